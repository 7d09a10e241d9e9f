"""Charts: what a page embeds, what policy allows it, and the same as figures for papers."""

import base64
import hashlib
import json
import re
import xml.etree.ElementTree

import pytest

from jaxformer.config import ConfigError
from jaxformer.report import charts
from jaxformer.report.blocks import table

HOSTILE = "</script><script>alert(1)</script><!-- \u2028 & \ud800"
DATA = {"points": {"run": ("repeat", [("a", 2), (HOSTILE, 1)]), "x": [1, 2, 1], "value": [3.0, None, 1.5]}}
SPEC = {
    "data": {"name": "points"},
    "mark": "point",
    "encoding": {"x": {"field": "x", "type": "quantitative"}, "y": {"field": "value", "type": "quantitative"}},
}


def chart(name="loss", title="Loss", spec=SPEC, **changes):
    return charts.Chart(name, title, spec, "It falls.", **{"data": DATA, **changes})


def bodies(html):
    return re.findall(r"<script>(.*?)</script>", html, re.DOTALL)


def test_every_script_is_allowed_by_its_hash_and_nothing_else_is():
    embedded = charts.scripts([chart()], extra="charts.names;")
    assert len(bodies(embedded.html)) == 3
    for body in bodies(embedded.html):
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in embedded.policy()
    assert "default-src 'none'" in embedded.policy()
    script_sources = embedded.policy().split("script-src ")[1].split(";")[0]
    assert "unsafe" not in script_sources
    assert "connect-src" not in embedded.policy()
    assert embedded.policy(connect=True).endswith("connect-src 'self'")


def test_text_in_data_ends_no_element_and_comes_back_unchanged():
    html = charts.scripts([chart(title=HOSTILE)]).html
    (content,) = re.findall(r'<script type="application/json" id="chart-data">(.*?)</script>', html, re.DOTALL)
    assert not set("<>&\u2028") & set(content)
    assert json.loads(content)["data"]["points"]["run"] == ["repeat", [["a", 2], [HOSTILE, 1]]]
    assert charts.rows(DATA["points"])[2] == {"run": HOSTILE, "x": 1, "value": 1.5}


def test_a_figure_is_escaped_and_has_its_table():
    html = charts.figure(chart(title="<b>1</b>", note="<i>", table=table(["<u>", "n"], [["<s>", 1]])))
    assert not re.search("<(b|i|u|s)>", html)
    assert "&lt;s&gt;" in html and 'aria-label="It falls."' in html
    assert "data-zoom" not in html  # it has no zoom
    layered = {"layer": [{"layer": [{**SPEC, "params": [charts.ZOOM]}]}, charts.CURSOR_RULE]}
    assert 'data-zoom="in"' in charts.figure(chart(spec=layered))


def test_the_library_is_kept_in_the_cache_and_made_again_if_damaged(tmp_path, monkeypatch):
    import vl_convert

    whole = charts.library()
    assert "vegaEmbed" in whole and "</script" not in whole
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path))
    made = []
    monkeypatch.setattr(vl_convert, "javascript_bundle", lambda *_, **__: made.append(1) or "made")
    for content in (None, whole, whole[:-1] + "?\n//" + "0" * 64, "\n", None):
        charts.library.cache_clear()
        for path in (tmp_path / "vega").glob("*") if content is not None else ():
            path.write_text(content)
        assert charts.library() == "made"
    charts.library.cache_clear()
    assert len(made) == 4  # the last is read


def test_figures_for_papers(tmp_path):
    paths = charts.write_figures([chart(title=HOSTILE, width=300)], tmp_path / "deep" / "figures")
    assert [path.name for path in paths] == ["loss.svg", "loss.png"]
    root = xml.etree.ElementTree.parse(paths[0]).getroot()
    words = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert any("alert(1)" in (word or "") for word in words) and not any(
        "script" in element.tag for element in root.iter()
    )
    png = paths[1].read_bytes()
    assert png.startswith(b"\x89PNG") and int.from_bytes(png[16:20], "big") >= 600
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="got .*, expected a folder to write figures into; give --figures=DIR"):
        charts.write_figures([chart()], tmp_path / "file")


@pytest.mark.parametrize(
    "build",
    [
        lambda: chart("Loss Curve"),
        lambda: chart(data={"points": {"x": [1], "y": [1, 2]}}),
        lambda: charts.scripts([chart(), chart()]),
        lambda: charts.scripts([chart(), chart("other", data={"points": {"x": [2]}})]),
    ],
)
def test_what_would_show_another_chart_is_an_error(build):
    with pytest.raises(ValueError, match="chart"):
        build()

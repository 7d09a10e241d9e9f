"""The explorer's value, its page in a browser, its server, and the command."""

import dataclasses
import functools
import http.client
import json
import os
import re
import sys
import threading
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import small

import jaxformer
from jaxformer import cli
from jaxformer.analysis import explorer, generation
from jaxformer.cli import explore
from jaxformer.config import ConfigError, overrides
from jaxformer.decode.compiled import CompiledDecoder
from jaxformer.hf import workdirs
from jaxformer.models import build
from jaxformer.report import charts, serving
from jaxformer.report import explorer as page
from jaxformer.tasks import _generation

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "report"))
import browser as browsers

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
OPTIONS = explorer.Options(top=4, new_tokens=3, beams=3)


@functools.lru_cache
def predictor():
    """A language model whose text may be longer than the other tests' (positions are learned)."""
    model = small.model("language_modelling")
    return explorer.prepare(model.predictor, ["a cab"], OPTIONS)


@functools.lru_cache
def document():
    return explorer.document(predictor(), "runs/<b>", ["a cab", "a cob"], ("a cab", "a cob"), OPTIONS)


def decode(**changes):
    return dataclasses.replace(small.model("language_modelling").config.decode, max_length=3, **changes)


def test_steps_have_the_models_alternatives_and_can_be_forced():
    options, read = decode(), predictor()
    found = generation.steps(read, "ab", options, top=4)
    (outputs,) = _generation.outputs(read, ["ab"], options)
    assert found.ids.tolist() == outputs[0].tokens.tolist()
    np.testing.assert_array_equal(found.alternative_ids[:, 0], found.ids)  # greedy search takes the likeliest
    np.testing.assert_allclose(np.log(found.chosen_probs).sum(), outputs[0].score, rtol=1e-4)
    other = int(found.alternative_ids[0, 1])
    forced = generation.steps(read, "ab", options, forced=[other], top=4)
    assert forced.ids[0] == other and np.isclose(forced.chosen_probs[0], found.probs[0, 1], rtol=1e-4)
    ended = generation.steps(read, "ab", options, forced=[read.runner.vocabulary.eos[0]])
    assert len(ended.ids) == 1
    with pytest.raises(ConfigError, match="forced: got"):
        generation.steps(read, "ab", options, forced=[10**6])
    with pytest.raises(ConfigError, match="writes no text"):
        generation.steps(small.model("classification").predictor, "ab", options)


def test_a_beam_tree_ends_in_the_result_of_decoding():
    options = decode(method="beam", beams=3)
    tree = generation.beam_tree(predictor(), "ab", options)
    (outputs,) = _generation.outputs(predictor(), ["ab"], options)
    best = [node for node in tree if node.is_best]
    assert [node.id for node in best] == outputs[0].tokens.tolist()
    assert np.isclose(best[-1].score, outputs[0].score, rtol=1e-4)
    assert all(node.parent < index for index, node in enumerate(tree))
    for node in tree:
        if node.parent >= 0:
            assert tree[node.parent].step == node.step - 1 and node.log_prob <= tree[node.parent].log_prob + 1e-5
    assert max(node.score for node in tree if node.score is not None) == best[-1].score
    with pytest.raises(ConfigError, match="got decode.method greedy"):
        generation.beam_tree(predictor(), "ab", decode())


def test_the_value_holds_what_the_model_gives(monkeypatch):
    model, value = small.model("language_modelling"), document()
    (maps, _), (lens, _), (scan, _) = (call(["a cab", "a cob"]) for call in (model.attention, model.lens, model.ablate))
    first = value["sentences"][0]
    assert json.loads(json.dumps(value, allow_nan=False)) == value
    (kind,) = first["kinds"]
    np.testing.assert_allclose(explorer.read_array(kind["maps"]), maps["decoder"], atol=1e-5)
    np.testing.assert_allclose(explorer.read_array(kind["rollout"]), maps.rollout(), atol=1e-5)
    assert np.isclose(kind["scores"]["entropy"][1][2], maps.heads()[6].scores["entropy"], atol=1e-5)
    np.testing.assert_allclose(explorer.read_array(first["lens"]["probs"])[..., :4], lens.probs[..., :4], atol=1e-5)
    np.testing.assert_allclose(
        explorer.read_array(first["ablation"]["heads"]["decoder"]), scan.heads["decoder"], atol=1e-5
    )
    (explained,) = model.attention(["a cab"], gradient=True)
    grown = np.maximum(explained["decoder"] * explained.explained.gradients["decoder"], 0)
    np.testing.assert_allclose(explorer.read_array(kind["gradients"]), grown, rtol=1e-3, atol=1e-6)
    assert value["patching"]["refused"] is None and value["patching"]["clean_tokens"][4] == "a"
    assert list(value["patching"]["parts"]) == ["residual", "attention", "mlp", "heads"]
    heads = model.patch("a cab", "a cob", part="heads").log_probs
    np.testing.assert_allclose(explorer.read_array(value["patching"]["parts"]["heads"]), heads, atol=1e-5)
    monkeypatch.setattr(explorer, "MAX_SCANNED_PARTS", 9)  # a large model: its residual stream alone
    assert list(explorer.patched(predictor(), "a cab", "a cob")["parts"]) == ["residual"]
    assert list(explorer.patched(predictor(), "a cab", "a cob", ["mlp"])["parts"]) == ["mlp"]
    assert explorer.pair_of(predictor(), ["a", "bb", "cc"]) == ("bb", "cc")
    assert explorer.pair_of(predictor(), ["a", "bb"]) == explorer.SAMPLE_PAIR


def test_a_recurrent_model_is_explored_without_parts_to_remove(monkeypatch):
    model = small.model("rnn")
    monkeypatch.setattr(explorer, "writes", lambda predictor: False)  # its programs take seconds to compile
    value = explorer.sentence(model.predictor, "ab", dataclasses.replace(OPTIONS, top=2), target="b")
    assert [kind["name"] for kind in value["kinds"]] == ["alignment"] and value["ablation"] is None
    assert not explorer.can_edit(model.predictor) and value["relevance"] is None and value["lens"] is not None


def test_the_python_of_the_guide_runs(monkeypatch):
    """With a tiny model, whose text is short."""
    guide = (Path(__file__).resolve().parents[2] / "docs" / "explore.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    monkeypatch.setattr(jaxformer, "load", lambda path: small.model("translation"))
    names = {}
    exec(compile(code.replace("three hundred and ", ""), "docs/explore.md", "exec"), names)
    assert names["patched"].restored.shape == (3, 4) and names["scan"].heads["cross"].shape[:2] == (2, 4)


def test_a_page_decodes_without_a_copy_of_the_parameters():
    """A loop over layers reads them as they are; unrolled layers, a CPU's default, would be copied out of the stack."""
    read = predictor()
    assert read.runner.module.config.decoder.unroll == 1
    decoder = CompiledDecoder(read.runner.module, decode(), read.runner.vocabulary)
    assert decoder.prepare_variables(read.runner.variables) is read.runner.variables
    stack = dataclasses.replace(read.config.model.decoder, unroll=2)
    unrolled = build.build(dataclasses.replace(read.config.model, decoder=stack))
    separate = dataclasses.replace(decoder, module=unrolled).prepare_variables(read.runner.variables)
    assert set(separate["params"]["decoder"]["blocks"]) == {"0", "1"}
    looped = explorer.prepare(
        dataclasses.replace(
            read,
            config=dataclasses.replace(read.config, model=unrolled.config),
            runner=dataclasses.replace(read.runner, module=unrolled),
        ),
        ["ab"],
        OPTIONS,
    )
    assert looped.runner.module.config.decoder.unroll == 1


def test_limits_are_one_line():
    with pytest.raises(ConfigError, match="got 0 sentences, expected 1 to 32"):
        explorer.document(predictor(), "x", [], None, OPTIONS)
    with pytest.raises(ConfigError, match="recurrent model without attention"):
        explorer.document(small.model("rnn_lm").predictor, "x", ["a"], None, OPTIONS)
    refused = explorer.patched(predictor(), "a", "ab")
    assert "expected equally many" in refused["refused"]
    assert "tokens are the same" in explorer.patched(predictor(), "ab", "ab")["refused"]


# --- the page ---------------------------------------------------------------------------------------------------------


def hostile(value):
    """The value with hostile text in every name."""
    value = json.loads(json.dumps(value))
    value["name"] = HOSTILE
    for each in value["sentences"]:
        each["text"] = HOSTILE
        each["tokens"] = {side: [f"{HOSTILE}{name}" for name in names] for side, names in each["tokens"].items()}
        each["lens"]["outputs"] = [[[HOSTILE] * 4 for _ in row] for row in each["lens"]["outputs"]]
        each["steps"]["tokens"] = [HOSTILE] * len(each["steps"]["tokens"])
        for node in each["beam"]:
            node["token"] = HOSTILE
    return value


def test_text_in_the_page_ends_no_element():
    html = page.render(hostile(document())).replace(charts.library(), "")  # which has "<img" in a string
    assert "<script>alert" not in html and "<img" not in html
    (data,) = re.findall(r'<script type="application/json" id="explorer-data">(.*?)</script>', html, re.DOTALL)
    assert json.loads(data)["sentences"][0]["text"] == HOSTILE
    assert "script-src 'sha256-" in unescape(html) and "connect-src" not in html
    assert "connect-src 'self'" in unescape(page.render(document(), serve=True))


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    if browsers.executable() is None:
        pytest.skip("Chromium is not installed")
    opened = browsers.Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


READY = "document.getElementById('explorer').dataset.state === 'ready'"


def enter(chromium):
    """Presses the Enter key, which submits forms and presses buttons."""
    for kind in ("keyDown", "keyUp"):
        chromium.call("Input.dispatchKeyEvent", type=kind, key="Enter", text="\r", windowsVirtualKeyCode=13)


def text_of(chromium, name):
    return chromium.run(f"document.querySelector('[data-x={json.dumps(name)}]').textContent")


def test_heads_and_tokens_are_chosen_by_keyboard(chromium, tmp_path):
    (tmp_path / "explore.html").write_text(page.render(document()), encoding="utf-8")
    chromium.open(f"file://{tmp_path}/explore.html")
    chromium.wait(READY)
    chromium.run("document.querySelector('[role=gridcell][aria-selected=true]').focus()")
    for key in ("ArrowRight", "ArrowDown", "ArrowRight", "ArrowLeft", "ArrowDown"):  # the last one leaves the grid
        chromium.press(key)
    assert chromium.run("[explorer.state.layer, explorer.state.head]") == [1, 1]
    assert text_of(chromium, "head").startswith("decoder layer 1 head 1: entropy ")
    assert chromium.run("document.activeElement.getAttribute('aria-selected')") == "true"
    shown = chromium.run("charts.rows('explore-map').map((row) => row.value)")
    expected = explorer.read_array(document()["sentences"][0]["kinds"][0]["maps"])[1, 1]
    np.testing.assert_allclose(np.reshape(shown, expected.shape), expected, atol=1e-6)
    chromium.run("document.querySelectorAll('[data-x=lines] .side:first-child button')[2].focus()")
    assert text_of(chromium, "next-title") == "Next token after “▁”".replace(
        "▁", document()["sentences"][0]["tokens"]["target"][2]
    )
    paths = "[...document.querySelectorAll('[data-x=lines] path')].filter((x) => x.style.display === '')"
    assert set(chromium.run(f"{paths}.map((x) => x.dataset.query)")) == {"2"}
    chromium.run("document.querySelector('[data-x=back]').focus()")
    enter(chromium)
    assert text_of(chromium, "step-name") == "token 2 of 3"
    patching = document()["patching"]
    gap = patching["clean_log_prob"] - patching["corrupted_log_prob"]
    chromium.run("document.querySelector('[data-x=part]').focus()")
    for keys, part in (("DD", "mlp"), ("D", "heads"), ("UUU", "residual")):
        for key in keys:
            chromium.press({"D": "ArrowDown", "U": "ArrowUp"}[key])
        assert chromium.run("explorer.state.part") == part
        shown = chromium.run("charts.rows('explore-patching').map((row) => row.value)")
        expected = explorer.read_array(patching["parts"][part])
        np.testing.assert_allclose(
            np.reshape(shown, expected.shape), (expected - patching["corrupted_log_prob"]) / gap, atol=1e-4
        )
        label = {"mlp": "layer 0", "heads": "layer 0", "residual": "input"}[part]
        assert chromium.run("charts.rows('explore-patching')[0].row") == label
    assert chromium.messages == []


def test_hostile_text_stays_text_and_small_screens_do_not_overflow(chromium, tmp_path):
    (tmp_path / "explore.html").write_text(page.render(hostile(document())), encoding="utf-8")
    chromium.open(f"file://{tmp_path}/explore.html", width=320, dark=True)
    chromium.wait(READY)
    chromium.run("document.querySelector('[data-chart=explore-map]').scrollIntoView()")
    chromium.wait("document.querySelector('[data-chart=explore-map]').dataset.state === 'drawn'")
    assert chromium.run("document.querySelectorAll('#explorer img, #explorer script').length") == 0
    assert text_of(chromium, "sentence").startswith(HOSTILE)
    assert chromium.run("document.documentElement.scrollWidth") <= 320
    assert chromium.messages == []


@pytest.mark.parametrize(("width", "dark"), [(1440, False), (320, True)])
def test_the_page_fits_windows_of_all_sizes_without_a_serious_finding_of_axe(chromium, server, width, dark):
    chromium.open(server.url, width=width, dark=dark)
    chromium.wait(READY)
    chromium.run("Promise.all(charts.names.map((name) => charts.draw(name)))")
    states = chromium.run("[...document.querySelectorAll('[data-chart]')].map((each) => each.dataset.state)")
    assert states == ["drawn"] * 3
    assert chromium.run("document.documentElement.scrollWidth") <= width
    chromium.run("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    assert chromium.serious_findings() == {}
    assert chromium.messages == []


# --- the server -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server():
    site = serving.Site(lambda: page.render(document(), serve=True), explore._answers(predictor(), OPTIONS))
    with serving.Server(site, 0) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def ask(server, path, body, **headers):
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=60)
    body = body if isinstance(body, (bytes, str)) else json.dumps(body)
    connection.request("POST", path, body, {"Content-Type": "application/json", **headers})
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def test_the_page_asks_and_the_model_answers(chromium, server):
    chromium.open(server.url)
    chromium.wait(READY)
    chromium.run("document.querySelector('[data-x=line]').focus()")
    chromium.run("document.querySelector('[data-x=line]').select()")
    for letter in "a dab":
        chromium.press(letter)
    enter(chromium)
    chromium.wait("explorer.data.sentences.length === 3")
    assert text_of(chromium, "message") == ""
    (own,) = small.model("language_modelling").attention(["a dab"])
    shown = chromium.run("[...explorer.numbers(explorer.data.sentences[2].kinds[0].maps).values]")
    np.testing.assert_allclose(shown, own["decoder"].reshape(-1), atol=1e-5)
    chromium.run("document.querySelector('[data-x=remove-head]').click()")
    chromium.wait("document.querySelectorAll('[data-x=removed] td').length > 0")
    assert "Without decoder layer 0 head 0" in text_of(chromium, "removed")
    other = chromium.run("explorer.data.sentences[2].steps.alternative_ids[explorer.state.step][1]")
    chromium.run("document.querySelector('[data-x=alternatives] li:nth-child(2) button').focus()")
    enter(chromium)
    chromium.wait(f"explorer.data.sentences[2].steps.ids.includes({other})")
    assert chromium.messages == []


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "words"),
    [
        ("/api/sentence", {"line": ""}, {}, 400, "line: got no text"),
        ("/api/sentence", {"line": "x" * 40}, {}, 400, "expected at most the model's 16"),
        ("/api/sentence", {"line": "a", "forced": ["x"]}, {}, 400, "forced: got no token ids"),
        ("/api/sentence", {"line": "a", "target": "b"}, {}, 400, "targets: got some"),
        ("/api/ablation", {"line": "a", "heads": [["decoder", 9, 0]]}, {}, 400, "heads: got"),
        ("/api/ablation", {"line": "a", "heads": 3}, {}, 400, "got no lists"),
        (
            "/api/patching",
            {"clean": "a", "corrupted": "b", "part": "mpl"},
            {},
            400,
            "part: got 'mpl', expected one of res",
        ),
        ("/api/sentence", "[1]", {}, 400, "got a list, expected a JSON object"),
        ("/api/sentence", "{", {}, 400, "got no JSON"),
        ("/api/sentence", {"line": "y" * 2**16}, {}, 413, "expected at most 65,536"),
        ("/api/other", {}, {}, 404, "not found"),
        ("/api/sentence", {"line": "a"}, {"Content-Type": "text/plain"}, 400, "expected application/json"),
        ("/api/sentence", {"line": "a"}, {"Host": "evil.example"}, 403, "this address only"),
        ("/api/sentence", {"line": "a"}, {"Origin": "http://evil.example"}, 403, "this address only"),
    ],
)
def test_wrong_questions_are_refused_in_one_line(server, path, body, headers, status, words):
    got, answer = ask(server, path, body, **headers)
    assert got == status and words in answer["error"] and "\n" not in answer["error"]


def test_a_port_that_is_taken_is_one_line(server):
    with pytest.raises(ConfigError, match=r"--port: got \d+ \(.*\), expected a free port"):
        serving.Server(server.site, server.server_address[1])


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """A folder that stands for the run of the small model."""
    model = small.model("language_modelling")
    (tmp_path / "config.json").write_text(overrides.to_json(model.config))
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "step-1.json").write_text(
        json.dumps([{"input": "a cab"}, {"input": "a cob"}, {"input": ""}])
    )
    monkeypatch.setattr(workdirs, "load", lambda *_: model)
    return tmp_path


def test_the_command_writes_a_page_and_its_value(workdir, capsys):
    words = ["explore", f"--workdir={workdir}", "--tokens=3", "--beams=3"]
    assert cli.main(words) == 0
    assert capsys.readouterr().out == f"written to {workdir / 'explore.html'}\n"
    value = page.read(workdir)
    assert [each["text"] for each in value["sentences"]] == ["a cab", "a cob"]
    assert "a cab" in (workdir / "explore.html").read_text(encoding="utf-8")
    page_of_run = page.of_runs([SimpleNamespace(workdir=workdir)])
    assert "a cab" in page_of_run.html and len(page_of_run.charts) == 3 and not page_of_run.notes
    (workdir / "lines.txt").write_text("a dab\n\n")
    before = sorted(os.listdir(workdir))
    assert cli.main([*words, f"--input={workdir}/lines.txt", f"--output={workdir}/other.html"]) == 0
    assert sorted(os.listdir(workdir)) == sorted([*before, "other.html"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port=80"], "--port: got 80 without --serve"),
        (["--serve", "--output=x.html"], "with --serve, expected one of the two"),
        (["--output=x.txt"], "expected a file that ends in .html"),
        (["--input=absent.txt"], "--input: got 'absent.txt'"),
        (["--serve", "--port=x"], "expected a number from 0 to 65535"),
    ],
)
def test_wrong_flags_are_one_line_and_write_nothing(workdir, words, message, capsys):
    before = sorted(os.listdir(workdir))
    assert cli.main(["explore", f"--workdir={workdir}", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert sorted(os.listdir(workdir)) == before


def test_a_damaged_value_is_one_line(tmp_path):
    assert page.read(tmp_path) is None
    for content in ("{", '{"format": 0}', "[]"):
        (tmp_path / page.DATA_FILE).write_text(content)
        with pytest.raises(ConfigError, match="run jaxformer explore again"):
            page.read(tmp_path)
        (note,) = page.of_runs([SimpleNamespace(workdir=tmp_path)]).notes
        assert "run jaxformer explore again" in note

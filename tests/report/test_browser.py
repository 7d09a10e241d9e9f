"""Pages in headless Chromium: no errors, charts drawn, keys and mouse, small and large windows, nothing of a stranger's
text runs. One browser serves all tests."""

import dataclasses
import json
import math
import random
import threading

import pytest
from browser import Browser, executable

from jaxformer import report
from jaxformer.config import Config, ModelConfig, ScheduleConfig, StackConfig, TrainConfig, overrides
from jaxformer.report import live
from jaxformer.train.reporting import MetricsFile

pytestmark = pytest.mark.skipif(executable() is None, reason="Chromium is not installed (Debian's package chromium)")

HOSTILE = "</script><script>stolen=1</script><img src=x onerror=stolen=1> {{7*7}} \u2028 $& \\ '+x+' `${1}`" + "'\""
CONFIG = Config(model=ModelConfig(encoder=StackConfig(), decoder=StackConfig()), train=TrainConfig(steps=1000))

MAX_BYTES = 5_000_000
MAX_FIRST_CHART_SECONDS = 2.0
"""To the first chart of twenty runs, in processor time of the page: the wall clock of a busy machine says nothing."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def metrics(count, seed=0, every=10):
    draw = random.Random(seed)
    for step in range(every, count * every + 1, every):
        values = {"loss": 8 / math.sqrt(step) + draw.random() / 10 + seed / 10, "learning_rate": 1e-3}
        rates = {"steps_per_second": 10.0, "tokens_per_second": 5e4, "gradient_norm": 1 + draw.random(), "padding": 0.1}
        yield {"step": step, "wall_time": 1e9 + step, "split": "train", **values, **rates, "skipped": 0.0}
        if step % (every * 10) == 0:
            yield {"step": step, "split": "validation", "loss": values["loss"] + 0.1, HOSTILE: 1.0, "bleu": step / 100}


def put(folder, count=50, seed=0, **files):
    folder.mkdir(parents=True)
    config = dataclasses.replace(CONFIG, schedule=ScheduleConfig(peak=1e-3 * (seed + 1)))
    (folder / "config.json").write_text(overrides.to_json(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics(count, seed)))
    for name, value in files.items():
        path = folder / (name.replace("__", "/") + ".json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(value))
    return folder


def drawn(browser, name="loss"):
    browser.wait(f"document.querySelector('[data-chart={name}]')?.dataset.state === 'drawn'")


def readout(browser, name="loss"):
    return browser.run(f"document.querySelector('[data-readout={name}]').textContent")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page of one run whose names, samples and measures hold markup."""
    records = [{"input": HOSTILE, "output": f"{HOSTILE} {n}", "reference": HOSTILE} for n in range(4)]
    confusion = {"classes": [HOSTILE, "b"], "counts": [[3, 1], [0, 2]]}
    error = {"mse": [0.2, 0.3], "mae": [0.3, 0.4], "naive_mse": [0.3, 0.5]}
    group = {"count": 2, "predicted": 1.0, "true": 1.5, "deviation": 0.5}
    diagnosis = {
        "confusion": confusion,
        "sets": [{"label": HOSTILE, "true": 3, "predicted": 2, "correct": 1}],
        "numbers": {"examples": 4, "error": 0.5, "bias": 0.1, "points": [[1.0, 1.2], [2.0, 1.9]], "groups": [group]},
        "forecast": {"steps": {"step": [1, 2], **error}, "channels": {"channel": [HOSTILE, "y"], **error}},
    }
    evaluation = {"split": "test", "examples": 4, "bleu": 12.5, "diagnosis": diagnosis}
    files = {
        "eval-test": evaluation,
        "samples__test": records,
        "samples__step-100": records,
        "samples__step-200": records,
    }
    folder = put(tmp_path_factory.mktemp("run") / "<b>run<i>&", **files, environment={HOSTILE: HOSTILE})
    return report.write([folder]).as_uri()


def test_charts_are_drawn_and_answer_to_keys_and_to_the_mouse(browser, page):
    browser.open(page)
    drawn(browser)
    view = "charts.view('loss')"
    browser.run("document.querySelector('[data-chart=loss]').focus()")
    browser.press("ArrowRight")
    assert readout(browser).startswith("step 10train: ")
    browser.press("ArrowRight")
    assert readout(browser).startswith("step 20train: ")
    rule = browser.run("document.querySelector('[data-chart=loss] .mark-rule.layer_1_marks line').outerHTML")
    place = browser.run(f"{view}.scale('x')(20)")
    assert f"translate({place:.4g}" in rule and 'opacity="0.5"' in rule and "y2=" in rule
    low, high = browser.run(f"{view}.scale('x').domain()")
    browser.press("+")
    zoomed = browser.run(f"{view}.scale('x').domain()")
    assert zoomed[1] - zoomed[0] == pytest.approx((high - low) / 2)
    browser.press("ArrowRight", shift=True)
    assert browser.run(f"{view}.scale('x').domain()")[0] == pytest.approx(zoomed[0] + (zoomed[1] - zoomed[0]) / 4)
    browser.press("0")
    assert browser.run(f"{view}.scale('x').domain()") == [low, high]
    browser.press("Escape")
    assert readout(browser) == ""
    left, top, width = browser.run(
        "(b => [b.left, b.top, b.width])(document.querySelector('[data-chart=loss]').getBoundingClientRect())"
    )
    browser.mouse(left + width / 2, top + 100)
    browser.wait("document.querySelector('[data-readout=loss]').textContent.startsWith('step 2')")
    browser.run("document.querySelector('#chart-loss [data-zoom=in]').click()")
    browser.wait(f"{view}.scale('x').domain()[1] < {high}")
    assert browser.messages == []


def test_the_controls_change_all_curves(browser, page):
    browser.open(page)
    drawn(browser)
    browser.run("document.getElementById('smooth').focus()")
    browser.press("ArrowRight")
    browser.wait("charts.view('loss').signal('smooth') === 1")
    assert browser.run("document.getElementById('smooth-value').textContent") == "3 points"
    means = browser.run("charts.view('loss').data('data_0')?.length ?? 1")
    assert means
    browser.run("(e => {e.value = 'tokens'; e.dispatchEvent(new Event('change'))})(document.getElementById('axis'))")
    browser.wait("charts.view('loss')?.signal('axis') === 'tokens'")
    assert browser.run("charts.view('loss').scale('x').domain()[1]") == 500 * 5000  # 5,000 tokens a step
    browser.run("(e => {e.value = '1'; e.dispatchEvent(new Event('change'))})(document.getElementById('log-y'))")
    browser.wait("charts.view('loss')?.scale('y').type === 'log'")
    assert browser.messages == []


@pytest.mark.parametrize(("width", "dark"), [(1440, False), (320, True)])
def test_windows_of_all_sizes_and_no_serious_finding_of_axe(browser, page, width, dark):
    browser.open(page, width=width, dark=dark)
    browser.run("Promise.all(charts.names.map(name => charts.draw(name)))")
    states = browser.run("[...document.querySelectorAll('[data-chart]')].map(each => each.dataset.state)")
    assert len(states) > 11 and set(states) == {"drawn"}
    assert browser.run("document.documentElement.scrollWidth") <= width
    ink = browser.run("charts.view('loss').scenegraph().root && getComputedStyle(document.body).color")
    assert ink == ("rgb(223, 228, 234)" if dark else "rgb(28, 33, 39)")
    assert ink in browser.run("document.querySelector('[data-chart=loss] svg').outerHTML")
    browser.run("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert browser.serious_findings() == {}
    assert browser.messages == []


def test_text_of_strangers_stays_text(browser, page):
    browser.open(page)
    browser.run("Promise.all(charts.names.map(name => charts.draw(name)))")
    assert browser.run("typeof stolen") == "undefined"
    assert browser.run("document.images.length") == 0
    assert browser.run("document.querySelectorAll('script').length") == 4
    assert browser.run("document.querySelector('h1').textContent") == "<b>run<i>&"
    assert browser.run("document.getElementById('samples').textContent.includes('onerror=stolen=1>')")
    assert browser.run("document.getElementById('evaluation').textContent.includes('<script>stolen=1</script>')")
    # What got in all the same could neither run nor load anything.
    refused = browser.run(
        "new Promise(done => { document.addEventListener('securitypolicyviolation', e => done(e.violatedDirective));"
        "const s = document.createElement('script'); s.textContent = 'stolen=1'; document.body.append(s); })"
    )
    assert refused.startswith("script-src") and browser.run("typeof stolen") == "undefined"
    assert browser.run("fetch('data:,x').then(() => 'loaded', () => 'refused')") == "refused"


def test_twenty_runs_are_small_and_soon_there(browser, tmp_path):
    folders = [put(tmp_path / f"run {number}", 400, number) for number in range(20)]
    path = report.write(folders)
    assert path.stat().st_size < MAX_BYTES
    browser.open(path.as_uri())
    drawn(browser)
    browser.call("Performance.enable")
    metrics = {each["name"]: each["value"] for each in browser.call("Performance.getMetrics")["metrics"]}
    assert metrics["TaskDuration"] < MAX_FIRST_CHART_SECONDS
    assert browser.run("charts.view('loss').scale('color').domain().length") == 20
    assert browser.messages == []


def test_a_live_page_shows_each_point_of_a_killed_and_resumed_run_once(browser, tmp_path):
    folder = put(tmp_path / "run", 6)
    server = live.Server(live.State([folder]), 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    shown = "charts.rows('loss').filter(row => row.split === 'train').map(row => [row.step, row.value])"
    try:
        browser.open(server.url)
        drawn(browser)
        assert browser.run(f"{shown}.map(row => row[0])") == [10, 20, 30, 40, 50, 60]
        # The run was killed: it resumes from its checkpoint of step 30, and its rows after that are gone.
        file = MetricsFile(folder / "metrics.jsonl", first_step=30)
        browser.wait(f"{shown}.length === 3")
        for step in (40, 50, 60, 70):
            file.write(step, "train", {"loss": 100.0 + step})
        file.file.write('{"step": 80, "wall_time": 1, "spl')  # a row that is being written
        file.file.flush()
        browser.wait(f"{shown}.length === 7")
        file.close()
        found = browser.run(shown)
        assert [step for step, _ in found] == [10, 20, 30, 40, 50, 60, 70]
        assert [value for _, value in found][3:] == [140, 150, 160, 170]
        marks = "document.querySelectorAll('[data-chart=loss] .mark-symbol.role-mark path').length"
        browser.wait(f"{marks} === 7")
        assert "step 70 of 1,000" in browser.run("document.getElementById('status').textContent")
        assert browser.messages == []
    finally:
        server.shutdown()
        server.server_close()


def test_a_live_page_that_loads_itself_again_looks_as_before(browser, tmp_path):
    folder = put(tmp_path / "run", 30)
    server = live.Server(live.State([folder]), 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    change = "(e => {e.%s; e.dispatchEvent(new Event('%s', {bubbles: true}))})(document.getElementById('%s'))"
    details = "[...document.querySelectorAll('details')].find(e => e.textContent.startsWith('how to read'))"
    try:
        browser.open(server.url)
        drawn(browser)
        browser.run(change % ("value = '3'", "input", "smooth"))
        browser.run(change % ("value = 'tokens'", "change", "axis"))
        browser.wait("charts.view('loss')?.signal('axis') === 'tokens'")
        browser.run("document.querySelector('[data-chart=loss]').focus()")
        browser.press("+")
        low, high = browser.run("charts.view('loss').scale('x').domain()")
        browser.run(f"{details}.open = true; scrollTo(0, 150); window.before = true")
        (folder / "eval-test.json").write_text(json.dumps({"split": "test", "examples": 4, "bleu": 12.5}))
        browser.wait("window.before === undefined && document.readyState === 'complete'")
        drawn(browser)
        assert browser.run("document.getElementById('evaluation') !== null")  # what it was loaded again for
        assert browser.run("charts.view('loss').scale('x').domain()") == pytest.approx([low, high])
        assert browser.run("[charts.options.axis, charts.options.smooth]") == ["tokens", 3]
        assert browser.run(f"{details}.open") and browser.run("scrollY") == 150
        assert browser.run("document.activeElement.dataset.chart") == "loss"
        # A zoom is that of its axis: steps show all of it, tokens again what was zoomed, a redrawn chart too.
        browser.run(change % ("value = 'step'", "change", "axis"))
        browser.wait("charts.view('loss')?.scale('x').domain()[1] === 300")
        browser.run(change % ("value = 'tokens'", "change", "axis"))
        browser.run(change % ("value = '1'", "change", "log-y"))
        browser.wait("charts.view('loss')?.scale('y').type === 'log'")
        assert browser.run("charts.view('loss').scale('x').domain()") == pytest.approx([low, high])
        browser.run("document.querySelector('[data-chart=loss]').focus()")
        browser.press("0")
        browser.wait("charts.view('loss').scale('x').domain()[0] === 50000")
        assert browser.run("charts.zooms()") == {}
        assert browser.messages == []
    finally:
        server.shutdown()
        server.server_close()

"""The page: its values are those of the files, all text is escaped, and missing or damaged files are named."""

import ast
import dataclasses
import json
import math
import pathlib
from html.parser import HTMLParser

import pytest

import jaxformer.report
from jaxformer import registry, report, tasks
from jaxformer.config import (
    CheckpointConfig,
    Config,
    ConfigError,
    DataConfig,
    EvaluateConfig,
    ModelConfig,
    ScheduleConfig,
    StackConfig,
    TaskConfig,
    TokenizerConfig,
    TrainConfig,
    overrides,
)
from jaxformer.parallel import distributed
from jaxformer.report import blocks, measures, page, runs, sample_tables, sections

CONFIG = Config(
    model=ModelConfig(
        encoder=StackConfig(layers=2, width=16, dropout=0.1), decoder=StackConfig(layers=3, width=16), dtype="bfloat16"
    ),
    train=TrainConfig(steps=100),
    evaluate=EvaluateConfig(decode_examples=7),
)
SIGNATURE = "nrefs:1|case:mixed|tok:13a"
VOID = {"meta", "br", "img", "link", "input"}


def row(step, split="train", **values):
    rates = {"steps_per_second": 2.0, "tokens_per_second": 50.0, "learning_rate": 1e-3, "gradient_norm": 1.0}
    return {"step": step, "wall_time": 1e9 + step, "split": split, **(rates if split == "train" else {}), **values}


def losses(count=10, every=10):
    train = [row(i * every, loss=8.0 / i) for i in range(1, count + 1)]
    return train + [row(50, "validation", loss=2.5, bleu=11.0), row(100, "validation", loss=2.75, bleu=12.0)]


def put(folder, **files):
    """Writes a workdir; names with __ lie in a folder, values that are no text become JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return folder


def whole(folder, config=CONFIG, rows=None, **files):
    put(folder)
    texts = {
        "config.json": overrides.to_json(config),
        "environment.json": json.dumps({"python": "3.11.7", "versions": {"jax": "0.10.2"}, "devices": ["tpu v9"]}),
        "metrics.jsonl": "".join(json.dumps(each) + "\n" for each in (losses() if rows is None else rows)),
        "result.json": json.dumps({"step": 100, "loss": 2.75, "bleu": 12.0}),
        "eval-test.json": json.dumps({"split": "test", "bleu": 33.25, "signatures": {"bleu": SIGNATURE}}),
        "parameters.txt": "parameter  shape  decay\na/kernel  8 x 4  -\n0 of 1,234,567 entries decay\n",
        **files,
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


class Reader(HTMLParser):
    """Tags, attributes, text of a page, and what is in its scripts; complains where tags do not nest."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.words, self.scripts = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        (self.scripts if self.open[-1:] == ["script"] else self.words).append(data)

    @property
    def text(self):
        return "\n".join(self.words)


def read(folder, *others):
    return Reader(report.write([folder, *others]).read_text(encoding="utf-8"))


def cells(reader, first):
    """The cells of the table row that begins with `first`."""
    words = [word for word in reader.words if word.strip()]
    return words[words.index(first) + 1 :]


def test_a_result_of_an_earlier_end_is_left_out(tmp_path):
    whole(tmp_path / "run", **{"result.json": json.dumps({"step": 60, "loss": 1.25})})
    (run,) = runs.read([tmp_path / "run"])
    assert run.result == {}
    assert any("out of date (it is of step 60, and the run ends at step 100)" in note for note in run.notes)


# --- one run ----------------------------------------------------------------------------------------------------------


def test_the_page_says_what_the_files_say(tmp_path):
    folder = whole(tmp_path / "run")
    put(folder, **{"samples__step-50.json": [{"input": "eins", "output": "zwo", "reference": "two"}]})
    found = read(folder)
    assert cells(found, "test: BLEU (0 to 100)")[0] == "33.25"
    assert cells(found, "validation (first 7): BLEU (0 to 100)")[0] == "12"
    assert cells(found, "best validation loss")[0] == "2.5 at step 50"
    assert cells(found, "steps")[0] == "100 of 100"
    assert cells(found, "parameters")[0] == "1,234,567"
    assert cells(found, "training time")[0].startswith("about 50 s")
    assert SIGNATURE in found.words
    start = found.words.index("eins")
    assert [word for word in found.words[start:] if word.strip()][:3] == ["eins", "zwo", "two"]
    assert cells(found, "model.dtype")[0] == "bfloat16"
    assert cells(found, "model.decoder.layers")[0] == "3"
    assert "model.decoder.dropout" not in found.words  # at its default
    assert cells(found, "jax")[0] == "0.10.2"
    assert "a/kernel  8 x 4" in found.text
    assert [value for name, value in found.attributes if name == "data-chart"][:2] == ["loss", "validation-bleu"]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not list(folder.glob("*.tmp"))


def test_the_page_needs_nothing_else(tmp_path):
    found = read(whole(tmp_path / "run"))
    links = [value for name, value in found.attributes if name in ("src", "href", "xlink:href", "action", "data")]
    assert links
    assert all(link.startswith("#") for link in links)
    targets = {value for name, value in found.attributes if name == "id"}
    assert {link[1:] for link in links} <= targets
    outside = [value for name, value in found.attributes if value and "://" in value and not name.startswith("xmlns")]
    assert outside == []
    (policy,) = [value for name, value in found.attributes if name == "content" and "default-src" in value]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy and policy.count("unsafe-inline") == 1 and "connect-src" not in policy
    assert found.tags.count("script") == policy.count("sha256-") + 1  # one of them is data
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    assert "prefers-color-scheme: dark" in found.text
    ids = [value for name, value in found.attributes if name == "id"]
    assert len(ids) == len(set(ids))


HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>&amp;$\\frac{\\'


def test_nothing_foreign_becomes_markup(tmp_path):
    name = HOSTILE.replace("/", "|")
    folder = whole(
        tmp_path / name,
        **{
            "environment.json": json.dumps({HOSTILE: HOSTILE}),
            f"eval-{name}.json": json.dumps({HOSTILE: 1.0, "bleu": HOSTILE, "signatures": {"bleu": HOSTILE}}),
            "parameters.txt": HOSTILE,
        },
        rows=[*losses(), row(100, "validation", **{HOSTILE: 3.0, "loss": 1.0})],
    )
    put(folder, **{"samples__test.json": [{"input": HOSTILE, "output": "\ud800 ok", "reference": ["not text"]}, "x"]})
    found = read(folder, whole(tmp_path / "_other"))
    assert "img" not in found.tags and found.tags.count("script") == len(found.scripts) == 4
    assert json.loads(found.scripts[0])["charts"]
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    for place in ("samples", "parameters", "environment"):
        assert place in [value for attribute, value in found.attributes if attribute == "id"]
    assert found.text.count(HOSTILE) >= 6


def test_long_samples_are_cut_and_it_is_said(tmp_path):
    folder = whole(tmp_path / "run")
    put(folder, **{"samples__test.json": [{"input": "a" * 2000, "output": str(i)} for i in range(40)]})
    text = read(folder).text
    assert "test: 25 of 40 decoded" in text
    assert "500 more letters" in text


def test_samples_of_the_end_come_first_and_older_steps_are_folded(tmp_path):
    folder = whole(tmp_path / "run")
    for name in ("step-9", "step-100", "test"):
        put(folder, **{f"samples__{name}.json": [{"input": "a", "output": "b"}]})
    (run,) = runs.read([folder])
    assert list(run.samples) == ["test", "step 100", "step 9"]
    found = {block.summary: block.is_open for block in sample_tables.samples(run) if block.kind == "details"}
    assert list(found.values()) == [False, True, True, False] and next(iter(found)).startswith("sample 1: a")


# --- what is missing or broken ----------------------------------------------------------------------------------------


def test_a_torn_last_line_is_left_out(tmp_path):
    folder = whole(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 110, "wall_time": 1e9, "spl')
    (run,) = runs.read([folder])
    assert run.step == 100
    assert len(run.rows["train"]) == 10
    assert "metrics.jsonl: the last line is torn, left out" in run.notes


def test_other_broken_lines_are_counted_and_the_last_of_a_step_counts(tmp_path):
    lines = ["[]", "null", '{"step": true, "split": "train"}', json.dumps(row(20, loss=3.0)), "x" * 9]
    lines += [json.dumps(each) for each in (row(10, loss=1.0), row(10, loss=2.0), row(30, loss=None))]
    folder = whole(tmp_path / "run", **{"metrics.jsonl": "\n".join(lines)})
    (run,) = runs.read([folder])
    steps, values = run.series("train", "loss")
    assert steps.tolist() == [10, 20, 30]
    assert values[:2].tolist() == [2.0, 3.0]
    assert math.isnan(values[2])
    assert "metrics.jsonl: 4 of 8 lines cannot be read, left out; the first is line 1" in run.notes
    assert "train loss: not a finite number in 1 of 3 reports, first at step 30" in sections.not_finite(run)


def test_an_empty_folder_still_gives_a_page_that_says_so(tmp_path):
    found = read(tmp_path)
    for words in (
        "no config.json",
        "no environment.json",
        "no metrics.jsonl",
        "not finished",
        "no eval-",
        "parameters",
    ):
        assert words in found.text
    assert "Nothing has been measured yet." in found.words
    assert not (tmp_path / "loss.png").exists()


@pytest.mark.parametrize("text", ["{", "[1]", "\udcff", "{}", "[" * 20000])
def test_broken_files_are_said(tmp_path, text):
    names = ("config.json", "environment.json", "result.json", "eval-test.json", "parameters.txt", "samples/test.json")
    (tmp_path / "samples").mkdir()
    for name in (*names, "metrics.jsonl"):
        (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    (run,) = runs.read([tmp_path])
    unreadable = {note.split(" cannot")[0] for note in run.notes if "cannot be read" in note}
    expected = {"{}": {"samples/test.json"}, "[1]": set(names[:4])}
    assert unreadable >= expected.get(text, {*names[:4], "samples/test.json"})
    sections.results([run])  # and what there is can be shown


def test_a_config_of_another_version_is_shown_though_it_does_not_fit(tmp_path):
    config = json.loads(overrides.to_json(CONFIG)) | {"flux": {"capacitor": 3}}
    folder = whole(tmp_path / "run", **{"config.json": json.dumps(config)})
    (run,) = runs.read([folder])
    assert run.config is None
    assert any("does not fit this version" in note for note in run.notes)
    assert ("flux.capacitor", "3") in sections.configuration(run)[0].body.rows


@pytest.mark.parametrize("workdirs", [[], ["nowhere"], ["file"]])
def test_what_is_no_workdir_is_refused(tmp_path, workdirs):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="got .*, expected") as caught:
        report.write([tmp_path / name for name in workdirs])
    assert "\n" not in str(caught.value)


def test_a_failure_leaves_the_old_page_and_training_succeeds(tmp_path, monkeypatch, capsys):
    put(tmp_path, **{"report.html": "old"})
    monkeypatch.setattr(page, "render", lambda found: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        report.write([tmp_path])
    report.write_after_training(tmp_path)
    assert "warning: no report (ZeroDivisionError: division by zero)" in capsys.readouterr().err
    assert (tmp_path / "report.html").read_text() == "old"
    assert not list(tmp_path.glob("*.tmp"))


def test_only_the_first_process_reports(tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "is_first_process", lambda: False)
    report.write_after_training(tmp_path)
    assert list(tmp_path.iterdir()) == []


# --- several runs -----------------------------------------------------------------------------------------------------


def test_runs_are_compared(tmp_path):
    other = dataclasses.replace(CONFIG, schedule=ScheduleConfig(peak=0.25), task=TaskConfig(label_smoothing=0.1))
    first, second = whole(tmp_path / "a" / "run"), whole(tmp_path / "b" / "run", other)
    found = read(first, second, first)
    assert (tmp_path / "comparison.html").exists() and (tmp_path / "comparison.png").exists()
    assert not (first / "report.html").exists() and not (second / "report.html").exists()
    differences = cells(found, "Differences")
    assert "2 runs compared" in found.text
    assert cells(found, "schedule.peak")[:2] == ["0.001", "0.25"]
    assert cells(found, "task.label_smoothing")[:2] == ["0", "0.1"]
    table = ["field", "a/run", "b/run", "schedule.peak", "0.001", "0.25", "task.label_smoothing", "0", "0.1"]
    start = differences.index("field")
    assert differences[start : start + 10] == [*table, "Results; in brackets the difference from a/run."]
    start = differences.index("validation: bleu")
    assert differences[start : start + 3] == ["validation: bleu", "12", "12 (+0)"]
    assert cells(found, "test: BLEU (0 to 100)")[:2] == ["33.25", "33.25"]


def test_a_comparison_goes_where_it_is_told_and_replaces_no_run_s_page(tmp_path):
    first, second = whole(tmp_path / "runs" / "a"), whole(tmp_path / "runs" / "deep" / "b")
    alone = report.write([first]).read_bytes()
    assert report.write([first, second]) == tmp_path / "runs" / "comparison.html"
    (tmp_path / "pages").mkdir()
    asked = tmp_path / "pages" / "both.html"
    assert report.write([first, second], asked) == asked
    assert sorted(path.name for path in asked.parent.iterdir()) == ["both.html", "both.png"]
    assert (first / "report.html").read_bytes() == alone
    for wrong in (tmp_path / "both", tmp_path / "pages"):
        with pytest.raises(ConfigError, match="--output: got .*, expected a file that ends in .html"):
            report.write([first], wrong)
    with pytest.raises(ConfigError, match="No such file or directory, expected to write the page there"):
        report.write([first], tmp_path / "nowhere" / "a.html")


SCORES = {"step": 100, "loss": 2.0, "perplexity": 7.4, "accuracy": 0.5, "bleu": 0.0, "exact_match": 0.999}


@pytest.mark.parametrize(
    ("values", "config", "first"),
    [
        (SCORES, {}, "bleu"),
        (SCORES, {"evaluate": EvaluateConfig(headline="exact_match")}, "exact_match"),
        (SCORES, {"checkpoint": CheckpointConfig(metric="exact_match")}, "exact_match"),
        (
            SCORES,
            {"checkpoint": CheckpointConfig(metric="bleu"), "evaluate": EvaluateConfig(headline="perplexity")},
            "perplexity",
        ),
        ({"loss": 0.3, "accuracy": 0.9, "macro_f1": 0.8}, {}, "accuracy"),
        ({"loss": 0.3, "accuracy": 0.9, "macro_f1": 0.8, "f1": 0.6, "precision": 0.7, "recall": 0.5}, {}, "f1"),
        ({"loss": 0.3, "accuracy": 0.9, "macro_f1": 0.8, "word_accuracy": 0.85}, {}, "word_accuracy"),
        ({"loss": 0.3, "accuracy": 0.4, "perplexity": 2.0, "word_perplexity": 9.0, "bits_per_byte": 1.0}, {},
         "word_perplexity"),
        ({"loss": 0.3, "accuracy": 0.4, "spearman": 0.7, "pearson": 0.6}, {}, "spearman"),
        ({"loss": 0.3, "rouge1": 3.0, "rouge2": 1.0, "rouge_l": 2.0, "perplexity": 4.0}, {}, "rouge1"),
        ({"loss": 0.3}, {}, "loss"),
    ],
)  # fmt: skip
def test_the_main_measure_comes_first(tmp_path, values, config, first):
    files = {"eval-test.json": json.dumps({"split": "test", **values}), "result.json": json.dumps(values)}
    (run,) = runs.read([whole(tmp_path, dataclasses.replace(CONFIG, **config), **files)])
    cards, scores = sections.results([run])
    title = f"test: {measures.LABELS.get(first, first)}"
    assert cards.cards[0].title == scores.rows[0][0] == title


def test_the_quickstart_is_known_by_its_exact_matches(tmp_path):
    recipe = pathlib.Path(__file__).parents[2] / "configs" / "quickstart.py"
    config = overrides.parse([f"--config={recipe}"])
    evaluation = {"split": "test", "examples": 1000, "bleu": 0.0, "exact_match": 0.999}
    (run,) = runs.read([whole(tmp_path, config, **{"eval-test.json": json.dumps(evaluation)})])
    (card,) = sections.results([run])[0].cards
    assert (card.title, card.value) == ("test: exact matches (share)", "0.999")
    assert card.details[0] == "95 %: 0.9944 to 0.9998 (Wilson interval of 1,000 examples)"


def test_a_headline_that_was_not_measured_is_said(tmp_path):
    folder = whole(tmp_path, dataclasses.replace(CONFIG, evaluate=EvaluateConfig(headline="blue")))
    assert "evaluate.headline is 'blue', which was not measured; there are bleu, loss" in read(folder).text


def test_every_score_of_decoded_text_says_of_how_many_examples_it_is():
    scores = {name for task in registry.names("jaxformer.tasks") for name in tasks.get(task).score_names}
    assert set(measures.DECODED) == scores


def test_an_evaluation_of_a_part_with_other_settings_says_both(tmp_path):
    part = {"split": "test", "examples": 20, "split_examples": 60, "decoded_examples": 7, "loss": 2.5, "bleu": 4.0}
    changed = {"data.dir": {"run": "old", "here": "new"}, "data.length": {"run": 80, "here": 24}}
    folder = whole(tmp_path / "run")
    put(folder, **{"eval-test.json": {**part, "changed": changed}})
    found = read(folder)
    assert cells(found, "test (first 7): BLEU (0 to 100)")[0] == "4"
    assert cells(found, "split_examples")[0] == "60"
    assert cells(found, "changed")[0] == "data.dir: new (run: old); data.length: 24 (run: 80)"


def test_equal_configs_are_said_to_be_equal(tmp_path):
    found = runs.read([whole(tmp_path / "a"), whole(tmp_path / "b")])
    assert sections.differences(found)[0] == blocks.Paragraph("The runs have the same configuration.")
    assert "do not compare" not in str(sections.curve_blocks(found))


def test_losses_per_different_labels_are_said_not_to_compare(tmp_path):
    other = dataclasses.replace(CONFIG, data=DataConfig(tokenizer=TokenizerConfig(vocab=123)))
    assert "do not compare" in str(
        sections.curve_blocks(runs.read([whole(tmp_path / "a"), whole(tmp_path / "b", other)]))
    )


def test_the_best_value_follows_the_mode(tmp_path):
    config = dataclasses.replace(CONFIG, checkpoint=CheckpointConfig(metric="bleu", mode="max"))
    (run,) = runs.read([whole(tmp_path, config)])
    assert run.best() == ("bleu", 12.0, 100)


# --- curves -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "words"),
    [(3, "3"), (1234567, "1,234,567"), (0.123456, "0.1235"), (33.0, "33"), (1e-7, "1e-07"), (1e20, "1e+20"),
     (True, "true"), (None, "null"), ([1, "ä"], '[1, "ä"]'), ("a", "a"), (123456.7, "123,457"), (math.inf, "inf")],
)  # fmt: skip
def test_numbers_are_shown_for_people(value, words):
    assert blocks.format_value(value) == words


def test_a_report_does_not_wait_for_jax():
    folder = jaxformer.report.__path__[0]
    for path in pathlib.Path(folder).glob("*.py"):
        with open(path, encoding="utf-8") as file:
            body = ast.parse(file.read()).body
        modules = {node.module for node in body if isinstance(node, ast.ImportFrom)}
        modules |= {alias.name for node in body if isinstance(node, ast.Import) for alias in node.names}
        assert not {m for m in modules if m.split(".")[0] in ("jax", "flax") or m in ("jaxformer.tasks",)}

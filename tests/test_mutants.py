"""Every planted mistake still applies to today's code, and the runner says what its tests said."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def runner():
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "benchmarks" / "mutants.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


mutants = runner()
EVERY = mutants.load()


@pytest.mark.parametrize("category", sorted({mutant.category for mutant in EVERY}))
def test_every_mistake_applies_to_one_place_and_compiles(category):
    for mutant in EVERY:
        if mutant.category == category:
            assert mutant.planted(ROOT / "jaxformer") != (ROOT / "jaxformer" / mutant.file).read_text(encoding="utf-8")


def test_mistakes_have_names_of_their_own_sources_and_tests_that_exist():
    ids = [mutant.id for mutant in EVERY]
    assert len(ids) == len(set(ids)) >= 120
    for mutant in EVERY:
        assert mutant.slip and mutant.source and mutant.tests and mutant.goldens in ("", "all"), mutant.id
        for test in mutant.tests:
            path, _, name = test.partition("::")
            assert (ROOT / path).is_file(), f"{mutant.id} names {path}"
            assert f"def {name.partition('[')[0]}" in (ROOT / path).read_text(encoding="utf-8"), f"{mutant.id}: {test}"


def test_no_mistake_that_was_once_missed_is_missed_again():
    found = json.loads(mutants.RESULTS.read_text(encoding="utf-8"))
    once = {
        "batch-norm-momentum", "min-p-before-top-p", "settled-by-length-now", "settled-by-limit", "tile-window-edge",
        "tile-window-edge-ahead", "yarn-magnitude-sine", "scale-width-per-head", "min-length-ignored",
        "min-length-one-more", "min-length-one-less", "forced-first-ignored", "forced-first-late",
        "checksums-never-read", "checksums-never-read-on-load", "evaluation-ignores-ema",
        "same-dropout-in-microbatches",
    }  # fmt: skip
    assert once <= {mutant.id for mutant in EVERY}
    assert not {name for name in once if found[name]["verdict"] not in mutants.CAUGHT}


def test_most_mistakes_are_caught_and_the_page_says_so(tmp_path, monkeypatch):
    found = json.loads(mutants.RESULTS.read_text(encoding="utf-8"))
    planted = [mutant for mutant in EVERY if not mutant.equivalent and mutant.id in found]
    caught = [mutant for mutant in planted if found[mutant.id]["verdict"] in mutants.CAUGHT]
    assert len(planted) >= 120
    assert len(caught) >= 0.97 * len(planted)
    assert not [mutant.id for mutant in caught if mutants.slow(found[mutant.id].get("by", ""))]  # run mutants.py again
    written, copy = mutants.PAGE.read_text(encoding="utf-8"), tmp_path / "page.md"
    copy.write_text(written, encoding="utf-8")
    monkeypatch.setattr(mutants, "PAGE", copy)
    mutants.write_page(EVERY, found)
    assert copy.read_text(encoding="utf-8") == written


def test_a_mistake_is_planted_and_mended(tmp_path):
    class Copy(mutants.Tree):
        def __init__(self, root):
            self.root, self.held = root, None

    path = tmp_path / "jaxformer" / "a.py"
    path.parent.mkdir()
    path.write_text("x = 1\ny = 2\n")
    before = path.stat().st_mtime_ns
    mutant = mutants.Mutant("some", "one", "slip", "a.py", "x = 1", "x = 3", ("tests/a.py",), "nobody")
    tree = Copy(tmp_path)
    tree.plant(mutant)
    assert path.read_text() == "x = 3\ny = 2\n" and path.stat().st_mtime_ns != before
    tree.mend()
    assert path.read_text() == "x = 1\ny = 2\n" and path.stat().st_mtime_ns == before
    path.write_text("x = 1\nx = 1\n")
    with pytest.raises(ValueError, match=re.escape("one: got 2 places in a.py, expected 1")):
        tree.plant(mutant)


@pytest.mark.parametrize(
    ("tally", "late", "expected"),
    [
        ({"passed": 3, "failed": "", "code": 0}, False, "survived"),
        ({"passed": 3, "failed": "tests/a.py::test_b", "code": 1}, False, "caught"),
        ({"passed": 0, "failed": "tests/a.py (import)", "code": 2}, False, "caught"),
        (None, False, "caught"),
        (None, True, "too slow"),
        ({"passed": 0, "failed": "", "code": 0}, False, "broken"),  # all skipped
        ({"passed": 0, "failed": "", "code": 4}, False, "broken"),  # no such test
    ],
)
def test_verdicts_follow_from_what_the_tests_did(tally, late, expected):
    assert mutants.verdict(tally, late)["verdict"] == expected


def test_words_of_only_are_categories_and_ids():
    assert {mutant.category for mutant in mutants.chosen(EVERY, "beam")} == {"beam"}
    assert [mutant.id for mutant in mutants.chosen(EVERY, "rope-sign-lost")] == ["rope-sign-lost"]
    assert mutants.chosen(EVERY, "") == EVERY
    with pytest.raises(SystemExit, match="got 'ropes'"):
        mutants.chosen(EVERY, "ropes")

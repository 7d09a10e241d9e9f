"""The lists of tests: fast.txt for `make test-fast`, slow.txt for `make test-all` alone, and the long files."""

import re
import types
from pathlib import Path

import conftest

ROOT = Path(__file__).resolve().parents[1]
LISTED = (ROOT / "tests" / "fast.txt").read_text(encoding="utf-8").split()
FOLDERS = (
    "cli", "data", "decode", "hf", "launch", "models", "nn", "parallel", "plan", "report", "runtime", "sweep",
    "tasks", "train",
)  # fmt: skip


def test_every_line_is_there_once_and_is_a_file_or_one_of_its_tests():
    assert sorted(set(LISTED)) == LISTED
    for line in LISTED:
        path, _, name = line.partition("::")
        assert (ROOT / path).is_file(), f"tests/fast.txt names {path}"
        assert not name or f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"tests/fast.txt names {line}"


def test_every_folder_of_tests_has_a_file_in_it():
    assert {path.name for path in (ROOT / "tests").iterdir() if any(path.glob("test_*.py"))} >= set(FOLDERS)
    for folder in FOLDERS:
        assert any(line.startswith(f"tests/{folder}/") for line in LISTED), f"tests/fast.txt has none of {folder}"


def test_make_reads_the_list():
    assert "@tests/fast.txt" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_every_slow_test_is_there_once_and_none_is_a_fast_one():
    lines = (ROOT / "tests" / "slow.txt").read_text(encoding="utf-8").splitlines()
    assert sorted(set(lines)) == lines
    for line in lines:
        path, *classes, name = line.partition("[")[0].partition("__with")[0].split("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert all(f"class {name}" in text for name in classes), f"tests/slow.txt names {line}"
        assert re.search(rf"def {name}\(" if not classes else rf"def {name[:-1]}", text), f"tests/slow.txt names {line}"
        assert line.partition("[")[0] not in LISTED, f"{line} is in tests/fast.txt, too"


def test_slow_tests_are_marked_by_name_or_case(monkeypatch):
    def item(nodeid):
        marks: list[str] = []
        return types.SimpleNamespace(nodeid=nodeid, marks=marks, add_marker=marks.append)

    items = [
        item("tests/a.py::one[x]"),
        item("tests/a.py::one[y]"),
        item("tests/a.py::two[x]"),
        item("tests/a.py::three"),
    ]
    monkeypatch.setattr(conftest, "SLOW", {"tests/a.py::one[y]", "tests/a.py::two"})
    conftest.pytest_collection_modifyitems(types.SimpleNamespace(), items)
    assert [each.marks for each in items] == [[], ["slow"], ["slow"], []]
    assert '-m "not slow" $(TESTS)' in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_every_long_file_is_there():
    assert {path.name for path in (ROOT / "tests").rglob("test_*.py")} >= set(conftest.LONG)

"""The lists of files: those of `make test-fast`, in tests/fast.txt, and the long ones, which run first."""

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


def test_every_long_file_is_there():
    assert {path.name for path in (ROOT / "tests").rglob("test_*.py")} >= set(conftest.LONG)

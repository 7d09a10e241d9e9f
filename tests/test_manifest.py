"""Checksums: every change of every file of a checkpoint is noticed, and nothing that is loaded is run."""

import ast
import json
from pathlib import Path

import pytest

from jaxformer.checkpoint import manifest
from jaxformer.checkpoint.manifest import Damaged
from jaxformer.config import ConfigError

PACKAGE = Path(__file__).resolve().parents[1] / "jaxformer"


@pytest.fixture
def directory(tmp_path):
    place = tmp_path / "5"
    (place / "state").mkdir(parents=True)
    (place / "state" / "array").write_bytes(bytes(range(200)))
    (place / "about.json").write_text('{"step": 5}')
    manifest.write(place)
    return place


def check(directory):
    manifest.check_files(directory, manifest.read(directory))


def flip(raw: bytes) -> bytes:
    return raw[:20] + bytes([raw[20] ^ 4]) + raw[21:] if len(raw) > 20 else bytes([raw[0] ^ 4]) + raw[1:]


def test_what_was_written_is_whole(directory):
    check(directory)
    assert set(manifest.read(directory)) == {"state/array", "about.json"}
    (directory / "notes.txt").write_text("a file more is no damage")
    check(directory)


@pytest.mark.parametrize("name", ["state/array", "about.json", "manifest.json"])
@pytest.mark.parametrize(
    "change",
    [lambda raw: raw[: len(raw) // 2], lambda raw: bytes(len(raw)), flip, lambda raw: raw + b"x", lambda raw: b""],
    ids=["truncated", "zeroed", "flipped", "longer", "emptied"],
)
def test_every_change_is_noticed(directory, name, change):
    path = directory / name
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(Damaged) as error:
        check(directory)
    assert str(error.value).isprintable()


def test_a_missing_file_is_noticed_and_a_missing_manifest_is_said(directory):
    (directory / "about.json").unlink()
    with pytest.raises(Damaged, match=r"about.json: No such file"):
        check(directory)
    (directory / "manifest.json").unlink()
    assert manifest.read(directory) is None


def forge(directory, **edits):
    path = directory / manifest.FILE_NAME
    content = json.loads(path.read_text())
    content.pop("sha256")
    content |= edits
    path.write_text(json.dumps(content | {"sha256": manifest._digest(content)}))


def test_a_newer_format_is_refused_and_not_called_damaged(directory):
    forge(directory, format=manifest.FORMAT + 1)
    with pytest.raises(ConfigError, match=r"got format 3, expected at most 2; a newer version"):
        check(directory)


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", ""])
def test_a_manifest_names_nothing_outside(directory, name):
    forge(directory, files={name: {"bytes": 1, "sha256": "0"}})
    with pytest.raises(Damaged, match="which is not in the checkpoint"):
        check(directory)


@pytest.mark.parametrize("files", [[], None, 3, {"a": None}, {"a": {"bytes": "x", "sha256": "y"}}, {"a": []}])
def test_hostile_manifests_are_damage(directory, files):
    forge(directory, files=files)
    with pytest.raises(Damaged):
        check(directory)


def test_no_module_loads_anything_that_could_run_code():
    forbidden = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "yaml", "joblib"}
    runs = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            # Kept programs are run in any case, so only their owner's files are read.
            allowed = {"pickle"} if path == PACKAGE / "runtime" / "programs.py" else set()
            assert not {name.split(".")[0] for name in names} & (forbidden - allowed), path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
                runs.append(path.name)
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert ast.unparse(node.value) == "False", path
    assert runs == ["recipes.py"]  # recipes, which are programs of the user's

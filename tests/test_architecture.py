"""Imports point one way. Read from the source, so that imports inside functions and for types alone count, too."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "jaxformer"

LAYERS = (
    ("errors", "types"),
    ("registry",),
    ("runtime",),
    ("display",),
    ("config",),
    ("parallel",),
    ("data",),
    ("nn",),
    ("models",),
    ("chunks",),
    ("losses", "metrics"),
    ("decode",),
    ("tasks",),
    ("framing",),
    ("checkpoint",),
    ("storage",),
    ("train",),
    ("analysis", "bridges"),
    ("model",),
    ("hf",),
    ("evaluation", "preflight"),
    ("conversation", "doctor", "experiment", "plan", "report", "serving", "testing"),
    ("sweep",),
    ("cli",),
)
"""The rooms, first to last: a room imports rooms of lines above its own, and no other of its line."""

FREE = {"__init__": {"hf", "model"}, "__main__": {"cli", "runtime"}, "overrides": {"config"}}
"""The package's own front, and names of earlier versions."""


def imports(path: Path) -> set[str]:
    """Full names of what a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = sorted(PACKAGE.rglob("*.py"))
ROOMS = {room(path) for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    order = {name: number for number, line in enumerate(LAYERS) for name in line}
    own = room(path)
    assert own in order or own in FREE, f"{own} is new: give it a place in LAYERS"
    for name in imports(path):
        if not name.startswith("jaxformer."):
            continue
        other = name.split(".")[1]
        if other in ROOMS and other != own:
            assert other in FREE[own] if own in FREE else order[other] < order[own], f"{path} imports {name}"


def test_the_page_lists_the_rooms_in_their_order():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.split("<!-- rooms -->")[1].split("<!-- /rooms -->")[0].strip().splitlines()[2:]
    listed = tuple(tuple(re.findall(r"`(\w+)`", row.split("|")[1])) for row in table)
    assert listed == LAYERS, "docs/architecture.md: the table of rooms differs from LAYERS"


def test_data_knows_nothing_of_parallelism_but_the_rules():
    for path in (PACKAGE / "data").rglob("*.py"):
        assert not [n for n in imports(path) if "jaxformer.parallel" in n and "parallel.rules" not in n], path


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_imports_other_frameworks(path):
    assert not {name.split(".")[0] for name in imports(path)} & {"tensorflow", "torch", "transformers", "clu"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_has_hidden_defaults_or_bare_asserts(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        assert not isinstance(node, ast.Assert), f"{path}:{node.lineno}: assert"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            assert ast.unparse(node.func.value) not in ("config", "self.config"), f"{path}:{node.lineno}: config.get"


def test_launchers_and_recipes_import_little():
    for path in (ROOT / "launch").glob("*.py"):
        assert not [name for name in imports(path) if name.split(".")[0] in ("jaxformer", "jax")], path
    for path in [*(ROOT / "configs").glob("*.py"), *(ROOT / "experiments" / "sweeps").glob("*.py")]:
        for name in imports(path):
            if name.startswith("jaxformer"):
                assert name.split(".")[1] in ("config", "sweep"), f"{path} imports {name}"


def test_the_front_is_instant():
    """Refusing a config, printing help, planning a sweep: none of them may wait for jax."""
    heavy = {"jax", "flax", "numpy", "tensorflow_datasets", "orbax"}
    for name in (
        *(f"config/{file.stem}" for file in (PACKAGE / "config").glob("*.py")),
        "cli/__init__",
        "registry",
    ):
        assert not {n.split(".")[0] for n in module_level(PACKAGE / f"{name}.py")} & heavy, name


def module_level(path: Path) -> set[str]:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    modules = [n.module or "" for n in body if isinstance(n, ast.ImportFrom)]
    return {*modules, *(alias.name for n in body if isinstance(n, ast.Import) for alias in n.names)}


def test_test_files_have_unique_names():
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))

"""Imports point one way. Read from the source, so an import inside a function counts and one for types does not."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "jaxformer"

FOUNDATION = {"config", "registry", "files", "redaction"}
CORE = FOUNDATION | {"types", "parallel", "nn", "models"}

ALLOWED: dict[str, set[str]] = {
    "types": set(),
    "config": set(),
    "registry": set(),
    "files": {"config"},
    "redaction": {"config"},
    "streams": {"files", "redaction"},
    "schema": FOUNDATION,
    "checks": FOUNDATION,
    "overrides": FOUNDATION | {"schema", "checks"},
    "lines": {"config", "files"},
    "reuse": {"config", "overrides"},
    "memory": set(),
    "places": {"config"},
    "compilation": {"config", "memory", "places"},
    "arguments": FOUNDATION | {"schema"},
    "fields": FOUNDATION | {"schema"},
    "chunks": {"types", "parallel"},
    "losses": {"types", "chunks"},
    "metrics": {"types", "chunks"},
    "parallel": FOUNDATION | {"types"},
    "data": FOUNDATION | {"types", "parallel", "places"},
    "nn": FOUNDATION | {"types", "parallel"},
    "models": CORE,
    "decode": CORE,
    "model": CORE | {"overrides", "decode", "tasks", "data"},
    "tasks": CORE | {"decode", "data", "losses", "metrics"},
    "train": CORE
    | {"overrides", "results", "reuse", "checks", "decode", "data", "losses", "metrics", "tasks", "model"}
    | {"checkpoint"},
    "checkpoint": CORE | {"overrides", "data", "tasks", "model", "train"},
    "hf": CORE
    | {"schema", "overrides", "checks", "decode", "data", "losses", "metrics", "tasks", "model", "checkpoint", "train"},
    "results": {"config", "overrides"},
    "report": CORE | {"overrides", "results", "metrics", "tasks", "checkpoint"},
    "testing": CORE | {"metrics", "tasks", "train"},
    "sweep": FOUNDATION | {"overrides", "results"},
    "inspection": FOUNDATION | {"overrides", "results", "checkpoint", "preflight", "compilation", "places"},
    "preflight": FOUNDATION | {"overrides", "checks", "parallel", "data"},
    "plan": CORE | {"overrides", "data", "tasks", "train"},
    "experiment": CORE | {"overrides", "data", "losses", "metrics", "decode", "tasks", "model", "train", "checkpoint"},
    "cli": {
        "config", "registry", "overrides", "parallel", "tasks", "train", "data", "checkpoint", "report", "lines",
        "sweep", "experiment", "inspection", "plan", "preflight", "hf", "memory", "compilation", "arguments",
        "files", "redaction", "streams", "fields", "reuse",
    },
    "__main__": {"cli"},
    "__init__": {"hf"},
}  # fmt: skip
"""Room -> the rooms it may import. A new room gets its row here, and with it its place in the house."""


def imports(path: Path) -> set[str]:
    """Full names of what a file imports, leaving out `if TYPE_CHECKING`."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = sorted(PACKAGE.rglob("*.py"))
ROOMS = {room(path) for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    assert room(path) in ALLOWED, f"{room(path)} is new: give it a row in ALLOWED"
    for name in imports(path):
        if name.startswith("jaxformer."):
            other = name.split(".")[1]
            if other in ROOMS and other != room(path):
                assert other in ALLOWED[room(path)], f"{path} imports {name}"


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
                assert name.split(".")[1] in ("config", "overrides", "sweep"), f"{path} imports {name}"


def test_the_front_is_instant():
    """Refusing a config, printing help, planning a sweep: none of them may wait for jax."""
    heavy = {"jax", "flax", "numpy", "tensorflow_datasets", "orbax"}
    for name in ("schema", "overrides", "lines", "cli", "config", "registry"):
        assert not {n.split(".")[0] for n in module_level(PACKAGE / f"{name}.py")} & heavy, name


def module_level(path: Path) -> set[str]:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    modules = [n.module or "" for n in body if isinstance(n, ast.ImportFrom)]
    return {*modules, *(alias.name for n in body if isinstance(n, ast.Import) for alias in n.names)}


def test_test_files_have_unique_names():
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))

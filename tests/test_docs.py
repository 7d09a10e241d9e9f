"""What README and docs say is true: commands run (at toy size) or parse, Python runs, paths and links exist."""

from __future__ import annotations

import io
import re
import runpy
import shlex
from pathlib import Path

import builders
import pytest
import recipes

from jaxformer import cli
from jaxformer.config import overrides

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
TOY = [
    "--config.train.steps=2",
    "--config.train.evaluate_every=0",
    "--config.optimizer.name=sgd",
    "--config.optimizer.momentum=0",
    "--config.evaluate.examples=16",
    "--config.evaluate.decode_examples=0",  # tests/train/test_loop.py decodes in training
    "--config.data.batch=16",
    "--config.data.buckets=40",
    "--config.data.examples=200",
    "--config.decode.max_length=8",
    "--config.decode.batch=1000",  # a test split is one batch, so one program
    *(
        f"--config.model.{part}.{edit}"  # without biases: compiling takes time by the parameter
        for part in ("encoder", "decoder")
        for edit in ("layers=1", "width=16", "norm.kind=rms", "attention.bias=false", "ffn.bias=false")
    ),
]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


def commands() -> list[tuple[str, list[str]]]:
    """(page, words) of every `jaxformer` command, without what stands before a pipe."""
    found = []
    for page in PAGES:
        for block in blocks(page, "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line.split("|")[-1], comments=True)
                if words and words[0] == "jaxformer":
                    found.append((page.name, words[1:]))
    return found


@pytest.mark.parametrize(("page", "words"), commands(), ids=lambda x: x if isinstance(x, str) else "-".join(x)[:60])
def test_every_command_is_one(page, words, monkeypatch):
    monkeypatch.chdir(ROOT)
    name, command, rest = cli.find(words)
    arguments = cli.parse(name, command, rest)
    if command.takes_recipe and any(word.startswith("--config=") for word in arguments.config):
        overrides.parse(arguments.config)


def test_the_commands_and_the_python_of_the_readme_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    builders.one_device(monkeypatch)
    builders.drawn_parameters(monkeypatch)
    for name in ("configs", "experiments"):
        (tmp_path / name).symlink_to(ROOT / name)
    first = [words for page, words in commands() if page == "README.md" and "runs/quickstart" in " ".join(words)]
    assert [words[0] for words in first] == ["train", "evaluate", "decode", "report", "inspect"]
    for words in first:
        if words[0] == "train":
            words = [word for word in words if "train.steps" not in word] + TOY
        monkeypatch.setattr("sys.stdin", io.StringIO("three hundred and five\n"))
        assert cli.main(words) == 0, capsys.readouterr().err
    workdir = tmp_path / "runs" / "quickstart"
    page = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    table = re.search(r"## What a workdir holds\n(.*?)\n\n[^|]", page, re.S).group(1)
    for row in table.splitlines()[3:]:
        for name in re.findall(r"`([^`]+)`", row.split("|")[1]):
            assert (workdir / name.rstrip("/")).exists(), (
                f"docs/running.md: a workdir holds {name}, but this one does not"
            )
    for block in blocks(ROOT / "README.md", "python"):
        exec(compile(block, "README.md", "exec"), {})


def scripts() -> list[tuple[str, Path, list[str]]]:
    """(page, script, its flags) of every `python FILE.py` in pages and in the docstrings of benchmarks."""
    found = []
    for page in [*PAGES, *sorted((ROOT / "benchmarks").glob("*.py"))]:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for path, rest in re.findall(
            r"\bpython ((?:benchmarks|docs|examples|experiments|tests)/\S+\.py)\b([^\n`]*)", text
        ):
            found.append((page.name, ROOT / path, re.findall(r"--[a-z][a-z0-9-]*", rest)))
    return found


def test_scripts_take_the_flags_that_pages_show():
    found = scripts()
    assert len(found) > 60
    for page, script, flags in found:
        assert script.is_file(), f"{page}: {script.relative_to(ROOT)}"
        code = script.read_text(encoding="utf-8")
        for name in re.findall(r"^ *(?:import|from) (\w+)", code, re.M):  # with parsers that benchmarks share
            beside = script.with_name(f"{name}.py")
            code += beside.read_text(encoding="utf-8") if beside.is_file() else ""
        for flag in flags:
            if flag == "--config":  # the project's own
                assert re.search(r"\boverrides\b|parse_known_args|--config", code.split('"""', 2)[2]), (
                    f"{page}: {script.name}"
                )
                continue
            field = flag[2:].replace("-", "_")  # flags are made of names and of a dataclass's fields, too
            assert re.search(rf"""["']({flag}|{flag[2:]})["']|^    {field}: (int|str|float)\b""", code, re.M), (
                f"{page}: {script.name} has no {flag}"
            )


def test_the_parts_of_a_model_run_alone_and_in_a_block_of_ones_own():
    names: dict = {}
    for block in blocks(ROOT / "docs" / "components.md", "python"):  # one program
        exec(compile(block, "components.md", "exec"), names)
    (block,) = [block for block in blocks(ROOT / "docs" / "extending.md", "python") if "GatedBlock" in block]
    exec(compile(block, "extending.md", "exec"), {})


def test_what_is_closed_is_in_the_code_that_the_page_names():
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    schema = (ROOT / "jaxformer" / "config" / "schema.py").read_text(encoding="utf-8")
    rows = re.findall(r"^\|.*\| `(jaxformer/\S+)`: (.*) \| `(\w+)` \|$", page, re.M)
    assert len(rows) == 10
    for file, names, section in rows:
        code = (ROOT / file).read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^ *(def|class) {name}\b|^{name}:", code, re.M), f"{file}: no {name}"
        assert re.search(rf"^class {section}\b|^{section} =", schema, re.M), section


def test_every_path_that_a_page_names_exists():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for path in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (page.parent / path).exists(), f"{page.name}: link to {path}"
        for path in re.findall(
            r"`((?:configs|docs|experiments|jaxformer|launch|tests|benchmarks)/[\w/]+(?:\.\w+|/))[:`]", text
        ):
            assert "NAME" in path or (ROOT / path).exists(), f"{page.name}: {path}"


def test_readme_and_index_name_every_page():
    docs = ROOT / "docs"
    files = [path.relative_to(docs) for path in docs.rglob("*") if path.suffix in (".md", ".ipynb")]
    pages = {str(path.with_suffix("")) for path in files}
    pages -= {"index", *(page for page in pages if page.startswith("measurements/") and page != "measurements/README")}
    index = (docs / "index.md").read_text(encoding="utf-8")
    tree = "".join(re.findall(r"^```{toctree}\n(.*?)^```", index, re.M | re.S)).splitlines()
    assert sorted(line for line in tree if line and not line.startswith(":")) == sorted(pages)
    table = "".join(line for line in index.splitlines() if line.startswith("|"))
    assert {Path(path).with_suffix("").as_posix() for path in re.findall(r"\]\(([^)]+)\)", table)} == pages
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    linked = {Path(path).with_suffix("").as_posix() for path in re.findall(r"\]\(docs/([^)]+)\)", readme)}
    assert "notebooks" in linked
    assert linked - {"notebooks", "images/overview"} == {page for page in pages if not page.startswith("notebooks/")}


def test_the_list_of_modules_is_todays():
    writer = runpy.run_path(str(ROOT / "docs" / "reference" / "write_modules.py"))
    page = (ROOT / "docs" / "reference" / "modules.md").read_text(encoding="utf-8")
    assert page == writer["page"](), "write it: python docs/reference/write_modules.py > docs/reference/modules.md"


def test_every_recipe_says_how_to_run_it():
    for recipe, variant, words in recipes.each():
        text = recipe.read_text(encoding="utf-8").split('"""')[1]
        for word in ("Command:", "Hardware:", "Score:", "Time:"):
            assert word in text, f"{recipe.name}: no {word}"
        assert variant in text
        overrides.freeze(overrides.load(words))

"""Prints docs/reference/modules.md: `python docs/reference/write_modules.py > docs/reference/modules.md`."""

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "jaxformer"
WITH_MEMBERS = (
    *("config", "nn.attention", "nn.block", "nn.stack", "nn.layers", "nn.masks", "nn.recurrent"),
    *("models.transformer", "losses", "metrics"),
)
"""Modules whose functions and classes the site shows."""

INTRODUCTION = """\
The site made by `make docs` (`build/site/reference/modules.html`) shows every function and class of the modules at the
end of this page. Elsewhere the page has this list alone, with the first sentence of each module.
`python docs/reference/write_modules.py > docs/reference/modules.md` writes it again."""


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    sentence = re.split(r"(?<!\bal)(?<=\.) ", paragraph)[0]
    return sentence.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")


def page() -> str:
    """The page: the list of modules, and the directives that the site fills."""
    modules: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        if not any(part.startswith("_") for part in parts[:-1]) and (path.stem == "__init__" or path.stem[0] != "_"):
            modules.setdefault("/".join(parts[:-1]), []).append(path)
    lines = ["# Modules", "", INTRODUCTION, ""]
    for package, paths in sorted(modules.items()):
        lines += [f"## `jaxformer/{package}`".replace("/`", "`"), ""]
        own = next((path for path in paths if path.stem == "__init__"), None)
        lines += [first_sentence(own), ""] if own and first_sentence(own) else []
        rows = [f"| `{path.name}` | {first_sentence(path)} |" for path in paths if path is not own]
        lines += ["| module | content |", "|---|---|", *rows, ""] if rows else []
    lines += ["## Functions and classes", "", "```{eval-rst}"]
    for name in WITH_MEMBERS:
        lines += [f".. automodule:: jaxformer.{name}", "   :members:", ""]
    return "\n".join([*lines[:-1], "```", ""])


if __name__ == "__main__":
    print(page(), end="")

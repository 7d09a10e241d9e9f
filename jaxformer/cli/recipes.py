"""`jaxformer recipes`: the recipes of a folder, with their variants and the first line of their docstrings."""

from __future__ import annotations

import os
import textwrap
from argparse import Namespace
from pathlib import Path

from jaxformer.cli.arguments import Command, Flag
from jaxformer.config import recipes
from jaxformer.errors import ConfigError
from jaxformer.runtime import terminal


def run(arguments: Namespace) -> int:
    folder = Path(arguments.dir)
    if not folder.is_dir():
        raise ConfigError(
            f"--dir: got {arguments.dir!a}, but there is no such folder here, expected one with recipes; give --dir=DIR"
        )
    found = [
        recipes.describe(os.path.join(arguments.dir, name)) for name in sorted(os.listdir(folder)) if is_recipe(name)
    ]
    if not found:
        raise ConfigError(f"--dir: got {arguments.dir!a}, a folder without .py files, expected recipes; give --dir=DIR")
    for description in found:
        print(format_description(description, terminal.columns()))
    return 0


def is_recipe(name: str) -> bool:
    """True for the files of a folder that may be recipes."""
    return name.endswith(".py") and not name.startswith(("_", "."))


def format_description(recipe: recipes.Description, width: int) -> str:
    """A recipe as text: what --config takes, and below it its docstring's line and variants, or its error."""
    lines = [recipe.summary or "(no docstring)"] if not recipe.error else [f"error: {recipe.error}"]
    if recipe.variants:
        lines.append(f"variants: {', '.join(recipe.variants)}")
    indented = [
        line
        for text in lines
        for line in textwrap.wrap(
            text, max(width - 1, 20), initial_indent="    ", subsequent_indent="    ", break_long_words=False
        )
    ]
    return "\n".join([recipe.path, *indented])


COMMAND = Command(
    "list the recipes of a folder",
    run,
    {"dir": Flag("folder with recipes", default="configs", directory="read")},
    prints=True,
    details="with their variants and the first line of their docstrings",
    example="jaxformer recipes",
)

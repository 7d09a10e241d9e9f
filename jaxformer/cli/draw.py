"""`jaxformer draw`: pictures of a config or a run, as files for papers and slides."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from typing import TYPE_CHECKING

from jaxformer.cli.arguments import CHECKPOINT, Command, Flag, positive
from jaxformer.config import Config, overrides
from jaxformer.errors import ConfigError
from jaxformer.registry import nearest
from jaxformer.runtime import files, secrets, terminal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from jaxformer.model import Model

PICTURES = {
    "positions": ("length", "checkpoint"),
    "masks": ("length",),
    "model": (),
    "flops": (),
    "schedule": (),
    "embeddings": ("tokens", "neighbours", "checkpoint"),
}
"""Pictures by name, and the flags beside --config, --workdir and --output that each takes."""


def run(arguments: Namespace) -> int:
    name = arguments.picture
    if name not in PICTURES:
        raise ConfigError(f"draw: got {name!a}, expected one of {', '.join(PICTURES)}{nearest(name, list(PICTURES))}")
    for flag in ("length", "tokens", "neighbours", "checkpoint"):
        if getattr(arguments, flag) and flag not in PICTURES[name]:
            pictures = " and ".join(picture for picture, flags in PICTURES.items() if flag in flags)
            raise ConfigError(f"draw {name}: got --{flag}, expected it with {pictures} only; leave it out")
    config, title = _config(arguments)
    output = arguments.output or f"{title}-{name}.png"
    _check_output(output)
    from jaxformer.report import pictures

    figure, lines = _draw(name, arguments, config, title)
    for line in lines:
        print(secrets.redact(line))
    pictures.save(figure, output)
    print(f"written to {output}")
    return 0


def _config(arguments: Namespace) -> tuple[Config, str]:
    """The config of the recipe or of the run, with the edits, and a name for it that can begin a file's name."""
    recipes = [word for word in arguments.config if word.startswith("--config=")]
    edits = [word for word in arguments.config if not word.startswith("--config=")]
    name = arguments.picture
    if bool(recipes) == bool(arguments.workdir):
        got = "both --config and --workdir" if recipes else "neither --config nor --workdir"
        raise ConfigError(f"draw {name}: got {got}, expected one of them, a recipe or a run")
    if recipes and (name == "embeddings" or arguments.checkpoint):
        what = "embeddings" if name == "embeddings" else "--checkpoint"
        raise ConfigError(f"draw {name}: got a recipe, expected a run for {what}; give --workdir=DIR")
    if recipes:
        config, title = overrides.parse(arguments.config), recipes[0].removeprefix("--config=")
        title = os.path.basename(title).replace(".py", "")
    else:
        if edits and name == "embeddings":
            raise ConfigError(
                f"draw embeddings: got {edits[0].partition('=')[0]}, expected no edits of the run's config"
            )
        config = overrides.edit(overrides.read(arguments.workdir), edits)
        title = os.path.basename(os.path.abspath(arguments.workdir))
    return config, re.sub(r"[^\w.-]+", "-", title)


def _check_output(output: str) -> None:
    """Refuses a file that cannot be written before anything is computed."""
    from jaxformer.report import pictures

    pictures.check_output(output)
    folder = os.path.dirname(os.path.abspath(output))
    if not os.path.isdir(folder):
        raise ConfigError(f"--output: got {output!a}, but {folder} is no folder, expected one that exists; create it")
    files.check_directory("--output", folder, writable=True)


def _draw(name: str, arguments: Namespace, config: Config, title: str) -> tuple[Figure, list[str]]:
    """The figure, and lines about it for the terminal."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here is worth an accelerator
    from jaxformer.report.pictures import diagram, neighbours, panels

    if name in ("model", "flops"):
        from jaxformer.analysis.draw import model as models
        from jaxformer.analysis.draw.diagram import to_text
        from jaxformer.plan import program

        resolved = program.resolve(config)
        if name == "model":
            drawn = models.diagram(resolved.model, title)
            text = to_text(drawn, terminal.columns(), details=terminal.columns() >= 60)
            return diagram.figure(drawn), text.split("\n")
        from jaxformer.plan import pictures

        picture = pictures.flops(resolved, title)
        return panels.figure(picture), picture.summary
    if name == "embeddings":
        from jaxformer.analysis.draw import embeddings

        words = [word for word in arguments.tokens.split(",") if word]
        model = _load(arguments)
        found = embeddings.neighbourhood(
            model.config.model, model.params, model.tokenizers, title, words, arguments.neighbours
        )
        return neighbours.figure(found), neighbours.lines(found)
    from jaxformer.analysis.draw import masks, positions, schedule

    if name == "masks":
        picture = masks.masks(config, title, arguments.length)
    elif name == "schedule":
        picture = schedule.schedule(config, title)
    else:
        params = _load(arguments).params if arguments.workdir and positions.needs_run(config) else None
        picture = positions.positions(config, title, arguments.length, params)
    return panels.figure(picture), picture.summary


def _load(arguments: Namespace) -> Model:
    from jaxformer.hf import workdirs

    return workdirs.load(arguments.workdir, arguments.checkpoint)


COMMAND = Command(
    "pictures of a recipe or a run: masks, positions, ...",
    run,
    {
        "workdir": Flag("run in place of a recipe", default="", directory="read", bucket="copy"),
        "output": Flag("file that ends in .png, .svg or .pdf; without it NAME-PICTURE.png here", default=""),
        "length": Flag("positions, masks: number of positions or slots that are drawn", default=None, type=positive),
        "tokens": Flag("embeddings: tokens with commas between them; without it the first ones", default=""),
        "neighbours": Flag("embeddings: nearest neighbours of each token; 3 without it", default=None, type=positive),
        "checkpoint": CHECKPOINT,
    },
    config="optional",
    positionals=("PICTURE",),
    choices=tuple(PICTURES),
    details=f"PICTURE is one of {', '.join(PICTURES)}; the file is PNG, SVG or PDF",
    example="jaxformer draw masks --config=configs/gpt3.py:small --output=masks.svg",
)

"""`jaxformer explore`: a page of what a model attends to, its layers predict and its parts do, for given sentences."""

from __future__ import annotations

import itertools
import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxformer.cli import lines
from jaxformer.cli.arguments import CHECKPOINT, Command, Flag, port, positive
from jaxformer.errors import ConfigError

if TYPE_CHECKING:
    from jaxformer.analysis.explorer import Options
    from jaxformer.tasks import Predictor

SAMPLED_SENTENCES = 3
"""Sentences that are taken from a run's samples if none are given."""
MAX_SAMPLED_CHARACTERS = 200
"""Longer samples are left out: they would not fit a screen."""


def run(arguments: Namespace) -> int:
    if arguments.port is not None and not arguments.serve:
        raise ConfigError(f"--port: got {arguments.port} without --serve, expected both; add --serve")
    if arguments.serve and arguments.output:
        raise ConfigError(f"--output: got {arguments.output!a} with --serve, expected one of the two")
    page = _page_path(arguments)
    sentences = _given_sentences(arguments.input) or _sampled_sentences(Path(arguments.workdir))

    from jaxformer.analysis import explorer
    from jaxformer.hf import workdirs
    from jaxformer.report import explorer as explorer_page
    from jaxformer.report import serving
    from jaxformer.runtime import files

    predictor = workdirs.load(arguments.workdir, arguments.checkpoint).predictor
    options = explorer.Options(new_tokens=arguments.tokens, beams=arguments.beams)
    sentences = sentences or list(explorer.SAMPLE_PAIR)
    name = Path(arguments.workdir).absolute().name
    pair = explorer.pair_of(predictor, sentences)
    predictor = explorer.prepare(predictor, [*sentences, *pair], options)
    document = explorer.document(predictor, name, sentences, pair, options)
    if arguments.serve:
        site = serving.Site(lambda: explorer_page.render(document, serve=True), _answers(predictor, options))
        return serving.serve(site, arguments.port or 0, f"exploring {name}")
    html = explorer_page.render(document)
    try:
        files.write_atomic(page, html)
        if not arguments.output:
            text = json.dumps(document, allow_nan=False)
            files.write_atomic(page.with_name(explorer_page.DATA_FILE), text)
    except OSError as error:
        got = f"{page}: got {error.strerror or error}"
        raise ConfigError(f"{got}, expected to write the page there; give --output=FILE.html") from error
    print(f"written to {page}")
    return 0


def _page_path(arguments: Namespace) -> Path:
    """Path of the page: `--output`, or explore.html of the run."""
    if arguments.output:
        path = Path(arguments.output)
        if path.suffix != ".html" or path.is_dir() or not path.absolute().parent.is_dir():
            raise ConfigError(f"--output: got {arguments.output!a}, expected a file that ends in .html in a folder")
        return path
    workdir = Path(arguments.workdir)
    if not (workdir / "config.json").exists() and not arguments.serve:
        raise ConfigError(f"--output: got none and no run's folder ({arguments.workdir!a}), expected FILE.html")
    return workdir / "explore.html"


def _given_sentences(path: str) -> list[str]:
    """The lines of `--input` that are not empty; [] without it. "-" is stdin."""
    if not path:
        return []
    with lines.open_input("" if path == "-" else path) as source:
        read = lines.read_chunks(source, 1, "stdin" if path == "-" else path)
        found = [line for chunk in itertools.islice(read, 10_000) for line in chunk if line.strip()]
    if not found:
        raise ConfigError(f"--input: got {path!a} without a sentence, expected one a line")
    return found


def _sampled_sentences(workdir: Path) -> list[str]:
    """Inputs of the last samples that a run's training decoded; [] if there are none."""
    files = sorted((workdir / "samples").glob("*.json"), key=lambda path: path.stat().st_mtime)
    for path in reversed(files):
        try:
            records = json.loads(path.read_text(encoding="utf-8"))
            found = [record["input"] for record in records if isinstance(record.get("input"), str)]
        except (OSError, ValueError, TypeError, AttributeError):
            continue  # the samples are a convenience
        found = [line for line in found if line.strip() and len(line) <= MAX_SAMPLED_CHARACTERS and "\n" not in line]
        if found:
            return list(dict.fromkeys(found))[:SAMPLED_SENTENCES]
    return []


def _answers(predictor: Predictor, options: Options) -> Mapping[str, Any]:
    """Functions that answer the questions of the page, by path."""
    from jaxformer.analysis import explorer, patching

    def sentence(question: Mapping[str, Any]) -> dict[str, Any]:
        target, forced = question.get("target"), question.get("forced", [])
        if target is not None and not isinstance(target, str):
            raise ConfigError("target: got no text, expected one, or null")
        if not isinstance(forced, list) or not all(type(token) is int for token in forced):
            raise ConfigError("forced: got no token ids, expected a list of them")
        if len(forced) > explorer.MAX_TOKENS:
            raise ConfigError(f"forced: got {len(forced)} tokens, expected at most {explorer.MAX_TOKENS}")
        return explorer.sentence(predictor, _text(question, "line"), options, target, forced)

    def ablation(question: Mapping[str, Any]) -> dict[str, Any]:
        parts = [question.get(name, []) for name in ("heads", "mlps")]
        if not all(isinstance(part, list) and all(isinstance(one, list) for one in part) for part in parts):
            raise ConfigError("heads, mlps: got no lists, expected [[kind, layer, head], ...] and [[side, layer], ...]")
        heads, mlps = ([tuple(one) for one in part] for part in parts)
        return explorer.ablation(predictor, _text(question, "line"), heads, mlps)

    def patched(question: Mapping[str, Any]) -> dict[str, Any]:
        part = question.get("part", "residual")
        if part not in patching.PARTS:
            raise ConfigError(f"part: got {str(part)[:40]!a}, expected one of {', '.join(patching.PARTS)}")
        return explorer.patched(predictor, _text(question, "clean"), _text(question, "corrupted"), [part])

    return {"/api/sentence": sentence, "/api/ablation": ablation, "/api/patching": patched}


def _text(question: Mapping[str, Any], name: str) -> str:
    """A line of text in a question."""
    text = question.get(name)
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{name}: got no text, expected a sentence")
    return text


COMMAND = Command(
    "a page of what a model attends to, its layers predict and its parts do",
    run,
    {
        "workdir": Flag("folder of the run, or one of its checkpoints", directory="read", bucket="copy"),
        "input": Flag("text file of sentences, one a line; - for stdin; without it the run's samples", default=""),
        "output": Flag("page to write, FILE.html; without it explore.html in the folder of the run", default=""),
        "serve": Flag("a page whose sentences can be edited, for this machine only", default=False, switch=True),
        "port": Flag("with --serve: port of the page; without it any that is free", default=None, type=port),
        "tokens": Flag("most tokens that a language model writes after a sentence", default=16, type=positive),
        "beams": Flag("beams of the tree of a beam search", default=4, type=positive),
        "checkpoint": CHECKPOINT,
    },
    example="jaxformer explore --workdir=runs/quickstart --input=lines.txt",
)

"""`jaxformer inspect`: a run as text for a terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxformer.config import Config, RecurrentConfig, StackConfig, overrides
from jaxformer.errors import ConfigError
from jaxformer.runtime import files, units
from jaxformer.train import results

ARRAY_GROUPS = {"params": "parameters", "opt_state": "optimizer", "variables": "other variables"}
"""Groups of a checkpoint's arrays, and their names in the text."""


def describe(path: str | Path) -> str:
    """A run as text: model, task, progress, checkpoints, results, and every parameter with its shape.

    No array is loaded: shapes come from a checkpoint's metadata, or from `parameters.txt` before there is one.

    Args:
      path: a workdir, or something below its `checkpoints`.

    Raises:
      ConfigError: there is no run at `path`.
    """
    from jaxformer import checkpoint  # imports jax

    path = Path(path).absolute()
    # `find_run` refuses a run without checkpoints, which has only begun.
    workdir, selection = (path, "") if (path / "config.json").is_file() else checkpoint.find_run(path)
    config = overrides.read(workdir)
    ranked = {part: checkpoint.list_ranked(workdir, part, config.checkpoint) for part in ("last", "best")}
    directory = _select(workdir / "checkpoints", selection, ranked)
    arrays: Mapping[tuple[str, ...], Any] = {}
    checkpoints = [_checkpoints(config, ranked), _average(config)]
    if directory is not None:
        try:
            arrays = checkpoint.array_metadata(directory)
            checkpoints.append(_sizes(directory, arrays))
        except checkpoint.Damaged as error:
            checkpoints.append(f"  {directory.parent.name}/{directory.name} cannot be read: {error}")
    sections = {
        "model": _align(_model(config)),
        "run": _align(_task(config) + _progress(workdir, config)),
        "checkpoints": "\n".join(filter(None, checkpoints)),
        "results": _align(_results(workdir, config)) or "  none yet; see jaxformer evaluate",
        "parameters": _parameters(arrays, workdir),
    }
    return f"{path}\n\n" + "\n\n".join(f"{name}\n{text}" for name, text in sections.items())


# --- config -----------------------------------------------------------------------------------------------------------


def _model(config: Config) -> list[tuple[str, str]]:
    model = config.model
    rows = []
    for name in ("encoder", "decoder", "recurrent_encoder", "recurrent_decoder"):
        part = getattr(model, name)
        if isinstance(part, RecurrentConfig):
            rows.append((name.replace("_", " "), _recurrent(part)))
        elif isinstance(part, StackConfig):
            rows.append((name, _stack(part)))
    if model.linear is not None:
        maps = "maps of trend and remainder" if model.linear.trend else "one map"
        own = " a channel" if model.linear.individual else ", shared by the channels"
        rows.append(("linear", f"{maps}{own}"))
    if model.series is not None:
        series = model.series
        stride = f" every {series.stride}" if series.stride else ""
        rows.append(("series", f"{series.channels} channels, patches of {series.patch} steps{stride}"))
    if model.multi_token is not None:
        depth = model.multi_token.depth
        rows.append(("multi-token", f"{depth} module{'s' * (depth > 1)} for tokens after the next, in training alone"))
    head = model.head
    outputs = {
        "classes": f"one of {head.classes} classes",
        "slots": f"for each token one of {head.classes} classes",
        "forecast": f"the next {head.horizon} time steps",
        "pair": f"a vector of either sentence ({head.pooling} pooling)",
    }
    text = outputs.get(head.kind, "tokens")
    text += ", tied to the embedding" if head.kind == "tokens" and head.tied else ""
    text += ", one table for both sides" if model.share_embeddings else ""
    return [*rows, ("head", text), ("compute", model.dtype)]


def _stack(part: StackConfig) -> str:
    attention, norm = part.attention, part.norm
    grouped = f" ({attention.kv_heads} for keys and values)" if attention.kv_heads else ""
    if attention.latent is not None:
        grouped = f" (keys and values from {attention.latent.rank} latent channels)"
    if attention.temperature is not None:
        grouped += f" (temperature by position from {attention.temperature.length} on)"
    if attention.value_residual is not None:
        grouped += " (values mixed with the first layer's)"
    ffn = "no feed-forward"
    if part.ffn is not None:
        gated = "gated " if part.ffn.gated else ""
        ffn = f"feed-forward {part.ffn.width or 4 * part.width} {gated}{part.ffn.activation}"
    if part.moe is not None:
        shared = f" and {part.moe.shared} shared" if part.moe.shared else ""
        ffn += f" x {part.moe.experts} experts of which a token passes {part.moe.top_k}{shared}"
    return (
        f"layers {part.layers}{' (shared)' if part.share_layers else ''}, width {part.width}, "
        f"heads {attention.heads}{grouped}, {ffn}, "
        f"{part.encoding.kind} positions, {norm.order} {norm.kind} norm"
        + ("" if part.embed.vocab is None else f", vocabulary {part.embed.vocab}")
    )


def _recurrent(part: RecurrentConfig) -> str:
    directions = " in both directions" if part.bidirectional else ""
    attention = "" if part.attention == "none" else f", {part.attention} attention"
    cell = f"{part.cell}{directions}{attention}"
    return f"layers {part.layers}, width {part.width}, {cell}, vocabulary {part.embed.vocab}"


def _task(config: Config) -> list[tuple[str, str]]:
    data, schedule, tokenizer = config.data, config.schedule, config.data.tokenizer
    batch = f"{data.tokens:,} tokens" if data.tokens else f"{data.batch} rows"
    source = " ".join(word for word in (data.source, data.name, data.dir) if word)
    rate = f"{schedule.kind} rate up to {schedule.peak:g} after {schedule.warmup:,} steps"
    return [
        ("task", config.task.name),
        ("data", f"{source}; {tokenizer.kind} tokens, at most {data.length}; batches of {batch}"),
        ("optimizer", f"{config.optimizer.name}, {rate}"),
    ]


def _average(config: Config) -> str:
    keep = config.checkpoint
    return f"  evaluated and decoded with the mean of the {keep.average_of} {keep.average}" if keep.average else ""


# --- progress and results ---------------------------------------------------------------------------------------------


def _progress(workdir: Path, config: Config) -> list[tuple[str, str]]:
    step, loss = _last_report(workdir / "metrics.jsonl")
    state = "finished" if results.finished_result(workdir) is not None else "not finished"
    report = f", train loss {loss:.4g}" if math.isfinite(loss) else ""
    return [("step", f"{step:,} of {config.train.steps:,}, {state}{report}")]


def _last_report(path: Path) -> tuple[int, float]:
    """Step and loss of the last complete training row; 0 and NaN without one."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in reversed(lines):
        row = files.parse_metrics_row(line)  # None: incomplete, since the run is writing it or was killed
        if row is not None and row["split"] == "train":
            loss = row.get("loss")
            return row["step"], float(loss) if isinstance(loss, (int, float)) else math.nan
    return 0, math.nan


def _results(workdir: Path, config: Config) -> list[tuple[str, str]]:
    rows = []
    for path in [workdir / results.FILE_NAME, *sorted(workdir.glob("eval-*.json"))]:
        if path.exists():
            try:
                values = files.read_json(path)
                mismatch = results.mismatch(values, config) if path.name == results.FILE_NAME else ""
                rows.append((path.name, f"out of date: {mismatch}" if mismatch else _values(values)))
            except ConfigError as error:
                rows.append((path.name, f"cannot be read: {error}"))
    return rows


def _values(values: Any) -> str:
    """The numbers of a dict, with their names."""
    if not isinstance(values, dict):
        return ""
    numbers = {k: v for k, v in values.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    return "  ".join(
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.5g}" for name, value in numbers.items()
    )


# --- checkpoints and parameters ---------------------------------------------------------------------------------------


def _select(directory: Path, selection: str, ranked: dict[str, list[Path]]) -> Path | None:
    """The checkpoint that `checkpoint.load_run` would use; None if there is none."""
    if selection and selection not in ranked:
        return directory / selection
    candidates = ranked[selection] if selection else [*ranked["best"], *ranked["last"]]
    return candidates[0] if candidates else None


def _checkpoints(config: Config, ranked: dict[str, list[Path]]) -> str:
    """One line per checkpoint with its validation measures: newest first, then best first."""
    from jaxformer import checkpoint

    keep = config.checkpoint
    best = f"best ({'least' if keep.mode == 'min' else 'most'} {keep.metric})"
    rows = []
    for part, title in (("last", "last"), ("best", best)):
        for directory in ranked[part]:
            values = _values(checkpoint.read_about(directory).get("values"))
            rows.append((title, f"step {int(directory.name):,}", values))
            title = ""
        if not ranked[part]:
            rows.append((title, "none", ""))
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    lines = (f"  {title:<{widths[0]}}  {step:<{widths[1]}}  {values}".rstrip() for title, step, values in rows)
    return "\n".join(lines)


def _sizes(directory: Path, arrays: Mapping[tuple[str, ...], Any]) -> str:
    """Total size of a checkpoint's arrays, by group."""
    sizes: dict[str, int] = {}
    for path, array in arrays.items():
        sizes[path[0]] = sizes.get(path[0], 0) + math.prod(array.shape) * array.dtype.itemsize
    words = [f"{name} {units.format_size(sizes[key])}" for key, name in ARRAY_GROUPS.items() if key in sizes]
    return f"  in {directory.parent.name}/{directory.name}: {', '.join(words)}" if words else ""


def _parameters(arrays: Mapping[tuple[str, ...], Any], workdir: Path) -> str:
    """Every parameter with its shape and size, grouped by part of the model."""
    shapes = [("/".join(path[1:]), tuple(array.shape)) for path, array in arrays.items() if path[0] == "params"]
    shapes = shapes or _listed_shapes(workdir / "parameters.txt")
    if not shapes:
        return "  not known: neither a checkpoint nor parameters.txt says"
    total = sum(math.prod(shape) for _, shape in shapes)
    lines = [("total", "", f"{total:,}", "")]
    for part in dict.fromkeys(name.split("/")[0] for name, _ in shapes):
        members = [(name, shape) for name, shape in shapes if name.split("/")[0] == part]
        size = sum(math.prod(shape) for _, shape in members)
        is_parameter = members[0][0] == part
        shape = _format_shape(members[0][1]) if is_parameter else ""
        lines.append((part, shape, f"{size:,}", f"{size / max(total, 1):.1%}"))
        for name, member_shape in () if is_parameter else members:
            count = f"{math.prod(member_shape):,}"
            lines.append((f"  {name.removeprefix(f'{part}/')}", _format_shape(member_shape), count, ""))
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    texts = (f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d:>{widths[3]}}" for a, b, c, d in lines)
    return "\n".join(text.rstrip() for text in texts)


def _listed_shapes(path: Path) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes in a `parameters.txt`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []
    matches = (re.match(r"(\S+)\s+(scalar|\d+(?: x \d+)*)(?:\s|$)", line) for line in lines)
    return [(m[1], () if m[2] == "scalar" else tuple(map(int, m[2].split(" x ")))) for m in matches if m]


def _format_shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _align(rows: Sequence[tuple[str, str]]) -> str:
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows)

"""What lies in a workdir, and what this machine and installation are, in words for a terminal."""

from __future__ import annotations

import functools
import importlib
import math
import os
import platform
import re
import shutil
import sys
import tempfile
import time
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any, Callable, Iterator

from jaxformer import __version__, compilation, files, overrides, places, preflight, results
from jaxformer.config import Config, ConfigError, RecurrentConfig, StackConfig
from jaxformer.preflight import Finding

# --- a run ------------------------------------------------------------------------------------------------------------


def describe(path: str | Path) -> str:
    """A run as text: model, task, how far it is, its checkpoints and results, and every parameter with its shape.

    No array is loaded: shapes come from a checkpoint's metadata, or from `parameters.txt` before there is one.

    Args:
      path: a workdir, or something below its `checkpoints`.

    Raises:
      ConfigError: there is no run at `path`.
    """
    from jaxformer import checkpoint

    path = Path(path).absolute()
    # A run that has just begun has no checkpoints yet, which is no reason to say nothing of it.
    workdir, chosen = (path, "") if (path / "config.json").is_file() else checkpoint.locate(path)
    config = overrides.read(workdir)
    found = {part: checkpoint.ranked(workdir, part, config.checkpoint) for part in ("last", "best")}
    source = _chosen(workdir / "checkpoints", chosen, found)
    arrays, broken = {}, ""
    if source:
        try:
            arrays = checkpoint.arrays(source)
        except checkpoint.Damaged as error:
            broken = f"  {source.parent.name}/{source.name} cannot be read: {error}"
    checkpoints = [_checkpoints(config, found, checkpoint.about), _used(config), _size(source, arrays), broken]
    sections = {
        "model": _rows(_model(config)),
        "run": _rows(_task(config) + _progress(workdir, config)),
        "checkpoints": "\n".join(filter(None, checkpoints)),
        "results": _rows(_results(workdir, config)) or "  none yet; see jaxformer evaluate",
        "parameters": _parameters(arrays, workdir),
    }
    return f"{path}\n\n" + "\n\n".join(f"{name}\n{text}" for name, text in sections.items())


def _chosen(folder: Path, chosen: str, found: dict[str, list[Path]]) -> Path | None:
    """The checkpoint that is meant, as `checkpoint.load` understands it; None where there is none."""
    if chosen and chosen not in found:
        return folder / chosen
    ranked = found[chosen] if chosen else [*found["best"], *found["last"]]
    return ranked[0] if ranked else None


def _model(config: Config) -> list[tuple[str, str]]:
    model, rows = config.model, []
    for name in ("encoder", "decoder", "recurrent_encoder", "recurrent_decoder"):
        part = getattr(model, name)
        if part is not None:
            rows.append(
                (name.replace("_", " "), _recurrent(part) if isinstance(part, RecurrentConfig) else _stack(part))
            )
    head = model.head
    decides = {"classes": "one of", "slots": "for each token one of"}.get(head.kind)
    words = "tokens" if decides is None else f"{decides} {head.classes} classes"
    words = f"a vector of either sentence ({head.pooling} pooling)" if head.kind == "pair" else words
    shared = ", tied to the embedding" if head.kind == "tokens" and head.tied else ""
    rows.append(("head", words + shared + (", one table for both sides" if model.share_embeddings else "")))
    return [*rows, ("compute", model.dtype)]


def _stack(part: StackConfig) -> str:
    attention, norm = part.attention, part.norm
    grouped = f" ({attention.kv_heads} for keys and values)" if attention.kv_heads else ""
    ffn = "no feed-forward"
    if part.ffn is not None:
        gated = "gated " if part.ffn.gated else ""
        ffn = f"feed-forward {part.ffn.width or 4 * part.width} {gated}{part.ffn.activation}"
    if part.moe is not None:
        shared = f" and {part.moe.shared} shared" if part.moe.shared else ""
        ffn += f" x {part.moe.experts} experts of which a token passes {part.moe.top_k}{shared}"
    return (
        f"layers {part.layers}, width {part.width}, heads {attention.heads}{grouped}, {ffn}, "
        f"{part.encoding.kind} positions, {norm.order} {norm.kind} norm, vocabulary {part.embed.vocab}"
    )


def _recurrent(part: RecurrentConfig) -> str:
    both = " in both directions" if part.bidirectional else ""
    attention = "" if part.attention == "none" else f", {part.attention} attention"
    return f"layers {part.layers}, width {part.width}, {part.cell}{both}{attention}, vocabulary {part.embed.vocab}"


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


def _progress(workdir: Path, config: Config) -> list[tuple[str, str]]:
    step, loss = _last_report(workdir / "metrics.jsonl")
    ended = ", finished" if results.finished(workdir) is not None else ", not finished"
    report = f", train loss {loss:.4g}" if math.isfinite(loss) else ""
    return [("step", f"{step:,} of {config.train.steps:,}{ended}{report}")]


def _last_report(path: Path) -> tuple[int, float]:
    """Step and loss of the last whole training row; 0 and NaN without one."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in reversed(lines):
        row = files.metrics_row(line)  # None: torn, since the run is writing it or was killed while it did
        if row is not None and row["split"] == "train":
            loss = row.get("loss")
            return row["step"], float(loss) if isinstance(loss, (int, float)) else math.nan
    return 0, math.nan


def _checkpoints(config: Config, found: dict[str, list[Path]], about: Callable[[Path], dict[str, Any]]) -> str:
    """A line a checkpoint with what it measured: the newest first, and the best first."""
    keep = config.checkpoint
    rows = []
    for part, title in (
        ("last", "last"),
        ("best", f"best ({'least' if keep.mode == 'min' else 'most'} {keep.metric})"),
    ):
        for directory in found[part]:
            rows.append((title, f"step {int(directory.name):,}", _values(about(directory).get("values"))))
            title = ""
        if not found[part]:
            rows.append((title, "none", ""))
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    lines = (f"  {title:<{widths[0]}}  {step:<{widths[1]}}  {values}".rstrip() for title, step, values in rows)
    return "\n".join(lines)


def _used(config: Config) -> str:
    keep = config.checkpoint
    return f"  evaluated and decoded with the mean of the {keep.average_of} {keep.average}" if keep.average else ""


def _size(source: Path | None, held: dict[tuple[str, ...], Any]) -> str:
    """What the arrays of a checkpoint amount to, by kind."""
    sizes: dict[str, int] = {}
    for path, each in held.items():
        sizes[path[0]] = sizes.get(path[0], 0) + math.prod(each.shape) * each.dtype.itemsize
    kinds = {"params": "parameters", "opt_state": "optimizer", "variables": "other variables"}
    words = [f"{name} {sizes[key] / 1e6:,.1f} MB" for key, name in kinds.items() if key in sizes]
    return f"  in {source.parent.name}/{source.name}: {', '.join(words)}" if words else ""


def _results(workdir: Path, config: Config) -> list[tuple[str, str]]:
    rows = []
    for path in [workdir / results.NAME, *sorted(workdir.glob("eval-*.json"))]:
        if path.exists():
            try:
                values = files.read_json(path)
                stale = results.problem(values, config) if path.name == results.NAME else ""
                rows.append((path.name, f"out of date: {stale}" if stale else _values(values)))
            except ConfigError as error:
                rows.append((path.name, f"cannot be read: {error}"))
    return rows


def _values(values: Any) -> str:
    if not isinstance(values, dict):
        return ""
    numbers = {k: v for k, v in values.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    return "  ".join(
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.5g}" for name, value in numbers.items()
    )


def _parameters(held: dict[tuple[str, ...], Any], workdir: Path) -> str:
    """Every parameter with its shape and size, under the part of the model that it belongs to."""
    rows = [("/".join(path[1:]), tuple(each.shape)) for path, each in held.items() if path[0] == "params"]
    rows = rows or _listed(workdir / "parameters.txt")
    if not rows:
        return "  not known: neither a checkpoint nor parameters.txt says"
    total = sum(math.prod(shape) for _, shape in rows)
    lines = [("total", "", f"{total:,}", "")]
    for part in dict.fromkeys(name.split("/")[0] for name, _ in rows):
        inside = [(name, shape) for name, shape in rows if name.split("/")[0] == part]
        size = sum(math.prod(shape) for _, shape in inside)
        alone = inside[0][1] if inside[0][0] == part else None
        lines.append((part, "" if alone is None else _shape(alone), f"{size:,}", f"{size / max(total, 1):.1%}"))
        if alone is None:
            below = ((name.removeprefix(f"{part}/"), shape) for name, shape in inside)
            lines += [(f"  {name}", _shape(shape), f"{math.prod(shape):,}", "") for name, shape in below]
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    texts = (f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d:>{widths[3]}}" for a, b, c, d in lines)
    return "\n".join(text.rstrip() for text in texts)


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _listed(path: Path) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes in a `parameters.txt`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []
    found = (re.match(r"(\S+)\s+(scalar|\d+(?: x \d+)*)(?:\s|$)", line) for line in lines)
    return [(m[1], () if m[2] == "scalar" else tuple(map(int, m[2].split(" x ")))) for m in found if m]


def _rows(rows: list[tuple[str, str]]) -> str:
    width = max((len(left) for left, _ in rows), default=0)
    return "\n".join(f"  {left:<{width}}  {right}" for left, right in rows)


# --- this machine -----------------------------------------------------------------------------------------------------


MODULES = {"orbax-checkpoint": "orbax.checkpoint"}
"""Distributions whose module is not named as they are."""

LITTLE, TOO_LITTLE = 5e9, 2e8  # bytes: a few checkpoints of a small model with its data; less than one of them


def doctor(config: Config | None = None, devices: int | None = None, seconds: float = 60.0) -> int:
    """Checks what an experiment depends on here and prints a line for each.

    Returns 0; 1 if something of the machine or the installation fails; 2 if only the config or its data does.

    In a run of several processes each checks itself and all compare; the first one prints everything, the others what
    is wrong with them alone.

    Args:
      config: a run to check the devices and data for.
      devices: how many there must be in all.
      seconds: that the processes wait for each other.
    """
    codes: list[int] = []
    silent = preflight.number() > 0
    for level, name, words, code in _findings(config, devices, seconds):
        if level == "FAIL" or not silent:
            print(f"{f'{preflight.number()}: ' if silent else ''}{level:<4}  {name:<20}  {words}", flush=True)
        codes += [code] if level == "FAIL" else []
    if not silent:
        print(f"{len(codes)} of these must be put right" if codes else "nothing wrong found")
    return min(codes, default=0)


def _findings(config: Config | None, devices: int | None, seconds: float) -> Iterator[Finding]:
    yield Finding("ok", "jaxformer", __version__)
    yield Finding("ok", "python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("ok", "platform", f"{platform.platform()}, {os.cpu_count()} cpus")
    for name, least in requirements().items():
        yield _package(name, least)
    yield _other_frameworks()
    broken = False
    for found in _devices():
        broken |= found.name == "devices" and found.level == "FAIL"
        yield found
    if not broken:
        yield from preflight.findings(config, devices, seconds)
    yield from _folders()


@functools.cache
def requirements() -> dict[str, str]:
    """What the library needs: distribution -> least version, "" for any. From its metadata, or its `pyproject.toml`."""
    try:
        lines = [line for line in metadata.requires("jaxformer") or [] if "extra ==" not in line]
    except metadata.PackageNotFoundError:  # run from a checkout without being installed
        path = Path(__file__).parents[1] / "pyproject.toml"
        lines = tomllib.loads(path.read_text(encoding="utf-8"))["project"]["dependencies"] if path.exists() else []
    found = (re.match(r"([\w.-]+)(?:\[[^]]*])?\s*(?:\(?>=\s*([\d.]+))?", line) for line in lines)
    return {match[1]: match[2] or "" for match in found if match}


def _package(name: str, least: str) -> Finding:
    remedy = "install it with: pip install -r requirements.lock"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding("FAIL", name, f"not installed; {remedy}")
    if _release(version) < _release(least):
        return Finding("FAIL", name, f"got {version}, expected at least {least}; {remedy}")
    try:
        importlib.import_module(MODULES.get(name, name.replace("-", "_")))
    except Exception as error:  # a broken package fails in its own ways, and each is what the user came to see
        return Finding("FAIL", name, f"{version}, but importing it: {_one_line(error)}; {remedy}")
    return Finding("ok", name, version + (f" (needs {least})" if least else ""))


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version, without trailing zeros: 1.10.0rc1 is (1, 10)."""
    numbers = [int(digits) for digits in re.findall(r"\d+", re.match(r"[\d.]*", version)[0])]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _other_frameworks() -> Finding:
    loaded = [name for name in ("tensorflow", "torch") if name in sys.modules]
    if loaded:
        return Finding(
            "warn", "frameworks", f"{' and '.join(loaded)} got imported, which jaxformer never does; find by whom"
        )
    return Finding("ok", "frameworks", "neither tensorflow nor torch got imported")


def _devices() -> Iterator[Finding]:
    try:
        import jax
        import numpy as np

        backend, kinds = jax.default_backend(), sorted({device.device_kind for device in jax.devices()})
        yield Finding("ok", "devices", f"{jax.device_count()} x {', '.join(kinds)} (backend {backend})")
        yield _idle_accelerator(backend)
        # Small whole numbers are exact in every precision that a matrix unit may choose.
        x = np.arange(64, dtype=np.float32).reshape(8, 8) % 5
        begun = time.monotonic()
        got = np.asarray(jax.jit(lambda x: x @ x)(x))
        seconds = time.monotonic() - begun
        right = np.array_equal(got, x @ x)
        wrong = f"got a wrong product from {backend}, expected the same as on the host; try another jaxlib or driver"
        done = f"compiled and computed in {seconds:.1f} s"
        yield Finding("ok" if right else "FAIL", "matrix product", done if right else wrong)
    except Exception as error:
        yield Finding(
            "FAIL", "devices", f"{_one_line(error)}; see the installation guide of jax, or set JAX_PLATFORMS=cpu"
        )


def _idle_accelerator(backend: str) -> Finding:
    """Whether the machine has an accelerator that jax was not installed for."""
    for device, extra in compilation.ACCELERATORS.items():
        if backend == "cpu" and os.path.exists(device):
            remedy = "unset JAX_PLATFORMS" if "JAX_PLATFORMS" in os.environ else f"install jaxformer[{extra}]"
            return Finding("warn", "accelerator", f"{device} exists but jax uses the cpu; {remedy}")
    return Finding("ok", "accelerator", "none idle")


def _folders() -> Iterator[Finding]:
    for name, folder in (("cache folder", places.cache()), ("current folder", Path.cwd())):
        existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
        free = shutil.disk_usage(existing).free
        words = f"{folder}, {free / 1e9:.1f} GB free"
        try:
            with tempfile.TemporaryFile(dir=existing):
                pass
        except OSError as error:
            remedy = "set JAXFORMER_CACHE to another folder" if name == "cache folder" else "go to another folder"
            yield Finding("FAIL", name, f"{existing} is not writable ({error.strerror or error}); {remedy}")
            continue
        level = "FAIL" if free < TOO_LITTLE else "warn" if free < LITTLE else "ok"
        yield Finding(level, name, words + ("" if level == "ok" else "; checkpoints and data need more: make room"))


def _one_line(error: Exception) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:200]}"

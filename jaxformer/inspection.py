"""What lies in a workdir, and what this machine and installation are, in words."""

from __future__ import annotations

import importlib
import json
import os
import platform
import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxformer import __version__
from jaxformer.config import Config

PACKAGES = (
    "jax",
    "flax",
    "optax",
    "orbax.checkpoint",
    "grain",
    "tensorflow_datasets",
    "ml_collections",
    "tokenizers",
    "sentencepiece",
    "num2words",
    "sacrebleu",
    "sacremoses",
    "matplotlib",
    "tensorboardX",
)


# --- a run ------------------------------------------------------------------------------------------------------------


def describe(path: str | Path) -> str:
    """A run as text: its config's main lines, every parameter with its shape, its checkpoints, its last figures.

    Raises:
      ConfigError: there is no run at `path`, or its checkpoint cannot be read.
    """
    from jaxformer import checkpoint

    model = checkpoint.load(path)
    workdir, _ = checkpoint.locate(Path(path).absolute())
    sections = [_summary(model.config), _parameters(model.params), _checkpoints(workdir), _figures(workdir)]
    return f"{path}\n\n" + "\n\n".join(text for text in sections if text)


def _summary(config: Config) -> str:
    model, rows = config.model, []
    for name in ("encoder", "decoder", "recurrent_encoder", "recurrent_decoder"):
        part = getattr(model, name)
        if part is not None:
            about = f"layers {part.layers}, width {part.width}, vocabulary {part.embed.vocab}"
            if hasattr(part, "cell"):
                rows.append((name, f"{about}, {part.cell}, attention {part.attention}"))
            else:
                heads = f"heads {part.attention.heads}"
                rows.append((name, f"{about}, {heads}, {part.encoding.kind} positions, {part.norm.order} norm"))
    rows += [
        ("head", model.head.kind),
        ("task", config.task.name),
        ("data", " ".join(word for word in (config.data.source, config.data.name, config.data.dir) if word)),
        ("train", f"{config.train.steps} steps, {config.optimizer.name}, {config.schedule.kind}, {model.dtype}"),
    ]
    return _rows(rows)


def _parameters(params: Any) -> str:
    import jax

    leaves = jax.tree_util.tree_leaves_with_path(params)
    rows = [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf.shape, leaf.size) for path, leaf in leaves]
    total = sum(size for _, _, size in rows)
    shown = [(name, f"{'x'.join(map(str, shape)) or 'scalar':>16}  {size:>14,}") for name, shape, size in rows]
    return f"parameters: {total:,}\n" + _rows(shown)


def _checkpoints(workdir: Path) -> str:
    rows = []
    for part in ("last", "best"):
        folder = workdir / "checkpoints" / part
        steps = sorted(int(p.name) for p in folder.iterdir() if p.name.isdecimal()) if folder.is_dir() else []
        rows.append((f"checkpoints/{part}", ", ".join(f"step {step:,}" for step in steps) or "none"))
    return _rows(rows)


def _figures(workdir: Path) -> str:
    rows = []
    for path in [workdir / "result.json", *sorted(workdir.glob("eval-*.json"))]:
        if path.exists():
            values = json.loads(path.read_text(encoding="utf-8"))
            shown = [f"{name} {value:.5g}" for name, value in values.items() if isinstance(value, (int, float))]
            rows.append((path.name, ", ".join(shown)))
    return _rows(rows)


def _rows(rows: list[tuple[str, str]]) -> str:
    width = max((len(left) for left, _ in rows), default=0)
    return "\n".join(f"  {left:<{width}}  {right}" for left, right in rows)


# --- this machine -----------------------------------------------------------------------------------------------------


def doctor() -> int:
    """Prints what an experiment depends on here. Returns 0, or 2 if something is missing."""
    rows = [("jaxformer", __version__), ("python", f"{platform.python_version()} ({sys.executable})")]
    rows += [("platform", platform.platform()), ("cpus", str(os.cpu_count()))]
    wrong = [] if sys.version_info >= (3, 11) else ["python: got less than 3.11, expected 3.11 or newer"]
    for name in PACKAGES:
        try:
            importlib.import_module(name)
            rows.append((name, metadata.version(name.replace(".", "-").replace("_", "-"))))
        except Exception as error:  # a broken package fails in its own ways, and each is what the user came to see
            wrong.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())}; install requirements.lock")
    rows += _devices(wrong) + _folders(wrong)
    print(_rows(rows))
    print("\n".join(f"wrong: {line}" for line in wrong) or "nothing wrong found")
    return 2 if wrong else 0


def _devices(wrong: list[str]) -> list[tuple[str, str]]:
    try:
        import jax
        import jax.numpy as jnp

        kinds = sorted({device.device_kind for device in jax.devices()})
        value = float(jax.jit(lambda x: (x @ x).sum())(jnp.ones((8, 8))))
        if value != 512.0:
            wrong.append(f"devices: got {value} for a product of ones, expected 512; this backend computes wrongly")
        return [("devices", f"{jax.device_count()} x {', '.join(kinds)} ({jax.default_backend()})")]
    except Exception as error:
        wrong.append(f"devices: {type(error).__name__}: {' '.join(str(error).split())}; see the jax installation guide")
        return []


def _folders(wrong: list[str]) -> list[tuple[str, str]]:
    cache = Path(os.environ.get("JAXFORMER_CACHE") or Path.home() / ".cache" / "jaxformer")
    rows = []
    for name, folder in (("cache", cache), ("here", Path.cwd())):
        existing = next(p for p in (folder, *folder.parents) if p.exists())
        try:
            with tempfile.TemporaryFile(dir=existing):
                pass
        except OSError as error:
            wrong.append(f"{name}: got {existing} ({error.strerror}), expected a writable folder; check permissions")
        rows.append((name, f"{folder} ({shutil.disk_usage(existing).free / 1e9:.1f} GB free)"))
    return rows

"""Writes what must not change unseen: `python tests/goldens/write.py configs|losses`.

    configs/<recipe>[-<variant>].json   the resolved config of every recipe
    losses/jax-<version>-<set>.json     training losses of tiny runs, exact on this version of jax and instruction set
    checkpoint-<format>/                a run of the version that introduced this format; never written again

`checkpoint` writes the last of these, for a format that has none yet. `losses` writes those of this processor, or with
`XLA_FLAGS=--xla_cpu_max_isa=AVX2 ONEDNN_MAX_CPU_ISA=AVX2` those of a lower instruction set.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

GOLDENS = Path(__file__).resolve().parent
ROOT = GOLDENS.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

import conftest  # noqa: E402, F401  the devices and compiler settings that the tests run with
import recipes  # noqa: E402


def goldens() -> dict[str, str]:
    """Golden file of a resolved config -> what --config takes."""
    return {path.stem + (f"-{variant}" if variant else ""): words for path, variant, words in recipes.each()}


def config(recipe: str) -> str:
    from jaxformer.config import overrides

    return overrides.to_json(overrides.freeze(overrides.load(recipe)))


def losses(workdir: Path) -> list[float]:
    """The training losses of a run, exact: each a mean over the steps since the one before."""
    rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if row["split"] == "train"]


INSTRUCTION_SETS = {
    "sse4_2": "sse4_2",
    "avx": "avx",
    "avx2": "avx2",
    "avx512": "avx512vl",
    "avx512_vnni": "avx512_vnni",
    "avx512_bf16": "avx512_bf16",
    "amx": "amx_tile",
    "amx_fp16": "amx_fp16",
}
"""Levels of vector instructions by the names that `--xla_cpu_max_isa` takes, and the flag of /proc/cpuinfo that each
adds. Every level needs those before it."""


def instruction_set(cpu_flags: Collection[str], xla_flags: str = "") -> str:
    """The level of vector instructions that XLA compiles for, which decides how sums are rounded; "" if none is known.

    Args:
      cpu_flags: of the processor.
      xla_flags: content of XLA_FLAGS, whose last `--xla_cpu_max_isa` caps the level.
    """
    held = [*itertools.takewhile(lambda name: INSTRUCTION_SETS[name] in cpu_flags, INSTRUCTION_SETS)]
    caps = re.findall(r"--xla_cpu_max_isa=(\w+)", xla_flags)
    levels = list(INSTRUCTION_SETS)
    if caps and caps[-1].lower() in levels:
        held = held[: levels.index(caps[-1].lower()) + 1]
    return held[-1] if held else ""


def cpu_info() -> str:
    """Linux's description of the processors; "" elsewhere."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def cpu_flags(info: str) -> list[str]:
    """Instructions of the first processor, as Linux names them."""
    return next((line.split(":")[1].split() for line in info.splitlines() if line.startswith("flags")), [])


def processor(info: str, level: str) -> str:
    """The kind of the first processor of a text of /proc/cpuinfo: "GenuineIntel 6/207 avx512_bf16", or `level` alone.

    Args:
      info: the text, "" where there is none.
      level: its own level of vector instructions.
    """
    first = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", info.split("\n\n")[0], re.MULTILINE))
    names = ("vendor_id", "cpu family", "model")
    return "{} {}/{} ".format(*map(first.get, names)) + level if first.keys() >= set(names) else level


def losses_file(version: str, level: str) -> Path:
    """Golden losses of a version of jax compiled for `level`: {kind of processor: {run: losses}}.

    Neither the level nor a cap (`--xla_cpu_max_isa`) says how all sums are rounded: libraries that look at the
    processor by themselves, and the sizes of its caches, add in another order. So kinds of processors are kept apart;
    the two that are named by a level alone are of unknown models.
    """
    return GOLDENS / "losses" / f"jax-{version}-{level}.json"


def digests(tree: Any) -> dict[str, str]:
    """A checksum of every array of a tree, by path."""
    import jax
    import numpy as np

    from jaxformer.types import leaf_path

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(leaf_path(keys)): hashlib.sha256(np.asarray(x).tobytes()).hexdigest() for keys, x in leaves}


def checkpoint() -> None:
    import jax
    import tiny_runs

    from jaxformer.checkpoint import load, manifest
    from jaxformer.config import MeshConfig
    from jaxformer.parallel import mesh as meshes
    from jaxformer.train import loop

    target = GOLDENS / f"checkpoint-{manifest.FORMAT}"
    if target.exists():
        raise SystemExit(f"{target}: is there, and is never written again")
    # One device and one moment: most of a small checkpoint is what Orbax says of every array's layout.
    make = meshes.make
    loop.meshes.make = lambda config: make(MeshConfig(data=1), jax.devices()[:1])
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # the config then names no folder of this machine
        tiny_runs.files(Path("files"))
        edits = dict(train__steps=2, train__ema=0.9, checkpoint__keep_best=0, optimizer__name="sgd")
        config = tiny_runs.config("packed", Path("files"), **edits, data__tokenizer__kind="character")
        loop.train(config, "run")
        step = Path("run", "checkpoints", "last", "2")
        (step / "state" / "commit_success.txt").write_text("committed\n")  # in place of a folder of this machine
        manifest.write(step)
        for name in ("config.json", "jaxformer_tokenizer.json", "checkpoints/last/2"):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if Path("run", name).is_dir() else shutil.copy
            copy(Path("run", name), target / name)
    (target / "digests.json").write_text(json.dumps(digests(load(target).params), indent=1) + "\n")


def main(what: str) -> None:
    if what == "checkpoint":
        checkpoint()
    elif what == "configs":
        shutil.rmtree(GOLDENS / "configs", ignore_errors=True)
        (GOLDENS / "configs").mkdir()
        for name, recipe in goldens().items():
            (GOLDENS / "configs" / f"{name}.json").write_text(config(recipe), encoding="utf-8")
    elif what == "losses":
        import pytest

        # The runs are those of the tests; they write their losses down when asked to.
        tests = str(ROOT / "tests" / "train" / "test_continuation.py")
        (GOLDENS / "losses").mkdir(exist_ok=True)
        os.environ["GOLDEN_LOSSES"] = "write"
        raise SystemExit(pytest.main(["-q", "-p", "no:xdist", tests, "-k", "losses", "--override-ini=addopts="]))
    else:
        raise SystemExit(f"got {what!r}, expected configs, losses or checkpoint")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")

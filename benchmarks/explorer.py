"""The attention explorer on a large random decoder: seconds and peak memory of `jaxformer explore`.

    python benchmarks/explorer.py [--recipe=configs/llama.py:1b] [--dtype=float32] [--folder=DIR] [--output=FILE.jsonl]

Makes a run of the recipe's model with random parameters (float32, so four bytes each on the disk) and a tokenizer of
bytes, and calls the command for two sentences of 26 bytes, between which it patches the residual stream. What is
measured is a process of its own, with programs compiled anew: wall and processor seconds of the whole command, and its
peak resident set, in which the parameters count. --folder keeps the run, and takes one that is there already.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

SENTENCES = ("The cup was full of water.", "The cup was free of water.")
"""As long as each other in bytes, so that activations can be patched between them."""


def make_run(folder: Path, recipe: str, dtype: str) -> None:
    """Writes a workdir of the recipe's model with normal random parameters, drawn one array at a time."""
    import jax
    import jax.numpy as jnp

    from jaxformer import checkpoint
    from jaxformer.config import TokenizerConfig, overrides
    from jaxformer.data.tokenizers import Tokenizers
    from jaxformer.models import build
    from jaxformer.types import TrainState

    config = overrides.parse([f"--config={recipe}", f"--config.model.dtype={dtype}"])
    tokenizer = TokenizerConfig(kind="byte", multiple=config.data.tokenizer.vocab)  # as many rows as the recipe has
    data, decoder = dataclasses.replace(config.data, tokenizer=tokenizer), config.model.decoder
    tokenizers = Tokenizers.build(data, [], ("text",))
    embed = dataclasses.replace(decoder.embed, vocab=tokenizers.target.vocab)
    model = dataclasses.replace(config.model, decoder=dataclasses.replace(decoder, embed=embed))
    config = dataclasses.replace(config, model=model, data=data)
    rng = np.random.default_rng(0)

    def draw(path: Any, shape: Any) -> Any:
        values = rng.standard_normal(shape.shape, np.float32)
        values *= 0.02
        return jnp.asarray(values + 1 if "norm" in str(path) else values)

    shapes = checkpoint.param_shapes(config, build.build(config.model))
    params = jax.tree.map_with_path(draw, shapes)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoints = checkpoint.Checkpoints(folder, dataclasses.replace(config.checkpoint, keep_best=0))
    checkpoints.save(TrainState(jnp.zeros((), jnp.int32), params, (), jax.random.key(0), {}), {}, {})
    checkpoints.close()
    tokenizers.save(folder)
    (folder / "config.json").write_text(overrides.to_json(config), encoding="utf-8")


def measure(folder: Path, sentences: Path, page: Path) -> dict[str, float]:
    """Seconds and peak memory of one call of the command, without kept programs.

    Raises:
      RuntimeError: the command fails.
    """
    command = [
        sys.executable, "-m", "jaxformer", "explore",
        f"--workdir={folder}", f"--input={sentences}", f"--output={page}",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_ENABLE_COMPILATION_CACHE": "0", "JAX_PLATFORMS": "cpu"}
    begun = time.perf_counter()
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}: got exit code {process.returncode}, expected 0")
    return {
        "seconds": time.perf_counter() - begun,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "peak_gib": used.ru_maxrss / 2**20,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="configs/llama.py:1b")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--folder", default="")
    parser.add_argument("--output", default="")
    arguments = parser.parse_args(argv)
    from jaxformer.config import overrides
    from jaxformer.models import build

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.folder or f"{temporary}/run").absolute()
        if not (folder / "config.json").exists():
            make_run(folder, arguments.recipe, arguments.dtype)
        model = overrides.read(folder).model
        sentences, page = Path(temporary) / "sentences.txt", Path(temporary) / "page.html"
        sentences.write_text("\n".join(SENTENCES) + "\n", encoding="utf-8")
        row: dict[str, Any] = {
            "parameters": build.count_params(build.shapes(build.build(model))["params"]),
            "dtype": model.dtype,
            **measure(folder, sentences, page),
            "page_mb": page.stat().st_size / 1e6,
            "machine": f"{os.cpu_count()} {platform.machine()} cores",
        }
    print(
        f"{row['parameters'] / 1e9:.2f} B parameters, {row['dtype']}: {row['seconds']:.0f} s "
        f"({row['cpu_seconds']:.0f} s of processors), at most {row['peak_gib']:.2f} GiB, page {row['page_mb']:.1f} MB"
    )
    if arguments.output:
        with Path(arguments.output).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Attention kernels side by side: time and temporary memory of forward and backward against the length.

    python benchmarks/attention.py [--lengths=256,512,1024] [--rounds=5] [--output=FILE.jsonl]

The kernels take turns within a round, so that a machine that slows down slows all of them; figures are medians over the
rounds, and the ratio is the median of the rounds' own ratios. One JSON object a row is appended to `--output`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer import registry
from jaxformer.config import AttentionConfig
from jaxformer.nn import kernels, masks
from jaxformer.parallel import mesh as meshes

PEER = "dense"


def compiled(name: str, length: int, heads: int, head_width: int):
    """The compiled gradient of a causal attention of one sequence, and its arguments."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, length, heads, head_width)), jnp.float32) for _ in range(3))
    slots = masks.slots_from_segments(jnp.ones((1, length), jnp.int32))
    mask, config = masks.Mask(slots, slots, causal=True, same_slots=True), AttentionConfig(heads=heads)

    def loss(q, k, v):
        return jnp.square(kernels.get(name).apply(q * head_width**-0.5, k, v, mask, None, None, config)).sum()

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, k, v).compile(), (q, k, v)


def lacking(name: str, length: int, heads: int, head_width: int) -> str | None:
    """What a kernel lacks on this machine, one device of it: such kernels are left out."""
    if name in ("ring", "ulysses"):
        return "a mesh that divides sequences"
    site = kernels.CallSite(meshes.platform(), "float32", heads, heads, head_width, length, length, causal=True)
    return kernels.get(name).missing(site)


def seconds(function, arguments) -> float:
    begun = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - begun


def measure(length: int, rounds: int, heads: int = 4, head_width: int = 32) -> list[dict[str, Any]]:
    """One row a kernel: `milliseconds`, `temporary_mb`, and `ratio`, the peer's time divided by its own."""
    names = [
        name for name in registry.names("jaxformer.nn.kernels") if lacking(name, length, heads, head_width) is None
    ]
    made = {name: compiled(name, length, heads, head_width) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(rounds + 1):
        for name in names if round_ % 2 else reversed(names):
            taken = seconds(*made[name])
            if round_:  # the first round warms up
                times[name].append(taken)
    return [
        {
            "kernel": name,
            "length": length,
            "milliseconds": 1e3 * statistics.median(times[name]),
            "temporary_mb": made[name][0].memory_analysis().temp_size_in_bytes / 1e6,
            "ratio": statistics.median(peer / own for peer, own in zip(times[PEER], times[name], strict=True)),
            "jax": jax.__version__,
            "device": jax.devices()[0].device_kind,
        }
        for name in names
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="256,512,1024")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", default="")
    arguments = parser.parse_args(argv)
    print(f"{'kernel':<12}{'length':>8}{'ms':>10}{'temp MB':>10}{'speed against ' + PEER:>22}")
    for length in map(int, arguments.lengths.split(",")):
        for row in measure(length, arguments.rounds):
            print(
                f"{row['kernel']:<12}{row['length']:>8}{row['milliseconds']:>10.2f}{row['temporary_mb']:>10.2f}"
                f"{row['ratio']:>21.2f}x"
            )
            if arguments.output:
                with open(arguments.output, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

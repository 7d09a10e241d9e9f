"""Attention kernels side by side: time and temporary memory of forward and backward against the length.

    python benchmarks/attention.py [--lengths=256,512,1024] [--rounds=5] [--output=FILE.jsonl]
    python benchmarks/attention.py --rows=4 --heads=6 --head-width=64 [--dtype=bfloat16] [--dropout=0.1]

The kernels take turns within a round, so that a machine that slows down slows all of them; figures are medians over the
rounds, and the ratio is the median of the rounds' own ratios. Processor time is the least of all rounds: other
processes lengthen it less than they do wall time. One JSON object a row is appended to `--output`.
"""

from __future__ import annotations

import argparse
import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Case:
    """Shape and kind of the attention: `rows` causal texts of `length` slots."""

    length: int
    rows: int = 1
    heads: int = 4
    head_width: int = 32
    dtype: str = "float32"
    dropout: float = 0.0


def compiled(name: str, case: Case):
    """The compiled gradient of the attention, and its arguments."""
    rng, shape = np.random.default_rng(0), (case.rows, case.length, case.heads, case.head_width)
    q, k, v = (jnp.asarray(rng.normal(size=shape), case.dtype) for _ in range(3))
    slots = masks.slots_from_segments(jnp.ones((case.rows, case.length), jnp.int32))
    config = AttentionConfig(heads=case.heads)

    # The mask and the key are arguments, as in a run: the compiler must not know them.
    def loss(q, k, v, slots, key):
        mask = masks.Mask(slots, slots, causal=True, same_slots=True)
        dropout = kernels.AttentionDropout(case.dropout, key) if case.dropout else None
        o = kernels.get(name).apply(q * case.head_width**-0.5, k, v, mask, None, dropout, config)
        return jnp.square(o.astype(jnp.float32)).sum()

    arguments = (q, k, v, slots, jax.random.key(0))
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arguments).compile(), arguments


def lacking(name: str, case: Case) -> str | None:
    """What a kernel lacks on this machine, one device of it: such kernels are left out."""
    if name in ("ring", "ulysses"):
        return "a mesh that divides sequences"
    site = kernels.CallSite(
        meshes.platform(), case.dtype, case.heads, case.heads, case.head_width, case.length, case.length, causal=True
    )
    kernel = kernels.get(name)
    return kernel.missing(site) or kernel.needs(AttentionConfig(heads=case.heads), False, case.dropout > 0)


def seconds(function, arguments) -> tuple[float, float]:
    """Wall and processor seconds of a call."""
    begun, used = time.perf_counter(), time.process_time()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - begun, time.process_time() - used


def measure(case: Case, rounds: int) -> list[dict[str, Any]]:
    """One row a kernel: times, `temporary_mb`, and `ratio`, the peer's wall time divided by its own."""
    names = [name for name in registry.names("jaxformer.nn.kernels") if lacking(name, case) is None]
    made = {name: compiled(name, case) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    used: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(rounds + 1):
        for name in names if round_ % 2 else reversed(names):
            wall, processor = seconds(*made[name])
            if round_:  # the first round warms up
                times[name].append(wall)
                used[name].append(processor)
    return [
        {
            "kernel": name,
            **dataclasses.asdict(case),
            "processor_milliseconds": 1e3 * min(used[name]),
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
    for field in dataclasses.fields(Case)[1:]:
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(flag, type=type(field.default), default=field.default, dest=field.name)
    parser.add_argument("--output", default="")
    arguments = parser.parse_args(argv)
    shape = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(Case)[1:]}
    print(f"{'kernel':<12}{'length':>8}{'ms':>10}{'processor ms':>14}{'temp MB':>10}{'speed against ' + PEER:>22}")
    for length in map(int, arguments.lengths.split(",")):
        for row in measure(Case(length, **shape), arguments.rounds):
            print(
                f"{row['kernel']:<12}{row['length']:>8}{row['milliseconds']:>10.2f}"
                f"{row['processor_milliseconds']:>14.2f}{row['temporary_mb']:>10.2f}{row['ratio']:>21.2f}x"
            )
            if arguments.output:
                with open(arguments.output, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

"""Trains a small mixture of experts on many meshes of eight simulated devices; the losses must be those of one.

    python benchmarks/moe_meshes.py [--meshes=expert4,expert2-fsdp2-tensor2] [--steps=5] [--output=rows.jsonl]

For each mesh and dispatch: the largest relative difference of the losses, the share of an expert kernel's bytes that
one device holds, the share of dropped assignments, and the megabytes that each kind of collective of the compiled step
returns on one device.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
from flax import linen as nn

from jaxformer import tasks
from jaxformer.config import (
    AttentionConfig,
    Config,
    EmbedConfig,
    EncodingConfig,
    FeedForwardConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    ScheduleConfig,
    StackConfig,
    TaskConfig,
)  # fmt: skip
from jaxformer.models import build
from jaxformer.parallel import mesh as meshes
from jaxformer.train import optim, step
from jaxformer.types import Batch, Slots, Stream

MESHES = "expert4,expert8,expert4-fsdp2,expert4-tensor2,expert2-fsdp2-tensor2,fsdp8"
COLLECTIVES = ("all-gather", "reduce-scatter", "all-to-all", "all-reduce", "collective-permute")
ROWS, LENGTH, VOCAB = 16, 24, 64


def config_of(capacity: float | None) -> Config:
    stack = StackConfig(
        layers=2,
        width=32,
        embed=EmbedConfig(vocab=VOCAB),
        encoding=EncodingConfig(kind="rope"),
        attention=AttentionConfig(heads=2),
        ffn=FeedForwardConfig(width=64, activation="silu", gated=True, dropout=0.1),
        moe=MoEConfig(8, 2, capacity=capacity, shared=1),
        dropout=0.1,
        unroll=1,
    )
    return Config(
        model=ModelConfig(decoder=stack),
        task=TaskConfig(name="language_modelling"),
        optimizer=OptimizerConfig(name="sgd"),
        schedule=ScheduleConfig(kind="constant", peak=0.1, warmup=1),
    )


def batches(steps: int) -> list[Batch]:
    rng, found = np.random.default_rng(0), []
    for _ in range(steps):
        tokens = rng.integers(1, VOCAB, (ROWS, LENGTH + 1)).astype(np.int32)
        segment = (np.arange(LENGTH) < rng.integers(LENGTH // 2, LENGTH + 1, ROWS)[:, None]).astype(np.int32)
        position = np.arange(LENGTH, dtype=np.int32) * segment
        stream = Stream(tokens[:, :-1], Slots(position, segment))
        found.append(Batch(None, stream, tokens[:, 1:], segment.astype(np.float32)))
    return found


def train(config: Config, mesh: jax.sharding.Mesh, steps: int) -> tuple[np.ndarray, float, float, str]:
    """Losses, share of an expert kernel on one device, share of dropped assignments, and the compiled step as text."""
    module = build.build(config.model)
    schedule = optim.schedule(config.schedule, steps, config.model.decoder.width)
    with jax.set_mesh(mesh):
        optimizer = optim.optimizer(config.optimizer, schedule, nn.meta.unbox(build.shapes(module))["params"])
        state = step.create(config, module, optimizer, mesh)
        update = step.make(config, module, tasks.get(config.task.name), optimizer, schedule, mesh)
        losses, text = [], ""
        for batch in batches(steps):
            placed = step.place(batch, mesh)
            if not text:
                update = update.lower(state, placed).compile()
                text = update.as_text()
            state, sums = update(state, placed)
            losses.append(float(sums["loss"][0] / sums["loss"][1]))
    kernel = state.params["decoder"]["blocks"]["ffn"]["in"]["kernel"]
    share = kernel.addressable_shards[0].data.nbytes / kernel.nbytes
    return np.array(losses), share, float(sums["dropped"][0] / sums["dropped"][1]), text


def moved(text: str) -> dict[str, float]:
    """Megabytes that each kind of collective returns; a collective in the scanned layers counts once."""
    found = {}
    for name in COLLECTIVES:
        shapes = "".join(re.findall(rf"= (.*?) {name}(?:-start)?\(", text))
        sizes = re.findall(r"(?:f32|s32|u32|pred)\[([\d,]*)\]", shapes)
        found[name] = round(sum(4 * math.prod(int(n) for n in size.split(",") if n) for size in sizes) / 1e6, 3)
    return found


def mesh_of(name: str) -> MeshConfig:
    given = {match[1]: int(match[2]) for match in re.finditer(r"([a-z]+)(\d+)", name)}
    return MeshConfig(**{"data": 8 // math.prod(given.values()), **given})


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--meshes", default=MESHES)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--output", default="")
    arguments = parser.parse_args(argv)
    print(f"{'dispatch':<10}{'mesh':<24}{'loss difference':>16}{'held':>8}{'dropped':>9}  MB returned by collectives")
    for capacity in (None, 1.0):
        config = config_of(capacity)
        alone = train(config, meshes.make(MeshConfig(), jax.devices()[:1]), arguments.steps)[0]
        for name in arguments.meshes.split(","):
            losses, held, dropped, text = train(config, meshes.make(mesh_of(name)), arguments.steps)
            row = {
                "dispatch": "dropless" if capacity is None else "capacity",
                "mesh": name,
                "difference": float(np.abs(losses / alone - 1).max()),
                "held": held,
                "dropped": dropped,
                "megabytes": moved(text),
            }
            words = "  ".join(f"{key} {value}" for key, value in row["megabytes"].items() if value)
            print(f"{row['dispatch']:<10}{name:<24}{row['difference']:>16.1e}{held:>8.4f}{dropped:>9.3f}  {words}")
            if arguments.output:
                with open(arguments.output, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

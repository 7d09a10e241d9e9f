"""Runs of one program against the same runs one after the other: time of a step, and how far the results differ.

    python benchmarks/lanes.py --lanes=8

Runs differ in seed, peak rate, weight decay, dropout and label smoothing. For three sizes of a decoder the table has
the time in which all runs make a step, one after the other and as one program, in alternating rounds (the fastest of
each counts), their ratio, and the largest difference of a parameter after the steps, relative to the largest parameter.
Compilation is not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer import tasks
from jaxformer.config import (
    Config,
    EmbedConfig,
    EncodingConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
)
from jaxformer.train import in_memory, lanes
from jaxformer.train import step as steps
from jaxformer.types import TrainState

SIZES = {"small": (2, 32, 8, 16), "medium": (2, 64, 16, 32), "large": (4, 128, 32, 64)}
"""Layers, width, rows and tokens of a row."""
VOCAB = 256


def config_of(layers: int, width: int, lane: int) -> Config:
    """The config of run number `lane`."""
    rate = 0.05 + 0.01 * lane
    stack = in_memory.small_stack(
        layers, width, EmbedConfig(vocab=VOCAB), dropout=rate, encoding=EncodingConfig(kind="rope")
    )
    optimizer = OptimizerConfig(weight_decay=0.01 * (lane + 1))
    schedule = ScheduleConfig(peak=1e-3 * (1 + lane / 4), warmup=5)
    config = in_memory.small_config(ModelConfig(decoder=stack), "language_modelling", 1000, schedule, optimizer)
    task, train = dataclasses.replace(config.task, label_smoothing=rate), dataclasses.replace(config.train, seed=lane)
    return dataclasses.replace(config, mesh=MeshConfig(data=1), task=task, train=train)


def measure(name: str, count: int, rounds: int, per_round: int) -> dict:
    """A row of the table."""
    layers, width, rows, length = SIZES[name]
    configs = [config_of(layers, width, lane) for lane in range(count)]
    rng = np.random.default_rng(0)
    batches = [[in_memory.continuation(rng.integers(0, VOCAB, (rows, length + 1))) for _ in configs] for _ in range(4)]
    # A run alone has its rates as constants of its program. One such program is timed, and stands for all.
    trainers = {lane: in_memory.Trainer(configs[lane]) for lane in (0, count - 1)}
    mesh = trainers[0].mesh
    with jax.set_mesh(mesh):
        together = lanes.LaneStep(configs, lanes.differing_rates(configs), tasks.get("language_modelling"), mesh)
        begin = [trainers[0]._init_state(jnp.uint32(lane)) for lane in range(count)]
        states = together.stack(begin)
        alone = {lane: begin[lane] for lane in trainers}
        best = {"alone": float("inf"), "together": float("inf")}

        def train_together(states: TrainState) -> TrainState:
            for step in range(per_round):
                states, _ = together(states, batches[step % 4], [True] * count)
            return jax.block_until_ready(states)

        def train_alone(lane: int) -> None:
            for step in range(per_round):
                batch = steps.shard_batch(batches[step % 4][lane], mesh)
                alone[lane], _ = trainers[lane]._train_step(alone[lane], batch)
            jax.block_until_ready(alone[lane])

        states = train_together(states)  # compiles
        for lane in trainers:
            train_alone(lane)
        difference = max(_difference(together.take(states, lane).params, alone[lane].params) for lane in alone)
        for _ in range(rounds):
            times = [time.perf_counter()]
            states = train_together(states)
            times.append(time.perf_counter())
            train_alone(0)
            times.append(time.perf_counter())
            best["together"] = min(best["together"], (times[1] - times[0]) / per_round)
            best["alone"] = min(best["alone"], (times[2] - times[1]) / per_round * count)
    return {
        "size": name,
        "layers": layers,
        "width": width,
        "rows": rows,
        "length": length,
        "lanes": count,
        "alone_ms": 1e3 * best["alone"],
        "together_ms": 1e3 * best["together"],
        "ratio": best["alone"] / best["together"],
        "difference": difference,
        "device": jax.devices()[0].device_kind,
    }


def _difference(one: dict, other: dict) -> float:
    pairs = list(zip(jax.tree.leaves(one), jax.tree.leaves(other)))
    largest = max(float(jnp.max(jnp.abs(x))) for _, x in pairs)
    return max(float(jnp.max(jnp.abs(x - y))) for x, y in pairs) / largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", type=int, default=8, help="number of runs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="steps of a round")
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--output", default="", help="file that gets the rows as JSON lines")
    arguments = parser.parse_args()
    print("| size | layers | width | rows x tokens | runs | one by one, ms | together, ms | ratio | difference |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for name in arguments.sizes.split(","):
        row = measure(name, arguments.lanes, arguments.rounds, arguments.steps)
        print(
            f"| {name} | {row['layers']} | {row['width']} | {row['rows']} x {row['length']} | {row['lanes']} | "
            f"{row['alone_ms']:.1f} | {row['together_ms']:.1f} | {row['ratio']:.2f} | {row['difference']:.1e} |",
            flush=True,
        )
        if arguments.output:
            with Path(arguments.output).open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

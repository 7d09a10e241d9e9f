"""Every family on every mesh of a table: the same run as on one device, with the memory really divided.

    python benchmarks/meshes.py [--family=decoder,...] [--mesh=data8,...] [--steps=5] [--output=FILE.jsonl]
    python benchmarks/meshes.py --page      writes docs/measurements/meshes.md from benchmarks/results/meshes.jsonl

Eight simulated devices, float32. A row holds if the losses of the training steps equal one device's to a relative 2e-5,
the initial parameters are the same (to the bit on jax 0.10; 0.12 compiles its normal generator otherwise for shards,
which can turn the last one), parameters and optimizer state take a device's share of the bytes, greedy
decoding gives the same tokens, and the compiler had to rematerialise nothing on its way ("involuntary full
rematerialization" in its log). What makes no sense is refused with one line, which is printed in its place.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault(  # the older code generator compiles in half the time; later versions no longer have it
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8"
    + " --xla_cpu_use_fusion_emitters=false" * metadata.version("jaxlib").startswith("0.10."),
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

sys.path.insert(0, str(Path(__file__).parent))

import jax
import numpy as np
import pages
from flax import linen as nn

from jaxformer import tasks
from jaxformer.config import (
    AttentionConfig,
    Config,
    ConfigError,
    DataConfig,
    DecodeConfig,
    EmbedConfig,
    EncodingConfig,
    FeedForwardConfig,
    HeadConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    RecurrentConfig,
    ScheduleConfig,
    StackConfig,
    TaskConfig,
    TrainConfig,
)
from jaxformer.config.checks import check
from jaxformer.decode.compiled import Vocabulary
from jaxformer.decode.runner import Runner
from jaxformer.models import build
from jaxformer.parallel import mesh as meshes
from jaxformer.train import optim, step
from jaxformer.types import Batch, PyTree, Slots, Stream, TrainState

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "meshes.jsonl"
PAGE = ROOT / "docs" / "measurements" / "meshes.md"
VOCAB, WIDTH, LENGTH, ROWS = 32, 32, 16, 16
TOLERANCE, SLACK = 2e-5, 0.17
COMPLAINT = "nvoluntary full rematerialization"

MESHES: dict[str, MeshConfig] = {
    "data8": MeshConfig(data=8),
    "zero1_data8": MeshConfig(data=8, zero1=True),
    "fsdp8": MeshConfig(data=1, fsdp=8),
    "tensor8": MeshConfig(data=1, tensor=8),
    "fsdp2_tensor4": MeshConfig(data=1, fsdp=2, tensor=4),
    "data2_fsdp2_tensor2": MeshConfig(data=2, fsdp=2, tensor=2),
    "data2_fsdp4": MeshConfig(data=2, fsdp=4),
    "pipeline2": MeshConfig(stage=2, data=4),
    "pipeline4": MeshConfig(stage=4, data=2),
    "pipeline2_fsdp2_tensor2": MeshConfig(stage=2, data=1, fsdp=2, tensor=2),
    "pipeline4_tensor2": MeshConfig(stage=4, data=1, tensor=2),
    "expert4": MeshConfig(data=2, expert=4),
    "expert2_fsdp2_tensor2": MeshConfig(data=1, expert=2, fsdp=2, tensor=2),
    "context2": MeshConfig(data=4, context=2),
    "context4_tensor2": MeshConfig(data=1, context=4, tensor=2),
    "context8": MeshConfig(data=1, context=8),
    "ulysses2": MeshConfig(data=4, context=2),
    "ulysses4_tensor2": MeshConfig(data=1, context=4, tensor=2),
    "ulysses8": MeshConfig(data=1, context=8),
}
"""Sequences that are divided take the ring, or where the name says so heads for slots and back."""


def stack(**edits: Any) -> StackConfig:
    base = StackConfig(
        layers=4, width=WIDTH, embed=EmbedConfig(vocab=VOCAB), encoding=EncodingConfig(kind="rope"),
        attention=AttentionConfig(heads=8), ffn=FeedForwardConfig(width=2 * WIDTH), unroll=1,
    )  # fmt: skip
    return dataclasses.replace(base, **edits)


def recurrent() -> ModelConfig:
    side = RecurrentConfig(width=WIDTH, embed=EmbedConfig(vocab=VOCAB))
    decoder = dataclasses.replace(side, attention="dot")
    return ModelConfig(recurrent_encoder=side, recurrent_decoder=decoder, share_embeddings=True)


def mixture(capacity: float | None) -> ModelConfig:
    # A pipeline sees the router's losses one microbatch at a time, so they are left out of a table of equal losses.
    moe = MoEConfig(8, 2, capacity=capacity, shared=1, balance_loss=0.0, z_loss=0.0)
    return ModelConfig(decoder=stack(moe=moe))


FAMILIES: dict[str, tuple[str, Callable[[], ModelConfig]]] = {
    "encoder": ("masked_lm", lambda: ModelConfig(encoder=stack(), head=HeadConfig())),
    "decoder": (
        "language_modelling",
        lambda: ModelConfig(decoder=stack(attention=AttentionConfig(heads=8, kv_heads=4))),
    ),
    "seq2seq": (
        "translation",
        lambda: ModelConfig(encoder=stack(encoding=EncodingConfig(kind="t5")), decoder=stack(), share_embeddings=True),
    ),
    "moe": ("language_modelling", lambda: mixture(None)),
    "moe_capacity": ("language_modelling", lambda: mixture(1.0)),
    "recurrent": ("translation", recurrent),
}
"""Family -> its task and its model. A new family is a new row."""


def config_of(family: str, mesh: MeshConfig, kernel: str = "auto") -> Config:
    task, make = FAMILIES[family]
    model = make()
    for side in ("encoder", "decoder"):
        found = getattr(model, side)
        if found is not None:
            attention = dataclasses.replace(found.attention, kernel=kernel)
            model = dataclasses.replace(model, **{side: dataclasses.replace(found, attention=attention)})
    return Config(
        model=model,
        task=TaskConfig(name=task),
        data=DataConfig(batch=ROWS, length=LENGTH),
        # Not Adam: a key's bias has no gradient but rounding error, which Adam would blow up to the full rate.
        optimizer=OptimizerConfig(name="sgd"),
        schedule=ScheduleConfig(kind="constant", peak=0.3, warmup=1),
        train=TrainConfig(steps=10),
        mesh=mesh,
    )


def batch_of(config: Config, seed: int) -> Batch:
    """Ragged rows, the second half of them packed with two segments."""
    rng = np.random.default_rng(seed)

    def stream() -> Stream:
        lengths = rng.integers(LENGTH // 2, LENGTH + 1, size=(ROWS, 1))
        segment = (np.arange(LENGTH)[None] < lengths).astype(np.int32)
        segment[ROWS // 2 :] *= 1 + (np.arange(LENGTH)[None] >= LENGTH // 4)
        position = np.where(segment == 2, np.arange(LENGTH)[None] - LENGTH // 4, np.arange(LENGTH)[None])
        tokens = rng.integers(1, VOCAB, size=segment.shape)
        return Stream(np.int32(tokens * (segment > 0)), Slots(np.int32(position * (segment > 0)), segment))

    parts = config.model.parts
    source = stream() if any("encoder" in part for part in parts) else None
    target = stream() if any("decoder" in part for part in parts) else None
    side = target or source
    labels = rng.integers(1, VOCAB, size=side.tokens.shape).astype(np.int32)
    return Batch(source, target, labels, (side.slots.segment > 0).astype(np.float32))


class Outcome(NamedTuple):
    """What a mesh must not change, and what it must: bytes of parameters and of optimizer state on one device."""

    losses: np.ndarray
    initial: list[np.ndarray]
    tokens: list[np.ndarray]
    held: dict[str, int]


def run(config: Config, mesh: jax.sharding.Mesh, steps: int) -> Outcome:
    module = build.build(config.model)
    schedule = optim.schedule(config.schedule, config.train.steps, WIDTH)
    with jax.set_mesh(mesh):
        optimizer = optim.optimizer(config.optimizer, schedule, nn.meta.unbox(build.shapes(module))["params"])
        state = step.init_state(config, module, optimizer, mesh)
        initial = jax.tree.map(np.asarray, jax.tree.leaves(state.params))
        held = bytes_held(state)
        update = step.make_train_step(config, module, tasks.get(config.task.name), optimizer, schedule, mesh)
        losses, balanced = [], build.uses_causal_ring(config.model, LENGTH)
        for seed in range(steps):
            state, sums = update(state, step.shard_batch(batch_of(config, seed), mesh, balanced))
            losses.append(float(sums["loss"][0] / sums["loss"][1]))
        if bytes_held(state) != held:
            raise AssertionError(f"a step moved the state: {bytes_held(state)} bytes a device after {held}")
        return Outcome(np.array(losses), initial, decoded(config, module, state.params), held)


def bytes_held(state: TrainState) -> dict[str, int]:
    """Bytes on the first device."""

    def of(tree: PyTree) -> int:
        return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))

    return {"params": of(state.params), "opt_state": of(state.opt_state)}


def decoded(config: Config, module: nn.Module, params: PyTree) -> list[np.ndarray]:
    """The tokens of eight prompts, greedily continued; nothing for a model that does not decode."""
    if not any("decoder" in part for part in config.model.parts):
        return []
    rng = np.random.default_rng(0)
    prompts = [{"target": rng.integers(1, VOCAB, 3).astype(np.int32)} for _ in range(8)]
    if len(config.model.parts) == 2:
        prompts = [{"source": rng.integers(1, VOCAB, 5).astype(np.int32)} for _ in range(8)]
    runner = Runner(module, {"params": params}, Vocabulary(eos=(0,), pad=0, start=1))
    found = runner.generate(prompts, DecodeConfig(max_length=6, batch=8))
    return [hypotheses[0].tokens for hypotheses in found]


def expected(config: Config, mesh: jax.sharding.Mesh) -> dict[str, float]:
    """Share of one device's bytes that a device may hold at most: what the mesh divides, and something for the small
    parts (norms, biases, key heads fewer than the axis) that stay whole."""
    shape = mesh.shape
    mixture = any(stack is not None and stack.moe is not None for stack in (config.model.encoder, config.model.decoder))
    ways = math.prod(shape[axis] for axis in ("stage", "fsdp", "tensor", "expert")[: 4 if mixture else 3])
    state = ways * (shape["data"] if config.mesh.zero1 else 1)
    return {part: 1 / n + (SLACK if n > 1 else 0.0) for part, n in (("params", ways), ("opt_state", state))}


def compare(family: str, name: str, reference: Outcome, steps: int) -> dict[str, Any]:
    """One row of the table: what was measured, and whether all of it holds."""
    config = config_of(family, MESHES[name], "ulysses" if name.startswith("ulysses") else "auto")
    row: dict[str, Any] = {"family": family, "mesh": name}
    try:
        check(config)
        mesh = meshes.make(config.mesh)
        begun = time.perf_counter()
        with Stderr() as said:
            outcome = run(config, mesh, steps)
    except ConfigError as error:
        return row | {"holds": True, "refused": str(error)}
    share = {name: outcome.held[name] / max(reference.held[name], 1) for name in outcome.held}
    most = expected(config, mesh)
    last = 0.0 if jax.__version_info__ < (0, 12) else 2.0**-23
    same = [np.abs(a - b).max() <= last for a, b in zip(outcome.initial, reference.initial, strict=True)]
    tokens = [np.array_equal(a, b) for a, b in zip(outcome.tokens, reference.tokens, strict=True)]
    difference = float(np.max(np.abs(outcome.losses / reference.losses - 1)))
    row |= {
        "difference": difference,
        "initial": bool(all(same)),
        "decoding": all(tokens),
        "share": share,
        "rematerialised": COMPLAINT in said.text,
        "losses": outcome.losses.tolist(),
        "seconds": round(time.perf_counter() - begun, 1),
        "jax": jax.__version__,
    }
    divided = all(share[part] <= most[part] for part in share)
    good = difference <= TOLERANCE and all(same) and all(tokens) and divided and not row["rematerialised"]
    return row | {"holds": good}


class Stderr:
    """What the process, the compiler's C++ included, writes to standard error meanwhile; it is shown afterwards."""

    def __enter__(self) -> Stderr:
        self.file, self.kept = tempfile.TemporaryFile(), os.dup(2)
        sys.stderr.flush()
        os.dup2(self.file.fileno(), 2)
        return self

    def __exit__(self, *error: object) -> None:
        sys.stderr.flush()
        os.dup2(self.kept, 2)
        os.close(self.kept)
        self.file.seek(0)
        self.text = self.file.read().decode(errors="replace")
        self.file.close()
        sys.stderr.write(self.text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", default=",".join(FAMILIES))
    parser.add_argument("--mesh", default=",".join(MESHES))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--output", default="")
    parser.add_argument("--page", action="store_true", help="only write the page, from the rows that are there")
    arguments = parser.parse_args(argv)
    if arguments.page:
        rows = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
        pages.put(PAGE, "meshes", pages.table(("mesh", *FAMILIES), table(rows)))
        return 0 if all(row["holds"] for row in rows) else 1
    print(
        f"{'family':<13}{'mesh':<25}{'loss differs':>13}{'params':>8}{'state':>7}{'init':>6}{'decode':>8}{'holds':>7}"
    )
    wrong = 0
    for family in arguments.family.split(","):
        alone = MeshConfig(data=1)
        reference = run(config_of(family, alone), meshes.make(alone, jax.devices()[:1]), arguments.steps)
        for name in arguments.mesh.split(","):
            row = compare(family, name, reference, arguments.steps)
            wrong += not row["holds"]
            print(f"{family:<13}{name:<25}" + line(row), flush=True)
            if arguments.output:
                with open(arguments.output, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    return 1 if wrong else 0


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """A line for each mesh, with the newest row of each family: the losses' difference and the share of parameters."""
    newest = {(row["mesh"], row["family"]): row for row in rows}

    def cell(row: dict[str, Any] | None) -> str:
        if row is None or "refused" in row:
            return "" if row is None else "refused"
        return f"{row['difference']:.0e}, {row['share']['params']:.2f}" + ("" if row["holds"] else " FAILS")

    return [[name.replace("_", " x "), *(cell(newest.get((name, family))) for family in FAMILIES)] for name in MESHES]


def line(row: dict[str, Any]) -> str:
    if "refused" in row:
        return f"refused: {row['refused']}"
    words = {True: "same", False: "DIFFERS"}
    share = row["share"]
    text = f"{row['difference']:>13.1e}{share['params']:>8.3f}{share['opt_state']:>7.3f}{words[row['initial']]:>6}"
    text += f"{words[row['decoding']]:>8}{'yes' if row['holds'] else 'NO':>7}"
    return text + ("   REMATERIALISED" if row["rematerialised"] else "")


if __name__ == "__main__":
    sys.exit(main())

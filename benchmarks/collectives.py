"""Bytes that one training step sends between devices, as compiled, against the least that its parallelism needs.

    python benchmarks/collectives.py [--layers=4] [--width=128] [--length=64] [--rows=16] [--output=FILE.jsonl]
    TPU_SKIP_MDS_QUERY=1 python benchmarks/collectives.py --topology=v5e:2x4        (the TPU's compiler; extra libtpu)
    python benchmarks/collectives.py --page         writes docs/measurements/meshes.md from results/collectives.jsonl

Nothing is run: the step of a decoder is compiled for eight simulated devices and its HLO read.
Textbook minimum, in bytes that one of n devices sends, f = (n - 1) / n, parameters and activations in 4 bytes:

    data     2 f * parameters                    one all-reduce of the gradient
    fsdp     3 f * parameters                    gathered forward and backward, gradient scattered (ZeRO-3, section 7)
    tensor   2 f * (4 L + 2) * B T D             an all-reduce for each half layer and direction, embedding and head
             + 2 f * 3 B T                       (Megatron, section 3); the loss's maximum, sum and label
    ring     2 f * parameters                    keys and values go round forward and backward, and so do their
             + 6 f * L B T D                     gradients (Liu et al. 2023, section 3)
    ulysses  2 f * parameters                    queries, keys, values and outputs change places, in both directions
             + 8 f / n * L B T D                 (Jacobs et al. 2023, section 3)

What fsdp leaves whole (norms, biases) adds its gradient's all-reduce. The CPU's program sends more than the TPU's: it
gathers kernels in float32, where the TPU multiplies, and so gathers, bfloat16.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

sys.path.insert(0, str(Path(__file__).parent))

import jax
import numpy as np
import pages
from flax import linen as nn
from jax.experimental import topologies

from jaxformer import tasks
from jaxformer.config import (
    AttentionConfig,
    Config,
    EmbedConfig,
    FeedForwardConfig,
    MeshConfig,
    ModelConfig,
    StackConfig,
    TaskConfig,
)
from jaxformer.models import build
from jaxformer.parallel import mesh as meshes
from jaxformer.parallel import rules
from jaxformer.parallel.collectives import Collective, collectives
from jaxformer.train import optim, step
from jaxformer.types import Batch, PyTree, Slots, Stream

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "collectives.jsonl"
PAGE = ROOT / "docs" / "measurements" / "meshes.md"
BYTES = 4


def config_of(mesh: MeshConfig, kernel: str, layers: int, width: int) -> Config:
    stack = StackConfig(
        layers=layers, width=width, embed=EmbedConfig(vocab=4 * width),
        attention=AttentionConfig(heads=8, kernel=kernel),
        ffn=FeedForwardConfig(width=4 * width), unroll=1,
    )  # fmt: skip
    return Config(model=ModelConfig(decoder=stack), task=TaskConfig(name="language_modelling"), mesh=mesh)


def compiled(config: Config, mesh: jax.sharding.Mesh, rows: int, length: int) -> jax.stages.Compiled:
    """The training step, compiled for a batch of `rows` of `length` tokens and never run."""
    module = build.build(config.model)
    schedule = optim.schedule(config.schedule, config.train.steps, config.model.decoder.width)
    with jax.set_mesh(mesh):
        optimizer = optim.optimizer(config.optimizer, schedule, nn.meta.unbox(build.shapes(module))["params"])
        state = step.abstract_state(config, module, optimizer, mesh)
        update = step.make_train_step(config, module, tasks.get(config.task.name), optimizer, schedule, mesh)

        def abstract(dtype: type) -> jax.ShapeDtypeStruct:
            shape = (rows, length)
            return jax.ShapeDtypeStruct(shape, dtype, sharding=rules.batch_sharding(mesh, shape))

        ids = abstract(np.int32)
        batch = Batch(None, Stream(ids, Slots(ids, ids)), ids, abstract(np.float32))
        return update.lower(state, batch).compile()


def minimum(config: Config, mesh: jax.sharding.Mesh, rows: int, length: int) -> float:
    """The textbook's bytes, for a mesh with one axis."""
    axis, n = next((name, size) for name, size in mesh.shape.items() if size > 1)
    boxed = build.shapes(build.build(config.model))["params"]
    split, kept = _parameters(boxed, mesh)
    share, stack = (n - 1) / n, config.model.decoder
    activation = rows * length * stack.width
    if axis == "context":
        each = 6 if stack.attention.kernel == "ring" else 8 / n
        return BYTES * share * (2 * (split + kept) + each * stack.layers * activation)
    if axis == "tensor":
        return BYTES * 2 * share * ((4 * stack.layers + 2) * activation + 3 * rows * length)
    return BYTES * share * (3 * split + 2 * kept)


def _parameters(boxed: PyTree, mesh: jax.sharding.Mesh) -> tuple[int, int]:
    """How many parameters the mesh divides, and how many it leaves whole."""
    layout, counts = rules.shardings(boxed, mesh), [0, 0]
    for leaf, place in zip(jax.tree.leaves(nn.meta.unbox(boxed)), jax.tree.leaves(layout), strict=True):
        counts[place.is_fully_replicated] += math.prod(leaf.shape)
    return counts[0], counts[1]


MESHES = {
    "data 8": (MeshConfig(data=8), "auto"),
    "fsdp 8": (MeshConfig(data=1, fsdp=8), "auto"),
    "tensor 8": (MeshConfig(data=1, tensor=8), "auto"),
    "ring 8": (MeshConfig(data=1, context=8), "ring"),
    "ulysses 8": (MeshConfig(data=1, context=8), "ulysses"),
}


def measure(
    name: str, layers: int, width: int, length: int, rows: int, topology: str
) -> tuple[dict[str, Any], list[Collective]]:
    config = config_of(*MESHES[name], layers, width)
    devices = topologies.get_topology_desc(topology, platform="tpu").devices if topology else jax.devices()
    mesh = meshes.make(config.mesh, list(devices))
    found = collectives(compiled(config, mesh, rows, length).as_text())
    kinds: collections.Counter = collections.Counter()
    for each in found:
        kinds[each.kind] += each.bytes
    sent, least = sum(kinds.values()), minimum(config, mesh, rows, length)
    row = {
        "mesh": name,
        "topology": topology or "cpu",
        "sent": sent,
        "minimum": least,
        "ratio": sent / least,
        "kinds": dict(kinds),
    }
    return row | {"layers": layers, "width": width, "length": length, "rows": rows, "jax": jax.__version__}, found


COLUMNS = ("mesh", "minimum", "CPU's program", "ratio", "TPU's program (v5e:2x4)", "ratio")


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """A line for each mesh, with its newest row of either compiler."""
    newest = {(row["mesh"], row["topology"]): row for row in rows}
    lines = []
    for name in MESHES:
        found = [newest[name, topology] for topology in ("cpu", "v5e:2x4")]
        cells = [cell for row in found for cell in (f"{row['sent'] / 1e6:.2f} MB", f"{row['ratio']:.2f}")]
        lines.append([name, f"{found[0]['minimum'] / 1e6:.2f} MB", *cells])
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 4), ("width", 128), ("length", 64), ("rows", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--mesh", default=",".join(MESHES))
    parser.add_argument("--topology", default="", help="of a TPU slice, as v5e:2x4; the default is simulated devices")
    parser.add_argument("--list", action="store_true", help="every collective, the largest first")
    parser.add_argument("--output", default="")
    parser.add_argument("--page", action="store_true", help="only write the page, from the rows that are there")
    arguments = parser.parse_args(argv)
    if arguments.page:
        rows = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
        pages.put(PAGE, "collectives", pages.table(COLUMNS, table(rows)))
        return 0
    print(f"{'mesh':<12}{'sent MB':>10}{'minimum MB':>12}{'ratio':>8}   by kind, MB")
    for name in arguments.mesh.split(","):
        row, found = measure(
            name, arguments.layers, arguments.width, arguments.length, arguments.rows, arguments.topology
        )
        kinds = ", ".join(f"{kind} {size / 1e6:.3f}" for kind, size in row["kinds"].items())
        print(f"{name:<12}{row['sent'] / 1e6:>10.3f}{row['minimum'] / 1e6:>12.3f}{row['ratio']:>8.2f}   {kinds}")
        if arguments.list:
            for each in sorted(found, key=lambda each: -each.bytes):
                print(
                    f"    {each.kind:<20}{each.bytes / 1e6:>10.4f}  {each.executions} x {each.payload:.0f}  {each.name}"
                )
        if arguments.output:
            with open(arguments.output, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Pipeline parallelism: each part of the mesh's `stage` axis keeps some of the layers, and activations travel.

GPipe's schedule (Huang et al. 2019): the rows of a batch are cut into M microbatches, which follow each other through
the S stages. In tick t stage s works on microbatch t - s and then hands its output to stage s + 1 (one `ppermute`);
the backward pass is the transpose of the same loop. Of the M + S - 1 ticks each stage works in M, so the share

    (S - 1) / (M + S - 1)

of the time is the bubble: 43 % with as many microbatches as 4 stages, 16 % with four times as many.

`shard_map` is manual over `stage` alone. Inside, the other axes of the mesh mean what they mean everywhere, so each
stage may itself be split by data, FSDP and tensor parallelism. Outside the layers (embedding, head, loss) `stage` is
one more axis over which rows are divided, so that no stage waits there for another.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Float

from jaxformer.parallel.rules import constrain
from jaxformer.types import Array, PyTree

AXIS = "stage"


def stages() -> int:
    """Stages of the mesh that is entered; 1 without a mesh, and inside a stage."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[AXIS] == AxisType.Manual:
        return 1
    return mesh.shape[AXIS]


def divides(rows: int, layers: int, parts: int) -> bool:
    """Whether `rows` of a batch make `parts` microbatches on the mesh that is entered, and its stages divide both."""
    return layers % stages() == 0 and parts % stages() == 0 and rows % (_shards() * parts) == 0


def _shards() -> int:
    """Over how many devices the rows of one microbatch are divided."""
    shape = jax.sharding.get_abstract_mesh().shape
    return shape["data"] * shape["fsdp"] * shape["expert"]


def pipeline(
    prepare: Callable[[PyTree, PyTree], PyTree],
    layer: Callable[[PyTree, Array, PyTree, Array, Array], tuple[Array, PyTree]],
    weights: PyTree,
    x: Float[Array, "B T D"],
    rows: PyTree,
    shared: PyTree,
    parts: int,
) -> tuple[Float[Array, "B T D"], PyTree]:
    """What a scan of `layer` over `weights` makes of `x`, and what the layers say; `divides` must hold.

    Args:
      prepare: `(rows, shared) -> context` of one microbatch; run once a tick.
      layer: `(weights of one layer, x, context, number of the layer, number of the microbatch) -> (x, said)`. What is
        said, any pytree of numbers, comes back as `[L, ...]`: the mean over the microbatches.
      weights: `[L, ...]`, the layers divided over `stage`.
      rows: arrays `[B, ...]` that belong to the rows of `x`; every stage gets them whole.
      shared: what belongs to no row. Closures must not capture arrays: the gradient passes through the arguments.
      parts: M, microbatches.
    """
    shards, count, layers = _shards(), stages(), jax.tree.leaves(weights)[0].shape[0]

    def split(x: Array) -> Array:
        # Device shard outermost and microbatch next: each device's rows of a microbatch are then rows that it has.
        x = x.reshape(shards, parts, -1, *x.shape[1:])
        return constrain(x, "batch", "microbatches", *(None,) * (x.ndim - 2))

    def whole(x: Array) -> Array:
        """`[M, B / M, ...]` of this stage's share of the microbatches."""
        # Not all_gather: its transpose would be a reduction, which XLA cannot compile on a CPU in bfloat16 where it is
        # written out, as here. This one's is the same exchange, and a sum on each device. Equally many bytes travel.
        x = jnp.broadcast_to(x[:, None], (shards, count, *x.shape[1:]))
        x = jnp.moveaxis(jax.lax.all_to_all(x, AXIS, split_axis=1, concat_axis=1), (1, 2), (0, 1))
        return x.reshape(parts, -1, *x.shape[4:])

    def stage(weights: PyTree, numbers: Array, x: Array, rows: PyTree, shared: PyTree) -> tuple[Array, PyTree]:
        place = numbers[0] // (layers // count)
        x, rows = whole(x), jax.tree.map(whole, rows)

        def tick(received: Array, time: Array) -> tuple[Array, tuple[Array, PyTree]]:
            part = jnp.clip(time - place, 0, parts - 1)  # in the bubble: any microbatch, whose result nobody reads
            context = prepare(jax.tree.map(lambda x: x[part], rows), shared)
            step = lambda x, each: layer(each[0], x, context, each[1], part)  # noqa: E731
            y, said = jax.lax.scan(step, jnp.where(place == 0, x[part], received), (weights, numbers))
            said = jax.tree.map(lambda x: jnp.where(part == time - place, x, 0) / parts, said)
            return jax.lax.ppermute(y, AXIS, [(i, i + 1) for i in range(count - 1)]), (y, said)

        _, (made, said) = jax.lax.scan(tick, jnp.zeros_like(x[0]), jnp.arange(parts + count - 1))
        # The last stage's outputs are the result: each stage gets its share of them.
        made = made[count - 1 :].reshape(count, parts // count, *x.shape[1:])
        made = jax.lax.all_to_all(made, AXIS, split_axis=0, concat_axis=0)[-1]
        made = jnp.moveaxis(made.reshape(parts // count, shards, -1, *made.shape[2:]), 0, 1)
        return made, jax.tree.map(lambda x: x.sum(0), said)

    over, cut = PartitionSpec(AXIS), PartitionSpec(None, AXIS)
    run = jax.shard_map(
        stage,
        in_specs=(over, over, cut, cut, PartitionSpec()),
        out_specs=(cut, over),
        axis_names={AXIS},
        check_vma=False,  # layers start loops of their own from constants, which would each have to be marked
    )
    y, said = run(weights, jnp.arange(layers), split(x), jax.tree.map(split, rows), shared)
    return constrain(y.reshape(x.shape), "batch", "length", "act_embed"), said

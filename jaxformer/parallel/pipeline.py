"""Pipeline parallelism: the layers are divided over the mesh axis `stage`, and activations move between stages.

The schedule is GPipe's (Huang et al. 2019, https://arxiv.org/abs/1811.06965). The rows of a batch are split into M
microbatches, which follow each other through the S stages. In tick t, stage s computes microbatch t - s and sends its
output to stage s + 1 (one `ppermute`). The backward pass is the transpose of the same loop. Each stage computes in M of
the M + S - 1 ticks. The rest, (S - 1) / (M + S - 1) of the time, is the bubble: 43 % for M = S = 4, 16 % for M = 16.

The `shard_map` is manual over `stage` only. Inside, the other mesh axes keep their meaning, so each stage may itself be
divided by data, FSDP and tensor parallelism. Outside the layers (embedding, head, loss), `stage` divides rows.
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
    """Number of stages of the entered mesh; 1 without a mesh (or in `jax.pmap`), and inside a stage."""
    mesh = jax.sharding.get_abstract_mesh()
    if dict(zip(mesh.axis_names, mesh.axis_types, strict=True)).get(AXIS, AxisType.Manual) == AxisType.Manual:
        return 1
    return mesh.shape[AXIS]


def can_pipeline(rows: int, layers: int, microbatches: int) -> bool:
    """True if `rows` rows divide into this many microbatches, and the stages divide both layers and microbatches."""
    return layers % stages() == 0 and microbatches % stages() == 0 and rows % (_row_shards() * microbatches) == 0


def _row_shards() -> int:
    """Number of devices that the rows of one microbatch are divided over."""
    shape = jax.sharding.get_abstract_mesh().shape
    return shape["data"] * shape["fsdp"] * shape["expert"]


def pipeline(
    prepare: Callable[[PyTree, PyTree], PyTree],
    layer: Callable[[PyTree, Array, PyTree, Array, Array], tuple[Array, PyTree]],
    weights: PyTree,
    x: Float[Array, "B T D"],
    rows: PyTree,
    shared: PyTree,
    microbatches: int,
) -> tuple[Float[Array, "B T D"], PyTree]:
    """Runs `layer` over `weights` as a pipeline; equals a scan over the layers. Requires `can_pipeline`.

    Args:
      prepare: `(rows, shared) -> context` of one microbatch; called once per tick.
      layer: `(weights of one layer, x, context, layer index, microbatch index) -> (x, aux)`; `aux` is any pytree of
        numbers.
      weights: weights of all layers, `[L, ...]`, divided over `stage`.
      x: input of the first layer.
      rows: arrays `[B, ...]` that belong to the rows of `x`; every stage gets all of them.
      shared: arrays that belong to no row. Gradients pass only through these arguments, so closures must not capture
        arrays.
      microbatches: M.

    Returns:
      The output of the last layer, and the layers' `aux` as `[L, ...]`, averaged over the microbatches.
    """
    shards, count, layers = _row_shards(), stages(), jax.tree.leaves(weights)[0].shape[0]

    def split(x: Array) -> Array:
        # Device shard outermost, microbatch next: so each device already holds its rows of every microbatch.
        x = x.reshape(shards, microbatches, -1, *x.shape[1:])
        return constrain(x, "batch", "microbatches", *(None,) * (x.ndim - 2))

    def gather_rows(x: Array) -> Array:
        """All microbatches `[M, B / M, ...]`, from this stage's part of them."""
        # Not all_gather: its transpose is a reduction, which XLA cannot compile for a CPU in bfloat16 inside a
        # shard_map. The transpose of all_to_all is an all_to_all and a local sum, with the same number of bytes.
        x = jnp.broadcast_to(x[:, None], (shards, count, *x.shape[1:]))
        x = jnp.moveaxis(jax.lax.all_to_all(x, AXIS, split_axis=1, concat_axis=1), (1, 2), (0, 1))
        return x.reshape(microbatches, -1, *x.shape[4:])

    def stage(weights: PyTree, numbers: Array, x: Array, rows: PyTree, shared: PyTree) -> tuple[Array, PyTree]:
        stage_index = numbers[0] // (layers // count)
        x, rows = gather_rows(x), jax.tree.map(gather_rows, rows)

        def tick(received: Array, time: Array) -> tuple[Array, tuple[Array, PyTree]]:
            # In the bubble this is any microbatch, whose result is not used.
            microbatch = jnp.clip(time - stage_index, 0, microbatches - 1)
            context = prepare(jax.tree.map(lambda x: x[microbatch], rows), shared)
            step = lambda x, each: layer(each[0], x, context, each[1], microbatch)  # noqa: E731
            y, aux = jax.lax.scan(step, jnp.where(stage_index == 0, x[microbatch], received), (weights, numbers))
            aux = jax.tree.map(lambda x: jnp.where(microbatch == time - stage_index, x, 0) / microbatches, aux)
            return jax.lax.ppermute(y, AXIS, [(i, i + 1) for i in range(count - 1)]), (y, aux)

        _, (outputs, aux) = jax.lax.scan(tick, jnp.zeros_like(x[0]), jnp.arange(microbatches + count - 1))
        # The outputs of the last stage are the result. Each stage gets a part of them.
        outputs = outputs[count - 1 :].reshape(count, microbatches // count, *x.shape[1:])
        outputs = jax.lax.all_to_all(outputs, AXIS, split_axis=0, concat_axis=0)[-1]
        outputs = jnp.moveaxis(outputs.reshape(microbatches // count, shards, -1, *outputs.shape[2:]), 0, 1)
        return outputs, jax.tree.map(lambda x: x.sum(0), aux)

    by_stage, by_rows = PartitionSpec(AXIS), PartitionSpec(None, AXIS)
    run = jax.shard_map(
        stage,
        in_specs=(by_stage, by_stage, by_rows, by_rows, PartitionSpec()),
        out_specs=(by_rows, by_stage),
        axis_names={AXIS},
        check_vma=False,  # loops inside layers start from constants, each of which would need a cast to varying
    )
    y, aux = run(weights, jnp.arange(layers), split(x), jax.tree.map(split, rows), shared)
    return constrain(y.reshape(x.shape), "batch", "length", "act_embed"), aux

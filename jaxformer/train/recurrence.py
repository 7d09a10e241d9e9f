"""Memories of earlier text that training carries from batch to batch (`config.task.recurrence`).

Row i of a batch goes on with the text of row i of the batch before (`data.planning.RunningTextPlanner`). What the model
keeps of that text lies in the variables of a `TrainState` under `types.MEMORY`, so that a checkpoint holds it and a
resumed run goes on bit for bit. Gradients do not reach it (Dai et al. 2019, Transformer-XL, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxformer.config import Config
from jaxformer.errors import ConfigError
from jaxformer.parallel import rules
from jaxformer.types import MEMORY, PyTree


def with_memory(
    config: Config, variables: Mapping[str, PyTree], make: Callable[[jax.ShapeDtypeStruct], PyTree], mesh: Mesh
) -> dict[str, PyTree]:
    """`variables`, with memories if the config asks for them.

    They are the layers' inputs "states" `[B, L, S, D]` in the compute precision, the newest slot last, and "count"
    `[B]`, the number of slots that hold text. Rows lead, so that they are sharded and split as the batch is.

    Args:
      make: a leaf from its shape, dtype and sharding.

    Raises:
      ConfigError: the model has no memory of limited length.
    """
    if not config.task.recurrence:
        return dict(variables)
    encoder, permutation = config.model.encoder, config.model.permutation
    if encoder is None or permutation is None or permutation.memory is None:
        raise ConfigError(
            "config.task.recurrence: got True, expected a model with model.permutation.memory; set both or none"
        )
    rows = config.data.batch
    shapes = {
        "states": ((rows, encoder.layers, permutation.memory, encoder.width), jnp.dtype(config.model.dtype)),
        "count": ((rows,), jnp.dtype(jnp.int32)),
    }

    def leaf(shape: tuple[int, ...], dtype: jnp.dtype) -> PyTree:
        names = ("batch", *(None,) * (len(shape) - 1))
        spec = rules.drop_uneven_axes(rules.spec(names), shape, mesh)
        return make(jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.NamedSharding(mesh, spec)))

    return {**variables, MEMORY: {name: leaf(*shape) for name, shape in shapes.items()}}

"""Memory against the length: attention and loss, forward and backward, as the compiler plans it. Nothing is run.

    python benchmarks/memory.py [--lengths=1024,4096,16384,65536] [--devices=4] [--output=FILE.jsonl]

Figures are bytes of temporary memory of one device, for one sequence of 4 heads of 64 (attention), and of width 64 and
32,768 vocabulary rows (loss). `ring` and `ulysses` divide the sequence over `--devices` simulated ones. `dense` and
`whole`, which are quadratic in the length and proportional to length times vocabulary, stop at `--limit`. One JSON
object a row is appended to `--output`.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

HEADS, HEAD_WIDTH, WIDTH, VOCAB, CHUNK, BLOCK = 4, 64, 64, 32768, 512, 512
LARGE = ("dense", "whole")


def attention(name: str, length: int) -> int:
    """Bytes of the gradient of a causal attention."""
    import jax
    import jax.numpy as jnp

    from jaxformer.config import AttentionConfig
    from jaxformer.nn import kernels
    from jaxformer.nn.masks import Mask
    from jaxformer.types import Slots

    config = AttentionConfig(heads=HEADS, block=BLOCK)

    def loss(q: Any, k: Any, v: Any, side: Slots) -> Any:
        mask = Mask(side, side, causal=True, same_slots=True)
        return jnp.square(kernels.get(name).apply(q, k, v, mask, None, None, config)).sum()

    x = jax.ShapeDtypeStruct((1, length, HEADS, HEAD_WIDTH), jnp.float32, sharding=divided(4))
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=divided(2))
    return temporary(jax.grad(loss, argnums=(0, 1, 2)), x, x, x, Slots(ids, ids))


def cross_entropy(name: str, length: int) -> int:
    """Bytes of the gradient of a language model's loss with respect to hidden states and table."""
    import jax
    import jax.numpy as jnp

    from jaxformer import losses
    from jaxformer.types import DeferredLogits

    def loss(hidden: Any, table: Any, labels: Any, weights: Any) -> Any:
        logits = DeferredLogits(hidden, table, None, CHUNK)
        if name == "whole":
            logits = jnp.einsum("btd,vd->btv", hidden, table)
        return losses.cross_entropy(logits, labels, weights)[0]

    hidden, table = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, length, WIDTH), (VOCAB, WIDTH)))
    labels, weights = (jax.ShapeDtypeStruct((1, length), dtype) for dtype in (jnp.int32, jnp.float32))
    return temporary(jax.grad(loss, argnums=(0, 1)), hidden, table, labels, weights)


def divided(rank: int) -> Any:
    """How the current mesh divides `[B, T, ...]`; None without one."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.sharding.get_mesh()
    return None if mesh.empty else NamedSharding(mesh, PartitionSpec(None, "context", *(None,) * (rank - 2)))


def temporary(function: Any, *arguments: Any) -> int:
    import jax

    return jax.jit(function).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


def measure(length: int, limit: int, devices: int) -> list[dict[str, Any]]:
    """One row a way of computing, of those that `limit` allows."""
    import contextlib

    import jax

    from jaxformer.config import MeshConfig
    from jaxformer.parallel import mesh as meshes

    rows = []
    parts = {"attention": ("dense", "blockwise", "ring", "ulysses"), "loss": ("whole", "chunked")}
    for part, names in parts.items():
        for name in names:
            if name in LARGE and length > limit:
                continue
            over = devices if name in ("ring", "ulysses") else 1
            place = contextlib.nullcontext()
            if over > 1:
                place = jax.set_mesh(meshes.make(MeshConfig(data=1, context=over), jax.devices()[:over]))
            with place:
                size = (attention if part == "attention" else cross_entropy)(name, length)
            row = {"part": part, "name": name, "length": length, "devices": over, "bytes": size}
            rows.append({**row, "bytes_per_token": size / length, "jax": jax.__version__})
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="1024,4096,16384,65536")
    parser.add_argument("--devices", type=int, default=4, help="simulated; they divide the heads for ulysses")
    parser.add_argument("--limit", type=int, default=16384, help="longest sequence of dense attention and whole logits")
    parser.add_argument("--output", default="")
    arguments = parser.parse_args(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={arguments.devices}")
    print(f"{'part':<11}{'computed':<11}{'length':>8}{'devices':>9}{'MB':>11}{'bytes/token':>13}")
    for length in map(int, arguments.lengths.split(",")):
        for row in measure(length, arguments.limit, arguments.devices):
            print(
                f"{row['part']:<11}{row['name']:<11}{row['length']:>8}{row['devices']:>9}{row['bytes'] / 1e6:>11.2f}"
                f"{row['bytes_per_token']:>13.0f}",
                flush=True,
            )
            if arguments.output:
                with open(arguments.output, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

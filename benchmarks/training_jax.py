"""The jaxformer side of `training.py`: the step of a run on one device, asked for from outside."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import numpy as np  # noqa: E402
import training_shared as shared  # noqa: E402
from flax import linen as nn  # noqa: E402

from jaxformer import config as c  # noqa: E402
from jaxformer import tasks  # noqa: E402
from jaxformer.models import build  # noqa: E402
from jaxformer.nn import cpu, products  # noqa: E402
from jaxformer.parallel import mesh as meshes  # noqa: E402
from jaxformer.runtime import memory  # noqa: E402
from jaxformer.train import optim  # noqa: E402
from jaxformer.train import step as steps  # noqa: E402
from jaxformer.types import Batch, Slots, Stream  # noqa: E402


def config(shape: shared.Shape, dtype: str) -> c.Config:
    """As the recipes in `configs/` fill it in."""
    name = {"decoder": "language_modelling", "encoder": "masked_lm"}.get(shape.family, "translation")
    return c.Config(
        model=model(shape, dtype),
        task=c.TaskConfig(name=name, vocab=shape.vocab),
        optimizer=c.OptimizerConfig(weight_decay=0.1),
        schedule=c.ScheduleConfig(kind="constant", peak=1e-4, warmup=0),
        mesh=c.MeshConfig(data=1),
    )


def model(shape: shared.Shape, dtype: str) -> c.ModelConfig:
    drop = shape.dropout
    if shape.family == "rnn":
        part = dict(width=shape.width, embed=c.EmbedConfig(vocab=shape.vocab, dropout=drop), dropout=drop)
        return c.ModelConfig(
            recurrent_encoder=c.RecurrentConfig(**part, bidirectional=True),
            recurrent_decoder=c.RecurrentConfig(**part, attention="additive"),
            share_embeddings=True,
            dtype=dtype,
        )
    embed = c.EmbedConfig(vocab=shape.vocab, dropout=drop, deviation=0.02)
    attention = c.AttentionConfig(heads=shape.heads, dropout=drop)
    learned = c.EncodingConfig(kind="learned", max_length=shape.length)
    sizes = dict(layers=shape.layers, width=shape.width, dropout=drop)
    if shape.family == "decoder":
        ffn = c.FeedForwardConfig(activation="gelu_tanh")
        stack = c.StackConfig(**sizes, embed=embed, encoding=learned, attention=attention, ffn=ffn)
        return c.ModelConfig(decoder=stack, dtype=dtype)
    if shape.family == "encoder":
        embed = c.EmbedConfig(vocab=shape.vocab, kinds=2, norm=True, dropout=drop, deviation=0.02)
        norm = c.NormConfig(order="post", epsilon=1e-12)
        stack = c.StackConfig(**sizes, embed=embed, encoding=learned, attention=attention, norm=norm)
        return c.ModelConfig(encoder=stack, head=c.HeadConfig(transform=True, bias=True), dtype=dtype)
    stack = c.StackConfig(
        **sizes,
        embed=c.EmbedConfig(vocab=shape.vocab, scale=True, dropout=drop),
        attention=c.AttentionConfig(heads=shape.heads),
        ffn=c.FeedForwardConfig(width=shape.inner, activation="relu"),
    )
    return c.ModelConfig(encoder=stack, decoder=stack, share_embeddings=True, dtype=dtype)


def batch(given: dict[str, np.ndarray]) -> Batch:
    """In the form of `jaxformer.types`."""

    def stream(side: str) -> Stream | None:
        if side not in given:
            return None
        real = given[f"{side}_real"].astype(np.int32)
        return Stream(given[side], Slots(np.arange(real.shape[1], dtype=np.int32) * real, real))

    return Batch(stream("source"), stream("target"), given["labels"], given["weights"])


class Training:
    """A state, its compiled step, and batches that lie ready on the host."""

    def __init__(self, config: c.Config, batches: list[Batch]) -> None:
        self.mesh = meshes.make(config.mesh, jax.devices()[:1])
        self.turn, self.heap = itertools.cycle(batches), memory.HeapTrimmer("cpu")
        with jax.set_mesh(self.mesh):
            module = build.build(config.model)
            boxed = build.shapes(module)["params"]
            schedule = optim.schedule(config.schedule, config.train.steps, build.model_width(config.model))
            names = build.logical_names(module)
            optimizer = optim.optimizer(config.optimizer, schedule, nn.meta.unbox(boxed), names)
            self.parameters = build.count_params(nn.meta.unbox(boxed))
            self.state = steps.init_state(config, module, optimizer, self.mesh)
            self.step = steps.make_train_step(
                config, module, tasks.get(config.task.name), optimizer, schedule, self.mesh
            )

    def run(self) -> float:
        """A step's mean loss."""
        with jax.set_mesh(self.mesh):
            self.state, sums = self.step(self.state, steps.shard_batch(next(self.turn), self.mesh))
            self.heap.after_step()  # while the step runs, as in the loop
            total, weight = jax.device_get(sums["loss"])
            jax.block_until_ready(self.state)
        return float(total / weight)

    def overhead(self, count: int = 5) -> dict[str, float]:
        """Seconds that a step costs outside of the compiled function: placing a batch, calling, fetching the sums."""
        seconds = []
        with jax.set_mesh(self.mesh):
            for _ in range(count):
                begun = time.perf_counter()
                self.state, sums = self.step(self.state, steps.shard_batch(next(self.turn), self.mesh))
                called = time.perf_counter() - begun
                jax.block_until_ready((self.state, sums))
                begun = time.perf_counter()
                jax.device_get(sums)
                seconds.append(called + time.perf_counter() - begun)
        return {"overhead_seconds": min(seconds)}


def bare(shape: shared.Shape, dtype: str) -> Callable[[], float]:
    """The products of all dense layers, forward and backward, and nothing else."""
    sizes = shared.products(shape)
    keys = jax.random.split(jax.random.key(0), 3)
    of = lambda i, j, k: {s: jax.random.normal(keys[i], (s[j], s[k]), dtype) for s in set(sizes)}  # noqa: E731
    x, kernel, dy = of(0, 0, 1), of(1, 1, 2), of(2, 0, 2)

    @jax.jit
    def both_ways(x, kernel, dy):
        y, pull = jax.vjp(products.dot, x, kernel)
        return y, pull(dy)

    # A program for each shape: in one program the compiler would compute equal gradients x^T dy only once.
    def step() -> float:
        for s in sizes:
            jax.block_until_ready(both_ways(x[s], kernel[s], dy[s]))
        return 0.0

    return step


def main() -> None:
    task = shared.task()
    shape = task["shape"]
    about = {"versions": {"jax": jax.__version__}}
    if task["plain"]:
        cpu.is_supported = lambda x: False
    if task["products"]:
        shared.serve(bare(shape, task["dtype"]), about)
        return
    training = Training(config(shape, task["dtype"]), [batch(shared.batch(shape, i)) for i in range(shared.BATCHES)])
    shared.serve(training.run, about | {"parameters": training.parameters}, training.overhead)


if __name__ == "__main__":
    main()

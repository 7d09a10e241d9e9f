"""Training with a label of the row beside those of its slots: what is left of a killed run goes on bit for bit."""

from __future__ import annotations

import json

import builders
import chex
import jax
import numpy as np
from flax import linen as nn

from jaxformer import tasks
from jaxformer.config import (
    AttentionConfig,
    Config,
    DataConfig,
    EmbedConfig,
    FeedForwardConfig,
    HeadConfig,
    MeshConfig,
    ModelConfig,
    NormConfig,
    OptimizerConfig,
    ScheduleConfig,
    TaskConfig,
    TokenizerConfig,
    TrainConfig,
)
from jaxformer.data.pipeline import Pipeline
from jaxformer.data.sources import Dataset
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.models import build
from jaxformer.parallel import mesh as meshes
from jaxformer.train import optim, step

STACK = builders.stack(
    layers=1,
    norm=NormConfig(kind="rms"),
    attention=AttentionConfig(heads=2, bias=False),
    ffn=FeedForwardConfig(width=8, bias=False),
    embed=EmbedConfig(vocab=264, kinds=2, dropout=0.1),
)
TEXTS = [{"text": f"{number} is a number. " * (number % 3 + 1)} for number in range(11)]


def test_a_killed_run_goes_on_bit_for_bit():
    """Arrays and a JSON text survive: five steps are as two, and three of another pipeline from there on."""
    config = Config(
        model=ModelConfig(encoder=STACK, head=HeadConfig(relation=True, width=8)),
        data=DataConfig(batch=4, length=24, tokenizer=TokenizerConfig(kind="byte")),
        task=TaskConfig(name="masked_lm", relation="next_sentence", all_positions=True),
        optimizer=OptimizerConfig(name="sgd"),
        schedule=ScheduleConfig(kind="constant", peak=0.1, warmup=1),
        train=TrainConfig(steps=5, accumulation=2),
    )
    tokenizers, task = Tokenizers.build(config.data, [], ("text",)), tasks.get("masked_lm")
    module, mesh = build.build(config.model), meshes.make(MeshConfig(), jax.devices()[:1])
    schedule = optim.schedule(config.schedule, 5, 8)

    def pipeline() -> Pipeline:
        return Pipeline(config, Dataset({"train": TEXTS}, "key"), tokenizers, task, multiple=2)

    with jax.set_mesh(mesh):
        optimizer = optim.optimizer(config.optimizer, schedule, nn.meta.unbox(build.shapes(module))["params"])
        update = step.make_train_step(config, module, task, optimizer, schedule, mesh)
        params = jax.tree.map(np.array, builders.make(config.model)[1]["params"])  # a step consumes the arrays it gets
        moments = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(optimizer.init, params))

        def start() -> step.TrainState:
            return jax.device_put(step.TrainState(np.int32(0), params, moments, jax.random.key(1), {}))

        def run(state, batches, count):
            losses = []
            for _ in range(count):
                state, sums = update(state, step.shard_batch(next(batches), mesh))
                losses.append(tuple(map(float, sums["loss"])))
            return jax.device_get(state), losses

        first, second = pipeline(), pipeline()
        whole, expected = run(start(), first_batches := first.train(), 5)
        early, begun = run(start(), second_batches := second.train(), 2)
        saved = json.dumps(second.data_state(second_batches))
        first_batches.close()
        second_batches.close()
        batches = pipeline().resume(json.loads(saved))
        late, rest = run(jax.device_put(early), batches, 3)
        batches.close()
    assert [*begun, *rest] == expected and len(set(expected)) == 5
    chex.assert_trees_all_equal(late.params, whole.params)
    chex.assert_trees_all_equal(late.opt_state, whole.opt_state)

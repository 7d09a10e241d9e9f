"""Permutation language modelling: orders, rows of a running text, memories in training, the command line."""

import dataclasses
import re

import builders
import chex
import jax
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from task_toys import config, encoded, learned, words

from jaxformer import tasks
from jaxformer.config import (
    AttentionConfig,
    Config,
    ConfigError,
    EmbedConfig,
    EncodingConfig,
    FeedForwardConfig,
    MeshConfig,
    ModelConfig,
    NormConfig,
    OptimizerConfig,
    PermutationConfig,
    ScheduleConfig,
    StackConfig,
    TaskConfig,
    TokenizerConfig,
    TrainConfig,
    overrides,
)
from jaxformer.models import build
from jaxformer.parallel import mesh as meshes
from jaxformer.tasks import permutation_lm
from jaxformer.train import optim, step
from jaxformer.types import MEMORY, Batch, Permutation

TASK = tasks.get("permutation_lm")
NUMBERS = " ".join(f"w{i}" for i in range(400))


@settings(max_examples=25, deadline=None)
@given(count=st.integers(1, 40), every=st.integers(1, 9), begin=st.integers(0, 1), seed=st.integers(0, 99))
def test_the_last_part_of_an_order_is_predicted(count, every, begin, seed):
    """Against the drawn order itself, with or without a special token before the text."""
    settings = config("permutation_lm", length=41, predict_every=every)
    tokens = np.arange(100, 100 + begin + count, dtype=np.int32)
    features = permutation_lm.permuted(settings, tokens, np.arange(begin, begin + count), np.random.default_rng(seed))
    drawn = (np.random.default_rng(seed).permutation(count) + begin).tolist()
    number = min(max(1, count // every), len(tokens) - 1)
    predicted = drawn[count - number :]
    order = [predicted.index(slot) + 1 if slot in predicted else 0 for slot in range(len(tokens))]
    size = max(1, 41 // every)
    assert features["order"].tolist() == order and 0 in order
    assert features["targets"].tolist() == predicted + [-1] * (size - number)
    assert features["labels"].tolist() == [100 + slot for slot in predicted] + [0] * (size - number)
    assert features["weights"].tolist() == [1.0] * number + [0.0] * (size - number)


def test_every_slot_is_as_likely_at_every_place_of_an_order():
    settings = config("permutation_lm", length=6, predict_every=2)
    rng, counts = np.random.default_rng(0), np.zeros((4, 2))
    tokens = np.arange(6, dtype=np.int32)
    for _ in range(4000):
        features = permutation_lm.permuted(settings, tokens, np.arange(1, 5), rng)
        counts[features["targets"][:2] - 1, [0, 1]] += 1
    assert np.abs(counts / 4000 - 0.25).max() < 4 * np.sqrt(0.25 * 0.75 / 4000)  # four standard errors


def test_special_tokens_are_seen_and_never_predicted_and_windows_hold_all_tokens():
    both = learned(TokenizerConfig(kind="word", vocab=500), NUMBERS)
    tokenizer = both.source
    settings = config("permutation_lm", length=12, predict_every=1)
    features = encoded(settings, both, text=NUMBERS)
    assert features["source"][0] == tokenizer.cls and features["source"][-1] == tokenizer.sep
    assert features["order"][0] == features["order"][-1] == 0 and int(features["cut"]) == 390
    pieces = TASK.encode_windows(settings, both, {"text": NUMBERS}, np.random.default_rng(0))
    predicted = [dict(zip(p["targets"].tolist(), p["labels"].tolist(), strict=True)) for p in pieces]
    text = [part[slot] for part in predicted for slot in sorted(part) if slot >= 0]
    assert text == tokenizer.encode(NUMBERS)


def test_masks_of_a_prompt_see_the_text_and_not_each_other():
    prompt = TASK.prompt(config("permutation_lm"), words(), "the <mask> sat on <mask>")
    assert prompt["order"].tolist() == [0, 0, 1, 0, 0, 1, 0] and prompt["targets"].tolist() == [2, 5]


# Memories in training

MODEL = ModelConfig(
    encoder=StackConfig(
        layers=1,
        width=8,
        embed=EmbedConfig(vocab=16),
        encoding=EncodingConfig("transformer_xl"),
        attention=AttentionConfig(heads=2, bias=False),
        ffn=FeedForwardConfig(width=16, bias=False),
        norm=NormConfig(order="post", kind="rms"),
        unroll=1,
    ),
    permutation=PermutationConfig(memory=6),
)


def training_batches() -> list[Batch]:
    """Two batches of 8 rows of 4 tokens, in which every other row continues the first; rows have 1 to 3 targets."""
    rng, batches = np.random.default_rng(0), []
    for continues in (np.zeros(8, bool), np.arange(8) % 2 == 0):
        source = builders.stream(rng, [4] * 8)
        targets = np.stack([rng.permutation(4)[:3] for _ in range(8)]).astype(np.int32)
        targets[np.arange(3) > np.arange(8)[:, None] % 3] = -1
        order = np.zeros((8, 5), np.int32)
        np.put_along_axis(order, targets, np.arange(1, 4)[None], axis=1)
        order = order[:, :4]  # -1 was written into the last column
        labels = np.take_along_axis(source.tokens, np.maximum(targets, 0), axis=1)
        weights = (targets >= 0).astype(np.float32)
        order = Permutation(order, targets)
        batches.append(Batch(source, None, labels, weights, permutation=order, continues=continues))
    return batches


def trained(mesh_config: MeshConfig, devices: int, accumulation: int):
    """The state after a step on each batch, and the sums of the steps."""
    settings = Config(
        model=MODEL,
        task=TaskConfig("permutation_lm", recurrence=True),
        optimizer=OptimizerConfig(name="sgd"),
        schedule=ScheduleConfig(kind="constant", peak=0.1, warmup=0),
        train=TrainConfig(steps=10, accumulation=accumulation),
        mesh=mesh_config,
    )
    settings = dataclasses.replace(settings, data=dataclasses.replace(settings.data, batch=8))
    module, mesh = build.build(MODEL), meshes.make(mesh_config, jax.devices()[:devices])
    with jax.set_mesh(mesh):
        schedule = optim.schedule(settings.schedule, 10, 8)
        shapes = nn.meta.unbox(build.shapes(module))["params"]
        optimizer = optim.optimizer(settings.optimizer, schedule, shapes)
        update = step.make_train_step(settings, module, TASK, optimizer, schedule, mesh)
        abstract = step.abstract_state(settings, module, optimizer, mesh)
        params = builders.make(MODEL)[1]["params"]
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), (abstract.opt_state, dict(abstract.variables)))
        state = step.TrainState(np.int32(0), params, zeros[0], jax.random.key(0), zeros[1])
        state = jax.device_put(state, jax.tree.map(lambda x: x.sharding, abstract))
        found = []
        for batch in training_batches():
            state, sums = update(state, step.shard_batch(batch, mesh))
            found.append(jax.device_get(sums))
    return state, found


def test_memories_follow_their_rows_through_microbatches_and_meshes():
    whole, sums = trained(MeshConfig(), 1, 1)
    split, other = trained(MeshConfig(data=2, fsdp=2, tensor=2), 8, 2)
    chex.assert_trees_all_close(jax.device_get(split.params), jax.device_get(whole.params), rtol=2e-4, atol=2e-6)
    chex.assert_trees_all_close(jax.device_get(split.variables), jax.device_get(whole.variables), rtol=2e-4, atol=2e-5)
    assert [s["loss"][1] for s in other] == [s["loss"][1] for s in sums] == [15.0, 15.0]
    memory = split.variables[MEMORY]
    assert memory["count"].tolist() == [6, 4] * 4
    assert memory["states"].shape == (8, 1, 6, 8) and memory["states"].addressable_shards[0].data.shape[0] == 2
    # What a row remembers first is the embedding of its text: of the batch before where it continues.
    first, second = (np.asarray(batch.source.tokens) for batch in training_batches())
    told = np.concatenate([first, second], axis=1)[:, -6:]
    table = np.asarray(builders.make(MODEL)[1]["params"]["source_embed"]["table"])
    np.testing.assert_allclose(np.asarray(memory["states"])[::2, 0, :2], table[told[::2, :2]], rtol=1e-6)
    assert MEMORY not in split.evaluation_variables()


# Configs and the command line


def recipe(folder, **edits):
    config = overrides.defaults()
    config.data.source, config.data.dir, config.data.cache = "text", str(folder), str(folder / "cache")
    config.data.splits = {"train": ("a.txt",), "validation": ("a.txt",)}
    config.data.tokenizer.kind, config.data.packing = "byte", "concat"
    config.data.batch, config.data.length, config.data.shuffle = 4, 8, False
    config.task.name, config.task.recurrence, config.task.predict_every = "permutation_lm", True, 2
    stack = overrides.section(StackConfig, layers=1, width=16, attention=dict(heads=2, bias=False), unroll=1)
    config.model.encoder = stack
    config.model.encoder.ffn.width, config.model.encoder.norm.order = 16, "post"
    config.model.encoder.encoding.kind, config.model.encoder.dropout = "transformer_xl", 0.1
    config.model.permutation = overrides.section(PermutationConfig, memory=6)
    config.train.steps, config.train.log_every, config.schedule.kind = 4, 4, "constant"
    config.train.evaluate_every, config.train.checkpoint_every, config.train.accumulation = 0, 2, 2
    config.schedule.warmup = 1
    for path, value in edits.items():
        overrides.override(config, path.replace("__", "."), str(value))
    return config


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"data__shuffle": True}, "data.shuffle: got True, expected False with config.task.recurrence"),
        ({"data__packing": "none"}, "data.packing: got 'none', expected concat with config.task.recurrence"),
        ({"data__packing": "first_fit"}, "data.packing: got 'first_fit', expected none or concat"),
        ({"data__tokens": 64}, "data.tokens: got 64, expected None with"),
        ({"model__permutation__memory": None}, "permutation.memory: got None, expected a number of slots"),
        ({"model__permutation__reuse": 4}, "permutation.reuse: got 4, expected None with"),
        ({"task__name": "masked_lm", "data__packing": "none"}, "recurrence: got True, expected False for"),
        ({"mesh__stage": 2}, "mesh.stage: got 2, expected 1 for a permutation model"),
        ({"mesh__context": 2}, "mesh.context: got 2, expected 1 with permutations"),
    ],
)
def test_what_cannot_be_honoured_is_refused(tmp_path, edits, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        overrides.freeze(recipe(tmp_path, **edits))


def test_it_needs_a_model_with_permutations(tmp_path):
    config = recipe(tmp_path)
    config.model.permutation = None
    with pytest.raises(ConfigError, match=re.escape("model.permutation: got None, expected a section for the task")):
        overrides.freeze(config)

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from decode_toys import PrefixModule
from flax import linen as nn

from jaxformer.config import ConfigError, DecodeConfig
from jaxformer.decode.compiled import Vocabulary
from jaxformer.decode.runner import Runner

VOCABULARY = Vocabulary(eos=(), pad=9, start=1, size=13)
PROMPTS = [{"target": np.arange(1, 1 + size, dtype=np.int32)} for size in (2, 11, 5, 3, 9)]


class Scaled(nn.Module):
    """Multiplies target tokens by the parameter "scale"."""

    @nn.compact
    def __call__(self, batch):
        return batch.target.tokens * self.param("scale", nn.initializers.ones, ())

    def encode(self, source):
        return source.tokens


def token_sum(output, batch):
    return jnp.sum(output * (batch.target.slots.segment != 0), axis=1)


def scaled(**fields):
    return Runner(Scaled(), {"params": {"scale": np.float32(2)}}, VOCABULARY, batch_size=2, **fields)


def test_forward_aligns_outputs_with_prompt_indices_and_drops_empty_rows():
    batches = list(scaled().forward(PROMPTS, finish=token_sum))
    assert [len(batch.indices) for batch in batches] == [2, 2, 1]
    sums = {int(i): float(x) for batch in batches for i, x in zip(batch.indices, batch.outputs, strict=True)}
    assert sums == {i: 2.0 * prompt["target"].sum() for i, prompt in enumerate(PROMPTS)}


def test_forward_pads_with_the_pads_to_the_buckets():
    [batch] = scaled(buckets=(12,)).forward(PROMPTS[:1])
    assert batch.batch.target.tokens.tolist() == [[1, 2] + [9] * 10]
    assert batch.outputs.tolist() == [[2, 4] + [18] * 10]
    [batch] = scaled(source_pad=7).forward([{"source": [1, 2, 3]}], "encode", buckets=(4,))
    assert batch.outputs.tolist() == [[1, 2, 3, 7]]


def toy(**fields):
    table = np.random.default_rng(0).normal(size=(97, 16)).astype(np.float32)
    return Runner(PrefixModule(), {"params": {"table": table}}, VOCABULARY, **fields)


def test_generate_keeps_the_order_and_the_position_limits():
    options, calls = DecodeConfig(max_length=4, batch=2, past_positions="stop"), []
    progress = lambda *numbers: calls.append(numbers)  # noqa: E731
    results = toy(max_target_length=12).generate(PROMPTS, options, progress=progress)
    assert [len(hypotheses[0].tokens) for hypotheses in results] == [4, 2, 4, 4, 4]
    assert calls[-1] == (5, 5)
    assert [h[0].tokens.tolist() for h in toy().generate(PROMPTS[2:3], options)] == [results[2][0].tokens.tolist()]
    with pytest.raises(ConfigError, match="got 11 tokens, expected at most the model's 10 positions"):
        toy(max_target_length=10).generate(PROMPTS, options)
    with pytest.raises(ConfigError, match="got 3 slots, expected at most the model's 2 positions"):
        toy(max_source_length=2).generate([{"source": [1, 2, 3]}], options)


def test_draws_of_a_prompt_depend_on_its_row_index():
    options = DecodeConfig(method="sample", max_length=4, batch=8)
    draws = lambda seed, indices: [  # noqa: E731
        hypotheses[0].tokens.tolist()
        for hypotheses in toy().generate([PROMPTS[0]] * 4, dataclasses.replace(options, seed=seed), indices)
    ]
    first = draws(0, None)
    assert draws(0, [3, 2, 1, 0]) == first[::-1]
    assert draws(1, None) != first

"""`configs/gpt2_notes.py` is the study notes' GPT-2: its parameters, its first loss and its logits."""

from __future__ import annotations

import math
from pathlib import Path

import jax
import notes_gpt2
import numpy as np
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxformer import losses
from jaxformer.config import overrides
from jaxformer.models import build
from jaxformer.types import Batch, Slots, Stream

RECIPE = str(Path(__file__).resolve().parents[2] / "configs" / "gpt2_notes.py")


@pytest.fixture(scope="module")
def module() -> nn.Module:
    config = overrides.parse([f"--config={RECIPE}", "--config.model.decoder.unroll=1"])  # a loop compiles sooner
    return build.build(build.resolve(config.model, notes_gpt2.VOCAB, notes_gpt2.VOCAB, None))


def batch_of(tokens: np.ndarray) -> Batch:
    position = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    return Batch(None, Stream(tokens.astype(np.int32), Slots(position, np.ones(tokens.shape, np.int32))))


def test_the_parameters_are_those_of_the_notes(module):
    params = nn.meta.unbox(build.shapes(module))["params"]
    assert {path: x.shape for path, x in flatten_dict(params, sep="/").items()} == notes_gpt2.SHAPES
    assert build.count_params(params) == 8_271_696


def test_the_logits_are_those_of_a_torch_model_with_the_same_weights(module):
    params = unflatten_dict(notes_gpt2.weights(), sep="/")
    logits = np.asarray(jax.jit(module.apply)({"params": params}, batch_of(notes_gpt2.tokens())))
    kept = np.load(notes_gpt2.LOGITS)["logits"]
    assert np.abs(kept).max() > 1
    np.testing.assert_allclose(logits[:, ::3, ::16], kept, atol=2e-4)
    pytest.importorskip("torch", reason="the whole of the logits needs torch (extra [bench])")
    np.testing.assert_allclose(logits, notes_gpt2.torch_logits(), atol=2e-4)


def test_training_starts_at_chance_and_the_padding_row_at_zero(module):
    text = np.random.default_rng(0).integers(1, notes_gpt2.VOCAB, (4, 65)).astype(np.int32)

    @jax.jit
    def start(key):
        variables = nn.meta.unbox(build.init_variables(module, key))
        logits = module.apply(variables, batch_of(text[:, :-1]))
        total, count = losses.cross_entropy(logits, text[:, 1:], np.ones((4, 64)))
        return total / count, variables["params"]["target_embed"]["table"]

    loss, table = start(jax.random.key(0))
    assert float(loss) == pytest.approx(math.log(notes_gpt2.VOCAB), abs=0.5)
    assert not np.any(table[0])
    assert np.all(np.any(table[1:], axis=1))

"""The property tests that users get: each passes for a model that is right and fails for one that is wrong."""

import dataclasses
import textwrap

import builders
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxformer import tasks, testing
from jaxformer.config import EmbedConfig, HeadConfig, MeshConfig, ModelConfig, RecurrentConfig, StackConfig
from jaxformer.config.overrides import defaults, freeze, section
from jaxformer.models import build
from jaxformer.models.transformer import Transformer
from jaxformer.nn.cache import TransformerState
from jaxformer.parallel import mesh as meshes
from jaxformer.types import Batch

RNN = RecurrentConfig(cell="gru", width=8, embed=EmbedConfig(vocab=builders.VOCAB))
MODELS = {
    "encoder": ModelConfig(encoder=builders.stack()),
    "decoder": ModelConfig(decoder=builders.stack()),
    "seq2seq": ModelConfig(encoder=builders.stack(), decoder=builders.stack(), share_embeddings=True),
    "classifier": ModelConfig(encoder=builders.stack(), head=HeadConfig(kind="classes", classes=3, pooling="mean")),
    "recurrent": ModelConfig(recurrent_encoder=RNN, recurrent_decoder=dataclasses.replace(RNN, attention="additive")),
}


def made(config, lengths=(5, 5)):
    module = build.build(config)
    return module, testing.random_variables(module), testing.random_batch(config, lengths)


class Mistaken(nn.Module):
    """A decoder whose logits are changed by `mistake(logits, batch)`."""

    config: ModelConfig
    mistake: object

    @nn.compact
    def __call__(self, batch: Batch) -> jax.Array:
        return self.mistake(Transformer(self.config, name="model")(batch), batch)


def mistaken(mistake, lengths=(5, 3)):
    module = Mistaken(MODELS["decoder"], mistake)
    return module, testing.random_variables(module), testing.random_batch(module.config, lengths)


@pytest.mark.parametrize("name", ["classifier", "recurrent"])  # invariants/ tests the others
def test_models_have_the_properties_of_any_model(name):
    given = made(MODELS[name], (5, 3, 4))
    testing.assert_padding_invariant(*given)
    testing.assert_batch_order_invariant(*given)


def test_a_recurrent_decoder_is_causal_and_steps_equal_its_whole_pass():
    given = made(MODELS["recurrent"])
    testing.assert_causal(*given)
    testing.assert_steps_equal_forward(*given, prompt=2)


def test_a_decoder_that_sees_ahead_is_found():
    with pytest.raises(AssertionError, match="depends on a later one"):
        testing.assert_causal(*made(ModelConfig(decoder=builders.stack(causal=False))))
    with pytest.raises(AssertionError, match="does not depend on its own"):
        testing.assert_causal(*mistaken(lambda logits, batch: 0.0 * logits, (5, 5)))
    with pytest.raises(ValueError, match="got a batch with padding"):
        testing.assert_causal(*made(MODELS["decoder"], (5, 3)))


def test_outputs_that_depend_on_padding_or_on_the_place_in_the_batch_are_found():
    with pytest.raises(AssertionError):
        testing.assert_padding_invariant(*mistaken(lambda logits, batch: logits - logits.mean(1, keepdims=True)))
    with pytest.raises(AssertionError):
        testing.assert_batch_order_invariant(*mistaken(lambda logits, batch: logits.at[0].multiply(2.0)))


def test_packed_examples_that_see_each_other_are_found():
    module, variables, _ = mistaken(lambda logits, batch: jnp.cumsum(logits, axis=1))
    with pytest.raises(AssertionError):
        testing.assert_packing_invariant(module, variables, (4, 2), builders.VOCAB)


def test_a_cache_that_forgets_its_position_is_found(monkeypatch):
    append = TransformerState.append
    stays = lambda state, count: (append(state, count)[0], append(state, count)[1].replace(position=state.position))  # noqa: E731
    monkeypatch.setattr(TransformerState, "append", stays)
    with pytest.raises(AssertionError):
        testing.assert_steps_equal_forward(*made(MODELS["decoder"]), prompt=2)


def test_a_model_that_computes_something_else_on_a_mesh_is_found():
    mesh = meshes.make(MeshConfig(data=2, tensor=2), jax.devices()[:4])
    testing.assert_sharded_equals_single(*made(MODELS["decoder"]), mesh)
    off = lambda logits, batch: logits if jax.sharding.get_abstract_mesh().empty else 2.0 * logits  # noqa: E731
    with pytest.raises(AssertionError):
        testing.assert_sharded_equals_single(*mistaken(off, (5, 5)), mesh)


def task_inputs():
    rng = np.random.default_rng(0)
    outputs = rng.standard_normal((3, 4, builders.VOCAB)).astype(np.float32)
    labels, weights = rng.integers(builders.VOCAB, size=(3, 4)).astype(np.int32), np.float32(rng.random((3, 4)) > 0.3)
    return outputs, Batch(None, None, labels, weights)


def test_sums_of_a_task_add_up_over_rows_and_leave_out_what_has_no_weight():
    config = defaults()
    config.task.name, config.task.vocab = "language_modelling", builders.VOCAB
    config.model.decoder = section(StackConfig)
    config = freeze(config)
    task, (outputs, batch) = tasks.get("language_modelling"), task_inputs()
    testing.assert_sums_add_up(task, config, outputs, batch)
    testing.assert_weights_select(task, config, outputs, batch)
    mean = lambda config, outputs, batch: {"loss": (jnp.mean(outputs), jnp.float32(1.0))}  # noqa: E731
    for check in (testing.assert_sums_add_up, testing.assert_weights_select):
        with pytest.raises(AssertionError):
            check(dataclasses.replace(task, loss=mean), config, outputs, batch)


def test_random_inputs_have_the_shapes_of_the_model():
    batch = testing.random_batch(MODELS["seq2seq"], [3, 2], length=6)
    chex.assert_shape([batch.source.tokens, batch.target.tokens, batch.labels, batch.weights], (2, 6))
    assert batch.source.slots.segment.sum(1).tolist() == [4, 3] and batch.weights.sum() == 5
    variables = testing.random_variables(build.build(MODELS["decoder"]))
    assert not any((leaf == leaf.ravel()[0]).all() for leaf in jax.tree.leaves(variables))


def test_the_example_of_the_module_runs():
    lines = testing.__doc__.split("like this::\n\n")[1].split("\n")
    code = textwrap.dedent("\n".join(line for line in lines if line.startswith("    ") or not line))
    assert "class PerToken" in code and "assert_steps_equal_forward" in code
    exec(compile(code, "example", "exec"), {})


class PerToken(nn.Module):
    """A module from outside of the package: logits of each slot, from its own token, or with `leak` from all."""

    leak: bool = False

    @nn.compact
    def __call__(self, batch: Batch) -> jax.Array:
        x = nn.Embed(13, 8)(batch.target.tokens)
        x = x + x.mean(1, keepdims=True) if self.leak else x
        return nn.Dense(13)(x)


def test_a_module_from_outside_is_tested_too():
    batch = testing.random_batch(MODELS["decoder"], [5, 5, 5, 5])
    module = PerToken()
    variables = testing.random_variables(module, batch=batch)
    testing.assert_causal(module, variables, batch)
    testing.assert_padding_invariant(module, variables, batch)
    testing.assert_batch_order_invariant(module, variables, batch)
    testing.assert_packing_invariant(module, variables, [3, 2], 13, side="target")
    mesh = meshes.make(MeshConfig(data=4), jax.devices()[:4])
    testing.assert_sharded_equals_single(module, variables, batch, mesh)
    with pytest.raises(AssertionError, match="a position depends on a later one"):
        testing.assert_causal(PerToken(leak=True), variables, batch)
    with pytest.raises(AssertionError):
        testing.assert_packing_invariant(PerToken(leak=True), variables, [3, 2], 13, side="target")

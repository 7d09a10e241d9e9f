"""Weights rounded to 8 bits: which, by how much, and that decoding computes with exactly those."""

from dataclasses import replace

import builders
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import (
    AttentionConfig,
    DecodeConfig,
    EmbedConfig,
    FeedForwardConfig,
    HeadConfig,
    ModelConfig,
    RecurrentConfig,
)
from jaxformer.decode import engine, int8

CELL = RecurrentConfig(cell="lstm", width=8, embed=EmbedConfig(vocab=builders.VOCAB))
MODELS = {
    "seq2seq": builders.seq2seq(attention=AttentionConfig(heads=2, kv_heads=1)),
    "untied": replace(
        builders.decoder(ffn=FeedForwardConfig(width=16, gated=True), embed=EmbedConfig(vocab=builders.VOCAB, width=4)),
        head=HeadConfig(tied=False, bias=True),
    ),
    "recurrent": ModelConfig(recurrent_encoder=CELL, recurrent_decoder=replace(CELL, attention="dot")),
}
SCALES = ("kernel_scale", "table_scale")


def leaves(tree) -> dict[str, jax.Array]:
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in jax.tree.leaves_with_path(tree)}


def rounded(module, variables):
    return jax.jit(lambda variables: int8.quantized(module, variables))(variables)


def restored(module, variables):
    """The variables as numbers again, after rounding."""
    found, given = jax.device_get((leaves(rounded(module, variables)), leaves(variables)))
    where = {"/".join(("params", *path, what[0])): what for path, what in int8.places(module).items()}

    def value(path, x):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name not in where:
            np.testing.assert_array_equal(found[name], x)
            return x
        scale = found[f"{name}_scale"]
        _, inputs, outputs = where[name]
        wide = scale.reshape(*scale.shape[: scale.ndim - outputs], *(1,) * inputs, *scale.shape[scale.ndim - outputs :])
        assert found[name].dtype == jnp.int8 and np.abs(found[name]).max() == 127
        assert (np.abs(found[name] * wide - x) <= 0.5001 * wide).all()
        return found[name] * wide

    assert set(found) == set(given) | {f"{name}_scale" for name in where}
    return jax.tree_util.tree_map_with_path(value, jax.device_get(variables))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_with_the_rounded_weights(name):
    config = MODELS[name]
    module, variables = builders.make(config)
    batch = builders.batch(builders.seq2seq() if name == "recurrent" else config)
    apply = builders.apply(module)
    found = apply(rounded(module, variables), batch)
    np.testing.assert_allclose(found, apply(restored(module, variables), batch), rtol=2e-5, atol=2e-5)
    plain = apply(variables, batch)
    error = np.abs(found - plain).max() / np.abs(plain).max()
    assert 0 < error < 0.05


def test_dense_kernels_and_tables_are_rounded_and_nothing_else():
    module, variables = builders.make(MODELS["seq2seq"])
    found = leaves(rounded(module, variables)["params"])
    whole = {name for name, x in found.items() if x.dtype == jnp.int8}
    assert {name.split("/")[-1] for name in found.keys() - whole} == {"bias", "scale", *SCALES}
    assert "source_embed/table" in whole and "decoder/blocks/cross/query/kernel" in whole
    query = found["decoder/blocks/attention/query/kernel_scale"]
    assert query.shape == (2, 2, 4)  # layers, heads, channels of a head


def test_decoding_is_that_of_the_rounded_weights():
    module, variables = builders.make(MODELS["seq2seq"], seed=3)
    prompts = [{"source": np.arange(1, 4 + i, dtype=np.int32)} for i in range(3)]
    end = engine.Vocabulary(eos=(2,), pad=0, start=1)
    runs = {}
    for weights, given in (("int8", variables), ("float", restored(module, variables))):
        config = DecodeConfig(method="beam", beams=3, max_length=6, weights=weights)
        runs[weights] = engine.run(module, given, prompts, config, end)
    for a, b in zip(runs["int8"], runs["float"], strict=True):
        assert a[0].tokens.tolist() == b[0].tokens.tolist()
        assert a[0].score == pytest.approx(b[0].score, abs=1e-4)

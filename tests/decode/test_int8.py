"""Weight-only int8 quantization: which weights, with what error, and that decoding uses exactly these values."""

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
from jaxformer.decode import int8
from jaxformer.decode.compiled import Vocabulary
from jaxformer.decode.runner import Runner

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


def quantized(module, variables):
    return jax.jit(lambda variables: int8.quantize(module, variables))(variables)


def dequantized(module, variables):
    """The quantized variables as floats."""
    leaf, original = jax.device_get((leaves(quantized(module, variables)), leaves(variables)))
    weights = {
        "/".join(("params", *path, weight.name)): weight for path, weight in int8.quantized_weights(module).items()
    }

    def value(path, x):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name not in weights:
            np.testing.assert_array_equal(leaf[name], x)
            return x
        scale = leaf[f"{name}_scale"]
        _, inputs, outputs = weights[name]
        wide = scale.reshape(*scale.shape[: scale.ndim - outputs], *(1,) * inputs, *scale.shape[scale.ndim - outputs :])
        assert leaf[name].dtype == jnp.int8 and np.abs(leaf[name]).max() == 127
        assert (np.abs(leaf[name] * wide - x) <= 0.5001 * wide).all()
        return leaf[name] * wide

    assert set(leaf) == set(original) | {f"{name}_scale" for name in weights}
    return jax.tree_util.tree_map_with_path(value, jax.device_get(variables))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_with_the_quantized_weights(name):
    config = MODELS[name]
    module, variables = builders.make(config)
    batch = builders.batch(builders.seq2seq() if name == "recurrent" else config)
    apply = builders.apply(module)
    logits = apply(quantized(module, variables), batch)
    np.testing.assert_allclose(logits, apply(dequantized(module, variables), batch), rtol=2e-5, atol=2e-5)
    plain = apply(variables, batch)
    error = np.abs(logits - plain).max() / np.abs(plain).max()
    assert 0 < error < 0.05


def test_dense_kernels_and_tables_are_quantized_and_nothing_else():
    module, variables = builders.make(MODELS["seq2seq"])
    params = leaves(quantized(module, variables)["params"])
    int8_names = {name for name, x in params.items() if x.dtype == jnp.int8}
    assert {name.split("/")[-1] for name in params.keys() - int8_names} == {"bias", "scale", *SCALES}
    assert "source_embed/table" in int8_names and "decoder/blocks/cross/query/kernel" in int8_names
    query = params["decoder/blocks/attention/query/kernel_scale"]
    assert query.shape == (2, 2, 4)  # layers, heads, channels of a head


def test_decoding_uses_the_quantized_weights():
    module, variables = builders.make(MODELS["seq2seq"], seed=3)
    prompts = [{"source": np.arange(1, 4 + i, dtype=np.int32)} for i in range(3)]
    vocabulary = Vocabulary(eos=(2,), pad=0, start=1)
    results = {}
    for weights, values in (("int8", variables), ("float", dequantized(module, variables))):
        options = DecodeConfig(max_length=6, weights=weights)
        results[weights] = Runner(module, values, vocabulary).generate(prompts, options)
    for a, b in zip(results["int8"], results["float"], strict=True):
        assert a[0].tokens.tolist() == b[0].tokens.tolist()
        assert a[0].score == pytest.approx(b[0].score, abs=1e-4)

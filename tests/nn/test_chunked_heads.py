"""Heads that each project a chunk of their input: the same as whole heads whose kernels are block-diagonal."""

from __future__ import annotations

import dataclasses

import builders
import jax
import numpy as np
import pytest

from jaxformer import testing
from jaxformer.config import AttentionConfig, Config, ConfigError, EncodingConfig, MeshConfig, TaskConfig, checks
from jaxformer.decode import int8
from jaxformer.hf import comparison
from jaxformer.models import build
from jaxformer.parallel import mesh as meshes
from jaxformer.plan import flops
from jaxformer.train import optim

CHUNK = AttentionConfig(heads=4, kv_heads=2, head_width=4, input="chunk")


def whole(config):
    """The config with whole heads."""
    parts = {name: getattr(config, name) for name in config.parts}
    edit = lambda part: dataclasses.replace(part, attention=dataclasses.replace(part.attention, input="whole"))  # noqa: E731
    return dataclasses.replace(config, **{name: edit(part) for name, part in parts.items()})


def block_diagonal(tree, width):
    """Variables in which kernels `[L, H, D / H, K]` of queries, keys and values are `[L, D, H, K]`, zero elsewhere."""

    def convert(keys, x):
        words = [str(key.key) for key in keys]
        if words[-1] != "kernel" or words[-2] not in ("query", "key", "value"):
            return x
        layers, heads, chunk, head_width = x.shape
        full = np.zeros((layers, width, heads, head_width), x.dtype)
        for head in range(heads):
            full[:, head * chunk : (head + 1) * chunk, head] = x[:, head]
        return full

    return jax.tree_util.tree_map_with_path(convert, tree)


@pytest.fixture(scope="module")
def seq2seq():
    config = builders.seq2seq(layers=1, attention=CHUNK)
    return config, *builders.make(config)


@pytest.fixture(scope="module")
def outputs(seq2seq):
    """Of the model, of whole heads with the same kernels, and of rounded kernels, with those: one program."""
    config, module, variables = seq2seq
    batch = builders.batch(config, [5, 4])

    @jax.jit
    def every(variables, full):
        rounded = int8.quantize(module, variables)
        others = build.build(whole(config)).apply(full, batch), module.apply(rounded, batch)
        return module.apply(variables, batch), *others, rounded

    return jax.device_get(every(variables, block_diagonal(variables, 8)))


def test_they_equal_whole_heads_with_block_diagonal_kernels(seq2seq, outputs):
    _, _, variables = seq2seq
    assert variables["params"]["decoder"]["blocks"]["cross"]["key"]["kernel"].shape == (1, 2, 4, 4)
    exact, expected, _, _ = outputs
    np.testing.assert_allclose(exact, expected, rtol=1e-5, atol=1e-6)


def test_the_initial_variance_is_that_of_the_chunk():
    config = builders.encoder(layers=8, width=64, attention=AttentionConfig(heads=4, head_width=32, input="chunk"))
    key = jax.random.key(0)
    params = jax.jit(lambda: build.init_variables(build.build(config), key))()["params"]
    kernel = np.asarray(params["encoder"]["blocks"]["attention"]["query"]["kernel"].value)
    assert kernel.shape == (8, 4, 16, 32)
    assert kernel.var() * 16 == pytest.approx(1.0, rel=0.05)


def test_decoding_steps_equal_the_whole_pass(seq2seq):
    config, module, variables = seq2seq
    testing.assert_steps_equal_forward(module, variables, builders.batch(config, [5, 5]), 2)


def test_a_mesh_changes_nothing():
    config = builders.encoder(layers=1, attention=AttentionConfig(heads=4, kv_heads=2, input="chunk"))
    module, variables = builders.make(config)
    mesh = meshes.make(MeshConfig(data=2, fsdp=2, tensor=2))
    testing.assert_sharded_equals_single(module, variables, builders.batch(config, [5] * 4), mesh)
    names = build.logical_names(module)["encoder"]["blocks"]["attention"]
    assert names["key"]["kernel"] == ("layers", "kv_heads", "embed", "head")
    sizes = optim.muon_axes(("query", "kernel"), names["query"]["kernel"])
    assert sizes is not None and tuple(sizes) == ((2,), (3,)), "Muon makes each head's matrix orthogonal"


def test_parameters_and_flops_are_counted(seq2seq):
    config, module, variables = seq2seq
    settings = Config(model=config, task=TaskConfig(name="translation"))
    ours, full = (checks.size.min_parameters(dataclasses.replace(settings, model=m)) for m in (config, whole(config)))
    q, k, v = (8 * heads * 4 for heads in (4, 2, 2))
    assert full - ours == 3 * ((q + k + v) - (q // 4 + k // 2 + v // 2))  # two self-attentions and a cross-attention
    names = build.logical_names(module)
    other = build.build(whole(config))
    shapes = jax.eval_shape(lambda: builders.make(whole(config))[1]["params"])
    counted = flops.matmul_parameters(settings, variables["params"], names)
    assert flops.matmul_parameters(settings, shapes, build.logical_names(other)) - counted == full - ours


def test_kernels_are_rounded_for_decoding_by_head(seq2seq, outputs):
    _, _, variables = seq2seq
    exact, _, close, rounded = outputs
    query = rounded["params"]["encoder"]["blocks"]["attention"]["query"]
    assert query["kernel"].dtype == np.int8 and query["kernel_scale"].shape == (1, 4, 4)
    kernel = variables["params"]["encoder"]["blocks"]["attention"]["query"]["kernel"]
    np.testing.assert_allclose(
        query["kernel"] * query["kernel_scale"][:, :, None], kernel, atol=np.abs(kernel).max() / 127
    )
    np.testing.assert_allclose(close, exact, atol=0.1 * np.abs(exact).max())


def test_no_family_has_them():
    config = builders.decoder(attention=AttentionConfig(heads=2, input="chunk"))
    (line,) = comparison.config_differences(config, whole(config))
    assert "attention.input" in line and "chunk" in line


@pytest.mark.parametrize(
    ("heads", "encoding", "mesh", "message"),
    [
        ({"heads": 6, "kv_heads": 6}, "rope", {}, "width: got 8, expected a multiple of the heads, each of which"),
        ({}, "transformer_xl", {}, "input: got 'chunk', expected whole for encoding.kind transformer_xl"),
        ({}, "rope", {"fsdp": 4, "data": 2}, r"width // attention.heads: got 2, expected a multiple of mesh.fsdp"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_is_refused(heads, encoding, mesh, message):
    edits = {"attention": dataclasses.replace(CHUNK, **heads), "encoding": EncodingConfig(kind=encoding)}
    config = Config(model=builders.encoder(**edits), task=TaskConfig(name="masked_lm"), mesh=MeshConfig(**mesh))
    with pytest.raises(ConfigError, match=message):
        checks.check(config)

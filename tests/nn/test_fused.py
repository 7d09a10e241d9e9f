"""The kernels of other machines: what they lack here, what they refuse, and what "auto" then takes."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import (
    AttentionConfig,
    Config,
    ConfigError,
    ConvConfig,
    DataConfig,
    EncodingConfig,
    HeadConfig,
    MeshConfig,
    ModelConfig,
    RecurrentConfig,
    StackConfig,
    checks,
)
from jaxformer.models import build
from jaxformer.nn import kernels
from jaxformer.nn.kernels import CallSite, splash
from jaxformer.nn.masks import Mask, slots_from_segments
from jaxformer.parallel import mesh as meshes

SITE = CallSite("cpu", "bfloat16", heads=8, kv_heads=4, head_width=64, queries=512, keys=512, causal=True)
LONG = {"queries": 4096, "keys": 4096}
SHORT = {"queries": 256, "keys": 256}


@pytest.mark.parametrize(
    ("edits", "name", "reason"),
    [
        ({"causal": False}, "dense", "512 x 512 scores are few; splash needs a TPU; cudnn needs an NVIDIA GPU"),
        ({}, "rowwise", "512 x 512 causal scores on a CPU"),
        ({"dropout": True}, "blockwise", "512 x 512 scores are many"),
        ({"queries": 513, "keys": 513}, "blockwise", "513 x 513 scores are many"),
        ({"bias": True}, "dense", "512 x 512 scores are few"),
        ({"prefix": True}, "dense", "512 x 512 scores are few"),
        ({"same_slots": False}, "dense", "512 x 512 scores are few"),
        (SHORT, "rowwise", "256 x 256 causal scores on a CPU"),
        ({**SHORT, "causal": False}, "dense", "few"),
        ({**SHORT, "prefix": True}, "dense", "few"),
        ({**SHORT, "bias": True}, "dense", "few"),
        ({**SHORT, "dropout": True}, "dense", "few"),
        ({**SHORT, "tensor": 2}, "dense", "few"),
        ({**SHORT, "platform": "gpu"}, "dense", "few"),
        ({"queries": 127, "keys": 127}, "dense", "127 x 127 scores are few"),
        (LONG, "blockwise", "are many"),
        ({"platform": "tpu"}, "splash", "tpu"),
        ({"platform": "tpu", "bias": True}, "dense", "splash needs an encoding that adds no bias"),
        ({"platform": "tpu", "dropout": True, **LONG}, "blockwise", "splash needs attention.dropout 0"),
        ({"platform": "tpu", "same_slots": False}, "dense", "splash needs queries that are not read against a cache"),
        ({"platform": "gpu", "dtype": "float32"}, "dense", "cudnn needs model.dtype bfloat16, not float32"),
        ({"platform": "gpu"}, "dense", "cudnn needs compute capability 8.0 or more, not 0.0"),
        ({"context": 4}, "ulysses", "context 4 x tensor 1 divides 4 key heads"),
        ({"context": 4, "tensor": 2}, "ring", "context 4 x tensor 2 does not divide 4 heads"),
        ({"context": 4, "queries": 1, "keys": 64}, "dense", "1 x 64"),
        ({"context": 4, "hidden_pairs": True}, "dense", "a table"),
    ],
)
def test_auto_says_what_it_takes_and_why(edits, name, reason):
    got, why = kernels.choose_kernel(AttentionConfig(heads=8), SITE._replace(**edits))
    assert got == name
    assert reason in why


@pytest.mark.parametrize(
    ("capability", "edits", "reason"),
    [
        (9.0, {"head_width": 256}, None),
        (8.0, {"head_width": 256}, "up to 128"),
        (9.0, {"head_width": 36}, "256"),
        (9.0, {"keys": 511}, "even numbers of slots, not 512 x 511"),
        (9.0, {"queries": 1}, "even"),
    ],
)
def test_cudnn_is_taken_where_the_gpu_can(monkeypatch, capability, edits, reason):
    monkeypatch.setattr("jaxformer.nn.kernels.cudnn._capability", lambda: capability)
    name, why = kernels.choose_kernel(AttentionConfig(heads=8), SITE._replace(platform="gpu", **edits))
    assert (name == "cudnn") == (reason is None)
    assert reason is None or reason in why


@pytest.mark.parametrize(
    ("name", "edits", "lacking"),
    [
        ("splash", {}, "a TPU"),
        ("cudnn", {}, "an NVIDIA GPU"),
        ("ulysses", {"context": 3}, "heads that context x tensor (3) divides, not 8"),
        ("splash", {"platform": "tpu", "context": 2}, "whole sequences"),
    ],
)
def test_a_named_kernel_that_cannot_work_is_refused_in_one_line(name, edits, lacking):
    with pytest.raises(ConfigError, match="expected a kernel that works here; set it to auto") as error:
        kernels.choose_kernel(AttentionConfig(heads=8, kernel=name), SITE._replace(**edits))
    assert lacking in str(error.value)
    assert "\n" not in str(error.value)


def test_against_a_cache_a_kernel_for_whole_sequences_gives_way():
    cached = SITE._replace(same_slots=False, causal=True, queries=1)
    assert kernels.choose_kernel(AttentionConfig(heads=8, kernel="splash"), cached)[0] == "dense"
    assert kernels.choose_kernel(AttentionConfig(heads=8, kernel="dense"), cached._replace(keys=2**21))[0] == "dense"


def test_a_model_says_its_kernels_before_it_is_built():
    stack = StackConfig(width=64, attention=AttentionConfig(heads=4))
    model = ModelConfig(encoder=stack, decoder=stack)
    assert {side: name for side, (name, _) in build.chosen_kernels(model, 64).items()} == dict.fromkeys(
        ("encoder", "decoder"), "dense"
    )
    assert not build.uses_causal_ring(model, 64)
    with jax.set_mesh(meshes.make(MeshConfig(data=1, context=8))):
        assert build.uses_causal_ring(model, 64)
        assert not build.uses_causal_ring(
            dataclasses.replace(model, decoder=None), 64
        )  # nothing is causal: nothing to balance
    named = dataclasses.replace(stack, attention=AttentionConfig(heads=4, kernel="splash"))
    with pytest.raises(ConfigError, match="needs a TPU"):
        build.chosen_kernels(ModelConfig(decoder=named), 64)


@pytest.mark.parametrize("kernel", ["splash", "cudnn", "ring", "ulysses", "blockwise"])
def test_a_table_of_pairs_is_refused(kernel):
    side, x = slots_from_segments(jnp.ones((1, 4), jnp.int32)), jnp.zeros((1, 4, 2, 8))
    mask = Mask(side, side, hidden_pairs=jnp.zeros((1, 4, 4), bool))
    with pytest.raises(ConfigError, match="single pairs"):
        kernels.get(kernel).apply(x, x, x, mask, None, None, AttentionConfig(heads=2))


@pytest.mark.parametrize(
    ("position", "segment", "fine"),
    [
        ([0, 1, 2, 3, 0], [1, 1, 1, 1, 0], True),
        ([0, 1, 0, 1, 2], [1, 1, 2, 2, 2], True),
        ([0, 0, 0, 1, 2], [0, 0, 1, 1, 1], True),
        ([0, 3, 1, 2, 0], [1, 1, 1, 1, 0], False),
        ([0, 2, 3, 4, 5], [1, 1, 1, 1, 1], False),
        ([0, 0, 1, 0, 0], [1, 2, 1, 0, 0], False),
    ],
)
def test_splash_knows_when_slots_do_not_stand_for_positions(position, segment, fine):
    side = slots_from_segments(jnp.ones((1, 5), jnp.int32))._replace(
        position=jnp.array([position]), segment=jnp.array([segment])
    )
    assert bool(splash._slots_are_positions(side, side)[0]) == fine
    later = side._replace(position=side.position + 2)  # of a cache: the same slots, further on
    assert not bool(splash._slots_are_positions(later, side)[0])


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="cuDNN needs a GPU")
@pytest.mark.parametrize("mask", ["packed", "causal", "window"])
def test_cudnn_is_dense(mask):
    rng = np.random.default_rng(0)
    q, do = (jnp.asarray(rng.standard_normal((2, 128, 4, 64)), jnp.bfloat16) for _ in range(2))
    k, v = (jnp.asarray(rng.standard_normal((2, 128, 2, 64)), jnp.bfloat16) for _ in range(2))
    segment = jnp.repeat(jnp.array([[1, 2, 3, 0], [1, 1, 1, 1]]), 32, axis=1)
    side = slots_from_segments(segment)
    see = Mask(side, side, causal=mask != "packed", window=9 if mask == "window" else None, same_slots=True)

    @functools.partial(jax.jit, static_argnames="name")
    def run(q, k, v, name):
        def total(q, k, v):
            o = kernels.get(name).apply(q / 8, k, v, see, None, None, AttentionConfig(heads=4))
            return jnp.sum(o.astype(jnp.float32) * do.astype(jnp.float32)), o

        return jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(q, k, v)

    got, wanted = (
        jax.tree.map(lambda x: x.astype(jnp.float32), run(q, k, v, name=name)) for name in ("cudnn", "dense")
    )
    chex.assert_trees_all_close(got[0][1], wanted[0][1], rtol=2e-2, atol=2e-2)
    chex.assert_trees_all_close(got[1], wanted[1], rtol=5e-2, atol=5e-2)


def config_of(**parts) -> Config:
    model = ModelConfig(**({"decoder": StackConfig()} | parts))
    return Config(model=model, data=DataConfig(length=64), mesh=MeshConfig(data=1, context=4))


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"decoder": None, "encoder": StackConfig(conv=ConvConfig())}, "a convolution"),
        ({"decoder": None, "recurrent_decoder": RecurrentConfig()}, "a recurrent model"),
        ({"head": HeadConfig(kind="classes", pooling="last")}, "head.pooling last"),
    ],
)
def test_what_needs_slots_in_order_is_refused_where_sequences_are_divided(parts, expected):
    with pytest.raises(ConfigError, match="config.mesh.context: got 4, expected 1 with") as error:
        checks.mesh.check_context(config_of(**parts), 4)
    assert expected in str(error.value)


def test_lengths_that_the_context_axis_does_not_divide_are_refused():
    config = dataclasses.replace(config_of(), data=DataConfig(length=66))
    with pytest.raises(ConfigError, match=r"config.data.length: got 66, expected a multiple of mesh.context \(4\)"):
        checks.mesh.check_context(config, 4)
    checks.mesh.check_context(config_of(decoder=StackConfig(encoding=EncodingConfig(kind="alibi"))), 4)

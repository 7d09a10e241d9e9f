"""Latent attention and the mixtures of DeepSeek against numpy, in every place where a stack's layers are read."""

from __future__ import annotations

import dataclasses
import math

import builders
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxformer import testing
from jaxformer.config import (
    AttentionConfig,
    Config,
    ConfigError,
    DataConfig,
    EncodingConfig,
    FeedForwardConfig,
    LatentConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    NormConfig,
    OptimizerConfig,
    RopeScalingConfig,
)
from jaxformer.config.checks import mesh as mesh_checks
from jaxformer.config.checks import size
from jaxformer.config.checks.model import check_model
from jaxformer.config.checks.stack import check_stack
from jaxformer.decode import int8
from jaxformer.models import build
from jaxformer.nn import moe as mixtures
from jaxformer.nn.encodings import rope
from jaxformer.nn.latent_attention import LatentAttention, absorbs
from jaxformer.nn.masks import Mask, slots_from_segments
from jaxformer.parallel import mesh as meshes
from jaxformer.plan import decoding, flops, shapes
from jaxformer.train import optim

LATENT = LatentConfig(rank=6, query_rank=5, content_width=4, rope_width=2, value_width=3)
MOE = MoEConfig(
    experts=4, top_k=2, shared=1, dense_layers=1, dense_width=20, gate="sigmoid", correction=True, groups=2,
    top_groups=1, group_score="top2", scale=2.5,
)  # fmt: skip
STACK = builders.stack(
    layers=2,
    attention=AttentionConfig(heads=2, bias=False, latent=LATENT),
    encoding=EncodingConfig("rope", interleaved=True),
    ffn=FeedForwardConfig(width=12, activation="silu", gated=True, bias=False),
    norm=NormConfig("rms"),
    moe=MOE,
)
MODEL = ModelConfig(decoder=STACK)
ALONE = ModelConfig(decoder=dataclasses.replace(STACK, layers=1, moe=None))  # one layer compiles sooner


def edited(**parts) -> ModelConfig:
    """`MODEL` with other fields of "attention", "moe", "encoding" or of the stack itself."""
    nested = {name: dataclasses.replace(getattr(STACK, name), **edit) for name, edit in parts.items()
              if isinstance(edit, dict)}  # fmt: skip
    return ModelConfig(decoder=dataclasses.replace(STACK, **{**parts, **nested}))


# --- the layer --------------------------------------------------------------------------------------------------------


def rms(x, scale, epsilon):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon) * scale


def turned(x, angle, interleaved):
    """One vector whose pairs are turned by `angle` `[P]`."""
    half = len(x) // 2
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + half) for i in range(half)]
    y = x.copy()
    for (a, b), phi in zip(pairs, angle):
        y[a], y[b] = x[a] * np.cos(phi) - x[b] * np.sin(phi), x[b] * np.cos(phi) + x[a] * np.sin(phi)
    return y


def by_loops(params, latent, x, base, interleaved, window, factor):
    """Causal latent attention of one row `[T, D]`, head by head and query by query, in float64."""
    params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    T, heads = len(x), params["up"]["kernel"].shape[1]
    angle = lambda t: t * base ** (-2 * np.arange(latent.rope_width // 2) / latent.rope_width)  # noqa: E731
    read = x
    if latent.query_rank is not None:
        down = x @ params["query_down"]["kernel"] + params["query_down"].get("bias", 0)
        read = rms(down, params["query_norm"]["scale"], latent.epsilon)
    both = x @ params["down"]["kernel"] + params["down"].get("bias", 0)
    c = rms(both[:, : latent.rank], params["latent_norm"]["scale"], latent.epsilon)
    shared = [turned(both[t, latent.rank :], angle(t), interleaved) for t in range(T)]
    y = np.zeros((T, x.shape[1])) + params["out"].get("bias", 0)
    for h in range(heads):
        up = params["up"]["kernel"][:, h]
        for t in range(T):
            q = read[t] @ params["query"]["kernel"][:, h]
            q = np.concatenate([q[: latent.content_width], turned(q[latent.content_width :], angle(t), interleaved)])
            seen = range(0 if window is None else max(0, t - window + 1), t + 1)
            keys = [np.concatenate([c[s] @ up[:, : latent.content_width], shared[s]]) for s in seen]
            scores = np.array([q @ k for k in keys]) * factor
            weights = np.exp(scores - scores.max())
            values = np.array([c[s] @ up[:, latent.content_width :] for s in seen])
            y[t] += weights / weights.sum() @ values @ params["out"]["kernel"][h]
    return y


FORMS = {
    "narrow values": (LATENT, True, None, None),
    "wide values, no query latent, halves, biases": (
        dataclasses.replace(LATENT, query_rank=None, rope_width=4, value_width=11, epsilon=0.1), False, 2, None
    ),
    "scores of YaRN": (dataclasses.replace(LATENT, value_width=None), True, None, 1.5),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_the_layer_is_that_of_loops(name):
    latent, interleaved, window, score_scale = FORMS[name]
    # The single pair of channels keeps its frequency under YaRN: the factor on scores alone is left.
    scaling = score_scale and RopeScalingConfig("yarn", factor=4.0, magnitude=1.0, score_scale=score_scale)
    encoding = EncodingConfig("rope", base=50.0, interleaved=interleaved, scaling=scaling)
    config = AttentionConfig(heads=2, bias=not interleaved, latent=latent, window=window)
    module = LatentAttention(config, latent, encoding, 8)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 5, 8)).astype(np.float32)
    slots = slots_from_segments(jnp.ones((2, 5), jnp.int32))

    def run(params, x):
        position = rope.Angles(encoding, config, latent.rope_width).apply({}, slots)
        return module.apply({"params": params}, x, Mask(slots, slots, True, window, same_slots=True), position)[0]

    def init(x):
        rotation = rope.Rotation(*(jnp.ones((2, 5, latent.rope_width // 2)),) * 2)
        return module.init(jax.random.key(0), x, Mask(slots, slots, True), rotation)

    shape = jax.eval_shape(init, x)["params"]
    params = jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), nn.meta.unbox(shape))
    factor = (latent.content_width + latent.rope_width) ** -0.5
    factor *= 1.0 if score_scale is None else (0.1 * score_scale * math.log(4.0) + 1.0) ** 2
    got = jax.jit(run)(params, x)
    for row in range(2):
        expected = by_loops(params, latent, x[row].astype(np.float64), 50.0, interleaved, window, factor)
        np.testing.assert_allclose(got[row], expected, rtol=2e-5, atol=2e-5)


# --- the stack --------------------------------------------------------------------------------------------------------


def test_a_decode_step_absorbs_and_a_prompt_does_not_with_the_logits_of_the_whole_pass():
    module, variables = builders.make(MODEL)
    assert absorbs(LATENT, 1, 6) and not absorbs(LATENT, 4, 6)
    testing.assert_steps_equal_forward(module, variables, builders.batch(MODEL, [6, 6]), 4)


def test_a_cache_holds_one_latent_and_one_rotated_key_a_token():
    module = build.build(edited(unroll=1))
    cache = module.bind({}).decoder.empty_cache(2, 7, jnp.float32)
    assert cache.k.shape == (2, 2, 1, 6, 7) and cache.v.shape == (2, 2, 1, 7, 2)
    held = (cache.k.nbytes + cache.v.nbytes) / 2
    assert decoding.transformer_state_bytes(STACK, "float32", 7)["keys and values"] == held == 2 * 7 * (6 + 2) * 4


def test_packed_texts_see_themselves_alone():
    module, variables = builders.make(ALONE)
    testing.assert_packing_invariant(module, variables, (4, 2), builders.VOCAB)


def test_tiles_and_recomputation_change_no_value_and_no_gradient():
    module, variables = builders.make(ALONE)
    batch = builders.batch(ALONE, [4, 4])
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(2, 4, builders.VOCAB)), jnp.float32)

    def gradient(module):
        return jax.jit(jax.grad(lambda v: jnp.sum(weights * module.apply(v, batch))))(variables)

    attention = dataclasses.replace(STACK.attention, kernel="blockwise", block=2)
    tiled = dataclasses.replace(ALONE.decoder, attention=attention, remat="full")
    other, expected = gradient(build.build(ModelConfig(decoder=tiled))), gradient(module)
    chex.assert_trees_all_close(other, expected, rtol=1e-4, atol=1e-5)
    assert np.any(expected["params"]["decoder"]["blocks"]["attention"]["up"]["kernel"])


def test_on_eight_devices_as_on_one():
    module, variables = builders.make(ALONE)
    mesh = meshes.make(MeshConfig(data=1, tensor=2, context=2, fsdp=2))
    testing.assert_sharded_equals_single(module, variables, builders.batch(ALONE, [6, 4, 5, 6]), mesh)


def test_int8_leaves_the_up_projection_as_it_is():
    paths = set(int8.quantized_weights(build.build(MODEL)))
    attention = ("decoder", "blocks", "attention")
    assert {(*attention, name) for name in ("query", "query_down", "down", "out")} <= paths
    assert (*attention, "up") not in paths and ("decoder", "dense_blocks", "ffn", "in") in paths


# --- mixtures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "moe",
    [
        MoEConfig(experts=6, top_k=2, normalise=False, groups=3, top_groups=2, scale=16.0),
        MoEConfig(experts=6, top_k=3, gate="sigmoid", correction=True, groups=2, top_groups=1, group_score="top2"),
        MoEConfig(experts=6, top_k=2, gate="sigmoid", correction=True, scale=0.5),
    ],
)
def test_experts_are_chosen_as_token_by_token(moe):
    rng = np.random.default_rng(3)
    probs = rng.uniform(size=(2, 9, 6)).astype(np.float32)
    correction = (0.2 * rng.normal(size=6)).astype(np.float32) if moe.correction else None
    visible = np.ones((2, 9), bool)
    visible[1, 7:] = False
    chosen, gates = mixtures.choose_experts(probs, visible, moe, correction)
    for b, t in np.ndindex(2, 9):
        if not visible[b, t]:
            assert set(np.asarray(chosen[b, t])) == {6} and not np.any(gates[b, t])
            continue
        scores = probs[b, t] + (0 if correction is None else correction)
        groups = scores.reshape(moe.groups, -1)
        best = groups.max(1) if moe.group_score == "max" else np.sort(groups, 1)[:, -2:].sum(1)
        kept = np.argsort(-best)[: moe.top_groups or moe.groups]
        allowed = [e for e in range(6) if e // groups.shape[1] in kept]
        expected = sorted(allowed, key=lambda e: -scores[e])[: moe.top_k]
        assert list(np.asarray(chosen[b, t])) == expected
        weights = probs[b, t][expected]
        weights = weights / weights.sum() if moe.normalise else weights
        np.testing.assert_allclose(gates[b, t], weights * moe.scale, rtol=1e-5)


# --- what else reads a stack ------------------------------------------------------------------------------------------


def test_parameters_and_products_are_counted():
    module = build.build(MODEL)
    tree, names = nn.meta.unbox(build.shapes(module))["params"], build.logical_names(module)
    config = Config(model=MODEL, data=DataConfig(length=16))
    down, query, up, out = 8 * (6 + 2), 5 * (8 + 2 * 6), 6 * 2 * 7, 2 * 3 * 8
    attention, dense, expert, router, table = down + query + up + out, 3 * 8 * 20, 3 * 8 * 12, 8 * 4, builders.VOCAB * 8
    all_parameters = 2 * attention + dense + router + 5 * expert + table
    assert size.min_parameters(config) == all_parameters
    assert (
        sum(x.size for x in jax.tree.leaves(tree)) == all_parameters + 2 * (8 + 8 + 6 + 5) + 8 + 4
    )  # norms, correction
    multiplied = 2 * attention + dense + router + (2 + 1) * expert + table
    assert flops.matmul_parameters(config, tree, names) == pytest.approx(multiplied)
    assert flops.attention_flops(config, 16) == 6 * 2 * 2 * (6 + 3) * 16
    layers = shapes.stack_layers(config, "decoder", 16)
    assert layers.multiplied == pytest.approx(multiplied - table)
    assert layers.scores == pytest.approx(2 * (6 + 3) / 2 * 17 / 2)


def test_the_correction_is_not_decayed():
    module = build.build(MODEL)
    mask = optim.decay_mask(nn.meta.unbox(build.shapes(module))["params"], OptimizerConfig())
    blocks = mask["decoder"]["blocks"]
    assert not blocks["ffn"]["correction_bias"] and blocks["attention"]["up"]["kernel"]


REFUSED = {
    "kv_heads": ({"attention": {"kv_heads": 1}}, r"attention.kv_heads: got 1, expected None with attention.latent"),
    "head_width": ({"attention": {"head_width": 4}}, r"attention.head_width: got 4, expected None"),
    "norm": ({"attention": {"norm": NormConfig("rms")}}, r"attention.norm: got"),
    "alibi": ({"encoding": {"kind": "alibi"}}, r"encoding.kind: got 'alibi', expected rope, or an encoding"),
    "odd rotation": ({"attention": {"latent": dataclasses.replace(LATENT, rope_width=3)}}, r"encoding.fraction: got"),
    "scores": (
        {"encoding": {"scaling": RopeScalingConfig("linear", factor=2.0, score_scale=1.0)}},
        r"score_scale: got 1.0, expected 0 where kind is not yarn",
    ),
    "scores without latents": (
        {"encoding": {"scaling": RopeScalingConfig("yarn", score_scale=1.0)}, "attention": {"latent": None}},
        r"score_scale: got 1.0, expected 0 without attention.latent",
    ),
    "groups": ({"moe": {"groups": 3}}, r"moe.groups: got 3, expected a divisor of the experts \(4\)"),
    "top groups": ({"moe": {"top_groups": 3}}, r"moe.top_groups: got 3, expected at most the groups \(2\)"),
    "few experts": ({"moe": {"top_k": 3}}, r"moe.top_groups: got 1, expected enough groups of 2 experts"),
    "single experts": (
        {"moe": {"groups": 4, "top_groups": 2}}, r"moe.group_score: got 'top2', expected max where a group has one"
    ),
    "all dense": ({"moe": {"dense_layers": 2}}, r"moe.dense_layers: got 2, expected fewer than the layers \(2\)"),
    "width of none": ({"moe": {"dense_layers": 0}}, r"moe.dense_width: got 20, expected None where dense_layers is 0"),
    "rate": ({"moe": {"correction": False, "correction_rate": 0.1}}, r"correction_rate: got 0.1, expected 0 where moe"),
    "shared": ({"share_layers": True}, r"moe.dense_layers: got 1, expected 0 with share_layers"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(name):
    edits, message = REFUSED[name]
    model = edited(**edits)
    with pytest.raises(ConfigError, match=message):
        check_stack(model.decoder, "config.model.decoder", Config(model=model))


def test_parts_that_need_layers_of_one_form_refuse_others():
    config = Config(model=MODEL)
    check_stack(STACK, "config.model.decoder", config)
    check_model(MODEL)
    sizes = {"data": 1, "fsdp": 1, "tensor": 1, "context": 1, "expert": 1, "stage": 2}
    with pytest.raises(ConfigError, match=r"mesh.stage: got 2, expected 1 for decoder.moe.dense_layers"):
        mesh_checks.check_divisibility(config, sizes)
    with pytest.raises(ConfigError, match=r"moe.dense_layers: got 1, expected 0 in a decoder with an encoder"):
        check_model(dataclasses.replace(MODEL, encoder=builders.stack()))

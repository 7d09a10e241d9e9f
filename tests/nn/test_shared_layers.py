"""Layers that share one set of parameters, and embeddings whose sum is projected to the model width (ALBERT)."""

import dataclasses

import builders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import traverse_util

from jaxformer.config import (
    AdapterConfig,
    AttentionConfig,
    Config,
    ConfigError,
    DataConfig,
    EmbedConfig,
    EncodingConfig,
    FeedForwardConfig,
    HeadConfig,
    MeshConfig,
    ModelConfig,
    NormConfig,
    OptimizerConfig,
)
from jaxformer.config.checks import mesh as mesh_checks
from jaxformer.config.checks import size
from jaxformer.config.checks.model import check_model
from jaxformer.config.checks.sections import check_train
from jaxformer.config.checks.stack import check_stack
from jaxformer.decode import int8
from jaxformer.models import adapters, build
from jaxformer.nn.masks import slots_from_segments
from jaxformer.parallel import mesh as meshes
from jaxformer.parallel import rules
from jaxformer.plan import flops
from jaxformer.types import Batch, Stream

LAYERS, WIDTH, INNER, VOCAB, LENGTH = 3, 16, 8, 24, 6
TOKENS = jnp.asarray(np.random.default_rng(0).integers(1, VOCAB, (8, LENGTH)))
SLOTS = slots_from_segments(jnp.ones((8, LENGTH), jnp.int32))
KINDS = jnp.asarray(np.random.default_rng(1).integers(0, 2, (8, LENGTH)))
STACK = builders.stack(
    layers=LAYERS,
    width=WIDTH,
    share_layers=True,
    embed=EmbedConfig(vocab=VOCAB, width=INNER, projection="sum", projection_bias=True, norm=True, kinds=2),
    attention=AttentionConfig(heads=2),
    encoding=EncodingConfig("learned", max_length=LENGTH),
    ffn=FeedForwardConfig(width=32),
    norm=NormConfig(order="post"),
)
HEAD = HeadConfig(transform=True, bias=True)
ALBERT = ModelConfig(encoder=STACK, head=HEAD)
BATCH = Batch(Stream(TOKENS, SLOTS, KINDS), None)


def random_params(model):
    """Parameters that are all random, so that no bias and no scale could be left out unseen."""
    shapes = nn.meta.unbox(build.shapes(build.build(model)))["params"]
    generator = np.random.default_rng(2)
    return jax.tree.map(lambda x: jnp.asarray(0.3 * generator.standard_normal(x.shape), jnp.float32), shapes)


def apply(model, variables):
    return jax.jit(build.build(model).apply)(variables, BATCH)


@pytest.fixture(scope="module")
def params():
    return random_params(ALBERT)


@pytest.fixture(scope="module")
def logits(params):
    return apply(ALBERT, {"params": params})


def stacked(params, side="encoder"):
    """The parameters of layers of their own that are equal."""
    repeat = lambda x: jnp.broadcast_to(x, (LAYERS, *x.shape))  # noqa: E731
    return params | {side: params[side] | {"blocks": jax.tree.map(repeat, params[side]["blocks"])}}


def separate(model):
    part = "encoder" if model.decoder is None else "decoder"
    stack = dataclasses.replace(getattr(model, part), share_layers=False)
    return dataclasses.replace(model, **{part: stack})


def gelu(x):
    return jax.nn.gelu(x, approximate=False)


def norm(x, weights):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weights["scale"] + weights["bias"]


def test_the_model_is_what_the_paper_writes(params, logits):
    """Slowly, in numpy, row by row: sum, norm and projection, then the same layer again and again."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    embed, stack, head = p["source_embed"], p["encoder"], p["head"]
    block = stack["blocks"]
    for row in range(2):
        x = embed["table"][TOKENS[row]] + embed["kinds"][KINDS[row]] + stack["position"]["table"]
        x = norm(x, stack["embed_norm"]) @ stack["embed_projection"]["kernel"] + stack["embed_projection"]["bias"]
        for _ in range(LAYERS):
            own, total = block["attention"], np.zeros_like(x)
            for h in range(2):
                q, k, v = (x @ own[n]["kernel"][:, h] + own[n]["bias"][h] for n in ("query", "key", "value"))
                weights = np.exp(q @ k.T / np.sqrt(8))
                total += weights / weights.sum(-1, keepdims=True) @ v @ own["out"]["kernel"][h]
            x = norm(x + total + own["out"]["bias"], block["attention_norm"])
            hidden = np.asarray(gelu(x @ block["ffn"]["in"]["kernel"] + block["ffn"]["in"]["bias"]))
            x = norm(x + hidden @ block["ffn"]["out"]["kernel"] + block["ffn"]["out"]["bias"], block["ffn_norm"])
        y = np.asarray(gelu(x @ head["transform"]["kernel"] + head["transform"]["bias"]))
        y = norm(y, head["transform_norm"]) @ embed["table"].T + head["bias"]
        np.testing.assert_allclose(logits[row], y, rtol=2e-4, atol=2e-4)


def test_gradients_are_the_sums_over_layers_of_their_own(params):
    def gradient(model, params):
        module = build.build(model)
        return jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(module.apply({"params": p}, BATCH)))))(params)

    looped = dataclasses.replace(ALBERT, encoder=dataclasses.replace(STACK, unroll=1))
    shared, own = gradient(looped, params), gradient(separate(looped), stacked(params))
    summed = jax.tree.map(lambda x: x.sum(0), own["encoder"]["blocks"])
    for got, expected in zip(jax.tree.leaves(shared["encoder"]["blocks"]), jax.tree.leaves(summed), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3)


def test_loops_and_recomputation_change_nothing(params, logits):
    model = dataclasses.replace(ALBERT, encoder=dataclasses.replace(STACK, unroll=1, remat="full"))
    np.testing.assert_allclose(apply(model, {"params": params}), logits, rtol=1e-5, atol=1e-5)


def test_there_is_one_layer_of_parameters_and_its_work_is_done_by_each(params):
    names = build.logical_names(build.build(ALBERT))
    assert not any("layers" in axes for axes in jax.tree.leaves(names, is_leaf=lambda x: isinstance(x, tuple)))
    others = separate(ALBERT)
    count = lambda tree: sum(x.size for x in jax.tree.leaves(tree))  # noqa: E731
    block = count(params["encoder"]["blocks"])
    assert count(stacked(params)) - count(params) == (LAYERS - 1) * block
    config, own = Config(model=ALBERT), Config(model=others)
    other_names = build.logical_names(build.build(others))
    assert flops.flops_per_token(config, params, names, LENGTH) == pytest.approx(
        flops.flops_per_token(own, stacked(params), other_names, LENGTH)
    )
    kernels = {p: x for p, x in traverse_util.flatten_dict(params["encoder"]["blocks"]).items() if p[-1] == "kernel"}
    assert size.min_parameters(own) - size.min_parameters(config) == (LAYERS - 1) * count(kernels)
    assert size.min_parameters(config) <= count(params)


@pytest.mark.parametrize("unroll", [1, None])
def test_a_cache_computes_what_a_whole_pass_does(unroll):
    """Of an encoder-decoder, whose cross-attention has one projection of the memory in all layers."""
    model = ModelConfig(encoder=STACK, decoder=dataclasses.replace(STACK, unroll=unroll), head=HEAD)
    module, params = build.build(model), random_params(model)
    cut = lambda tree, end: jax.tree.map(lambda x: x[:2, :end], tree)  # noqa: E731
    source, target = cut(BATCH.source, LENGTH), Stream(cut(TOKENS, LENGTH), cut(SLOTS, LENGTH), None)

    @jax.jit
    def both(variables):
        whole = module.apply(variables, Batch(source, target))
        first, state = module.apply(variables, Batch(source, cut(target, 4)), LENGTH, method="start")
        return whole[:, 3:5], first, module.apply(variables, target.tokens[:, 4:5], state, method="step")[0]

    prepared = module.unstack({"params": params})
    assert jax.tree.structure(prepared) == jax.tree.structure({"params": params})  # nothing to separate
    whole, first, second = both(prepared)
    np.testing.assert_allclose(first, whole[:, 0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(second, whole[:, 1], rtol=1e-4, atol=1e-4)


def test_a_mesh_computes_the_same(params, logits):
    config = MeshConfig(fsdp=2, tensor=2, data=2)
    mesh_checks.check_divisibility(Config(model=ALBERT), {n: getattr(config, n) for n in meshes.AXES})
    mesh, module = meshes.make(config), build.build(ALBERT)
    shardings = rules.shardings(build.shapes(module), mesh)["params"]
    placed = jax.device_put(params, shardings)
    with jax.set_mesh(mesh):
        got = jax.jit(lambda p: module.apply({"params": p}, BATCH))(placed)
    np.testing.assert_allclose(got, logits, rtol=1e-4, atol=1e-4)


def test_every_projection_of_embeddings_has_a_sharding():
    """No mesh axis divides two axes of one matrix."""
    mesh = meshes.make(MeshConfig(data=1, fsdp=8))
    rows = dataclasses.replace(STACK, embed=EmbedConfig(vocab=VOCAB, width=INNER), output_width=INNER)
    for stack, path in ((STACK, ("decoder", "embed_projection", "kernel")), (rows, ("target_embed", "up"))):
        made = rules.shardings(build.shapes(build.build(ModelConfig(decoder=stack, head=HEAD))), mesh)["params"]
        assert traverse_util.flatten_dict(made)[path].spec == jax.P(None, "fsdp")


def test_adapters_and_integers_are_of_the_one_layer(params, logits):
    adapted = dataclasses.replace(
        ALBERT, adapter=AdapterConfig(rank=2, targets=("attention/query", "embed_projection"))
    )
    check_model(adapted)
    shapes = nn.meta.unbox(build.shapes(build.build(adapted)))["params"]
    assert shapes["encoder"]["blocks"]["attention"]["query"]["lora_a"].shape == (WIDTH, 2)
    generator = np.random.default_rng(3)
    flat = traverse_util.flatten_dict(shapes)
    own = {path: jnp.asarray(0.2 * generator.standard_normal(x.shape), jnp.float32) for path, x in flat.items()}
    own |= traverse_util.flatten_dict(params)
    trained = traverse_util.unflatten_dict(own)
    got = apply(adapted, {"params": trained})
    assert np.abs(np.asarray(got - logits)).max() > 5e-4
    merged = apply(ALBERT, {"params": adapters.merge(trained)})
    np.testing.assert_allclose(got, merged, rtol=1e-5, atol=1e-5)
    rounded = int8.quantize(build.build(ALBERT), {"params": params})
    assert rounded["params"]["encoder"]["blocks"]["ffn"]["in"]["kernel"].dtype == jnp.int8
    close = apply(ALBERT, rounded)
    assert np.abs(np.asarray(close - logits)).max() < 0.05 * np.abs(np.asarray(logits)).max()


def test_a_slot_head_may_have_a_hidden_layer(params):
    head = HeadConfig(kind="slots", classes=1, width=5, hidden="relu")
    model = dataclasses.replace(ALBERT, head=head)
    own = random_params(model) | {name: params[name] for name in ("encoder", "source_embed")}
    module = build.build(model)
    x = np.asarray(module.apply({"params": own}, BATCH, method="hidden"))
    hidden = np.maximum(x @ own["head"]["hidden"]["kernel"] + own["head"]["hidden"]["bias"], 0)
    expected = hidden @ own["head"]["decision"]["kernel"] + own["head"]["decision"]["bias"]
    np.testing.assert_allclose(module.apply({"params": own}, BATCH), expected, rtol=1e-4, atol=1e-4)


REFUSALS = {
    "share_layers: got True, expected False with norm.kind batch": {"norm": NormConfig(kind="batch")},
    "embed.projection: got sum, expected table where embed.width is None": {
        "embed": EmbedConfig(vocab=VOCAB, projection="sum")
    },
    "embed.projection: got sum, expected table for recurrent parts, permutations and stacks without layers": {
        "layers": 0
    },
}


@pytest.mark.parametrize("message", REFUSALS)
def test_stacks_that_cannot_be_are_refused(message):
    model = dataclasses.replace(ALBERT, encoder=dataclasses.replace(STACK, **REFUSALS[message]))

    def check():
        check_stack(model.encoder, "config.model.encoder", Config(model=model, data=DataConfig(length=LENGTH)))
        check_model(model)

    with pytest.raises(ConfigError) as error:
        check()
    assert message in str(error.value).replace("'", "") and "\n" not in str(error.value)


def test_what_needs_layers_of_their_own_or_a_table_of_the_models_width_is_refused():
    with pytest.raises(ConfigError, match=r"optimizer.layer_decay: got 0.5, expected 1 for encoder.share_layers"):
        check_train(Config(model=ALBERT, optimizer=OptimizerConfig(layer_decay=0.5)))
    with pytest.raises(ConfigError, match=r"mesh.stage: got 3, expected 1 for encoder.share_layers"):
        mesh_checks.check_divisibility(Config(model=ALBERT), dict.fromkeys(meshes.AXES, 1) | {"stage": 3})
    with pytest.raises(ConfigError, match=r"adapter.layers: got \(0,\), expected \(\) where layers share"):
        check_model(dataclasses.replace(ALBERT, adapter=AdapterConfig(layers=(0,))))
    with pytest.raises(ConfigError, match=r"embed.projection: got 'sum', expected table, or head.transform"):
        check_model(dataclasses.replace(ALBERT, head=HeadConfig()))
    other = dataclasses.replace(STACK, embed=dataclasses.replace(STACK.embed, projection="table"))
    with pytest.raises(ConfigError, match=r"share_embeddings: got '?True'?, expected the same embed.projection"):
        check_model(ModelConfig(encoder=STACK, decoder=other, head=HEAD, share_embeddings=True))

"""Schedules at known points, optimizers against their references, Muon per matrix, decay masks, state shardings."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxformer.config import ConfigError, MeshConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from jaxformer.parallel import mesh as meshes
from jaxformer.train import ema, optim
from jaxformer.types import leaf_path

PARAMS = {
    "encoder": {
        "blocks": {
            "attention": {
                "query": {"kernel": jnp.ones((2, 8, 2, 4)), "bias": jnp.zeros((2, 2, 4))},
                "out": {"kernel": jnp.ones((2, 2, 4, 8))},
            },
            "ffn": {"in": {"kernel": jnp.ones((2, 8, 16))}},
            "norm": {"scale": jnp.ones((2, 8))},
        }
    },
    "source_embed": {"table": jnp.ones((24, 8))},
    "head": {"decision": {"kernel": jnp.ones((8, 3))}},
}
NAMES = {
    "encoder": {
        "blocks": {
            "attention": {
                "query": {"kernel": ("layers", "embed", "heads", "head"), "bias": ("layers", "heads", "head")},
                "out": {"kernel": ("layers", "heads", "head", "embed")},
            },
            "ffn": {"in": {"kernel": ("layers", "embed", "ffn")}},
            "norm": {"scale": ("layers", None)},
        }
    },
    "source_embed": {"table": ("vocab", "table")},
    "head": {"decision": {"kernel": ("embed", None)}},
}


def noise(tree, seed=0):
    keys = iter(jax.random.split(jax.random.key(seed), len(jax.tree.leaves(tree))))
    return jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), tree)


def rates(kind, counts, steps=100, width=16, **fields):
    rate = optim.schedule(ScheduleConfig(kind=kind, **fields), steps, width)
    return np.asarray([rate(n) for n in counts])


@pytest.mark.parametrize("kind", sorted(optim.SCHEDULES))
def test_warm_up_is_linear_and_peaks_at_the_warm_up_step(kind):
    got = rates(kind, [0, 1, 4, 9], peak=0.5, warmup=10)
    top = 0.5 if kind != "noam" else 0.5 * (16 * 10) ** -0.5
    np.testing.assert_allclose(got, top * np.array([0.1, 0.2, 0.5, 1.0]), rtol=1e-6)
    assert rates(kind, range(100), peak=0.5, warmup=10).argmax() in (9, 10)


@pytest.mark.parametrize(
    ("kind", "counts", "expected"),
    [
        ("constant", [10, 99, 500], [1.0, 1.0, 1.0]),
        ("linear", [10, 55, 100, 500], [1.0, 0.55, 0.1, 0.1]),
        ("cosine", [10, 32.5, 55, 100, 500], [1.0, 0.1 + 0.45 * (1 + 0.5**0.5), 0.55, 0.1, 0.1]),
        ("wsd", [10, 75, 80, 90, 100], [1.0, 1.0, 1.0, 0.55, 0.1]),
        ("inverse_sqrt", [9, 39, 89], [1.0, 0.5, 1 / 3]),
        ("noam", [9, 39, 89], [160**-0.5, 160**-0.5 / 2, 160**-0.5 / 3]),
    ],
)
def test_after_the_warm_up(kind, counts, expected):
    np.testing.assert_allclose(rates(kind, counts, peak=1.0, warmup=10, floor=0.1), expected, rtol=1e-5)


def test_noam_is_the_papers_formula():
    """Transformer base: width 512, warm-up 4000; its highest rate is about 7e-4."""
    steps = np.array([1, 1000, 4000, 100_000])
    formula = 512**-0.5 * np.minimum(steps**-0.5, steps * 4000**-1.5)
    np.testing.assert_allclose(rates("noam", steps - 1, width=512, peak=1.0, warmup=4000), formula, rtol=1e-5)
    assert formula[2] == pytest.approx(6.99e-4, rel=1e-3)


@pytest.mark.parametrize("kind", sorted(optim.SCHEDULES))
def test_schedules_trace_and_bear_odd_lengths(kind):
    rate = optim.schedule(ScheduleConfig(kind=kind, warmup=0), 1, 8)
    value = jax.jit(rate)(jnp.int32(0))
    chex.assert_type(value, jnp.float32)
    assert np.isfinite(value)
    assert value > 0
    late = optim.schedule(ScheduleConfig(kind=kind, warmup=50, peak=1.0), 10, 1)
    assert all(np.isfinite(late(n)) and late(n) > 0 for n in range(10))


def test_unknown_kinds_name_the_nearest():
    with pytest.raises(ConfigError, match=r"schedule.kind: got 'cosin'.*did you mean 'cosine'"):
        optim.schedule(ScheduleConfig(kind="cosin"), 10, 8)
    with pytest.raises(ConfigError, match=r"optimizer.name: got 'adafacter'.*did you mean 'adafactor'"):
        optim.optimizer(OptimizerConfig(name="adafacter"), lambda n: 0.1, PARAMS)


SMALL = {"source_embed": {"table": jnp.ones((6, 4))}, "ffn": {"kernel": jnp.ones((2, 4, 8)), "bias": jnp.ones((2, 8))}}


def run(rule, steps=3, params=SMALL):
    """Parameters after a few updates with gradients that do not depend on them."""
    params, update = noise(params, 1), jax.jit(rule.update)
    state = jax.jit(rule.init)(params)
    for i in range(steps):
        updates, state = update(noise(params, 10 + i), state, params)
        params = optax.apply_updates(params, updates)
    return params


REFERENCES = {
    "adamw": lambda rate, mask: optax.adamw(rate, 0.9, 0.98, 1e-8, weight_decay=0.1, mask=mask),
    "adam": lambda rate, mask: optax.chain(optax.add_decayed_weights(0.1, mask), optax.adam(rate, 0.9, 0.98, 1e-8)),
    "lion": lambda rate, mask: optax.lion(rate, 0.9, 0.98, weight_decay=0.1, mask=mask),
    "sgd": lambda rate, mask: optax.chain(optax.add_decayed_weights(0.1, mask), optax.sgd(rate, 0.9)),
    "adafactor": lambda rate, mask: optax.adafactor(rate, weight_decay_rate=0.1 * 0.05, weight_decay_mask=mask),
}


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_matches_optax(name):
    config = OptimizerConfig(name=name, beta2=0.98, weight_decay=0.1)
    rate = optim.schedule(ScheduleConfig(kind="constant", peak=0.05, warmup=0), 10, 8)
    mask = optim.decay_mask(SMALL, config)
    assert mask == {"source_embed": {"table": False}, "ffn": {"kernel": True, "bias": False}}
    chex.assert_trees_all_close(
        run(optim.optimizer(config, rate, SMALL)), run(REFERENCES[name](0.05, mask)), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("name", sorted(optim.OPTIMIZERS))
def test_lowers_a_quadratic(name):
    target = noise(SMALL, 3)
    names = {"source_embed": {"table": ("vocab", "table")}, "ffn": {"kernel": ("layers", "embed", "ffn"), "bias": ()}}
    rule = optim.optimizer(OptimizerConfig(name=name), lambda n: 0.05, SMALL, names)

    def loss(params):
        return optax.global_norm(jax.tree.map(jnp.subtract, params, target)) ** 2

    @jax.jit
    def step(params, state):
        updates, state = rule.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    params, state = SMALL, jax.jit(rule.init)(SMALL)
    for _ in range(40):
        params, state = step(params, state)
    assert loss(params) < 0.5 * loss(SMALL)


def muon_update(grads, names):
    rule = optim.optimizer(OptimizerConfig(name="muon"), lambda n: 1.0, grads, names)
    return jax.jit(lambda grads: rule.update(grads, rule.init(grads), grads)[0])(grads)


def test_muon_treats_layers_separately_and_heads_together():
    grads, names = (
        {part: tree["encoder"]["blocks"][part] for part in ("attention", "ffn")} for tree in (noise(PARAMS), NAMES)
    )
    updates = muon_update(grads, names)
    query, out, inner = (
        lambda tree: tree["attention"]["query"]["kernel"],
        lambda tree: tree["attention"]["out"]["kernel"],
        lambda tree: tree["ffn"]["in"]["kernel"],
    )
    plain = {
        "query": {"kernel": query(grads)[0].reshape(8, 2 * 4)},
        "out": {"kernel": out(grads)[1].reshape(2 * 4, 8)},
        "in_0": {"kernel": inner(grads)[0]},
        "in_1": {"kernel": inner(grads)[1]},
    }
    expected = {name: update["kernel"] for name, update in muon_update(plain, None).items()}
    chex.assert_trees_all_close(inner(updates), jnp.stack([expected["in_0"], expected["in_1"]]), atol=1e-5)
    chex.assert_trees_all_close(query(updates)[0], expected["query"].reshape(8, 2, 4), atol=1e-5)
    chex.assert_trees_all_close(out(updates)[1], expected["out"].reshape(2, 4, 8), atol=1e-5)
    for layer in range(2):
        # Newton-Schulz leaves singular values of 1 within about 0.3; the scale is 0.2 * sqrt(longer side).
        values = np.linalg.svd(np.asarray(inner(updates)[layer]), compute_uv=False) / (0.2 * 16**0.5)
        assert values.min() > 0.6
        assert values.max() < 1.3
    # The root mean square that Adam's update has in practice.
    assert float(jnp.sqrt(jnp.mean(inner(updates) ** 2))) == pytest.approx(0.2, rel=0.35)


def newton_schulz(matrix):
    """Jordan 2024: five quintic steps from the matrix over its Frobenius norm, the shorter side first."""
    x = matrix / np.linalg.norm(matrix)
    x = x.T if x.shape[0] > x.shape[1] else x
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


@pytest.mark.parametrize("shape", [(4, 6), (6, 4)])
def test_muon_is_the_update_that_its_description_says(shape):
    rng, beta = np.random.default_rng(0), 0.9
    names = {"ffn": {"kernel": ("embed", "ffn")}}
    params = {"ffn": {"kernel": jnp.zeros(shape)}}
    rule = optim.optimizer(OptimizerConfig(name="muon", momentum=beta), lambda n: 1.0, params, names)
    state, update = rule.init(params), jax.jit(rule.update)
    ours, jordans = np.zeros(shape), np.zeros(shape)
    apart = []
    for t in range(1, 61):
        g = rng.normal(size=shape)
        updates, state = update({"ffn": {"kernel": jnp.float32(g)}}, state, params)
        ours = beta * ours + (1 - beta) * g
        corrected = beta * ours / (1 - beta ** (t + 1)) + (1 - beta) * g / (1 - beta**t)
        scale = -0.2 * max(shape) ** 0.5
        if t in (1, 2, 3, 10):
            np.testing.assert_allclose(updates["ffn"]["kernel"], scale * newton_schulz(corrected), atol=2e-4)
        jordans = beta * jordans + g
        apart.append(np.abs(newton_schulz(g + beta * jordans) - newton_schulz(corrected)).max())
    assert apart[0] < 1e-12 and apart[1] > 0.01 and apart[-1] < 0.01


def test_the_weight_average_may_warm_up():
    plain, warm = TrainConfig(ema=0.9), TrainConfig(ema=0.9, ema_warmup=True)
    counts = np.array([0, 1, 8, 79, 80, 81, 1000])
    assert ema.decay_at(plain, counts) == 0.9
    by_hand = [1 / 10, 2 / 11, 9 / 18, 80 / 89, 81 / 90, 0.9, 0.9]
    np.testing.assert_allclose(ema.decay_at(warm, counts), by_hand, rtol=1e-6)


def test_muon_leaves_tables_norms_biases_and_the_head_to_adam():
    table = optim.parameter_table(PARAMS, OptimizerConfig(name="muon"), NAMES)
    rules = {line.split()[0]: line.split()[-1] for line in table.splitlines()}
    muon = {path for path, rule in rules.items() if rule == "muon"}
    assert muon == {f"encoder/blocks/{part}/kernel" for part in ("attention/query", "attention/out", "ffn/in")}
    assert table.endswith("0 of 760 entries decay")

    params = {"ffn": SMALL["ffn"], "source_embed": SMALL["source_embed"]}
    names = {"ffn": {"kernel": ("layers", "embed", "ffn"), "bias": ("layers", "ffn")}}
    names["source_embed"] = {"table": ("vocab", "table")}
    mixed = run(optim.optimizer(OptimizerConfig(name="muon", weight_decay=0.1), lambda n: 0.05, params, names))
    adam = run(optim.optimizer(OptimizerConfig(weight_decay=0.1), lambda n: 0.05, params))
    chex.assert_trees_all_close(mixed["source_embed"], adam["source_embed"], rtol=1e-6)
    chex.assert_trees_all_close(mixed["ffn"]["bias"], adam["ffn"]["bias"], rtol=1e-6)
    assert not jnp.allclose(mixed["ffn"]["kernel"], adam["ffn"]["kernel"], atol=1e-3)


@pytest.mark.parametrize(
    ("path", "names", "expected"),
    [
        (("rnn", "cell", "kernel"), ("embed", None, "ffn"), ((0,), (2,))),  # gates are separate matrices
        (("blocks", "moe", "kernel"), ("layers", "experts", "embed", "ffn"), ((2,), (3,))),
        (("blocks", "attention", "key", "kernel"), ("layers", "embed", "kv_heads", "head"), ((1,), (2, 3))),
        (("blocks", "score", "table"), ("layers", "buckets", "heads"), None),
        (("encoder", "position", "table"), (None, "table"), None),
        (("blocks", "norm", "scale"), ("layers", None), None),
        (("cell", "bias"), (None, "ffn"), None),
        (("odd", "kernel"), (None, None, None), None),
    ],
)
def test_muon_axes(path, names, expected):
    assert optim.muon_axes(path, names) == expected


def test_muon_refuses_to_guess():
    with pytest.raises(ValueError, match=r"encoder/blocks/attention/out/kernel of shape.*pass `axis_names`"):
        optim.optimizer(OptimizerConfig(name="muon"), lambda n: 0.1, PARAMS)


def test_moments_are_float32_for_bfloat16_parameters():
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    for name in sorted(optim.OPTIMIZERS):
        rule = optim.optimizer(OptimizerConfig(name=name), lambda n: 0.1, half, NAMES)
        _, after = jax.eval_shape(rule.update, half, jax.eval_shape(rule.init, half), half)
        for state in (jax.eval_shape(rule.init, half), after):
            kinds = {leaf.dtype for leaf in jax.tree.leaves(state)}
            assert kinds <= {jnp.dtype("float32"), jnp.dtype("int32")}, (name, kinds)


def test_decay_mask_and_its_table():
    config = OptimizerConfig(weight_decay=0.1)
    mask = optim.decay_mask(PARAMS, config)
    decayed = {"/".join(leaf_path(k)) for k, v in jax.tree_util.tree_leaves_with_path(mask) if v}
    prefix = "encoder/blocks"
    assert decayed == {
        f"{prefix}/attention/query/kernel",
        f"{prefix}/attention/out/kernel",
        f"{prefix}/ffn/in/kernel",
        "head/decision/kernel",
    }
    rows = {line.split()[0]: line.split() for line in optim.parameter_table(PARAMS, config).splitlines()}
    assert rows["source_embed/table"] == ["source_embed/table", "24", "x", "8", "-"]
    assert rows["head/decision/kernel"][-1] == "0.1"
    assert optim.parameter_table(PARAMS, config).endswith("536 of 760 entries decay")


def test_clip_by_norm():
    grads = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0]])}
    norm = optax.global_norm(grads)
    chex.assert_trees_all_close(
        optim.clip_by_norm(grads, norm, 1.0), optax.clip_by_global_norm(1.0).update(grads, None)[0], rtol=1e-6
    )
    chex.assert_trees_all_equal(optim.clip_by_norm(grads, norm, 5.0), grads)
    chex.assert_trees_all_equal(optim.clip_by_norm(grads, norm, None), grads)
    zeros = jax.tree.map(jnp.zeros_like, grads)
    chex.assert_trees_all_equal(optim.clip_by_norm(zeros, jnp.zeros(()), 1.0), zeros)
    for bad in (jnp.inf, jnp.nan):
        assert all(jnp.isnan(x).all() for x in jax.tree.leaves(optim.clip_by_norm(grads, jnp.float32(bad), 1.0)))


@pytest.mark.parametrize("name", sorted(optim.OPTIMIZERS))
def test_state_lies_as_its_parameters(name):
    mesh = meshes.make(MeshConfig(data=1, fsdp=4, tensor=2))
    shapes = {"source_embed": {"table": (512, 256)}, "ffn": {"kernel": (2, 128, 256)}, "norm": {"scale": (64,)}}
    is_leaf = lambda s: isinstance(s, tuple)  # noqa: E731
    shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes, is_leaf=is_leaf)
    names = {
        "source_embed": {"table": ("vocab", "table")},
        "ffn": {"kernel": ("layers", "embed", "ffn")},
        "norm": {"scale": (None,)},
    }
    spec = {"source_embed": {"table": ("tensor", "fsdp")}, "ffn": {"kernel": (None, "fsdp", "tensor")}}
    spec["norm"] = {"scale": (None,)}
    places = jax.tree.map(lambda s: NamedSharding(mesh, PartitionSpec(*s)), spec, is_leaf=is_leaf)
    rule = optim.optimizer(OptimizerConfig(name=name, weight_decay=0.1), lambda n: 0.1, shapes, names)
    layout = optim.optimizer_state_shardings(rule, shapes, places, mesh)
    state = jax.eval_shape(rule.init, shapes)
    chex.assert_trees_all_equal_structs(layout, state)
    full = {x.shape: y for x, y in zip(jax.tree.leaves(shapes), jax.tree.leaves(places), strict=True)}
    seen = set()
    for leaf, place in zip(jax.tree.leaves(state), jax.tree.leaves(layout), strict=True):
        if leaf.shape in full:
            seen.add(leaf.shape)
            assert place == full[leaf.shape]
        elif leaf.shape in ((), (1,), (3,)):
            assert place.spec == PartitionSpec()
    if name == "adafactor":
        # [L, D, F] is factored into rows [L, D] and columns [L, F], each lying as its axes do in the kernel.
        specs = {x.shape: y.spec for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(layout), strict=True)}
        assert specs[(2, 128)] == PartitionSpec(None, "fsdp")
        assert specs[(2, 256)] == PartitionSpec(None, "tensor")
    else:
        assert seen == set(full)
    made = jax.jit(lambda: rule.init(jax.tree.map(lambda s: jnp.zeros(s.shape), shapes)), out_shardings=layout)()
    chex.assert_trees_all_equal_shapes(made, state)

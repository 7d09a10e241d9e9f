"""Every kernel on every predicate that the project builds, in value and in gradient, against the dense one.

Rows of one batch are the predicates: which slots there are, which belong together, and padding whose outputs matter. So
each kernel is compiled once for every rule of order.
"""

import functools

import builders
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import registry
from jaxformer.config import AttentionConfig, ConfigError, EncodingConfig, MeshConfig
from jaxformer.models import build
from jaxformer.nn import kernels
from jaxformer.nn.kernels import blockwise, rowwise
from jaxformer.nn.masks import Mask, visible
from jaxformer.parallel import mesh as meshes
from jaxformer.parallel import rules
from jaxformer.train import step as steps
from jaxformer.types import Slots

LENGTH, HEADS, GROUPS, WIDTH = 8, 4, 2, 4
SEGMENTS = {
    "full": [1, 1, 1, 1, 1, 1, 1, 1],
    "padded": [1, 1, 1, 1, 1, 0, 0, 0],
    "padded left": [0, 0, 0, 1, 1, 1, 1, 1],
    "packed": [1, 1, 1, 2, 2, 3, 3, 3],
    "packed and padded": [1, 1, 1, 2, 2, 2, 0, 0],
    "empty": [0, 0, 0, 0, 0, 0, 0, 0],
    "reading padding": [1, 1, 1, 1, 1, -1, -1, -1],
    "reading padding left": [-1, -1, -1, 1, 1, 1, 1, 1],
    "reading padding between": [1, 1, -1, -1, 1, 1, 1, 1],
    "nothing to read": [-1, -1, -1, -1, -1, -1, -1, -1],
}
RULES = {
    "": (False, None),
    "causal": (True, None),
    "window": (False, 3),
    "causal window": (True, 3),
    "prefix": (True, None),
    "prefix window": (True, 3),
}
PREFIX = np.array([0, 5, 2, 1])  # leading positions of segments 1, 2 and 3 that all of the segment sees
MESHES = {"ring": MeshConfig(data=2, context=4), "ulysses": MeshConfig(data=2, context=2, tensor=2)}
KERNELS = [name for name in registry.names("jaxformer.nn.kernels") if name != "dense"]


def side(segments=tuple(SEGMENTS)) -> Slots:
    """One row a predicate. Positions count from 0 in every document, as in the batches of `data`."""
    segment = np.array([SEGMENTS[name] for name in segments])
    index = np.broadcast_to(np.arange(LENGTH), segment.shape)
    group = np.abs(segment)
    first = np.argmax(group[:, None, :] == group[:, :, None], axis=-1)  # of each slot's document
    return Slots(np.where(segment == 0, 0, index - first).astype(np.int32), segment.astype(np.int32))


def mask_of(rule: str) -> Mask:
    causal, window = RULES[rule]
    return Mask(with_prefix(side()) if "prefix" in rule else side(), side(), causal, window, same_slots=True)


def with_prefix(slots: Slots) -> Slots:
    return slots._replace(prefix=PREFIX[np.abs(slots.segment)].astype(np.int32))


def step() -> Mask:
    """Late queries against a longer cache, of texts that nothing is packed with."""
    key = side(("full", "padded", "empty"))
    return Mask(jax.tree.map(lambda ids: ids[:, 2:6], key), key, causal=True)


def across() -> Mask:
    """Cross-attention: queries of one stream, keys of another, of another length."""
    key = side(tuple(reversed(SEGMENTS)))
    return Mask(side(), jax.tree.map(lambda ids: ids[:, :6], key))


OTHERS = {"cross": across, "step": step}


def inputs(mask: Mask):
    draw = np.random.default_rng(0).standard_normal
    rows, length, columns = *mask.query.segment.shape, mask.key.segment.shape[1]
    q, do = (draw((rows, length, HEADS, WIDTH)).astype(np.float32) for _ in range(2))
    k, v = (draw((rows, columns, GROUPS, WIDTH)).astype(np.float32) for _ in range(2))
    return q, k, v, do


@functools.partial(jax.jit, static_argnames=("name", "window"))
def compiled(name, mask, window, q, k, v, do):
    """Output and gradients of a kernel whose config has the window too, as that of a layer does."""
    config = AttentionConfig(heads=HEADS, kv_heads=GROUPS, block=3, window=window)

    def total(q, k, v):
        o = kernels.get(name).apply(q, k, v, mask, None, None, config)
        return jnp.sum(o * do), o

    (_, o), gradients = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(q, k, v)
    return o, gradients


def run(name: str, mask: Mask, window: int | None = None):
    return jax.device_get(compiled(name, mask, window, *inputs(mask)))


@functools.cache
def expected(rule: str):
    return run("dense", OTHERS[rule]() if rule in OTHERS else mask_of(rule), RULES.get(rule, (0, None))[1])


EVERY = [
    (name, rule)
    for name in KERNELS
    for rule in (*RULES, *OTHERS)
    # The window's has the prefix, too; against a cache all but blockwise give way to another.
    if rule != "prefix" and (rule != "step" or name == "blockwise")
]


@pytest.mark.parametrize(("name", "rule"), EVERY)
def test_every_kernel_is_dense_under_every_predicate(name, rule, monkeypatch):
    if name == "cudnn":  # its mask and what it does with blind queries; the sum is XLA's
        fused = jax.nn.dot_product_attention
        plain = lambda *given, implementation, **options: fused(*given, **options)  # noqa: E731
        monkeypatch.setattr(jax.nn, "dot_product_attention", plain)
    mask, window = OTHERS[rule]() if rule in OTHERS else mask_of(rule), RULES.get(rule, (0, None))[1]
    if name == "splash" and "prefix" in rule:
        with pytest.raises(ConfigError, match="got splash, expected another, which needs a mask without a prefix"):
            run(name, mask, window)
        return
    with jax.set_mesh(meshes.make(MESHES[name])) if name in MESHES else jax.named_scope(name):
        got = run(name, mask, window)
    wanted = expected(rule)
    for row, predicate in enumerate(SEGMENTS if rule != "step" else ("full", "padded", "empty")):
        pick = lambda tree: jax.tree.map(lambda x: x[row], tree)  # noqa: B023, E731
        chex.assert_trees_all_close(pick(got), pick(wanted), rtol=1e-4, atol=2e-5, custom_message=predicate)


@pytest.mark.parametrize("rule", [*RULES, "cross"])
def test_the_dense_kernel_is_the_rule_pair_by_pair(rule):
    mask = across() if rule == "cross" else mask_of(rule)
    causal, window = RULES.get(rule, (False, None))
    (q, k, v, _), (o, _) = inputs(mask), expected(rule)
    for b, t, h in np.ndindex(o.shape[:3]):
        keys = [s for s in range(k.shape[1]) if sees(mask, b, t, s, causal, window)]
        scores = np.array([float(q[b, t, h] @ k[b, s, h // (HEADS // GROUPS)]) for s in keys])
        weights = np.exp(scores - scores.max(initial=0.0))
        wanted = sum((w * v[b, s, h // 2] for w, s in zip(weights, keys)), np.zeros(WIDTH)) / max(weights.sum(), 1e-30)
        np.testing.assert_allclose(o[b, t, h], wanted, rtol=1e-4, atol=1e-5)


def sees(mask: Mask, b: int, t: int, s: int, causal: bool, window: int | None) -> bool:
    """The predicate in words: the same document, a key that is text, not ahead if causal (except of the prefix), less
    than a window away."""
    query, key = int(mask.query.segment[b, t]), int(mask.key.segment[b, s])
    back = int(mask.query.position[b, t]) - int(mask.key.position[b, s])
    in_prefix = mask.query.prefix is not None and int(mask.key.position[b, s]) < PREFIX[abs(query)]
    if key <= 0 or abs(query) != key or (causal and back < 0 and not in_prefix):
        return False
    return window is None or abs(back) < window


def test_rowwise_takes_all_keys_where_a_member_of_a_vmap_is_out_of_order():
    """Members of `vmap` share the branch: one whose positions run backwards, beside one in order."""
    ordered = side(("full",))
    masks = [
        Mask(s, s, causal=True, same_slots=True) for s in (ordered, ordered._replace(position=7 - ordered.position))
    ]
    both = jax.tree.map(lambda *x: np.stack(x), *masks)
    got = jax.device_get(jax.vmap(compiled, (None, 0, None, *[None] * 4))("rowwise", both, None, *inputs(masks[0])))
    wanted = jax.tree.map(lambda *x: np.stack(x), *(run("dense", mask) for mask in masks))
    chex.assert_trees_all_close(got, wanted, rtol=1e-4, atol=2e-5)


def test_rowwise_on_eight_devices_with_recomputation_has_the_gradients_of_dense():
    def gradients(kernel, remat, mesh):
        attention = AttentionConfig(heads=2, kernel=kernel, block=4)
        config = builders.decoder(layers=1, encoding=EncodingConfig("rope"), attention=attention, remat=remat)
        module, variables = builders.make(config)
        batch = builders.batch(config, [8, 5, 8, 2, 8, 7, 8, 3])
        total = jax.jit(jax.grad(lambda v, batch: jnp.sum(jnp.sin(module.apply(v, batch)))))
        if mesh is None:
            return jax.device_get(total(variables, batch))
        with jax.set_mesh(mesh):
            placed = jax.tree.map(jax.device_put, dict(variables), rules.shardings(build.shapes(module), mesh))
            return jax.device_get(total(placed, steps.shard_batch(batch, mesh)))

    mesh = meshes.make(MeshConfig(data=2, fsdp=2, tensor=2))
    chex.assert_trees_all_close(
        gradients("rowwise", "full", mesh), gradients("dense", "none", None), rtol=1e-4, atol=2e-5
    )


def test_rowwise_leaves_out_the_keys_behind_each_block():
    assert rowwise._divide(256, 128) == ((0, 64, 64), (64, 128, 128), (128, 192, 192), (192, 256, 256))
    assert rowwise._divide(7, 4) == ((0, 2, 2), (2, 4, 4), (4, 7, 7))
    assert rowwise._divide(127, 128) == ()
    see, blocks = np.tril(np.ones((1, 7, 7), bool)), rowwise._divide(7, 4)
    assert rowwise._in_order(blocks, see)
    see[0, 3, 4] = True
    assert not rowwise._in_order(blocks, see)


@pytest.mark.parametrize("name", [name for name in KERNELS if name != "rowwise"])
def test_a_table_of_pairs_is_refused(name):
    mask = mask_of("").replace(hidden_pairs=np.zeros((len(SEGMENTS), LENGTH, LENGTH), bool))
    with pytest.raises(ConfigError, match="single pairs"):
        run(name, mask)


@functools.partial(jax.jit, static_argnames=("size", "causal"))
def tiles_and_pairs(size, causal, window, prefix):
    """For each window and prefix: which tiles are read, and which have a visible pair."""
    slots = jax.tree.map(jnp.asarray, side(("full",)))

    def each(window, prefix):
        query = slots if prefix is None else slots._replace(prefix=jnp.full_like(slots.position, prefix))
        tiles = [jax.tree.map(lambda ids: blockwise.tile(ids, size), each) for each in (query, slots)]
        see, count = visible(query, slots, causal, window)[0], -(-LENGTH // size)
        see = jnp.pad(see, [(0, -LENGTH % size)] * 2).reshape(count, size, count, size)
        return blockwise.active_tiles(*tiles, causal, window), see.any(axis=(1, 3))

    return jax.vmap(each)(window, prefix)


@pytest.mark.parametrize("windows", [None, (2, 5)])
def test_exactly_the_tiles_of_a_prefix_are_read(windows):
    """At every length of the prefix: its queries read ahead to its end, the others no further than themselves."""
    for size in (1, 2, 3, 4, 8):
        prefix = np.arange(LENGTH + 1, dtype=np.int32)
        if windows is None:
            active, seen = tiles_and_pairs(size, True, None, prefix)
            np.testing.assert_array_equal(active, seen, err_msg=f"tiles of {size}")
        else:
            window, prefix = (x.ravel().astype(np.int32) for x in np.meshgrid(windows, prefix))
            active, seen = tiles_and_pairs(size, True, window, prefix)
            assert not (np.asarray(seen) & ~np.asarray(active)).any(), f"tiles of {size}"


@pytest.mark.parametrize("causal", [True, False])
def test_exactly_the_tiles_within_a_window_are_read(causal):
    """At every width of the window and of the tiles, the edge of either on the other's included."""
    for size in (2, 4):
        active, seen = tiles_and_pairs(size, causal, np.arange(1, LENGTH + 2, dtype=np.int32), None)
        np.testing.assert_array_equal(active, seen, err_msg=f"tiles of {size}")

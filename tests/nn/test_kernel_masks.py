"""Every kernel on every predicate that the project builds, in value and in gradient, against the dense one.

Rows of one batch are the predicates: which slots there are, which belong together, and padding whose outputs matter. So
each kernel is compiled once for every rule of order.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import registry
from jaxformer.config import AttentionConfig, ConfigError, MeshConfig
from jaxformer.nn import kernels
from jaxformer.nn.kernels import blockwise, dense
from jaxformer.nn.masks import Mask, visible
from jaxformer.parallel import mesh as meshes
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
    return Slots(jnp.asarray(np.where(segment == 0, 0, index - first), jnp.int32), jnp.asarray(segment, jnp.int32))


def mask_of(rule: str) -> Mask:
    causal, window = RULES[rule]
    return Mask(with_prefix(side()) if "prefix" in rule else side(), side(), causal, window, same_slots=True)


def with_prefix(slots: Slots) -> Slots:
    return slots._replace(prefix=jnp.asarray(PREFIX[np.abs(slots.segment)], jnp.int32))


def across() -> Mask:
    """Cross-attention: queries of one stream, keys of another, of another length."""
    key = side(tuple(reversed(SEGMENTS)))
    return Mask(side(), jax.tree.map(lambda ids: ids[:, :6], key))


def inputs(mask: Mask):
    draw = np.random.default_rng(0).standard_normal
    rows, length, columns = *mask.query.segment.shape, mask.key.segment.shape[1]
    q, do = (jnp.asarray(draw((rows, length, HEADS, WIDTH)), jnp.float32) for _ in range(2))
    k, v = (jnp.asarray(draw((rows, columns, GROUPS, WIDTH)), jnp.float32) for _ in range(2))
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
    return run("dense", across() if rule == "cross" else mask_of(rule), RULES.get(rule, (0, None))[1])


@pytest.mark.parametrize("rule", [rule for rule in (*RULES, "cross") if rule != "prefix"])  # the window's has it, too
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_is_dense_under_every_predicate(name, rule, monkeypatch):
    if name == "cudnn":  # its mask and what it does with blind queries; the sum is XLA's
        fused = jax.nn.dot_product_attention
        plain = lambda *given, implementation, **options: fused(*given, **options)  # noqa: E731
        monkeypatch.setattr(jax.nn, "dot_product_attention", plain)
    mask, window = across() if rule == "cross" else mask_of(rule), RULES.get(rule, (0, None))[1]
    if name == "splash" and "prefix" in rule:
        with pytest.raises(ConfigError, match="got splash, expected another, which needs a mask without a prefix"):
            run(name, mask, window)
        return
    with jax.set_mesh(meshes.make(MESHES[name])) if name in MESHES else jax.named_scope(name):
        got = run(name, mask, window)
    wanted = expected(rule)
    for row, predicate in enumerate(SEGMENTS):
        pick = lambda tree: jax.tree.map(lambda x: x[row], tree)  # noqa: B023, E731
        chex.assert_trees_all_close(pick(got), pick(wanted), rtol=1e-4, atol=2e-5, custom_message=predicate)


@pytest.mark.parametrize("rule", [*RULES, "cross"])
def test_the_dense_kernel_is_the_rule_pair_by_pair(rule):
    mask = across() if rule == "cross" else mask_of(rule)
    causal, window = RULES.get(rule, (False, None))
    q, k, v, _ = inputs(mask)
    o = dense.attend(q, k, v, mask, None, None, AttentionConfig(heads=HEADS))
    o, q, k, v, mask = jax.tree.map(np.asarray, (o, q, k, v, mask))
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


@pytest.mark.parametrize("name", KERNELS)
def test_a_table_of_pairs_is_refused(name):
    mask = mask_of("").replace(hidden_pairs=jnp.zeros((len(SEGMENTS), LENGTH, LENGTH), bool))
    with pytest.raises(ConfigError, match="single pairs"):
        run(name, mask)


@pytest.mark.parametrize("window", [None, 2, 5])
def test_exactly_the_tiles_of_a_prefix_are_read(window):
    """At every length of the prefix: its queries read ahead to its end, the others no further than themselves."""
    full = side(("full",))
    for size, prefix in np.ndindex(5, LENGTH + 1):
        size = (1, 2, 3, 4, 8)[size]
        query = full._replace(prefix=jnp.full_like(full.position, prefix))
        tiles = [jax.tree.map(lambda ids: blockwise.tile(ids, size), slots) for slots in (query, full)]  # noqa: B023
        see = np.asarray(visible(query, full, True, window))[0]
        padded = np.pad(see, [(0, -LENGTH % size)] * 2).reshape(-(-LENGTH // size), size, -(-LENGTH // size), size)
        active = blockwise.active_tiles(*tiles, True, window)
        missed = padded.any(axis=(1, 3)) & ~np.asarray(active)
        assert not missed.any(), f"tiles of {size}, prefix {prefix}"
        if window is None:
            np.testing.assert_array_equal(active, padded.any(axis=(1, 3)), err_msg=f"tiles of {size}, prefix {prefix}")


@pytest.mark.parametrize("causal", [True, False])
def test_exactly_the_tiles_within_a_window_are_read(causal):
    """At every width of the window and of the tiles, the edge of either on the other's included."""
    full = side(("full",))
    for size in (2, 4):
        tiles = jax.tree.map(lambda ids: blockwise.tile(ids, size), full)  # noqa: B023
        for window in range(1, LENGTH + 2):
            see = np.asarray(visible(full, full, causal, window)).reshape(LENGTH // size, size, LENGTH // size, size)
            active = blockwise.active_tiles(tiles, tiles, causal, window)
            np.testing.assert_array_equal(active, see.any(axis=(1, 3)), err_msg=f"tiles of {size}, window {window}")

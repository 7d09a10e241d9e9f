"""Matrix products as the CPU likes them equal the plain ones, serve one device only, and give way where they fail."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxformer.config import MeshConfig
from jaxformer.nn import cpu, products
from jaxformer.nn.layers import Dense, project_jointly
from jaxformer.parallel import mesh as meshes
from jaxformer.parallel import rules
from jaxformer.parallel.collectives import collectives


def arrays(dtype: str, kernel: tuple[int, ...], inputs: int, bias: bool):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 7, *kernel[:inputs])).astype(jnp.dtype(dtype))  # 21 rows: no power of two divides them
    shift = rng.standard_normal(kernel[inputs:]).astype(np.float32) if bias else None
    return x, rng.standard_normal(kernel).astype(np.float32), shift


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kernel", "inputs", "bias"), [((8, 2, 6), 1, True), ((2, 6, 8), 2, True), ((8, 4), 1, False), ((4, 8), 1, False)]
)
def test_value_and_gradient_are_the_plain_ones(monkeypatch, dtype, kernel, inputs, bias):
    given = arrays(dtype, kernel, inputs, bias)
    used = []
    monkeypatch.setattr(cpu, "_dot", lambda *args, real=cpu._dot: used.append(1) or real(*args))

    def pulled(x, kernel, bias):
        y, pull = jax.vjp(lambda *args: products.dot(args[0], args[1], inputs, args[2]), x, kernel, bias)
        return y, pull(y)

    @jax.jit
    def every(*given):
        fast = pulled(*given)
        assert used
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "is_supported", lambda x: False)
            exact = [None if a is None else a.astype(jnp.float32) for a in given]
            return fast, pulled(*given), pulled(*exact)

    for a, b, c in zip(*map(jax.tree.leaves, jax.device_get(every(*given))), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        scale = np.abs(c).max()
        error = np.abs(a.astype(np.float32) - c).max() / scale
        assert error <= (1e-6 if dtype == "float32" else 1e-2)
        # As exact as the plain ones, which round elsewhere.
        assert error <= 2.0 * np.abs(b.astype(np.float32) - c).max() / scale + 1e-6


def test_only_one_cpu_uses_them():
    x = jnp.ones((2, 4))
    assert cpu.is_supported(x) and not cpu.is_supported(x.astype(jnp.float16))
    with jax.set_mesh(meshes.make(MeshConfig(data=1), jax.devices()[:1])):
        assert jax.jit(lambda x: x if cpu.is_supported(x) else None)(x) is not None
    with jax.set_mesh(meshes.make(MeshConfig(data=-1))):
        assert not cpu.is_supported(x)


class Projections(nn.Module):
    """Maps of one input, with so many heads each."""

    heads: tuple[int, ...]

    @nn.compact
    def __call__(self, x):
        return project_jointly(
            x, *(Dense((8, each, 3), ("embed", "heads", "head"), name=f"{i}") for i, each in enumerate(self.heads))
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [(8, 4, 4), (4, 4), (8, 2, 2)])  # two heads stay whole on each of four devices
def test_maps_of_one_input_exchange_the_sum_of_its_gradients(dtype, heads):
    module = Projections(heads)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 6, 8)).astype(jnp.dtype(dtype))
    boxed = jax.eval_shape(module.init, jax.random.key(0), x)
    params = jax.tree.map(lambda p: (0.3 * rng.standard_normal(p.shape)).astype(p.dtype), nn.meta.unbox(boxed))

    def pulled(params, x):
        ys, pull = jax.vjp(module.apply, params, x)
        return ys, pull(jax.tree.map(jnp.cos, ys))

    alone = jax.jit(pulled)(params, x)
    mesh = meshes.make(MeshConfig(data=2, tensor=4))
    with jax.set_mesh(mesh):
        assert cpu.exchanges_separately(*(("heads", size) for size in heads)) == (min(heads) > 2)
        places = rules.shardings(boxed, mesh), rules.batch_sharding(mesh, x.shape)
        program = jax.jit(lambda *given: pulled(*given)).lower(*jax.device_put((params, x), places)).compile()
        divided = program(*jax.device_put((params, x), places))
    sent = [each for each in collectives(program.as_text()) if each.axes(mesh.shape) == ("tensor",)]
    assert len(sent) == 1 and sent[0].payload == x[:2].astype(np.float32).nbytes
    for a, b in zip(*map(jax.tree.leaves, (alone, divided)), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        error = np.abs(a.astype(np.float32) - b.astype(np.float32)).max()
        assert error <= (2e-6 if dtype == "float32" else 2e-2) * np.abs(a.astype(np.float32)).max()


@pytest.mark.parametrize("error", [1.0, RuntimeError("Unsupported element type")])
def test_where_they_fail_the_plain_ones_are_used_and_a_line_says_so(monkeypatch, caplog, error):
    def failing(dtype):
        if isinstance(error, Exception):
            raise error
        return error

    monkeypatch.setattr(cpu, "_error", failing)
    cpu._works.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            x, kernel, bias = arrays("float32", (8, 4), 1, True)
            y = jax.jit(lambda *args: products.dot(args[0], args[1], 1, args[2]))(x, kernel, bias)
            jax.eval_shape(products.dot, x, kernel)
        np.testing.assert_allclose(y, np.asarray(x) @ kernel + bias, rtol=1e-5, atol=1e-5)
        (line,) = caplog.messages
        assert "plain ones are used" in line and "\n" not in line
    finally:
        cpu._works.cache_clear()


def test_the_trial_passes_here():
    assert all(cpu._error(dtype) < 0.02 for dtype in ("float32", "bfloat16"))


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["model\t: 1", "flags\t\t: fma avx2", "flags\t\t: avx512_bf16"], False),
        (["flags\t\t: avx2 avx512_bf16"], True),
        (["flags : amx_bf16"], True),
        (["Features\t: fp asimd bf16"], True),
        (["Features\t: fp asimd"], False),
        (["processor : 0"], True),  # nothing is known of the processor
    ],
)
def test_the_flags_of_the_processor_say_if_it_multiplies_bfloat16(lines, expected):
    assert cpu._has_bfloat16(lines) is expected


@pytest.mark.parametrize("able", [True, False])
def test_products_of_bfloat16_are_widened_where_the_processor_has_no_instructions(monkeypatch, able):
    monkeypatch.setattr(cpu, "multiplies_bfloat16", lambda: able)
    x, kernel = jnp.ones((6, 4), jnp.bfloat16), jnp.ones((4, 8), jnp.bfloat16)

    def every(x, kernel):  # a function of its own in each case, since jax keeps traces
        y, pull = jax.vjp(lambda x, kernel: (products.dot(x, kernel), products.wide_dot(x, kernel)), x, kernel)
        return y, pull(y)

    text = jax.jit(every).lower(x, kernel).as_text()
    operands = [line.partition(" : (")[2] for line in text.splitlines() if "dot_general" in line]
    assert len(operands) == 6
    assert all(("bf16" in line) is able for line in operands)

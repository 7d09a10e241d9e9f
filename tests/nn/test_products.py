"""Products with kernels multiply in the compute precision, forwards and backwards."""

from dataclasses import replace

import builders
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import tasks
from jaxformer.config import Config, EmbedConfig, ModelConfig, RecurrentConfig, TaskConfig
from jaxformer.nn import cpu, products
from jaxformer.train import step


def dots(jaxpr):
    """All products of a program, those inside of loops and calls too."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from dots(inner)


def given(dtype):
    rng = np.random.default_rng(0)
    x, kernel = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 7, 8), (8, 5)))
    return jnp.asarray(x, dtype), jnp.asarray(kernel), jnp.asarray(rng.standard_normal((3, 7, 5)), jnp.float32)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wide_product_has_a_float32_result_and_the_gradients_of_the_plain_one(monkeypatch, dtype, fast):
    if not fast:
        monkeypatch.setattr(cpu, "is_supported", lambda x: False)
    x, kernel, dy = given(dtype)

    @jax.jit
    def both(x, kernel, dy):
        y, pull = jax.vjp(products.wide_dot, x, kernel)
        exact, gradient = jax.vjp(lambda x, kernel: x @ kernel, x.astype(jnp.float32), kernel)
        return (y, *pull(dy)), (exact, *gradient(dy))

    (y, dx, dkernel), expected = jax.device_get(both(x, kernel, dy))
    assert y.dtype == dkernel.dtype == jnp.float32 and dx.dtype == x.dtype
    for found, wanted in zip((y, dx, dkernel), expected, strict=True):
        rounding = 1e-6 if dtype == "float32" else 2e-2
        np.testing.assert_allclose(found.astype(np.float32), wanted, atol=rounding * np.abs(wanted).max())


CELL = RecurrentConfig(cell="lstm", width=8, embed=EmbedConfig(vocab=builders.VOCAB))
MODELS = {
    "decoder": ("language_modelling", builders.decoder()),
    "seq2seq": ("translation", builders.seq2seq()),
    "additive": (
        "translation",
        ModelConfig(recurrent_encoder=CELL, recurrent_decoder=replace(CELL, attention="additive")),
    ),
    "dot": ("translation", ModelConfig(recurrent_encoder=CELL, recurrent_decoder=replace(CELL, attention="dot"))),
}


@pytest.mark.parametrize("name", MODELS)
def test_training_in_bfloat16_multiplies_no_kernel_in_float32(monkeypatch, name):
    monkeypatch.setattr(cpu, "is_supported", lambda x: False)
    task, model = MODELS[name]
    model = replace(model, dtype="bfloat16")
    module, variables = builders.make(model)
    batch = builders.batch(builders.seq2seq() if task == "translation" else builders.decoder())
    config = Config(model=model, task=TaskConfig(name=task))
    loss = lambda params: step.summed_loss(config, module, tasks.get(task), params, {}, batch, jax.random.key(0))[0]  # noqa: E731
    found = list(dots(jax.make_jaxpr(jax.grad(loss))(variables["params"]).jaxpr))
    # Those with batch axes, or a vector, are attention's, whose cotangents stay as they are.
    flat = lambda eqn: min(x.aval.ndim for x in (*eqn.invars, *eqn.outvars)) < 2  # noqa: E731
    kernels = [eqn for eqn in found if not eqn.params["dimension_numbers"][1][0] and not flat(eqn)]
    assert len(kernels) >= 12
    assert {x.aval.dtype.name for eqn in kernels for x in eqn.invars} == {"bfloat16"}

"""The recipes as models: sizes that the papers state, and losses that start where chance does."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

import jax
import numpy as np
import pytest
import recipes
from flax import linen as nn

from jaxformer import losses
from jaxformer.config import ConfigError, overrides
from jaxformer.models import build

ROOT = Path(__file__).resolve().parents[1]


def test_every_recipe_names_its_variants():
    """Beside the list of tests/recipes.py: what an unknown variant is answered with is complete and true."""
    listed = {path.stem: [] for path, _, _ in recipes.each()}
    for path, variant, _ in recipes.each():
        listed[path.stem] += [variant] if variant else []
    for path in recipes.CONFIGS.glob("*.py"):
        found = runpy.run_path(str(path))
        assert set(listed[path.stem]) <= set(found.get("VARIANTS", ())), path.name
        for variant in (*found.get("VARIANTS", ()), *found.get("OLD_VARIANTS", {})):
            overrides.freeze(overrides.load(f"{path}:{variant}"))
    assert overrides.load("configs/sst2.py:bilstm") == overrides.load("configs/sst2.py:lstm")
    with pytest.raises(
        ConfigError, match="got variant 'trasformer', expected one of transformer, lstm; did you mean 'tr"
    ):
        overrides.load("configs/wikitext2.py:trasformer")


def model_of(name: str, vocab: int, *edits: str):
    config = overrides.parse([f"--config={ROOT / 'configs' / name}", *edits]).model
    return build.build(build.resolve(config, vocab, vocab, 2))


@pytest.mark.parametrize(
    ("name", "vocab", "millions"),
    [
        # Radford et al. 2019 call it 117M; the released checkpoint has 124.4M (50257 rows, here padded to 50304).
        ("gpt2_124m.py", 50304, 124.48),
        # Vaswani et al. 2017, table 3: 65 and 213 million with a shared vocabulary of about 37000.
        ("transformer_base.py", 37000, 63),
        ("transformer_big.py", 37000, 214),
        # Devlin et al. 2019: 110 million; without the pooler, with the transform before the tied projection.
        ("bert_mlm.py:base", 30522, 109.5),
        # Brown et al. 2020, table 2.1, which counts neither table: the names of the sizes are rounded.
        ("gpt3.py:small", 50304, 125.3),
        ("gpt3.py:medium", 50304, 356),
        ("gpt3.py:large", 50304, 760),
        ("gpt3.py:2.7b", 50304, 2651),
        ("gpt3.py:175b", 50304, 174600),
        # The released checkpoints.
        ("llama.py:1b", 128256, 1235.8),
        ("llama.py:7b", 32000, 6738.4),
        ("moe_8x7b.py", 32000, 46702.8),
        ("t5_11b.py", 32128, 11307.3),
    ],
)
def test_parameter_counts_are_the_papers(name, vocab, millions):
    shapes = nn.meta.unbox(build.shapes(model_of(name, vocab)))["params"]
    assert build.count_params(shapes) / 1e6 == pytest.approx(millions, rel=0.01)


def test_a_gpt2_of_the_notes_sizes_starts_at_chance():
    module = model_of("gpt2_3m.py", 512, "--config.model.decoder.unroll=1")
    batch = build.example_batch(module.config, 2, 32)
    tokens = np.random.default_rng(0).integers(0, 512, (2, 33)).astype(np.int32)
    batch = batch._replace(target=batch.target._replace(tokens=tokens[:, :-1]))

    @jax.jit
    def loss(key):
        variables = nn.meta.unbox(build.init_variables(module, key))
        total, count = losses.cross_entropy(module.apply(variables, batch), tokens[:, 1:], np.ones((2, 32)))
        return total / count

    assert float(loss(jax.random.key(0))) == pytest.approx(math.log(512), abs=0.5)


def test_the_two_wikitext2_models_have_the_same_size():
    sizes = [
        build.count_params(nn.meta.unbox(build.shapes(model_of(f"wikitext2.py:{variant}", 8000)))["params"])
        for variant in ("transformer", "lstm")
    ]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.02), sizes

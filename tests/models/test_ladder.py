"""What the steps from a bigram table to a transformer need: no layers, no output matrix, one linear map."""

from __future__ import annotations

import dataclasses

import builders
import jax
import numpy as np
import pytest
import recipes

from jaxformer import testing
from jaxformer.config import (
    AttentionConfig,
    Config,
    ConfigError,
    EncodingConfig,
    FeedForwardConfig,
    HeadConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    NormConfig,
    TaskConfig,
    checks,
    overrides,
)
from jaxformer.data import sources
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.decode import int8
from jaxformer.models import build
from jaxformer.parallel import mesh as meshes
from jaxformer.plan import flops
from jaxformer.train.setup import resolve_config

NO_POSITIONS, NO_NORM = EncodingConfig(kind="none"), NormConfig(kind="none")
BIGRAM = ModelConfig(
    decoder=builders.stack(layers=0, width=builders.VOCAB, encoding=NO_POSITIONS, norm=NO_NORM, unroll=None,
                           attention=AttentionConfig(heads=1)),
    head=HeadConfig(projection=False),
)  # fmt: skip


def settings(model: ModelConfig) -> Config:
    return Config(model=model, task=TaskConfig(name="language_modelling"))


def test_a_bigram_models_logits_are_rows_of_one_table():
    module, variables = builders.make(BIGRAM)
    batch = builders.batch(BIGRAM, [5, 5])
    assert jax.tree.map(np.shape, variables) == {"params": {"target_embed": {"table": (builders.VOCAB,) * 2}}}
    logits = testing.apply(module)(variables, batch)
    np.testing.assert_array_equal(logits, variables["params"]["target_embed"]["table"][batch.target.tokens])
    testing.assert_steps_equal_forward(module, variables, batch, 2)
    testing.assert_causal(module, variables, batch)
    names = build.logical_names(module)
    assert checks.size.min_parameters(settings(BIGRAM)) == builders.VOCAB**2
    assert flops.matmul_parameters(settings(BIGRAM), variables["params"], names) == 0
    quantized = int8.quantize(module, variables)["params"]["target_embed"]
    assert set(quantized) == {"table", "table_scale"}


def test_without_layers_there_are_positions_norm_and_head():
    config = builders.decoder(layers=0, encoding=EncodingConfig(kind="learned", max_length=8), unroll=None)
    module, variables = builders.make(config)
    assert set(variables["params"]["decoder"]) == {"position", "final_norm"}
    testing.assert_steps_equal_forward(module, variables, builders.batch(config, [5, 5]), 2)
    batch = builders.batch(config, [5] * 8)
    mesh = meshes.make(MeshConfig(data=2, fsdp=2, stage=2))
    testing.assert_sharded_equals_single(module, variables, batch, mesh)


def test_a_feed_forward_layer_without_output_is_one_linear_map():
    ffn = FeedForwardConfig(width=8, activation="relu", output=False)
    config = builders.encoder(
        layers=1, ffn=ffn, norm=NO_NORM, encoding=NO_POSITIONS, residual_attention=False, residual_ffn=False
    )
    module, variables = builders.make(dataclasses.replace(config, head=HeadConfig(kind="none")))
    batch = builders.batch(config, [4, 4])
    layer = jax.tree.map(lambda x: x[0], variables["params"]["encoder"]["blocks"])
    assert set(layer["ffn"]) == {"in"}
    whole = testing.apply(module)(variables, batch)
    no_ffn = dataclasses.replace(module.config, encoder=dataclasses.replace(config.encoder, ffn=None))
    attended = testing.apply(build.build(no_ffn))(variables, batch)
    expected = np.maximum(attended @ layer["ffn"]["in"]["kernel"] + layer["ffn"]["in"]["bias"], 0)
    np.testing.assert_allclose(whole, expected, rtol=1e-5, atol=1e-6)
    matrices = [x.size for x in jax.tree.leaves(variables) if x.ndim - (x.shape[0] == 1) > 1]
    biases = 4 * 8  # of queries, keys and values, which have two axes, and of the attention's output
    assert checks.size.min_parameters(settings(module.config)) == sum(matrices) - biases + 8


def stack(**edits):
    base = builders.stack(layers=0, encoding=NO_POSITIONS)
    return dataclasses.replace(base, **edits)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (ModelConfig(decoder=stack(encoding=EncodingConfig(kind="rope"))), r"kind: got 'rope', expected none, or an"),
        (ModelConfig(decoder=stack(moe=MoEConfig())), r"decoder.moe: got 'a section', expected None where layers is 0"),
        (ModelConfig(decoder=stack(), encoder=builders.stack()), "layers: got 0, expected at least 1 beside"),
        (
            ModelConfig(decoder=builders.stack(ffn=FeedForwardConfig(width=16, output=False))),
            r"ffn.width: got 16, expected the model width \(8\), since ffn.output is False",
        ),
        (
            ModelConfig(decoder=builders.stack(ffn=FeedForwardConfig(width=8, output=False), moe=MoEConfig())),
            "moe: got 'a section', expected None where ffn.output is False",
        ),
        (
            dataclasses.replace(BIGRAM, head=HeadConfig(projection=False, chunk=4)),
            "head.chunk: got 4, expected no such part, since head.projection is False",
        ),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(model, message):
    with pytest.raises(ConfigError, match=message):
        checks.check(settings(model))


def test_the_bigram_table_has_the_width_of_the_vocabulary(tmp_path):
    (tmp_path / "input.txt").write_text("abc" * 40)
    config = overrides.parse([f"--config={recipes.CONFIGS / 'ladder.py'}:bigram", f"--config.data.dir={tmp_path}"])
    dataset = sources.build(config.data, ("text",))
    tokenizers = Tokenizers.build(config.data, dataset.splits["train"], ("text",))
    with pytest.raises(ConfigError, match="decoder.width: got 72, expected 16, the padded vocabulary"):
        resolve_config(config, dataset, tokenizers)
    narrow = dataclasses.replace(config.model.decoder, width=16)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, decoder=narrow))
    assert resolve_config(config, dataset, tokenizers).model.decoder.embed.vocab == 16


def test_each_step_of_the_ladder_adds_one_part():
    """Parameters of each variant at 72 tokens, by hand."""
    d, v, t = 32, 72, 8
    embed, head, attend, output = (v + t) * d, d * v + v, 3 * d * d, d * d + d
    block = attend + output + 2 * 4 * d * d + 5 * d
    expected = {
        "bigram": v * v,
        "head": embed + attend + head,
        "heads": embed + attend + head,
        "ffn": embed + attend + d * d + d + head,
        "residual": embed + 3 * block + head,
        "norm": embed + 3 * (block + 4 * d) + 2 * d + head,
    }
    for variant, count in expected.items():
        config = overrides.parse([f"--config={recipes.CONFIGS / 'ladder.py'}:{variant}"])
        module = build.build(build.resolve(config.model, v, v))
        shapes = jax.eval_shape(lambda module=module: build.init_variables(module, jax.random.key(0)))
        assert build.count_params(jax.tree.map(lambda x: x, shapes["params"])) == count, variant

"""An encoder that starts from a trained encoder-decoder: T5's objective before a classifier (`config.init`)."""

import dataclasses
import logging

import builders
import chex
import jax
import jax.numpy as jnp
import pytest

from jaxformer import checkpoint
from jaxformer.config import (
    CheckpointConfig,
    Config,
    ConfigError,
    DataConfig,
    HeadConfig,
    InitConfig,
    TokenizerConfig,
    overrides,
)
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.train import warm_start
from jaxformer.types import TrainState


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A workdir of an encoder-decoder with random parameters, and these."""
    workdir = tmp_path_factory.mktemp("pair")
    config = Config(model=builders.seq2seq())
    params = builders.make(config.model)[1]["params"]
    checkpoints = checkpoint.Checkpoints(workdir, CheckpointConfig(keep_best=0))
    checkpoints.save(TrainState(jnp.zeros((), jnp.int32), params, (), jax.random.key(0), {}), {}, {})
    checkpoints.close()
    data = DataConfig(tokenizer=TokenizerConfig(kind="character", multiple=1))
    Tokenizers.build(data, [{"source": "abc"}], ("source",)).save(workdir)
    (workdir / "config.json").write_text(overrides.to_json(config))
    return workdir, params


def classifier(workdir, **edits):
    """State and config of a new classifier that is to start from `workdir`."""
    model = dataclasses.replace(builders.classifier(), **edits)
    config = Config(model=model, init=InitConfig(str(workdir), head=False))
    params = builders.make(model, seed=1)[1]["params"]
    return TrainState(jnp.zeros((), jnp.int32), params, (), jax.random.key(0), {}), config


def test_the_encoder_is_taken_and_the_decoder_left_out_with_a_word(pair, caplog):
    workdir, loaded = pair
    state, config = classifier(workdir)
    with caplog.at_level(logging.INFO, "jaxformer"):
        params = warm_start.load_initial_params(state, config, warm_start.RUN_FORMAT).params
    assert set(params) == {"encoder", "source_embed", "head"}
    chex.assert_trees_all_equal(params["encoder"], loaded["encoder"])
    chex.assert_trees_all_equal(params["source_embed"], loaded["source_embed"])
    chex.assert_trees_all_equal(params["head"], state.params["head"])
    assert f"the encoder of {workdir} is taken, and its decoder left out" in caplog.text


def test_another_encoder_is_refused(pair):
    workdir, _ = pair
    for edits in ({"encoder": builders.stack(width=16)}, {"head": HeadConfig(kind="classes", classes=5)}):
        state, config = classifier(workdir, **edits)
        config = dataclasses.replace(config, init=InitConfig(str(workdir), head="head" in edits))
        with pytest.raises(ConfigError, match="differ in structure or shape"):
            warm_start.load_initial_params(state, config, warm_start.RUN_FORMAT)

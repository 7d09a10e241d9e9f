"""Tiny models of each family that read text, made once for all tests of this folder."""

import dataclasses
import functools

import builders
import jax
import numpy as np

from jaxformer import testing
from jaxformer.config import (
    AdapterConfig,
    AttentionConfig,
    Config,
    DataConfig,
    DecodeConfig,
    EmbedConfig,
    EncodingConfig,
    FeedForwardConfig,
    HeadConfig,
    LatentConfig,
    ModelConfig,
    MoEConfig,
    NormConfig,
    RecurrentConfig,
    TaskConfig,
    TokenizerConfig,
)
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.model import Model
from jaxformer.models import build

VOCAB = 264
DATA = DataConfig(tokenizer=TokenizerConfig(kind="byte"), length=16, buckets=(16,))  # one length for all
STACK = builders.stack(  # few parameters: compiling takes time by the array
    embed=EmbedConfig(vocab=VOCAB),
    attention=AttentionConfig(heads=4, kv_heads=2, bias=False),
    ffn=FeedForwardConfig(width=16, activation="relu"),
    norm=NormConfig(kind="rms"),
)
SINKS = dataclasses.replace(STACK, attention=dataclasses.replace(STACK.attention, sink=True))
LEARNED = dataclasses.replace(STACK, encoding=EncodingConfig(kind="learned", max_length=16))
GRU = RecurrentConfig(cell="gru", layers=2, width=8, embed=EmbedConfig(vocab=VOCAB))
ADDITIVE = dataclasses.replace(GRU, attention="additive")
PARTS = {
    "language_modelling": ModelConfig(decoder=LEARNED),
    "adapted": ModelConfig(decoder=LEARNED, adapter=AdapterConfig(rank=2, targets=("attention", "ffn"))),
    "narrow": ModelConfig(
        decoder=dataclasses.replace(
            LEARNED, embed=EmbedConfig(vocab=VOCAB, width=4), output_width=4, sublayers="parallel_one_norm"
        )
    ),
    "latent": ModelConfig(
        decoder=dataclasses.replace(
            STACK,
            attention=AttentionConfig(heads=4, latent=LatentConfig(4, content_width=2, rope_width=2, value_width=3)),
            moe=MoEConfig(experts=2, shared=1, dense_layers=1),
        )
    ),
    "translation": ModelConfig(encoder=SINKS, decoder=SINKS),
    "classification": ModelConfig(encoder=STACK, head=HeadConfig(kind="classes", classes=3, pooling="mean")),
    "rnn": ModelConfig(recurrent_encoder=GRU, recurrent_decoder=ADDITIVE),
    "rnn_lm": ModelConfig(recurrent_decoder=GRU),
}
TASKS = {
    "adapted": "language_modelling",
    "latent": "language_modelling",
    "narrow": "language_modelling",
    "rnn": "translation",
    "rnn_lm": "language_modelling",
}


@functools.lru_cache
def model(name) -> Model:
    config = Config(
        model=PARTS[name], data=DATA, task=TaskConfig(name=TASKS.get(name, name)), decode=DecodeConfig(max_length=4)
    )
    module = build.build(config.model)
    variables = testing.random_variables(module, 3)
    return Model(module, variables["params"], {}, config, Tokenizers.build(config.data, [], ("text",)))


@functools.lru_cache
def sown(name, text, target=None):
    """The sentence, the logits of the model's own forward pass, and the intermediates that it sows."""
    from jaxformer.analysis import sentences

    held = model(name)
    targets = None if target is None else [target]
    (sentence,) = sentences.read(held.predictor, [text], targets)
    read = jax.jit(lambda variables, batch: held.module.apply(variables, batch, mutable=["intermediates"]))
    logits, found = read(held.inference_variables(), sentence.batch)
    return sentence, np.asarray(logits), found["intermediates"]

"""GPT-J (Wang and Komatsuzaki 2021): parallel sub-layers behind one norm, and RoPE on a part of each head."""

from __future__ import annotations

import math
from typing import Any

from jaxformer.config import (
    AttentionConfig,
    EmbedConfig,
    EncodingConfig,
    FeedForwardConfig,
    ModelConfig,
    NormConfig,
    StackConfig,
)
from jaxformer.errors import ConfigError
from jaxformer.hf.families import _decoder
from jaxformer.hf.table import (
    Family,
    Row,
    Settings,
    attention_rows,
    hf_activation,
    linear_rows,
    norm_rows,
    require_ffn,
    require_stack,
)


def read_config(settings: Settings, head: str) -> ModelConfig:
    width, heads = settings.size("n_embd", 4096), settings.size("n_head", 16)
    decoder = StackConfig(
        layers=settings.size("n_layer", 28),
        width=width,
        embed=EmbedConfig(vocab=settings.size("vocab_size", 50400), dropout=settings("embd_pdrop", 0.0)),
        encoding=EncodingConfig(
            "rope",
            max_length=settings.size("n_positions", 2048),
            fraction=_rotated_fraction(settings, max(width // heads, 1)),
            interleaved=True,
        ),
        attention=AttentionConfig(heads=heads, bias=False, dropout=settings("attn_pdrop", 0.0)),
        ffn=FeedForwardConfig(
            width=settings.size("n_inner", None) or 4 * width,
            activation=settings.activation("activation_function", "gelu_new"),
        ),
        norm=NormConfig(epsilon=settings("layer_norm_epsilon", 1e-5)),
        dropout=settings("resid_pdrop", 0.0),
        sublayers="parallel_one_norm",
    )
    top = _decoder.head_config(settings, head, tied=False, bias=head == "causal_lm")
    return ModelConfig(decoder=decoder, head=top)


def _rotated_fraction(settings: Settings, head_width: int) -> float:
    """`rotary_dim` as a fraction of the head width, whose product with it is never below the whole number.

    Raises:
      ConfigError: it is null, or not an even number up to the head width.
    """
    rotated = settings.raw("rotary_dim", 64)
    if isinstance(rotated, bool) or not isinstance(rotated, int) or rotated % 2 or not 0 < rotated <= head_width:
        raise ConfigError(
            f"{settings.path}: got rotary_dim {rotated!r}, expected an even number up to the head width, {head_width}; "
            "this variant is not supported"
        )
    fraction = rotated / head_width
    return fraction if int(fraction * head_width) == rotated else math.nextafter(fraction, 1.0)


def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
    decoder = require_stack(model, "decoder")
    ffn = require_ffn(decoder)
    return {
        "n_embd": decoder.width,
        "n_layer": decoder.layers,
        "n_head": decoder.attention.heads,
        "n_inner": ffn.width,
        "n_positions": decoder.encoding.max_length,
        "rotary_dim": int(decoder.encoding.fraction * (decoder.width // decoder.attention.heads)),
        "vocab_size": decoder.embed.vocab,
        "activation_function": hf_activation(ffn.activation),
        "layer_norm_epsilon": decoder.norm.epsilon,
        "embd_pdrop": decoder.embed.dropout,
        "attn_pdrop": decoder.attention.dropout,
        "resid_pdrop": decoder.dropout,
        "tie_word_embeddings": _decoder.is_tied(model, head, False),
    }


def rows(model: ModelConfig, head: str) -> list[Row]:
    decoder = require_stack(model, "decoder")
    hf_layer, param_layer = "transformer.h.{layer}", "decoder/blocks"
    names = ("q_proj", "k_proj", "v_proj", "out_proj")
    return [
        Row("transformer.wte.weight", "target_embed/table"),
        *norm_rows(f"{hf_layer}.ln_1", f"{param_layer}/attention_norm"),
        *attention_rows(f"{hf_layer}.attn", f"{param_layer}/attention", decoder.attention, decoder.width, names),
        *linear_rows(f"{hf_layer}.mlp.fc_in", f"{param_layer}/ffn/in"),
        *linear_rows(f"{hf_layer}.mlp.fc_out", f"{param_layer}/ffn/out"),
        *norm_rows("transformer.ln_f", "decoder/final_norm"),
        *_decoder.head_rows(model, head),
    ]


FAMILY = Family(
    model_types=("gptj",),
    heads={
        "causal_lm": "GPTJForCausalLM",
        "sequence": "GPTJForSequenceClassification",
        "qa": "GPTJForQuestionAnswering",
        "model": "GPTJModel",
    },
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    prefix="transformer.",
    droppable_tensors=_decoder.DROPPABLE_TENSORS,
    ignored_keys={
        "rotary": "older key; the library always rotates",
        "scale_attn_weights": "older key; the library always scales",
        **dict.fromkeys(
            ("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
            "of a head that the library does not have",
        ),
        "summary_first_dropout": "of a head that the library does not have",
    },
    ignored_tensors=(
        r"transformer\.h\.\d+\.attn\.((masked_)?bias|embed_positions)",
        r"transformer\.rotary_emb\.embed_positions",
    ),
    tied_tensors=("lm_head.weight", "transformer.wte.weight"),
)

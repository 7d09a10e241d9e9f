"""Writes `goldens/flax`: what a few Flax classes of the old library compute, in configurations where its rules are odd.

Needs an environment of its own on Python 3.11, without jaxformer:

    pip install transformers==4.55.4 flax==0.7.0 jax==0.4.13 jaxlib==0.4.13 "numpy<1.27" "scipy<1.12" "ml_dtypes<0.3"
    python tests/hf/goldens/write_flax.py [NAME...]

The format is that of `benchmarks/flax_classes.py`, which compares such folders.
"""

import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import transformers
from flax.traverse_util import flatten_dict, unflatten_dict

TARGET = Path(__file__).with_name("flax")
SIZES = {"vocab_size": 23, "max_position_embeddings": 24}
ENCODER = {**SIZES, "hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 10}
CASES = {
    # token types are 1 where a call gives none; a table of another width; the activation of the discriminator
    "FlaxElectraForPreTraining": ("electra", {**ENCODER, "embedding_size": 8, "hidden_act": "relu"}, {}),
    # a window of 3 sees 4 tokens
    "FlaxMistralForCausalLM": (
        "mistral",
        {**ENCODER, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 3},
        {},
    ),
    # tokens are scaled before their norm, and `min_length` bans the end token once more
    "FlaxBlenderbotSmallForConditionalGeneration": (
        "blenderbot-small",
        {
            **SIZES, "d_model": 12, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2,
            "decoder_attention_heads": 3, "encoder_ffn_dim": 10, "decoder_ffn_dim": 14, "scale_embedding": True,
            "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
        },
        {"beam": {"max_length": 12, "min_length": 6, "num_beams": 3, "no_repeat_ngram_size": 2, "length_penalty": 0.7}},
    ),
    # the first block counts twice; question tokens lose their scores, and token types come from the separator
    "FlaxBigBirdForQuestionAnswering": (
        "big_bird",
        {
            **ENCODER, "block_size": 2, "num_random_blocks": 1, "use_bias": False, "sep_token_id": 5,
            "hidden_act": "gelu",
        },
        {},
    ),
    # positions of both sides begin at row 0, where RoBERTa's own class begins after the padding's id; unlike widths
    "FlaxEncoderDecoderModel": (
        "encoder-decoder",
        {
            "encoder": {**ENCODER, "model_type": "roberta", "pad_token_id": 1, "type_vocab_size": 1},
            "decoder": {
                **ENCODER, "model_type": "roberta", "pad_token_id": 1, "type_vocab_size": 1, "hidden_size": 8,
                "num_attention_heads": 2, "is_decoder": True, "add_cross_attention": True, "tie_word_embeddings": False,
            },
            "pad_token_id": 1, "decoder_start_token_id": 2, "eos_token_id": 3,
        },
        {"greedy": {"max_length": 7}},
    ),
    # the last hidden state of the encoder is before its final norm; GPT-2's scores have one scale, whatever its config
    "FlaxEncoderDecoderModel-2": (
        "encoder-decoder",
        {
            "encoder": {**ENCODER, "model_type": "roberta-prelayernorm", "pad_token_id": 1, "type_vocab_size": 1},
            "decoder": {
                "model_type": "gpt2", "vocab_size": 23, "n_positions": 24, "n_embd": 12, "n_layer": 2, "n_head": 2,
                "n_inner": 10, "is_decoder": True, "add_cross_attention": True, "scale_attn_weights": False,
                "scale_attn_by_inverse_layer_idx": True,
            },
            "pad_token_id": 1, "decoder_start_token_id": 2, "eos_token_id": 3,
        },
        {},
    ),
    # biases and parameters of norms, whatever the config says; the layers' width is not the table's
    "FlaxOPTForCausalLM": (
        "opt",
        {
            **SIZES, "hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "ffn_dim": 10,
            "word_embed_proj_dim": 8, "do_layer_norm_before": False, "enable_bias": False,
            "layer_norm_elementwise_affine": False, "activation_function": "gelu_new",
        },
        {},
    ),
    # one table, whatever the config says
    "FlaxMarianMTModel": (
        "marian",
        {
            **SIZES, "d_model": 12, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 2,
            "decoder_attention_heads": 3, "encoder_ffn_dim": 10, "decoder_ffn_dim": 14, "decoder_vocab_size": 19,
            "share_encoder_decoder_embeddings": False, "pad_token_id": 0, "eos_token_id": 2,
            "decoder_start_token_id": 0, "forced_eos_token_id": None, "activation_function": "relu",
        },
        {},
    ),
    # a summary of every third token, the rest with the block before
    "FlaxLongT5ForConditionalGeneration": (
        "longt5",
        {
            "vocab_size": 23, "d_model": 12, "d_kv": 3, "d_ff": 10, "num_layers": 2, "num_decoder_layers": 1,
            "num_heads": 2, "relative_attention_num_buckets": 6, "relative_attention_max_distance": 9,
            "local_radius": 2, "global_block_size": 3, "encoder_attention_type": "transient-global",
            "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
        },
        {"greedy": {"max_length": 6}},
    ),
}  # fmt: skip

LONG = ("big_bird", "longt5")
"""`model_type`s that get texts of 14 tokens, and whose attention is not of one shape."""


def random_params(params, rng):
    """Random values for every leaf, norms and biases too."""
    leaves = {}
    for path, leaf in flatten_dict(params).items():
        centre = 1.0 if path[-1] in ("scale", "weight") else 0.0
        leaves[path] = jnp.asarray((centre + 0.3 * rng.normal(size=leaf.shape)).astype(np.float32))
    return unflatten_dict(leaves)


def encoded(model, kind, inputs):
    """The encoder's output of a pair's call: its `encode` read positions as token types, which gave NaN."""
    if kind != "encoder-decoder":
        return {}
    states = model(**inputs, decoder_input_ids=inputs["input_ids"][:, :1]).encoder_last_hidden_state
    return {"encoder_outputs": (states,)}


def write(name, kind, values, searches):
    rng = np.random.default_rng(7)
    config = transformers.AutoConfig.for_model(kind, **values)
    model = getattr(transformers, name.split("-")[0])(config)
    model.params = random_params(model.params, rng)
    model.save_pretrained(TARGET / name)
    length = 14 if kind in LONG else 7
    ids, mask = rng.integers(3, 22, (2, length)), np.ones((2, length), np.int32)
    mask[1, slice(0, 2) if kind == "mistral" else slice(5, None)] = 0
    inputs = {"input_ids": ids.astype(np.int32), "attention_mask": mask}
    arrays = {f"gen/{case}/in/{key}": value for case in searches for key, value in inputs.items()}
    for case, options in searches.items():
        arrays[f"gen/{case}/args"] = json.dumps(options)
        found = model.generate(**inputs, **options, **encoded(model, kind, inputs))
        arrays |= {f"gen/{case}/{field}": np.asarray(value) for field, value in found.items()}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = rng.integers(3, 22, (2, 5)).astype(np.int32)
    outputs = model(**inputs, output_hidden_states=True, output_attentions=kind not in LONG)
    arrays |= {f"in/{key}": value for key, value in inputs.items()}
    for field, value in outputs.items():
        parts = {f"{field}/{i}": x for i, x in enumerate(value)} if isinstance(value, tuple) else {field: value}
        arrays |= {f"out/{key}": np.asarray(x) for key, x in parts.items()}
    np.savez_compressed(TARGET / name / "expected.npz", **arrays)


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        write(name, *CASES[name])

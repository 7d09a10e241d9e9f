"""Writes `cases.json`: outputs of the other library for configs that are easily misread.

    python tests/hf/goldens/write.py [NAME...]        (needs the extra [bench]: torch and transformers)

With names only those cases are written anew; the others stay as they are.

A case holds a config.json, the names and shapes of the weights, and calls with their outputs. The weights themselves
are not kept: `values` makes them from their names, here and in the test.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

TARGET = Path(__file__).with_name("cases.json")

CONSTANT = ("roformer.encoder.embed_positions.weight",)
"""Tensors that are no weights: they keep their values."""

SMALL = {
    "vocab_size": 24, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
LLAMA = SMALL | {"num_key_value_heads": 1, "max_position_embeddings": 16, "pad_token_id": 0}
BERT = SMALL | {"max_position_embeddings": 12, "pad_token_id": 1}
GPT2 = {"vocab_size": 24, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 12, "pad_token_id": 0}
BART = {
    "vocab_size": 24, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 12, "decoder_ffn_dim": 12, "max_position_embeddings": 12,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
XLNET = {"vocab_size": 24, "d_model": 8, "n_layer": 2, "n_head": 2, "d_inner": 12, "pad_token_id": 5}
RELATIVE = BERT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}
BUCKETS = {"position_buckets": 4, "norm_rel_ebd": "layer_norm", "share_att_key": True}

IDS = [[3, 4, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14]]
RIGHT = [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]
LEFT = [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]
TEXT = {"input_ids": IDS, "labels": IDS}
SPANS = [
    {"input_ids": IDS, "attention_mask": mask, "start_positions": [2, 1], "end_positions": [3, 4]}
    for mask in (RIGHT, LEFT)
]
CLASSIFIED = [
    {"input_ids": [[3, 4, 5, 0, 0], [6, 7, 8, 9, 10]], "labels": [1, 0]},  # no mask: padding is known by its id
    {"input_ids": [[0, 0, 5, 6, 7], [0, 6, 0, 9, 0]]},
    {"input_ids": [[3, 4, 5, 0, 0], [6, 7, 8, 9, 10]], "attention_mask": [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]},
    {"input_ids": [[0, 0, 3, 4, 5], [6, 7, 8, 9, 10]], "attention_mask": [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]},
    {"input_ids": [[3, 4, 5, 6, 7], [6, 7, 8, 9, 10]], "attention_mask": [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]},
    {"input_ids": [[0, 0, 0, 0, 0], [6, 7, 8, 9, 10]]},
]
DEEPSEEK = SMALL | {
    "num_hidden_layers": 3, "num_key_value_heads": 2, "max_position_embeddings": 32, "kv_lora_rank": 6,
    "q_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3, "n_routed_experts": 4,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 4, "first_k_dense_replace": 1,
    "pad_token_id": 0,
}  # fmt: skip
LONG = {"input_ids": [[3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22]]}


EXACT = (("t5gemma_classifier", 0), ("t5gemma_token", 0))
"""Cases and calls computed in float64: in float32 the library's own first logit is 1.7e-5 off."""


def padding(side: str) -> dict[str, Any]:
    """Inputs whose first row is padded on this side."""
    return {"input_ids": IDS, "attention_mask": {"left": LEFT, "right": RIGHT}[side]}


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Weights of a tensor: uniform in +-0.5 by a linear congruential generator; those of norms about 1."""
    count = math.prod(shape)
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(2 * zlib.crc32(name.encode()) + 1)
    for _ in range(3):
        state = (state ^ (state >> np.uint64(29))) * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
    uniform = (state >> np.uint64(40)).astype(np.float64) / 2**24 - 0.5
    norm = name.endswith("weight") and len(shape) == 1
    return (uniform + norm).astype(np.float32).reshape(shape)


def cases() -> dict[str, tuple[str, dict[str, Any], dict[str, Any], list[dict[str, Any]]]]:
    """Name -> (class, arguments of its config, what is put into its config.json, calls)."""
    found: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[dict[str, Any]]]] = {
        "gemma_gelu": ("GemmaForCausalLM", LLAMA | {"head_dim": 6, "hidden_act": "gelu"}, {}, [TEXT]),
        "gemma_silu_and_older_key": (
            "GemmaForCausalLM",
            LLAMA | {"head_dim": 6, "hidden_act": "silu"},
            {"hidden_activation": "relu"},
            [TEXT],
        ),
        "gemma_both_ways": (
            "GemmaForCausalLM",
            LLAMA | {"use_bidirectional_attention": True, "head_dim": 6},
            {},
            [TEXT],
        ),
        "llama_theta_beside": (
            "LlamaForCausalLM",
            LLAMA,
            {"rope_parameters": {"rope_type": "default"}, "rope_theta": 50.0},
            [TEXT],
        ),
        "llama_head_dim": ("LlamaForCausalLM", LLAMA | {"head_dim": 6, "attention_bias": True}, {}, [TEXT]),
        "bert_both_biases": ("BertForMaskedLM", BERT | {"tie_word_embeddings": False}, {}, [TEXT]),
        "bert_both_biases_tied": (
            "BertForMaskedLM",
            BERT | {"tie_word_embeddings": False},
            {"tie_word_embeddings": True},
            [TEXT],
        ),
        "roberta_both_biases": ("RobertaForMaskedLM", BERT | {"tie_word_embeddings": False}, {}, [TEXT]),
        "deberta_both_biases": ("DebertaForMaskedLM", RELATIVE | {"tie_word_embeddings": False}, {}, [TEXT]),
        "deberta_v2_both_biases": ("DebertaV2ForMaskedLM", RELATIVE | {"tie_word_embeddings": False}, {}, [TEXT]),
        "xlnet_untied": ("XLNetLMHeadModel", XLNET | {"tie_word_embeddings": False}, {}, [TEXT]),
        "bart_two_tables": ("BartForConditionalGeneration", BART | {"tie_word_embeddings": False}, {}, [TEXT]),
        "gpt2_alias": (
            "GPT2LMHeadModel",
            GPT2,
            {"n_embd": None, "hidden_size": 8, "n_layer": None, "num_hidden_layers": 2},
            [TEXT],
        ),
        "xlnet_summary": (
            "XLNetForSequenceClassification",
            XLNET | {"summary_activation": "relu", "summary_type": "mean", "num_labels": 3},
            {},
            [{"input_ids": IDS, "attention_mask": LEFT, "labels": [2, 0]}],
        ),
        "gpt2_says_outputs": ("GPT2LMHeadModel", GPT2 | {"output_hidden_states": True}, {}, [TEXT]),
    }
    scalings = {
        "linear": {"rope_type": "linear", "factor": 3.0},
        "dynamic": {"rope_type": "dynamic", "factor": 2.5},
        "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
        "yarn_short": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4, "beta_fast": 2.0},
        "yarn_factor": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.7,
            "beta_fast": 3.0, "beta_slow": 0.5, "truncate": False,
        },
        "yarn_mscale": {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "mscale": 0.7,
            "mscale_all_dim": 2.0, "rope_theta": 100.0,
        },
        "llama3": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16, "rope_theta": 30.0,
        },
    }  # fmt: skip
    for name, rope in scalings.items():
        width = {"hidden_size": 16, "head_dim": 12} if name != "dynamic" else {"hidden_size": 16, "head_dim": 8}
        config = LLAMA | width | {"rope_parameters": {"rope_theta": 10000.0, **rope}}
        found[f"llama_{name}"] = ("LlamaForCausalLM", config, {}, [LONG])
    found |= latent_cases()
    for family, more in {"Mixtral": {}, "Qwen3Moe": {"moe_intermediate_size": 12, "norm_topk_prob": True}}.items():
        counts = {"num_local_experts": 4} if family == "Mixtral" else {"num_experts": 4}
        config = LLAMA | {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.5, "head_dim": 4} | counts | more
        padded = {**TEXT, "labels": [IDS[0][:4] + [-100, -100], IDS[1]], "attention_mask": RIGHT}
        calls = [TEXT, padded]
        found[f"{family.lower()}_router"] = (f"{family}ForCausalLM", config | {"output_router_logits": True}, {}, calls)
    found["mixtral_model_router"] = (
        "MixtralModel",
        config | {"num_local_experts": 4, "num_experts": 4},
        {},
        [{"input_ids": IDS, "output_router_logits": True}],
    )
    behind = {"labels": IDS}  # labels count wherever they stand
    for side in ("left", "right"):
        found[f"llama_padded_{side}"] = ("LlamaForCausalLM", LLAMA, {}, [{**padding(side), **behind}])
    found["mixtral_padded"] = (
        "MixtralForCausalLM",
        LLAMA | {"num_local_experts": 4, "head_dim": 4},
        {},
        [{**padding("right"), **behind}],
    )
    found["bert_padded"] = ("BertForMaskedLM", BERT, {}, [{**padding("right"), **behind}])
    found["bert_classifier_padded_left"] = (
        "BertForSequenceClassification", BERT | {"num_labels": 3}, {}, [{**padding("left"), "labels": [2, 0]}]
    )  # fmt: skip
    masked = {**padding("left"), **behind, "decoder_input_ids": IDS, "decoder_attention_mask": RIGHT}
    found["bart_padded"] = ("BartForConditionalGeneration", BART, {}, [masked])
    readers = {
        "gpt2": ("GPT2", GPT2), "bert": ("Bert", BERT), "roberta": ("Roberta", BERT), "bart": ("Bart", BART),
        "deberta": ("Deberta", RELATIVE), "deberta_absolute": ("Deberta", BERT),
        "deberta_v2": ("DebertaV2", RELATIVE | {"conv_kernel_size": 5, "conv_act": "sigmoid"}),
        "deberta_v3": ("DebertaV2", RELATIVE | BUCKETS | {"conv_kernel_size": 3}),
    }  # fmt: skip
    for name, (family, config) in readers.items():
        found[f"{name}_qa"] = (f"{family}ForQuestionAnswering", config, {}, SPANS)
    found["xlnet_qa"] = ("XLNetForQuestionAnsweringSimple", XLNET, {}, SPANS)
    mixed = {
        "Mixtral": {"num_local_experts": 4},
        "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
    }
    for family in ("GPT2", "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Mixtral", "Qwen3Moe"):
        config = GPT2 if family == "GPT2" else LLAMA | {"head_dim": 4} | mixed.get(family, {})
        calls = CLASSIFIED if family in ("GPT2", "Llama") else CLASSIFIED[:2]
        found[f"{family.lower()}_classifier"] = (
            f"{family}ForSequenceClassification", config | {"num_labels": 3}, {}, calls
        )  # fmt: skip
    found |= decoders() | encoders() | windows_of_gemma() | long_cases() | pairs() | t5gemma_cases()
    one = [{"input_ids": [[3, 0, 5, 0]], "labels": [2]}]
    found["llama_classifier_without_pad"] = (
        "LlamaForSequenceClassification", LLAMA | {"num_labels": 3, "pad_token_id": None}, {}, one
    )  # fmt: skip
    return found


def windows_of_gemma() -> dict[str, tuple[str, dict[str, Any], dict[str, Any], list[dict[str, Any]]]]:
    """Gemma 2 and 3, whose layers differ by their window, and with it by their RoPE base."""
    gemma = LLAMA | {"head_dim": 6, "sliding_window": 3, "query_pre_attn_scalar": 9, "num_hidden_layers": 3}
    capped = {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 1.5}
    mixed = {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    bases = {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
    }
    shown = [TEXT, padding("left") | {"output_hidden_states": True}]
    return {
        "gemma2": ("Gemma2ForCausalLM", gemma | capped, {}, [TEXT, padding("right") | {"output_hidden_states": True}]),
        "gemma2_without_caps": (
            "Gemma2ForCausalLM",
            gemma | mixed | {
                "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True,
                "tie_word_embeddings": False, "rope_parameters": bases["full_attention"],
            },
            {},
            [TEXT],
        ),
        "gemma2_classifier": ("Gemma2ForSequenceClassification", gemma | {"num_labels": 3}, {}, CLASSIFIED[:2]),
        "gemma3": ("Gemma3ForCausalLM", gemma | capped | mixed | {"rope_parameters": bases}, {}, shown),
        "gemma3_both_ways": (
            "Gemma3TextModel", gemma | mixed | {"use_bidirectional_attention": True}, {}, [padding("right")],
        ),
        "gemma3_classifier": (
            "Gemma3TextForSequenceClassification", gemma | {"num_labels": 3, "layer_types": ["sliding_attention"] * 3},
            {}, CLASSIFIED[:2],
        ),
    }  # fmt: skip


def t5gemma_cases() -> dict[str, tuple[str, dict[str, Any], dict[str, Any], list[dict[str, Any]]]]:
    """T5Gemma: sides of one width and of two, windows in each, caps, and classifiers with one side and with both."""
    side = LLAMA | {"head_dim": 6, "sliding_window": 2, "query_pre_attn_scalar": 9, "num_hidden_layers": 2}
    side |= {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 1.5}
    other = {
        "hidden_size": 12, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "num_hidden_layers": 3,
        "query_pre_attn_scalar": 4, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True, "vocab_size": 20,
        "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 50.0}, "rms_norm_eps": 1e-3,
        "hidden_activation": "silu",
    }  # fmt: skip
    alike = {"encoder": side, "decoder": side, "vocab_size": 24}
    masked = {**padding("left"), "labels": [[5, 6, 7, -100], [8, 9, 10, 11]]}
    # One padded slot, within the window of a real one: those that see none attend to all alike in the library.
    given = {**padding("right"), "decoder_input_ids": IDS, "decoder_attention_mask": [[1, 1, 1, 1, 1, 0], [1] * 6]}
    wide = {"encoder": side, "decoder": side | other}
    one = alike | {"num_labels": 3, "is_encoder_decoder": False}
    two = alike | {"num_labels": 3}
    return {
        "t5gemma": ("T5GemmaForConditionalGeneration", alike, {}, [masked, given]),
        "t5gemma_wide": ("T5GemmaForConditionalGeneration", wide | {"tie_word_embeddings": False}, {}, [masked]),
        "t5gemma_narrow": ("T5GemmaModel", {"encoder": side | other, "decoder": side}, {}, [given]),
        "t5gemma_encoder": (
            "T5GemmaEncoderModel",
            one,
            {},
            [padding("left"), {"input_ids": CLASSIFIED[0]["input_ids"]}],
        ),
        "t5gemma_encoder_classifier": ("T5GemmaForSequenceClassification", one, {}, CLASSIFIED[:5]),
        "t5gemma_classifier": ("T5GemmaForSequenceClassification", two, {}, CLASSIFIED[2:5]),
        "t5gemma_token": ("T5GemmaForTokenClassification", two, {}, [CLASSIFIED[2]]),
    }


def decoders() -> dict[str, tuple[str, dict[str, Any], dict[str, Any], list[dict[str, Any]]]]:
    """Decoders and encoder-decoders whose layers differ from GPT-2's and BART's."""
    olmo2 = SMALL | {
        "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    oss = SMALL | {
        "num_key_value_heads": 1, "head_dim": 4, "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 3,
        "max_position_embeddings": 32, "pad_token_id": 0,
    }  # fmt: skip
    odd = {
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 3,
        "swiglu_alpha": 0.9, "swiglu_limit": 0.4, "attention_bias": False, "rms_norm_eps": 1e-2,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 50.0},
    }  # fmt: skip
    nxt = SMALL | {
        "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32, "pad_token_id": 0, "num_experts": 3,
        "num_experts_per_tok": 2, "moe_intermediate_size": 4, "shared_expert_intermediate_size": 5,
        "linear_key_head_dim": 4, "linear_value_head_dim": 3, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "rms_norm_eps": 1e-2,  # a smaller one makes errors of rounding large where a head's output is almost zero
        "layer_types": ["linear_attention", "full_attention"],
    }  # fmt: skip
    nxt_dense = {
        "linear_value_head_dim": 6, "linear_num_value_heads": 2, "linear_conv_kernel_dim": 2, "hidden_act": "gelu",
        "num_experts": 0, "rms_norm_eps": 0.05, "num_hidden_layers": 3,
        "layer_types": ["linear_attention"] * 2 + ["full_attention"],
    }  # fmt: skip
    nxt_sparse = {
        "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3], "linear_num_value_heads": 6,
        "partial_rotary_factor": 0.5, "layer_types": ["full_attention", *["linear_attention"] * 3], "rms_norm_eps": 0.5,
    }  # fmt: skip
    nxt_full = {
        "layer_types": ["full_attention"] * 2, "attention_bias": True, "norm_topk_prob": False,
        "tie_word_embeddings": True, "rope_parameters": {
            "rope_type": "linear", "factor": 2.0, "rope_theta": 50.0, "partial_rotary_factor": 0.75,
        },
    }  # fmt: skip
    routed = {"output_router_logits": True, "output_hidden_states": True}
    phi = SMALL | {
        "hidden_size": 16, "num_attention_heads": 4, "max_position_embeddings": 16, "pad_token_id": 0,
    }  # fmt: skip
    phi_yarn = {
        "rope_type": "yarn", "factor": 4.0, "rope_theta": 50.0, "original_max_position_embeddings": 4,
        "partial_rotary_factor": 1.0,
    }  # fmt: skip
    phi3 = phi | {"num_key_value_heads": 2}
    mixed = ["sliding_attention", "full_attention"]
    temperature = {
        "rope_type": "default", "rope_theta": 100.0, "llama_4_scaling_beta": 0.4, "original_max_position_embeddings": 2,
    }  # fmt: skip
    longrope = {
        "rope_type": "longrope", "short_factor": [1.5, 3.0], "long_factor": [2.0, 40.0], "rope_theta": 50.0,
        "partial_rotary_factor": 1.0,
    }  # fmt: skip
    opt = {
        "vocab_size": 24, "hidden_size": 8, "ffn_dim": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
        "max_position_embeddings": 12, "word_embed_proj_dim": 6, "pad_token_id": 1,
    }  # fmt: skip
    bare = {"enable_bias": False, "layer_norm_elementwise_affine": False, "word_embed_proj_dim": 8}
    neo = {
        "vocab_size": 24, "hidden_size": 8, "num_layers": 3, "num_heads": 2, "max_position_embeddings": 12,
        "attention_types": [[["local"], 2], [["global"], 1]], "window_size": 2,
    }  # fmt: skip
    gptj = GPT2 | {"rotary_dim": 2, "n_inner": 12}
    neox = SMALL | {"max_position_embeddings": 12, "hidden_size": 16}
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    bloom = {"vocab_size": 24, "hidden_size": 12, "n_layer": 2, "n_head": 3}
    xglm = {
        "vocab_size": 24, "d_model": 8, "ffn_dim": 12, "num_layers": 2, "attention_heads": 2, "pad_token_id": 1
    }  # fmt: skip
    start = {"decoder_start_token_id": 0}
    ended = [  # the state of the last end token decides, padding after it or not
        {"input_ids": [[3, 4, 5, 2, 0], [6, 7, 8, 9, 2]], "attention_mask": mask, "labels": [2, 0]}
        for mask in ([[1, 1, 1, 1, 0], [1] * 5], [[1] * 5] * 2)
    ]
    mt5 = {
        "vocab_size": 24, "d_model": 8, "d_kv": 3, "d_ff": 12, "num_layers": 2, "num_decoder_layers": 1, "num_heads": 2
    }  # fmt: skip
    shown = [{"input_ids": IDS, "labels": IDS, "output_hidden_states": True}]
    padded = [padding("right") | {"labels": IDS}, padding("left") | {"labels": IDS}]
    masked = [{**padding("left"), "decoder_input_ids": IDS, "decoder_attention_mask": RIGHT}]
    ignored = [{"input_ids": IDS, "labels": [[3, 4, 5, -100, -100], [6, 7, 8, 9, 10]]}]
    blenderbot = BART | {"pad_token_id": 0, "bos_token_id": 1, "decoder_layers": 2}
    return {
        "olmo2": ("Olmo2ForCausalLM", olmo2, {}, [TEXT, padding("left") | {"output_hidden_states": True}]),
        "olmo2_yarn": (
            "Olmo2ForCausalLM",
            olmo2 | {
                "num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": True, "hidden_act": "gelu",
                "rms_norm_eps": 1e-3,
                "rope_parameters": {
                    "rope_type": "yarn", "factor": 4.0, "rope_theta": 50.0, "original_max_position_embeddings": 4,
                },
            },
            {},
            [TEXT, padding("right")],
        ),
        "olmo2_classifier": ("Olmo2ForSequenceClassification", olmo2 | {"num_labels": 3}, {}, CLASSIFIED[:2]),
        "gpt_oss": ("GptOssForCausalLM", oss, {}, [TEXT | routed, padding("left")]),
        "gpt_oss_odd": ("GptOssForCausalLM", oss | odd, {}, [TEXT, padding("right")]),
        "gpt_oss_classifier": ("GptOssForSequenceClassification", oss | {"num_labels": 3}, {}, CLASSIFIED[:2]),
        "gpt_oss_token": (
            "GptOssForTokenClassification", oss | {"num_labels": 3, "layer_types": ["full_attention"] * 2}, {},
            [TEXT | {"labels": [[0, 1, 2, 0, 1, 2]] * 2}],
        ),
        "qwen3_next": ("Qwen3NextForCausalLM", nxt, {}, [TEXT | routed, padding("left"), LONG]),
        "qwen3_next_full": ("Qwen3NextForCausalLM", nxt | nxt_full, {}, [TEXT, padding("left")]),
        "qwen3_next_dense": ("Qwen3NextForCausalLM", nxt | nxt_dense, {}, [TEXT, padding("left")]),
        "qwen3_next_sparse": ("Qwen3NextForCausalLM", nxt | nxt_sparse, {}, [TEXT | routed, padding("left")]),
        "qwen3_next_classifier": ("Qwen3NextForSequenceClassification", nxt | {"num_labels": 3}, {}, CLASSIFIED[:2]),
        "qwen3_next_token": (
            "Qwen3NextForTokenClassification", nxt | {"num_labels": 3, "num_experts": 0}, {},
            [TEXT | {"labels": [[0, 1, 2, 0, 1, 2]] * 2}],
        ),
        "phi": (
            "PhiForCausalLM", phi | {"num_attention_heads": 2}, {}, [TEXT, padding("left")],
        ),
        "phi_norms": (
            "PhiForCausalLM",
            phi | {
                "num_key_value_heads": 2, "qk_layernorm": True, "hidden_act": "relu2", "layer_norm_eps": 1e-2,
                "tie_word_embeddings": True, "rope_parameters": phi_yarn,
            },
            {},
            [TEXT, padding("right")],
        ),
        "phi_wide_heads": (
            "PhiForCausalLM",
            phi | {"num_key_value_heads": 1, "head_dim": 6, "partial_rotary_factor": 0.7, "rope_theta": 100.0},
            {},
            [TEXT],
        ),
        "phi_classifier": ("PhiForSequenceClassification", phi | {"num_labels": 3}, {}, CLASSIFIED[:2]),
        "phi_token": (
            "PhiForTokenClassification", phi | {"num_labels": 3}, {}, [TEXT | {"labels": [[0, 1, 2, 0, 1, 2]] * 2}],
        ),
        "phi3": (
            "Phi3ForCausalLM",
            phi3 | {"rope_parameters": longrope, "original_max_position_embeddings": 5, "sliding_window": 4},
            {},
            [TEXT | padding("left") | {"output_hidden_states": True}, {"input_ids": [IDS[0][:5]]}],
        ),
        "phi3_wide_heads": (
            "Phi3ForCausalLM",
            phi3 | {
                "head_dim": 6, "num_key_value_heads": 1, "hidden_act": "relu2", "tie_word_embeddings": True,
                "rms_norm_eps": 1e-2,
                "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.7},
            },
            {},
            [TEXT, padding("right")],
        ),
        "phi3_classifier": ("Phi3ForSequenceClassification", phi3 | {"num_labels": 3}, {}, CLASSIFIED[:2]),
        "phi3_token": (
            "Phi3ForTokenClassification",
            phi3 | {
                "num_labels": 3, "num_key_value_heads": 4, "original_max_position_embeddings": 4,
                "rope_parameters": longrope | {
                    "partial_rotary_factor": 0.5, "attention_factor": 1.3, "short_factor": [1.5], "long_factor": [0.4],
                },
            },
            {},
            [TEXT | {"labels": [[0, 1, 2, 0, 1, 2]] * 2}],
        ),
        "qwen2_late_windows": (
            "Qwen2ForCausalLM",
            LLAMA | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
            {},
            [TEXT, padding("left")],
        ),
        "qwen3_windows": (
            "Qwen3ForCausalLM",
            LLAMA | {"head_dim": 6, "use_sliding_window": True, "sliding_window": 2, "layer_types": mixed[::-1]},
            {},
            [TEXT],
        ),
        "ministral": (
            "MinistralForCausalLM",
            LLAMA | {"head_dim": 6, "sliding_window": 3, "layer_types": mixed},
            {},
            [TEXT | {"output_hidden_states": True}, padding("left")],
        ),
        "ministral_classifier": (
            "MinistralForSequenceClassification",
            LLAMA | {"head_dim": 4, "num_labels": 3, "sliding_window": 2},
            {},
            CLASSIFIED[:2],
        ),
        "qwen3_answers": ("Qwen3ForQuestionAnswering", LLAMA | {"head_dim": 6}, {}, SPANS),
        "mistral_answers": ("MistralForQuestionAnswering", LLAMA | {"head_dim": 4, "sliding_window": 3}, {}, SPANS[:1]),
        "ministral_token": (
            "MinistralForTokenClassification",
            LLAMA | {
                "head_dim": 4, "num_labels": 3, "layer_types": ["full_attention"] * 2, "num_key_value_heads": 2,
                "hidden_act": "gelu",
            },
            {},
            [TEXT | {"labels": [[0, 1, 2, 0, 1, 2]] * 2}],
        ),
        "ministral3": (
            "Ministral3ForCausalLM",
            LLAMA | {
                "head_dim": 6,
                "rope_parameters": temperature | {
                    "rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 2.0,
                },
            },
            {},
            [TEXT | {"output_hidden_states": True}, padding("left"), padding("right")],
        ),
        "ministral3_classifier": (
            "Ministral3ForSequenceClassification",
            LLAMA | {
                "head_dim": 4, "num_labels": 3, "sliding_window": 3, "tie_word_embeddings": True,
                "rope_parameters": temperature | {"original_max_position_embeddings": 1},
            },
            {},
            CLASSIFIED[:2],
        ),
        "ministral3_token": (
            "Ministral3ForTokenClassification",
            LLAMA | {
                "head_dim": 4, "num_labels": 3, "num_key_value_heads": 2,
                "rope_parameters": temperature | {"llama_4_scaling_beta": 0.0},
            },
            {},
            [TEXT | {"labels": [[0, 1, 2, 0, 1, 2]] * 2}],
        ),
        "opt_350m": ("OPTForCausalLM", opt | {"do_layer_norm_before": False}, {}, shown + padded),
        "opt_pre_norm": ("OPTForCausalLM", opt | {"activation_function": "gelu"}, {}, padded),
        "opt_without_biases": ("OPTForCausalLM", opt | bare | {"_remove_final_layer_norm": True}, {}, [TEXT]),
        "opt_classifier": ("OPTForSequenceClassification", opt | {"num_labels": 3}, {}, CLASSIFIED[:1]),
        "gpt_neo_layers": ("GPTNeoForCausalLM", neo, {}, shown),
        "gptj": ("GPTJForCausalLM", gptj, {}, shown),
        "gpt_neox": ("GPTNeoXForCausalLM", neox, {}, shown + padded),
        "gpt_neox_sequential": (
            "GPTNeoXForCausalLM",
            neox | {"use_parallel_residual": False, "attention_bias": False, "rope_parameters": rope},
            {},
            [TEXT],
        ),
        "gpt_neox_older_keys": (
            "GPTNeoXForCausalLM",
            neox | {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5}},
            {"rope_parameters": None, "rotary_pct": 0.5, "rotary_emb_base": 50},
            [TEXT],
        ),
        "bloom": ("BloomForCausalLM", bloom, {}, shown + padded[:1]),
        "bloom_residual_after_norm": (
            "BloomForCausalLM",
            bloom | {"apply_residual_connection_post_layernorm": True},
            {},
            [TEXT],
        ),
        "xglm": ("XGLMForCausalLM", xglm, {}, shown),
        "mt5": ("MT5ForConditionalGeneration", mt5, {}, [TEXT]),
        "t5_classifier": ("T5ForSequenceClassification", mt5 | {"num_labels": 3, "eos_token_id": 2} | start, {}, ended),
        "mt5_token": (
            "MT5ForTokenClassification", mt5 | {"num_labels": 3}, {},
            [padding("right") | {"labels": [[0, 1, 2, 0, -100, -100], [1, 2, 0, 1, 2, 0]]}],
        ),
        "t5_answers": ("T5ForQuestionAnswering", mt5 | start, {}, SPANS),
        "mbart": ("MBartForConditionalGeneration", BART | {"decoder_layers": 2}, {}, ignored + masked),
        "blenderbot": ("BlenderbotForConditionalGeneration", blenderbot, {}, ignored + masked),
        "blenderbot_small": (
            "BlenderbotSmallForConditionalGeneration", blenderbot | {"scale_embedding": True}, {}, ignored + masked
        ),
    }  # fmt: skip


def encoders() -> dict[str, tuple[str, dict[str, Any], dict[str, Any], list[dict[str, Any]]]]:
    """Relatives of BERT, choices between texts, and the layers of an encoder as a decoder."""
    choices = {"input_ids": [IDS, IDS[::-1]], "attention_mask": [RIGHT, LEFT]}
    kinds = {"token_type_ids": [[[0, 0, 1, 1, 0, 1]] * 2] * 2}
    pairs = {**padding("left"), "labels": IDS, "output_hidden_states": True}
    causal = [padding(side) | {"labels": [[3, 4, -100, -100, -100, -100], IDS[1]]} for side in ("left", "right")]
    decoder = BERT | {"is_decoder": True}
    distilled = {
        "vocab_size": 24, "dim": 8, "hidden_dim": 12, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 12,
        "activation": "relu", "sinusoidal_pos_embds": True,
    }  # fmt: skip
    narrow = BERT | {"embedding_size": 6, "pad_token_id": 0}
    albert = narrow | {"num_hidden_layers": 3}
    order = {**padding("right"), "labels": IDS, "sentence_order_label": [1, 0]}
    found = [padding(side) | {"labels": [[0, 1, 1, 0, 1, 0], [1, 0, 0, 0, 1, 1]]} for side in ("left", "right")]
    return {
        "albert": ("AlbertForMaskedLM", albert, {}, [pairs]),
        "albert_equal_widths": (
            "AlbertForMaskedLM", albert | {"embedding_size": 8, "tie_word_embeddings": False}, {}, [TEXT]
        ),
        "albert_pretraining": ("AlbertForPreTraining", albert | {"hidden_act": "relu"}, {}, [order]),
        "albert_choice": ("AlbertForMultipleChoice", albert, {}, [choices]),
        "electra": ("ElectraForPreTraining", narrow | {"hidden_act": "relu"}, {}, found),
        "electra_generator": ("ElectraForMaskedLM", narrow | {"hidden_act": "relu", "embedding_size": 10}, {}, [pairs]),
        "electra_classifier": (
            "ElectraForSequenceClassification", narrow | {"embedding_size": 8, "num_labels": 3}, {}, [padding("left")]
        ),
        "electra_choice": ("ElectraForMultipleChoice", narrow | {"summary_activation": "tanh"}, {}, [choices]),
        "electra_choice_of_states": (
            "ElectraForMultipleChoice", narrow | {"summary_activation": "", "summary_use_proj": False}, {}, [choices]
        ),
        "electra_causal": ("ElectraForCausalLM", narrow | {"is_decoder": True}, {}, causal),
        "distilbert": ("DistilBertForMaskedLM", distilled | {"tie_word_embeddings": False}, {}, [pairs]),
        "distilbert_classifier": (
            "DistilBertForSequenceClassification", distilled | {"num_labels": 3}, {}, [padding("left")]
        ),
        "deberta_v2_choice": (
            "DebertaV2ForMultipleChoice",
            RELATIVE | BUCKETS | {"pooler_hidden_size": 8},
            {},
            [choices | {"labels": [1, 0]}],
        ),
        "bert_choice": ("BertForMultipleChoice", BERT, {}, [choices | kinds | {"labels": [1, 0]}]),
        "bert_next_sentence": ("BertForNextSentencePrediction", BERT, {}, [padding("right") | {"labels": [1, 0]}]),
        "roberta_choice": ("RobertaForMultipleChoice", BERT, {}, [choices | {"labels": [1, 0]}]),
        "xlm_roberta": ("XLMRobertaForMaskedLM", BERT | {"pad_token_id": 2, "hidden_act": "relu"}, {}, [pairs]),
        "prelayernorm": ("RobertaPreLayerNormForMaskedLM", BERT | {"hidden_act": "gelu_new"}, {}, [pairs]),
        "prelayernorm_model": ("RobertaPreLayerNormModel", BERT | {"type_vocab_size": 1}, {}, [padding("right")]),
        "bert_causal": ("BertLMHeadModel", decoder, {"architectures": ["BertForCausalLM"]}, causal),
        "roberta_causal": (
            "RobertaForCausalLM",
            decoder | {"type_vocab_size": 2},
            {},
            [call | {"token_type_ids": [[0, 0, 1, 1, 0, 1]] * 2} for call in causal],
        ),
    }  # fmt: skip


def pairs() -> dict[str, tuple[str, dict[str, Any], dict[str, Any], list[dict[str, Any]]]]:
    """Encoders and decoders of two families, of other widths and depths, with labels and with inputs on both sides."""
    joined = {"is_decoder": True, "add_cross_attention": True}
    bert, roberta = {"model_type": "bert"} | BERT | {"pad_token_id": 0}, {"model_type": "roberta"} | BERT
    prelayernorm = roberta | {"model_type": "roberta-prelayernorm"}
    gpt2 = {"model_type": "gpt2"} | GPT2 | {"vocab_size": 20, "n_embd": 6, "n_layer": 1} | joined
    labels = {**padding("right"), "labels": [[3, 4, 5, -100], [6, 7, 8, 9]], "output_hidden_states": True}
    both = {
        **padding("left"), "decoder_input_ids": [[2, 3, 4], [2, 5, 6]], "decoder_attention_mask": [[1, 1, 0], [1, 1, 1]]
    }  # fmt: skip
    kinds = {"token_type_ids": [[0, 0, 1, 1, 0, 1]] * 2, "decoder_position_ids": [[2, 3, 4]] * 2}
    start = {"decoder_start_token_id": 2, "pad_token_id": 0}
    roberta_start = {"decoder_start_token_id": 2, "pad_token_id": 1}
    distilled = {
        "model_type": "distilbert", "vocab_size": 24, "dim": 8, "hidden_dim": 12, "n_layers": 1, "n_heads": 2,
        "max_position_embeddings": 12,
    }  # fmt: skip
    narrow = {"embedding_size": 6, "model_type": "electra"}
    scaled = gpt2 | {"n_embd": 8, "scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False, "n_layer": 2}
    kind = "EncoderDecoderModel"
    return {
        "pair_bert_gpt2": (kind, {"encoder": bert, "decoder": gpt2, **start}, {}, [labels, both | kinds]),
        "pair_roberta": (kind, {"encoder": roberta, "decoder": roberta | joined, **roberta_start}, {}, [labels, both]),
        "pair_bert": (
            kind,
            {"encoder": bert | {"hidden_act": "relu"}, "decoder": bert | joined | {"num_hidden_layers": 1}, **start},
            {},
            [labels, both | {"decoder_token_type_ids": [[0, 1, 1]] * 2}],
        ),
        "pair_prelayernorm_untied": (
            kind,
            {
                "encoder": distilled,
                "decoder": prelayernorm | joined | {"hidden_size": 6, "tie_word_embeddings": False},
                **roberta_start,
            },
            {},
            [labels],
        ),
        "pair_albert_gpt2": (
            kind, {"encoder": bert | narrow | {"model_type": "albert"}, "decoder": scaled, **start}, {}, [labels]
        ),
        "pair_electra": (kind, {"encoder": bert | narrow, "decoder": bert | narrow | joined, **start}, {}, [labels]),
    }  # fmt: skip


def long_cases() -> dict[str, tuple[str, dict[str, Any], dict[str, Any], list[dict[str, Any]]]]:
    """Cases of encoders for long texts, of ModernBERT and of RoFormer; as in `cases`."""
    modern = SMALL | {
        "num_hidden_layers": 4, "max_position_embeddings": 16, "local_attention": 4, "pad_token_id": 0,
        "bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2,
    }  # fmt: skip
    bases = {"full_attention": 50.0, "sliding_attention": 7.0}
    unlike = {
        "attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True, "norm_eps": 0.1,
        "hidden_activation": "silu", "classifier_activation": "relu", "local_attention": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
    }  # fmt: skip
    ids = [[3 + (7 * i + 5 * row) % 20 for i in range(17)] for row in range(2)]
    mask = [[1] * 17, [1] * 11 + [0] * 6]
    left = [row[::-1] for row in mask]
    short = {"input_ids": [row[:13] for row in ids], "attention_mask": [row[:13] for row in mask]}
    long = {"input_ids": ids, "attention_mask": mask}
    sparse = SMALL | {"max_position_embeddings": 18, "pad_token_id": 0, "block_size": 2, "num_random_blocks": 1}
    separated = {"input_ids": [[23 if i in (4, 9) else x for i, x in enumerate(row)] for row in ids]}
    spans = {"start_positions": [6, 5], "end_positions": [8, 12]}
    t5 = {
        "vocab_size": 24, "d_model": 8, "d_kv": 3, "d_ff": 12, "num_layers": 2, "num_decoder_layers": 1, "num_heads": 2,
        "relative_attention_num_buckets": 6, "relative_attention_max_distance": 9, "local_radius": 2,
        "global_block_size": 3, "decoder_start_token_id": 0,
    }  # fmt: skip
    labels = {"labels": IDS, "output_hidden_states": True}
    summaries = t5 | {"encoder_attention_type": "transient-global"}
    rotary = SMALL | {"max_position_embeddings": 18, "pad_token_id": 0}
    choices = {"input_ids": [IDS, [IDS[1], IDS[0]]], "attention_mask": [RIGHT, LEFT], "labels": [1, 0]}
    return {
        "big_bird": (
            "BigBirdForMaskedLM",
            sparse | {"rescale_embeddings": True, "use_bias": False},
            {},
            [long | {"labels": ids}, short],  # blocks; all keys
        ),
        "big_bird_spans": ("BigBirdForQuestionAnswering", sparse | {"sep_token_id": 23}, {}, [separated | spans]),
        "big_bird_lengths": (
            "BigBirdForQuestionAnswering", sparse, {}, [long | spans | {"question_lengths": [[3], [5]]}]
        ),
        "big_bird_classifier": ("BigBirdForSequenceClassification", sparse | {"num_labels": 3}, {}, [long]),
        "big_bird_causal": (
            "BigBirdForCausalLM", sparse | {"is_decoder": True, "attention_type": "original_full"}, {}, [long]
        ),
        "longt5_local": ("LongT5ForConditionalGeneration", t5, {}, [long | labels]),
        "longt5": (
            "LongT5ForConditionalGeneration",
            summaries | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
            {},
            [long | labels, long | labels | {"attention_mask": left}],
        ),
        "roformer": (
            "RoFormerForMaskedLM",
            rotary | {"embedding_size": 6, "rotary_value": True, "hidden_act": "relu"},
            {},
            [long],
        ),
        "modernbert": (
            "ModernBertForMaskedLM", modern, {}, [TEXT | padding("left") | {"output_hidden_states": True}]
        ),
        "modernbert_biases": ("ModernBertForQuestionAnswering", modern | unlike, {}, SPANS),
        "modernbert_untied": (
            "ModernBertForMaskedLM", modern | {"tie_word_embeddings": False, "decoder_bias": False}, {}, [TEXT]
        ),
        "modernbert_classifier": (
            "ModernBertForSequenceClassification",
            modern | {"num_labels": 3, "classifier_pooling": "mean", "num_hidden_layers": 1},
            {},
            CLASSIFIED[2:3],
        ),
        "modernbert_choice": (
            "ModernBertForMultipleChoice", modern, {}, [choices | {"attention_mask": [RIGHT, RIGHT]}]
        ),
        "modernbert_choice_mean": (
            "ModernBertForMultipleChoice", modern | {"classifier_pooling": "mean"}, {}, [choices]
        ),
        "roformer_choice": ("RoFormerForMultipleChoice", rotary, {}, [choices]),
        "roformer_causal": ("RoFormerForCausalLM", rotary | {"is_decoder": True}, {}, [long | {"labels": ids}]),
    }  # fmt: skip


def latent_cases() -> dict[str, tuple[str, dict[str, Any], dict[str, Any], list[dict[str, Any]]]]:
    """DeepSeek-V2 and V3; the first two are like published models, the others like none."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "rope_theta": 100.0}
    yarns = yarn | {"mscale": 0.7, "mscale_all_dim": 2.0}
    groups = {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}
    several = {"num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 6, "n_group": 3}
    several |= {"topk_group": 2}
    everything = {**TEXT, "output_router_logits": True, "output_hidden_states": True}
    v2, v3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
    cases = {
        "groups": (v2, groups | {"rope_parameters": yarns, "routed_scaling_factor": 16.0}, [LONG]),
        "bias": (
            v3, {"n_group": 2, "topk_group": 1, "rope_parameters": yarns, "qk_rope_head_dim": 4},
            [everything | LONG | {"labels": LONG["input_ids"]}],
        ),
        "plain": (
            v2, {"q_lora_rank": None, "n_shared_experts": 2, "routed_scaling_factor": 1.7, "first_k_dense_replace": 0},
            [padding("left")],
        ),
        "wide": (
            v2, groups | several | {"num_experts_per_tok": 4, "v_head_dim": 9,
            "first_k_dense_replace": 2, "tie_word_embeddings": True, "rms_norm_eps": 1e-3, "hidden_act": "gelu",
            "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 50.0}},
            [everything],
        ),
        "halves": (
            v3, {"rope_interleave": False, "norm_topk_prob": False, "q_lora_rank": None, "attention_bias": True,
            "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "num_experts_per_tok": 3, "qk_rope_head_dim": 4},
            [padding("left")],
        ),
        "ample": (
            v3, several | {"num_experts_per_tok": 3, "v_head_dim": 8, "first_k_dense_replace": 2, "rms_norm_eps": 1e-2,
            "qk_rope_head_dim": 6, "rope_parameters": yarn | {"mscale_all_dim": 1.0}},
            [LONG],
        ),
        "dense": (v2, {"first_k_dense_replace": 3, "attention_bias": True}, [TEXT]),
        "token": (
            "DeepseekV3ForTokenClassification", {"n_group": 1, "topk_group": 1, "num_labels": 3},
            [TEXT | {"labels": [[0, 1, 2, 0, 1, 2]] * 2}],
        ),
    }  # fmt: skip
    return {f"deepseek_{name}": (kind, DEEPSEEK | more, {}, calls) for name, (kind, more, calls) in cases.items()}


def flat(outputs: Any) -> dict[str, list]:
    """The outputs that a test compares, to seven digits."""
    found = {}
    for name, value in outputs.items():
        if name == "hidden_states" and len(value) == 1:  # T5Gemma's classifiers give the last ones unasked
            continue
        kept = name in ("loss", "logits", "start_logits", "end_logits", "aux_loss", "router_logits", "hidden_states")
        kept = kept or name in ("last_hidden_state", "pooler_output", "prediction_logits", "sop_logits")
        if kept:
            parts = value if isinstance(value, tuple) else (value,)
            found[name] = [[float(f"{x:.7g}") for x in part.detach().double().reshape(-1).tolist()] for part in parts]
    return found


def main() -> None:
    import torch
    import transformers
    from safetensors.numpy import load_file, save_file

    transformers.logging.set_verbosity_error()
    chosen = cases() if len(sys.argv) == 1 else {name: cases()[name] for name in sys.argv[1:]}
    content = {} if len(sys.argv) == 1 else json.loads(TARGET.read_text(encoding="utf-8"))
    for name, (kind, arguments, edits, calls) in chosen.items():
        model = getattr(transformers, kind)
        with tempfile.TemporaryDirectory() as place:
            model(model.config_class(**copy.deepcopy(arguments))).save_pretrained(place)
            weights = Path(place) / "model.safetensors"
            initial = load_file(weights)
            shapes = {key: value.shape for key, value in initial.items()}
            random = {key: values(key, shape) for key, shape in shapes.items()}
            constant = {key: value for key, value in initial.items() if key in CONSTANT}
            save_file(random | constant, weights, {"format": "pt"})
            path = Path(place) / "config.json"
            config = json.loads(path.read_text()) | edits
            config = {key: value for key, value in config.items() if key not in edits or value is not None}
            path.write_text(json.dumps(config))
            again = model.from_pretrained(place, dtype=torch.float32).eval()
            found = []
            for number, call in enumerate(calls):
                exact = copy.deepcopy(again).double() if (name, number) in EXACT else again
                inputs = {k: torch.tensor(v) if isinstance(v, list) else v for k, v in call.items()}
                with torch.no_grad():
                    found.append({"inputs": call, "outputs": flat(exact(**inputs))})
        content[name] = {"config": config, "tensors": shapes, "calls": found}
        print(name, {k: v[0][:1] for k, v in found[0]["outputs"].items()})
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(case)}" for name, case in content.items())
    TARGET.write_text("{\n" + lines + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Random configurations of every family in jaxformer/hf/keys.json; see `hugging_face_random.py`.

A draw is a table of values that differ from small ones: key of config.json -> value. `build` turns it into a
config.json. Keys that depend on others (`rope_parameters`, `layer_types`) are drawn by name, and worked out there, so
that any part of a draw is a configuration, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

VOCAB = 37
ACTIVATIONS = ("gelu", "relu", "silu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_python",
    "quick_gelu", "relu2",
    "swish", "tanh", "mish", "sigmoid",
    )  # fmt: skip
PROJECTIONS = tuple(f"{gate}{act}" for gate in ("", "gated-") for act in ("relu", "gelu", "silu", "gelu_new", "tanh"))
WIDTHS, HEADS, LAYERS, INNER = (24, 12, 36), (2, 1, 3, 4), (2, 1, 3), (20, 16, 33)
RATES = (0.0, 0.1, 0.3)
ROPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "base")
SUMMARY = {
    "summary_type": ("first", "last", "mean", "cls_index"),
    "summary_use_proj": (True, False),
    "summary_activation": (None, "tanh", "gelu", "relu"),
    "summary_proj_to_labels": (True, False),
    "summary_last_dropout": RATES,
    "summary_first_dropout": RATES,
}
BOOLS = ("scale_embedding", "tie_word_embeddings", "attention_bias", "mlp_bias", "use_bias", "enable_bias", "norm_bias",
    "decoder_bias", "classifier_bias", "norm_topk_prob", "rope_interleave", "qk_layernorm", "use_parallel_residual",
    "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "rescale_embeddings",
    "apply_residual_connection_post_layernorm", "position_biased_input", "relative_attention", "legacy",
    "share_att_key",
    "do_layer_norm_before", "_remove_final_layer_norm", "layer_norm_elementwise_affine", "rotary_value",
    "sinusoidal_pos_embds", "use_bidirectional_attention", "use_sliding_window", "same_length", "bi_data",
    "share_encoder_decoder_embeddings", "token_classification_bias", "output_router_logits", "is_decoder",
    "slow_but_exact", "talking_head", "output_hidden_states", "add_cross_attention", "use_cache",
    "sparse_prediction")  # fmt: skip
RARE = ("is_decoder", "add_cross_attention", "talking_head", "sparse_prediction", "use_sliding_window", "legacy",
    "num_hidden_groups", "inner_group_num", "encoder_layerdrop", "decoder_layerdrop", "layerdrop", "mlp_only_layers",
    "decoder_sparse_step", "chunk_size_feed_forward", "bos_token_id", "mem_len", "reuse_len", "bi_data",
    "same_length")  # fmt: skip
"""Keys whose other values are refused, or change nothing: drawn less often."""

CHOICES: dict[str, tuple[Any, ...]] = {
    **SUMMARY,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim"), WIDTHS),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers",
        "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads", "attention_heads",
        "encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("intermediate_size", "n_inner", "hidden_dim", "d_ff", "d_inner", "ffn_dim", "encoder_ffn_dim",
        "decoder_ffn_dim"), INNER),
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function", "activation", "ff_activation",
        "pooler_hidden_act", "classifier_activation", "conv_act"), ACTIVATIONS),
    **dict.fromkeys(("layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps", "norm_eps"), (1e-5, 1e-2, 1e-12, 1e-1)),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout",
        "activation_dropout", "classifier_dropout", "classifier_dropout_prob", "resid_pdrop", "embd_pdrop",
        "attn_pdrop",
        "hidden_dropout", "qa_dropout", "seq_classif_dropout", "pooler_dropout", "dropout_rate", "cls_dropout",
        "embedding_dropout", "mlp_dropout", "embed_dropout", "resid_dropout", "encoder_layerdrop", "decoder_layerdrop",
        "layerdrop"), RATES),
    **dict.fromkeys(BOOLS, (False, True)),
    "legacy": (True, False),
    "vocab_size": (VOCAB, 41),
    "num_key_value_heads": (None, 1, 2),
    "head_dim": (None, 8, 12, 6),
    "d_kv": (6, 5, 8),
    "d_head": (None, 8),
    "embedding_size": (None, 16, 9),
    "word_embed_proj_dim": (None, 16),
    "max_position_embeddings": (40, 64),
    "n_positions": (40, 64),
    "type_vocab_size": (2, 0, 3, 1),
    "pad_token_id": (0, 1, 3, None, 36),
    "bos_token_id": (1, 0, None),
    "eos_token_id": (2, [2, 5], None, 7),
    "decoder_start_token_id": (2, 4, 0),
    "forced_eos_token_id": (None, 2),
    "classifier_dropout": (None, 0.2),
    "rope_parameters": (None, *ROPES),
    "sliding_window": (None, 3, 5, 40),
    "max_window_layers": (0, 1, 2),
    "layer_types": (None, "mixed", "full", "sliding"),
    "local_attention": (6, 8, 128, 5),
    "attention_types": ("both", "local", "global"),
    "window_size": (3, 5, 256),
    "num_hidden_groups": (1, 2),
    "inner_group_num": (1, 2),
    "attention_type": ("block_sparse", "original_full"),
    "block_size": (2, 3, 4),
    "num_random_blocks": (1, 2, 0),
    "sep_token_id": (6, 9),
    "max_relative_positions": (-1, 4, 6),
    "pos_att_type": (["c2p", "p2c"], ["c2p"], ["p2c"], None, "c2p|p2c", []),
    "position_buckets": (-1, 4, 6),
    "norm_rel_ebd": ("none", "layer_norm"),
    "conv_kernel_size": (0, 3, 5),
    "conv_groups": (1, 2),
    "pooler_hidden_size": (None, 24, 16),
    "attention_head_size": (None, 8),
    "relative_attention_num_buckets": (8, 6, 32, 12),
    "relative_attention_max_distance": (9, 17, 128),
    "feed_forward_proj": PROJECTIONS,
    "local_radius": (2, 3, 127),
    "global_block_size": (3, 2, 16),
    "encoder_attention_type": ("local", "transient-global"),
    "rotary_dim": (4, 8, 2, None),
    "partial_rotary_factor": (0.5, 1.0, 0.25),
    "clamp_len": (-1, 4, 7),
    "attn_type": ("bi", "uni"),
    "mem_len": (None, 5),
    "reuse_len": (None, 3),
    "query_pre_attn_scalar": (16, 8, 5.5),
    "final_logit_softcapping": (30.0, None, 2.0),
    "attn_logit_softcapping": (50.0, None, 1.5),
    "classifier_pooling": ("cls", "mean"),
    "num_experts": (4, 3, 6),
    "num_local_experts": (4, 3, 6),
    "n_routed_experts": (4, 6),
    "num_experts_per_tok": (2, 1, 3),
    "n_shared_experts": (1, 2),
    "moe_intermediate_size": (10, 7),
    "first_k_dense_replace": (1, 0, 2),
    "kv_lora_rank": (6, 9),
    "q_lora_rank": (5, None),
    "n_group": (1, 2),
    "topk_group": (1, 2),
    "topk_method": ("greedy", "group_limited_greedy"),
    "qk_nope_head_dim": (4, 6),
    "qk_rope_head_dim": (4, 2, 6),
    "v_head_dim": (3, 8),
    "routed_scaling_factor": (1.0, 2.5),
    "router_aux_loss_coef": (0.001, 0.3),
    "mlp_only_layers": (None, [0]),
    "decoder_sparse_step": (1, 2),
    "swiglu_alpha": (1.702, 1.0),
    "swiglu_limit": (7.0, 0.5),
    "pretraining_tp": (1, 2),
    "chunk_size_feed_forward": (0, 5),
    "initializer_cutoff_factor": (2.0, 3.0),
    "start_n_top": (5, 3),
    "end_n_top": (5, 3),
    "num_labels": (3, 1, 2, 5),
    "problem_type": (None, "regression", "single_label_classification", "multi_label_classification"),
    "file": ("whole", "few keys", "older keys"),
    "weights": ("one file", "several files", "older format", "bfloat16"),
}  # fmt: skip
"""Key -> values; the first is that of the small model. `file` and `weights`: how they are written."""

FAMILY: dict[str, dict[str, tuple[Any, ...]]] = {
    "deepseek_v2": {"num_key_value_heads": (4,), "num_attention_heads": (4, 2), "head_dim": (None,)},
    "deepseek_v3": {"num_key_value_heads": (4,), "num_attention_heads": (4, 2), "head_dim": (None,)},
    "gemma": {"use_bidirectional_attention": (None,)},  # theirs is bidirectional with `sdpa` alone
    "distilbert": {"pad_token_id": (0, 3)},
    "roformer": {"max_position_embeddings": (40, 64)},
    "gemma3_text": {
        "query_pre_attn_scalar": (16, 8, 5),
        "sliding_window": (3, 5, 40),
        "final_logit_softcapping": (None, 2.0),
        "attn_logit_softcapping": (None, 1.5),
    },
    "marian": {"pad_token_id": (36, 0, 3), "decoder_vocab_size": (None, 33), "decoder_start_token_id": (36, 0)},
    "pegasus": {"eos_token_id": (1, 2)},
    "opt": {
        "do_layer_norm_before": (True, False),
        "enable_bias": (True, False),
        "layer_norm_elementwise_affine": (True, False),
    },
    "xglm": {"pad_token_id": (1, 0)},
    "gpt_neox": {
        "rope_parameters": ROPES,  # theirs turns a quarter of a head without, here an odd number of channels
        "head_dim": (None,),
        "attention_bias": (True, False),
        "use_parallel_residual": (True, False),
    },
    "gpt_oss": {"attention_bias": (True, False), "sliding_window": (3, 5, 40)},
    "gemma2": {"sliding_window": (3, 5, 40)},
    "phi3": {"original_max_position_embeddings": (40, 8, 4096)},
    "gpt2": {"summary_type": ("cls_index", "first"), "scale_attn_weights": (True, False), "n_inner": (None, 20, 33)},
    "gptj": {"n_inner": (None, 20)},
    "gpt_neo": {"intermediate_size": (None, 20), "window_size": (4, 5, 256)},  # 3 slots of padding see a token
    "xlnet": {
        "summary_activation": ("tanh", "gelu", "relu"),
        "summary_type": ("last", "first", "mean"),
        "summary_proj_to_labels": (False,),
        "n_layers": (None,),
        "d_head": (None,),
    },
    "albert": {"embedding_size": (16, 9, 24)},
    "electra": {"embedding_size": (24, 16, 9), "summary_activation": ("gelu", "tanh")},
    "big_bird": {"num_random_blocks": (1, 2)},
    "ministral": {"rope_parameters": ROPES, "head_dim": (12, 8, 6), "sliding_window": (3, 5, 40)},  # theirs needs both
    "bart": {"num_labels": (3, 1, 5)},
    "deberta": {"position_biased_input": (True, False), "relative_attention": (True, False)},
    "deberta-v2": {"position_biased_input": (True, False), "relative_attention": (True, False)},
    "modernbert": {
        "attention_dropout": (0.0,),
        "head_dim": (None,),
        "decoder_bias": (True, False),
        "layer_types": (None, "mixed", "full"),
    },
}
CAUSAL_ENCODERS = ("bert", "roberta", "xlm-roberta", "roberta-prelayernorm", "electra", "roformer", "big_bird")
REFUSE = {
    "use_bidirectional_attention": ("gemma2",), "embd_pdrop": ("phi3",), "layer_types": ("qwen2", "qwen3"),
    "rope_parameters": ("modernbert",), "mlp_bias": ("deepseek_v2",), "norm_topk_prob": ("deepseek_v2",),
    "attn_type": ("xlnet",),
    "sliding_window": ("modernbert",), "embedding_size": ("deberta", "deberta-v2"), "summary_type": ("gpt2",),
}  # fmt: skip
"""Key -> families that refuse its other values, or most of them."""
TIED = ("gpt2", "opt", "bloom", "xglm", "gpt_neo", "bert", "roberta", "xlm-roberta", "roberta-prelayernorm", "electra",
    "albert", "distilbert", "deberta", "deberta-v2", "modernbert", "xlnet", "roformer", "big_bird", "gemma", "gemma2",
    "gemma3_text", "bart", "mbart", "marian", "pegasus", "blenderbot", "blenderbot-small", "t5", "longt5",
    "mt5")  # fmt: skip
MINOR = {"rope_parameters", "layer_types", "attention_types", "file", "weights"}


def choices(kind: str, listed: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """The values that each key of a family may have; the first is the small model's."""
    names = [*listed["defaults"], *listed["beside"], "num_labels", "problem_type", "file", "weights"]
    found = {name: CHOICES[name] for name in names if name in CHOICES}
    found |= FAMILY.get(kind, {})
    if "tie_word_embeddings" in found and kind in TIED:
        found["tie_word_embeddings"] = (True, False)
    if listed["defaults"].get("is_decoder", False) is False and kind not in CAUSAL_ENCODERS:
        found.pop("is_decoder", None), found.pop("add_cross_attention", None)
    if "rope_parameters" in found and "original_max_position_embeddings" not in found:
        found["original_max_position_embeddings"] = (None, 6)
    return found


def draw(kind: str, head: str, listed: dict[str, Any], rng: np.random.Generator, rate: float) -> dict[str, Any]:
    """Values that differ from those of the small model; each key with probability `rate`."""
    found = {}
    for name, values in choices(kind, listed).items():
        rare = name in RARE or (name in listed["beside"] and kind in ("bert", "roberta", "modernbert", "roformer"))
        chance = rate / 6 if rare or kind in REFUSE.get(name, ()) else rate
        if len(values) > 1 and rng.random() < chance:
            found[name] = values[rng.integers(1, len(values))]
    if kind not in ("albert", "electra", "roformer"):
        found.pop("embedding_size", None) if rng.random() < 0.8 else None
    if head not in ("sequence", "token"):
        found.pop("num_labels", None)
    if head != "sequence":
        found.pop("problem_type", None)
    if "decoder_start_token_id" in listed["defaults"] and found.get("pad_token_id", 0) is None:
        del found["pad_token_id"]  # labels need one there
    return found


def build(kind: str, head: str, listed: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the config class of a draw."""
    config = {name: values[0] for name, values in choices(kind, listed).items()} | changed
    config.pop("file", None), config.pop("weights", None)
    for name in listed["beside"]:  # keys that only code reads stay absent unless they were drawn
        if name not in changed and config.get(name) in (None, 0, "none", -1, False):
            config.pop(name, None)
    if kind.startswith("deberta") and not config["relative_attention"]:
        config["pos_att_type"] = None
    if "num_key_value_heads" in config and config["num_key_value_heads"] is None:
        config["num_key_value_heads"] = config["num_attention_heads"]
    if "topk_group" in config:
        config["topk_group"] = min(config["topk_group"], config["n_group"])
    if "kv_lora_rank" in config:
        config["num_key_value_heads"] = config["num_attention_heads"]
    if head == "causal_lm" and kind in CAUSAL_ENCODERS:
        config["is_decoder"] = True
    if kind == "big_bird" and head == "causal_lm":
        config["attention_type"] = "original_full"
    if head not in ("sequence", "token"):
        config.pop("num_labels", None)
    for name in ("head_dim", "num_key_value_heads", "embedding_size", "n_inner", "intermediate_size", "layer_types",
                 "sep_token_id", "num_decoder_layers", "classifier_dropout", "attention_head_size", "d_head",
                 "n_layers", "original_max_position_embeddings"):  # fmt: skip
        if name in config and config[name] is None:
            del config[name]
    layers = next(config[name] for name in ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers")
                  if name in config)  # fmt: skip
    pattern = config.pop("layer_types", None)
    if pattern:
        both = ("full_attention", "sliding_attention")
        kinds = {"mixed": [both[i % 3 == 1] for i in range(layers)], "full": [both[0]] * layers}
        config["layer_types"] = kinds.get(pattern, [both[1]] * layers)
    if "attention_types" in config:
        pattern = config.pop("attention_types")
        kinds = ["global", "local"] if pattern == "both" else [pattern]
        whole, rest = divmod(layers, len(kinds))
        config["attention_types"] = [[kinds, whole]] + ([[kinds[:rest], 1]] if rest else [])
    rope = config.pop("rope_parameters", None)
    if rope or "partial_rotary_factor" in config:
        config |= rope_of(kind, config, rope or "default")
    return config


def lengthen(config: dict[str, Any]) -> None:
    """Gives a configuration positions for long texts."""
    for name in ("max_position_embeddings", "n_positions"):
        if name in config:
            config[name] = 320
    for side in ("encoder", "decoder"):
        if isinstance(config.get(side), dict):
            lengthen(config[side])


PAIR = {"decoder_start_token_id": (1, 4), "pad_token_id": (0, 3), "eos_token_id": (2, 7), "bos_token_id": (1, None),
    "weights": CHOICES["weights"]}  # fmt: skip
"""Keys of a pair itself, with values as in `CHOICES`."""


def draw_pair(sides: dict[str, str], listed: dict[str, Any], rng: np.random.Generator, rate: float) -> dict[str, Any]:
    """Values of both sides of a pair, as "encoder.key" and "decoder.key", and those of the pair itself."""
    found = {}
    for side, head in (("encoder", "bare"), ("decoder", "causal_lm")):
        own = draw(sides[side], head, listed[side], rng, rate)
        for name in ("file", "weights", "is_decoder", "add_cross_attention", "tie_word_embeddings"):
            own.pop(name, None)
        found |= {f"{side}.{name}": value for name, value in own.items()}
    found |= {name: values[1] for name, values in PAIR.items() if rng.random() < rate}
    if "weights" in found:
        found["weights"] = str(rng.choice(PAIR["weights"][1:]))
    return found


def build_pair(sides: dict[str, str], listed: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the config class of a pair."""
    config = {name: changed.get(name, values[0]) for name, values in PAIR.items() if name != "weights"}
    for side, head in (("encoder", "bare"), ("decoder", "causal_lm")):
        own = {name.removeprefix(f"{side}."): x for name, x in changed.items() if name.startswith(f"{side}.")}
        config[side] = {"model_type": sides[side], **build(sides[side], head, listed[side], own)}
    config["decoder"] |= {"is_decoder": True, "add_cross_attention": True}
    return config


GEMMA_SIDE = ("attention_bias", "attn_logit_softcapping", "final_logit_softcapping", "head_dim", "hidden_activation",
    "hidden_size", "intermediate_size", "layer_types", "max_position_embeddings", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "query_pre_attn_scalar", "rms_norm_eps", "rope_parameters",
    "sliding_window", "bos_token_id", "eos_token_id", "pad_token_id")  # fmt: skip
"""Keys that either side of a T5Gemma has."""


def draw_t5gemma(head: str, gemma: dict[str, Any], rng: np.random.Generator, rate: float) -> dict[str, Any]:
    """Values of both sides of a T5Gemma, as "encoder.key" and "decoder.key", and those of the whole."""
    found = {}
    for side in ("encoder", "decoder"):
        own = draw("gemma2", "causal_lm", gemma, rng, rate)
        found |= {f"{side}.{name}": value for name, value in own.items() if name in GEMMA_SIDE}
        if found.get(f"{side}.pad_token_id", 0) is None or head not in ("sequence", "token"):
            found.pop(f"{side}.pad_token_id", None)
    whole = {"tie_word_embeddings": (False,), "weights": CHOICES["weights"][1:], "dropout_rate": (0.1,)}
    if head in ("sequence", "token"):
        whole |= {"num_labels": (1, 2, 5), "is_encoder_decoder": (False,), "classifier_dropout_rate": (0.2,)}
    if head == "sequence":
        whole["problem_type"] = CHOICES["problem_type"][1:]
    return found | {name: values[rng.integers(len(values))] for name, values in whole.items() if rng.random() < rate}


def build_t5gemma(head: str, gemma: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the config class of a T5Gemma."""
    config = {name: x for name, x in changed.items() if "." not in name and name != "weights"}
    for side in ("encoder", "decoder"):
        own = {name.removeprefix(f"{side}."): x for name, x in changed.items() if name.startswith(f"{side}.")}
        config[side] = {
            name: x for name, x in build("gemma2", "causal_lm", gemma, own).items() if name in GEMMA_SIDE
        } | {"vocab_size": VOCAB}
    # After 3 slots of padding before a text, the classifier of its first token sees a token.
    if head in ("sequence", "token"):
        config["decoder"]["sliding_window"] = max(config["decoder"]["sliding_window"], 4)
    return {"vocab_size": VOCAB, "is_encoder_decoder": head != "encoder"} | config


def rope_of(kind: str, config: dict[str, Any], name: str) -> dict[str, Any]:
    """`rope_parameters` of a kind, and lists of divisors as long as the rotated part of a head."""
    fraction = config.pop("partial_rotary_factor", 0.5 if kind in ("gpt_neox", "phi") else 1.0)
    width = config.get("qk_rope_head_dim") or config.get("head_dim")
    width = width or config["hidden_size"] // config["num_attention_heads"]
    rope: dict[str, Any] = {"rope_type": name, "rope_theta": 100.0}
    if kind in ("gpt_neox", "phi", "phi3"):
        rope["partial_rotary_factor"] = fraction
    pairs = int(width * (fraction if kind in ("gpt_neox", "phi", "phi3") else 1.0)) // 2
    if name == "base":
        rope |= {"rope_type": "default", "rope_theta": 777.0}
    if name in ("linear", "dynamic"):
        rope["factor"] = 3.0
    if name == "yarn":
        rope |= {"factor": 4.0, "original_max_position_embeddings": 10, "beta_fast": 8.0}
    if name == "llama3":
        rope |= {"factor": 4.0, "original_max_position_embeddings": 10, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if name == "longrope":
        rope |= {"short_factor": [1.0 + i for i in range(pairs)], "long_factor": [1.5 + 2.0 * i for i in range(pairs)],
                 "original_max_position_embeddings": config.get("original_max_position_embeddings") or 8}  # fmt: skip
        if kind != "phi3":
            rope["factor"] = 5.0
    if kind == "ministral3":
        rope = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8} | rope
    if kind in ("gemma3_text", "modernbert"):
        return {
            "rope_parameters": {
                "full_attention": rope,
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            }
        }
    return {"rope_parameters": rope}

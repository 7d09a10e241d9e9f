"""Argument names of the old classes' calls, in their order: of the classes and of their modules."""

from __future__ import annotations

import inspect
from typing import Any

OUTPUTS = "output_attentions output_hidden_states return_dict"
CROSS = "encoder_hidden_states encoder_attention_mask"
TYPED = "input_ids attention_mask token_type_ids position_ids"
DECODER = "input_ids attention_mask position_ids"
PAIR = "input_ids attention_mask decoder_input_ids decoder_attention_mask"
RNG = "params dropout_rng train"

CALLS: dict[str, str] = {
    "bert": f"{TYPED} head_mask {CROSS} {RNG} {OUTPUTS} past_key_values",
    "big_bird": f"{TYPED} head_mask {CROSS} params dropout_rng indices_rng train {OUTPUTS} past_key_values",
    "big_bird_qa": f"{TYPED} head_mask question_lengths params dropout_rng indices_rng train {OUTPUTS}",
    "albert": f"{TYPED} {RNG} {OUTPUTS}",
    "distilbert": f"input_ids attention_mask head_mask {RNG} {OUTPUTS}",
    "roformer": f"input_ids attention_mask token_type_ids head_mask {RNG} {OUTPUTS}",
    "gpt2": f"{DECODER} {CROSS} params past_key_values dropout_rng train {OUTPUTS}",
    "gptj": f"{DECODER} params past_key_values dropout_rng train {OUTPUTS}",
    "bloom": f"input_ids attention_mask past_key_values {RNG} {OUTPUTS}",
    "opt": f"{DECODER} params past_key_values {OUTPUTS} dropout_rng deterministic train",
    "xglm": f"{DECODER} {CROSS} {OUTPUTS} train params past_key_values dropout_rng",
    "bart": f"{PAIR} position_ids decoder_position_ids {OUTPUTS} train params dropout_rng",
    "t5": f"{PAIR} {OUTPUTS} train params dropout_rng",
    "t5_encoder": f"input_ids attention_mask {OUTPUTS} train params dropout_rng",
}
"""Kind of call -> argument names of a class. `train` of OPT is an addition to the old `deterministic`."""

MODULES: dict[str, str] = {
    "bert": f"{TYPED} head_mask deterministic {OUTPUTS}",
    "bert_body": f"{TYPED} head_mask {CROSS} init_cache deterministic {OUTPUTS}",
    "bert_causal": f"{DECODER} token_type_ids head_mask {CROSS} init_cache deterministic {OUTPUTS}",
    "big_bird_qa": f"{TYPED} head_mask logits_mask deterministic {OUTPUTS}",
    "albert": f"{TYPED} deterministic {OUTPUTS}",
    "distilbert": f"input_ids attention_mask deterministic {OUTPUTS}",
    "roformer": f"input_ids attention_mask token_type_ids head_mask deterministic {OUTPUTS}",
    "gpt2": f"{DECODER} {CROSS} deterministic init_cache {OUTPUTS}",
    "gptj": f"{DECODER} deterministic init_cache {OUTPUTS}",
    "bloom": f"input_ids attention_mask deterministic init_cache {OUTPUTS}",
    "opt": f"{DECODER} init_cache {OUTPUTS} deterministic",
    "opt_body": f"{DECODER} {OUTPUTS} deterministic init_cache",
    "xglm": f"{DECODER} {CROSS} init_cache {OUTPUTS} deterministic",
    "bart": f"{PAIR} position_ids decoder_position_ids {OUTPUTS} deterministic",
    "t5": f"{PAIR} encoder_outputs {OUTPUTS} deterministic",
    "t5_encoder": f"input_ids attention_mask {OUTPUTS} deterministic",
}
"""Kind of call -> argument names of a module."""

ENCODE = {
    "bart": f"{DECODER} {OUTPUTS} train params dropout_rng",
    "t5": f"input_ids attention_mask {OUTPUTS} train params dropout_rng",
}
DECODE = {
    kind: f"decoder_input_ids encoder_outputs encoder_attention_mask decoder_attention_mask {positions}past_key_values "
    f"{OUTPUTS} train params dropout_rng deterministic"
    for kind, positions in (("bart", "decoder_position_ids "), ("t5", ""))
}
"""Calls of the decoder of an encoder-decoder. Two of the old classes had `deterministic` in the place of `train`."""

DEFAULTS = {"train": False, "deterministic": True, "init_cache": False}
REQUIRED = {"input_ids", "decoder_input_ids", "encoder_outputs"}


def kind_of(call: str, model_type: str, head: str) -> str:
    """Kind of a class's call, from that of its group."""
    if (model_type, head) == ("bart", "causal_lm"):
        return "xglm"
    if (model_type, head) == ("big_bird", "qa"):
        return "big_bird_qa"
    return "t5_encoder" if head == "encoder" else call


def module_kind(kind: str, model_type: str, head: str) -> str:
    """Kind of a module's call."""
    kind = "bert" if kind == "big_bird" else kind
    if kind == "bert" and (head == "model" or (model_type, head) == ("electra", "causal_lm")):
        return "bert_body"
    if kind == "bert" and head == "causal_lm":
        return "bert_causal"
    return "opt_body" if kind == "opt" and head == "model" else kind


def signature(names: str, first: str = "") -> inspect.Signature:
    """The signature of these arguments; those named in `first` have no default."""
    required = set(first.split())
    parameters = []
    for name in names.split():
        default: Any = inspect.Parameter.empty if name in required else DEFAULTS.get(name)
        parameters.append(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default))
    return inspect.Signature(parameters)

"""Random models of the other library against ours: every family, and all that can be done with it.

    python benchmarks/hugging_face.py [--only=WORD] [--all] [--output=FILE.json] [--page=docs/hugging-face.md]
    python benchmarks/hugging_face.py --input=FILE.json --page=docs/hugging-face.md      (the page alone, from a file)

Needs the extra [bench] (torch, transformers). Every case is made by their code with random weights, saved, loaded by
`jaxformer.from_pretrained` and compared; then ours is saved and loaded by theirs. With `--all` the configurations of
`tests/hf/goldens/cases.json` come to those named here, and the families are those of the package. Exits 1 where a
figure is above its bound. The figures, each the largest difference divided by the largest value:

    forward    outputs in float32
    bfloat16   outputs in bfloat16 against theirs in float32, divided by the same error of theirs in bfloat16
    loss, gradient    in float32
    greedy, beam      True if all ids are the same
    sample     chi-square of 2,000 draws of a token under temperature, top-k and top-p against the probabilities that
               their logits give, by degrees of freedom as a score that is normal if the two agree
    mesh       gradients of eight rows on 8 devices (2 data, 2 fsdp, 2 tensor) against one device
    export     outputs of theirs, loaded from what ours saved
"""

from __future__ import annotations

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import argparse
import copy
import json
import math
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
import transformers
from safetensors.numpy import load_file
from transformers import AutoConfig

import jaxformer
from jaxformer.config import MeshConfig
from jaxformer.hf import convert
from jaxformer.parallel import mesh as meshes

BOUNDS = {
    "forward": 2e-5, "bfloat16": 3.0, "loss": 2e-5, "gradient": 1e-4, "sample": 4.5, "mesh": 1e-4, "export": 2e-5,
}  # fmt: skip
COLUMNS = ("forward", "bfloat16", "loss", "gradient", "greedy", "beam", "sample", "mesh", "export")
GOLDENS = Path(__file__).resolve().parents[1] / "tests" / "hf" / "goldens" / "cases.json"
DRAWS = 2000

MARKER = "<!-- measured -->"

SMALL = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 56}
BART = {
    "vocab_size": 99, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 40, "decoder_ffn_dim": 56, "max_position_embeddings": 40,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
MARIAN = BART | {"pad_token_id": 98, "decoder_start_token_id": 98, "eos_token_id": 0, "bos_token_id": None}
T5 = {
    "vocab_size": 99, "d_model": 32, "d_kv": 10, "d_ff": 44, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 12, "relative_attention_max_distance": 17, "decoder_start_token_id": 0,
}  # fmt: skip
GPT2 = {
    "vocab_size": 99,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 48,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = SMALL | {"max_position_embeddings": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = LLAMA | {"num_key_value_heads": 2}
EXPERTS = {"head_dim": 12, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DELTA = GROUPED | EXPERTS | {
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8,
    "linear_value_head_dim": 6, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 20, "head_dim": 16,
}  # fmt: skip
DELTA_WIDTHS = {"linear_num_value_heads": 2, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 2}
XLNET = {"vocab_size": 99, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 56, "pad_token_id": 5}


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0} | more}


def long_rope(original: int, pairs: int = 4, **more: Any) -> dict[str, Any]:
    lists = {"short_factor": [1.0 + i for i in range(pairs)], "long_factor": [1.5 + 9.0 * i for i in range(pairs)]}
    return {"original_max_position_embeddings": original} | rope("longrope", partial_rotary_factor=1.0, **lists, **more)


GROWING = rope("yarn", factor=4.0, original_max_position_embeddings=4, llama_4_scaling_beta=0.7, rope_theta=500.0)
T5GEMMA = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 5,
    "max_position_embeddings": 48, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 6.0,
}  # fmt: skip
UNLIKE = {
    "hidden_size": 48, "num_hidden_layers": 3, "num_key_value_heads": 1, "attn_logit_softcapping": None,
    "hidden_activation": "silu", "attention_bias": True, "rms_norm_eps": 1e-4, "final_logit_softcapping": None,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 3,
    "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0},
}  # fmt: skip
SIDES = {"encoder": T5GEMMA, "decoder": T5GEMMA, "vocab_size": 99}
STRETCH = {"factor": 4.0, "original_max_position_embeddings": 12}
CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("gpt2", "GPT2LMHeadModel", "", GPT2),
    (
        "gpt2",
        "GPT2LMHeadModel",
        "scores by layer, relu",
        GPT2 | {"scale_attn_by_inverse_layer_idx": True, "activation_function": "relu"},
    ),
    ("gpt2", "GPT2ForSequenceClassification", "", GPT2 | {"pad_token_id": 0, "num_labels": 3}),
    ("gpt2", "GPT2ForTokenClassification", "", GPT2 | {"num_labels": 3}),
    ("gpt2", "GPT2ForQuestionAnswering", "", GPT2),
    ("llama", "LlamaForCausalLM", "", LLAMA),
    ("llama", "LlamaForCausalLM", "linear", GROUPED | rope("linear", factor=3.0)),
    ("llama", "LlamaForCausalLM", "dynamic", GROUPED | {"max_position_embeddings": 12} | rope("dynamic", factor=3.0)),
    ("llama", "LlamaForCausalLM", "yarn", GROUPED | {"head_dim": 16} | rope("yarn", **STRETCH)),
    (
        "llama",
        "LlamaForCausalLM",
        "llama3",
        GROUPED | rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, **STRETCH),
    ),
    ("llama", "LlamaForSequenceClassification", "", LLAMA | {"num_labels": 3}),
    ("mistral", "MistralForCausalLM", "window 5", GROUPED | {"sliding_window": 5}),
    ("ministral", "MinistralForCausalLM", "windows of 5", GROUPED | {"head_dim": 12, "sliding_window": 5}),
    (
        "ministral",
        "MinistralForCausalLM",
        "a window of 3 in the second of three layers, tied",
        GROUPED
        | {
            "head_dim": 8,
            "num_hidden_layers": 3,
            "sliding_window": 3,
            "tie_word_embeddings": True,
            "hidden_act": "gelu",
        }
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    ("ministral", "MinistralForTokenClassification", "", GROUPED | {"head_dim": 16, "num_labels": 3}),
    ("ministral3", "Ministral3ForCausalLM", "", GROUPED | {"head_dim": 12, "sliding_window": 5} | GROWING),
    (
        "ministral3",
        "Ministral3ForCausalLM",
        "tied, without a window",
        GROUPED | {"tie_word_embeddings": True} | GROWING,
    ),
    ("ministral3", "Ministral3ForSequenceClassification", "", GROUPED | {"head_dim": 16, "num_labels": 3} | GROWING),
    ("qwen2", "Qwen2ForCausalLM", "", GROUPED),
    ("phi3", "Phi3ForCausalLM", "", LLAMA),
    ("phi3", "Phi3ForCausalLM", "longrope, short texts, window 5", GROUPED | {"sliding_window": 5} | long_rope(40)),
    ("phi3", "Phi3ForCausalLM", "longrope, long texts", GROUPED | long_rope(4)),
    (
        "phi3",
        "Phi3ForCausalLM",
        "half of each head, tied, wide heads",
        GROUPED
        | {"head_dim": 12, "tie_word_embeddings": True}
        | rope("default", partial_rotary_factor=0.5, rope_theta=500.0),
    ),
    ("phi3", "Phi3ForSequenceClassification", "longrope", GROUPED | {"num_labels": 3} | long_rope(4)),
    ("phi3", "Phi3ForTokenClassification", "", GROUPED | {"num_labels": 3}),
    ("phi3", "Phi3Model", "attention_factor", GROUPED | long_rope(4, attention_factor=1.3)),
    (
        "llama",
        "LlamaForCausalLM",
        "longrope",
        GROUPED
        | rope(
            "longrope",
            factor=4.0,
            short_factor=[1.0] * 4,
            long_factor=[2.0, 3.0, 5.0, 9.0],
            original_max_position_embeddings=4,
        ),
    ),
    ("qwen3", "Qwen3ForCausalLM", "", GROUPED | {"head_dim": 12}),
    ("qwen3", "Qwen3ForQuestionAnswering", "", GROUPED | {"head_dim": 12}),
    ("gemma", "GemmaForCausalLM", "", GROUPED | {"head_dim": 12}),
    ("mixtral", "MixtralForCausalLM", "", GROUPED | {"num_local_experts": 6, "num_experts_per_tok": 2}),
    (
        "mixtral",
        "MixtralForSequenceClassification",
        "window 5",
        GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 5, "num_labels": 3},
    ),
    ("qwen3_moe", "Qwen3MoeForCausalLM", "", GROUPED | EXPERTS),
    ("qwen3_moe", "Qwen3MoeForCausalLM", "normalised", GROUPED | EXPERTS | {"norm_topk_prob": True}),
    ("qwen3_next", "Qwen3NextForCausalLM", "", DELTA),
    ("qwen3_next", "Qwen3NextForCausalLM", "no linear layer", DELTA | {"layer_types": ["full_attention"] * 2}),
    (
        "qwen3_next",
        "Qwen3NextForCausalLM",
        "all but the last layer linear",
        DELTA | {"num_hidden_layers": 3, "layer_types": ["linear_attention"] * 2 + ["full_attention"]} | DELTA_WIDTHS,
    ),
    (
        "qwen3_next",
        "Qwen3NextForCausalLM",
        "experts in every second layer but one",
        DELTA
        | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
        | {"layer_types": ["full_attention", *["linear_attention"] * 3]},
    ),
    ("bert", "BertModel", "", SMALL),
    ("bert", "BertForMaskedLM", "relu", SMALL | {"hidden_act": "relu"}),
    ("bert", "BertForSequenceClassification", "regression", SMALL | {"num_labels": 1}),
    (
        "bert",
        "BertForSequenceClassification",
        "multi-label",
        SMALL | {"num_labels": 4, "problem_type": "multi_label_classification"},
    ),
    ("bert", "BertForTokenClassification", "", SMALL | {"num_labels": 5}),
    ("bert", "BertForQuestionAnswering", "", SMALL),
    ("roberta", "RobertaModel", "", SMALL | {"max_position_embeddings": 40, "pad_token_id": 1}),
    (
        "roberta",
        "RobertaForMaskedLM",
        "silu",
        SMALL | {"max_position_embeddings": 40, "pad_token_id": 1, "hidden_act": "silu"},
    ),
    ("roberta", "RobertaForTokenClassification", "", SMALL | {"max_position_embeddings": 40, "num_labels": 3}),
    ("roberta", "RobertaForQuestionAnswering", "", SMALL | {"max_position_embeddings": 40}),
    (
        "deberta",
        "DebertaForMaskedLM",
        "",
        SMALL
        | {
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "max_relative_positions": 6,
            "position_biased_input": True,
            "type_vocab_size": 2,
        },
    ),
    (
        "deberta",
        "DebertaForTokenClassification",
        "c2p",
        SMALL | {"relative_attention": True, "pos_att_type": ["c2p"], "type_vocab_size": 0, "num_labels": 3},
    ),
    (
        "deberta-v2",
        "DebertaV2ForMaskedLM",
        "",
        SMALL
        | {
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 6,
            "share_att_key": False,
            "norm_rel_ebd": "layer_norm",
            "type_vocab_size": 0,
        },
    ),
    (
        "deberta-v2",
        "DebertaV2ForQuestionAnswering",
        "p2c",
        SMALL
        | {
            "relative_attention": True,
            "pos_att_type": ["p2c"],
            "position_buckets": 6,
            "share_att_key": True,
            "type_vocab_size": 0,
        },
    ),
    ("xlnet", "XLNetLMHeadModel", "", XLNET),
    ("xlnet", "XLNetForSequenceClassification", "", XLNET | {"num_labels": 3}),
    ("xlnet", "XLNetForTokenClassification", "", XLNET | {"num_labels": 3}),
    ("t5", "T5ForConditionalGeneration", "gated-silu", T5 | {"feed_forward_proj": "gated-silu"}),
    (
        "t5",
        "T5ForConditionalGeneration",
        "v1.1",
        T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    ("t5", "T5EncoderModel", "", T5),
    ("t5", "T5ForSequenceClassification", "", T5 | {"num_labels": 3, "eos_token_id": 1}),
    ("t5", "T5ForTokenClassification", "", T5 | {"num_labels": 3}),
    ("t5", "T5ForQuestionAnswering", "", T5 | {"feed_forward_proj": "gated-gelu"}),
    ("t5gemma", "T5GemmaForConditionalGeneration", "", SIDES),
    (
        "t5gemma",
        "T5GemmaForConditionalGeneration",
        "a wide decoder, untied",
        SIDES | {"decoder": T5GEMMA | UNLIKE, "tie_word_embeddings": False},
    ),
    ("t5gemma", "T5GemmaForConditionalGeneration", "a wide encoder", SIDES | {"encoder": T5GEMMA | UNLIKE}),
    ("t5gemma", "T5GemmaModel", "", SIDES),
    ("t5gemma", "T5GemmaEncoderModel", "", SIDES | {"is_encoder_decoder": False}),
    ("t5gemma", "T5GemmaForSequenceClassification", "", SIDES | {"num_labels": 3}),
    ("t5gemma", "T5GemmaForTokenClassification", "encoder", SIDES | {"num_labels": 3, "is_encoder_decoder": False}),
    (
        "bart",
        "BartForConditionalGeneration",
        "relu, scaled",
        BART | {"activation_function": "relu", "scale_embedding": True},
    ),
    ("bart", "BartForSequenceClassification", "", BART | {"num_labels": 3}),
    ("bart", "BartForQuestionAnswering", "", BART),
    ("pegasus", "PegasusForConditionalGeneration", "", BART | {"pad_token_id": 0, "decoder_start_token_id": 0}),
    ("marian", "MarianMTModel", "", MARIAN),
    (
        "marian",
        "MarianMTModel",
        "two vocabularies",
        MARIAN
        | {"pad_token_id": 76, "decoder_start_token_id": 76, "decoder_vocab_size": 77}
        | {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
    ),
]
"""model_type, class, what is special, config."""


def attention(kind: str) -> str:
    """Their attention that ours equals in padded slots too: docs/hugging-face.md says why not ModernBERT's `eager`."""
    return "sdpa" if kind == "modernbert" else "eager"


def theirs(kind: str, name: str, settings: dict[str, Any]) -> Any:
    """A model of theirs whose weights are large enough that every part matters."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **settings)
    config._attn_implementation = attention(kind)
    config._experts_implementation = "eager"  # their grouped product refuses experts as narrow as these in bfloat16
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for tensor_name, tensor in model.named_parameters():
            if not tensor.requires_grad:  # Pegasus keeps its sinusoids as one
                continue
            if tensor.ndim > 1:
                tensor.mul_(1.0 if kind == "t5" else 3.0)  # T5 starts large, and does not scale its scores
            elif "norm" not in tensor_name.lower() and "ln_" not in tensor_name:
                tensor.add_(0.1 * torch.randn_like(tensor))
    return model


def inputs_of(name: str, settings: dict[str, Any]) -> dict[str, np.ndarray]:
    """A padded batch of two rows, with the labels of that head."""
    rng, length = np.random.default_rng(1), 15
    sides = [settings[side]["vocab_size"] for side in ("encoder", "decoder") if settings.get(side)]
    low = min(settings.get("decoder_vocab_size", 99), settings["vocab_size"], *sides)
    ids = rng.integers(6, low - 3, (2, length))
    mask = np.ones_like(ids)
    left = "XLNet" in name
    hidden = np.s_[1, :4] if left else np.s_[1, 11:]
    # see docs/hugging-face.md: what is not supported, and that padding does not count in dynamic scaling
    unlike = (settings.get("rope_parameters") or {}).get("rope_type") == "dynamic"
    if not unlike and not (name.startswith("Deberta") and "Question" in name):
        mask[hidden], ids[hidden] = 0, settings.get("pad_token_id") or 0
    if name.startswith(("BartForSequence", "T5ForSequence")):  # the hidden state of the last end token decides
        ids[0, 14] = ids[1, 10] = settings["eos_token_id"]
    given = {"input_ids": ids, "attention_mask": mask}
    classes = settings.get("num_labels", 2)
    if "QuestionAnswering" in name:
        return given | {"start_positions": np.asarray([3, 5]), "end_positions": np.asarray([6, 8])}
    if "SequenceClassification" in name:
        if classes == 1:
            return given | {"labels": rng.normal(size=2).astype(np.float32)}
        if settings.get("problem_type"):
            return given | {"labels": rng.integers(0, 2, (2, classes)).astype(np.float32)}
        return given | {"labels": rng.integers(0, classes, 2)}
    if "TokenClassification" in name:
        return given | {"labels": np.where(mask, rng.integers(0, classes, ids.shape), -100)}
    if "Conditional" in name or "MTModel" in name:
        return given | {"labels": rng.integers(6, low - 3, (2, 9))}
    if name == "T5GemmaModel":
        return given | {"decoder_input_ids": rng.integers(6, low - 3, (2, 9))}
    return given if name.endswith("Model") and "LMHead" not in name else given | {"labels": np.where(mask, ids, -100)}


def relative(got: Any, expected: Any, mask: np.ndarray | None = None) -> float:
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    if mask is not None and got.shape[:2] == mask.shape:
        got, expected = got[mask != 0], expected[mask != 0]
    return float(np.abs(got - expected).max() / max(np.abs(expected).max(), 1e-9))


def main_output(outputs: Any) -> str:
    return next(
        name for name in ("logits", "start_logits", "prediction_logits", "last_hidden_state") if name in outputs
    )


def compare(kind: str, name: str, settings: dict[str, Any], place: Path) -> dict[str, Any]:
    """One row of the table."""
    model = theirs(kind, name, settings)
    model.save_pretrained(place / "theirs")
    inputs = inputs_of(name, settings)
    tensors = {key: torch.as_tensor(value) for key, value in inputs.items()}
    expected = model(**tensors)
    ours = jaxformer.from_pretrained(place / "theirs")
    out = ours(**inputs)
    output = main_output(expected)
    mask = None if ours.config.model.decoder and ours.config.model.encoder else inputs["attention_mask"]
    row = {"forward": relative(out[output], expected[output].detach(), mask)}
    if "loss" in expected and expected.loss is not None:
        row["loss"] = abs(float(out.loss) - float(expected.loss)) / abs(float(expected.loss))
        expected.loss.backward()
        grads = jax.grad(lambda params: ours(**inputs, params=params).loss)(ours.params)
        mine = convert.export_gradients(ours.hf.family.file_rows(ours.config.model, ours.hf.head), grads)
        pairs = [(mine[key], grad) for key, grad in gradients(model, place / "gradients").items() if key in mine]
        largest = max(float(np.abs(g).max()) for _, g in pairs)
        row["gradient"] = max(float(np.abs(np.asarray(a) - b).max()) for a, b in pairs) / largest
        row["mesh"] = on_a_mesh(place / "theirs", inputs)
    row["bfloat16"] = in_bfloat16(model, place / "theirs", inputs, output, mask)
    if ours.hf.head in ("causal_lm", "seq2seq") and kind != "xlnet":
        row |= generated(model, ours, inputs)
        row["sample"] = sampled(model, ours, inputs)
    ours.save_pretrained(place / "ours")
    again = getattr(transformers, name).from_pretrained(place / "ours", attn_implementation=attention(kind)).eval()
    row["export"] = relative(again(**tensors)[output].detach(), expected[output].detach(), mask)
    return row


def on_a_mesh(directory: Path, inputs: dict[str, np.ndarray]) -> float:
    """How far gradients of eight rows on 8 devices are from those on one."""
    rows = {name: np.concatenate([value] * 4) for name, value in inputs.items()}
    found = []
    for sizes in ({"data": 1}, {"data": 2, "fsdp": 2, "tensor": 2}):
        mesh = meshes.make(MeshConfig(**sizes), jax.devices()[: math.prod(sizes.values())])
        model = jaxformer.from_pretrained(directory, mesh=mesh)
        with jax.set_mesh(mesh):
            gradient = jax.jit(jax.grad(lambda params, model=model: model(**rows, params=params).loss))
            found.append([np.asarray(x) for x in jax.tree.leaves(gradient(model.params))])
    largest = max(float(np.abs(x).max()) for x in found[0])
    return max(float(np.abs(a - b).max()) for a, b in zip(*found, strict=True)) / largest


def in_bfloat16(model: Any, directory: Path, inputs: dict[str, np.ndarray], output: str, mask: Any) -> float:
    """The error of outputs in bfloat16 as a multiple of that of theirs."""
    whole = {name: torch.as_tensor(value) for name, value in inputs.items()}
    expected = model(**whole)[output].detach()
    low = copy.deepcopy(model).to(torch.bfloat16)
    given = {name: x.to(torch.bfloat16) if x.is_floating_point() else x for name, x in whole.items()}
    theirs_off = relative(low(**given)[output].detach().float(), expected, mask)
    ours = jaxformer.from_pretrained(directory, dtype="bfloat16")
    return relative(np.asarray(ours(**inputs)[output], np.float32), expected, mask) / max(theirs_off, 1e-9)


def sampled(model: Any, ours: Any, inputs: dict[str, np.ndarray]) -> float:
    """How far the frequencies of drawn tokens are from the probabilities that their logits give; see the top."""
    ids = inputs["input_ids"][:1, :6]
    options = {"temperature": 1.5, "top_k": 12, "top_p": 0.9}
    more = {"num_return_sequences": DRAWS, "max_new_tokens": 2}  # the last token may be forced
    found = ours.generate(input_ids=ids, do_sample=True, seed=3, **more, **options)
    size = ids.shape[1] if ours.config.model.encoder is None else 1
    begin = {} if ours.config.model.encoder is None else {"decoder_input_ids": torch.as_tensor(found[:1, :size])}
    drawn = found[:, size]
    with torch.no_grad():
        logits = model(input_ids=torch.as_tensor(ids), **begin).logits[0, -1].double()
    probs = torch.softmax(logits / options["temperature"], 0)
    order = torch.argsort(probs, descending=True)[: options["top_k"]]
    kept = probs[order] / probs[order].sum()
    order = order[torch.cumsum(kept, 0) - kept < options["top_p"]]
    expected = (probs[order] / probs[order].sum()).numpy() * DRAWS
    counts = np.asarray([(drawn == int(token)).sum() for token in order])
    if counts.sum() < DRAWS:  # a token that cannot be drawn was
        return math.inf
    freedom = max(len(order) - 1, 1)
    return float(abs(((counts - expected) ** 2 / expected).sum() - (len(order) - 1)) / math.sqrt(2 * freedom))


def gradients(model: Any, place: Path) -> dict[str, np.ndarray]:
    """Gradients of theirs by the names of files, which are not those in memory where experts are one tensor there."""
    again = copy.deepcopy(model)
    with torch.no_grad():
        for ours, parameter in zip(again.parameters(), model.parameters(), strict=True):
            ours.copy_(torch.full_like(ours, np.nan) if parameter.grad is None else parameter.grad)
        for buffer in again.buffers():
            if buffer.is_floating_point():
                buffer.fill_(np.nan)
    again.save_pretrained(place)
    found = load_file(place / "model.safetensors")
    return {name: grad for name, grad in found.items() if not np.isnan(grad).any()}


def generated(model: Any, ours: Any, inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    """Whether greedy and beam search give the same ids; prompts are padded on the left for a decoder alone."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    if ours.config.model.encoder is None:
        ids, mask = (np.stack([x[0], np.roll(x[1], 4)]) for x in (ids, mask))
    given = {"input_ids": ids, "attention_mask": mask}
    row = {}
    for word, more in (("greedy", {}), ("beam", {"num_beams": 4, "num_return_sequences": 4, "early_stopping": False})):
        options = {"max_new_tokens": 10, "do_sample": False, **more}
        tensors = {key: torch.as_tensor(value) for key, value in given.items()}
        expected = model.generate(**tensors, **options).numpy()
        got = ours.generate(**given, **options)
        row[word] = got.shape == expected.shape and bool((got == expected).all())
    return row


def markdown(rows: list[dict[str, Any]]) -> str:
    """A row for each family: the worst of its configurations, and how many they are."""
    lines = ["| family | configurations | " + " | ".join(COLUMNS) + " |", "|" + "---|" * (len(COLUMNS) + 2)]
    for family in sorted({row["family"] for row in rows}):
        own = [row for row in rows if row["family"] == family]
        lines.append(f"| {family} | {len(own)} | " + " | ".join(_cell(own, column) for column in COLUMNS) + " |")
    return "\n".join(lines) + "\n"


def _cell(rows: list[dict[str, Any]], column: str) -> str:
    values = [row[column] for row in rows if column in row]
    if not values:
        return ""
    if column in ("greedy", "beam"):
        return "same" if all(values) else f"{values.count(False)} of {len(values)} differ"
    return f"{max(values):.1f}" if column in ("bfloat16", "sample") else f"{max(values):.0e}"


def golden_cases() -> list[tuple[str, str, str, dict[str, Any]]]:
    """The configurations of the tests' goldens, as `CASES` has them, with room for longer texts and special tokens.

    Left to those tests: pairs of two models, heads whose inputs are choices or pairs of sentences, and Gemma that sees
    both ways, as the library's does not without `sdpa`, nor in a padded batch.
    """
    found = []
    for name, case in json.loads(GOLDENS.read_text(encoding="utf-8")).items():
        config = dict(case["config"])
        kind, head = config.pop("model_type"), config.pop("architectures")[0]
        if kind == "encoder-decoder" or config.get("use_bidirectional_attention") or not hasattr(transformers, head):
            continue
        if head.endswith(("MultipleChoice", "NextSentencePrediction")):
            continue
        config = {key: value for key, value in config.items() if key not in ("transformers_version", "dtype")}
        for key in ("max_position_embeddings", "n_positions"):
            if config.get(key) in range(48) and "rope_parameters" not in config:
                config[key] = 48
        for key, default in (("pad_token_id", 0), ("bos_token_id", 1), ("eos_token_id", 2)):
            tokens = config.get(key)
            tokens = tokens if isinstance(tokens, list) else [tokens]
            if not all(token in range(config["vocab_size"]) for token in tokens):
                config[key] = default
        found.append((kind, head, name, config))
    return found


def measured(only: str, goldens: bool) -> list[dict[str, Any]]:
    """Every case whose class or remark contains `only`, compared and printed."""
    rows = []
    for kind, name, what, settings in CASES + (golden_cases() if goldens else []):
        if only.lower() not in f"{kind} {name} {what}".lower():
            continue
        row: dict[str, Any] = {"family": kind, "class": name, "what": what}
        with tempfile.TemporaryDirectory() as place:
            try:
                row |= compare(kind, name, settings, Path(place))
            except Exception as error:  # one broken case must not hide the others
                row["error"] = f"{type(error).__name__}: {error}"
                traceback.print_exc()
        with open("/proc/self/maps") as mappings:
            if sum(1 for _ in mappings) > 30_000:  # of 65,530 that a process may have; every kernel takes some
                jax.clear_caches()
        print(json.dumps(row), "BAD: " + ", ".join(wrong(row)) if wrong(row) else "", flush=True)
        rows.append(row)
    return rows


def wrong(row: dict[str, Any]) -> list[str]:
    """What is above its bound, differs or failed."""
    above = [key for key, bound in BOUNDS.items() if row.get(key, 0.0) > bound]
    return above + [key for key in ("greedy", "beam") if row.get(key) is False] + [key for key in row if key == "error"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only cases whose class or remark contains this")
    parser.add_argument("--all", action="store_true", help="also the configurations of the tests' goldens")
    parser.add_argument("--output", default="")
    parser.add_argument("--input", default="", help="rows of an earlier run; nothing is measured")
    parser.add_argument("--page", default="", help="page whose part after the marker is replaced by the table")
    arguments = parser.parse_args()
    rows = json.loads(Path(arguments.input).read_text()) if arguments.input else measured(arguments.only, arguments.all)
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if arguments.page:
        page = Path(arguments.page)
        above = page.read_text(encoding="utf-8").partition(MARKER)[0]
        page.write_text(f"{above}{MARKER}\n\n{markdown(rows)}", encoding="utf-8")
    return 1 if any(wrong(row) for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

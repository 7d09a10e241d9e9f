"""Writes `peft.json`: outputs of the peft package for adapters of several kinds.

    python tests/hf/goldens/write_peft.py        (needs torch, transformers and peft)

As in `cases.json` the weights are not kept: `values` makes those of the model and of the adapter from their names.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from write import BART, BERT, BUCKETS, GPT2, IDS, LLAMA, RELATIVE, RIGHT, flat, values

TARGET = Path(__file__).with_name("peft.json")

T5 = {
    "vocab_size": 24, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2,
    "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
TEXT = {"input_ids": IDS, "attention_mask": RIGHT}
BOTH = TEXT | {"decoder_input_ids": IDS}


def cases() -> dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Name -> (class, arguments of its config, arguments of LoraConfig, inputs)."""
    return {
        "gpt2": (
            "GPT2LMHeadModel",
            GPT2,
            {"target_modules": ["c_attn", "attn.c_proj", "c_fc"], "fan_in_fan_out": True, "task_type": "CAUSAL_LM"},
            TEXT,
        ),
        "llama": (
            "LlamaForCausalLM",
            LLAMA,
            {
                "target_modules": "all-linear", "rank_pattern": {"q_proj": 3}, "alpha_pattern": {"o_proj": 9},
                "use_rslora": True, "task_type": "CAUSAL_LM",
            },
            TEXT,
        ),
        "bert": (
            "BertForSequenceClassification",
            BERT | {"num_labels": 3},
            {
                "target_modules": ["query", "intermediate.dense"], "layers_to_transform": [1], "lora_dropout": 0.5,
                "task_type": "SEQ_CLS",
            },
            TEXT,
        ),
        "t5": (
            "T5ForConditionalGeneration",
            T5,
            {"target_modules": r"decoder.*(SelfAttention|EncDecAttention)\.(q|o)", "task_type": "SEQ_2_SEQ_LM"},
            BOTH,
        ),
        "bart": (
            "BartForConditionalGeneration",
            BART,
            {
                "target_modules": ["q_proj", "fc2"], "exclude_modules": r".*encoder_attn.*",
                "task_type": "SEQ_2_SEQ_LM",
            },
            BOTH,
        ),
        "deberta": ("DebertaForTokenClassification", RELATIVE, {"target_modules": ["in_proj", "dense"]}, TEXT),
        "deberta_v2": (
            "DebertaV2ForTokenClassification",
            RELATIVE | BUCKETS,
            {"target_modules": ["query_proj", "key_proj"], "task_type": "TOKEN_CLS"},
            TEXT,
        ),
    }  # fmt: skip


def main() -> None:
    import torch
    import transformers
    from peft import LoraConfig, PeftModel, get_peft_model
    from safetensors.numpy import load_file, save_file

    transformers.logging.set_verbosity_error()
    content = {}
    for name, (kind, arguments, lora, inputs) in cases().items():
        model = getattr(transformers, kind)
        with tempfile.TemporaryDirectory() as folder:
            base, adapter = Path(folder) / "base", Path(folder) / "adapter"
            model(model.config_class(**arguments)).save_pretrained(base)
            shapes = {key: value.shape for key, value in load_file(base / "model.safetensors").items()}
            save_file({key: values(key, shape) for key, shape in shapes.items()}, base / "model.safetensors")
            get_peft_model(model.from_pretrained(base), LoraConfig(r=2, lora_alpha=3, **lora)).save_pretrained(adapter)
            file = adapter / "adapter_model.safetensors"
            added = {key: value.shape for key, value in load_file(file).items()}
            save_file({key: values(key, shape) for key, shape in added.items()}, file)
            adapted = PeftModel.from_pretrained(model.from_pretrained(base, dtype=torch.float32), adapter).eval()
            with torch.no_grad():
                outputs = flat(adapted(**{key: torch.tensor(value) for key, value in inputs.items()}))
            content[name] = {
                "config": json.loads((base / "config.json").read_text()),
                "tensors": shapes,
                "adapter_config": json.loads((adapter / "adapter_config.json").read_text())
                | {"base_model_name_or_path": "base"},
                "adapter": added,
                "inputs": inputs,
                "logits": outputs["logits"][0],
            }
        print(name, list(added)[:2], outputs["logits"][0][:2])
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(case)}" for name, case in content.items())
    TARGET.write_text("{\n" + lines + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()

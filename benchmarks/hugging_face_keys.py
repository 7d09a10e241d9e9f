"""Writes `jaxformer/hf/keys.json`: the keys of every family's config class, with the other library's defaults.

    python benchmarks/hugging_face_keys.py

Needs the extra [bench] (transformers). For each `model_type`:

    aliases    other names of a key, which the library accepts in a config.json
    defaults   the fields of the config class
    beside     names that the modelling code asks the config for and that are no field of the class: null where absent

`common` holds the fields of all classes, `generation` the names that the library moves to generation_config.json.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import transformers
from transformers import modeling_layers

TARGET = Path(__file__).resolve().parents[1] / "jaxformer" / "hf" / "keys.json"

CLASSES = (
    "Albert", "Bart", "Bert", "BigBird", "Blenderbot", "BlenderbotSmall", "Bloom", "Deberta", "DebertaV2",
    "DeepseekV2", "DeepseekV3", "DistilBert", "Electra", "EncoderDecoder", "GPT2", "GPTJ", "GPTNeo", "GPTNeoX",
    "Gemma", "Gemma2", "Gemma3Text", "GptOss", "Llama", "LongT5", "MBart", "MT5", "Marian", "Ministral", "Ministral3",
    "Mistral", "Mixtral", "ModernBert", "OPT", "Olmo2", "Pegasus", "Phi", "Phi3", "Qwen2", "Qwen3", "Qwen3Moe",
    "Qwen3Next", "RoFormer", "Roberta", "RobertaPreLayerNorm", "T5", "XGLM", "XLMRoberta", "XLNet",
)  # fmt: skip

GENERIC = {name: head for name, head in vars(modeling_layers).items() if name.startswith("GenericFor")}
"""Heads that several modelling files share."""

ASKED = re.compile(r'(?:getattr|hasattr)\((?:self\.)?config, "([a-z]\w*)"|\bconfig\.([a-z]\w*)\b(?!\()')


def asked(config: type) -> set[str]:
    """Names that the modelling code of a config class reads from it."""
    module = importlib.import_module(config.__module__.replace("configuration_", "modeling_"))
    text = inspect.getsource(module)
    text += "".join(inspect.getsource(head) for name, head in GENERIC.items() if name in text)
    return {first or second for first, second in ASKED.findall(text)}


def defaults(config: type, without: set[str]) -> dict[str, Any]:
    """The fields of a config class as a config.json would hold them."""
    found = {}
    for field in dataclasses.fields(config):
        if field.name not in without or field.default is not getattr(transformers.PreTrainedConfig, field.name, None):
            value = None if field.default is dataclasses.MISSING else field.default
            found[field.name] = list(value) if isinstance(value, tuple) else value
    return found


def main() -> None:
    base = transformers.PreTrainedConfig
    common = {field.name: field.default for field in dataclasses.fields(base)}
    methods = set(dir(base))
    families = {}
    for name in CLASSES:
        config = getattr(transformers, f"{name}Config")
        known = defaults(config, set(common))
        beside = sorted(asked(config) - set(known) - set(common) - set(config.attribute_map) - methods)
        families[config.model_type] = {"aliases": config.attribute_map, "defaults": known, "beside": beside}
    generation = sorted(transformers.GenerationConfig._get_default_generation_params())
    content = {
        "version": transformers.__version__,
        "common": common,
        "generation": generation,
        "families": dict(sorted(families.items())),
    }
    TARGET.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

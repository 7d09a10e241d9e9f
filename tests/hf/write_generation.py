"""Writes `generation/`: tiny random models of the other library, and what its `generate` returns for many arguments.

    python tests/hf/write_generation.py          (with torch and transformers; jaxformer is not imported)

A directory a model, as the library saves it, and `cases.json`: for each case the model, the arguments, the returned
sequences, and for beams their scores. `test_generation.py` compares ours.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

PLACE = Path(__file__).parent / "generation"
VOCAB, PAD, BOS, EOS = 28, 1, 0, 2

SHARED = {"vocab_size": VOCAB, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
SIDES = {
    "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "max_position_embeddings": 40, "init_std": 0.9,
    "decoder_start_token_id": EOS, "forced_eos_token_id": None,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 40, "initializer_range": 1.4}),
    "llama": (
        "LlamaForCausalLM",
        {
            "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
            "max_position_embeddings": 40, "initializer_range": 0.9, "tie_word_embeddings": False,
        },
    ),
    "bart": ("BartForConditionalGeneration", SIDES),
    "marian": ("MarianMTModel", SIDES | {"decoder_start_token_id": PAD}),
    "pegasus": ("PegasusForConditionalGeneration", SIDES | {"decoder_start_token_id": PAD, "init_std": 1.6}),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 12, "decoder_start_token_id": PAD, "initializer_factor": 2.7,
        },
    ),
}  # fmt: skip

SEEDS = {"gpt2": 74, "llama": 0, "bart": 17, "marian": 1, "pegasus": 5, "t5": 12}
"""Under which the outputs vary, end at different lengths, and depend on where the padding of a source stands."""

TEXT = [[3, 9, 17, 5, 11], [8, 20, 4, 26, 7]]
LEFT = [[PAD, PAD, 9, 5, 11], [8, 20, 4, 26, 7]]
RIGHT = [[9, 5, 11, PAD, PAD], [8, 20, 4, 26, 7]]
MIDDLE = [[9, PAD, 5, PAD, 11], [8, 20, 4, 26, 7]]
LONG = [[(7 * i) % 20 + 3 for i in range(26)]]

RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "lengths_new": {"max_new_tokens": 7, "min_new_tokens": 5},
    "lengths_all": {"max_length": 14, "min_length": 11},
    "least": {"max_new_tokens": 14, "min_new_tokens": 11},  # gpt2 alone ends with its eleventh token
    "both_lengths": {"max_length": 8, "max_new_tokens": 9, "min_length": 6, "min_new_tokens": 8},
    "penalty": {"repetition_penalty": 1.6},
    "ngram": {"no_repeat_ngram_size": 2},
    "bans": {"bad_words_ids": [[9, 5], [11], [EOS], [4, 26, 7]], "suppress_tokens": [6, 13, 14]},
    "forced_ends": {"forced_eos_token_id": [EOS, 5], "max_new_tokens": 6, "min_new_tokens": 6},
    "two_ends": {"eos_token_id": [4, 16, EOS], "max_new_tokens": 12, "min_new_tokens": 2},
    "beam": {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 9},
    "beam_first": {"num_beams": 3, "num_return_sequences": 2, "early_stopping": True, "length_penalty": 2.0},
    "beam_exact": {
        "num_beams": 4, "num_return_sequences": 4, "early_stopping": "never", "length_penalty": 1.5,
        "max_new_tokens": 8, "eos_token_id": [EOS, 4],
    },
    "beam_short": {"num_beams": 3, "length_penalty": -1.0, "early_stopping": "never", "min_new_tokens": 3},
    "beam_estimate": {"num_beams": 2, "num_return_sequences": 2, "length_penalty": 0.5, "eos_token_id": [EOS, 4, 16]},
    "beam_rules": {
        "num_beams": 3, "num_return_sequences": 3, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3,
        "bad_words_ids": [[9, 5], [11]], "suppress_tokens": [6], "min_new_tokens": 3, "max_new_tokens": 8,
        "forced_eos_token_id": [5], "length_penalty": 0.8,
    },
}  # fmt: skip
SIMPLE = ("greedy", "beam")


def cases() -> list[dict[str, Any]]:
    """Model, name and arguments of each. Every rule after one decoder's and one translator's prompts; then padding."""
    found = []
    for model in ("gpt2", "bart"):
        found += [
            {"model": model, "name": name, "in": {"input_ids": TEXT}, "args": args} for name, args in RULES.items()
        ]
        found.append({"model": model, "name": "long", "in": {"input_ids": LONG}, "args": {}})
    found.append(
        {"model": "gpt2", "name": "up_to_the_last_position", "in": {"input_ids": LONG}, "args": {"min_new_tokens": 14}}
    )
    found.append({"model": "gpt2", "name": "inferred", "in": {"input_ids": LEFT}, "args": {}})
    found.append(
        {"model": "gpt2", "name": "forced_first", "in": {"input_ids": [[7], [20]]}, "args": {"forced_bos_token_id": 12}}
    )
    found.append(
        {"model": "gpt2", "name": "not_forced", "in": {"input_ids": TEXT}, "args": {"forced_bos_token_id": 12}}
    )
    for name in ("greedy", "beam_rules"):
        found.append(
            {
                "model": "bart",
                "name": f"forced_first_{name}",
                "in": {"input_ids": TEXT},
                "args": {**RULES[name], "forced_bos_token_id": 12},
            }
        )
    for name, start in (("added", [[7, 9], [8, 3]]), ("kept", [[EOS, 9], [EOS, 3]]), ("one", [[EOS, 9], [8, 3]])):
        found.append(
            {
                "model": "bart",
                "name": f"start_{name}",
                "in": {"input_ids": TEXT, "decoder_input_ids": start},
                "args": {"max_length": 9},
            }
        )
    found.append({"model": "bart", "name": "without_mask", "in": {"input_ids": LEFT}, "args": {}})
    for model in ("gpt2", "llama"):
        for name in (*SIMPLE, "beam_rules"):
            # A padding token is part of their n-grams: it must not be chosen.
            args = {**RULES[name], "suppress_tokens": [PAD, 6]}
            found.append({"model": model, "name": f"left_{name}", "in": masked(LEFT, PAD), "args": args})
    for model in ("bart", "marian", "pegasus", "t5"):
        for side, ids in (("left", LEFT), ("right", RIGHT), ("middle", MIDDLE)):
            names = SIMPLE if side == "left" else ("greedy",)
            found += [
                {"model": model, "name": f"{side}_{name}", "in": masked(ids, PAD), "args": RULES[name]}
                for name in names
            ]
    old = {"max_length": 9, "num_beams": 2, "no_repeat_ngram_size": 2}
    for name, files in (
        ("old", {"config": old}),
        ("shielded", {"config": old, "generation": {"pad_token_id": PAD, "decoder_start_token_id": 3}}),
    ):
        for which, args in (("", {}), ("_new", {"max_new_tokens": 4})):
            found.append(
                {"model": "bart", "name": f"{name}{which}", "in": {"input_ids": TEXT}, "args": args, "files": files}
            )
    stored = {"eos_token_id": [EOS, 4], "pad_token_id": PAD, "max_new_tokens": 6, "suppress_tokens": [9]}
    for name, args in (
        ("stored", {}),
        ("stored_length", {"max_length": 20}),
        ("stored_off", {"suppress_tokens": None}),
    ):
        found.append(
            {"model": "gpt2", "name": name, "in": {"input_ids": TEXT}, "args": args, "files": {"generation": stored}}
        )
    return found


def masked(ids: list[list[int]], pad: int) -> dict[str, Any]:
    return {"input_ids": ids, "attention_mask": [[int(token != pad) for token in row] for row in ids]}


def make(name: str) -> Any:
    """The model, saved without a generation_config.json."""
    kind, settings = MODELS[name]
    torch.manual_seed(SEEDS[name])
    cls = getattr(transformers, kind)
    model = cls(cls.config_class(**SHARED, **settings)).eval()
    model.save_pretrained(PLACE / name)
    (PLACE / name / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((PLACE / name / "config.json").read_text())
    config.pop("transformers_version")
    write(PLACE / name / "config.json", config)


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def run(case: dict[str, Any], place: Path) -> dict[str, Any]:
    """What the library returns, from a copy of the model's directory with the case's files."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(PLACE / case["model"], place)
    files = case.get("files", {})
    if "config" in files:
        write(place / "config.json", json.loads((place / "config.json").read_text()) | files["config"])
    if "generation" in files:
        write(place / "generation_config.json", files["generation"])
    model = getattr(transformers, MODELS[case["model"]][0]).from_pretrained(place).eval()
    inputs = {name: torch.tensor(value) for name, value in case["in"].items()}
    with torch.no_grad():
        out = model.generate(**inputs, **case["args"], return_dict_in_generate=True, output_scores=True)
    found = {"sequences": out.sequences.tolist()}
    if getattr(out, "sequences_scores", None) is not None:
        found["scores"] = [round(score, 5) for score in out.sequences_scores.tolist()]
    return found


def main() -> None:
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    shutil.rmtree(PLACE, ignore_errors=True)
    for name in MODELS:
        make(name)
    with tempfile.TemporaryDirectory() as scratch:
        lines = [json.dumps({**case, **run(case, Path(scratch) / "model")}) for case in cases()]
    (PLACE / "cases.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()

"""Writes random configurations of the old Flax classes, with what they compute, for `flax_classes.py` to compare.

    python benchmarks/flax_random_write.py FOLDER [--seeds=0:2] [--only=WORD[,WORD...]] [--rate=0.3]

Needs the environment of tests/hf/goldens/write_flax.py, without jaxformer. Each key of config.json gets another value
than the small model's with probability `rate`; `draw.json` beside the checkpoint holds those that did.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from pathlib import Path
from typing import Any

import hugging_face_draws as draws
import jax.numpy as jnp
import numpy as np
import transformers
from flax.traverse_util import flatten_dict, unflatten_dict

KEYS = Path(__file__).resolve().parents[1] / "jaxformer" / "hf" / "keys.json"
PREFIXES = {
    "albert": "Albert", "bart": "Bart", "bert": "Bert", "big_bird": "BigBird", "blenderbot": "Blenderbot",
    "blenderbot-small": "BlenderbotSmall", "bloom": "Bloom", "distilbert": "DistilBert", "electra": "Electra",
    "gemma": "Gemma", "gpt2": "GPT2", "gpt_neo": "GPTNeo", "gptj": "GPTJ", "llama": "Llama", "longt5": "LongT5",
    "marian": "Marian", "mbart": "MBart", "mistral": "Mistral", "mt5": "MT5", "opt": "OPT", "pegasus": "Pegasus",
    "roberta": "Roberta", "roberta-prelayernorm": "RobertaPreLayerNorm", "roformer": "RoFormer", "t5": "T5",
    "xglm": "XGLM", "xlm-roberta": "XLMRoberta",
}  # fmt: skip
HEADS = {
    "ForCausalLM": "causal_lm", "LMHeadModel": "causal_lm", "ForConditionalGeneration": "seq2seq", "MTModel": "seq2seq",
    "ForMaskedLM": "masked_lm", "ForSequenceClassification": "sequence", "ForTokenClassification": "token",
    "ForQuestionAnswering": "qa", "ForMultipleChoice": "multiple_choice", "ForPreTraining": "pretraining",
    "ForNextSentencePrediction": "next_sentence", "EncoderModel": "encoder", "Model": "model",
}  # fmt: skip
ACTIVATIONS = ("gelu", "relu", "silu", "swish", "gelu_new", "gelu_pytorch_tanh")
PADDED_LENGTHS = {"big_bird": 24, "longt5": 17}
DECODERS = ("bloom", "gemma", "gpt2", "gpt_neo", "gptj", "llama", "mistral", "opt", "xglm")
WITHOUT = ("rope_parameters", "layer_types", "file", "output_hidden_states", "chunk_size_feed_forward")
SEARCHES = (
    {"num_beams": 1}, {"num_beams": 3, "length_penalty": 0.6, "early_stopping": True},
    {"num_beams": 2, "length_penalty": 2.0, "num_return_sequences": 2}, {"min_length": 8, "no_repeat_ngram_size": 2},
    {"num_beams": 3, "min_length": 7, "early_stopping": "never"}, {"forced_eos_token_id": 7},
    {"suppress_tokens": [9, 11]},
    {"forced_bos_token_id": 8}, {"do_sample": True, "top_k": 1, "temperature": 0.7}, {"begin_suppress_tokens": [5, 12]},
)  # fmt: skip


def drawn(
    kind: str, head: str, rng: np.random.Generator, rate: float, fixed: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of the config class, and what was drawn."""
    listed = json.loads(KEYS.read_text())["families"][kind]
    changed = draws.draw(kind, head, listed, rng, rate) | fixed
    changed = {name: value for name, value in changed.items() if name not in (*WITHOUT, *listed["beside"])}
    if "embedding_size" in changed and kind not in ("albert", "electra"):
        del changed["embedding_size"]
    for name, value in changed.items():
        if value in draws.ACTIVATIONS and isinstance(value, str):
            changed[name] = str(rng.choice(ACTIVATIONS))
    config = draws.build(kind, head, listed, changed)
    for name in ("rope_parameters", "is_decoder", "max_window_layers"):
        config.pop(name, None)
    if head == "causal_lm" and kind in draws.CAUSAL_ENCODERS:
        config["is_decoder"] = True
    if kind == "big_bird" and head == "causal_lm":
        config["attention_type"] = str(rng.choice(["original_full", "block_sparse"]))
    return config, changed


def random_params(params: Any, rng: np.random.Generator) -> Any:
    """Random values for every leaf, norms and biases too."""
    leaves = {}
    for path, leaf in flatten_dict(params).items():
        centre = 1.0 if path[-1] in ("scale", "weight") and leaf.ndim == 1 else 0.0
        size = 1.2 / leaf.shape[0] ** 0.5 if path[-1] == "kernel" else 0.5
        leaves[path] = jnp.asarray((centre + size * rng.normal(size=leaf.shape)).astype(np.float32))
    return unflatten_dict(leaves)


def inputs_of(kind: str, head: str, config: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Arguments of a call, its second row padded on either side."""
    length = PADDED_LENGTHS.get(kind, 11)
    if kind == "big_bird":
        length = config.block_size * (24 // config.block_size)
    vocab = config.vocab_size - 2
    ids, mask = rng.integers(3, vocab, (2, length)).astype(np.int32), np.ones((2, length), np.int32)
    causal = head in ("causal_lm", "model") and kind in (
        "bloom",
        "gemma",
        "gpt2",
        "gpt_neo",
        "gptj",
        "llama",
        "mistral",
        "opt",
        "xglm",
    )
    mask[1, slice(0, 3) if causal else slice(length - 3, None)] = 0
    if head == "sequence" and kind in ("bart", "mbart"):
        ids[ids == config.eos_token_id] = 20
        ids[:, length - 5] = config.eos_token_id
    if config.pad_token_id is not None and config.pad_token_id >= 0:
        ids[mask == 0] = config.pad_token_id
    inputs = {"input_ids": ids, "attention_mask": mask}
    kinds = getattr(config, "type_vocab_size", 0)
    if kinds and kind not in ("distilbert",) and rng.random() < 0.5:
        inputs["token_type_ids"] = rng.integers(0, kinds, ids.shape).astype(np.int32)
    if head == "multiple_choice":
        return {name: np.stack([x, x[::-1]], 1) for name, x in inputs.items()}
    if config.is_encoder_decoder and head not in ("causal_lm", "encoder", "sequence", "qa"):
        inputs["decoder_input_ids"] = rng.integers(3, vocab, (2, 6)).astype(np.int32)
        if rng.random() < 0.5:
            hidden = np.ones((2, 6), np.int32)
            hidden[1, 4:] = 0
            inputs["decoder_attention_mask"] = hidden
    return inputs


def write(folder: Path, kind: str, name: str, head: str, seed: int, rate: float, fixed: dict[str, Any]) -> str:
    """One checkpoint; a line about it."""
    rng = np.random.default_rng(zlib.crc32(f"{name} {seed}".encode()))
    values, changed = drawn(kind, head, rng, rate, fixed)
    place = folder / f"{name}-{seed}"
    try:
        config = transformers.AutoConfig.for_model(kind, **values)
        model = getattr(transformers, name)(config, input_shape=(1, 24) if kind == "big_bird" else (1, 1))
        model.params = random_params(model.params, rng)
        inputs = inputs_of(kind, head, config, rng)
        arrays = {f"in/{key}": value for key, value in inputs.items()}
        flags = {"output_hidden_states": True, "output_attentions": kind not in PADDED_LENGTHS}
        if kind == "mistral":
            flags["output_attentions"] = False
        outputs = model(**inputs, **flags)
        for field, value in outputs.items():
            parts = {f"{field}/{i}": x for i, x in enumerate(value)} if isinstance(value, tuple) else {field: value}
            arrays |= {f"out/{key}": np.asarray(x) for key, x in parts.items()}
        writes = head in ("causal_lm", "seq2seq") and kind not in draws.CAUSAL_ENCODERS and "BartForCausal" not in name
        for number in rng.choice(len(SEARCHES), 2, replace=False) if writes else ():
            options = {"max_length": 17 if not config.is_encoder_decoder else 10, **SEARCHES[number]}
            given = {key: inputs[key] for key in ("input_ids", "attention_mask")}
            try:
                found = model.generate(**given, **options)
            except Exception as error:
                print(f"  {name}-{seed} {options}: {type(error).__name__} {str(error)[:80]}")
                continue
            arrays |= {f"gen/{number}/in/{key}": value for key, value in given.items()}
            arrays[f"gen/{number}/args"] = json.dumps(options)
            arrays |= {
                f"gen/{number}/{field}": np.asarray(x) for field, x in found.items() if field in ("sequences", "scores")
            }
    except Exception as error:
        return f"theirs fails: {type(error).__name__} {str(error).splitlines()[0][:90] if str(error) else ''} {changed}"
    if not all(np.isfinite(x).all() for key, x in arrays.items() if key.startswith("out/")):
        return f"theirs is not finite {changed}"
    model.save_pretrained(place)
    (place / "draw.json").write_text(json.dumps(changed))
    np.savez_compressed(place / "expected.npz", **arrays)
    return "written"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--seeds", default="0:2")
    parser.add_argument("--only", default="")
    parser.add_argument("--rate", type=float, default=0.3)
    parser.add_argument("--set", default="{}", help="JSON: keys that every draw has")
    arguments = parser.parse_args()
    first, last = map(int, arguments.seeds.split(":"))
    for seed in range(first, last):
        for kind, prefix in PREFIXES.items():
            classes = [(f"Flax{prefix}{end}", head) for end, head in HEADS.items()]
            wished = arguments.only.split(",")
            classes = [pair for pair in classes if any(word in pair[0] for word in wished)]
            classes = [pair for pair in classes if hasattr(transformers, pair[0])]
            if classes:
                name, head = classes[seed % len(classes)]
                line = write(Path(arguments.folder), kind, name, head, seed, arguments.rate, json.loads(arguments.set))
                print(f"{name}-{seed}", line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

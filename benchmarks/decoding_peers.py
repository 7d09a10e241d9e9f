"""The peers that `decoding.py` measures and runs: Hugging Face `generate` on torch, and CTranslate2 (extra [bench])."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import turns  # noqa: E402

THREADS = os.cpu_count() or 1


def continuation(task: dict[str, Any]) -> Callable[[], int]:
    """A function that calls `generate` of a random GPT-2; "compiled": with a static cache and `torch.compile`."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    settings = GPT2Config(
        vocab_size=task["vocab"], n_embd=task["width"], n_layer=task["layers"], n_head=task["width"] // 64,
        n_positions=task["prompt"] + task["tokens"], bos_token_id=0, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(settings).eval().to(getattr(torch, task["dtype"]))
    options: dict[str, Any] = {"do_sample": task["method"] == "sample", "max_new_tokens": task["tokens"]}
    if task["compiled"]:
        model.forward = torch.compile(model.forward, mode="default", dynamic=False)
        options["cache_implementation"] = "static"
    prompts = torch.randint(0, task["vocab"], (task["batch"], task["prompt"]))

    def run() -> int:
        with torch.inference_mode():
            return model.generate(prompts, attention_mask=torch.ones_like(prompts), **options).shape[1]

    return run


def batches(sources: list[list[int]], rows: int) -> list[list[int]]:
    """Indices of the sources in batches of `rows`, the longest first."""
    order = sorted(range(len(sources)), key=lambda i: -len(sources[i]))
    return [order[i : i + rows] for i in range(0, len(order), rows)]


def hugging_face_translation(task: dict[str, Any]) -> Callable[[], list[list[int]]]:
    """A function that translates with an exported model and beam search, with sources sorted by length."""
    import torch
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(task["directory"]).eval()
    sources, pad, eos = task["sources"], model.config.pad_token_id, model.config.eos_token_id
    options = dict(num_beams=task["beams"], max_new_tokens=task["tokens"], length_penalty=1.0, do_sample=False)

    def run() -> list[list[int]]:
        outputs: list[list[int]] = [[] for _ in sources]
        for indices in batches(sources, task["batch"]):
            longest = max(len(sources[i]) for i in indices)
            ids = torch.tensor([sources[i] + [pad] * (longest - len(sources[i])) for i in indices])
            with torch.inference_mode():
                output = model.generate(input_ids=ids, attention_mask=(ids != pad).long(), **options)
            for i, row in zip(indices, output.tolist(), strict=True):
                outputs[i] = [token for token in row[1:] if token not in (pad, eos)]
        return outputs

    return run


def ctranslate2_translation(task: dict[str, Any]) -> Callable[[], list[list[int]]]:
    """A function that translates with CTranslate2, with `task["inter"]` batches at the same time."""
    import ctranslate2
    import transformers
    from tokenizers import Tokenizer

    # Pegasus is pre-norm without a norm of embeddings; its config class in transformers 5 lacks both attributes.
    transformers.PegasusConfig.normalize_before, transformers.PegasusConfig.normalize_embedding = True, False
    directory = tempfile.mkdtemp()
    ctranslate2.converters.TransformersConverter(task["directory"]).convert(directory, force=True)
    tokenizer = Tokenizer.from_file(str(Path(task["directory"], "tokenizer.json")))
    settings = json.loads(Path(task["directory"], "config.json").read_text())
    path = Path(directory, "config.json")
    path.write_text(
        json.dumps(
            json.loads(path.read_text())
            | {"decoder_start_token": tokenizer.id_to_token(settings["decoder_start_token_id"])}
        )
    )
    inter = task["inter"]
    translator = ctranslate2.Translator(
        directory, device="cpu", compute_type=task["dtype"], inter_threads=inter, intra_threads=THREADS // inter
    )
    sources = [[tokenizer.id_to_token(token) for token in row] for row in task["sources"]]

    def run() -> list[list[int]]:
        results = translator.translate_batch(
            sources, beam_size=task["beams"], length_penalty=1.0, max_decoding_length=task["tokens"],
            max_batch_size=task["batch"],
        )  # fmt: skip
        return [[tokenizer.token_to_id(token) for token in result.hypotheses[0]] for result in results]

    return run


PEERS = {
    "generate": continuation,
    "hugging_face": hugging_face_translation,
    "ctranslate2": ctranslate2_translation,
}

if __name__ == "__main__":
    task = turns.task()
    turns.serve(PEERS[task["peer"]](task))

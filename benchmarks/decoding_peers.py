"""The peers of `decoding.py`, which runs them: Hugging Face generate on torch, and CTranslate2 (extra [bench])."""

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


def continued(task: dict[str, Any]) -> Callable[[], int]:
    """`generate` of a random GPT-2 of that size; "compiled": a static cache and the forward pass by torch.compile."""
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
    """Places of sources of similar length, so many at a time."""
    order = sorted(range(len(sources)), key=lambda i: -len(sources[i]))
    return [order[i : i + rows] for i in range(0, len(order), rows)]


def translated_by_hugging_face(task: dict[str, Any]) -> Callable[[], list[list[int]]]:
    """Beam search of an exported translator; sources sorted by length, as ours are."""
    import torch
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(task["directory"]).eval()
    sources, pad, end = task["sources"], model.config.pad_token_id, model.config.eos_token_id
    options = dict(num_beams=task["beams"], max_new_tokens=task["tokens"], length_penalty=1.0, do_sample=False)

    def run() -> list[list[int]]:
        found: list[list[int]] = [[] for _ in sources]
        for places in batches(sources, task["batch"]):
            longest = max(len(sources[i]) for i in places)
            ids = torch.tensor([sources[i] + [pad] * (longest - len(sources[i])) for i in places])
            with torch.inference_mode():
                output = model.generate(input_ids=ids, attention_mask=(ids != pad).long(), **options)
            for i, row in zip(places, output.tolist(), strict=True):
                found[i] = [token for token in row[1:] if token not in (pad, end)]
        return found

    return run


def translated_by_ctranslate2(task: dict[str, Any]) -> Callable[[], list[list[int]]]:
    """The same by CTranslate2, in the faster of its two ways to use the cores that `task["inter"]` names."""
    import ctranslate2
    import transformers
    from tokenizers import Tokenizer

    # Pegasus is pre-norm and has no norm of embeddings; transformers 5 no longer says so in its config class.
    transformers.PegasusConfig.normalize_before, transformers.PegasusConfig.normalize_embedding = True, False
    directory = tempfile.mkdtemp()
    ctranslate2.converters.TransformersConverter(task["directory"]).convert(directory, force=True)
    tokenizer = Tokenizer.from_file(str(Path(task["directory"], "tokenizer.json")))
    says = json.loads(Path(task["directory"], "config.json").read_text())
    path = Path(directory, "config.json")
    path.write_text(
        json.dumps(
            json.loads(path.read_text())
            | {"decoder_start_token": tokenizer.id_to_token(says["decoder_start_token_id"])}
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
        return [[tokenizer.token_to_id(token) for token in each.hypotheses[0]] for each in results]

    return run


PEERS = {
    "generate": continued,
    "hugging_face": translated_by_hugging_face,
    "ctranslate2": translated_by_ctranslate2,
}

if __name__ == "__main__":
    given = turns.task()
    turns.serve(PEERS[given["peer"]](given))

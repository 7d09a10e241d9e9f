"""Whether the sections of a config agree."""

from __future__ import annotations

from jaxformer.checks.tables import wrong
from jaxformer.config import Config, DecodeConfig

SHAPES: dict[str, tuple[str, str, str]] = {
    "translation": ("encoder decoder", "tokens", "an encoder and a decoder"),
    "summarisation": ("encoder decoder", "tokens", "an encoder and a decoder"),
    "language_modelling": ("decoder", "tokens", "a decoder alone"),
    "masked_lm": ("encoder", "tokens", "an encoder alone"),
    "classification": ("encoder|decoder", "classes", "an encoder or a decoder, not both"),
    "tagging": ("encoder|decoder", "slots", "an encoder or a decoder, not both"),
    "answering": ("encoder|decoder", "slots", "an encoder or a decoder, not both"),
    "similarity": ("encoder|decoder", "pair", "an encoder or a decoder, not both"),
}
"""Task -> which sides it needs, which head, and the sides in words. A task that is not listed is not judged here."""


def task(config: Config) -> None:
    model, task = config.model, config.task.name
    encoder = model.encoder is not None or model.recurrent_encoder is not None
    decoder = model.decoder is not None or model.recurrent_decoder is not None
    sides = " ".join(name for name, there in (("encoder", encoder), ("decoder", decoder)) if there)
    if task in SHAPES:
        needed, head, words = SHAPES[task]
        if sides not in needed.split("|"):
            raise wrong("config.task.name", task, f"{words} for this task (the model has: {sides.replace(' ', ', ')})")
        if model.head.kind != head:
            raise wrong("config.model.head.kind", model.head.kind, f"{head} for the task {task}")
        if head in ("classes", "slots") and model.head.classes == 1:
            raise wrong("config.model.head.classes", 1, f"at least 2 for the task {task}")
        if task == "answering" and model.head.classes not in (None, 2):
            raise wrong("config.model.head.classes", model.head.classes, "2 (start and end) or None for this task")
        if config.data.packing != "none" and task != "language_modelling":
            raise wrong("config.data.packing", config.data.packing, f"none for the task {task}")
    if task == "similarity":
        for name in ("label_smoothing", "z_loss"):
            if getattr(config.task, name):
                raise wrong(f"config.task.{name}", getattr(config.task, name), f"0 for the task {task}")
    if (
        sides == "decoder"
        and model.decoder is not None
        and model.decoder.causal is False
        and task == "language_modelling"
    ):
        raise wrong(
            "config.model.decoder.causal", "False", "True or None: a language model cannot see what it predicts"
        )
    if model.share_embeddings and not config.data.tokenizer.joint:
        raise wrong("config.model.share_embeddings", "True", "a joint vocabulary", "set data.tokenizer.joint=true")


def data(config: Config) -> None:
    data = config.data
    if list(data.buckets) != sorted(set(data.buckets)) or (data.buckets and data.buckets[0] < 2):
        raise wrong("config.data.buckets", data.buckets, "ascending lengths of at least 2")
    if data.buckets and data.buckets[-1] > data.length:
        raise wrong("config.data.buckets", data.buckets, f"lengths of at most data.length ({data.length})")
    if data.tokens is not None and data.tokens < data.length:
        raise wrong("config.data.tokens", data.tokens, f"at least data.length ({data.length})")
    if data.tokenizer.kind == "file" and not data.tokenizer.path:
        raise wrong("config.data.tokenizer.path", data.tokenizer.path, "a file, since tokenizer.kind is file")
    if len(data.score_range) != 2 or data.score_range[0] >= data.score_range[1]:
        raise wrong("config.data.score_range", data.score_range, "the lowest and the highest score, as 0,5")
    if data.format and data.source != "table":
        raise wrong("config.data.format", data.format, f"'' for data.source {data.source}, which has one format")
    for split, files in data.splits.items():
        if not split.replace("-", "").replace("_", "").isalnum():  # it becomes part of file names in the workdir
            raise wrong("config.data.splits", split, "names of letters, digits, - and _", "rename it")
        if not files:
            raise wrong(f"config.data.splits.{split}", files, "at least one file or split expression")


def train(config: Config) -> None:
    train, keep = config.train, config.checkpoint
    if train.ema_warmup and train.ema is None:
        raise wrong("config.train.ema_warmup", True, "false without config.train.ema, the decay that it warms up to")
    if config.data.tokens is None and config.data.batch % train.accumulation:
        raise wrong("config.train.accumulation", train.accumulation, f"a divisor of data.batch ({config.data.batch})")
    if config.data.tokens is not None and config.data.tokens // config.data.length < train.accumulation:
        rows = config.data.tokens // config.data.length
        raise wrong("config.train.accumulation", train.accumulation, f"at most the rows of the longest batch ({rows})")
    kept = keep.keep_last if keep.average_of == "last" else keep.keep_best
    if keep.average > kept:
        raise wrong("config.checkpoint.average", keep.average, f"at most keep_{keep.average_of} ({kept})")


def decode(decode: DecodeConfig) -> None:
    if decode.length_penalty < 0 and decode.length_norm == "gnmt":
        raise wrong("config.decode.length_penalty", decode.length_penalty, "at least 0 for length_norm gnmt")
    if decode.method == "beam" and decode.hypotheses > decode.beams:
        raise wrong("config.decode.hypotheses", decode.hypotheses, f"at most decode.beams ({decode.beams})")
    if decode.method == "greedy" and decode.hypotheses > 1:
        raise wrong("config.decode.hypotheses", decode.hypotheses, "1 for greedy decoding", "use beam or sample")
    if decode.min_length > decode.max_length:
        raise wrong("config.decode.min_length", decode.min_length, f"at most decode.max_length ({decode.max_length})")
    if any(not word or min(word) < 0 for word in decode.bad_words):
        raise wrong("config.decode.bad_words", decode.bad_words, "sequences of token ids, none of them empty")
    if any(token < 0 for token in decode.suppress):
        raise wrong("config.decode.suppress", decode.suppress, "token ids, from 0")
    if any(token < 0 for token in decode.forced_last):
        raise wrong("config.decode.forced_last", decode.forced_last, "token ids, from 0")
    if decode.forced_first in decode.suppress:
        raise wrong("config.decode.forced_first", decode.forced_first, "a token that decode.suppress does not hold")
    if decode.forced_last and set(decode.forced_last) <= set(decode.suppress):
        raise wrong("config.decode.forced_last", decode.forced_last, "a token that decode.suppress does not hold")

"""A small run of every task on data that `files` writes: what `task_drills.py` trains, kills and resumes.

Command:  python -m jaxformer train --config=benchmarks/task_recipes.py:TASK --workdir=runs/task --config.data.dir=DIR
Variants: the names of the tasks
Hardware: one CPU core
Time:     a second, beside the start
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

from jaxformer import registry
from jaxformer.config import GeneratorConfig, PermutationConfig, SeriesConfig, StackConfig, TemplateConfig
from jaxformer.config.overrides import defaults, section

STEPS = 24
WORDS = ("amber", "birch", "cedar", "daisy", "elm", "fern", "grape", "hazel", "iris", "lilac", "maple", "oak", "pine")
EVEN, ODD = WORDS[::2], WORDS[1::2]
STACK = dict(layers=1, width=16, dropout=0.1, attention=dict(heads=2), ffn=dict(width=32))


def files(folder: Path) -> None:
    """The data of all tasks: texts, tables, tagged words, questions and a series, each with rules that can be learned.

    The digits of `captioning` and `series_classification` come with scikit-learn, conversations and preferences with
    the package.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    for split, count in (("train", 96), ("valid", 24)):
        texts = [" ".join(rng.choices(WORDS, k=rng.randrange(4, 9))) for _ in range(count)]
        (folder / f"{split}.txt").write_text("".join(text + "\n" for text in texts))
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row(text)) + "\n" for text in texts))
        tagged = ["".join(f"{word} {'B-tree' if word in EVEN else 'O'}\n" for word in text.split()) for text in texts]
        (folder / f"{split}.conll").write_text("\n".join(tagged))
        (folder / f"{split}.json").write_text(json.dumps(questions(texts)))
    steps = [f"{i},{math.sin(i / 3):.4f},{math.cos(i / 5) + rng.gauss(0, 0.1):.4f}\n" for i in range(160)]
    (folder / "series.csv").write_text("step,a,b\n" + "".join(steps))


def row(text: str) -> dict[str, object]:
    """The columns of the tables."""
    words = text.split()
    even = sum(word in EVEN for word in words)
    return {
        "text": text,
        "pair": " ".join(sorted(words)),
        "label": "even" if 2 * even > len(words) else "odd",
        "labels": sorted(set(words) & {"amber", "birch", "cedar"}),
        "score": even / len(words),
        "target": " ".join(reversed(words)),
    }


def questions(texts: list[str]) -> dict[str, object]:
    """Questions for the word that follows another one, in SQuAD's format."""
    paragraphs = []
    for number, text in enumerate(texts):
        first, answer = text.split()[1:3]
        answers = [{"text": answer, "answer_start": text.index(f"{first} {answer}") + len(first) + 1}]
        paragraph = {"id": str(number), "question": f"what follows {first}", "answers": answers}
        paragraphs.append({"context": text, "qas": [paragraph]})
    return {"version": "1.1", "data": [{"title": "words", "paragraphs": paragraphs}]}


def get_config(task: str):
    """The recipe of a task. Reports, checkpoints and evaluations fall together in no pattern."""
    config = defaults()
    config.task.name = task
    config.data.source, suffix = SOURCES.get(task, ("text", "txt"))
    if suffix:
        config.data.splits = {"train": (f"train.{suffix}",), "validation": (f"valid.{suffix}",)}
    config.data.columns = COLUMNS.get(task, {})
    config.data.tokenizer.kind = "word"
    config.data.tokenizer.sentinels = 8 if task == "span_corruption" else 0
    config.data.length, config.data.batch = 32, 8
    sides = SIDES.get(task, ("encoder",))
    for side in sides:
        setattr(config.model, side, section(StackConfig, **STACK, encoding=dict(kind="rope")))
    config.model.share_embeddings = len(sides) == 2 and task != "captioning"
    config.train.steps, config.train.log_every = STEPS, 3
    config.train.checkpoint_every, config.train.evaluate_every = 5, 8
    config.schedule.warmup, config.schedule.peak = 4, 1e-2
    config.evaluate.batch, config.evaluate.examples, config.evaluate.decode_examples = 8, 24, 8
    config.evaluate.samples = 2
    config.decode.max_length = 12
    EDITS.get(task, lambda config: None)(config)
    return config


def _vectors(config) -> None:
    config.model.encoder = section(StackConfig, layers=0, width=16, encoding=dict(kind="none"), norm=dict(kind="none"))
    config.model.head.tied = False
    config.data.packing = "first_fit"
    config.evaluate.decode_examples = config.evaluate.samples = 0


def _permutation(config) -> None:
    """Rows that go on with the text of the batch before, and the memory that this leaves."""
    config.model.encoder = section(StackConfig, **STACK, encoding=dict(kind="transformer_xl"), norm=dict(order="post"))
    config.model.permutation = section(PermutationConfig, memory=16)
    config.data.packing, config.data.shuffle, config.data.length = "concat", False, 16
    config.task.recurrence = True


def _replaced(config) -> None:
    config.model.generator = section(GeneratorConfig, encoder=dict(**STACK, encoding=dict(kind="rope")))
    config.model.head.kind = "slots"
    config.evaluate.decode_examples = config.evaluate.samples = 0


def _classes(config, kind="classes") -> None:
    config.model.head.kind, config.model.head.pooling = kind, "mean"


def _slots(config) -> None:
    config.model.head.kind = "slots"


def _answers(config) -> None:
    _slots(config)
    config.model.encoder.embed.kinds = 2


def _forecasts(config) -> None:
    config.data.splits = {"train": ("series.csv[:100]",), "validation": ("series.csv[100:]",)}
    config.data.length, config.data.horizon = 16, 4
    config.evaluate.decode_examples = config.evaluate.samples = 0
    config.model.series = section(SeriesConfig, channels=2, patch=4, normalise="instance")
    config.model.encoder = section(StackConfig, **STACK, encoding=dict(kind="learned", max_length=4))
    config.model.head.kind = "forecast"


def _digits(config) -> None:
    config.data.name = "2/pairs" if config.task.name == "captioning" else "2"
    config.model.series = section(SeriesConfig, channels=4)


def _digit_classes(config) -> None:
    _digits(config)
    _classes(config)
    config.model.head.classes = 10
    config.evaluate.decode_examples = config.evaluate.samples = 0


def _dialogue(config) -> None:
    config.data.examples, config.data.length = 200, 160


def _preference(config) -> None:
    """The model is that of a run of `dialogue`."""
    config.model.decoder = None
    config.init.directory = "DIALOGUE"  # given on the command line
    config.data.examples, config.data.length = 100, 192
    config.schedule.peak = 1e-3


def _template(config) -> None:
    config.task.template = section(TemplateConfig, source="reverse: {source}", target="{target}")


SOURCES = {
    **dict.fromkeys(("classification", "multi_label", "regression", "similarity"), ("table", "jsonl")),
    **dict.fromkeys(("translation", "summarisation", "text_to_text"), ("table", "jsonl")),
    **dict.fromkeys(("captioning", "series_classification"), ("digits", "")),
    "tagging": ("conll", "conll"),
    "answering": ("squad", "json"),
    "forecasting": ("series", "csv"),
    "dialogue": ("orders", ""),
    "preference": ("order_pairs", ""),
}
"""Task -> its source and the suffix of its files; others read lines of text."""
COLUMNS = {
    "classification": {"text": "text", "label": "label"},
    "multi_label": {"text": "text", "labels": "labels"},
    "regression": {"text": "text", "score": "score"},
    "similarity": {"text": "text", "pair": "pair", "score": "score"},
    **{name: {"source": "text", "target": "target"} for name in ("translation", "summarisation", "text_to_text")},
    "forecasting": {"date": "step"},
}
SIDES = {
    **dict.fromkeys(("language_modelling", "prefix_lm", "dialogue", "preference"), ("decoder",)),
    **dict.fromkeys(("translation", "summarisation", "text_to_text"), ("encoder", "decoder")),
    **dict.fromkeys(("span_corruption", "denoising", "captioning"), ("encoder", "decoder")),
}
"""Task -> the stacks of its model; others have an encoder."""
EDITS = {
    **dict.fromkeys(("skip_gram", "cbow"), _vectors),
    **dict.fromkeys(("classification", "multi_label", "regression"), _classes),
    "permutation_lm": _permutation,
    "replaced_tokens": _replaced,
    "similarity": lambda config: _classes(config, "pair"),
    "tagging": _slots,
    "answering": _answers,
    "forecasting": _forecasts,
    "captioning": _digits,
    "series_classification": _digit_classes,
    "dialogue": _dialogue,
    "preference": _preference,
    "text_to_text": _template,
}
NAMES = registry.names("jaxformer.tasks")

"""Names of measures in words, with their units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxformer.config import Config

LABELS = {
    "loss": "loss (nats per label)",
    "padding": "padding (share of slots)",
    "skipped": "skipped steps per report",
    "spiked": "steps skipped as spikes, per report",
    "steps_per_second": "steps per second",
    "learning_rate": "learning rate",
    "tokens_per_second": "tokens per second, padding left out",
    "gradient_norm": "gradient norm, before clipping",
    "perplexity": "perplexity per token",
    "word_perplexity": "perplexity per word",
    "bits_per_byte": "bits per UTF-8 byte",
    "accuracy": "accuracy (share of labels)",
    "macro_f1": "F1, mean over the classes (0 to 1)",
    "f1": "F1 (0 to 1)",
    "precision": "precision (0 to 1)",
    "recall": "recall (0 to 1)",
    "word_accuracy": "words tagged right (share)",
    "cut_examples": "examples that were too long",
    "changed": "settings that differ from the run's",
    "split_examples": "examples of the whole split",
    "decoded_examples": "examples decoded and scored",
    "cut_tokens": "tokens that were cut off",
    "cut_words": "words without a token, tagged O",
    "empty_examples": "examples that lost all of a reply",
    "margin": "reward of the chosen reply above the rejected one",
    "chosen_reward": "reward of the chosen reply",
    "rejected_reward": "reward of the rejected reply",
    "ranking_accuracy": "pairs whose chosen reply is the likelier (share)",
    "label_loss": "loss of the labels (nats per label)",
    "distillation": "divergence from the teacher, times T^2 (nats per label)",
    "exact_match": "exact matches (share)",
    "spearman": "Spearman's rank correlation (-1 to 1)",
    "pearson": "Pearson's correlation (-1 to 1)",
    "bleu": "BLEU (0 to 100)",
    "rouge1": "ROUGE-1 F1 (0 to 100)",
    "rouge2": "ROUGE-2 F1 (0 to 100)",
    "rouge_l": "ROUGE-L F1 (0 to 100)",
    "bleu_lc_tok": "BLEU, lower-cased and tokenised (0 to 100)",
    "chrf": "chrF (0 to 100)",
}
"""Description and unit of each measure; others are shown by their name."""

HEADLINES = (
    ("bleu", "bleu_lc_tok", "exact_match"),
    ("rouge1", "rouge2", "rouge_l"),
    ("spearman", "pearson"),
    ("f1", "exact_match", "precision", "recall"),
    ("word_accuracy",),
    ("word_perplexity", "bits_per_byte"),
    ("perplexity",),
    ("accuracy", "macro_f1"),
    ("loss",),
)
"""Measures by which results of tasks are known: the first row whose first name was measured."""

DECODED = (
    "bleu", "bleu_lc_tok", "chrf", "exact_match", "f1", "pearson", "precision", "recall", "rouge1", "rouge2", "rouge_l",
    "spearman", "squared_error", "word_accuracy",
)  # fmt: skip
"""Measures of decoded text (the scores of all tasks); training decodes only `evaluate.decode_examples` examples."""

NO_MEASURES = ("split", "signatures", "checkpoint", "by_length", "diagnosis")
"""Entries of `eval-<split>.json` that the table of measures leaves out."""

NO_SCORES = {
    "step", "config", "weights", "seconds", "examples", "cut_examples", "cut_tokens", "cut_words", "empty_examples",
    "split_examples", "decoded_examples", "changed", "stopped_early", *NO_MEASURES,
}  # fmt: skip
"""Entries of results that cannot be a headline."""


def headline(values: Mapping[str, Any], config: Config | None = None) -> list[str]:
    """The measures by which a result is known, the main one first.

    The main one is `evaluate.headline`, else the measure by which checkpoints are chosen if it is not the loss, else
    the task's.
    """
    names = next((row for row in HEADLINES if row[0] in values), ())
    main = [] if config is None else [config.evaluate.headline or config.checkpoint.metric]
    return [name for name in dict.fromkeys([*(name for name in main if name != "loss"), *names]) if name in values]

"""The files of configs/, with every variant they take."""

from __future__ import annotations

from pathlib import Path
from typing import Iterator

CONFIGS = Path(__file__).resolve().parents[1] / "configs"

VARIANTS = {
    "bert_mlm": ("tiny", "pairs", "base"),
    "btc_ner": ("transformer", "lstm"),
    "chat": ("sft", "dpo"),
    "digits": ("classify", "caption"),
    "distil": ("teacher", "student", "alone"),
    "ett": ("patch", "linear", "dlinear"),
    "gpt3": ("small", "medium", "large", "xl", "2.7b", "6.7b", "13b", "175b"),
    "ladder": ("bigram", "head", "heads", "ffn", "residual", "norm"),
    "llama": ("1b", "7b"),
    "moe_tiny": ("", "dropless", "dense", "deepseek"),
    "quickstart": ("", "fr", "es"),
    "scan": ("lstm", "lstm_paper", "relative"),
    "shakespeare_char": ("cpu", "gpu"),
    "squad": ("transformer", "lstm", "generative"),
    "sst2": ("transformer", "lstm"),
    "stsb": ("transformer", "lstm", "finetune"),
    "transfer": ("masked_lm", "span_corruption", "sst2", "wnut17"),
    "transformer_base": ("base", "big"),
    "wikitext2": ("transformer", "lstm"),
    "word_vectors": ("skip_gram", "cbow"),
}
"""Recipe -> its variants ("": without one); recipes that are not listed have none."""


def each() -> Iterator[tuple[Path, str, str]]:
    """Every (file, variant, what --config takes)."""
    for path in sorted(CONFIGS.glob("*.py")):
        for variant in VARIANTS.get(path.stem, ("",)):
            yield path, variant, f"{path}:{variant}" if variant else str(path)

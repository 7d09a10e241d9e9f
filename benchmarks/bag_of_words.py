"""Simple baselines beside a trained classifier: what a linear model of words (or pixels) scores on a recipe's splits.

    python benchmarks/bag_of_words.py --config=configs/sst2.py --config.data.dir=DIR [--split=test]
    python benchmarks/bag_of_words.py --config=configs/digits.py:classify

Texts with a class: logistic regression on unigrams and bigrams, whose counts or TF-IDF weights are the features. A pair
of texts has features of each side. Series and images with a class: logistic regression on their values, each
standardised. Which features and which C (the inverse of the L2 penalty) is chosen by the accuracy on the validation
split; the measured split is read once. Of a mixture, every component that has classes and a training split is measured
by itself.

Tagged words: each word gets the tag it most often has in training, a new word the most frequent of all tags. There is
nothing to choose.

Words are what stands between blanks, lower-cased where the recipe's tokenizer does so. All examples of the training
split are read (up to data.examples), whole: nothing is truncated to data.length. Needs scikit-learn, from the extra
[bench].
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxformer import metrics
from jaxformer.config import Config, components, overrides
from jaxformer.data import sources
from jaxformer.data.sources import Dataset, Example
from jaxformer.errors import ConfigError

INVERSE_PENALTIES = (0.1, 0.3, 1.0, 3.0, 10.0)
WEIGHTINGS = ("counts", "tf-idf")
MAX_ITERATIONS = 2000


def read_split(config: Config, dataset: Dataset, split: str) -> list[Example]:
    """The examples of a split; of the training split the first `data.examples`.

    Raises:
      ConfigError: there is no such split.
    """
    if split not in dataset.splits:
        raise sources.unknown_split(split, dataset.splits)
    examples = dataset.splits[split]
    count = len(examples)
    if split == "train" and config.data.examples is not None:
        count = min(count, config.data.examples)
    return [examples[index] for index in range(count)]


def most_frequent_tags(config: Config, dataset: Dataset, split: str) -> dict[str, float]:
    """Entity precision, recall and F1 (or the accuracy of words) of each word's most frequent tag in training."""
    if dataset.classes is None:
        raise ConfigError("data: got tags without names of classes, expected them; choose another source")
    fold = str.lower if config.data.tokenizer.lowercase else str
    by_word: dict[str, Counter[str]] = {}
    overall: Counter[str] = Counter()
    for example in read_split(config, dataset, "train"):
        for word, tag in zip(fold(example["text"]).split(" "), example["tags"], strict=True):
            by_word.setdefault(word, Counter())[dataset.classes[tag]] += 1
            overall[dataset.classes[tag]] += 1
    # Of equally frequent tags, the first seen in training.
    likeliest = {word: counts.most_common(1)[0][0] for word, counts in by_word.items()}
    default = overall.most_common(1)[0][0]
    examples = read_split(config, dataset, split)
    predicted = [[likeliest.get(word, default) for word in fold(each["text"]).split(" ")] for each in examples]
    true = [[dataset.classes[tag] for tag in each["tags"]] for each in examples]
    right = [a == b for one, other in zip(predicted, true, strict=True) for a, b in zip(one, other, strict=True)]
    scores = {"word_accuracy": float(np.mean(right))}
    return scores | (metrics.entity_scores(predicted, true)._asdict() if metrics.are_span_tags(dataset.classes) else {})


def text_features(config: Config, train: Sequence[Example], weighting: str) -> Any:
    """A fitted function from examples to a sparse matrix `[examples, n-grams]`, of the n-grams in `train`."""
    from scipy import sparse
    from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer

    kind = {"counts": CountVectorizer, "tf-idf": TfidfVectorizer}[weighting]
    options = {"sublinear_tf": True} if weighting == "tf-idf" else {}
    sides = [role for role in ("text", "pair") if role in train[0]]
    fitted = {
        side: kind(ngram_range=(1, 2), token_pattern=r"\S+", lowercase=config.data.tokenizer.lowercase, **options).fit(
            [example[side] for example in train]
        )
        for side in sides
    }
    return lambda examples: sparse.hstack(
        [fitted[side].transform([example[side] for example in examples]) for side in sides]
    ).tocsr()


def value_features(train: Sequence[Example]) -> Any:
    """A fitted function from series `[T, C]` of one length to a matrix `[examples, T * C]`, columns standardised."""
    flat = lambda examples: np.stack([np.ravel(example["values"]) for example in examples])  # noqa: E731
    values = flat(train)
    mean, deviation = values.mean(axis=0), values.std(axis=0)
    deviation[deviation == 0] = 1.0
    return lambda examples: (flat(examples) - mean) / deviation


def logistic_regression(config: Config, dataset: Dataset, split: str) -> dict[str, Any]:
    """Accuracy and macro-F1 on `split` of the logistic regression that is best on the validation split.

    Returns:
      "features", "C" and "validation_accuracy" of the choice, and "accuracy" and "macro_f1" (fractions).
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import f1_score

    train, validation = (read_split(config, dataset, name) for name in ("train", "validation"))
    train_labels, validation_labels = (np.array([each["label"] for each in part]) for part in (train, validation))
    is_text = "text" in train[0]
    best: tuple[float, str, float, Any, Any] | None = None
    for weighting in WEIGHTINGS if is_text else ("values",):
        features = text_features(config, train, weighting) if is_text else value_features(train)
        inputs, held_out = features(train), features(validation)
        for penalty in INVERSE_PENALTIES:
            model = LogisticRegression(C=penalty, max_iter=MAX_ITERATIONS).fit(inputs, train_labels)
            found = float(np.mean(model.predict(held_out) == validation_labels))
            if best is None or found > best[0]:  # of equals the first: the stronger penalty
                best = (found, weighting, penalty, features, model)
    assert best is not None
    accuracy, weighting, penalty, features, model = best
    examples = read_split(config, dataset, split)
    true = np.array([each["label"] for each in examples])
    predicted = model.predict(features(examples))
    return {
        "features": weighting,
        "C": penalty,
        "validation_accuracy": accuracy,
        "accuracy": float(np.mean(predicted == true)),
        "macro_f1": float(f1_score(true, predicted, average="macro")),
    }


def measure(config: Config, split: str) -> dict[str, dict[str, Any]]:
    """The baselines of each data set of a recipe, by the names of its components ("" without a mixture).

    Raises:
      ConfigError: no data set has classes of texts, series or words, and a training split.
    """
    found = {}
    for name, view in components.views(config).items():
        dataset = sources.build(view.data, (), trains=False)
        if "train" not in dataset.splits:
            continue
        roles = set(dataset.splits["train"][0])
        if {"text", "tags"} <= roles:
            found[name] = most_frequent_tags(view, dataset, split)
        elif "label" in roles and roles & {"text", "values"}:
            found[name] = logistic_regression(view, dataset, split)
    if not found:
        raise ConfigError(
            f"config.data: got a recipe of {config.task.name} without classes, expected texts or series with a label, "
            "or tagged words; choose another recipe"
        )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", default="test")
    flags, edits = parser.parse_known_args(argv)
    config, start = overrides.parse(edits), time.process_time()
    for name, values in measure(config, flags.split).items():
        print(f"{flags.split}{f', {name}' if name else ''}")
        for key, value in values.items():
            print(f"  {key:20} {value if isinstance(value, str) or key == 'C' else f'{100 * value:.1f} %'}")
    print(f"{time.process_time() - start:.0f} s of processor time")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

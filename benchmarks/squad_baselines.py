"""What answers questions without learning, on a recipe's data: random spans, and spans beside the question's words.

    python benchmarks/squad_baselines.py --config=configs/squad.py --config.data.dir=DIR [--split=test]

random: as many words as the answer of a training question drawn at random has, from anywhere in the context (seed 0).
beside N: the N words, none of them in the question, with the most of the question's words among the 5 before and the 5
after them (the first of equals); a word weighs log((1 + n) / (1 + n_w)), n_w of the n training contexts have it. Prints
exact match and F1 in percent.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from typing import Any, Callable, Sequence

from jaxformer import metrics
from jaxformer.config import overrides
from jaxformer.data import sources

WORDS = (1, 2, 3, 5, 8)
NEAR = 5


def weights(contexts: set[str]) -> Callable[[str], float]:
    """How much a word says: its inverse document frequency."""
    counts = Counter(word for context in contexts for word in set(map(metrics.normal_answer, context.split())))
    return lambda word: math.log((1 + len(contexts)) / (1 + counts[word]))


def random_span(example: dict[str, Any], count: int, rng: random.Random) -> str:
    words = example["context"].split()
    begin = rng.randrange(max(len(words) - count + 1, 1))
    return " ".join(words[begin : begin + count])


def beside(example: dict[str, Any], count: int, weight: Callable[[str], float]) -> str:
    words = example["context"].split()
    normal = list(map(metrics.normal_answer, words))
    asked = set(map(metrics.normal_answer, example["question"].split())) - {""}
    hits = [weight(word) if word in asked else 0.0 for word in normal]

    def near(begin: int) -> float:
        around = hits[max(begin - NEAR, 0) : begin] + hits[begin + count : begin + count + NEAR]
        return -1.0 if asked.intersection(normal[begin : begin + count]) else sum(around)

    begin = max(range(max(len(words) - count + 1, 1)), key=near)
    return " ".join(words[begin : begin + count])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", default="test")
    flags, recipe = parser.parse_known_args(argv)
    config = overrides.parse(recipe)
    dataset = sources.build(config.data, ("question", "context", "answers"))
    train, split = ([part[i] for i in range(len(part))] for part in (dataset.splits[n] for n in ("train", flags.split)))
    rng, weight = random.Random(0), weights({example["context"] for example in train})
    lengths = [len(example["answers"][0].split()) for example in train if example["answers"]]
    ways = {"random": lambda example: random_span(example, rng.choice(lengths), rng)}
    ways |= {f"beside {count}": lambda example, count=count: beside(example, count, weight) for count in WORDS}
    print(f"{flags.split}: {len(split):,} questions\n{'':10} exact match    F1")
    for name, answer in ways.items():
        scores = metrics.answer_scores([answer(each) for each in split], [each["answers"] for each in split])
        print(f"{name:10} {100 * scores['exact_match']:11.1f} {100 * scores['f1']:5.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

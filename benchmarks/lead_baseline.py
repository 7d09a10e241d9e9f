"""ROUGE of a text's first words, on a recipe's data: what summarises without learning.

    python benchmarks/lead_baseline.py --config=configs/aeslc.py --config.data.dir=DIR [--split=test]

lead N: the first N words of the source.
"""

from __future__ import annotations

import argparse
from typing import Sequence

from jaxformer import metrics
from jaxformer.config import overrides
from jaxformer.data import sources

WORDS = (4, 8, 16, 32)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", default="test")
    flags, recipe = parser.parse_known_args(argv)
    config = overrides.parse(recipe)
    split = sources.build(config.data, ("source", "target")).splits[flags.split]
    examples = [split[i] for i in range(len(split))]
    print(f"{flags.split}: {len(examples):,} texts\n{'':8} ROUGE-1     2     L")
    for count in WORDS:
        leads = [" ".join(example["source"].split()[:count]) for example in examples]
        scores = metrics.rouge(leads, [example["target"] for example in examples])
        print(
            f"lead {count:<3} "
            + " ".join(f"{score.value:{7 if i == 0 else 5}.1f}" for i, score in enumerate(scores.values()))
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""`jaxformer data`: `prepare NAME` makes a stock data set readable, `build` makes token shards of a corpus."""

from __future__ import annotations

import argparse
from argparse import Namespace

from jaxformer.cli.arguments import Command, Flag, one_of, positive
from jaxformer.config import overrides
from jaxformer.errors import ConfigError

KINDS_OF_DUPLICATES = ("none", "exact", "minhash")


def prepare(arguments: Namespace) -> int:
    if arguments.prepare != "prepare":
        raise ConfigError(
            f"data: got {arguments.prepare!a}, expected prepare or build; give jaxformer data prepare NAME, or "
            "jaxformer data build --help"
        )
    from jaxformer.data import prepare

    print(f"prepared in {prepare.prepare(arguments.name, arguments.dir)}")
    return 0


def build(arguments: Namespace) -> int:
    config = overrides.parse(arguments.config)
    from jaxformer.data import build

    options = build.Options(
        filters=tuple(arguments.filter),
        min_length=arguments.min_length,
        max_length=arguments.max_length,
        deduplicate=arguments.deduplicate,
        similarity=arguments.similarity,
        held_out=arguments.held_out,
        sample_mb=arguments.sample_mb,
        shard_mb=arguments.shard_mb,
    )
    index = build.build(config, arguments.target, arguments.workers, options, arguments.beam)
    for split, counts in index["splits"].items():
        print(f"{split}: {counts['documents']:,} documents, {counts['tokens']:,} tokens, {counts['bytes']:,} bytes")
    for name, splits in index["components"].items():
        print(f"  {name}: " + ", ".join(f"{split} {counts['tokens']:,} tokens" for split, counts in splits.items()))
    print(f"built in {arguments.target}")
    return 0


def number(text: str) -> float:
    """Type of a flag whose value is a number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!a}, expected a number") from None


BUILD = Command(
    "build: a corpus to token shards, which training reads by random access",
    build,
    {
        "target": Flag(
            "folder of the shards, or its address in a bucket; a stopped build goes on there",
            directory="create",
            bucket="itself",
        ),
        "workers": Flag("processes, each of which uses one core", default=1, type=positive),
        "beam": Flag(
            "options of Apache Beam, as '--runner=FlinkRunner --flink_master=HOST:8081', whose pipeline makes the "
            "shards; all machines share the folders, or the bucket",
            default="",
        ),
        "filter": Flag("MODULE:FUNCTION from a text to True (keep it) or False; may be repeated", [], repeats=True),
        "min-length": Flag("drop documents of fewer characters", default=0, type=positive),
        "max-length": Flag("drop documents of more characters", default=None, type=positive),
        "deduplicate": Flag(
            f"{', '.join(KINDS_OF_DUPLICATES)}: keep the first of equal or similar documents",
            default="none",
            type=one_of(*KINDS_OF_DUPLICATES),
        ),
        "similarity": Flag("minhash: smallest Jaccard similarity of duplicates", default=0.8, type=number),
        "held-out": Flag(
            "share of the training documents, by their hash, that becomes the split validation",
            default=0.0,
            type=number,
        ),
        "sample-mb": Flag("megabytes of text that a vocabulary is learned from", default=100, type=positive),
        "shard-mb": Flag("megabytes of input in a shard; without it 4 to 256", default=None, type=positive),
    },
    config="recipe",
    details="config.data says where the text is, and how it becomes tokens",
    example="jaxformer data build --config=configs/wikitext2.py --target=corpus --workers=8",
)

COMMAND = Command(
    "prepare NAME: make a tfds data set readable here; build: a corpus to token shards",
    prepare,
    {"dir": Flag("tfds data_dir to prepare into", directory="create")},
    positionals=("prepare", "NAME"),
    details="without TensorFlow from then on; this step needs it (extra [prepare]); jaxformer data build --help",
    example="jaxformer data prepare wmt14_translate/de-en --dir=prepared",
    actions={"build": BUILD},
)

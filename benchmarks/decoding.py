"""Greedy decoding with a cache that grows against one made for the longest output, in one process, by turns.

    python benchmarks/decoding.py [--batch=1,32] [--tokens=200] [--layers=6] [--width=384] [--rounds=5]

A language model of random weights continues prompts of 8 tokens. No token ends a row, so that both do the same work;
that they choose the same tokens is checked. Prints tokens/s, medians over the rounds, and the median of the ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Callable

import jax
import numpy as np
from flax import linen as nn

from jaxformer.config import AttentionConfig, DecodeConfig, EmbedConfig, EncodingConfig, ModelConfig, StackConfig
from jaxformer.decode import engine, growing
from jaxformer.decode.batching import stack
from jaxformer.models import build
from jaxformer.types import Batch

PROMPT, VOCAB = 8, 65


def model(layers: int, width: int):
    """A decoder and random weights for it."""
    part = StackConfig(
        layers=layers, width=width, embed=EmbedConfig(vocab=VOCAB), attention=AttentionConfig(heads=width // 64),
        encoding=EncodingConfig(kind="rope"), unroll=layers,
    )  # fmt: skip
    module, rng = build.build(ModelConfig(decoder=part)), np.random.default_rng(0)
    shapes = nn.meta.unbox(build.shapes(module))
    return module, jax.tree.map(lambda x: (0.05 * rng.standard_normal(x.shape)).astype(x.dtype), shapes)


def decoder(made, prompts: Batch, tokens: int, first: int) -> Callable[[], np.ndarray]:
    """A compiled function that decodes the prompts and returns the tokens, with room for `first` of them at first."""
    module, variables = made
    config, rows = DecodeConfig(max_length=tokens), prompts.target.tokens.shape[0]
    limit, ids = np.full(rows, tokens, np.int32), np.arange(rows, dtype=np.int32)

    def program(variables, prompts: Batch):
        end = engine.Vocabulary(eos=(), pad=0)
        model = engine.bind(module, variables)
        return engine.decode(model, prompts, config, end, limit, ids, jax.random.key(0)).tokens

    kept, growing.FIRST = growing.FIRST, first  # read while the program is traced
    compiled = jax.jit(program).lower(variables, prompts).compile()
    growing.FIRST = kept
    return lambda: np.asarray(compiled(variables, prompts))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", default="1,32")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=5)
    flags = parser.parse_args(argv)
    made, failed = model(flags.layers, flags.width), 0
    print("batch  growing tok/s  whole tok/s  ratio")
    for batch in map(int, flags.batch.split(",")):
        rng = np.random.default_rng(1)
        prompts = stack([{"target": rng.integers(0, VOCAB, PROMPT)} for _ in range(batch)], batch, (0, 0))
        ways = {"growing": growing.FIRST, "whole": flags.tokens}
        runs = {name: decoder(made, prompts, flags.tokens, first) for name, first in ways.items()}
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        outputs = {name: run() for name, run in runs.items()}
        for turn in range(flags.rounds):
            for name in sorted(runs, reverse=turn % 2 == 1):
                begun = time.perf_counter()
                outputs[name] = runs[name]()
                seconds[name].append(time.perf_counter() - begun)
        failed += not np.array_equal(outputs["growing"], outputs["whole"])
        rates = {name: batch * flags.tokens / statistics.median(each) for name, each in seconds.items()}
        ratio = statistics.median(b / a for a, b in zip(seconds["growing"], seconds["whole"], strict=True))
        print(f"{batch:5}  {rates['growing']:13,.0f}  {rates['whole']:11,.0f}  {ratio:5.2f}", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    raise SystemExit(main())

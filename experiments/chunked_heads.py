"""Heads that each read a chunk of the input beside heads that read all of it.

Vaswani et al. 2017 (section 3.2.2) project the whole input for every head. Some explanations cut the input of width D
into H chunks instead, and head h projects its own chunk of D / H channels. The kernels of queries, keys and values are
then block-diagonal: H times fewer parameters and products. The task is to name the tokens at several given distances at
once, in two layers. "chunk" has the same width as "whole"; "chunk, same size" gets the saved parameters back as units
of its feed-forward layers.

    jaxformer experiment chunked_heads --scale=full --workdir=runs/chunked_heads
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Callable, Iterator

import jax
import numpy as np
from flax import linen as nn

from jaxformer import experiment
from jaxformer.config import (
    AttentionConfig,
    EmbedConfig,
    EncodingConfig,
    FeedForwardConfig,
    HeadConfig,
    ModelConfig,
    ScheduleConfig,
)
from jaxformer.experiment import Result, progress, verdict
from jaxformer.nn.attention import Attention
from jaxformer.nn.masks import Mask
from jaxformer.plan.flops import count_flops
from jaxformer.train.in_memory import Trainer, small_config, small_stack, stream
from jaxformer.types import Array, Batch, Slots

CLAIM = (
    "Heads that each read a chunk of the input need fewer parameters, products and time, but learn worse than heads "
    "that read the whole input, even when their feed-forward layers get the saved parameters back."
)
RULE = (
    "Supported if for the most heads a layer of chunks takes fewer FLOPs and, in the median of the seeds, less time, "
    "and the worst seed of whole heads is more than 0.02 in accuracy above the best of chunks of the same size. Not "
    "supported if the FLOPs or the time are no less, or the mean of whole heads is less than 0.01 above that of such "
    "chunks."
)
WHOLE, CHUNK, SAME = "whole", "chunk", "chunk, same size"
TOKENS = 3
DISTANCES = (1, 3, 4, 6)  # a slot is asked for the tokens so far to its left


@dataclass(frozen=True)
class Scale:
    """Size of the trial: `steps` updates of `batch` sequences, of which `length` slots are asked.

    A layer is timed on `timed_rows` sequences of `timed_length` slots and width `timed_width`: the least of `turns`.
    """

    models: tuple[str, ...]
    heads: tuple[int, ...]
    seeds: int
    steps: int
    width: int
    layers: int = 2
    length: int = 12
    batch: int = 32
    tests: int = 256
    turns: int = 30
    timed_rows: int = 8
    timed_length: int = 64
    timed_width: int = 256


SCALES = {
    "smoke": Scale(
        (WHOLE, SAME),
        (2,),
        2,
        steps=5,
        width=16,
        layers=1,
        tests=64,
        turns=2,
        timed_rows=1,
        timed_length=8,
        timed_width=16,
    ),
    "full": Scale((WHOLE, CHUNK, SAME), (2, 4, 8), seeds=3, steps=300, width=32),
}


def draw(rng: np.random.Generator, rows: int, length: int) -> Batch:
    """`rows` random sequences; a slot's label is the number in base `TOKENS` of the tokens at `DISTANCES`.

    The first slots, which have no token so far back, are not asked.
    """
    edge = max(DISTANCES)
    tokens = rng.integers(0, TOKENS, (rows, length + edge)).astype(np.int32)
    labels = sum(np.roll(tokens, distance, axis=1) * TOKENS**i for i, distance in enumerate(DISTANCES))
    weights = np.zeros(tokens.shape, np.float32)
    weights[:, edge:] = 1.0
    return Batch(stream(tokens), None, labels.astype(np.int32), weights)


def attention_of(model: str, heads: int) -> AttentionConfig:
    return AttentionConfig(heads=heads, input="whole" if model == WHOLE else "chunk", kernel="dense")


def trainer_of(model: str, heads: int, scale: Scale) -> Trainer:
    width = scale.width
    # Three kernels save width ** 2 (1 - 1 / heads) weights each; a feed-forward unit has two times the width.
    units = 2 * width + (3 * width * (heads - 1) // (2 * heads) if model == SAME else 0)
    stack = small_stack(
        layers=scale.layers,
        width=width,
        embed=EmbedConfig(vocab=TOKENS, deviation=1.0),
        encoding=EncodingConfig(kind="t5", buckets=20, max_distance=11),
        attention=attention_of(model, heads),
        ffn=FeedForwardConfig(width=units),
    )
    schedule = ScheduleConfig(kind="cosine", peak=5e-3, warmup=scale.steps // 10, floor=0.01)
    model_config = ModelConfig(encoder=stack, head=HeadConfig(kind="slots", classes=TOKENS ** len(DISTANCES)))
    return Trainer(small_config(model_config, "tagging", scale.steps, schedule))


def trial(trainer: Trainer, seed: int, scale: Scale) -> dict[str, float]:
    """Trains from one seed; loss, and the share of slots of unseen sequences at which all tokens are right."""

    def batches(purpose: int, count: int, rows: int) -> Iterator[Batch]:
        rng = np.random.default_rng([purpose, seed])
        return (draw(rng, rows, scale.length) for _ in range(count))

    state = trainer.train(seed, batches(0, scale.steps, scale.batch))
    found = trainer.measure(state, batches(1, scale.tests // 64, 64))
    return {"accuracy": found["accuracy"], "loss": found["loss"], "parameters": trainer.parameters}


def layer_of(model: str, heads: int, scale: Scale) -> tuple[Callable[[Array], Array], float]:
    """A compiled layer of attention with random weights, and the FLOPs that it takes."""
    module = Attention(attention_of(model, heads), EncodingConfig(kind="none"), scale.timed_width)
    ids = np.ones((scale.timed_rows, scale.timed_length), np.int32)
    slots = Slots(np.cumsum(ids, axis=1, dtype=np.int32) - 1, ids)
    x = np.zeros((*ids.shape, scale.timed_width), np.float32)
    mask, rng = Mask(slots, slots, same_slots=True), np.random.default_rng(0)
    shapes = nn.meta.unbox(jax.eval_shape(lambda: module.init(jax.random.key(0), x, mask)))
    variables = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32) / leaf.shape[0] ** 0.5, shapes)
    function = jax.jit(lambda x: module.apply(variables, x, mask)[0])
    return function, count_flops(jax.make_jaxpr(function)(x).jaxpr)


def least_times(layers: list[Callable[[Array], Array]], x: Array, turns: int) -> list[float]:
    """Minimum milliseconds of each layer, called in turns, in another order each time: load affects all alike."""
    least, rng = [float("inf")] * len(layers), np.random.default_rng(0)
    for turn in range(turns + 1):  # the first one compiles
        for number in rng.permutation(len(layers)):
            begun = time.perf_counter()
            jax.block_until_ready(layers[number](x))
            if turn:
                least[number] = min(least[number], 1000 * (time.perf_counter() - begun))
    return least


def run(scale: str) -> Result:
    rows, size = [], SCALES[scale]
    names = [(model, heads) for heads in size.heads for model in (WHOLE, CHUNK)]
    layers = dict(zip(names, (layer_of(*name, size) for name in names), strict=True))
    shape = (size.timed_rows, size.timed_length, size.timed_width)
    times = []
    for seed in range(size.seeds):
        x = jax.device_put(np.random.default_rng(seed).standard_normal(shape, np.float32))
        spent = least_times([function for function, _ in layers.values()], x, size.turns)
        times.append(dict(zip(names, spent, strict=True)))
    for heads in size.heads:
        for model in size.models:
            trainer = trainer_of(model, heads, size)
            layer = (WHOLE if model == WHOLE else CHUNK, heads)
            for seed in range(size.seeds):
                cost = {"flops": layers[layer][1], "milliseconds": times[seed][layer]}
                rows.append({"model": model, "heads": heads, "seed": seed} | trial(trainer, seed, size) | cost)
                progress(f"{heads} heads, {model}, seed {seed}: {rows[-1]['accuracy']:.3f}")
    return judge(rows)


def judge(rows: list[dict]) -> Result:
    """Applies `RULE`."""
    result = Result(("model", "heads"), tuple(rows), "unclear", "")
    heads, models = sorted(result.levels("heads")), result.levels("model")
    most = heads[-1]

    def at(measure: str, model: str, number: int) -> np.ndarray:
        return np.array(result.values(measure, model=model, heads=number))

    flops = float(at("flops", SAME, most)[0] / at("flops", WHOLE, most)[0])
    spent = float(np.median(at("milliseconds", SAME, most) / at("milliseconds", WHOLE, most)))
    whole, same = at("accuracy", WHOLE, most), at("accuracy", SAME, most)
    cheaper = flops < 1 and spent < 1
    words = "; ".join(
        ", ".join(f"{at('accuracy', model, n).mean():.3f} {model}" for model in models) + f" with {n} heads"
        for n in heads
    )
    parameters = ", ".join(f"{int(at('parameters', model, most)[0]):,}" for model in models)
    reason = (
        f"Accuracy, mean of {len(whole)} seeds: {words}. With {most} heads the parameters are {parameters}, and a "
        f"layer of chunks takes {flops:.2f} of the FLOPs and {spent:.2f} of the time of one of whole heads."
    )
    supported = cheaper and whole.min() - same.max() > 0.02
    refuted = not cheaper or whole.mean() - same.mean() < 0.01
    return dataclasses.replace(result, verdict=verdict(bool(supported), bool(refuted)), reason=reason)


def plot(result: Result):
    made, panels = experiment.figure("slots with all tokens right", "time of a layer (ms)")
    for panel, measure in zip(panels, ("accuracy", "milliseconds")):
        experiment.curves(panel, result, "heads", measure, by="model")
        panel.set_xscale("log", base=2)
        panel.set_xticks(result.levels("heads"), map(str, result.levels("heads")))
        panel.set_xlabel("heads, of width / heads channels each")
    experiment.legend(made, panels[0])
    return made

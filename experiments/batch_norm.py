"""Layer norm against batch norm in a transformer, with small batches or varying lengths (Shen et al. 2020).

Batch norm normalises a feature by its statistics over the batch in training, and by running ones in evaluation. Where
the two differ, the model that is evaluated is not the one that was trained. "Mixed" batches hold sequences of all
lengths, "alike" ones hold one length, as batches do that are cut from sorted text. The task is to say, at every slot,
how often its token occurs in the sequence.

    jaxformer experiment batch_norm --scale=full --workdir=runs/batch_norm
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

import jax
import numpy as np

from jaxformer import experiment, losses
from jaxformer.config import EmbedConfig, EncodingConfig, HeadConfig, ModelConfig, NormConfig, ScheduleConfig
from jaxformer.experiment import Result, progress, verdict
from jaxformer.train.in_memory import Trainer, small_config, small_stack
from jaxformer.types import Array, Batch, PyTree, Slots, Stream

CLAIM = (
    "In a transformer batch norm's running statistics make evaluation worse than training, most where batches are "
    "small or of one length each; layer norm knows no such gap and has the lower loss in evaluation."
)
RULE = (
    "The gap is the loss in evaluation less that with the statistics of training batches, of the same model on the "
    "same batches. Supported if in every condition the mean loss in evaluation is lower with layer norm, and batch "
    "norm's gap is above 0.05 for every seed in the smallest batches of one length each, where it is larger in the "
    "mean than in the largest mixed ones. Not supported if there its mean gap is below 0.01, or if in every condition "
    "batch norm has the lower mean loss."
)
TOKENS, COUNTS = 8, 8
LENGTHS = (4, 16)  # minimum and maximum
MIXED, ALIKE = "mixed lengths", "one length"


@dataclass(frozen=True)
class Scale:
    """Size of the trial: `steps` updates, of batches with each of `batches` rows."""

    batches: tuple[int, ...]
    lengths: tuple[str, ...]
    seeds: int
    steps: int
    width: int
    layers: int = 2
    tests: int = 256  # sequences


SCALES = {
    "smoke": Scale((4,), (MIXED, ALIKE), seeds=2, steps=20, width=16, layers=1, tests=16),
    "full": Scale((4, 32), (MIXED, ALIKE), seeds=3, steps=500, width=32),
}


def draw(rng: np.random.Generator, rows: int, lengths: str) -> Batch:
    """`rows` random sequences, each real slot labelled with how often its token occurs, less 1."""
    least, most = LENGTHS
    tokens = rng.integers(0, TOKENS, (rows, most)).astype(np.int32)
    length = rng.integers(least, most + 1, rows if lengths == MIXED else 1)[:, None]
    real = np.broadcast_to(np.arange(most) < length, tokens.shape)
    counts = np.sum((tokens[:, :, None] == tokens[:, None, :]) & real[:, None, :], axis=-1)
    labels = np.clip(counts - 1, 0, COUNTS - 1).astype(np.int32)
    slots = Slots(np.where(real, np.arange(most), 0).astype(np.int32), real.astype(np.int32))
    return Batch(Stream(tokens, slots), None, labels, real.astype(np.float32))


def trainer_of(kind: str, scale: Scale) -> Trainer:
    stack = small_stack(
        layers=scale.layers,
        width=scale.width,
        embed=EmbedConfig(vocab=TOKENS),
        encoding=EncodingConfig(kind="none"),  # a count does not depend on the order
        norm=NormConfig(kind=kind, momentum=0.95),  # the running statistics keep up with so short a training
    )
    schedule = ScheduleConfig(kind="cosine", peak=3e-3, warmup=scale.steps // 10, floor=0.01)
    model_config = ModelConfig(encoder=stack, head=HeadConfig(kind="slots", classes=COUNTS))
    return Trainer(small_config(model_config, "tagging", scale.steps, schedule))


def trials(trainer: Trainer, batch: int, lengths: str, scale: Scale) -> list[dict[str, float]]:
    """Loss on unseen batches per seed, with running statistics and with those of the batches."""

    @jax.jit
    def as_trained(variables: PyTree, batch: Batch) -> tuple[Array, Array]:
        # A dropout key is what makes it training; no rate is above 0. The statistics that change are thrown away.
        key = {"dropout": jax.random.key(0)}
        logits, _ = trainer.module.apply(variables, batch, rngs=key, mutable=["batch_stats"])
        return losses.cross_entropy(logits, batch.labels, batch.weights)

    found = []
    for seed in range(scale.seeds):
        rng = np.random.default_rng([0, batch, seed])
        state = trainer.train(seed, (draw(rng, batch, lengths) for _ in range(scale.steps)))
        rng = np.random.default_rng([1, batch, seed])
        tests = [draw(rng, batch, lengths) for _ in range(scale.tests // batch)]
        loss = trainer.measure(state, tests)["loss"]
        variables = {"params": state.params, **state.variables}
        total, weight = np.sum([jax.device_get(as_trained(variables, each)) for each in tests], axis=0)
        found.append({"loss": loss, "gap": float(loss - total / weight)})
    return found


def run(scale: str) -> Result:
    rows, size = [], SCALES[scale]
    for kind in ("layer", "batch"):
        trainer = trainer_of(kind, size)
        for batch, lengths in itertools.product(size.batches, size.lengths):
            for seed, found in enumerate(trials(trainer, batch, lengths, size)):
                rows.append({"norm": f"{kind} norm", "batch": batch, "lengths": lengths, "seed": seed} | found)
                progress(f"{kind}, {batch} rows, {lengths}, seed {seed}: {found['loss']:.3f}, gap {found['gap']:+.3f}")
    return judge(rows)


def judge(rows: list[dict]) -> Result:
    """Applies `RULE`."""
    result = Result(("norm", "batch", "lengths"), tuple(rows), "unclear", "")
    sizes = result.levels("batch")

    def mean(measure: str, kind: str, batch: int, lengths: str) -> float:
        return float(np.mean(result.values(measure, norm=f"{kind} norm", batch=batch, lengths=lengths)))

    each = list(itertools.product(sizes, result.levels("lengths")))
    worse = [mean("loss", "batch", *where) - mean("loss", "layer", *where) for where in each]
    hardest = result.values("gap", norm="batch norm", batch=min(sizes), lengths=ALIKE)
    easiest = mean("gap", "batch", max(sizes), MIXED)
    largest = max(mean("gap", "batch", *where) for where in each)
    supported = min(worse) > 0 and min(hardest) > 0.05 and np.mean(hardest) > easiest
    refuted = np.mean(hardest) < 0.01 or max(worse) < 0
    reason = (
        f"Batch norm's loss in evaluation less that with the batch's own statistics is {np.mean(hardest):+.3f} nats in "
        f"batches of {min(sizes)} sequences of one length, {easiest:+.3f} in mixed ones of {max(sizes)}, and at most "
        f"{largest:+.3f}; in evaluation it is {min(worse):+.3f} to {max(worse):+.3f} from layer norm's (mean of "
        f"{len(hardest)} seeds)."
    )
    return dataclasses.replace(result, verdict=verdict(bool(supported), bool(refuted)), reason=reason)


def plot(result: Result):
    made, panels = experiment.figure("loss in evaluation", "less that with the batch's own statistics")
    names = list(itertools.product(result.levels("batch"), result.levels("lengths")))
    for panel, measure in zip(panels, ("loss", "gap")):
        for offset, norm, colour in zip((-0.1, 0.1), result.levels("norm"), experiment.COLOURS):
            for at, (batch, lengths) in enumerate(names):
                values = result.values(measure, norm=norm, batch=batch, lengths=lengths)
                label = norm if at == 0 else None
                panel.plot([at + offset] * len(values), values, "o", color=colour, ms=5, alpha=0.6, label=label)
        panel.set_xticks(range(len(names)), [f"{batch} rows,\n{lengths}" for batch, lengths in names], fontsize=8)
        panel.set_xlabel("batch")
        panel.set_ylabel("nats a slot")
        panel.axhline(0.0, color="0.5", lw=0.8, ls="--")
    experiment.legend(made, panels[0])
    return made

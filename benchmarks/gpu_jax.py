"""The jaxformer side of `gpu.py`: one part of the table in one process, which then gives its memory back.

python benchmarks/gpu_jax.py '{"kind": "train", "arguments": ["--config=configs/gpt2_124m.py"], "toy": false}'
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import gpu_attention  # noqa: E402
import gpu_shared as shared  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402

from jaxformer.config import Config, DecodeConfig, overrides  # noqa: E402
from jaxformer.decode.compiled import Vocabulary  # noqa: E402
from jaxformer.decode.runner import Runner  # noqa: E402
from jaxformer.models import build  # noqa: E402
from jaxformer.parallel import mesh as meshes  # noqa: E402
from jaxformer.plan import chips, flops, program  # noqa: E402
from jaxformer.train import optim, workdir  # noqa: E402
from jaxformer.train import step as steps  # noqa: E402
from jaxformer.types import Batch, Slots, Stream, TrainState  # noqa: E402

Row = dict[str, Any]

CURVE = 2e-2
"""Largest relative difference of a loss in bfloat16 from the float32 run's of the same step."""


# --- training ---------------------------------------------------------------------------------------------------------


class Training:
    """The real step of a config on one device: compiled, with a fresh state and batches that lie ready on the host."""

    def __init__(self, config: Config, batches: int) -> None:
        self.mesh = meshes.make(config.mesh, jax.devices()[:1])
        with jax.set_mesh(self.mesh):
            begun = time.perf_counter()
            self.traced = program.trace(config, self.mesh)
            self.step = self.traced.trace.lower().compile()
            self.compile_seconds = time.perf_counter() - begun
            self.state = self.fresh()
        self.batches = [batch(self.traced, seed) for seed in range(batches)]
        self.turn: Iterator[Batch] = itertools.cycle(self.batches)
        self.sums: list[Any] = []

    @property
    def config(self) -> Config:
        return self.traced.config

    def fresh(self) -> TrainState:
        config = self.traced.config
        schedule = optim.schedule(config.schedule, config.train.steps, build.model_width(config.model))
        optimizer = optim.optimizer(config.optimizer, schedule, self.traced.state.params, self.traced.names)
        return steps.init_state(config, build.build(config.model), optimizer, self.mesh)

    def run(self, count: int) -> float:
        """Seconds of so many steps, begun and ended with an idle device. Batches are sent to it as a run sends them."""
        with jax.set_mesh(self.mesh):
            jax.block_until_ready(self.state)
            begun = time.perf_counter()
            for _ in range(count):
                self.state, sums = self.step(self.state, steps.shard_batch(next(self.turn), self.mesh))
                self.sums.append(sums)
            jax.block_until_ready((self.state, sums))
            return time.perf_counter() - begun

    def losses(self) -> list[float]:
        """Of all steps so far; a step that was left out, as its loss or gradient was not finite, has NaN."""
        found = jax.device_get(self.sums)
        return [float("nan") if x["skipped"][0] else float(x["loss"][0] / x["loss"][1]) for x in found]


def batch(traced: program.Program, seed: int) -> Batch:
    """Full rows of the trace's shape, without padding."""
    rows, length = traced.shape
    vocab = traced.config.task.vocab

    def stream(ids: np.ndarray) -> Stream:
        position = np.broadcast_to(np.arange(length, dtype=np.int32), ids.shape)
        return Stream(np.ascontiguousarray(ids), Slots(np.array(position), np.ones_like(position)))

    text = shared.tokens(rows, length + 1, vocab, seed)
    source = None if traced.batch.source is None else stream(shared.tokens(rows, length, vocab, seed + 1000))
    weights = np.ones((rows, length), np.float32)
    return Batch(source, stream(text[:, :-1]), np.ascontiguousarray(text[:, 1:]), weights)


def train(arguments: list[str], toy: bool) -> Iterator[Row]:
    """One row: speed, memory and MFU of a config's training step, if its loss is finite and falls."""
    timing = shared.TOY if toy else shared.FULL
    training = Training(overrides.parse(arguments), timing.batches)
    training.run(timing.batches)  # warm-up
    seconds = [training.run(timing.steps) for _ in range(timing.windows)]
    losses, config, traced = training.losses(), training.config, training.traced
    rows, length = traced.shape
    row: Row = {
        "shape": shape(config) | {"rows": rows, "length": length},
        "parameters": build.count_params(traced.state.params),
        "dtype": config.model.dtype,
        "chunk": config.model.head.chunk,
        "kernels": kernels_of(training),
        "losses": losses,
        "compile_seconds": training.compile_seconds,
        "memory_bytes": peak_memory(),
    }
    problem = shared.wrong(losses, timing.batches)
    if problem:
        yield row | {"failed": problem}
        return
    row |= shared.figures(seconds, timing.steps, rows * length)
    of = (config, traced.state.params, traced.names, length)
    row |= {"flops_token": flops.flops_per_token(*of), "flops_token_visible": flops.flops_per_token_visible(*of)}
    row["peak_flops"] = peak_flops()
    yield row | {"mfu": utilisation(row, row["tokens_per_second"])}


def utilisation(row: Row, speed: float) -> float | None:
    """Model FLOPs a second over the chip's peak; None where the peak is not known."""
    return speed * row["flops_token"] / row["peak_flops"] if row["peak_flops"] else None


def shape(config: Config) -> Row:
    """What a peer needs to build and train the same model."""
    stack, optimizer = config.model.decoder, config.optimizer
    return {
        "layers": stack.layers,
        "width": stack.width,
        "heads": stack.attention.heads,
        "head_width": stack.attention.head_width or stack.width // stack.attention.heads,
        "ffn_width": stack.ffn.width or 4 * stack.width,
        "vocab": stack.embed.vocab,
        "real_vocab": config.task.vocab,
        "rate": config.schedule.peak,
        "betas": [optimizer.beta1, optimizer.beta2],
        "decay": optimizer.weight_decay,
        "clip": optimizer.clip,
        "dropout": stack.dropout,
    }


def kernels_of(training: Training) -> dict[str, str]:
    with jax.set_mesh(training.mesh):
        found = build.chosen_kernels(training.config.model, training.traced.shape.length)
    return {side: name for side, (name, _) in found.items()}


def peak_memory() -> int | None:
    """The most bytes that this process has held on its device; the CPU does not say."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def peak_flops() -> float | None:
    """The device's, from `plan/chips.py`, which names the source."""
    kind = jax.devices()[0].device_kind.lower()
    return next((chip.flops for name, chip in chips.CHIPS.items() if name in kind), None)


# --- correctness ------------------------------------------------------------------------------------------------------


def correct(arguments: list[str], toy: bool) -> Iterator[Row]:
    """Rows of the loss curves, and of the kernel: on a CPU why there is none, and the blockwise one in its place."""
    length = 16 if toy else 256
    lacks, kernel = gpu_attention.lacking(length), "cudnn"
    if lacks:
        kernel = "blockwise"
        yield {"check": "cudnn", "skipped": f"not available: needs {lacks}"}
    yield {"check": "bfloat16 losses"} | shared.guarded(functools.partial(curves, arguments, 6 if toy else 30))
    for name in ("packed",) if toy else gpu_attention.CASES:
        check = functools.partial(gpu_attention.compare, kernel, name, length)
        yield {"check": f"{kernel} {name}"} | shared.guarded(check)


def curves(arguments: list[str], count: int) -> Row:
    """Losses of the same steps in bfloat16 and in float32 without TF32."""
    found = {}
    for dtype in ("bfloat16", "float32"):
        config = overrides.parse([*arguments, f"--config.model.dtype={dtype}"])
        with jax.default_matmul_precision("highest" if dtype == "float32" else None):
            training = Training(config, 2)
            training.run(count)
        found[dtype] = training.losses()
    low, high = map(np.array, found.values())
    difference = float(np.max(np.abs(low / high - 1)))
    row = {"difference": difference, "losses": found, "kernels": kernels_of(training)}
    problem = next(filter(None, (shared.wrong(losses, 2) for losses in found.values())), None)
    if problem is None and not difference <= CURVE:
        problem = f"losses differ by {difference:.1e} of float32's, more than {CURVE:g}"
    return row | ({"failed": problem} if problem else {})


# --- decoding ---------------------------------------------------------------------------------------------------------


def decode(arguments: list[str], toy: bool) -> Iterator[Row]:
    """Greedy continuation of prompts of one length, all to the same length: a row for each number of prompts."""
    config = program.resolve(overrides.parse(arguments))
    prompt, new, repeats = (4, 4, 2) if toy else (16, 256, 5)
    mesh = meshes.make(config.mesh, jax.devices()[:1])
    vocabulary = Vocabulary(eos=(), pad=0, size=config.task.vocab)
    with jax.set_mesh(mesh):
        module = build.build(config.model)
        variables = build.create(module, jax.random.key(0), mesh)
        runner = Runner(module, variables, vocabulary, max_target_length=config.data.length)
        for rows in (2,) if toy else (1, 32, 256):
            prompts = [{"target": ids} for ids in shared.tokens(rows, prompt, config.task.vocab, 0)]
            run = functools.partial(runner.generate, prompts, DecodeConfig(max_length=new, batch=rows))
            row = {"rows": rows, "prompt": prompt, "length": prompt + new, "dtype": config.model.dtype}
            yield row | shared.guarded(functools.partial(decoded, run, rows * new, repeats))


def decoded(run: Callable[[], list], total: int, repeats: int) -> Row:
    """Figures of `run`, which must give `total` tokens; what the first call takes beyond the others is compilation."""
    seconds = []
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        found = run()  # returns arrays of the host: the device is done
        seconds.append(time.perf_counter() - begun)
    if sum(len(best[0].tokens) for best in found) != total:
        return {"failed": "outputs of another length"}
    if not np.isfinite([best[0].score for best in found]).all():
        return {"failed": "scores were not finite"}
    timed = shared.figures(seconds[1:], 1, total)
    return {
        **timed,
        "compile_seconds": seconds[0] - timed["step_ms"] / 1e3,
        "memory_bytes": peak_memory(),
    }


# --- the process ------------------------------------------------------------------------------------------------------

KINDS = {"correct": correct, "train": train, "decode": decode, "attention": gpu_attention.speeds}


def rows(task: Row) -> Iterator[Row]:
    """The rows of a part, each with what its figures depend on; one that fails is a row that says so."""
    about = environment()
    try:
        for row in KINDS[task["kind"]](task["arguments"], task["toy"]):
            yield row | about
    except Exception as error:  # out of memory, say: the next part goes on
        yield shared.failure(error) | about


def environment() -> Row:
    device, about = jax.devices()[0], workdir.environment()
    here = {"device": device.device_kind, "driver": device.client.platform_version}
    here |= {name: about[name] for name in ("python", "versions", "commit")}
    return here | {"xla_flags": os.environ.get("XLA_FLAGS", "")}


def main() -> None:
    for row in rows(json.loads(sys.argv[1])):
        shared.say(row)


if __name__ == "__main__":
    main()

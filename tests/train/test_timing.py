"""The time left, by a clock of the test: compilation left out, evaluations and saves as often as they come."""

from __future__ import annotations

import io
from pathlib import Path

import builders
import jax
import jax.numpy as jnp
import pytest

from jaxformer.config import TrainConfig
from jaxformer.train.preemption import Watchdog
from jaxformer.train.reporting import ProgressLine
from jaxformer.train.run import Run
from jaxformer.train.timing import MIN_TIMED_STEPS, Clock, CompiledShapes, _remaining_count, is_due


class Time:
    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def passing():
    """A clock of 100 steps with an evaluation every 10 and a save every 25, and what moves it."""
    time = Time()
    clock = Clock(TrainConfig(steps=100, evaluate_every=10, checkpoint_every=25), time, lambda: 0)

    def go(seconds, then, *arguments):
        time.seconds += seconds
        then(*arguments)

    return clock, go


def test_compilation_is_not_in_the_time_left(passing):
    clock, go = passing
    go(60.0, clock.record_step, True)
    go(17.0, clock.record_step, False)  # it waited for the one before
    for step in range(3, 3 + MIN_TIMED_STEPS):
        assert clock.remaining(step) != clock.remaining(step), "too little is known"
        go(0.5, clock.record_step, False)
    assert clock.remaining(7) == 93 * 0.5
    go(45.0, clock.record_step, True)  # the next bucket
    go(9.0, clock.record_step, False)
    assert clock.remaining(9) == 91 * 0.5
    for _ in range(MIN_TIMED_STEPS):
        go(1.5, clock.record_step, False)
    assert clock.remaining(14) == 86 * 1.0
    assert clock.remaining(100) == 0


def test_a_compilation_that_no_new_shape_announces_is_left_out_too(passing):
    """As of the second step, whose state has other shardings than the first one's."""
    clock, go = passing
    compiled = 0
    clock.compiled = lambda: compiled
    for _ in range(MIN_TIMED_STEPS):
        go(1.0, clock.record_step, False)
    compiled += 1
    go(170.0, clock.record_step, False)
    go(3.0, clock.record_step, False)
    assert clock.remaining(10) == 90.0
    compiled += 1
    go(30.0, clock.record_part, "evaluation", 30.0)  # compiled there: the next step is as any other
    go(3.0, clock.record_step, False)
    assert clock.remaining(11) == pytest.approx(89 * 8 / 6)


def test_programs_that_jax_compiles_are_counted():
    clock = Clock(TrainConfig())
    before = clock.compiled()
    jax.jit(lambda x: x + 17)(jnp.ones(3))
    count = clock.compiled()
    assert count > before
    jax.block_until_ready(jnp.ones(3))
    assert clock.compiled() == count


def test_evaluations_and_saves_count_as_often_as_they_are_still_to_come(passing):
    clock, go = passing
    for _ in range(10):
        go(1.0, clock.record_step, False)
    assert clock.remaining(10) == 90
    go(0.25, clock.lap)  # reports and the like are in nothing
    go(30.0, clock.record_part, "evaluation", 24.0)
    assert clock.remaining(10) == 90 + 9 * 6.0
    for _ in range(15):
        go(1.0, clock.record_step, False)
    go(2.0, clock.record_part, "save")
    assert clock.remaining(25) == 75 + 8 * 6.0 + 3 * 2.0
    assert clock.remaining(100) == 0


@pytest.mark.parametrize("every", [0, 1, 3, 10, 12, 50])
@pytest.mark.parametrize("step", [0, 1, 3, 9, 10, 11, 12])
def test_how_often_something_happens_is_what_the_loop_does(step, every):
    happened = sum(each == 12 or is_due(each, every) for each in range(step + 1, 13))
    assert _remaining_count(step, 12, every) == happened


def test_the_line_says_what_the_clock_says(passing):
    clock, go = passing
    stream = io.StringIO()
    values = {"loss": 1.0, "learning_rate": 1e-3, "gradient_norm": 1.0, "tokens_per_second": 5.0, "padding": 0.0}
    progress = ProgressLine(clock, stream)
    go(300.0, clock.record_step, True)
    progress.write(1, "train", values)
    for _ in range(MIN_TIMED_STEPS + 1):
        go(2.0, clock.record_step, False)
    progress.write(2, "train", values)
    first, second = stream.getvalue().splitlines()
    assert first.startswith("step 1/100 ") and first.endswith("left ?")
    assert second.endswith("left 3 min 16 s")


def test_what_is_compiled_is_said_once_a_shape():
    said = []
    shapes = CompiledShapes("step", said.append)
    both, one = builders.batch(builders.seq2seq(), [3, 5]), builders.batch(builders.decoder(), [3, 5, 4])
    assert [shapes.is_new(each) for each in (both, both, one, both)] == [True, False, True, False]
    sides = [" x ".join(map(str, each.tokens.shape)) for each in (both.source, both.target, one.target)]
    assert said == [f"compiling step for batch {sides[0]} -> {sides[1]}", f"compiling step for batch {sides[2]}"]


def test_an_evaluation_leaves_out_what_its_first_batches_compiled():
    """Of three shapes of 10, 8 and 1 seconds more than the usual one, in an evaluation of 5 batches."""
    time = Time()
    run = Run.__new__(Run)
    run.clock, said = Clock(TrainConfig(), time), []
    run.eval_shapes = CompiledShapes("evaluation", said.append)
    run.watchdog = Watchdog(None, Path())
    batches = [builders.batch(builders.decoder(), [3] * rows) for rows in (1, 2, 1, 2, 3)]
    for _, seconds in zip(run.timed_batches(batches), (12.0, 10.0, 2.0, 2.0, 3.0), strict=True):
        time.seconds += seconds
    assert run.compile_seconds == 19.0
    assert len(said) == 3
    for _ in run.timed_batches(batches):
        time.seconds += 2.0
    assert run.compile_seconds == 0.0
    run.eval_shapes = CompiledShapes("evaluation", said.append)
    for _ in run.timed_batches(batches[:1]):  # nothing to compare it with
        time.seconds += 2.0
    assert run.compile_seconds == 2.0

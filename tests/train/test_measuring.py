"""What may change about measuring when a run goes on, and what is refused because the best are chosen by it."""

from __future__ import annotations

import dataclasses

import pytest

from jaxformer.config import CheckpointConfig, Config, ConfigError, DecodeConfig, EvaluateConfig, TaskConfig
from jaxformer.train import metric_settings


def config(metric="loss", task="translation", keep_best=1, evaluate=None, decode=None, **fields):
    return Config(
        task=TaskConfig(name=task, **fields),
        checkpoint=CheckpointConfig(metric=metric, keep_best=keep_best),
        evaluate=EvaluateConfig(**({"decode_examples": 10} | (evaluate or {}))),
        decode=DecodeConfig(**(decode or {})),
    )


REFUSED = [
    ({}, {"evaluate": {"examples": 5}}, "config.evaluate.examples: 5, was None"),
    ({"metric": "bleu"}, {"evaluate": {"decode_examples": 20}}, "config.evaluate.decode_examples: 20, was 10"),
    ({"metric": "bleu"}, {"decode": {"beams": 9}}, "config.decode.beams: 9, was 4"),
    ({"metric": "bleu"}, {"decode": {"seed": 1}}, "config.decode.seed: 1, was 0"),
    (
        {"task": "similarity", "objective": "contrastive"},
        {"evaluate": {"batch": 8}},
        "config.evaluate.batch: 8, was 64",
    ),
]


@pytest.mark.parametrize(("base", "edit", "what"), REFUSED)
def test_what_decides_the_best_may_not_change(base, edit, what, tmp_path):
    with pytest.raises(ConfigError, match="expected those that its best checkpoints were chosen by") as error:
        metric_settings.check_unchanged(config(**base, **edit), config(**base), tmp_path)
    assert what in str(error.value) and "\n" not in str(error.value)
    free = {**base, "keep_best": 0}
    assert metric_settings.check_unchanged(config(**free, **edit), config(**free), tmp_path) != []
    (tmp_path / "checkpoints" / "best" / "10").mkdir(parents=True)
    with pytest.raises(ConfigError, match="use another --workdir"):
        metric_settings.check_unchanged(config(**free, **edit), config(**free), tmp_path)


@pytest.mark.parametrize(
    ("base", "edit", "said"),
    [
        ({}, {"decode": {"beams": 9}}, ["config.decode.beams: 9, was 4"]),
        ({"metric": "bleu"}, {"evaluate": {"examples": 5}}, ["config.evaluate.examples: 5, was None"]),
        ({}, {"evaluate": {"batch": 8}}, []),
        ({}, {"evaluate": {"samples": 1, "headline": "chrf"}, "decode": {"batch": 3}}, []),
        ({}, {}, []),
    ],
)
def test_other_changes_are_said_and_decide_nothing(base, edit, said, tmp_path):
    lines = metric_settings.check_unchanged(config(**base, **edit), config(**base), tmp_path)
    assert [line.partition("from here on, ")[2] for line in lines] == said


def test_a_score_of_decoded_text_needs_decoded_text():
    metric_settings.check_metric_is_measured(config("bleu"))
    none = dataclasses.replace(config("bleu"), evaluate=EvaluateConfig())
    with pytest.raises(
        ConfigError, match="got 'bleu', a measure of decoded text, and config.evaluate.decode_examples 0"
    ):
        metric_settings.check_metric_is_measured(none)
    metric_settings.check_metric_is_measured(
        dataclasses.replace(none, checkpoint=CheckpointConfig(metric="bleu", keep_best=0))
    )
    metric_settings.check_metric_is_measured(dataclasses.replace(none, checkpoint=CheckpointConfig()))

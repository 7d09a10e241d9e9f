"""Measures by source length: sums of bins against rows taken one at a time, and scores of decoded text."""

import dataclasses

import builders
import numpy as np
import pytest

from jaxformer.config import Config, ConfigError, EvaluateConfig, TaskConfig
from jaxformer.train import by_length, step
from jaxformer.types import Batch

BINS = by_length.LengthBins((2, 4))


def test_bins_are_closed_above_and_named():
    assert BINS.labels() == ["1-2", "3-4", "5-"]
    assert BINS.index([1, 2, 3, 4, 5, 99]).tolist() == [0, 0, 1, 1, 2, 2]
    config = Config(model=builders.classifier(), task=TaskConfig(name="classification"))
    lengths = np.array([0, 3, 3, 3, 5, 6, 7, 9, 11])  # 0: a row that fills the batch
    assert by_length.choose_bins(config, lengths).upper == (3, 5, 7)
    assert by_length.choose_bins(config, np.array([4, 4, 4])).upper == ()
    chosen = dataclasses.replace(config, evaluate=EvaluateConfig(length_bins=(8,)))
    assert by_length.choose_bins(chosen, lengths).upper == (8,)


def test_sums_of_a_bin_are_those_of_its_rows_alone():
    model = builders.classifier(layers=1)
    config = Config(model=model, task=TaskConfig(name="classification"))
    module, variables = builders.make(model)
    batch = builders.batch(model, [5, 2, 4, 1, 3, 6])
    lengths = by_length.row_lengths(config, batch)
    evaluation = by_length.BinnedEvaluation(step.make_binned_eval_step(config, module, BINS.upper), BINS)
    whole = evaluation(variables, batch)
    evaluation(variables, batch)  # a second batch
    rows = evaluation.rows()
    assert [row["tokens"] for row in rows] == BINS.labels()
    logits = np.asarray(builders.apply(module)(variables, batch))
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(6), batch.labels]
    right = logits.argmax(axis=1) == batch.labels
    for number, row in enumerate(rows):
        inside = np.flatnonzero(BINS.index(lengths) == number)
        expected = {"examples": 2 * len(inside), "loss": losses[inside].mean(), "accuracy": right[inside].mean()}
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(whole["loss"], [losses.sum(), 6], rtol=1e-5)


def test_scores_are_those_of_the_texts_of_a_bin():
    config = Config(model=builders.seq2seq(), task=TaskConfig(name="translation"))
    texts = ["a b c d e", "b c d e f", "c d e f g", "d e f g h"]
    examples = [{"source": text, "target": text} for text in texts]
    results = [texts[0], "x y z", texts[2], "x y z"]
    counts = dict(zip(BINS.labels(), (2, 2, 1), strict=True))
    rows = [{"tokens": label, "examples": count, "loss": 1.0} for label, count in counts.items()]
    found = by_length.add_scores(config, rows, BINS, [1, 3, 2, 4], results, examples)
    assert [row.get("exact_match") for row in found[:2]] == [1.0, 0.0]
    assert found[0]["bleu"] == pytest.approx(100.0) and found[1]["bleu"] < 1.0
    assert found[2] == {**rows[2], "decoded_examples": 0}
    table = by_length.format_table(found).splitlines()
    assert table[0].split()[:3] == ["tokens", "examples", "loss"] and table[3].split()[3:5] == ["-", "-"]


@pytest.mark.parametrize(
    ("task", "model"), [("language_modelling", builders.decoder()), ("masked_lm", builders.encoder())]
)
def test_rows_without_a_length_have_no_bins(task, model):
    config = Config(model=model, task=TaskConfig(name=task), evaluate=EvaluateConfig(length_bins=(3,)))
    assert not by_length.applies(config)
    with pytest.raises(ConfigError, match=r"evaluate.length_bins: got \(3,\) for the task .*not single inputs"):
        by_length.choose_bins(config, np.array([3, 4]))
    assert by_length.choose_bins(dataclasses.replace(config, evaluate=EvaluateConfig()), np.zeros(0)).upper == ()


def test_empty_batches_are_refused():
    with pytest.raises(ValueError, match="got no input"):
        by_length.row_lengths(Config(model=builders.classifier()), Batch(None, None))

"""Runs of several seeds: their folders, resuming, exit codes, and the mean of their measures."""

import json
import statistics

import pytest
from test_loop import recipe

from jaxformer.config import ConfigError, overrides
from jaxformer.report import runs, sections
from jaxformer.train import results, seeds


class Trainer:
    """Stands for `loop.train`: writes what a run leaves, or ends with what `fate` says of its seed."""

    def __init__(self, **fate):
        self.fate, self.seeds = fate, []

    def __call__(self, config, workdir):
        seed = config.train.seed
        self.seeds.append(seed)
        workdir.mkdir(parents=True, exist_ok=True)
        (workdir / "config.json").write_text(overrides.to_json(config))
        fate = self.fate.get(f"seed{seed}", 0)
        if isinstance(fate, str):
            raise ConfigError(fate)
        if fate == 0:
            record = results.to_record(config.train.steps, config, {"loss": 1.0 + seed**2, "accuracy": 0.5})
            (workdir / "result.json").write_text(json.dumps(record))
        return fate


def test_every_seed_has_a_folder_and_the_means_are_written(tmp_path):
    start = Trainer()
    assert seeds.train(recipe(train__seed=1), tmp_path / "all", 3, start) == 0
    assert start.seeds == [1, 2, 3]
    summary = json.loads((tmp_path / "all" / "seeds.json").read_text())
    assert summary["seeds"] == [1, 2, 3] and list(summary["runs"]) == ["seed-1", "seed-2", "seed-3"]
    losses = [2.0, 5.0, 10.0]
    assert summary["mean"] == {"loss": statistics.fmean(losses), "accuracy": 0.5}
    assert summary["deviation"]["loss"] == pytest.approx(statistics.stdev(losses))
    assert [path.name for path in seeds.members(tmp_path / "all")] == ["seed-1", "seed-2", "seed-3"]
    table = seeds.format_table(summary).splitlines()
    assert table[0].split() == ["measure", "mean", "deviation", "seed-1", "seed-2", "seed-3"]
    assert table[1].split() == ["loss", "5.66667", "4.04145", "2", "5", "10"]


def test_a_stopped_seed_ends_the_command_and_the_next_one_goes_on_there(tmp_path):
    start = Trainer(seed1=143)
    assert seeds.train(recipe(), tmp_path, 3, start) == 143
    assert start.seeds == [0, 1]
    assert json.loads((tmp_path / "seeds.json").read_text())["mean"] == {"loss": 1.0, "accuracy": 0.5}
    again = Trainer()
    assert seeds.train(recipe(), tmp_path, 3, again) == 0
    assert again.seeds == [1, 2]
    more = Trainer()
    assert seeds.train(recipe(), tmp_path, 1, more) == 0 and not more.seeds  # fewer: the others are kept
    assert json.loads((tmp_path / "seeds.json").read_text())["seeds"] == [0, 1, 2]


def test_a_seed_that_diverges_does_not_keep_the_others_from_training(tmp_path, caplog):
    start = Trainer(seed0="train: got 10 steps in a row")
    assert seeds.train(recipe(), tmp_path, 2, start) == 2
    assert start.seeds == [0, 1] and "seed 0: train: got 10 steps in a row" in caplog.text
    summary = json.loads((tmp_path / "seeds.json").read_text())
    assert list(summary["runs"]) == ["seed-1"] and summary["deviation"]["loss"] is None


def test_wrong_folders_and_seeds_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="expected seeds up to 4294967295"):
        seeds.train(recipe(train__seed=2**32 - 1), tmp_path, 2, Trainer())
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds a run without --seeds, expected another folder"):
        seeds.train(recipe(), tmp_path, 2, Trainer())
    (tmp_path / "seeds.json").write_text('{"seeds": ["x"]}')
    with pytest.raises(ConfigError, match="expected a list of numbers"):
        seeds.members(tmp_path)


def test_a_measure_that_one_run_lacks_has_no_mean():
    summary = seeds.summarise({"a": {"loss": 1.0, "f1": None, "step": 3}, "b": {"loss": float("nan"), "f1": 0.5}})
    assert summary["mean"] == {"loss": None, "f1": None}


def test_the_report_has_the_means_of_runs_that_differ_in_the_seed_alone(tmp_path):
    seeds.train(recipe(), tmp_path / "all", 2, Trainer())
    Trainer()(recipe(train__steps=20), tmp_path / "other")
    read = runs.read([*seeds.expand([tmp_path / "all"]), tmp_path / "other"])
    blocks = sections.seed_means(read)
    rows = [row for block in blocks if hasattr(block, "rows") for row in block.rows]
    text = str(rows)
    assert len(rows) == 2 and "1.5 ± 0.71" in text and "accuracy" in text
    assert "other" not in str(blocks)

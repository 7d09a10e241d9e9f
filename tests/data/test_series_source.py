"""Windows of series: which rows they hold, how the training part scales them, and what is wrong with a file."""

import gzip

import numpy as np
import pytest

from jaxformer.config import ConfigError, DataConfig
from jaxformer.data import packing, series
from jaxformer.data.sources import Channels, Dataset, build, check_channels

ROWS = np.random.default_rng(0).normal(size=(30, 2)).round(3)


def text(rows=ROWS, header="date,load,oil"):
    return "\n".join([header, *(f"2016-07-{i + 1:02d},{a},{b}" for i, (a, b) in enumerate(rows))]) + "\n"


@pytest.fixture
def config(tmp_path):
    def config(content=None, **edits):
        splits = {"train": ("x.csv[:20]",), "validation": ("x.csv[20:26]",), "test": ("x.csv[26:]",)}
        if content is not None:
            (tmp_path / "x.csv").write_text(content)
        fields = {"length": 5, "horizon": 2, "splits": splits, "columns": {"date": "date"}, **edits}
        return DataConfig(source="series", dir=str(tmp_path), cache=str(tmp_path / "cache"), **fields)

    return config


def test_a_split_forecasts_its_own_rows_and_looks_back_before_them(config):
    data = build(config(text()), ("values", "future"))
    first_rows = {"train": (5, 20), "validation": (20, 26), "test": (26, 30)}
    for split, (first, stop) in first_rows.items():
        windows = data.splits[split]
        assert len(windows) == stop - 2 - first + 1
        for i in range(len(windows)):
            np.testing.assert_array_equal(windows[i]["values"], ROWS[first + i - 5 : first + i])
            np.testing.assert_array_equal(windows[i]["future"], ROWS[first + i : first + i + 2])
        with pytest.raises(IndexError):
            windows[len(windows)]
    assert data.channels.names == ("load", "oil")
    np.testing.assert_allclose(data.channels.means, ROWS[:20].mean(axis=0))
    np.testing.assert_allclose(data.channels.deviations, ROWS[:20].std(axis=0))


def test_the_published_borders_have_the_published_numbers_of_windows(config):
    rows = "\n".join(["a", *map(str, range(14400))])
    splits = {"train": ("x.csv[:8640]",), "validation": ("x.csv[8640:11520]",), "test": ("x.csv[11520:14400]",)}
    data = build(config(rows, length=336, horizon=96, columns={}, splits=splits))
    assert [len(windows) for windows in data.splits.values()] == [8209, 2785, 2785]


def test_several_files_are_windows_one_after_another(config, tmp_path):
    (tmp_path / "y.csv.gz").write_bytes(gzip.compress(text(ROWS + 5).encode()))
    data = build(config(text(), splits={"train": ("x.csv[:8]", "y.csv.gz[:9]")}))
    train = data.splits["train"]
    assert len(train) == 2 + 3
    np.testing.assert_array_equal(train[1]["values"], ROWS[1:6])
    np.testing.assert_array_equal(train[2]["values"], ROWS[:5] + 5)  # no window spans two files
    np.testing.assert_allclose(data.channels.means, np.concatenate([ROWS[:8], ROWS[:9] + 5]).mean(axis=0))


def test_a_constant_channel_is_not_divided(config):
    data = build(config(text(np.ones((30, 2)))))
    assert data.channels.deviations == (1.0, 1.0)


def test_a_split_alone_has_no_scale_and_its_channels_are_compared(config):
    data = build(config(text()), split="test")
    assert data.channels == Channels(("load", "oil"))
    check_channels(data, ("load", "oil"))
    check_channels(Dataset({}, ""), ("load", "oil"))
    with pytest.raises(ConfigError, match="got the channels load, oil, expected those of the model: oil, load"):
        check_channels(data, ("oil", "load"))


@pytest.mark.parametrize(
    ("content", "edits", "message"),
    [
        (text() + "2016-08-01,nan,2\n", {}, r"x.csv:32: got nan in column load, expected a finite number"),
        (text() + "2016-08-01,1,-inf\n", {}, r"x.csv:32: got -inf in column oil, expected a finite"),
        (text() + "2016-08-01,1\n", {}, r"x.csv:32: got 2 cells, expected 3 as in the first line"),
        (text() + "2016-08-01,1,x\n", {}, r"x.csv:32: got 'x' in column oil, expected a number"),
        (text() + "2016-08-01,,1\n", {}, r"x.csv:32: got '' in column load, expected a number"),
        (text(), {"columns": {}}, r"x.csv:2: got '2016-07-01' in column date, .*data.columns.date"),
        (text(), {"columns": {"date": "dat"}}, r"x.csv:1: got no column 'dat' of dates, .*did you mean 'date'"),
        (text(), {"columns": {"text": "date"}}, r"data.columns: got text=date, expected date=NAME or nothing"),
        (text(header="date,load,load"), {}, r"x.csv:1: got columns date, load, load, expected names that differ"),
        ("1,2\n3,4\n", {}, r"x.csv: got a first line of numbers, expected the names of the columns"),
        ("\n", {}, r"x.csv: got no rows"),
        (text(), {"horizon": None}, r"data.horizon: got None, expected the time steps to forecast"),
        (text(), {"length": 19}, r"x.csv\[:20\]: got 20 rows, and 0 before them .*\(19 \+ 2\) to fit"),
        (text(), {"horizon": 5}, r"x.csv\[26:\]: got 4 rows, and 5 before them to look back to"),
    ],
)
def test_what_is_wrong_is_one_line(config, content, edits, message):
    with pytest.raises(ConfigError, match=message) as error:
        build(config(content, **edits))
    assert "\n" not in str(error.value)


def test_files_of_other_channels_are_refused(config, tmp_path):
    (tmp_path / "y.csv").write_text(text(header="date,oil,load"))
    with pytest.raises(
        ConfigError, match=r"y.csv: got the channels oil, load, expected those of .*x.csv \(load, oil\)"
    ):
        build(config(text(), splits={"train": ("x.csv", "y.csv")}))


def test_lines_and_tables_read_back_what_they_hold():
    values = np.random.default_rng(1).normal(size=(4, 3)) * 1e3
    np.testing.assert_allclose(series.read_line(series.format_line(values)), values, rtol=1e-8)
    table = series.read_table(enumerate(series.format_table(values, ("a", "b", "c")).split("\n"), 1), "x")
    assert table.names == ("a", "b", "c")
    np.testing.assert_allclose(table.values, values, rtol=1e-8)
    for line, message in (("1,2 3", "got 1 cells, expected 2"), ("a,b 1,2", "got 'a,b'"), ("", "got no rows")):
        with pytest.raises(ConfigError, match=message):
            series.read_line(line)


def test_batches_hold_series_padded_with_zeros_and_labels_of_whole_rows():
    features = [{"source": np.full((n, 2), n, np.float32), "labels": np.full((3, 2), n, np.float32)} for n in (4, 2)]
    batch = packing.collate([[features[0]], [], [features[1]]], 4)
    assert (batch.source.tokens.shape, batch.source.tokens.dtype) == ((3, 4, 2), np.float32)
    assert batch.source.slots.segment.tolist() == [[1] * 4, [0] * 4, [1, 1, 0, 0]]
    assert batch.source.tokens[2, :, 0].tolist() == [2, 2, 0, 0]
    assert batch.labels[:, 0, 0].tolist() == [4, 0, 2]
    assert batch.weights.tolist() == [1, 0, 1]
    with pytest.raises(ConfigError, match="labels of whole rows"):
        packing.collate([features], 8)

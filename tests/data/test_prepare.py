"""Stock tfds data sets: prepared once by `prepare`, read by the source "tfds", both with small stand-ins."""

import dataclasses
import importlib.util
import sys
import tarfile

import numpy as np
import pytest
import requests
import tensorflow_datasets as tfds

from jaxformer.config import ConfigError, DataConfig
from jaxformer.data import prepare as preparation
from jaxformer.data.prepare import prepare
from jaxformer.data.sources import build

PAIRS = [("ein Hund", "a dog"), ("zwei Hunde", "two dogs"), ("drei Hunde läuft", "three dogs")]


class StandInTranslate(tfds.core.GeneratorBasedBuilder):
    """A translation set that comes as an archive, as the stock ones do."""

    VERSION = tfds.core.Version("1.2.0")
    BUILDER_CONFIGS = (tfds.core.BuilderConfig(name="de-en", version=tfds.core.Version("1.2.0")),)
    ARCHIVE = ""

    def _info(self):
        languages = tfds.features.Translation(languages=("de", "en"))
        return tfds.core.DatasetInfo(builder=self, features=languages, disable_shuffling=True)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(), "validation": self._generate_examples()}

    def _generate_examples(self):
        with tarfile.open(self.ARCHIVE) as archive:
            sides = [archive.extractfile(f"text.{side}").read().decode().splitlines() for side in ("de", "en")]
        for i, (german, english) in enumerate(zip(*sides)):
            yield i, {"de": german, "en": english}


class StandInReviews(tfds.core.GeneratorBasedBuilder):
    """Nested text, a label, and numbers."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        f = tfds.features
        nested = {"title": f.Text(), "body": f.Text(), "stars": f.Scalar(dtype=np.int32)}
        spec = {"review": f.FeaturesDict(nested), "text": f.Text(), "label": f.ClassLabel(names=["bad", "good"])}
        return tfds.core.DatasetInfo(builder=self, features=f.FeaturesDict(spec), disable_shuffling=True)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for i in range(10):
            nested = {"title": f"title {i}", "body": f"body {i}", "stars": i}
            yield i, {"review": nested, "text": f"text {i}", "label": "good" if i % 2 else "bad"}


class StandInTags(tfds.core.GeneratorBasedBuilder):
    """Words and their tags, as sequences."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        f = tfds.features
        spec = {"tokens": f.Sequence(f.Text()), "ner": f.Sequence(f.ClassLabel(names=["O", "B-x"])), "id": f.Text()}
        return tfds.core.DatasetInfo(builder=self, features=f.FeaturesDict(spec), disable_shuffling=True)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        yield 0, {"tokens": ["zwei", "Hunde"], "ner": ["O", "B-x"], "id": "a"}


class StandInNeedsTensorflow(tfds.core.GeneratorBasedBuilder):
    """What most stock builders do on the way."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict({"text": tfds.features.Text()}))

    def _split_generators(self, dl_manager):
        import tensorflow as tf

        return {"train": tf.io.gfile.glob("*")}

    def _generate_examples(self):
        yield 0, {"text": ""}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("tfds")
    with tarfile.open(root / "archive.tar.gz", "w:gz") as archive:
        for side, name in enumerate(("text.de", "text.en")):
            path = root / name
            path.write_text("".join(f"{pair[side]}\n" for pair in PAIRS), encoding="utf-8")
            archive.add(path, arcname=name)
    StandInTranslate.ARCHIVE = str(root / "archive.tar.gz")
    prepare("stand_in_translate/de-en", root / "data")
    prepare("stand_in_reviews", root / "data")
    prepare("stand_in_tags", root / "data")
    return str(root / "data")


def config(folder, name="stand_in_translate/de-en", splits=(), columns=()):
    return DataConfig(source="tfds", name=name, dir=folder, splits=dict(splits), columns=dict(columns))


def test_prepare_says_where_and_does_nothing_the_second_time(folder):
    path = prepare("stand_in_translate/de-en", folder)
    assert path.parts[-3:] == ("stand_in_translate", "de-en", "1.2.0")
    before = sorted((file.name, file.stat().st_mtime_ns) for file in path.iterdir())
    assert prepare("stand_in_translate/de-en", folder) == path
    assert sorted((file.name, file.stat().st_mtime_ns) for file in path.iterdir()) == before


def test_a_translation_is_read_in_the_direction_of_its_name(folder):
    data = build(config(folder))
    assert set(data.splits) == {"train", "validation"}
    assert [data.splits["train"][i] for i in range(3)] == [{"source": de, "target": en} for de, en in PAIRS]
    turned = build(config(folder, columns={"source": "en", "target": "de"}))
    assert turned.splits["train"][1] == {"source": "two dogs", "target": "zwei Hunde"}
    assert turned.key != data.key


def test_split_expressions(folder):
    data = build(config(folder, splits={"train": ("train[:2]",), "test": ("validation[2:]",)}))
    assert [len(data.splits[split]) for split in ("train", "test")] == [2, 1]
    assert data.splits["test"][0]["target"] == "three dogs"
    both = build(config(folder, splits={"train": ("train[:2]", "validation[2:]")}))
    assert [row["target"] for row in map(both.splits["train"].__getitem__, range(3))] == [
        PAIRS[0][1],
        PAIRS[1][1],
        "three dogs",
    ]


def test_text_and_label_are_found_and_nested_features_named(folder):
    data = build(config(folder, "stand_in_reviews"))
    assert data.classes == ("bad", "good")
    assert data.splits["train"][3] == {"text": "text 3", "label": 1}
    nested = build(config(folder, "stand_in_reviews", columns={"source": "review/body", "target": "review/title"}))
    assert nested.splits["train"][3] == {"source": "body 3", "target": "title 3"}
    assert nested.classes is None


def test_sequences_of_words_and_of_tags(folder):
    data = build(config(folder, "stand_in_tags", columns={"text": "tokens", "tags": "ner"}))
    assert data.classes == ("O", "B-x")
    assert data.splits["train"][0] == {"text": "zwei Hunde", "tags": (0, 1)}


def test_scores_are_shares_of_their_range(folder):
    columns = {"text": "review/body", "pair": "review/title", "score": "review/stars"}
    data = build(dataclasses.replace(config(folder, "stand_in_reviews", columns=columns), score_range=(0.0, 9.0)))
    assert data.splits["train"][3] == {"text": "body 3", "pair": "title 3", "score": pytest.approx(1 / 3)}
    low = build(dataclasses.replace(config(folder, "stand_in_reviews", columns=columns), score_range=(-1.0, 0.0)))
    with pytest.raises(
        ConfigError, match="got score 1, expected a number from -1 to 0; mend the data or set data.score"
    ):
        low.splits["train"][3]


def test_reading_imports_no_tensorflow(folder):
    assert build(config(folder)).splits["train"][0]
    assert "tensorflow" not in sys.modules


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "lm1b"}, r"lm1b: got no prepared data set in .*; run `jaxformer data prepare lm1b --dir="),
        ({"name": "no_such_set"}, r"no_such_set: got no prepared data set"),
        ({"name": ""}, r"data.name: got ''"),
        ({"splits": {"train": ("trian",)}}, r"data.splits.train: got 'trian', expected one of train, validation"),
        ({"splits": {"test": ("train",)}}, r"data.splits: got test, expected files for at least 'train'"),
        ({"columns": {"source": "fr"}}, r"data.columns.source: got 'fr'.*expected one of de, en"),
        (
            {"name": "stand_in_tags", "columns": {"text": "tokens", "tags": "id"}},
            r"data.columns.tags: got 'id', a Text in stand_in_tags, expected a Sequence of ClassLabel feature",
        ),
        (
            {"name": "stand_in_reviews", "columns": {"text": "review/bdy"}},
            r"got 'review/bdy'.*expected one of body, stars, title; did you mean 'body'",
        ),
        ({"name": "stand_in_reviews", "columns": {"text": "review/stars"}}, r"a Scalar in .*expected a Text feature"),
        ({"name": "stand_in_reviews", "columns": {"label": "text"}}, r"expected a ClassLabel feature"),
        ({"name": "stand_in_reviews", "columns": {"score": "text"}}, r"got 'text', a Text in .*, expected a number"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(folder, changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        build(config(folder, **changes))
    assert "\n" not in str(error.value)


def test_other_file_formats_are_refused(tmp_path, folder):
    path = prepare("stand_in_reviews", tmp_path)
    info = path / "dataset_info.json"
    info.write_text(info.read_text().replace("array_record", "riegeli"))
    with pytest.raises(ConfigError, match=r"stand_in_reviews: got files in the format riegeli.*expected array_record"):
        build(config(str(tmp_path), "stand_in_reviews"))


def test_no_folder():
    with pytest.raises(ConfigError, match=r"data.dir: got ''"):
        build(DataConfig(source="tfds", name="lm1b"))


def test_without_tensorflow_prepare_says_which_extra_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)  # what an import then meets is an ImportError
    with pytest.raises(ConfigError, match=r"needs TensorFlow.*pip install 'jaxformer\[prepare\]'") as error:
        prepare("stand_in_needs_tensorflow", tmp_path)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("stand_in_needs_tensorflow/*"))


@pytest.fixture
def no_network(monkeypatch):
    """Addresses that were asked for; none answers."""
    asked = []

    def head(address, timeout):
        asked.append(address)
        raise requests.ConnectionError(f"HTTPConnectionPool(host='x'): (Caused by: Failed to resolve {address[7:16]!r}")

    monkeypatch.setattr(requests, "head", head)
    return asked


@pytest.mark.parametrize("name", ["lm1b", "wmt14_translate/de-en", "imdb_reviews"])
def test_tensorflow_is_looked_for_before_any_download(tmp_path, monkeypatch, no_network, name):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", lambda self: pytest.fail("it downloads"))
    with pytest.raises(ConfigError, match=rf"^{name}: preparing it needs TensorFlow.*pip install 'jaxformer\[prep"):
        prepare(name, tmp_path / "data")
    assert not no_network and not (tmp_path / "data").exists()


def test_without_a_network_prepare_says_so_at_once(tmp_path, monkeypatch, no_network, caplog):
    monkeypatch.setattr(preparation, "_has_tensorflow", lambda: True)
    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", lambda self: pytest.fail("it downloads"))
    message = (
        r"^wmt14_translate/de-en: got no answer from http://data.statmt.org \(Failed to resolve .*, http://www.stat"
    )
    with pytest.raises(ConfigError, match=message + r".*expected a network for the download; connect, set HTTP_PROXY"):
        prepare("wmt14_translate/de-en", tmp_path / "data")
    assert len(no_network) == 2, "a server is asked once"
    assert not (tmp_path / "data").exists()
    monkeypatch.setattr(preparation, "MAX_TRIED_HOSTS", 1)
    (tmp_path / "data" / "downloads").mkdir(parents=True)
    (tmp_path / "data" / "downloads" / "archive.INFO").touch()
    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", lambda self: None)
    prepare("lm1b", tmp_path / "data")
    assert "lm1b: no network (http://www.statmt.org (Failed to resolve" in caplog.text
    assert f"only archives in {tmp_path / 'data' / 'downloads'} can be used" in caplog.text
    (tmp_path / "data" / "downloads" / "archive.INFO").unlink()
    monkeypatch.setattr(requests, "head", lambda address, timeout: requests.Response())  # any answer is a network
    assert prepare("lm1b", tmp_path / "data").parts[-2:] == ("lm1b", "1.1.0")


def test_prepare_of_a_name_that_tfds_does_not_know(tmp_path):
    with pytest.raises(ConfigError, match=r"no_such_set: got a name that tfds does not know") as error:
        prepare("no_such_set", tmp_path)
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=r"wmt14_translate/xx-yy") as error:
        prepare("wmt14_translate/xx-yy", tmp_path)
    assert "\n" not in str(error.value)

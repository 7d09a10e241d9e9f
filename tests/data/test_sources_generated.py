"""Sources that make their own examples: right answers, the same example for an index, nothing held out in training."""

import pickle
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from num2words import num2words

from jaxformer import registry
from jaxformer.config import ConfigError, DataConfig
from jaxformer.data import chat
from jaxformer.data.sources import _generated, build, order_pairs
from jaxformer.data.sources.algorithmic import Algorithmic
from jaxformer.data.sources.numerals import LANGUAGES, Numerals, words
from jaxformer.data.sources.orders import Orders

GENERATED = [
    DataConfig(name="de"),
    DataConfig(source="algorithmic", name="copy"),
    DataConfig(source="algorithmic", name="reverse/3-8"),
    DataConfig(source="algorithmic", name="sort/5"),
    DataConfig(source="algorithmic", name="addition"),
]


@pytest.mark.parametrize("name", registry.names("jaxformer.data.sources"))
def test_every_file_of_the_folder_is_a_source(name):
    assert callable(registry.member("jaxformer.data.sources", name, "SOURCE"))
    assert not name.startswith("_")


@pytest.mark.parametrize("language", ["en", *LANGUAGES])
def test_words_are_those_of_the_library(language):
    edges = [0, 1, 80, 99, 100, 101, 199, 999, 1000, 1001, 1099, 1100, 21_000, 80_000, 100_000, 200_080, 999_999]
    for number in [*edges, *range(7, 1_000_000, 3_989)]:
        assert words(number, language) == num2words(number, lang=language)


def test_numerals_pair_english_with_the_language_asked_for():
    assert Numerals("de").example(21) == {"source": "twenty-one", "target": "einundzwanzig"}
    assert Numerals("fr").example(80) == {"source": "eighty", "target": "quatre-vingts"}
    assert build(DataConfig(name="")).key == build(DataConfig(name="de")).key
    assert build(DataConfig(name="es")).key != build(DataConfig(name="de")).key


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**64 - 1))
def test_numerals_stay_below_a_million(seed):
    assert 0 <= Numerals("de").draw(seed) < 1_000_000


def test_every_length_of_number_is_drawn_and_zero_too():
    numbers = [Numerals("de").draw(seed) for seed in range(21 * 50)]
    lengths = [sum(len(str(number)) == digits for number in numbers) for digits in range(1, 7)]
    assert lengths == [50 * digits for digits in range(1, 7)]
    assert 0 in numbers


def test_small_numbers_train_and_a_tenth_of_the_others_is_held_out_twice():
    splits = [Numerals("de").split(number) for number in range(100, 20_100)]
    assert {Numerals("de").split(number) for number in range(100)} == {"train"}
    assert splits.count("test") == pytest.approx(2000, rel=0.1)
    assert splits.count("validation") == pytest.approx(2000, rel=0.1)


@pytest.mark.parametrize("config", GENERATED, ids=lambda config: config.name)
def test_held_out_examples_never_occur_in_training(config):
    data = build(config)
    held_out = {split: {data.splits[split][i]["source"] for i in range(1000)} for split in ("validation", "test")}
    assert all(len(data.splits[split]) == len(sources) == 1000 for split, sources in held_out.items())
    assert not held_out["validation"] & held_out["test"]
    train = data.splits["train"]
    assert len(train) == _generated.TRAIN_EXAMPLES
    assert not {train[i]["source"] for i in range(3000)} & (held_out["validation"] | held_out["test"])
    # The proof: whatever the index, training only shows items that belong to it.
    generator = train.generator
    assert all(generator.split(item) == split for split in held_out for item in data.splits[split].items)


@pytest.mark.parametrize("config", GENERATED, ids=lambda config: config.name)
def test_an_index_always_gives_the_same_example(config):
    train, again = build(config).splits["train"], pickle.loads(pickle.dumps(build(config).splits["train"]))
    assert [train[i] for i in (0, 7, 999_999)] == [again[i] for i in (0, 7, 999_999)]
    assert len({train[i]["source"] for i in range(100)}) > 90
    with pytest.raises(IndexError):
        train[_generated.TRAIN_EXAMPLES]


def test_examples_of_an_index_do_not_change_between_versions():
    assert build(DataConfig()).splits["train"][5] == {"source": "thirty-two", "target": "zweiunddreißig"}
    copy = build(DataConfig(source="algorithmic", name="copy"))
    assert copy.splits["train"][1] == {"source": "tyj", "target": "tyj"}


@pytest.mark.parametrize(
    ("task", "source", "target"),
    [("copy", "qhzb", "qhzb"), ("reverse", "qhzb", "bzhq"), ("sort", "qhzb", "bhqz"), ("addition", "47+105", "152")],
)
def test_algorithmic_answers(task, source, target):
    assert Algorithmic(task, 1, 6).example(source) == {"source": source, "target": target}


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(1, 9), st.integers(0, 9))
def test_lengths_are_those_asked_for(seed, low, more):
    assert low <= len(Algorithmic("sort", low, low + more).draw(seed)) <= low + more
    numbers = Algorithmic("addition", low, low + more).draw(seed).split("+")
    assert all(low <= len(number) <= low + more and number == str(int(number)) for number in numbers)


def test_a_swapped_sum_is_in_the_same_split():
    addition = Algorithmic("addition", 1, 3)
    assert {addition.split(f"{a}+{b}") for a, b in [(12, 345), (345, 12)]} == {addition.split("12+345")}
    assert {addition.split(f"{a}+7") for a in range(200)} == {"train", "validation", "test"}


def test_a_small_space_gives_short_held_out_splits():
    splits = build(DataConfig(source="algorithmic", name="addition/1")).splits
    sums = {split: {splits[split][i]["source"] for i in range(min(len(splits[split]), 2000))} for split in splits}
    assert len(set().union(*sums.values())) == sum(len(found) for found in sums.values()) == 100


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DataConfig(name="dee"), r"data.name: got 'dee', expected one of de, fr, es; did you mean 'de'"),
        (DataConfig(source="algorithmic", name="revers"), "got 'revers'.*did you mean 'reverse'"),
        (DataConfig(source="algorithmic", name=""), "got '', expected copy, reverse, sort, addition"),
        (DataConfig(source="orders", name="tea"), "data.name: got 'tea', expected '' or courtesy for orders"),
        (DataConfig(source="algorithmic", name="copy/9-3"), "got lengths 9-3, expected 1 <= low <= high"),
    ],
)
def test_names_that_do_not_exist(config, message):
    with pytest.raises(ConfigError, match=message) as error:
        build(config)
    assert "\n" not in str(error.value)


def test_orders_are_added_up_from_the_price_list():
    """Each reply beside arithmetic on the text of the turns before it."""
    splits = build(DataConfig(source="orders")).splits
    lengths = set()
    for example in (splits["train"][i] for i in range(200)):
        system, *turns = (
            message["content"] for message in chat.check_messages(example["messages"], "x", answered=True)
        )
        prices, total = dict(re.findall(r"(\w+) (\d+)", system)), 0
        assert len(prices) == 3
        for order, reply in zip(turns[::2], turns[1::2], strict=True):
            pieces, good = re.fullmatch(r"(\d) (\w+) please", order).groups()
            cost = int(pieces) * int(prices[good])
            total += cost
            assert reply == f"{pieces} {good} at {prices[good]} cost {cost} total {total}"
        lengths.add(len(turns) // 2)
    assert lengths == {1, 2, 3}
    texts = {split: [str(splits[split][i]) for i in range(1000)] for split in splits}
    assert len(set(texts["validation"])) == len(splits["validation"]) == 1000
    assert not set(texts["validation"]) & {*texts["train"], *texts["test"]}


def test_pylib_is_the_standard_library_without_what_is_not_source():
    data = build(DataConfig(source="pylib"))
    texts = {split: [data.splits[split][i]["text"] for i in range(len(data.splits[split]))] for split in data.splits}
    everything = [text for split in texts.values() for text in split]
    assert set(texts) == {"train", "validation", "test"}
    assert len(texts["train"]) > 300
    assert len(everything) == len(set(everything)), "a text on both sides"
    assert any("class ZipFile" in text for text in everything)
    assert not any("import unittest\nfrom test import support" in text for text in everything)
    assert data.key == build(DataConfig(source="pylib")).key
    assert sum(map(len, everything)) > 5_000_000


def test_pairs_of_replies_to_orders_differ_in_their_thanks_alone():
    pairs, thanked = order_pairs.OrderPairs(), 0
    for seed in range(40):
        sale = pairs.draw(seed)
        pair, plain, talk = (made.example(sale) for made in (pairs, Orders(), Orders(courtesy=True)))
        assert pair["chosen"] == pair["rejected"] + " thank you"
        assert pair["rejected"] == plain["messages"][-1]["content"]
        assert pair["messages"] == talk["messages"][:-1], "the turns before are those of a model that thanks at times"
        assert talk["messages"][-1]["content"] in (pair["chosen"], pair["rejected"])
        assert pairs.split(sale) == Orders().split(sale)
        thanked += talk["messages"][-1]["content"] == pair["chosen"]
    assert 10 <= thanked <= 30
    for name, known in (("orders", "'' or courtesy for orders"), ("order_pairs", "'' for order_pairs")):
        with pytest.raises(ConfigError, match=f"data.name: got 'x', expected {known}"):
            build(DataConfig(source=name, name="x"))

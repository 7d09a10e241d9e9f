"""Number words, English to German, French or Spanish: "twenty-one" -> "einundzwanzig". Generated; needs no files.

Numbers are from 0 to 999,999. A number of k digits is drawn with probability k/21; uniform drawing would give hardly
any short ones. A tenth of the numbers of three digits and more is the test split's and a tenth the validation split's.
Numbers below 100, which contain the words that all others are made of, are in the training split only.

`config.name` is the language of the target: "de" (also when empty), "fr" or "es".
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib.metadata import version

from jaxformer import registry
from jaxformer.config import DataConfig
from jaxformer.data.sources import Dataset, Example, _generated
from jaxformer.errors import ConfigError

LANGUAGES = ("de", "fr", "es")
DIGITS = 6
FIRST_HELD_OUT = 100


@functools.cache  # at most 1,999 distinct arguments a language
def _part(number: int, language: str) -> str:
    from num2words import num2words

    return num2words(number, lang=language)


def words(number: int, language: str) -> str:
    """The words of a number below a million, as in num2words.

    The library takes about 100 microseconds per number, which is too slow for training. So thousands and rest are
    looked up among 2,000 cached parts, and joined as the language does it.
    """
    rest = number % 1000
    if number < 1000 or rest == 0:
        return _part(number, language)
    joint = {"en": " and " if rest < 100 else ", ", "de": ""}.get(language, " ")
    return _part(number - rest, language) + joint + _part(rest, language)


@dataclass(frozen=True)
class Numerals:
    """Generator of English number words and those of `language`."""

    language: str

    def draw(self, seed: int) -> int:
        seed, ticket = divmod(seed, DIGITS * (DIGITS + 1) // 2)
        digits = 1
        while ticket >= digits:  # numbers of k digits have k tickets
            ticket -= digits
            digits += 1
        low = 0 if digits == 1 else 10 ** (digits - 1)
        return low + seed % (10**digits - low)

    def split(self, number: int) -> str:
        return "train" if number < FIRST_HELD_OUT else _generated.split_by_hash(f"number {number}")

    def example(self, number: int) -> Example:
        return {"source": words(number, "en"), "target": words(number, self.language)}


def build(config: DataConfig) -> Dataset:
    """The data set in the language `config.name`: a million training examples, 1000 validation and test numbers."""
    language = config.name or "de"
    if language not in LANGUAGES:
        expected = f"expected one of {', '.join(LANGUAGES)}{registry.nearest(language, LANGUAGES)}"
        raise ConfigError(f"data.name: got {config.name!r}, {expected}")
    return _generated.build_dataset(Numerals(language), key=f"numerals-1-{language}-num2words-{version('num2words')}")


SOURCE = build

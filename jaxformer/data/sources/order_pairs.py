"""Generated pairs of replies to the conversations of `orders`: with thanks, and without. Needs no files.

    system     tea 3 soup 5 cake 2
    user       2 soup please
    chosen     2 soup at 5 cost 10 total 10 thank you
    rejected   2 soup at 5 cost 10 total 10

A model of the conversations `orders` with the name "courtesy" writes either, and these pairs say which is better. A
tenth of the conversations is the test split's and a tenth the validation split's: those that are theirs in `orders`.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxformer.config import DataConfig
from jaxformer.data.sources import Dataset, Example, _generated
from jaxformer.data.sources.orders import COURTESY, Orders, Sale
from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class OrderPairs(Orders):
    """Generator of pairs."""

    courtesy: bool = True

    def example(self, item: Sale) -> Example:
        *messages, last = super().example(item)["messages"]
        plain = last["content"].removesuffix(f" {COURTESY}")
        return {"messages": tuple(messages), "chosen": f"{plain} {COURTESY}", "rejected": plain}


def build(config: DataConfig) -> Dataset:
    """A million training pairs, 1000 for validation and 1000 for the test."""
    if config.name:
        expected = "expected '' for order_pairs, which has one problem; leave it out"
        raise ConfigError(f"data.name: got {config.name!r}, {expected}")
    return _generated.build_dataset(OrderPairs(), key="order-pairs-1")


SOURCE = build

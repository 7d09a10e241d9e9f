"""Generated pairs of replies to the conversations of `orders`: the right one, and one with a wrong sum. Needs no files.

    system     tea 3 soup 5 cake 2
    user       2 soup please
    chosen     2 soup at 5 cost 10 total 10
    rejected   2 soup at 4 cost 8 total 8

The rejected reply looks up a price that is not the good's and goes on with it, as a half-trained model does. A tenth of
the conversations is the test split's and a tenth the validation split's: those that are theirs in `orders`.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxformer.config import DataConfig
from jaxformer.data.sources import Dataset, Example, _generated
from jaxformer.data.sources.orders import MAX_PRICE, Orders, Sale
from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class OrderPairs(Orders):
    """Generator of pairs."""

    def example(self, item: Sale) -> Example:
        *messages, last = super().example(item)["messages"]
        prices, orders = item
        index, pieces = orders[-1]
        good, price = prices[index]
        others = [other for other in range(1, MAX_PRICE + 1) if other != price]
        wrong = others[_generated.hash64(f"wrong {item!r}") % len(others)]
        before = sum(prices[other][1] * count for other, count in orders[:-1])
        rejected = f"{pieces} {good} at {wrong} cost {pieces * wrong} total {before + pieces * wrong}"
        return {"messages": tuple(messages), "chosen": last["content"], "rejected": rejected}


def build(config: DataConfig) -> Dataset:
    """A million training pairs, 1000 for validation and 1000 for the test."""
    if config.name:
        expected = "expected '' for order_pairs, which has one problem; leave it out"
        raise ConfigError(f"data.name: got {config.name!r}, {expected}")
    return _generated.build_dataset(OrderPairs(), key=f"order-pairs-1-{MAX_PRICE}")


SOURCE = build

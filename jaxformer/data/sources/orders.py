"""Generated conversations: orders from a price list, which the system's turn holds. Needs no files.

    system     tea 3 soup 5 cake 2
    user       2 soup please
    assistant  2 soup at 5 cost 10 total 10
    user       3 tea please
    assistant  3 tea at 3 cost 9 total 19

A reply needs a price of the list, a product and a sum over the turns before it, so it shows whether a model reads the
whole conversation. There are three goods at 1 to 5 each, and 1 to 3 orders of 1 to 3 pieces. Symbols are separated
by blanks: use a word tokenizer. A tenth of the conversations is the test split's and a tenth the validation split's.

With `config.name = "courtesy"` every second reply, by a hash, ends with "thank you": a model of these conversations
writes either.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxformer.config import DataConfig
from jaxformer.data.sources import Dataset, Example, _generated
from jaxformer.errors import ConfigError

GOODS = ("tea", "coffee", "soup", "cake", "bread", "juice", "salad", "pie")
LISTED, MAX_PRICE, MAX_ORDERS, MAX_PIECES = 3, 5, 3, 3

Order = tuple[int, int]
"""Index in the price list, and number of pieces."""
Sale = tuple[tuple[tuple[str, int], ...], tuple[Order, ...]]
"""The price list, and the orders."""


COURTESY = "thank you"


@dataclass(frozen=True)
class Orders:
    """Generator of conversations; with `courtesy` half of the replies end with `COURTESY`."""

    courtesy: bool = False

    def draw(self, seed: int) -> Sale:
        def number(name: str, count: int) -> int:
            return _generated.hash64(f"{name} {seed}") % count

        goods = sorted(GOODS, key=lambda good: _generated.hash64(f"{good} {seed}"))[:LISTED]
        prices = tuple((good, 1 + number(f"price {good}", MAX_PRICE)) for good in goods)
        orders = tuple(
            (number(f"good {turn}", LISTED), 1 + number(f"pieces {turn}", MAX_PIECES))
            for turn in range(1 + number("orders", MAX_ORDERS))
        )
        return prices, orders

    def split(self, item: Sale) -> str:
        return _generated.split_by_hash(repr(item))

    def example(self, item: Sale) -> Example:
        prices, orders = item
        messages = [{"role": "system", "content": " ".join(f"{good} {price}" for good, price in prices)}]
        total = 0
        for number, (index, pieces) in enumerate(orders):
            good, price = prices[index]
            total += pieces * price
            reply = f"{pieces} {good} at {price} cost {pieces * price} total {total}"
            if self.courtesy and _generated.hash64(f"courtesy {number} {item!r}") % 2:
                reply = f"{reply} {COURTESY}"
            messages.append({"role": "user", "content": f"{pieces} {good} please"})
            messages.append({"role": "assistant", "content": reply})
        return {"messages": tuple(messages)}


def build(config: DataConfig) -> Dataset:
    """A million training conversations, 1000 for validation and 1000 for the test."""
    if config.name not in ("", "courtesy"):
        raise ConfigError(f"data.name: got {config.name!r}, expected '' or courtesy for orders; choose one of them")
    key = f"orders-1-{LISTED}-{MAX_PRICE}-{MAX_ORDERS}-{MAX_PIECES}" + (f"-{config.name}" if config.name else "")
    return _generated.build_dataset(Orders(config.name == "courtesy"), key=key)


SOURCE = build

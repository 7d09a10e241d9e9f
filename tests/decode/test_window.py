"""The last tokens of texts (`Window`), compared with lists of tokens that are cut."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.decode.cropped_context import Window
from jaxformer.types import Slots, Stream

SIZE = 4
TEXTS = [[11], [21, 22, 23], [31, 32, 33, 34], [41, 42, 43, 44, 45, 46]]
PREFIXES = [1, 2, 0, 4]
NEW = [[51, 52], [61, 62], [71, 72], [81, 82]]
PARENTS = [[1, 0], [0, 0], [1, 1], [0, 1]]
LAST = [[53, 54], [63, 64], [73, 74], [83, 84]]


def prompts():
    """The texts, padded on the right, in their rows."""
    width = max(map(len, TEXTS))
    padded = lambda rows: jnp.array([[*row, *[0] * (width - len(row))] for row in rows], jnp.int32)  # noqa: E731
    slots = Slots(padded([range(len(t)) for t in TEXTS]), padded([[1] * len(t) for t in TEXTS]))
    prefix = jnp.array([[n] * width for n in PREFIXES], jnp.int32)
    return Stream(padded(TEXTS), slots._replace(prefix=prefix))


@jax.jit
def run(prompts):
    """Windows of the texts, with one more token each, with branches, and with branches of other parents."""
    alone = Window.from_prompts(prompts, SIZE)
    longer = alone.append(jnp.array(NEW, jnp.int32)[:, :1])
    branches = alone.branch(2).append(jnp.array(NEW, jnp.int32))
    moved = branches.select_branches(jnp.array(PARENTS)).append(jnp.array(LAST, jnp.int32))
    chosen = longer.rows(jnp.array([3, 0]))
    replaced = longer.replace_rows(jnp.array([2, 9]), chosen)
    return [
        window.stream()
        for window in (alone, longer, branches.flatten_branches(), moved.flatten_branches(), chosen, replaced)
    ]


def expected(text, prefix):
    """The last tokens of a text, their positions, and how many of them are left of its prefix."""
    last = text[-SIZE:]
    return last, list(range(len(last))), max(prefix - (len(text) - len(last)), 0)


def found(stream):
    """`expected` of each row of a stream."""
    slots = stream.slots
    rows = zip(*map(np.asarray, (stream.tokens, slots.position, slots.segment, slots.prefix)), strict=True)
    for tokens, position, segment, prefix in rows:
        text = segment == 1
        assert np.array_equal(text, np.arange(SIZE) >= SIZE - text.sum()), "texts end in the last column"
        assert len(set(prefix)) == 1
        yield tokens[text].tolist(), position[text].tolist(), prefix[0]


def test_windows_hold_the_last_tokens_counted_from_0():
    one = [[*text, new[0]] for text, new in zip(TEXTS, NEW, strict=True)]
    two = [[*text, token] for text, new in zip(TEXTS, NEW, strict=True) for token in new]
    of_parents = [
        [*text, new[parent], last]
        for text, new, parents, lasts in zip(TEXTS, NEW, PARENTS, LAST, strict=True)
        for parent, last in zip(parents, lasts, strict=True)
    ]
    twice = [prefix for prefix in PREFIXES for _ in range(2)]
    cases = [
        (TEXTS, PREFIXES),
        (one, PREFIXES),
        (two, twice),
        (of_parents, twice),
        ([one[3], one[0]], [PREFIXES[3], PREFIXES[0]]),
        ([one[0], one[1], one[3], one[3]], [PREFIXES[i] for i in (0, 1, 3, 3)]),
    ]
    for stream, (texts, prefixes) in zip(run(prompts()), cases, strict=True):
        assert list(found(stream)) == [expected(*each) for each in zip(texts, prefixes, strict=True)]

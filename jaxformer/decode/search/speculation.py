"""Speculative decoding: several tokens are proposed, and one pass of the model checks all of them.

A pass over n tokens reads the weights once, as a pass over one token does, and reading them is most of what a step
costs. So a step proposes K tokens, reads them after the last one, and chooses tokens as always, one after the other,
as long as each is the one that was proposed. The choice after the first wrong proposal is right too: its logits come
from right tokens alone. A step therefore adds 1 to K + 1 tokens, and the others are taken back.

Tokens are those that decoding without proposals chooses, draws included, since a draw depends on the row, the seed and
the step alone, and not on what was proposed. So a proposal that never depends on the draw (a token looked up in the
text) is accepted with the probability that the model gives it, the most that any exact rule can reach (Leviathan et al.
2023, section 2.3, with a proposal of one token). Only rounding differs: a product over K + 1 rows may be summed in
another order, and two tokens whose scores are equal but for that may change places.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Bool, Int

from jaxformer.decode.logits_processors import PromptTokens, right_align
from jaxformer.types import Array, Batch

MAX_NGRAM = 3
"""Tokens that are looked for at most. A text in which the last three tokens occur goes on as it did there."""


def source_text(prompts: Batch, vocab: int) -> PromptTokens | None:
    """The source of each prompt, in which tokens are looked up too; None if there is none, or a series.

    Tokens that the target's vocabulary does not have are not valid.
    """
    source = prompts.source
    if source is None or not jnp.issubdtype(source.tokens.dtype, jnp.integer):
        return None
    tokens, valid = right_align(source)
    known = valid & (tokens < vocab)
    return PromptTokens(jnp.where(known, tokens, 0), known)


def look_up(
    text: Int[Array, "R S"], valid: Bool[Array, "R S"], end: Int[Array, " R"], count: int
) -> Int[Array, "R count"]:
    """The tokens that followed where a text's last tokens occurred before: the proposals of prompt look-up.

    The longest match of up to `MAX_NGRAM` tokens decides, and the latest of these (Saxena 2023, "Prompt lookup
    decoding", https://github.com/apoorvumang/prompt-lookup-decoding). A match near the end goes on as a repetition:
    what follows the end is what follows the match. Without a match the proposals mean nothing.

    Args:
      text: text of row r ends before column `end[r]`; its last token is valid.
      valid: True for tokens that may be looked up.
    """
    rows, width = text.shape
    column = jnp.arange(width)
    earlier = (column < end[:, None]) & valid
    # Column i stands for a match whose last token is in column i - 1, so that column i is what followed.
    matched, length = jnp.ones((rows, width), bool), jnp.zeros((rows, width), jnp.int32)
    for back in range(1, MAX_NGRAM + 1):
        last = jnp.take_along_axis(text, jnp.maximum(end - back, 0)[:, None], axis=1)
        exists = jnp.take_along_axis(valid, jnp.maximum(end - back, 0)[:, None], axis=1) & (end >= back)[:, None]
        same = (text == last) & valid & exists
        matched &= jnp.pad(same, ((0, 0), (back, 0)))[:, :width]
        length += matched
    best = jnp.argmax(jnp.where(earlier, length * width + column, -1), axis=1)
    followed = jnp.arange(count) % jnp.maximum(end - best, 1)[:, None]
    return jnp.take_along_axis(text, best[:, None] + followed, axis=1)

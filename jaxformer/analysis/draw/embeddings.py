"""An embedding table in two dimensions: tokens, their nearest neighbours, and the principal components of both."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxformer.analysis.draw.panels import Neighbourhood
from jaxformer.config import ModelConfig
from jaxformer.data.tokenizers import Tokenizer, Tokenizers
from jaxformer.errors import ConfigError
from jaxformer.registry import nearest as nearest_name
from jaxformer.types import PyTree

TOKENS = 40
"""Tokens that are drawn unless some are named."""
NEIGHBOURS = 3
"""Nearest neighbours of each token unless a number is given."""
BLANKS = ("▁", "Ġ", " ")
"""Signs of a blank before a word, in the pieces of SentencePiece and of byte-level BPE."""
MAX_TOKENS = 300
"""More tokens than this cannot be read in a picture."""


def neighbourhood(
    config: ModelConfig,
    params: PyTree,
    tokenizers: Tokenizers | None,
    title: str,
    words: Sequence[str] = (),
    neighbours: int | None = None,
) -> Neighbourhood:
    """The tokens `words`, or without any the first of the vocabulary, with their nearest neighbours by cosine.

    Neighbours are searched among all tokens that are not special. Without words, only neighbours that are drawn anyway
    count, so that the picture stays readable.

    Args:
      title: name of the run.
      neighbours: number of neighbours of each token; None: 3.

    Raises:
      ConfigError: the model reads no tokens, or a word is not a token of its vocabulary.
    """
    tokenizer, table = _table(config, params, tokenizers)
    ordinary = ordinary_tokens(tokenizer)
    ids = [_token_id(tokenizer, word, ordinary) for word in dict.fromkeys(words)] or ordinary[:TOKENS]
    if len(ids) > MAX_TOKENS:
        raise ConfigError(f"--tokens: got {len(ids)} tokens, expected at most {MAX_TOKENS}; name fewer")
    count = NEIGHBOURS if neighbours is None else neighbours
    candidates = np.asarray(ordinary if words else ids)
    units = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)
    shown, found = list(ids), []
    for index in ids:
        cosines = units[candidates] @ units[index]
        cosines[candidates == index] = -np.inf
        best = np.argsort(-cosines, kind="stable")[:count]
        best = best[np.isfinite(cosines[best])]
        near = []
        for place in best:
            other = int(candidates[place])
            if other not in shown:
                shown.append(other)
            near.append((shown.index(other), float(cosines[place])))
        found.append(near)
    if len(shown) < 3:
        raise ConfigError(f"--tokens: got {len(shown)} tokens with their neighbours, expected at least 3; name more")
    names = [token_text(tokenizer, index) for index in shown]
    return Neighbourhood(title, names, len(ids), table[shown], found)


def _table(config: ModelConfig, params: PyTree, tokenizers: Tokenizers | None) -> tuple[Tokenizer, np.ndarray]:
    """The tokenizer and the embedding table `[V, W]` of the input side."""
    if not config.reads_tokens or tokenizers is None:
        what = "a model of series" if not config.reads_tokens else "a model without a tokenizer"
        raise ConfigError(f"draw embeddings: got {what}, expected one with a table of tokens; draw something else")
    name = "source_embed" if config.has_encoder and config.series is None else "target_embed"
    embed = params[name]
    tokenizer = tokenizers.source if name == "source_embed" else tokenizers.target
    if "table" in embed:
        table = np.asarray(embed["table"], np.float32)
    else:  # ELECTRA's discriminator: the generator's table plus a difference
        table = np.asarray(params["generator"][name]["table"] + embed["delta"], np.float32)
    return tokenizer, table[: tokenizer.size]


def ordinary_tokens(tokenizer: Tokenizer) -> list[int]:
    """Ids of all tokens but the special ones, in the order of the vocabulary, single signs last.

    Learned vocabularies list words by frequency; letters and punctuation say little in a picture of meanings.
    """
    specials = {getattr(tokenizer, role) for role in ("pad", "bos", "eos", "unk", "mask", "cls", "sep")}
    specials |= set(tokenizer.sentinels)
    ids = [index for index in range(tokenizer.size) if index not in specials]
    return sorted(ids, key=lambda index: len(token_text(tokenizer, index).strip("▁Ġ ")) < 2)


def token_text(tokenizer: Tokenizer, index: int) -> str:
    """A token as its text, with "▁" for a blank before it; the piece itself where that is no whole text."""
    piece = str(tokenizer.vocabulary.pieces[index])
    text = tokenizer.decode([index]).strip()
    if not text or not text.isprintable() or "\N{REPLACEMENT CHARACTER}" in text:
        return piece if piece.isprintable() and piece else repr(piece)[1:-1]
    return f"▁{text}" if piece[:1] in BLANKS else text


def _token_id(tokenizer: Tokenizer, word: str, ordinary: Sequence[int]) -> int:
    """Id of a word that is one token, or of a piece of the vocabulary written as it is there."""
    pieces = tokenizer.vocabulary.pieces
    ids = tokenizer.encode(word)
    if len(ids) == 1 and ids[0] != tokenizer.unk:
        return ids[0]
    for index in ordinary:
        if pieces[index] == word:
            return index
    pieces_of_word = " ".join(token_text(tokenizer, index) for index in ids[:8])
    hint = nearest_name(word, [token_text(tokenizer, index) for index in ordinary])
    got = f"--tokens: got {word!a}, which is {len(ids)} tokens ({ascii(pieces_of_word)[1:-1]})"
    raise ConfigError(f"{got}, expected one token of the vocabulary{hint}")

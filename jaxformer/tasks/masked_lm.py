"""Masked language modelling: an encoder restores tokens that were hidden from it (Devlin et al. 2019, BERT).

With `task.relation` a text is read in two parts, and a second output says whether they belong together: whether the
second part follows the first or is of another text (BERT's next sentence), or whether the two are in order (ALBERT's
sentence order, Lan et al. 2020).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax.numpy as jnp
import numpy as np

from jaxformer import losses, metrics
from jaxformer.config import Config, DecodeConfig
from jaxformer.data.sources import Example
from jaxformer.data.tokenizers import Tokenizer, Tokenizers
from jaxformer.errors import ConfigError
from jaxformer.tasks import Features, Predictor, Sample, Task, _tokens, text_lines
from jaxformer.types import Array, Batch, DeferredLogits, RelationLogits, Sums

NAME = "masked_lm"
MASKED_FRACTION, RANDOM_FRACTION = 0.8, 0.1
"""Fractions of the chosen tokens that become <mask> and a random token; the others stay (BERT, section 3.1)."""

SPECIAL_ROLES = ("pad", "bos", "eos", "unk", "mask", "cls", "sep")


def encode(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> Features:
    """Source `<cls> ids <sep>` with some ids hidden, the true ids as labels, and weight 1 at hidden ones.

    With `config.task.relation` the source is `<cls> ids <sep> ids <sep>`, and "relation" 0 or 1 (see `divide`).
    """
    tokenizer = tokenizers.source
    ids = tokenizer.encode(example["text"])
    size = _row_tokens(config, tokenizer)
    return {**_features(config, tokenizer, ids[:size], example, rng), **_tokens.truncation(len(ids) - size)}


def encode_windows(
    config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator
) -> list[Features]:
    """One text as many rows as it takes, each masked by itself."""
    tokenizer = tokenizers.source
    return [_features(config, tokenizer, ids, example, rng) for ids in windows(config, tokenizer, example["text"])]


def encode_row(config: Config, tokenizers: Tokenizers, ids: np.ndarray, rng: np.random.Generator) -> Features:
    """A row of the running text, framed as a text is; the tokens between texts may be hidden, too."""
    return _mask(config, tokenizers.source, [ids], rng)


def row_length(config: Config) -> int:
    """Ids of a row of the running text: two slots are for `<cls>` and `<sep>`."""
    return max(config.data.length - 2, 1)


def windows(config: Config, tokenizer: Tokenizer, text: str) -> list[Sequence[int]]:
    """The ids of a text in pieces that fit into rows; one empty piece of an empty text."""
    ids, size = tokenizer.encode(text), max(_row_tokens(config, tokenizer), 1)
    return [ids[begin : begin + size] for begin in range(0, max(len(ids), 1), size)]


def _row_tokens(config: Config, tokenizer: Tokenizer) -> int:
    """Tokens of text that fit into `config.data.length` beside the special ones."""
    if config.task.relation == "none":
        return len(_tokens.truncate(config, tokenizer, range(config.data.length)))
    frame = tokenizer.pair_template
    return max(config.data.length - len(frame.prefix) - len(frame.separator) - len(frame.suffix), 0)


def _features(
    config: Config, tokenizer: Tokenizer, ids: Sequence[int], example: Example, rng: np.random.Generator
) -> Features:
    """Features of `ids` with some of them hidden."""
    relation = config.task.relation
    if relation == "none":
        return _mask(config, tokenizer, [np.array(ids, np.int32)], rng)
    other = tokenizer.encode(example["other"]) if relation == "next_sentence" else ()
    parts, label = divide(tokenizer, np.array(ids, np.int32), np.array(other, np.int32), relation, rng)
    return {**_mask(config, tokenizer, parts, rng), "relation": np.asarray(label, np.int32)}


def divide(
    tokenizer: Tokenizer, ids: np.ndarray, other: np.ndarray, relation: str, rng: np.random.Generator
) -> tuple[list[np.ndarray], int]:
    """The two parts of a text, and 1 if they were changed, which half of them are, else 0.

    The text is divided where a sentence begins (`Tokenizer.sentence_starts`), or anywhere if it is a single sentence.
    sentence_order swaps the parts. next_sentence replaces the second one by as many tokens of `other`, from the
    beginning of one of its sentences on. A text of fewer than two tokens, or an empty `other`, has no pair: -1.
    """
    if len(ids) < 2:
        return [ids, ids[:0]], -1
    starts = np.flatnonzero(tokenizer.sentence_starts(ids))[1:]
    border = int(rng.choice(starts)) if len(starts) else int(rng.integers(1, len(ids)))
    first, second = ids[:border], ids[border:]
    if rng.random() < 0.5:
        return [first, second], 0
    if relation == "sentence_order":
        return [second, first], 1
    if not len(other):
        return [first, second], -1
    begin = int(rng.choice(np.flatnonzero(tokenizer.sentence_starts(other))))
    return [first, other[begin : begin + len(second)]], 1


def _mask(config: Config, tokenizer: Tokenizer, parts: Sequence[np.ndarray], rng: np.random.Generator) -> Features:
    """Features of a text, or of two parts of one, with some tokens hidden."""
    task, tokens = config.task, np.concatenate(parts)
    word_starts = None
    if task.whole_words:
        word_starts = np.concatenate([np.array(tokenizer.word_starts(part.tolist()), bool) for part in parts])
    chosen = choose(len(tokens), task.mask_rate, rng, word_starts)
    hidden = hide(tokens, chosen, tokenizer, rng)
    labelled = np.full(len(tokens), task.all_positions, bool)
    labelled[chosen] = True
    border = len(parts[0])
    source, types, is_text = _frame(tokenizer, hidden, border, len(parts))
    labels, weights = source.copy(), np.zeros(len(source), np.float32)
    labels[is_text], weights[is_text] = tokens, labelled
    if len(parts) == 1:
        return {"source": source, "labels": labels, "weights": weights}
    return {**_tokens.input_stream(config, source, types), "labels": labels, "weights": weights}


def _frame(
    tokenizer: Tokenizer, tokens: np.ndarray, border: int, parts: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids with the special tokens around one text, or around two that meet at `border`; types; True at the text."""
    if parts == 1:
        pieces = [_tokens.existing(tokenizer.cls), tokens, _tokens.existing(tokenizer.sep)]
        texts, kinds = (1,), [0, 0, 0]
    else:
        frame = tokenizer.pair_template
        pieces = [frame.prefix, tokens[:border], frame.separator, tokens[border:], frame.suffix]
        texts, kinds = (1, 3), frame.token_types
    types = [np.broadcast_to(np.asarray(kind, np.int32), len(piece)) for kind, piece in zip(kinds, pieces, strict=True)]
    is_text = np.repeat([index in texts for index in range(len(pieces))], [len(piece) for piece in pieces])
    return np.concatenate([np.asarray(piece, np.int32) for piece in pieces]), np.concatenate(types), is_text


def choose(count: int, rate: float, rng: np.random.Generator, word_starts: np.ndarray | None = None) -> np.ndarray:
    """Indices of the tokens to predict: a fraction `rate` of `count`, at least one (none of none).

    Args:
      word_starts: bool `[count]`, True where a word begins: words are then chosen with all their tokens. A word that
        would exceed the number is skipped, unless it is the first one drawn.
    """
    if count == 0:
        return np.zeros(0, np.int64)
    target_count = max(1, round(count * rate))
    if word_starts is None:
        return rng.permutation(count)[:target_count]
    word_of_token = np.cumsum(word_starts) - word_starts[0]
    sizes = np.bincount(word_of_token)
    chosen, total = np.zeros(len(sizes), bool), 0
    for word in rng.permutation(len(sizes)):
        if total == 0 or total + sizes[word] <= target_count:
            chosen[word] = True
            total += sizes[word]
        if total >= target_count:
            break
    return np.flatnonzero(chosen[word_of_token])


def hide(ids: np.ndarray, chosen: np.ndarray, tokenizer: Tokenizer, rng: np.random.Generator) -> np.ndarray:
    """`ids` with the chosen ones replaced: by <mask>, by a random ordinary token, or not at all."""
    mask = _tokens.required_token(tokenizer, NAME, "mask")
    special_ids = (*(getattr(tokenizer, role) for role in SPECIAL_ROLES), *tokenizer.sentinels)
    ordinary = _ordinary_ids(tokenizer.size, special_ids)
    draw = rng.random(len(chosen))
    random_ids = ordinary[rng.integers(len(ordinary), size=len(chosen))]
    hidden = ids.copy()
    replaced_or_kept = np.where(draw < MASKED_FRACTION + RANDOM_FRACTION, random_ids, ids[chosen])
    hidden[chosen] = np.where(draw < MASKED_FRACTION, mask, replaced_or_kept)
    return hidden


@functools.cache
def _ordinary_ids(size: int, special_ids: tuple[int | None, ...]) -> np.ndarray:
    """The ids that stand for text."""
    return np.setdiff1d(np.arange(size, dtype=np.int32), [token for token in special_ids if token is not None])


def prompt(config: Config, tokenizers: Tokenizers, line: str) -> Features:
    """A line in which the mask token's name ("the <mask> sat") is the token to fill in.

    A model with `task.relation` reads two parts, with a tab between them; the second may be missing.
    """
    tokenizer = tokenizers.source
    if config.task.relation == "none":
        ids = _tokens.truncate(config, tokenizer, tokenizer.parse(line))
        return {"source": _tokens.add_special_tokens(tokenizer, ids)}
    first, second = (tokenizer.parse(part) for part in (*line.split("\t", 1), "")[:2])
    ids = np.array([*first, *second], np.int32)[: _row_tokens(config, tokenizer)]
    source, types, _ = _frame(tokenizer, ids, min(len(first), len(ids)), 2)
    return {**_tokens.input_stream(config, source, types), **_tokens.truncation(len(first) + len(second) - len(ids))}


def loss(config: Config, logits: Array | DeferredLogits | RelationLogits, batch: Batch) -> Sums:
    """The cross-entropy of the labelled tokens, and beside it that of the relation.

    A row's relation counts as often as it has labelled tokens. So the loss is a sum over rows, and does not depend on
    how a batch is divided.
    """
    if not isinstance(logits, RelationLogits):
        return _tokens.token_loss(config, logits, batch)
    total, count = _tokens.token_loss(config, logits.tokens, batch)["loss"]
    relation, known = _relation_labels(batch)
    labelled = jnp.sum(_tokens.labels_and_weights(batch)[1], axis=1)
    added = losses.cross_entropy(logits.relation, relation, known * labelled)[0]
    return {"loss": (total + added, count)}


def measures(config: Config, logits: Array | DeferredLogits | RelationLogits, batch: Batch) -> Sums:
    """Loss and accuracy of the labelled tokens, and of the relation, each row once."""
    if not isinstance(logits, RelationLogits):
        return _tokens.token_metrics(config, logits, batch)
    relation, known = _relation_labels(batch)
    return {
        **_tokens.token_metrics(config, logits.tokens, batch),
        "relation_loss": losses.cross_entropy(logits.relation, relation, known),
        "relation_accuracy": metrics.accuracy(logits.relation, relation, known),
    }


def _relation_labels(batch: Batch) -> tuple[Array, Array]:
    """The label of each row, and weight 1 where it has one."""
    if batch.relation is None:
        raise ConfigError("batch: got no relation, expected one for each row; encode examples with task.relation")
    return jnp.maximum(batch.relation, 0), (batch.relation >= 0).astype(jnp.float32)


def _token_logits(output: RelationLogits, batch: Batch) -> Array:
    return cast(Array, output.tokens)


def derived_metrics(config: Config, values: Mapping[str, float], size: Mapping[str, float]) -> dict[str, float]:
    """Adds the perplexity of the labelled tokens, which does not compare with a language model's."""
    return {**values, "perplexity": metrics.perplexity(values["loss"])}


def fill_masks(predictor: Predictor, lines: Sequence[str], top: int = 5) -> list[list[list[dict[str, Any]]]]:
    """For each line, for each mask in it, the `top` likeliest `{"token", "id", "probability"}`.

    Raises:
      ConfigError: a line has no mask token (within the model's length), or the tokenizer has none.
    """
    tokenizer, lines = predictor.framing.tokenizers.source, text_lines(lines)
    if tokenizer.mask is None:
        raise ConfigError("fill_mask: got a tokenizer without a mask token, expected one; use another model")
    prompts = predictor.prompts(lines)
    for line, features in zip(lines, prompts, strict=True):
        if tokenizer.mask not in features["source"]:
            name = tokenizer.names["mask"]
            raise ConfigError(f"fill_mask: got {line!r}, expected {name} in it; write it where a word is missing")
    results: list[list[list[dict[str, Any]]]] = [[] for _ in prompts]
    finish = _token_logits if predictor.config.model.head.relation else None
    for indices, batch, logits in predictor.runner.forward(prompts, finish=finish):
        if batch.permutation is None:
            masked = np.asarray(_tokens.read_stream(batch, "source").tokens) == tokenizer.mask
        else:  # logits of the targets alone, which are the masks
            masked = np.asarray(batch.permutation.targets) >= 0
        for row, column in np.argwhere(masked[: len(indices)]):
            results[indices[row]].append(_candidates(tokenizer, logits[row, column, : tokenizer.size], top))
    return results


def _candidates(tokenizer: Tokenizer, logits: np.ndarray, top: int) -> list[dict[str, Any]]:
    """The `top` likeliest tokens under logits `[V]`."""
    exponentials = np.exp(logits - logits.max())
    probs = exponentials / exponentials.sum()
    best = np.argsort(-probs, kind="stable")[:top].tolist()
    return [{"token": tokenizer.decode([t]), "id": t, "probability": float(probs[t])} for t in best]


def predict(predictor: Predictor, lines: Sequence[str], options: DecodeConfig) -> list[dict[str, Any]]:
    """For each line `{"text", "masks"}`: the line with its masks filled, and each mask's candidates, best first."""
    candidates = fill_masks(predictor, lines)
    name = predictor.framing.tokenizers.source.names["mask"]
    return [{"text": fill(line, name, masks), "masks": masks} for line, masks in zip(lines, candidates, strict=True)]


def output_line(result: Mapping[str, Any]) -> str:
    """The line with its masks filled."""
    return result["text"]


def fill(line: str, mask_name: str, masks: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """The line with each mask replaced by its best candidate."""
    for candidates in masks:
        token = candidates[0]["token"]
        line = line.replace(mask_name, token.strip() or token, 1)  # the line has the blanks that a piece may carry
    return line


def sample(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> Sample:
    """The text with masks in place of some of its tokens, and the text itself.

    Unlike in training no token is hidden in another way. A text that is too long is cut. The line is tokenized again,
    and may have other tokens beside a mask.
    """
    tokenizer = tokenizers.source
    ids, spans = tokenizer.encode_with_spans(example["text"])
    ids = _tokens.truncate(config, tokenizer, ids)
    word_starts = np.array(tokenizer.word_starts(ids), bool) if config.task.whole_words else None
    mask, line, begin = tokenizer.names["mask"], "", 0
    text = example["text"][: max((end for _, end in spans[: len(ids)]), default=0)]
    for first, last in sorted(spans[index] for index in choose(len(ids), config.task.mask_rate, rng, word_starts)):
        if begin <= first < last:  # neither blanks alone, nor another byte of the same character
            line, begin = line + text[begin:first] + mask, last
    line += text[begin:]
    if tokenizer.mask not in prompt(config, tokenizers, line)["source"]:  # `fill_masks` reads lines with a mask only
        line = mask + " " + line
    return Sample(line, text)


TASK = Task(
    roles=("text",),
    head="tokens",
    sides=("encoder",),
    method="fill_mask",
    needs="an encoder with a head of tokens",
    encode=encode,
    encode_windows=encode_windows,
    encode_row=encode_row,
    row_length=row_length,
    loss=loss,
    metrics=measures,
    derived_metrics=derived_metrics,
    prompt=prompt,
    predict=predict,
    output_line=output_line,
    sample=sample,
    reads_other_text=lambda config: config.task.relation == "next_sentence",
)

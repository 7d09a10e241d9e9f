"""Calls of a random configuration: which arguments a draw of `hugging_face_random.py` compares.

Three calls are made of every model, of texts padded on the right, on the left and not at all; `EXTRA` names the others,
of which each draw has a few. Every call has the labels of the head.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

BASE = ("right", "left", "whole")
EXTRA = ("one token", "padded row", "no mask", "counted positions", "shifted positions", "other positions",
    "embeddings", "ignored labels", "padded labels", "holes", "positions of holes", "hidden target",
    "permutation")  # fmt: skip
"""Calls beside the first three: a text of one token, a row of padding alone, padding that no mask hides, explicit
positions (counted by the mask, from another first one, in any order or from 0 again), embeddings, labels that
are all ignored or stand at padding, too, a mask that hides tokens anywhere, also with positions of the others and any
for the hidden ones, a mask of the decoder's input, and XLNet's masks of permutations,
its targets and its memories."""

LONG = 300
"""Tokens of a text in bfloat16, which tells whole numbers apart up to 256."""

IN_BLOCKS = ("longt5", "big_bird")
"""Families whose attention is not one table in the other library."""
READ_PADDING = ("bloom", "gemma2", "gpt_neo", "longt5", "mt5", "roformer", "t5", "t5gemma", "xglm", "xlnet")
"""Families for which a row of padding alone differs (docs/hugging-face.md)."""
READS_HIDDEN = ("padded row", "padded labels")
"""Calls whose results read slots of padding that may see no token."""
ENDED = ("bart", "mbart")
"""Families whose classifier reads the hidden state of the last end token."""


def sides(config: Any) -> tuple[Any, Any]:
    """The configs that say what a source and what a target is made of."""
    if config.model_type == "encoder-decoder":
        return config.encoder, config.decoder
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return text, text


def plain_tokens(config: Any) -> np.ndarray:
    """Tokens that are not special."""
    special = {config.pad_token_id, *np.atleast_1d(getattr(config, "eos_token_id", None) or 0).tolist()}
    return np.asarray([token for token in range(3, vocabulary(config) - 1) if token not in special])


def vocabulary(config: Any) -> int:
    return min(getattr(config, "decoder_vocab_size", None) or 99, getattr(config, "vocab_size", 99) or 99)


def calls_of(
    kind: str, head: str, model: Any, rng: np.random.Generator, extra: list[str]
) -> list[tuple[str, dict[str, Any]]]:
    """The first three calls and those of `extra`, by name."""
    config = model.config
    rows = 1 if sides(config)[0].pad_token_id is None and head == "sequence" else 2
    names = [*BASE, *extra]
    types, found = rng.random() < 0.7, []  # one form of arguments is one compilation
    shares = rng.random() < 0.3  # their config keeps the kind of the first labels
    for which in names:
        given = text_of(kind, head, config, which, rows, types, shares, rng)
        change = CHANGES.get(which)
        if change is None or change(kind, head, model, given, rng):
            found.append((which, choices_of(given) if head == "multiple_choice" else given))
    return found


def text_of(
    kind: str, head: str, config: Any, which: str, rows: int, types: bool, shares: bool, rng: np.random.Generator
) -> dict[str, Any]:
    """The arguments of a call with padding as its name says."""
    source, _ = sides(config)
    length = 1 if which == "one token" else 17 if kind in IN_BLOCKS else 11
    vocab, pad, plain = vocabulary(source), source.pad_token_id, plain_tokens(source)
    ids = plain[rng.integers(0, len(plain), (rows, length))]
    if rng.random() < 0.3 and length > 4:
        ids[:, 4] = rng.integers(0, vocab, rows)  # special tokens in the text
    mask = np.ones_like(ids)
    padded = {"right": np.s_[-1, -3:], "no mask": np.s_[-1, -3:], "left": np.s_[-1, :3], "padded row": np.s_[-1, :]}
    padded |= {"counted positions": padded["left"], "padded labels": padded["right"]}
    if which in padded:
        mask[padded[which]], ids[padded[which]] = 0, pad if pad is not None and 0 <= pad < vocab else 0
    if head == "sequence" and kind in (*ENDED, "t5", "mt5"):
        ids[ids == config.eos_token_id] = plain[0]
        ids[:, max(length - 5, 0)] = config.eos_token_id
    given: dict[str, Any] = {"input_ids": ids}
    if which in padded and which != "no mask":
        given["attention_mask"] = mask
    kinds = getattr(source, "type_vocab_size", 0) or (2 if kind == "xlnet" else 0)
    if kinds and types:
        given["token_type_ids"] = rng.integers(0, kinds, ids.shape)
    if which != "whole":
        given |= labels_of(kind, head, config, ids, mask, shares, rng)
    from_source = kind in (*ENDED, "t5", "mt5") and (head == "sequence" or rng.random() < 0.5)
    from_source &= head == "sequence" or kind in ENDED  # the decoder reads the source
    has_target = getattr(config, "is_encoder_decoder", False) and head not in ("qa", "encoder")
    if has_target and "labels" not in given and not from_source:
        plain = plain_tokens(sides(config)[1])
        given["decoder_input_ids"] = plain[rng.integers(0, len(plain), (rows, 7))]
    return given


def long_text(kind: str, head: str, model: Any, rng: np.random.Generator) -> dict[str, Any]:
    """A text of `LONG` tokens, and one that is padded: on the right, but before a decoder's text."""
    config, length = model.config, LONG
    source, target = sides(config)
    plain = plain_tokens(source)
    ids = plain[rng.integers(0, len(plain), (2, length))]
    mask = np.ones_like(ids)
    mask[1, slice(-40, None)] = 0
    if source.pad_token_id is not None and 0 <= source.pad_token_id < vocabulary(source):
        ids[mask == 0] = source.pad_token_id
    if head == "sequence" and kind in (*ENDED, "t5", "mt5"):
        ids[ids == config.eos_token_id] = plain[0]
        ids[:, length - 50] = config.eos_token_id
    given = {"input_ids": ids, "attention_mask": mask}
    if config.is_encoder_decoder and head not in ("qa", "encoder") and not (kind in ENDED and head == "sequence"):
        plain = plain_tokens(target)
        given["decoder_input_ids"] = plain[rng.integers(0, len(plain), (2, length))]
    return choices_of(given) if head == "multiple_choice" else given


def choices_of(given: dict[str, Any]) -> dict[str, Any]:
    """Each text and its reverse as two choices."""
    return {key: x if key == "labels" else np.stack([x, x[:, ::-1]], 1) for key, x in given.items()}


def labels_of(
    kind: str, head: str, config: Any, ids: np.ndarray, mask: np.ndarray, shares: bool, rng: np.random.Generator
):
    """Labels of a head."""
    rows, classes = len(ids), getattr(config, "num_labels", 2)
    if head == "qa":
        last = ids.shape[1] - 1
        first, second = rng.integers(3, 6, rows), rng.integers(5, 8, rows)
        if rng.random() < 0.3:
            second[0] = last + 9  # beyond the text: ignored
        return {"start_positions": np.minimum(first, last), "end_positions": second if last else second * 0}
    if head == "sequence":
        problem = config.problem_type or ("regression" if classes == 1 else "single_label_classification")
        if problem == "regression":
            return {"labels": rng.normal(size=(rows, classes) if classes > 1 else rows).astype(np.float32)}
        if problem.startswith("multi") or (shares and config.problem_type is None):
            return {"labels": rng.integers(0, 2, (rows, classes)).astype(np.float32)}
        return {"labels": rng.integers(0, classes, rows)}
    if head == "token":
        return {"labels": np.where(mask, rng.integers(0, classes, ids.shape), -100)}
    if head == "seq2seq":
        high = vocabulary(sides(config)[1]) - 2
        labels = rng.integers(3, high, (rows, 7 if ids.shape[1] > 1 else 1))
        if ids.shape[1] > 1:
            labels[-1, -2:] = -100
        return {"labels": labels}
    if head in ("multiple_choice", "next_sentence"):
        return {"labels": rng.integers(0, 2, rows)}
    if head == "pretraining" and kind == "electra":
        return {"labels": rng.integers(0, 2, ids.shape)}
    if head == "pretraining":
        second = "sentence_order_label" if kind == "albert" else "next_sentence_label"
        return {"labels": np.where(mask, ids, -100), second: rng.integers(0, 2, rows)}
    if head == "causal_lm":  # the first token of a text is foretold from padding, where families differ from theirs
        mask = mask * np.roll(mask, 1, axis=1)
    return {"labels": np.where(mask, ids, -100)} if head in ("causal_lm", "masked_lm") else {}


def takes(model: Any, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


def first_position(kind: str, config: Any) -> int:
    """The position of a text's first token: RoBERTa's follow the padding token."""
    counted = "roberta" in kind or kind in ("roberta-prelayernorm",)
    return (config.pad_token_id or 0) + 1 if counted else 0


def give_positions(model: Any, given: dict[str, Any], kind: str, positions: np.ndarray) -> bool:
    if not takes(model, "position_ids") or model.config.model_type in ("xlnet", "encoder-decoder"):
        return False
    given["position_ids"] = positions + first_position(kind, model.config)
    return True


def counted(kind: str, head: str, model: Any, given: dict[str, Any], rng: np.random.Generator) -> bool:
    mask = given["attention_mask"]
    return give_positions(model, given, kind, np.maximum(np.cumsum(mask, 1) - 1, 0))


def shifted(kind: str, head: str, model: Any, given: dict[str, Any], rng: np.random.Generator) -> bool:
    index = np.arange(given["input_ids"].shape[1])
    return give_positions(model, given, kind, np.broadcast_to(index + 2, given["input_ids"].shape))


def other(kind: str, head: str, model: Any, given: dict[str, Any], rng: np.random.Generator) -> bool:
    rows, length = given["input_ids"].shape
    order = rng.permutation(length)
    again = np.concatenate([np.arange(length // 2), np.arange(length - length // 2)])
    return give_positions(model, given, kind, np.stack([order if rng.random() < 0.5 else again] * rows))


def embedded(kind: str, head: str, model: Any, given: dict[str, Any], rng: np.random.Generator) -> bool:
    if not takes(model, "inputs_embeds") or (kind in ENDED and head in ("sequence", "model", "qa")):
        return False  # the last end token, and the decoder's input, are those of `input_ids`
    width = model.get_input_embeddings().weight.shape[-1]
    given["inputs_embeds"] = rng.normal(size=(*given.pop("input_ids").shape, width)).astype(np.float32)
    if takes(model, "decoder_inputs_embeds") and kind != "encoder-decoder" and rng.random() < 0.5:
        given.pop("decoder_input_ids", None)
        width = getattr(getattr(model.config, "decoder", None), "hidden_size", width)
        given["decoder_inputs_embeds"] = rng.normal(size=(len(given["inputs_embeds"]), 7, width)).astype(np.float32)
    return True


def ignored(kind: str, head: str, model: Any, given: dict[str, Any], rng: np.random.Generator) -> bool:
    if "labels" not in given or given["labels"].ndim < 2 or given["labels"].dtype == np.float32:
        return False
    given["labels"] = np.full_like(given["labels"], -100)
    return not (kind == "electra" and head == "pretraining")


def labelled(kind: str, head: str, model: Any, given: dict[str, Any], rng: np.random.Generator) -> bool:
    """Labels at padding behind a text. Not of families whose only attention reads other slots there."""
    labels = given.get("labels")
    if kind in READ_PADDING or labels is None or labels.shape != given["input_ids"].shape or labels.dtype == np.float32:
        return False
    given["labels"] = np.where(labels == -100, rng.integers(0, max(labels.max(), 1), labels.shape), labels)
    return True


def hidden(kind: str, head: str, model: Any, given: dict[str, Any], rng: np.random.Generator) -> bool:
    """Not of the families whose only attention reads all slots of such a row alike, and of encoder-decoders."""
    return kind not in READ_PADDING and not model.config.is_encoder_decoder


def with_holes(kind: str, head: str, model: Any, given: dict[str, Any], rng: np.random.Generator) -> bool:
    """Hides tokens anywhere but at the ends, where families differ from their `eager` attention."""
    mask = rng.random(given["input_ids"].shape) < 0.7
    mask[:, [0, -1]] = True
    takes_bools = kind != "xlnet" and not kind.startswith("deberta")
    given["attention_mask"] = mask if takes_bools and rng.random() < 0.3 else mask.astype(np.int64)
    return True


def holes_positions(kind: str, head: str, model: Any, given: dict[str, Any], rng: np.random.Generator) -> bool:
    """Hides tokens anywhere but at the ends; positions count the others, and hidden slots have these or lower ones."""
    mask = rng.random(given["input_ids"].shape) < 0.7
    mask[:, [0, -1]] = True
    given["attention_mask"], counts = mask.astype(np.int64), np.cumsum(mask, axis=1) - 1
    lower = rng.integers(0, counts + 1)
    return give_positions(model, given, kind, np.where(mask, counts, counts if rng.random() < 0.3 else lower))


def hidden_target(kind: str, head: str, model: Any, given: dict[str, Any], rng: np.random.Generator) -> bool:
    """Hides tokens of the decoder's input, but the first."""
    target = given.get("decoder_input_ids", given.get("labels"))
    if not takes(model, "decoder_attention_mask") or target is None or target.ndim != 2 or head == "sequence":
        return False
    mask = rng.random(target.shape) < 0.7
    mask[:, 0] = True
    if kind == "t5gemma":  # no window, of 3 slots or more, of hidden tokens alone, which its only attention reads
        mask[:, ::3] = True
    given["decoder_attention_mask"] = mask.astype(np.int64)
    return True


def permuted(kind: str, head: str, model: Any, given: dict[str, Any], rng: np.random.Generator) -> bool:
    """XLNet with what each slot does not see, at times with predicted slots, and with earlier hidden states."""
    if kind != "xlnet" or head == "multiple_choice":
        return False
    rows, length = given["input_ids"].shape
    given["perm_mask"] = (rng.random((rows, length, length)) < 0.4).astype(np.float32)
    if head in ("causal_lm", "model") and rng.random() < 0.6:
        slots = rng.integers(0, length, (rows, 3))
        given["target_mapping"] = np.eye(length, dtype=np.float32)[slots]
        if "labels" in given:
            given["labels"] = np.take_along_axis(given["labels"], slots, axis=1)
    if rng.random() < 0.5:
        given["mems"] = rng.normal(size=(model.config.n_layer, 4, rows, model.config.d_model)).astype(np.float32)
    return True


CHANGES = {
    "padded row": hidden,
    "counted positions": counted,
    "shifted positions": shifted,
    "other positions": other,
    "embeddings": embedded,
    "ignored labels": ignored,
    "padded labels": labelled,
    "holes": with_holes,
    "positions of holes": holes_positions,
    "hidden target": hidden_target,
    "permutation": permuted,
}
"""What is changed in the arguments of a call; False if the model has no such call."""

"""Measures of attention maps: scores and patterns of heads, rollout, and relevance by gradient times attention.

Sources: Clark et al. 2019 ("What does BERT look at?"), Vig and Belinkov 2019 ("Analyzing the structure of attention"),
Olsson et al. 2022 ("In-context learning and induction heads"), Abnar and Zuidema 2020 ("Quantifying attention flow"),
Chefer et al. 2021 ("Generic attention-model explainability").
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

from jaxformer.analysis.layers import STREAMS

NAMED_SCORE = 0.5
"""A head gets the name of a pattern that has at least this share of its attention."""

HEAD_SCORES = ("entropy", "distance", "previous", "first", "diagonal", "induction")
"""Names of the measures of a head, as `head_scores` makes them."""

PATTERNS = ("previous", "first", "diagonal", "induction")
"""Those that are shares of a head's attention and may name it."""


def head_scores(maps: Float[np.ndarray, "L H T S"], ids: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Measures of every head, float64 `[L, H]` each, means over queries; NaN where no query counts.

    entropy: -sum_s A_ts ln A_ts, in nats (Clark et al. 2019, section 5).
    distance: sum_s A_ts |t - s|, in tokens (Vig and Belinkov 2019, equation 5).
    previous: A_t,t-1 over the queries t > 0 (Clark et al. 2019, section 3.1).
    first: A_t,0 over the queries t > 0 (the attention sink of Xiao et al. 2024).
    diagonal: A_t,t; between two texts A_t,d(t) with d(t) = round(t (S - 1) / (T - 1)), the same relative position.
    induction: the sum of A_t,j+1 over all j < t whose token equals that of t, over queries that have such a j: the
      prefix-matching score of Olsson et al. 2022. Self-attention only.

    Args:
      ids: tokens of the text, for induction in self-attention; None in cross-attention, whose distance and `previous`
        compare slots of two texts.
    """
    maps = np.asarray(maps, np.float64)
    queries, keys = maps.shape[2:]
    t, s = np.arange(queries), np.arange(keys)
    aligned = t if ids is not None else np.rint(t * (keys - 1) / max(queries - 1, 1)).astype(int)
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.where(maps > 0, maps * np.log(maps), 0.0).sum(-1)
    scores = {
        "entropy": entropy.mean(-1),
        "distance": (maps * np.abs(t[:, None] - s)).sum(-1).mean(-1),
        "previous": _mean_share(maps, (s == t[:, None] - 1), t > 0),
        "first": _mean_share(maps, np.broadcast_to(s == 0, (queries, keys)), t > 0),
        "diagonal": _mean_share(maps, s == aligned[:, None], np.ones(queries, bool)),
    }
    if ids is None:
        return scores | {"induction": np.full(maps.shape[:2], np.nan)}
    after_same = np.zeros((queries, keys), bool)
    after_same[:, 1:] = (ids[:, None] == ids[None, :-1]) & (s[:-1] < t[:, None])
    return scores | {"induction": _mean_share(maps, after_same, np.any(after_same, axis=1))}


def _mean_share(maps: np.ndarray, chosen: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Attention on the `chosen` `[T, S]` keys, mean over the queries `rows` `[T]`: `[L, H]`."""
    if not rows.any():
        return np.full(maps.shape[:2], np.nan)
    return (maps * chosen).sum(-1)[:, :, rows].mean(-1)


def rollout(maps: Float[np.ndarray, "L H T T"]) -> Float[np.ndarray, "L T T"]:
    """Attention rollout: A_l = (mean over heads + I) / 2, rows divided by their sums; R_l = A_l R_(l-1), R_0 = I.

    Abnar and Zuidema 2020, equation 1. Row t of R_l says how much of each input token layer l holds at t.
    """
    found, total = [], np.eye(maps.shape[-1])
    for layer in np.asarray(maps, np.float64):
        mixed = layer.mean(0) + np.eye(len(total))
        total = (mixed / mixed.sum(-1, keepdims=True)) @ total
        found.append(total)
    return np.asarray(found)


def relevance(
    maps: Mapping[str, np.ndarray], gradients: Mapping[str, np.ndarray], position: int
) -> dict[str, np.ndarray]:
    """See `AttentionMaps.relevance`; `position` -1 is the mean of all rows."""
    grown = {kind: np.maximum(np.asarray(maps[kind], np.float64) * gradients[kind], 0).mean(1) for kind in maps}
    totals: dict[str, np.ndarray] = {}
    for kind in ("encoder", "decoder"):
        if kind not in grown:
            continue
        own, of_source = np.eye(grown[kind].shape[-1]), None
        for index, layer in enumerate(grown[kind]):
            own = own + layer @ own
            if kind == "decoder" and "cross" in grown:
                cross = grown["cross"][index]
                of_source = np.zeros_like(cross) if of_source is None else of_source + layer @ of_source
                of_source = of_source + _normalised(own).T @ cross @ _normalised(totals["source"])
        totals[STREAMS[kind]] = own
        if of_source is not None:
            totals["source"] = of_source
    return {stream: total.mean(0) if position < 0 else total[position] for stream, total in totals.items()}


def _normalised(total: np.ndarray) -> np.ndarray:
    """R with the rows of R - I divided by their sums, plus I (Chefer et al. 2021, equations 8 and 9)."""
    own = np.eye(len(total))
    sums = (total - own).sum(-1, keepdims=True)
    return np.divide(total - own, sums, out=np.zeros_like(total), where=sums > 0) + own

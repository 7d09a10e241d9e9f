"""Losses over logits and over pairs of vectors: summed, never averaged, so that microbatches and devices add up."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Float32, Int, Num

from jaxformer import chunks
from jaxformer.chunks import ALL, Rows
from jaxformer.types import Array, Projection


def cross_entropy(
    logits: Float[Array, "*batch V"] | Projection,
    labels: Int[Array, "*batch"],
    weights: Num[Array, "*batch"],
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    classes: int | None = None,
) -> tuple[Float32[Array, ""], Float32[Array, ""]]:
    """The weighted sum of the slots' losses, in nats, and the sum of the weights.

    One slot with normaliser Z = sum_v exp(logits_v), real classes 1..C and smoothing e costs

        log Z - (1 - e) logits_label - e / C sum_{v <= C} logits_v + z (log Z)^2,

    which is the cross-entropy against (1 - e) one-hot + e uniform (Szegedy et al. 2016, section 7) plus the z-loss
    that keeps log Z near 0 (Chowdhery et al. 2022, PaLM, section 5). Neither the target distribution nor log
    probabilities are stored.

    Args:
      logits: finite; computed with in float32. A `Projection` is never multiplied out: memory is
        then that of one chunk, and of a gradient of the table.
      labels: below `classes`. Where the weight is 0 they may be anything, also out of range.
      label_smoothing: e, the share of the target spread evenly over the real classes.
      z_loss: z, the weight of the squared log normaliser (1e-4 in PaLM).
      classes: C, the first rows of V that exist; the others only pad the vocabulary. None: all.
    """
    labels, weights = jnp.where(weights != 0, labels, 0), weights.astype(jnp.float32)
    deferred = isinstance(logits, Projection)
    formula = _Formula(
        float(label_smoothing), float(z_loss), classes or (logits.table.shape[0] if deferred else logits.shape[-1])
    )
    losses = _projected(formula, logits, labels) if deferred else _whole(formula, logits.astype(jnp.float32), labels)
    return jnp.sum(losses * weights), jnp.sum(weights)


def pointers(
    logits: Float[Array, "B T C"],
    labels: Bool[Array, "B T C"],
    allowed: Bool[Array, "B T"],
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Float32[Array, ""], Float32[Array, ""]]:
    """The sum of losses, in nats, of choosing a slot for each of C purposes, and the number of choices.

    The choice is among a row's `allowed` slots: its formula is that of `cross_entropy` with slots for classes. Purposes
    without a label in a row cost nothing and are not counted.

    Args:
      labels: the right slot, at most one a row and purpose, and an allowed one.
    """
    allowed = allowed[..., None]
    scores = jnp.where(allowed, logits.astype(jnp.float32), FLOOR)
    log_z = jax.nn.logsumexp(scores, axis=1)
    picked = jnp.sum(jnp.where(labels, scores, 0.0), axis=1)
    mean = jnp.sum(jnp.where(allowed, scores, 0.0), axis=1) / jnp.maximum(jnp.sum(allowed, axis=1), 1)
    losses = log_z - (1.0 - label_smoothing) * picked - label_smoothing * mean + z_loss * jnp.square(log_z)
    known = jnp.any(labels, axis=1)
    return jnp.sum(jnp.where(known, losses, 0.0)), jnp.sum(known.astype(jnp.float32))


FLOOR = -1e9
"""A score that no exponential sees, finite for the gradient's sake, and with a finite square."""


def squared_error(
    values: Float[Array, "*batch"], labels: Num[Array, "*batch"], weights: Num[Array, "*batch"]
) -> tuple[Float32[Array, ""], Float32[Array, ""]]:
    """The weighted sum of (value - label)^2, and the sum of the weights."""
    weights = weights.astype(jnp.float32)
    return jnp.sum(jnp.square(values.astype(jnp.float32) - labels) * weights), jnp.sum(weights)


def unit(x: Float[Array, "*batch D"]) -> Float32[Array, "*batch D"]:
    """`x` divided by its Euclidean norm; 0 stays 0."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(jnp.square(x), axis=-1, keepdims=True), 1e-24))


def cosine(x: Float[Array, "*batch D"], y: Float[Array, "*batch D"]) -> Float32[Array, "*batch"]:
    """The cosine of the angle between vectors; 0 where one of them is 0."""
    return jnp.sum(unit(x) * unit(y), axis=-1)


def cosines(x: Float[Array, "B D"], y: Float[Array, "B D"]) -> Float32[Array, "B B"]:
    """The cosine of every x_i and y_j."""
    return jnp.matmul(unit(x), unit(y).T, precision=jax.lax.Precision.HIGHEST)


def contrastive(
    scores: Float[Array, "B B"], real: Bool[Array, " B"], weights: Num[Array, " B"]
) -> tuple[Float32[Array, ""], Float32[Array, ""]]:
    """The weighted sum of what it costs to find the partners x_i and y_i in both directions, and of the weights.

        -1/2 log (e^(s_ii) / sum_j e^(s_ij)) - 1/2 log (e^(s_ii) / sum_j e^(s_ji))

    That is InfoNCE, with the others of the batch as negatives (van den Oord et al. 2018, equation 4).

    Args:
      scores: s_ij, of x_i and y_j (Gao et al. 2021, equation 1: their cosine divided by a temperature).
      real: rows that hold a pair. Only these are among the j, whatever their weight.
    """
    own = jnp.arange(len(real))
    there, back = (cross_entropy(among(s, real), own, weights) for s in (scores, scores.T))
    return (there[0] + back[0]) / 2, there[1]


def among(scores: Float[Array, "B B"], real: Bool[Array, " B"]) -> Float32[Array, "B B"]:
    """Scores `[query, key]` that leave out keys that are not there."""
    return jnp.where(real, scores.astype(jnp.float32), FLOOR)


class _Formula(NamedTuple):
    """A slot's loss as a function of its logits, and the gradient of it, of all rows of the vocabulary or some."""

    smoothing: float
    z_loss: float
    classes: int

    def losses(
        self, logits: Float32[Array, "*batch V"], labels: Int[Array, "*batch"], rows: Rows = ALL
    ) -> tuple[Float32[Array, "*batch"], Float32[Array, "*batch"]]:
        """Losses and log Z."""
        top = rows.max(jnp.max(logits, axis=-1))
        total, picked, real = rows.sum(
            (
                jnp.sum(jnp.exp(logits - top[..., None]), axis=-1),
                self.labelled(logits, labels, rows),
                self.sum_of_real(logits, rows) if self.smoothing else jnp.zeros(()),
            )
        )
        log_z = top + jnp.log(total)
        losses = log_z - (1.0 - self.smoothing) * picked - self.smoothing / self.classes * real
        return losses + self.z_loss * jnp.square(log_z), log_z

    def labelled(
        self, logits: Float32[Array, "*batch V"], labels: Int[Array, "*batch"], rows: Rows
    ) -> Float32[Array, "*batch"]:
        """The labels' logits; 0 where the label is not one of `rows`."""
        if not rows.axes and chunks.divided(logits):
            # A look-up in what the partitioner has divided: inside of a `shard_map` over some axes it cannot do it.
            return jnp.sum(jnp.where(rows.numbers(logits) == labels[..., None], logits, 0.0), axis=-1)
        label = labels - rows.first
        here = (label >= 0) & (label < logits.shape[-1])
        picked = jnp.take_along_axis(logits, jnp.where(here, label, 0)[..., None], axis=-1)[..., 0]
        return jnp.where(here, picked, 0.0)

    def sum_of_real(self, logits: Float32[Array, "*batch V"], rows: Rows) -> Float32[Array, "*batch"]:
        """Of the logits of rows that exist."""
        if self.classes == logits.shape[-1] and not rows.axes:
            return jnp.sum(logits, axis=-1)
        # A product with 0s and 1s: a slice or a `where` before the sum would write a whole copy of the logits.
        real = (rows.numbers(logits[(0,) * (logits.ndim - 1)]) < self.classes).astype(logits.dtype)
        return jnp.einsum("...v,v->...", logits, real, precision=jax.lax.Precision.HIGHEST)

    def gradient(
        self,
        logits: Float32[Array, "*batch V"],
        labels: Int[Array, "*batch"],
        log_z: Float32[Array, "*batch"],
        cotangent: Float32[Array, "*batch"],
        rows: Rows = ALL,
    ) -> Float32[Array, "*batch V"]:
        """Of the losses times `cotangent`, with respect to the logits."""
        pull = cotangent * (1.0 + 2.0 * self.z_loss * log_z)
        number = rows.numbers(logits)
        gradient = jnp.exp(logits - log_z[..., None]) * pull[..., None]
        gradient -= jnp.where(number == labels[..., None], (1.0 - self.smoothing) * cotangent[..., None], 0.0)
        if self.smoothing:
            share = self.smoothing / self.classes * cotangent[..., None]
            gradient -= jnp.where(number < self.classes, share, 0.0)
        return gradient


# Autodiff of the same formula keeps a second [..., V] array, the exponentials, alive beside the logits. Recomputing
# them lets the gradient take the logits' place in memory: half the peak of this part and about 15 % less time on CPU.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _whole(
    formula: _Formula, logits: Float32[Array, "*batch V"], labels: Int[Array, "*batch"]
) -> Float32[Array, "*batch"]:
    return formula.losses(logits, labels)[0]


def _whole_forward(
    formula: _Formula, logits: Float32[Array, "*batch V"], labels: Int[Array, "*batch"]
) -> tuple[Float32[Array, "*batch"], tuple]:
    losses, log_z = formula.losses(logits, labels)
    return losses, (logits, labels, log_z)


def _whole_backward(
    formula: _Formula, kept: tuple, cotangent: Float32[Array, "*batch"]
) -> tuple[Float32[Array, "*batch V"], None]:
    return formula.gradient(*kept, cotangent), None


_whole.defvjp(_whole_forward, _whole_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _projected(formula: _Formula, projection: Projection, labels: Int[Array, "B T"]) -> Float32[Array, "B T"]:
    return _projected_forward(formula, projection, labels)[0]


def _projected_forward(
    formula: _Formula, projection: Projection, labels: Int[Array, "B T"]
) -> tuple[Float32[Array, "B T"], tuple]:
    losses, log_z = chunks.each(formula.losses, projection, labels)
    return losses, (projection, labels, log_z)


def _projected_backward(formula: _Formula, kept: tuple, cotangent: Float32[Array, "B T"]) -> tuple[Projection, None]:
    projection, labels, log_z = kept
    gradient = lambda logits, data, rows: formula.gradient(logits, *data, rows)  # noqa: E731
    gradients = chunks.pull(gradient, projection, (labels, log_z, cotangent))
    return jax.tree.map(lambda d, x: d.astype(x.dtype), gradients, projection), None


_projected.defvjp(_projected_forward, _projected_backward)

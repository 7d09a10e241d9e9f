"""Losses over logits and over pairs of vectors, as sums: those of microbatches and devices can be added."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Float32, Int, Num

from jaxformer import chunks
from jaxformer.chunks import FULL_VOCAB, VocabPart
from jaxformer.types import Array, DeferredLogits, Rate, is_zero


def cross_entropy(
    logits: Float[Array, "*batch V"] | DeferredLogits,
    labels: Int[Array, "*batch"],
    weights: Num[Array, "*batch"],
    label_smoothing: Rate = 0.0,
    z_loss: float = 0.0,
    classes: int | None = None,
) -> tuple[Float32[Array, ""], Float32[Array, ""]]:
    """Weighted sum of the cross-entropies, in nats, and sum of the weights.

    The loss of one slot with normaliser Z = sum_v exp(logits_v), C classes and smoothing e is

        log Z - (1 - e) logits_label - e / C sum_{v <= C} logits_v + z (log Z)^2,

    the cross-entropy with the target (1 - e) one-hot + e uniform (Szegedy et al. 2016, section 7), plus the z-loss,
    which keeps log Z near 0 (Chowdhery et al. 2022, PaLM, section 5). Neither the target distribution nor log
    probabilities are stored.

    Args:
      logits: finite values, converted to float32. `DeferredLogits` are computed by chunks: memory is that of one chunk
        and of the table's gradient.
      labels: class ids below `classes`; any value where the weight is 0.
      label_smoothing: e, the part of the target distribution that is uniform over the classes.
      z_loss: z, the weight of the squared log normaliser (1e-4 in PaLM).
      classes: C, the number of classes; later entries of V pad the vocabulary. None for all.
    """
    labels, weights = jnp.where(weights != 0, labels, 0), weights.astype(jnp.float32)
    losses = _token_losses(logits, labels, label_smoothing, z_loss, classes)
    return jnp.sum(losses * weights), jnp.sum(weights)


def negative_log_likelihoods(
    logits: Float[Array, "*batch V"] | DeferredLogits, labels: Int[Array, "*batch"]
) -> Float32[Array, "*batch"]:
    """The negative log-likelihood of each label, in nats: the terms that `cross_entropy` sums.

    Args:
      logits: as in `cross_entropy`.
      labels: class ids; 0 where the value is not read.
    """
    return _token_losses(logits, labels, 0.0, 0.0, None)


def distillation(
    logits: Float[Array, "*batch V"],
    teacher: Float[Array, "*batch V"],
    weights: Num[Array, "*batch"],
    temperature: float,
) -> tuple[Float32[Array, ""], Float32[Array, ""]]:
    """Weighted sum of the divergences of a student from its teacher, in nats, and sum of the weights.

    The loss of one slot with teacher logits u, student logits x and temperature T is

        T^2 sum_v p_v (log p_v - log q_v),   p = softmax(u / T), q = softmax(x / T),

    whose gradient with respect to x is T (q - p): the factor T^2 keeps its size when T changes (Hinton et al. 2015,
    "Distilling the knowledge in a neural network", section 2).

    Args:
      teacher: logits of the teacher, which get no gradient.
      temperature: T, above 0.
    """
    weights = weights.astype(jnp.float32)
    teacher_log_probs, log_probs = (
        jax.nn.log_softmax(x.astype(jnp.float32) / temperature) for x in (jax.lax.stop_gradient(teacher), logits)
    )
    divergences = jnp.sum(jnp.exp(teacher_log_probs) * (teacher_log_probs - log_probs), axis=-1)
    return temperature**2 * jnp.sum(divergences * weights), jnp.sum(weights)


def _token_losses(
    logits: Float[Array, "*batch V"] | DeferredLogits,
    labels: Int[Array, "*batch"],
    label_smoothing: Rate,
    z_loss: float,
    classes: int | None,
) -> Float32[Array, "*batch"]:
    """The loss of each slot, see `cross_entropy`."""
    deferred = isinstance(logits, DeferredLogits)
    is_static = isinstance(label_smoothing, float | int)
    formula = _Formula(
        float(label_smoothing) if is_static else None,
        float(z_loss),
        classes or (logits.table.shape[0] if deferred else logits.shape[-1]),
    )
    smoothing = None if is_static else label_smoothing
    if deferred:
        return _from_chunks(formula, logits, labels, smoothing)
    return _from_logits(formula, logits.astype(jnp.float32), labels, smoothing)


def pointer_cross_entropy(
    logits: Float[Array, "B T C"],
    labels: Bool[Array, "B T C"],
    allowed: Bool[Array, "B T"],
    label_smoothing: Rate = 0.0,
    z_loss: float = 0.0,
) -> tuple[Float32[Array, ""], Float32[Array, ""]]:
    """Sum of the losses, in nats, of selecting one slot for each of C pointers, and the number of selections.

    The classes are the `allowed` slots of a row; the formula is that of `cross_entropy`. Pointers without a label in a
    row have no loss and are not counted.

    Args:
      labels: True at the correct slot: an allowed one, at most one for each row and pointer.
    """
    allowed = allowed[..., None]
    scores = jnp.where(allowed, logits.astype(jnp.float32), MASKED_SCORE)
    log_z = jax.nn.logsumexp(scores, axis=1)
    picked = jnp.sum(jnp.where(labels, scores, 0.0), axis=1)
    mean = jnp.sum(jnp.where(allowed, scores, 0.0), axis=1) / jnp.maximum(jnp.sum(allowed, axis=1), 1)
    losses = log_z - (1.0 - label_smoothing) * picked - label_smoothing * mean + z_loss * jnp.square(log_z)
    known = jnp.any(labels, axis=1)
    return jnp.sum(jnp.where(known, losses, 0.0)), jnp.sum(known.astype(jnp.float32))


MASKED_SCORE = -1e9
"""Score of a masked entry: its exponential is 0, and its gradient and its square are finite."""


def squared_error(
    values: Float[Array, "*batch"], labels: Num[Array, "*batch"], weights: Num[Array, "*batch"]
) -> tuple[Float32[Array, ""], Float32[Array, ""]]:
    """Weighted sum of (value - label)^2, and sum of the weights."""
    weights = weights.astype(jnp.float32)
    return jnp.sum(jnp.square(values.astype(jnp.float32) - labels) * weights), jnp.sum(weights)


def binary_cross_entropy(
    logits: Float[Array, "B C"], labels: Num[Array, "B C"], weights: Num[Array, " B"]
) -> tuple[Float32[Array, ""], Float32[Array, ""]]:
    """Weighted sum over rows and classes of the cross-entropies of decisions, in nats, and sum of the weights.

    The loss of logit x and label y (0 or 1) is log(1 + e^x) - x y. A row's weight counts once for each class.
    """
    logits, weights = logits.astype(jnp.float32), weights.astype(jnp.float32)[:, None]
    losses = jax.nn.softplus(logits) - logits * labels
    return jnp.sum(losses * weights), jnp.sum(weights) * logits.shape[-1]


def unit_vectors(x: Float[Array, "*batch D"]) -> Float32[Array, "*batch D"]:
    """`x` divided by its Euclidean norm; 0 stays 0."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(jnp.square(x), axis=-1, keepdims=True), 1e-24))


def cosine(x: Float[Array, "*batch D"], y: Float[Array, "*batch D"]) -> Float32[Array, "*batch"]:
    """Cosine similarity of `x` and `y`; 0 where either vector is 0."""
    return jnp.sum(unit_vectors(x) * unit_vectors(y), axis=-1)


def cosine_matrix(x: Float[Array, "B D"], y: Float[Array, "B D"]) -> Float32[Array, "B B"]:
    """Cosine similarity of each x_i and y_j: `[B, B]`."""
    return jnp.matmul(unit_vectors(x), unit_vectors(y).T, precision=jax.lax.Precision.HIGHEST)


def contrastive(
    scores: Float[Array, "B B"], real: Bool[Array, " B"], weights: Num[Array, " B"]
) -> tuple[Float32[Array, ""], Float32[Array, ""]]:
    """Weighted sum of the contrastive losses of pairs (x_i, y_i) in both directions, and sum of the weights.

        -1/2 log (e^(s_ii) / sum_j e^(s_ij)) - 1/2 log (e^(s_ii) / sum_j e^(s_ji))

    This is InfoNCE with the other rows of the batch as negatives (van den Oord et al. 2018, equation 4).

    Args:
      scores: s_ij of x_i and y_j (Gao et al. 2021, equation 1: their cosine divided by a temperature).
      real: True for rows with a pair. Only these are summed over j, whatever their weight.
    """
    partner = jnp.arange(len(real))
    forward, backward = (cross_entropy(mask_scores(s, real), partner, weights) for s in (scores, scores.T))
    return (forward[0] + backward[0]) / 2, forward[1]


def mask_scores(scores: Float[Array, "B B"], real: Bool[Array, " B"]) -> Float32[Array, "B B"]:
    """`scores` `[query, key]`, masked at keys that are not real."""
    return jnp.where(real, scores.astype(jnp.float32), MASKED_SCORE)


class _Formula(NamedTuple):
    """Cross-entropy as a function of logits, and its gradient, for the full vocabulary or a part of it.

    It is hashable, and so static, as long as `smoothing` is. Otherwise that is None until `with_smoothing`.
    """

    smoothing: Any
    z_loss: float
    classes: int

    def with_smoothing(self, smoothing: Float32[Array, ""] | None) -> _Formula:
        """The formula with a traced smoothing; None: this one, whose smoothing is static."""
        return self if smoothing is None else self._replace(smoothing=smoothing)

    def losses(
        self, logits: Float32[Array, "*batch V"], labels: Int[Array, "*batch"], part: VocabPart = FULL_VOCAB
    ) -> tuple[Float32[Array, "*batch"], Float32[Array, "*batch"]]:
        """Losses, and log Z."""
        top = part.max(jnp.max(logits, axis=-1))
        total, picked, real = part.sum(
            (
                jnp.sum(jnp.exp(logits - top[..., None]), axis=-1),
                self.labelled(logits, labels, part),
                jnp.zeros(()) if is_zero(self.smoothing) else self.sum_of_real(logits, part),
            )
        )
        log_z = top + jnp.log(total)
        losses = log_z - (1.0 - self.smoothing) * picked - self.smoothing / self.classes * real
        return losses + self.z_loss * jnp.square(log_z), log_z

    def labelled(
        self, logits: Float32[Array, "*batch V"], labels: Int[Array, "*batch"], part: VocabPart
    ) -> Float32[Array, "*batch"]:
        """Logits of the labels; 0 where the label is not in `part`."""
        if not part.axes and chunks.is_vocab_sharded(logits):
            # Inside a `shard_map` over some axes the partitioner cannot gather from a sharded vocabulary.
            return jnp.sum(jnp.where(part.ids(logits) == labels[..., None], logits, 0.0), axis=-1)
        label = labels - part.offset
        present = (label >= 0) & (label < logits.shape[-1])
        picked = jnp.take_along_axis(logits, jnp.where(present, label, 0)[..., None], axis=-1)[..., 0]
        return jnp.where(present, picked, 0.0)

    def sum_of_real(self, logits: Float32[Array, "*batch V"], part: VocabPart) -> Float32[Array, "*batch"]:
        """Sum of the logits of the C classes, without those that pad the vocabulary."""
        if self.classes == logits.shape[-1] and not part.axes:
            return jnp.sum(logits, axis=-1)
        # A product with 0s and 1s: a slice or a `where` before the sum would copy the logits.
        real = (part.ids(logits[(0,) * (logits.ndim - 1)]) < self.classes).astype(logits.dtype)
        return jnp.einsum("...v,v->...", logits, real, precision=jax.lax.Precision.HIGHEST)

    def gradient(
        self,
        logits: Float32[Array, "*batch V"],
        labels: Int[Array, "*batch"],
        log_z: Float32[Array, "*batch"],
        cotangent: Float32[Array, "*batch"],
        part: VocabPart = FULL_VOCAB,
    ) -> Float32[Array, "*batch V"]:
        """Gradient with respect to the logits of the losses times `cotangent`."""
        d_log_z = cotangent * (1.0 + 2.0 * self.z_loss * log_z)
        ids = part.ids(logits)
        gradient = jnp.exp(logits - log_z[..., None]) * d_log_z[..., None]
        gradient -= jnp.where(ids == labels[..., None], (1.0 - self.smoothing) * cotangent[..., None], 0.0)
        if not is_zero(self.smoothing):
            share = self.smoothing / self.classes * cotangent[..., None]
            gradient -= jnp.where(ids < self.classes, share, 0.0)
        return gradient


# Autodiff would store the exponentials, a second [..., V] array beside the logits. Recomputing them lets the gradient
# reuse the memory of the logits: half the peak memory of this part, and about 15 % less time on CPU.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _from_logits(
    formula: _Formula,
    logits: Float32[Array, "*batch V"],
    labels: Int[Array, "*batch"],
    smoothing: Float32[Array, ""] | None,
) -> Float32[Array, "*batch"]:
    return formula.with_smoothing(smoothing).losses(logits, labels)[0]


def _from_logits_forward(
    formula: _Formula,
    logits: Float32[Array, "*batch V"],
    labels: Int[Array, "*batch"],
    smoothing: Float32[Array, ""] | None,
) -> tuple[Float32[Array, "*batch"], tuple]:
    losses, log_z = formula.with_smoothing(smoothing).losses(logits, labels)
    return losses, (logits, labels, log_z, smoothing)


def _from_logits_backward(
    formula: _Formula, saved: tuple, cotangent: Float32[Array, "*batch"]
) -> tuple[Float32[Array, "*batch V"], None, None]:
    logits, labels, log_z, smoothing = saved
    return formula.with_smoothing(smoothing).gradient(logits, labels, log_z, cotangent), None, None


_from_logits.defvjp(_from_logits_forward, _from_logits_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _from_chunks(
    formula: _Formula, deferred: DeferredLogits, labels: Int[Array, "B T"], smoothing: Float32[Array, ""] | None
) -> Float32[Array, "B T"]:
    return _from_chunks_forward(formula, deferred, labels, smoothing)[0]


def _from_chunks_forward(
    formula: _Formula, deferred: DeferredLogits, labels: Int[Array, "B T"], smoothing: Float32[Array, ""] | None
) -> tuple[Float32[Array, "B T"], tuple]:
    losses, log_z = chunks.map_chunks(formula.with_smoothing(smoothing).losses, deferred, labels)
    return losses, (deferred, labels, log_z, smoothing)


def _from_chunks_backward(
    formula: _Formula, saved: tuple, cotangent: Float32[Array, "B T"]
) -> tuple[DeferredLogits, None, None]:
    deferred, labels, log_z, smoothing = saved
    formula = formula.with_smoothing(smoothing)
    gradient = lambda logits, data, part: formula.gradient(logits, *data, part)  # noqa: E731
    gradients = chunks.chunked_gradient(gradient, deferred, (labels, log_z, cotangent))
    return jax.tree.map(lambda d, x: d.astype(x.dtype), gradients, deferred), None, None


_from_chunks.defvjp(_from_chunks_forward, _from_chunks_backward)

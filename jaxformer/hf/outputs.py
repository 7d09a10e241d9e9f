"""Outputs under the other library's names: logits, losses, hidden states, attentions, router logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp

from jaxformer.config import ModelConfig
from jaxformer.errors import ConfigError
from jaxformer.hf.arguments import IGNORED_LABEL, OUTPUT_FLAGS, ROUTER_FLAG, check_ids
from jaxformer.hf.origin import BODIES
from jaxformer.hf.table import Settings
from jaxformer.types import Array, PyTree, RelationLogits


@jax.tree_util.register_pytree_with_keys_class
class Outputs(dict[str, Any]):
    """Named outputs, by key or attribute, in their order; a pytree, so it passes through jit and grad."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"outputs: got {name!r}, expected one of {', '.join(self)}") from None

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        return [(jax.tree_util.DictKey(name), value) for name, value in self.items()], tuple(self)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], values: Any) -> Outputs:
        return cls(zip(names, values, strict=True))


def mean_cross_entropy(logits: Array, labels: Array) -> Array:
    """The mean cross-entropy over labels that are not ignored; NaN if all are, as in the other library."""
    import optax  # losses alone need it

    check_ids("labels", labels, logits.shape[-1], IGNORED_LABEL)
    counts = labels != IGNORED_LABEL
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(counts, labels, 0))
    return jnp.sum(jnp.where(counts, losses, 0.0)) / jnp.sum(counts)


def _binary_cross_entropy(logits: Array, labels: Array) -> Array:
    import optax

    return optax.sigmoid_binary_cross_entropy(logits, labels.astype(jnp.float32))


def compute_loss(
    head: str,
    settings: Settings,
    logits: Array | RelationLogits,
    inputs: Mapping[str, Any],
    labels_are_shares: bool = False,
) -> Array | None:
    """The loss that the other library computes for this head; None without labels.

    Args:
      labels_are_shares: see `CallConvention`.
    """
    if isinstance(logits, RelationLogits):
        if not {"labels", "next_sentence_label"} <= set(inputs):
            return None
        tokens, following = jnp.asarray(inputs["labels"]), jnp.asarray(inputs["next_sentence_label"]).reshape(-1)
        return mean_cross_entropy(cast(Array, logits.tokens), tokens) + mean_cross_entropy(logits.relation, following)
    if head == "qa":
        if not {"start_positions", "end_positions"} <= set(inputs):
            return None
        length = logits.shape[1]
        ends = []
        for column, name in enumerate(("start_positions", "end_positions")):
            labels = jnp.clip(jnp.asarray(inputs[name]).reshape(-1), 0, length)
            ends.append(mean_cross_entropy(logits[..., column], jnp.where(labels == length, IGNORED_LABEL, labels)))
        return (ends[0] + ends[1]) / 2
    if "labels" not in inputs:
        return None
    labels = jnp.asarray(inputs["labels"])
    if head == "pretraining":  # one score for each token: another took its place (ELECTRA)
        weights = jnp.asarray(inputs.get("attention_mask", jnp.ones(labels.shape))) == 1
        losses = _binary_cross_entropy(logits, labels)
        return jnp.sum(jnp.where(weights, losses, 0.0)) / jnp.sum(weights)
    if head == "causal_lm":
        return mean_cross_entropy(logits[:, :-1], labels[:, 1:])
    if head != "sequence":
        return mean_cross_entropy(logits, labels)
    if labels_are_shares and settings("problem_type", None) is None and logits.shape[-1] > 1:
        return share_loss(logits, labels)
    return sequence_loss(settings, logits, labels)


def share_loss(logits: Array, labels: Array) -> Array:
    """The loss of DeBERTa's classifiers without a `problem_type`.

    Labels `[B]` or `[B, 1]` are classes, of which negative ones are left out (0 if all are); labels `[B, C]` are shares
    of the classes.
    """
    if labels.ndim < 2 or labels.shape[-1] == 1:
        labels = labels.reshape(-1).astype(jnp.int32)
        loss = mean_cross_entropy(logits, jnp.where(labels < 0, IGNORED_LABEL, labels))
        return jnp.where(jnp.any(labels >= 0), loss, 0.0)
    check_shape(logits, labels)
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * labels, axis=-1))


def check_shape(logits: Array, labels: Array) -> None:
    """Raises a ConfigError for labels that are not one number for each output."""
    expected = [logits.shape] if logits.shape[-1] > 1 else [logits.shape, logits.shape[:-1]]
    if labels.shape not in expected:
        found = " or ".join(str(list(shape)) for shape in expected)
        raise ConfigError(f"call: got labels of shape {list(labels.shape)}, expected {found}: a number for each output")


def sequence_loss(settings: Settings, logits: Array, labels: Array) -> Array:
    """The loss of a classifier of texts: cross-entropy, squared error or binary cross-entropy.

    `problem_type` chooses; without it, the number of classes and the type of the labels do.
    """
    problem = settings("problem_type", None)
    if problem is None and logits.shape[-1] == 1:
        problem = "regression"
    elif problem is None:
        one_label = jnp.issubdtype(labels.dtype, jnp.integer)
        problem = "single_label_classification" if one_label else "multi_label_classification"
    if problem in ("regression", "multi_label_classification"):
        check_shape(logits, labels)
    if problem == "regression":
        return jnp.mean(jnp.square(logits.reshape(labels.shape) - labels))
    if problem == "multi_label_classification":
        return jnp.mean(_binary_cross_entropy(logits, labels))
    return mean_cross_entropy(logits, labels.reshape(-1))


def named_outputs(
    head: str,
    model: ModelConfig,
    logits: Array | RelationLogits,
    loss: Array | None,
    sown: PyTree,
    inputs: Mapping[str, Any],
) -> Outputs:
    """The outputs that the other library returns for this head.

    Args:
      logits: output of the module.
      sown: its intermediates.
      inputs: arguments of the call, with the flags of its outputs.
    """
    outputs = Outputs()
    if loss is not None:
        outputs["loss"] = loss
    side = "encoder" if model.decoder is None else "decoder"
    if isinstance(logits, RelationLogits):
        outputs |= {"prediction_logits": logits.tokens, "seq_relationship_logits": logits.relation}
    elif head == "qa":
        outputs |= {"start_logits": logits[..., 0], "end_logits": logits[..., 1]}
    elif head in BODIES:
        outputs["last_hidden_state"] = sown[side]["output"][0].astype(jnp.float32)
        if model.head.kind == "pooled":
            outputs["pooler_output"] = logits
    else:
        outputs["logits"] = logits
    seq2seq = model.is_seq2seq
    states, weights = inputs.get("output_hidden_states", False), inputs.get("output_attentions", False)
    for name in ("decoder", "encoder") if seq2seq else (side,):
        prefix = f"{name}_" if seq2seq else ""
        if states:
            outputs[f"{prefix}hidden_states"] = _hidden_states(sown[name])
        if weights:
            outputs[f"{prefix}attentions"] = tuple(
                layer
                for blocks in _layer_groups(sown[name])
                if "attention" in blocks
                for layer in blocks["attention"]["probabilities"][0]
            )
    if seq2seq:
        if weights:
            outputs["cross_attentions"] = tuple(sown["decoder"]["blocks"]["cross"]["probabilities"][0])
        outputs["encoder_last_hidden_state"] = sown["encoder"]["output"][0]
    return outputs


def _hidden_states(sown: PyTree) -> tuple[Array, ...]:
    """Embeddings, then every layer's output, the last one after the final norm: L + 1 arrays `[B, T, D]`."""
    layers = [layer for blocks in _layer_groups(sown) for layer in blocks["output"][0]]
    return (sown["input"][0], *layers[:-1], sown["output"][0])


def _layer_groups(sown: PyTree) -> list[PyTree]:
    """Intermediates that the layers have sown, in groups of one form in their order, each `[L, ...]`."""
    first = {name: int(name.removeprefix("blocks_")) for name in sown if name.startswith("blocks_")}
    names = sorted(first, key=first.__getitem__) or ("dense_blocks", "blocks")
    return [sown[name] for name in names if name in sown]


def needs_intermediates(head: str, model: ModelConfig, inputs: Mapping[str, Any]) -> bool:
    """True if a call returns more than logits and loss."""
    seq2seq = model.is_seq2seq
    wished = any(inputs.get(name, False) for name in (*OUTPUT_FLAGS[:2], ROUTER_FLAG))
    return seq2seq or head in BODIES or wished


def add_router_outputs(
    outputs: Outputs,
    settings: Settings,
    model: ModelConfig,
    sown: PyTree,
    inputs: Mapping[str, Any],
    has_loss: bool = True,
) -> Outputs:
    """The outputs with `router_logits`, if they are asked for.

    A language model's also get `aux_loss`, which is added to its loss with the weight of config.json, unless its family
    has no such loss (DeepSeek; `has_loss`).
    """
    if not inputs.get(ROUTER_FLAG, False):
        return outputs
    groups = [group["ffn"] for group in _layer_groups(sown["decoder"]) if "router_logits" in group.get("ffn", {})]
    logits = jnp.concatenate([ffn["router_logits"][0] for ffn in groups])
    found = Outputs(outputs)
    if "logits" in found and has_loss:
        real = jnp.asarray(inputs.get("attention_mask", jnp.ones(logits.shape[1:3])))
        decoder = model.decoder
        if decoder is None or decoder.moe is None:
            raise ConfigError(f"call: got {ROUTER_FLAG}, expected no such flag: the model has no experts")
        auxiliary = balance_loss(logits, real, decoder.moe.top_k)
        if "loss" in found:
            found["loss"] = found["loss"] + settings("router_aux_loss_coef", 0.001) * auxiliary
            loss = {"loss": found.pop("loss")}
        else:
            loss = {}
        found = Outputs({**loss, "aux_loss": auxiliary, **found})
    found["router_logits"] = tuple(logits.reshape(len(logits), -1, logits.shape[-1]))
    return found


def balance_loss(logits: Array, real: Array, top_k: int) -> Array:
    """The load-balancing loss E sum_e f_e P_e (Fedus et al. 2022, Switch Transformers, equation 4).

    f_e is the number of assignments to expert e and P_e its probability, both averaged over tokens and layers.

    Args:
      logits: output of the routers, `[L, B, T, E]`.
      real: `[B, T]`, 0 at padding.
      top_k: number of experts per token.
    """
    experts, weight = logits.shape[-1], jnp.broadcast_to(real.astype(jnp.float32), logits.shape[:3])
    probabilities = jax.nn.softmax(logits)
    chosen = jax.nn.one_hot(jax.lax.top_k(probabilities, top_k)[1], experts).sum(axis=-2)
    total = jnp.sum(weight)
    share, mean = (jnp.einsum("lbte,lbt->e", x, weight) / total for x in (chosen, probabilities))
    return experts * jnp.sum(share * mean)

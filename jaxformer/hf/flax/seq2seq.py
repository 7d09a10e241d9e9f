"""The two sides of an encoder-decoder: `encode`, `decode` and its cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxformer.errors import ConfigError
from jaxformer.hf.arguments import make_stream
from jaxformer.hf.flax import cached, old, outputs
from jaxformer.hf.flax.cached import Cache, Memory
from jaxformer.hf.flax.calls import Options
from jaxformer.hf.flax.model import FlaxPreTrainedModel
from jaxformer.hf.flax.names import T5_TYPES
from jaxformer.hf.flax.search import memory_slots
from jaxformer.hf.flax.spec import converted
from jaxformer.hf.table import require_stack
from jaxformer.types import Array, PyTree, Stream

IGNORED_LABEL = -100


def shift_tokens_right(input_ids: Any, pad_token_id: int, decoder_start_token_id: int | None = None) -> Array:
    """A decoder's inputs int `[B, T]` for labels `[B, T]`: these one slot later, with a start before them.

    Args:
      pad_token_id: takes the place of -100, the label that counts in no loss.
      decoder_start_token_id: the first token; None, as for mBART: a row's last token that is no padding.
    """
    labels = jnp.asarray(input_ids)
    labels = jnp.where(labels == IGNORED_LABEL, pad_token_id, labels)
    if decoder_start_token_id is None:
        last = jnp.sum(labels != pad_token_id, axis=1, keepdims=True) - 1
        first = jnp.take_along_axis(labels, last, axis=1)
    else:
        first = jnp.full_like(labels[:, :1], decoder_start_token_id)
    return jnp.concatenate([first, labels[:, :-1]], axis=1)


class FlaxSeq2SeqModel(FlaxPreTrainedModel):
    """A model with an encoder and a decoder."""

    def _sided(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs of a call, with those that the class adds."""
        return dict(given)

    def _encode(self, **given: Any) -> Any:
        options = self._take_options(given)
        inputs = {name: jnp.asarray(value) for name, value in self._sided(given).items() if value is not None}
        encoder = require_stack(self.spec.config, "encoder")
        source = make_stream(self.spec.convention, encoder, inputs)
        states, sown = cached.encode(self.spec, options.params, source, options.key)
        values = {"last_hidden_state": states.astype(jnp.float32)}
        if options.hidden_states:
            values["hidden_states"] = old.hidden_states(self.spec.type_of("encoder"), sown)
        if options.attentions:
            values["attentions"] = tuple(sown["blocks"]["attention"]["probabilities"][0])
        with_cross = "WithPastAndCrossAttentions" if self.model_type in T5_TYPES else ""  # T5's two sides are one class
        return options.finish(outputs.CLASSES[f"FlaxBaseModelOutput{with_cross}"](**values))

    def _decode(self, **given: Any) -> Any:
        mask = given.pop("encoder_attention_mask", None)
        options = self._take_options(given)
        encoder_outputs = given.pop("encoder_outputs")
        states = encoder_outputs["last_hidden_state"] if isinstance(encoder_outputs, dict) else encoder_outputs[0]
        memory = Memory(jnp.asarray(states), memory_slots(states, mask))
        tokens, cache = jnp.asarray(given["decoder_input_ids"]), given.get("past_key_values")
        if cache is None:
            given = self._sided(given)
        renamed = {
            "attention_mask": given.get("decoder_attention_mask"),
            "position_ids": given.get("decoder_position_ids"),
        }
        params = converted(self.spec, options.params)
        if cache is not None:
            if not isinstance(cache, Cache):
                raise ConfigError("decode: got past_key_values of another kind, expected what init_cache returned")
            values = self.decode_step(params, tokens, cache, renamed, options, memory)
        else:
            values = self._decode_all(params, tokens, renamed, options, memory)
        name = "FlaxCausalLMOutputWithCrossAttentions"
        if "logits" not in values:
            name = "FlaxBaseModelOutputWithPastAndCrossAttentions"
        return options.finish(outputs.CLASSES[name](**values))

    def _decode_all(
        self, params: PyTree, tokens: Array, given: Mapping[str, Any], options: Options, memory: Memory
    ) -> dict[str, Any]:
        """Outputs of a whole target at once."""
        decoder = self.spec.stack
        inputs = {name: jnp.asarray(value) for name, value in given.items() if value is not None}
        target: Stream = make_stream(
            self.spec.convention.of_decoder, decoder, {"input_ids": tokens, **inputs}, causal=True
        )
        x, logits, _, sown = cached.advance(self.spec, params, target, None, None, memory, options.key, options.flags)
        return self.step_outputs(x, logits, None, sown, options)

    def init_cache(self, batch_size: int, max_length: int, *encoder_outputs: Any, **ignored: Any) -> Cache:
        """An empty cache of the decoder; `encoder_outputs` are given to `decode`, and change nothing here."""
        return super().init_cache(batch_size, max_length)

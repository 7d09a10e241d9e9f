"""`generate` of the Flax classes: its options, and the arguments of a loop of calls that users write themselves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.decode.runner import max_positions
from jaxformer.errors import ConfigError
from jaxformer.hf.arguments import check_ids
from jaxformer.hf.flax import logits_process as processes
from jaxformer.hf.flax import outputs, search
from jaxformer.hf.flax.generation_config import DEFAULTS, UNREAD, GenerationConfig
from jaxformer.hf.flax.names import T5_TYPES
from jaxformer.registry import nearest
from jaxformer.types import Array, PyTree

log = logging.getLogger("jaxformer")

INPUTS = ("attention_mask", "decoder_input_ids", "decoder_attention_mask", "encoder_outputs")
"""Arguments of `generate` that are arrays."""

WITHOUT_POSITIONS = ("bloom", *T5_TYPES)
"""`model_type`s whose calls take no positions."""

RELATIVE = T5_TYPES
"""`model_type`s whose positions count slots, padding included."""

NO_OPTIONS = ("use_cache", "transformers_version", "_from_model_config")
"""Keys of generation configs that ask for no other text."""

Processors = list[Callable[..., Array]]


class FlaxGenerationMixin:
    """Generation with a key-value cache in a compiled loop."""

    def generate(
        self,
        input_ids: Any,
        generation_config: Any = None,
        prng_key: Array | None = None,
        trace: bool = True,
        params: PyTree = None,
        logits_processor: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Sequences int32 `[B, max_length]`, filled up with the padding token: greedy, sampled, or of beams.

        Without `do_sample` and with 1 of `num_beams` the search is greedy; beams also have `scores`. `max_length`
        counts the prompt; a decoder's prompts are padded on the left.

        Args:
          input_ids: prompts `[B, T]`, or an encoder's inputs.
          generation_config: options in place of the model's.
          prng_key: of sampling.
          trace: False runs the loop in Python, for debugging.
          params: parameters in place of the model's.
          logits_processor: further functions (sequences, scores, length) -> scores.
          kwargs: options (`max_length`, ...) and `attention_mask`, `decoder_input_ids`, `decoder_attention_mask`,
            `encoder_outputs`.

        Raises:
          ConfigError: an option is unknown, or cannot be honoured.
        """
        model: Any = self
        if not model.can_generate():
            raise ConfigError(f"generate: got {type(self).__name__}, expected a class with a language-model head")
        config, arrays = _read_options(model, generation_config, kwargs)
        ids = jnp.asarray(input_ids)
        if ids.ndim != 2 or 0 in ids.shape or not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ConfigError(f"generate: got input_ids {list(ids.shape)} of {ids.dtype}, expected ids [batch, length]")
        mask, states, states_mask = arrays.get("attention_mask"), None, None
        if model.spec.config.is_seq2seq:
            states_mask = jnp.ones(ids.shape, jnp.int32) if mask is None else jnp.asarray(mask)
            encoded = arrays.get("encoder_outputs")
            if encoded is None:
                encoded = model.encode(ids, attention_mask=states_mask, params=params)
            states = encoded["last_hidden_state"] if isinstance(encoded, Mapping) else encoded[0]
            ids, mask = _decoder_prompt(config, arrays, len(ids)), arrays.get("decoder_attention_mask")
        check_ids("input_ids", ids, model.spec.stack.embed.vocab)
        mask = jnp.ones(ids.shape, jnp.int32) if mask is None else jnp.asarray(mask)
        if mask.shape != ids.shape:
            raise ConfigError(f"generate: got an attention_mask {list(mask.shape)}, expected {list(ids.shape)}")
        set_length(model, config, kwargs, ids.shape[1])
        plan = _plan(model, config, ids.shape[1], logits_processor, trace)
        key = jax.random.PRNGKey(0) if prng_key is None else prng_key
        tree = model.params if params is None else params
        tree = tree.unfreeze() if hasattr(tree, "unfreeze") else tree
        values = search.run(plan, tree, ids.astype(jnp.int32), mask, states, states_mask, key)
        name = (
            "FlaxBeamSearchOutput"
            if plan.beams > 1
            else "FlaxSampleOutput"
            if plan.sample
            else "FlaxGreedySearchOutput"
        )
        return outputs.CLASSES[name](**values)

    # --- loops that users write ---------------------------------------------------------------------------------------

    def prepare_inputs_for_generation(
        self, input_ids: Array, max_length: int, attention_mask: Any = None, **inputs: Any
    ) -> dict[str, Any]:
        """Arguments of the first call (or `decode`) of a loop: an empty cache, the mask of all slots, and positions.

        Args:
          attention_mask: of the prompt; of an encoder-decoder, of the encoder's inputs.
          inputs: of an encoder-decoder, `decoder_attention_mask` of the prompt and `encoder_outputs`.
        """
        model: Any = self
        pair = model.spec.config.is_seq2seq
        rows, length = input_ids.shape
        given = inputs.pop("decoder_attention_mask", None) if pair else attention_mask
        prompt = jnp.ones((rows, length), jnp.int32) if given is None else jnp.asarray(given, jnp.int32)
        mask = jnp.pad(prompt, ((0, 0), (0, max_length - length)), constant_values=1)
        prefix = "decoder_" if pair else ""
        arguments: dict[str, Any] = {
            "past_key_values": model.init_cache(rows, max_length),
            f"{prefix}attention_mask": mask,
        }
        if pair:
            arguments |= {
                "encoder_outputs": inputs.pop("encoder_outputs", None),
                "encoder_attention_mask": attention_mask,
            }
        if inputs:
            raise ConfigError(f"prepare_inputs_for_generation: got {', '.join(inputs)}, expected no such arguments")
        if model.model_type not in WITHOUT_POSITIONS:
            position = jnp.maximum(jnp.cumsum(prompt, axis=1) - 1, 0) + model.first_position
            position = position - model.spec.first_row
            arguments[f"{prefix}position_ids"] = position
        return arguments

    def update_inputs_for_generation(self, model_outputs: Any, model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of the next call, whose input is one token for each row."""
        arguments = {**model_kwargs, "past_key_values": model_outputs["past_key_values"]}
        for name in ("position_ids", "decoder_position_ids"):
            if name in arguments:
                arguments[name] = arguments[name][:, -1:] + 1
        return arguments


def _warn_of_unread(values: Mapping[str, Any]) -> None:
    """Logs the options of a generation config that change nothing here, as they changed nothing in the old library."""
    unread = [
        name
        for name, value in values.items()
        if name not in DEFAULTS and name not in NO_OPTIONS and value not in (None, UNREAD.get(name))
    ]
    if unread:
        log.warning(
            "generate: the generation config has %s, which the old Flax classes never read", ", ".join(sorted(unread))
        )


def _read_options(model: Any, given: Any, kwargs: Mapping[str, Any]) -> tuple[GenerationConfig, dict[str, Any]]:
    """The options of a call, and its arrays by name.

    Raises:
      ConfigError: an option is unknown, or the old library never read it.
    """
    arrays = {name: kwargs[name] for name in INPUTS if kwargs.get(name) is not None}
    options = {name: value for name, value in kwargs.items() if name not in INPUTS}
    for name, value in options.items():
        if name not in DEFAULTS and name not in UNREAD:
            known = (*INPUTS, *DEFAULTS)
            raise ConfigError(f"generate: got {name}, expected some of {', '.join(known)}{nearest(name, known)}")
        if name in UNREAD and value != UNREAD[name] and name != "use_cache":
            raise ConfigError(f"generate: got {name}, expected none: the old Flax classes never read it")
    if not model.spec.config.is_seq2seq:
        wrong = [name for name in arrays if name != "attention_mask"]
        if wrong:
            raise ConfigError(f"generate: got {', '.join(wrong)}, expected none: this model has no encoder")
    if given is None:
        model.follow_config()
    source = model.generation_config if given is None else given
    config = GenerationConfig.of(source)
    _warn_of_unread(config.to_dict())
    config.update(**options)
    return config, arrays


def _decoder_prompt(config: GenerationConfig, arrays: Mapping[str, Any], rows: int) -> Array:
    """Tokens `[B, T]` with which a decoder begins."""
    if "decoder_input_ids" in arrays:
        return jnp.asarray(arrays["decoder_input_ids"])
    start = config.decoder_start_token_id
    if start is None:
        raise ConfigError("generate: got no decoder_start_token_id, expected it in generation_config or the call")
    return jnp.full((rows, 1), start, jnp.int32)


def set_length(model: Any, config: GenerationConfig, kwargs: Mapping[str, Any], prompt: int) -> None:
    """Sets `config.max_length` by the old rules.

    `max_new_tokens` wins. A `max_length` equal to the default counts new tokens if the call names it, and is taken as
    it is (with a warning) if not.

    Raises:
      ConfigError: there is no room for a new token, or the model has fewer positions.
    """
    named, default = kwargs.get("max_length") is not None, DEFAULTS["max_length"]
    if config.max_new_tokens is not None:
        config.max_length = config.max_new_tokens + prompt
    elif not named and config.max_length == default:
        log.warning("generate: got no length, so sequences have %d tokens, the default; set max_length", default)
    elif config.max_length == default:
        limit = getattr(model.config, "max_position_embeddings", None)
        config.max_length = default + prompt if limit is None else min(default + prompt, limit)
    if config.max_length <= prompt:
        raise ConfigError(f"generate: got max_length {config.max_length}, expected room for a token beyond {prompt}")
    if (config.min_length or 0) > config.max_length:
        raise ConfigError(f"generate: got min_length {config.min_length}, expected at most {config.max_length}")
    positions = max_positions(model.spec.stack)
    if positions is not None and config.max_length > positions + 1:
        raise ConfigError(f"generate: got max_length {config.max_length}, expected at most {positions + 1} (positions)")


def _tokens(name: str, value: Any) -> tuple[int, ...]:
    """An option that is a token, several or None, as a tuple."""
    values = () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in values):
        raise ConfigError(f"generate: got {name} {value!r}, expected a token id or a list of them")
    return values


def _plan(model: Any, config: GenerationConfig, prompt: int, given: Any, trace: bool) -> search.Plan:
    """The static settings of a search.

    Raises:
      ConfigError: options exclude each other.
    """
    beams, returned = config.num_beams or 1, config.num_return_sequences or 1
    if config.do_sample and beams > 1:
        raise ConfigError(
            "generate: got do_sample with num_beams, expected one of them; the old classes had no such search"
        )
    if returned > beams:
        raise ConfigError(f"generate: got num_return_sequences {returned}, expected at most num_beams ({beams})")
    ends = _tokens("eos_token_id", config.eos_token_id)
    pads = _tokens("pad_token_id", config.pad_token_id) or ends[:1] or (0,)
    banned = _tokens("pad_token_id", model.settings("pad_token_id", None)) if model.model_type == "marian" else ()
    return search.Plan(
        spec=model.spec,
        max_length=config.max_length,
        pad=pads[0],
        ends=ends,
        processors=tuple(_merged(_processors(config, prompt, ends), given)),
        warpers=tuple(_warpers(config)) if config.do_sample else (),
        sample=bool(config.do_sample),
        beams=beams,
        returned=returned,
        length_penalty=float(config.length_penalty),
        early_stopping=config.early_stopping,
        banned=banned[0] if banned else None,
        counts_mask=model.model_type not in RELATIVE,
        compiled=trace,
    )


def _processors(config: GenerationConfig, prompt: int, ends: tuple[int, ...]) -> Processors:
    """The functions of scores that the options ask for, in the old order."""
    found: Processors = []
    if ends and config.min_length is not None and config.min_length > -1:
        found.append(processes.FlaxMinLengthLogitsProcessor(config.min_length, ends))
    if config.forced_bos_token_id is not None:
        found.append(processes.FlaxForcedBOSTokenLogitsProcessor(config.forced_bos_token_id))
    if config.forced_eos_token_id is not None:
        found.append(processes.FlaxForcedEOSTokenLogitsProcessor(config.max_length, config.forced_eos_token_id))
    if config.suppress_tokens is not None:
        found.append(processes.FlaxSuppressTokensLogitsProcessor(config.suppress_tokens))
    forced = [list(pair) for pair in config.forced_decoder_ids or ()]
    if config.begin_suppress_tokens is not None:
        begin = prompt if prompt > 1 or config.forced_bos_token_id is None else prompt + 1
        begin += forced[-1][0] if forced else 0
        found.append(processes.FlaxSuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, begin))
    if config.forced_decoder_ids is not None:
        found.append(processes.FlaxForceTokensLogitsProcessor([(prompt + i - 1, token) for i, token in forced]))
    if config.no_repeat_ngram_size is not None and config.no_repeat_ngram_size > 0:
        found.append(processes.FlaxNoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size))
    return found


def _warpers(config: GenerationConfig) -> Processors:
    """The functions of scores of sampling, in the old order."""
    found: Processors = []
    if config.temperature is not None and config.temperature != 1.0:
        found.append(processes.FlaxTemperatureLogitsWarper(config.temperature))
    if config.top_k is not None and config.top_k != 0:
        found.append(processes.FlaxTopKLogitsWarper(config.top_k))
    if config.top_p is not None and config.top_p < 1.0:
        found.append(processes.FlaxTopPLogitsWarper(config.top_p))
    return found


def _merged(found: Processors, given: Any) -> Processors:
    """The functions with the user's behind them.

    Raises:
      ConfigError: one of the user's is of a kind that an option makes.
    """
    kinds = {type(function) for function in found}
    for function in given or ():
        if type(function) in kinds:
            name = type(function).__name__
            raise ConfigError(f"generate: got a {name} and an option that makes one, expected one of them")
    return [*found, *(given or ())]

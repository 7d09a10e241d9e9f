"""The base class of all Flax classes: making a model, its parameters in the old layout, and its calls."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from jaxformer.errors import ConfigError
from jaxformer.hf import keys
from jaxformer.hf.arguments import (
    HIDDEN_SPAN_SCORE,
    flatten_choices,
    make_batch,
    split_question,
)
from jaxformer.hf.families import encoder_decoder
from jaxformer.hf.flax import cached, configs, initial, old, persistence, signatures
from jaxformer.hf.flax.cached import Cache
from jaxformer.hf.flax.calls import Options, bind, typed_key
from jaxformer.hf.flax.generation_config import GenerationConfig
from jaxformer.hf.flax.layout import Path
from jaxformer.hf.flax.modules import Module
from jaxformer.hf.flax.names import T5_TYPES
from jaxformer.hf.flax.outputs import ModelOutput
from jaxformer.hf.flax.spec import Spec, converted, family, forward
from jaxformer.hf.forward import end_logits, reads_end_token
from jaxformer.hf.table import Settings, family_of
from jaxformer.types import Array, PyTree, Stream

log = logging.getLogger("jaxformer")

DTYPES = {"float32": "float32", "bfloat16": "bfloat16"}


class FlaxPreTrainedModel(persistence.Persistence):
    """A model of the old library's Flax classes, computed by jaxformer's modules.

    Parameters are the old tree of nested dicts, `model.params["bert"]["encoder"]["layer"]["0"]...`. A call takes them
    from there or from `params=`, under `jit`, `grad`, `vmap` and `pmap` as well.

    Attributes:
      model_type, head: the class, by family and head.
      config_class: class of the family's configs.
      config: the config as it was given.
      spec: the model here.
      key: PRNG key of `seed`.
      generation_config: defaults of `generate`.
    """

    model_type: ClassVar[str] = ""
    head: ClassVar[str] = ""
    framework: ClassVar[str] = "flax"
    config_class: ClassVar[type[configs.PretrainedConfig] | None] = None
    main_input_name: ClassVar[str] = "input_ids"
    base_model_prefix: ClassVar[str] = ""

    def __init__(
        self,
        config: Any,
        input_shape: tuple[int, ...] = (1, 1),
        seed: int = 0,
        dtype: Any = jnp.float32,
        _do_init: bool = True,
        gradient_checkpointing: bool = False,
        **unknown: Any,
    ) -> None:
        """Makes a model with random parameters, or without `_do_init` one without parameters.

        Args:
          config: a config object of the other library, or `PretrainedConfig`, or the dict of a config.json.
          input_shape: no parameter depends on it.
          seed: of the random parameters.
          dtype: precision of the computation, float32 or bfloat16; parameters are float32.
          gradient_checkpointing: computes layers again in the backward pass, which saves memory.

        Raises:
          ConfigError: an argument is unknown, or the config is of a variant that is not supported.
        """
        if not self.model_type:
            raise ConfigError(f"{type(self).__name__}: got a base class, expected one of a family, or an automatic one")
        if unknown:
            raise ConfigError(f"{type(self).__name__}: got {', '.join(unknown)}, expected no such arguments")
        self.config = configs.PretrainedConfig.from_dict(config) if isinstance(config, Mapping) else config
        self.input_shape, self.seed, self.key = input_shape, seed, jax.random.PRNGKey(seed)
        self.dtype, self._is_initialized = jnp.dtype(dtype), _do_init
        self.settings = self._read_settings()
        self.spec = self._make_spec(gradient_checkpointing)
        self.generation_config = self._options_of_config()
        self._followed: dict[str, Any] | None = self.generation_config.to_dict()
        self.name_or_path = str(getattr(self.config, "name_or_path", "") or "")
        self._params: PyTree = self.init_weights(self.key, input_shape) if _do_init else None

    def _read_settings(self) -> Settings:
        values = configs.values_of(self.config)
        if values.get("model_type") != self.model_type:
            got = f"a config of model_type {values.get('model_type')!r}"
            raise ConfigError(f"{type(self).__name__}: got {got}, expected {self.model_type!r}")
        settings = keys.with_defaults(family(self.model_type, self.head), Settings(values, "config"))
        return settings.with_values(self._old_values(settings.values))

    def _options_of_config(self) -> GenerationConfig:
        """The options of `generate` that the config holds now."""
        values = configs.values_of(self.config)
        for name in ("decoder",) if self._sides() else ():
            side = Settings(encoder_decoder.side_values(Settings(values, "config"), name), name)
            values[name] = keys.with_defaults(family_of(side), side).values
        return GenerationConfig.from_model_config(keys.with_defaults(self.spec.family, Settings(values)).values)

    def read_options(self, directory: FilePath) -> None:
        """Sets `generation_config` from generation_config.json, where a directory has one."""
        found, is_copy = GenerationConfig.of_directory(directory)
        self.generation_config = self.generation_config if found is None else found
        self._followed = self.generation_config.to_dict() if is_copy else None

    def is_options_copy(self) -> bool:
        """True if `generation_config` came from the config, and is unchanged."""
        return self._followed is not None and self.generation_config.to_dict() == self._followed

    def follow_config(self) -> None:
        """Sets `generation_config` anew if it came from the config, and a script has changed only the config since."""
        if self.is_options_copy() and (current := self._options_of_config()).to_dict() != self._followed:
            log.warning("generate: the config says other options than it did; generation_config is the place for them")
            self.generation_config, self._followed = current, current.to_dict()

    def _old_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of a config.json as the old class read them."""
        return old.old_values(self.model_type, values)

    def _make_spec(self, gradient_checkpointing: bool) -> Spec:
        if self.dtype.name not in DTYPES:
            raise ConfigError(f"dtype: got {self.dtype.name}, expected {' or '.join(DTYPES)}; use bfloat16")
        model = keys.read_model(family(self.model_type, self.head), self.settings, self.head)
        model = old.old_model(self.model_type, self.head, self.settings, model)
        model = dataclasses.replace(model, dtype=DTYPES[self.dtype.name])
        if gradient_checkpointing:
            stacks = {name: getattr(model, name) for name in ("encoder", "decoder")}
            stacks = {name: dataclasses.replace(stack, remat="full") for name, stack in stacks.items() if stack}
            model = dataclasses.replace(model, **stacks)
        return Spec(self.model_type, self.head, model, self._sides())

    def _sides(self) -> tuple[str, ...]:
        """`Spec.sides`."""
        return ()

    def enable_gradient_checkpointing(self) -> None:
        """Computes layers again in the backward pass, which saves memory and changes no value."""
        self.spec = self._make_spec(True)

    # --- parameters ---------------------------------------------------------------------------------------------------

    @property
    def params(self) -> PyTree:
        """The parameters: nested dicts in the old layout.

        Raises:
          ValueError: the model was made with `_do_init=False`, and has none.
        """
        if not self._is_initialized:
            raise ValueError(
                "params: got a model made with _do_init=False, expected parameters of its own; keep them beside it"
            )
        return self._params

    @params.setter
    def params(self, params: PyTree) -> None:
        if not self._is_initialized:
            raise ValueError("params: got a model made with _do_init=False, which holds none; keep them beside it")
        params = params.unfreeze() if hasattr(params, "unfreeze") else dict(params)
        missing = self.required_params - set(traverse_util.flatten_dict(params))
        if missing:
            names = ", ".join(sorted("/".join(path) for path in missing)[:5])
            raise ValueError(f"params: got none of {names} ({len(missing)} leaves), expected all of required_params")
        self._params = params

    @property
    def required_params(self) -> set[Path]:
        """Paths of all leaves."""
        return set(self.spec.leaves)

    @property
    def params_shape_tree(self) -> PyTree:
        """The tree of shapes of the parameters."""
        return traverse_util.unflatten_dict(self.spec.leaves)

    def init_weights(self, rng: Array, input_shape: tuple[int, ...] = (1, 1), params: PyTree = None) -> PyTree:
        """Random parameters in the old layout; leaves that `params` has keep its values."""
        given = {} if params is None else traverse_util.flatten_dict(dict(params))
        leaves = {
            path: given[path] if path in given else initial.leaf(self.spec, self.settings, path, shape, rng)
            for path, shape in self.spec.leaves.items()
        }
        return traverse_util.unflatten_dict(leaves)

    def num_params(self, params: PyTree = None) -> int:
        """Number of parameters."""
        return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(self.params if params is None else params))

    def _cast(self, params: PyTree, dtype: Any, mask: PyTree) -> PyTree:
        convert = lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x  # noqa: E731
        if mask is None:
            return jax.tree.map(convert, params)
        # Keyed by path: a mask is often a FrozenDict beside a dict of parameters, or the other way round.
        chosen = traverse_util.flatten_dict(mask, sep="/")
        leaves = traverse_util.flatten_dict(params, sep="/")
        if differing := sorted(set(chosen) ^ set(leaves)):
            raise ValueError(f"mask: expected one bool for each parameter; only one of both trees has {differing[0]!r}")
        cast = {path: convert(x) if chosen[path] else x for path, x in leaves.items()}
        return traverse_util.unflatten_dict(cast, sep="/")

    def to_bf16(self, params: PyTree, mask: PyTree = None) -> PyTree:
        """`params` in bfloat16; with a `mask` of bools, the leaves where it is True."""
        return self._cast(params, jnp.bfloat16, mask)

    def to_fp32(self, params: PyTree, mask: PyTree = None) -> PyTree:
        """`params` in float32."""
        return self._cast(params, jnp.float32, mask)

    def to_fp16(self, params: PyTree, mask: PyTree = None) -> PyTree:
        """`params` in float16, to store; computation is in float32 or bfloat16."""
        return self._cast(params, jnp.float16, mask)

    # --- calls --------------------------------------------------------------------------------------------------------

    @property
    def module(self) -> Module:
        """The module: `module.apply({"params": params}, input_ids, ...)` with the old modules' arguments."""
        return Module(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of a forward pass; arguments as of the old class, see `inspect.signature`.

        With `train=True` and a `dropout_rng` it is a forward pass with dropout.

        Raises:
          ConfigError: an argument is unknown, or is not supported.
        """
        return self._call(**bind(type(self).__name__, self.call_signature, args, kwargs))

    call_signature: ClassVar[inspect.Signature]

    def _call(self, **given: Any) -> Any:
        """`__call__` with its arguments by name."""
        options = self._take_options(given)
        if given.get("past_key_values") is not None:
            return self._cached_call(given, options)
        given.pop("past_key_values", None)
        given, hidden = self._split_question(given)
        inputs = self._inputs(given)
        inputs, choices = flatten_choices(inputs) if self.head == "multiple_choice" else (inputs, 0)
        old.check_length(self.spec.config, inputs["input_ids"].shape[-1])
        batch = make_batch(self.spec.convention, self.settings, self.spec.config, self.head, inputs)
        values = forward(self.spec, options.params, batch, options.key, options.flags)
        if reads_end_token(self.spec.config, self.head):
            values["logits"] = end_logits(self.settings, values["logits"], inputs)
        if hidden is not None:
            values |= {name: values[name] - HIDDEN_SPAN_SCORE * hidden for name in ("start_logits", "end_logits")}
        return self._named(values, choices, options)

    def _split_question(self, given: dict[str, Any]) -> tuple[dict[str, Any], Array | None]:
        """The arguments without those that say where a question ends, and which slots no span may use."""
        if not (self.head == "qa" and self.spec.convention.hides_question):
            return given, None
        if "logits_mask" in given:  # of the module, which finds no question of its own
            hidden = given.pop("logits_mask")
            return given, None if hidden is None else jnp.asarray(hidden).reshape(jnp.shape(given["input_ids"]))
        return split_question(self.settings, {name: value for name, value in given.items() if value is not None})

    def _inputs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays of a call, as `make_batch` takes them; those that the model has no use for are left out."""
        inputs = {name: jnp.asarray(value) for name, value in given.items() if value is not None}
        if not self.spec.stack.embed.kinds:
            inputs.pop("token_type_ids", None)
        elif "token_type_ids" not in inputs and self.model_type in old.DEFAULT_KIND:
            inputs["token_type_ids"] = jnp.full_like(inputs["input_ids"], old.DEFAULT_KIND[self.model_type])
        if self.spec.config.is_seq2seq and "decoder_input_ids" not in inputs:
            inputs.pop("decoder_attention_mask", None)
            if self.model_type in T5_TYPES:
                raise ConfigError("call: got no decoder_input_ids, expected them; T5 makes none of its own")
        return inputs

    def _take_options(self, given: dict[str, Any]) -> Options:
        """Removes from `given` what is no input.

        Raises:
          ConfigError: an option is not supported.
        """
        for name in ("encoder_hidden_states", "encoder_attention_mask"):
            if given.pop(name, None) is not None:
                raise ConfigError(
                    f"call: got {name}, expected None: a decoder alone has no cross-attention here; use "
                    "FlaxEncoderDecoderModel"
                )
        given.pop("indices_rng", None)  # of random blocks, in whose place the first block is read (docs/migration.md)
        heads = given.pop("head_mask", None)
        train = bool(given.pop("train", None) or False) or given.pop("deterministic", True) is False
        key, params = given.pop("dropout_rng", None), given.pop("params", None)
        if train and key is None and self.spec.has_dropout:
            raise ConfigError("call: got train=True without dropout_rng, expected a key: the model has dropout")
        config = self.config
        wished = {name: given.pop(name, None) for name in signatures.OUTPUTS.split()}
        defaults = {name: getattr(config, name, name == "return_dict") for name in wished}
        flags = {name: defaults[name] if value is None else value for name, value in wished.items()}
        params = self.params if params is None else params
        params = params.unfreeze() if hasattr(params, "unfreeze") else params
        heads = None if heads is None else old.checked_heads(self.model_type, self.spec.stack, heads)
        return Options(
            params=params if heads is None else old.without_heads(params, heads),
            heads=heads,
            key=typed_key(key) if train else None,
            attentions=bool(flags["output_attentions"]),
            hidden_states=bool(flags["output_hidden_states"]),
            return_dict=flags["return_dict"] is not False,
        )

    def _named(self, values: Mapping[str, Any], choices: int, options: Options) -> Any:
        """The class's output object, or a tuple."""
        renamed = self.spec.convention.renamed
        values = {renamed.get(name, name): value for name, value in values.items()}
        if options.heads is not None and "attentions" in values:
            values["attentions"] = old.masked_attentions(values["attentions"], options.heads)
        if choices:
            values["logits"] = values["logits"].reshape(-1, choices)
        return options.finish(self.output_class(**values))

    output_class: ClassVar[type[ModelOutput]]

    # --- with a cache -------------------------------------------------------------------------------------------------

    def init_cache(self, batch_size: int, max_length: int, *unused: Any, **ignored: Any) -> Cache:
        """An empty cache for `past_key_values`, with room for `max_length` slots."""
        if self.spec.config.decoder is None:
            raise ConfigError(f"init_cache: got {type(self).__name__}, expected a causal model or an encoder-decoder")
        return cached.empty(self.spec, batch_size, max_length)

    def _cached_call(self, given: dict[str, Any], options: Options) -> Any:
        """The call of a causal model whose past is in a cache."""
        cache = given.pop("past_key_values")
        if self.spec.config.decoder is None or self.spec.config.encoder is not None or not isinstance(cache, Cache):
            raise ConfigError("call: got past_key_values, expected a causal model, and what its init_cache returned")
        tokens = jnp.asarray(given["input_ids"])
        params = converted(self.spec, options.params)
        values = self.decode_step(params, tokens, cache, given, options)
        return options.finish(self.output_class(**values))

    def decode_step(
        self,
        params: PyTree,
        tokens: Array,
        cache: Cache,
        given: Mapping[str, Any],
        options: Options,
        memory: Any = None,
    ) -> dict[str, Any]:
        """Outputs of new tokens, whose keys and values are added to the cache.

        Args:
          params: parameters here.
          given: `attention_mask` of all slots of the cache, `position_ids` and `token_type_ids` of the tokens.
        """
        mask = given.get("attention_mask")
        mask = jnp.ones_like(cache.position) if mask is None else jnp.asarray(mask)
        if mask.shape[-1] != cache.position.shape[1]:
            raise ConfigError(
                f"call: got an attention_mask of {mask.shape[-1]} slots beside past_key_values, expected one of all "
                f"{cache.position.shape[1]} slots of the cache"
            )
        position = given.get("position_ids")
        if position is not None:
            position = jnp.broadcast_to(jnp.asarray(position) - self.first_position, tokens.shape)
            tokens = cached.check_order(self.spec, cache, tokens, mask, position)
        slots, cache_slots, written = cached.query_slots(self.spec, cache, tokens.shape[1], mask, position)
        kinds = self.spec.stack.embed.kinds
        token_type = given.get("token_type_ids")
        if kinds and token_type is None:
            token_type = jnp.full_like(tokens, old.DEFAULT_KIND.get(self.model_type, 0))
        target = Stream(tokens, slots, jnp.asarray(token_type) if kinds else None)
        x, logits, keys_values, sown = cached.advance(
            self.spec, params, target, cache, cache_slots, memory, options.key, options.flags
        )
        past = Cache(keys_values, written, cache.index + tokens.shape[1])
        return self.step_outputs(x, logits, past, sown, options)

    def step_outputs(
        self, x: Array, logits: Array, past: Cache | None, sown: PyTree, options: Options
    ) -> dict[str, Any]:
        """Named outputs of a decoder's step."""
        values: dict[str, Any] = (
            {"logits": logits} if self.spec.config.head.kind == "tokens" else {"last_hidden_state": x}
        )
        if past is not None:
            values["past_key_values"] = past
        if options.hidden_states:
            values["hidden_states"] = old.hidden_states(self.spec.type_of("decoder"), sown)
        if options.attentions:
            values["attentions"] = tuple(sown["blocks"]["attention"]["probabilities"][0])
            if options.heads is not None:
                values["attentions"] = old.masked_attentions(values["attentions"], options.heads)
            if "cross" in sown["blocks"]:
                values["cross_attentions"] = tuple(sown["blocks"]["cross"]["probabilities"][0])
        return values

    @property
    def first_position(self) -> int:
        """The number that `position_ids` give to the first position: RoBERTa's begin after the padding's id."""
        return self.spec.first_position

    def can_generate(self) -> bool:
        """True if the model writes text."""
        return self.spec.config.decoder is not None and self.spec.config.head.kind == "tokens"

"""The language in which a Hugging Face family is written: a table that imports checkpoints and exports them.

A family is one file in `jaxformer/hf/families/` that defines `FAMILY = Family(...)`. Its three functions are

    read_config(settings, head)   config.json    -> ModelConfig
    write_config(model, head)     ModelConfig    -> config.json
    rows(model, head)             names and layouts of all tensors, read in both directions

A row says which tensor of the file is which parameter here, and how the axes are rearranged:

    Row("h.{layer}.attn.c_attn.weight", ("decoder/blocks/attention/query/kernel", ...), "D (n H K) -> n D H K", sizes)

reads the fused matrices `[D, 3 * D]` of all layers into three parameters `[L, D, H, K]`, and writes them back.
`linear_rows`, `norm_rows` and `attention_rows` make the rows of common modules. docs/hugging-face.md adds a family step
by step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from jaxformer import registry
from jaxformer.config import AttentionConfig, FeedForwardConfig, HeadConfig, ModelConfig, StackConfig
from jaxformer.config.schema import Activation
from jaxformer.errors import ConfigError

STACKED_AXES = ("{layer}", "{expert}")
"""Placeholders for numbers in tensor names. Parameters are stacked over them, in this order."""


@dataclass(frozen=True)
class Row:
    """One tensor of the file and its parameter; with placeholders, one tensor a layer, or one an expert of each layer.

    Attributes:
      hf_name: name of the tensor. `{layer}` stands for the number of the layer; the parameter is then stacked over
        layers, `[L, ...]`. With `{expert}` it is stacked over experts, too: `[L, E, ...]`.
      param_path: path of the parameter, or paths of several parameters that the tensor holds together. The right side
        of the layout then begins with an axis `n` over them.
      layout: einops pattern "axes in the file -> axes of the parameter" for one tensor; "": the same axes.
      sizes: lengths of the axes that stand in parentheses in the pattern.
      splits: lengths of the parts along the tensor's first axis, one for each of several parameters; each part then has
        the layout, without an axis `n`, and lengths that the parts do not share are left out of `sizes`.
      groups: with `splits`, equal parts of the first axis, each of which holds a piece of every parameter, as long as
        `splits` says; the pieces of a parameter follow one another in their order.
      optional: the parameter is zero if the file lacks the tensor.
      first_layer: number in the file of the parameter's first layer.
    """

    hf_name: str
    param_path: str | tuple[str, ...]
    layout: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    splits: tuple[int, ...] = ()
    groups: int = 1
    optional: bool = False
    first_layer: int = 0

    @property
    def param_paths(self) -> tuple[str, ...]:
        return (self.param_path,) if isinstance(self.param_path, str) else self.param_path

    @property
    def stacked_axes(self) -> int:
        """Number of leading axes over which the parameter is stacked: 0, 1 (layers) or 2 (layers and experts)."""
        return sum(placeholder in self.hf_name for placeholder in STACKED_AXES)

    def name(self, index: Sequence[int]) -> str:
        """The name of one tensor; `index` holds the numbers of the layer and the expert."""
        name, numbers = self.hf_name, iter(index)
        for placeholder, first in zip(STACKED_AXES, (self.first_layer, 0), strict=True):
            name = name.replace(placeholder, str(first + next(numbers))) if placeholder in name else name
        return name


@dataclass(frozen=True)
class CallConvention:
    """The conventions of a family's model classes and tokenizers.

    Attributes:
      positions: slots that get a position id: "slots" (all), "ids" (those without the padding token, as RoBERTa
        counts), or "mask" (those that the attention mask shows, as OPT and BLOOM count).
      takes_position_ids: False where the family's classes have no argument `position_ids`, which is then refused.
      decoder_positions: the same for the decoder beside an encoder; None: as `positions` says.
      scales_embeddings: True where `inputs_embeds` are multiplied by the square root of the width as rows of the table
        are (`embed.scale`); False where the classes only scale what they look up.
      decoder_scales_embeddings: the same for the decoder beside an encoder; None: as `scales_embeddings` says.
      is_pair: the model is put together of two (`families/encoder_decoder.py`). A call then takes token types and
        positions of either side, and hides the padding in a decoder's input that is made of labels.
      decoder_start_token: first token of a decoder's input if config.json names none; None: it has to name one.
      decoder_input_from_source: without decoder inputs, the decoder reads the encoder's input: with all heads (BART)
        or with those named (T5).
      starts_with_last_token: a decoder's input that is made of labels begins with their last token that is not padding
        (mBART's language), in place of a start token.
      prefix_tokens, separator_tokens, suffix_tokens: special tokens before a text, between the two texts of a pair, and
        after them. They count if there is no tokenizer.json that says it.
      last_token_type: token type of the last special token if it has one of its own (XLNet).
      reads_last_token: classifiers of texts decide at the rightmost token that is not padding, by its id; beside an
        encoder they read the source, shifted right, with its padding hidden (T5Gemma).
      labels_are_shares: a classifier of texts without a `problem_type` takes labels `[B, C]` as shares of the classes,
        and leaves out negative classes (DeBERTa).
      start_and_padding: `settings -> (start token, padding token)` of a decoder's input that is made of labels or of
        the source; None: `decoder_start_token_id` and `pad_token_id`.
      hides_padding: `model -> bool`, True where tokens equal to the padding token are hidden in a call without an
        attention mask, False where such a call is refused; None: they are tokens like others.
      choices_begin_first: choices that are padded before their first token are refused, since the library pools the
        first token there, and not the first slot (ModernBERT).
      hides_question: in the head for spans, the tokens before the context lose all scores, and have token type 0
        where the others have 1 (BigBird).
      spans_read_padding: padding that sees no token has scores of other slots in the library's only attention, so a
        loss of spans is refused where there is some.
      renamed: names of arguments and outputs -> the family's own.
      call: a function that replaces the usual call of `jaxformer/hf/forward.py`; None: the usual one.
    """

    positions: str = "slots"
    takes_position_ids: bool = True
    decoder_positions: str | None = None
    scales_embeddings: bool = False
    decoder_scales_embeddings: bool | None = None
    is_pair: bool = False
    decoder_start_token: int | None = 0
    decoder_input_from_source: bool | tuple[str, ...] = False
    starts_with_last_token: bool = False
    prefix_tokens: tuple[str, ...] = ()
    separator_tokens: tuple[str, ...] = ()
    suffix_tokens: tuple[str, ...] = ()
    last_token_type: int | None = None
    reads_last_token: bool = False
    labels_are_shares: bool = False
    start_and_padding: Callable[[Settings], tuple[Any, Any]] | None = None
    hides_padding: Callable[[ModelConfig], bool] | None = None
    choices_begin_first: bool = False
    hides_question: bool = False
    spans_read_padding: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)
    call: Callable[..., Any] | None = None

    def decodes_source(self, head: str) -> bool:
        """True if the decoder reads the encoder's input where it is given none."""
        heads = self.decoder_input_from_source
        return heads if isinstance(heads, bool) else head in heads

    @property
    def of_decoder(self) -> CallConvention:
        """The convention with what the decoder's side has of its own."""
        positions, scales = self.decoder_positions, self.decoder_scales_embeddings
        return replace(
            self,
            positions=self.positions if positions is None else positions,
            scales_embeddings=self.scales_embeddings if scales is None else scales,
        )


@dataclass(frozen=True)
class Family:
    """One architecture of the transformers library.

    Regular expressions match whole tensor names, with `prefix`.

    Attributes:
      model_types: values of `model_type` that this family reads; an export writes the first.
      heads: head -> class name in `architectures`. Heads are causal_lm, masked_lm, pretraining (the two outputs of BERT
        and ALBERT, or ELECTRA's discriminator), seq2seq, sequence, token, qa, multiple_choice, next_sentence (BERT's
        second output alone), model (the body), and bare (a body without BERT's pooler) or encoder (T5's encoder alone).
      head_prefixes: head -> start of the body's tensor names in a file with that head, where it is not `prefix`.
      other_classes: further class names -> head; the library's Flax classes wrote some.
      read_config: `(settings, head) -> ModelConfig`.
      write_config: `(model, head) -> config.json`, without the keys that all families share. It raises ConfigError if
        the family cannot express the model.
      rows: `(model, head) -> rows`, which cover every parameter.
      prefix: start of the body's tensor names in a file with a head. Files of a bare model lack it.
      droppable_tensors: expressions for tensors of heads and poolers, which are dropped with a notice if the head that
        is loaded has no such parameters.
      ignored_tensors: expressions for tensors that are no parameters (buffers in old files).
      duplicate_tensors: (first, second) names of one parameter. The library reads the first if a file has both; an
        untied head is written with both.
      embedding_tables: names of the embedding that encoder and decoder share, of the encoder's and of the decoder's.
        The latter two count if a file has them and they differ.
      ignored_keys: config.json keys that change nothing here -> the reason; see `jaxformer/hf/keys.py`.
      renamed_tensors: (regular expression, replacement) from older tensor names to current ones.
      constant_tensors: `model -> tensors` that the file holds and that are no parameters.
      tied_tensors: names of the output projection and of the embedding that it may be tied to.
      relation: what the second output of its pretraining head says, as `task.relation`.
      convention: how its models are called.
      resolve: `(model, tensors) -> model` for what config.json leaves to the tensors; it removes tensors that are no
        parameters of that model.
      specialise: `settings -> family` for a `model_type` whose config.json names further ones; None: it names none.
      generation_values: `settings -> keys` that hold the options of `generate`, where there is no
        generation_config.json.
    """

    model_types: tuple[str, ...]
    heads: Mapping[str, str]
    read_config: Callable[[Settings, str], ModelConfig]
    write_config: Callable[[ModelConfig, str], dict[str, Any]]
    rows: Callable[[ModelConfig, str], Sequence[Row]]
    prefix: str = ""
    head_prefixes: Mapping[str, str] = field(default_factory=dict)
    other_classes: Mapping[str, str] = field(default_factory=dict)
    droppable_tensors: tuple[str, ...] = ()
    ignored_tensors: tuple[str, ...] = ()
    duplicate_tensors: tuple[tuple[str, str], ...] = ()
    embedding_tables: tuple[str, str, str] | None = None
    ignored_keys: Mapping[str, str] = field(default_factory=dict)
    renamed_tensors: tuple[tuple[str, str], ...] = ()
    tied_tensors: tuple[str, str] | None = None
    relation: Literal["next_sentence", "sentence_order"] = "next_sentence"
    convention: CallConvention = CallConvention()
    constant_tensors: Callable[[ModelConfig], dict[str, np.ndarray]] = lambda model: {}
    resolve: Callable[[ModelConfig, dict[str, Any]], ModelConfig] = lambda model, tensors: model
    specialise: Callable[[Settings], Family] | None = None
    generation_values: Callable[[Settings], Mapping[str, Any]] = lambda settings: settings.values

    def file_rows(self, model: ModelConfig, head: str) -> list[Row]:
        """`rows` with the names of a file that is written with the head; those of a bare model still have `prefix`."""
        start = self.head_prefixes.get(head, self.prefix)

        def renamed(row: Row) -> Row:
            of_head = any(path.startswith("head/") for path in row.param_paths)
            return row if of_head else replace(row, hf_name=start + row.hf_name.removeprefix(self.prefix))

        return (
            [renamed(row) for row in self.rows(model, head)] if start != self.prefix else list(self.rows(model, head))
        )


class Settings:
    """The keys of a config.json, with the library's defaults. Errors name the file.

    Calling it reads a key: `settings("hidden_size", 768)`.

    Attributes:
      path: the file, for messages.
      values: its content.
      defaults: defaults of the library's config class for absent keys. They win over the defaults in this code.
      read_keys: keys that were read.
      unread_keys: keys inside a value (`rope_parameters.factor`) that nothing reads.
    """

    def __init__(
        self, values: Mapping[str, Any], path: str = "config.json", defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.values, self.path, self.defaults = values, path, defaults or {}
        self.read_keys: set[str] = set()
        self.unread_keys: set[str] = set()

    def with_values(self, values: Mapping[str, Any]) -> Settings:
        """A copy with other values, which shares the record of keys that were read."""
        other = Settings(values, self.path, self.defaults)
        other.read_keys, other.unread_keys = self.read_keys, self.unread_keys
        return other

    def raw(self, name: str, default: Any = None) -> Any:
        """The value as it stands in the file, null included; the default if the key is absent."""
        self.read_keys.add(name)
        return self.values.get(name, self.defaults.get(name, default))

    def __call__(self, name: str, default: Any = ConfigError, *aliases: str) -> Any:
        """The value of a key, of one of its `aliases`, or the default. Null counts as absent.

        Raises:
          ConfigError: the value is not of the default's type, or the key is absent and there is no default.
        """
        self.read_keys.update((name, *aliases))
        for key in (name, *aliases):
            if key in self.values and (self.values[key] is not None or default is None):
                return self._typed(key, self.values[key], default)
        if name not in self.values and self.defaults.get(name) is not None:
            return self._typed(name, self.defaults[name], default)
        if default is ConfigError:
            raise ConfigError(f"{self.path}: got no {name}, expected one; the file is not of this model_type")
        return default

    def size(self, name: str, default: int | type | None = ConfigError, *aliases: str) -> Any:
        """A whole number of at least 1 (or None if that is the default).

        Raises:
          ConfigError: the value is anything else.
        """
        value = self(name, default, *aliases)
        if value is None and default is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
            raise ConfigError(f"{self.path}: got {name} {value!r}, expected a whole number of at least 1; fix the file")
        return value

    def layer_kinds(self, layers: int, allowed: tuple[str, ...]) -> list[str] | None:
        """`layer_types`: the kind of each of the `layers`; None where the file does not say it.

        Raises:
          ConfigError: they are not one of the `allowed` kinds for each layer.
        """
        kinds = self("layer_types", None)
        if kinds is None:
            return None
        if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in allowed for kind in kinds):
            raise ConfigError(
                f"{self.path}: got layer_types {kinds!r:.80}, expected {' or '.join(allowed)} for each of the {layers} "
                "layers; fix the file"
            )
        return kinds

    def expect(self, name: str, *allowed: Any) -> None:
        """Refuses a variant that is not implemented. The first of `allowed` is the default.

        Raises:
          ConfigError: the value is not among `allowed`.
        """
        value = self(name, allowed[0])
        if value not in allowed:
            expected = " or ".join(map(repr, allowed))
            raise ConfigError(f"{self.path}: got {name} {value!r}, expected {expected}; this variant is not supported")

    def activation(self, name: str, default: str) -> Activation:
        """The jaxformer name of an activation function; `default` is a name of the library.

        Raises:
          ConfigError: the function is unknown.
        """
        hf_name = self(name, default)
        if not isinstance(hf_name, str) or hf_name not in ACTIVATIONS:
            raise ConfigError(f"{self.path}: got {name} {hf_name!r}, expected one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[hf_name]

    def _typed(self, name: str, value: Any, default: Any) -> Any:
        expected = type(default)
        if expected is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if expected in (bool, int, float, str) and type(value) is not expected:
            raise ConfigError(f"{self.path}: got {name} {value!r}, expected {expected.__name__}; fix the file")
        return value


ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python": "gelu",
    "quick_gelu": "gelu_sigmoid",
    "relu": "relu",
    "relu2": "relu_squared",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
    "mish": "mish",
    "sigmoid": "sigmoid",
}
"""Activation function: name in config.json -> name in a jaxformer config."""


def hf_activation(activation: str) -> str:
    """The first of the library's names for an activation function."""
    return next(hf_name for hf_name, name in ACTIVATIONS.items() if name == activation)


# --- finding the family -----------------------------------------------------------------------------------------------


def families() -> Iterator[tuple[str, Family]]:
    """The families in `jaxformer/hf/families/` and those of the modules in `JAXFORMER_FAMILIES`, with their names."""
    package = "jaxformer.hf.families"
    external = os.environ.get("JAXFORMER_FAMILIES", "").split(",")
    for name in (*registry.names(package), *filter(None, external)):
        yield name, registry.member(package, name, "FAMILY")


def family_of(settings: Settings) -> Family:
    """The family that reads this config.json.

    Raises:
      ConfigError: its `model_type` is unknown.
    """
    model_type, known = settings("model_type", ""), []
    for _, family in families():
        if model_type in family.model_types:
            return family if family.specialise is None else family.specialise(settings)
        known += family.model_types
    expected = f"one of {', '.join(sorted(known))}{registry.nearest(model_type, known)}"
    raise ConfigError(f"{settings.path}: got model_type {model_type!r}, expected {expected}")


def head_of(family: Family, settings: Settings) -> str:
    """The head that `architectures` names; "model" if the key is absent.

    Raises:
      ConfigError: the family has no such head.
    """
    architectures = settings("architectures", None) or []
    classes = [(architecture, head) for head, architecture in family.heads.items()]
    for architecture, head in (*classes, *family.other_classes.items()):
        if architecture in architectures:
            return head
    if not architectures and "model" in family.heads:
        return "model"
    if not architectures and len(family.heads) == 1:
        return next(iter(family.heads))
    expected = ", ".join(family.heads.values())
    raise ConfigError(f"{settings.path}: got architectures {architectures}, expected one of {expected}")


# --- rows of common modules -------------------------------------------------------------------------------------------


def attention_sizes(config: AttentionConfig, width: int) -> dict[str, int]:
    """Sizes of the axes H (heads), G (key heads) and K (head width) in layouts of attention tensors."""
    head_width = config.head_width or width // config.heads
    return {"H": config.heads, "G": config.kv_heads or config.heads, "K": head_width}


def linear_rows(
    hf_name: str,
    param_path: str,
    weight: str = "O I -> I O",
    bias: str = "",
    sizes: Mapping[str, int] | None = None,
    has_bias: bool = True,
) -> list[Row]:
    """Rows of a torch Linear: `weight` `[out, in]`, and `bias` if it has one. The patterns are layouts of `Row`."""
    rows = [Row(f"{hf_name}.weight", f"{param_path}/kernel", weight, sizes or {})]
    return [*rows, Row(f"{hf_name}.bias", f"{param_path}/bias", bias, sizes or {})] if has_bias else rows


def norm_rows(hf_name: str, param_path: str, has_bias: bool = True) -> list[Row]:
    """Rows of a layer norm, or without bias of an RMS norm."""
    rows = [Row(f"{hf_name}.weight", f"{param_path}/scale")]
    return [*rows, Row(f"{hf_name}.bias", f"{param_path}/bias")] if has_bias else rows


def attention_rows(
    hf_name: str,
    param_path: str,
    config: AttentionConfig,
    width: int,
    names: Sequence[str] = ("q", "k", "v", "o"),
) -> list[Row]:
    """Rows of an attention layer with four torch Linears, with the biases that `config` has.

    Args:
      width: width of the model.
      names: modules of the query, key, value and output projection, below `hf_name`.
    """
    sizes = attention_sizes(config, width)
    key_bias = config.bias if config.key_bias is None else config.key_bias
    output_bias = config.bias if config.output_bias is None else config.output_bias
    inputs = [("query", "H", config.bias), ("key", "G", key_bias), ("value", "G", config.bias)]
    rows = []
    for name, (part, heads, has_bias) in zip(names, inputs, strict=False):
        axes = {heads: sizes[heads], "K": sizes["K"]}
        rows.append(
            Row(f"{hf_name}.{name}.weight", f"{param_path}/{part}/kernel", f"({heads} K) D -> D {heads} K", axes)
        )
        if has_bias:
            rows.append(Row(f"{hf_name}.{name}.bias", f"{param_path}/{part}/bias", f"({heads} K) -> {heads} K", axes))
    axes = {"H": sizes["H"], "K": sizes["K"]}
    rows.append(Row(f"{hf_name}.{names[3]}.weight", f"{param_path}/out/kernel", "D (H K) -> H K D", axes))
    return [*rows, Row(f"{hf_name}.{names[3]}.bias", f"{param_path}/out/bias")] if output_bias else rows


# --- heads ------------------------------------------------------------------------------------------------------------

SPAN_HEAD = HeadConfig(kind="slots", tied=False, classes=2)
"""Extractive question answering: a start score and an end score for every slot."""

NO_HEAD = HeadConfig(kind="none", tied=False)
"""A bare model, whose output are hidden states."""


def count_classes(settings: Settings) -> int:
    """Number of classes of a classifier: the entries of `id2label`, else `num_labels`, else 2."""
    names = settings("id2label", None)
    if names is not None and not isinstance(names, Mapping):
        raise ConfigError(f"{settings.path}: got id2label {names!r:.80}, expected an object of labels; fix the file")
    return len(names) if names else settings.size("num_labels", 2)


def classifier_head(settings: Settings, kind: Literal["classes", "slots"], **fields: Any) -> HeadConfig:
    """A classifier: kind "classes" (one decision a sequence) or "slots" (one a token)."""
    return HeadConfig(kind=kind, tied=False, classes=count_classes(settings), **fields)


def choice_head(**fields: Any) -> HeadConfig:
    """One score for each of several texts (multiple choice), which a call compares."""
    return HeadConfig(kind="classes", tied=False, classes=1, **fields)


def token_classifier_dropout(settings: Settings) -> float:
    """Dropout of a decoder's token classifier: `classifier_dropout`, else `hidden_dropout`, else 0.1."""
    for name in ("classifier_dropout", "hidden_dropout"):
        if settings(name, None) is not None:
            return settings(name, 0.0)
    return 0.1


# --- models to export -------------------------------------------------------------------------------------------------


def require_stack(model: ModelConfig, name: str) -> StackConfig:
    """The encoder or the decoder of a model.

    Raises:
      ConfigError: the model has none.
    """
    stack = getattr(model, name)
    if stack is None:
        raise ConfigError(f"export: got a model without {name}, expected one for this family; choose another")
    return stack


def require_ffn(stack: StackConfig) -> FeedForwardConfig:
    """The feed-forward layers of a stack.

    Raises:
      ConfigError: the stack has none.
    """
    if stack.ffn is None:
        raise ConfigError("export: got a stack without feed-forward layers, expected them for this family")
    return stack.ffn

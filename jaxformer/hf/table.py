"""The language that families are written in: rows that say which tensor of theirs is which parameter of ours.

A row is read in both directions, so what imports a checkpoint also exports it.

    Row("h.{layer}.attn.c_attn.weight", qkv("decoder", "kernel"), "D (n H K) -> n D H K", heads)

says that the fused `[D, 3 D]` matrices of all layers are our three stacked kernels `[L, D, H, K]`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxformer import registry
from jaxformer.config import AttentionConfig, ConfigError, EncodingConfig, HeadConfig, ModelConfig, StackConfig

STACKED = ("{layer}", "{expert}")
"""What stands for numbers in a name; our parameters are stacked over them, in this order."""


@dataclass(frozen=True)
class Row:
    """One tensor of theirs, or one a layer, or one an expert of a layer.

    Attributes:
      theirs: its name; `{layer}` stands for the layer's number, and then ours is stacked over layers, `[L, ...]`; with
        `{expert}` also over experts, `[L, E, ...]`.
      ours: path of our parameter, or of several that theirs holds together; their layout then begins with an axis n.
      layout: einops pattern "theirs -> ours" for one tensor; "": the same.
      sizes: of the axes that a pattern takes apart.
      optional: zeros where the file lacks it.
    """

    theirs: str
    ours: str | tuple[str, ...]
    layout: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    optional: bool = False

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.ours,) if isinstance(self.ours, str) else self.ours

    @property
    def depth(self) -> int:
        """Over how many leading axes ours is stacked."""
        return sum(word in self.theirs for word in STACKED)

    def name(self, index: Sequence[int]) -> str:
        """Theirs at a place of these axes."""
        name, numbers = self.theirs, iter(index)
        for word in STACKED:
            name = name.replace(word, str(next(numbers))) if word in name else name
        return name


@dataclass(frozen=True)
class Convention:
    """How models are called, where families differ.

    Attributes:
      positions: how positions count: "slots" (every slot), "ids" (RoBERTa: only tokens that are not padding).
      start: what a decoder's input begins with, where config.json names no token.
      repeats: a decoder that is given nothing reads the encoder's input again (BART).
      before, between, after: names of the special tokens before a text, between a pair, and after it, where no
        tokenizer.json says it.
      last_kind: token type of the last special token, if it is one of its own (XLNet).
      call: what reads inputs and makes outputs; None: the usual way, see `jaxformer/hf/calling.py`.
    """

    positions: str = "slots"
    start: int = 0
    repeats: bool = False
    before: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    last_kind: int | None = None
    call: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Family:
    """One architecture of the other library.

    Attributes:
      types: values of `model_type` that it reads; the first is what it writes.
      heads: our word for a head -> the class named in `architectures`.
      read: `(settings, head) -> ModelConfig`.
      write: `(model, head) -> config.json` without what is the same for all families, or a ConfigError that says what
        the family cannot express.
      rows: `(model, head) -> rows`, of every parameter.
      prefix: what begins the names of the body in a file that has a head; a bare model's file lacks it.
      spare: regular expressions of tensors of heads and poolers, dropped with a notice by a model that lacks them.
      ignored: regular expressions of tensors that are no parameters (buffers of old files).
      twins: (stronger, weaker): two names of one parameter, of which the other library reads the first where both are
        there. A file of an untied head needs both.
      tables: names of the embedding of both sides, of the encoder's own and of the decoder's own. Where a file has its
        own ones and they differ, they count.
      free: keys of config.json that change nothing here, with the reason; see `jaxformer/hf/keys.py`.
      renamed: (regular expression, replacement) from older names to today's.
      constants: `model -> tensors` that are no parameters but stand in a file.
      output: names of the output projection and of the embedding that it may be tied to.
      convention: how it is called.
    """

    types: tuple[str, ...]
    heads: Mapping[str, str]
    read: Callable[[Settings, str], ModelConfig]
    write: Callable[[ModelConfig, str], dict[str, Any]]
    rows: Callable[[ModelConfig, str], Sequence[Row]]
    prefix: str = ""
    spare: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    twins: tuple[tuple[str, str], ...] = ()
    tables: tuple[str, str, str] | None = None
    free: Mapping[str, str] = field(default_factory=dict)
    renamed: tuple[tuple[str, str], ...] = ()
    output: tuple[str, str] | None = None
    convention: Convention = Convention()
    constants: Callable[[ModelConfig], dict[str, np.ndarray]] = lambda model: {}


class Settings:
    """A config.json: fields with the defaults of the other library, and errors that name the file.

    Attributes:
      where: the file, for messages.
      values: what it says.
      defaults: what the other library's class says where the file is silent; it goes before the defaults in this code.
      asked: names that were asked for.
      unread: names inside of a value (`rope_parameters.factor`) that were not.
    """

    def __init__(
        self, values: Mapping[str, Any], where: str = "config.json", defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.values, self.where, self.defaults = values, where, defaults or {}
        self.asked: set[str] = set()
        self.unread: set[str] = set()

    def replaced(self, values: Mapping[str, Any]) -> Settings:
        """Other values of the same file; what is asked of either counts as asked of both."""
        other = Settings(values, self.where, self.defaults)
        other.asked, other.unread = self.asked, self.unread
        return other

    def given(self, name: str, default: Any = None) -> Any:
        """The setting as it stands, where null is a value of its own; the default if it is absent."""
        self.asked.add(name)
        return self.values.get(name, self.defaults.get(name, default))

    def __call__(self, name: str, default: Any = ConfigError, *others: str) -> Any:
        """The setting `name`, or under an `others` name, or the default; without one it must be there.

        A number must be a number: a default of a type is also a demand.
        """
        self.asked.update((name, *others))
        for key in (name, *others):
            if key in self.values and (self.values[key] is not None or default is None):
                return self._typed(key, self.values[key], default)
        if name not in self.values and self.defaults.get(name) is not None:
            return self._typed(name, self.defaults[name], default)
        if default is ConfigError:
            raise ConfigError(f"{self.where}: got no {name}, expected one; the file is not of this model_type")
        return default

    def size(self, name: str, default: int | type | None = ConfigError, *others: str) -> Any:
        """A setting that is a whole number of at least 1 (or None if that is the default)."""
        value = self(name, default, *others)
        if value is None and default is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
            raise ConfigError(
                f"{self.where}: got {name} {value!r}, expected a whole number of at least 1; fix the file"
            )
        return value

    def expect(self, name: str, *allowed: Any) -> None:
        """Refuses settings that this code does not compute. The first of `allowed` is the default."""
        value = self(name, allowed[0])
        if value not in allowed:
            expected = " or ".join(map(repr, allowed))
            raise ConfigError(f"{self.where}: got {name} {value!r}, expected {expected}; this variant is not supported")

    def activation(self, name: str, default: str) -> str:
        """An activation function by their name, as our name."""
        theirs = self(name, default)
        if not isinstance(theirs, str) or theirs not in ACTIVATIONS:
            raise ConfigError(f"{self.where}: got {name} {theirs!r}, expected one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[theirs]

    def _typed(self, name: str, value: Any, default: Any) -> Any:
        kind = type(default)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if kind in (bool, int, float, str) and type(value) is not kind:
            raise ConfigError(f"{self.where}: got {name} {value!r}, expected {kind.__name__}; fix the file")
        return value


ACTIVATIONS = {
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
"""Their activation -> ours."""


def their_activation(ours: str) -> str:
    """The first of their names for an activation of ours."""
    return next(theirs for theirs, name in ACTIVATIONS.items() if name == ours)


def families() -> Iterator[tuple[str, Family]]:
    """Every file of `jaxformer/hf/families/`, by name."""
    package = "jaxformer.hf.families"
    for name in registry.names(package):
        yield name, registry.member(package, name, "FAMILY")


def family_of(settings: Settings) -> Family:
    """The family that reads this config.json."""
    wanted, known = settings("model_type", ""), []
    for _, family in families():
        if wanted in family.types:
            return family
        known += family.types
    expected = f"one of {', '.join(sorted(known))}{registry.nearest(wanted, known)}"
    raise ConfigError(f"{settings.where}: got model_type {wanted!r}, expected {expected}")


def head_of(family: Family, settings: Settings) -> str:
    """Our word for the head that `architectures` names; "model" where it is silent."""
    named = settings("architectures", None) or []
    for head, architecture in family.heads.items():
        if architecture in named:
            return head
    if not named and "model" in family.heads:
        return "model"
    expected = ", ".join(family.heads.values())
    raise ConfigError(f"{settings.where}: got architectures {named}, expected one of {expected}")


def attention_sizes(config: AttentionConfig, width: int) -> dict[str, int]:
    """Axis sizes H, G and K for the patterns of attention tensors."""
    head_width = config.head_width or width // config.heads
    return {"H": config.heads, "G": config.kv_heads or config.heads, "K": head_width}


def linear(theirs: str, ours: str, weight: str = "O I -> I O", bias: str = "", **sizes: int) -> list[Row]:
    """Rows of a torch Linear: `weight` [out, in] and `bias`; a `bias` pattern of None leaves the bias out."""
    return [
        Row(f"{theirs}.weight", f"{ours}/kernel", weight, sizes),
        Row(f"{theirs}.bias", f"{ours}/bias", bias, sizes),
    ]


def norm(theirs: str, ours: str, bias: bool = True) -> list[Row]:
    """Rows of a layer norm (or of an RMS norm, without bias)."""
    rows = [Row(f"{theirs}.weight", f"{ours}/scale")]
    return [*rows, Row(f"{theirs}.bias", f"{ours}/bias")] if bias else rows


def projections(
    theirs: str, ours: str, config: AttentionConfig, width: int, names: Sequence[str] = ("q", "k", "v", "o")
) -> list[Row]:
    """Rows of four torch Linears, `names` in the order query, key, value, output, with the biases that `config` has."""
    sizes = attention_sizes(config, width)
    key_bias = config.bias if config.key_bias is None else config.key_bias
    output_bias = config.bias if config.output_bias is None else config.output_bias
    parts = [("query", "H", config.bias), ("key", "G", key_bias), ("value", "G", config.bias)]
    rows = []
    for name, (part, heads, bias) in zip(names, parts, strict=False):
        taken = {heads: sizes[heads], "K": sizes["K"]}
        rows.append(Row(f"{theirs}.{name}.weight", f"{ours}/{part}/kernel", f"({heads} K) D -> D {heads} K", taken))
        if bias:
            rows.append(Row(f"{theirs}.{name}.bias", f"{ours}/{part}/bias", f"({heads} K) -> {heads} K", taken))
    taken = {"H": sizes["H"], "K": sizes["K"]}
    rows.append(Row(f"{theirs}.{names[3]}.weight", f"{ours}/out/kernel", "D (H K) -> H K D", taken))
    return [*rows, Row(f"{theirs}.{names[3]}.bias", f"{ours}/out/bias")] if output_bias else rows


def labels(settings: Settings) -> int:
    """How many classes a classifier has: the entries of `id2label`, else `num_labels`, else 2."""
    names = settings("id2label", None)
    if names is not None and not isinstance(names, Mapping):
        raise ConfigError(f"{settings.where}: got id2label {names!r:.80}, expected an object of labels; fix the file")
    return len(names) if names else settings.size("num_labels", 2)


def classifier(settings: Settings, kind: str, **fields: Any) -> HeadConfig:
    """The head of a classifier: kind "classes" (a decision a sequence) or "slots" (one a token)."""
    return HeadConfig(kind=kind, tied=False, classes=labels(settings), **fields)


def token_dropout(settings: Settings) -> float:
    """Dropout before the decision of a decoder's token classifier: the first of its settings that is given, or 0.1."""
    names = ("classifier_dropout", "hidden_dropout")
    found = [settings(name, 0.0) for name in names if settings(name, None) is not None]
    return (*found, 0.1)[0]


SPANS = HeadConfig(kind="slots", tied=False, classes=2)
"""Extractive question answering: a start and an end score for every slot."""

HIDDEN = HeadConfig(kind="none", tied=False)
"""A bare model."""


def side(model: ModelConfig, name: str) -> StackConfig:
    """The encoder or decoder that a family needs.

    Raises:
      ConfigError: the model lacks it.
    """
    stack = getattr(model, name)
    if stack is None:
        raise ConfigError(f"export: got a model without {name}, expected one for this family; choose another")
    return stack


def same(model: ModelConfig, again: ModelConfig) -> list[str]:
    """Where two model configs differ in what they compute: paths with both values."""
    return list(_differences(normal(model), normal(again), "model"))


def normal(model: ModelConfig) -> ModelConfig:
    """The config with every default spelled out and what its kinds do not read reset, so that equals compare equal."""
    sides = {}
    for name in ("encoder", "decoder"):
        stack = getattr(model, name)
        if stack is not None:
            sides[name] = _normal_stack(stack, causal=name == "decoder")
    return dataclasses.replace(model, **sides)


READ = {
    "none": (),
    "learned": ("max_length", "offset"),
    "sinusoidal": ("base", "concatenated"),
    "rope": ("base", "fraction", "interleaved", "scaling"),
    "t5": ("buckets", "max_distance", "bidirectional"),
    "alibi": (),
}
"""Encoding -> the fields that it reads; one that is not listed reads all."""


def _normal_stack(stack: StackConfig, causal: bool) -> StackConfig:
    attention, encoding, norm_, width = stack.attention, stack.encoding, stack.norm, stack.width
    causal = causal if stack.causal is None else stack.causal
    if encoding.bidirectional is None:
        encoding = dataclasses.replace(encoding, bidirectional=not causal)
    if encoding.kind in READ:
        read = {name: getattr(encoding, name) for name in READ[encoding.kind]}
        encoding = dataclasses.replace(EncodingConfig(encoding.kind), **read)
    if norm_.kind == "rms":
        norm_ = dataclasses.replace(norm_, bias=True)
    attention = dataclasses.replace(
        attention,
        kv_heads=attention.kv_heads or attention.heads,
        head_width=attention.head_width or width // attention.heads,
        key_bias=attention.bias if attention.key_bias is None else attention.key_bias,
        output_bias=attention.bias if attention.output_bias is None else attention.output_bias,
    )
    return dataclasses.replace(
        stack,
        causal=causal,
        encoding=encoding,
        attention=attention,
        embed=dataclasses.replace(stack.embed, width=stack.embed.width or width),
        ffn=stack.ffn and dataclasses.replace(stack.ffn, width=stack.ffn.width or 4 * width),
        norm=dataclasses.replace(norm_, final=norm_.order != "post" if norm_.final is None else norm_.final),
    )


def _differences(a: Any, b: Any, path: str) -> Iterator[str]:
    if dataclasses.is_dataclass(a) and type(a) is type(b):
        for f in dataclasses.fields(a):
            if f.name not in FREE:
                yield from _differences(getattr(a, f.name), getattr(b, f.name), f"{path}.{f.name}")
    elif a != b:
        yield f"{path} {a!r} (expected {b!r})"


FREE = frozenset({
    "dropout", "kernel", "block", "unroll", "remat", "remat_names", "microbatches", "deviation", "dtype", "momentum",
    "average_padding", "input_dropout", "pad", "capacity", "balance_loss", "z_loss",
})  # fmt: skip
"""Fields that do not change what a model computes when it is applied."""

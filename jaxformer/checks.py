"""What a type cannot say about a config: ranges, names, and fields that must agree.

Three tables hold what concerns one field; a new field gets its row there. The functions below them hold what needs
more than one. Paths in messages are those that `--config.PATH=VALUE` takes.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Iterator, Mapping

from jaxformer import registry
from jaxformer.config import (
    AttentionConfig,
    CheckpointConfig,
    Config,
    ConfigError,
    ConvConfig,
    DataConfig,
    DecodeConfig,
    EmbedConfig,
    EncodingConfig,
    EvaluateConfig,
    FeedForwardConfig,
    HeadConfig,
    ModelConfig,
    MoEConfig,
    NormConfig,
    OptimizerConfig,
    PermutationConfig,
    RecurrentConfig,
    RopeScalingConfig,
    ScheduleConfig,
    StackConfig,
    TaskConfig,
    TokenizerConfig,
    TrainConfig,
)

FOLDERS: dict[tuple[type, str], tuple[str, tuple[str, ...]]] = {
    (EncodingConfig, "kind"): ("jaxformer.nn.encodings", ()),
    (AttentionConfig, "kernel"): ("jaxformer.nn.kernels", ("auto",)),
    (DataConfig, "source"): ("jaxformer.data.sources", ()),
    (TaskConfig, "name"): ("jaxformer.tasks", ("none",)),
}
"""Fields that name a file of a folder, and what else they may say."""

AXES = ("stage", "data", "fsdp", "expert", "context", "tensor")

ACTIVATIONS = (
    "relu", "gelu", "gelu_tanh", "gelu_sigmoid", "silu", "tanh", "relu_squared", "mish", "sigmoid",
)  # fmt: skip

CHOICES: dict[tuple[type, str], tuple[str, ...]] = {
    (RopeScalingConfig, "kind"): ("linear", "dynamic", "llama3", "yarn"),
    (FeedForwardConfig, "activation"): ACTIVATIONS,
    (ConvConfig, "activation"): ACTIVATIONS,
    (HeadConfig, "activation"): ACTIVATIONS,
    (HeadConfig, "hidden"): ACTIVATIONS,
    (NormConfig, "kind"): ("layer", "rms", "batch", "none"),
    (NormConfig, "order"): ("pre", "post", "sandwich"),
    (StackConfig, "remat"): ("none", "minimal", "full", "names", "offload"),
    (RecurrentConfig, "cell"): ("rnn", "lstm", "gru"),
    (RecurrentConfig, "attention"): ("none", "additive", "dot"),
    (HeadConfig, "kind"): ("tokens", "slots", "classes", "pooled", "none"),
    (HeadConfig, "pooling"): ("first", "mean", "last"),
    (ModelConfig, "dtype"): ("float32", "bfloat16"),
    (TokenizerConfig, "kind"): ("byte", "character", "word", "bpe", "unigram", "file"),
    (DataConfig, "document"): ("line", "file"),
    (DataConfig, "packing"): ("none", "concat", "first_fit"),
    (OptimizerConfig, "name"): ("adamw", "adam", "adafactor", "lion", "sgd", "muon"),
    (ScheduleConfig, "kind"): ("constant", "linear", "cosine", "wsd", "inverse_sqrt", "noam"),
    (CheckpointConfig, "mode"): ("min", "max"),
    (CheckpointConfig, "average_of"): ("last", "best"),
    (DecodeConfig, "method"): ("greedy", "sample", "beam"),
    (DecodeConfig, "length_norm"): ("gnmt", "power"),
    (DecodeConfig, "stopping"): ("first", "estimate", "exact"),
}

# Intervals: the bounds and whether they belong to it. None: no upper bound.
POSITIVE_INT = (1, None, "[]")
COUNT = (0, None, "[]")
POSITIVE = (0.0, None, "(]")
RATE = (0.0, 1.0, "[)")
SHARE = (0.0, 1.0, "[]")
PORTION = (0.0, 1.0, "(]")

RANGES: dict[type, dict[str, tuple[float, float | None, str]]] = {
    EmbedConfig: {
        "vocab": POSITIVE_INT, "width": POSITIVE_INT, "kinds": COUNT, "dropout": RATE, "deviation": POSITIVE,
        "pad": COUNT,
    },
    RopeScalingConfig: {
        "factor": (1.0, None, "[]"), "original": POSITIVE_INT, "low": POSITIVE, "high": POSITIVE, "slow": POSITIVE,
        "fast": POSITIVE, "magnitude": POSITIVE,
    },
    EncodingConfig: {
        "max_length": POSITIVE_INT, "offset": COUNT, "base": (1.0, None, "(]"), "fraction": PORTION, "dropout": RATE,
        "buckets": (2, None, "[]"), "max_distance": POSITIVE_INT, "clamp": POSITIVE_INT,
    },
    AttentionConfig: {
        "heads": POSITIVE_INT, "kv_heads": POSITIVE_INT, "head_width": POSITIVE_INT, "window": POSITIVE_INT,
        "window_every": POSITIVE_INT, "block": POSITIVE_INT, "dropout": RATE,
    },
    FeedForwardConfig: {"width": POSITIVE_INT, "dropout": RATE},
    MoEConfig: {
        "experts": POSITIVE_INT, "top_k": POSITIVE_INT, "capacity": POSITIVE, "shared": COUNT, "balance_loss": COUNT,
        "z_loss": COUNT,
    },
    NormConfig: {"epsilon": POSITIVE, "momentum": RATE, "offset": (0.0, 1.0, "[]")},
    ConvConfig: {"kernel": POSITIVE_INT, "groups": POSITIVE_INT},
    StackConfig: {
        "layers": POSITIVE_INT, "width": POSITIVE_INT, "dropout": RATE, "unroll": POSITIVE_INT,
        "microbatches": POSITIVE_INT,
    },
    PermutationConfig: {"memory": POSITIVE_INT, "reuse": POSITIVE_INT},
    RecurrentConfig: {"layers": POSITIVE_INT, "width": POSITIVE_INT, "dropout": RATE, "recurrent_dropout": RATE},
    HeadConfig: {
        "chunk": POSITIVE_INT, "classes": POSITIVE_INT, "width": POSITIVE_INT, "dropout": RATE, "epsilon": POSITIVE,
    },
    TokenizerConfig: {"vocab": POSITIVE_INT, "multiple": POSITIVE_INT},
    DataConfig: {
        "batch": POSITIVE_INT, "tokens": POSITIVE_INT, "length": (2, None, "[]"), "examples": POSITIVE_INT,
    },
    TaskConfig: {"label_smoothing": RATE, "z_loss": COUNT, "mask_rate": (0.0, 1.0, "()")},
    OptimizerConfig: {
        "beta1": RATE, "beta2": RATE, "epsilon": POSITIVE, "momentum": RATE, "weight_decay": COUNT, "clip": POSITIVE,
    },
    ScheduleConfig: {"peak": POSITIVE, "warmup": COUNT, "floor": SHARE, "decay": SHARE},
    TrainConfig: {
        "steps": POSITIVE_INT, "seed": COUNT, "accumulation": POSITIVE_INT, "ema": RATE, "log_every": POSITIVE_INT,
        "evaluate_every": COUNT, "checkpoint_every": COUNT, "skip_limit": POSITIVE_INT, "deadline": POSITIVE,
        "watchdog": POSITIVE,
    },
    CheckpointConfig: {"keep_last": POSITIVE_INT, "keep_best": COUNT, "average": COUNT},
    EvaluateConfig: {"batch": POSITIVE_INT, "examples": POSITIVE_INT, "decode_examples": COUNT, "samples": COUNT},
    DecodeConfig: {
        "beams": POSITIVE_INT, "hypotheses": POSITIVE_INT, "max_length": POSITIVE_INT, "min_length": COUNT,
        "max_ratio": POSITIVE, "temperature": POSITIVE, "top_k": COUNT, "top_p": PORTION, "min_p": SHARE,
        "repetition_penalty": POSITIVE, "no_repeat_ngram": COUNT, "forced_first": COUNT, "forced_last": COUNT,
        "batch": POSITIVE_INT, "seed": COUNT,
    },
}  # fmt: skip

SHAPES: dict[str, tuple[str, str, str]] = {
    "translation": ("encoder decoder", "tokens", "an encoder and a decoder"),
    "language_modelling": ("decoder", "tokens", "a decoder alone"),
    "masked_lm": ("encoder", "tokens", "an encoder alone"),
    "classification": ("encoder|decoder", "classes", "an encoder or a decoder, not both"),
}
"""Task -> which sides it needs, which head, and the sides in words. A task that is not listed is not judged here."""


def check(config: Config) -> None:
    """Raises a one-line ConfigError at the first thing that makes no sense in a config whose types are right."""
    for path, part in _parts(config, "config"):
        fields(part, path)
    for path, part in _parts(config, "config"):  # only now: a stack's checks rely on its names being known
        if isinstance(part, StackConfig):
            _stack(part, path, config)
        elif isinstance(part, RecurrentConfig):
            _recurrent(part, path)
    if config.model.parts or not config.init.directory:  # else the directory has the model, judged when it is read
        _model(config.model)
        _task(config)
    _data(config)
    _train(config)
    _decode(config.decode)


def _parts(part: Any, path: str) -> Iterator[tuple[str, Any]]:
    yield path, part
    for f in dataclasses.fields(part):
        value = getattr(part, f.name)
        if dataclasses.is_dataclass(value):
            yield from _parts(value, f"{path}.{f.name}")


def _wrong(path: str, got: Any, expected: str, remedy: str = "") -> ConfigError:
    shown = ascii(got) if isinstance(got, str) else str(got)
    return ConfigError(f"{path}: got {shown}, expected {expected}{'; ' + remedy if remedy else ''}")


def fields(part: Any, path: str) -> None:
    """Names and ranges of one section's own fields."""
    for f in dataclasses.fields(part):
        value, here, key = getattr(part, f.name), f"{path}.{f.name}", (type(part), f.name)
        if value is None:
            continue
        if key in FOLDERS or key in CHOICES:
            package, extra = FOLDERS[key] if key in FOLDERS else ("", CHOICES[key])
            known = extra + (registry.names(package) if package else ())
            if value not in known:
                raise ConfigError(
                    f"{here}: got {value!a}, expected one of {', '.join(known)}{registry.nearest(value, known)}"
                )
        elif type(part) in RANGES and f.name in RANGES[type(part)]:
            low, high, ends = RANGES[type(part)][f.name]
            above = value >= low if ends[0] == "[" else value > low
            below = high is None or (value <= high if ends[1] == "]" else value < high)
            if not (above and below):
                words = f"{'at least' if ends[0] == '[' else 'more than'} {low:g}"
                words += "" if high is None else f" and {'at most' if ends[1] == ']' else 'less than'} {high:g}"
                raise _wrong(here, value, words)


# --- parts of the model -----------------------------------------------------------------------------------------------


def _stack(stack: StackConfig, path: str, config: Config) -> None:
    attention, encoding = stack.attention, stack.encoding
    if attention.head_width is None and stack.width % attention.heads:
        raise _wrong(
            f"{path}.width", stack.width, f"a multiple of attention.heads ({attention.heads})",
            "change one of them, or set attention.head_width",
        )  # fmt: skip
    kv_heads = attention.heads if attention.kv_heads is None else attention.kv_heads
    if attention.heads % kv_heads:
        raise _wrong(f"{path}.attention.kv_heads", kv_heads, f"a divisor of heads ({attention.heads})")
    head_width = stack.width // attention.heads if attention.head_width is None else attention.head_width
    if not attention.output and attention.heads * head_width != stack.width:
        raise _wrong(
            f"{path}.attention.output", "False",
            f"heads * head_width ({attention.heads} * {head_width}) to equal the width ({stack.width})",
            "set output=True or change the head width",
        )  # fmt: skip
    if encoding.kind == "rope":
        rotated = int(head_width * encoding.fraction)
        if rotated % 2 or rotated < 2:
            raise _wrong(
                f"{path}.encoding.fraction", encoding.fraction,
                f"an even rotated width (head width {head_width} * fraction = {rotated})",
            )  # fmt: skip
    table = encoding.kind == "learned" or (encoding.kind == "deberta" and encoding.absolute)
    if table and encoding.max_length - encoding.offset < config.data.length:
        least = f"at least data.length ({config.data.length})" + (" and the offset" if encoding.offset else "")
        raise _wrong(f"{path}.encoding.max_length", encoding.max_length, least)
    if encoding.kind == "transformer_xl" and stack.width % 2:
        raise _wrong(f"{path}.width", stack.width, "an even width: sines and as many cosines", "change it")
    if encoding.kind == "t5" and encoding.buckets is None:
        raise _wrong(f"{path}.encoding.buckets", None, "a number for t5")
    if encoding.kind == "deberta" and attention.heads * head_width != stack.width:
        expected = f"heads * head_width to equal the width ({stack.width}) with encoding.kind deberta"
        raise _wrong(f"{path}.attention.head_width", head_width, expected)
    if stack.conv is not None and stack.conv.kernel % 2 == 0:
        raise _wrong(f"{path}.conv.kernel", stack.conv.kernel, "an odd number, with a slot in the middle")
    if stack.conv is not None and stack.width % stack.conv.groups:
        raise _wrong(f"{path}.conv.groups", stack.conv.groups, f"a divisor of the width ({stack.width})")
    if stack.moe is not None:
        _moe(stack, f"{path}.moe")
    if stack.norm.order == "sandwich" and stack.norm.kind == "none":
        raise _wrong(f"{path}.norm.kind", "none", "a norm, since norm.order is sandwich")
    _embed(stack.embed, stack.width, path)
    if attention.kernel != "auto":
        kernel = registry.member("jaxformer.nn.kernels", attention.kernel, "KERNEL")
        score = registry.member("jaxformer.nn.encodings", encoding.kind, "ENCODING").score is not None
        reason = kernel.refuse(attention, score, attention.dropout > 0)
        if reason:
            raise _wrong(f"{path}.attention.kernel", attention.kernel, "a kernel for this layer", reason)


def _moe(stack: StackConfig, path: str) -> None:
    moe = stack.moe
    if stack.ffn is None:
        raise _wrong(path, "a section", "None where there is no feed-forward layer", "set ffn too")
    if moe.top_k > moe.experts:
        raise _wrong(f"{path}.top_k", moe.top_k, f"at most the experts ({moe.experts})")
    if moe.top_k == 1 and moe.normalise and moe.experts > 1:
        raise _wrong(f"{path}.normalise", "True", "False with top_k 1: the only weight would always be 1")


def _recurrent(stack: RecurrentConfig, path: str) -> None:
    if stack.bidirectional and stack.width % 2:
        raise _wrong(f"{path}.width", stack.width, "an even width, half for each direction")
    _embed(stack.embed, stack.width, path)


def _embed(embed: EmbedConfig, width: int, path: str) -> None:
    if embed.width is not None and embed.width > width:
        raise _wrong(f"{path}.embed.width", embed.width, f"at most the model width ({width})")


def _model(model: ModelConfig) -> None:
    recurrent = [part for part in model.parts if part.startswith("recurrent_")]
    transformer = [part for part in model.parts if part not in recurrent]
    if not model.parts:
        raise _wrong(
            "config.model", "no encoder and no decoder", "at least one", "add one in the recipe with section()"
        )
    if transformer and recurrent:
        raise _wrong(
            "config.model", " and ".join(transformer + recurrent), "parts of one family",
            "set the transformer parts or the recurrent ones to None",
        )  # fmt: skip
    encoder, decoder = model.encoder or model.recurrent_encoder, model.decoder or model.recurrent_decoder
    if model.recurrent_decoder is not None:
        if model.recurrent_decoder.bidirectional:
            raise _wrong("config.model.recurrent_decoder.bidirectional", "True", "False: a decoder reads forwards")
        if model.recurrent_decoder.attention != "none" and encoder is None:
            raise _wrong(
                "config.model.recurrent_decoder.attention", model.recurrent_decoder.attention,
                "none where there is no encoder",
            )  # fmt: skip
    if model.recurrent_encoder is not None and model.recurrent_encoder.attention != "none":
        attention = model.recurrent_encoder.attention
        raise _wrong("config.model.recurrent_encoder.attention", attention, "none: it is the decoder that attends")
    if model.decoder is not None and model.decoder.causal is False and encoder is not None:
        raise _wrong("config.model.decoder.causal", "False", "True or None: a decoder cannot see what it predicts")
    if model.share_embeddings:
        _shared(encoder, decoder)
    if model.permutation is not None:
        _permutation(model)
    last = model.head.pooling == "last" and model.head.kind == "classes"
    if last and model.encoder is not None and model.encoder.encoding.kind != "transformer_xl":  # XLNet's is the last
        raise _wrong("config.model.head.pooling", "last", "first or mean for a transformer encoder")


def _permutation(model: ModelConfig) -> None:
    path, encoder = "config.model.permutation", model.encoder
    if encoder is None or model.decoder is not None:
        raise _wrong(path, "a section", "None unless the model is a transformer encoder alone")
    if encoder.encoding.kind != "transformer_xl":
        raise _wrong(path, "a section", f"encoding.kind transformer_xl (it is {encoder.encoding.kind})")
    if encoder.norm.order != "post" or encoder.ffn is None or encoder.moe is not None:
        raise _wrong(path, "a section", "layers with a dense feed-forward part, and norm.order post")


def _shared(encoder: Any, decoder: Any) -> None:
    path = "config.model.share_embeddings"
    if encoder is None or decoder is None:
        raise _wrong(path, "True", "False where there is only one side")
    widths = [side.embed.width or side.width for side in (encoder, decoder)]
    if widths[0] != widths[1] or encoder.width != decoder.width:
        raise _wrong(path, "True", f"equal widths of both sides (they are {widths[0]} and {widths[1]})")
    if encoder.embed.vocab != decoder.embed.vocab:
        raise _wrong(path, "True", f"equal vocabularies (they are {encoder.embed.vocab} and {decoder.embed.vocab})")


# --- sections that must agree -----------------------------------------------------------------------------------------


def _task(config: Config) -> None:
    model, task = config.model, config.task.name
    encoder = model.encoder is not None or model.recurrent_encoder is not None
    decoder = model.decoder is not None or model.recurrent_decoder is not None
    sides = " ".join(name for name, there in (("encoder", encoder), ("decoder", decoder)) if there)
    if task in SHAPES:
        needed, head, words = SHAPES[task]
        if sides not in needed.split("|"):
            raise _wrong("config.task.name", task, f"{words} for this task (the model has: {sides.replace(' ', ', ')})")
        if model.head.kind != head:
            raise _wrong("config.model.head.kind", model.head.kind, f"{head} for the task {task}")
        if head == "classes" and model.head.classes == 1:
            raise _wrong("config.model.head.classes", 1, f"at least 2 for the task {task}")
        if config.data.packing != "none" and task != "language_modelling":
            raise _wrong("config.data.packing", config.data.packing, f"none for the task {task}")
    if (
        sides == "decoder"
        and model.decoder is not None
        and model.decoder.causal is False
        and task == "language_modelling"
    ):
        raise _wrong(
            "config.model.decoder.causal", "False", "True or None: a language model cannot see what it predicts"
        )
    if model.share_embeddings and not config.data.tokenizer.joint:
        raise _wrong("config.model.share_embeddings", "True", "a joint vocabulary", "set data.tokenizer.joint=true")


def _data(config: Config) -> None:
    data = config.data
    if list(data.buckets) != sorted(set(data.buckets)) or (data.buckets and data.buckets[0] < 2):
        raise _wrong("config.data.buckets", data.buckets, "ascending lengths of at least 2")
    if data.buckets and data.buckets[-1] > data.length:
        raise _wrong("config.data.buckets", data.buckets, f"lengths of at most data.length ({data.length})")
    if data.tokens is not None and data.tokens < data.length:
        raise _wrong("config.data.tokens", data.tokens, f"at least data.length ({data.length})")
    if data.tokenizer.kind == "file" and not data.tokenizer.path:
        raise _wrong("config.data.tokenizer.path", data.tokenizer.path, "a file, since tokenizer.kind is file")
    for split, files in data.splits.items():
        if not split.replace("-", "").replace("_", "").isalnum():  # it becomes part of file names in the workdir
            raise _wrong("config.data.splits", split, "names of letters, digits, - and _", "rename it")
        if not files:
            raise _wrong(f"config.data.splits.{split}", files, "at least one file or split expression")


def _train(config: Config) -> None:
    train, keep = config.train, config.checkpoint
    if config.data.tokens is None and config.data.batch % train.accumulation:
        raise _wrong("config.train.accumulation", train.accumulation, f"a divisor of data.batch ({config.data.batch})")
    if config.data.tokens is not None and config.data.tokens // config.data.length < train.accumulation:
        rows = config.data.tokens // config.data.length
        raise _wrong("config.train.accumulation", train.accumulation, f"at most the rows of the longest batch ({rows})")
    kept = keep.keep_last if keep.average_of == "last" else keep.keep_best
    if keep.average > kept:
        raise _wrong("config.checkpoint.average", keep.average, f"at most keep_{keep.average_of} ({kept})")
    _mesh(config)


def _mesh(config: Config) -> None:
    for path, mesh in (("config.mesh", config.mesh), ("config.mesh.dcn", config.mesh.dcn)):
        given = {name: getattr(mesh, name) for name in AXES}
        if any(size < 1 and size != -1 for size in given.values()) or list(given.values()).count(-1) > 1:
            got = ", ".join(f"{name}={size}" for name, size in given.items())
            raise _wrong(path, got, "sizes of at least 1, and -1 at most once")
    sizes = {name: max(getattr(config.mesh, name), 1) * max(getattr(config.mesh.dcn, name), 1) for name in AXES}
    if sizes["context"] > 1:
        _context(config, sizes["context"])
    divides(config, sizes)
    rows = config.train.accumulation * sizes["data"] * sizes["fsdp"] * sizes["expert"] * sizes["stage"]
    if config.data.tokens is None and config.data.batch % rows:
        ways = "accumulation and the mesh's data, fsdp, expert and stage"
        raise _wrong("config.data.batch", config.data.batch, f"a multiple of {rows} ({ways})")


def _context(config: Config, size: int) -> None:
    """Divided sequences: their slots may come in any order, and their number must come out even."""
    model = config.model
    ordered = {
        "a recurrent model": model.recurrent_encoder is not None or model.recurrent_decoder is not None,
        "a convolution (encoder.conv)": model.encoder is not None and model.encoder.conv is not None,
        "permutations (model.permutation)": model.permutation is not None,
        "a mixture of experts of limited capacity (moe.capacity)": any(
            stack is not None and stack.moe is not None and stack.moe.capacity is not None
            for stack in (model.encoder, model.decoder)
        ),
        "head.pooling last": model.head.pooling == "last" and model.head.kind in ("classes", "pooled"),
    }
    for what, there in ordered.items():
        if there:
            raise _wrong("config.mesh.context", size, f"1 with {what}, which needs whole sequences in order")
    for path, length in [("length", config.data.length), *(("buckets", bucket) for bucket in config.data.buckets)]:
        if length % size:
            raise _wrong(f"config.data.{path}", length, f"a multiple of mesh.context ({size})", "change one of them")


def divides(config: Config, sizes: Mapping[str, int]) -> None:
    """Judges a mesh of these sizes: it must divide what it is there to divide.

    What is small may stay whole: norms, biases, and key heads that are fewer than the tensor axis is long.

    Raises:
      ConfigError: layers, heads, widths, a vocabulary or lengths that an axis does not divide; stages for a model that
        has no pipeline.
    """
    model, stages = config.model, sizes["stage"]
    if stages > 1 and (model.permutation is not None or model.recurrent_encoder or model.recurrent_decoder):
        kind = "permutation" if model.permutation is not None else "recurrent"
        raise _wrong("config.mesh.stage", stages, f"1 for a {kind} model, which has no pipeline")
    for name in model.parts:
        part, path = getattr(model, name), f"config.model.{name}"
        wanted = [("width", part.width, "fsdp"), ("embed.vocab", part.embed.vocab, "tensor")]
        if isinstance(part, RecurrentConfig):
            width = part.width // 2 if part.bidirectional else part.width
            wanted.append(("width", width, "tensor"))
        else:
            wanted += [("layers", part.layers, "stage"), ("microbatches", part.microbatches, "stage")]
            heads = part.attention.kv_heads or 0
            wanted.append(("attention.heads", part.attention.heads, "tensor"))
            wanted.append(("attention.kv_heads", heads if heads > sizes["tensor"] else None, "tensor"))
            if part.ffn is not None:
                wanted.append(("ffn.width", part.ffn.width or 4 * part.width, "tensor"))
            if part.moe is not None:
                wanted.append(("moe.experts", part.moe.experts, "expert"))
            if stages > 1 and part.norm.kind == "batch":
                raise _wrong(f"{path}.norm.kind", "batch", "layer, rms or none: a pipeline never sees a whole batch")
        for field, size, axis in wanted:
            if size is not None and size % sizes[axis]:
                raise _wrong(
                    f"{path}.{field}", size, f"a multiple of mesh.{axis} ({sizes[axis]})", "change one of them"
                )


def _decode(decode: DecodeConfig) -> None:
    if decode.length_penalty < 0 and decode.length_norm == "gnmt":
        raise _wrong("config.decode.length_penalty", decode.length_penalty, "at least 0 for length_norm gnmt")
    if decode.method == "beam" and decode.hypotheses > decode.beams:
        raise _wrong("config.decode.hypotheses", decode.hypotheses, f"at most decode.beams ({decode.beams})")
    if decode.method == "greedy" and decode.hypotheses > 1:
        raise _wrong("config.decode.hypotheses", decode.hypotheses, "1 for greedy decoding", "use beam or sample")
    if decode.min_length > decode.max_length:
        raise _wrong("config.decode.min_length", decode.min_length, f"at most decode.max_length ({decode.max_length})")
    if any(not word or min(word) < 0 for word in decode.bad_words):
        raise _wrong("config.decode.bad_words", decode.bad_words, "sequences of token ids, none of them empty")
    if any(token < 0 for token in decode.suppress):
        raise _wrong("config.decode.suppress", decode.suppress, "token ids, from 0")
    for name in ("forced_first", "forced_last"):
        if getattr(decode, name) in decode.suppress:
            raise _wrong(f"config.decode.{name}", getattr(decode, name), "a token that decode.suppress does not hold")

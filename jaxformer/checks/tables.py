"""What concerns one field: three tables, in which a new field gets its row."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxformer import registry
from jaxformer.config import (
    AttentionConfig,
    CheckpointConfig,
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
    (HeadConfig, "kind"): ("tokens", "slots", "classes", "pooled", "pair", "none"),
    (HeadConfig, "pooling"): ("first", "mean", "last"),
    (ModelConfig, "dtype"): ("float32", "bfloat16"),
    (TokenizerConfig, "kind"): ("byte", "character", "word", "bpe", "unigram", "file"),
    (DataConfig, "document"): ("line", "file"),
    (DataConfig, "format"): ("", "tsv", "tsv_quoted", "csv", "jsonl", "labelled"),
    (TaskConfig, "objective"): ("regression", "contrastive"),
    (DataConfig, "packing"): ("none", "concat", "first_fit"),
    (OptimizerConfig, "name"): ("adamw", "adam", "adafactor", "lion", "sgd", "muon"),
    (ScheduleConfig, "kind"): ("constant", "linear", "cosine", "wsd", "inverse_sqrt", "noam"),
    (CheckpointConfig, "mode"): ("min", "max"),
    (CheckpointConfig, "average_of"): ("last", "best"),
    (DecodeConfig, "method"): ("greedy", "sample", "beam"),
    (DecodeConfig, "length_norm"): ("gnmt", "power"),
    (DecodeConfig, "stopping"): ("first", "estimate", "exact"),
    (DecodeConfig, "weights"): ("float", "int8"),
}

# Intervals: the bounds and whether they belong to it. None: no upper bound.
INT32 = 2**31 - 1  # steps, positions, token ids and sizes of arrays are int32
POSITIVE_INT = (1, INT32, "[]")
COUNT = (0, INT32, "[]")
SEED = (0, 2**32 - 1, "[]")  # JAX drops the bits above: the seeds 0 and 2**32 would be one
LENGTH = (2, 2**30, "[]")  # the data pipeline takes 2**30 for a length that nothing exceeds
LAYERS = (1, 10_000, "[]")  # each costs time to compile; the deepest ever trained had so many (Xiao et al. 2018)
CELL_LAYERS = (1, 1_000, "[]")  # these are not scanned
BEAMS = (1, 100_000, "[]")  # rows of one prompt, all decoded at once
NOT_NEGATIVE = (0.0, None, "[]")
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
        "experts": POSITIVE_INT, "top_k": POSITIVE_INT, "capacity": POSITIVE, "shared": COUNT,
        "balance_loss": NOT_NEGATIVE, "z_loss": NOT_NEGATIVE,
    },
    NormConfig: {"epsilon": POSITIVE, "momentum": RATE, "offset": (0.0, 1.0, "[]")},
    ConvConfig: {"kernel": POSITIVE_INT, "groups": POSITIVE_INT},
    StackConfig: {
        "layers": LAYERS, "width": POSITIVE_INT, "dropout": RATE, "unroll": POSITIVE_INT,
        "microbatches": POSITIVE_INT,
    },
    PermutationConfig: {"memory": POSITIVE_INT, "reuse": POSITIVE_INT},
    RecurrentConfig: {"layers": CELL_LAYERS, "width": POSITIVE_INT, "dropout": RATE, "recurrent_dropout": RATE},
    HeadConfig: {
        "chunk": POSITIVE_INT, "classes": POSITIVE_INT, "width": POSITIVE_INT, "dropout": RATE, "epsilon": POSITIVE,
        "input_dropout": RATE,
    },
    TokenizerConfig: {"vocab": POSITIVE_INT, "multiple": POSITIVE_INT},
    DataConfig: {
        "batch": POSITIVE_INT, "tokens": POSITIVE_INT, "length": LENGTH, "examples": POSITIVE_INT,
    },
    TaskConfig: {
        "label_smoothing": RATE, "z_loss": NOT_NEGATIVE, "mask_rate": (0.0, 1.0, "()"), "stride": POSITIVE_INT,
        "temperature": POSITIVE, "positive": SHARE,
    },
    OptimizerConfig: {
        "beta1": RATE, "beta2": RATE, "epsilon": POSITIVE, "momentum": RATE, "weight_decay": NOT_NEGATIVE,
        "clip": POSITIVE, "spike": POSITIVE,
    },
    ScheduleConfig: {"peak": POSITIVE, "warmup": COUNT, "floor": SHARE, "decay": SHARE},
    TrainConfig: {
        "steps": POSITIVE_INT, "seed": SEED, "accumulation": POSITIVE_INT, "ema": RATE, "log_every": POSITIVE_INT,
        "evaluate_every": COUNT, "checkpoint_every": COUNT, "skip_limit": POSITIVE_INT, "deadline": POSITIVE,
        "watchdog": POSITIVE,
    },
    CheckpointConfig: {"keep_last": POSITIVE_INT, "keep_best": COUNT, "average": COUNT},
    EvaluateConfig: {"batch": POSITIVE_INT, "examples": POSITIVE_INT, "decode_examples": COUNT, "samples": COUNT},
    DecodeConfig: {
        "beams": BEAMS, "hypotheses": BEAMS, "max_length": POSITIVE_INT, "min_length": COUNT,
        "max_ratio": POSITIVE, "temperature": POSITIVE, "top_k": COUNT, "top_p": PORTION, "min_p": SHARE,
        "repetition_penalty": POSITIVE, "no_repeat_ngram": COUNT, "forced_first": COUNT,
        "batch": POSITIVE_INT, "seed": SEED,
    },
}  # fmt: skip


def wrong(path: str, got: Any, expected: str, remedy: str = "") -> ConfigError:
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
                names = ", ".join(each or "''" for each in known)
                raise ConfigError(f"{here}: got {value!a}, expected one of {names}{registry.nearest(value, known)}")
        elif type(part) in RANGES and f.name in RANGES[type(part)]:
            low, high, ends = RANGES[type(part)][f.name]
            above = value >= low if ends[0] == "[" else value > low
            below = high is None or (value <= high if ends[1] == "]" else value < high)
            if not (above and below):
                words = f"{'at least' if ends[0] == '[' else 'more than'} {_plain(low)}"
                if high is not None and not (high == INT32 and not above):
                    words += f" and {'at most' if ends[1] == ']' else 'less than'} {_plain(high)}"
                raise wrong(here, value, words)


def _plain(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"

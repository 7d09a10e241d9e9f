"""Puts an encoder and a decoder of two checkpoints together; cross-attention between them begins at random."""

from __future__ import annotations

import dataclasses
import logging
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import flax
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxformer.config import Config, DataConfig, TaskConfig
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.hf import convert, hub, keys, loading, reading, weights
from jaxformer.hf.families.encoder_decoder import JOINED, check_type
from jaxformer.hf.origin import TASKS
from jaxformer.hf.pretrained import HuggingFace
from jaxformer.hf.reading import Tensor
from jaxformer.hf.table import Family, Row, Settings, families, family_of
from jaxformer.hf.tokenizer import open_tokenizers
from jaxformer.model import Model
from jaxformer.models import build
from jaxformer.types import PyTree

log = logging.getLogger("jaxformer")

HEAD = "seq2seq"
FRESH = ("decoder/blocks/cross", "memory_projection/", "head/")
"""Starts of parameter paths that need not be in either checkpoint."""

DEVIATION = 0.02
"""Standard deviation of fresh matrices where the decoder's config names no `initializer_range`."""

START_ROLES, END_ROLES = ("bos", "cls", "eos"), ("eos", "sep")
"""Special tokens of the decoder's tokenizer that begin and end a text, the first that it has."""


def from_encoder_decoder_pretrained(
    encoder: str | os.PathLike[str],
    decoder: str | os.PathLike[str],
    *,
    decoder_start_token_id: int | None = None,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
    dtype: str = "float32",
    mesh: Mesh | None = None,
    seed: int = 0,
) -> Model:
    """An encoder-decoder of two checkpoints, to fine-tune.

    The encoder gives its body, the decoder its body and its head. Cross-attention starts from random values unless the
    decoder's file has it, and so does the projection between sides of unlike widths.

    Args:
      encoder, decoder: directories, or names of models on the hub.
      decoder_start_token_id: first token of the decoder's input; None: as the decoder's config or its tokenizer says
        (<bos>, else [CLS]).
      eos_token_id: token that ends a text; None: likewise (<eos>, else [SEP]).
      pad_token_id: padding of the decoder's input; None: likewise, else the token that ends a text.
      dtype: precision of the computation; parameters are float32.
      mesh: shards the parameters over devices; each device reads its own part of the files.
      seed: seed of random parameters.

    Raises:
      ConfigError: a directory cannot be read, or its family is none of an encoder or of a decoder with cross-attention.
    """
    places = {"encoder": hub.locate(encoder, what="encoder"), "decoder": hub.locate(decoder, what="decoder")}
    sides = {side: _open_side(place, side) for side, place in places.items()}
    tokenizers = _open_tokenizers(places, sides)
    chosen = _special_tokens(
        sides["decoder"], tokenizers, decoder_start_token_id, eos_token_id, pad_token_id, str(places["decoder"])
    )
    values = {
        "model_type": "encoder-decoder",
        "architectures": ["EncoderDecoderModel"],
        "is_encoder_decoder": True,
        **{side: dict(settings.values) for side, (_, settings) in sides.items()},
        **{name: token for name, token in chosen.items() if token is not None},
    }
    settings = Settings(values, f"{places['encoder']} and {places['decoder']}")
    family = family_of(settings)
    settings = keys.with_defaults(family, settings)
    tensors = _side_tensors(places, sides)
    model = loading.untie_output(family, keys.read_model(family, settings, HEAD), tensors)
    model = family.resolve(dataclasses.replace(model, dtype=dtype), tensors)
    loading.check_counts(model, settings, len(tensors))
    module = build.build(model)
    shapes, shardings = loading.param_shapes(model, module, mesh)
    rows = family.rows(model, HEAD)
    deviation = float(sides["decoder"][1]("initializer_range", DEVIATION))
    initial = _fresh_parameters(rows, tensors, shapes, shardings, deviation, seed)
    params = convert.import_params(rows, tensors, shapes, shardings, initial, loading.can_drop_of(family, rows))
    log.warning(
        "%s: %d parameters start from random values (%s): train the pair before you use it",
        settings.path,
        len(initial),
        ", ".join(sorted({"cross-attention" if "/cross" in path else path.split("/")[0] for path in initial})),
    )
    if tokenizers is not None:
        target = tokenizers.target.with_special_tokens(
            bos=chosen["decoder_start_token_id"], eos=chosen["eos_token_id"], pad=chosen["pad_token_id"]
        )
        tokenizers = Tokenizers(target if tokenizers.joint else tokenizers.source, target)
    defaults = {name: token for name, token in chosen.items() if token is not None}
    loading.check_vocabulary(places["decoder"], settings, model, tokenizers, defaults)
    config = Config(
        model=model,
        data=DataConfig(length=min(loading.least_positions(model), DataConfig.length)),
        task=TaskConfig(name=TASKS[HEAD]),
    )
    return Model(module, params, {}, config, tokenizers, hf=HuggingFace(HEAD, family, settings, defaults))


def _open_side(place: Path, side: str) -> tuple[Family, Settings]:
    """The family of one checkpoint, and its config as that of this side.

    Raises:
      ConfigError: the pair has no such side.
    """
    path = str(place / reading.CONFIG_FILE)
    values = dict(reading.read_config(place))
    check_type(path, side, values.get("model_type"))
    family = next(family for _, family in families() if values["model_type"] in family.model_types)
    values |= JOINED if side == "decoder" else dict.fromkeys(JOINED, False)
    for name in ("output_hidden_states", "output_attentions"):  # flags of calls, which the pair has itself
        values.pop(name, None)
    return family, keys.with_defaults(family, Settings(values, path))


def _side_tensors(places: Mapping[str, Path], sides: Mapping[str, tuple[Family, Settings]]) -> dict[str, Tensor]:
    """The tensors of both checkpoints by their names in a pair. Heads of the encoder are left out later."""
    tensors: dict[str, Tensor] = {}
    for side, (family, _) in sides.items():
        prefix = family.prefix if side == "encoder" else ""
        own = convert.canonical_tensors(family, weights.open_weights(places[side]))
        tensors |= {f"{side}.{name.removeprefix(prefix)}": tensor for name, tensor in own.items()}
    return tensors


def _fresh_parameters(
    rows: Sequence[Row],
    tensors: Mapping[str, Tensor],
    shapes: PyTree,
    shardings: PyTree | None,
    deviation: float,
    seed: int,
) -> dict[str, jax.Array]:
    """Random parameters, by path, where neither checkpoint has them: normal matrices, zero biases, norms of one."""
    by_path = flax.traverse_util.flatten_dict(shapes, sep="/")
    sharding_of = {} if shardings is None else flax.traverse_util.flatten_dict(shardings, sep="/")
    fresh = {}
    for row in rows:
        for path in row.param_paths:
            shape = by_path[path].shape
            names = [row.name(index) for index in np.ndindex(shape[: row.stacked_axes])]
            if not path.startswith(FRESH) or any(name in tensors for name in names):
                continue
            leaf = path.rsplit("/", 1)[1]
            if leaf in ("scale", "bias"):
                value = jnp.full(shape, float(leaf == "scale"))
            else:
                key = jax.random.fold_in(jax.random.key(seed), np.uint32(zlib.crc32(path.encode())))
                value = deviation * jax.random.normal(key, shape)
            fresh[path] = jax.device_put(value, sharding_of.get(path))
    return fresh


def _open_tokenizers(places: Mapping[str, Path], sides: Mapping[str, tuple[Family, Settings]]) -> Tokenizers | None:
    """The encoder's tokenizer for the source and the decoder's for the target; one if they have the same tokens."""
    found = {side: open_tokenizers(place, sides[side][1]) for side, place in places.items()}
    missing = [str(places[side]) for side, tokenizers in found.items() if tokenizers is None]
    source, target = found["encoder"], found["decoder"]
    if source is None or target is None:
        if len(missing) == 1:
            log.warning("%s: there is no tokenizer, so the pair reads token ids alone", missing[0])
        return None
    if source.source.vocabulary_fingerprint == target.target.vocabulary_fingerprint:
        return Tokenizers(target.target, target.target)
    return Tokenizers(source.source, target.target)


def _special_tokens(
    decoder: tuple[Family, Settings],
    tokenizers: Tokenizers | None,
    start: int | None,
    end: int | None,
    pad: int | None,
    path: str,
) -> dict[str, int | None]:
    """The decoder's special tokens: those that were given, else of its config, else of its tokenizer."""
    settings = decoder[1]

    def choose(given: int | None, names: Sequence[str], roles: Sequence[str]) -> int | None:
        stated = [settings(name, None) for name in names]
        stated = [token[0] if isinstance(token, list) and token else token for token in stated]
        known = [] if tokenizers is None else [getattr(tokenizers.target, role) for role in roles]
        return next((token for token in (given, *stated, *known) if token is not None), None)

    ends = choose(end, ("eos_token_id",), END_ROLES)
    found = {
        "decoder_start_token_id": choose(start, ("decoder_start_token_id", "bos_token_id"), START_ROLES),
        "eos_token_id": ends,
        "pad_token_id": choose(pad, ("pad_token_id",), ("pad",)),
    }
    found["pad_token_id"] = ends if found["pad_token_id"] is None else found["pad_token_id"]
    if None in found.values():
        names = ", ".join(name for name, token in found.items() if token is None)
        log.warning("%s: it names no %s: give them to train on labels and to generate", path, names)
    return found

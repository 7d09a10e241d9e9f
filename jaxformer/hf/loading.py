"""Directories of the other library, read into models of ours."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import Mesh

from jaxformer.config import Config, ConfigError, DataConfig, DecodeConfig, ModelConfig, TaskConfig
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.hf import convert, files, generation, keys
from jaxformer.hf.files import Tensor
from jaxformer.hf.pretrained import TASKS, Pretrained, room
from jaxformer.hf.table import Family, Row, Settings, family_of, head_of, labels
from jaxformer.hf.tokenizer import open_tokenizers
from jaxformer.models import build
from jaxformer.parallel import rules
from jaxformer.types import PyTree

log = logging.getLogger("jaxformer")

WINDOW, ANSWER = 384, 30
"""Tokens of question and context together, and the most of an answer, as BERT reads SQuAD (Devlin et al. 2019)."""


def from_pretrained(
    directory: str | os.PathLike[str],
    *,
    head: str | None = None,
    classes: int | None = None,
    vocab: int | None = None,
    dtype: str = "float32",
    mesh: Mesh | None = None,
    seed: int = 0,
) -> Pretrained:
    """The model in a directory of the other library: config.json and model.safetensors (or its shards).

    Args:
      head: another head on the same body (causal_lm, masked_lm, seq2seq, sequence, token, qa, model), whose parameters
        are random unless the file has them; None: the file's own.
      classes: of a classification head; where the file's has another number, the decision is random.
      vocab: rows of the embedding, if it is to be resized: rows that are new are random.
      dtype: precision of the computation; parameters are float32.
      mesh: lays the parameters out over devices, each reading its own part of the file.
      seed: of what is random.

    Raises:
      ConfigError: the directory's files are missing, broken, contradict each other or are of an unknown architecture.
    """
    directory = Path(directory)
    settings = Settings(files.read_config(directory), str(directory / "config.json"))
    family, tensors = family_of(settings), files.open_tensors(directory)
    settings = keys.named(family, settings)
    own = head_of(family, settings)
    head = own if head is None else head
    if head not in family.heads:
        raise ConfigError(f"head: got {head!r}, expected one of {', '.join(family.heads)} for {family.types[0]}")
    found = convert.canonical(family, tensors)
    if head == own == "model" and "bare" in family.heads and not any("pooler" in name for name in found):
        head = "bare"
    other_classes = classes is not None and classes != labels(settings)
    if other_classes:
        named = {"id2label": {str(i): f"LABEL_{i}" for i in range(classes)}}
        settings = settings.replaced({**settings.values, **named})
    model = dataclasses.replace(keys.read_model(family, settings, head), dtype=dtype)
    model = with_tables(family, untied(family, model, found), found)
    _check_counts(model, settings, len(found))
    module = build.build(model)
    boxed = build.shapes(module)
    shapes = nn.meta.unbox(boxed)["params"]
    layout = None if mesh is None else rules.shardings(boxed, mesh)["params"]
    rows = family.rows(model, head)
    fresh = _fresh_head(module, shapes, seed) if head != own or other_classes else {}
    if other_classes:
        found = _without(found, [row for row in rows if row.paths[0].startswith("head/decision")])
    spare = _spare(family, rows)
    left = [name for name in convert.unknown(found, rows) if spare(name)]
    if left:
        log.warning("%s: left out %s, which a model with head %r has no use for", directory, ", ".join(left), head)
    params = convert.read(rows, found, shapes, layout, fresh, spare)
    tokenizers = open_tokenizers(directory, settings)
    defaults = generation.read_defaults(directory, settings.values)
    check_vocabulary(directory, settings, model, tokenizers, defaults)
    names = tuple(str(name) for name in (settings("id2label", None) or {}).values()) or None
    data = DataConfig(length=min(room(model), WINDOW if head == "qa" else DataConfig.length))
    decode = DecodeConfig(max_length=ANSWER) if head == "qa" else DecodeConfig()
    config = Config(model=model, data=data, task=TaskConfig(name=_task(model, head)), decode=decode)
    pretrained = Pretrained(
        module=module,
        params=params,
        variables={},
        config=config,
        tokenizers=tokenizers,
        classes=names,
        family=family,
        head=head,
        settings=settings,
        defaults=defaults,
    )
    return pretrained if vocab is None else resized(pretrained, vocab, seed)


def check_vocabulary(
    directory: Path,
    settings: Settings,
    model: ModelConfig,
    tokenizers: Tokenizers | None,
    defaults: Mapping[str, Any],
) -> None:
    """Names a tokenizer and special tokens that go beyond the tables.

    Raises:
      ConfigError: a special token is no id at all.
    """
    sides = [stack.embed.vocab for stack in (model.encoder, model.decoder) if stack is not None]
    for where, values in ((settings.where, settings.values), (str(directory / "generation_config.json"), defaults)):
        keys.check_tokens(values, where, sides[-1])
    if tokenizers is None:
        return
    for tokenizer, rows in ((tokenizers.source, sides[0]), (tokenizers.target, sides[-1])):
        if len(tokenizer.vocabulary.pieces) > rows:
            log.warning(
                "%s: the tokenizer has %d ids, the table %d rows: texts with tokens beyond it are refused",
                directory,
                len(tokenizer.vocabulary.pieces),
                rows,
            )
            return


def _check_counts(model: ModelConfig, settings: Settings, tensors: int) -> None:
    """Refuses numbers that no file of so many tensors can have, before anything is made in them.

    Raises:
      ConfigError: there are more layers or experts than tensors, or heads do not divide what they share.
    """
    for stack in (model.encoder, model.decoder):
        if stack is None:
            continue
        counts = {"layers": stack.layers, "experts in every layer": 1 if stack.moe is None else stack.moe.experts}
        for what, count in counts.items():
            if count > tensors:
                raise ConfigError(
                    f"{settings.where}: got {count} {what}, expected no more than the file has tensors, {tensors}; the "
                    "file and its config.json contradict each other"
                )
        heads, groups = stack.attention.heads, stack.attention.kv_heads or stack.attention.heads
        if stack.attention.head_width is None and stack.width % heads:
            raise ConfigError(f"{settings.where}: got {heads} heads, expected a divisor of the width {stack.width}")
        if heads % groups:
            raise ConfigError(f"{settings.where}: got {groups} key heads, expected a divisor of the {heads} heads")


def _task(model: ModelConfig, head: str) -> str:
    """What trains such a model here: no task is a regression, and only translation has two sides."""
    two = model.encoder is not None and model.decoder is not None
    return "none" if model.head.classes == 1 or (two and head != "seq2seq") else TASKS.get(head, "none")


def read_params(
    directory: Path, settings: Settings, family: Family, model: ModelConfig, head: str, params: PyTree, keep_head: bool
) -> PyTree:
    """A directory's tensors in the places of `params`, whose values stay where only a new head has them.

    Args:
      keep_head: read the head where the file has one; False: it stays as it is.
    """
    found, rows = convert.canonical(family, files.open_tensors(directory)), family.rows(model, head)
    if family.output is not None and model.head.tied:
        found.pop(family.output[0], None)
    with_tables(family, model, found)
    heads = {path: x for path, x in _paths(params).items() if path.startswith("head/")}
    if not keep_head:
        found = _without(found, [row for row in rows if all(path in heads for path in row.paths)])
    fresh = heads if not keep_head or head != head_of(family, settings) else {}
    layout = jax.tree.map(lambda x: x.sharding, params)
    return convert.read(rows, found, params, layout, fresh, _spare(family, rows))


def _without(tensors: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """The tensors that none of `rows` speaks of."""
    return {name: tensors[name] for name in convert.unknown(tensors, rows)}


def untied(family: Family, model: ModelConfig, tensors: Mapping[str, Any]) -> ModelConfig:
    """A head is tied only if its own tensor, where the file has one, equals the embedding's; a copy is dropped."""
    if family.output is None or family.output[0] not in tensors or not model.head.tied:
        return model
    output, embedding = (tensors.get(name) for name in family.output)
    if embedding is not None and _equal(output, embedding):
        del tensors[family.output[0]]
        return model
    return dataclasses.replace(model, head=dataclasses.replace(model.head, tied=False))


def with_tables(family: Family, model: ModelConfig, tensors: dict[str, Any]) -> ModelConfig:
    """The model with one table for both sides, or two where the file has two that differ; `tensors` hold those alone.

    Raises:
      ConfigError: they differ, and the head is tied to the one for both.
    """
    if family.tables is None:
        return model
    shared, *names = family.tables
    own = [name for name in names if name in tensors]
    if model.decoder is None:
        if names[0] in tensors:
            tensors[shared] = tensors.pop(names[0])
        return model
    if not own:
        return model
    base = tensors.get(shared, tensors[own[0]])
    if model.share_embeddings and all(_equal(tensors[name], base) for name in own):
        for name in own:
            del tensors[name]
        tensors[shared] = base
        return model
    if model.share_embeddings and model.head.kind == "tokens" and model.head.tied:
        raise ConfigError(
            f"{base.file}: got {', '.join(own)}, which differ, under a tied head, expected one table; save the "
            "checkpoint again with tie_word_embeddings false"
        )
    for name in names:
        tensors.setdefault(name, base)
    tensors.pop(shared, None)
    return dataclasses.replace(model, share_embeddings=False)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one.array() == other.array()).all())


_paths = functools.partial(flax.traverse_util.flatten_dict, sep="/")


def _fresh_head(module: nn.Module, shapes: PyTree, seed: int) -> dict[str, jax.Array]:
    """Random values for parameters of the head."""
    if "head" not in shapes:
        return {}
    made = nn.meta.unbox(jax.jit(lambda key: build.initialise(module, key)["params"]["head"])(jax.random.key(seed)))
    return {f"head/{path}": x for path, x in _paths(made).items()}


def _spare(family: Family, rows: Sequence[Row]) -> Callable[[str], bool]:
    """Which tensors may be left over: those of heads and poolers that no row of this head wants."""
    wanted = {row.theirs for row in rows}
    return lambda name: name not in wanted and any(re.fullmatch(pattern, name) for pattern in family.spare)


def resized(pretrained: Pretrained, vocab: int, seed: int = 0) -> Pretrained:
    """The model with `vocab` rows in its embeddings and head: old rows are kept, new ones drawn like the old.

    New embedding rows are normal with the mean and deviation of the old ones.
    """
    model = pretrained.config.model
    sides = {}
    for name in ("encoder", "decoder"):
        stack = getattr(model, name)
        if stack is not None:
            sides[name] = dataclasses.replace(stack, embed=dataclasses.replace(stack.embed, vocab=vocab))
    old = (model.decoder or model.encoder).embed.vocab
    model = dataclasses.replace(model, **sides)
    module = build.build(model)
    shapes = _paths(nn.meta.unbox(build.shapes(module))["params"])
    key, params = jax.random.key(seed), {}
    for i, (path, x) in enumerate(_paths(pretrained.params).items()):
        axis = next((a for a, (new, was) in enumerate(zip(shapes[path].shape, x.shape)) if new != was), None)
        if axis is None:
            params[path] = x
        elif vocab < old:
            params[path] = jax.lax.slice_in_dim(x, 0, vocab, axis=axis)
        else:
            more = shapes[path].shape[:axis] + (vocab - old,) + shapes[path].shape[axis + 1 :]
            drawn = jax.random.normal(jax.random.fold_in(key, i), more) * jnp.std(x) + jnp.mean(x, axis, keepdims=True)
            params[path] = jnp.concatenate([x, drawn if x.ndim > 1 else jnp.zeros(more)], axis)
    tree = flax.traverse_util.unflatten_dict(params, sep="/")
    values = {name: value for name, value in pretrained.settings.values.items() if name != "n_token"}
    settings = pretrained.settings.replaced({**values, "vocab_size": vocab})  # n_token: XLNet's other name of it
    config = dataclasses.replace(pretrained.config, model=model)
    return dataclasses.replace(pretrained, module=module, params=tree, config=config, settings=settings)

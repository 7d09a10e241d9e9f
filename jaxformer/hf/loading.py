"""Loads Hugging Face checkpoint directories: config.json, tensors, tokenizer and generation defaults."""

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

from jaxformer import checkpoint
from jaxformer.config import Config, DataConfig, DecodeConfig, ModelConfig, TaskConfig
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.errors import ConfigError
from jaxformer.hf import blocks, convert, generation_options, keys, reading, weights
from jaxformer.hf.origin import PROBLEMS, TASKS
from jaxformer.hf.pretrained import HuggingFace
from jaxformer.hf.reading import Tensor
from jaxformer.hf.table import Family, Row, Settings, count_classes, family_of, head_of
from jaxformer.hf.tokenizer import open_tokenizers
from jaxformer.model import Model
from jaxformer.models import build
from jaxformer.parallel import rules
from jaxformer.types import PyTree

log = logging.getLogger("jaxformer")

MAX_QA_LENGTH = 384
"""Tokens of question and context together, as BERT reads SQuAD (Devlin et al. 2019)."""
MAX_ANSWER_LENGTH = 30


def from_pretrained(
    directory: str | os.PathLike[str],
    *,
    head: str | None = None,
    classes: int | None = None,
    vocab: int | None = None,
    dtype: str = "float32",
    mesh: Mesh | None = None,
    seed: int = 0,
) -> Model:
    """The model in a Hugging Face directory: config.json and weights (`weights.open_weights`).

    Args:
      head: another head on the same body: causal_lm, masked_lm, pretraining, seq2seq, sequence, token, qa,
        multiple_choice or model.
        Its parameters are random unless the file has them. None: the head of the file.
      classes: number of classes of a classifier. If the file has another number, the decision layer is random.
      vocab: new number of embedding rows; added rows are random.
      dtype: precision of the computation; parameters are float32.
      mesh: shards the parameters over devices; each device reads its own part of the file.
      seed: seed of random parameters.

    Raises:
      ConfigError: files are missing, damaged or contradict each other, or the architecture is unknown.
    """
    directory = Path(directory)
    settings = Settings(reading.read_config(directory), str(directory / "config.json"))
    family, tensors = family_of(settings), weights.open_weights(directory)
    settings = apart(directory, keys.with_defaults(family, settings))
    if vocab is not None and family.convention.is_pair:
        raise ConfigError(f"vocab: got {vocab} for a pair of two vocabularies, expected None; change one side's model")
    file_head = head_of(family, settings)
    head = file_head if head is None else head
    if head not in family.heads:
        raise ConfigError(f"head: got {head!r}, expected one of {', '.join(family.heads)} for {family.model_types[0]}")
    if classes is not None and head not in ("sequence", "token"):
        raise ConfigError(f"classes: got {classes} for head {head!r}, expected None: sequence and token have classes")
    tensors = convert.canonical_tensors(family, tensors)
    if head == file_head == "model" and "bare" in family.heads and not any("pooler" in name for name in tensors):
        head = "bare"
    has_new_classes = classes is not None and classes != count_classes(settings)
    if classes is not None and has_new_classes:
        labels = {str(i): f"LABEL_{i}" for i in range(classes)}
        settings = settings.with_values({**settings.values, "id2label": labels})
    model = dataclasses.replace(keys.read_model(family, settings, head), dtype=dtype)
    model = family.resolve(resolve_embedding_tables(family, untie_output(family, model, tensors), tensors), tensors)
    check_counts(model, settings, len(tensors))
    module = build.build(model)
    shapes, shardings = param_shapes(model, module, mesh)
    rows = family.rows(model, head)
    initial = _random_head(module, shapes, seed) if head != file_head or has_new_classes else {}
    if has_new_classes:
        tensors = _without_rows(tensors, [row for row in rows if row.param_paths[0].startswith("head/decision")])
    can_drop = can_drop_of(family, rows)
    dropped = [name for name in convert.unmatched_names(tensors, rows) if can_drop(name)]
    if dropped:
        log.warning("%s: left out %s, which a model with head %r has no use for", directory, ", ".join(dropped), head)
    params = convert.import_params(rows, tensors, shapes, shardings, initial, can_drop)
    tokenizers = open_tokenizers(directory, settings)
    defaults = generation_options.read_defaults(directory, family.generation_values(settings))
    check_vocabulary(directory, settings, model, tokenizers, defaults)
    names = tuple(str(name) for name in (settings("id2label", None) or {}).values()) or None
    data = DataConfig(length=min(least_positions(model), MAX_QA_LENGTH if head == "qa" else DataConfig.length))
    decode = DecodeConfig(max_length=MAX_ANSWER_LENGTH) if head == "qa" else DecodeConfig()
    relation = family.relation if model.head.relation else "none"
    task = TaskConfig(name=_task_name(model, head, settings), relation=relation)
    config = Config(model=model, data=data, task=task, decode=decode)
    origin = HuggingFace(head, family, settings, defaults)
    loaded = Model(module, params, {}, config, tokenizers, classes=names, hf=origin)
    return loaded if vocab is None else resize_vocabulary(loaded, origin, vocab, seed)


def apart(directory: str | os.PathLike[str], settings: Settings) -> Settings:
    """The settings of a pair whose two sides are no longer one set of layers, once both are read."""
    if not settings("tie_encoder_decoder", False):
        return settings
    log.warning("%s: got tie_encoder_decoder: both sides start equal here, and are trained and saved apart", directory)
    return settings.with_values({**settings.values, "tie_encoder_decoder": False})


def param_shapes(model: ModelConfig, module: nn.Module, mesh: Mesh | None) -> tuple[PyTree, PyTree | None]:
    """Shapes of the parameters, and their shardings on a mesh."""
    if mesh is None:
        return checkpoint.param_shapes(Config(model=model), module), None
    boxed = build.shapes(module)
    return nn.meta.unbox(boxed)["params"], rules.shardings(boxed, mesh)["params"]


def check_vocabulary(
    directory: Path,
    settings: Settings,
    model: ModelConfig,
    tokenizers: Tokenizers | None,
    defaults: Mapping[str, Any],
) -> None:
    """Warns of a tokenizer and of special tokens with ids beyond the embedding tables.

    Raises:
      ConfigError: a special token is not an id.
    """
    sizes = [stack.embed.vocab or 0 for stack in (model.encoder, model.decoder) if stack is not None]
    for path, values in ((settings.path, settings.values), (str(directory / "generation_config.json"), defaults)):
        keys.check_special_tokens(values, path, sizes[-1])
    if tokenizers is None:
        return
    for tokenizer, rows in ((tokenizers.source, sizes[0]), (tokenizers.target, sizes[-1])):
        if len(tokenizer.vocabulary.pieces) > rows:
            log.warning(
                "%s: the tokenizer has %d ids, the table %d rows: texts with tokens beyond it are refused",
                directory,
                len(tokenizer.vocabulary.pieces),
                rows,
            )
            return


def check_counts(model: ModelConfig, settings: Settings, tensors: int) -> None:
    """Refuses sizes that a file with this number of tensors cannot have, before anything is allocated.

    Raises:
      ConfigError: there are more layers or experts than tensors, or heads do not divide what they share.
    """
    for stack in (model.encoder, model.decoder):
        if stack is None:
            continue
        layers = 1 if stack.share_layers else stack.layers
        counts = {"layers": layers, "experts in every layer": 1 if stack.moe is None else stack.moe.experts}
        for what, count in counts.items():
            if count > tensors:
                raise ConfigError(
                    f"{settings.path}: got {count} {what}, expected no more than the file has tensors, {tensors}; the "
                    "file and its config.json contradict each other"
                )
        heads, groups = stack.attention.heads, stack.attention.kv_heads or stack.attention.heads
        if stack.attention.head_width is None and stack.width % heads:
            raise ConfigError(f"{settings.path}: got {heads} heads, expected a divisor of the width {stack.width}")
        if heads % groups:
            raise ConfigError(f"{settings.path}: got {groups} key heads, expected a divisor of the {heads} heads")


def _task_name(model: ModelConfig, head: str, settings: Settings) -> str:
    """Name of the task that trains such a model; "none" for several numbers, and for classifiers with two stacks.

    Raises:
      ConfigError: `problem_type` is unknown.
    """
    if model.is_seq2seq and head != "seq2seq":
        return "none"
    if head != "sequence":
        return "none" if model.head.classes == 1 else TASKS.get(head, "none")
    problem = settings("problem_type", None)
    if problem is None:
        problem = "regression" if model.head.classes == 1 else "single_label_classification"
    if problem not in PROBLEMS:
        expected = f"expected one of {', '.join(PROBLEMS)} or null"
        raise ConfigError(f"{settings.path}: got problem_type {problem!a}, {expected}; mend the file")
    is_number = model.head.classes == 1
    if problem == "multi_label_classification":
        return PROBLEMS[problem]
    return PROBLEMS[problem] if is_number == (problem == "regression") else "none"


def read_params(
    directory: Path, settings: Settings, family: Family, model: ModelConfig, head: str, params: PyTree, keep_head: bool
) -> PyTree:
    """The parameters of a directory. Those of a new head, which the file lacks, keep their values in `params`.

    Args:
      keep_head: read the head if the file has it; False: it keeps its values.
    """
    tensors, rows = convert.canonical_tensors(family, weights.open_weights(directory)), family.rows(model, head)
    if family.tied_tensors is not None and model.head.tied:
        tensors.pop(family.tied_tensors[0], None)
    family.resolve(resolve_embedding_tables(family, model, tensors), tensors)
    head_params = {path: x for path, x in _flatten(params).items() if path.startswith("head/")}
    if not keep_head:
        tensors = _without_rows(tensors, [row for row in rows if all(path in head_params for path in row.param_paths)])
    initial = head_params if not keep_head or head != head_of(family, settings) else {}
    shardings = jax.tree.map(lambda x: x.sharding, params)
    return convert.import_params(rows, tensors, params, shardings, initial, can_drop_of(family, rows))


def _without_rows(tensors: Mapping[str, Tensor], rows: Sequence[Row]) -> dict[str, Tensor]:
    """The tensors that none of `rows` describes."""
    return {name: tensors[name] for name in convert.unmatched_names(tensors, rows)}


def untie_output(family: Family, model: ModelConfig, tensors: dict[str, Tensor]) -> ModelConfig:
    """The model, untied if the file has an output projection that differs from the embedding.

    An equal projection is removed from `tensors`.
    """
    if family.tied_tensors is None or family.tied_tensors[0] not in tensors or not model.head.tied:
        return model
    output, embedding = family.tied_tensors
    if embedding in tensors and _same_values(tensors[output], tensors[embedding]):
        del tensors[output]
        return model
    return dataclasses.replace(model, head=dataclasses.replace(model.head, tied=False))


def resolve_embedding_tables(family: Family, model: ModelConfig, tensors: dict[str, Tensor]) -> ModelConfig:
    """The model with a shared embedding, or with two if the file has two that differ.

    Other copies are removed from `tensors`.

    Raises:
      ConfigError: the two differ, and the head is tied to the shared one.
    """
    if family.embedding_tables is None:
        return model
    shared, *names = family.embedding_tables
    separate = [name for name in names if name in tensors]
    if model.decoder is None:
        if names[0] in tensors:
            tensors[shared] = tensors.pop(names[0])
        return model
    if not separate:
        return model
    base = tensors.get(shared, tensors[separate[0]])
    if model.share_embeddings and all(_same_values(tensors[name], base) for name in separate):
        for name in separate:
            del tensors[name]
        tensors[shared] = base
        return model
    if model.share_embeddings and model.head.kind == "tokens" and model.head.tied:
        raise ConfigError(
            f"{base.file}: got {', '.join(separate)}, which differ, under a tied head, expected one table; save the "
            "checkpoint again with tie_word_embeddings false"
        )
    for name in names:
        tensors.setdefault(name, base)
    tensors.pop(shared, None)
    return dataclasses.replace(model, share_embeddings=False)


def _same_values(a: Tensor, b: Tensor) -> bool:
    """True if all values are equal; memory holds a block of each."""
    if a.shape != b.shape:
        return False
    equal = all((x == y).all() for x, y in blocks.pairs(a.array(), b.array()))
    a.release()
    b.release()
    return equal


_flatten = functools.partial(flax.traverse_util.flatten_dict, sep="/")


def _random_head(module: nn.Module, shapes: PyTree, seed: int) -> dict[str, jax.Array]:
    """Random initial parameters of the head, by path."""
    if "head" not in shapes:
        return {}
    params = nn.meta.unbox(
        jax.jit(lambda key: build.init_variables(module, key)["params"]["head"])(jax.random.key(seed))
    )
    return {f"head/{path}": x for path, x in _flatten(params).items()}


def can_drop_of(family: Family, rows: Sequence[Row]) -> Callable[[str], bool]:
    """A function that is True for tensors of heads and poolers that no row of this head reads."""
    used = {row.hf_name for row in rows}
    return lambda name: name not in used and any(re.fullmatch(pattern, name) for pattern in family.droppable_tensors)


def _output_vocab(model: ModelConfig) -> int:
    """Vocabulary size of the decoder, or of the encoder if there is no decoder."""
    stack = model.decoder or model.encoder
    if stack is None or stack.embed.vocab is None:
        raise ConfigError("vocab: got a model without token embeddings, expected some; leave vocab out")
    return stack.embed.vocab


def resize_vocabulary(loaded: Model, origin: HuggingFace, vocab: int, seed: int = 0) -> Model:
    """The model with `vocab` rows in its embeddings and head. Old rows keep their values.

    New rows are drawn from a normal distribution with the mean and the standard deviation of the old rows.
    """
    model = loaded.config.model
    stacks = {}
    for name in ("encoder", "decoder"):
        stack = getattr(model, name)
        if stack is not None:
            stacks[name] = dataclasses.replace(stack, embed=dataclasses.replace(stack.embed, vocab=vocab))
    old_vocab = _output_vocab(model)
    model = dataclasses.replace(model, **stacks)
    module = build.build(model)
    shapes = _flatten(nn.meta.unbox(build.shapes(module))["params"])
    key, params = jax.random.key(seed), {}
    for i, (path, x) in enumerate(_flatten(loaded.params).items()):
        axis = next((a for a, (new, was) in enumerate(zip(shapes[path].shape, x.shape)) if new != was), None)
        if axis is None:
            params[path] = x
        elif vocab < old_vocab:
            params[path] = jax.lax.slice_in_dim(x, 0, vocab, axis=axis)
        else:
            added = shapes[path].shape[:axis] + (vocab - old_vocab,) + shapes[path].shape[axis + 1 :]
            drawn = jax.random.normal(jax.random.fold_in(key, i), added) * jnp.std(x) + jnp.mean(x, axis, keepdims=True)
            params[path] = jnp.concatenate([x, drawn if x.ndim > 1 else jnp.zeros(added)], axis)
    tree = flax.traverse_util.unflatten_dict(params, sep="/")
    values = {name: value for name, value in origin.settings.values.items() if name != "n_token"}
    settings = origin.settings.with_values({**values, "vocab_size": vocab})  # n_token: XLNet's other name of it
    config = dataclasses.replace(loaded.config, model=model)
    resized = dataclasses.replace(origin, settings=settings)
    return dataclasses.replace(loaded, module=module, params=tree, config=config, hf=resized)


def least_positions(model: ModelConfig) -> int:
    """The number of positions that both sides have."""
    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    return min(stack.encoding.max_length - stack.encoding.offset for stack in stacks)

"""Models of the other library: loaded, called and saved under its names, computed by ours."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh

from jaxformer.config import Config, ConfigError, DataConfig, ModelConfig, TaskConfig
from jaxformer.decode import engine
from jaxformer.decode.batching import Prompt
from jaxformer.hf import calling, convert, files, generation, rewrite
from jaxformer.hf.table import Family, Settings, families, family_of, head_of, same
from jaxformer.hf.tokenizer import frame, open_tokenizers
from jaxformer.model import Model
from jaxformer.models import build
from jaxformer.parallel import rules
from jaxformer.types import Batch, PyTree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

log = logging.getLogger("jaxformer")

TASKS = {"causal_lm": "language_modelling", "masked_lm": "masked_lm", "seq2seq": "translation"}
"""Head -> the task that trains it here; the others are classification."""


@dataclass(frozen=True, eq=False)
class Pretrained(Model):
    """A `Model` that also answers to the other library's names.

    Attributes:
      family: the architecture's table.
      head: our word for its head: causal_lm, masked_lm, seq2seq, sequence, token, qa, model, ...
      settings: its config.json.
      defaults: its generation_config.json.
    """

    family: Family | None = field(default=None)
    head: str = field(default="")
    settings: Settings = field(default_factory=lambda: Settings({}))
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def __call__(
        self, batch: Batch | None = None, *, params: PyTree = None, dropout_key: Any = None, **inputs: Any
    ) -> Any:
        """The outputs of a call with their argument names, e.g. `model(input_ids=ids, attention_mask=mask).logits`.

        Usable under jit and grad: parameters are `self.params`, or those given. A `dropout_key` makes it a training
        step's forward. Outputs come in float32 under their names, as a pytree: logits or last_hidden_state, loss where
        labels are given, hidden_states, attentions.

        Raises:
          ConfigError: an argument is not supported by this model.
        """
        params = self.params if params is None else params
        if batch is not None:
            return super().__call__(batch)
        custom = None if self.family is None else self.family.calling
        if custom is not None:
            return custom(self, params, dropout_key, inputs)
        given = calling.check(inputs, calling.accepted(self.config.model, self.head))
        model = self.config.model
        batch = calling.batch_of(self.family or OURS, self.settings, model, self.head, given)
        wanted = calling.needs_intermediates(self.head, model, given)
        logits, sown = apply(self.module, {**self._variables, "params": params}, batch, wanted, dropout_key)
        loss = calling.loss_of(self.head, self.settings, logits, given)
        return calling.outputs_of(self.head, model, logits, loss, sown, given)

    def generate(self, prompts: Any = None, decode: Any = None, **options: Any) -> Any:
        """Token ids with their argument names (`input_ids=..., num_beams=4`), or texts as `Model.generate`."""
        if prompts is not None:
            return super().generate(prompts, decode, **options)
        return generation.generate(self, options)

    def answer(self, questions: Sequence[str], contexts: Sequence[str], longest: int = 30) -> list[dict[str, Any]]:
        """For each question the span of its context with the highest start + end score, `{"answer", "start", "end",
        "score"}`: characters of the context, and the probability of that start times that of that end.

        Args:
          longest: the most tokens of an answer.

        Raises:
          ConfigError: the model has no question-answering head, or its tokenizer does not know characters.
        """
        if self.head != "qa" or self.tokenizers is None:
            raise ConfigError(f"answer: got a model with head {self.head!r}, expected one with a qa head and tokenizer")
        found = []
        for question, context in zip(questions, contexts, strict=True):
            framed = frame(self.tokenizers.source, self.settings("model_type", ""), question, context)
            if not framed.offsets:
                raise ConfigError("answer: got a tokenizer without character offsets, expected a tokenizer.json")
            kinds = {"token_type_ids": np.asarray([framed.kinds])} if self.config.model.encoder.embed.kinds else {}
            out = self(input_ids=np.asarray([framed.ids]), **kinds)
            inside = np.asarray([part == 1 for part in framed.parts])
            first, last = (np.asarray(jax.nn.softmax(x[0])) * inside for x in (out.start_logits, out.end_logits))
            table = np.tril(np.triu(np.outer(first, last)), longest - 1)
            start, end = np.unravel_index(int(table.argmax()), table.shape)
            begin, finish = framed.offsets[start][0], framed.offsets[end][1]
            found.append({"answer": context[begin:finish], "start": begin, "end": finish, "score": float(table.max())})
        return found

    def _prompt(self, line: str) -> Prompt:
        """An imported model's text is framed as its tokenizer.json says."""
        if self.family is None:
            return super()._prompt(line)
        if self.tokenizers is None:
            raise ConfigError(
                "model: got text, expected token ids: the directory has no tokenizer.json or spiece.model"
            )
        framed = frame(self.tokenizers.source, self.settings("model_type", ""), line)
        ids, model = np.asarray(framed.ids, np.int32), self.config.model
        if model.encoder is None:
            return {"target": ids}
        prompt = {"source": ids}
        if model.encoder.embed.kinds:
            prompt["kind"] = np.asarray(framed.kinds, np.int32)
        if model.decoder is not None:
            prompt["target"] = generation.decoder_start({**self.settings.values, **self.defaults}, 1)[0]
        return prompt

    def _vocabulary(self) -> engine.Vocabulary:
        if self.family is None:
            return super()._vocabulary()
        pad, ends = generation.special({**self.settings.values, **self.defaults})
        return engine.Vocabulary(eos=ends, pad=pad)

    def save_pretrained(self, directory: str | os.PathLike[str], family: str | None = None, dtype: Any = None) -> None:
        """Writes config.json, model.safetensors and the tokenizer, so that the other library computes the same.

        Args:
          family: file of `jaxformer/hf/families/`; None: the one it came from, or the first that can express it.
          dtype: of the file's tensors; None: float32.

        Raises:
          ConfigError: no family computes what this model does; the message says where they differ.
        """
        model, params = self.config.model, self.params
        if self.family is None:
            model, params = rewrite.in_their_terms(model, params)
        chosen, head, settings = self._expressed(model, family)
        tensors = {**convert.write(chosen.rows(model, head), params, dtype), **chosen.constants(model)}
        if head in ("model", "bare", "encoder"):
            tensors = {name.removeprefix(chosen.prefix): make for name, make in tensors.items()}
        files.write(directory, settings, tensors)
        self._save_tokenizer(Path(directory))

    def _expressed(self, model: ModelConfig, name: str | None) -> tuple[Family, str, dict[str, Any]]:
        """The family to export to, its head, and the config.json."""
        problems = []
        for found, family in families():
            if name not in (None, found) or (name is None and self.family is not None and family is not self.family):
                continue
            for head in [self.head] if self.head in family.heads else []:
                try:
                    settings = {**family.write(model, head), **self._labels(head)}
                    settings = {"model_type": family.types[0], "architectures": [family.heads[head]], **settings}
                    again = family.read(Settings(settings), head)
                except (ConfigError, AttributeError, KeyError) as error:
                    problems.append(f"{found}: {error}")
                    continue
                different = same(model, again)
                if not different:
                    return family, head, self._merged(model, family, head, settings)
                problems.append(f"{found} {head}: {different[0]}")
        if not problems:
            raise ConfigError(f"export: got family {name!r}, expected one of {', '.join(f for f, _ in families())}")
        nearest = min(problems, key=len)
        raise ConfigError(f"export: got a model that no family computes, expected e.g. {nearest}; change the config")

    def _merged(self, model: ModelConfig, family: Family, head: str, settings: dict[str, Any]) -> dict[str, Any]:
        """The config.json to write: an imported model's own, as far as it still describes the model."""
        if self.family is not family:
            return settings | self._special_tokens()
        own = dict(self.settings.values)
        as_it_was = {**settings, **own}
        return as_it_was if not same(model, family.read(Settings(as_it_was), head)) else {**own, **settings}

    def _labels(self, head: str) -> dict[str, Any]:
        if head not in ("sequence", "token"):
            return {}
        count = self.config.model.head.classes or 0
        names = self.classes or self.config.task.classes or tuple(f"LABEL_{i}" for i in range(count))
        return {"id2label": {str(i): n for i, n in enumerate(names)}, "label2id": {n: i for i, n in enumerate(names)}}

    def _special_tokens(self) -> dict[str, Any]:
        """Ids of the special tokens, for a model that was trained here."""
        if self.family is not None or self.tokenizers is None:
            return {}
        target = self.tokenizers.target
        ids = {"pad_token_id": target.pad, "bos_token_id": target.bos, "eos_token_id": target.eos}
        if self.config.model.encoder is not None and self.config.model.decoder is not None:
            ids["decoder_start_token_id"] = target.bos
        return {name: value for name, value in ids.items() if value is not None}

    def _save_tokenizer(self, directory: Path) -> None:
        if self.tokenizers is not None and self.tokenizers.joint:
            self.tokenizers.target.export(directory / "tokenizer.json")


OURS = Family((), {}, lambda s, h: ModelConfig(), lambda m, h: {}, lambda m, h: [])
"""The conventions of a model that was trained here."""


@functools.partial(jax.jit, static_argnames=("module", "wanted"))
def apply(module: nn.Module, variables: PyTree, batch: Batch, wanted: bool, key: Any = None) -> tuple[Any, PyTree]:
    """The module's output, and its intermediates if they are wanted."""
    rngs = {} if key is None else {"dropout": key}
    if not wanted:
        return module.apply(variables, batch, rngs=rngs), {}
    output, sown = module.apply(variables, batch, rngs=rngs, mutable=["intermediates"])
    return output, sown["intermediates"]


def room(model: ModelConfig) -> int:
    """The most positions that every table of them has."""
    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    return min(stack.encoding.max_length - stack.encoding.offset for stack in stacks)


def head_of_model(model: ModelConfig) -> str:
    """Our word for the head of a model that was trained here."""
    if model.head.kind == "tokens":
        if model.decoder is None and model.recurrent_decoder is None:
            return "masked_lm"
        return "causal_lm" if model.encoder is None and model.recurrent_encoder is None else "seq2seq"
    return {"classes": "sequence", "slots": "token"}.get(model.head.kind, "model")


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
      classes: of a new classification head.
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
    own = head_of(family, settings)
    head = own if head is None else head
    if head not in family.heads:
        raise ConfigError(f"head: got {head!r}, expected one of {', '.join(family.heads)} for {family.types[0]}")
    found = convert.canonical(family, tensors)
    if head == own == "model" and "bare" in family.heads and not any("pooler" in name for name in found):
        head = "bare"
    if classes is not None:
        settings = Settings(
            {**settings.values, "id2label": {str(i): f"LABEL_{i}" for i in range(classes)}}, settings.where
        )
    model = dataclasses.replace(family.read(settings, head), dtype=dtype)
    model = _untied(family, model, found)
    module = build.build(model)
    boxed = build.shapes(module)
    shapes = nn.meta.unbox(boxed)["params"]
    layout = None if mesh is None else rules.shardings(boxed, mesh)["params"]
    rows = family.rows(model, head)
    fresh = _fresh_head(module, shapes, rows, found, seed) if head != own else {}
    spare = _spare(family, rows)
    left = [name for name in convert.unknown(found, rows) if spare(name)]
    if left:
        log.warning("%s: left out %s, which a model with head %r has no use for", directory, ", ".join(left), head)
    params = convert.read(rows, found, shapes, layout, fresh, spare)
    names = tuple(str(name) for name in (settings("id2label", None) or {}).values()) or None
    data = DataConfig(length=min(room(model), DataConfig.length))
    config = Config(model=model, data=data, task=TaskConfig(name=TASKS.get(head, "classification")))
    pretrained = Pretrained(
        module=module,
        params=params,
        variables={},
        config=config,
        tokenizers=open_tokenizers(directory, settings),
        classes=names,
        family=family,
        head=head,
        settings=settings,
        defaults=generation.read_defaults(directory),
    )
    return pretrained if vocab is None else resized(pretrained, vocab, seed)


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
    heads = {path: x for path, x in _flat(params).items() if path.startswith("head/")}
    if not keep_head:
        tops = [row for row in rows if all(path in heads for path in row.paths)]
        found = {name: tensor for name, tensor in found.items() if convert.unknown([name], tops)}
    fresh = heads if not keep_head or head != head_of(family, settings) else {}
    layout = jax.tree.map(lambda x: x.sharding, params)
    return convert.read(rows, found, params, layout, fresh, _spare(family, rows))


def _untied(family: Family, model: ModelConfig, tensors: Mapping[str, Any]) -> ModelConfig:
    """A head is tied only if its own tensor, where the file has one, equals the embedding's; a copy is dropped."""
    if family.output is None or family.output[0] not in tensors or not model.head.tied:
        return model
    output, embedding = (tensors.get(name) for name in family.output)
    if embedding is not None and output.shape == embedding.shape and bool((output.array() == embedding.array()).all()):
        del tensors[family.output[0]]
        return model
    return dataclasses.replace(model, head=dataclasses.replace(model.head, tied=False))


def _fresh_head(module: nn.Module, shapes: PyTree, rows: Any, tensors: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Random values for parameters of the head."""
    if "head" not in shapes:
        return {}
    made = nn.meta.unbox(jax.jit(lambda key: build.initialise(module, key)["params"]["head"])(jax.random.key(seed)))
    return {f"head/{path}": x for path, x in _flat(made).items()}


def _flat(tree: PyTree) -> dict[str, Any]:
    return {"/".join(str(key.key) for key in path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def _spare(family: Family, rows: Any) -> Any:
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
    shapes = _flat(nn.meta.unbox(build.shapes(module))["params"])
    key, params = jax.random.key(seed), {}
    for i, (path, x) in enumerate(_flat(pretrained.params).items()):
        axis = next((a for a, (new, was) in enumerate(zip(shapes[path].shape, x.shape)) if new != was), None)
        if axis is None:
            params[path] = x
        elif vocab < old:
            params[path] = jax.lax.slice_in_dim(x, 0, vocab, axis=axis)
        else:
            more = shapes[path].shape[:axis] + (vocab - old,) + shapes[path].shape[axis + 1 :]
            drawn = jax.random.normal(jax.random.fold_in(key, i), more) * jnp.std(x) + jnp.mean(x, axis, keepdims=True)
            params[path] = jnp.concatenate([x, drawn if x.ndim > 1 else jnp.zeros(more)], axis)
    tree: dict[str, Any] = {}
    for path, x in params.items():
        *outer, leaf = path.split("/")
        functools.reduce(lambda node, part: node.setdefault(part, {}), outer, tree)[leaf] = x
    settings = Settings({**pretrained.settings.values, "vocab_size": vocab}, pretrained.settings.where)
    config = dataclasses.replace(pretrained.config, model=model)
    return dataclasses.replace(pretrained, module=module, params=tree, config=config, settings=settings)

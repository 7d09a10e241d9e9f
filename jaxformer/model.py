"""What users hold: a trained model with its tokenizers. Strings in, strings out."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxformer import overrides, tasks
from jaxformer.config import Config, ConfigError, DecodeConfig
from jaxformer.decode import engine
from jaxformer.decode.batching import Prompt, jobs
from jaxformer.nn.heads import pool
from jaxformer.nn.recurrent import Encoded
from jaxformer.registry import nearest
from jaxformer.tasks import answering, tagging
from jaxformer.types import Array, Batch, PyTree

if TYPE_CHECKING:
    from jaxformer.data.tokenizers import Tokenizers

METHODS = {
    "translate": "an encoder and a decoder with a head of tokens",
    "generate": "a decoder with a head of tokens",
    "fill_mask": "an encoder with a head of tokens",
    "classify": "a head of classes",
    "tag": "a head of classes for every token",
    "answer": "a head of start and end for every token, and the task answering",
    "embed": "a head of vectors of sentences",
}
"""What each method needs of the model."""

IMPLIED = {
    "beam": ("beams", "length_norm", "length_penalty", "stopping"),
    "sample": ("temperature", "top_k", "top_p", "min_p", "seed"),
}
"""Options that choose the decoding method where it is not given."""


class Output(NamedTuple):
    """One decoded text, its new tokens int32 `[n]`, and its score (see `jaxformer.decode.sample.Hypotheses`)."""

    text: str
    score: float
    tokens: np.ndarray


@dataclass(frozen=True, eq=False)
class Model:
    """A module with parameters, the config it was built from, and the tokenizers of its text.

    Which methods fit is decided by the parts that exist, and the others say which does.

    Attributes:
      module: the Linen module.
      params: its parameters, a plain pytree.
      variables: other collections that it reads (batch-norm statistics); empty for most models.
      config: the resolved config of the run.
      tokenizers: `source` and `target` tokenizers.
      classes: names of a classifier's classes; None: their numbers.
      weights: which checkpoints these are (a `checkpoint.Used`); None: of none.
    """

    module: nn.Module
    params: PyTree
    variables: Mapping[str, PyTree]
    config: Config
    tokenizers: Tokenizers
    classes: tuple[str, ...] | None = field(default=None)
    weights: Any = field(default=None)

    def __call__(self, batch: Batch) -> Array:
        """Float32 logits of a batch: `[B, T, V]`, or `[B, C]` of a classifier."""
        return engine.forward(self.module, self._variables, batch)

    def translate(self, lines: Sequence[str], decode: DecodeConfig | None = None, **options: Any) -> list[str]:
        """The best output for each line, e.g. `translate(lines, beams=5)`. An empty line stays empty.

        Args:
          decode: how to decode; None: as the run's config says.
          options: fields of `DecodeConfig` that replace its own (`max_length` counts new tokens alone). Beam options
            choose beam search and sampling options sampling, unless `method` is given too.

        Raises:
          ConfigError: the model has no encoder and decoder, or an option is unknown or out of range.
        """
        self._require("translate")
        return [outputs[0].text if outputs else "" for outputs in self.outputs(lines, decode, **options)]

    def generate(self, prompts: Sequence[str], decode: DecodeConfig | None = None, **options: Any) -> list[str]:
        """A continuation of each prompt (without the prompt); the empty prompt gives a text from its start.

        Arguments and errors are those of `translate`.
        """
        self._require("generate")
        return [outputs[0].text if outputs else "" for outputs in self.outputs(prompts, decode, **options)]

    def outputs(self, lines: Sequence[str], decode: DecodeConfig | None = None, **options: Any) -> list[list[Output]]:
        """All hypotheses of `translate` or `generate` with their scores: up to `hypotheses` a line, best first.

        Empty lines of a translation have none. Arguments and errors are those of `translate`.
        """
        self._require("translate", "generate")
        config = self._decode_config(decode, options)
        lines = _lines(lines)
        seq2seq = self._family() == "translate"
        wanted = [i for i, line in enumerate(lines) if line.strip() or not seq2seq]
        prompts = [self._prompt(lines[i]) for i in wanted]
        found = engine.run(
            self.module,
            self._variables,
            prompts,
            config,
            self._vocabulary(),
            source_pad=self.tokenizers.source.pad or 0,
            buckets=self.config.data.buckets,
            room=self._room(),
            source_room=engine.positions(self.config.model.encoder),
            rows=np.asarray(wanted, np.int32),
        )
        results: list[list[Output]] = [[] for _ in lines]
        for i, prompt, hypotheses in zip(wanted, prompts, found, strict=True):
            given = () if seq2seq else prompt.get("target", ())
            results[i] = [Output(self._text(given, h.tokens), h.score, h.tokens) for h in hypotheses]
        return results

    def classify(self, lines: Sequence[str]) -> list[dict[str, Any]]:
        """For each line `{"label", "probability", "probabilities"}`, the last a dict of all labels."""
        self._require("classify")
        results: list[dict[str, Any]] = [{} for _ in lines]
        for index, _, rows in self._forward([self._prompt(line) for line in _lines(lines)], None, _softmax):
            for i, row in zip(index, rows, strict=True):
                names, best = self._names(len(row)), int(row.argmax())
                probabilities = dict(zip(names, map(float, row), strict=True))
                results[i] = {"label": names[best], "probability": float(row[best]), "probabilities": probabilities}
        return results

    def tag(self, lines: Sequence[str], words: bool = False) -> list[list[dict[str, Any]]]:
        """For each line, for each of its tokens (special ones left out), `{"token", "label", "probability"}`.

        Args:
          words: for each of its words instead (what stands between blanks), `{"word", "label", "probability"}`, as its
            first token is judged. A word without a token (cut off, or unknown) is "O" with probability 0.
        """
        self._require("tag")
        lines, side = _lines(lines), self._side()
        tokenizer = getattr(self.tokenizers, side)
        results: list[list[dict[str, Any]]] = [[] for _ in lines]
        for index, batch, rows in self._forward([self._prompt(line) for line in lines], None, _softmax):
            stream = getattr(batch, side)
            for place, tokens, segment, row in zip(index, stream.tokens, stream.slots.segment, rows):
                if words:
                    found = [("word", *word) for word in self._words(lines[place])]
                else:
                    texts = ((slot, tokenizer.decode([tokens[slot]])) for slot in np.flatnonzero(segment))
                    found = [("token", text, slot) for slot, text in texts if text]
                results[place] = [{what: text, **self._tag(row, slot)} for what, text, slot in found]
        return results

    def _tag(self, rows: np.ndarray, slot: int | None) -> dict[str, Any]:
        """The likeliest class of a slot, and its probability, from those of all slots `[T, C]`."""
        if slot is None:
            return {"label": "O", "probability": 0.0}
        best = int(rows[slot].argmax())
        return {"label": self._names(rows.shape[-1])[best], "probability": float(rows[slot, best])}

    def _words(self, line: str) -> list[tuple[str, int | None]]:
        """The words of a line, and the slot of each one's first token in its prompt."""
        _, places, _ = tagging.read(self.config, self.tokenizers.source, line)
        return list(zip(tagging.words(line), places, strict=True))

    def _names(self, count: int) -> tuple[str, ...]:
        """Of so many classes, numbers where the run knows no names."""
        return self.classes or self.config.task.classes or tuple(map(str, range(count)))

    def answer(
        self, questions: Sequence[str], contexts: Sequence[str], longest: int | None = None
    ) -> list[dict[str, Any]]:
        """For each question the likeliest span of its context, `{"answer", "start", "end", "score"}`: characters of the
        context, and the probability of that start times that of that end.

        A long context is read in windows, as in training. With `config.task.unanswerable` the answer is empty where
        that is likelier than any.

        Args:
          contexts: as many as questions.
          longest: the most tokens of an answer; None: `config.decode.max_length`.

        Raises:
          ConfigError: the model has no question-answering head, or a question leaves no room for a context.
        """
        self._require("answer")
        questions, contexts = _lines(questions), _lines(contexts)
        longest = self.config.decode.max_length if longest is None else longest
        if len(questions) != len(contexts) or longest < 1:
            got = f"{len(questions)} questions, {len(contexts)} contexts and longest {longest}"
            raise ConfigError(f"answer: got {got}, expected a context a question, and longest of at least 1")
        readings = [self._reading(*both) for both in zip(questions, contexts, strict=True)]
        parts = [(place, w) for place, each in enumerate(readings) for w in answering.windows(self.config, each)]
        found: list[list[Any]] = [[] for _ in questions]
        prompts, length = [self._part(readings[place], window) for place, window in parts], self.config.data.length
        sizes = (*(self.config.data.buckets or (length // 4, length // 2)), length)  # no more: positions may end there
        for index, _, rows in self._forward(prompts, buckets=sizes):
            for (place, window), logits in zip((parts[i] for i in index), rows, strict=True):
                found[place].append(answering.span(readings[place], window, logits, longest))
        maybe = self.config.task.unanswerable
        return [answering.choose(each, context, maybe) for each, context in zip(found, contexts, strict=True)]

    def _reading(self, question: str, context: str) -> answering.Reading:
        return answering.read(self.config, self.tokenizers.source, question, context)

    def _part(self, reading: answering.Reading, window: range) -> Prompt:
        return answering.prompt_of(self.config, reading, window)

    def fill_mask(self, lines: Sequence[str], top: int = 5) -> list[list[list[dict[str, Any]]]]:
        """For each line, for each mask in it, the `top` likeliest `{"token", "id", "probability"}`.

        Raises:
          ConfigError: a line has no mask token (within the model's length), or the model is no masked language model.
        """
        self._require("fill_mask")
        tokenizer, lines = self.tokenizers.source, _lines(lines)
        if tokenizer.mask is None:
            raise ConfigError("fill_mask: got a tokenizer without a mask token, expected one; use another model")
        prompts = [self._prompt(line) for line in lines]
        for line, prompt in zip(lines, prompts, strict=True):
            if tokenizer.mask not in prompt["source"]:
                name = tokenizer.names["mask"]
                raise ConfigError(f"fill_mask: got {line!r}, expected {name} in it; write it where a word is missing")
        results: list[list[list[dict[str, Any]]]] = [[] for _ in prompts]
        for index, batch, logits in self._forward(prompts):
            for row, slot in np.argwhere(batch.source.tokens[: len(index)] == tokenizer.mask):
                scores = logits[row, slot, : tokenizer.size]
                probs = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
                best = np.argsort(-probs, kind="stable")[:top].tolist()
                found = [{"token": tokenizer.decode([t]), "id": t, "probability": float(probs[t])} for t in best]
                results[index[row]].append(found)
        return results

    def embed(self, lines: Sequence[str], pooling: str | None = None) -> np.ndarray:
        """One vector a line, float32 `[n, D]`, from the hidden states below the head (an encoder's, if there is one).

        Args:
          pooling: "mean" over the real tokens, the "first" or the "last" of them; None: what the head of a model of
            sentences makes (with its layer, if it has one), "mean" for others.
        """
        poolings = ("mean", "first", "last")
        if pooling is not None and pooling not in poolings:
            hint = nearest(str(pooling), poolings)
            raise ConfigError(f"embed: got pooling {pooling!r}, expected one of {', '.join(poolings)}{hint}")
        lines, side, width = _lines(lines), self._side(), self._width()
        method, finish = "encode" if self._encodes() else "hidden", _pooling(side, pooling or "mean")
        if self._family() == "embed":
            lines = [line.replace("\t", " ") for line in lines]  # one sentence each: no tab parts a pair
            if pooling is None:
                method, finish, width = None, _first_of_pair, self.config.model.head.width or width
        vectors = np.zeros((len(lines), width), np.float32)
        prompts = [{name: x for name, x in self._prompt(line).items() if name in (side, "kind")} for line in lines]
        for index, _, rows in self._forward(prompts, method, finish):
            vectors[index] = rows
        return vectors

    def similarity(self, pairs: Sequence[Sequence[str]], pooling: str | None = None) -> list[float]:
        """The cosine of the vectors that `embed` makes of two sentences, -1 to 1, for each pair of them.

        Raises:
          ConfigError: `pairs` are no pairs of strings, or `pooling` is unknown.
        """
        pairs = list(pairs)
        for pair in pairs:
            if isinstance(pair, (str, bytes)) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
                raise ConfigError(f"similarity: got {pair!r}, expected two strings; give a list of pairs of sentences")
        place = {text: i for i, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))}
        vectors = self.embed(list(place), pooling).astype(np.float64)
        units = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        found = [units[place[first]] @ units[place[second]] for first, second in pairs]
        return np.clip(found, -1.0, 1.0).tolist()

    def score(self, lines: Sequence[str], targets: Sequence[str] | None = None) -> list[float]:
        """The log-likelihood (natural logarithm) of each line; in translation, of `targets[i]` given `lines[i]`.

        It is the sum over all tokens, the end of the text included where the task trains on it. A text longer than
        `config.data.length` is read in windows, as evaluation does; a source is cut, as in training.

        Raises:
          ConfigError: a target has more tokens than `config.data.length`, or the model is neither a language model nor
            one of translation.
        """
        self._require("translate", "generate")
        seq2seq = self._family() == "translate"
        lines = _lines(lines)
        if seq2seq != (targets is not None) or (seq2seq and len(_lines(targets)) != len(lines)):
            expected = "as many targets as lines" if seq2seq else "none: a language model reads lines only"
            got = "none" if targets is None else str(len(targets))
            raise ConfigError(f"score: got targets {got}, expected {expected}; change the call")
        task, rng = tasks.get(self.config.task.name), np.random.default_rng(0)
        texts = (
            [{"source": s, "target": t} for s, t in zip(lines, targets)] if seq2seq else [{"text": x} for x in lines]
        )
        if seq2seq:
            self._refuse_long(targets)
        windows = task.windows or (lambda *given: [task.encode(*given)])
        parts = [windows(self.config, self.tokenizers, example, rng) for example in texts]
        line_of = np.repeat(np.arange(len(lines)), [len(each) for each in parts])
        scores = np.zeros(len(lines))
        for index, _, rows in self._forward([part for each in parts for part in each], None, _log_likelihood):
            np.add.at(scores, line_of[index], rows)
        return scores.tolist()

    def _refuse_long(self, targets: Sequence[str]) -> None:
        """Raises a ConfigError where the score of a target would be that of its beginning only."""
        longest = self.config.data.length
        for target in targets:
            size = len(self.tokenizers.target.encode(target)) + 1
            if size > longest:
                shown = target if len(target) < 60 else target[:60] + "..."
                raise ConfigError(
                    f"score: got a target of {size} tokens, its end included ({shown!a}), expected at most {longest} "
                    "(data.length); shorten it"
                )

    def too_long(self, lines: Sequence[str]) -> int:
        """How many of these inputs have more tokens than `config.data.length`, so that their ends are not read."""
        return sum("cut" in self._prompt(line) for line in _lines(lines))

    @property
    def _variables(self) -> dict[str, PyTree]:
        return {"params": self.params, **{name: x for name, x in self.variables.items() if name != "ema"}}

    def _encodes(self) -> bool:
        return self.config.model.encoder is not None or self.config.model.recurrent_encoder is not None

    def _decodes(self) -> bool:
        return self.config.model.decoder is not None or self.config.model.recurrent_decoder is not None

    def _side(self) -> str:
        """The stream of a text that is read and not continued."""
        return "source" if self._encodes() else "target"

    def _width(self) -> int:
        model = self.config.model
        encoder = model.encoder or model.recurrent_encoder
        return (encoder or model.decoder or model.recurrent_decoder).width

    def _family(self) -> str:
        """The method that fits this model."""
        if self.config.model.head.kind == "classes":
            return "classify"
        if self.config.model.head.kind == "slots":
            return "answer" if self.config.task.name == "answering" else "tag"
        if self.config.model.head.kind == "pair":
            return "embed"
        if not self._decodes():
            return "fill_mask"
        return "translate" if self._encodes() else "generate"

    def _require(self, *methods: str) -> None:
        fits = self._family()
        if fits not in methods:
            needs = " or ".join(METHODS[method] for method in methods)
            raise ConfigError(f"model: got {METHODS[fits]}, expected {needs} for this method; use model.{fits}")

    def _prompt(self, line: str) -> Prompt:
        prompt = tasks.get(self.config.task.name).prompt
        if prompt is None:
            raise ConfigError(f"task {self.config.task.name}: got a line to encode, expected none: it has no prompts")
        return prompt(self.config, self.tokenizers, line)

    def _decode_config(self, decode: DecodeConfig | None, options: dict[str, Any]) -> DecodeConfig:
        """The decoding options of one call, judged as those of a recipe are."""
        if "method" not in options:
            implied = [method for method, names in IMPLIED.items() if any(name in options for name in names)]
            if len(implied) > 1:
                got = ", ".join(options)
                raise ConfigError(f"decode options: got {got}, expected one method's; add method='beam' or 'sample'")
            options = {**options, **({"method": implied[0]} if implied else {})}
        base = dataclasses.asdict(self.config.decode if decode is None else decode)
        return overrides.freeze({**dataclasses.asdict(self.config), "decode": {**base, **options}}).decode

    def _vocabulary(self) -> engine.Vocabulary:
        target = self.tokenizers.target
        end = target.sep if target.eos is None else target.eos
        return engine.Vocabulary(eos=() if end is None else (end,), pad=target.pad or 0, size=target.size)

    def _room(self) -> int | None:
        """How many target positions exist: learned ones have a table of them, the others no end."""
        return engine.positions(self.config.model.decoder)

    def _text(self, given: Sequence[int], tokens: np.ndarray) -> str:
        """The text of new tokens. After a prompt, what they add to its text: a tokenizer may join across the border."""
        decode = self.tokenizers.target.decode
        before, whole = decode(list(given)), decode([*given, *tokens.tolist()])
        return whole[len(before) :] if whole.startswith(before) else decode(tokens.tolist())

    def _forward(
        self,
        prompts: Sequence[Prompt],
        method: str | None = None,
        finish: Finish | None = None,
        buckets: tuple[int, ...] | None = None,
    ) -> Iterator[tuple[np.ndarray, Batch, np.ndarray]]:
        """Batches of prompts through the module: places among the inputs, the batch, and its real rows' output."""
        pads = (self.tokenizers.source.pad or 0, self.tokenizers.target.pad or 0)
        buckets = self.config.data.buckets if buckets is None else buckets
        for index, batch in jobs(prompts, self.config.evaluate.batch, pads, buckets):
            output = engine.forward(self.module, self._variables, batch, method, finish)
            yield index, batch, np.asarray(output)[: len(index)]


Finish = Callable[[Any, Batch], Array]
"""What is made of a module's output on the device."""


def _softmax(logits: Array, batch: Batch) -> Array:
    return jax.nn.softmax(logits, axis=-1)


def _log_likelihood(logits: Array, batch: Batch) -> Array:
    """`[B]`: the weighted sum of the labels' log-probabilities."""
    gains = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.labels[:, :, None], axis=-1)[:, :, 0]
    return jnp.sum(gains * batch.weights, axis=1)


@functools.cache
def _pooling(side: str, how: str) -> Finish:
    def finish(output: Any, batch: Batch) -> Array:
        x = output.outputs if isinstance(output, Encoded) else output
        return pool(x.astype(jnp.float32), getattr(batch, side).slots, how)

    return finish


def _first_of_pair(vectors: Array, batch: Batch) -> Array:
    return vectors[:, 0]


def _lines(lines: Sequence[str]) -> list[str]:
    """The input as a list of strings."""
    if isinstance(lines, (str, bytes)) or not all(isinstance(line, str) for line in lines):
        got = type(lines).__name__ if isinstance(lines, (str, bytes)) else "other things than strings in it"
        raise ConfigError(f"lines: got {got}, expected a list of strings; write [line]")
    return list(lines)

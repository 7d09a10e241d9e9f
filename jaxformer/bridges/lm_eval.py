"""Language models for the Language Model Evaluation Harness (the package `lm_eval`, extra `[harness]`).

results = lm_eval.simple_evaluate(HarnessModel(jaxformer.load("runs/lm")), tasks=["my_task"])
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from jaxformer.errors import ConfigError
from jaxformer.tasks import Features, Predictor, _generation, _tokens
from jaxformer.types import Array, Batch

Base: Any
windows: Any
try:
    Base, windows = importlib.import_module("lm_eval.api.model").TemplateLM, importlib.import_module("lm_eval.utils")
except ImportError:
    # Tools that import every module work without the package; a model then says what is missing.
    Base, windows = object, None

LENGTH = 2048
"""Tokens of a context where neither the recipe nor config.json states a number."""
NEW_TOKENS = 256
"""Tokens that a request of `generate_until` gets at most if it names no number, as in the harness's own models."""


class Predicting(Protocol):
    """The part of a `jaxformer.Model` that the adapter needs."""

    @property
    def predictor(self) -> Predictor:
        """The model, ready for text."""
        ...


class HarnessModel(Base):
    """A language model as the harness's class of models.

    A text begins with the tokens that its framing puts there (<bos> of a run), and likelihoods are of tokens, as
    `Model.score` sums them, without the end of the text. A context that is too long loses its beginning. Texts of
    `loglikelihood_rolling` that are longer than `length` are read in the harness's windows, which share no tokens.

    Attributes:
      length: tokens that the model reads at once.
    """

    def __init__(self, model: Predicting, length: int | None = None) -> None:
        """
        Args:
          length: None: `data.length` of the run, or the positions of an imported model.

        Raises:
          ConfigError: the package is not installed; the model is no language model with a decoder alone, or has no
            token before the first.
        """
        if windows is None:
            raise ConfigError("lm_eval: got no package lm_eval, expected it; pip install 'jaxformer[harness]'")
        super().__init__()
        self.predictor = model.predictor
        parts = self.predictor.config.model
        if parts.has_encoder or not parts.has_decoder or parts.head.kind != "tokens":
            raise ConfigError("lm_eval: got a model that is no language model, expected a decoder alone that generates")
        self.text_tokenizer = self.predictor.framing.tokenizers.target
        self.length = length or self.predictor.framing.chat_length or LENGTH
        if self.length < 2:
            raise ConfigError(f"lm_eval: got length {self.length}, expected at least 2")
        self.start = self._framed("")
        self.first = self.start[-1] if self.start else _tokens.start_token(self.text_tokenizer, "lm_eval")

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return _tokens.required_token(self.text_tokenizer, "lm_eval", "eos", "sep")

    @property
    def prefix_token_id(self) -> int:
        """The token before the first one of a text."""
        return self.first

    @property
    def max_length(self) -> int:
        """`length`, under the harness's name."""
        return self.length

    @property
    def max_gen_toks(self) -> int:
        """Default number of new tokens."""
        return NEW_TOKENS

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The tokens of a text, behind those that begin one unless `add_special_tokens` is False."""
        return self.text_tokenizer.encode(string) if add_special_tokens is False else self._framed(string)

    def tok_decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return self.text_tokenizer.decode(list(tokens))

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each text, all of its tokens, after the start of a text."""
        pairs: list[tuple[list[int], list[int]]] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            rolling = windows.get_rolling_token_windows(ids, self.first, self.length, context_len=1)
            found = [windows.make_disjoint_window(pair) for pair in rolling]
            pairs += found
            owners += [number] * len(found)
        totals = np.zeros(len(requests))
        for owner, (value, _) in zip(owners, self._score(pairs), strict=True):
            totals[owner] += value
        return totals.tolist()

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """A continuation of each context, up to the first of its `until` texts, which is left out.

        Raises:
          ConfigError: an option of a request is unknown, or leaves no room for its context.
        """
        groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        wanted = [generation_options(request.args[1]) for request in requests]
        for number, (options, _) in enumerate(wanted):
            groups[tuple(sorted(options.items()))].append(number)
        texts = [""] * len(requests)
        for chosen, numbers in groups.items():
            options = _generation.decode_options(self.predictor.config, None, dict(chosen))
            room = self.length - options.max_length
            if room < 1:
                raise ConfigError(
                    f"lm_eval: got max_gen_toks {options.max_length}, expected fewer than the {self.length} tokens "
                    "that the model reads; lower it in the task, or give a larger length"
                )
            prompts: list[Features] = [
                {"target": np.asarray(self._framed(requests[n].args[0])[-room:] or [self.first], np.int32)}
                for n in numbers
            ]
            replies = _generation.reply_texts(self.predictor, prompts, options)
            for number, reply in zip(numbers, replies, strict=True):
                ends = [reply.index(stop) for stop in wanted[number][1] if stop in reply]
                texts[number] = reply[: min(ends, default=len(reply))]
        return texts

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        return self._score([(context, continuation) for _, context, continuation in requests])

    def _framed(self, text: str) -> list[int]:
        """A text as a prompt of the model, without truncation."""
        return np.asarray(self.predictor.framing.prompt(text)["target"]).tolist()

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """For each context and continuation, the continuation's log-likelihood, and whether it is the greedy one."""
        rows: list[Features] = []
        for context, continuation in pairs:
            if not context or len(continuation) > self.length:
                raise ConfigError(
                    f"lm_eval: got a continuation of {len(continuation)} tokens after {len(context)}, expected at most "
                    f"{self.length} after at least 1; shorten it, or give a larger length"
                )
            ids = np.asarray([*context, *continuation][-self.length - 1 :], np.int32)
            weights = (np.arange(len(ids) - 1) >= len(ids) - 1 - len(continuation)).astype(np.float32)
            rows.append({"target": ids[:-1], "labels": ids[1:], "weights": weights})
        found: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        for indices, _, sums in self.predictor.runner.forward(rows, finish=likelihood_and_misses):
            for index, (value, misses) in zip(indices, sums, strict=True):
                found[index] = (float(value), bool(misses == 0))
        return found


def likelihood_and_misses(logits: Array, batch: Batch) -> Float32[Array, "B 2"]:
    """For each row the log-likelihood of its labels, and the number of them that are not the likeliest token."""
    labels, weights = _tokens.labels_and_weights(batch)
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, :, None], axis=-1)[:, :, 0]
    misses = jnp.argmax(logits, axis=-1) != labels
    return jnp.stack([jnp.sum(log_probs * weights, axis=1), jnp.sum(misses * weights, axis=1)], axis=1)


def generation_options(given: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Fields of `DecodeConfig` for the harness's generation arguments, and the texts that end a continuation.

    Raises:
      ConfigError: an argument is unknown.
    """
    known = {"until", "max_gen_toks", "max_new_tokens", "do_sample", "temperature", "top_p", "top_k"}
    unknown = sorted(given.keys() - known)
    if unknown:
        raise ConfigError(f"lm_eval: got generation_kwargs {', '.join(unknown)}, expected {', '.join(sorted(known))}")
    until = given.get("until") or ()
    stops = (until,) if isinstance(until, str) else tuple(stop for stop in until if stop)
    options: dict[str, Any] = {"max_length": given.get("max_gen_toks", given.get("max_new_tokens", NEW_TOKENS))}
    if not given.get("do_sample", False):
        return {**options, "method": "greedy"}, stops
    names = ("temperature", "top_p", "top_k")
    return {**options, "method": "sample", **{name: given[name] for name in names if name in given}}, stops

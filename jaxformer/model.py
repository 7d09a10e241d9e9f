"""The model that users hold: strings in, results out; or arrays under the other library's names.

Each method is one call: what a task does with text lies in `jaxformer/tasks/`, what the other library's names mean in
`jaxformer/hf/`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from flax import linen as nn

from jaxformer import framing, tasks
from jaxformer.analysis import ablate as analysis_ablate
from jaxformer.analysis import attention as analysis_attention
from jaxformer.analysis import lens as analysis_lens
from jaxformer.analysis import notebook
from jaxformer.analysis import patching as analysis_patching
from jaxformer.analysis.notebook import Parameters
from jaxformer.analysis.results import Results
from jaxformer.bridges import onnx as onnx_bridge
from jaxformer.bridges import onnx_decoding
from jaxformer.checkpoint import LoadedRun, WeightsInfo
from jaxformer.config import Config, DecodeConfig
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.decode.compiled import Vocabulary, forward
from jaxformer.decode.generate import ModelBundle
from jaxformer.decode.runner import max_positions
from jaxformer.errors import ConfigError
from jaxformer.models import adapters, build
from jaxformer.tasks import (
    Predictor,
    _embedding,
    _generation,
    _likelihood,
    _words,
    answering,
    classification,
    dialogue,
    forecasting,
    masked_lm,
    regression,
    replaced_tokens,
    tagging,
)
from jaxformer.tasks._generation import Output
from jaxformer.types import EMA, Array, Batch, PyTree

__all__ = ["HuggingFaceInterface", "Model", "Output"]


class HuggingFaceInterface(Protocol):
    """The other library's way to use a model; `jaxformer.hf.pretrained.HuggingFace` implements it."""

    @property
    def head(self) -> str:
        """Name of the model's head: causal_lm, masked_lm, seq2seq, sequence, token, qa, model, bare, encoder."""
        ...

    @property
    def architecture(self) -> str:
        """The other library's class for the model."""
        ...

    def predictor(self, model: Model, config: Config) -> Predictor:
        """The model, ready for text; an imported one frames text as its directory does."""
        ...

    def call(self, model: Model, params: PyTree, dropout_key: Array | None, inputs: Mapping[str, Any]) -> Any:
        """The named outputs of a forward pass."""
        ...

    def generate(self, model: Model, options: Mapping[str, Any]) -> Any:
        """Token ids."""
        ...

    def save_pretrained(self, model: Model, directory: str | os.PathLike[str], family: str | None, dtype: Any) -> None:
        """Writes a directory that the other library loads."""
        ...

    def save_adapter(
        self, model: Model, directory: str | os.PathLike[str], base: str | os.PathLike[str] | None
    ) -> None:
        """Writes the adapters as a directory of the peft package."""
        ...

    def push_to_hub(
        self, model: Model, name: str, family: str | None, dtype: Any, adapter: bool, **options: Any
    ) -> str:
        """Uploads the model with a card."""
        ...


@dataclass(frozen=True, eq=False)
class Model:
    """A module with parameters, the config it was built from, and the tokenizers of its text.

    Head and sides of the model decide which methods fit; the other methods raise a ConfigError that names the one to
    use. `jaxformer.load` and `jaxformer.from_pretrained` return models.

    Attributes:
      module: the Linen module.
      params: its parameters, a plain pytree.
      variables: other collections that it reads (batch-norm statistics); empty for most models.
      config: the resolved config of the run.
      tokenizers: `source` and `target` tokenizers; None: the directory has none, and the model takes token ids only.
      classes: names of a classifier's classes; None: those of the config.
      weights: which checkpoints the parameters come from; None: from no run.
      hf: calls under the other library's names, and where an imported model comes from. Models that are loaded have it.
      draft: a smaller model that proposes tokens; see `with_draft`.
    """

    module: nn.Module
    params: PyTree
    variables: Mapping[str, PyTree]
    config: Config
    tokenizers: Tokenizers | None
    classes: tuple[str, ...] | None = None
    weights: WeightsInfo | None = None
    hf: HuggingFaceInterface | None = None
    draft: Model | None = None

    @classmethod
    def of_run(cls, run: LoadedRun, hf: HuggingFaceInterface | None = None) -> Model:
        """The model of a loaded run."""
        classes = run.config.task.classes or None
        return cls(run.module, run.params, run.variables, run.config, run.tokenizers, classes, run.weights, hf)

    # Text. See the functions for results and errors.

    def predict(self, lines: Sequence[str], decode: DecodeConfig | None = None, **options: Any) -> Sequence[Any]:
        """The result of the model's task for each line, as `jaxformer decode` makes it. Options as in `translate`."""
        task, decode = tasks.get(self.config.task.name), self._decode_options(decode, options)
        return task.predict(self.predictor, tasks.text_lines(lines), decode)

    def translate(self, lines: Sequence[str], decode: DecodeConfig | None = None, **options: Any) -> list[str]:
        """The best output for each line, e.g. `translate(lines, beams=5)`. An empty line stays empty.

        Args:
          decode: how to decode; None: as the run's config says.
          options: fields of `DecodeConfig` that replace its own (`max_length` counts new tokens alone). Beam options
            choose beam search and sampling options sampling, unless `method` is given too.

        Raises:
          ConfigError: the model has no encoder and decoder, or an option is unknown or out of range.
        """
        return _generation.best_texts(self._for("translate"), lines, self._decode_options(decode, options))

    def generate(self, prompts: Sequence[str] | None = None, decode: DecodeConfig | None = None, **options: Any) -> Any:
        """A continuation of each prompt (without the prompt); the empty prompt gives a text from its start.

        Arguments and errors are those of `translate`. Without prompts, token ids under the other library's argument
        names (`generate(input_ids=..., num_beams=4)`): there `max_length` counts the prompt, and
        generation_config.json sets the defaults; see `jaxformer.hf.generation.generate`.
        """
        if prompts is None:
            return self._interface("generate").generate(self, options)
        return _generation.best_texts(self._for("generate"), prompts, self._decode_options(decode, options))

    def chat(
        self,
        history: Sequence[Mapping[str, str]],
        decode: DecodeConfig | None = None,
        stream: bool = False,
        **options: Any,
    ) -> str | Iterator[str]:
        """The reply to a conversation, `[{"role": "user", "content": "Hi"}]`; with `stream` in pieces, see `stream`.

        Its turns are perhaps one of the system, then user and assistant in turns, the user last. The model's chat
        template writes them. Where they leave no room for a reply, the oldest turns are left out, each user's with its
        reply, and a warning says how many; the system's turn stays. Options are those of `translate`.

        Raises:
          ConfigError: the model is no language model or has no chat template, roles are unknown or out of order, or an
            option is unknown or out of range.
        """
        answer = dialogue.stream_reply if stream else dialogue.reply
        return answer(self._for("chat", "generate"), history, self._decode_options(decode, options))

    def stream(
        self, prompt: str | Sequence[Mapping[str, str]], decode: DecodeConfig | None = None, **options: Any
    ) -> Iterator[str]:
        """`generate([prompt])[0]` in pieces, as tokens are chosen; of an encoder-decoder `translate`, of a list `chat`.

        A piece has the tokens of 0.05 seconds, or one that takes longer (`jaxformer.decode.streaming`), and no half
        character. Between two pieces nothing runs, so the generation ends when nobody reads on.
        Arguments and errors are those of `translate`.

        Raises:
          ConfigError: also for a beam search and for several hypotheses, whose best is known at the end only.
        """
        if not isinstance(prompt, str):
            return dialogue.stream_reply(self._for("chat", "generate"), prompt, self._decode_options(decode, options))
        return _generation.stream(self._for("translate", "generate"), prompt, self._decode_options(decode, options))

    def outputs(self, lines: Sequence[str], decode: DecodeConfig | None = None, **options: Any) -> list[list[Output]]:
        """All hypotheses of `translate` or `generate` with their scores: up to `hypotheses` per line, best first.

        Empty lines of a translation have none. Arguments and errors are those of `translate`.
        """
        return _generation.outputs(self._for("translate", "generate"), lines, self._decode_options(decode, options))

    def with_draft(self, draft: Model, speculate: int = 4) -> Model:
        """The same model, to which a smaller one proposes tokens: its texts are the same, and come sooner.

        Greedy search and sampling run with it, whatever method decodes text. How much is gained depends on how often
        the two agree; the log says how many tokens a pass of the model gave (`jaxformer.decode.search.speculation`).

        Args:
          draft: a model of the same kind with the same tokenizer.
          speculate: tokens that are proposed at a time, `config.decode.speculate`.

        Raises:
          ConfigError: the draft has other tokens, or reads another kind of input; or `speculate` is no number from 1.
        """
        for name, config in (("model", self.config.model), ("draft", draft.config.model)):
            if config.decoder is None or config.head.kind != "tokens":
                raise ConfigError(f"draft: got a {name} that is no transformer that writes text, expected one")
        if self.config.model.is_seq2seq != draft.config.model.is_seq2seq:
            kinds = ("a decoder alone", "an encoder-decoder")
            got, expected = kinds[draft.config.model.is_seq2seq], kinds[self.config.model.is_seq2seq]
            raise ConfigError(f"draft: got {got}, expected {expected}, as the model is; take another")
        if self.tokenizers is not None and draft.tokenizers is not None:
            side = self.tokenizers.differing_side(draft.tokenizers)
            if side is not None:
                raise ConfigError(f"draft: got one with another {side} tokenizer, expected the model's; take another")
        if speculate < 1:
            raise ConfigError(f"speculate: got {speculate}, expected a number of tokens from 1")
        config = dataclasses.replace(self.config, decode=self._decode_options(None, {"speculate": speculate}))
        return dataclasses.replace(self, config=config, draft=draft)

    def classify(self, lines: Sequence[str]) -> list[dict[str, Any]]:
        """For each line `{"label", "probability", "probabilities"}`, the last a dict of all labels.

        Of a model whose labels are sets, `{"labels", "probabilities"}`: the names of the set, and a probability each.
        """
        predictor = self._for("classify")
        task = tasks.fitting(predictor.config) or classification.TASK
        return list(task.predict(predictor, lines, self.config.decode))

    def regress(self, lines: Sequence[str]) -> list[float]:
        """The number of each line, in the units of the training data."""
        return regression.predict(self._for("regress"), lines, self.config.decode)

    def forecast(self, series: Sequence[np.ndarray]) -> np.ndarray:
        """The next steps of each series, float64 `[n, H, C]`, in the units of the training data.

        Args:
          series: arrays `[steps, C]` of at least `config.data.length` steps; the last ones are read.

        Raises:
          ConfigError: a series is too short, has other channels or a value that is not finite.
        """
        return forecasting.forecast(self._for("forecast"), series)

    def tag(self, lines: Sequence[str], words: bool = False) -> list[list[dict[str, Any]]]:
        """For each line, for each of its tokens (special ones left out), `{"token", "label", "probability"}`.

        Args:
          words: for each of its words instead (what stands between blanks), `{"word", "label", "probability"}`, as its
            first token is tagged. A word without a token (truncated, or unknown) is "O" with probability 0.
        """
        predictor = self._for("tag")
        return tagging.predict(predictor, lines, self.config.decode) if words else tagging.tag_tokens(predictor, lines)

    def answer(
        self, questions: Sequence[str], contexts: Sequence[str], longest: int | None = None
    ) -> list[dict[str, Any]]:
        """For each question the likeliest span of its context, `{"answer", "start", "end", "score"}`.

        Start and end count characters of the context; the score is the probability of that start times that of that
        end. A long context is read in windows, as in training. With `config.task.unanswerable` the answer is empty
        where that is likelier than any.

        Args:
          contexts: as many as questions.
          longest: the greatest number of tokens of an answer; None: `config.decode.max_length`.

        Raises:
          ConfigError: the model has no question-answering head, or a question leaves no slot for its context.
        """
        return answering.answer(self._for("answer"), questions, contexts, longest)

    def fill_mask(self, lines: Sequence[str], top: int = 5) -> list[list[list[dict[str, Any]]]]:
        """For each line, for each mask in it, the `top` likeliest `{"token", "id", "probability"}`.

        Raises:
          ConfigError: a line has no mask token (within the model's length), or the model is no masked language model.
        """
        return masked_lm.fill_masks(self._for("fill_mask"), lines, top)

    def detect(self, lines: Sequence[str]) -> list[list[dict[str, Any]]]:
        """For each line, for each of its tokens (special ones left out), `{"token", "id", "replaced"}`.

        The last is the probability that the token is not the original, as ELECTRA's discriminator sees it.
        """
        return replaced_tokens.detect(self._for("detect"), lines)

    def embed(self, lines: Sequence[str], pooling: str | None = None) -> np.ndarray:
        """One vector per line, float32 `[n, D]`, from the hidden states below the head (an encoder's, if there is one).

        Args:
          pooling: "mean" over the real tokens, the "first" or the "last" of them; None: the output of the head of a
            sentence model (with its layer, if it has one), "mean" for others.
        """
        return _embedding.embed(self.predictor, lines, pooling)

    def nearest(self, word: str, top: int = 10) -> list[dict[str, Any]]:
        """The `top` words whose vectors have the highest cosine with that of `word`: `{"word", "cosine"}`, best first.

        Several words with blanks between them stand for the sum of their vectors, each of length 1.

        Raises:
          ConfigError: a word is not in the vocabulary, or the model is none of word vectors.
        """
        return self._neighbours([(part, 1.0) for part in tasks.text_lines([word])[0].split()], top)

    def analogy(self, a: str, b: str, c: str, top: int = 10) -> list[dict[str, Any]]:
        """The words nearest to b - a + c: a is to b as c is to the answer (Mikolov et al. 2013).

        `analogy("man", "king", "woman")` looks for "queen". Vectors have length 1 before they are added; the three
        words are no answers. Result and errors are those of `nearest`.
        """
        return self._neighbours([(b, 1.0), (a, -1.0), (c, 1.0)], top)

    def similarity(self, pairs: Sequence[Sequence[str]], pooling: str | None = None) -> list[float]:
        """The cosine, -1 to 1, of the vectors of the two sentences of each pair; see `embed`.

        Raises:
          ConfigError: `pairs` are no pairs of strings, or `pooling` is unknown.
        """
        return _embedding.cosines(self.predictor, pairs, pooling)

    def score(self, lines: Sequence[str], targets: Sequence[str] | None = None) -> list[float]:
        """The log-likelihood (natural logarithm) of each line; in translation, of `targets[i]` given `lines[i]`.

        It is the sum over all tokens, the end of the text included where the task trains on it. A text longer than
        `config.data.length` is read in windows, as evaluation does; a source is truncated, as in training.

        Raises:
          ConfigError: a target has more tokens than `config.data.length`, or the model is neither a language model nor
            one of translation.
        """
        return _likelihood.log_likelihoods(self._for("translate", "generate"), lines, targets)

    def too_long(self, lines: Sequence[str]) -> int:
        """Number of these inputs that have more tokens than `config.data.length`, so that their ends are not read."""
        return sum("cut" in prompt for prompt in self.predictor.prompts(tasks.text_lines(lines)))

    # What it computes inside: arrays with the names of tokens, which a notebook displays. See docs/explore.md.

    def attention(
        self,
        lines: Sequence[str],
        targets: Sequence[str] | None = None,
        layers: Sequence[int] | None = None,
        gradient: bool = False,
        position: int = -1,
    ) -> Results[analysis_attention.AttentionMaps]:
        """Attention of each head for each line: probabilities `[L, H, T, S]` by kind, with the names of the tokens.

        Args:
          targets: what the decoder of an encoder-decoder reads; None: the model's own output.
          layers: indices of the layers to keep; None: all.
          gradient: also the gradients of the highest logit at `position`, for `AttentionMaps.relevance`.

        Raises:
          ConfigError: the model has no attention over tokens, or an argument does not fit.
        """
        return analysis_attention.attention(self.predictor, lines, targets, layers, gradient, position)

    def lens(
        self, lines: Sequence[str], targets: Sequence[str] | None = None, top: int = 5
    ) -> Results[analysis_lens.Lens]:
        """The logit lens: what the head would predict from each layer, for each line; the `top` likeliest outputs.

        Raises:
          ConfigError: the head gives no logits, or the model reads no text.
        """
        return analysis_lens.lens(self.predictor, lines, targets, top)

    def ablate(
        self,
        lines: Sequence[str],
        heads: Sequence[analysis_ablate.HeadChoice] | None = None,
        mlps: Sequence[analysis_ablate.MlpChoice] | None = None,
        targets: Sequence[str] | None = None,
    ) -> Results[analysis_ablate.Ablation] | Results[analysis_ablate.AblationScan]:
        """The outputs for each line without some heads and feed-forward layers, whose outputs count as 0.

        Without `heads` and `mlps`, the change that each of them makes, removed alone.

        Args:
          heads: (layer, head), or (kind, layer, head) of an encoder-decoder, as ("cross", 0, 1).
          mlps: layers, or (side, layer) of an encoder-decoder.

        Raises:
          ConfigError: there is no such part, or the model is no transformer whose head gives logits.
        """
        return analysis_ablate.ablate(self.predictor, lines, heads, mlps, targets)

    def patch(
        self,
        clean: str,
        corrupted: str,
        target: str | None = None,
        position: int | None = None,
        part: str = "residual",
    ) -> analysis_patching.Patching:
        """Activations of `clean` put into `corrupted`, one layer and token at a time: what brings its answer back.

        Args:
          target: output that is measured in an encoder-decoder; None: the model's own for `clean`.
          position: slot whose best output is measured in other models; None: a decoder's last, all of an encoder.
          part: "residual": the residual stream after each layer; "attention" and "mlp": what self-attention and the
            feed-forward layer add to it; "heads": the output of each single head, at all tokens at a time. Of an
            encoder-decoder the encoder's.

        Raises:
          ConfigError: the sentences have unlike numbers of tokens, there is no such part, or as in `ablate`.
        """
        return analysis_patching.patch(self.predictor, clean, corrupted, target, position, part)

    @property
    def parameters(self) -> Parameters:
        """The parameters by path ("decoder/blocks/ffn/in/kernel"), a mapping that a notebook displays as a table."""
        return Parameters(self.params)

    def _repr_html_(self) -> str:
        return notebook.summary(self.config, self.params)

    # Arrays.

    def __call__(
        self,
        batch: Batch | None = None,
        *,
        params: PyTree = None,
        dropout_key: Array | None = None,
        **inputs: Any,
    ) -> Any:
        """Float32 logits of a batch, `[B, T, V]`, or `[B, C]` of a classifier.

        Without a batch, the outputs of a call with the other library's argument names, e.g.
        `model(input_ids=ids, attention_mask=mask).logits`: logits or last_hidden_state, loss where labels are given,
        hidden_states, attentions, as a float32 pytree. Usable under jit and grad.

        Args:
          params: parameters to use in place of `self.params`.
          dropout_key: makes a call with names a training step's forward pass.

        Raises:
          ConfigError: an argument is not supported by this model.
        """
        if batch is not None:
            return forward(self.module, self.inference_variables(params), batch)
        return self._interface("call").call(self, params, dropout_key, inputs)

    def save_pretrained(self, directory: str | os.PathLike[str], family: str | None = None, dtype: Any = None) -> None:
        """Writes config.json, model.safetensors and the tokenizer, so that the other library computes the same.

        Adapters are merged; `save_adapter` writes them alone.

        Args:
          family: file of `jaxformer/hf/families/`; None: the one it came from, or the first that can express it.
          dtype: of the file's tensors; None: float32.

        Raises:
          ConfigError: no family computes what this model does; the message names the differences.
        """
        model = self if self.config.model.adapter is None else self.merge_adapters()
        self._interface("save_pretrained").save_pretrained(model, directory, family, dtype)

    def save_adapter(self, directory: str | os.PathLike[str], base: str | os.PathLike[str] | None = None) -> None:
        """Writes the adapters alone, and what else was trained, as the peft package does: a small directory.

        Args:
          base: directory of the model that they were trained on, for adapter_config.json.

        Raises:
          ConfigError: the model has no adapters, or the format has no place for what was trained.
        """
        self._interface("save_adapter").save_adapter(self, directory, base)

    def push_to_hub(
        self,
        name: str,
        *,
        family: str | None = None,
        dtype: Any = None,
        adapter: bool = False,
        token: str | bool | None = None,
        revision: str | None = None,
        private: bool | None = None,
        message: str = "",
    ) -> str:
        """Uploads the model to the Hugging Face hub, with a card that holds its recipe and its measured scores.

        The scores are those in the run's workdir: `result.json`, and `eval-<split>.json` of `jaxformer evaluate`.
        Secrets in the recipe are redacted; paths of the machine are not.

        Args:
          name: "org/name" of the repository, which is made if there is none.
          family, dtype: see `save_pretrained`.
          adapter: the adapters alone; see `save_adapter`.
          token: a token of the hub that may write; None: `HF_TOKEN`, or that of a login.
          revision: branch; None: the main branch.
          private: of a new repository; None: as the account says.
          message: of the commit.

        Returns:
          The address of the commit.

        Raises:
          ConfigError: the model cannot be written, huggingface_hub is not installed, or the hub refuses.
        """
        options = {"token": token, "revision": revision, "private": private, "message": message}
        return self._interface("push_to_hub").push_to_hub(self, name, family, dtype, adapter, **options)

    def merge_adapters(self) -> Model:
        """A model without adapters that computes the same: each kernel is `W + scale * A B`.

        Raises:
          ConfigError: the model has no adapters.
        """
        config = self.config
        if config.model.adapter is None:
            raise ConfigError("merge_adapters: got a model without adapters, expected some; it is merged already")
        plain = dataclasses.replace(config.model, adapter=None)
        params, config = adapters.merge(self.params), dataclasses.replace(config, model=plain)
        return dataclasses.replace(self, module=build.build(plain), params=params, config=config)

    def as_nnx(self, rngs: Any = None) -> Any:
        """The model as a Flax NNX module with the same arrays; called with a `Batch` it gives the same bits.

        Args:
          rngs: `flax.nnx.Rngs` with a stream "dropout": every call draws a key and computes as a training step does;
            None: without dropout.
        """
        from jaxformer.bridges import nnx  # imports a part of flax that nothing else needs

        return nnx.to_nnx(self.module, self.inference_variables(), rngs)

    def with_nnx(self, converted: Any) -> Model:
        """This model with the variables that a module of `as_nnx` holds now, as after training it in NNX.

        Raises:
          ConfigError: the module is not one that `as_nnx` made of this model.
        """
        from jaxformer.bridges import nnx

        variables = nnx.from_nnx(converted, self.inference_variables())
        others = {name: value for name, value in variables.items() if name != "params"}
        return dataclasses.replace(self, params=variables["params"], variables={**self.variables, **others})

    def export_onnx(self, path: str | os.PathLike[str], length: int, rows: int | None = None) -> Path:
        """Writes the forward pass as an ONNX file; inputs, outputs and errors: `jaxformer.bridges.onnx.export`."""
        return onnx_bridge.export(self.module, self.inference_variables(), self.config.model, path, length, rows)

    def export_onnx_step(
        self,
        directory: str | os.PathLike[str],
        length: int,
        source_length: int | None = None,
        rows: int | None = None,
    ) -> Path:
        """Writes one step of decoding as ONNX files; arguments and errors: `jaxformer.bridges.onnx_decoding.export`."""
        task = self.config.task.name
        if task != "none" and tasks.get(task).has_prefix:
            raise ConfigError(
                f"export_onnx_step: got a model of the task {task}, whose prompts see their own future, expected one "
                "that reads them token by token"
            )
        vocab = None if self.tokenizers is None else self.tokenizers.target.size
        return onnx_decoding.export(
            self.inference_variables(), self.config.model, directory, length, source_length, rows, vocab
        )

    def inference_variables(self, params: PyTree = None) -> dict[str, PyTree]:
        """The variables of a forward pass: `params` (None: the model's own) and the other collections."""
        others = {name: value for name, value in self.variables.items() if name != EMA}
        return {"params": self.params if params is None else params, **others}

    @functools.cached_property
    def predictor(self) -> Predictor:
        """The model as tasks use it, with its runner and framing.

        Raises:
          ConfigError: the model has no tokenizers.
        """
        if self.tokenizers is None and self.config.model.reads_tokens:
            raise ConfigError(
                "model: got text, expected token ids: the directory has no tokenizer.json or spiece.model"
            )
        config = self.config
        if self.classes:
            config = dataclasses.replace(config, task=dataclasses.replace(config.task, classes=self.classes))
        if self.hf is not None:
            predictor = self.hf.predictor(self, config)
        else:
            predictor = framing.run_predictor(config, self.module, self.inference_variables(), self.tokenizers)
        if self.draft is None:
            return predictor
        return dataclasses.replace(predictor, runner=dataclasses.replace(predictor.runner, draft=self.draft.bundle()))

    def bundle(self) -> ModelBundle:
        """The module and its variables, as decoding takes a draft."""
        decoder = self.config.model.decoder
        return ModelBundle(
            self.module, self.inference_variables(), Vocabulary((), 0), max_target_length=max_positions(decoder)
        )

    def _for(self, *methods: str) -> Predictor:
        """The predictor, if one of these methods fits the model."""
        predictor = self.predictor
        tasks.require(predictor.config, *methods)
        return predictor

    def _neighbours(self, terms: Sequence[tuple[str, float]], top: int) -> list[dict[str, Any]]:
        """The words nearest to a sum of weighted words."""
        (found,) = _words.neighbours(self._for("nearest"), [terms], top)
        return [{"word": word, "cosine": cosine} for word, cosine in zip(*found, strict=True)]

    def _decode_options(self, decode: DecodeConfig | None, options: Mapping[str, Any]) -> DecodeConfig:
        return _generation.decode_options(self.config, decode, options)

    def _interface(self, method: str) -> HuggingFaceInterface:
        if self.hf is None:
            raise ConfigError(
                f"{method}: got a model that was not loaded, expected one from jaxformer.load or from_pretrained"
            )
        return self.hf

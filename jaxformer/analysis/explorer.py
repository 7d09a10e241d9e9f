"""Everything that the attention explorer shows of a model, as one value that JSON can hold.

Arrays are base64 of little-endian float32 with their shape, `{"shape": [2, 4, 7, 7], "data": "..."}`, so they are exact
and compact. `jaxformer/report/explorer.py` makes a page of the value; `jaxformer explore --serve` answers with parts.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxformer import tasks
from jaxformer.analysis import ablate, attention, generation, lens, patching, sentences
from jaxformer.analysis.attention import SIDES, AttentionMaps
from jaxformer.analysis.layers import LOGIT_HEADS, Reader
from jaxformer.analysis.lens import Lens
from jaxformer.analysis.measures import HEAD_SCORES
from jaxformer.analysis.sentences import Sentence
from jaxformer.config import DecodeConfig, ModelConfig
from jaxformer.decode.batching import bucket_length
from jaxformer.errors import ConfigError
from jaxformer.models import build
from jaxformer.tasks import Predictor

FORMAT = 1
"""Version of the value."""

MAX_TOKENS = 256
"""Tokens of one side of a sentence: a map of more has more cells than a screen has pixels to point at."""

MAX_SCANNED_PARTS = 400
"""Heads and feed-forward layers that are removed one at a time; larger models ask for single ones."""

MAX_SENTENCES = 32
"""Sentences of one page."""

STREAM_NAMES = ("source", "target")

SAMPLE_PAIR = (
    "I poured water from the bottle into the cup until it was full.",
    "I poured water from the bottle into the cup until it was empty.",
)
"""Two sentences whose "it" means the cup and the bottle."""


@dataclass(frozen=True)
class Options:
    """Sizes of the explorer's results for a sentence.

    Attributes:
      top: alternatives at each position.
      new_tokens: most tokens that a language model writes after a sentence.
      beams: beams of the tree.
    """

    top: int = 8
    new_tokens: int = 16
    beams: int = 4


def document(
    predictor: Predictor, name: str, lines: Sequence[str], pair: Sequence[str] | None, options: Options
) -> dict[str, Any]:
    """The explorer's value for some sentences, and for a pair between which activations are patched.

    Args:
      name: of the model, for people.
      pair: None: no patching.

    Raises:
      ConfigError: the model reads no text or has no attention, or there are too many sentences or tokens.
    """
    lines = tasks.text_lines(lines)
    if not lines or len(lines) > MAX_SENTENCES:
        raise ConfigError(f"explore: got {len(lines)} sentences, expected 1 to {MAX_SENTENCES}")
    attention.check(predictor.config.model)
    model, params = predictor.config.model, predictor.runner.variables["params"]
    found = [describe(predictor, read, options) for read in sentences.read(predictor, lines)]
    return {
        "format": FORMAT,
        "name": name,
        "task": predictor.config.task.name,
        "parameters": build.count_params(params),
        "sides": {side: [stack.layers, stack.attention.heads, stack.width] for side, stack in model.stacks.items()},
        "writes": writes(predictor),
        "edits": can_edit(predictor),
        "options": dataclasses.asdict(options),
        "sentences": found,
        "patching": None if pair is None or not can_edit(predictor) else patched(predictor, *pair),
        "induction": induction(predictor),
    }


def pair_of(predictor: Predictor, lines: Sequence[str]) -> tuple[str, str]:
    """Two sentences to patch between: the first two with equally many tokens, else `SAMPLE_PAIR`."""
    side = "source" if predictor.config.model.has_encoder else "target"
    sizes = [len(sentences.plain(predictor.config.model, prompt).get(side, ())) for prompt in predictor.prompts(lines)]
    for second, size in enumerate(sizes):
        first = sizes.index(size)
        if first < second:
            return lines[first], lines[second]
    return SAMPLE_PAIR


def writes(predictor: Predictor) -> bool:
    """True if the model writes text."""
    return predictor.config.model.has_decoder and predictor.config.model.head.kind == "tokens"


def can_edit(predictor: Predictor) -> bool:
    """True if parts of the model can be removed, and activations patched."""
    model = predictor.config.model
    return (model.encoder is not None or model.decoder is not None) and model.head.kind in LOGIT_HEADS


def sentence(
    predictor: Predictor, line: str, options: Options, target: str | None = None, forced: Sequence[int] = ()
) -> dict[str, Any]:
    """All that is shown of one sentence.

    Args:
      target: what the decoder of an encoder-decoder reads; None: the model's own output.
      forced: tokens that the generated text begins with.
    """
    (read,) = sentences.read(predictor, [line], None if target is None else [target])
    return describe(predictor, read, options, target, forced)


def prepare(predictor: Predictor, lines: Sequence[str], options: Options) -> Predictor:
    """The predictor with one padded length for all of these sentences, so that each program is compiled once.

    Its layers are a loop: unrolled ones, the default on a CPU, take longer to compile, and decoding would copy them.
    """
    model = predictor.config.model
    sides = {"encoder": model.encoder, "decoder": model.decoder}
    looped = {side: dataclasses.replace(stack, unroll=1) for side, stack in sides.items() if stack is not None}
    module = build.build(dataclasses.replace(model, **looped)) if looped else predictor.runner.module
    lengths = [len(ids) for prompt in predictor.prompts(lines) for name, ids in prompt.items() if name in STREAM_NAMES]
    more = 0 if model.encoder is not None or not writes(predictor) else options.new_tokens
    size = bucket_length(max(lengths, default=1) + more)
    return dataclasses.replace(predictor, runner=dataclasses.replace(predictor.runner, buckets=(size,), module=module))


def describe(
    predictor: Predictor, read: Sentence, options: Options, target: str | None = None, forced: Sequence[int] = ()
) -> dict[str, Any]:
    """`sentence` of one that has been read."""
    line = read.text
    longest = max(len(ids) for ids in read.ids.values())
    if longest > MAX_TOKENS:
        raise ConfigError(
            f"line {line[:40]!a}: got {longest} tokens, expected at most {MAX_TOKENS} to look at; shorten it"
        )
    maps = maps_of(predictor, read)
    has_lens = predictor.config.model.head.kind in LOGIT_HEADS
    return {
        "text": line,
        "cut": read.cut,
        "target": target,
        "tokens": {side: list(names) for side, names in read.tokens.items()},
        "kinds": [kind_json(maps, kind) for kind in maps.maps],
        "relevance": relevance_json(maps),
        "lens": lens_json(lens.lens_of(predictor, read, options.top)) if has_lens else None,
        "ablation": scan_json(predictor, read),
        **(written(predictor, read, options, forced) if writes(predictor) else {"steps": None, "beam": None}),
    }


def maps_of(predictor: Predictor, read: Sentence) -> AttentionMaps:
    """The maps of a sentence, with gradients where the head has logits."""
    runner = predictor.runner
    if predictor.config.model.recurrent_decoder is not None:
        return attention.recurrent_maps(predictor, read)
    explain = -1 if predictor.config.model.head.kind in LOGIT_HEADS else None
    reader = Reader(runner.module, runner.variables)
    reader.check_heads("explore")
    return attention.maps_of(predictor, reader, read, explain=explain)


def array_json(values: np.ndarray) -> dict[str, Any]:
    """An array as JSON."""
    data = base64.b64encode(np.ascontiguousarray(values, "<f4").tobytes()).decode("ascii")
    return {"shape": list(np.shape(values)), "data": data}


def read_array(value: dict[str, Any]) -> np.ndarray:
    """The array of `array_json`."""
    return np.frombuffer(base64.b64decode(value["data"]), "<f4").reshape(value["shape"])


def number(value: float) -> float | None:
    """A number as JSON, None if it is none."""
    return float(value) if np.isfinite(value) else None


def kind_json(maps: AttentionMaps, kind: str) -> dict[str, Any]:
    """One kind of attention: maps, scores and patterns of heads, rollout, gradients."""
    array, own = maps.maps[kind], kind in ("encoder", "decoder")
    summaries = maps.heads(kind)
    shape = array.shape[:2]
    scores = {name: np.reshape([number(one.scores[name]) for one in summaries], shape).tolist() for name in HEAD_SCORES}
    patterns = [list(one.names) for one in summaries]
    explained = maps.explained
    return {
        "name": kind,
        "queries": SIDES[kind][0],
        "keys": SIDES[kind][1],
        "maps": array_json(array),
        "scores": scores,
        "patterns": [patterns[i * shape[1] : (i + 1) * shape[1]] for i in range(shape[0])],
        "rollout": array_json(maps.rollout(kind)) if own else None,
        "gradients": None if explained is None else array_json(np.maximum(array * explained.gradients[kind], 0)),
    }


def relevance_json(maps: AttentionMaps) -> dict[str, Any] | None:
    """Relevance of each token for the explained logit."""
    if maps.explained is None:
        return None
    values = {side: list(map(float, numbers)) for side, numbers in maps.relevance().items()}
    return {"position": maps.explained.position, "output": maps.explained.name, "values": values}


def lens_json(found: Lens) -> dict[str, Any]:
    """A lens as JSON."""
    return {
        "tokens": list(found.tokens),
        "next": list(found.next_tokens),
        "outputs": [[list(names) for names in row] for row in found.outputs],
        "probs": array_json(found.probs),
        "entropy": array_json(found.entropy),
        "final": array_json(found.final_probs),
    }


def scan_json(predictor: Predictor, read: Sentence) -> dict[str, Any] | None:
    """Ablations of every head and feed-forward layer as JSON; None for models that cannot be edited, without the
    values for models that have too many parts."""
    if not can_edit(predictor):
        return None
    parts = count_parts(predictor.config.model)
    if parts > MAX_SCANNED_PARTS:
        return {"parts": parts, "heads": None, "mlps": None}
    found = ablate.scan(predictor, ablate.open_reader(predictor, "explore"), read)
    return {
        "parts": parts,
        "tokens": list(found.tokens),
        "references": list(found.references),
        "before": array_json(found.before),
        "heads": {kind: array_json(values) for kind, values in found.heads.items()},
        "mlps": {side: array_json(values) for side, values in found.mlps.items()},
    }


def ablation(
    predictor: Predictor, line: str, heads: Sequence[ablate.HeadChoice], mlps: Sequence[ablate.MlpChoice]
) -> dict[str, Any]:
    """Outputs for a sentence with and without some heads and feed-forward layers, as JSON."""
    (found,) = ablate.ablate(predictor, [line], heads, mlps)
    if not isinstance(found, ablate.Ablation):
        raise TypeError("ablation: got a scan, expected chosen parts")
    index = np.arange(len(found.tokens))
    return {
        "removed": list(found.removed),
        "tokens": list(found.tokens),
        "references": list(found.references),
        "before": array_json(found.before[index, found.reference_ids]),
        "after": array_json(found.after[index, found.reference_ids]),
        "best_before": [attention.output_name(predictor, int(i)) for i in np.argmax(found.before, axis=-1)],
        "best_after": [attention.output_name(predictor, int(i)) for i in np.argmax(found.after, axis=-1)],
    }


def patched(predictor: Predictor, clean: str, corrupted: str, parts: Sequence[str] = ()) -> dict[str, Any]:
    """Activation patching between two sentences; of sentences that do not fit, why.

    Args:
      parts: those of `patching.PARTS` that are patched; none: all, of models with many heads the residual stream alone.
    """
    model = predictor.config.model
    stack = model.encoder or model.decoder
    if not parts:
        is_large = count_parts(model) > MAX_SCANNED_PARTS
        known = [part for part in patching.PARTS if part != "mlp" or (stack is not None and stack.ffn is not None)]
        parts = patching.PARTS[:1] if is_large else known
    try:
        found = patching.patch_parts(predictor, clean, corrupted, parts)
    except ConfigError as error:
        return {"clean": clean, "corrupted": corrupted, "refused": str(error)}
    first = found[0]
    return {
        "clean": clean,
        "corrupted": corrupted,
        "refused": None,
        "clean_tokens": list(first.clean_tokens),
        "corrupted_tokens": list(first.corrupted_tokens),
        "answer": first.answer,
        "clean_log_prob": first.clean_log_prob,
        "corrupted_log_prob": first.corrupted_log_prob,
        "parts": {one.part: array_json(one.log_probs) for one in found},
    }


def count_parts(model: ModelConfig) -> int:
    """Heads and feed-forward layers of a transformer's layers."""
    return sum(stack.layers * (stack.attention.heads + 1) for stack in model.stacks.values())


def induction(predictor: Predictor) -> list[list[float]] | None:
    """Induction scores on repeated random tokens, by layer and head; None of models that are no decoder alone."""
    model = predictor.config.model
    if model.decoder is None or model.encoder is not None:
        return None
    return attention.induction_scores(predictor)["decoder"].tolist()


def written(predictor: Predictor, read: Sentence, options: Options, forced: Sequence[int]) -> dict[str, Any]:
    """The model's output by token, and the tree of a beam search."""
    decode, line = decode_options(predictor, options), read.text
    steps = generation.steps(predictor, line, decode, forced, options.top, None if forced else read.written)
    beams = dataclasses.replace(decode, method="beam", beams=options.beams, hypotheses=1)
    tree = generation.beam_tree(predictor, line, beams) if not forced else []
    tokenizer = predictor.framing.tokenizers.target
    return {
        "steps": {
            "method": decode.method,
            "prompt": list(steps.prompt),
            "tokens": list(steps.tokens),
            "ids": steps.ids.tolist(),
            "text": tokenizer.decode(steps.ids),
            "alternatives": [list(names) for names in steps.alternatives],
            "alternative_ids": steps.alternative_ids.tolist(),
            "probs": array_json(steps.probs),
            "chosen": array_json(steps.chosen_probs),
        },
        "beam": [dataclasses.asdict(node) for node in tree] or None,
    }


def decode_options(predictor: Predictor, options: Options) -> DecodeConfig:
    """The run's options; a language model writes `options.new_tokens` at most, greedily."""
    decode = predictor.config.decode
    if predictor.config.model.is_seq2seq:
        return decode
    longest = min(decode.max_length, options.new_tokens)
    return dataclasses.replace(decode, method="greedy", hypotheses=1, max_length=longest)

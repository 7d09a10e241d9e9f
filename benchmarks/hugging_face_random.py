"""Random configurations of the other library's models against ours, to find what differs in silence.

    python benchmarks/hugging_face_random.py --output=FILE.jsonl [--seeds=0:3] [--only=WORD] [--rate=0.25]
    python benchmarks/hugging_face_random.py --table=FILE.jsonl

Needs the extra [bench]. For every family of jaxformer/hf/keys.json, one head class a seed, by turns, each
key of config.json gets another value than the small model's with probability `rate` (`hugging_face_draws.py`). Their
model gets random weights in every tensor and is saved; both libraries read that directory. Compared are outputs,
hidden states, attention probabilities and the loss, of texts padded on the right, on the left and not at all,
of a few other calls (`hugging_face_calls.py`), of a search with random options (`hugging_face_searches.py`), and
sometimes what theirs computes with what ours saves. Each draw is a line of JSON, with one of these
results:

    equal      all within 5e-6 of the largest value, or at most 4 times as far from theirs in float64 as theirs in
               float32 is, with its weights or with weights changed in the last bit
    refused    one line of ours, which names a key
    theirs     their library fails on it
    different, error    a find: `keys` are those of the draw without which it is none

Draws that FILE holds are not repeated. `--table` prints the counts of each family.
"""

from __future__ import annotations

import os

os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")

import argparse
import contextlib
import copy
import functools
import json
import logging
import sys
import tempfile
import traceback
import unittest.mock
import warnings
import zlib
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import hugging_face_calls as calls
import hugging_face_draws as draws
import hugging_face_searches as searches
import jax
import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig

import jaxformer
from jaxformer.errors import ConfigError
from jaxformer.hf import keys
from jaxformer.hf.families import encoder_decoder
from jaxformer.hf.table import families

BOUND, ATTENTION_BOUND = 5e-6, 2e-5
EXTRA, EXPORTED = 2, 0.3
"""Calls beside the first three, and the share of models that are saved again."""
CHANGED = 8
"""Models of theirs with weights changed in the last bit, where an output is beyond its bound."""
CONSTANT = ("embed_positions.weight", "position_ids")
OUTPUTS = ("loss", "logits", "start_logits", "end_logits", "prediction_logits", "seq_relationship_logits", "sop_logits",
    "last_hidden_state", "pooler_output", "hidden_states", "attentions", "encoder_hidden_states",
    "decoder_hidden_states",
    "encoder_attentions", "decoder_attentions", "cross_attentions", "encoder_last_hidden_state",
    "router_logits", "aux_loss")  # fmt: skip


class Options(NamedTuple):
    """What each draw compares: calls beside the first three ((): two at random), and a number of searches."""

    extra: tuple[str, ...] = ()
    searches: int = 1
    bfloat16: bool = False


OPTIONS = Options()


class TheirsFails(Exception):
    """The other library cannot make or run the model."""


@contextlib.contextmanager
def their_code():
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        raise TheirsFails(
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]
        ) from error


class Style(NamedTuple):
    """How a checkpoint is written."""

    config: str = "whole"
    weights: str = "one file"


def attention(kind: str, head: str) -> str:
    """Their attention. Padding before a text, which spans compete with, is ours in `sdpa` alone."""
    has_padding = head == "qa" and kind not in calls.READ_PADDING and "decoder" in sides_of(kind)
    return "sdpa" if kind == "modernbert" or has_padding else "eager"


@functools.cache
def sides_of(kind: str) -> tuple[str, ...]:
    """The stacks of a family's models."""
    model = next(family for _, family in families() if kind in family.model_types)
    return (
        ("encoder",)
        if "masked_lm" in model.heads
        else ("encoder", "decoder")
        if "seq2seq" in model.heads
        else ("decoder",)
    )


def saved(kind: str, name: str, head: str, config: dict[str, Any], style: Style, place: Path, seed: int) -> Any:
    """Their model with random values in every tensor, as they read it from `place`."""
    with their_code():
        torch.manual_seed(seed)
        made = AutoConfig.for_model(kind, **copy.deepcopy(config))
        model = getattr(transformers, name)(made, **class_arguments(head)).eval()
        for key, tensor in model.state_dict().items():
            kept = kind in ("marian", "pegasus", "roformer") or (
                kind == "encoder-decoder" and "roformer" in str(config)
            )
            if not tensor.is_floating_point() or (key.endswith(CONSTANT) and kept):
                continue
            if tensor.ndim < 2:
                is_norm = key.endswith("weight")
                tensor.copy_(0.3 * torch.randn_like(tensor) + (1.0 if is_norm else 0.0))
            else:
                scale = 1.0 if "embed" in key or "wte" in key or "shared" in key else 1.5 / tensor.shape[-1] ** 0.5
                tensor.copy_(scale * torch.randn_like(tensor))
        save(model, style.weights, place)
        rewrite(place / "config.json", style.config)
        if head in ("causal_lm", "seq2seq"):
            add_options(place / "generation_config.json", model, seed)
        return read_back(kind, name, head, place)


def add_options(path: Path, model: Any, seed: int) -> None:
    """Random options of a search in generation_config.json, or in config.json without that file, as was once usual."""
    vocab = calls.vocabulary(calls.sides(model.config)[1])
    is_pair = bool(getattr(model.config, "is_encoder_decoder", False))
    rng = np.random.default_rng([seed, 1])
    found = searches.file_options(is_pair, vocab, rng)
    if rng.random() < 0.3:
        path.unlink(missing_ok=True)
        path = path.with_name("config.json")
    if found and path.exists():
        path.write_text(json.dumps(json.loads(path.read_text()) | found))


def save(model: Any, weights: str, place: Path) -> None:
    """A checkpoint in one file, in several, in bfloat16, or in torch's older format."""
    if weights == "bfloat16":
        model = copy.deepcopy(model).to(torch.bfloat16)
    model.save_pretrained(place, **({"max_shard_size": "9KB"} if weights == "several files" else {}))
    if weights == "older format":
        tensors = {}
        for path in place.glob("*.safetensors"):
            tensors |= load_file(path)
            path.unlink()
        torch.save(tensors, place / "pytorch_model.bin")


def class_arguments(head: str) -> dict[str, Any]:
    return {"add_pooling_layer": False} if head == "bare" else {}


def read_back(kind: str, name: str, head: str, place: Path, dtype: Any = torch.float32) -> Any:
    """Their model of a directory. Their other products of experts refuse widths as small as these."""
    options = {"attn_implementation": attention(kind, head), "dtype": dtype}
    model = getattr(transformers, name).from_pretrained(place, **options, **class_arguments(head)).eval()
    model.config._experts_implementation = "eager"
    return model


def rewrite(path: Path, style: str) -> None:
    """config.json without keys that have their defaults, or with rotary keys of version 4."""
    content = json.loads(path.read_text())
    if style == "few keys" and content["model_type"] not in ("encoder-decoder", "t5gemma"):
        defaults = keys.key_lists()["families"][content["model_type"]]["defaults"]
        content = {key: value for key, value in content.items() if key not in defaults or value != defaults[key]}
    if style == "older keys" and isinstance(content.get("rope_parameters"), dict):
        rope = dict(content["rope_parameters"])
        if "rope_theta" in rope:
            content.pop("rope_parameters")
            content["rope_theta"] = rope.pop("rope_theta")
            if "partial_rotary_factor" in rope:
                content["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
            content["rope_scaling"] = rope if rope.get("rope_type") != "default" else None
    path.write_text(json.dumps(content))


def parts_of(outputs: Any) -> dict[str, Any]:
    """Outputs by name, with a number where there are several."""
    found = {}
    for name in OUTPUTS:
        value = outputs.get(name) if hasattr(outputs, "get") else None
        if isinstance(value, tuple | list):
            found |= {f"{name}/{i}": x for i, x in enumerate(value) if x is not None}
        elif value is not None:
            found[name] = value
    return {name: np.asarray(x.detach().double() if isinstance(x, torch.Tensor) else x) for name, x in found.items()}


def seen(name: str, x: np.ndarray, mask: np.ndarray | None, is_pair: bool) -> np.ndarray:
    """The values of tokens that the mask shows."""
    if mask is not None and "router" in name and x.shape[0] == mask.size:
        return x[mask.reshape(-1) != 0]
    if mask is None or x.ndim < 2 or (is_pair and not name.startswith("encoder")) or "router" in name:
        return x
    if x.ndim == 4 and x.shape[0] == mask.shape[0] and x.shape[2] == mask.shape[1]:
        return x.transpose(0, 2, 1, 3)[mask != 0]
    return x[mask != 0] if x.shape[:2] == mask.shape else x


def kind_of_shape(x: np.ndarray) -> tuple[int, ...]:
    """The shape without a last axis of 1."""
    return x.shape[:-1] if x.ndim == 2 and x.shape[1] == 1 else x.shape


def difference(
    got: dict[str, Any], expected: dict[str, Any], exact: Any, mask: Any, is_pair: bool, changed: Any = list
) -> str:
    """The output that differs most beyond its bound; "" if none does.

    Args:
      exact: theirs in float64, when called; None: unknown.
      changed: theirs with weights changed in the last bit, several times, when called.
    """
    worst, what = 0.0, ""
    for name, value in expected.items():
        if name not in got:
            continue  # heads that return less here are listed in docs/hugging-face.md
        ours, theirs = np.asarray(got[name], np.float64), value
        if kind_of_shape(ours) == kind_of_shape(theirs):
            ours = ours.reshape(theirs.shape)  # DeBERTa's regression returns its logits as a row
        if ours.shape != theirs.shape:
            return f"{name}: shape {ours.shape}, theirs {theirs.shape}"
        ours, theirs = seen(name, ours, mask, is_pair), seen(name, theirs, mask, is_pair)
        if not np.isfinite(theirs).all():
            if not (np.isnan(ours) == np.isnan(theirs)).all():
                return f"{name}: theirs is not finite"
            continue
        size = max(np.abs(theirs).max(initial=0.0), 1e-9)
        bound = ATTENTION_BOUND if "attentions" in name else BOUND
        off = np.abs(ours - theirs).max(initial=0.0) / size
        if not off <= bound and exact is not None:
            truth = seen(name, exact()[name], mask, is_pair)
            if not np.isfinite(truth).all() and off <= 4 * bound:  # theirs in float64 is NaN behind hidden rows
                continue
            if np.abs(ours - truth).max() <= 4 * max(np.abs(theirs - truth).max(), bound * size):
                continue
            rounding = [np.abs(seen(name, x[name], mask, is_pair) - truth).max() for x in changed()]
            if np.abs(ours - truth).max() <= 4 * max(rounding, default=0.0):
                continue
        if not off <= max(worst, bound):
            worst, what = off if off == off else np.inf, f"{name}: {off:.1e}"
    return what


def batch_decides(kind: str, config: Any) -> bool:
    """True if the longest row of a batch changes the others in the other library, which is not so here."""
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope, *[x for x in rope.values() if isinstance(x, dict)]]
    scaled = any(x.get("rope_type") in ("dynamic", "longrope") for x in ropes)
    return scaled or bool(getattr(config, "use_bidirectional_attention", False))


def compare(kind: str, name: str, head: str, config: dict[str, Any], style: Style, seed: int) -> tuple[str, str]:
    """The result of a draw, and what differs."""
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "theirs"
        try:
            model = saved(kind, name, head, config, style, place, seed)
            if OPTIONS.bfloat16:
                return compare_bfloat16(kind, name, head, model, style, place, rng)
            extra = list(OPTIONS.extra) or rng.choice(calls.EXTRA, EXTRA, replace=False).tolist()
            made = calls.calls_of(kind, head, model, rng, extra)
            ours = jaxformer.from_pretrained(place)
            if ours.hf.head != head:
                return "different", f"head {ours.hf.head}"
            # LongT5's slots of padding, which its attention fills from those around, are no output of its encoder.
            is_pair = bool(getattr(model.config, "is_encoder_decoder", False)) and (kind, head) != ("longt5", "encoder")
            refused: list[str] = []
            for which, given in made:
                spans = which == "left" and head == "qa" and kind in calls.READ_PADDING
                if spans or (which != "whole" and batch_decides(kind, model.config)):
                    continue
                try:
                    found = compare_call(model, ours, given, is_pair, which in calls.READS_HIDDEN)
                except (TheirsFails, ConfigError) as error:
                    if which in calls.BASE and (which != "left" or isinstance(error, TheirsFails)):
                        raise  # some choices between texts are refused with padding on the left alone
                    refused.append(f"{which}: {type(error).__name__[:6]} {str(error).replace(str(place), '')}"[:220])
                    continue
                if found:
                    return "different", f"{which}: {found}"
            texts = dict(made)
            if ours.hf.head in ("causal_lm", "seq2seq") and kind != "xlnet":
                for _ in range(OPTIONS.searches):
                    try:
                        found = compare_search(kind, model, ours, texts, rng)
                    except TheirsFails as error:  # on these options, which say nothing of others
                        found = f"refused search there: {error}"
                    if found.startswith("refused"):
                        refused.append(found)
                    elif found:
                        return "different", found
            if rng.random() < EXPORTED:
                found = compare_saved(kind, name, head, model, ours, texts["whole"], Path(folder) / "ours", is_pair)
                if found[0] != "equal":
                    return found
            return "equal", "; ".join(refused)
        except TheirsFails as error:
            return "theirs", str(error)
        except ConfigError as error:
            line = str(error)
            return ("refused", line.replace(str(place), "")) if "\n" not in line else ("error", line)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            return "error", f"{type(error).__name__}: {str(error)[:200]} ({Path(where.filename).name}:{where.lineno})"


def compare_bfloat16(
    kind: str, name: str, head: str, model: Any, style: Style, place: Path, rng: np.random.Generator
) -> tuple[str, str]:
    """Outputs computed in bfloat16 from weights that bfloat16 holds, of a text of `calls.LONG` tokens.

    Both libraries round after each operation, by at most 2^-9 of a value, so that the error of theirs (bfloat16 against
    float32 of the same weights) says what rounding does to this model. Ours may be twice that, of the typical token and
    of the 95th percentile, and one rounding more. A mixture's rounded scores send tokens to other experts: there the
    typical token alone is compared.
    """
    given = calls.long_text(kind, head, model, rng)
    tensors = {key: torch.as_tensor(np.ascontiguousarray(x)) for key, x in given.items()}
    with their_code():
        if style.weights != "bfloat16":
            save(model, "bfloat16", place)
            rewrite(place / "config.json", style.config)
        exact, theirs = (
            parts_of(read_back(kind, name, head, place, x)(**tensors, output_hidden_states=True))
            for x in (torch.float32, torch.bfloat16)
        )
    ours = parts_of(jaxformer.from_pretrained(place, dtype="bfloat16")(**given, output_hidden_states=True))
    mask, is_pair = given.get("attention_mask"), bool(getattr(model.config, "is_encoder_decoder", False))
    mask = mask.reshape(-1, mask.shape[-1]) if mask is not None else None
    worst, what = 1.0, ""
    shares = (0.5,) if any("expert" in key for key in model.config.to_dict()) else (0.5, 0.95)
    for output, truth in exact.items():
        if output not in ours or truth.ndim < 2 or "router" in output:
            continue
        found = [
            seen(output, np.asarray(x[output], np.float64), mask, is_pair) for x in (ours, theirs, {output: truth})
        ]
        found = [x.reshape(-1, x.shape[-1] if truth.ndim > 2 else 1) for x in found]
        finite = np.isfinite(found[2]).all(1)
        errors = [np.sqrt(np.square(x - found[2])[finite].mean(1)) for x in found[:2]]
        size = np.sqrt(np.square(found[2][finite]).mean()) * 2.0**-9
        for share in shares:
            mine, bound = (np.quantile(x, share) for x in errors)
            if not mine <= worst * (2 * bound + size):
                worst = mine / (2 * bound + size) if mine == mine else np.inf
                what = f"bfloat16: {output}: error {mine / size:.1f} roundings, theirs {bound / size:.1f}, at {share}"
    return ("different", what) if what else ("equal", "")


@contextlib.contextmanager
def double_softmax():
    """Keeps float64 where their models ask for float32, in which the masked scores of a hidden row are -inf."""
    softmax = torch.nn.functional.softmax

    def kept(x: torch.Tensor, *given: Any, dtype: torch.dtype | None = None, **named: Any) -> torch.Tensor:
        return softmax(x, *given, dtype=None if x.dtype == torch.float64 else dtype, **named)

    with unittest.mock.patch.object(torch.nn.functional, "softmax", kept):
        yield


def compare_call(model: Any, ours: Any, given: dict[str, Any], is_pair: bool, hidden: bool = False) -> str:
    """The output that differs; `hidden`: slots that see no token count, in their default attention, which is `sdpa`."""
    flags = {"output_hidden_states": True, "output_attentions": model.config.model_type not in calls.IN_BLOCKS}
    if hidden and type(model)._supports_sdpa:
        model, flags = copy.deepcopy(model), {"output_hidden_states": True}
        model.set_attn_implementation("sdpa")
    tensors = {key: torch.as_tensor(np.ascontiguousarray(x)) for key, x in given.items()}

    def theirs(model, tensors):
        with their_code():
            found = parts_of(model(**tensors, **flags))
        if model.config.model_type != "big_bird":
            return found
        # Its hidden states are those of the row that is padded to whole blocks.
        length = tensors["input_ids"].shape[-1] if "input_ids" in tensors else tensors["inputs_embeds"].shape[-2]
        return {name: x[:, :length] if "hidden_states" in name else x for name, x in found.items()}

    @functools.cache
    def exact():
        raised = {key: x.double() if x.is_floating_point() else x for key, x in tensors.items()}
        with double_softmax():
            return theirs(copy.deepcopy(model).double(), raised)

    @functools.cache
    def changed():
        generator, found = torch.Generator().manual_seed(0), []
        for _ in range(CHANGED):
            other = copy.deepcopy(model)
            with torch.no_grad():
                for x in other.parameters():
                    x.mul_(1 + (torch.rand(x.shape, generator=generator) - 0.5) * 2.0**-23)
            found.append(theirs(other, tensors))
        return found

    expected = theirs(model, tensors)

    try:
        got = ours(**given, **flags)
    except ConfigError as error:
        if hidden or "attentions" not in str(error):
            raise
        got = ours(**given, output_hidden_states=True)
    mask = given.get("attention_mask")
    mask = mask.reshape(-1, mask.shape[-1]) if mask is not None else None
    if model.config.model_type == "encoder-decoder" and "labels" in given:
        return difference(parts_of(got), shown_targets(expected, given["labels"]), exact, mask, is_pair, changed)
    return difference(parts_of(got), expected, exact, mask, is_pair, changed)


def shown_targets(outputs: dict[str, np.ndarray], labels: np.ndarray) -> dict[str, np.ndarray]:
    """The outputs of a pair, without the decoder's if its input, made of labels, has padding, which is hidden there."""
    is_hidden = bool((labels[:, :-1] == -100).any())
    own = ("logits", "decoder", "cross")
    return {name: x for name, x in outputs.items() if not (is_hidden and name.startswith(own))}


def with_own_positions(kind: str, model: Any) -> Any:
    """The model, whose searches count positions as its calls do; theirs counts RoBERTa's from 0 in searches."""
    first = calls.first_position(kind, model.config)
    if not first:
        return model
    model = copy.deepcopy(model)
    counted = model._prepare_position_ids_for_generation
    model._prepare_position_ids_for_generation = lambda *given: counted(*given) + first
    return model


def compare_search(kind: str, model: Any, ours: Any, texts: dict[str, dict[str, Any]], rng: np.random.Generator) -> str:
    """A search with random options; "" if the ids are equal."""
    is_pair = ours.config.model.encoder is not None
    chosen = {"whole": texts["whole"]} if batch_decides(kind, model.config) else texts
    model = with_own_positions(kind, model)
    which, given = searches.search_inputs(model.config, chosen, rng)
    tensors = {key: torch.as_tensor(np.ascontiguousarray(x)) for key, x in given.items()}
    with their_code():
        written = model.generate(**tensors, max_new_tokens=6, do_sample=False, num_beams=1).numpy()
    prompt = (
        given.get("decoder_input_ids", given["input_ids"][:, :0]).shape[1] + 1
        if is_pair
        else given["input_ids"].shape[1]
    )
    new = written[:, prompt:]
    vocab = calls.vocabulary(calls.sides(model.config)[1])
    options = searches.options_of(is_pair, vocab, new.reshape(-1) if new.size else written.reshape(-1), prompt, rng)
    if "prompt_lookup_num_tokens" in options:
        given = {key: x[:1] for key, x in given.items()}
    tensors = {key: torch.as_tensor(np.ascontiguousarray(x)) for key, x in given.items()}
    in_file = {x: y for x, y in model.generation_config.to_dict().items() if x in searches.IN_FILE and y is not None}
    if searches.drop_counting(in_file, given, is_pair) != in_file:
        return ""
    options = searches.beside_file(options, in_file, rng)
    decoder = getattr(model.config, "decoder", None)
    if "roberta" in getattr(decoder, "model_type", "") and decoder.pad_token_id is not None:
        # A padding token that such a decoder writes has no position in theirs (docs/hugging-face.md).
        options["suppress_tokens"] = [*(options.get("suppress_tokens") or []), decoder.pad_token_id]
    beams = (in_file | options).get("num_beams", 1)
    with their_code():
        expected = model.generate(**tensors, **options, return_dict_in_generate=True, output_scores=beams > 1)
    try:
        got = ours.generate(**given, **options, return_dict_in_generate=True)
    except ConfigError as error:
        return f"refused search: {error}"
    mine, theirs = np.asarray(got["sequences"]), expected.sequences.numpy()
    ends = (in_file | options).get("forced_eos_token_id")
    if isinstance(ends, list) and options["do_sample"]:  # they have equal scores, and which is sampled is chance
        mine, theirs = (np.concatenate([x[:, :-1], searches.first_of(x[:, -1:], ends)], 1) for x in (mine, theirs))
    if beams == 1 and mine.shape == theirs.shape and (mine == theirs).all():
        return ""
    told = f"of {which}, {options}" + (f" beside {in_file}" if in_file else "")
    if beams > 1 and mine.shape == theirs.shape:
        found = [
            (np.asarray(x.sequences), np.asarray(x.sequences_scores, np.float64), len(given["input_ids"]))
            for x in (got, expected)
        ]
        if searches.same_hypotheses(*found, ends if isinstance(ends, list) else []):
            return ""
        return f"search {told}: {found[0]}, theirs {found[1]}"
    with their_code():
        exact = copy.deepcopy(model).double().generate(**tensors, **options).numpy()
    if mine.shape == exact.shape and (mine == exact).all():
        return ""
    return f"search {told}: {mine.tolist()}, theirs {theirs.tolist()}"


def compare_saved(
    kind: str, name: str, head: str, model: Any, ours: Any, given: Any, place: Path, is_pair: bool
) -> tuple[str, str]:
    """Outputs of their model with the weights that ours saves."""
    ours.save_pretrained(place)
    try:
        again = read_back(kind, name, head, place)
        tensors = {key: torch.as_tensor(np.ascontiguousarray(x)) for key, x in given.items()}
        with torch.no_grad():
            got, expected = parts_of(again(**tensors)), parts_of(model(**tensors))
    except Exception as error:
        return "error", f"export, {type(error).__name__}: {str(error)[:200]}"
    found = difference(got, expected, None, None, is_pair)
    return ("different", f"export: {found}") if found else ("equal", "")


def reduce(found: tuple[str, str], changed: dict[str, Any], test: Any) -> dict[str, Any]:
    """The keys without which a find is none."""
    if test({})[0] == found[0]:
        return {}
    kept = dict(changed)
    for key in changed:
        fewer = {name: value for name, value in kept.items() if name != key}
        if test(fewer)[0] == found[0]:
            kept = fewer
    return kept


def listed_of(kind: str) -> dict[str, Any]:
    return keys.key_lists()["families"][kind]


def measure(kind: str, head: str, name: str, seed: int, rate: float) -> dict[str, Any]:
    """One draw."""
    number = zlib.crc32(f"{kind} {head} {seed}".encode())
    rng = np.random.default_rng(number)
    if kind == "encoder-decoder":
        sides = {side: str(rng.choice(kinds)) for side, kinds in encoder_decoder.SIDES.items()}
        lists = {side: listed_of(other) for side, other in sides.items()}
        changed = draws.draw_pair(sides, lists, rng, rate)
        build = functools.partial(draws.build_pair, sides, lists)
    elif kind == "t5gemma":
        sides, gemma = {}, listed_of("gemma2")
        changed = draws.draw_t5gemma(head, gemma, rng, rate)
        build = functools.partial(draws.build_t5gemma, head, gemma)
    else:
        sides, listed = {}, listed_of(kind)
        changed = draws.draw(kind, head, listed, rng, rate)
        build = functools.partial(draws.build, kind, head, listed)

    def test(values: dict[str, Any]) -> tuple[str, str]:
        try:
            config = build(values)
            if OPTIONS.bfloat16:
                draws.lengthen(config)
        except (ZeroDivisionError, KeyError) as error:
            return "theirs", f"draw: {error!r}"
        style = Style(values.get("file", "whole"), values.get("weights", "one file"))
        return compare(kind, name, head, config, style, number)

    result, what = test(changed)
    row = {"family": kind, "head": head, "seed": seed, **sides, "result": result, "what": what}
    if result in ("different", "error"):
        row["keys"] = reduce((result, what), changed, test)
        row["what"] = test(row["keys"])[1]
    elif result in ("refused", "theirs"):
        row["changed"] = changed
    return row


def of_round(seed: int, only: str, heads: str) -> list[tuple[str, str, str]]:
    """One head of every family, by turns: family, head, class."""
    found = []
    for _, family in families():
        kind, listed = family.model_types[0], keys.key_lists()["families"]
        if kind not in listed and kind != "encoder-decoder":
            continue
        wanted = [
            (head, name)
            for head, name in family.heads.items()
            if any(word in f"{kind} {head} {name}".lower() for word in only.split(","))
        ]
        wanted = [pair for pair in wanted if not heads or pair[0] in heads.split(",")]
        if wanted:
            found.append((kind, *wanted[seed % len(wanted)]))
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Counts of results by family, as markdown."""
    names = ("equal", "refused", "theirs", "different", "error")
    lines = ["| family | draws | " + " | ".join(names) + " |", "|" + "---|" * (len(names) + 2)]
    for kind in sorted({row["family"] for row in rows}):
        counts = Counter(row["result"] for row in rows if row["family"] == kind)
        lines.append(f"| {kind} | {counts.total()} | " + " | ".join(str(counts[name]) for name in names) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="")
    parser.add_argument("--table", default="", help="rows of an earlier run; nothing is measured")
    parser.add_argument("--seeds", default="0:3", help="first:after the last")
    parser.add_argument(
        "--only",
        default="",
        help="only classes whose family, head and name contain one of these words, separated by commas",
    )
    parser.add_argument("--heads", default="", help="only these heads, separated by commas")
    parser.add_argument("--extra", default="", help="these calls beside the first three, separated by commas")
    parser.add_argument("--searches", type=int, default=1, help="searches of each model that writes text")
    parser.add_argument("--bfloat16", action="store_true", help="compute in bfloat16, a text of 300 tokens, no more")
    parser.add_argument("--rate", type=float, default=0.25)
    arguments = parser.parse_args()
    if arguments.table:
        print(table([json.loads(line) for line in Path(arguments.table).read_text().splitlines()]))
        return 0
    global OPTIONS
    OPTIONS = Options(tuple(filter(None, arguments.extra.split(","))), arguments.searches, arguments.bfloat16)
    logging.getLogger("jaxformer").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    path, bad = Path(arguments.output), 0
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(row["family"], row["head"], row["seed"]) for row in done}
    first, last = map(int, arguments.seeds.split(":"))
    for seed in range(first, last):
        for kind, head, name in of_round(seed, arguments.only.lower(), arguments.heads):
            if (kind, head, seed) in done:
                continue
            row = measure(kind, head, name, seed, arguments.rate)
            bad += row["result"] in ("different", "error")
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            with open("/proc/self/maps") as mappings:
                if sum(1 for _ in mappings) > 30_000:  # of 65,530 that a process may have
                    jax.clear_caches()
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())

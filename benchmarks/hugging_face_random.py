"""Random configurations of the other library's models against ours, to find what differs in silence.

    python benchmarks/hugging_face_random.py --output=FILE.jsonl [--seeds=0:3] [--only=WORD] [--rate=0.25]
    python benchmarks/hugging_face_random.py --table=FILE.jsonl

Needs the extra [bench]. For every family of jaxformer/hf/keys.json, one head class a seed, by turns, each
key of config.json gets another value than the small model's with probability `rate` (`hugging_face_draws.py`). Their
model gets random weights in every tensor and is saved; both libraries read that directory. Compared are outputs,
hidden states, attention probabilities and the loss, of texts padded on the right, on the left and not at all,
greedy and beam search, and what theirs computes with what ours saves. Each draw is a line of JSON, with one of these
results:

    equal      all within 5e-6 of the largest value, or as near to theirs in float64 as theirs in float32 is
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
import json
import logging
import sys
import tempfile
import traceback
import warnings
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import hugging_face_draws as draws
import jax
import numpy as np
import torch
import transformers
from transformers import AutoConfig

import jaxformer
from jaxformer.errors import ConfigError
from jaxformer.hf import keys
from jaxformer.hf.table import families

BOUND, ATTENTION_BOUND = 5e-6, 2e-5
SEARCHED = 0.3
"""Share of the draws that write texts whose greedy and beam search are compared: they take most of the time."""
IN_BLOCKS = ("longt5", "big_bird")
"""Families whose attention is not one table in the other library."""
CONSTANT = ("embed_positions.weight", "position_ids")
OUTPUTS = ("loss", "logits", "start_logits", "end_logits", "prediction_logits", "seq_relationship_logits", "sop_logits",
    "last_hidden_state", "pooler_output", "hidden_states", "attentions", "encoder_hidden_states",
    "decoder_hidden_states",
    "encoder_attentions", "decoder_attentions", "cross_attentions", "encoder_last_hidden_state",
    "router_logits", "aux_loss")  # fmt: skip


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


def attention(kind: str) -> str:
    return "sdpa" if kind == "modernbert" else "eager"


def saved(kind: str, name: str, config: dict[str, Any], style: str, place: Path) -> Any:
    """Their model with random values in every tensor, as they read it from `place`."""
    with their_code():
        torch.manual_seed(zlib.crc32(f"{kind} {name}".encode()))
        settings = copy.deepcopy(config)
        made = AutoConfig.for_model(kind, **settings)
        made._attn_implementation = attention(kind)
        model = getattr(transformers, name)(made).eval()
        for key, tensor in model.state_dict().items():
            if not tensor.is_floating_point() or (key.endswith(CONSTANT) and kind in ("marian", "pegasus", "roformer")):
                continue
            if tensor.ndim < 2:
                is_norm = key.endswith("weight")
                tensor.copy_(0.3 * torch.randn_like(tensor) + (1.0 if is_norm else 0.0))
            else:
                scale = 1.0 if "embed" in key or "wte" in key or "shared" in key else 1.5 / tensor.shape[-1] ** 0.5
                tensor.copy_(scale * torch.randn_like(tensor))
        model.save_pretrained(place)
        rewrite(place / "config.json", style)
        return read_back(kind, name, place)


def read_back(kind: str, name: str, place: Path) -> Any:
    """Their model of a directory. Their other products of experts refuse widths as small as these."""
    model = getattr(transformers, name).from_pretrained(place, attn_implementation=attention(kind)).eval()
    model.config._experts_implementation = "eager"
    return model


def rewrite(path: Path, style: str) -> None:
    """config.json without keys that have their defaults, or with rotary keys of version 4."""
    content = json.loads(path.read_text())
    if style == "few keys":
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


def inputs_of(
    kind: str, name: str, head: str, config: Any, rng: np.random.Generator
) -> list[tuple[str, dict[str, Any]]]:
    """Calls: padded on the right, on the left, and not padded."""
    length = 17 if kind in ("big_bird", "longt5") else 11
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocab = min(getattr(config, "decoder_vocab_size", None) or 99, getattr(text, "vocab_size", 99) or 99)
    pad = getattr(text, "pad_token_id", None)
    special = {pad, *np.atleast_1d(getattr(text, "eos_token_id", None) or 0).tolist()}
    plain = np.asarray([token for token in range(3, vocab - 1) if token not in special])
    rows = 1 if pad is None and head == "sequence" else 2
    found = []
    for which in ("right", "left", "whole"):
        ids = plain[rng.integers(0, len(plain), (rows, length))]
        if rng.random() < 0.3:
            ids[:, 4] = rng.integers(0, vocab, rows)  # special tokens in the text
        mask = np.ones_like(ids)
        if which != "whole":
            hidden = np.s_[-1, -3:] if which == "right" else np.s_[-1, :3]
            mask[hidden], ids[hidden] = 0, pad if pad is not None and 0 <= pad < vocab else 0
        if head == "sequence" and draws_end(kind):  # the hidden state of the last end token decides
            ids[ids == text.eos_token_id] = plain[0]
            ids[:, length - 5] = text.eos_token_id
        given: dict[str, Any] = {"input_ids": ids}
        if which != "whole":
            given["attention_mask"] = mask
        kinds = getattr(config, "type_vocab_size", 0) or (2 if kind == "xlnet" else 0)
        if kinds and rng.random() < 0.7:
            given["token_type_ids"] = rng.integers(0, kinds, ids.shape)
        if which != "whole":
            given |= labels_of(kind, name, head, config, ids, mask, rng)
        if head == "multiple_choice":
            given = {key: x if key == "labels" else np.stack([x, x[:, ::-1]], 1) for key, x in given.items()}
        from_source = kind in ("bart", "mbart") and rng.random() < 0.5  # the decoder reads the source
        if getattr(config, "is_encoder_decoder", False) and "labels" not in given and head != "qa" and not from_source:
            given["decoder_input_ids"] = plain[rng.integers(0, len(plain), (rows, 6))]
        found.append((which, given))
    return found


def draws_end(kind: str) -> bool:
    return kind in ("bart", "mbart")


def labels_of(
    kind: str, name: str, head: str, config: Any, ids: np.ndarray, mask: np.ndarray, rng: np.random.Generator
):
    """Labels of a head."""
    rows, classes = len(ids), getattr(config, "num_labels", 2)
    if head == "qa":
        return {"start_positions": rng.integers(3, 6, rows), "end_positions": rng.integers(5, 8, rows)}
    if head == "sequence":
        problem = config.problem_type or ("regression" if classes == 1 else "single_label_classification")
        if problem == "regression":
            return {"labels": rng.normal(size=(rows, classes) if classes > 1 else rows).astype(np.float32)}
        if problem.startswith("multi"):
            return {"labels": rng.integers(0, 2, (rows, classes)).astype(np.float32)}
        return {"labels": rng.integers(0, classes, rows)}
    if head == "token":
        return {"labels": np.where(mask, rng.integers(0, classes, ids.shape), -100)}
    if head == "seq2seq":
        high = (getattr(config, "decoder_vocab_size", None) or config.vocab_size) - 2
        labels = rng.integers(3, high, (rows, 7))
        labels[-1, -2:] = -100
        return {"labels": labels}
    if head == "multiple_choice":
        return {"labels": rng.integers(0, 2, rows)}
    if head == "next_sentence":
        return {"labels": rng.integers(0, 2, rows)}
    if head == "pretraining" and kind == "electra":
        return {"labels": rng.integers(0, 2, ids.shape)}
    if head == "pretraining":
        second = "sentence_order_label" if kind == "albert" else "next_sentence_label"
        return {"labels": np.where(mask, ids, -100), second: rng.integers(0, 2, rows)}
    if head == "causal_lm":  # the first token of a text is foretold from padding, where families differ from theirs
        mask = mask * np.roll(mask, 1, axis=1)
    return {"labels": np.where(mask, ids, -100)} if head in ("causal_lm", "masked_lm") else {}


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


def difference(got: dict[str, Any], expected: dict[str, Any], exact: Any, mask: Any, is_pair: bool) -> str:
    """The output that differs most beyond its bound; "" if none does."""
    worst, what = 0.0, ""
    for name, value in expected.items():
        if name not in got:
            continue  # heads that return less here are listed in docs/hugging-face.md
        ours, theirs = np.asarray(got[name], np.float64), value
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
            if np.abs(ours - truth).max() <= 4 * max(np.abs(theirs - truth).max(), bound * size):
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


def compare(kind: str, name: str, head: str, config: dict[str, Any], style: str, seed: int) -> tuple[str, str]:
    """The result of a draw, and what differs."""
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "theirs"
        try:
            model = saved(kind, name, config, style, place)
            calls = inputs_of(kind, name, head, model.config, rng)
            ours = jaxformer.from_pretrained(place)
            is_pair = bool(getattr(model.config, "is_encoder_decoder", False))
            for which, given in calls:
                if which != "whole" and batch_decides(kind, model.config):
                    continue
                found = compare_call(model, ours, given, is_pair)
                if found:
                    return "different", f"{which}: {found}"
            found = compare_searches(kind, model, ours, calls, rng)
            if found:
                return "different", found
            return compare_saved(kind, name, model, ours, calls[2][1], Path(folder) / "ours", is_pair)
        except TheirsFails as error:
            return "theirs", str(error)
        except ConfigError as error:
            line = str(error)
            return ("refused", line.replace(str(place), "")) if "\n" not in line else ("error", line)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            return "error", f"{type(error).__name__}: {str(error)[:200]} ({Path(where.filename).name}:{where.lineno})"


def compare_call(model: Any, ours: Any, given: dict[str, Any], is_pair: bool) -> str:
    flags = {"output_hidden_states": True, "output_attentions": model.config.model_type not in IN_BLOCKS}
    tensors = {key: torch.as_tensor(np.ascontiguousarray(x)) for key, x in given.items()}
    with their_code():
        expected = parts_of(model(**tensors, **flags))

    def exact():
        with their_code():
            whole = copy.deepcopy(model).double()
            raised = {key: x.double() if x.is_floating_point() else x for key, x in tensors.items()}
            return parts_of(whole(**raised, **flags))

    try:
        got = ours(**given, **flags)
    except ConfigError as error:
        if "attentions" not in str(error):
            raise
        got = ours(**given, output_hidden_states=True)
    mask = given.get("attention_mask")
    mask = mask.reshape(-1, mask.shape[-1]) if mask is not None else None
    return difference(parts_of(got), expected, exact, mask, is_pair)


def compare_searches(kind: str, model: Any, ours: Any, calls: list, rng: np.random.Generator) -> str:
    """Greedy and beam search, where the head writes text."""
    if ours.hf.head not in ("causal_lm", "seq2seq") or kind == "xlnet" or rng.random() > SEARCHED:
        return ""
    is_pair = ours.config.model.encoder is not None
    text = calls[0][1] if is_pair else calls[1][1]
    if batch_decides(kind, model.config):
        text = calls[2][1]
    given = {key: text[key] for key in ("input_ids", "attention_mask") if key in text}
    given.setdefault("attention_mask", np.ones_like(given["input_ids"]))
    beams = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": float(rng.choice([0.6, 1.0, 2.0]))}
    for word, more in (("greedy", {}), ("beam", beams | {"early_stopping": bool(rng.random() < 0.5)})):
        options = {"max_new_tokens": 6, "do_sample": False} | more
        with their_code():
            expected = model.generate(**{key: torch.as_tensor(x) for key, x in given.items()}, **options).numpy()
        try:
            got = np.asarray(ours.generate(**given, **options))
        except ConfigError as error:
            if "longrope" in str(error).lower() or "passes" in str(error):
                return ""
            raise
        if got.shape != expected.shape or (got != expected).any():
            return f"{word}: {got.tolist()}, theirs {expected.tolist()}"
    return ""


def compare_saved(
    kind: str, name: str, model: Any, ours: Any, given: Any, place: Path, is_pair: bool
) -> tuple[str, str]:
    """Outputs of their model with the weights that ours saves."""
    ours.save_pretrained(place)
    try:
        again = read_back(kind, name, place)
        tensors = {key: torch.as_tensor(np.ascontiguousarray(x)) for key, x in given.items()}
        with torch.no_grad():
            got, expected = parts_of(again(**tensors)), parts_of(model(**tensors))
    except Exception as error:
        return "error", f"export, {type(error).__name__}: {str(error)[:200]}"
    found = difference(got, expected, None, None, is_pair)
    return ("different", f"export: {found}") if found else ("equal", "")


def reduce(found: tuple[str, str], changed: dict[str, Any], test: Any) -> dict[str, Any]:
    """The keys without which a find is none."""
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
    listed = listed_of(kind)
    changed = draws.draw(kind, head, listed, np.random.default_rng(number), rate)

    def test(values: dict[str, Any]) -> tuple[str, str]:
        try:
            config = draws.build(kind, head, listed, values)
        except (ZeroDivisionError, KeyError) as error:
            return "theirs", f"draw: {error!r}"
        return compare(kind, name, head, config, values.get("file", "whole"), number)

    result, what = test(changed)
    row = {"family": kind, "head": head, "seed": seed, "result": result, "what": what}
    if result in ("different", "error"):
        row["keys"] = reduce((result, what), changed, test)
        row["what"] = test(row["keys"])[1]
    elif result == "refused":
        row["changed"] = changed
    return row


def of_round(seed: int, only: str) -> list[tuple[str, str, str]]:
    """One head of every family, by turns: family, head, class."""
    found = []
    for _, family in families():
        kind, listed = family.model_types[0], keys.key_lists()["families"]
        heads = [pair for pair in family.heads.items() if pair[0] != "bare"]
        if kind not in listed or kind == "encoder-decoder":
            continue
        wanted = [(head, name) for head, name in heads if only in f"{kind} {head} {name}".lower()]
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
    parser.add_argument("--only", default="", help="only classes of a family or head that contains this")
    parser.add_argument("--rate", type=float, default=0.25)
    arguments = parser.parse_args()
    if arguments.table:
        print(table([json.loads(line) for line in Path(arguments.table).read_text().splitlines()]))
        return 0
    logging.getLogger("jaxformer").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    path, bad = Path(arguments.output), 0
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(row["family"], row["head"], row["seed"]) for row in done}
    first, last = map(int, arguments.seeds.split(":"))
    for seed in range(first, last):
        for kind, head, name in of_round(seed, arguments.only.lower()):
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

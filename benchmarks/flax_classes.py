"""Compares the classes of `jaxformer.hf.flax` with what the old library's own Flax classes computed.

    python benchmarks/flax_classes.py ../shared/flax_goldens [NAME ...]

A folder holds a folder for each class, `FlaxBertModel` or `FlaxBertModel-2`, with `config.json`, `flax_model.msgpack`
and `expected.npz`: arguments of a call (`in/<name>`), its outputs (`out/<field>` or `out/<field>/<i>`), and of
`generate`, `gen/<case>/in/<name>`, `gen/<case>/args`, `gen/<case>/sequences` and, where they are kept, scores of beams
(`gen/<case>/scores`). With names, only the folders that begin with one of them are compared.

Prints a line for each class: the largest relative error of an output with the name of that output, the largest of
attention probabilities, and how many cases of `generate` give the same ids; for a class that is not here, why. The exit
code is 1 if an error is above its bound (5e-6; 2e-5 for attention), ids differ, or a class of a family that is here
does not load.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.hf import flax

MAX_ERROR, MAX_ATTENTION_ERROR = 5e-6, 2e-5
"""Largest difference of an output, relative to its largest value, in float32. T5 does not scale the scores of
attention, so rounding grows in its probabilities: the old classes are up to 7e-6 from what they compute in float64.
"""


def _mask(field: str, value: np.ndarray, inputs: dict[str, np.ndarray], pair: bool) -> Any:
    """A mask of the slots that are compared, in the shape of an output: those whose attention mask is 1."""
    encoder, decoder = inputs.get("attention_mask"), inputs.get("decoder_attention_mask")
    mask = encoder if not pair or field.startswith("encoder") or decoder is None else decoder
    mask = None if mask is None else mask.reshape(-1, mask.shape[-1])
    if mask is None or value.ndim < 2 or value.shape[0] != mask.shape[0]:
        return 1
    if value.ndim == 4:  # attention, by query
        return mask[:, None, :, None] if value.shape[2] == mask.shape[1] else 1
    return mask.reshape(*mask.shape, *[1] * (value.ndim - 2)) if value.shape[1] == mask.shape[1] else 1


def relative_errors(model: Any, arrays: Any) -> dict[str, float]:
    """Largest error of every stored output, relative to its largest value.

    Raises:
      ValueError: the model has other outputs, or one of another shape.
    """
    inputs = {name[3:]: arrays[name] for name in arrays.files if name.startswith("in/")}
    stored = [name[4:] for name in arrays.files if name.startswith("out/")]
    pair = bool(getattr(model.config, "is_encoder_decoder", False))
    out = model(**inputs, output_hidden_states=True, output_attentions=any("attentions" in name for name in stored))
    got = {f"{field}/{i}": x for field, xs in out.items() if isinstance(xs, tuple) for i, x in enumerate(xs)}
    got |= {field: x for field, x in out.items() if not isinstance(x, tuple)}
    if set(got) != set(stored):
        raise ValueError(f"outputs: got {sorted(got)}, expected {sorted(stored)}")
    errors = {}
    for name in stored:
        found, expected = np.asarray(got[name], np.float64), arrays[f"out/{name}"]
        if found.shape != expected.shape:
            raise ValueError(f"{name}: got shape {found.shape}, expected {expected.shape}")
        mask = _mask(name, expected, inputs, pair)
        errors[name] = float(np.abs((found - expected) * mask).max() / np.abs(expected * mask).max())
    return errors


def differing_cases(model: Any, arrays: Any) -> tuple[int, list[str]]:
    """The number of cases of `generate`, and those that give other ids or scores."""
    cases = sorted({name.split("/")[1] for name in arrays.files if name.startswith("gen/")})
    differing = []
    for case in cases:
        inputs = {name.split("/")[-1]: arrays[name] for name in arrays.files if name.startswith(f"gen/{case}/in/")}
        found = model.generate(**inputs, **json.loads(str(arrays[f"gen/{case}/args"])))
        scores = arrays[f"gen/{case}/scores"] if f"gen/{case}/scores" in arrays.files else found.get("scores", 0.0)
        same = np.array_equal(found.sequences, arrays[f"gen/{case}/sequences"])
        if not same or not np.allclose(found.get("scores", 0.0), scores, rtol=1e-5):
            differing.append(case)
    return len(cases), differing


def compare(directory: Path) -> tuple[str, bool]:
    """A line about one class, and whether it is as it should be."""
    name = directory.name.split("-")[0]
    try:
        cls = getattr(flax, name)
    except ImportError as error:
        return f"refused: {str(error).split(', expected')[0]}", True
    try:
        model = cls.from_pretrained(directory)
        arrays = np.load(directory / "expected.npz")
        errors = relative_errors(model, arrays)
        cases, differing = differing_cases(model, arrays)
    except Exception as error:
        return f"{type(error).__name__}: {error}", False
    attention, others = (
        {name: error for name, error in errors.items() if ("attentions" in name) == wished} for wished in (True, False)
    )
    worst = max(others, key=others.__getitem__)
    line, good = f"{others[worst]:.1e}  {worst}", others[worst] <= MAX_ERROR
    if attention:
        most = max(attention.values())
        line, good = f"{line}  attention {most:.1e}", good and most <= MAX_ATTENTION_ERROR
    if cases:
        line += f"  ids of {cases - len(differing)}/{cases} cases{''.join(f', not {case}' for case in differing)}"
    return line, good and not differing


def main(arguments: list[str]) -> int:
    """Prints the table; 1 if a class differs."""
    if not arguments or not Path(arguments[0]).is_dir():
        print("flax_classes: got no folder of checkpoints, expected one; name it")
        return 2
    wished, failed, count = tuple(arguments[1:]), 0, 0
    for path in sorted(Path(arguments[0]).glob("Flax*/expected.npz")):
        if not wished or path.parent.name.startswith(wished):
            line, good = compare(path.parent)
            count, failed = count + 1, failed + (not good)
            print(f"{path.parent.name:48} {line}{'' if good else '  DIFFERS'}", flush=True)
    print(f"{count} classes, {failed} of them differ")
    return int(failed > 0)


if __name__ == "__main__":
    logging.getLogger("jaxformer").setLevel(logging.ERROR)  # what a class leaves out of its file is no news here
    sys.exit(main(sys.argv[1:]))

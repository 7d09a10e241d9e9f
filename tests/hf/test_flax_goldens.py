"""The old Flax classes' own outputs and generated ids: the door's are the same to rounding.

A few of the checkpoints are kept with the project. Beside it may lie all of them (`../shared/flax_goldens`); with
`GOLDENS=all` they are all compared.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from jaxformer.hf import flax

KEPT = Path(__file__).with_name("goldens") / "flax"
BESIDE = Path(__file__).resolve().parents[2].parent / "shared" / "flax_goldens"
ALL = os.environ.get("GOLDENS") == "all"
MISSING = ("BigBird", "LongT5")
"""Families that are not here."""

NAMES = [path.parent for path in sorted(KEPT.glob("*/expected.npz"))]
if ALL:
    NAMES = [path.parent for path in sorted(BESIDE.glob("*/expected.npz"))]
    NAMES = [path for path in NAMES if not path.name.startswith(tuple(f"Flax{name}" for name in MISSING))]

MAX_ERROR = 5e-6
"""Largest difference of an output, relative to its largest value, in float32."""


def mask_of(field, value, inputs, pair):
    """Where the attention mask is 1, in the shape of a field; padding's outputs are nobody's."""
    encoder, decoder = inputs.get("attention_mask"), inputs.get("decoder_attention_mask")
    mask = encoder if not pair or field.startswith("encoder") or decoder is None else decoder
    mask = None if mask is None else mask.reshape(-1, mask.shape[-1])
    if mask is None or value.shape[0] != mask.shape[0] or value.ndim < 2:
        return 1
    if value.ndim == 4:
        return mask[:, None, :, None]
    if value.shape[1] != mask.shape[1]:
        return 1
    return mask.reshape(*mask.shape, *[1] * (value.ndim - 2))


def errors(model, arrays):
    """Relative error of every output that is stored."""
    inputs = {name[3:]: arrays[name] for name in arrays.files if name.startswith("in/")}
    stored = [name[4:] for name in arrays.files if name.startswith("out/")]
    pair = getattr(model.config, "is_encoder_decoder", False)
    out = model(**inputs, output_hidden_states=True, output_attentions=any("attentions" in name for name in stored))
    assert set(out) == {name.split("/")[0] for name in stored}
    found = {}
    for name in stored:
        field, _, index = name.partition("/")
        got = np.asarray(out[field][int(index)] if index else out[field], np.float64)
        expected = arrays[f"out/{name}"]
        assert got.shape == expected.shape, name
        mask = mask_of(field, expected, inputs, pair)
        found[name] = np.abs((got - expected) * mask).max() / np.abs(expected * mask).max()
    for field in {name.split("/")[0] for name in stored if "/" in name}:
        assert len(out[field]) == sum(name.startswith(f"{field}/") for name in stored)
    return found


@pytest.mark.parametrize("directory", NAMES, ids=lambda path: path.name)
def test_outputs_and_generated_ids(directory):
    model = getattr(flax, directory.name).from_pretrained(directory)
    arrays = np.load(directory / "expected.npz")
    found = errors(model, arrays)
    worst = max(found, key=found.get)
    assert found[worst] <= MAX_ERROR, f"{worst}: {found[worst]:.1e}"
    for case in sorted({name.split("/")[1] for name in arrays.files if name.startswith("gen/")}):
        inputs = {n.split("/")[-1]: arrays[n] for n in arrays.files if n.startswith(f"gen/{case}/in/")}
        options = json.loads(str(arrays[f"gen/{case}/args"]))
        got = model.generate(**inputs, **options).sequences
        np.testing.assert_array_equal(got, arrays[f"gen/{case}/sequences"], err_msg=case)


@pytest.mark.skipif(not ALL or not BESIDE.exists(), reason="with GOLDENS=all, and the checkpoints beside the project")
def test_all_classes_of_the_old_library_are_here_or_named_as_missing():
    for path in BESIDE.glob("Flax*"):
        if path.name.startswith(tuple(f"Flax{name}" for name in MISSING)):
            with pytest.raises(ImportError, match="expected a class of one of Albert"):
                getattr(flax, path.name)
        else:
            assert path.name in flax.__all__

"""Adapters of the peft package: read onto a base model, written, and refused in one line where they are not ours."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_cases import VALUES

import jaxformer
from jaxformer.hf import writing

CASES = json.loads((Path(__file__).with_name("goldens") / "peft.json").read_text(encoding="utf-8"))


def directories(name, place, **edits):
    """The base model and the adapter of a case, written to two directories; `edits` change adapter_config.json."""
    case = CASES[name]
    base, adapter = place / "base", place / "adapter"
    if not base.exists():
        tensors = {key: VALUES(key, tuple(shape)) for key, shape in case["tensors"].items()}
        writing.write_checkpoint(base, case["config"], tensors)
    adapter.mkdir(exist_ok=True)
    (adapter / "adapter_config.json").write_text(json.dumps(case["adapter_config"] | edits))
    tensors = {key: VALUES(key, tuple(shape)) for key, shape in case["adapter"].items()}
    save_file(tensors, adapter / "adapter_model.safetensors")
    return base, adapter


def logits(model, case):
    inputs = {key: np.asarray(value) for key, value in case["inputs"].items()}
    return np.asarray(model(**inputs).logits).reshape(-1)


@pytest.mark.parametrize("name", list(CASES))
def test_outputs_are_those_of_the_peft_package_and_files_come_back(name, tmp_path):
    case = CASES[name]
    base, adapter = directories(name, tmp_path)
    model = jaxformer.from_pretrained(adapter, base=base)
    np.testing.assert_allclose(logits(model, case), case["logits"], rtol=2e-5, atol=2e-5)
    model.save_adapter(tmp_path / "again", base)
    written, read = (load_file(path / "adapter_model.safetensors") for path in (tmp_path / "again", adapter))
    assert written.keys() == read.keys()
    for key, value in read.items():
        np.testing.assert_array_equal(written[key], value, err_msg=key)
    again = jaxformer.from_pretrained(tmp_path / "again")  # the base as the file names it
    for ours, theirs in zip(
        jax.tree.leaves(again.merge_adapters().params), jax.tree.leaves(model.merge_adapters().params)
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)

"""Adapters of the peft package: read onto a base model, written, and refused in one line where they are not ours.

By default the cases of which no two fail for one mistake; with `GOLDENS=all` (`make goldens`) all of them.
"""

import dataclasses
import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_cases import VALUES, loaded

import jaxformer
from jaxformer.config import ConfigError
from jaxformer.hf import writing
from jaxformer.hf.peft import reading, sites
from jaxformer.hf.peft import writing as peft_writing

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


FEW = ("gpt2", "bert", "t5")  # fused maps; some layers and a saved head; an expression
NAMES = list(CASES) if os.environ.get("GOLDENS") == "all" else FEW


@pytest.mark.parametrize("name", NAMES)
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
    merge = jax.jit(lambda params: dataclasses.replace(model, params=params).merge_adapters().params)
    for ours, theirs in zip(*(jax.tree.leaves(merge(each.params)) for each in (again, model)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_adapters_of_layers_in_groups_are_of_the_layers_that_the_file_names(tmp_path):
    """Of Qwen3-Next: layers 0 and 1 are a group, layer 2 another; merged kernels are compared in the file's layout."""
    base, adapter, rng = tmp_path / "base", tmp_path / "adapter", np.random.default_rng(0)
    loaded("qwen3_next_dense", base)
    before, tensors, expected = load_file(base / "model.safetensors"), {}, {}
    names = ["0.mlp.up_proj", "2.mlp.up_proj", "2.self_attn.k_proj", "0.linear_attn.out_proj"]
    for name in names:
        weight = before[f"model.layers.{name}.weight"]
        a, b = (rng.normal(size=size).astype(np.float32) for size in ((2, weight.shape[1]), (weight.shape[0], 2)))
        key = f"base_model.model.model.layers.{name}"
        tensors |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
        expected[f"model.layers.{name}.weight"] = weight + 3.0 / 2 * b @ a
    adapter.mkdir()
    save_file(tensors, adapter / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 3, "layers_to_transform": [0, 2]}
    targets = ["up_proj", "k_proj", "out_proj"]
    (adapter / "adapter_config.json").write_text(json.dumps(values | {"target_modules": targets}))
    model = jaxformer.from_pretrained(adapter, base=base)
    model.merge_adapters().save_pretrained(tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for name, value in (before | expected).items():
        np.testing.assert_allclose(merged[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
    model.save_adapter(tmp_path / "again", base)
    written = load_file(tmp_path / "again" / "adapter_model.safetensors")
    assert written.keys() == tensors.keys()
    for key, value in tensors.items():
        np.testing.assert_array_equal(written[key], value)
    named = json.loads((tmp_path / "again" / "adapter_config.json").read_text())["target_modules"]
    assert sorted(named) == sorted(f"model.layers.{name}" for name in names)
    one = {key: value for key, value in tensors.items() if "2.mlp" in key}  # all layers of its group, and no other
    save_file(one, adapter / "adapter_model.safetensors")
    values["layers_to_transform"] = None
    (adapter / "adapter_config.json").write_text(json.dumps(values | {"target_modules": ["layers.2.mlp.up_proj"]}))
    jaxformer.from_pretrained(adapter, base=base).save_adapter(tmp_path / "one", base)
    named = json.loads((tmp_path / "one" / "adapter_config.json").read_text())["target_modules"]
    assert named == ["model.layers.2.mlp.up_proj"]
    (adapter / "adapter_config.json").write_text(
        json.dumps(values | {"target_modules": [f"layers.{n}" for n in names]})
    )
    save_file({k: v for k, v in tensors.items() if "2.mlp" not in k}, adapter / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=r"no adapter of model.layers.2.mlp.up_proj in the file"):
        jaxformer.from_pretrained(adapter, base=base)


def refusal(name, place, **edits):
    base, adapter = directories(name, place, **edits)
    with pytest.raises(ConfigError) as error:
        reading.from_pretrained(adapter, base=base)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"use_dora": True}, "got use_dora True, expected null, false or nothing"),
        ({"a_new_key": {"x": 1}}, "got a_new_key {'x': 1}, expected null, false or nothing"),
        ({"bias": "all"}, "got bias 'all', expected none"),
        ({"peft_type": "LOHA"}, "got peft_type 'LOHA', expected LORA"),
        ({"init_lora_weights": "pissa"}, "got init_lora_weights 'pissa', expected one that leaves the base's weights"),
        ({"r": 0}, "got r 0, expected a whole number of at least 1"),
        ({"lora_alpha": "a"}, "got lora_alpha 'a', expected a number above 0"),
        ({"lora_dropout": 1.0}, "got lora_dropout 1.0, expected a number of at least 0 and less than 1"),
        ({"task_type": "X"}, "got task_type 'X', expected null or one of CAUSAL_LM"),
        ({"rank_pattern": {"c_fc": "x"}}, "expected an object of numbers"),
    ],
)
def test_what_is_not_ours_is_refused(edits, message, tmp_path):
    assert message in refusal("gpt2", tmp_path, **edits)


@pytest.mark.parametrize(
    ("name", "edits", "message"),
    [
        ("gpt2", {"rank_pattern": {"c_fc": 3}}, "got rank 3 of transformer.h.0.mlp.c_fc, expected 2, the file's"),
        ("gpt2", {"target_modules": ["c_attn"]}, "got an adapter of transformer.h.0.attn.c_proj in the file"),
        ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"]}, "got no adapter of transformer.h.0.mlp.c_proj"),
        ("gpt2", {"target_modules": "("}, "expected a regular expression"),
        ("gpt2", {"exclude_modules": ["c_fc"]}, "got an adapter of transformer.h.0.mlp.c_fc in the file"),
        ("bert", {"layers_to_transform": [0]}, "got no adapter of bert.encoder.layer.0"),
    ],
)
def test_a_file_that_contradicts_its_config_is_refused(name, edits, message, tmp_path):
    assert message in refusal(name, tmp_path, **edits)


def test_a_base_is_needed_and_belongs_to_adapters_alone(tmp_path):
    base, adapter = directories("gpt2", tmp_path, base_model_name_or_path=None)
    with pytest.raises(ConfigError, match="got base_model_name_or_path None, expected a local directory; give base="):
        reading.from_pretrained(adapter)
    with pytest.raises(ConfigError, match="base: got .*, expected none: there is no adapter_config.json there"):
        reading.from_pretrained(base, base=base)


def test_adapters_of_a_fused_map_that_differ_become_one_of_the_sum_of_their_ranks():
    rng = np.random.default_rng(0)
    paths, layouts = (("q",), ("k",), ("v",)), ("r D -> D r", "(n H K) r -> n r H K")
    site = sites.Site("h.{layer}.c", paths, *layouts, {"H": 2, "K": 3}, transposed=True)
    flat = {}
    for name, rank, scale in (("q", 2, 3.0), ("v", 1, 0.5)):  # k has none
        flat[name, "lora_a"] = rng.normal(size=(2, 5, rank)).astype(np.float32)
        flat[name, "lora_b"] = rng.normal(size=(2, rank, 2, 3)).astype(np.float32)
        flat[name, "lora_scale"] = np.full(2, scale, np.float32)
    (written,) = peft_writing._write_sites([site], flat, "")
    assert (written.rank, written.alpha, list(written.matrices)) == (3, 9.0, ["h.0.c", "h.1.c"])
    for layer in range(2):
        a, b = written.matrices[f"h.{layer}.c"]
        delta = (written.alpha / written.rank * b @ a).reshape(3, 2, 3, 5)
        for i, name in enumerate("qkv"):
            if name == "k":
                assert not delta[i].any()
                continue
            parts = [flat[name, f"lora_{part}"][layer] for part in ("scale", "a", "b")]
            np.testing.assert_allclose(delta[i], parts[0] * np.einsum("dr,rhk->hkd", *parts[1:]), rtol=1e-5)

"""Qwen3-Next: texts that the other library generates, what is written, and variants that are refused."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

import jaxformer
from jaxformer.config import ConfigError
from jaxformer.hf import keys, reading, writing
from jaxformer.hf.table import Settings, families

GOLDENS = Path(__file__).with_name("goldens")
FAMILY = dict(families())["qwen3_next"]
LINEAR, FULL = "linear_attention", "full_attention"


def case(name):
    """config.json and tensors of a case."""
    spec = importlib.util.spec_from_file_location("write_qwen3_next", GOLDENS / "write.py")
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    found = json.loads((GOLDENS / "cases.json").read_text(encoding="utf-8"))[name]
    return found["config"], {key: module.values(key, tuple(shape)) for key, shape in found["tensors"].items()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The case "qwen3_next", with modules of multi-token prediction beside its layers, as published files have them."""
    config, tensors = case("qwen3_next")
    place = tmp_path_factory.mktemp("in")
    further = {"mtp.fc.weight": np.ones((8, 16), np.float32), "mtp.norm.weight": np.ones(8, np.float32)}
    writing.write_checkpoint(place, config, tensors | further)
    return place, config, tensors


@pytest.fixture(scope="module")
def model(checkpoint):
    return jaxformer.from_pretrained(checkpoint[0])


def test_texts_are_those_of_the_other_library(model):
    """What `generate` of transformers 5.24 returns for the same weights; a row is padded at its left."""
    ids = np.array([[0, 0, 9, 5, 11], [8, 20, 4, 16, 7]])
    inputs = {"input_ids": ids, "attention_mask": (ids > 0).astype(int), "max_new_tokens": 8, "do_sample": False}
    expected = [[23, 4, 21, 21, 21, 6, 20, 22], [7, 15, 19, 16, 5, 7, 15, 22]]
    assert np.asarray(model.generate(**inputs))[:, 5:].tolist() == expected
    expected = [[23, 4, 21, 21, 21, 6, 20, 22], [7, 15, 12, 12, 3, 23, 4, 7]]
    assert np.asarray(model.generate(**inputs, num_beams=3))[:, 5:].tolist() == expected


def test_what_is_written_is_what_was_read_without_multi_token_prediction(checkpoint, model, tmp_path):
    _, config, tensors = checkpoint
    model.save_pretrained(tmp_path)
    written = reading.open_tensors(tmp_path)
    assert set(written) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(written[name].array(), tensor, err_msg=name)
    assert reading.read_config(tmp_path) == config


def test_dropping_multi_token_prediction_is_said(checkpoint, caplog):
    jaxformer.from_pretrained(checkpoint[0])
    assert "mtp.fc.weight" in caplog.text


def read(values, head="causal_lm"):
    return keys.read_model(FAMILY, keys.with_defaults(FAMILY, Settings(values)), head).decoder


def test_layers_without_names_have_attention_in_every_fourth_or_as_the_interval_says():
    assert read({"num_hidden_layers": 9}).delta_layers == (0, 1, 2, 4, 5, 6, 8)
    assert read({"num_hidden_layers": 5, "full_attention_interval": 2}).delta_layers == (0, 2, 4)
    assert read({"num_hidden_layers": 2, "layer_types": [FULL, FULL]}).delta is None
    sparse = read({"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert sparse.dense_numbers == (0, 2, 3, 4) and sparse.moe.dense_width == 5632 and sparse.ffn.width == 512
    dense = read({"num_hidden_layers": 2, "mlp_only_layers": [0, 1]})
    assert dense.moe is None and dense.ffn.width == 5632
    assert read({"num_hidden_layers": 2}).encoding.fraction == 0.25


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_next_full", "qwen3_next_dense", "qwen3_next_sparse"])
def test_a_written_config_reads_as_the_same_model(name):
    config, _ = case(name)
    found = keys.read_model(FAMILY, keys.with_defaults(FAMILY, Settings(config)), "causal_lm")
    again = FAMILY.write_config(found, "causal_lm")
    assert keys.read_model(FAMILY, keys.with_defaults(FAMILY, Settings(again)), "causal_lm") == found


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"layer_types": [LINEAR]}, "layer_types .* for each of the 2 layers"),
        ({"layer_types": [LINEAR, "sliding_attention"]}, "layer_types .* for each of the 2 layers"),
        ({"linear_num_value_heads": 3}, r"linear_num_value_heads 3, expected a multiple of linear_num_key_heads \(2\)"),
        ({"mlp_only_layers": 3}, "mlp_only_layers 3, expected numbers of layers"),
        ({"num_experts": -1}, "num_experts -1, expected at least 0"),
    ],
)
def test_what_it_cannot_be_is_refused(edit, message):
    config, _ = case("qwen3_next")
    with pytest.raises(ConfigError, match=message):
        read(config | edit)


def test_a_fused_projection_of_another_size_is_refused(checkpoint, tmp_path):
    _, config, tensors = checkpoint
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    for rows in (39, 44):  # the key heads do not divide the first, and the parts do not add up to the second
        writing.write_checkpoint(tmp_path / str(rows), config, tensors | {name: np.zeros((rows, 8), np.float32)})
        with pytest.raises(ConfigError, match=rf"in_proj_qkvz.weight of shape \[{rows}, 8\], expected one that makes"):
            jaxformer.from_pretrained(tmp_path / str(rows))

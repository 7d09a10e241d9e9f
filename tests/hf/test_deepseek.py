"""DeepSeek-V2 and V3: what is written reads as the same model, and variants that would compute something else."""

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
FAMILIES = dict(families())


def values():
    spec = importlib.util.spec_from_file_location("write_deepseek", GOLDENS / "write.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.values


def case(name):
    """config.json and tensors of a case."""
    found = json.loads((GOLDENS / "cases.json").read_text(encoding="utf-8"))[name]
    make = values()
    return found["config"], {key: make(key, tuple(shape)) for key, shape in found["tensors"].items()}


def test_what_is_written_is_what_was_read_without_the_modules_that_predict_further_tokens(tmp_path):
    config, tensors = case("deepseek_bias")
    further = {"model.layers.3.eh_proj.weight": np.ones((8, 16), np.float32)}
    writing.write_checkpoint(tmp_path / "in", config | {"num_nextn_predict_layers": 1}, tensors | further)
    model = jaxformer.from_pretrained(tmp_path / "in")
    assert model.params["decoder"]["dense_blocks"]["ffn"]["in"]["kernel"].shape == (1, 8, 12)
    model.save_pretrained(tmp_path / "out")
    written = reading.open_tensors(tmp_path / "out")
    assert set(written) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(written[name].array(), tensor, err_msg=name)
    again = json.loads((tmp_path / "out" / "config.json").read_text())
    family = FAMILIES["deepseek_v3"]
    read = lambda content: keys.read_model(family, keys.with_defaults(family, Settings(content)), "causal_lm")  # noqa: E731
    assert again["rope_parameters"]["mscale_all_dim"] == 2.0
    assert read(again) == read(config)


REFUSED = {
    "key heads": ("deepseek_v3", {"num_attention_heads": 128, "num_key_value_heads": 8}, "num_key_value_heads 8"),
    "period": ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq 2, expected 1"),
    "scores of V2": ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid', expected 'softmax'"),
    "scores of V3": ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax', expected 'sigmoid'"),
    "choice of V3": ("deepseek_v3", {"topk_method": "greedy"}, "topk_method 'greedy', expected 'noaux_tc'"),
    "weights of V2": ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob True, expected False"),
    "biases": ("deepseek_v2", {"mlp_bias": True}, "mlp_bias True, expected False"),
    "scores": (
        "deepseek_v3",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}},
        "mscale_all_dim 1.0 with rope_type linear",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_variant_that_computes_something_else_is_refused(name):
    kind, edits, message = REFUSED[name]
    family = FAMILIES[kind]
    with pytest.raises(ConfigError, match=message):
        keys.read_model(family, keys.with_defaults(family, Settings(edits)), "causal_lm")


def test_a_family_does_not_write_the_others_mixture():
    v2, v3 = (FAMILIES[name] for name in ("deepseek_v2", "deepseek_v3"))
    model = keys.read_model(v3, keys.with_defaults(v3, Settings({})), "causal_lm")
    with pytest.raises(ConfigError, match="got a mixture with gate sigmoid, expected softmax"):
        v2.write_config(model, "causal_lm")
    plain = keys.read_model(FAMILIES["llama"], keys.with_defaults(FAMILIES["llama"], Settings({})), "causal_lm")
    with pytest.raises(ConfigError, match="got attention without latents"):
        v3.write_config(plain, "causal_lm")

"""Windows by layer of Qwen2, Qwen3 and Ministral, and Ministral 3's temperature, as config.json says them."""

from __future__ import annotations

import dataclasses

import pytest

from jaxformer.config import ConfigError, ModelConfig, RopeScalingConfig, TemperatureConfig
from jaxformer.hf import keys
from jaxformer.hf.table import Settings, families

FAMILIES = dict(families())
LAYERS = {"num_hidden_layers": 4, "sliding_window": 5}
MIXED = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
ROPE = {"rope_type": "default", "llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 9}


def read(name: str, values: dict) -> ModelConfig:
    family = FAMILIES[name]
    return keys.read_model(family, keys.with_defaults(family, Settings(values, "config.json")), "causal_lm")


@pytest.mark.parametrize(
    ("name", "values", "width", "layers"),
    [
        ("qwen2", {"max_window_layers": 1}, None, ()),
        ("qwen2", {"max_window_layers": 1, "use_sliding_window": True}, 5, (1, 2, 3)),
        ("qwen3", {"max_window_layers": -1, "use_sliding_window": True}, 5, (0, 1, 2, 3)),
        ("qwen3", {"use_sliding_window": True}, None, ()),  # 28 layers come before the first with a window
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": None}, None, ()),
        ("qwen2", {"use_sliding_window": True, "layer_types": MIXED}, 5, (1, 3)),
        ("ministral", {}, 5, (0, 1, 2, 3)),
        ("ministral", {"layer_types": MIXED}, 5, (1, 3)),
        ("ministral", {"sliding_window": None}, None, ()),
        ("ministral", {"layer_types": MIXED[:1] * 4}, None, ()),
    ],
)
def test_the_layers_with_a_window_are_those_of_the_library_and_are_written_so(name, values, width, layers):
    model = read(name, LAYERS | values)
    decoder = model.decoder
    assert (decoder.attention.window, decoder.windowed_layers if width else ()) == (width, layers)
    assert read(name, FAMILIES[name].write_config(model, "causal_lm")) == model


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        (
            "qwen2",
            {"layer_types": MIXED},
            "sliding_attention without a sliding_window, .* width and use_sliding_window",
        ),
        (
            "ministral",
            {"layer_types": MIXED, "sliding_window": None},
            "without a sliding_window, expected a width; set",
        ),
        ("ministral", {"layer_types": MIXED[:3]}, "layer_types .* for each of the 4 layers"),
        ("mistral", {"layer_types": MIXED}, "layer_types .*, expected full_attention for each of the 4 layers"),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": "2"}, "max_window_layers '2', expected int"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window True, expected False"),
        ("ministral3", {"rope_parameters": ROPE | {"llama_4_scaling_beta": None}}, "llama_4_scaling_beta None and"),
        ("ministral3", {"rope_parameters": ROPE | {"llama_4_scaling_beta": -0.1}}, "llama_4_scaling_beta -0.1 and"),
        ("ministral3", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "original_max_position_embeddings None"),
        ("ministral3", {"rope_parameters": 3}, "rope_parameters 3, expected an object"),
    ],
)
def test_what_contradicts_itself_is_refused(name, values, message):
    with pytest.raises(ConfigError, match=message):
        read(name, LAYERS | values)


def test_the_temperature_is_read_where_the_rotation_does_not_read_its_length(caplog):
    model = read("ministral3", LAYERS | {"rope_parameters": ROPE})
    assert model.decoder.attention.temperature == TemperatureConfig(0.3, 9) and not caplog.records
    assert model.decoder.encoding.scaling is None
    usual = read("ministral3", {}).decoder
    assert usual.attention.temperature == TemperatureConfig(0.1, 16384)
    assert (usual.encoding.scaling.kind, usual.encoding.scaling.factor, usual.encoding.base) == ("yarn", 16.0, 1e6)
    old = {"rope_theta": 70.0, "rope_scaling": ROPE | {"rope_type": "yarn", "factor": 2.0}}  # as version 4 wrote it
    decoder = read("ministral3", LAYERS | old).decoder
    assert (decoder.encoding.base, decoder.encoding.scaling.original) == (70.0, 9)


def test_ministral_3_is_written_as_it_was_read_and_two_lengths_are_refused():
    write = FAMILIES["ministral3"].write_config
    for rope in (ROPE, ROPE | {"llama_4_scaling_beta": 0.0}, ROPE | {"rope_type": "yarn", "factor": 2.0}):
        model = read("ministral3", LAYERS | {"rope_parameters": rope})
        assert read("ministral3", write(model, "causal_lm")) == model
    scaling = RopeScalingConfig("yarn", factor=2.0, original=7)
    encoding = dataclasses.replace(model.decoder.encoding, scaling=scaling)
    other = dataclasses.replace(model, decoder=dataclasses.replace(model.decoder, encoding=encoding))
    with pytest.raises(ConfigError, match="temperature.length 9 and encoding.scaling.original 7, expected the same"):
        write(other, "causal_lm")


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "modernbert", "qwen3_next", "ministral"])
@pytest.mark.parametrize("kinds", [["local"] * 4, [["full_attention"]] * 4, "full_attention", {}, [None] * 4])
def test_kinds_of_layers_that_are_none_are_refused_in_one_line(name, kinds):
    head = "masked_lm" if name == "modernbert" else "causal_lm"
    settings = keys.with_defaults(
        FAMILIES[name], Settings({"num_hidden_layers": 4, "layer_types": kinds}, "config.json")
    )
    with pytest.raises(ConfigError, match=r"config.json: got layer_types .* for each of the 4 layers; fix the file"):
        keys.read_model(FAMILIES[name], settings, head)

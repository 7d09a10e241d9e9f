"""T5Gemma where parts meet: decoding with caches and windows, padding, a mesh, nested keys; values: test_cases.py."""

import copy
import dataclasses
import json

import jax
import numpy as np
import pytest
from test_cases import CASES, VALUES

import jaxformer
from jaxformer.config import MeshConfig
from jaxformer.config.checks.model import check_model
from jaxformer.errors import ConfigError
from jaxformer.hf import writing
from jaxformer.parallel import mesh as meshes

IDS = np.array([[3, 4, 5, 6, 7, 8], [9, 10, 11, 12, 0, 0]])
MASK = np.array([[1] * 6, [1] * 4 + [0] * 2])


def write(name, place, edit=None):
    case = CASES[name]
    config = copy.deepcopy(case["config"])
    for path, value in (edit or {}).items():
        *parents, key = path.split(".")
        part = config
        for parent in parents:
            part = part[parent]
        part[key] = value
    writing.write_checkpoint(place, config, {key: VALUES(key, tuple(shape)) for key, shape in case["tensors"].items()})
    return place


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return jaxformer.from_pretrained(write("t5gemma_wide", tmp_path_factory.mktemp("t5gemma")))


def test_greedy_decoding_is_the_likeliest_token_of_the_whole_pass(model):
    """Seven new tokens, beyond the decoder's window of 2, and sources padded on the right and on the left."""
    found = []
    for shift in (0, 2):
        ids, mask = (np.stack([x[0], np.roll(x[1], shift)]) for x in (IDS, MASK))
        tokens = np.asarray(model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=7, do_sample=False))
        assert (tokens[:, 0] == 2).all()  # the decoder's bos_token_id
        out = model(input_ids=ids, attention_mask=mask, decoder_input_ids=tokens[:, :-1])
        best = np.asarray(out.logits).argmax(axis=-1)
        for row in range(2):
            length = np.flatnonzero(np.append(tokens[row, 1:] == 1, True))[0]  # up to the end token
            assert best[row, :length].tolist() == tokens[row, 1 : 1 + length].tolist()
            found.append(length)
    assert max(found) == 7


def test_eight_devices_have_the_gradient_of_one(model, tmp_path):
    place = write("t5gemma", tmp_path / "in")
    rows = {"input_ids": np.tile(IDS, (4, 1)), "attention_mask": np.tile(MASK, (4, 1)), "labels": np.tile(IDS, (4, 1))}
    found = []
    for sizes, count in (({"data": 1}, 1), ({"data": 2, "fsdp": 2, "tensor": 2}, 8)):
        mesh = meshes.make(MeshConfig(**sizes), jax.devices()[:count])
        own = jaxformer.from_pretrained(place, mesh=mesh)
        with jax.set_mesh(mesh):
            gradient = jax.jit(jax.grad(lambda params, own=own: own(**rows, params=params).loss))(own.params)
        found.append(jax.tree.map(np.asarray, gradient))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *found)


def test_the_encoder_sees_a_window_both_ways(model):
    encoder, decoder = model.config.model.encoder, model.config.model.decoder
    assert (encoder.attention.window, decoder.attention.window) == (3, 2)
    assert encoder.windowed_layers == (0,) and decoder.windowed_layers == (1, 2)
    assert decoder.memory_width == encoder.width == 8 and "memory_projection" not in model.params


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"encoder.layer_types": ["full_attention"]}, r"\(encoder\): got layer_types .* each of the 2 layers"),
        ({"decoder.sliding_window": None}, r"\(decoder\): got sliding_window null"),
        ({"decoder.final_logit_softcapping": 0.0}, r"\(decoder\): got final_logit_softcapping 0.0"),
        ({"decoder.model_type": "gemma2"}, "got decoder .* expected the config of a t5_gemma_module"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder False, expected True"),
    ],
)
def test_what_a_side_cannot_be_is_refused(edit, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        jaxformer.from_pretrained(write("t5gemma_wide", tmp_path, edit))


def test_padding_that_only_the_encoder_would_not_see_is_refused(model):
    with pytest.raises(ConfigError, match=r"got padding \(0\) without an attention_mask, expected one"):
        model(input_ids=IDS, decoder_input_ids=IDS)
    model(input_ids=IDS[:1], decoder_input_ids=IDS[:1])


def test_a_memory_width_is_that_of_the_encoder(model):
    config = model.config.model
    check_model(config)
    for edit, message in (
        ({"encoder": None, "head": config.head}, "expected None without an encoder"),
        (
            {"decoder": dataclasses.replace(config.decoder, memory_width=9)},
            r"expected the encoder's width \(8\), or None",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            check_model(dataclasses.replace(config, **edit))


def test_the_written_file_names_both_sides(model, tmp_path):
    model.save_pretrained(tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["encoder"]["hidden_size"] == 8 and written["decoder"]["hidden_size"] == 12
    assert written["encoder"]["sliding_window"] == written["decoder"]["sliding_window"] == 2

"""ONNX files, run by onnxruntime, against the model. What is refused needs no package."""

import dataclasses

import builders
import jax
import numpy as np
import pytest

from jaxformer.bridges import onnx as bridge
from jaxformer.errors import ConfigError
from jaxformer.types import Batch, Slots, Stream

LENGTH = 5


def stream(rows: int, left: bool) -> Stream:
    """Texts of 2, 3, ... tokens, padded on one side."""
    lengths = np.minimum(np.arange(rows) + 2, LENGTH)[:, None]
    segment = (np.arange(LENGTH) >= LENGTH - lengths if left else np.arange(LENGTH) < lengths).astype(np.int32)
    tokens = np.random.default_rng(rows).integers(1, builders.VOCAB, (rows, LENGTH)).astype(np.int32) * segment
    return Stream(tokens, Slots(np.maximum(np.cumsum(segment, 1) - 1, 0).astype(np.int32), segment))


@pytest.mark.parametrize("family", ["encoder", "decoder", "seq2seq", "classifier"])
def test_the_file_computes_what_the_model_does(family, tmp_path):
    pytest.importorskip("jax2onnx", reason="needs the extra [onnx]")
    runtime = pytest.importorskip("onnxruntime")
    encoding = builders.EncodingConfig(kind="learned", max_length=LENGTH)  # absolute: padding must not move tokens
    config = builders.FAMILIES[family](layers=1, encoding=encoding)
    module, variables = builders.make(config)
    path = bridge.export(module, variables, config, tmp_path / "new" / "model.onnx", LENGTH)
    assert [file.name for file in path.parent.iterdir()] == ["model.onnx"]
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    for rows, left in ((1, False), (4, True)):
        sides = {"source": config.has_encoder, "target": config.has_decoder}
        streams = {side: stream(rows, left) if reads else None for side, reads in sides.items()}
        inputs = {}
        for side, read in streams.items():
            if read is not None:
                inputs |= {f"{side}_tokens": read.tokens, f"{side}_segment": read.slots.segment}
        assert [node.name for node in session.get_inputs()] == list(inputs)
        assert [node.name for node in session.get_outputs()] == ["logits"]
        (got,) = session.run(None, inputs)
        want = np.asarray(jax.jit(module.apply)(variables, Batch(**streams)))
        real = slice(None) if family == "classifier" else stream(rows, left).slots.segment > 0
        np.testing.assert_allclose(got[real], want[real], rtol=1e-5, atol=1e-5)


def test_a_causal_text_of_a_length_at_which_a_run_has_another_kernel(tmp_path):
    pytest.importorskip("jax2onnx", reason="needs the extra [onnx]")
    runtime = pytest.importorskip("onnxruntime")
    length = 130
    config = builders.decoder(layers=1, encoding=builders.EncodingConfig(kind="learned", max_length=length))
    module, variables = builders.make(config)
    path = bridge.export(module, variables, config, tmp_path / "model.onnx", length, rows=1)
    tokens, segment = np.arange(length, dtype=np.int32)[None] % builders.VOCAB, np.ones((1, length), np.int32)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {"target_tokens": tokens, "target_segment": segment})
    batch = Batch(None, Stream(tokens, Slots(np.cumsum(segment, 1, dtype=np.int32) - 1, segment)))
    np.testing.assert_allclose(got, jax.jit(module.apply)(variables, batch), rtol=1e-5, atol=1e-5)


def test_the_program_of_a_file_has_dense_attention_where_the_config_leaves_the_choice():
    config = builders.FAMILIES["seq2seq"]()
    attention = dataclasses.replace(config.decoder.attention, kernel="blockwise")
    config = dataclasses.replace(config, decoder=dataclasses.replace(config.decoder, attention=attention))
    changed = bridge.with_dense_attention(config)
    assert changed.encoder.attention.kernel == "dense" and changed.decoder is config.decoder


@pytest.mark.parametrize(
    ("edits", "options", "message"),
    [
        ({}, {"length": 0}, "export_onnx: got length 0, expected at least 1"),
        ({}, {"length": 4, "rows": 0}, "export_onnx: got rows 0, expected at least 1"),
        ({"dtype": "bfloat16"}, {"length": 4}, "computes in bfloat16, expected float32"),
    ],
)
def test_what_cannot_be_exported_is_refused(edits, options, message, tmp_path):
    config = dataclasses.replace(builders.decoder(), **edits)
    with pytest.raises(ConfigError, match=message):
        bridge.export(None, {}, config, tmp_path / "model.onnx", **options)
    assert not list(tmp_path.iterdir())


def test_a_file_that_exists_is_not_replaced(tmp_path):
    (tmp_path / "model.onnx").write_text("kept")
    with pytest.raises(ConfigError, match="which exists, expected a new file"):
        bridge.export(None, {}, builders.decoder(), tmp_path / "model.onnx", 4)
    assert (tmp_path / "model.onnx").read_text() == "kept"

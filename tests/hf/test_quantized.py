"""Weights in MXFP4 and FP8 are read as the numbers that they stand for, and what does not fit is refused."""

import importlib.util
import json
import math
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

import jaxformer
from jaxformer.config import MeshConfig
from jaxformer.errors import ConfigError
from jaxformer.hf import quantized, reading, weights, writing
from jaxformer.hf.flax import FlaxLlamaForCausalLM
from jaxformer.parallel import mesh

GOLDENS = Path(__file__).with_name("goldens")
CASES = json.loads((GOLDENS / "cases.json").read_text(encoding="utf-8"))
FP8 = {"quant_method": "fp8", "weight_block_size": [3, 5], "activation_scheme": "dynamic"}


def values():
    spec = importlib.util.spec_from_file_location("write_quantized", GOLDENS / "write.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.values


def fp4_number(bits):
    """E2M1 by its definition: a sign, two bits of exponent with bias 1, one of mantissa, subnormal at exponent 0."""
    sign, exponent, mantissa = -1 if bits & 8 else 1, (bits >> 1) & 3, bits & 1
    return sign * (mantissa / 2 if exponent == 0 else 2 ** (exponent - 1) * (1 + mantissa / 2))


def mxfp4_matrix(codes, scales):
    """The values `[E, M, O]` of blocks `[E, O, G, 16]` number by number."""
    experts, outputs, groups, _ = codes.shape
    matrix = np.zeros((experts, groups * 32, outputs), np.float32)
    for e, o, g, b in np.ndindex(codes.shape):
        byte, factor = int(codes[e, o, g, b]), 2.0 ** (int(scales[e, o, g]) - 127)
        matrix[e, g * 32 + 2 * b, o] = fp4_number(byte % 16) * factor
        matrix[e, g * 32 + 2 * b + 1, o] = fp4_number(byte // 16) * factor
    return matrix


def fp8_matrix(codes, factors, block):
    """The values of a matrix number by number; `factors` has one for each block."""
    return np.array(
        [
            [np.float32(codes[i, j]) * np.float32(factors[i // block[0], j // block[1]]) for j in range(codes.shape[1])]
            for i in range(codes.shape[0])
        ]
    )


def gpt_oss():
    """A config and plain tensors of gpt-oss, and the same tensors with the experts in MXFP4."""
    width, inner, experts, random = 32, 64, 3, np.random.default_rng(0)
    sizes = {8: width, 12: inner, 24: 2 * inner}
    config = CASES["gpt_oss"]["config"] | {"hidden_size": width, "intermediate_size": inner}
    plain, packed = {}, {}
    for name, shape in CASES["gpt_oss"]["tensors"].items():
        if "experts" in name or "norm" in name or "router" in name:
            shape = [sizes.get(size, size) for size in shape]
        elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
            shape = [24, width]
        elif "proj" in name:
            shape = [width if "o_proj" in name else shape[0], *([8 if "o_proj" in name else width] * (len(shape) - 1))]
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            rows = 2 * inner if "gate_up" in name else width
            codes = random.integers(0, 256, (experts, rows, shape[1] // 32, 16), np.uint8)
            scales = random.integers(119, 126, codes.shape[:-1], np.uint8)
            plain[name] = mxfp4_matrix(codes, scales)
            packed |= {name + "_blocks": codes, name + "_scales": scales}
        else:
            plain[name] = packed[name] = values()(name, tuple(shape))
    return config, plain, packed


def fp8_llama(name="llama_head_dim", block=(3, 5), dtype=np.float32):
    """A config, plain tensors and tensors in FP8 of LLaMA. Sides of the matrices are no multiples of a block's."""
    case, make = CASES[name], values()
    plain, packed = {}, {}
    for name, shape in case["tensors"].items():
        x = make(name, tuple(shape))
        plain[name] = packed[name] = x
        if name.endswith("_proj.weight"):
            grid = [math.ceil(size / part) for size, part in zip(shape, block, strict=True)]
            factors = (np.random.default_rng(len(name)).random(grid) + 0.01).astype(dtype)
            codes = (x * 4).astype(ml_dtypes.float8_e4m3fn)
            plain[name] = fp8_matrix(codes, factors, block)
            packed |= {name: codes, name + "_scale_inv": factors}
    return case["config"], plain, packed


def same_params(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_byte_of_mxfp4_is_two_numbers():
    codes = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)
    scales = np.array([[list(range(1, 255, 16))]], np.uint8)
    found = quantized.mxfp4_values(codes[0], scales[0])
    np.testing.assert_array_equal(found.T[None], mxfp4_matrix(codes, scales))
    assert found.dtype == np.float32 and np.signbit(quantized.mxfp4_values(codes[0], scales[0])[0, 16])


def test_gpt_oss_in_mxfp4_is_the_model_of_plain_weights(tmp_path):
    config, plain, packed = gpt_oss()
    method = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    writing.write_checkpoint(tmp_path / "plain", config, plain)
    writing.write_checkpoint(tmp_path / "packed", config | method, packed)
    expected = jaxformer.from_pretrained(tmp_path / "plain")
    model = jaxformer.from_pretrained(tmp_path / "packed")
    same_params(model.params, expected.params)
    two = mesh.make(MeshConfig(data=1, tensor=2), jax.devices()[:2])
    sharded = jaxformer.from_pretrained(tmp_path / "packed", mesh=two)
    same_params(sharded.params, expected.params)
    model.save_pretrained(tmp_path / "out")
    assert "quantization_config" not in reading.read_config(tmp_path / "out")
    written = reading.open_tensors(tmp_path / "out")
    name = "model.layers.1.mlp.experts.down_proj"
    np.testing.assert_array_equal(written[name].array(), plain[name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e8m0fnu"])
def test_llama_in_fp8_is_the_model_of_plain_weights(dtype, tmp_path):
    config, plain, packed = fp8_llama(dtype=np.dtype(getattr(ml_dtypes, dtype, dtype)))
    writing.write_checkpoint(tmp_path / "plain", config, plain)
    writing.write_checkpoint(tmp_path / "packed", config | {"quantization_config": FP8}, packed)
    expected = jaxformer.from_pretrained(tmp_path / "plain")
    same_params(jaxformer.from_pretrained(tmp_path / "packed").params, expected.params)


def test_one_factor_for_a_matrix_and_scales_of_activations(tmp_path, caplog):
    codes = np.arange(-6, 6, dtype=np.float32).reshape(3, 4).astype(ml_dtypes.float8_e4m3fn)
    tensors = {"a.weight": codes, "a.weight_scale_inv": np.float32([0.25]), "a.activation_scale": np.float32([2])}
    settings = {"quant_method": "fp8", "activation_scheme": "static"}
    writing.write_checkpoint(tmp_path, {"quantization_config": settings}, tensors)
    found = weights.open_weights(tmp_path)
    assert list(found) == ["a.weight"] and "activations are not rounded to FP8" in caplog.text
    np.testing.assert_array_equal(found["a.weight"].array(), codes.astype(np.float32) / 4)


def test_exponents_in_whole_numbers_are_powers_of_two(tmp_path):
    codes = np.ones((4, 6), ml_dtypes.float8_e4m3fn)
    tensors = {"a.weight": codes, "a.weight_scale_inv": np.array([[127, 128], [126, 125]], np.uint8)}
    writing.write_checkpoint(tmp_path, {"quantization_config": FP8}, tensors)
    found = weights.open_weights(tmp_path)["a.weight"].array()
    np.testing.assert_array_equal(found, np.float32([[1] * 5 + [2]] * 3 + [[0.5] * 5 + [0.25]]))


def test_the_flax_classes_read_fp8(tmp_path):
    config, plain, packed = fp8_llama("llama_padded_left")
    writing.write_checkpoint(tmp_path / "plain", config, plain)
    writing.write_checkpoint(tmp_path / "packed", config | {"quantization_config": FP8}, packed)
    expected = FlaxLlamaForCausalLM.from_pretrained(tmp_path / "plain")
    same_params(FlaxLlamaForCausalLM.from_pretrained(tmp_path / "packed").params, expected.params)


MATRIX, FACTORS = np.ones((4, 6), ml_dtypes.float8_e4m3fn), np.ones((2, 2), np.float32)
CODES, SCALES = np.zeros((2, 3, 1, 16), np.uint8), np.zeros((2, 3, 1), np.uint8)


@pytest.mark.parametrize(
    ("settings", "tensors", "message"),
    [
        (
            FP8,
            {"a": MATRIX, "a_scale_inv": np.ones((2, 3), np.float32)},
            r"factors \[2, 3\], expected .* of \[3, 5",
        ),
        (FP8, {"a": MATRIX.astype(np.float32), "a_scale_inv": FACTORS}, "a of float32 .* expected a matrix in FP8"),
        (FP8, {"a": MATRIX[None], "a_scale_inv": FACTORS}, r"\[1, 4, 6\] with factors"),
        (FP8, {"a_scale_inv": FACTORS}, "got factors a_scale_inv without their weights"),
        (FP8 | {"weight_block_size": 128}, {"a": MATRIX, "a_scale_inv": FACTORS}, "weight_block_size 128, expected"),
        (FP8 | {"weight_block_size": None}, {"a": MATRIX, "a_scale_inv": FACTORS}, r"factors \[2, 2\], expected"),
        ({"quant_method": "mxfp4"}, {"a_blocks": CODES}, "a_scales of nothing, expected"),
        ({"quant_method": "mxfp4"}, {"a_blocks": CODES, "a_scales": SCALES[:1]}, r"uint8 \[1, 3, 1\], expected"),
        ({"quant_method": "mxfp4"}, {"a_blocks": CODES.astype(np.int8), "a_scales": SCALES}, "of int8 "),
        ({"quant_method": "gptq"}, {"a_blocks": CODES}, "weights in 'gptq' .quantization_config., expected plain ones"),
    ],
)
def test_weights_that_do_not_fit_their_scales_are_refused(settings, tensors, message, tmp_path):
    writing.write_checkpoint(tmp_path, {"quantization_config": settings}, tensors)
    with pytest.raises(ConfigError, match=message):
        weights.open_weights(tmp_path)

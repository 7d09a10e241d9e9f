"""Weights of fewer bits in a checkpoint (`quantization_config`), read as the float32 numbers that they stand for.

Two formats of published checkpoints are read:

- `mxfp4` (gpt-oss): a matrix `NAME` of experts as `NAME_blocks`, two numbers of 4 bits in a byte, and `NAME_scales`, a
  power of two for every 32 numbers (OCP Microscaling Formats 1.0, 2023: E2M1 and E8M0).
- `fp8` (DeepSeek-V3 and fine-tuned models in FP8): `NAME` in 8 bits, and `NAME_scale_inv`, a factor for each block of
  `weight_block_size` numbers (DeepSeek-V3 report, arXiv:2412.19437, section 3.3.2) or for the whole matrix.

Numbers of 4 bits times a power of two are exact in float32; FP8 times its factor is rounded once. Activations are not
rounded: the formats' own kernels for `fp8` do so, and their outputs differ by that.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float32, UInt8

from jaxformer.errors import ConfigError
from jaxformer.hf import reading
from jaxformer.hf.blocks import in_threads
from jaxformer.hf.reading import Tensor, quote

log = logging.getLogger("jaxformer")

KEY = "quantization_config"
METHODS = ("mxfp4", "fp8")

FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of E2M1, by the lower three bits; the fourth bit is the sign."""

MXFP4_BLOCK = 32
"""Numbers with one scale."""

FP8_DTYPES = tuple(map(np.dtype, (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2)))

BLOCKS, SCALES, FACTORS, ACTIVATIONS = "_blocks", "_scales", "_scale_inv", ("activation_scale", "input_scale")
"""Ends of the names of tensors."""


def method_of(values: Mapping[str, Any], path: str) -> str | None:
    """The format of the weights by a config.json; None: plain numbers.

    Raises:
      ConfigError: the format is none of `METHODS`.
    """
    stored = values.get(KEY)
    if not stored:
        return None
    method = stored.get("quant_method", stored) if isinstance(stored, dict) else stored
    if method not in METHODS:
        raise ConfigError(
            f"{path}: got weights in {quote(method)} ({KEY}), expected plain ones or {' or '.join(METHODS)}; load them "
            "in the library that wrote them, dequantize them, and save_pretrained"
        )
    return method


def dequantized(tensors: dict[str, Tensor], directory: Path) -> dict[str, Tensor]:
    """The tensors of a directory, with plain ones in place of those of few bits, as its config.json says.

    Values are computed when an array is accessed.

    Raises:
      ConfigError: the format is unknown, or a tensor does not fit its scales.
    """
    if not any(name.endswith((BLOCKS, FACTORS)) for name in tensors):
        return tensors
    config, path = reading.read_config(directory), str(directory / reading.CONFIG_FILE)
    method = method_of(config, path)
    if method is None:
        return tensors
    if method == "mxfp4":
        return _of_mxfp4(tensors)
    log.warning("%s: weights in FP8 are read as float32, and activations are not rounded to FP8", path)
    return _of_fp8(tensors, config[KEY].get("weight_block_size"), path)


@dataclass(frozen=True, eq=False)
class _Dequantized(Tensor):
    """A tensor computed from two tensors of the file.

    Attributes:
      codes: the numbers of few bits.
      scales: their scales.
    """

    codes: Tensor
    scales: Tensor

    def release(self) -> None:
        """Returns the memory pages of both to the system."""
        self.codes.release()
        self.scales.release()


class Mxfp4(_Dequantized):
    """A matrix of every expert, `[E, M, O]`, from blocks `[E, O, M/32, 16]` and scales `[E, O, M/32]`."""

    def array(self) -> Float32[np.ndarray, "E M O"]:
        """The values; a view whose axis M is the fastest, as in the file."""
        experts, inputs, outputs = self.shape
        values = np.empty((experts, outputs, inputs), np.float32)
        codes, scales = self.codes.array(), self.scales.array()

        def read(expert: int) -> None:
            values[expert] = mxfp4_values(codes[expert], scales[expert])

        in_threads(read, range(experts), values.nbytes)
        return values.transpose(0, 2, 1)


@dataclass(frozen=True, eq=False)
class Fp8(_Dequantized):
    """A matrix in FP8 with a factor for each block.

    Attributes:
      block: rows and columns of a block.
    """

    block: tuple[int, int]

    def array(self) -> Float32[np.ndarray, "O M"]:
        """The values."""
        factors, (rows, columns) = self.scales.array(), self.block
        grid = (factors.view(ml_dtypes.float8_e8m0fnu) if factors.dtype == np.uint8 else factors).astype(np.float32)
        values = self.codes.array().astype(np.float32)
        by_row = np.repeat(grid.reshape(-(-self.shape[0] // rows), -1), rows, axis=0)[: self.shape[0]]
        for column in range(by_row.shape[1]):
            values[:, column * columns : (column + 1) * columns] *= by_row[:, column, None]
        return values


def mxfp4_values(
    blocks: UInt8[np.ndarray, "*rows G 16"], scales: UInt8[np.ndarray, "*rows G"]
) -> Float32[np.ndarray, "*rows M"]:
    """The numbers of MXFP4, M = 32 G of them in a row: the lower half of a byte is the first of its two numbers."""
    magnitudes = np.array(FP4_MAGNITUDES, np.float32)
    numbers = np.concatenate([magnitudes, -magnitudes])
    pairs = np.stack([np.tile(numbers, 16), np.repeat(numbers, 16)], axis=-1)  # of every byte
    factors = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    return (pairs[blocks] * factors[..., None, None]).reshape(*blocks.shape[:-2], -1)


def _of_mxfp4(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    plain = {}
    for name, codes in tensors.items():
        base = name.removesuffix(BLOCKS)
        if name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS in tensors:
            continue
        if base == name:
            plain[name] = codes
            continue
        scales = tensors.get(base + SCALES)
        good = scales is not None and codes.shape == (*scales.shape, MXFP4_BLOCK // 2) and len(scales.shape) == 3
        if scales is None or not good or {codes.dtype, scales.dtype} != {np.dtype(np.uint8)}:
            found = "nothing" if scales is None else f"{scales.dtype} {list(scales.shape)}"
            raise ConfigError(
                f"{codes.file}: got {name} of {codes.dtype} {list(codes.shape)} and {base + SCALES} of {found}, "
                "expected uint8 [E, O, G, 16] and uint8 [E, O, G]; download the checkpoint again"
            )
        experts, outputs, groups = scales.shape
        shape = (experts, groups * MXFP4_BLOCK, outputs)
        plain[base] = Mxfp4(base, shape, np.dtype(np.float32), codes.file, _NOTHING, codes, scales)
    return plain


def _of_fp8(tensors: Mapping[str, Tensor], block: Any, path: str) -> dict[str, Tensor]:
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    ):
        raise ConfigError(
            f"{path}: got weight_block_size {quote(block)}, expected [rows, columns] or null; fix the file"
        )
    plain = {}
    for name, codes in tensors.items():
        if name.endswith((FACTORS, *ACTIVATIONS)):
            continue
        scales = tensors.get(name + FACTORS)
        if scales is None:
            plain[name] = codes
            continue
        size = block or codes.shape
        grid = tuple(-(-length // part) for length, part in zip(codes.shape, size, strict=False))
        whole = block is None and scales.shape in ((), (1,), (1, 1))
        if len(codes.shape) != 2 or not (whole or scales.shape == grid) or codes.dtype not in FP8_DTYPES:
            raise ConfigError(
                f"{codes.file}: got {name} of {codes.dtype} {list(codes.shape)} with factors {list(scales.shape)}, "
                f"expected a matrix in FP8 and a factor for each block of {list(size)}; the file and its config.json "
                "contradict each other"
            )
        plain[name] = Fp8(
            name, codes.shape, np.dtype(np.float32), codes.file, _NOTHING, codes, scales, (size[0], size[1])
        )
    orphans = [name for name in tensors if name.endswith(FACTORS) and name.removesuffix(FACTORS) not in tensors]
    if orphans:
        raise ConfigError(
            f"{tensors[orphans[0]].file}: got factors {orphans[0]} without their weights, expected both; download the "
            "checkpoint again"
        )
    return plain


_NOTHING = np.empty(0, np.uint8)

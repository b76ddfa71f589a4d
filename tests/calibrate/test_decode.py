"""Decoding against plain loops over the formats' definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moefit.calibrate.decode import decode_e8m0, decode_fp8, decode_mxfp4, finite
from moefit.errors import CheckpointError

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e2m1(nibble: int) -> float:
    return math.copysign(MAGNITUDES[nibble & 7], -1.0 if nibble & 8 else 1.0)


def e4m3(code: int) -> float:
    """OCP FP8 e4m3, bias 7; 0x7f and 0xff are NaN."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return math.copysign(math.ldexp(mantissa, -9), sign)
    return sign * math.ldexp(8 + mantissa, exponent - 10)


def mxfp4_reference(packed: Tensor, scale: Tensor) -> Tensor:
    rows, half = packed.shape
    out = torch.empty(rows, 2 * half)
    for r in range(rows):
        for c in range(2 * half):
            byte = int(packed[r, c // 2]) & 0xFF
            nibble = byte & 15 if c % 2 == 0 else byte >> 4
            out[r, c] = math.ldexp(e2m1(nibble), int(scale[r, c // 32]) - 127)
    return out


def fp8_reference(codes: Tensor, scale: Tensor, height: int) -> Tensor:
    rows, columns = codes.shape
    out = torch.empty(rows, columns)
    for r in range(rows):
        for c in range(columns):
            out[r, c] = math.ldexp(e4m3(int(codes[r, c])), int(scale[r // height, c // 32]) - 127)
    return out


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal with the sign of zero."""
    return a.dtype == b.dtype == torch.float32 and torch.equal(a.view(torch.int32), b.view(torch.int32))


def random_bytes(seed: int, *shape: int, low: int = 0, high: int = 256) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(low, high, shape, np.uint8))


def finite_fp8(seed: int, *shape: int) -> Tensor:
    codes = random_bytes(seed, *shape)
    return torch.where((codes & 0x7F) == 0x7F, codes - 1, codes)


def test_e8m0_is_exact_everywhere() -> None:
    powers = decode_e8m0(torch.arange(255, dtype=torch.uint8))
    assert powers.tolist() == [math.ldexp(1.0, byte - 127) for byte in range(255)]
    assert powers[0].item() == 2.0**-127 > 0  # a denormal, not flushed to zero


def test_e8m0_nan_is_refused_by_index() -> None:
    scale = torch.full((3, 4), 127, dtype=torch.uint8)
    scale[1, 2] = scale[2, 0] = 255
    with pytest.raises(CheckpointError, match=r"shard, x\.scale.*found 255 at \[1, 2\]"):
        decode_e8m0(scale, where="shard, x.scale")


def test_vector_of_the_real_model() -> None:
    """layers.0.attn.wkv row 0 begins d8 71 f2 79 under scale byte 0x73."""
    codes = torch.tensor([[0xD8, 0x71, 0xF2, 0x79]], dtype=torch.uint8)
    values = decode_fp8(codes, torch.tensor([[0x73]], dtype=torch.uint8))
    assert values[0, :2].tolist() == [-0.00390625, 0.03515625]
    assert values[0, 2:].tolist() == [e4m3(0xF2) * 2.0**-12, e4m3(0x79) * 2.0**-12]


def test_every_code() -> None:
    """All 256 MXFP4 bytes and all finite FP8 codes under a scale of 1."""
    packed = torch.arange(256, dtype=torch.uint8)[None]
    ones = torch.full((1, 16), 127, dtype=torch.uint8)
    assert same_bits(decode_mxfp4(packed, ones), mxfp4_reference(packed, ones))
    assert same_bits(decode_mxfp4(packed.view(torch.int8), ones), mxfp4_reference(packed, ones))
    codes = torch.tensor([[c for c in range(256) if c & 0x7F != 0x7F]], dtype=torch.uint8)
    assert same_bits(decode_fp8(codes, ones[:, :8]), fp8_reference(codes, ones[:, :8], 1))


def test_low_nibble_is_the_even_column() -> None:
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, 0] = 0x7A  # low nibble a = -1, high nibble 7 = 6
    assert decode_mxfp4(packed, torch.tensor([[128]], dtype=torch.uint8))[0, :3].tolist() == [-2.0, 12.0, 0.0]


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 5), groups=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_mxfp4_equals_the_loop(rows: int, groups: int, seed: int) -> None:
    packed, scale = random_bytes(seed, rows, groups * 16), random_bytes(seed + 1, rows, groups, high=253)
    values = decode_mxfp4(packed, scale)
    assert same_bits(values, mxfp4_reference(packed, scale))
    assert torch.equal(values.to(torch.bfloat16).to(torch.float32), values)  # BF16 holds MXFP4 exactly


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 70), columns=st.integers(1, 70), blocks=st.booleans(), seed=st.integers(0, 2**32))
def test_fp8_equals_the_loop(rows: int, columns: int, blocks: bool, seed: int) -> None:
    """Blocks and row groups, whole and ragged; BF16 is exact from scale byte 3 on."""
    height = 32 if blocks else 1
    shape = (-(-rows // height), -(-columns // 32))
    codes, scale = finite_fp8(seed, rows, columns), random_bytes(seed + 1, *shape, low=3, high=247)
    values = decode_fp8(codes, scale)
    assert same_bits(values, fp8_reference(codes, scale, height))
    assert torch.equal(values.to(torch.bfloat16).to(torch.float32), values)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 300), columns=st.integers(1, 300), seed=st.integers(0, 2**32))
def test_large_fp8_blocks_are_many_small_ones(rows: int, columns: int, seed: int) -> None:
    """DeepSeek-V4's 128x128 blocks."""
    scale = random_bytes(seed, -(-rows // 128), -(-columns // 128), low=3, high=247)
    codes = finite_fp8(seed + 1, rows, columns)
    repeated = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(4, 1)[:, : -(-columns // 32)]
    assert same_bits(decode_fp8(codes, scale), decode_fp8(codes, repeated.contiguous()))


def test_smallest_products_are_exact() -> None:
    codes = torch.tensor([[1, 0x81, 2, 0x08]], dtype=torch.uint8)
    for byte in (0, 1, 2):
        scale = torch.tensor([[byte]], dtype=torch.uint8)
        assert same_bits(decode_fp8(codes, scale), fp8_reference(codes, scale, 1))
    packed, scale = random_bytes(3, 2, 16), torch.zeros(2, 1, dtype=torch.uint8)
    assert same_bits(decode_mxfp4(packed, scale), mxfp4_reference(packed, scale))


def test_overflow_and_nan_codes_are_refused() -> None:
    packed = torch.full((1, 16), 0x77, dtype=torch.uint8)  # 6 * 2^127 is beyond float32
    with pytest.raises(CheckpointError, match=r"not finite.*inf at \[0, 0\]"):
        decode_mxfp4(packed, torch.tensor([[254]], dtype=torch.uint8))
    codes = torch.zeros(2, 40, dtype=torch.uint8)
    codes[1, 33] = 0xFF
    with pytest.raises(CheckpointError, match=r"w\]: expected finite numbers, found nan at \[1, 33\]"):
        decode_fp8(codes, torch.full((1, 2), 127, dtype=torch.uint8), where="w")


def test_wrong_scale_shapes_are_refused() -> None:
    codes = torch.zeros(64, 64, dtype=torch.uint8)
    for shape in ((3, 2), (2, 3), (64, 1), (2,)):
        with pytest.raises(CheckpointError, match=r"expected shape \[2, 2\] or \[64, 2\] or \[1, 1\], found"):
            decode_fp8(codes, torch.zeros(shape, dtype=torch.uint8))
    for shape in ((64, 2), (2, 4), (64, 5)):
        with pytest.raises(CheckpointError, match=r"expected shape \[64, 4\], found"):
            decode_mxfp4(codes, torch.zeros(shape, dtype=torch.uint8))


def test_finite() -> None:
    values = torch.ones(3, 3)
    assert finite(values, "") is values
    assert finite(torch.ones(0), "").numel() == 0
    for bad in (math.nan, math.inf, -math.inf):
        values = torch.ones(3, 3)
        values[2, 1] = bad
        with pytest.raises(CheckpointError, match=r"at \[2, 1\]"):
            finite(values, "")

"""The CUDA encoder's plain model everywhere; the kernels against it where there is a card."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moefit.errors import QuantizeError
from moefit.quantize import cuda_encode
from moefit.quantize.codebook import CODEBOOKS, HALF_BITS, INTEGER_BITS, table_float32
from moefit.quantize.cuda_reference import encode_cuda_reference, reverse_bits
from moefit.quantize.encode import encode_tiles
from moefit.quantize.trellis import pack, unpack

EVERY_K = [(c, k) for c in CODEBOOKS for k in INTEGER_BITS] + [("mul1", k) for k in HALF_BITS]
needs_card = pytest.mark.skipif(not cuda_encode.available(), reason="no CUDA card, or built without MOEFIT_CUDA")


def gaussian(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 256)).astype(np.float32)


def squared_error(tiles: np.ndarray, states: np.ndarray, codebook: str) -> float:
    return float(np.square(table_float32(codebook)[states].astype(np.float64) - tiles).mean())


def on_card(tiles: np.ndarray, codebook: str, bits: float, **options: int) -> np.ndarray:
    return cuda_encode.encode_tiles_cuda(torch.from_numpy(tiles).cuda(), codebook, bits, **options).cpu().numpy()


def test_reversing_bits() -> None:
    assert reverse_bits(np.array([0b0011, 0b1000]), 4).tolist() == [0b1100, 0b0001]


@pytest.mark.parametrize(("codebook", "bits"), [("mul1", 2.5), ("mul1", 3.0), ("mcg", 4.0), ("3inst", 6.0)])
def test_model_closes_the_ring_and_is_as_good_as_the_cpu_encoder(codebook: str, bits: float) -> None:
    tiles = gaussian(6)
    states = encode_cuda_reference(tiles, table_float32(codebook), bits, 128)
    np.testing.assert_array_equal(unpack(pack(states, bits), bits), states)
    ours = squared_error(tiles, states, codebook)
    assert ours <= 1.02 * squared_error(tiles, encode_tiles(tiles, codebook, bits, fixed_point=False), codebook)


def test_model_survives_extremes() -> None:
    tiles = np.stack([np.full(256, v, np.float32) for v in (0.0, 1e4, -1e30)])
    states = encode_cuda_reference(tiles, table_float32("mul1"), 3.0, 128)
    np.testing.assert_array_equal(unpack(pack(states, 3.0), 3.0), states)


@pytest.mark.skipif(cuda_encode.available(), reason="there is a card and the library")
def test_without_a_card_the_error_says_what_to_do() -> None:
    with pytest.raises(QuantizeError, match="on CUDA|no CUDA encoder"):
        cuda_encode.encode_tiles_cuda(torch.zeros(1, 256), "mul1", 3.0)


@needs_card
@pytest.mark.parametrize(("codebook", "bits"), EVERY_K)
def test_kernels_equal_the_model(codebook: str, bits: float) -> None:
    tiles = np.concatenate([gaussian(1, 3), gaussian(1, 4) * 3])
    expected = encode_cuda_reference(tiles, table_float32(codebook), bits, 128)
    np.testing.assert_array_equal(on_card(tiles, codebook, bits), expected)
    batch = gaussian(300, 5)
    batch[[0, 299]] = tiles
    np.testing.assert_array_equal(on_card(batch, codebook, bits)[[0, 299]], expected)


@needs_card
@pytest.mark.parametrize("count", [1, 2, 131, 132, 133, 264, 265, 700])
def test_kernels_are_deterministic_and_independent_of_the_batch(count: int) -> None:
    tiles = gaussian(count, 7)
    first = on_card(tiles, "mul1", 3.0)
    np.testing.assert_array_equal(first, on_card(tiles, "mul1", 3.0))
    np.testing.assert_array_equal(first[-1:], on_card(tiles[-1:], "mul1", 3.0))


@needs_card
@pytest.mark.parametrize(("codebook", "bits"), EVERY_K)
def test_kernels_are_as_good_as_the_cpu_encoder(codebook: str, bits: float) -> None:
    tiles = gaussian(512, 9)
    ours = squared_error(tiles, on_card(tiles, codebook, bits), codebook)
    assert ours <= 1.005 * squared_error(tiles, encode_tiles(tiles, codebook, bits, threads=8), codebook)


@needs_card
def test_kernels_close_the_ring_on_extremes() -> None:
    tiles = gaussian(64, 6)
    for i, constant in enumerate((0.0, 1.0, -4.0, 8.0, 1e4, -1e4, 65504.0, 1e30, -1e30, 1e-8)):
        tiles[i] = constant
    tiles[12:40, 100] = 1e4
    tiles[40, ::2], tiles[40, 1::2] = 1e4, -1e4
    for codebook, bits in EVERY_K:
        states = on_card(tiles, codebook, bits)
        np.testing.assert_array_equal(unpack(pack(states, bits), bits), states)
    assert on_card(tiles[:0], "mul1", 3.0).shape == (0, 256)


@needs_card
def test_non_finite_tiles_are_refused() -> None:
    tiles = gaussian(3)
    tiles[2, 5] = np.nan
    with pytest.raises(QuantizeError, match="tile 2"):
        on_card(tiles, "mul1", 3.0)

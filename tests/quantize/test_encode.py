"""The native encoder against its plain reference, and both against exllamav3's error on Gaussian tiles."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefit.errors import QuantizeError
from moefit.quantize.codebook import CODEBOOKS, HALF_BITS, INTEGER_BITS, table_float32
from moefit.quantize.encode import decode_states, encode_tiles, instruction_sets
from moefit.quantize.trellis import pack, unpack

EVERY_K = [(c, k) for c in CODEBOOKS for k in INTEGER_BITS] + [("mul1", k) for k in HALF_BITS]


def gaussian(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 256)).astype(np.float32)


def mean_squared_error(tiles: np.ndarray, codebook: str, bits: float, **options: object) -> float:
    values = table_float32(codebook)[encode_tiles(tiles, codebook, bits, threads=2, **options)]
    return float(np.mean((values.astype(np.float64) - tiles) ** 2))


@pytest.mark.parametrize(("codebook", "bits"), EVERY_K)
def test_native_equals_reference(codebook: str, bits: float) -> None:
    tiles = gaussian(1, seed=int(10 * bits))
    expected = encode_tiles(tiles, codebook, bits, isa="reference")
    for isa in instruction_sets():
        np.testing.assert_array_equal(encode_tiles(tiles, codebook, bits, isa=isa), expected)


@pytest.mark.parametrize("bits", [1.5, 3.0])
def test_native_full_precision_equals_reference(bits: float) -> None:
    tiles = gaussian(1, seed=3)
    expected = encode_tiles(tiles, "mul1", bits, isa="reference", fixed_point=False)
    for isa in instruction_sets():
        np.testing.assert_array_equal(encode_tiles(tiles, "mul1", bits, isa=isa, fixed_point=False), expected)


def test_a_tile_beyond_the_range_of_8_bits_takes_full_precision() -> None:
    tiles = gaussian(8)
    tiles[0, 100], tiles[1, 100] = 3.9, 4.5
    states = encode_tiles(tiles, "mul1", 3.0)
    exact = encode_tiles(tiles, "mul1", 3.0, fixed_point=False)
    np.testing.assert_array_equal(states[1], exact[1])
    assert (states[2:] != exact[2:]).any()  # the two arithmetics do differ
    np.testing.assert_array_equal(states[:2], encode_tiles(tiles[:2], "mul1", 3.0, isa="reference"))


@pytest.mark.parametrize(
    "tile",
    [
        np.zeros(256), np.full(256, 7.0), np.full(256, -1e4), np.full(256, 1e-30), np.full(256, 6e4),
        np.where(np.arange(256) == 17, 300.0, 0.1), np.where(np.arange(256) % 2, 12.0, -12.0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("bits", [1.0, 2.5, 3.0, 5.0])
def test_extreme_tiles_still_close_the_ring(tile: np.ndarray, bits: float) -> None:
    states = encode_tiles(tile[None].astype(np.float32), "mul1", bits)
    np.testing.assert_array_equal(unpack(pack(states, bits), bits), states)
    for isa in instruction_sets():
        np.testing.assert_array_equal(encode_tiles(tile[None].astype(np.float32), "mul1", bits, isa=isa), states)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(EVERY_K), st.floats(1e-3, 50.0))
def test_states_close_and_beat_scalar_rounding_of_chance(seed: int, which: tuple[str, float], scale: float) -> None:
    codebook, bits = which
    tiles = gaussian(2, seed) * np.float32(scale)
    states = encode_tiles(tiles, codebook, bits)
    np.testing.assert_array_equal(unpack(pack(states, bits), bits), states)
    chance = np.random.default_rng(seed).integers(0, 65536, tiles.shape).astype(np.uint16)
    error = np.square(decode_states(states, codebook).astype(np.float64) - tiles).sum(axis=1)
    assert (error < np.square(decode_states(chance, codebook).astype(np.float64) - tiles).sum(axis=1)).all()


def test_threads_do_not_change_states() -> None:
    tiles = gaussian(9)
    one = encode_tiles(tiles, "mul1", 3.0, threads=1)
    for threads in (2, 4, 16):
        np.testing.assert_array_equal(encode_tiles(tiles, "mul1", 3.0, threads=threads), one)
    assert encode_tiles(tiles[:0], "mul1", 3.0, threads=4).shape == (0, 256)


# Mean squared error on `gaussian(1000, seed=42)` of the full-precision encoder: float32 costs, one Viterbi run over
# positions -128 .. 127 with free ends to find the node before position 0, one round the ring from and to that node.
TWO_RUNS = {
    ("mul1", 1.0): 0.277167, ("mul1", 2.0): 0.068749, ("mul1", 2.5): 0.0348901, ("mul1", 3.0): 0.0177071,
    ("mul1", 3.5): 0.00908077, ("mul1", 4.0): 0.0046827, ("mcg", 2.0): 0.0741874,
}  # fmt: skip


@pytest.mark.parametrize(("codebook", "bits"), TWO_RUNS)
def test_error_is_within_half_a_percent_of_full_precision(codebook: str, bits: float) -> None:
    tiles = gaussian(1000, seed=42)
    assert mean_squared_error(tiles, codebook, bits) <= TWO_RUNS[codebook, bits] * 1.005


# Paired: exllamav3's own states for its own eight tiles are in the golden file, so sampling noise cancels.
@pytest.mark.parametrize(("codebook", "k"), [(c, k) for c in CODEBOOKS for k in range(1, 9)])
def test_error_on_exllamav3s_own_tiles(shared: Path, codebook: str, k: int) -> None:
    from safetensors.numpy import load_file

    golden = load_file(shared / "golden" / "exl3_tiles.safetensors")
    tiles = golden["tiles"]
    theirs = np.mean((golden[f"values.{codebook}.{k}"].astype(np.float64) - tiles) ** 2)
    assert mean_squared_error(tiles, codebook, k) <= theirs * 1.02  # eight tiles: ties and starts move 1 %


@pytest.mark.slow
@pytest.mark.parametrize(("codebook", "k"), [(c, k) for c in CODEBOOKS for k in range(1, 9)])
@pytest.mark.parametrize("scale", [1.0, 1.24371088])
def test_error_on_gaussian_tiles_is_exllamav3s(shared: Path, codebook: str, k: int, scale: float) -> None:
    """Within 0.5 % of its figure, with the sampling error of our smaller set removed by its own control variate:
    the mean square of the tiles themselves."""
    golden = json.loads((shared / "golden" / "exl3_gaussian_mse.json").read_text())
    theirs = golden[f"{codebook}.{k}" if scale == 1.0 else f"{codebook}.{k}.scaled1.2437"]
    tiles = gaussian(1500, seed=42) * np.float32(scale)
    per_tile = np.square(table_float32(codebook)[encode_tiles(tiles, codebook, k, threads=2)] - tiles).mean(axis=1)
    per_tile = per_tile.astype(np.float64) / scale**2
    sampling_error = per_tile.std() / np.sqrt(len(per_tile))
    assert per_tile.mean() <= theirs * 1.005 + 2 * sampling_error


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_tiles_are_refused(value: float) -> None:
    tiles = gaussian(3)
    tiles[2, 5] = value
    with pytest.raises(QuantizeError, match="tile 2"):
        encode_tiles(tiles, "mul1", 3.0)

"""Codebooks, ring order, packing: bit for bit against tensors dumped from exllamav3 1.6.5's CUDA kernels."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from moefit.errors import QuantizeError
from moefit.quantize.codebook import CODEBOOKS, HALF_BITS, INTEGER_BITS, check_bits, marker, table
from moefit.quantize.encode import decode_states
from moefit.quantize.linear import decode
from moefit.quantize.trellis import from_tiles, pack, ring_order, symbol_widths, to_tiles, unpack

GOLDEN_BITS = [(c, k) for c in CODEBOOKS for k in range(1, 9)]
ALL_BITS = sorted(INTEGER_BITS + HALF_BITS)


@pytest.fixture(scope="module")
def golden(shared: Path) -> dict[str, np.ndarray]:
    return load_file(shared / "golden" / "exl3_tiles.safetensors")


def random_ring_states(rng: np.random.Generator, bits: float, shape: tuple[int, ...]) -> np.ndarray:
    """States that close on the ring, built literally: roll every symbol's bits through a 16-bit register."""
    widths = symbol_widths(bits)
    states = np.zeros((int(np.prod(shape)), 256), dtype=np.uint16)
    for row in states:
        symbols = [int(rng.integers(0, 1 << w)) for w in widths]
        state = 0
        for t in range(512):  # the second lap has the first as its history
            state = ((state << widths[t % 256]) | symbols[t % 256]) & 0xFFFF
            row[t % 256] = state
    return states.reshape(*shape, 256)


def pack_bit_by_bit(states: np.ndarray, bits: float) -> np.ndarray:
    """One tile, from the words of the specification: symbols most significant bit first, words filled from the top."""
    stream = ""
    for state, width in zip(states, symbol_widths(bits), strict=True):
        stream += format(int(state) & ((1 << width) - 1), f"0{width}b")
    words = [int(stream[i : i + 32], 2) for i in range(0, len(stream), 32)]
    return np.array(words, dtype="<u4").view(np.int16)


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_table_is_exllamav3s(golden: dict[str, np.ndarray], codebook: str) -> None:
    np.testing.assert_array_equal(table(codebook).view(np.uint16), golden[f"table.{codebook}"].view(np.uint16))


@pytest.mark.parametrize(
    ("codebook", "crc", "first"),
    [
        ("3inst", 0x4C83D524, "3a25 bb5b 3b74 34b6"),
        ("mcg", 0xD2D13C52, "3f60 304e ba13 3ab8"),
        ("mul1", 0x2BDF05C5, "c2e8 3921 b72d 3239"),
    ],
)
def test_table_checksum(codebook: str, crc: int, first: str) -> None:
    assert zlib.crc32(table(codebook).tobytes()) == crc
    assert [f"{x:04x}" for x in table(codebook).view(np.uint16)[:4]] == first.split()


@pytest.mark.parametrize(("codebook", "k"), GOLDEN_BITS)
def test_golden_round_trip(golden: dict[str, np.ndarray], codebook: str, k: int) -> None:
    states = golden[f"states.{codebook}.{k}"].view(np.uint16)
    packed = golden[f"trellis.{codebook}.{k}"]
    np.testing.assert_array_equal(unpack(packed, k)[0], states)
    np.testing.assert_array_equal(pack(states[None], k), packed)
    values = decode_states(states, codebook)
    np.testing.assert_array_equal(values.view(np.uint16), golden[f"values.{codebook}.{k}"].view(np.uint16))
    weight = from_tiles(values[None])
    np.testing.assert_array_equal(weight.view(np.uint16), golden[f"weight.{codebook}.{k}"].view(np.uint16))


@pytest.mark.parametrize("bits", ALL_BITS)
def test_pack_equals_the_bit_by_bit_definition(bits: float) -> None:
    states = random_ring_states(np.random.default_rng(int(bits * 10)), bits, (2, 3))
    packed = pack(states, bits)
    assert packed.shape == (2, 3, 16 * bits)
    np.testing.assert_array_equal(packed[1, 2], pack_bit_by_bit(states[1, 2], bits))
    np.testing.assert_array_equal(unpack(packed, bits), states)


@given(st.sampled_from(ALL_BITS), st.binary(min_size=256 * 8, max_size=256 * 8))
def test_any_bits_are_a_valid_tile(bits: float, content: bytes) -> None:
    packed = np.frombuffer(content, dtype=np.int16)[: int(16 * bits)][None, None]
    np.testing.assert_array_equal(pack(unpack(packed, bits), bits), packed)


def test_worked_example_of_the_specification() -> None:
    symbols = [0x5, 0x9, 0xB, 0xB, 0x9, 0x5, 0xF, 0x7] + [0] * 248
    states, state = np.zeros(256, dtype=np.uint16), 0
    for t in range(512):
        state = ((state << 4) | symbols[t % 256]) & 0xFFFF
        states[t % 256] = state
    assert states[3] == 0x59BB
    assert [int(w) for w in pack(states, 4.0).view(np.uint16)[:2]] == [0x95F7, 0x59BB]


def test_tiles_are_a_permutation() -> None:
    assert sorted(ring_order()) == list(range(256))
    matrix = np.arange(48 * 32).reshape(48, 32)
    tiles = to_tiles(matrix)
    assert tiles.shape == (3, 2, 256)
    np.testing.assert_array_equal(from_tiles(tiles), matrix)
    # mma.m16n8k16: lane 5 holds rows 2, 3, 10, 11 of column 1, then of column 9.
    expected = [matrix[16 + r, 16 + c] for c in (1, 9) for r in (2, 3, 10, 11)]
    np.testing.assert_array_equal(tiles[1, 1, 40:48], expected)


@pytest.mark.parametrize(
    ("bits", "codebook", "word"),
    [
        (0.5, "mul1", "no such K"),
        (9, "mcg", "no such K"),
        (2.5, "mcg", "half-integer"),
        (3, "mul2", "codebook"),
    ],
)
def test_undefined_bits_are_refused(bits: float, codebook: str, word: str) -> None:
    with pytest.raises(QuantizeError, match=word):
        check_bits(bits, codebook)


def test_markers_are_the_multipliers() -> None:
    assert marker("mul1") == ("mul1", -2082680531)
    assert marker("mcg") == ("mcg", -877912083)
    assert marker("3inst") is None


def test_real_pack_decodes_to_its_original(shared: Path) -> None:
    """Experts of a pack that exllamav3 wrote itself are close to the weights it was made from."""
    packed = read_layer(shared / "golden" / "exllamav3-tiny-qwen3-moe-3bpw")
    original = read_layer(shared / "models" / "tiny-qwen3-moe")
    found = 0
    for name, weight in original.items():
        prefix = name.removesuffix(".weight")
        if f"{prefix}.trellis" not in packed:
            continue
        decoded = decode(*(packed[f"{prefix}.{s}"].numpy() for s in ("trellis", "suh", "svh")), "mul1")
        assert float((decoded - weight.float().T).norm() / weight.float().norm()) < 0.2
        found += 1
    assert found == 32 * 3


def read_layer(directory: Path) -> dict[str, torch.Tensor]:
    """Expert tensors of layer 2."""
    tensors = {}
    for shard in sorted(directory.glob("*.safetensors")):
        with safe_open(shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                if "layers.2.mlp.experts." in name:
                    tensors[name] = file.get_tensor(name)
    return tensors

"""The trellis: ring order of a 16x16 tile, bit packing, and the plain reference of the encoder.

A tile is a ring of 256 positions t. State S_t is a 16-bit window over the ring's bit stream,
S_t = (S_{t-1} << D(t) | symbol_t) mod 2^16, and the weight at t is codebook[S_t]. D(t) is the symbol width:
K, or for half-integer K floor(K) at even t and one more at odd t. Sources: QTIP (arXiv 2406.11235) for the bitshift
trellis and tail-biting; exllamav3 1.6.5 for orders and packing, checked bit for bit against its CUDA kernels
(tests/quantize/test_codec.py). docs/exl3.md is the one-page specification.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import numpy as np

TILE = 16  # side
RING = TILE * TILE  # positions


@cache
def ring_order() -> np.ndarray:
    """int64 [256]: row-major element (row * 16 + column, rows along in) found at ring position t.

    This is the B-fragment order of the mma.m16n8k16 instruction, two fragments side by side.
    """
    t = np.arange(RING)
    lane, j = t // 8, t % 8
    row = 2 * (lane % 4) + (j & 1) + 8 * ((j >> 1) & 1)
    column = lane // 4 + 8 * (j >> 2)
    return row * TILE + column


def to_tiles(matrix: np.ndarray) -> np.ndarray:
    """[k, n] -> [k/16, n/16, 256], each tile in ring order."""
    k, n = matrix.shape
    tiles = matrix.reshape(k // TILE, TILE, n // TILE, TILE).swapaxes(1, 2)
    return tiles.reshape(k // TILE, n // TILE, RING)[..., ring_order()]


def from_tiles(tiles: np.ndarray) -> np.ndarray:
    """[k/16, n/16, 256] in ring order -> [k, n]; the inverse of `to_tiles`."""
    rows, columns, _ = tiles.shape
    flat = np.empty_like(tiles)
    flat[..., ring_order()] = tiles
    return flat.reshape(rows, columns, TILE, TILE).swapaxes(1, 2).reshape(rows * TILE, columns * TILE)


@cache
def symbol_widths(bits: float) -> np.ndarray:
    """D(t) for K = `bits`: int64 [256]."""
    t = np.arange(RING)
    return (int(2 * bits) + (t & 1)) >> 1


@cache
def _windows(bits: float) -> tuple[np.ndarray, np.ndarray]:
    """For every t, the 16-bit stream word in which S_t begins and the bit at which it begins there: int64 [256]."""
    start = (np.cumsum(symbol_widths(bits)) - 16) % int(RING * bits)
    return start // 16, start % 16


def _stream_order(words: np.ndarray) -> np.ndarray:
    """Swap neighbouring 16-bit words: storage is 32-bit words filled from the top. Its own inverse."""
    return words.reshape(*words.shape[:-1], -1, 2)[..., ::-1].reshape(words.shape)


def unpack(trellis: np.ndarray, bits: float) -> np.ndarray:
    """Packed tiles int16/uint16 [..., 16 K] -> states uint16 [..., 256]."""
    stream = _stream_order(trellis.view(np.uint16)).astype(np.uint32)
    word, shift = _windows(bits)
    pair = (stream[..., word] << 16) | stream[..., (word + 1) % stream.shape[-1]]
    return (pair >> (16 - shift).astype(np.uint32)).astype(np.uint16)


def pack(states: np.ndarray, bits: float) -> np.ndarray:
    """States uint16 [..., 256] -> packed tiles int16 [..., 16 K].

    Only the low D(t) bits of each state are stored; `unpack` returns the same states if and only if they
    close on the ring (S_t shares its high bits with S_{t-1}), which every encoder here guarantees.
    """
    flat = states.reshape(-1, RING)
    stream = np.zeros((len(flat), int(RING * bits)), dtype=np.uint8)
    widths = symbol_widths(bits)
    ends = np.cumsum(widths)
    for bit in range(int(widths.max())):  # bit 0 is the last of its symbol in the stream
        at = np.flatnonzero(widths > bit)
        stream[:, ends[at] - 1 - bit] = (flat[:, at] >> bit) & 1
    words = np.packbits(stream, axis=1).view(">u2").astype(np.uint16)
    return _stream_order(words).view(np.int16).reshape(*states.shape[:-1], -1)


def reverse_bits(x: np.ndarray, count: int) -> np.ndarray:
    """The low `count` bits of non-negative integers, in reverse order."""
    reversed_ = np.zeros_like(x)
    for i in range(count):
        reversed_ |= ((x >> i) & 1) << (count - 1 - i)
    return reversed_


@dataclass(frozen=True)
class Bounds:
    """How the encoder bounds the cost of what is still to come, and how wide it searches."""

    reach: int  # positions before and after position 0 that the bounds see: even, 128 .. 256
    slack: np.float32  # a path is followed while cost and bound exceed the first bound by no more; doubled as needed
    scale: np.float32  # of the 16-bit codes that 8-bit bounds are made of; 0 for float32 bounds

    CAP: ClassVar[int] = 127
    MOST_GROWTH: ClassVar[int] = 48
    COARSER: ClassVar[float] = 0.70710678  # units twice as large for a tile that does not fit; after that, float32

    def rows(self, values: np.ndarray, weights: np.ndarray, widths: np.ndarray) -> list[np.ndarray]:
        """Least costs of coming to each node before the first and after each step: int64 units or float32 [nodes].

        Step i enters with widths[i]. Empty if a step lifts all costs by more than 8 bits hold well.
        """
        rows = [np.zeros(1 << (16 - widths[0]), np.int64 if self.scale else np.float32)]
        kept, codes, offset = rows[0], self._codes(values), 0
        for code, enter, leave in zip(self._codes(weights), widths, widths[1:], strict=False):
            smallest = kept.min() if self.scale else 0
            kept = (np.repeat(kept, 1 << enter) + self._square(codes - code)).reshape(1 << leave, -1).min(axis=0)
            if self.scale:
                kept, offset = np.minimum(kept, self.CAP) - smallest, offset + smallest
                if kept.min() > self.MOST_GROWTH:
                    return []
            rows.append(kept + offset if self.scale else kept)
        return rows

    def cost(self, row: np.ndarray) -> np.ndarray:
        """A row as float32."""
        return row.astype(np.float32) * (np.float32(32768) / (self.scale * self.scale)) if self.scale else row

    def _codes(self, x: np.ndarray) -> np.ndarray:
        return np.clip(np.rint(x * self.scale), -32767, 32767).astype(np.int64) if self.scale else x

    def _square(self, d: np.ndarray) -> np.ndarray:
        if not self.scale:
            return d * d  # product and sum are rounded apart
        d = ((d + 32768) & 65535) - 32768  # as 16-bit words wrap round
        return np.minimum((d * d + (1 << 14)) >> 15, self.CAP)


def _walk(
    values: np.ndarray, weights: np.ndarray, widths: np.ndarray, bounds: list[np.ndarray], node: int, slack: np.float32
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Cheapest paths from `node` over `weights`, given up where cost and bound exceed the first by more than slack.

    bounds: float32 [nodes] before the first and after each step, of what is still to come. Returns (costs of the nodes
    at the end, infinite where no path came; for every step and node the dropped top bits of the best state).
    """
    cost = np.full(len(bounds[0]), np.inf, np.float32)
    cost[node] = 0
    limit, branches = bounds[0][node] + slack, []
    for u, weight in enumerate(weights):
        d = values - weight
        candidates = (np.repeat(cost, 1 << widths[u]) + d * d).reshape(1 << widths[u + 1], -1)
        branches.append(candidates.argmin(axis=0))  # the lowest wins ties
        cost = candidates.min(axis=0)
        cost[cost + bounds[u + 1] > limit] = np.inf
    return cost, branches


def _trace(branches: list[np.ndarray], widths: np.ndarray, node: int) -> np.ndarray:
    """States of the path that ends in `node`: int64 [steps]."""
    states = []
    for u in reversed(range(len(branches))):
        states.append(int(branches[u][node]) << int(16 - widths[u + 1]) | node)
        node = states[-1] >> int(widths[u])
    return np.array(states[::-1])


def _reversed_nodes(row: np.ndarray) -> np.ndarray:
    """A row of nodes in the other direction's order."""
    return row[reverse_bits(np.arange(len(row)), len(row).bit_length() - 1)]


def encode_reference(tiles: np.ndarray, values: np.ndarray, bits: float, search: Bounds) -> np.ndarray:
    """Plain model of the native encoder (quantize/native/encode_kernel.h), bit for bit; slow.

    tiles: float32 [count, 256] in ring order; values: float32 [65536]; returns uint16 [count, 256].
    Read backwards, with the bits of every state reversed, the ring is a trellis of the same kind. Bounds run from
    `reach` positions before and after position 0 towards it; where their sum is smallest the ring is closed. Two walks
    from there, each under the bounds of the other direction, meet at position 128; while none do, slack is doubled.
    """
    half, widths = RING // 2, np.tile(symbol_widths(bits), 2)
    ahead, behind = values, values[reverse_bits(np.arange(1 << 16), 16)]
    window = np.arange(-search.reach, 0) % RING
    states = np.empty(tiles.shape, dtype=np.uint16)
    finest_first = [replace(search, scale=search.scale * np.float32(s)) for s in (1, Bounds.COARSER, 0)]
    for i, tile in enumerate(np.clip(tiles, -16, 16)):
        for kind in finest_first:
            before = kind.rows(ahead, tile[window], widths[: search.reach + 1])
            after = kind.rows(behind, tile[::-1][window], widths[: search.reach + 1])
            if before and after:
                break
        node = int((before[-1] + _reversed_nodes(after[-1])).argmin())
        # From position 0 outwards, in the order of the direction that they are to bound.
        of_ahead, of_behind = (
            [kind.cost(_reversed_nodes(row)) for row in rows[: -half - 2 : -1]] for rows in (after, before)
        )
        back = int(reverse_bits(np.array(node), 16 - int(widths[0])))
        whole = kind.cost(before[-1])[node] + kind.cost(after[-1])[back]
        slack = np.clip(whole / np.float32(80), search.slack / np.float32(64), search.slack)
        while True:
            cost_ahead, path_ahead = _walk(ahead, tile[:half], widths, of_ahead, node, slack)
            cost_behind, path_behind = _walk(behind, tile[::-1][:half], widths, of_behind, back, slack)
            total = cost_ahead + _reversed_nodes(cost_behind)
            if np.isfinite(total).any():
                break
            slack *= 2
        meeting = int(total.argmin())
        states[i, :half] = _trace(path_ahead, widths, meeting)
        meeting = int(reverse_bits(np.array(meeting), 16 - int(widths[0])))
        states[i, half:] = reverse_bits(_trace(path_behind, widths, meeting), 16)[::-1]
    return states

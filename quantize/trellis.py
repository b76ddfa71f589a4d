"""The trellis: ring order of a 16x16 tile, bit packing, and the plain reference of the encoder.

A tile is a ring of 256 positions t. State S_t is a 16-bit window over the ring's bit stream,
S_t = (S_{t-1} << D(t) | symbol_t) mod 2^16, and the weight at t is codebook[S_t]. D(t) is the symbol width:
K, or for half-integer K floor(K) at even t and one more at odd t. Sources: QTIP (arXiv 2406.11235) for the bitshift
trellis and tail-biting; exllamav3 1.6.5 for orders and packing, checked bit for bit against its CUDA kernels
(tests/quantize/test_codec.py). docs/exl3.md is the one-page specification.
"""

from __future__ import annotations

from functools import cache

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


class FixedPoint:
    """The 16-bit costs of the native encoder (quantize/native/encode_kernel.h), in plain integers of 1/512."""

    UNREACHABLE, RENORMALIZE, LIMIT = 32767, 1024, 4.0

    def __init__(self, values: np.ndarray) -> None:
        self.codes = np.rint(values * np.float32(4096)).astype(np.int64)

    def distance(self, weight: np.float32) -> np.ndarray:
        """(value - weight)^2 of every state: int64 [65536]."""
        d = self.codes - int(np.rint(weight * np.float32(4096)))
        return (d * d + (1 << 14)) >> 15

    def settle(self, cost: np.ndarray) -> np.ndarray:
        """Cap the kept costs, and subtract the smallest once it has grown past RENORMALIZE."""
        cost = np.minimum(cost, self.UNREACHABLE)
        if (smallest := cost.min()) <= self.RENORMALIZE:
            return cost
        return np.where(cost == self.UNREACHABLE, cost, cost - smallest)


class FullPrecision:
    """float32 costs, product and sum rounded apart."""

    UNREACHABLE = np.float32(np.inf)

    def __init__(self, values: np.ndarray) -> None:
        self.values = values.astype(np.float32)

    def distance(self, weight: np.float32) -> np.ndarray:
        d = self.values - weight
        return d * d

    def settle(self, cost: np.ndarray) -> np.ndarray:
        return cost


def _viterbi(
    tile: np.ndarray,
    metric: FixedPoint | FullPrecision,
    bits: float,
    first: int,
    steps: int,
    node: int | None,
) -> tuple[np.ndarray, int]:
    """Cheapest path over positions first .. first + steps - 1 (mod 256).

    node: the node at which the path begins and ends, or None for free ends.
    Returns (states uint16 [steps], node entering the first position).
    """
    widths = symbol_widths(bits)
    zero = metric.distance(np.float32(0)).dtype.type(0)
    nodes = 1 << (16 - widths[first % RING])
    cost = np.full(nodes, zero if node is None else metric.UNREACHABLE)
    if node is not None:
        cost[node] = zero
    branch = []
    for t in range(first, first + steps):
        enter, leave = widths[t % RING], widths[(t + 1) % RING]
        candidates = np.repeat(cost, 1 << enter) + metric.distance(tile[t % RING])  # [65536]
        candidates = candidates.reshape(1 << leave, -1)  # [dropped top bits, nodes leaving t]
        branch.append(candidates.argmin(axis=0))  # the lowest wins ties
        cost = metric.settle(candidates.min(axis=0))
    at = int(cost.argmin()) if node is None else node
    states = np.empty(steps, dtype=np.uint16)
    for i in reversed(range(steps)):
        t = first + i
        state = int(branch[i][at]) << (16 - widths[(t + 1) % RING]) | at
        states[i] = state
        at = state >> widths[t % RING]
    return states, at


def encode_reference(tiles: np.ndarray, values: np.ndarray, bits: float, lead: int, fixed_point: bool) -> np.ndarray:
    """Plain tail-biting Viterbi over all 65,536 states; `encode.encode_tiles` gives the same states.

    tiles: float32 [count, 256] in ring order; values: float32 [65536]; returns uint16 [count, 256].
    The ring is closed on the node that the best path over positions -lead .. lead-1 puts before position 0; a second
    run over the whole ring starts and ends there.
    """
    states = np.empty(tiles.shape, dtype=np.uint16)
    full = FullPrecision(values)
    for i, tile in enumerate(tiles):
        fits = fixed_point and np.abs(tile).max() <= FixedPoint.LIMIT
        for metric in (FixedPoint(values), full) if fits else (full,):
            path, _ = _viterbi(tile, metric, bits, -lead, 2 * lead, None)
            node = int(path[lead]) >> symbol_widths(bits)[0]
            states[i], entered = _viterbi(tile, metric, bits, 0, RING, node)
            if entered == node:  # capped fixed-point costs may close elsewhere; then the full precision decides
                break
    return states

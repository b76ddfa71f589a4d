"""Windows of several tokens: which experts a step asks for that computes 1..8 tokens of one sequence at once.

Tokens of a sequence choose alike, so a window asks for fewer experts than as many tokens of different sequences would.
Windows are cut without overlap from the start of every run, a run being an unbroken stretch of decode tokens of one
conversation; what is left over at a run's end is in no window. Where no token at all is known to be decode, all count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..errors import TraceError

MAX_WINDOW = 8
SIZES = tuple(range(1, MAX_WINDOW + 1))
WHOLE = 840
"""A multiple of every window's size: a run cut at a multiple of it has the same windows."""
PIECE = WHOLE * 39
"""Longest piece of a run. Fewer than 2 * PIECE tokens are counted at once, whose numbers are less than 2**16 by more
than MAX_WINDOW."""


class Windows(NamedTuple):
    """Counts over `steps` windows of one size. hits: int64 [L, E], windows in which at least one token asks for the
    expert. tokens: int64 [L, E], tokens of these windows that do; each layer's are steps * size * top_k."""

    steps: int
    hits: np.ndarray
    tokens: np.ndarray


BySize = Mapping[int, Windows]
"""Window size (1..MAX_WINDOW) -> its counts; sizes of which there is no window are not in it."""


class Runs(NamedTuple):
    """Unbroken stretches of tokens: the first of each, how many, and their source (-1: unknown). int64 [R] each."""

    begin: np.ndarray
    length: np.ndarray
    source: np.ndarray


def find_runs(starts: np.ndarray, decode: np.ndarray | None, source: np.ndarray) -> Runs:
    """starts: [C + 1], the first token of each conversation, and N. decode: bool [N], tokens to take; None takes all.
    source: int [N], which does not change within a run."""
    tokens = int(starts[-1])
    if not tokens:
        nothing = np.zeros(0, np.int64)
        return Runs(nothing, nothing, nothing)
    cuts = np.zeros(tokens + 1, bool)
    cuts[starts] = True
    cuts[1:-1] |= source[1:] != source[:-1]
    if decode is not None:
        cuts[1:-1] |= decode[1:] != decode[:-1]
    edges = np.flatnonzero(cuts)
    begin, length = edges[:-1], np.diff(edges)
    if decode is not None:
        begin, length = begin[decode[begin]], length[decode[begin]]
    return Runs(begin, length, source[begin].astype(np.int64))


class Sums:
    """Windows of sizes 1..MAX_WINDOW counted so far: steps int64 [8], hits and tokens int64 [8, L, E]."""

    def __init__(self, layers: int, experts: int) -> None:
        self.steps = np.zeros(MAX_WINDOW, np.int64)
        self.hits = np.zeros((MAX_WINDOW, layers, experts), np.int64)
        self.tokens = np.zeros_like(self.hits)

    def add(self, ids: Sequence[np.ndarray], begin: np.ndarray, length: np.ndarray) -> None:
        """Count runs of ids, [L] x [N, k], a few tens of thousands of tokens at a time."""
        begin, length = _in_pieces(begin, length)
        block = np.cumsum(length) // PIECE  # [R], ascending
        for low, high in _groups(block):
            token = _ranges(begin[low:high], length[low:high])
            rows: np.ndarray | slice = token
            if len(token) and token[-1] - token[0] + 1 == len(token):
                rows = slice(int(token[0]), int(token[-1]) + 1)
            new, steps = _new_in_window(length[low:high])
            self.steps += steps
            for layer, of_layer in enumerate(ids):
                hits, tokens = _count(np.asarray(of_layer[rows]), new, self.hits.shape[2])
                self.hits[:, layer] += hits
                self.tokens[:, layer] += tokens

    def merge(self, other: Sums) -> None:
        self.steps += other.steps
        self.hits += other.hits
        self.tokens += other.tokens

    def add_windows(self, windows: BySize) -> None:
        for size, found in windows.items():
            self.steps[size - 1] += found.steps
            self.hits[size - 1] += found.hits
            self.tokens[size - 1] += found.tokens

    @property
    def windows(self) -> dict[int, Windows]:
        return {
            size: Windows(int(self.steps[size - 1]), self.hits[size - 1], self.tokens[size - 1])
            for size in SIZES
            if self.steps[size - 1]
        }


def count_runs(
    ids: Sequence[np.ndarray], experts: int, runs: Runs, sources: Sequence[str]
) -> tuple[dict[int, Windows], dict[str, dict[int, Windows]]]:
    """(windows of all runs, windows of each source that has any). ids: [L] x [N, k], every id in [0, experts)."""
    whole = Sums(len(ids), experts)
    by_source: dict[str, dict[int, Windows]] = {}
    for number, name in enumerate(("", *sources), -1):
        mine = runs.source == number
        if not mine.any():
            continue
        sums = Sums(len(ids), experts)
        sums.add(ids, runs.begin[mine], runs.length[mine])
        whole.merge(sums)
        if number >= 0 and sums.steps[0]:
            by_source[name] = sums.windows
    return whole.windows, by_source


def count_plainly(
    ids: Sequence[np.ndarray], experts: int, runs: Sequence[tuple[int, int]], size: int
) -> tuple[int, list[list[int]], list[list[int]]]:
    """(steps, hits [L][E], tokens [L][E]) of windows of one size, in plain loops: the reference of the tests.

    runs: (first token, number of tokens) of each."""
    steps, hits, tokens = 0, [[0] * experts for _ in ids], [[0] * experts for _ in ids]
    for begin, length in runs:
        for first in range(begin, begin + length - size + 1, size):
            steps += 1
            for layer, rows in enumerate(ids):
                asked = [int(expert) for token in range(first, first + size) for expert in rows[token]]
                for expert in set(asked):
                    hits[layer][expert] += 1
                for expert in asked:
                    tokens[layer][expert] += 1
    return steps, hits, tokens


def check_windows(windows: BySize, counts: np.ndarray, layers: Sequence[int], top_k: int, what: str) -> None:
    """Raises TraceError for what no routing gives. counts: [L, E], of all tokens that windows can be made of."""
    mend = "record the traffic again"
    for size, (steps, hits, tokens) in windows.items():
        where = f"{what} of {size} tokens"
        if size not in SIZES or type(steps) is not int or steps < 1:
            found = f"expected 1..{MAX_WINDOW} tokens and at least one window, found {size} and {steps}"
            raise TraceError("impossible windows", where=where, found=found, mend=mend)
        if hits.shape != counts.shape or tokens.shape != counts.shape:
            found = f"expected {list(counts.shape)}, found {list(hits.shape)} and {list(tokens.shape)}"
            raise TraceError("counts of windows have the wrong shape", where=where, found=found, mend=mend)
        # steps < 2**47 / size, as these tokens are among `counts`: checked below, so no sum overflows
        wrong = np.argwhere((tokens < 0) | (tokens > counts) | (hits < 0) | (hits > tokens) | (hits > steps))
        wrong = wrong if len(wrong) else np.argwhere(tokens > hits * size)
        if len(wrong):
            layer, expert = (int(i) for i in wrong[0])
            found = f"{hits[layer, expert]} hits and {tokens[layer, expert]} tokens in {steps} windows, "
            raise TraceError(
                "impossible counts of windows",
                where=f"{where}, layer {layers[layer]}, expert {expert}",
                found=found + f"of {counts[layer, expert]} tokens in all",
                mend=mend,
            )
        sums = tokens.sum(axis=1)
        if (sums != steps * size * top_k).any():
            layer = int(np.flatnonzero(sums != steps * size * top_k)[0])
            found = f"expected {steps} windows x {size} x {top_k} = {steps * size * top_k}, found {sums[layer]}"
            raise TraceError(
                "counts of windows do not add up", where=f"{where}, layer {layers[layer]}", found=found, mend=mend
            )


def same_windows(one: BySize, other: BySize) -> bool:
    return one.keys() == other.keys() and all(
        mine.steps == other[size].steps
        and np.array_equal(mine.hits, other[size].hits)
        and np.array_equal(mine.tokens, other[size].tokens)
        for size, mine in one.items()
    )


_SETS = (np.arange(256) >> np.arange(MAX_WINDOW)[:, None]) & 1  # [8, 256], bit s of each byte
_NEW = [
    np.array(
        [sum(1 << (8 * distance + size - 1) for distance in range(place, MAX_WINDOW)) for place in range(size)],
        np.uint64,
    )
    for size in SIZES
]
"""Of each size, by a token's place in its window: what `_new_in_window` gives."""


def _new_in_window(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(uint64 [n], windows int64 [8]) for runs of these lengths, one after the other.

    Byte d - 1 of a token's number says, bit s - 1 for windows of s tokens, whether an expert that was last asked for d
    tokens before is new in the token's window; byte 7 stands for 8 tokens and more. A token in no window has no bit.
    """
    before = np.cumsum(lengths) - lengths
    place = np.arange(int(lengths.sum())) - np.repeat(before, lengths)  # [n], in its run
    new = np.zeros(len(place), "<u8")
    for size, pattern in zip(SIZES, _NEW, strict=True):
        inside = place < np.repeat(lengths // size * size, lengths)
        new |= np.where(inside, pattern[place % size], np.uint64(0))
    return new, np.array([int((lengths // size).sum()) for size in SIZES], np.int64)


def _count(ids: np.ndarray, new: np.ndarray, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """(hits, tokens), int64 [8, E] both, of one layer's ids [n, k], n < 2 * PIECE. new: of `_new_in_window`."""
    top_k = ids.shape[1]
    key = np.repeat(np.arange(len(ids), dtype=np.uint32), top_k)
    key |= ids.ravel().astype(np.uint32) << np.uint32(16)
    key.sort()  # by expert, then by token
    ago = np.full(len(key), MAX_WINDOW, np.uint32)  # tokens since the expert was last asked for, 8 for more
    np.minimum(key[1:] - key[:-1], np.uint32(MAX_WINDOW), out=ago[1:])  # 17 and more between two experts
    np.maximum(ago, np.uint32(1), out=ago)  # an expert twice in one row, which cannot be true
    place = (key & np.uint32(0xFFFF)) * np.uint32(MAX_WINDOW) + ago - np.uint32(1)
    bits = new.view(np.uint8)[place]  # in which sizes of windows it is new
    index = ((key >> np.uint32(16)) << np.uint32(8)) | bits
    joint = np.bincount(index, minlength=experts * 256).reshape(experts, 256)
    hits = _SETS @ joint.T
    inside = (new >> np.uint64(8 * (MAX_WINDOW - 1))).astype(np.uint32)  # [n], sizes in which the token is in a window
    some = np.flatnonzero(inside != 255)
    index = (ids[some].astype(np.uint32) << np.uint32(8)) | inside[some, None]
    part = np.bincount(index.ravel(), minlength=experts * 256).reshape(experts, 256)
    whole = joint.sum(axis=1) - part.sum(axis=1)
    return hits, whole + _SETS @ part.T


def _in_pieces(begin: np.ndarray, length: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Runs of at most PIECE tokens with the same windows."""
    if not len(length) or length.max() <= PIECE:
        return begin, length
    pieces = -(-length // PIECE)
    run = np.repeat(np.arange(len(length)), pieces)
    offset = (np.arange(len(run)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * PIECE
    return begin[run] + offset, np.minimum(length[run] - offset, PIECE)


def _groups(label: np.ndarray) -> list[tuple[int, int]]:
    """Stretches of equal labels."""
    edges = np.flatnonzero(np.diff(label, prepend=-1, append=-1)) if len(label) else np.zeros(1, np.int64)
    return list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))


def _ranges(begin: np.ndarray, length: np.ndarray) -> np.ndarray:
    """The numbers of all runs, one after the other."""
    shift = np.repeat(begin - (np.cumsum(length) - length), length)
    return shift + np.arange(len(shift))

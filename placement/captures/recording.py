"""What a stream of captures says token by token: windows of steps, and a sample of whole conversations.

Both hold to a fixed memory however long the stream is. Windows: a buffer of PIECE tokens and one answer, 2 k bytes per
token and layer, and 16 numbers for each expert. The sample: 2 k bytes per token and layer too, 240 MB for 500,000
tokens of 40 layers and top-6.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..recorded import Recorded, hashes, per_conversation
from ..traffic import PHASES, Phase
from ..windows import PIECE, WHOLE, BySize, Sums, Windows
from .shape import MoeShape

LONGEST_SHARE = 8
"""A conversation keeps at most this part of all kept tokens: its last, in which the model itself writes."""


class Steps:
    """Windows of decode tokens, and of all others as long as no token was decode (windows.py says which count)."""

    def __init__(self, shape: MoeShape) -> None:
        self.shape = shape
        self._sums: dict[bool, Sums] = {}  # by whether of decode tokens
        self._of_sources: dict[tuple[bool, str], Sums] = {}
        self._waiting: dict[bool, list[np.ndarray]] = {True: [], False: []}
        self._rows = {True: 0, False: 0}
        self._decode = False

    def add(self, ids: np.ndarray, decode: bool) -> None:
        """One run of consecutive tokens. ids: uint16 [T, L, k]. Runs longer than PIECE come in pieces of so many."""
        self._decode |= decode and bool(len(ids))
        if not len(ids) or (self._decode and not decode):
            return
        self._waiting[decode].append(ids)
        self._rows[decode] += len(ids)
        if self._rows[decode] >= PIECE:
            self._flush(decode)

    def add_windows(self, windows: BySize, of_sources: Mapping[str, BySize], decode: bool) -> None:
        """Windows counted elsewhere. decode: that traffic has decode tokens."""
        self._decode |= decode
        if windows:
            self._sum(decode).add_windows(windows)
        for name, found in of_sources.items():
            key = (decode, name)
            self._of_sources.setdefault(key, Sums(*self._size)).add_windows(found)

    def result(self) -> tuple[dict[int, Windows], dict[str, dict[int, Windows]]]:
        """(windows, windows by source) of all that was added."""
        self._flush(self._decode)
        of_sources = {name: sums.windows for (decode, name), sums in self._of_sources.items() if decode == self._decode}
        return self._sums[self._decode].windows if self._decode in self._sums else {}, of_sources

    @property
    def _size(self) -> tuple[int, int]:
        return len(self.shape.layers), self.shape.experts

    def _sum(self, decode: bool) -> Sums:
        return self._sums.setdefault(decode, Sums(*self._size))

    def _flush(self, decode: bool) -> None:
        waiting, self._waiting[decode], self._rows[decode] = self._waiting[decode], [], 0
        if waiting:
            length = np.array([len(ids) for ids in waiting])
            ids = np.concatenate(waiting)  # [T, L, k]
            self._sum(decode).add([ids[:, layer] for layer in range(ids.shape[1])], np.cumsum(length) - length, length)


class _Kept(NamedTuple):
    """ids: uint16 [T, L, k]. phase: int8 [T]."""

    number: int
    ids: np.ndarray
    phase: np.ndarray
    source: str


class Recording:
    """A sample of the conversations of a stream, at most `keep` tokens of them; all, if there are no more.

    Each conversation has a random rank that depends on nothing but its place in the stream, and those of lowest rank
    are kept, as many as fit: the same stream gives the same sample, and a long conversation is as likely to be in it as
    a short one. Of one longer than keep / LONGEST_SHARE, at most the last so many tokens are taken, and cut so that the
    windows that are left are windows of the whole.
    """

    def __init__(self, shape: MoeShape, keep: int) -> None:
        self.shape, self.keep = shape, keep
        self._longest = max(1, keep // LONGEST_SHARE)
        self._kept: list[tuple[int, int, _Kept]] = []  # a heap: highest rank first
        self._tokens, self._number = 0, 0
        self._open: object = None
        self._pieces: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, conversation: object, ids: np.ndarray, phase: Phase | None) -> None:
        """The next tokens of a conversation; another name, and the one before is over. ids: uint16 [T, L, k]."""
        if not self.keep:
            return
        if conversation != self._open:
            self.close()
            self._open = conversation
        if len(ids):
            number = -1 if phase is None else PHASES.index(phase)
            self._pieces.append((ids, np.full(len(ids), number, np.int8)))
        while self._pieces and sum(len(ids) for ids, _ in self._pieces[1:]) >= self._longest:
            self._pieces.pop(0)

    def add_recorded(self, recorded: Recorded) -> None:
        """Conversations recorded before."""
        self.close()
        for talk in per_conversation(recorded) if self.keep else ():
            last = slice(_cut(talk.phase, self._longest), None)
            ids = np.stack([ids[last] for ids in talk.ids], axis=1)
            self._take(ids.astype(np.uint16), talk.phase[last], talk.source)

    def close(self) -> None:
        """The conversation that is open is over."""
        if self._pieces:
            ids, phase = (np.concatenate(parts) for parts in zip(*self._pieces, strict=True))
            first = _cut(phase, self._longest)
            self._take(ids[first:], phase[first:], "")
        self._open, self._pieces = None, []

    def recorded(self) -> Recorded | None:
        """What was kept, in the order of the stream; None where nothing was."""
        self.close()
        kept = sorted((item for _, _, item in self._kept), key=lambda item: item.number)
        if not kept:
            return None
        sources = tuple(sorted({item.source for item in kept} - {""}))
        return Recorded(
            _ByLayer([item.ids for item in kept]),
            self.shape.layers,
            self.shape.experts,
            np.concatenate([[0], np.cumsum([len(item.ids) for item in kept])]),
            np.concatenate([item.phase for item in kept]),
            np.array([sources.index(item.source) if item.source else -1 for item in kept]),
            sources,
        )

    def _take(self, ids: np.ndarray, phase: np.ndarray, source: str) -> None:
        if not len(ids):
            return
        rank = int(hashes(np.array([self._number]), 0)[0])
        heapq.heappush(self._kept, (-rank, self._number, _Kept(self._number, ids, phase, source)))
        self._number += 1
        self._tokens += len(ids)
        while self._tokens > self.keep:
            self._tokens -= len(heapq.heappop(self._kept)[2].ids)


def _cut(phase: np.ndarray, longest: int) -> int:
    """The first token to keep of a conversation, so that at most `longest` are left and runs stay whole, or lose a
    multiple of WHOLE tokens, after which windows of every size begin anew."""
    first = max(0, len(phase) - longest)
    decode = phase == PHASES.index("decode")
    if not first or (decode.any() and not decode[first]):
        return first
    begin, end = 0, len(phase)
    if decode.any():
        others = np.flatnonzero(~decode)
        begin = int(others[others < first].max(initial=-1)) + 1
        end = int(others[others > first].min(initial=end))
    return min(begin - (begin - first) // WHOLE * WHOLE, end)


class _ByLayer(Sequence[np.ndarray]):
    """ids [N, k] of each layer, put together from conversations when asked for: a second copy of all would double the
    memory."""

    def __init__(self, conversations: list[np.ndarray]) -> None:
        self.conversations = conversations  # uint16 [T, L, k] each

    def __len__(self) -> int:
        return int(self.conversations[0].shape[1])

    def __getitem__(self, layer: int | slice) -> np.ndarray:  # type: ignore[override]
        if not -len(self) <= layer < len(self):  # type: ignore[operator]
            raise IndexError(layer)
        return np.concatenate([ids[:, layer] for ids in self.conversations])

"""Recorded routing: what the router chose for every token, conversation by conversation. Spec: docs/traffic.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import TraceError
from .traffic import MAX_EXPERTS, PHASES, TokenLabels, TrafficTable, count_layer
from .traffic_file import map_recorded
from .windows import MAX_WINDOW, Windows, count_runs, find_runs

BLOCK = 1 << 18  # rows of one layer looked at at once
_MEND = "record the routing again"


@dataclass(frozen=True, eq=False)
class Recorded:
    """The routing of N tokens of C conversations, in order.

    ids: one integer array [N, k] per MoE layer, in the order of `layers` (may be memory-mapped). layers: the model's
    layer numbers [L]. experts: E. starts: int64 [C + 1], the first token of each conversation, and N. phase: int8 [N],
    index into PHASES, -1 unknown. source: int16 [C], index into `sources`, -1 unknown.

    Raises TraceError where these do not fit each other; `check` looks at the ids too.
    """

    ids: Sequence[np.ndarray]
    layers: tuple[int, ...]
    experts: int
    starts: np.ndarray
    phase: np.ndarray
    source: np.ndarray
    sources: tuple[str, ...]

    def __post_init__(self) -> None:
        for name, kind in (("starts", np.int64), ("phase", np.int8), ("source", np.int16)):
            given = np.asarray(getattr(self, name))
            if given.ndim != 1 or given.dtype.kind not in "iu":
                found = f"expected integers in one row, found {given.dtype} {list(given.shape)}"
                raise TraceError("recorded routing has the wrong shape", where=name, found=found, mend=_MEND)
            object.__setattr__(self, name, given.astype(kind, copy=False))
        starts, phase, source = self.starts, self.phase, self.source
        if len(starts) < 2 or starts[0] != 0 or (starts[1:] < starts[:-1]).any():
            found = f"expected 0, then numbers that do not fall, then the tokens, found {starts[:8].tolist()}"
            raise TraceError("the conversations are out of order", where="starts", found=found, mend=_MEND)
        _check_labels("phase", phase, self.tokens, len(PHASES))
        _check_labels("source", source, self.conversations, len(self.sources))
        if len(set(self.sources)) != len(self.sources) or "" in self.sources:
            found = f"expected different names, found {list(self.sources)!r:.80}"
            raise TraceError("the names of the sources are wrong", where="sources", found=found, mend=_MEND)
        ascending = list(self.layers) == sorted(set(self.layers))
        if not self.layers or not ascending or self.layers[0] < 0 or len(self.ids) != len(self.layers):
            found = f"expected an array for each of some ascending layer numbers, found {len(self.ids)} for "
            found += f"{list(self.layers)[:8]}"
            raise TraceError("layer numbers do not fit the routing", where="layers", found=found, mend=_MEND)
        top_k = 0
        for layer, ids in zip(self.layers, self.ids, strict=True):
            top_k = top_k or (ids.shape[1] if ids.ndim == 2 else 0)
            if ids.shape != (self.tokens, top_k) or not 0 < top_k <= self.experts <= MAX_EXPERTS:
                found = f"expected [{self.tokens}, top-k <= {self.experts} experts], found {list(ids.shape)}"
                raise TraceError(
                    "recorded routing has the wrong shape", where=f"layer {layer}", found=found, mend=_MEND
                )
            if ids.dtype.kind not in "iu":
                raise TraceError("routing ids are not integers", where=f"layer {layer}", found=f"found {ids.dtype}")

    @property
    def tokens(self) -> int:
        return int(self.starts[-1])

    @property
    def conversations(self) -> int:
        return len(self.starts) - 1

    @property
    def top_k(self) -> int:
        return int(self.ids[0].shape[1])

    def check(self) -> None:
        """Look at every id. TraceError, with layer and row, for ids outside [0, E), the same one twice in a row, and
        all-zero rows (a capture hook that did not run)."""
        for layer, ids in zip(self.layers, self.ids, strict=True):
            for low in range(0, self.tokens, BLOCK):
                rows = np.asarray(ids[low : low + BLOCK])
                count_layer(f"layer {layer}", rows, self.experts, np.arange(low, low + len(rows)))


class Talk(NamedTuple):
    """One conversation. ids: views [T, k] per layer; phase: int8 [T]; source: its name, "" unknown."""

    number: int
    ids: list[np.ndarray]
    phase: np.ndarray
    source: str


def per_conversation(recorded: Recorded) -> Iterator[Talk]:
    """Every conversation that has tokens, in order, with views into the recording."""
    layers = list(recorded.ids)
    for number, (low, high) in enumerate(zip(recorded.starts[:-1], recorded.starts[1:], strict=True)):
        if low < high:
            place = int(recorded.source[number])
            name = recorded.sources[place] if place >= 0 else ""
            yield Talk(number, [ids[low:high] for ids in layers], recorded.phase[low:high], name)


def window_counts(recorded: Recorded, size: int, decode_only: bool = True) -> Windows:
    """(steps, hits, tokens) of windows of `size` tokens (see windows.py), 1..8. Zeros where there is none.

    decode_only: of decode tokens, if any token is known to be decode; else of all tokens, whatever their phase.
    TraceError for another size, and for an id outside [0, E).
    """
    if not 1 <= size <= MAX_WINDOW:
        raise TraceError("no such window", found=f"expected 1..{MAX_WINDOW} tokens, found {size}")
    found = all_window_counts(recorded, decode_only)
    nothing = np.zeros((len(recorded.layers), recorded.experts), np.int64)
    return found.get(size, Windows(0, nothing, nothing))


def all_window_counts(recorded: Recorded, decode_only: bool = True) -> dict[int, Windows]:
    """`window_counts` of every size of which there is a window, in one pass that costs no more than one size's."""
    check_range(recorded)
    decode = recorded.phase == PHASES.index("decode")
    runs = find_runs(recorded.starts, decode if decode_only and decode.any() else None, _source_of_tokens(recorded))
    return count_runs(recorded.ids, recorded.experts, runs._replace(source=np.full(len(runs.begin), -1)), ())[0]


def table(recorded: Recorded) -> TrafficTable:
    """The traffic table, with phases, sources and windows. TraceError where the routing cannot be true."""
    labels = TokenLabels(recorded.phase, _source_of_tokens(recorded), recorded.sources, recorded.starts)
    return TrafficTable.from_topk(dict(zip(recorded.layers, recorded.ids, strict=True)), recorded.experts, labels)


def select(recorded: Recorded, conversations: np.ndarray) -> Recorded:
    """Some of the conversations. conversations: bool [C], or their numbers, in the order and as often as wanted.

    Views where they follow on each other, else copies. TraceError for numbers that are none.
    """
    chosen = np.asarray(conversations)
    if chosen.dtype == bool and chosen.shape == (recorded.conversations,):
        chosen = np.flatnonzero(chosen)
    if chosen.ndim != 1 or chosen.dtype.kind not in "iu" or not len(chosen):
        raise TraceError("no conversation is chosen", found=f"found {chosen.dtype} {list(chosen.shape)}")
    if chosen.min() < 0 or chosen.max() >= recorded.conversations:
        found = f"expected 0..{recorded.conversations - 1}, found {chosen.min()}..{chosen.max()}"
        raise TraceError("there is no such conversation", found=found)
    begin = recorded.starts[chosen]
    length = recorded.starts[chosen + 1] - begin
    starts = np.concatenate([[0], np.cumsum(length)])
    rows: np.ndarray | slice = np.repeat(begin - starts[:-1], length) + np.arange(starts[-1])
    if (chosen[1:] == chosen[:-1] + 1).all():
        rows = slice(int(begin[0]), int(begin[0] + starts[-1]))
    return Recorded(
        [ids[rows] for ids in recorded.ids],
        recorded.layers,
        recorded.experts,
        starts,
        recorded.phase[rows],
        recorded.source[chosen],
        recorded.sources,
    )


def split(recorded: Recorded, share: float, seed: int = 0) -> tuple[Recorded, Recorded]:
    """(about `share` of the conversations, the others), every source with two or more of them in both parts.

    Within a source, by rank of a hash of the conversation's number and the seed: the same recording is always split
    alike. Sources with a single conversation are split as if they were one source. TraceError where a part would be
    empty.
    """
    if not 0 < share < 1:
        raise TraceError("a share that splits nothing", found=f"expected 0 < share < 1, found {share}")
    filled = np.flatnonzero(np.diff(recorded.starts))
    source = recorded.source[filled].astype(np.int64)
    if len(filled) < 2:
        mend = "record more than one conversation"
        raise TraceError("one conversation cannot be split", found=f"found {len(filled)} with tokens", mend=mend)
    names, stratum, sizes = np.unique(source, return_inverse=True, return_counts=True)
    stratum = np.where(sizes[stratum] == 1, len(names), stratum)
    order = np.lexsort((hashes(filled, seed), stratum))
    first = np.zeros(recorded.conversations, bool)
    for group in np.split(order, np.flatnonzero(np.diff(stratum[order])) + 1):
        wanted = min(max(round(share * len(group)), 1), len(group) - 1)
        if len(group) == 1:  # among other sources, which have more
            wanted = round(share)
        first[filled[group[:wanted]]] = True
    rest = np.zeros_like(first)
    rest[filled] = ~first[filled]
    return select(recorded, first), select(recorded, rest)


def load_recorded(path: Path) -> Recorded | None:
    """The recorded routing of a traffic table's file, memory-mapped; None where it holds none.

    TraceError for a file that is damaged, whose parts do not fit each other, or with ids outside [0, E).
    """
    found = map_recorded(path)
    if found is None:
        return None
    head, tensors, layers, experts = found
    try:
        recorded = Recorded(
            list(tensors["topk_ids"]),
            tuple(layers),
            experts,
            np.array(tensors["starts"]),
            np.array(tensors["phase"]),
            np.array(tensors["source"]),
            tuple(head["recorded_sources"]),
        )
        if recorded.top_k != head["top_k"] or recorded.tokens > head["tokens"]:
            found_text = f"expected at most {head['tokens']} tokens, top-{head['top_k']}, found {recorded.tokens}, "
            found_text += f"top-{recorded.top_k}"
            raise TraceError("the recorded routing is not of this table's traffic", found=found_text, mend=_MEND)
        check_range(recorded)
    except TraceError as error:
        where = f"{path}, {error.where}" if error.where else str(path)
        raise TraceError(error.what, where=where, found=error.found, mend=error.mend) from error
    return recorded


def check_range(recorded: Recorded) -> None:
    """TraceError for an id outside [0, E): as far as a loop over all ids needs it to be safe, and no further."""
    for layer, ids in zip(recorded.layers, recorded.ids, strict=True):
        if ids.size and (ids.max() >= recorded.experts or (ids.dtype.kind == "i" and ids.min() < 0)):
            row, column = (int(i) for i in np.argwhere((ids < 0) | (ids >= recorded.experts))[0])
            raise TraceError(
                "routing id out of range",
                where=f"layer {layer}, row {row}",
                found=f"expected 0 <= id < {recorded.experts}, found {ids[row, column]}",
                mend=_MEND,
            )


def _source_of_tokens(recorded: Recorded) -> np.ndarray:
    return np.repeat(recorded.source, np.diff(recorded.starts))  # [N]


def _check_labels(name: str, given: np.ndarray, number: int, limit: int) -> None:
    if len(given) != number or (len(given) and (given.min() < -1 or given.max() >= limit)):
        span = f"{given.min()}..{given.max()}" if len(given) else "none"
        found = f"expected {number} numbers from -1 to {limit - 1}, found {len(given)}, {span}"
        raise TraceError("recorded routing has the wrong labels", where=name, found=found, mend=_MEND)


def hashes(numbers: np.ndarray, seed: int) -> np.ndarray:
    """uint64, well mixed: Vigna's splitmix64."""
    with np.errstate(over="ignore"):
        value = (numbers.astype(np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            value = (value ^ (value >> np.uint64(shift))) * np.uint64(factor)
    return value ^ (value >> np.uint64(31))

"""Pieces of captures, the sums over them, and what cannot be true of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from ...errors import TraceError
from ..recorded import Recorded
from ..traffic import PHASES, Phase, TrafficTable, count_layer
from ..windows import BySize
from .recording import Recording, Steps
from .shape import OTHER_MODEL, MoeShape

LIMIT = 1 << 47
"""No count reaches it (docs/traffic.md), so that no sum over experts overflows an int64."""


class TopK(NamedTuple):
    """Routing of consecutive tokens, or of one step. ids: integers [tokens, layers, top_k]; rows of -1 are missing.

    first: number of the first row in what was recorded. conversation: pieces with the same number follow on each other
    in one sequence of a file, its phases one after the other; None where rows are of several sequences.
    """

    where: str
    ids: np.ndarray
    phase: Phase | None = None
    first: int = 0
    conversation: int | None = None


class Counts(NamedTuple):
    """Tokens per expert: [layers, experts], or [steps, layers, experts]; whole numbers, floats allowed."""

    where: str
    counts: np.ndarray
    phase: Phase | None = None


class Labelled(NamedTuple):
    """What of the counts given elsewhere came from a source: [layers with experts, experts]."""

    source: str
    counts: np.ndarray


class Counted(NamedTuple):
    """Windows of the counts given elsewhere, and recorded routing of some of them. decode: some of these tokens are."""

    windows: BySize
    of_sources: Mapping[str, BySize]
    decode: bool
    recorded: Callable[[], Recorded | None]


class Left(NamedTuple):
    """Something that a reader leaves out with good reason, and how many of it."""

    what: str
    number: int


Piece = TopK | Counts | Labelled | Counted | Left


class Tally:
    """Counts int64 [L, E] in all, per phase and per source, of the pieces added so far.

    steps, recording: where the routing of sequences goes besides, if anywhere. name: of the file.
    """

    def __init__(
        self, shape: MoeShape, steps: Steps | None = None, recording: Recording | None = None, name: str = ""
    ) -> None:
        self.shape = shape
        self.steps, self.recording, self.name = steps, recording, name
        self.left: Counter[str] = Counter()
        self.total = np.zeros((len(shape.layers), shape.experts), dtype=np.int64)
        self.phases = {phase: np.zeros_like(self.total) for phase in PHASES}
        self.sources: dict[str, np.ndarray] = {}

    def add(self, piece: Piece) -> None:
        """Raises TraceError for a piece that cannot be a capture of this model."""
        if isinstance(piece, Left):
            self.left[piece.what] += piece.number
            return
        if isinstance(piece, Labelled):
            self.sources[piece.source] = self.sources.get(piece.source, 0) + piece.counts
            return
        if isinstance(piece, Counted):
            self._follow_counted(piece)
            return
        if isinstance(piece, TopK):
            ids, counts = self._of_topk(piece)
            self._follow(piece, ids)
        else:
            counts = self._of_counts(piece)
        self.total += counts
        if piece.phase:
            self.phases[piece.phase] += counts
        if self.total.max() >= LIMIT:
            raise TraceError("counts too large to be true", where=piece.where, found=f"expected under {LIMIT:,}")

    def _follow(self, piece: TopK, ids: np.ndarray) -> None:
        """ids: [T, L, k], checked."""
        if piece.conversation is None:
            return
        ids = ids.astype(np.uint16)
        if self.steps is not None:
            self.steps.add(ids, piece.phase == "decode")
        if self.recording is not None:
            self.recording.add((self.name, piece.conversation), ids, piece.phase)

    def _follow_counted(self, piece: Counted) -> None:
        if self.steps is not None:
            self.steps.add_windows(piece.windows, piece.of_sources, piece.decode)
        if self.recording is not None and self.recording.keep and (recorded := piece.recorded()) is not None:
            self.recording.add_recorded(recorded)

    def merge(self, other: Tally) -> None:
        """Add all of another tally of the same model."""
        self.total += other.total
        for phase in PHASES:
            self.phases[phase] += other.phases[phase]
        for name, counts in other.sources.items():
            self.sources[name] = self.sources.get(name, 0) + counts
        self.left += other.left

    @property
    def is_even(self) -> bool:
        """Whether all layers have seen the same whole number of tokens, and at least one."""
        sums = self.total.sum(axis=1)
        return bool((sums == sums[0]).all() and sums[0] > 0 and sums[0] % self.shape.top_k == 0)

    def table(self, where: str) -> TrafficTable:
        """The traffic table. Raises TraceError where nothing was recorded or layers disagree about the tokens."""
        sums, layers, top_k = self.total.sum(axis=1), self.shape.layers, self.shape.top_k
        if not sums.any():
            mend = "switch the capture on before the traffic, and stop it after"
            raise TraceError("nothing was recorded", where=where, found="every count is 0", mend=mend)
        odd = next((i for i, total in enumerate(sums) if not total), None)
        if odd is not None:
            found = f"no token in layer {layers[odd]}, {sums.max():,} routed in others"
            mend = "the engine does not capture that layer (another kernel, routing by a table): use another capture"
            raise TraceError("a layer with experts has recorded nothing", where=where, found=found, mend=mend)
        odd = next((i for i, total in enumerate(sums) if total != sums[0]), None)
        if odd is not None:
            raise TraceError(
                "the layers have seen different numbers of tokens",
                where=where,
                found=f"{sums[0]:,} routed in layer {layers[0]}, {sums[odd]:,} in layer {layers[odd]}",
                mend="take a capture written between two steps and not within one; of captures per rank, give all",
            )
        if sums[0] % top_k:
            raise TraceError(
                "the counts are no whole number of tokens",
                where=where,
                found=f"{sums[0]:,} routed per layer, top-{top_k}",
                mend=f"{OTHER_MODEL}; shared experts must not be fused into the routing",
            )
        try:
            prefill, decode = (self.phases[phase] for phase in PHASES)
            return TrafficTable(self.total, int(sums[0]) // top_k, layers, top_k, prefill, decode, self.sources)
        except TraceError as error:
            raise TraceError(error.what, where=f"{where}, {error.where}", found=error.found, mend=error.mend) from error

    def _of_topk(self, piece: TopK) -> tuple[np.ndarray, np.ndarray]:
        """(ids [T, L, k], counts [L, E]) of the rows that are there; the others are counted as left out."""
        ids, shape = piece.ids, self.shape
        if ids.dtype.kind not in "iu":
            raise TraceError("routing ids are not integers", where=piece.where, found=f"found {ids.dtype}")
        if ids.ndim != 3 or ids.shape[2] != shape.top_k:
            raise TraceError(
                "recorded routing has the wrong shape",
                where=piece.where,
                found=f"expected [tokens, layers, {shape.top_k}], found {list(ids.shape)}",
                mend=f"{OTHER_MODEL}; shared experts must not be fused into the routing",
            )
        ids, dense = shape.routed(ids, 1, piece.where)  # [T, L, k], [T, dense, k]
        if not ((dense == 0) | (dense == -1)).all():
            raise TraceError(
                "a dense layer has routed tokens",
                where=piece.where,
                mend=OTHER_MODEL,
            )
        missing = (ids == -1).all(axis=(1, 2))  # [T]
        torn = np.flatnonzero((ids == -1).any(axis=(1, 2)) & ~missing)
        if torn.size:
            raise TraceError(
                "part of a token's routing is missing",
                where=f"{piece.where}, row {piece.first + torn[0]}",
                found=f"{torn.size} of {len(ids)} rows have -1 in some layers or ranks only",
                mend="the capture hook did not run everywhere: record again",
            )
        if missing.any():
            self.left["tokens without routing (cached prefix, padding)"] += int(missing.sum())
            ids = ids[~missing]
        numbers = piece.first + np.flatnonzero(~missing)
        rows = [
            count_layer(f"{piece.where}, layer {layer}", ids[:, index], shape.experts, numbers)
            for index, layer in enumerate(shape.layers)
        ]
        return ids, np.stack(rows)

    def _of_counts(self, piece: Counts) -> np.ndarray:
        """Counts [L, E], summed over steps, exact."""
        counts, shape, where = piece.counts, self.shape, piece.where
        mend = "give the engine's raw counts, whole numbers of tokens per expert"
        if counts.dtype.kind not in "iuf":
            raise TraceError("activation counts are not numbers", where=where, found=f"found {counts.dtype}", mend=mend)
        if counts.ndim not in (2, 3) or counts.shape[-1] != shape.experts:
            raise TraceError(
                "activation counts have the wrong shape",
                where=where,
                found=f"expected [layers, {shape.experts} experts], found {list(counts.shape)}",
                mend=f"{OTHER_MODEL}, and counts of all ranks' experts",
            )
        counts = counts.reshape(-1, *counts.shape[-2:])  # [S, L, E]
        if not np.isfinite(counts).all() or (counts < 0).any():
            found = f"found {counts.min() if counts.size else ''}..{counts.max() if counts.size else ''}"
            raise TraceError("activation counts are negative or not finite", where=where, found=found, mend=mend)
        if counts.dtype.kind == "f":
            if (counts != np.floor(counts)).any():
                found = f"found {counts[counts != np.floor(counts)][0]}"
                raise TraceError("activation counts are not whole numbers", where=where, found=found, mend=mend)
            exact = 2 / np.finfo(counts.dtype).eps
            if counts.size and counts.max() > exact:
                found = f"expected at most {exact:,.0f} in {counts.dtype}, found {counts.max():,.0f}"
                mend = "record in several parts and give them all"
                raise TraceError("activation counts are too large to be exact", where=where, found=found, mend=mend)
        total = counts.sum(axis=0, dtype=np.float64)  # [L, E]; exact below LIMIT
        if total.size and total.max() >= LIMIT:
            raise TraceError("counts too large to be true", where=where, found=f"expected under {LIMIT:,}", mend=mend)
        routed, dense = shape.routed(total.astype(np.int64), 0, where)
        if dense.any():
            raise TraceError("a dense layer has routed tokens", where=where, mend=OTHER_MODEL)
        return routed

"""The traffic table: how many tokens the router sent to each expert of each layer. Spec: docs/traffic.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from ..errors import TraceError
from ..files import write_atomic
from .traffic_file import FORMAT, VERSION, Head, Tensors, pack_windows, read_table, table_bytes, unpack_windows
from .traffic_file import write_recorded as write_with_recorded
from .windows import BySize, Sums, Windows, check_windows, count_runs, find_runs, same_windows

if TYPE_CHECKING:
    from .recorded import Recorded

PACK_TABLE = "calibration/traffic.safetensors"
"""Where a pack's own table lies in it."""
Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, Phase] = ("prefill", "decode")
MAX_LAYERS, MAX_EXPERTS = 4096, 65536  # ids are stored as uint16


@dataclass(frozen=True, eq=False)
class TokenLabels:
    """What is known of N tokens. phase: int [N], index into PHASES. source: int [N], index into `sources`. -1: unknown.

    sources: different names, none empty. starts: int64 [C + 1], the first token of each conversation, and N; None where
    nothing is known of conversations, and then no windows are counted.
    """

    phase: np.ndarray
    source: np.ndarray
    sources: tuple[str, ...]
    starts: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class TrafficTable:
    """counts: int64 [L, E], tokens routed to each expert. layers: the model's layer numbers, ascending [L].

    tokens: rows seen by every layer. top_k: experts per token. Each row of counts sums to tokens * top_k.
    prefill, decode: int64 [L, E], what of `counts` came in these phases; None where none is known to have.
    sources: name -> int64 [L, E], what of `counts` came from there, by name; names are not empty.
    windows: of decode steps of 1..8 tokens, by size (windows.py); of all tokens where none is known to be decode. They
    need not cover all traffic. source_windows: what of them came from each source.
    """

    counts: np.ndarray
    tokens: int
    layers: tuple[int, ...]
    top_k: int
    prefill: np.ndarray | None = None
    decode: np.ndarray | None = None
    sources: Mapping[str, np.ndarray] = field(default_factory=dict)
    windows: BySize = field(default_factory=dict)
    source_windows: Mapping[str, BySize] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("counts", *PHASES):
            if (given := getattr(self, name)) is not None:
                counts = _frozen(given)
                object.__setattr__(self, name, counts if name == "counts" or counts.any() else None)
        sources = {name: _frozen(counts) for name, counts in sorted(self.sources.items())}
        object.__setattr__(self, "sources", {name: counts for name, counts in sources.items() if counts.any()})
        _check_table(self.counts, self.tokens, self.layers, self.top_k)
        _check_parts(self.counts, self.phases, self.layers, self.top_k, "phases")
        _check_parts(self.counts, self.sources, self.layers, self.top_k, "sources")
        object.__setattr__(self, "windows", _frozen_windows(self.windows))
        of_sources = {name: _frozen_windows(found) for name, found in sorted(self.source_windows.items()) if found}
        object.__setattr__(self, "source_windows", of_sources)
        stepped = self.counts if self.decode is None else self.decode
        check_windows(self.windows, stepped, self.layers, self.top_k, "windows")
        _check_source_windows(self)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TrafficTable)
            and (self.tokens, self.layers, self.top_k) == (other.tokens, other.layers, other.top_k)
            and np.array_equal(self.counts, other.counts)
            and all(
                mine.keys() == theirs.keys() and all(np.array_equal(mine[name], theirs[name]) for name in mine)
                for mine, theirs in ((self.phases, other.phases), (self.sources, other.sources))
            )
            and same_windows(self.windows, other.windows)
            and self.source_windows.keys() == other.source_windows.keys()
            and all(same_windows(found, other.source_windows[name]) for name, found in self.source_windows.items())
        )

    @property
    def phases(self) -> dict[str, np.ndarray]:
        """The known phases' counts [L, E]; what they lack of `counts` came in an unknown phase."""
        return {
            phase: counts
            for phase, counts in (("prefill", self.prefill), ("decode", self.decode))
            if counts is not None
        }

    @property
    def phase_tokens(self) -> dict[str, int]:
        """Tokens of each known phase."""
        return {phase: int(counts[0].sum()) // self.top_k for phase, counts in self.phases.items()}

    @property
    def source_tokens(self) -> dict[str, int]:
        """Tokens of each known source."""
        return {name: int(counts[0].sum()) // self.top_k for name, counts in self.sources.items()}

    @classmethod
    def from_topk(cls, ids: Mapping[int, np.ndarray], experts: int, labels: TokenLabels | None = None) -> TrafficTable:
        """Count recorded routing. ids: layer number -> integer array [N, k], the same N and k everywhere.

        experts: E, experts per layer. labels: phase and source of each of the N tokens. Rows of captures known to be
        broken are refused (TraceError): an id outside [0, E), the same expert twice in a row, all-zero rows (a capture
        hook that did not run).
        """
        if not ids:
            raise TraceError("no layer has recorded routing", mend="record at least one token")
        layers = tuple(sorted(ids))
        shapes = {layer: ids[layer].shape for layer in layers}
        first = shapes[layers[0]]
        for layer in layers:
            if shapes[layer] != first or len(first) != 2 or not first[0] or not first[1]:
                raise TraceError(
                    "recorded routing has the wrong shape",
                    where=f"layer {layer}",
                    found=f"expected [tokens, top_k] as layer {layers[0]} {list(first)}, found {list(shapes[layer])}",
                    mend="record every token in every MoE layer, and at least one token",
                )
        counts = np.stack([count_layer(f"layer {layer}", ids[layer], experts) for layer in layers])  # [L, E]
        if labels is None:
            return cls(counts, first[0], layers, first[1])
        prefill, decode = np.stack(
            [_count_labelled(ids[layer], labels.phase, len(PHASES), experts) for layer in layers], 1
        )
        by_source = [_count_labelled(ids[layer], labels.source, len(labels.sources), experts) for layer in layers]
        sources = dict(zip(labels.sources, np.stack(by_source, 1), strict=True))  # name -> [L, E]
        windows: BySize = {}
        source_windows: Mapping[str, BySize] = {}
        if labels.starts is not None:
            is_decode = labels.phase == PHASES.index("decode")
            runs = find_runs(labels.starts, is_decode if is_decode.any() else None, labels.source)
            windows, source_windows = count_runs([ids[layer] for layer in layers], experts, runs, labels.sources)
        return cls(counts, first[0], layers, first[1], prefill, decode, sources, windows, source_windows)

    def save(self, path: Path, recorded: Recorded | None = None) -> None:
        """Write the table (safetensors) atomically; the same table gives the same bytes.

        recorded: routing of the same model to keep in the file too, written a block at a time. TraceError where it is
        of another model or cannot be true.
        """
        if recorded is None:
            write_atomic(path, self.to_bytes())
            return
        here = (self.layers, self.counts.shape[1], self.top_k)
        if (recorded.layers, recorded.experts, recorded.top_k) != here or not 0 < recorded.tokens <= self.tokens:
            raise TraceError(
                "the recorded routing is not of this table's traffic",
                found=f"expected 1..{self.tokens} tokens of {len(self.layers)} layers x {here[1]} experts, "
                f"top-{self.top_k}, found {recorded.tokens} of {len(recorded.layers)} x {recorded.experts}, "
                f"top-{recorded.top_k}",
                mend="keep what was recorded with the table",
            )
        recorded.check()
        head, tensors = self._contents()
        write_with_recorded(
            path, head | {"version": VERSION, "recorded_sources": list(recorded.sources)}, tensors, recorded
        )

    def to_bytes(self) -> bytes:
        """The file's bytes, in the lowest version that can hold the table."""
        head, tensors = self._contents()
        return table_bytes(head, tensors)

    def _contents(self) -> tuple[Head, Tensors]:
        version = VERSION if self.windows else 3 if self.sources else 2 if self.phases else 1
        head: Head = {"format": FORMAT, "tokens": self.tokens, "top_k": self.top_k, "version": version}
        tensors = {"counts": self.counts, "layers": np.array(self.layers, dtype=np.int64), **self.phases}
        if self.sources:
            head["sources"] = list(self.sources)
            tensors["sources"] = np.stack(list(self.sources.values()))  # [S, L, E]
        return head, tensors | pack_windows(self.windows, self.source_windows, list(self.sources))

    @classmethod
    def load(cls, path: Path) -> TrafficTable:
        """Read and validate a table; recorded routing in the file is not read (see `recorded.load_recorded`).

        TraceError names the file and what is wrong with it.
        """
        head, tensors = read_table(path)
        try:
            names = head.get("sources", [])
            layers = tuple(int(layer) for layer in tensors["layers"])
            prefill, decode = (tensors.get(phase) for phase in PHASES)
            sources = dict(zip(names, tensors.get("sources", ()), strict=True))
            windows = unpack_windows(tensors, names, "windows")
            return cls(tensors["counts"], head["tokens"], layers, head["top_k"], prefill, decode, sources, *windows)
        except TraceError as error:
            where = f"{path}, {error.where}"
            raise TraceError(error.what, where=where, found=error.found, mend=error.mend) from error


def merge(tables: Sequence[TrafficTable]) -> TrafficTable:
    """One table of the tokens of all `tables`, which must have the same layers, experts and top_k.

    Windows are those of decode tokens if any table has such tokens, as if all had been recorded together.
    """
    if not tables:
        raise TraceError("no traffic table to merge")
    first = tables[0]
    for number, table in enumerate(tables):
        if (table.layers, table.top_k, table.counts.shape) != (first.layers, first.top_k, first.counts.shape):
            raise TraceError(
                "traffic tables of different models",
                where=f"table {number}",
                found=f"expected the same layers, counts {list(first.counts.shape)} and top-{first.top_k}, "
                f"found {list(table.counts.shape)} and top-{table.top_k}",
                mend="merge only traffic recorded on one model",
            )
    counts = np.sum([table.counts for table in tables], axis=0)
    nothing = np.zeros_like(counts)
    prefill, decode = (np.sum([table.phases.get(phase, nothing) for table in tables], axis=0) for phase in PHASES)
    sources: dict[str, np.ndarray] = {}
    for table in tables:
        for name, part in table.sources.items():
            sources[name] = sources.get(name, nothing) + part
    tokens = sum(table.tokens for table in tables)
    known = any(table.decode is not None for table in tables)
    windows, of_sources = Sums(*counts.shape), {name: Sums(*counts.shape) for name in sources}
    for table in tables:
        if (table.decode is not None) == known:
            windows.add_windows(table.windows)
            for name, found in table.source_windows.items():
                of_sources[name].add_windows(found)
    by_source = {name: sums.windows for name, sums in of_sources.items()}
    return TrafficTable(counts, tokens, first.layers, first.top_k, prefill, decode, sources, windows.windows, by_source)


def stack(tables: Sequence[TrafficTable]) -> TrafficTable:
    """One table of the layers of all `tables`, which saw the same tokens; layers ascend from table to table."""
    if not tables:
        raise TraceError("no traffic table to stack")
    first = tables[0]
    for number, table in enumerate(tables):
        known = [
            (
                part.tokens,
                part.top_k,
                part.counts.shape[1],
                part.phase_tokens,
                part.source_tokens,
                _steps(part.windows),
                {name: _steps(found) for name, found in part.source_windows.items()},
            )
            for part in (table, first)
        ]
        if known[0] != known[1]:
            found = f"expected {known[1]}, found {known[0]}"
            raise TraceError("traffic tables of other tokens", where=f"table {number}", found=found)
    prefill, decode = (
        np.concatenate([table.phases[phase] for table in tables]) if phase in first.phases else None for phase in PHASES
    )
    return TrafficTable(
        np.concatenate([table.counts for table in tables]),
        first.tokens,
        tuple(layer for table in tables for layer in table.layers),
        first.top_k,
        prefill,
        decode,
        {name: np.concatenate([table.sources[name] for table in tables]) for name in first.sources},
        _stack_windows([table.windows for table in tables]),
        {name: _stack_windows([table.source_windows[name] for table in tables]) for name in first.source_windows},
    )


def _steps(windows: BySize) -> dict[int, int]:
    return {size: found.steps for size, found in windows.items()}


def _stack_windows(parts: Sequence[BySize]) -> dict[int, Windows]:
    """Of layers that saw the same windows."""
    return {
        size: Windows(
            found.steps,
            np.concatenate([part[size].hits for part in parts]),
            np.concatenate([part[size].tokens for part in parts]),
        )
        for size, found in parts[0].items()
    }


def count_layer(where: str, ids: np.ndarray, experts: int, numbers: np.ndarray | None = None) -> np.ndarray:
    """Counts [E] of one layer's ids [N, k]. Raises TraceError naming `where` and the first row that cannot be true.

    numbers: what the rows are called [N], where it is not 0, 1, ...
    """
    if numbers is None:
        numbers = np.arange(len(ids))
    if ids.dtype.kind not in "iu":
        raise TraceError("routing ids are not integers", where=where, found=f"found {ids.dtype}")
    k = ids.shape[1]
    ranked = np.sort(ids, axis=1)
    least, most = ranked[:, 0], ranked[:, -1]
    # With k > 1 an all-zero row names expert 0 twice; with k = 1 only a whole layer of zeros is suspect.
    zeros = np.flatnonzero((least == 0) & (most == 0))
    if zeros.size and (k > 1 or zeros.size == len(ids) >= experts > 1):
        raise TraceError(
            "all-zero routing rows",
            where=f"{where}, row {numbers[zeros[0]]}",
            found=f"{zeros.size} of {len(ids)} rows",
            mend="the capture hook did not run for them (fused kernel, cached prefix): record again",
        )
    outside = np.flatnonzero((least < 0) | (most >= experts))
    if outside.size:
        row = int(outside[0])
        wrong = next(int(expert) for expert in ids[row] if not 0 <= expert < experts)
        raise TraceError(
            "routing id out of range",
            where=f"{where}, row {numbers[row]}",
            found=f"expected 0 <= id < {experts}, found {wrong}",
        )
    twice = np.flatnonzero((ranked[:, 1:] == ranked[:, :-1]).any(axis=1)) if k > 1 else zeros[:0]
    if twice.size:
        raise TraceError(
            "an expert occurs twice in one row",
            where=f"{where}, row {numbers[twice[0]]}",
            found=f"expected {k} different ids, found {ids[twice[0]].tolist()}",
        )
    return np.bincount(ids.ravel().astype(np.int64), minlength=experts)


def _count_labelled(ids: np.ndarray, label: np.ndarray, labels: int, experts: int) -> np.ndarray:
    """Counts [labels, E] of ids [N, k] by the tokens' label [N]; -1 is none."""
    known = label >= 0
    places = label[known, None].astype(np.int64) * experts + ids[known].astype(np.int64)  # [n, k]
    return np.bincount(places.ravel(), minlength=labels * experts).reshape(labels, experts)


def _frozen(given: np.ndarray) -> np.ndarray:
    """A copy that cannot be written to: a table must not change."""
    counts = np.array(given, dtype=np.int64, order="C")
    counts.setflags(write=False)
    return counts


def _frozen_windows(windows: BySize) -> dict[int, Windows]:
    return {
        size: Windows(steps, _frozen(hits), _frozen(tokens)) for size, (steps, hits, tokens) in sorted(windows.items())
    }


def _check_source_windows(table: TrafficTable) -> None:
    """Windows of a source are among its tokens, and those of all sources among all windows."""
    for name, found in table.source_windows.items():
        if name not in table.sources or not found.keys() <= table.windows.keys():
            raise TraceError("windows of a source without its counts", where=f"source_windows, {name}")
        check_windows(found, table.sources[name], table.layers, table.top_k, f"windows of {name}")
    for size, (steps, hits, tokens) in table.windows.items():
        parts = [found[size] for found in table.source_windows.values() if size in found]
        nothing = np.zeros_like(hits)
        if (
            sum(part.steps for part in parts) > steps
            or (sum((part.hits for part in parts), nothing) > hits).any()
            or (sum((part.tokens for part in parts), nothing) > tokens).any()
        ):
            raise TraceError("the windows of the sources are more than the whole", where=f"windows of {size} tokens")


def _check_parts(
    counts: np.ndarray, parts: Mapping[str, np.ndarray], layers: tuple[int, ...], top_k: int, what: str
) -> None:
    mend = "record the traffic again"
    for name, part in parts.items():
        if not name or part.shape != counts.shape or part.min() < 0:
            found = f"expected {list(counts.shape)} counts >= 0, found {list(part.shape)} from {part.min()}"
            raise TraceError("impossible traffic counts", where=name or what, found=found, mend=mend)
        sums = part.sum(axis=1)
        if (sums != sums[0]).any() or sums[0] % top_k:
            found = f"expected the same number of tokens x {top_k} in every layer, found {sums[:8].tolist()}"
            raise TraceError("traffic counts do not add up", where=name, found=found, mend=mend)
    beyond = np.argwhere(sum(parts.values(), np.zeros_like(counts)) > counts)
    if beyond.size:
        layer, expert = (int(i) for i in beyond[0])
        found = f"more than {counts[layer, expert]} for expert {expert} of layer {layers[layer]}"
        where = "prefill, decode" if what == "phases" else what
        raise TraceError(f"the {what} are more than the whole", where=where, found=found, mend=mend)


def _check_table(counts: np.ndarray, tokens: int, layers: tuple[int, ...], top_k: int) -> None:
    mend = "record the traffic again"
    if counts.ndim != 2 or not (0 < counts.shape[0] <= MAX_LAYERS and 0 < counts.shape[1] <= MAX_EXPERTS):
        found = f"expected [L <= {MAX_LAYERS}, E <= {MAX_EXPERTS}], found {list(counts.shape)}"
        raise TraceError("traffic counts have the wrong shape", where="counts", found=found, mend=mend)
    if len(layers) != len(counts) or list(layers) != sorted(set(layers)) or layers[0] < 0:
        found = f"expected {len(counts)} ascending layer numbers, found {list(layers)[:8]}"
        raise TraceError("layer numbers do not fit the counts", where="layers", found=found, mend=mend)
    if not 0 < top_k <= counts.shape[1]:
        found = f"expected 1..{counts.shape[1]}, found {top_k}"
        raise TraceError("top_k out of range", where="top_k", found=found, mend=mend)
    # An expert is named at most once per token: no count exceeds the tokens, and no sum overflows.
    if not 0 < tokens < 2**47 or counts.min() < 0 or counts.max() > tokens:
        found = f"expected 0 <= count <= tokens < 2**47, found {counts.min()}..{counts.max()} of {tokens} tokens"
        raise TraceError("impossible traffic counts", where="counts", found=found, mend=mend)
    for layer, total in zip(layers, counts.sum(axis=1), strict=True):
        if total != tokens * top_k:
            raise TraceError(
                "traffic counts do not add up",
                where=f"layer {layer}",
                found=f"expected {tokens} tokens x {top_k} = {tokens * top_k}, found {total}",
                mend=mend,
            )

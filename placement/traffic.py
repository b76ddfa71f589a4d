"""The traffic table: how many tokens the router sent to each expert of each layer. Spec: docs/plan.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ..errors import TraceError
from ..files import write_atomic

VERSION = 3
"""Of tables that tell sources apart. Those that tell only phases apart are written as version 2, others as version 1,
byte for byte as ever."""
PACK_TABLE = "calibration/traffic.safetensors"
"""Where a pack's own table lies in it."""
Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, Phase] = ("prefill", "decode")
MAX_LAYERS, MAX_EXPERTS = 4096, 65536  # ids are stored as uint16


@dataclass(frozen=True, eq=False)
class TokenLabels:
    """What is known of N tokens. phase: int [N], index into PHASES. source: int [N], index into `sources`. -1: unknown.

    sources: different names, none empty.
    """

    phase: np.ndarray
    source: np.ndarray
    sources: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class TrafficTable:
    """counts: int64 [L, E], tokens routed to each expert. layers: the model's layer numbers, ascending [L].

    tokens: rows seen by every layer. top_k: experts per token. Each row of counts sums to tokens * top_k.
    prefill, decode: int64 [L, E], what of `counts` came in these phases; None where none is known to have.
    sources: name -> int64 [L, E], what of `counts` came from there, by name; names are not empty.
    """

    counts: np.ndarray
    tokens: int
    layers: tuple[int, ...]
    top_k: int
    prefill: np.ndarray | None = None
    decode: np.ndarray | None = None
    sources: Mapping[str, np.ndarray] = field(default_factory=dict)

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

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TrafficTable)
            and (self.tokens, self.layers, self.top_k) == (other.tokens, other.layers, other.top_k)
            and np.array_equal(self.counts, other.counts)
            and all(
                mine.keys() == theirs.keys() and all(np.array_equal(mine[name], theirs[name]) for name in mine)
                for mine, theirs in ((self.phases, other.phases), (self.sources, other.sources))
            )
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
        return cls(counts, first[0], layers, first[1], prefill, decode, sources)

    def save(self, path: Path) -> None:
        """Write the table (safetensors) atomically; the same table gives the same bytes."""
        write_atomic(path, self.to_bytes())

    def to_bytes(self) -> bytes:
        """The file's bytes. One metadata key only: safetensors writes several in no fixed order."""
        version = VERSION if self.sources else 2 if self.phases else 1
        head: dict[str, Any] = {"format": "moefit.traffic", "tokens": self.tokens, "top_k": self.top_k}
        tensors = {"counts": self.counts, "layers": np.array(self.layers, dtype=np.int64), **self.phases}
        if self.sources:
            head["sources"] = list(self.sources)
            tensors["sources"] = np.stack(list(self.sources.values()))  # [S, L, E]
        return save(tensors, metadata={"moefit": json.dumps(head | {"version": version}, sort_keys=True)})

    @classmethod
    def load(cls, path: Path) -> TrafficTable:
        """Read and validate a table. TraceError names the file and what is wrong with it."""
        try:
            with safe_open(path, framework="numpy") as file:
                head = json.loads((file.metadata() or {}).get("moefit", "{}"))
                # Anything else, a model's shard say, may hold dtypes that numpy does not know.
                names = file.keys() if isinstance(head, dict) and head.get("format") == "moefit.traffic" else []
                tensors = {name: file.get_tensor(name) for name in names}
        except (OSError, SafetensorError, ValueError, TypeError) as error:
            mend = "give a table that moefit traffic has written"
            raise TraceError("not a traffic table", where=str(path), found=str(error), mend=mend) from error
        mend = "record the traffic again with this version of moefit"
        if not isinstance(head, dict) or head.get("format") != "moefit.traffic":
            raise TraceError("not a traffic table", where=f"{path}, metadata moefit.format", mend=mend)
        if type(head.get("version")) is not int or not 1 <= head["version"] <= VERSION:
            found = f"expected 1..{VERSION}, found {head.get('version')!r}"
            raise TraceError("unknown traffic version", where=f"{path}, version", found=found, mend=mend)
        shapes = {name: (str(tensor.dtype), tensor.ndim) for name, tensor in tensors.items()}
        known: list[str] = [phase for phase in PHASES if phase in tensors]
        expected = {"counts": ("int64", 2), "layers": ("int64", 1), **dict.fromkeys(known, ("int64", 2))}
        if head["version"] == VERSION:
            expected["sources"] = ("int64", 3)
        if shapes != expected or (head["version"] < VERSION and (head["version"] == 2) != bool(known)):
            found = f"expected {expected}, found {shapes}"
            raise TraceError("traffic table has the wrong tensors", where=str(path), found=found, mend=mend)
        names, by_source = head.get("sources", []), tensors.get("sources", ())
        good = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if not good or names != sorted(set(names)) or len(names) != len(by_source):
            found = f"expected {len(by_source)} different names in order, found {names!r:.80}"
            raise TraceError("the names of the sources are wrong", where=f"{path}, sources", found=found, mend=mend)
        for name in ("tokens", "top_k"):
            if type(head.get(name)) is not int:
                raise TraceError("not a whole number", where=f"{path}, {name}", mend=mend)
        try:
            layers = tuple(int(layer) for layer in tensors["layers"])
            prefill, decode = (tensors.get(phase) for phase in PHASES)
            sources = dict(zip(names, by_source, strict=True))
            return cls(tensors["counts"], head["tokens"], layers, head["top_k"], prefill, decode, sources)
        except TraceError as error:
            where = f"{path}, {error.where}"
            raise TraceError(error.what, where=where, found=error.found, mend=error.mend) from error


def merge(tables: Sequence[TrafficTable]) -> TrafficTable:
    """One table of the tokens of all `tables`, which must have the same layers, experts and top_k."""
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
    return TrafficTable(counts, tokens, first.layers, first.top_k, prefill, decode, sources)


def stack(tables: Sequence[TrafficTable]) -> TrafficTable:
    """One table of the layers of all `tables`, which saw the same tokens; layers ascend from table to table."""
    if not tables:
        raise TraceError("no traffic table to stack")
    first = tables[0]
    for number, table in enumerate(tables):
        known = [
            (part.tokens, part.top_k, part.counts.shape[1], part.phase_tokens, part.source_tokens)
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
    )


def count_layer(where: str, ids: np.ndarray, experts: int, numbers: np.ndarray | None = None) -> np.ndarray:
    """Counts [E] of one layer's ids [N, k]. Raises TraceError naming `where` and the first row that cannot be true.

    numbers: what the rows are called [N], where it is not 0, 1, ...
    """
    if numbers is None:
        numbers = np.arange(len(ids))
    if ids.dtype.kind not in "iu":
        raise TraceError("routing ids are not integers", where=where, found=f"found {ids.dtype}")
    k = ids.shape[1]
    # With k > 1 an all-zero row names expert 0 twice; with k = 1 only a whole layer of zeros is suspect.
    zeros = np.flatnonzero((ids == 0).all(axis=1))
    if zeros.size and (k > 1 or zeros.size == len(ids) >= experts > 1):
        raise TraceError(
            "all-zero routing rows",
            where=f"{where}, row {numbers[zeros[0]]}",
            found=f"{zeros.size} of {len(ids)} rows",
            mend="the capture hook did not run for them (fused kernel, cached prefix): record again",
        )
    outside = np.argwhere((ids < 0) | (ids >= experts))
    if outside.size:
        row, column = (int(value) for value in outside[0])
        raise TraceError(
            "routing id out of range",
            where=f"{where}, row {numbers[row]}",
            found=f"expected 0 <= id < {experts}, found {ids[row, column]}",
        )
    ranked = np.sort(ids, axis=1)
    twice = np.flatnonzero((ranked[:, 1:] == ranked[:, :-1]).any(axis=1))
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

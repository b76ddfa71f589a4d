"""The traffic table's file: safetensors, with recorded routing in it where there is some. Spec: docs/traffic.md."""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ..errors import TraceError
from ..files import write_atomic
from .windows import Windows

if TYPE_CHECKING:
    from .recorded import Recorded

VERSION = 4
"""Of tables with counts of windows or recorded routing. Those that tell sources apart are written as version 3, those
that tell only phases apart as version 2, others as version 1, byte for byte as ever."""
FORMAT = "moefit.traffic"
WINDOWS, OF_SOURCES = ("window_sizes", "window_steps", "window_hits", "window_tokens"), "source_"
RECORDED = {"starts": ("I64", 1), "topk_ids": ("U16", 3), "source": ("I16", 1), "phase": ("I8", 1)}
"""Tensors of the recorded routing, in the order in which they lie behind the others: dtype, dimensions."""
_CODES = {"I64": "<i8", "U16": "<u2", "I16": "<i2", "I8": "|i1"}
_BLOCK = 1 << 20  # rows written at once
_MEND = "record the traffic again with this version of moefit"

Head = dict[str, Any]
Tensors = dict[str, np.ndarray]


def table_bytes(head: Head, tensors: Tensors) -> bytes:
    """A file without recorded routing. One metadata key only: safetensors writes several in no fixed order."""
    return save(tensors, metadata={"moefit": json.dumps(head, sort_keys=True)})


def write_recorded(path: Path, head: Head, tensors: Tensors, recorded: Recorded) -> None:
    """A file with recorded routing, atomically, a block of rows at a time. tensors: int64 all."""
    shapes = {
        "starts": recorded.starts.shape,
        "topk_ids": (len(recorded.ids), recorded.tokens, recorded.top_k),
        "source": recorded.source.shape,
        "phase": recorded.phase.shape,
    }
    small = tensors | {"starts": recorded.starts, "source": recorded.source, "phase": recorded.phase}
    kinds = {name: ("I64", tensors[name].shape) for name in sorted(tensors)}
    kinds |= {name: (code, shapes[name]) for name, (code, _) in RECORDED.items()}
    header: dict[str, Any] = {"__metadata__": {"moefit": json.dumps(head, sort_keys=True)}}
    end = 0
    for name, (code, shape) in kinds.items():
        start, end = end, end + math.prod(shape) * np.dtype(_CODES[code]).itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def write(file: BinaryIO) -> None:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, (code, _) in kinds.items():
            for array in recorded.ids if name == "topk_ids" else [small[name]]:
                for low in range(0, len(array), _BLOCK):
                    file.write(np.ascontiguousarray(array[low : low + _BLOCK], _CODES[code]).data)

    write_atomic(path, write)


def read_table(path: Path) -> tuple[Head, Tensors]:
    """Head and tensors but those of the recorded routing, with the right names, dtypes and numbers of dimensions.

    TraceError for a file that is no traffic table, cut short, of another version or with other tensors.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            head = json.loads((file.metadata() or {}).get("moefit", "{}"))
            # Anything else, a model's shard say, may hold dtypes that numpy does not know.
            names = list(file.keys()) if isinstance(head, dict) and head.get("format") == FORMAT else []
            kinds = {name: (part.get_dtype(), len(part.get_shape())) for name, part in _slices(file, names)}
            tensors = {name: file.get_tensor(name) for name in names if name not in RECORDED}
    except (OSError, SafetensorError, ValueError, TypeError, RecursionError) as error:
        mend = "give a table that moefit traffic has written"
        raise TraceError("not a traffic table", where=str(path), found=str(error), mend=mend) from error
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise TraceError("not a traffic table", where=f"{path}, metadata moefit.format", mend=_MEND)
    version = head.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        found = f"expected 1..{VERSION}, found {version!r}"
        raise TraceError("unknown traffic version", where=f"{path}, version", found=found, mend=_MEND)
    expected = _expected(version, kinds)
    if kinds != expected:
        found = f"expected {expected}, found {kinds}"
        raise TraceError("traffic table has the wrong tensors", where=str(path), found=found, mend=_MEND)
    _check_names(head.get("sources", []), len(tensors.get("sources", ())), f"{path}, sources", ordered=True)
    for name in ("tokens", "top_k"):
        if type(head.get(name)) is not int:
            raise TraceError("not a whole number", where=f"{path}, {name}", mend=_MEND)
    return head, tensors


def _slices(file: Any, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    return ((name, file.get_slice(name)) for name in names)


def _expected(version: int, kinds: Mapping[str, tuple[str, int]]) -> dict[str, tuple[str, int]]:
    """What a table of this version must hold, given what it does hold of what is optional."""
    phases = [phase for phase in ("prefill", "decode") if phase in kinds and version > 1]
    if version == 2 and not phases:
        phases = ["decode"]
    expected = {"counts": ("I64", 2), "layers": ("I64", 1), **dict.fromkeys(phases, ("I64", 2))}
    if version == 3 or (version == 4 and "sources" in kinds):
        expected["sources"] = ("I64", 3)
    if version < 4:
        return expected
    recorded, windows = not kinds.keys().isdisjoint(RECORDED), not kinds.keys().isdisjoint(WINDOWS)
    if windows or not recorded:
        expected |= dict(zip(WINDOWS, (("I64", 1), ("I64", 1), ("I64", 3), ("I64", 3)), strict=True))
    if any(name.startswith(OF_SOURCES) for name in kinds):
        expected |= {OF_SOURCES + name: ("I64", size) for name, size in zip(WINDOWS[1:], (2, 4, 4), strict=True)}
    return expected | (RECORDED if recorded else {})


def _check_names(names: Any, number: int, where: str, ordered: bool) -> None:
    good = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not good or len(set(names)) != number or len(names) != number or (ordered and names != sorted(names)):
        found = f"expected {number} different names{' in order' if ordered else ''}, found {names!r:.80}"
        raise TraceError("the names of the sources are wrong", where=where, found=found, mend=_MEND)


def pack_windows(
    windows: Mapping[int, Windows], of_sources: Mapping[str, Mapping[int, Windows]], sources: Sequence[str]
) -> Tensors:
    """Tensors of counts of windows: [W, ...] by size, ascending; of the sources [S, W, ...], 0 where one has none."""
    if not windows:
        return {}
    sizes = sorted(windows)
    found = [windows[size] for size in sizes]
    tensors = {
        "window_sizes": np.array(sizes, np.int64),
        "window_steps": np.array([one.steps for one in found], np.int64),
        "window_hits": np.stack([one.hits for one in found]),
        "window_tokens": np.stack([one.tokens for one in found]),
    }
    if of_sources:
        none = Windows(0, np.zeros_like(found[0].hits), np.zeros_like(found[0].hits))
        table = [[of_sources.get(name, {}).get(size, none) for size in sizes] for name in sources]
        tensors["source_window_steps"] = np.array([[one.steps for one in row] for row in table], np.int64)
        tensors["source_window_hits"] = np.stack([np.stack([one.hits for one in row]) for row in table])
        tensors["source_window_tokens"] = np.stack([np.stack([one.tokens for one in row]) for row in table])
    return tensors


def unpack_windows(
    tensors: Tensors, sources: Sequence[str], where: str
) -> tuple[dict[int, Windows], dict[str, dict[int, Windows]]]:
    """The reverse of `pack_windows`. TraceError where the tensors do not fit each other."""
    if "window_sizes" not in tensors:
        return {}, {}
    sizes = tensors["window_sizes"].tolist()
    wanted: dict[str, tuple[int, ...]] = dict.fromkeys(WINDOWS, (len(sizes),))
    lengths = {name: tensors[name].shape[:1] for name in WINDOWS}
    if OF_SOURCES + WINDOWS[1] in tensors:
        names = [OF_SOURCES + name for name in WINDOWS[1:]]
        lengths |= {name: tensors[name].shape[:2] for name in names}
        wanted |= dict.fromkeys(names, (len(sources), len(sizes)))
    if lengths != wanted or not sizes or sizes != sorted(set(sizes)):
        found = f"expected sizes that ascend and {wanted}, found sizes {sizes[:9]} and {lengths}"
        raise TraceError("counts of windows have the wrong shape", where=where, found=found, mend=_MEND)

    def of(steps: np.ndarray, hits: np.ndarray, tokens: np.ndarray) -> dict[int, Windows]:
        rows = zip(sizes, steps.tolist(), hits, tokens, strict=True)
        return {size: Windows(count, *both) for size, count, *both in rows if count}

    whole = of(*(tensors[name] for name in WINDOWS[1:]))
    if len(whole) != len(sizes):
        raise TraceError("impossible windows", where=f"{where}, window_steps", found="found none of a size", mend=_MEND)
    by_source: dict[str, dict[int, Windows]] = {}
    if OF_SOURCES + WINDOWS[1] in tensors:
        parts = zip(*(tensors[OF_SOURCES + name] for name in WINDOWS[1:]), strict=True)
        by_source = {name: of(*part) for name, part in zip(sources, parts, strict=True)}
    return whole, {name: found for name, found in by_source.items() if found}


def map_recorded(path: Path) -> tuple[Head, dict[str, np.ndarray], list[int], int] | None:
    """(head, tensors of the recorded routing memory-mapped, layer numbers, experts); None where the file has none.

    TraceError as `read_table`, and where the names of its sources are wrong.
    """
    head, tensors = read_table(path)
    found = map_tensors(path, RECORDED)
    if not found:
        return None
    names = head.get("recorded_sources")
    _check_names(names, len(names) if isinstance(names, list) else 0, f"{path}, recorded_sources", ordered=False)
    return head, found, tensors["layers"].tolist(), tensors["counts"].shape[1]


def map_tensors(path: Path, names: Container[str] | None = None) -> dict[str, np.ndarray]:
    """Tensors of integers of a safetensors file, memory-mapped read-only; names: only these.

    TraceError for a file that is no safetensors file, or cut short.
    """
    try:
        with safe_open(path, framework="numpy"):  # holds the header against the file's length
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise TraceError("a file cannot be read", where=str(path), found=str(error), mend="copy it again") from error
    found: dict[str, np.ndarray] = {}
    for name, entry in header.items():
        if (names is None or name in names) and entry.get("dtype") in _CODES:
            shape, offset = tuple(entry["shape"]), 8 + length + entry["data_offsets"][0]
            kind = np.dtype(_CODES[entry["dtype"]])
            found[name] = np.memmap(path, kind, "r", offset, shape) if math.prod(shape) else np.zeros(shape, kind)
    return found

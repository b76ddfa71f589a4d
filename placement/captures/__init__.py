"""Routing that serving engines have captured, read as traffic: which formats there are, and which one a file is in.

Each format's module yields pieces (top-k ids of tokens, or counts); `tally` checks and adds them.
docs/captures.md is the page. Nothing here needs torch but the reading of .pt files.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...errors import TraceError
from ..recorded import load_recorded
from ..traffic import PACK_TABLE, PHASES, TrafficTable
from . import exl3, imatrix, ktransformers, responses, sglang, vllm
from .recording import Recording, Steps
from .shape import OTHER_MODEL, MoeShape
from .tally import Counted, Counts, Labelled, Left, Piece, Tally, TopK
from .torchfile import load_torch

__all__ = [
    "NAMES",
    "CaptureFile",
    "Counts",
    "Left",
    "MoeShape",
    "Recording",
    "TopK",
    "detect",
    "find_files",
    "is_pack",
    "read_capture",
    "read_captures",
    "shape_of",
]

Read = Callable[[MoeShape], Iterator[Piece]]
TORCH = {"sglang-recorder": sglang, "vllm-exl3": exl3, "ktransformers": ktransformers}
"""Formats of .pt files, in the order in which they are tried."""
NAMES = ("vllm", "sglang", *TORCH, "imatrix", "moefit")
SAME_TOKENS = 100
"""Two captures of at least so many tokens with equal counts everywhere are one traffic given twice."""


class Detected(NamedTuple):
    """The format of a file, why, and its pieces for a model."""

    format: str
    why: str
    read: Read


@dataclass(frozen=True)
class CaptureFile:
    """What a file gave. left: what was left out, and how many of it. phase_tokens: of the phases it tells apart."""

    path: Path
    format: str
    why: str
    tokens: int
    phase_tokens: dict[str, int]
    left: dict[str, int]


def find_files(given: Sequence[Path], out: Path | None = None) -> list[Path]:
    """The files as given, and those below directories in order of name, hidden ones not; of a pack, its own table.

    Raises TraceError where there is none, where one comes twice, and where `out` would replace one.
    """
    found: list[Path] = []
    for path in given:
        if is_pack(path):
            found.append(path / PACK_TABLE)
            continue
        below = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        files = [p for p in below if p == path or not any(part.startswith(".") for part in p.relative_to(path).parts)]
        if not files:
            raise TraceError("a directory holds no capture", where=str(path), mend="name the files")
        found += files
    real = [path.resolve() for path in found]
    if twice := next((path for number, path in enumerate(real) if path in real[:number]), None):
        raise TraceError("a capture is given twice", where=str(twice), mend="give it once")
    if out is not None and out.resolve() in real:
        raise TraceError("the result would replace a capture", where=str(out), mend="choose another --out")
    return found


def is_pack(path: Path) -> bool:
    """Whether a directory is a pack, by the traffic table that it holds."""
    return (path / PACK_TABLE).is_file()


def shape_of(given: Sequence[Path]) -> MoeShape:
    """The model of a pack or of a traffic table among the files and directories. Raises TraceError for neither."""
    if pack := next((path for path in given if is_pack(path)), None):
        return MoeShape.read(pack)
    for path in given:
        if (path / "moefit.json").is_file():
            mend = f"restore {PACK_TABLE} from a copy of the pack, or build it again"
            raise TraceError("this pack has lost its traffic table", where=str(path), mend=mend)
        if (path / "identity.json").is_file():
            mend = "let the build finish; moefit coverage shows the layers that are done"
            raise TraceError("this pack is not finished, and has no traffic table yet", where=str(path), mend=mend)
        if path.is_file() and detect(path).format == "moefit":
            table = TrafficTable.load(path)
            return MoeShape(table.layers[-1] + 1, table.layers, table.counts.shape[1], table.top_k)
    mend = "give --model: a checkpoint, a pack, or its config.json"
    raise TraceError("a capture does not say which model it is of", where=str(given[0]), mend=mend)


def read_capture(path: Path, model: MoeShape, form: str | None = None) -> TrafficTable:
    """The traffic of one capture. form: one of NAMES, or None to look. Raises TraceError for what cannot be true."""
    return read_captures([path], model, form)[0]


def read_captures(
    paths: Sequence[Path], model: MoeShape, form: str | None = None, recording: Recording | None = None
) -> tuple[TrafficTable, list[CaptureFile]]:
    """The sum of captures of one model, with windows, and with what each file gave.

    recording: takes the routing of conversations, a conversation for each answer or array, where a format has it.
    Files of ranks that count their own experts only may add up to whole tokens together. Raises TraceError for a
    capture that is damaged, of another model or cannot be true, and for one that is given twice.
    """
    if not paths:
        raise TraceError("there is no capture to read", mend="give at least one file")
    whole, steps, tallies, files = Tally(model), Steps(model), list[Tally](), list[CaptureFile]()
    for path in paths:
        found = detect(path, form)
        tally = Tally(model, steps, recording, str(path))
        for piece in found.read(model):
            tally.add(piece)
        if not tally.total.any():
            tally.table(str(path))  # raises, with the reason
        tokens = int(tally.total.sum()) // (len(model.layers) * model.top_k)
        twin = next((i for i, other in enumerate(tallies) if np.array_equal(other.total, tally.total)), None)
        if twin is not None and tokens >= SAME_TOKENS:
            found_twin = f"the same counts everywhere as {files[twin].path}"
            mend = "give it once; where every rank records all tokens (tensor parallel), give one rank's file"
            raise TraceError("a capture is given twice", where=str(path), found=found_twin, mend=mend)
        phases: dict[str, int] = {
            phase: int(counts.sum()) // (len(model.layers) * model.top_k)
            for phase, counts in tally.phases.items()
            if counts.any()
        }
        files.append(CaptureFile(path, found.format, found.why, tokens, phases, dict(sorted(tally.left.items()))))
        tallies.append(tally)
        whole.merge(tally)
    odd = None if whole.is_even else next((i for i, tally in enumerate(tallies) if not tally.is_even), None)
    table = (whole if odd is None else tallies[odd]).table(str(paths[odd or 0]))
    windows, of_sources = steps.result()
    return replace(table, windows=windows, source_windows=of_sources), files


def detect(path: Path, form: str | None = None) -> Detected:
    """The format of a file by its content. form: its name instead. Raises TraceError for an unknown one."""
    if form is not None and form not in NAMES:
        found = f"expected one of {', '.join(NAMES)}, found {form}"
        raise TraceError("there is no such capture format", found=found, mend="choose one")
    if not path.is_file():
        raise TraceError("there is no such capture", where=str(path), mend="give a file; of a directory, its files")
    with path.open("rb") as file:
        head = file.read(64)
    if not head:
        raise TraceError("a capture is empty", where=str(path), mend="stop the recording before copying the file")
    detected = _detect(path, head, form)
    if form is not None and detected.format != form:
        found = f"expected {form}, found {detected.format} ({detected.why})"
        raise TraceError("a capture is in another format", where=str(path), found=found, mend="leave out --format")
    return detected


def _detect(path: Path, head: bytes, form: str | None) -> Detected:
    if head.startswith(imatrix.MAGIC):
        return Detected("imatrix", "GGUF by its first bytes", partial(imatrix.pieces, path))
    if head.startswith(vllm.NPY) or _is_npz(path):
        return Detected("vllm", "NumPy arrays by their first bytes", lambda _: vllm.array_files(path))
    if head[8:9] == b"{" and head[:8].endswith(b"\0"):
        return Detected("moefit", "safetensors by its first bytes", partial(_of_table, path))
    if b"blk." in head[8:]:
        mend = "write it as GGUF: llama-imatrix --output-format gguf, also from this file with --in-file"
        raise TraceError("an importance matrix in the old format has no counts per expert", where=str(path), mend=mend)
    if head.startswith((b"PK\x03\x04", b"\x80")) or path.suffix in (".pt", ".pth"):
        value: Any = load_torch(path)
        names = [form] if form in TORCH else list(TORCH)
        for name in names:
            if why := TORCH[name].looks_like(value) or ("as told" if form else ""):
                return Detected(name, why, partial(TORCH[name].pieces, value, str(path)))
        found = f"found {type(value).__name__}" + (f" with {list(value)[:4]}" if isinstance(value, dict) else "")
        raise TraceError("a .pt file of no known capture", where=str(path), found=found, mend=_choose())
    if head[:2] == b"\x1f\x8b" or head.lstrip()[:1] in (b"{", b"[", b'"') or vllm.NPY_BASE64.encode() in head:
        engine = responses.first_engine(path)
        if not engine:
            mend = "switch routing on at the server and in the requests; docs/captures.md says how"
            raise TraceError("no answer with routing in a file", where=str(path), mend=mend)
        return Detected(engine, f"answers of {engine}", lambda shape: responses.pieces(path, engine, shape))
    raise TraceError("the format of a capture is not recognised", where=str(path), mend=_choose())


def _choose() -> str:
    return f"give a capture of one of the formats {', '.join(NAMES)}"


def _is_npz(path: Path) -> bool:
    """A zip of arrays; torch's .pt files are zips too."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except vllm.BAD_ZIP:
        return False
    return bool(names) and all(name.endswith(".npy") for name in names)


def _of_table(path: Path, shape: MoeShape) -> Iterator[Piece]:
    """A traffic table of moefit's own, as packs hold it."""
    table = TrafficTable.load(path)
    if (table.layers, table.counts.shape[1], table.top_k) != (shape.layers, shape.experts, shape.top_k):
        raise TraceError(
            "a traffic table of another model",
            where=str(path),
            found=f"expected {len(shape.layers)} layers x {shape.experts} experts, top-{shape.top_k}, found "
            f"{len(table.layers)} x {table.counts.shape[1]}, top-{table.top_k}",
            mend=OTHER_MODEL,
        )
    yield from (Labelled(name, counts) for name, counts in table.sources.items())
    rest = table.counts.copy()
    for phase in PHASES:
        if (counts := table.phases.get(phase)) is not None:
            rest -= counts
            yield Counts(f"{path}, {phase}", counts, phase)
    yield Counts(str(path), rest)
    yield Counted(table.windows, table.source_windows, table.decode is not None, partial(load_recorded, path))

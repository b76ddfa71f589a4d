"""vLLM's `routed_experts` (`--enable-return-routed-experts`): the arrays, in every form in which they travel.

Integers [tokens, layers, top_k]: nested lists (0.21), base64 of .npy (0.22 and later), .npy and .npz files as saved
from the offline API; and what training frameworks make of them: NeMo-RL's `nrlre1:<dtype>:<T>x<L>x<K>:<base64>`,
objects with `data`, `dtype`, `shape`, `start` (Dynamo) and `encoding` (prime-rl), base64 or base85.
"""

from __future__ import annotations

import base64
import io
import math
import re
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import TraceError
from ..windows import PIECE
from .tally import Piece, TopK

NPY = b"\x93NUMPY"
NPY_BASE64 = "k05VTVBZ"
"""How every base64 of a .npy begins."""
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64")
_NEMO = re.compile(r"nrlre1:(\w+):(\d+)x(\d+)x(\d+):")
_AGAIN = "log the answer again, whole"
BAD_HEADER = (ValueError, SyntaxError, tokenize.TokenError, EOFError, OverflowError)
"""How NumPy's reader of headers, which are Python literals, ends on damaged ones."""
BAD_ZIP = (zipfile.BadZipFile, zlib.error, OSError, ValueError, EOFError, NotImplementedError, RuntimeError)


def decode(value: Any, where: str) -> np.ndarray:
    """One `routed_experts`, as it stands. Raises TraceError for what is none of the forms, or damaged."""
    if isinstance(value, str) and (match := _NEMO.match(value)):
        content = from_base64(value[match.end() :], where)
        return _raw(content, match[1], [int(size) for size in match.groups()[1:]], where)
    if isinstance(value, str):
        return npy(from_base64(value, where), where)
    if isinstance(value, dict) and isinstance(value.get("data"), str):
        encoded = from_base85 if "85" in str(value.get("encoding")) else from_base64
        return _raw(encoded(value["data"], where), value.get("dtype"), value.get("shape"), where)
    if isinstance(value, list):
        return from_lists(value, where)
    found = f"found {type(value).__name__}"
    raise TraceError("routed_experts in an unknown form", where=where, found=found, mend=_AGAIN)


def from_lists(value: list[Any], where: str) -> np.ndarray:
    try:
        return np.array(value)
    except (ValueError, OverflowError) as error:
        found = "expected [tokens][layers][top_k], found lists of different lengths"
        raise TraceError("nested lists that are no array", where=where, found=found, mend=_AGAIN) from error


def from_base64(text: str, where: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError as error:
        raise TraceError("base64 that is cut or damaged", where=where, found=str(error), mend=_AGAIN) from error


def from_base85(text: str, where: str) -> bytes:
    try:
        return base64.b85decode(text)
    except ValueError as error:
        raise TraceError("base85 that is cut or damaged", where=where, found=str(error), mend=_AGAIN) from error


def npy(data: bytes, where: str) -> np.ndarray:
    """The array of .npy bytes; no pickle, and no more memory than the bytes given."""
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except BAD_HEADER as error:
        found = str(error).splitlines()[0]
        raise TraceError("not a .npy array", where=where, found=found, mend=_AGAIN) from error
    needed, there = math.prod(shape) * dtype.itemsize, len(data) - file.tell()
    if dtype.hasobject or needed != there or min(shape, default=0) < 0:
        found = f"expected {needed:,} B of {dtype} {list(shape)}, found {there:,} B"
        raise TraceError("a .npy array that is cut or damaged", where=where, found=found, mend=_AGAIN)
    return np.frombuffer(data, dtype, offset=file.tell()).reshape(shape, order="F" if fortran else "C")


def array_files(path: Path) -> Iterator[Piece]:
    """The arrays of a .npy or .npz file."""
    if not zipfile.is_zipfile(path):
        try:
            yield from _sequence(str(path), np.load(path, mmap_mode="r", allow_pickle=False), 0)
        except BAD_HEADER as error:
            found, mend = str(error).splitlines()[0], "copy it again; arrays of objects are not opened"
            raise TraceError("a .npy array that is cut or damaged", where=str(path), found=found, mend=mend) from error
        return
    try:
        with zipfile.ZipFile(path) as archive:
            for number, name in enumerate(sorted(archive.namelist())):
                yield from _sequence(f"{path}, {name}", npy(archive.read(name), f"{path}, {name}"), number)
    except BAD_ZIP as error:
        raise TraceError(
            "a .npz file cannot be read", where=str(path), found=str(error), mend="copy it again"
        ) from error


def _sequence(where: str, ids: np.ndarray, number: int) -> Iterator[TopK]:
    """An array as the tokens of one conversation, some at a time: it may be larger than memory."""
    if ids.ndim != 3 or len(ids) <= PIECE:
        yield TopK(where, ids, conversation=number)
        return
    for low in range(0, len(ids), PIECE):
        yield TopK(where, ids[low : low + PIECE], first=low, conversation=number)


def _raw(content: bytes, dtype: Any, shape: Any, where: str) -> np.ndarray:
    """Little-endian integers in C order."""
    if dtype not in INTEGERS or not isinstance(shape, list) or not all(type(s) is int and s >= 0 for s in shape):
        found = f"expected one of {', '.join(INTEGERS)} and a shape, found {dtype!r} {shape!r}"
        raise TraceError("routed_experts in an unknown form", where=where, found=found, mend=_AGAIN)
    kind = np.dtype(dtype).newbyteorder("<")
    if len(content) != math.prod(shape) * kind.itemsize:
        found = f"expected {math.prod(shape) * kind.itemsize:,} B of {dtype} {shape}, found {len(content):,} B"
        raise TraceError("routed_experts that are cut or damaged", where=where, found=found, mend=_AGAIN)
    return np.frombuffer(content, kind).reshape(shape)

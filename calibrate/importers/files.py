"""Files as records, one at a time: JSON lines, JSON arrays, single JSON objects, plain or compressed."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..conversation import ODD, Bad, BadRecord, Conversation

MAX_RECORD = 64 << 20
"""Bytes of one line, array element or JSON file; a longer one is a bad record. Bounds the reader's memory."""
HEAD = 64 << 10
"""Bytes of a file that format detection sees as text."""
CHUNK, PIECE = 1 << 20, 1 << 16
"""Bytes buffered, and asked of a decompressor at once: what comes before damage within one piece is lost with it."""


@dataclass(frozen=True)
class Input:
    """One file (or directory of a data set) to import. name: what reports and documents call it."""

    path: Path
    name: str

    @property
    def stem(self) -> str:
        """The file's name without directories, compression and type."""
        return Path(self.name).name.split(".")[0] or self.name


class Stream(io.BufferedReader):
    """The bytes of a file. damage: "" or why they end before the file's end, known once they have ended."""

    raw: _Source

    @property
    def damage(self) -> str:
        return self.raw.damage


@contextmanager
def opened(path: Path, tell: Callable[[int], None] | None = None) -> Iterator[Stream]:
    """The file's bytes, decompressed if they are gzip or zstd (by content, not by name).

    tell: is called with the number of bytes taken from disk, for a progress bar.
    """
    with path.open("rb", buffering=0) as file:
        magic = file.read(4)
        file.seek(0)
        raw: Any = _Watched(file, tell)
        if magic[:2] == b"\x1f\x8b":
            with gzip.open(raw) as packed:
                yield Stream(_Source(packed.read1), CHUNK)
        elif magic == b"\x28\xb5\x2f\xfd":
            import pyarrow

            with pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd") as packed:
                yield Stream(_Source(packed.read), CHUNK)
        else:
            yield Stream(_Source(raw.read), CHUNK)


class _Source(io.RawIOBase):
    """What a decompressor gives; where it finds damage, the stream ends."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read, self.damage = read, ""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            content = b"" if self.damage else self._read(min(len(buffer), PIECE))
        except (OSError, EOFError, zlib.error) as error:
            self.damage, content = str(error), b""
        buffer[: len(content)] = content
        return len(content)


class _Watched(io.RawIOBase):
    """A file that tells how many bytes were read from it."""

    def __init__(self, file: io.RawIOBase, tell: Callable[[int], None] | None) -> None:
        self._file, self._tell = file, tell

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer) or 0
        if self._tell:
            self._tell(count)
        return count


def lines(
    file: Input, tell: Callable[[int], None] | None = None, blank: bool = False
) -> Iterator[tuple[str, bytes | Bad]]:
    """("NAME:LINE", line) of every line, of blank ones only if told. A damaged stream ends with a Bad."""
    with opened(file.path, tell) as stream:
        number = 0
        while True:
            number += 1
            where = f"{file.name}:{number}"
            line = stream.readline(MAX_RECORD + 1)
            if stream.damage:  # the last line is cut too
                yield where, Bad(where, f"the rest of the file cannot be decompressed ({stream.damage})")
                return
            if not line:
                return
            if len(line) > MAX_RECORD:
                yield where, Bad(where, f"a line of more than {MAX_RECORD >> 20} MiB")
                while line and not line.endswith(b"\n"):
                    line = stream.readline(CHUNK)
            elif blank or line.strip():
                yield where, line


def layout(file: Input) -> str:
    """How a JSON file holds its records: "lines", "array", "one" (the whole file), or "" if it is no JSON."""
    first: list[bytes] = []
    for _, line in lines(file):
        if isinstance(line, Bad):
            break
        first.append(line.removeprefix(codecs.BOM_UTF8).strip())
        if len(first) == 2:
            break
    if not first:
        with opened(file.path) as stream:  # a first line beyond the limit: only an array may be that long
            return "array" if stream.read(CHUNK).lstrip()[:1] == b"[" else ""
    if first[0][:1] not in (b"[", b"{"):
        return ""
    if _parses(first[0]) and (len(first) == 2 or first[0][:1] == b"{"):
        return "lines"
    if first[0][:1] == b"[":
        return "one" if _is_message(next((value for _, value in _elements(file, None)), None)) else "array"
    if file.path.name.removesuffix(".gz").removesuffix(".zst").endswith((".jsonl", ".ndjson")):
        return "lines"
    return "lines" if len(first) == 2 and first[1][:1] == b"{" and _parses(first[1]) else "one"


def records(file: Input, tell: Callable[[int], None] | None = None) -> Iterator[tuple[str, Any]]:
    """(where, value) of every JSON record of a file; a Bad in place of the value where it is none."""
    how = layout(file)
    if how == "array":
        yield from _elements(file, tell)
    elif how == "one":
        yield from _whole(file, tell)
    else:
        for where, line in lines(file, tell):
            yield where, line if isinstance(line, Bad) else _parse(line, where)


def convert(
    found: Iterable[tuple[str, Any]], one: Callable[[Any, str], Iterable[Conversation]]
) -> Iterator[Conversation | Bad]:
    """Every record through `one(record, where)`; what raises BadRecord becomes a Bad."""
    for where, value in found:
        if isinstance(value, Bad):
            yield value
            continue
        try:
            yield from list(one(value, where))
        except BadRecord as error:
            yield Bad(where, str(error))
        except ODD as error:
            yield Bad(where, f"another form than its format has ({type(error).__name__}: {error})")


def _parse(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        return Bad(where, f"not JSON ({error})")


def _parses(line: bytes) -> bool:
    return not isinstance(_parse(line, ""), Bad)


def _is_message(value: Any) -> bool:
    """An element of a bare list of messages or items, rather than a record of its own."""
    return isinstance(value, dict) and ("role" in value or value.get("type") in ("message", "function_call"))


def _whole(file: Input, tell: Callable[[int], None] | None) -> Iterator[tuple[str, Any]]:
    with opened(file.path, tell) as stream:
        content = stream.read(MAX_RECORD + 1)
    if stream.damage:
        yield file.name, Bad(file.name, f"the file cannot be decompressed ({stream.damage})")
    elif len(content) > MAX_RECORD:
        yield file.name, Bad(file.name, f"a JSON object of more than {MAX_RECORD >> 20} MiB")
    else:
        yield file.name, _parse(content, file.name)


def _elements(file: Input, tell: Callable[[int], None] | None) -> Iterator[tuple[str, Any]]:
    """The elements of a JSON array, with the line on which each begins. Holds one element (and at most as much again).

    After a syntax error nothing more can be found, so the rest of the file is one Bad.
    """
    decode = json.JSONDecoder().raw_decode
    with opened(file.path, tell) as stream:
        text, position, line, ended = "", 0, 1, False
        utf8 = codecs.getincrementaldecoder("utf-8-sig")()
        opening = True
        while True:
            while position < len(text) and (text[position] in " \t\r\n," or (opening and text[position] == "[")):
                line += text[position] == "\n"
                opening &= text[position] != "["
                position += 1
            if position < len(text) and text[position] == "]":
                return
            where, problem = f"{file.name}:{line}", "the array is cut off"
            if position < len(text):
                try:
                    value, stop = decode(text, position)
                    yield where, value
                    line += text.count("\n", position, stop)
                    position = stop
                    continue
                except ValueError as error:  # unfinished, as far as one can tell
                    problem = str(error)
                except RecursionError as error:
                    yield where, Bad(where, f"not JSON ({error}); the rest of the file was not read")
                    return
            if ended or len(text) - position > MAX_RECORD:
                yield where, Bad(where, f"not JSON ({problem}); the rest of the file was not read")
                return
            text, position = text[position:], 0
            try:
                content = stream.read(max(CHUNK, len(text)))
                text += utf8.decode(content, final=not content)
            except UnicodeDecodeError as error:
                yield where, Bad(where, f"the rest of the file cannot be read ({error})")
                return
            if stream.damage and not content:
                yield where, Bad(where, f"the rest of the file cannot be decompressed ({stream.damage})")
                return
            ended = not content

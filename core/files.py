"""Files that are either whole or absent: temporary name, fsync, rename, fsync of the directory."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO


def fsync_directory(path: Path) -> None:
    """Make the directory's entries (creations, renames) durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, content: bytes | Callable[[BinaryIO], None]) -> None:
    """Write `path` so that a reader, at any moment and after any crash, sees the old file or the new one.

    content: the bytes, or a function that writes them to the open file.
    The temporary name ends in `.tmp`; a leftover from a killed run is overwritten.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.filename is None:  # a write that fails (a full disk) does not say where
            error.filename = str(path)
        temporary.unlink(missing_ok=True)
        raise
    temporary.replace(path)
    fsync_directory(path.parent)


def json_bytes(value: Any) -> bytes:
    """Canonical JSON used for every file moefit writes: two-space indent, sorted keys, final newline.

    NaN and infinity are refused (ValueError): no reader but Python's own would take them.
    """
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


def write_json(path: Path, value: Any) -> None:
    """`write_atomic` of `json_bytes(value)`."""
    write_atomic(path, json_bytes(value))


def sha256_bytes(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def sha256_file(path: Path, block: int = 1 << 22) -> str:
    """Hex sha256 of a file, read in blocks of `block` bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(block):
            digest.update(chunk)
    return digest.hexdigest()

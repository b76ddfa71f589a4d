"""JSON that others wrote, read field by field, so that every refusal names the file and the field."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import PlanError
from .machine import LARGEST

SHOWN = 80  # characters of what was found
DIGEST = "[0-9a-f]{64}"


@dataclass(frozen=True)
class Kind:
    """What a file is. name: in messages. mend: what to do about one that is refused. most: bytes."""

    name: str
    format: str
    version: int
    most: int
    mend: str


def read_bytes(path: Path, kind: Kind) -> bytes:
    """A file's bytes. PlanError: it cannot be read, or is too large."""
    try:
        with path.open("rb") as file:
            content = file.read(kind.most + 1)
    except OSError as error:
        raise PlanError(f"{kind.name} cannot be read", where=str(path), found=str(error.strerror)) from error
    _check_size(content, str(path), kind)
    return content


def parse(content: bytes, where: str, kind: Kind, *keys: str) -> dict[str, Field]:
    """The fields of a file whose top level has `format`, `version` and exactly the other `keys`."""
    _check_size(content, where, kind)
    try:
        value = json.loads(content.decode(), object_pairs_hook=_no_duplicates, parse_constant=_no_constants)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{kind.name} is not JSON", where=where, found=shortened(str(error)), mend=kind.mend) from error
    root = Field(value, kind, where, "")
    if not isinstance(value, dict) or "format" not in value or "version" not in value:
        raise root.wrong("an object with format and version")
    root.child("format").exactly(kind.format)
    version = root.child("version")  # before the other keys: another version may have others
    if type(version.value) is int and version.value > kind.version:
        mend = "read it with the newer moefit that wrote it"
        found = f"expected {kind.version}, found {version.shown}"
        raise PlanError(f"{kind.name} of a later version", where=version.where, found=found, mend=mend)
    version.exactly(kind.version)
    return root.object("format", "version", *keys)


@dataclass(frozen=True)
class Field:
    """A value of JSON, the file it is from, and its path there."""

    value: Any
    kind: Kind
    file: str
    path: str

    @property
    def where(self) -> str:
        return f"{self.file}, {self.path or 'top level'}"

    @property
    def shown(self) -> str:
        """The value in few characters, however long or deep it is."""
        if isinstance(self.value, list):
            return f"a list of {len(self.value)}"
        if isinstance(self.value, dict):
            return f"an object of {len(self.value)}"
        return shortened(json.dumps(self.value[: 2 * SHOWN] if isinstance(self.value, str) else self.value))

    def wrong(self, expected: str, found: str = "") -> PlanError:
        found = f"expected {expected}, found {found or self.shown}"
        return PlanError(f"{self.kind.name} refused", where=self.where, found=found, mend=self.kind.mend)

    def child(self, key: str | int) -> Field:
        if isinstance(key, int):
            path = f"{self.path}[{key}]"
        else:
            path = f"{self.path}.{shortened(key if key.isprintable() else ascii(key))}".lstrip(".")
        return Field(self.value[key], self.kind, self.file, path)

    def object(self, *keys: str) -> dict[str, Field]:
        """An object with exactly these keys."""
        if not isinstance(self.value, dict):
            raise self.wrong(f"an object with {', '.join(sorted(keys))}")
        missing, unknown = sorted(set(keys) - set(self.value)), sorted(set(self.value) - set(keys))
        if missing:
            raise self.wrong(f"a field {missing[0]}", "none")
        if unknown:
            raise self.wrong(f"only {', '.join(sorted(keys))}", shortened(ascii(unknown[0])))
        return {key: self.child(key) for key in keys}

    def array(self, low: int, high: int) -> Iterator[Field]:
        """The items of a list, one by one: a path for each of millions at once would take more room than the list."""
        if not isinstance(self.value, list) or not low <= len(self.value) <= high:
            raise self.wrong(f"a list of {low} to {high}" if low != high else f"a list of {low}")
        return (self.child(index) for index in range(len(self.value)))

    def integer(self, low: int, high: int = LARGEST) -> int:
        if type(self.value) is not int or not low <= self.value <= high:
            raise self.wrong(f"an integer from {low} to {high}")
        return self.value

    def number(self, low: float, high: float = sys.float_info.max) -> float:
        """A float64, or an integer that is one."""
        if type(self.value) not in (int, float) or not low <= self.value <= high or float(self.value) != self.value:
            raise self.wrong(f"a finite number from {low!r} to {high!r}")
        return float(self.value)

    def text(self, pattern: str = ".{1,200}") -> str:
        if not isinstance(self.value, str) or not self.value.isprintable() or not re.fullmatch(pattern, self.value):
            raise self.wrong(f"printable text like {pattern}")
        return self.value

    def boolean(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.wrong("true or false")
        return self.value

    def one_of(self, known: tuple[str, ...]) -> str:
        if not isinstance(self.value, str) or self.value not in known:
            raise self.wrong(" or ".join(known))
        return self.value

    def exactly(self, value: Any) -> None:
        if type(self.value) is not type(value) or self.value != value:
            raise self.wrong(json.dumps(value))


def shortened(text: str) -> str:
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def _check_size(content: bytes, where: str, kind: Kind) -> None:
    if len(content) > kind.most:
        raise PlanError(
            f"{kind.name} too large", where=where, found=f"expected at most {kind.most:,} B", mend=kind.mend
        )


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {shortened(ascii(twice))} occurs twice")
    return value


def _no_constants(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")

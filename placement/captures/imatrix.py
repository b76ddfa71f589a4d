"""llama.cpp's importance matrix as a traffic log: the `counts` of the expert tensors in a GGUF file.

tools/imatrix/imatrix.cpp writes `general.type` = "imatrix" and, per weight, F32 tensors `<name>.in_sum2` and
`<name>.counts`; for `blk.N.ffn_{gate,up,down,gate_up}_exps.weight` the counts are [1, experts], tokens routed to each
expert. The older .dat has no counts per expert. Only headers and these tensors are read: llama.cpp's own `gguf` package
would bring an HTTP client and a YAML parser for it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ...errors import TraceError
from .shape import MoeShape
from .tally import Counts, Piece

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # version 1 had 32-bit lengths, and no imatrix
ALIGNMENT = 32  # unless `general.alignment` says otherwise
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _F32 = 8, 9, 0
_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(?:gate|up|down|gate_up)_exps\.weight\.counts")


@dataclass
class _Reader:
    """Little-endian values of an open GGUF file, never past its end."""

    file: BinaryIO
    size: int
    where: str

    def take(self, count: int) -> bytes:
        if count > self.size - self.file.tell():
            raise TraceError(
                "a GGUF file is cut short", where=self.where, found=f"it has {self.size:,} B", mend="copy it again"
            )
        return self.file.read(count)

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode(errors="replace")

    def value(self, kind: int, nested: bool = False) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY or nested:
            raise TraceError("a GGUF value of an unknown type", where=self.where, found=f"found type {kind}")
        inner, count = self.number("I"), self.number("Q")
        return [self.value(inner, nested=True) for _ in range(count)]


def pieces(path: Path, shape: MoeShape) -> Iterator[Piece]:
    """One piece of [L, E]. Raises TraceError for another GGUF, a damaged one, and counts that differ in a layer."""
    layers: dict[int, np.ndarray] = {}
    for name, counts in _counts(path).items():
        layer = int(_EXPERTS.fullmatch(name)[1])  # type: ignore[index]
        if layer in layers and not np.array_equal(layers[layer], counts):
            found = "gate, up and down have seen different tokens"
            raise TraceError("an expert's projections are counted differently", where=f"{path}, {name}", found=found)
        layers[layer] = counts
    yield Counts(str(path), shape.stack(layers, str(path)))


def _counts(path: Path) -> dict[str, np.ndarray]:
    """Tensor name -> float32 [E], of the expert tensors."""
    with path.open("rb") as file:
        reader = _Reader(file, path.stat().st_size, str(path))
        magic, version = reader.take(4), reader.number("I")
        if magic != MAGIC or version not in VERSIONS:
            found = f"expected GGUF version {VERSIONS}, found {magic!r} {version}"
            raise TraceError("not a GGUF file", where=str(path), found=found)
        tensors, values = reader.number("Q"), reader.number("Q")
        meta = {}
        for _ in range(values):
            key, kind = reader.text(), reader.number("I")
            meta[key] = reader.value(kind)
        if meta.get("general.type") != "imatrix":
            found = f"expected general.type imatrix, found {meta.get('general.type')!r}"
            mend = "give what llama-imatrix wrote, not the model"
            raise TraceError("a GGUF file that is no importance matrix", where=str(path), found=found, mend=mend)
        infos = {}
        for _ in range(tensors):
            name, dimensions = reader.text(), reader.number("I")
            sizes = [reader.number("Q") for _ in range(dimensions)]
            kind, offset = reader.number("I"), reader.number("Q")
            if _EXPERTS.fullmatch(name):
                if kind != _F32 or sizes[:1] != [1] or any(size != 1 for size in sizes[2:]):
                    found = f"expected F32 [1, experts], found type {kind} {sizes}"
                    raise TraceError("counts of another kind", where=f"{path}, {name}", found=found)
                infos[name] = (sizes[1] if len(sizes) > 1 else 1, offset)
        if not infos:
            mend = "make it with llama-imatrix from a mixture-of-experts model, as GGUF"
            raise TraceError("the importance matrix counts no experts", where=str(path), mend=mend)
        alignment = meta.get("general.alignment", ALIGNMENT)
        start = -(-file.tell() // alignment) * alignment if type(alignment) is int and alignment > 0 else file.tell()
        found_counts = {}
        for name, (experts, offset) in infos.items():
            file.seek(min(start + offset, reader.size))
            found_counts[name] = np.frombuffer(reader.take(4 * experts), dtype="<f4")
        return found_counts

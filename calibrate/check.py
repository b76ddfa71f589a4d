"""Look at every stored number once, before hours are spent: NaN and infinity are refused, by name and row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..errors import CheckpointError
from ..parallel import default_threads, ordered_map
from ..progress import Progress, Silent
from .checkpoint import Checkpoint

# dtype -> (unsigned integer, mask, limit): a number is NaN or infinite where (bits & mask) >= limit.
# The integer kinds, MXFP4's nibbles among them, have no such codes and are not read.
NONFINITE: dict[str, tuple[type[np.unsignedinteger], int, int]] = {
    "F8_E8M0": (np.uint8, 0xFF, 0xFF),
    "F8_E4M3": (np.uint8, 0x7F, 0x7F),
    "F8_E5M2": (np.uint8, 0x7F, 0x7C),
    "BF16": (np.uint16, 0x7FFF, 0x7F80),
    "F16": (np.uint16, 0x7FFF, 0x7C00),
    "F32": (np.uint32, 0x7FFF_FFFF, 0x7F80_0000),
    "F64": (np.uint64, 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
}

PIECE_BYTES = 1 << 20
"""Bytes looked at in one go: they stay in the core's cache between the passes."""


@dataclass(frozen=True)
class ValueCheck:
    """What `check_values` looked at: tensors and bytes read, and bytes of integers that can hold no NaN."""

    tensors: int
    bytes_read: int
    bytes_integer: int


def check_values(checkpoint: Checkpoint, progress: Progress | None = None, threads: int | None = None) -> ValueCheck:
    """Read every floating-point and scale tensor once, in file order, about 1 MiB per thread at a time.

    Raises CheckpointError for the first NaN, infinity, FP8 NaN code or E8M0 byte 255 in file order, naming
    file, tensor, flat index and row; which one is first does not depend on `threads`.
    """
    progress = progress or Silent()
    floats = [name for name, info in checkpoint.tensors.items() if info.dtype in NONFINITE]
    total = sum(checkpoint.tensors[name].nbytes for name in floats)

    def pieces() -> Iterator[list[tuple[str, int, int]]]:
        """Pieces of about PIECE_BYTES: many small tensors, or part of a large one."""
        batch, size = [], 0
        for name in floats:
            nbytes = checkpoint.tensors[name].nbytes
            for start in range(0, nbytes, PIECE_BYTES):
                stop = min(start + PIECE_BYTES, nbytes)
                batch.append((name, start, stop))
                size += stop - start
                if size >= PIECE_BYTES:
                    yield batch
                    batch, size = [], 0
        if batch:
            yield batch

    def look(batch: list[tuple[str, int, int]]) -> int:
        for name, start, stop in batch:
            _check_piece(checkpoint, name, start, stop)
        return sum(stop - start for _, start, stop in batch)

    progress.stage("check values", total, "B")
    for count in ordered_map(look, pieces(), threads or default_threads()):
        progress.advance(count)
    progress.finish()
    everything = sum(info.nbytes for info in checkpoint.tensors.values())
    return ValueCheck(len(floats), total, everything - total)


def _check_piece(checkpoint: Checkpoint, name: str, start: int, stop: int) -> None:
    info = checkpoint.tensors[name]
    kind, mask, limit = NONFINITE[info.dtype]
    bits = checkpoint.read(name, start, stop).numpy().view(kind)
    np.bitwise_and(bits, kind(mask), out=bits)
    if not bits.size or bits.max() < limit:
        return
    index = start // bits.itemsize + int((bits >= limit).argmax())
    columns = info.shape[-1] if info.shape else 1
    raise CheckpointError(
        "a stored number is NaN" if info.dtype == "F8_E8M0" else "a stored number is NaN or infinite",
        where=checkpoint.where(name),
        found=f"expected finite {info.dtype} everywhere, found otherwise at flat index {index} "
        f"(row {index // columns}, column {index % columns})",
        mend="the file is damaged: download it again, and compare its sha256 with the release's",
    )

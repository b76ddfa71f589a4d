"""Write a pack's shards: safetensors files whose header is known before the first byte of data."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from ..calibrate.checkpoint import INDEX, Checkpoint
from ..files import write_atomic, write_json
from .layout import PackLayout, PackTensor

COPY_BYTES = 1 << 24

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".ckpt", ".pth", ".pt", ".gguf", ".tmp")
"""Files of a model directory that hold weights (or nothing): they are not copied into a pack."""


def header(tensors: list[PackTensor]) -> bytes:
    """The file's first bytes: length and JSON header, padded with spaces to a multiple of 8."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        offsets = [start, start + tensor.nbytes]
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        start += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_shard(
    path: Path, tensors: list[PackTensor], source: Checkpoint, packed: Callable[[PackTensor], bytes]
) -> None:
    """Write one shard atomically; source tensors are copied in pieces of COPY_BYTES.

    packed: the bytes of an expert's tensor.
    """

    def write(file: BinaryIO) -> None:
        file.write(header(tensors))
        for tensor in tensors:
            if tensor.source is None:
                content = packed(tensor)
                if len(content) != tensor.nbytes:
                    raise ValueError(f"{tensor.name} has {len(content)} bytes, its header says {tensor.nbytes}")
                file.write(content)
                continue
            for start in range(0, tensor.nbytes, COPY_BYTES):
                stop = min(start + COPY_BYTES, tensor.nbytes)
                file.write(source.read(tensor.name, start, stop).numpy().data)

    write_atomic(path, write)


def write_index(path: Path, layout: PackLayout) -> None:
    """model.safetensors.index.json: every tensor exactly once, in the order of names."""
    weight_map = {tensor.name: shard for shard, tensors in layout.shards.items() for tensor in tensors}
    write_json(path / INDEX, {"metadata": {"total_size": layout.tensor_bytes}, "weight_map": weight_map})


def companion_files(model: Path) -> list[Path]:
    """Files to carry over besides weights, index and config.json, relative to the model directory, sorted.

    Tokenizer, generation settings and, where a release has it, its chat encoding code in a subdirectory.
    Hidden files and directories stay behind.
    """
    found = []
    for path in sorted(model.rglob("*")):
        relative = path.relative_to(model)
        if any(part.startswith(".") for part in relative.parts) or not path.is_file():
            continue
        if path.suffix in WEIGHT_SUFFIXES or relative.as_posix() in (INDEX, "config.json"):
            continue
        found.append(relative)
    return found


def copy_companions(model: Path, pack: Path) -> None:
    """Copy `companion_files` atomically, each."""
    for relative in companion_files(model):
        target = pack / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        with (model / relative).open("rb") as source:
            write_atomic(target, lambda file, source=source: shutil.copyfileobj(source, file))  # type: ignore[misc]

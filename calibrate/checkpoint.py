"""The original weights: a directory of safetensors shards, read without trusting any of it.

`Checkpoint.open` reads `config.json`, the index and every shard's header, and checks them against each other
and against the file sizes; it reads no tensor data. Tensors are read on demand, by position: memory holds
what the caller asked for and nothing else, and any number of threads may read at once.

Format: https://github.com/huggingface/safetensors (8 bytes little-endian header length, JSON header, data).
"""

from __future__ import annotations

import builtins
import hashlib
import json
import math
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import CheckpointError
from .decode import GROUP, decode_fp8, decode_mxfp4, finite

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own cap
SAMPLE_BYTES = 1 << 16
READ_AHEAD_BYTES = 4 << 20
DOWNLOAD = "download the file again"

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.uint8,  # bare exponents, kept as bytes
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}
"""safetensors dtype code -> torch dtype of `Checkpoint.stored`."""

PLAIN = ("BF16", "F16", "F32")
"""dtypes that need no scale."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: safetensors dtype code, shape, file name, byte offsets from the file's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint.

    path: the directory.
    config: the parsed `config.json`.
    tensors: every tensor by name, shard by shard, in file order within a shard.
    shards: shard file names, sorted.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    shards: list[str]

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Open a model directory: every header is read and checked, no tensor data.

        Raises CheckpointError where a file is missing, damaged or truncated, or index and shards disagree.
        """
        path = Path(path)
        if not path.is_dir():
            raise _bad(path, "no model directory", mend="give the folder that holds config.json")
        config = read_json(path / "config.json")
        index = path / INDEX
        weight_map = _read_weight_map(index) if index.exists() else None
        shards = _find_shards(path, weight_map)
        tensors: dict[str, TensorInfo] = {}
        for shard in shards:
            for info in read_header(path / shard):
                if info.name in tensors:
                    found = f"expected once, found in {tensors[info.name].file} too"
                    raise _bad(path / shard, "a tensor is stored twice", found, "remove the stale shard", info.name)
                tensors[info.name] = info
        if weight_map is not None:
            _check_index(index, weight_map, tensors)
        return cls(path, config, tensors, shards)

    def info(self, name: str) -> TensorInfo:
        """Where `name` lies; CheckpointError if the checkpoint has no such tensor."""
        if name not in self.tensors:
            mend = "check that the checkpoint is complete and of the supported family"
            raise _bad(self.path, "no such tensor", mend=mend, tensor=name)
        return self.tensors[name]

    def where(self, name: str) -> str:
        """File and tensor, for an error message."""
        return f"{self.path / self.info(name).file}, {name}"

    def bytes(self, name: str) -> builtins.bytes:
        """The tensor's bytes as they stand in the file."""
        return self.read(name).numpy().tobytes()

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """uint8 [stop - start]: part of the tensor's bytes, to walk a large one in bounded memory."""
        info = self.info(name)
        stop = info.nbytes if stop is None else stop
        if not 0 <= start <= stop <= info.nbytes:
            raise ValueError(f"{name} has bytes 0..{info.nbytes}, not {start}..{stop}")
        raw = torch.empty(stop - start, dtype=torch.uint8)
        with (self.path / info.file).open("rb", buffering=0) as file:
            _read_into(file.fileno(), raw.numpy(), info.start + start, self.where(name))
        return raw

    def stored(self, name: str) -> Tensor:
        """The tensor in its stored dtype and shape (F8_E8M0 as uint8), in memory of its own."""
        info = self.info(name)
        return self.read(name).view(DTYPES[info.dtype]).view(info.shape)

    def weight(self, prefix: str, device: torch.device | str = "cpu", kept: dict[str, Tensor] | None = None) -> Tensor:
        """float32 values of `<prefix>.weight`, or of the tensor named exactly `prefix`, decoded on `device`.

        I8 with an E8M0 `<prefix>.scale` is MXFP4 (two columns per byte), F8_E4M3 with one is FP8; BF16, F16
        and F32 stand alone. Exact. kept: stored bytes on the device by tensor name; what is not among them is read and
        added. Raises CheckpointError for other combinations, and for NaN or infinity.
        """

        def stored(name: str) -> Tensor:
            if kept is None:
                return self.stored(name).to(device)
            if name not in kept:
                kept[name] = self.stored(name).to(device)
            return kept[name]

        info = self._weight_info(prefix)
        check = kept is None or info.name not in kept
        if info.dtype in PLAIN:
            values = stored(info.name).to(torch.float32)
            return finite(values, self.where(info.name)) if check else values
        decode = decode_mxfp4 if info.dtype == "I8" else decode_fp8
        scale = stored(self._scale_info(info).name)
        return decode(stored(info.name), scale, where=self.where(info.name), check=check)

    def read_ahead(self, names: Iterable[str]) -> threading.Thread:
        """Read these tensors into the kernel's page cache, in the background, for whoever reads them next.

        Takes no memory of ours but one buffer; ends with the process. What cannot be read is left to that reader.
        """
        wanted = sorted((info.file, info.start, info.stop) for info in map(self.info, names))

        def work() -> None:
            buffer = bytearray(READ_AHEAD_BYTES)
            with suppress(OSError):
                for file, parts in groupby(wanted, key=itemgetter(0)):
                    with (self.path / file).open("rb", buffering=0) as handle:
                        for _, start, stop in parts:
                            while start < stop:
                                start += os.preadv(handle.fileno(), [memoryview(buffer)[: stop - start]], start) or stop

        thread = threading.Thread(target=work, name="read-ahead", daemon=True)
        thread.start()
        return thread

    def rows(self, prefix: str, indices: Tensor) -> Tensor:
        """float32 [n, C]: `weight(prefix)[indices]`, reading those rows only.

        indices: int64 [n], any order, repeats allowed. For tables too large to load (embedding, Engram).
        """
        info = self._weight_info(prefix)
        values = self._read_rows(info, indices)
        if info.dtype in PLAIN:
            return finite(values.to(torch.float32), self.where(info.name))
        scale = self._scale_info(info)
        per_row = scale.shape[0] == info.shape[0]  # otherwise one scale row serves a block of rows
        powers = self._read_rows(scale, indices if per_row else indices // GROUP)  # [n, ceil(C/32)]
        decode = decode_mxfp4 if info.dtype == "I8" else decode_fp8
        return decode(values, powers, where=self.where(info.name))

    def _read_rows(self, info: TensorInfo, indices: Tensor) -> Tensor:
        """Rows in the stored dtype, each distinct one read once and in file order."""
        unique, inverse = torch.unique(indices, return_inverse=True)
        if unique.numel() and not 0 <= int(unique[0]) <= int(unique[-1]) < info.shape[0]:
            found = f"expected 0..{info.shape[0] - 1}, found {int(unique[0])}..{int(unique[-1])}"
            mend = "check that tokenizer and checkpoint belong together"
            raise _bad(self.path / info.file, "a row lies outside its table", found, mend, info.name)
        row_bytes = info.nbytes // max(1, info.shape[0])
        raw = torch.empty((unique.numel(), row_bytes), dtype=torch.uint8)
        where = self.where(info.name)
        with (self.path / info.file).open("rb", buffering=0) as file:
            for target, row in zip(raw.numpy(), unique.tolist(), strict=True):
                _read_into(file.fileno(), target, info.start + row * row_bytes, where)
        return raw.view(DTYPES[info.dtype]).view(-1, *info.shape[1:])[inverse]

    def _weight_info(self, prefix: str) -> TensorInfo:
        info = self.info(prefix if prefix in self.tensors else f"{prefix}.weight")
        if info.dtype in PLAIN or (info.dtype in ("I8", "F8_E4M3") and len(info.shape) == 2):
            return info
        found = f"expected BF16, F16, F32, or an I8 or F8_E4M3 matrix, found {info.dtype} {list(info.shape)}"
        mend = "check that the checkpoint is of the supported family"
        raise _bad(self.path / info.file, "cannot decode this kind of tensor", found, mend, info.name)

    def _scale_info(self, info: TensorInfo) -> TensorInfo:
        name = info.name.removesuffix(".weight") + ".scale"
        scale = self.tensors.get(name)
        if scale is None or scale.dtype != "F8_E8M0":
            found = f"expected {name} as F8_E8M0, found {scale.dtype if scale else 'none'}"
            raise _bad(self.path / info.file, "a quantized weight has no scale", found, tensor=info.name)
        return scale


def wrong_shape(
    checkpoint: Checkpoint, name: str, expected: tuple[int, ...], found: tuple[int, ...]
) -> CheckpointError:
    """The error for a tensor that does not fit config.json."""
    return CheckpointError(
        "a tensor does not have the shape that config.json implies",
        where=f"{checkpoint.path}, {name}",
        found=f"expected {list(expected)}, found {list(found)}",
        mend="use the config.json that came with the checkpoint",
    )


def read_header(path: Path) -> list[TensorInfo]:
    """The tensors of one safetensors file, in file order, after checking the whole header.

    Raises CheckpointError: a header length no file has, JSON that does not parse, unknown dtypes, sizes that
    disagree with shapes, holes or overlaps between tensors, a file longer or shorter than its header says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        if first == b"version ":
            raise _bad(path, "the file is only a Git LFS pointer", mend="fetch the data with `git lfs pull`")
        length = int.from_bytes(first, "little")
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            found = f"expected a header of at most {MAX_HEADER_BYTES} bytes, found {length} in a file of {size}"
            raise _bad(path, "not a safetensors file, or one cut off in its header", found)
        header = _parse_json(file.read(length), path)
    begin = 8 + length
    header.pop("__metadata__", None)
    tensors = [_tensor_info(path, name, entry, begin) for name, entry in header.items()]
    tensors.sort(key=lambda info: (info.start, info.stop))
    end = begin
    for info in tensors:
        if info.start != end:
            what = "tensors overlap" if info.start < end else "there is a hole between tensors"
            found = f"expected data from offset {end - begin}, found {info.start - begin}"
            raise _bad(path, what, found, tensor=info.name)
        end = info.stop
    if size < end:
        cut = next(info.name for info in tensors if info.stop > size)
        found = f"expected {end} bytes, found {size}: file is {end - size} bytes short"
        raise _bad(path, "the shard is truncated", found, tensor=cut)
    if size > end:
        raise _bad(path, "the shard has bytes of no tensor", f"expected {end} bytes, found {size}")
    return tensors


def _tensor_info(path: Path, name: str, entry: Any, begin: int) -> TensorInfo:
    """One header entry, checked on its own. `begin` is where the data begin in the file."""
    if not (
        isinstance(entry, dict)
        and _are_counts(entry.get("shape"))
        and _are_counts(entry.get("data_offsets"))
        and len(entry["data_offsets"]) == 2
    ):
        found = f"expected dtype, shape and two data_offsets, found {entry!r:.200}"
        raise _bad(path, "a header entry is malformed", found, tensor=name)
    dtype, shape, (start, stop) = entry.get("dtype"), tuple(entry["shape"]), entry["data_offsets"]
    if dtype not in DTYPES:
        found = f"expected one of {', '.join(DTYPES)}, found {dtype!r:.60}"
        raise _bad(path, "a tensor has an unknown dtype", found, tensor=name)
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if stop - start != nbytes:
        found = f"expected {nbytes} bytes for {dtype} {list(shape)}, found {stop - start}"
        raise _bad(path, "a tensor's bytes do not fit its shape", found, tensor=name)
    return TensorInfo(name, dtype, shape, path.name, begin + start, begin + stop)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)  # True is no count


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; CheckpointError if it is missing, does not parse, or repeats a key."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise _bad(path, "a file is missing") from None
    return _parse_json(raw, path)


def _parse_json(raw: builtins.bytes, path: Path) -> dict[str, Any]:
    def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise _bad(path, "a JSON key stands twice", tensor=key)
            result[key] = value
        return result

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=without_repeats)
    except (ValueError, RecursionError) as error:
        raise _bad(path, "JSON does not parse", str(error)) from None
    if not isinstance(value, dict):
        raise _bad(path, "JSON is not an object", f"expected {{...}}, found {value!r:.60}")
    return value


def _read_weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> shard file name."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _bad(index, "the index has no weight_map", f"found {weight_map!r:.60}")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            found = f"expected the name of a .safetensors file beside it, found {shard!r:.100}"
            raise _bad(index, "the index names something that is not a shard", found, tensor=name)
    return weight_map


def _find_shards(path: Path, weight_map: dict[str, str] | None) -> list[str]:
    """Shard names, after comparing the index with the directory."""
    there = sorted(file.name for file in path.glob("*.safetensors"))
    if weight_map is None:
        if there != [SINGLE]:
            found = f"expected {INDEX}, or {SINGLE} alone; found {_some(there)}"
            raise _bad(path, "there is no index", found, "download the index")
        return there
    named = sorted(set(weight_map.values()))
    if missing := sorted(set(named) - set(there)):
        found = f"expected the {len(named)} files that the index names, missing {_some(missing)}"
        raise _bad(path, "shards are missing", found, "download the missing files")
    if stray := sorted(set(there) - set(named)):
        found = f"expected {len(named)} files, found also {_some(stray)}"
        mend = "move them elsewhere, or download the index that belongs to them"
        raise _bad(path, "there are shards that the index does not name", found, mend)
    return named


def _check_index(index: Path, weight_map: dict[str, str], tensors: dict[str, TensorInfo]) -> None:
    """The index and the shards name the same tensors in the same files."""
    mend = "download shards and index from the same revision"
    for name, shard in weight_map.items():
        if name in tensors and tensors[name].file != shard:
            found = f"expected in {shard}, found in {tensors[name].file}"
            raise _bad(index, "the index puts a tensor in the wrong shard", found, mend, name)
    if absent := [name for name in weight_map if name not in tensors]:
        found = f"expected the {len(weight_map)} tensors of the index, missing {_some(absent)}"
        shard_path = index.with_name(weight_map[absent[0]])
        raise _bad(shard_path, "a shard lacks tensors that the index names", found, mend, absent[0])
    if unnamed := [name for name in tensors if name not in weight_map]:
        found = f"expected the {len(weight_map)} tensors of the index, found also {_some(unnamed)}"
        shard_path = index.with_name(tensors[unnamed[0]].file)
        raise _bad(shard_path, "a shard holds tensors that the index does not name", found, mend, unnamed[0])


def source_identity(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a resumed build compares to know that its source is still the same one.

    {"config": sha256 of config.json, "shards": {name: {"bytes": size, "sha256": ...}}}; a shard's hash covers
    its header and three samples of 64 KiB of its data (first, middle, last), since a re-trained release keeps
    names, shapes and sizes. Megabytes are read, not the checkpoint: this tells one release from another and
    does not prove that every byte is sound.
    """
    shards = {}
    for shard in checkpoint.shards:
        path = checkpoint.path / shard
        size = path.stat().st_size
        with path.open("rb") as file:
            begin = 8 + int.from_bytes(file.read(8), "little")
            file.seek(0)
            digest = hashlib.sha256(file.read(begin))
            for start in (begin, (begin + size) // 2, size - SAMPLE_BYTES):
                file.seek(max(begin, start))
                digest.update(file.read(SAMPLE_BYTES))
        shards[shard] = {"bytes": size, "sha256": digest.hexdigest()}
    config = hashlib.sha256((checkpoint.path / "config.json").read_bytes()).hexdigest()
    return {"config": config, "shards": shards}


def _read_into(handle: int, target: np.ndarray, offset: int, where: str) -> None:
    """Fill `target` (uint8, contiguous) from `offset` of an open file, leaving the file position alone."""
    view = memoryview(target)  # type: ignore[arg-type]
    while len(view):
        count = os.preadv(handle, [view], offset)
        if count == 0:
            found = f"{len(view)} bytes short"
            raise CheckpointError("a shard shrank while it was read", where=where, found=found, mend=DOWNLOAD)
        view, offset = view[count:], offset + count


def _some(names: list[str]) -> str:
    """The first names, and how many more there are."""
    return (", ".join(names[:3]) or "none") + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _bad(path: Path, what: str, found: str = "", mend: str = DOWNLOAD, tensor: str = "") -> CheckpointError:
    where = f"{path}, {tensor}" if tensor else str(path)
    return CheckpointError(what, where=where, found=found, mend=mend)

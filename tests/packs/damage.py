"""Ways to damage a pack."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moefit.calibrate.checkpoint import INDEX, Checkpoint
from moefit.packs.manifest import MANIFEST, write_manifest

from ..calibrate.synthetic import Stored, write_shard

MARKER = "layers.1.ffn.experts.1.w1.mul1"


def sign_again(pack: Path) -> None:
    """Bring the manifest up to date with the files, so that only a look into them can find the damage."""
    manifest = json.loads((pack / MANIFEST).read_bytes())
    facts = {k: v for k, v in manifest.items() if k not in ("format", "version", "moefit", "files", "digest")}
    write_manifest(pack, facts)


def rewrite(pack: Path, shard: str, change: Callable[[Stored], None], index: bool = True) -> None:
    """Change the tensors of a shard; index: bring the index up to date."""
    checkpoint = Checkpoint.open(pack)
    tensors: Stored = {
        info.name: (info.dtype, info.shape, checkpoint.bytes(info.name))
        for info in checkpoint.tensors.values()
        if info.file == shard
    }
    change(tensors)
    write_shard(pack / shard, tensors)
    if index:
        path = pack / INDEX
        value = json.loads(path.read_bytes())
        kept = {name: file for name, file in value["weight_map"].items() if file != shard}
        value["weight_map"] = kept | dict.fromkeys(tensors, shard)
        path.write_text(json.dumps(value))


def edit_json(path: Path, change: Callable[[Any], None]) -> None:
    value = json.loads(path.read_bytes())
    change(value)
    path.write_text(json.dumps(value))


def shard_of(pack: Path, name: str) -> str:
    return Checkpoint.open(pack).info(name).file


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit of a file, counted from the end where `offset` is negative."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)

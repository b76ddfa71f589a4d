"""Is the source still what the build began with? Every byte of it counts, and a build may take days."""

from __future__ import annotations

from typing import Any

from ..calibrate.checkpoint import Checkpoint
from ..files import sha256_file
from ..parallel import ordered_map
from ..progress import Progress

Record = dict[str, dict[str, Any]]
"""Shard -> {"bytes", "modified" (nanoseconds, as the file system says), "sha256"}."""


def record_shards(source: Checkpoint, progress: Progress, threads: int) -> Record:
    """Hash every shard in full."""

    def one(shard: str) -> dict[str, Any]:
        path = source.path / shard
        status = path.stat()  # before reading: a change meanwhile shows next time
        return {"bytes": status.st_size, "modified": status.st_mtime_ns, "sha256": sha256_file(path)}

    progress.stage("hash source", sum((source.path / shard).stat().st_size for shard in source.shards), "B")
    record = {}
    for shard, entry in zip(source.shards, ordered_map(one, source.shards, threads), strict=True):
        record[shard] = entry
        progress.advance(entry["bytes"])
    progress.finish()
    return record


def changed_shards(source: Checkpoint, record: Record, threads: int) -> list[str]:
    """`shard: old sha256 -> new sha256` for each that differs from the record.

    A shard whose size and modification time are the recorded ones is taken to be the same; others are hashed again,
    so that a checkpoint which was only moved or copied goes on.
    """

    def one(shard: str) -> str | None:
        entry, status = record[shard], (source.path / shard).stat()
        if (status.st_size, status.st_mtime_ns) == (entry["bytes"], entry["modified"]):
            return None
        found = sha256_file(source.path / shard)
        return None if found == entry["sha256"] else f"source.shards.{shard}: {entry['sha256']} -> {found}"

    return [change for change in ordered_map(one, source.shards, threads) if change]

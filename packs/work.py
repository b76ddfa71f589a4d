"""The working directory of a build: what lets a killed build go on, and refuses to go on with something else.

`OUT.partial/` holds `identity.json` (what is being built from what), `work/` (passes over the traffic, finished
experts, layer reports) and `pack/`, the pack so far. Every file there is written to a temporary name and renamed, so
that a file which exists is whole. `OUT` itself appears at the end, by renaming `pack/`.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import PackError
from ..files import fsync_directory, write_json
from .expert import ExpertFile, ExpertReport
from .layout import PackTensor


class Work:
    """Paths and completeness of one build."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.root = out.with_name(out.name + ".partial")
        self.pack = self.root / "pack"
        self.folder = self.root / "work"

    @contextmanager
    def open(self, identity: dict[str, Any]) -> Iterator[None]:
        """Create or resume, under a lock that the kernel drops when the process dies.

        Raises PackError if another process builds here or has just finished, if the directory was begun with another
        identity, or if it is no build's at all.
        """
        self._check_ownership()
        self.root.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise PackError(
                    "another process is building this pack",
                    where=str(self.root),
                    mend="wait for it, or choose another --out",
                ) from None
            if not self._is_ours(handle):
                raise PackError(
                    "another process has just built this pack",
                    where=str(self.out),
                    mend="run the same command again",
                )
            self.check_identity(identity)
            if not self._identity.exists():
                write_json(self._identity, identity)
            self.pack.mkdir(exist_ok=True)
            self.folder.mkdir(exist_ok=True)
            for leftover in self.root.rglob("*.tmp"):  # of a killed run; nothing else writes here
                leftover.unlink()
            yield
        finally:
            os.close(handle)

    @property
    def _identity(self) -> Path:
        return self.root / "identity.json"

    def _is_ours(self, handle: int) -> bool:
        """Between our look at `out` and the lock, another process may have published and removed the directory."""
        return (
            self.root.is_dir()
            and os.path.samestat(os.fstat(handle), self.root.stat())
            and not (self.out.is_dir() and any(self.out.iterdir()))
        )

    def _check_ownership(self) -> None:
        """Raise PackError if somebody else's directory has our name: nothing in it may be touched."""
        if not self.root.exists() or self._identity.is_file():
            return
        first = {
            self._identity.name,
            self._identity.name + ".tmp",
        }  # of a build that is just beginning, or was killed then
        if not self.root.is_dir() or {path.name for path in self.root.iterdir()} - first:
            raise PackError(
                "the directory for unfinished work is not moefit's",
                where=str(self.root),
                found=f"expected it absent, empty or with {self._identity.name}",
                mend="move it elsewhere, or choose another --out",
            )

    def check_identity(self, identity: dict[str, Any]) -> None:
        """Raise PackError if an unfinished build of another identity, or no build's, lies here; writes nothing."""
        self._check_ownership()
        if self._identity.exists():
            self.refuse(differences(json.loads(self._identity.read_bytes()), identity))

    def refuse(self, changed: Sequence[str]) -> None:
        """Raise PackError naming what has changed since the build began, if anything has."""
        if changed:
            raise PackError(
                "an unfinished build of something else is in the way",
                where=str(self.root),
                found="changed since it began: " + "; ".join(changed[:4]) + (" ..." if changed[4:] else ""),
                mend="run the command it was begun with, or remove that directory to begin anew",
            )

    def expert(self, layer: int, expert: int) -> ExpertFile:
        return ExpertFile(self.folder, layer, expert)

    def packed(self, tensor: PackTensor) -> bytes:
        """Bytes of an expert's tensor, from its finished file."""
        if tensor.expert is None:
            raise ValueError(f"{tensor.name} is no expert's")
        return self.expert(*tensor.expert).tensor(tensor.name)

    def shard(self, name: str) -> Path:
        return self.pack / name

    @property
    def source_record(self) -> Path:
        """sha256 of every source shard in full, as the build began."""
        return self.folder / "source.json"

    @property
    def passes(self) -> Path:
        """Folder of `calibrate.passes`."""
        return self.folder / "passes"

    def drop_passes(self) -> None:
        """Once every layer is done, nothing reads them."""
        shutil.rmtree(self.passes, ignore_errors=True)

    def traffic(self, layer: int) -> Path:
        """The layer's traffic table."""
        return self.folder / f"traffic-{layer:03d}.safetensors"

    def layer_report(self, layer: int) -> Path:
        return self.folder / f"layer-{layer:03d}.json"

    def layer_done(self, layer: int) -> bool:
        """A layer is done once its report exists; it is written last."""
        return self.layer_report(layer).is_file()

    def done_layers(self) -> list[int]:
        """Numbers of the layers that are done, ascending."""
        found = (int(path.stem.rpartition("-")[2]) for path in self.folder.glob("layer-*.json"))
        return sorted(layer for layer in found if self.layer_done(layer))

    def read_layer_report(self, layer: int) -> list[ExpertReport]:
        return [ExpertReport.from_json(row) for row in json.loads(self.layer_report(layer).read_bytes())]

    def publish(self) -> None:
        """Rename the finished pack to its place and remove the rest."""
        if self.out.exists():  # an empty directory: checked at the start
            self.out.rmdir()
        self.pack.rename(self.out)
        fsync_directory(self.out.parent)
        self.remove()

    def discard(self) -> None:
        """Remove the directory for unfinished work, if it is a build's and no process works in it."""
        if not self._identity.is_file():
            return
        handle = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        else:
            self.remove()
        finally:
            os.close(handle)

    def remove(self) -> None:
        """Under the lock. The identity goes last, so that a killed removal is still known as ours."""
        for path in self.root.iterdir():
            if path != self._identity:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.rmtree(self.root)


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """`key: old -> new` for every leaf in which two JSON values differ; missing keys count as null."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        return [d for key in keys for d in differences(old.get(key), new.get(key), f"{path}.{key}".lstrip("."))]
    return [] if old == new else [f"{path}: {old} -> {new}"]

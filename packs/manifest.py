"""moefit.json: what a pack is made of and from. Specification: docs/pack.md."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import PackError
from ..files import json_bytes, sha256_bytes, sha256_file, write_json
from ..progress import Progress, Silent

MANIFEST = "moefit.json"
FORMAT, VERSION = "moefit.pack", 1
MAX_BYTES = 64 << 20


def write_manifest(pack: Path, facts: Mapping[str, Any], progress: Progress | None = None) -> dict[str, Any]:
    """Hash every file of `pack` as it stands on disk and write moefit.json beside them, last of all.

    facts: source, recipe, calibration, sizes, plan, fidelity, as docs/pack.md lays them out.
    """
    progress = progress or Silent()
    paths = sorted(p for p in pack.rglob("*") if p.is_file() and p.relative_to(pack).as_posix() != MANIFEST)
    progress.stage("hash", sum(p.stat().st_size for p in paths), "B")
    files = {}
    for path in paths:
        size = path.stat().st_size
        files[path.relative_to(pack).as_posix()] = {"bytes": size, "sha256": sha256_file(path)}
        progress.advance(size)
    progress.finish()
    manifest = {"format": FORMAT, "version": VERSION, "moefit": __version__, **facts, "files": files}
    manifest["digest"] = digest(manifest)
    write_json(pack / MANIFEST, manifest)
    return manifest


def digest(manifest: Mapping[str, Any]) -> str:
    """sha256 of the manifest's canonical JSON without its own `digest`: it names the pack, down to every byte."""
    return sha256_bytes(json_bytes({key: value for key, value in manifest.items() if key != "digest"}))


def read_manifest(pack: Path) -> dict[str, Any]:
    """Parse and check moefit.json. Raises PackError naming the field."""
    path = pack / MANIFEST
    if not path.is_file():
        raise PackError(
            "there is no manifest, so this is not a finished pack",
            where=str(path),
            mend="give the directory that moefit build wrote; an unfinished one ends in .partial",
        )
    mend = "restore moefit.json, or build the pack again"
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ValueError(f"{size} bytes, at most {MAX_BYTES} expected")
        content = path.read_bytes()
        manifest = json.loads(content)
        canonical = json_bytes(manifest)
    except (ValueError, RecursionError, OSError) as error:
        raise PackError("the manifest cannot be read", where=str(path), found=str(error), mend=mend) from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise PackError("the manifest is not a pack's", where=f"{path}, format", found=f"expected {FORMAT}", mend=mend)
    if manifest.get("version") != VERSION:
        found = f"expected {VERSION}, found {manifest.get('version')!r:.40}"
        raise PackError("unknown pack version", where=f"{path}, version", found=found, mend="update moefit")
    for key in ("source", "recipe", "calibration", "sizes", "files"):
        if not isinstance(manifest.get(key), dict):
            raise PackError("a field is missing or no object", where=f"{path}, {key}", mend=mend)
    for name, entry in manifest["files"].items():
        parts = Path(name).parts
        good = (
            isinstance(entry, dict)
            and type(entry.get("bytes")) is int
            and isinstance(entry.get("sha256"), str)
            and re.fullmatch(r"[0-9a-f]{64}", entry["sha256"])
        )
        if not good or Path(name).is_absolute() or ".." in parts or not parts:
            raise PackError("a file entry is malformed", where=f"{path}, files.{name:.80}", mend=mend)
    if content != canonical or manifest.get("digest") != digest(manifest):
        raise PackError(
            "the manifest has been changed",
            where=f"{path}, digest",
            found=f"expected {manifest.get('digest')!s:.64}, found {digest(manifest)}",
            mend=mend,
        )
    return manifest

"""What several commands do: print a result one way or the other, and refuse a target early."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from ..errors import MoefitError


def show(as_json: bool, value: dict[str, Any], text: str) -> None:
    """Print one or the other."""
    typer.echo(json.dumps(value, indent=2, sort_keys=True) if as_json else text)


def check_targets(targets: Sequence[Path | None], inputs: Sequence[Path | None], pack: Path | None = None) -> None:
    """`check_target` of each; and refuse one that is also an input, or another result. None: not given."""
    taken = {path.resolve(): "an input" for path in inputs if path is not None}
    for target in targets:
        if target is None:
            continue
        if (other := taken.get(target.resolve())) is not None:
            raise MoefitError(f"the result would replace {other}", where=str(target), mend="give another file name")
        check_target(target, pack)
        taken[target.resolve()] = "another result"


def check_target(path: Path, pack: Path | None = None) -> None:
    """Refuse, before any work, a file that could not be written after it, or that would change a pack."""
    inside = any((parent / "moefit.json").is_file() for parent in path.resolve().parents)
    if inside or (pack is not None and path.resolve().is_relative_to(pack.resolve())):
        mend = "give a path outside the pack; its manifest would no longer match"
        raise MoefitError("the result would be written into the pack", where=str(path), mend=mend)
    if not path.parent.is_dir() or path.is_dir():
        mend = "give a file name in a directory that exists"
        raise MoefitError("the result cannot be written there", where=str(path), mend=mend)

"""Tensors in a file that is either whole or absent; apart from `files`, which rooms without torch use."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from .errors import MoefitError
from .files import fsync_directory


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """A safetensors file, whole or absent. Raises MoefitError where it cannot be written (a full disk)."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        save_file(tensors, temporary)  # streams; `save` would hold a second copy
    except SafetensorError as error:
        temporary.unlink(missing_ok=True)
        raise MoefitError(
            "a file cannot be written",
            where=str(path),
            found=str(error),
            mend="free disk space and run the same command again to go on",
        ) from None
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
    fsync_directory(path.parent)

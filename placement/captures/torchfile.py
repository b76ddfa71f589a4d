"""`.pt` files, read without running what is in them, and written."""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import TraceError


def load_torch(path: Path) -> Any:
    """What `torch.save` wrote, with `weights_only=True`: tensors and plain containers, on the CPU, mapped from disk.

    torch is imported in functions of this file and nowhere else in this room. Raises TraceError for a damaged file and
    for a pickle that would run code.
    """
    from torch import load

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickles that are refused right away
            return load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise TraceError(
            "a pickle that may run code is not opened",
            where=str(path),
            found=f"expected tensors, numbers, lists and dicts, found {_reason(error)}",
            mend="save plain tensors: torch.save({'logical_count': counts}, path)",
        ) from error
    except Exception as error:  # a damaged file ends torch's readers in any of a dozen ways
        mend = "copy the file again, or record again"
        raise TraceError("a .pt file cannot be read", where=str(path), found=_reason(error), mend=mend) from error


def save_torch(tensors: Mapping[str, np.ndarray]) -> bytes:
    """The file that `torch.save` makes of a dict of tensors. The same tensors and torch give the same bytes."""
    from torch import from_numpy, save

    file = io.BytesIO()
    save({name: from_numpy(np.ascontiguousarray(array)) for name, array in tensors.items()}, file)
    return file.getvalue()


def is_tensor(value: Any, dimensions: tuple[int, ...] = ()) -> bool:
    """Whether this is a torch tensor, with one of these numbers of dimensions."""
    return (
        type(value).__module__.startswith("torch")
        and hasattr(value, "numpy")
        and value.ndim in (dimensions or (value.ndim,))
    )


def to_numpy(value: Any, where: str) -> np.ndarray:
    """A tensor's numbers. Raises TraceError for what is none, or in a dtype that numpy lacks (bfloat16)."""
    if not is_tensor(value):
        raise TraceError("expected a tensor", where=where, found=f"found {type(value).__name__}")
    try:
        return value.detach().cpu().numpy()
    except (TypeError, RuntimeError) as error:
        mend = "save it as int64"
        raise TraceError(
            "a tensor that holds no counts", where=where, found=f"found {value.dtype}", mend=mend
        ) from error


def _reason(error: Exception) -> str:
    """The telling sentence of torch's page of text."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = text.rpartition("WeightsUnpickler error: ")[2].partition(". ")[0]
    for advice in (" was not an allowed", " Check the documentation"):
        text = text.partition(advice)[0]
    return text[:200]

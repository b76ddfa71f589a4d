"""Encode tiles on a CUDA card: `libmoefit_cuda.so` (built with -DMOEFIT_CUDA=ON) through ctypes on torch tensors.

Same trellis and codebooks as `encode.encode_tiles`, other arithmetic (fp16 costs): equal quality, not the same states.
`cuda_reference.encode_cuda_reference` gives the same states bit for bit. No torch ABI is involved.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Final

import torch

from ..errors import QuantizeError
from .codebook import Codebook, check_bits, table_float32
from .trellis import RING

LEAD: Final = 128  # positions run before and after position 0 to find where to close the ring

LIBRARY: Final = Path(__file__).with_name("libmoefit_cuda.so")
TABLES_BYTES: Final = 393216  # MOEFIT_TABLES_BYTES
NOT_SUPPORTED: Final = 801  # cudaErrorNotSupported


@cache
def library() -> ctypes.CDLL:
    """The loaded library. Raises QuantizeError where it was not built."""
    if not LIBRARY.is_file():
        raise QuantizeError(
            "this installation has no CUDA encoder",
            where=str(LIBRARY),
            mend="install with CUDA's nvcc present: pip install . -C cmake.define.MOEFIT_CUDA=ON",
        )
    loaded = ctypes.CDLL(str(LIBRARY))
    loaded.moefit_error.restype = ctypes.c_char_p
    return loaded


def available() -> bool:
    """Whether there is a card and the library."""
    return LIBRARY.is_file() and torch.cuda.is_available()


def check(code: int, bits: float) -> None:
    """Raise QuantizeError for a cudaError_t other than success."""
    if code:
        found = f"CUDA error {code}: {library().moefit_error(code).decode()}"
        mend = "this K needs more shared memory than the card has: encode on the CPU" if code == NOT_SUPPORTED else ""
        raise QuantizeError("the CUDA encoder failed", where=f"K={bits:g}", found=found, mend=mend)


def pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def current_stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


@cache
def values_on(device: torch.device, codebook: Codebook) -> torch.Tensor:
    """The codebook on the card: float32 [65536]."""
    return torch.from_numpy(table_float32(codebook).copy()).to(device)


@cache
def tables_on(device: torch.device, codebook: Codebook, bits: float) -> torch.Tensor:
    """The codebook as the encoder reads it for one K: uint8 [TABLES_BYTES], kept for the life of the process."""
    tables = torch.empty(TABLES_BYTES, dtype=torch.uint8, device=device)
    with torch.cuda.device(device):
        values = values_on(device, codebook)
        check(library().moefit_prepare(pointer(values), int(2 * bits), pointer(tables), current_stream()), bits)
        torch.cuda.current_stream().synchronize()  # other streams will use it
    return tables


def scratch_for(device: torch.device, count: int, bits: float) -> torch.Tensor:
    """uint8 scratch to encode up to `count` tiles at a time; as much as helps, or less where memory is short."""
    least, most = ctypes.c_size_t(), ctypes.c_size_t()
    with torch.cuda.device(device):
        code = library().moefit_encode_scratch(
            ctypes.c_int64(count), int(2 * bits), ctypes.byref(least), ctypes.byref(most)
        )
    check(code, bits)
    try:
        return torch.empty(most.value, dtype=torch.uint8, device=device)
    except torch.cuda.OutOfMemoryError:
        return torch.empty(least.value, dtype=torch.uint8, device=device)


def encode_tiles_cuda(tiles: torch.Tensor, codebook: Codebook, bits: float, *, lead: int = LEAD) -> torch.Tensor:
    """States of a cheap closed path for every tile, on the tiles' card.

    tiles: float32 [count, 256] on a CUDA device, ring order, scaled to the codebook. Returns uint16 [count, 256],
    queued on the current stream. lead: even, 2 to 256 (`LEAD`). Deterministic, independent of the batch.
    Device memory: 0.5 GB of scratch, up to 2.2 GB where there are thousands of tiles (K = 3, 132 multiprocessors).
    Raises QuantizeError for a K that EXL3 does not define, a non-finite tile, or no library.
    """
    check_bits(bits, codebook)
    if tiles.ndim != 2 or tiles.shape[1] != RING or tiles.dtype != torch.float32 or not tiles.is_cuda:
        found = f"found {tiles.dtype} {list(tiles.shape)} on {tiles.device}"
        raise QuantizeError(
            "these are no tiles for the card", found=f"expected float32 [count, {RING}] on CUDA, {found}"
        )
    tiles = tiles.contiguous()
    finite = torch.isfinite(tiles).all(dim=1)
    if not bool(finite.all()):
        raise QuantizeError("cannot encode a non-finite weight", where=f"tile {int((~finite).nonzero()[0])}")
    states = torch.empty(tiles.shape, dtype=torch.uint16, device=tiles.device)
    tables, scratch = tables_on(tiles.device, codebook, bits), scratch_for(tiles.device, len(tiles), bits)
    with torch.cuda.device(tiles.device):
        code = library().moefit_encode(
            pointer(tiles),
            ctypes.c_int64(len(tiles)),
            pointer(tables),
            int(2 * bits),
            lead,
            pointer(states),
            pointer(scratch),
            ctypes.c_size_t(len(scratch)),
            current_stream(),
        )
    check(code, bits)
    return states

"""Encode tiles on a CUDA card: `libmoefit_cuda.so` (built with -DMOEFIT_CUDA=ON) through ctypes on torch tensors.

Same trellis and codebooks as `encode.encode_tiles`, other arithmetic (fp16 costs): equal quality, not the same states.
`cuda_reference.encode_cuda_reference` gives the same states bit for bit. No torch ABI is involved.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from ..errors import QuantizeError
from .codebook import Codebook, check_bits, table_float32
from .encode import LEAD
from .trellis import RING

NOT_SUPPORTED = 801  # cudaErrorNotSupported

LIBRARY = Path(__file__).with_name("libmoefit_cuda.so")


@cache
def _library() -> ctypes.CDLL:
    if not LIBRARY.is_file():
        raise QuantizeError(
            "this installation has no CUDA encoder",
            where=str(LIBRARY),
            mend="install with CUDA's nvcc present: pip install . -C cmake.define.MOEFIT_CUDA=ON",
        )
    library = ctypes.CDLL(str(LIBRARY))
    library.moefit_error.restype = ctypes.c_char_p
    return library


def available() -> bool:
    """Whether there is a card and the library."""
    return LIBRARY.is_file() and torch.cuda.is_available()


@cache
def _table(codebook: Codebook, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(table_float32(codebook).copy()).to(device)


def _check(code: int, bits: float) -> None:
    if code:
        found = f"CUDA error {code}: {_library().moefit_error(code).decode()}"
        mend = "this K needs more shared memory than the card has: encode on the CPU" if code == NOT_SUPPORTED else ""
        raise QuantizeError("the CUDA encoder failed", where=f"K={bits:g}", found=found, mend=mend)


def encode_tiles_cuda(tiles: torch.Tensor, codebook: Codebook, bits: float, *, lead: int = LEAD) -> torch.Tensor:
    """States of a cheap closed path for every tile, on the tiles' card.

    tiles: float32 [count, 256] on a CUDA device, ring order, scaled to the codebook. Returns uint16 [count, 256],
    queued on the current stream. lead: even, 2 to 256 (`encode.LEAD`). Deterministic, independent of the batch.
    Device memory: 0.5 GB of scratch, up to 2.2 GB where there are thousands of tiles (K = 3, 132 multiprocessors).
    Raises QuantizeError for a K that EXL3 does not define, a non-finite tile, or no library.
    """
    check_bits(bits, codebook)
    if tiles.ndim != 2 or tiles.shape[1] != RING or tiles.dtype != torch.float32 or not tiles.is_cuda:
        found = f"found {tiles.dtype} {list(tiles.shape)} on {tiles.device}"
        raise QuantizeError(
            "these are no tiles for the card", found=f"expected float32 [count, {RING}] on CUDA, {found}"
        )
    library, tiles = _library(), tiles.contiguous()
    finite = torch.isfinite(tiles).all(dim=1)
    if not bool(finite.all()):
        raise QuantizeError("cannot encode a non-finite weight", where=f"tile {int((~finite).nonzero()[0])}")
    count, twice_k = ctypes.c_int64(len(tiles)), int(2 * bits)
    states = torch.empty(tiles.shape, dtype=torch.uint16, device=tiles.device)
    with torch.cuda.device(tiles.device):
        least, most = ctypes.c_size_t(), ctypes.c_size_t()
        _check(library.moefit_encode_scratch(count, twice_k, ctypes.byref(least), ctypes.byref(most)), bits)
        try:
            scratch = torch.empty(most.value, dtype=torch.uint8, device=tiles.device)
        except torch.cuda.OutOfMemoryError:
            scratch = torch.empty(least.value, dtype=torch.uint8, device=tiles.device)
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (tiles, _table(codebook, tiles.device), states, scratch)]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        code = library.moefit_encode(
            pointers[0],
            count,
            pointers[1],
            twice_k,
            lead,
            pointers[2],
            pointers[3],
            ctypes.c_size_t(len(scratch)),
            stream,
        )
        _check(code, bits)
    return states

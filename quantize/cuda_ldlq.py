"""LDLQ over a group of matrices, and packing, all on a CUDA card. `ldlq.ldlq` is the plain version.

One matrix has too few tiles that may be encoded at the same time to fill a card (an anti-diagonal of 5120x2304 has
100 on average), and a group's anti-diagonals seldom come to whole rounds of the encoder. So the order is a schedule
over all matrices of the group: each step takes the tiles furthest from the end whose neighbours below and to the right
are done, in whole rounds as long as there are any.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Final

import numpy as np
import torch

from ..errors import QuantizeError
from .codebook import Codebook, check_bits
from .cuda_encode import LEAD, check, current_stream, library, pointer, scratch_for, tables_on, values_on
from .trellis import RING, TILE

# Rounds of the encoder in a step: so many it traces back at once, more gain nothing.
MOST_ROUNDS: Final = 8


class _Group(ctypes.Structure):
    """`moefit_ldlq_group` of cuda/ldlq.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("count", "k", "n")),
        *((name, ctypes.c_void_p) for name in ("weight", "lower_in", "lower_out")),
        *((name, ctypes.c_int32) for name in ("own_in", "own_out")),
        *((name, ctypes.c_void_p) for name in ("values", "tables")),
        *((name, ctypes.c_int32) for name in ("twice_k", "lead")),
        *((name, ctypes.c_void_p) for name in ("order", "step_ends")),
        ("steps", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("states", "quantized", "error_columns", "feedback")),
        *((name, ctypes.c_void_p) for name in ("targets", "row_sums", "step_states", "scratch")),
        ("scratch_bytes", ctypes.c_size_t),
    )


@lru_cache(maxsize=8)
def schedule(
    matrices: int, rows: int, columns: int, round_tiles: int, two_sided: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The order in which a group's tiles are encoded.

    Every tile comes in a later step than the one below it and, when two-sided, the one to its right. `round_tiles`
    are encoded in the time of one; a step takes whole rounds, MOST_ROUNDS at most, or all that is ready if that is
    less than one.
    Returns (order int32 [matrices * rows * columns]: (matrix * rows + i) * columns + j, step after step;
    ends int64 [steps]: where in `order` each step ends).
    """
    # Tiles are worked off in chains: rows of tiles from right to left, each behind the row below it; or columns
    # bottom-up, which do not wait for each other.
    chains, length = (rows, columns) if two_sided else (columns, rows)
    left = np.full((matrices, chains + 1), length, dtype=np.int64)  # tiles to do
    left[:, -1] = 0
    chain = np.arange(chains)
    order, ends, done = [], [], 0
    while done < matrices * rows * columns:
        now = left[:, :-1]
        ready = np.flatnonzero(now > (left[:, 1:] if two_sided else 0))
        take = len(ready)
        if take > round_tiles:
            take = min(take // round_tiles, MOST_ROUNDS) * round_tiles
        ahead = (now + chain if two_sided else now).ravel()[ready]  # steps to the end of the matrix
        chosen = np.sort(ready[np.argsort(-ahead, kind="stable")[:take]])
        matrix, c = np.divmod(chosen, chains)
        position = left[matrix, c] - 1
        i, j = (c, position) if two_sided else (position, c)
        order.append((matrix * rows + i) * columns + j)
        left[matrix, c] = position
        done += take
        ends.append(done)
    result = np.concatenate(order).astype(np.int32), np.array(ends, dtype=np.int64)
    for array in result:
        array.flags.writeable = False
    return result


@lru_cache(maxsize=8)
def _order_on(device: torch.device, *args: int) -> torch.Tensor:
    return torch.from_numpy(schedule(*args)[0].copy()).to(device)


def _block_columns(lower: torch.Tensor) -> torch.Tensor:
    """[b, k, k] -> [b, k/16, k, 16]: a tile's 16 columns lie together."""
    b, k, _ = lower.shape
    return lower.reshape(b, k, k // TILE, TILE).transpose(1, 2).contiguous()


def _check_inputs(weight: torch.Tensor, lower_in: torch.Tensor, lower_out: torch.Tensor | None) -> None:
    if weight.ndim != 3 or weight.shape[1] % TILE or weight.shape[2] % TILE or 0 in weight.shape:
        raise QuantizeError(
            "this is no group of weights",
            found=f"expected [b, k, n] with k and n multiples of {TILE}, found {list(weight.shape)}",
        )
    b, k, n = weight.shape
    factors = [("lower_in", lower_in, k), *([] if lower_out is None else [("lower_out", lower_out, n)])]
    for name, factor, side in factors:
        if factor.shape not in ((b, side, side), (1, side, side)):
            found = f"expected [{b} or 1, {side}, {side}], found {list(factor.shape)}"
            raise QuantizeError(f"{name} does not fit the weights", found=found)
    named = [("weight", weight), *((name, factor) for name, factor, _ in factors)]
    for name, tensor in named:
        if tensor.dtype != torch.float32 or not tensor.is_cuda or tensor.device != weight.device:
            found = f"expected float32 on one CUDA device, found {tensor.dtype} on {tensor.device}"
            raise QuantizeError(f"{name} is not ready for the card", found=found)
    finite = torch.stack([torch.isfinite(tensor).all() for _, tensor in named]).tolist()  # waits for the card
    for (name, tensor), good in zip(named, finite, strict=True):
        if not good:
            matrix = int((~torch.isfinite(tensor)).flatten(1).any(1).nonzero()[0])
            raise QuantizeError(f"{name} is not finite", where=f"matrix {matrix} of the group")


def ldlq_cuda(
    weight: torch.Tensor,
    lower_in: torch.Tensor,
    lower_out: torch.Tensor | None,
    codebook: Codebook,
    bits: float,
    *,
    lead: int = LEAD,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode a group of matrices with error feedback along k and, given `lower_out`, along n as well.

    weight: float32 [b, k, n] in the codebook's scale. lower_in: float32 [b, k, k], lower_out: float32 [b, n, n],
    both unit block lower triangular with the diagonal blocks not read (`ldlq.block_ldl`); [1, ...] is shared by all.
    Returns (states uint16 [b, k/16, n/16, 256], quantized float32 [b, k, n]: the values of the states), queued on the
    current stream; the host waits for the card once, at the start. A matrix' result does not depend on its group.

    Device memory beside inputs and results: 4 (k n + k k) bytes a matrix, two-sided 4 (2 k n + k k + n n), shared
    factors once (0.22 GB for 5120x2304); and the encoder's scratch, 2.2 GB at K = 3 with 132 multiprocessors.
    Raises QuantizeError for shapes or dtypes that do not fit, a number that is not finite, an impossible K, no library.
    """
    check_bits(bits, codebook)
    _check_inputs(weight, lower_in, lower_out)
    (b, k, n), device, two_sided = weight.shape, weight.device, lower_out is not None
    rows, columns = k // TILE, n // TILE
    weight = weight.contiguous()
    factors = [_block_columns(f) for f in (lower_in, lower_out) if f is not None]
    round_tiles = torch.cuda.get_device_properties(device).multi_processor_count * (2 if bits > 1 else 1)
    plan = (b, rows, columns, round_tiles, two_sided)
    _, ends = schedule(*plan)
    order = _order_on(device, *plan)
    largest = int(np.diff(ends, prepend=0).max())

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    states, quantized = new(b, rows, columns, RING, dtype=torch.uint16), new(b, k, n)
    feedback, targets = new(b, columns, k, TILE), new(largest, RING)
    step_states = new(largest, RING, dtype=torch.uint16)
    error_columns, row_sums = (new(b, rows, n, TILE), new(largest, RING)) if two_sided else (None, None)
    scratch = scratch_for(device, largest, bits)
    group = _Group(
        count=b, k=k, n=n,
        weight=pointer(weight), lower_in=pointer(factors[0]), lower_out=pointer(factors[1] if two_sided else None),
        own_in=len(lower_in) > 1, own_out=lower_out is not None and len(lower_out) > 1,
        values=pointer(values_on(device, codebook)), tables=pointer(tables_on(device, codebook, bits)),
        twice_k=int(2 * bits), lead=lead,
        order=pointer(order), step_ends=ctypes.c_void_p(ends.ctypes.data), steps=len(ends),
        states=pointer(states), quantized=pointer(quantized),
        error_columns=pointer(error_columns), feedback=pointer(feedback),
        targets=pointer(targets), row_sums=pointer(row_sums), step_states=pointer(step_states),
        scratch=pointer(scratch), scratch_bytes=len(scratch),
    )  # fmt: skip
    with torch.cuda.device(device):
        check(library().moefit_ldlq(ctypes.byref(group), current_stream()), bits)
    return states, quantized


def pack_cuda(states: torch.Tensor, bits: float) -> torch.Tensor:
    """`trellis.pack` on the card: states uint16 [..., 256] -> packed tiles int16 [..., 16 K]."""
    check_bits(bits, "mul1")
    if states.shape[-1:] != (RING,) or states.dtype != torch.uint16 or not states.is_cuda:
        found = f"expected uint16 [..., {RING}] on CUDA, found {states.dtype} {list(states.shape)} on {states.device}"
        raise QuantizeError("these are no states on the card", found=found)
    states = states.contiguous()
    packed = torch.empty((*states.shape[:-1], int(TILE * bits)), dtype=torch.int16, device=states.device)
    with torch.cuda.device(states.device):
        count = ctypes.c_int64(states.numel() // RING)
        check(library().moefit_pack(pointer(states), count, int(2 * bits), pointer(packed), current_stream()), bits)
    return packed

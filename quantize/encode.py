"""Native trellis encoder and decoder of tiles, with checked input."""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np

from ..errors import QuantizeError
from . import _native
from .codebook import Codebook, check_bits, table, table_float32
from .trellis import RING, Bounds, encode_reference

# Positions before and after position 0 that the CPU encoder's bounds see. Mean squared error at K = 3 against a float32
# search over 128 and then once round the ring: 144 +0.28 %, 160 +0.21 %, 176 +0.1 % (1,000 Gaussian tiles).
REACH: Final = 160

# Up to this K bounds are 8 bits wide, at a mean squared error 0.1 to 0.3 % above that of float32 bounds.
FIXED_POINT_UP_TO: Final = 4.0

# A unit of 8-bit bounds is 0.44 x 4^-K of the codebook's mean square: finer, and 127 units are too few for the
# spread of costs; coarser, and rounding disturbs them. The search begins 4 x 4^-K wide; an error is near 4^-K.
CODE_SCALE: Final = 272.0
SLACK: Final = 4.0
RMS: Final[dict[Codebook, float]] = {"mul1": 1.0, "mcg": 1.244, "3inst": 1.244}


def instruction_sets() -> list[str]:
    """Builds of the encoder this CPU can run, fastest first: of `avx512`, `avx2`, `plain`."""
    return list(_native.instruction_sets())


@cache
def search_of(codebook: Codebook, bits: float, fixed_point: bool, reach: int) -> Bounds:
    """The encoder's settings."""
    rms = RMS[codebook]
    slack = np.float32(SLACK * rms**2 * 4.0**-bits)
    return Bounds(reach, slack, np.float32(CODE_SCALE * 2.0**bits / rms if fixed_point else 0))


def encode_tiles(
    tiles: np.ndarray,
    codebook: Codebook,
    bits: float,
    *,
    threads: int = 1,
    reach: int = REACH,
    fixed_point: bool | None = None,
    isa: str = "",
) -> np.ndarray:
    """States of a cheap closed path for every tile.

    tiles: float32 [count, 256] in ring order, scaled to the codebook. Returns uint16 [count, 256].
    bits: K. fixed_point: 8-bit bounds; None chooses by FIXED_POINT_UP_TO. isa: "" takes the fastest, "reference" the
    plain Python of `trellis.encode_reference`; all give the same states. Releases the GIL.
    Raises QuantizeError for a K that EXL3 does not define or a non-finite tile, ValueError for fixed_point above K = 4.
    """
    check_bits(bits, codebook)
    tiles = np.ascontiguousarray(tiles, dtype=np.float32)
    if not np.isfinite(tiles).all():
        bad = int(np.flatnonzero(~np.isfinite(tiles).all(axis=1))[0])
        raise QuantizeError("cannot encode a non-finite weight", where=f"tile {bad}")
    if fixed_point is None:
        fixed_point = bits <= FIXED_POINT_UP_TO
    if fixed_point and bits > FIXED_POINT_UP_TO:
        raise ValueError(f"codes of 16 bits are too narrow for K = {bits:g}")
    values = table_float32(codebook)
    search = search_of(codebook, bits, fixed_point, reach)
    if isa == "reference":
        return encode_reference(tiles, values, bits, search)
    states = np.empty((len(tiles), RING), dtype=np.uint16)
    _native.encode(tiles, values, states, int(2 * bits), reach, float(search.slack), float(search.scale), threads, isa)
    return states


def decode_states(states: np.ndarray, codebook: Codebook) -> np.ndarray:
    """Values of states: uint16 [..., 256] -> float16 of the same shape."""
    return table(codebook)[states]

"""Native trellis encoder and decoder of tiles, with checked input."""

from __future__ import annotations

from typing import Final

import numpy as np

from ..errors import QuantizeError
from . import _native
from .codebook import Codebook, check_bits, table, table_float32
from .trellis import RING, encode_reference

# Positions run before and after position 0 to find the node on which the ring is closed. Shorter is faster and worse:
# mean squared error at K = 3 relative to 128: 64 +0.5 %, 32 +1.4 %, 16 +2.6 % (1,500 Gaussian tiles).
LEAD: Final = 128

# Up to this K the encoder's costs are 16-bit fixed point. The loss in mean squared error against float32 is 0.00 % at
# K = 2, 0.02 % at 3, 0.12 % at 3.5, and would be 0.33 % at 4 (1,500 Gaussian tiles).
FIXED_POINT_UP_TO: Final = 3.5


def instruction_sets() -> list[str]:
    """Builds of the encoder this CPU can run, fastest first: of `avx512`, `avx2`, `plain`."""
    return list(_native.instruction_sets())


def encode_tiles(
    tiles: np.ndarray,
    codebook: Codebook,
    bits: float,
    *,
    threads: int = 1,
    lead: int = LEAD,
    fixed_point: bool | None = None,
    isa: str = "",
) -> np.ndarray:
    """States of the cheapest closed path for every tile.

    tiles: float32 [count, 256] in ring order, scaled to the codebook. Returns uint16 [count, 256].
    bits: K. fixed_point: None chooses by FIXED_POINT_UP_TO. isa: "" takes the fastest, "reference" the plain
    Python of `trellis.encode_reference`; all give the same states. Releases the GIL.
    Raises QuantizeError for a K that EXL3 does not define or a non-finite tile.
    """
    check_bits(bits, codebook)
    tiles = np.ascontiguousarray(tiles, dtype=np.float32)
    if not np.isfinite(tiles).all():
        bad = int(np.flatnonzero(~np.isfinite(tiles).all(axis=1))[0])
        raise QuantizeError("cannot encode a non-finite weight", where=f"tile {bad}")
    if fixed_point is None:
        fixed_point = bits <= FIXED_POINT_UP_TO
    values = table_float32(codebook)
    if isa == "reference":
        return encode_reference(tiles, values, bits, lead, fixed_point)
    states = np.empty((len(tiles), RING), dtype=np.uint16)
    _native.encode(tiles, values, states, int(2 * bits), lead, fixed_point, threads, isa)
    return states


def decode_states(states: np.ndarray, codebook: Codebook) -> np.ndarray:
    """Values of states: uint16 [..., 256] -> float16 of the same shape."""
    return table(codebook)[states]

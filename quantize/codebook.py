"""The three EXL3 codebooks: 65,536 states to fp16 values, by integer mixing instead of a stored table.

Source: exllamav3 1.6.5's decoder, checked against tables dumped from its CUDA kernels
(tests/quantize/test_codec.py). A linear names its codebook by a marker tensor (docs/exl3.md).
"""

from __future__ import annotations

from functools import cache
from typing import Final, Literal, get_args

import numpy as np

from ..errors import QuantizeError

Codebook = Literal["mul1", "mcg", "3inst"]
CODEBOOKS: Final = get_args(Codebook)

# Multipliers, which are also the values of the marker tensors (as two's complement int32).
MCG_MULTIPLIER: Final = 0xCBAC1FED
MUL1_MULTIPLIER: Final = 0x83DCD12D

# Bits per weight that the codec defines. The half-integers alternate two symbol widths; only mul1 has them.
INTEGER_BITS: Final = tuple(float(k) for k in range(1, 9))
HALF_BITS: Final = (1.5, 2.5, 3.5)


def check_bits(bits: float, codebook: str) -> None:
    """Raise QuantizeError unless EXL3 defines `bits` (K) for `codebook`."""
    if codebook not in CODEBOOKS:
        raise QuantizeError("unknown codebook", found=f"{codebook!r}", mend=f"choose one of {', '.join(CODEBOOKS)}")
    if bits in INTEGER_BITS or (bits in HALF_BITS and codebook == "mul1"):
        return
    halves = " or 1.5, 2.5, 3.5" if codebook == "mul1" else "; half-integer K needs codebook mul1"
    raise QuantizeError(
        "EXL3 has no such K", found=f"K={bits:g} with codebook {codebook}", mend=f"choose K = 1..8{halves}"
    )


def marker(codebook: Codebook) -> tuple[str, int] | None:
    """Name suffix and int32 value of the marker tensor, or None for 3INST, which has none."""
    multiplier = {"mcg": MCG_MULTIPLIER, "mul1": MUL1_MULTIPLIER}.get(codebook)
    return None if multiplier is None else (codebook, multiplier - (1 << 32))


@cache
def table(codebook: Codebook) -> np.ndarray:
    """Value of every state: float16 [65536], read-only."""
    state = np.arange(1 << 16, dtype=np.uint32)
    if codebook == "mul1":
        mixed = state * np.uint32(MUL1_MULTIPLIER)
        byte_sum = sum((mixed >> np.uint32(shift)) & np.uint32(255) for shift in (0, 8, 16, 24))
        # One fp16 fused multiply-add of (1024 + sum); float64 holds product and sum exactly, so it rounds once.
        scale, offset = np.array([0x1EEE, 0xC931], dtype=np.uint16).view(np.float16).astype(np.float64)
        values = ((1024.0 + byte_sum) * scale + offset).astype(np.float16)
    else:
        if codebook == "mcg":
            mixed = state * np.uint32(MCG_MULTIPLIER)
        else:
            mixed = state * np.uint32(89226354) + np.uint32(64248484)
        mixed = (mixed & np.uint32(0x8FFF8FFF)) ^ np.uint32(0x3B603B60)
        halves = mixed.view(np.uint16).reshape(-1, 2).view(np.float16).astype(np.float32)
        values = (halves[:, 0] + halves[:, 1]).astype(np.float16)
    values.flags.writeable = False
    return values


@cache
def table_float32(codebook: Codebook) -> np.ndarray:
    """`table` widened to float32 (exact), read-only."""
    values = table(codebook).astype(np.float32)
    values.flags.writeable = False
    return values

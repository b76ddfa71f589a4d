"""Stored numbers to float32: E8M0 scales, MXFP4, FP8 e4m3.

Formats (OCP Microscaling Formats 1.0 and OCP FP8, laid out as in DeepSeek-V4.1's checkpoint):

- E8M0: one byte b is the power of two 2^(b-127). Byte 0 is 2^-127, a float32 denormal; byte 255 is NaN, which
  no sound checkpoint contains and which is refused here.
- MXFP4: two e2m1 numbers per byte, the LOW nibble is the EVEN column; bit 3 is the sign, the other three
  index 0, 0.5, 1, 1.5, 2, 3, 4, 6. One E8M0 byte per 32 columns of a row.
- FP8 e4m3 (no infinities; 0x7f and 0xff are NaN): one E8M0 byte per 32x32 block, or per 32 columns of a row; in
  DeepSeek-V4 per 128x128 block.

Every result is exact: multiplying a number of at most 4 significant bits by a power of two only moves its
exponent, and float32 reaches far enough down for the smallest product. BF16 holds the same values exactly,
but for FP8 values under a scale byte below 3, which reach under BF16's smallest denormal, 2^-133.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from ..errors import CheckpointError

GROUP = 32
"""Columns (and, in a block, rows) that share one E8M0 scale."""

LARGE_BLOCK = 128
"""Columns and rows of DeepSeek-V4's FP8 blocks."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Value of each MXFP4 nibble."""

# One look-up decodes a whole byte: its two float32 values (low nibble, high nibble) as one 8-byte entry.
_E2M1_PAIRS = np.array([[E2M1[b & 15], E2M1[b >> 4]] for b in range(256)], np.float32).view(np.complex64)[:, 0]


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """On a device: the four values of two MXFP4 bytes, complex128 [65536], 16 bytes each; powers of two of E8M0 bytes,
    float32 [256], NaN the last."""
    pairs = np.arange(1 << 16, dtype="<u2").view(np.uint8).reshape(-1, 2)
    fours = torch.from_numpy(_E2M1_PAIRS[pairs].view(np.complex128)[:, 0])
    powers = np.append(np.ldexp(np.ones(255, np.float32), np.arange(255) - 127), np.float32(np.nan))
    return fours.to(device), torch.from_numpy(powers).to(device)


def decode_e8m0(scale: Tensor, *, where: str = "", check: bool = True) -> Tensor:
    """Powers of two, float32, of E8M0 bytes (uint8, any shape).

    Raises CheckpointError on byte 255 (NaN), naming its first index. check: False for bytes that passed before; on a
    card every check waits for it.
    """
    if check and (nan := scale == 255).any():
        raise CheckpointError(
            "a scale is NaN",
            where=where,
            found=f"expected E8M0 bytes 0..254, found 255 at {nan.nonzero()[0].tolist()}",
            mend="the file is damaged: download it again",
        )
    return _tables(scale.device)[1][scale.int()]


def decode_mxfp4(packed: Tensor, scale: Tensor, *, where: str = "", check: bool = True) -> Tensor:
    """float32 [R, C] of MXFP4: packed int8 or uint8 [R, C/2], scale uint8 [R, C/32].

    Raises CheckpointError where the shapes disagree, a scale is NaN or a value would not be finite. check: as in
    `decode_e8m0`.
    """
    rows, half = packed.shape
    _expect_scale(scale, where, (rows, -(-2 * half // GROUP)))
    values = e2m1_pairs(packed.view(torch.uint8))
    values = _times_powers(values, decode_e8m0(scale, where=where, check=check))
    return finite(values, where) if check else values


def e2m1_pairs(packed: Tensor) -> Tensor:
    """float32 [R, C] of MXFP4 bytes uint8 [R, C/2], without their scales."""
    if packed.is_cpu:
        return torch.from_numpy(_E2M1_PAIRS.take(packed.numpy()).view(np.float32))  # three times as fast
    return e2m1_fours(packed)


def e2m1_fours(packed: Tensor) -> Tensor:
    """`e2m1_pairs` two bytes at a time, on any device. Codes from 2^15 on are negative indices: counted from behind."""
    two = packed.view(torch.int16).int()  # [R, C/4]
    return torch.view_as_real(_tables(packed.device)[0][two]).view(torch.float32).flatten(-2)


def decode_fp8(codes: Tensor, scale: Tensor, *, where: str = "", check: bool = True) -> Tensor:
    """float32 [R, C] of e4m3 codes [R, C] under E8M0 scales (uint8).

    The scale's shape tells the layout, see `fp8_scale_shapes`. Raises CheckpointError where it is none of these, a
    scale is NaN or a value would not be finite. check: as in `decode_e8m0`.
    """
    rows, columns = codes.shape
    blocks, groups, large = shapes = fp8_scale_shapes(rows, columns)
    _expect_scale(scale, where, *shapes)
    powers = decode_e8m0(scale, where=where, check=check)
    if scale.shape == blocks:
        powers = powers.repeat_interleave(GROUP, 0)[:rows]  # [R, ceil(C/32)]
    elif scale.shape == large:
        across = powers.repeat_interleave(LARGE_BLOCK // GROUP, 1)[:, : groups[1]]
        powers = across.repeat_interleave(LARGE_BLOCK, 0)[:rows]  # [R, ceil(C/32)]
    values = codes.view(torch.float8_e4m3fn).to(torch.float32)
    values = _times_powers(values, powers)
    return finite(values, where) if check else values


def fp8_scale_shapes(rows: int, columns: int) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Shapes of an FP8 matrix's scale: 32x32 blocks, groups of 32 in a row, 128x128 blocks.

    Where two of them are the same shape, they are also the same layout.
    """
    across = -(-columns // GROUP)
    return (-(-rows // GROUP), across), (rows, across), (-(-rows // LARGE_BLOCK), -(-columns // LARGE_BLOCK))


def finite(values: Tensor, where: str) -> Tensor:
    """`values`, or a CheckpointError naming the first NaN or infinity."""
    if values.numel() and not all(torch.isfinite(end) for end in torch.aminmax(values)):  # both ends carry NaN
        index = (~torch.isfinite(values)).nonzero()[0].tolist()
        raise CheckpointError(
            "a weight is not finite",
            where=where,
            found=f"expected finite numbers, found {values[tuple(index)].item()} at {index}",
            mend="the file is damaged: download it again",
        )
    return values


def _times_powers(values: Tensor, powers: Tensor) -> Tensor:
    """`values` [R, C] times `powers` [R, ceil(C/32)], each over its 32 columns, in place."""
    rows, columns = values.shape
    if columns % GROUP:
        return values.mul_(powers.repeat_interleave(GROUP, 1)[:, :columns])
    values.view(rows, columns // GROUP, GROUP).mul_(powers[:, :, None])
    return values


def _expect_scale(scale: Tensor, where: str, *shapes: tuple[int, int]) -> None:
    if tuple(scale.shape) not in shapes:
        raise CheckpointError(
            "a scale does not fit its weight",
            where=where,
            found=f"expected shape {' or '.join(str(list(s)) for s in shapes)}, found {list(scale.shape)}",
            mend="check that weight and scale come from the same release",
        )

"""Bring a weight to the shape the codebook was made for: signs, channel scales, Hadamards on both sides.

W = diag(suh) P C P diag(svh), where C is what the trellis encodes. Source of the form: exllamav3 1.6.5. Free for a
writer, and chosen here: the signs, the channel scales, and how the overall scale is shared between suh and svh.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from ..errors import QuantizeError
from .codebook import Codebook
from .hadamard import BLOCK, rotate_columns, rotate_rows

# Standard deviation of Gaussian input at which the codebook's error relative to the input's energy is least
# (benchmarks/codebook_scale.py).
CODEBOOK_SCALE: Final[dict[Codebook, dict[float, float]]] = {
    "mul1": {
        1.0: 1.12, 1.5: 1.028, 2.0: 0.992, 2.5: 0.96, 3.0: 0.94, 3.5: 0.929,
        4.0: 0.905, 5.0: 0.882, 6.0: 0.83, 7.0: 0.773, 8.0: 0.727,
    },
    "mcg": {
        1.0: 1.414, 2.0: 1.232, 3.0: 1.177, 4.0: 1.127,
        5.0: 1.071, 6.0: 0.997, 7.0: 0.917, 8.0: 0.862,
    },
    "3inst": {
        1.0: 1.425, 2.0: 1.237, 3.0: 1.17, 4.0: 1.114,
        5.0: 1.055, 6.0: 0.998, 7.0: 0.921, 8.0: 0.863,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Regularized:
    """Weights of one shape ready for the encoder: codes float32 [b, k, n] in the codebook's scale, suh [b, k] and
    svh [b, n], float32 that hold fp16 values already. codes = P (W / suh / svh) P."""

    codes: Tensor
    suh: Tensor
    svh: Tensor


def random_signs(seed: int, key: str, count: int) -> Tensor:
    """float32 [count] of +-1 that depend on nothing but `seed` and `key`."""
    digest = hashlib.sha256(f"{seed}/{key}".encode()).digest()
    bits = np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little"))).integers(0, 2, count)
    return torch.from_numpy(bits * 2.0 - 1.0).float()


def pad(x: Tensor, rows: int, columns: int) -> Tensor:
    """Zero-pad [..., k, n] at the bottom and right to [..., rows, columns]."""
    return torch.nn.functional.pad(x, (0, columns - x.shape[-1], 0, rows - x.shape[-2]))


def padded(size: int) -> int:
    """`size` rounded up to the Hadamard block, as EXL3 stores it."""
    return -(-size // BLOCK) * BLOCK


def fp16_values(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Scales rounded to fp16, as float32, and whether fp16 holds them: neither overflows nor vanishes."""
    rounded = scales.half().float()
    return rounded, ((rounded != 0) | (scales == 0)) & torch.isfinite(rounded)


def _to_fp16(scales: Tensor, names: list[str], which: str) -> Tensor:
    """Scales [b, m] rounded to fp16. Raises QuantizeError naming the weight and the channel that fp16 cannot hold."""
    rounded, fits = fp16_values(scales)
    if not bool(fits.all()):
        matrix, channel = (int(i) for i in (~fits).nonzero()[0])
        raise QuantizeError(
            f"{which} leaves fp16's range",
            where=f"{names[matrix]}, channel {channel}",
            found=f"scale {float(scales[matrix, channel]):.3e}, fp16 holds 6e-8 to 65504",
            mend="rescale the weight, or leave this tensor unquantized",
        )
    return rounded


def regularize(weights: Tensor, names: list[str], bits: float, codebook: Codebook, seed: int) -> Regularized:
    """Scale and rotate weights [b, k, n] (k and n multiples of 128).

    Output channels are brought to equal RMS, then input channels of the rotated weights. A channel of zeros gets
    scale 0 and decodes to exact zeros.
    """
    _, k, n = weights.shape
    rms = weights.square().mean(dim=1).sqrt()  # [b, n]
    # The RMS varies over decades between models; its typical size belongs to suh.
    typical = torch.where(rms > 0, rms, torch.nan).nanmedian(dim=1, keepdim=True).values.nan_to_num(1.0)
    signs = torch.stack([random_signs(seed, name + "/out", n) for name in names]).to(weights)
    svh = _to_fp16(signs * rms / 2.0 ** (typical.log2() / 2).round(), names, "svh")
    rotated = rotate_columns(weights / torch.where(svh == 0, 1.0, svh)[:, None, :])
    rms = rotated.square().mean(dim=2).sqrt()  # [b, k]
    signs = torch.stack([random_signs(seed, name + "/in", k) for name in names]).to(weights)
    suh = _to_fp16(signs * rms / CODEBOOK_SCALE[codebook][bits], names, "suh")
    return Regularized(rotate_rows(rotated / torch.where(suh == 0, 1.0, suh)[:, :, None]), suh, svh)

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
    """Weights that share one input, ready for the encoder.

    codes: one float32 [k, n_i] each, in the codebook's scale. suh: float32 [k], shared by all of them.
    svh: one float32 [n_i] each. The scales hold fp16 values already.
    """

    codes: list[torch.Tensor]
    suh: torch.Tensor
    svh: list[torch.Tensor]


def random_signs(seed: int, key: str, count: int) -> torch.Tensor:
    """float32 [count] of +-1 that depend on nothing but `seed` and `key`."""
    digest = hashlib.sha256(f"{seed}/{key}".encode()).digest()
    bits = np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little"))).integers(0, 2, count)
    return torch.from_numpy(bits * 2.0 - 1.0).float()


def pad(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Zero-pad [k, n] at the bottom and right to [rows, columns]."""
    if x.shape == (rows, columns):
        return x
    return torch.nn.functional.pad(x, (0, columns - x.shape[1], 0, rows - x.shape[0]))


def padded(size: int) -> int:
    """`size` rounded up to the Hadamard block, as EXL3 stores it."""
    return -(-size // BLOCK) * BLOCK


def _to_fp16(scale: torch.Tensor, name: str, which: str) -> torch.Tensor:
    rounded = scale.half().float()
    lost = (rounded == 0) & (scale != 0) | ~torch.isfinite(rounded)
    if lost.any():
        channel = int(lost.nonzero()[0])
        raise QuantizeError(
            f"{which} leaves fp16's range",
            where=f"{name}, channel {channel}",
            found=f"scale {float(scale[channel]):.3e}, fp16 holds 6e-8 to 65504",
            mend="rescale the weight, or leave this tensor unquantized",
        )
    return rounded


def regularize(
    weights: list[torch.Tensor], names: list[str], bits: float, codebook: Codebook, seed: int
) -> Regularized:
    """Scale and rotate weights [k, n_i] that share their input (k and n_i multiples of 128).

    Output channels are brought to equal RMS, then input channels of the rotated weights together, so that one suh and
    therefore one factorised Hessian serves all of them. A channel of zeros gets scale 0 and decodes to exact zeros.
    """
    k = weights[0].shape[0]
    rotated, svh = [], []
    for weight, name in zip(weights, names, strict=True):
        rms = weight.square().mean(dim=0).sqrt()  # [n]
        scale = random_signs(seed, name + "/out", len(rms)) * rms
        # The RMS varies over decades between models; its typical size belongs to suh (see below).
        typical = float(rms[rms > 0].median()) if bool((rms > 0).any()) else 1.0
        scale = scale / 2.0 ** round(np.log2(typical) / 2)
        svh.append(_to_fp16(scale, name, "svh"))
        divisor = torch.where(svh[-1] == 0, 1.0, svh[-1])
        rotated.append(rotate_columns(weight / divisor))
    rms = torch.cat(rotated, dim=1).square().mean(dim=1).sqrt()  # [k]
    suh = random_signs(seed, names[0] + "/in", k) * rms / CODEBOOK_SCALE[codebook][bits]
    suh = _to_fp16(suh, names[0], "suh")
    divisor = torch.where(suh == 0, 1.0, suh)
    return Regularized([rotate_rows(r / divisor[:, None]) for r in rotated], suh, svh)

"""The 128-point Hadamard rotation of EXL3, applied block by block."""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np
import torch

BLOCK: Final = 128


@cache
def matrix() -> torch.Tensor:
    """H128 / sqrt(128), float32 [128, 128]: Sylvester's, H[i, j] = (-1)^popcount(i & j); symmetric, its own inverse."""
    i = np.arange(BLOCK, dtype=np.uint8)
    sign = 1.0 - 2.0 * (np.bitwise_count(i[:, None] & i[None, :]) & 1)
    return torch.from_numpy(sign / np.sqrt(BLOCK)).float()


def rotate_rows(x: torch.Tensor) -> torch.Tensor:
    """P x for x [..., m, n], m a multiple of 128; P is block-diagonal."""
    return torch.matmul(matrix().to(x), x.unflatten(-2, (-1, BLOCK))).flatten(-3, -2)


def rotate_columns(x: torch.Tensor) -> torch.Tensor:
    """x P for x [..., m, n], n a multiple of 128."""
    return torch.matmul(x.unflatten(-1, (-1, BLOCK)), matrix().to(x)).flatten(-2)

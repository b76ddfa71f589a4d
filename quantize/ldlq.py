"""LDLQ: round block after block of input channels, each time correcting for the error made so far.

With H = L D L^T (L unit block lower triangular, 16x16 blocks, D block diagonal), feeding the error of the rows already
rounded back through L makes the total error tr(E^T H E) the sum of each block's own, weighted by D, instead of H.
Source: QuIP (arXiv 2307.13304), QuIP# (arXiv 2402.04396); block size and order as EXL3's tiles need them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import QuantizeError
from .trellis import TILE

# Rows rounded between two large matrix products; inside a group the feedback is a small product per 16 rows.
GROUP = 128

Encode = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Factor:
    """L of the damped Hessian. lower: float32 [k, k] with zero diagonal blocks. damping: the share that was needed."""

    lower: torch.Tensor
    damping: float


def block_ldl(hessian: torch.Tensor, damping: float) -> Factor:
    """Factorise H + damping * mean(diag H) * I, H float32 [k, k] symmetric positive semidefinite, k % 16 == 0.

    Cholesky runs in float64. Should rounding still leave a negative pivot, the damping is doubled, up to ten times,
    and the result says what it took. A zero matrix gives L = 0 (plain nearest-path rounding).
    Raises QuantizeError when H is not finite or not positive semidefinite.
    """
    h = hessian.double()
    if not torch.isfinite(h).all():
        raise QuantizeError("the Hessian is not finite")
    k = len(h)
    mean = float(h.diagonal().mean())
    if mean <= 0:
        return Factor(torch.zeros(k, k), damping)
    for _ in range(11):
        damped = h + damping * mean * torch.eye(k, dtype=h.dtype)
        cholesky, info = torch.linalg.cholesky_ex(damped)
        if int(info) == 0 and bool(torch.isfinite(cholesky).all()):
            break
        damping *= 2
    else:
        raise QuantizeError(
            "the Hessian is not positive semidefinite",
            found=f"no Cholesky factor with damping up to {damping / 2:g}",
            mend="recalibrate: accumulated x x^T cannot have this shape",
        )
    blocks = cholesky.reshape(k // TILE, TILE, k // TILE, TILE)
    diagonal = torch.stack([blocks[b, :, b, :] for b in range(k // TILE)])  # [k/16, 16, 16] lower triangular
    # Right-multiply every block column by the inverse of its diagonal block: solve X D = C.
    columns = cholesky.T.reshape(k // TILE, TILE, k)  # block column b, transposed
    lower = torch.linalg.solve_triangular(diagonal.mT, columns, upper=True).reshape(k, k).T
    lower = lower.reshape(k // TILE, TILE, k // TILE, TILE).clone()
    for b in range(k // TILE):
        lower[b, :, b, :] = 0
    return Factor(lower.reshape(k, k).float(), damping)


def ldlq(weight: torch.Tensor, lower: torch.Tensor, encode: Encode) -> torch.Tensor:
    """Round weight [k, n] bottom-up in blocks of 16 rows; returns the rounded values [k, n].

    encode: rounds a [16, n] block. Block i sees W_i + sum_{j > i} L[j, i]^T (W_j - Q_j).
    """
    k, _ = weight.shape
    quantized, error = torch.empty_like(weight), torch.zeros_like(weight)
    for end in range(k, 0, -GROUP):
        begin = max(0, end - GROUP)
        target = weight[begin:end] + lower[end:, begin:end].T @ error[end:]  # [group, n]
        for row in range(end - TILE, begin - 1, -TILE):
            here = slice(row, row + TILE)
            near = lower[row + TILE : end, here].T @ error[row + TILE : end]
            quantized[here] = encode(target[row - begin : row - begin + TILE] + near)
            error[here] = weight[here] - quantized[here]
    return quantized


def ldlq_reference(weight: torch.Tensor, lower: torch.Tensor, encode: Encode) -> torch.Tensor:
    """`ldlq` without the grouping: one product over all rows below, per block."""
    quantized, error = torch.empty_like(weight), torch.zeros_like(weight)
    for row in range(len(weight) - TILE, -1, -TILE):
        here = slice(row, row + TILE)
        quantized[here] = encode(weight[here] + lower[:, here].T @ error)
        error[here] = weight[here] - quantized[here]
    return quantized


def proxy_error(weight: torch.Tensor, quantized: torch.Tensor, hessian: torch.Tensor | None) -> float:
    """tr(E^T H E) / tr(W^T H W) with E = W - Q, both [k, n]; H = I when None. 0 when W carries no energy under H."""
    w, e = weight.double(), (weight - quantized).double()
    if hessian is None:
        numerator, denominator = e.square().sum(), w.square().sum()
    else:
        h = hessian.double()
        numerator, denominator = ((h @ e) * e).sum(), ((h @ w) * w).sum()
    return float(numerator / denominator) if float(denominator) > 0 else 0.0

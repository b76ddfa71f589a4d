"""LDLQ: round tile after tile, each time correcting for the error made so far.

The error of a quantized weight is measured as tr(E^T Hin E Hout), E = W - Q [k, n]: Hin [k, k] says which input
directions the traffic uses, Hout [n, n] which output directions the model's loss feels. With Hin = L D L^T and
Hout = M D' M^T (L, M unit block lower triangular, 16x16 blocks, D and D' block diagonal), feeding the error of the
tiles already rounded back through L and M makes the total error the sum of each tile's own, weighted by D and D'
instead of Hin and Hout. One-sided LDLQ is the case Hout = I.
Sources: QuIP (arXiv 2307.13304), QuIP# (arXiv 2402.04396); both sides: YAQA (arXiv 2505.22988). Block size and order
are what EXL3's tiles need.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import QuantizeError
from .trellis import RING, TILE, ring_order

# Rows rounded between two large matrix products; inside a group the feedback is a small product per 16 rows.
GROUP = 128

Encode = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Tiles float32 [t, 256] in ring order -> their states uint16 [t, 256] and the values of these float32 [t, 256]."""


@dataclass(frozen=True)
class Factor:
    """L of damped Hessians. lower: float32 [b, k, k], diagonal blocks zero. damping: float64 [b], the shares needed."""

    lower: Tensor
    damping: Tensor


def block_ldl(hessian: Tensor, damping: float) -> Factor:
    """Factorise H + damping * mean(diag H) * I for H float32 [b, k, k] symmetric positive semidefinite, k % 16 == 0.

    Cholesky runs in float64. Should rounding still leave a negative pivot, that matrix' damping is doubled, up to ten
    times, and the result says what it took. A zero matrix gives L = 0 (plain nearest-path rounding).
    Raises QuantizeError when H is not finite or not positive semidefinite.
    """
    if not bool(torch.isfinite(hessian).all()):
        raise QuantizeError("the Hessian is not finite", mend="recalibrate; a token's activations overflowed")
    b, k, _ = hessian.shape
    factored = [_cholesky(h.double(), damping) for h in hessian]  # one by one: CUDA's batched solver is slower
    cholesky = torch.stack([factor for factor, _ in factored])
    shares = torch.tensor([share for _, share in factored], dtype=torch.float64)
    blocks = cholesky.reshape(b, k // TILE, TILE, k // TILE, TILE)
    diagonal = blocks.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)  # [b, k/16, 16, 16] lower triangular
    # Right-multiply every block column by the inverse of its diagonal block: solve X D = C, transposed.
    columns = cholesky.mT.reshape(b, k // TILE, TILE, k)
    lower = torch.linalg.solve_triangular(diagonal.mT, columns, upper=True).reshape(b, k, k).mT
    lower = lower.reshape(b, k // TILE, TILE, k // TILE, TILE).clone()
    lower.diagonal(dim1=1, dim2=3).zero_()
    return Factor(lower.reshape(b, k, k).float(), shares)


def _cholesky(h: Tensor, damping: float) -> tuple[Tensor, float]:
    """Lower factor of damped H float64 [k, k], and the damping it took."""
    mean = float(h.diagonal().mean())
    if mean == 0:
        return torch.eye(len(h)).to(h), damping
    for doubled in range(11):
        share = damping * 2**doubled
        cholesky, info = torch.linalg.cholesky_ex(h + share * mean * torch.eye(len(h)).to(h))
        if int(info) == 0 and bool(torch.isfinite(cholesky).all()):
            return cholesky, share
    raise QuantizeError(
        "the Hessian is not positive semidefinite",
        found=f"no Cholesky factor with damping up to {share:g}",
        mend="recalibrate: accumulated x x^T cannot have this shape",
    )


def to_ring(x: Tensor) -> Tensor:
    """[..., 16, 16] row-major -> [..., 256] in ring order."""
    return x.flatten(-2)[..., torch.from_numpy(ring_order()).to(x.device)]


def from_ring(tiles: Tensor) -> Tensor:
    """[..., 256] in ring order -> [..., 16, 16] row-major; the inverse of `to_ring`."""
    place = torch.from_numpy(np.argsort(ring_order())).to(tiles.device)
    return tiles[..., place].unflatten(-1, (TILE, TILE))


def ldlq(weight: Tensor, lower_in: Tensor, lower_out: Tensor | None, encode: Encode) -> tuple[Tensor, Tensor]:
    """Round weights [b, k, n] of one shape; returns states uint16 [b, k/16, n/16, 256] and values float32 [b, k, n].

    lower_in [b or 1, k, k] and lower_out [b or 1, n, n] as from `block_ldl`; lower_out None stands for Hout = I.
    Tile (i, j) sees W_ij + sum of L[i', i]^T E_i'j' M[j', j] over the tiles (i', j') below, right, and below right.
    Runs on the tensors' device and encodes as many tiles at once as do not depend on each other: a row of tiles of
    all weights, or with lower_out an anti-diagonal.
    """
    if lower_out is not None:
        return _ldlq_two_sided(weight, lower_in, lower_out, encode)
    b, k, n = weight.shape
    states = torch.empty((b, k // TILE, n // TILE, RING), dtype=torch.uint16, device=weight.device)
    quantized, error = torch.empty_like(weight), torch.zeros_like(weight)
    for end in range(k, 0, -GROUP):
        begin = max(0, end - GROUP)
        target = weight[:, begin:end] + lower_in[:, end:, begin:end].mT @ error[:, end:]  # [b, group, n]
        for row in range(end - TILE, begin - 1, -TILE):
            here = slice(row, row + TILE)
            near = lower_in[:, row + TILE : end, here].mT @ error[:, row + TILE : end]
            block = target[:, row - begin : row - begin + TILE] + near  # [b, 16, n]
            tiles = to_ring(block.unflatten(2, (n // TILE, TILE)).transpose(1, 2)).reshape(-1, RING)
            encoded, values = encode(tiles)
            states[:, row // TILE] = encoded.view(b, n // TILE, RING)
            quantized[:, here] = from_ring(values).view(b, n // TILE, TILE, TILE).transpose(1, 2).flatten(2)
            error[:, here] = weight[:, here] - quantized[:, here]
    return states, quantized


def _ldlq_two_sided(weight: Tensor, lower_in: Tensor, lower_out: Tensor, encode: Encode) -> tuple[Tensor, Tensor]:
    b, k, n = weight.shape
    rows, columns = k // TILE, n // TILE
    states = torch.empty((b, rows, columns, RING), dtype=torch.int16, device=weight.device)
    tiles = weight.view(b, rows, TILE, columns, TILE).transpose(2, 3)  # [b, rows, columns, 16, 16]
    quantized = torch.empty_like(tiles, memory_format=torch.contiguous_format)
    error = torch.zeros(b, rows, TILE, n, dtype=weight.dtype, device=weight.device)
    fed = torch.zeros(b, columns, k, TILE, dtype=weight.dtype, device=weight.device)  # E (I + M), by tile column
    below = lower_in.view(-1, k, rows, TILE).permute(0, 2, 3, 1)  # L[:, i]^T: [b, rows, 16, k]
    right = lower_out.view(-1, n, columns, TILE).transpose(1, 2)  # M[:, j]: [b, columns, n, 16]
    for diagonal in range(rows + columns - 2, -1, -1):
        i = torch.arange(max(0, diagonal - columns + 1), min(rows, diagonal + 1), device=weight.device)
        j = diagonal - i
        along = error[:, i] @ right[:, j]  # [b, t, 16, 16]: what the tile's own row of tiles has left
        target = tiles[:, i, j] + along + below[:, i] @ fed[:, j]
        encoded, values = encode(to_ring(target).reshape(-1, RING))
        states[:, i, j] = encoded.view(torch.int16).view(b, len(i), RING)
        rounded = from_ring(values).view(b, len(i), TILE, TILE)
        quantized[:, i, j] = rounded
        left = tiles[:, i, j] - rounded
        error.view(b, rows, TILE, columns, TILE)[:, i, :, j] = left.transpose(0, 1)
        fed.view(b, columns, rows, TILE, TILE)[:, j, i] = along + left
    return states.view(torch.uint16), quantized.transpose(2, 3).reshape(b, k, n)


def ldlq_reference(weight: Tensor, lower_in: Tensor, lower_out: Tensor | None, encode: Encode) -> Tensor:
    """`ldlq` of one weight [k, n] by its formula, tile by tile; returns the values [k, n]."""
    k, n = weight.shape
    left = lower_in.mT + torch.eye(k).to(weight)  # (I + L)^T
    right = torch.eye(n).to(weight) + (0 if lower_out is None else lower_out)
    quantized, error = torch.empty_like(weight), torch.zeros_like(weight)
    for row in range(k - TILE, -1, -TILE):
        for column in range(n - TILE, -1, -TILE):
            here = slice(row, row + TILE), slice(column, column + TILE)
            target = weight[here] + left[here[0]] @ error @ right[:, here[1]]  # this tile's own error is still 0
            quantized[here] = from_ring(encode(to_ring(target)[None])[1])[0]
            error[here] = weight[here] - quantized[here]
    return quantized


def precision(x: Tensor) -> torch.dtype:
    """For products of whole matrices: float64, but float32 on CUDA: consumer cards are 64 times slower in float64."""
    return torch.float32 if x.is_cuda else torch.float64


def energy(error: Tensor, hin: Tensor | None, hout: Tensor | None) -> Tensor:
    """tr(E^T Hin E Hout), float64, for E [..., k, n]; a Hessian that is None is the identity."""
    e = error.to(precision(error))
    left = e if hin is None else hin.to(e) @ e
    right = e if hout is None else e @ hout.to(e)
    return (left * right).sum(dim=(-2, -1), dtype=torch.float64)


def proxy_error(weight: Tensor, quantized: Tensor, hin: Tensor | None, hout: Tensor | None = None) -> float:
    """tr(E^T Hin E Hout) / tr(W^T Hin W Hout), E = W - Q [k, n]. 0 when W carries no energy under them."""
    numerator = float(energy(weight - quantized, hin, hout))
    denominator = float(energy(weight, hin, hout))
    return numerator / denominator if denominator > 0 else 0.0

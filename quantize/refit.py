"""Refit suh and svh to the codes that were chosen: least squares in the metric the codes were rounded in.

With C fixed, W = diag(suh) P C P diag(svh) is linear in suh and in svh, so tr(E^T Hin E Hout) is a quadratic form in
either. A decoder sees only the two vectors: the improvement is free. exllamav3 1.6.5 does the one-sided form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .ldlq import precision


def _metric(hessian: Tensor | None, size: int, like: Tensor) -> Tensor:
    if hessian is None:
        return torch.eye(size).to(like)[None]
    return hessian.to(like)


def _solve(a: Tensor, residual: Tensor) -> Tensor:
    """delta [b, m] of a delta = residual, held at 0 where a says nothing."""
    size = a.shape[-1]
    ridge = 1e-6 * a.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[:, None, None] + torch.finfo(a.dtype).tiny
    delta, info = torch.linalg.solve_ex(a + ridge * torch.eye(size, dtype=a.dtype, device=a.device), residual)
    return torch.where((info == 0)[:, None] & torch.isfinite(delta), delta, 0.0)


def refit_scales(
    weights: Tensor, codes: Tensor, suh: Tensor, svh: Tensor, hin: Tensor | None, hout: Tensor | None, rounds: int = 2
) -> tuple[Tensor, Tensor]:
    """New suh [b, k] and svh [b, n], float32, that lower tr(E^T Hin E Hout).

    weights: float32 [b, k, n]. codes: P C P [b, k, n], the rotated decoded codes. hin, hout: [b or 1, k, k] and
    [b or 1, n, n], damped as the caller wants them; None is the identity. A scale never changes its sign or leaves
    half to twice its size, and one that is zero stays zero.
    """
    w, c = weights.to(precision(weights)), codes.to(precision(codes))
    _, k, n = w.shape
    a_in, a_out = _metric(hin, k, w), _metric(hout, n, w)
    left, right = suh.to(w), svh.to(w)
    for _ in range(rounds):
        v = left[:, :, None] * c
        error = w - v * right[:, None, :]
        gradient = ((a_in @ v) * (error @ a_out)).sum(dim=1)  # [b, n]
        right = _step(right, _solve((v.mT @ a_in @ v) * a_out, gradient))
        u = c * right[:, None, :]
        error = w - left[:, :, None] * u
        gradient = ((a_in @ error @ a_out) * u).sum(dim=2)  # [b, k]
        left = _step(left, _solve((u @ a_out @ u.mT) * a_in, gradient))
    return left.float(), right.float()


def _step(scale: Tensor, delta: Tensor) -> Tensor:
    ratio = torch.where(scale == 0, 1.0, 1 + delta / torch.where(scale == 0, 1.0, scale))
    return torch.where((ratio > 0.5) & (ratio < 2), scale * ratio, scale)

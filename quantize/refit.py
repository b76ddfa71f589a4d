"""Refit suh and svh to the codes that were chosen: least squares in the metric the codes were rounded in.

With C fixed, W = diag(suh) P C P diag(svh) is linear in suh and in svh, so tr(E^T Hin E Hout) is a quadratic form in
either. A decoder sees only the two vectors: the improvement is free. exllamav3 1.6.5 does the one-sided form.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from .ldlq import precision


def _metric(hessian: Tensor | None, size: int, like: Tensor) -> Tensor:
    if hessian is None:
        return torch.eye(size).to(like)[None]
    return hessian.to(like)


RIDGES: Final = (1e-6, 1e-4, 1e-2)
"""Shares of the mean diagonal that are added, one after the other until Cholesky finds no negative pivot."""


def _solve(a: Tensor, residual: Tensor) -> Tensor:
    """delta [b, m] of a delta = residual, a [b, m, m] positive semidefinite; 0 where no factor was found.

    One matrix at a time: batched factorisations are slower on CUDA, and on the CPU torch 2.13's batched LU never ends
    once `torch.set_num_threads` was called with more than one thread (MKL inside an OpenMP region).
    """
    deltas = torch.zeros_like(residual)
    for matrix, right, delta in zip(a, residual, deltas, strict=True):
        mean = matrix.diagonal().mean()
        for ridge in RIDGES:
            damped = matrix.clone()
            damped.diagonal().add_(ridge * mean + torch.finfo(a.dtype).tiny)
            factor, info = torch.linalg.cholesky_ex(damped)
            if int(info) == 0:
                delta.copy_(torch.cholesky_solve(right[:, None], factor)[:, 0])
                break
    return torch.where(torch.isfinite(deltas), deltas, 0.0)


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
    w_out = w @ a_out  # [b, k, n]
    u_out = (c * right[:, None, :]) @ a_out  # of u = P C P diag(svh)
    for _ in range(rounds):
        v = left[:, :, None] * c
        in_v = a_in @ v
        gradient = (in_v * (w_out - left[:, :, None] * u_out)).sum(dim=1)  # [b, n]
        right = _step(right, _solve((v.mT @ in_v) * a_out, gradient))
        u = c * right[:, None, :]
        u_out = u @ a_out
        gradient = ((a_in @ (w_out - left[:, :, None] * u_out)) * u).sum(dim=2)  # [b, k]
        left = _step(left, _solve((u_out @ u.mT) * a_in, gradient))
    return left.float(), right.float()


def _step(scale: Tensor, delta: Tensor) -> Tensor:
    ratio = torch.where(scale == 0, 1.0, 1 + delta / torch.where(scale == 0, 1.0, scale))
    return torch.where((ratio > 0.5) & (ratio < 2), scale * ratio, scale)

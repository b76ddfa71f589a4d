"""Integer baselines: round-to-nearest and GPTQ with a scale and a minimum per group of input channels.

Weights are in x W orientation; a group is `group` input channels of one output channel. The scale and minimum stay in
float32: stored in 16 bits each, they would add 32 / group bits per weight (0.25 at 128).
"""

from __future__ import annotations

import torch
from torch import Tensor


def rtn(weight: Tensor, bits: int = 3, group: int = 128) -> Tensor:
    """Round-to-nearest: weight float32 [..., in, out] -> its dequantized values. `group` divides in."""
    groups = weight.unflatten(-2, (-1, group))  # [..., G, group, out]
    scale, low = _grid(groups, bits)
    return _round(groups, scale, low, bits).flatten(-3, -2)


def gptq(weight: Tensor, hessian: Tensor, bits: int = 3, group: int = 128, damping: float = 0.01) -> Tensor:
    """GPTQ (arXiv 2210.17323) with static channel order: weight float32 [..., in, out] -> its dequantized values.

    hessian: [..., in, in], sum or mean of x x^T; damping: share of its mean diagonal added. A group's scale comes from
    the weights as corrected by then. Raises torch.linalg.LinAlgError where the damped Hessian is not positive definite.
    """
    h = hessian.double()
    mean = h.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    h = h + torch.where(mean > 0, damping * mean, 1.0) * torch.eye(h.shape[-1], dtype=h.dtype, device=h.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))
    upper = torch.linalg.cholesky(inverse, upper=True).to(weight.dtype)  # [..., in, in]
    rest, quantized = weight.clone(), torch.empty_like(weight)
    for channel in range(weight.shape[-2]):
        if channel % group == 0:
            scale, low = _grid(rest[..., channel : channel + group, :], bits)
        row = rest[..., channel : channel + 1, :]  # [..., 1, out]
        quantized[..., channel : channel + 1, :] = _round(row, scale, low, bits)
        error = (row - quantized[..., channel : channel + 1, :]) / upper[..., channel, channel, None, None]
        rest[..., channel + 1 :, :] -= upper[..., channel, channel + 1 :, None] * error
    return quantized


def _grid(groups: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scale and minimum of each group [..., group, out] -> [..., 1, out] each."""
    low, high = groups.amin(-2, keepdim=True), groups.amax(-2, keepdim=True)
    scale = (high - low) / (2**bits - 1)
    return torch.where(scale > 0, scale, 1.0), low


def _round(values: Tensor, scale: Tensor, low: Tensor, bits: int) -> Tensor:
    return ((values - low) / scale).round().clamp(0, 2**bits - 1) * scale + low

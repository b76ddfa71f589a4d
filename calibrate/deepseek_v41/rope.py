"""Rotary position embedding of DeepSeek-V4.1: interleaved pairs in the last `qk_rope_head_dim` dimensions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .config import V41Config


def frequencies(config: V41Config, compressing: bool) -> Tensor:
    """Radians per position of each pair, float32 [rope / 2].

    Window-only layers turn at `rope_theta`; compressing layers at `compress_rope_theta` under YaRN
    (arXiv:2309.00071, without its attention temperature).
    """
    dims = config.qk_rope_head_dim
    exponents = torch.arange(0, dims, 2, dtype=torch.float32) / dims
    if not compressing:
        return 1.0 / config.rope_theta**exponents
    theta = config.compress_rope_theta

    def pair_turning(times: float) -> float:
        """The (fractional) pair that turns this often within the original context."""
        return dims * math.log(config.yarn_original_positions / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_turning(config.yarn_beta_fast)), 0)
    high = min(math.ceil(pair_turning(config.yarn_beta_slow)), dims - 1)
    pairs = torch.arange(dims // 2, dtype=torch.float32)
    interpolated = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)  # 0 keeps the frequency, 1 divides it
    plain = 1.0 / theta**exponents
    return plain / config.yarn_factor * interpolated + plain * (1 - interpolated)


def rotate(x: Tensor, positions: Tensor, freqs: Tensor, inverse: bool = False) -> Tensor:
    """Turn the last 2 len(freqs) dimensions of x [T, ..., D] by its positions [T]; `inverse` turns back."""
    # float32 angles, as in the reference: rounding of large angles is part of the model's arithmetic
    angles = torch.outer(positions.to(torch.float32), freqs)  # [T, rope / 2]
    angles = angles.view(angles.shape[0], *[1] * (x.dim() - 2), angles.shape[1])
    cos, sin = angles.cos(), angles.sin()
    if inverse:
        sin = -sin
    still, turning = x.split([x.shape[-1] - 2 * len(freqs), 2 * len(freqs)], dim=-1)
    even, odd = turning.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
    return torch.cat([still, turned], dim=-1)

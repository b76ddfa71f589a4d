"""The rounding of DeepSeek-V4.1's key/value caches, in floating point: values move to the nearest one a cache can hold.

The release's inference code rounds whatever it caches, always and in the middle of its arithmetic, and the model was
trained with that. All channels are rounded, after the rotary embedding and the rotated ones among them, in blocks
along the last dimension that share a scale:

| cached | values | block | scale, from the block's largest magnitude m |
|---|---|---|---|
| keys/values of the sliding window | FP8 E4M3 | 32 | smallest power of two >= max(m, 1e-4) / 448 |
| compressed latents | FP4 E2M1 | 16 | max(m / 6, 2^-9) rounded to E4M3 |
| index keys, and the index queries | FP4 E2M1 | 32 | smallest power of two >= m / 6 |

Unlike its predecessor V4 there is no Hadamard rotation before the indexer's rounding, and the rotary part is not left
out. Gradients pass through unchanged (straight-through), as in training.
Source: `_window_kv`, `_compress_kv` and `Indexer.forward` in inference/model.py, `act_quant` and `fp4_act_quant` in
inference/kernel.py of deepseek-ai/DeepSeek-V4.1-Flash; transformers' deepseek_v41 does the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BLOCK = 32
"""Channels that share a power-of-two scale."""
LATENT_BLOCK = 16
"""Channels of a compressed latent that share an E4M3 scale."""

E4M3_MAX = 448.0
E2M1_MAX = 6.0
LEAST_WINDOW = 1e-4
"""Magnitudes below it do not make a window block's scale any smaller."""
LEAST_LATENT_SCALE = 2.0**-9
"""The smallest E4M3 number above 0."""
LEAST_INDEX_SCALE = 2.0**-126


def round_window(x: Tensor) -> Tensor:
    """Keys/values of the sliding window [..., D], D a multiple of 32, as the FP8 cache holds them."""

    def scale(largest: Tensor) -> Tensor:
        return _power_of_two(largest.clamp(min=LEAST_WINDOW) / E4M3_MAX)

    return _Rounded.apply(x, BLOCK, scale, _e4m3)


def round_latents(x: Tensor) -> Tensor:
    """Compressed latents [..., D], D a multiple of 16, as the FP4 cache holds them. Magnitudes end at 6 * 448."""

    def scale(largest: Tensor) -> Tensor:
        return _e4m3((largest / E2M1_MAX).clamp(LEAST_LATENT_SCALE, E4M3_MAX))

    return _Rounded.apply(x, LATENT_BLOCK, scale, _e2m1)


def round_index(x: Tensor) -> Tensor:
    """Index keys or queries [..., D], D a multiple of 32, as the FP4 cache of index keys holds them."""

    def scale(largest: Tensor) -> Tensor:
        return _power_of_two((largest / E2M1_MAX).clamp(min=LEAST_INDEX_SCALE))

    return _Rounded.apply(x, BLOCK, scale, _e2m1)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, block: int, scale: Callable[[Tensor], Tensor], grid: Callable[[Tensor], Tensor]
    ) -> Tensor:
        blocks = x.unflatten(-1, (-1, block))  # [..., D / block, block]
        scales = scale(blocks.abs().amax(-1, keepdim=True))
        return (grid(blocks / scales) * scales).flatten(-2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient, None, None, None


def _power_of_two(least: Tensor) -> Tensor:
    """The smallest power of two that is at least `least`, which is above 0."""
    mantissa, exponent = torch.frexp(least)  # mantissa in [0.5, 1)
    return torch.ldexp(torch.ones_like(least), torch.where(mantissa == 0.5, exponent - 1, exponent))


def _e4m3(x: Tensor) -> Tensor:
    """The nearest E4M3 number, ties to the even code; |x| at most 448."""
    return x.to(torch.float8_e4m3fn).to(x.dtype)


def _e2m1(x: Tensor) -> Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, ties to the even code."""
    x = x.clamp(-E2M1_MAX, E2M1_MAX)
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0)).to(x.dtype)
    return torch.round(x / step) * step  # torch.round goes to even, and so do the codes

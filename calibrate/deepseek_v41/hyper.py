"""Manifold-constrained hyper-connections (mHC): the residual is `hc_mult` parallel streams.

Each sub-layer projects the flattened streams once and gets three sets of coefficients: `pre` weighs the
streams into a sub-layer's input, `post` spreads its output over them, `comb` mixes them. The `pre` that one
sub-layer computes is used by the next one. Source: the DeepSeek-V4.1 reference inference code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .blocks import by_tokens, mean_square
from .config import V41Config
from .weights import Weights


@dataclass(frozen=True)
class HyperConnection:
    """Parameters of one sub-layer: fn [(2 + hc) hc, hc H], scale [3], base [(2 + hc) hc], all float32."""

    fn: Tensor
    scale: Tensor
    base: Tensor

    @staticmethod
    def load(weights: Weights, name: str, config: V41Config) -> HyperConnection:
        hc = config.hc_mult
        rows = (2 + hc) * hc
        fn = weights(f"{name}_fn", rows, hc * config.hidden_size)
        return HyperConnection(fn=fn, scale=weights(f"{name}_scale", 3), base=weights(f"{name}_base", rows))

    def coefficients(self, residual: Tensor, config: V41Config) -> tuple[Tensor, Tensor, Tensor]:
        """residual [T, hc, H] -> pre [T, hc], post [T, hc], comb [T, hc, hc]."""
        hc = config.hc_mult
        flat = residual.flatten(1)  # [T, hc H]
        squares = by_tokens(lambda block: mean_square(flat[block]), flat)
        inverse_rms = torch.rsqrt(squares.unsqueeze(-1) + config.rms_norm_eps)
        mixes = flat @ self.fn.T * inverse_rms  # [T, (2 + hc) hc]; normalised after the projection
        pre, post, comb = mixes.split([hc, hc, hc * hc], dim=-1)
        base_pre, base_post, base_comb = self.base.split([hc, hc, hc * hc])
        pre = torch.sigmoid(pre * self.scale[0] + base_pre) + config.hc_eps
        post = 2 * torch.sigmoid(post * self.scale[1] + base_post)
        comb = (comb * self.scale[2] + base_comb).unflatten(-1, (hc, hc))
        return pre, post, sinkhorn(comb, config.hc_sinkhorn_iters, config.hc_eps)


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Near doubly stochastic matrices [..., n, n] from logits: row softmax, then alternating normalisation.

    Ends on a column step, so columns sum to 1 within `eps` and rows as far as `iterations` have converged.
    """
    comb = (logits.softmax(dim=-1) + eps).flatten(0, -3)  # [M, n, n]
    comb = comb.permute(1, 2, 0).contiguous()  # [n, n, M]: n is 4, and long rows are three times as fast
    return _Alternate.apply(comb, iterations, eps).permute(2, 0, 1).contiguous().view(logits.shape)


class _Alternate(torch.autograd.Function):
    """The alternating normalisation of [n, n, M], columns first. Autograd's own records of so many tiny steps would
    take longer than the steps."""

    @staticmethod
    def forward(ctx: Any, comb: Tensor, iterations: int, eps: float) -> Tensor:
        saved = []
        for step in range(2 * iterations - 1):
            total = comb.sum(dim=step % 2, keepdim=True) + eps  # columns, rows, columns, ...
            comb = comb / total
            if ctx.needs_input_grad[0]:
                saved += [total, comb]
        ctx.save_for_backward(*saved)
        return comb

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        saved = ctx.saved_tensors
        for step in reversed(range(len(saved) // 2)):
            total, comb = saved[2 * step : 2 * step + 2]  # comb = x / total, total = sum(x) + eps
            gradient = (gradient - (gradient * comb).sum(dim=step % 2, keepdim=True)) / total
        return gradient, None, None


def fold(residual: Tensor, pre: Tensor) -> Tensor:
    """Streams [T, hc, H] weighed by pre [T, hc] into a sub-layer's input [T, H]."""
    return by_tokens(lambda block: (pre[block].unsqueeze(-1) * residual[block]).sum(dim=1), residual)


def add_spread(output: Tensor, streams: Tensor, post: Tensor) -> Tensor:
    """Streams [T, hc, H] with post[j] output [T, H] added to each: more of a sub-layer's output behind `spread`."""
    return by_tokens(
        lambda block: torch.addcmul(streams[block], post[block].unsqueeze(-1), output[block].unsqueeze(1)), streams
    )


def spread(output: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """New streams [T, hc, H]: out[j] = post[j] output + sum_i comb[i, j] residual[i] (comb's first index)."""

    def part(block: slice) -> Tensor:
        return post[block].unsqueeze(-1) * output[block].unsqueeze(1) + comb[block].mT @ residual[block]

    return by_tokens(part, residual)

"""Manifold-constrained hyper-connections (mHC): the residual is `hc_mult` parallel streams.

Each sub-layer projects the flattened streams once and gets three sets of coefficients: `pre` weighs the
streams into a sub-layer's input, `post` spreads its output over them, `comb` mixes them. The `pre` that one
sub-layer computes is used by the next one. Source: the DeepSeek-V4.1 reference inference code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
        inverse_rms = torch.rsqrt(flat.square().mean(-1, keepdim=True) + config.rms_norm_eps)
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
    comb = logits.softmax(dim=-1) + eps
    comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(dim=-1, keepdim=True) + eps)
        comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    return comb


def fold(residual: Tensor, pre: Tensor) -> Tensor:
    """Streams [T, hc, H] weighed by pre [T, hc] into a sub-layer's input [T, H]."""
    return (pre.unsqueeze(-1) * residual).sum(dim=1)


def spread(output: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """New streams [T, hc, H]: out[j] = post[j] output + sum_i comb[i, j] residual[i] (comb's first index)."""
    return post.unsqueeze(-1) * output.unsqueeze(1) + comb.mT @ residual

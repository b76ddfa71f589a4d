"""The mixture of experts: router and clamped SwiGLU."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .config import V41Config


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit), any shape; the input of an expert's down projection.

    The clamps belong to the model (they keep low-precision experts in range); each value is within limit².
    """
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def expert_forward(x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, limit: float) -> Tensor:
    """One expert on x [n, H]: w1 (gate) [I, H], w3 (up) [I, H], w2 (down) [H, I] -> [n, H]."""
    return clamped_swiglu(x @ w1.T, x @ w3.T, limit) @ w2.T


def route(x: Tensor, gate: Tensor, bias: Tensor, config: V41Config) -> tuple[Tensor, Tensor]:
    """Experts of each token: x [T, H], gate [E, H], bias [E] -> ids int64 [T, k], weights float32 [T, k].

    The bias takes part in the choice only; the weights are the chosen experts' own scores, normalised to 1
    and multiplied by `routed_scaling_factor`. Ids come in the order of falling biased score.
    """
    scores = F.softplus(x @ gate.T).sqrt()  # [T, E]
    ids = (scores + bias).topk(config.num_experts_per_tok, dim=-1).indices  # [T, k]
    weights = scores.gather(1, ids)
    # the reference's guard: a sum of exactly 0 must give 0, not NaN
    weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return ids, weights * config.routed_scaling_factor

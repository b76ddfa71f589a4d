"""The mixture of experts: router and clamped SwiGLU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import V41Config


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit), any shape; the input of an expert's down projection.

    The clamps belong to the model (they keep low-precision experts in range); each value is within limit².
    """
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def router_scores(x: Tensor, gate: Tensor) -> Tensor:
    """sqrt(softplus) of the router's logits: x [T, H], gate [E, H] -> [T, E], before the bias."""
    return F.softplus(x @ gate.T).sqrt()


def route(x: Tensor, gate: Tensor, bias: Tensor, config: V41Config) -> tuple[Tensor, Tensor]:
    """Experts of each token: x [T, H], gate [E, H], bias [E] -> ids int64 [T, k], weights float32 [T, k].

    The bias takes part in the choice only; the weights are the chosen experts' own scores, normalised to 1
    and multiplied by `routed_scaling_factor`. Ids come in the order of falling biased score.
    """
    scores = router_scores(x, gate)  # [T, E]
    ids = (scores + bias).topk(config.num_experts_per_tok, dim=-1).indices  # [T, k]
    return ids, _normalised(scores.gather(1, ids), config)


def routing_weights(x: Tensor, ids: Tensor, gate: Tensor, config: V41Config) -> Tensor:
    """The weights [T, k] that `route` gives the experts `ids` [T, k], to be differentiated: x [T, H], gate [E, H].

    Scores are taken of the chosen alone: the square root has no gradient at the 0 to which others' may underflow.
    """
    return _normalised(F.softplus((x @ gate.T).gather(1, ids)).sqrt(), config)


def _normalised(chosen: Tensor, config: V41Config) -> Tensor:
    # the reference's guard: a sum of exactly 0 must give 0, not NaN
    weights = chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * config.routed_scaling_factor


def next_ranks(x: Tensor, chosen: Tensor, ranks: int, gate: Tensor, bias: Tensor) -> Tensor:
    """The experts that come just behind `chosen` (`route`'s ids [T, k]) in the order of falling biased score.

    x [T, H], gate [E, H], bias [E] -> ids int64 [T, min(ranks, E - k)]. None is among the chosen, ties included.
    """
    others = (router_scores(x, gate) + bias).scatter(1, chosen, -torch.inf)  # [T, E]
    return others.topk(min(ranks, len(gate) - chosen.shape[1]), dim=-1).indices

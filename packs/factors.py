"""Quantize one routed expert under both sides of its Fisher information, from the passes over the traffic.

Kronecker factors per projection (`quantize.kronecker`), shrunk towards those of all the layer's experts; how much, and
the damping, is chosen per layer and projection by the error that one half of the traffic leaves on the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from ..calibrate.deepseek_v41.experts import clamped_swiglu
from ..calibrate.layout import expert_prefix
from ..calibrate.passes import LayerTraffic
from ..parallel import ordered_map
from ..quantize.kronecker import FactorSums, Regularization, choose_regularization, shrink
from ..quantize.linear import Linear, quantize_linears
from .expert import ADJACENT_WEIGHT, ExpertReport, packed, report, shares
from .recipe import Recipe

Weights = tuple[Tensor, Tensor, Tensor]
"""w1 (gate) [I, H], w3 (up) [I, H], w2 (down) [H, I], as in the checkpoint."""

Halves = dict[str, tuple[FactorSums, FactorSums]]
"""Projection (w1, w3, w2) -> one expert's sums over both halves of the traffic."""

TRIED: Final = 2
"""Experts of a layer by which shrinkage and damping are chosen."""


@dataclass(frozen=True)
class LayerFactors:
    """What a layer's experts share, by projection. priors: the sums of all of them, as one expert's."""

    priors: dict[str, FactorSums]
    chosen: dict[str, Regularization]


def expert_sums(traffic: LayerTraffic, expert: int, weights: Weights) -> Halves:
    """Factors of one expert over all passes, in traffic order; zeros where no token was routed to it.

    Raises CalibrationError if a file of a pass is missing or damaged."""
    shapes = {"w1": weights[0].shape[::-1], "w3": weights[1].shape[::-1], "w2": weights[2].shape[::-1]}
    sums = {p: (FactorSums(1, *shape), FactorSums(1, *shape)) for p, shape in shapes.items()}
    for half, piece in traffic.gradients(expert, weights):
        for p, x, gradients in (
            ("w1", piece.x, piece.d_gate),
            ("w3", piece.x, piece.d_up),
            ("w2", piece.a, piece.d_down),
        ):
            sums[p][half].add(0, x, gradients)
    return sums


def layer_factors(traffic: LayerTraffic, threads: int) -> LayerFactors:
    """One look at all experts of a layer, several at a time; memory holds the sums of `TRIED` and those in work."""
    experts = len(traffic.counts)
    by_traffic = traffic.counts.argsort(stable=True)
    reached = by_traffic[traffic.counts[by_traffic] > 0]
    spread = torch.linspace(0, len(reached) - 1, min(TRIED, len(reached))).round().long()
    tried = set(reached[spread].tolist())
    kept: list[Halves] = []
    totals: Halves = {}

    def one(expert: int) -> Halves:
        return expert_sums(traffic, expert, traffic.layer.expert(expert))

    for expert, sums in zip(range(experts), ordered_map(one, range(experts), threads), strict=True):
        if expert in tried:
            kept.append(sums)
        totals = {p: (totals[p][0] + s[0], totals[p][1] + s[1]) if totals else s for p, s in sums.items()}

    def choose(p: str) -> Regularization:
        halves = [FactorSums.stacked([sums[p][half] for sums in kept]) for half in range(2)]
        return choose_regularization(halves[0], halves[1], TRIED, totals[p])

    chosen = dict(zip(totals, ordered_map(choose, totals, threads), strict=True))
    return LayerFactors({p: first + second for p, (first, second) in totals.items()}, chosen)


def quantize_expert_two_sided(
    traffic: LayerTraffic, expert: int, weights: Weights, factors: LayerFactors, adjacent: Tensor, recipe: Recipe
) -> tuple[dict[str, Tensor], ExpertReport]:
    """EXL3 tensors of one expert and how well they fit. adjacent: float32 [a, H], inputs that nearly came here.

    An adjacent token has no gradient: it informs the input side only, as if the loss felt it as much as it feels the
    layer's average token. Raises QuantizeError naming the linear, CalibrationError for a damaged file of a pass.
    """
    layer, limit = traffic.layer.index, traffic.layer.config.swiglu_limit
    names = {p: expert_prefix(layer, expert, p) for p in ("w1", "w3", "w2")}
    near = {"w1": adjacent, "w3": adjacent}
    near["w2"] = clamped_swiglu(adjacent @ weights[0].T, adjacent @ weights[1].T, limit)  # [a, I]
    linears: dict[str, Linear] = {}
    tokens = 0
    for (p, (first, second)), weight in zip(expert_sums(traffic, expert, weights).items(), weights, strict=True):
        own, prior, chosen = first + second, factors.priors[p], factors.chosen[p]
        tokens = int(own.tokens)
        hin = own.hin
        energy = near[p].square().sum()
        if energy > 0 and prior.tokens > 0:
            typical = float(prior.trace / prior.tokens) * len(adjacent) / energy
            hin = hin + (ADJACENT_WEIGHT * typical) * (near[p].T @ near[p])
        in_share = 1 - shares(tokens, len(adjacent), chosen.shrink_in)[2]
        out_share = 1 - shares(tokens, 0, chosen.shrink_out)[2]
        options = replace(recipe.options, damping=chosen.damping_in, output_damping=chosen.damping_out)
        linears |= quantize_linears(
            {names[p]: weight.T.contiguous()},
            shrink(hin, prior.hin, in_share),
            shrink(own.hout, prior.hout, out_share),
            options,
        )
    counts = (
        int(traffic.counts[expert]),
        len(adjacent),
        *shares(tokens, len(adjacent), factors.chosen["w1"].shrink_in),
    )
    asked = {p: [c.shrink_in, c.damping_in, c.shrink_out, c.damping_out] for p, c in factors.chosen.items()}
    return packed(linears, names), report(layer, expert, counts, linears, names, asked)

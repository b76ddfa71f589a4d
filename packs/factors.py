"""Quantize routed experts under both sides of their Fisher information, from the passes over the traffic.

Kronecker factors per projection (`quantize.kronecker`), shrunk towards those of all the layer's experts; how much, and
the damping, is chosen per layer and projection by the error that one half of the traffic leaves on the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from ..calibrate.family import ExpertWeights
from ..calibrate.layout import Layout
from ..calibrate.passes import LayerTraffic
from ..parallel import ordered_map
from ..quantize.kronecker import FactorSums, Regularization, choose_regularization, shrink
from ..quantize.linear import Linear, quantize_linears
from .expert import ADJACENT_WEIGHT, ExpertReport, packed, report, shares
from .recipe import Recipe

Halves = dict[str, tuple[FactorSums, FactorSums]]
"""Projection (w1, w3, w2) -> one expert's sums over both halves of the traffic."""

TRIED: Final = 2
"""Experts of a layer by which shrinkage and damping are chosen."""

GROUP_ON_CARD: Final = 8
"""Experts quantized together on a card, which one would not fill. At V4.1's size each one's factors take 0.4 GB."""


@dataclass(frozen=True)
class LayerFactors:
    """What a layer's experts share, by projection. priors: the sums of all of them, as one expert's."""

    priors: dict[str, FactorSums]
    chosen: dict[str, Regularization]


def expert_sums(traffic: LayerTraffic, expert: int, weights: ExpertWeights) -> Halves:
    """Factors of one expert over all passes, in traffic order; zeros where no token was routed to it.

    Raises CalibrationError if a file of a pass is missing or damaged."""
    sums = {}
    for p, weight in zip(("w1", "w3", "w2"), weights, strict=True):
        n, k = weight.shape
        sums[p] = FactorSums(1, k, n, weight.device), FactorSums(1, k, n, weight.device)
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


def quantize_two_sided(
    traffic: LayerTraffic,
    experts: Sequence[int],
    adjacent: dict[int, Tensor],
    factors: LayerFactors,
    recipe: Recipe,
    layout: Layout,
) -> list[tuple[dict[str, Tensor], ExpertReport]]:
    """EXL3 tensors of some experts of a layer, quantized together, and how well they fit.

    adjacent: tokens int64 [a] by expert that nearly came there (`LayerTraffic.adjacent`). They have no gradient: they
    inform the input side only, as if the loss felt them as much as it feels the layer's average token.
    Raises QuantizeError naming the linear, CalibrationError for a damaged file of a pass.
    """
    weights: dict[str, list[Tensor]] = {p: [] for p in factors.priors}
    hin: dict[str, list[Tensor]] = {p: [] for p in factors.priors}
    hout: dict[str, list[Tensor]] = {p: [] for p in factors.priors}
    seen = []  # (tokens of all passes, adjacent tokens) of each expert
    for expert in experts:
        original = traffic.layer.expert(expert)
        x = traffic.inputs(adjacent.get(expert, torch.zeros(0, dtype=torch.int64)))  # [a, H]
        near = {"w1": x, "w3": x, "w2": traffic.layer.activation(x @ original[0].T, x @ original[1].T)}
        tokens = 0
        sums = expert_sums(traffic, expert, original)
        for (p, (first, second)), weight in zip(sums.items(), original, strict=True):
            own, prior, chosen = first + second, factors.priors[p], factors.chosen[p]
            tokens = int(own.tokens)
            in_share = 1 - shares(tokens, len(x), chosen.shrink_in)[2]
            out_share = 1 - shares(tokens, 0, chosen.shrink_out)[2]
            weights[p].append(weight.T.contiguous())
            hin[p].append(shrink(own.hin + _nearly(near[p], prior), prior.hin, in_share))
            hout[p].append(shrink(own.hout, prior.hout, out_share))
        seen.append((tokens, len(x)))
    layer = traffic.layer.index
    names = [{p: layout.expert_prefix(layer, expert, p) for p in ("w1", "w3", "w2")} for expert in experts]
    linears: dict[str, Linear] = {}
    for p, chosen in factors.chosen.items():
        options = replace(recipe.options, damping=chosen.damping_in, output_damping=chosen.damping_out)
        group = {name[p]: weight for name, weight in zip(names, weights.pop(p), strict=True)}
        linears |= quantize_linears(group, torch.cat(hin.pop(p)), torch.cat(hout.pop(p)), options)
    asked = {p: [c.shrink_in, c.damping_in, c.shrink_out, c.damping_out] for p, c in factors.chosen.items()}
    done = []
    for expert, name, (tokens, near_tokens) in zip(experts, names, seen, strict=True):
        weigh = shares(tokens, near_tokens, factors.chosen["w1"].shrink_in)
        counts = (int(traffic.counts[expert]), near_tokens, *weigh)
        done.append((packed(linears, name), report(layer, expert, counts, linears, name, asked)))
    return done


def _nearly(near: Tensor, prior: FactorSums) -> Tensor:
    """What adjacent inputs [a, k] add to an expert's sum hin [1, k, k]."""
    energy = near.square().sum()
    if not (energy > 0 and prior.tokens > 0):
        return torch.zeros_like(prior.hin)
    typical = float(prior.trace / prior.tokens) * len(near) / energy
    return (ADJACENT_WEIGHT * typical) * (near.T @ near)

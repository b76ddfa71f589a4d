"""How uneven traffic is: what `moefit traffic` shows of a table."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .traffic import TrafficTable

SHARES = (0.01, 0.05, 0.1, 0.2, 0.5)
"""Shares of all experts at which the hit curve is read."""


@dataclass(frozen=True)
class LayerSkew:
    """Of one layer. busiest: the largest count over the mean one. tenth: share of activations in the busiest tenth.

    half: experts that take half of all activations. unused: experts that no token chose. entropy: of an activation's
    expert, in bits; log2(E) where all are equally busy.
    """

    layer: int
    busiest: float
    tenth: float
    half: int
    unused: int
    entropy: float


@dataclass(frozen=True)
class SourceSkew:
    """Of one source, over all layers. tenth: share of its activations in the tenth of the experts that are busiest in
    all traffic: less than the whole's means that it asks for others. unused: experts that none of its tokens chose."""

    source: str
    tokens: int
    tenth: float
    unused: int


def source_skew(table: TrafficTable) -> list[SourceSkew]:
    """One per known source, most tokens first."""
    order = np.argsort(-table.counts, axis=None, kind="stable")
    busiest = order[: math.ceil(len(order) / 10)]
    found = [
        SourceSkew(name, tokens, float(counts.ravel()[busiest].sum() / counts.sum()), int((counts == 0).sum()))
        for name, tokens in table.source_tokens.items()
        for counts in (table.sources[name],)
    ]
    return sorted(found, key=lambda source: (-source.tokens, source.source))


def layer_skew(table: TrafficTable) -> list[LayerSkew]:
    """One per layer, in order."""
    found = []
    for layer, counts in zip(table.layers, table.counts, strict=True):
        ranked = np.sort(counts)[::-1]  # [E]
        total, reached = int(ranked.sum()), np.cumsum(ranked)
        used = ranked[ranked > 0] / total
        found.append(
            LayerSkew(
                layer,
                float(ranked[0] * len(ranked) / total),
                float(reached[math.ceil(len(ranked) / 10) - 1] / total),
                int(np.searchsorted(2 * reached, total) + 1),
                int((ranked == 0).sum()),
                float(-(used * np.log2(used)).sum()),
            )
        )
    return found


def hit_curve(table: TrafficTable) -> dict[float, float]:
    """Share of all experts, of any layer, busiest first -> share of the activations that they serve."""
    ranked = np.sort(table.counts, axis=None)[::-1]
    reached = np.cumsum(ranked) / ranked.sum()
    return {share: float(reached[math.ceil(share * len(ranked)) - 1]) for share in SHARES}


@dataclass(frozen=True)
class WindowShare:
    """Of steps of `size` tokens, over all layers. steps: windows counted. distinct: different experts that a step asks
    for, per activation: 1 where no two tokens of a step share one. independent: the same, were the tokens of a step not
    of one sequence but each of another."""

    size: int
    steps: int
    distinct: float
    independent: float


def window_shares(table: TrafficTable) -> list[WindowShare]:
    """One per size of windows that the table counts, ascending."""
    found = []
    for size, (steps, hits, tokens) in table.windows.items():
        chance = tokens / (steps * size)  # [L, E], that a token asks for the expert
        missed = np.ones_like(chance)
        for _ in range(size):
            missed = missed * (1 - chance)
        expected = steps * float((1 - missed).sum())
        activations = int(tokens.sum())
        found.append(WindowShare(size, steps, int(hits.sum()) / activations, expected / activations))
    return found

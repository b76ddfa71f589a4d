"""How far two logs of traffic differ in the experts they ask for, beside what chance alone would make of it.

Chance: two samples of one traffic differ too. Its floor is what `DRAWS` pairs of samples differ by that are drawn from
both logs together, each as large as its log counts for. Tokens of one conversation choose alike, so n tokens count for
less than n: where conversations are recorded, halves of them are compared, and n is divided by how much more these
differ than halves of independent tokens would (the design effect of cluster sampling: Kish, Survey Sampling, 1965).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..errors import TraceError
from .recorded import Recorded, split
from .traffic import PHASES, TrafficTable

DRAWS = 8
HALVINGS = 4
FEW = 8
"""Conversations below which halves say nothing."""
CLEAR = 1.5
"""Times the floor from which a distance is drift. Distances of whole models scatter by a few per cent only."""
HOT = 3
"""The hot set is the busiest 1/HOT of all experts of all layers."""


class Distance(NamedTuple):
    """Between two expert frequencies. variation: float64 [L], total variation distance per layer, 0..1.
    divergence: float64 [L], Jensen-Shannon divergence in bits, 0..1. changed: share of the hot set of one that is not
    in the other's."""

    variation: np.ndarray
    divergence: np.ndarray
    changed: float


@dataclass(frozen=True, eq=False)
class Drift:
    """found: between the logs. floor: of chance, means over draws. compared: whose tokens, "decode" or "all".

    tokens: of each log. effects: how many tokens of each count for one independent token. by_conversation: the effects
    were measured; else they are 1, and the floor is too low.
    """

    layers: tuple[int, ...]
    found: Distance
    floor: Distance
    compared: str
    tokens: tuple[int, int]
    effects: tuple[float, float]
    by_conversation: bool

    @property
    def times(self) -> float:
        """Mean total variation distance over that of chance."""
        floor = float(self.floor.variation.mean())
        return float(self.found.variation.mean()) / floor if floor else float(self.found.variation.any())

    @property
    def drifted(self) -> bool:
        return self.times >= CLEAR

    def to_json(self) -> dict[str, Any]:
        worst = int(self.found.variation.argmax())
        return {
            "compared": self.compared,
            "tokens": list(self.tokens),
            "variation": float(self.found.variation.mean()),
            "variation_floor": float(self.floor.variation.mean()),
            "variation_worst": float(self.found.variation[worst]),
            "variation_worst_layer": self.layers[worst],
            "divergence": float(self.found.divergence.mean()),
            "divergence_floor": float(self.floor.divergence.mean()),
            "divergence_worst": float(self.found.divergence.max()),
            "divergence_worst_layer": self.layers[int(self.found.divergence.argmax())],
            "hot_set_changed": self.found.changed,
            "hot_set_changed_floor": self.floor.changed,
            "times_floor": self.times,
            "design_effects": list(self.effects),
            "by_conversation": self.by_conversation,
            "drifted": self.drifted,
            "verdict": self.verdict,
        }

    @property
    def verdict(self) -> str:
        """One sentence, or two."""
        caution = ""
        if not self.by_conversation:
            caution = " Conversations were not recorded: tokens were taken as independent, so chance looks too small."
        sizes = f"the distance is {self.times:.1f} times what sampling alone gives"
        if not self.drifted:
            return f"No drift to be seen: {sizes}.{caution}"
        return (
            f"The traffic has drifted: {sizes}, and {self.found.changed:.1%} of the busiest third of the experts are "
            f"others ({self.floor.changed:.1%} by sampling alone).{caution}"
        )


def drift(
    one: TrafficTable, other: TrafficTable, recorded: tuple[Recorded | None, Recorded | None] = (None, None)
) -> Drift:
    """Of decode tokens if both tables have some, else of all. recorded: routing of each log, or of a part of it.

    TraceError for tables of different models.
    """
    tables = (one, other)
    if (one.layers, one.top_k, one.counts.shape) != (other.layers, other.top_k, other.counts.shape):
        raise TraceError(
            "traffic tables of different models cannot be compared",
            found=f"expected layers {list(one.layers)[:4]}..., counts {list(one.counts.shape)}, top-{one.top_k}, found "
            f"{list(other.layers)[:4]}..., {list(other.counts.shape)}, top-{other.top_k}",
            mend="compare logs of one model",
        )
    decode = one.decode is not None and other.decode is not None
    counts = [table.decode if decode and table.decode is not None else table.counts for table in tables]
    tokens = [int(count[0].sum()) // one.top_k for count in counts]
    both = (counts[0] + counts[1]) / (tokens[0] + tokens[1])  # [L, E], chance that a token asks for an expert
    measured = [None if part is None else design_effect(part, decode) for part in recorded]
    known = [effect for effect in measured if effect is not None]
    effects = [(sum(known) / len(known) if known else 1.0) if effect is None else effect for effect in measured]
    sizes = [max(1, round(count / effect)) for count, effect in zip(tokens, effects, strict=True)]
    return Drift(
        one.layers,
        distance(*counts),
        _mean([distance(*_draw(both, sizes, seed)) for seed in range(DRAWS)]),
        "decode" if decode else "all",
        (tokens[0], tokens[1]),
        (effects[0], effects[1]),
        bool(known),
    )


def distance(one: np.ndarray, other: np.ndarray) -> Distance:
    """Of counts [L, E], each row with at least one."""
    left, right = (counts / np.maximum(counts.sum(axis=1, keepdims=True), 1) for counts in (one, other))
    middle = (left + right) / 2
    divergence = (_information(left, middle) + _information(right, middle)) / 2
    hot = [set(_hot(shares).tolist()) for shares in (left, right)]
    return Distance(abs(left - right).sum(axis=1) / 2, divergence, 1 - len(hot[0] & hot[1]) / len(hot[0]))


def design_effect(recorded: Recorded, decode: bool) -> float | None:
    """How many tokens of a recording count for one independent token, at least 1; None where it has too few
    conversations. By Jensen-Shannon divergence, which grows as 1 / tokens.

    decode: of decode tokens only.
    """
    ratios = []
    for seed in range(HALVINGS):
        if recorded.conversations < FEW:
            return None
        halves = split(recorded, 0.5, seed)
        counts = [_counts(half, decode) for half in halves]
        tokens = [int(count[0].sum()) // recorded.top_k for count in counts]
        if not all(tokens):
            return None
        both = (counts[0] + counts[1]) / sum(tokens)
        chance = _mean([distance(*_draw(both, tokens, draw)) for draw in range(2)]).divergence.mean()
        ratios.append(float(distance(*counts).divergence.mean() / chance) if chance else 1.0)
    return max(1.0, sum(ratios) / len(ratios))


def _counts(recorded: Recorded, decode: bool) -> np.ndarray:
    """int64 [L, E]"""
    chosen = recorded.phase == PHASES.index("decode") if decode else slice(None)
    return np.stack([np.bincount(ids[chosen].ravel(), minlength=recorded.experts) for ids in recorded.ids])


def _draw(chance: np.ndarray, sizes: Sequence[int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts [L, E] of two samples of so many tokens. An expert's count is binomial: a token asks for it or not."""
    random = np.random.default_rng([seed, chance.size])
    one, other = (random.binomial(size, np.minimum(chance, 1)) for size in sizes)
    return one, other


def _mean(distances: Sequence[Distance]) -> Distance:
    variation, divergence, changed = zip(*distances, strict=True)
    return Distance(np.mean(variation, axis=0), np.mean(divergence, axis=0), float(np.mean(changed)))


def _information(shares: np.ndarray, middle: np.ndarray) -> np.ndarray:
    """Kullback-Leibler divergence from the middle per layer, in bits."""
    safe = np.where(shares > 0, shares, 1)
    return np.where(shares > 0, shares * np.log2(safe / np.where(middle > 0, middle, 1)), 0).sum(axis=1)


def _hot(shares: np.ndarray) -> np.ndarray:
    """Numbers of the busiest experts."""
    return np.argsort(-shares, axis=None, kind="stable")[: max(1, shares.size // HOT)]

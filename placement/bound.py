"""Lower bounds that no placement can beat, checked in exact integers.

Any choice of multipliers gives a valid bound (Lagrangian duality): weigh the groups of scenarios, the places of each
layer (a maximum is at least any weighted mean) and single experts (a layer waits for each of its experts), put a price
on a byte of each place, on an expert on the cards of a layer, on a move; and let every expert go to its cheapest
place. What multipliers a solver proposes therefore needs no trust, only evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .problem import Problem

SCALE = 1 << 40  # floating-point multipliers become integers of this grain


@dataclass(frozen=True)
class Multipliers:
    """Proposed multipliers, floats >= 0 in units of load. C classes of cards, then the host.

    groups: weight of each group of scenarios, by its number. places: [S, L, C + 1], what a layer's slowest place counts
    by class: of a class of n cards n times the weight of each. singles: [S, L, E], the same by expert. For each s and l
    these two add up to the weight of s's group, and the weights of all groups to 1, or come to that by scaling.
    bytes: per unit of room [C + 1]. most, least: per expert on cards [L]. move, move_bytes: per moved expert, per moved
    byte.
    """

    groups: dict[int, float]
    places: np.ndarray
    singles: np.ndarray
    bytes: np.ndarray
    most: np.ndarray
    least: np.ndarray
    move: float
    move_bytes: float


def lagrangian_bound(problem: Problem, proposed: Multipliers) -> int:
    """Lower bound on `Problem.cost`, exact."""
    classes, host = problem.classes, problem.host
    weights, singles = _whole_weights(problem, proposed)  # ints [S, L, C + 1], [S, L, E]
    price = [max(0, round(float(value) * SCALE)) for value in proposed.bytes]
    most, least = (_whole(value) for value in (proposed.most, proposed.least))  # [L]
    move, move_bytes = (max(0, round(value * SCALE)) for value in (proposed.move, proposed.move_bytes))
    # What has no limit has no price.
    most = most if problem.most is not None else most * 0
    move = move if problem.max_moves is not None else 0
    move_bytes = move_bytes if problem.max_bytes is not None else 0
    best: Any = None
    for number, members in enumerate([*classes, [host]]):
        place = members[0]
        loads = problem.loads[..., place].astype(object)  # [S, L, E]
        # A class's weight is shared by its cards, so its experts count with a share each.
        here = ((weights[:, :, number, None] // len(members) + singles) * loads).sum(axis=0)  # [L, E]
        if place == host:  # all cards wait
            here = here + (weights[:, :, :-1].sum(axis=2)[..., None] * problem.waits.astype(object)).sum(axis=0)
        here = here + price[number] * problem.units[:, :, place].astype(object)
        if place != host:
            here = here + (most - least)[:, None]
        if problem.home is not None:
            moved = ~np.isin(problem.home, members)
            here = here + moved * (move + move_bytes * problem.sizes[:, :, place].astype(object))
        if problem.allowed is not None:
            forbidden = ~problem.allowed[:, :, place]
            best = np.where(forbidden, None, here) if best is None else _least(best, here, forbidden)
        else:
            best = here if best is None else np.minimum(best, here)
    assert best is not None
    paid = price[-1] * problem.room[-1]
    paid += sum(price[c] * sum(problem.room[card] for card in members) for c, members in enumerate(classes))
    if problem.most is not None:
        paid += int((most * problem.most).sum())
    if problem.least is not None:
        paid -= int((least * problem.least).sum())
    if problem.max_moves is not None:
        paid += move * problem.max_moves
    if problem.max_bytes is not None:
        paid += move_bytes * problem.max_bytes
    return max(0, -((paid - int(best.sum())) // SCALE))


def _whole(values: np.ndarray) -> np.ndarray:
    return np.array([max(0, round(float(value) * SCALE)) for value in np.ravel(values)], dtype=object).reshape(
        values.shape
    )


def _least(best: np.ndarray, here: np.ndarray, forbidden: np.ndarray) -> np.ndarray:
    """The smaller of two, None being more than any number."""
    none = best == None  # noqa: E711  (elementwise)
    return np.where(forbidden, best, np.where(none, here, np.minimum(np.where(none, here, best), here)))


def _whole_weights(problem: Problem, proposed: Multipliers) -> tuple[np.ndarray, np.ndarray]:
    """Weights in integers that keep their sums: by group, then by place and single expert of each layer."""
    by_group = dict(zip(proposed.groups, _shares(list(proposed.groups.values()), SCALE), strict=True))
    places: Any = np.zeros(proposed.places.shape, dtype=object)
    singles: Any = np.zeros(proposed.singles.shape, dtype=object)
    cards = [len(members) for members in problem.classes] + [1]
    for s, group in enumerate(problem.groups):
        for layer in range(places.shape[1]):
            one = [*proposed.places[s, layer], *proposed.singles[s, layer]]
            shares = _shares(one, by_group[group])
            for number, count in enumerate(cards):  # whole per card; what is lost in rounding only lowers the bound
                places[s, layer, number] = shares[number] // count * count
            singles[s, layer] = shares[len(cards) :]
    return places, singles


def _shares(weights: Sequence[float], total: int) -> list[int]:
    """Integers >= 0 in proportion to `weights` that add up to `total` at most."""
    kept = [max(0.0, float(weight)) for weight in weights]
    whole = sum(kept)
    if whole <= 0:
        return [0] * len(kept)
    shares = [int(weight / whole * total) for weight in kept]
    shares[shares.index(max(shares))] -= max(0, sum(shares) - total)
    return shares

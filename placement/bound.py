"""Lower bounds that no placement can beat, each checked in exact integers.

Any choice of multipliers gives a valid bound (Lagrangian duality): put a price on a byte of each place, weigh
the cards of a layer with weights that add up to one (a maximum is at least any weighted mean), and let every
expert go to its cheapest place. What multipliers a solver proposes therefore needs no trust, only evaluation.
"""

from __future__ import annotations

import numpy as np

from .problem import Problem

SCALE = 1 << 40  # floating-point multipliers become integers of this grain


def lagrangian_bound(problem: Problem, weights: np.ndarray, byte_prices: list[int], scale: int) -> int:
    """Lower bound on `Problem.cost`, exact.

    weights: non-negative Python integers [L, N], each row adding up to `scale`. byte_prices: [P] non-negative
    integers, cost * scale per unit of room.
    """
    card_price, host_price = problem.prices
    size = problem.units.astype(object)
    best = host_price * scale * problem.work + byte_prices[-1] * size  # [L, E], on the host
    for card in range(problem.host):
        here = card_price * weights[:, card, None] * problem.work + byte_prices[card] * size
        best = np.minimum(best, here)
    paid = sum(price * room for price, room in zip(byte_prices, problem.room, strict=True))
    return max(0, -((paid - int(best.sum())) // scale))


def pooled_bound(problem: Problem) -> int:
    """The bound with all cards pooled and perfectly balanced, in closed form.

    Work moved from host to a card saves the same per (token * byte), so the best pool holds the most frequent
    experts: the byte price is that of the first expert that no longer fits.
    """
    cards = problem.host
    card_price, host_price = problem.prices
    saving = max(0, host_price * cards - card_price)  # times `scale` = cards
    counts = problem.traffic.counts.ravel()
    order = np.argsort(-counts, kind="stable")
    overflow = np.cumsum(problem.units.ravel()[order]) > sum(problem.room[:-1])
    price = saving * int(counts[order[np.argmax(overflow)]]) if overflow.any() else 0
    weights = np.ones((len(problem.sizes), cards), dtype=object)
    return lagrangian_bound(problem, weights, [price] * cards + [0], cards)


def integer_multipliers(weights: np.ndarray, byte_prices: np.ndarray, per_cost: float) -> tuple[np.ndarray, list[int]]:
    """Floating-point duals made into exact multipliers for `lagrangian_bound` with scale `SCALE`.

    weights: float [L, N], about one per row. byte_prices: float [P]; per_cost: their unit in units of cost.
    """
    whole = np.maximum(np.rint(weights * SCALE), 0).astype(np.int64).astype(object)  # [L, N]
    largest = np.argmax(whole, axis=1)
    whole[np.arange(len(whole)), largest] += SCALE - whole.sum(axis=1)
    prices = [max(0, round(float(price) * per_cost * SCALE)) for price in byte_prices]
    return whole, prices

"""Layer by layer at common prices: a sharper bound than the linear relaxation, and whole layers to choose from.

At given prices of bytes and moves the layers have nothing to do with each other, so each is an integer program of its
own, small enough to be solved to the end. Their sum is a bound (Lagrangian duality with whole experts), sharper than
the relaxation's wherever that moves a tenth of an expert. Their solutions are columns of a master program that takes
one for each layer within the bytes and moves there are; its prices make the next ones (Dantzig and Wolfe 1960).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, isfinite

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from .bound import Multipliers
from .problem import Problem
from .program import TRUST, quiet

COLUMNS = 1_500  # of one layer; above, HiGHS may need minutes for it
NODES = 200  # of a layer's search tree; what it proved by then is the bound
ROUNDS = 6


@dataclass(frozen=True)
class Prices:
    """In units of load. groups: weight of each group of scenarios, together 1. bytes: per byte of each place [P].

    move, move_bytes: per moved expert and per moved byte.
    """

    groups: dict[int, float]
    bytes: np.ndarray
    move: float
    move_bytes: float

    @classmethod
    def of(cls, problem: Problem, found: Multipliers) -> Prices:
        """From the relaxation, whose classes must be single cards."""
        per_byte = found.bytes / np.array(problem.unit)
        total = sum(found.groups.values()) or 1.0
        groups = {group: weight / total for group, weight in found.groups.items()}
        return cls(groups, per_byte, found.move, found.move_bytes)


def fits(problem: Problem) -> bool:
    """Whether layers are small enough, and all cards told apart."""
    return problem.busy.shape[1] * problem.host <= COLUMNS and all(len(members) == 1 for members in problem.classes)


def decompose(
    problem: Problem, found: Multipliers, starts: list[np.ndarray], target: float
) -> tuple[int, np.ndarray | None]:
    """(lower bound on `Problem.cost`, the best assignment that the layers' solutions make, or None).

    starts: assignments [L, E] whose layers may be taken as well. Stops when bound and assignment are within `target`.
    """
    layers = len(problem.busy)
    columns: list[list[np.ndarray]] = [[] for _ in range(layers)]

    def offer(assignment: np.ndarray) -> bool:
        new = False
        for rows, row in zip(columns, assignment, strict=True):
            if not any(np.array_equal(row, known) for known in rows):
                rows.append(row)
                new = True
        return new

    for start in starts:
        offer(start)
    prices, bound, best = Prices.of(problem, found), 0, None
    for _ in range(ROUNDS):
        here, assignment = at_prices(problem, prices)
        bound = max(bound, here)
        grown = assignment is not None and offer(assignment)
        best, prices = _master(problem, columns, prices)
        if not grown or (best is not None and problem.cost(best) - bound <= target * problem.cost(best)):
            break
    return bound, best


def at_prices(problem: Problem, prices: Prices) -> tuple[int, np.ndarray | None]:
    """Each layer's best at these prices: (lower bound on `Problem.cost`, assignment that may break limits, or None)."""
    total, rows = Fraction(0), []
    for layer in range(len(problem.busy)):
        bound, row = _layer(problem, prices, layer)
        total += bound
        rows.append(row)
    paid = sum(Fraction(float(p)) * max(free, 0) for p, free in zip(prices.bytes, _usable(problem), strict=True))
    paid += Fraction(prices.move) * (problem.max_moves or 0) + Fraction(prices.move_bytes) * (problem.max_bytes or 0)
    whole = [row for row in rows if row is not None]
    return max(0, ceil(total - paid)), np.stack(whole) if len(whole) == len(rows) else None


def _usable(problem: Problem) -> list[int]:
    """Bytes of each place that whole units can take [P]."""
    return [room * unit for room, unit in zip(problem.room, problem.unit, strict=True)]


def _layer(problem: Problem, prices: Prices, layer: int) -> tuple[Fraction, np.ndarray | None]:
    """(lower bound in units of load, places [E]) of one layer. Columns: x [E, cards], then t [S]."""
    experts, cards, scenarios = problem.busy.shape[1], problem.host, len(problem.groups)
    count = experts * cards
    loads, waits = problem.loads[:, layer].astype(np.float64), problem.waits[:, layer].astype(np.float64)
    typical = max(float(loads.max(axis=2).sum(axis=1).mean()) / (cards + 1), 1.0)
    loads, waits = loads / typical, waits / typical
    price = prices.bytes * problem.sizes[layer]  # [E, P]
    if problem.home is not None:
        moved = problem.home[layer][:, None] != np.arange(cards + 1)
        price = price + moved * (prices.move + prices.move_bytes * problem.sizes[layer])
    price = price / typical
    cost = np.append((price[:, :-1] - price[:, -1:]).ravel(), [prices.groups[group] for group in problem.groups])
    rows, bounds = [], []
    for s in range(scenarios):
        t = np.zeros(scenarios)
        t[s] = -1
        for card in range(cards):
            values = np.tile(-waits[s][:, None], cards)
            values[:, card] += loads[s, :, card]
            rows.append(np.append(values.ravel(), t))
            bounds.append(-waits[s].sum())
        rows.append(np.append(-np.repeat(loads[s, :, -1], cards), t))
        bounds.append(-loads[s, :, -1].sum())
    on_cards = np.append(np.ones(count), np.zeros(scenarios))
    if problem.most is not None:
        rows.append(on_cards)
        bounds.append(float(problem.most[layer]))
    if problem.least is not None:
        rows.append(-on_cards)
        bounds.append(-float(problem.least[layer]))
    once = sparse.csr_array(
        (np.ones(count), np.arange(count), np.arange(0, count + 1, cards)), shape=(experts, count + scenarios)
    )
    upper = np.append(np.ones(count), np.full(scenarios, np.inf))
    lower = np.zeros(experts)
    if problem.allowed is not None:
        upper[:count] = problem.allowed[layer, :, :-1].ravel()
        lower[~problem.allowed[layer, :, -1]] = 1
    with quiet():
        result = milp(
            cost,
            integrality=(np.arange(count + scenarios) < count).astype(int),
            bounds=Bounds(0, upper),
            constraints=[LinearConstraint(np.array(rows), ub=np.array(bounds)), LinearConstraint(once, lower, 1)],
            options={"mip_rel_gap": 1e-6, "node_limit": NODES},
        )
    proved = result.mip_dual_bound
    if proved is None or not isfinite(proved):
        return Fraction(0), None
    constant = float(price[:, -1].sum())
    # What HiGHS may be wrong by is relative to all that it added up, and all of it is positive once on one side.
    bound = Fraction(proved + constant) - TRUST * Fraction(abs(proved) + constant)
    if result.x is None:
        return bound * Fraction(typical), None
    share = result.x[:count].reshape(experts, cards)
    place = np.where(share.max(axis=1) > 0.5, share.argmax(axis=1), problem.host)
    return bound * Fraction(typical), place


def _master(problem: Problem, columns: list[list[np.ndarray]], last: Prices) -> tuple[np.ndarray | None, Prices]:
    """(best choice of one solution for each layer that keeps all limits, prices of its relaxation)."""
    flat = [(layer, row) for layer, rows in enumerate(columns) for row in rows]
    count, groups = len(flat), sorted(set(problem.groups))
    used = np.zeros((problem.host + 1, count))
    each = np.zeros((len(problem.groups), count))
    moves, written = np.zeros(count), np.zeros(count)
    for k, (layer, row) in enumerate(flat):
        holds = row[:, None] == np.arange(problem.host + 1)  # [E, P]
        used[:, k] = np.where(holds, problem.sizes[layer], 0).sum(axis=0)
        finish = np.where(holds, problem.loads[:, layer], 0).sum(axis=1)  # [S, P]
        finish[:, :-1] += np.where(holds[:, -1], problem.waits[:, layer], 0).sum(axis=1)[:, None]
        each[:, k] = finish.max(axis=1)
        if problem.home is not None:
            moved = row != problem.home[layer]
            moves[k] = moved.sum()
            written[k] = (problem.sizes[layer][np.arange(len(row)), row] * moved).sum()
    scale = max(float(each.sum(axis=0).mean()) * len(columns), 1.0) / 1000
    rows, bounds, names = [], [], []

    def add(name: tuple[str, int], values: np.ndarray, limit: float, unit: float) -> None:
        rows.append(np.append(values / unit, -1.0 if name[0] == "group" else 0.0))
        bounds.append(limit / unit)
        names.append((*name, unit))

    for place, free in enumerate(_usable(problem)):
        add(("bytes", place), used[place], float(free), max(free, 1) / 1000)
    for group in groups:
        add(("group", group), sum(each[s] for s, g in enumerate(problem.groups) if g == group), 0.0, scale)
    if problem.max_moves is not None:
        add(("move", 0), moves, float(problem.max_moves), 1.0)
    if problem.max_bytes is not None:
        add(("move_bytes", 0), written, float(problem.max_bytes), max(problem.max_bytes, 1) / 1000)
    one = np.zeros((len(columns), count + 1))
    for k, (layer, _) in enumerate(flat):
        one[layer, k] = 1
    cost = np.append(np.zeros(count), 1.0)  # z, in units of `scale`
    upper = np.append(np.ones(count), np.inf)
    prices = last
    relaxed = linprog(
        cost,
        np.array(rows),
        np.array(bounds),
        one,
        np.ones(len(columns)),
        np.stack([np.zeros_like(upper), upper], 1),
        "highs-ds",
    )
    if relaxed.x is not None:
        dual = {
            name: max(0.0, -float(m)) / name[2] * scale
            for name, m in zip(names, relaxed.ineqlin.marginals, strict=True)
        }
        by = {name[:2]: value for name, value in dual.items()}
        weights = {group: by["group", group] for group in groups}
        total = sum(weights.values())
        if total > 0:
            prices = Prices(
                {group: weight / total for group, weight in weights.items()},
                np.array([by["bytes", place] for place in range(problem.host + 1)]),
                by.get(("move", 0), 0.0),
                by.get(("move_bytes", 0), 0.0),
            )
    with quiet():
        result = milp(
            cost,
            integrality=np.append(np.ones(count), 0),
            bounds=Bounds(0, upper),
            constraints=[LinearConstraint(np.array(rows), ub=np.array(bounds)), LinearConstraint(one, 1, 1)],
            options={"mip_rel_gap": 1e-6, "node_limit": 10_000},
        )
    if result.x is None:
        return None, prices
    chosen = np.stack(
        [max(((result.x[k], -k) for k, (at, _) in enumerate(flat) if at == layer)) for layer in range(len(columns))]
    )
    assignment = np.stack([flat[int(-k)][1] for _, k in chosen])
    return assignment if problem.feasible(assignment) else None, prices

"""Fast plans: frequency-greedy, first fit by size, rounding of a fractional plan, and local improvement."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, permutations

import numpy as np

from .problem import Problem

INTEGRAL = 1 - 1e-6
CLEAR = 1e-12  # relative gain below which a step is rounding noise
EXCHANGES = 1000  # across layers; far more than were ever needed
PAIRS_UP_TO = 64  # experts of a layer, for exchanges of two at a time
SHORTLIST = 300

Step = tuple[int, int, int, int]  # layer, expert, old place, new place


def greedy(problem: Problem) -> np.ndarray | None:
    """Frequency-greedy: hottest expert first, onto the card with the least load in its layer, else the host.

    Ties go to the lower (layer, expert), then to the card with more room, then to the lower card. Within a
    layer this is longest-processing-time scheduling. Returns int64 [L, E], or None when one found no room.
    """
    order = np.argsort(-problem.traffic.counts.ravel(), kind="stable")
    return _fill(problem, np.full(problem.sizes.shape, -1), order, hottest=True)


def first_fit(problem: Problem) -> np.ndarray | None:
    """Memory only: largest expert first onto the place with most room. For budgets `greedy` cannot pack."""
    order = np.argsort(-problem.sizes.ravel(), kind="stable")
    return _fill(problem, np.full(problem.sizes.shape, -1), order, hottest=False)


def round_fractions(problem: Problem, fractions: np.ndarray) -> np.ndarray | None:
    """Whole experts from a fractional plan [L, E, P]: integral ones stay, the rest go as in `greedy`."""
    best = np.argmax(fractions, axis=2)
    assignment = np.where(fractions.max(axis=2) >= INTEGRAL, best, -1)
    if not _within(problem, assignment):  # solvers keep rows only within a tolerance
        return None
    open_ones = np.flatnonzero(assignment.ravel() < 0)
    order = open_ones[np.argsort(-problem.traffic.counts.ravel()[open_ones], kind="stable")]
    return _fill(problem, assignment, order, hottest=True)


def _within(problem: Problem, assignment: np.ndarray) -> bool:
    return all(int(problem.units[assignment == place].sum()) <= room for place, room in enumerate(problem.room))


def _fill(problem: Problem, assignment: np.ndarray, order: np.ndarray, hottest: bool) -> np.ndarray | None:
    experts, host = problem.sizes.shape[1], problem.host
    room = [left - int(problem.units[assignment == place].sum()) for place, left in enumerate(problem.room)]
    loads = problem.loads(assignment)  # [L, P]
    for index in order:
        layer, expert = divmod(int(index), experts)
        size = int(problem.units[layer, expert])
        fitting = [place for place in range(host + 1) if room[place] >= size]
        cards = [place for place in fitting if place != host]
        if not fitting:
            return None
        if not hottest:
            place = max(fitting, key=lambda place: (room[place], -place))
        elif cards:
            place = min(cards, key=lambda place: (loads[layer, place], -room[place], place))
        else:
            place = host
        assignment[layer, expert] = place
        room[place] -= size
        loads[layer, place] += problem.work[layer, expert]
    return assignment


def improve(problem: Problem, assignment: np.ndarray, enough: int = 0) -> np.ndarray:
    """Local search: exchanges of experts within a layer, then across layers until the cost is `enough`.

    Never worse than `assignment`, always feasible. Deltas are float64: exact up to 2**53; beyond that a
    near-tie may be decided wrongly, but deterministically (elementwise operations only, no reordered sums),
    and `Problem.cost` of the result is exact anyway.
    """
    state = _State(problem, assignment.copy())
    layers: Sequence[int] = range(len(assignment))
    for _ in range(EXCHANGES):
        for layer in layers:
            while steps := _best_within(state, layer):
                state.apply(steps)
        if float(sum(state.layer_cost(state.loads))) <= enough or not (steps := _best_across(state)):
            break
        state.apply(steps)
        layers = sorted({layer for layer, _, _, _ in steps})
    return state.assignment


class _State:
    """An assignment with its loads [L, P] and the room left on each place [P], kept in step."""

    def __init__(self, problem: Problem, assignment: np.ndarray) -> None:
        self.problem, self.assignment = problem, assignment
        self.work = problem.work.astype(np.float64)  # [L, E]
        self.loads = problem.loads(assignment).astype(np.float64)
        self.room = [room - int(problem.units[assignment == place].sum()) for place, room in enumerate(problem.room)]

    def apply(self, steps: list[Step]) -> None:
        for layer, expert, old, new in steps:
            self.assignment[layer, expert] = new
            self.room[old] += int(self.problem.units[layer, expert])
            self.room[new] -= int(self.problem.units[layer, expert])
            self.loads[layer, old] -= self.work[layer, expert]
            self.loads[layer, new] += self.work[layer, expert]

    def layer_cost(self, loads: np.ndarray) -> np.ndarray:
        """Cost of layers from their loads [..., P]."""
        card_price, host_price = self.problem.prices
        cost: np.ndarray = card_price * loads[..., :-1].max(axis=-1) + host_price * loads[..., -1]
        return cost


def _bundles(experts: np.ndarray, pairs: bool) -> list[tuple[int, ...]]:
    """What one place may give in an exchange: nothing, one expert, or (in small layers) two."""
    singles: list[tuple[int, ...]] = [(), *((int(expert),) for expert in experts)]
    return singles + list(combinations(map(int, experts), 2)) if pairs else singles


def _best_within(state: _State, layer: int) -> list[Step]:
    """The exchange of bundles between two places that lowers this layer's cost most; empty if none does."""
    problem, places, loads = state.problem, state.assignment[layer], state.loads[layer]
    card_price, host_price = problem.prices
    host = problem.host
    bundles, work, size = [], [], []
    for place in range(host + 1):
        bundle = _bundles(np.flatnonzero(places == place), len(places) <= PAIRS_UP_TO)
        bundles.append(bundle)
        work.append(np.array([sum(state.work[layer, expert] for expert in b) for b in bundle]))
        size.append(np.array([sum(int(problem.units[layer, expert]) for expert in b) for b in bundle]))
    best = float(state.layer_cost(loads)) * (1 - CLEAR)
    steps: list[Step] = []
    for p, q in combinations(range(host + 1), 2):
        shift = work[p][:, None] - work[q]  # [bundles of p, bundles of q], work from p to q
        moved = size[p][:, None] - size[q]
        slowest = np.maximum(loads[p] - shift, max((loads[g] for g in range(host) if g not in (p, q)), default=0))
        if q == host:
            cost = card_price * slowest + host_price * (loads[q] + shift)
        else:
            cost = card_price * np.maximum(slowest, loads[q] + shift) + host_price * loads[host]
        cost[(moved > state.room[q]) | (-moved > state.room[p])] = np.inf
        row, column = divmod(int(np.argmin(cost)), cost.shape[1])
        if cost[row, column] < best:
            best = float(cost[row, column])
            steps = [(layer, expert, p, q) for expert in bundles[p][row]]
            steps += [(layer, expert, q, p) for expert in bundles[q][column]]
    return steps


def _best_across(state: _State) -> list[Step]:
    """The exchange of two experts of different layers that lowers the cost most; empty if none does.

    The layers' costs add, so the change is the sum of two single moves; only the `SHORTLIST` best single
    moves of each direction are paired.
    """
    problem = state.problem
    experts = problem.sizes.shape[1]
    now = state.layer_cost(state.loads)  # [L]
    best, steps = -CLEAR * float(now.max()), []
    short: dict[tuple[int, int], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
    for p, q in permutations(range(problem.host + 1), 2):
        at = np.flatnonzero(state.assignment.ravel() == p)
        layer = at // experts
        loads = state.loads[layer]  # [moves, P]
        loads[:, p] -= state.work.ravel()[at]
        loads[:, q] += state.work.ravel()[at]
        change = state.layer_cost(loads) - now[layer]
        keep = np.argsort(change, kind="stable")[:SHORTLIST]
        short[p, q] = at[keep], change[keep], problem.units.ravel()[at[keep]]
    for p, q in combinations(range(problem.host + 1), 2):
        (there, gain, size), (back, cost, back_size) = short[p, q], short[q, p]
        if not (len(there) and len(back)):
            continue
        total = gain[:, None] + cost
        moved = size[:, None] - back_size  # [SHORTLIST, SHORTLIST], room from p to q
        total[(moved > state.room[q]) | (-moved > state.room[p])] = np.inf
        total[(there // experts)[:, None] == back // experts] = np.inf
        row, column = divmod(int(np.argmin(total)), total.shape[1])
        if total[row, column] < best:
            best = float(total[row, column])
            one, two = divmod(int(there[row]), experts), divmod(int(back[column]), experts)
            steps = [(*one, p, q), (*two, q, p)]
    return steps

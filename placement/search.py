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
    layer this is longest-processing-time scheduling. Where layers must have some experts on cards, their hottest go
    first. Returns int64 [L, E], or None when one found no room.
    """
    return _fill(problem, np.full(problem.busy.shape, -1), _by_heat(problem), hottest=True)


def first_fit(problem: Problem) -> np.ndarray | None:
    """Memory only: largest expert first onto the place with most room. For budgets `greedy` cannot pack."""
    order = np.argsort(-problem.sizes.max(axis=2).ravel(), kind="stable")
    return _fill(problem, np.full(problem.busy.shape, -1), order, hottest=False)


def round_shares(problem: Problem, classes: list[list[int]], shares: np.ndarray) -> np.ndarray | None:
    """Whole experts from a fractional plan [L, E, C + 1]: those of one class go onto its cards as `greedy` does, the
    others wherever there is room."""
    place = np.argmax(shares, axis=2)
    whole = shares.max(axis=2) >= INTEGRAL
    only = np.ones(problem.sizes.shape, dtype=bool)
    for number, members in enumerate([*classes, [problem.host]]):
        here = whole & (place == number)
        only[here] = np.isin(np.arange(len(problem.places)), members)
    order = _by_heat(problem)
    order = np.concatenate([order[whole.ravel()[order]], order[~whole.ravel()[order]]])
    return _fill(problem, np.full(problem.busy.shape, -1), order, hottest=True, only=only)


def round_moves(problem: Problem, classes: list[list[int]], shares: np.ndarray) -> np.ndarray:
    """Whole moves from a fractional plan [L, E, C + 1]: experts that move whole do, the others stay at home.

    Where that overflows a place, the moves onto it are taken back, coldest first.
    """
    assert problem.home is not None
    kind = np.zeros(len(problem.places), dtype=np.int64)  # class of each place
    for number, members in enumerate([*classes, [problem.host]]):
        kind[members] = number
    wanted = np.argmax(shares, axis=2)
    leaves = (shares.max(axis=2) >= INTEGRAL) & (wanted != kind[problem.home])
    assignment = problem.home.copy()
    room = [free - used for free, used in zip(problem.free, problem.used(assignment), strict=True)]
    finish = problem.finish(assignment).sum(axis=0)  # [L, P]
    for layer, expert in np.argwhere(leaves):  # first those that make room, which go to the host
        if wanted[layer, expert] == len(classes):
            room[assignment[layer, expert]] += int(problem.sizes[layer, expert, assignment[layer, expert]])
            assignment[layer, expert] = problem.host
    for index in np.argsort(-problem.busy, axis=None, kind="stable").tolist():
        layer, expert = divmod(index, problem.busy.shape[1])
        if not leaves[layer, expert] or wanted[layer, expert] == len(classes):
            continue
        members = classes[wanted[layer, expert]]
        size = problem.sizes[layer, expert]
        fitting = [card for card in members if room[card] >= size[card]] or members
        card = min(fitting, key=lambda card: (int(finish[layer, card]), card))
        room[card] -= int(size[card])
        finish[layer, card] += int(problem.loads[:, layer, expert, card].sum())
        assignment[layer, expert] = card
    while over := [p for p, (u, f) in enumerate(zip(problem.used(assignment), problem.free, strict=True)) if u > f]:
        came = np.argwhere((assignment == over[0]) & (problem.home != over[0]))
        if not came.size:
            return problem.home.copy()
        layer, expert = min(came.tolist(), key=lambda at: (problem.busy[at[0], at[1]], at))
        assignment[layer, expert] = problem.home[layer, expert]
    return assignment


def _by_heat(problem: Problem) -> np.ndarray:
    """Flat numbers of all experts, hottest first, after those that their layer must have on cards."""
    order = np.argsort(-problem.busy.ravel(), kind="stable")
    if problem.least is None:
        return order
    first = np.zeros(problem.busy.shape, dtype=bool)
    usable = np.ones(problem.busy.shape, dtype=bool)
    if problem.allowed is not None:
        usable &= problem.allowed[:, :, :-1].any(axis=2)
    for layer, least in enumerate(problem.least):
        ranked = np.argsort(-np.where(usable[layer], problem.busy[layer], -1), kind="stable")
        first[layer, ranked[: int(least)]] = True
    return np.concatenate([order[first.ravel()[order]], order[~first.ravel()[order]]])


def _fill(
    problem: Problem, assignment: np.ndarray, order: np.ndarray, hottest: bool, only: np.ndarray | None = None
) -> np.ndarray | None:
    """Place the experts of `order` one by one. only: bool [L, E, P], where each may go if there is room."""
    experts, host = problem.busy.shape[1], problem.host
    room = list(problem.room)
    units, loads = problem.units.tolist(), problem.loads.sum(axis=0).tolist()
    busy, allowed = problem.busy.tolist(), None if problem.allowed is None else problem.allowed.tolist()
    wanted = None if only is None else only.tolist()
    load = np.zeros((len(busy), host + 1)).tolist()
    heat = np.zeros((len(busy), host + 1)).tolist()
    on_cards = [0] * len(busy)
    for index in order.tolist():
        layer, expert = divmod(index, experts)
        size = units[layer][expert]
        fitting = [p for p in range(host + 1) if room[p] >= size[p] and (allowed is None or allowed[layer][expert][p])]
        if problem.most is not None and on_cards[layer] >= problem.most[layer]:
            fitting = [p for p in fitting if p == host]
        if wanted is not None and (better := [p for p in fitting if wanted[layer][expert][p]]):
            fitting = better
        if not fitting:
            return None
        cards = [p for p in fitting if p != host]
        here = loads[layer][expert]
        if not hottest:
            place = max(fitting, key=lambda p: (room[p] * problem.unit[p], -p))
        elif cards:
            place = min(cards, key=lambda p: (load[layer][p] + here[p], heat[layer][p], -room[p], p))
        else:
            place = host
        assignment[layer, expert] = place
        room[place] -= size[place]
        load[layer][place] += here[place]
        heat[layer][place] += busy[layer][expert]
        on_cards[layer] += place != host
    return assignment


def improve(
    problem: Problem, assignment: np.ndarray, enough: int = 0, weights: dict[int, float] | None = None
) -> np.ndarray:
    """Local search: exchanges of experts within a layer, then across layers until the cost is `enough`.

    weights: of groups of scenarios; the weighted sum stands in for the worst of them. Of a problem with one group the
    result is never worse than `assignment`. Always feasible if `assignment` is. Deltas are float64: exact up to 2**53;
    beyond that a near-tie may be decided wrongly, but deterministically, and `Problem.cost` is exact anyway.
    """
    state = _State(problem, assignment.copy(), weights)
    layers: Sequence[int] = range(len(assignment))
    for _ in range(EXCHANGES):
        for layer in layers:
            while steps := _best_within(state, layer):
                state.apply(steps)
        if float(state.layer_cost(state.finish).sum()) <= enough or not (steps := _best_across(state)):
            break
        state.apply(steps)
        layers = sorted({layer for layer, _, _, _ in steps})
    return state.assignment


class _State:
    """An assignment with its finishing times [S, L, P] and what is left of room, moves and limits, kept in step."""

    def __init__(self, problem: Problem, assignment: np.ndarray, weights: dict[int, float] | None) -> None:
        self.problem, self.assignment = problem, assignment
        share = weights or dict.fromkeys(problem.groups, 1.0)
        weight = np.array([share[group] for group in problem.groups])[:, None, None]  # [S, 1, 1]
        self.weight = weight
        self.work = problem.loads * weight[..., None]  # float64 [S, L, E, P]
        self.waits = problem.waits * weight  # [S, L, E]
        self.finish = problem.finish(assignment) * weight
        used = [int(problem.units[:, :, p][assignment == p].sum()) for p in range(len(problem.places))]
        self.room = [room - taken for room, taken in zip(problem.room, used, strict=True)]
        self.on_cards = (assignment != problem.host).sum(axis=1)
        self.moves, self.move_bytes = problem.max_moves, problem.max_bytes
        if problem.home is not None:
            layers, experts = np.nonzero(assignment != problem.home)
            sizes = problem.sizes[layers, experts, assignment[layers, experts]]
            self.moves = None if self.moves is None else self.moves - len(layers)
            self.move_bytes = None if self.move_bytes is None else self.move_bytes - int(sizes.sum())

    @staticmethod
    def layer_cost(finish: np.ndarray) -> np.ndarray:
        """Of finishing times [S, ..., P]: the sum over scenarios of the slowest place [...]."""
        return np.asarray(finish.max(axis=-1).sum(axis=0))

    def apply(self, steps: list[Step]) -> None:
        problem = self.problem
        for layer, expert, old, new in steps:
            self.assignment[layer, expert] = new
            self.room[old] += int(problem.units[layer, expert, old])
            self.room[new] -= int(problem.units[layer, expert, new])
            self.finish[:, layer, old] -= self.work[:, layer, expert, old]
            self.finish[:, layer, new] += self.work[:, layer, expert, new]
            from_host = int(old == problem.host) - int(new == problem.host)
            self.finish[:, layer, :-1] -= from_host * self.waits[:, layer, expert, None]
            self.on_cards[layer] += from_host
            moves, size = self.moving(layer, np.array([expert]), old, new)
            self.moves = None if self.moves is None else self.moves - int(moves[0])
            self.move_bytes = None if self.move_bytes is None else self.move_bytes - int(size[0])

    def moving(self, layer: int | np.ndarray, experts: np.ndarray, old: int, new: int) -> tuple[np.ndarray, np.ndarray]:
        """How many moves and moved bytes more it is to have experts on `new` instead of `old`."""
        if self.problem.home is None:
            return np.zeros(len(experts), int), np.zeros(len(experts), int)
        home, sizes = self.problem.home[layer, experts], self.problem.sizes[layer, experts]
        now, then = home != old, home != new
        return then.astype(int) - now, then * sizes[:, new] - now * sizes[:, old]

    def may(self, layer: int | np.ndarray, experts: np.ndarray, new: int) -> np.ndarray:
        """Which experts may lie on a place."""
        allowed = self.problem.allowed
        return np.ones(len(experts), bool) if allowed is None else allowed[layer, experts, new]

    def too_few(self, layer: int | np.ndarray, more: np.ndarray) -> np.ndarray:
        """Whether a layer with `more` experts on cards breaks its limits."""
        problem, then = self.problem, self.on_cards[layer] + more
        bad = np.zeros(np.shape(then), bool)
        if problem.least is not None:
            bad |= then < problem.least[layer]
        if problem.most is not None:
            bad |= then > problem.most[layer]
        return bad

    def over(
        self, p: int, q: int, into_q: np.ndarray, into_p: np.ndarray, moves: np.ndarray, size: np.ndarray
    ) -> np.ndarray:
        """Where changes of used units on p and q, of moves and of moved bytes break a limit."""
        bad = (into_q > self.room[q]) | (into_p > self.room[p])
        if self.moves is not None:
            bad |= moves > self.moves
        if self.move_bytes is not None:
            bad |= size > self.move_bytes
        return np.asarray(bad)


def _bundles(experts: np.ndarray, pairs: bool) -> list[tuple[int, ...]]:
    """What may go over at once: nothing, one expert, or two."""
    single: list[tuple[int, ...]] = [(), *((int(expert),) for expert in experts)]
    return single + [(int(a), int(b)) for a, b in combinations(experts, 2)] if pairs else single


class _Bundles:
    """All bundles of one place of a layer that may go to another, and what each changes there and here."""

    def __init__(self, state: _State, layer: int, old: int, new: int) -> None:
        problem = state.problem
        experts = np.flatnonzero(state.assignment[layer] == old)
        experts = experts[state.may(layer, experts, new)]
        self.names = _bundles(experts, problem.busy.shape[1] <= PAIRS_UP_TO)
        member = np.zeros((len(self.names), problem.busy.shape[1]))
        for row, names in enumerate(self.names):
            member[row, list(names)] = 1
        everyone = np.arange(problem.busy.shape[1])
        moves, size = state.moving(layer, everyone, old, new)
        self.leaves = state.work[:, layer, :, old] @ member.T  # [S, bundles]
        self.comes = state.work[:, layer, :, new] @ member.T
        self.waits = state.waits[:, layer] @ member.T
        self.leaves_units, self.comes_units = (problem.units[layer, :, p] @ member.T for p in (old, new))
        self.moves, self.size = moves @ member.T, size @ member.T
        self.count = member.sum(axis=1)


def _best_within(state: _State, layer: int) -> list[Step]:
    """The exchange between two places of a layer that lowers its cost most; empty if none does."""
    finish, host = state.finish[:, layer], state.problem.host  # [S, P]
    best = float(state.layer_cost(finish)) * (1 - CLEAR)
    slowest = {*finish.argmax(axis=1).tolist(), host}  # nothing is gained without one of them
    steps: list[Step] = []
    for p, q in combinations(range(host + 1), 2):
        if p not in slowest and q not in slowest:
            continue
        there, back = _Bundles(state, layer, p, q), _Bundles(state, layer, q, p)
        cost = np.zeros((len(there.names), len(back.names)))
        others = [place for place in range(host + 1) if place not in (p, q)]
        for s in range(len(finish)):
            wait = there.waits[s][:, None] - back.waits[s] if q == host else 0.0  # of all cards, for the host
            rest = finish[s, others].max() if others else 0.0
            on_p = finish[s, p] - there.leaves[s][:, None] + back.comes[s]
            on_q = finish[s, q] + there.comes[s][:, None] - back.leaves[s]
            cost += np.maximum(np.maximum(on_p, rest) + wait, on_q)
        into_q = there.comes_units[:, None] - back.leaves_units
        into_p = back.comes_units - there.leaves_units[:, None]
        moves, size = there.moves[:, None] + back.moves, there.size[:, None] + back.size
        bad = state.over(p, q, into_q, into_p, moves, size)
        if q == host:
            bad |= state.too_few(layer, back.count - there.count[:, None])
        cost[bad] = np.inf
        row, column = divmod(int(np.argmin(cost)), cost.shape[1])
        if cost[row, column] < best:
            best = float(cost[row, column])
            steps = [(layer, expert, p, q) for expert in there.names[row]]
            steps += [(layer, expert, q, p) for expert in back.names[column]]
    return steps


def _best_across(state: _State) -> list[Step]:
    """The exchange of two experts of different layers that lowers the cost most; empty if none does.

    The layers' costs add, so the change is the sum of two single moves; only the `SHORTLIST` best single
    moves of each direction are paired.
    """
    problem = state.problem
    now = state.layer_cost(state.finish)  # [L]
    best, steps = -CLEAR * float(now.max()), []
    short: dict[tuple[int, int], tuple[np.ndarray, ...]] = {}
    for p, q in permutations(range(problem.host + 1), 2):
        layer, expert = np.nonzero(state.assignment == p)
        may = state.may(layer, expert, q)
        more = int(p == problem.host) - int(q == problem.host)
        may &= ~state.too_few(layer, np.full(len(layer), more))
        layer, expert = layer[may], expert[may]
        finish = state.finish[:, layer]  # [S, moves, P]
        finish[..., p] -= state.work[:, layer, expert, p]
        finish[..., q] += state.work[:, layer, expert, q]
        finish[..., :-1] -= more * state.waits[:, layer, expert, None]
        change = state.layer_cost(finish) - now[layer]
        keep = np.argsort(change, kind="stable")[:SHORTLIST]
        layer, expert, change = layer[keep], expert[keep], change[keep]
        leaves, comes = problem.units[layer, expert, p], problem.units[layer, expert, q]
        short[p, q] = (layer, expert, change, leaves, comes, *state.moving(layer, expert, p, q))
    for p, q in combinations(range(problem.host + 1), 2):
        layer, expert, gain, leaves, comes, moves, size = short[p, q]
        back_layer, back_expert, cost, back_leaves, back_comes, back_moves, back_size = short[q, p]
        if not (len(layer) and len(back_layer)):
            continue
        total = gain[:, None] + cost  # [SHORTLIST, SHORTLIST]
        into_q, into_p = comes[:, None] - back_leaves, back_comes - leaves[:, None]
        bad = state.over(p, q, into_q, into_p, moves[:, None] + back_moves, size[:, None] + back_size)
        total[bad | (layer[:, None] == back_layer)] = np.inf
        row, column = divmod(int(np.argmin(total)), total.shape[1])
        if total[row, column] < best:
            best = float(total[row, column])
            steps = [(int(layer[row]), int(expert[row]), p, q)]
            steps += [(int(back_layer[column]), int(back_expert[column]), q, p)]
    return steps

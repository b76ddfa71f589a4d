"""From the plan in use and new traffic to the best plan within a number of moves, and the moves in a safe order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import PlanError
from .aim import Aim
from .limits import Limits
from .objective import make_problem
from .plan import Plan
from .problem import Problem, check_fits, check_limits_fit
from .solve import GAP, Search, make_plan
from .traffic import TrafficTable

CURVE_TARGET, CURVE_SHARE = (1e-3, 5e-3), 0.05
"""Gap at which a point of the curve is good enough: from, to; in between, this share of all that can be gained."""
PARKS = 3  # of one expert
CURVE = (20, 50, 100, 200, 500, 1000, 2000, 5000)


@dataclass(frozen=True)
class Move:
    """One expert carried from a place to another. parked: not where the plan wants it, but out of the way for now.

    layer: the model's layer number. bytes: what is written on `there`.
    """

    layer: int
    expert: int
    here: str
    there: str
    bytes: int
    parked: bool = False


@dataclass(frozen=True)
class CurvePoint:
    """The best within `limit` moves (None: as many as it takes). value: of the plan found, which moves `moves` experts
    and writes `bytes`; bound: no plan within the limit is below it. Both in the aim's unit."""

    limit: int | None
    moves: int
    bytes: int
    value: float
    bound: float


@dataclass(frozen=True)
class Replan:
    """plan: the new one. stay: value of the old one on the new traffic. moves: from old to new, in order."""

    plan: Plan
    stay: float
    moves: tuple[Move, ...]
    curve: tuple[CurvePoint, ...]


def replan(
    old: Plan,
    traffic: TrafficTable,
    max_moves: int | None = None,
    max_bytes: int | None = None,
    *,
    aim: Aim | None = None,
    limits: Limits | None = None,
    curve: bool = True,
    inputs: dict[str, str] | None = None,
    target: float = GAP,
) -> Replan:
    """The best plan for `traffic` that moves at most `max_moves` experts and writes at most `max_bytes`.

    Machine and sizes are the old plan's, aim and limits too where they are not given. curve: also solve for other
    numbers of moves, to show what each would gain. PlanError: traffic of other layers or experts, an old plan with
    replicas, or limits that the old plan breaks in more places than may be moved.
    """
    aim, limits = aim or old.aim, limits or old.limits
    if traffic.layers != old.layers or traffic.counts.shape != old.card_sizes.shape or traffic.top_k != old.top_k:
        raise PlanError(
            "the traffic is not of the plan's model",
            where="traffic",
            found=f"expected {list(old.card_sizes.shape)} layers and experts, top-{old.top_k}, found "
            f"{list(traffic.counts.shape)}, top-{traffic.top_k}",
            mend="give traffic of the model that the plan was made for",
        )
    if (old.holds.sum(axis=2) > 1).any():
        mend = "make a new plan without --from"
        raise PlanError("a plan with replicas cannot be moved from", where="the old plan", mend=mend)
    for name, limit in (("--max-moves", max_moves), ("--max-bytes", max_bytes)):
        if limit is not None and limit < 0:
            raise PlanError("a limit of moves below 0", where=name, found=f"found {limit}")
    problem, assumed = make_problem(old.machine, traffic, old.card_sizes, old.host_sizes, old.fixed, aim, limits)
    check_fits(problem, old.fixed, old.machine.budgets)
    check_limits_fit(problem)
    home = old.assignment
    free = replace(problem, home=home)
    limited = replace(free, max_moves=max_moves, max_bytes=max_bytes)
    search, start = within_limits(limited, target)
    if search.best is None:
        raise PlanError(
            "no plan within the limit keeps what it must",
            where="--max-moves, --max-bytes",
            found="the old plan breaks a pin, a forbidden place or a limit per layer in more experts than may move",
            mend="allow more moves, or loosen the limits",
        )
    plan = make_plan(
        search, start, old.machine, aim, traffic, old.card_sizes, old.host_sizes, old.fixed, assumed, inputs, limits
    )
    points = _curve(free, search, max_moves, max_bytes, target) if curve else ()
    stay = problem.value(problem.cost(home))
    return Replan(plan, stay, order_moves(problem, home, search.best, old.layers), points)


def within_limits(problem: Problem, target: float = GAP) -> tuple[Search, int | None]:
    """The search for a problem with a home: (finished search, cost of frequency-greedy or None, as `Search.run`)."""
    search = Search(problem, target)
    assert problem.home is not None
    search.note("as it is", problem.home.copy())
    start = search.run()
    return search, start


def _curve(
    free: Problem, chosen: Search, max_moves: int | None, max_bytes: int | None, target: float
) -> tuple[CurvePoint, ...]:
    """Points in order of their limit. What fits a smaller limit fits a larger one: no point is worse than the last."""
    unlimited, _ = within_limits(free, target)
    assert free.home is not None
    if unlimited.best is None:
        return ()
    needed = int((unlimited.best != free.home).sum())
    stay = free.cost(free.home)
    possible = (stay - unlimited.bound) / max(stay, 1)
    rough = max(target, CURVE_TARGET[0], min(CURVE_TARGET[1], CURVE_SHARE * possible))
    found: list[tuple[int | None, Search]] = [(None, unlimited)]
    for moves in CURVE:
        if moves < needed and moves != max_moves:
            found.append((moves, within_limits(replace(free, max_moves=moves), rough)[0]))
    if max_moves is not None and max_bytes is None and max_moves < needed:
        found.append((max_moves, chosen))
    points: list[CurvePoint] = []
    for limit, search in sorted(found, key=lambda one: (one[0] is None, one[0] or 0)):
        if search.best is None:  # rules that the old plan breaks in more experts
            continue
        point = _point(free, limit, search)
        if points and points[-1].value < point.value:
            point = replace(points[-1], limit=limit, bound=point.bound)
        points.append(point)
    return tuple(points)


def _point(free: Problem, limit: int | None, search: Search) -> CurvePoint:
    assert search.best is not None and free.home is not None
    layers, experts = np.nonzero(search.best != free.home)
    written = int(free.sizes[layers, experts, search.best[layers, experts]].sum())
    return CurvePoint(limit, len(layers), written, free.value(search.cost), free.value(search.bound))


def order_moves(problem: Problem, home: np.ndarray, new: np.ndarray, layers: Sequence[int]) -> tuple[Move, ...]:
    """The moves from `home` to `new`, in an order in which no place ever holds more than it can.

    What comes onto cards comes first, hottest first, as soon as there is room; what makes room goes coldest first.
    Where every remaining move waits for another one, an expert is parked on a place with room, the host if it can, and
    each a few times at most, so that this ends. PlanError: nowhere is room to park one.
    """
    room = [free - used for free, used in zip(problem.free, problem.used(home), strict=True)]
    at = {(int(layer), int(e)): int(home[layer, e]) for layer, e in np.argwhere(home != new)}
    busy, host = problem.busy, problem.host

    def urgency(expert: tuple[int, int]) -> tuple[bool, int, tuple[int, int]]:
        arrives = int(new[expert]) != host
        return not arrives, -int(busy[expert]) if arrives else int(busy[expert]), expert

    pending = sorted(at, key=urgency)
    steps: list[Move] = []
    parked = dict.fromkeys(at, 0)

    def carry(expert: tuple[int, int], there: int, aside: bool) -> None:
        here = at[expert]
        room[here] += int(problem.sizes[(*expert, here)])
        room[there] -= int(problem.sizes[(*expert, there)])
        at[expert] = there
        names = problem.places[here], problem.places[there]
        steps.append(Move(int(layers[expert[0]]), expert[1], *names, int(problem.sizes[(*expert, there)]), aside))

    while pending:
        ready = next((e for e in pending if problem.sizes[(*e, int(new[e]))] <= room[int(new[e])]), None)
        if ready is not None:
            carry(ready, int(new[ready]), False)
            pending.remove(ready)
            continue
        awaited = {int(new[e]) for e in pending}
        spots = [
            (spot == host, e, spot)
            for e in pending
            if at[e] in awaited and parked[e] < PARKS
            for spot in range(host + 1)
            if spot not in (at[e], int(new[e])) or spot not in awaited
            if problem.sizes[(*e, spot)] <= room[spot] and spot != at[e]
        ]
        if not spots:
            size = int(problem.sizes.max())
            raise PlanError(
                "the moves cannot be put in an order: every place is full to the last expert",
                where=", ".join(f"{name} {left:,} B free" for name, left in zip(problem.places, room, strict=True)),
                found=f"expected room for one expert, {size:,} B, on some place",
                mend="leave that much free on the host or a card",
            )
        _, expert, spot = max(spots, key=lambda s: (s[0], -int(busy[s[1]])))
        carry(expert, spot, True)
        parked[expert] += 1
    return tuple(steps)

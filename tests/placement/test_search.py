"""Fast plans and local search, each step against all the steps there are."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from moefit.placement import search
from moefit.placement.problem import Problem
from moefit.placement.program import build, relax

from .cases import costs, every, few, optimum, problems, random_traffic

seeds = st.integers(0, 2**32 - 1)


def some_plan(problem: Problem, seed: int = 0) -> np.ndarray:
    """One of all that keep the limits."""
    plans = every(problem)
    assume(len(plans))
    return np.asarray(plans[np.random.default_rng(seed).integers(len(plans))].argmax(axis=2))


def after(assignment: np.ndarray, steps: list[search.Step]) -> np.ndarray:
    changed = assignment.copy()
    for layer, expert, old, new in steps:
        assert changed[layer, expert] == old != new
        changed[layer, expert] = new
    return changed


def plain_greedy(problem: Problem) -> np.ndarray | None:
    """Hottest first onto the least loaded card that has room, for problems without limits per layer."""
    plan = np.full(problem.busy.shape, -1)
    room = list(problem.free)
    load = np.zeros((len(plan), problem.host + 1), int)
    heat = load.copy()
    for layer, expert in sorted(np.ndindex(*plan.shape), key=lambda at: (-problem.busy[at], at)):
        mine, sizes = problem.loads[:, layer, expert].sum(axis=0), problem.sizes[layer, expert]
        allowed = range(problem.host + 1) if problem.allowed is None else np.flatnonzero(problem.allowed[layer, expert])
        fits = [int(p) for p in allowed if sizes[p] <= room[p]]
        if not fits:
            return None
        cards = [p for p in fits if p != problem.host]
        place = min(
            cards or fits, key=lambda p: (load[layer, p] + mine[p], heat[layer, p], -(room[p] // problem.unit[p]), p)
        )
        plan[layer, expert] = place
        room[place] -= int(sizes[place])
        load[layer, place] += mine[place]
        heat[layer, place] += problem.busy[layer, expert]
    return plan


@few(60)
@given(problems())
def test_greedy_is_greedy(problem: Problem) -> None:
    problem = replace(problem, least=None, most=None)
    found, plain = search.greedy(problem), plain_greedy(problem)
    assert (found is None) == (plain is None)
    if found is not None:
        assert (found == plain).all()
        assert problem.feasible(found)


@few(60)
@given(problems())
def test_fast_plans_keep_bytes_rules_and_the_most_per_layer(problem: Problem) -> None:
    for plan in (search.greedy(problem), search.first_fit(problem)):
        assert plan is None or replace(problem, least=None).feasible(plan)


def test_greedy_puts_the_hottest_of_a_layer_first_that_must_have_some_on_cards() -> None:
    busy = np.array([[9, 8, 7, 6], [3, 2, 1, 0]])
    sizes, loads = np.ones((2, 4, 2), np.int64), np.repeat(busy[None, ..., None], 2, axis=3)
    problem = Problem(("gpu0", "host"), sizes, (3, 8), loads, loads[..., 0], 1.0, busy)
    assert search.greedy(problem).tolist() == [[0, 0, 0, 1], [1, 1, 1, 1]]  # type: ignore[union-attr]
    both = replace(problem, least=np.array([1, 1]))
    assert search.greedy(both).tolist() == [[0, 0, 1, 1], [0, 1, 1, 1]]  # type: ignore[union-attr]
    allowed = np.ones((2, 4, 2), bool)
    allowed[1, 0, 0] = False  # the next hottest then
    assert search.greedy(replace(both, allowed=allowed)).tolist() == [  # type: ignore[union-attr]
        [0, 0, 1, 1],
        [1, 0, 1, 1],
    ]
    one = replace(problem, most=np.array([1, 4]))
    assert search.greedy(one).tolist() == [[0, 1, 1, 1], [0, 0, 1, 1]]  # type: ignore[union-attr]


@few(60)
@given(problems(moves=True), seeds)
def test_improve_never_makes_worse_and_keeps_every_limit(problem: Problem, seed: int) -> None:
    start = some_plan(problem, seed)
    before = start.copy()
    weights = dict.fromkeys(problem.groups, 1.0)
    better = search.improve(problem, start, weights=weights)
    assert (start == before).all()
    assert problem.feasible(better)

    def weighed(plan: np.ndarray) -> int:
        return int(problem.finish(plan).max(axis=2).sum())

    assert weighed(better) <= weighed(start)
    if len(set(problem.groups)) == 1:
        assert problem.cost(better) <= problem.cost(start)
        assert (search.improve(problem, start) == better).all()


@few(60)
@given(problems(moves=True), seeds)
def test_state_keeps_step_with_the_plan(problem: Problem, seed: int) -> None:
    """Loads, room, moves and what is on cards after a number of steps, as of the plan they lead to."""
    rng = np.random.default_rng(seed)
    start = some_plan(problem, seed)
    weights = {group: float(rng.integers(1, 5)) for group in problem.groups}
    state = search._State(problem, start.copy(), weights)
    for _ in range(6):
        steps = search._best_across(state) if rng.random() < 0.3 else search._best_within(state, 0)
        if not steps:  # any step at all
            layer, expert = (int(rng.integers(n)) for n in start.shape)
            old = int(state.assignment[layer, expert])
            steps = [(layer, expert, old, int((old + rng.integers(1, problem.host + 1)) % (problem.host + 1)))]
        plan = after(state.assignment, steps)
        state.apply(steps)
        fresh = search._State(problem, plan.copy(), weights)
        assert (state.assignment == plan).all()
        assert (state.finish == fresh.finish).all() and state.room == fresh.room
        scale = np.array([weights[group] for group in problem.groups])[:, None, None]
        assert (state.finish == problem.finish(plan) * scale).all()
        assert (state.on_cards == (plan != problem.host).sum(axis=1)).all()
        assert (state.moves, state.move_bytes) == (fresh.moves, fresh.move_bytes)
        for p, (room, used) in enumerate(zip(state.room, problem.used(plan), strict=True)):
            assert room == problem.room[p] - used // problem.unit[p]
        if problem.home is not None:
            moved = plan != problem.home
            written = int(np.take_along_axis(problem.sizes, plan[..., None], 2)[..., 0][moved].sum())
            assert problem.max_moves is None or state.moves == problem.max_moves - int(moved.sum())
            assert problem.max_bytes is None or state.move_bytes == problem.max_bytes - written


@few(40)
@given(problems(moves=True, one_group=True), seeds)
def test_best_within_is_the_best_of_all(problem: Problem, seed: int) -> None:
    start = some_plan(problem, seed)
    experts = range(start.shape[1])
    bundles = [[], *([e] for e in experts), *(list(pair) for pair in combinations(experts, 2))]
    for layer in range(len(start)):
        plans = [start]
        for p, q in combinations(range(problem.host + 1), 2):
            for there in bundles:
                for back in bundles:
                    if any(start[layer, e] != p for e in there) or any(start[layer, e] != q for e in back):
                        continue
                    plan = start.copy()
                    plan[layer, there], plan[layer, back] = q, p
                    plans.append(plan)
        best = min(problem.cost(plan) for plan in plans if problem.feasible(plan))
        found = after(start, search._best_within(search._State(problem, start.copy(), None), layer))
        assert problem.feasible(found) and problem.cost(found) == best


@few(60)
@given(problems(moves=True, one_group=True), seeds)
def test_best_across_is_the_best_of_all(problem: Problem, seed: int) -> None:
    """Exchanges of two experts of different layers whose layers, one by one, keep their limits."""
    start = some_plan(problem, seed)
    everyone = list(np.ndindex(*start.shape))
    plans = [start]
    for one, two in combinations(everyone, 2):
        if one[0] != two[0]:
            plan = start.copy()
            plan[one], plan[two] = start[two], start[one]
            plans.append(plan)
    best = min(problem.cost(plan) for plan in plans if problem.feasible(plan))
    found = after(start, search._best_across(search._State(problem, start.copy(), None)))
    assert problem.feasible(found) and problem.cost(found) == best


@few(40)
@given(problems(moves=True))
def test_rounded_plans(problem: Problem) -> None:
    for classes in (problem.classes, [[card] for card in range(problem.host)]):
        relaxed = relax(build(problem, classes))
        if relaxed is None:
            continue
        assert problem.home is not None
        shares = relaxed[1]
        plan = search.round_shares(problem, classes, shares)
        assert plan is None or replace(problem, home=None, least=None).feasible(plan)
        bytes_only = replace(problem, allowed=None, least=None, most=None, max_moves=None, max_bytes=None)
        moved = search.round_moves(problem, classes, shares)
        if bytes_only.feasible(problem.home):
            assert bytes_only.feasible(moved)


def test_whole_shares_are_kept() -> None:
    """Of two equal cards as one class, and of cards apart."""
    rng = np.random.default_rng(3)
    busy = random_traffic(3, 8, 2, 100, 0).counts
    sizes, loads = np.ones((3, 8, 3), np.int64), np.repeat(busy[None, ..., None], 3, axis=3)
    problem = Problem(("gpu0", "gpu1", "host"), sizes, (8, 8, 24), loads, loads[..., 0], 1.0, busy)
    for classes in ([[0, 1]], [[0], [1]]):
        place = rng.integers(0, len(classes) + 1, size=(3, 8))
        place[:] = np.where(np.cumsum(place < len(classes)).reshape(3, 8) > 14, len(classes), place)
        plan = search.round_shares(problem, classes, np.eye(len(classes) + 1)[place])
        assert plan is not None
        groups = [*classes, [2]]
        overfull = len(classes) == 2 and max(np.bincount(place.ravel(), minlength=3)[:2]) > 8
        assert overfull or all(plan[at] in groups[place[at]] for at in np.ndindex(3, 8))


@few(40)
@given(problems(one_group=True))
def test_enough_is_enough(problem: Problem) -> None:
    """Exchanges across layers stop at a cost that is low enough; within layers they are free."""
    start = some_plan(problem)
    lazy = search.improve(problem, start, enough=2**62)
    assert problem.cost(search.improve(problem, start)) <= problem.cost(lazy) <= problem.cost(start)
    best = optimum(problem)
    assert best is not None and best <= problem.cost(lazy)


def test_layers_of_many_experts_exchange_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    work = np.array([4, 9, 2, 10, 4, 7, 2, 4])
    loads = np.repeat(work[None, None, :, None], 3, axis=3)
    sizes = np.ones((1, 8, 3), np.int64)
    problem = Problem(("gpu0", "gpu1", "host"), sizes, (4, 4, 0), loads, loads[..., 0] * 0, 1.0, loads[0, ..., 0])
    start = np.array([[0, 0, 0, 0, 1, 1, 1, 1]])
    assert problem.cost(search.improve(problem, start)) == 21 == int(costs(problem, every(problem)).min())
    monkeypatch.setattr(search, "PAIRS_UP_TO", 7)
    assert problem.cost(search.improve(problem, start)) == 22

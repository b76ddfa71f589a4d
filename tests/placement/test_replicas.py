"""Experts on several cards: each copy gains, fits, and none that would gain more is left out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moefit.placement import Gpu, Machine, solve
from moefit.placement.problem import Problem
from moefit.placement.replicas import replicate, spread
from moefit.placement.search import greedy
from moefit.placement.solve import GAP

from .cases import Case, cases, few, optimum, problems, random_traffic
from .test_search import some_plan


@few(60)
@given(problems(copies=True, one_group=True), st.integers(0, 2**32 - 1))
def test_copies_gain_fit_and_come_to_an_end(problem: Problem, seed: int) -> None:
    start = some_plan(problem, seed)
    holds = replicate(problem, start)
    assert problem.feasible(holds)
    assert (holds & problem.holding(start) == problem.holding(start)).all()  # nothing is taken away
    assert (holds.any(axis=2)).all() and not holds[start == problem.host, :-1].any()
    copies = int(holds.sum()) - start.size
    assert problem.cost(holds) <= problem.cost(start) + copies * problem.host  # each rounds its share up
    # No further copy gains anything.
    slack = len(problem.groups) * problem.busy.size
    for layer, expert, card in np.argwhere(~holds[..., :-1]):
        more = holds.copy()
        more[layer, expert, card] = True
        if problem.feasible(more):
            assert problem.cost(more) >= problem.cost(holds) - slack


@few(60)
@given(problems(copies=True, one_group=True), st.integers(0, 2**32 - 1))
def test_layers_laid_out_anew_gain_and_fit(problem: Problem, seed: int) -> None:
    start = some_plan(problem, seed)
    holds = spread(problem, start)
    assert problem.feasible(holds)
    assert (holds[:, :, -1] == (start == problem.host)).all()
    assert problem.cost(holds) <= problem.cost(start) + int(holds.sum())  # each copy rounds its share up
    assert (spread(problem, start) == holds).all()


def test_others_make_way_for_an_expert_that_every_token_asks_for() -> None:
    """No single copy gains: the hot expert's card is the slowest, and another with a share of it would be slower."""
    loads = np.repeat(np.array([12, 5, 5, 5, 5, 5, 5])[None, None, :, None], 4, axis=3)  # [1, 1, 7, 3 cards and host]
    problem = Problem(
        ("gpu0", "gpu1", "gpu2", "host"), np.ones((1, 7, 4), np.int64), (6, 6, 6, 0), loads, loads[..., 0] * 0, 1.0,
        loads[0, ..., 0],
    )  # fmt: skip
    start = np.array([[0, 1, 1, 1, 2, 2, 2]])
    assert problem.cost(start) == problem.cost(replicate(problem, start)) - 0 == 15
    hot = replace(problem, loads=np.where(loads == 12, 18, loads))
    assert hot.cost(start) == 18 == hot.cost(replicate(hot, start))
    assert hot.cost(spread(hot, start)) == 16  # 48 in three


def test_the_best_copy_comes_first() -> None:
    """One place for a copy: of the experts of the slowest cards, the one that gains most."""
    loads = np.array([[[[8, 8, 99], [2, 2, 99]], [[30, 30, 99], [2, 2, 99]]]])
    sizes = np.ones((1 + 1, 2, 3), np.int64)
    problem = Problem(("gpu0", "gpu1", "host"), sizes, (2, 3, 0), loads, loads[..., 0] * 0, 1.0, loads[0, ..., 0])
    start = np.array([[0, 1], [0, 1]])
    holds = replicate(problem, start)
    assert np.argwhere(holds & ~problem.holding(start)).tolist() == [[1, 0, 1]]
    assert problem.cost(start) == 38 and problem.cost(holds) == 8 + 17
    roomy = replace(problem, free=(4, 4, 0))
    assert problem.cost(replicate(roomy, start)) < 8 + 17
    never = np.ones((2, 2, 3), bool)
    never[1, 0, 1] = False
    holds = replicate(replace(problem, allowed=never), start)
    assert np.argwhere(holds & ~problem.holding(start)).tolist() == [[0, 0, 1]]


@few(15)
@given(cases(copies=True))
def test_plans_with_replicas(case: Case) -> None:
    problem = case.problem()
    best = optimum(problem, copies=case.machine.mode == "ep")
    if best is None:
        return
    plan, without = case.solve(replicas=True), case.solve()
    assert problem.feasible(plan.holds)
    assert plan.value == problem.value(problem.cost(plan.holds))
    assert plan.bound <= problem.value(best) <= plan.value
    assert plan.value <= without.value * (1 + GAP)
    assert plan.bound <= without.bound * (1 + GAP)
    assert plan.greedy is None or plan.value <= plan.greedy
    assert sum(plan.shares) == pytest.approx(1)
    if case.machine.mode == "ep":  # the integer program knows no replicas: its bound is none
        assert plan.bound_from in ("nothing", "linear relaxation")
    else:
        assert plan.holds.sum() == plan.holds[..., 0].size


def test_a_hot_expert_is_copied() -> None:
    """With room to spare on every card its load is shared, and the bound says that nothing is left to gain."""
    traffic, sizes = random_traffic(3, 6, 1, 300, 4), np.full((3, 6), 10_000)
    machine = Machine((Gpu(200_000),) * 3, 10**6)
    plan, without = solve(sizes, traffic, machine, replicas=True), solve(sizes, traffic, machine)
    assert plan.plan_from.startswith("replicas")
    assert plan.value < 0.8 * without.value and plan.gap < 0.1
    assert plan.bound < without.bound
    assert all(used <= 200_000 for used in plan.used[:-1]) and not plan.holds[..., -1].any()


def test_scenarios_are_weighed_together() -> None:
    """A copy that helps one scenario and is of no use in the other."""
    loads = np.array([[[[10, 10, 99], [0, 0, 99]]], [[[1, 1, 99], [3, 3, 99]]]])
    sizes = np.ones((1, 2, 3), np.int64)
    problem = Problem(
        ("gpu0", "gpu1", "host"), sizes, (2, 2, 0), loads, loads[..., 0] * 0, 1.0, loads[0, ..., 0], (0, 0)
    )
    start = greedy(problem)
    assert start is not None and problem.cost(start) == 13
    holds = replicate(problem, start)
    assert problem.cost(holds) == 5 + 3 == optimum(problem, copies=True)  # the shares of 1 and 3 are rounded up

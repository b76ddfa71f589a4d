"""Lower bounds against the optimum by enumeration, and the relaxation against one written out row by row."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import linprog

from moefit.placement import program
from moefit.placement.bound import Multipliers, lagrangian_bound
from moefit.placement.problem import Problem
from moefit.placement.program import build, margins, relax, solve_program

from .cases import costs, every, few, optimum, problems

seeds = st.integers(0, 2**32 - 1)


def random_multipliers(problem: Problem, seed: int, copies: bool = False) -> Multipliers:
    """Of all kinds and orders of magnitude, some missing, also for limits that the problem has not."""
    rng = np.random.default_rng(seed)
    scenarios, layers, experts = problem.waits.shape
    classes = len(problem.classes)

    def some(*shape: int) -> Any:
        return rng.random(shape) * 10.0 ** rng.integers(-3, 4) * (rng.random(shape) < rng.choice([0.2, 1.0]))

    singles = some(scenarios, layers, experts) * (0 if copies else rng.integers(0, 2))
    return Multipliers(
        {group: float(some()) for group in sorted(set(problem.groups))},
        some(scenarios, layers, classes + 1),
        singles,
        some(classes + 1),
        some(layers),
        some(layers),
        float(some()),
        float(some()),
    )


@few(50)
@given(problems(moves=True), seeds)
def test_any_multipliers_give_a_bound(problem: Problem, seed: int) -> None:
    best = optimum(problem)
    assume(best is not None)
    for k in range(10):
        assert 0 <= lagrangian_bound(problem, random_multipliers(problem, seed + k)) <= best  # type: ignore[operator]


@few(40)
@given(problems(copies=True), seeds)
def test_any_multipliers_without_singles_give_a_bound_with_replicas(problem: Problem, seed: int) -> None:
    best = optimum(problem, copies=True)
    assume(best is not None)
    relaxed = relax(build(problem, problem.classes, replicas=True))
    assert relaxed is not None and not relaxed[0].singles.any()
    assert lagrangian_bound(problem, relaxed[0]) <= best  # type: ignore[operator]
    for k in range(10):
        found = random_multipliers(problem, seed + k, copies=True)
        assert 0 <= lagrangian_bound(problem, found) <= best  # type: ignore[operator]


def plain_relaxation(problem: Problem) -> float | None:
    """Optimum of the linear relaxation with every card by itself and the host's share a variable of its own.

    Columns x[l, e, p], t[s, l], z. No expert takes less than its whole time, wherever its parts lie.
    """
    scenarios, layers, experts = problem.waits.shape
    places = problem.host + 1
    x = np.arange(layers * experts * places).reshape(layers, experts, places)
    t = x.size + np.arange(scenarios * layers).reshape(scenarios, layers)
    z = x.size + t.size
    rows: list[np.ndarray] = []
    bounds: list[float] = []

    def row(bound: float) -> np.ndarray:
        rows.append(np.zeros(z + 1))
        bounds.append(bound)
        return rows[-1]

    once = np.zeros((layers * experts, z + 1))
    for k in range(layers * experts):
        once[k, x.reshape(-1, places)[k]] = 1
    for p in range(places):
        row(problem.room[p])[x[..., p]] = problem.units[..., p]
    for s in range(scenarios):
        for layer in range(layers):
            for p in range(places):
                here = row(0)
                here[x[layer, :, p]] = problem.loads[s, layer, :, p]
                if p != problem.host:
                    here[x[layer, :, -1]] = problem.waits[s, layer]
                here[t[s, layer]] = -1
    for group in set(problem.groups):
        here = row(0)
        for s, g in enumerate(problem.groups):
            here[t[s]] = float(g == group)
        here[z] = -1
    for layer in range(layers):
        if problem.most is not None:
            row(float(problem.most[layer]))[x[layer, :, :-1]] = 1
        if problem.least is not None:
            row(-float(problem.least[layer]))[x[layer, :, :-1]] = -1
    if problem.home is not None:
        came = problem.home[..., None] != np.arange(places)
        if problem.max_moves is not None:
            row(problem.max_moves)[x] = came
        if problem.max_bytes is not None:
            row(problem.max_bytes)[x] = came * problem.sizes
    upper = np.full(z + 1, np.inf)
    upper[: x.size] = 1 if problem.allowed is None else problem.allowed.ravel()
    cost = np.zeros(z + 1)
    cost[z] = 1
    found = linprog(
        cost, np.array(rows), bounds, once, np.ones(len(once)), list(zip(np.zeros(z + 1), upper, strict=True))
    )
    return None if found.x is None else float(found.fun)


@few(50)
@given(problems(moves=True))
def test_relaxation_without_singles_is_the_plain_one(problem: Problem) -> None:
    """With cards apart and pooled by class, where it is the same: parts of equal cards can be balanced."""
    plain = plain_relaxation(problem)
    for classes in ([[card] for card in range(problem.host)], problem.classes):
        relaxed = relax(build(problem, classes, replicas=True))
        if plain is None or relaxed is None:
            assert plain is None and relaxed is None
            assert not len(every(problem))
            continue
        found, shares = relaxed
        assert shares.shape == (*problem.busy.shape, len(classes) + 1)
        assert shares.min() >= -1e-6 and shares.sum(axis=2) == pytest.approx(1)
        if classes == problem.classes:
            bound = lagrangian_bound(problem, found)
            assert plain * (1 - 1e-6) - 1e-6 <= bound <= plain * (1 + 1e-6) + 1


@few(50)
@given(problems(moves=True))
def test_bound_of_the_relaxation_is_its_optimum_and_below_every_plan(problem: Problem) -> None:
    """Strong duality: a bound evaluated from duals loses nothing, so that no multiplier is forgotten or misread."""
    made = build(problem, problem.classes)
    relaxed = relax(made)
    best = optimum(problem)
    if relaxed is None:
        assert best is None
        return
    exact = linprog(
        made.cost, made.rows, made.bounds, bounds=list(zip(np.zeros(len(made.upper)), made.upper, strict=True))
    )
    value = float(exact.fun) * made.per_cost
    bound = lagrangian_bound(problem, relaxed[0])
    assert value * (1 - 1e-6) - 1e-6 <= bound <= value * (1 + 1e-6) + 1
    weaker = relax(build(problem, problem.classes, replicas=True))
    assert weaker is not None and lagrangian_bound(problem, weaker[0]) <= bound + 1
    if best is not None:
        assert bound <= best


def test_an_expert_is_not_in_two_halves() -> None:
    """Cards alike, one hot expert: half of it on each would be done in half the time."""
    loads = np.array([[[[100, 100, 500], [10, 10, 50]]]])
    sizes = np.ones((1, 2, 3), np.int64)
    problem = Problem(("gpu0", "gpu1", "host"), sizes, (2, 2, 2), loads, loads[..., 0] * 0, 1.0, loads[0, ..., 0])
    assert problem.classes == [[0, 1]] and optimum(problem) == 100
    found = [relax(build(problem, problem.classes, replicas)) for replicas in (False, True)]
    assert [lagrangian_bound(problem, relaxed[0]) for relaxed in found if relaxed] == [100, 50]


def test_bounds_are_exact_where_floats_are_not() -> None:
    """One expert of 2**61 + 1 units that has nowhere else to go."""
    loads = np.array([[[[2**61 + 1, 2**61 + 1]]]])
    sizes = np.ones((1, 1, 2), np.int64)
    problem = Problem(("gpu0", "host"), sizes, (1, 1), loads, loads[..., 0] * 0, 1.0, loads[0, ..., 0] // 2)
    zero = np.zeros(1)
    half = Multipliers({0: 1.0}, np.array([[[1.0, 1.0]]]), np.zeros((1, 1, 1)), np.zeros(2), zero, zero, 0.0, 0.0)
    assert lagrangian_bound(problem, half) == 2**60 + 1  # the better half, rounded up
    single = replace(half, places=np.zeros((1, 1, 2)), singles=np.ones((1, 1, 1)))
    assert lagrangian_bound(problem, single) == 2**61 + 1 == optimum(problem)


@few(40)
@given(problems(moves=True))
def test_margins_are_what_the_second_place_costs_more(problem: Problem) -> None:
    """An expert that has a clear cheapest place lies there whole in the relaxation."""
    problem = replace(problem, allowed=None)
    relaxed = relax(build(problem, problem.classes))
    assume(relaxed is not None)
    assert relaxed is not None
    found, shares = relaxed
    margin = margins(problem, found)
    assert margin.min() >= 0
    clear = margin > 1e-6 * max(1.0, float(problem.loads.max()))
    assert (shares.max(axis=2)[clear] > 1 - 1e-6).all()


@few(60)
@given(problems(moves=True))
def test_the_program_finds_the_optimum(problem: Problem) -> None:
    best = optimum(problem)
    bound, assignment = solve_program(problem, 1e-6, 1000)
    if best is None:
        assert assignment is None
        return
    assert assignment is not None and problem.feasible(assignment)
    assert problem.cost(assignment) == best
    assert best * (1 - 2e-6) - 1e-3 <= bound <= best


@few(40)
@given(problems(moves=True), seeds)
def test_the_program_around_a_plan_is_the_best_near_it(problem: Problem, seed: int) -> None:
    plans = every(problem)
    assume(len(plans))
    rng = np.random.default_rng(seed)
    keep = plans[rng.integers(len(plans))].argmax(axis=2)
    keep[rng.random(keep.shape) < 0.5] = -1
    near = plans[((plans.argmax(axis=3) == keep) | (keep < 0)).all(axis=(1, 2))]
    best = int(costs(problem, near).min())
    bound, assignment = solve_program(problem, 1e-6, 1000, keep)
    assert assignment is not None and problem.cost(assignment) == best >= bound
    assert ((assignment == keep) | (keep < 0)).all()


def test_an_answer_that_overflows_is_solved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """HiGHS keeps rows within a tolerance only: here its first answer puts one expert too many on a card."""
    sizes = np.repeat(np.array([[5, 4, 3, 2], [2, 3, 4, 5]])[..., None], 3, axis=2)
    loads = sizes[None] * np.array([1, 1, 10])
    problem = Problem(("gpu0", "gpu1", "host"), sizes, (10, 10, 20), loads, loads[..., 0] * 0, 1.0, sizes[..., 0])
    real, calls = program.milp, []

    def sloppy(*args: Any, **options: Any) -> Any:
        result = real(*args, **options)
        calls.append(1)
        if len(calls) == 1:
            x = result.x[:16].reshape(2, 4, 2)  # a view
            x[...] = np.eye(3)[[[0, 0, 2, 2], [0, 2, 1, 1]]][..., :2]  # 5 + 4 + 2 = 11 on a card that holds 10
        return result

    monkeypatch.setattr(program, "milp", sloppy)
    bound, assignment = solve_program(problem, 1e-6, 1000)
    assert len(calls) == 2
    assert assignment is not None and problem.feasible(assignment)
    assert bound <= optimum(problem)  # type: ignore[operator]
    assert Fraction(problem.cost(assignment)) >= bound


def test_the_program_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with program.quiet():
        ctypes.CDLL(None).printf(b"stray\n")
    print("kept")
    assert capfd.readouterr().out == "kept\n"

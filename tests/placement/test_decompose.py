"""Layer by layer at prices: bounds and plans against the optimum by enumeration."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from moefit.placement import decompose as module
from moefit.placement.bound import lagrangian_bound
from moefit.placement.decompose import Prices, at_prices, decompose, fits
from moefit.placement.problem import Problem
from moefit.placement.program import build, relax
from moefit.placement.search import greedy, improve, round_moves

from .cases import costs, every, few, optimum, problems, random_traffic


def apart(problem: Problem) -> Problem:
    """With cards that are told apart, as a plan in use does."""
    if all(len(members) == 1 for members in problem.classes):
        return problem
    return replace(problem, free=tuple(free + card for card, free in enumerate(problem.free)))


@few(25)
@given(problems(moves=True), st.integers(0, 2**32 - 1))
def test_any_prices_give_a_bound_and_the_best_layers(problem: Problem, seed: int) -> None:
    """Without limits across layers the sum of the layers' best is no less than at any other rows."""
    problem = apart(problem)
    best = optimum(problem)
    assume(best is not None)
    rng = np.random.default_rng(seed)
    groups = sorted(set(problem.groups))
    weights = rng.dirichlet(np.ones(len(groups)))
    size = float(problem.sizes.mean())
    cost = float(problem.loads.mean())
    prices = Prices(
        dict(zip(groups, weights.tolist(), strict=True)),
        rng.random(problem.host + 1) * rng.integers(0, 2, size=problem.host + 1) * cost / size,
        0.0 if problem.max_moves is None else float(rng.random() * cost),
        0.0 if problem.max_bytes is None else float(rng.random() * cost / size),
    )
    bound, assignment = at_prices(problem, prices)
    assert 0 <= bound <= best  # type: ignore[operator]
    assert assignment is not None
    allowed = problem.allowed
    assert allowed is None or allowed[(*np.indices(assignment.shape), assignment)].all()
    on_cards = (assignment != problem.host).sum(axis=1)
    assert problem.least is None or (on_cards >= problem.least).all()
    assert problem.most is None or (on_cards <= problem.most).all()
    # Weighed as the prices say, no rows that keep these limits are cheaper, and the bound is theirs.
    free = replace(problem, free=(10**9,) * (problem.host + 1), max_moves=None, max_bytes=None)
    here = priced(problem, prices, assignment[None, ..., None] == np.arange(problem.host + 1))[0]
    assert here == pytest.approx(priced(problem, prices, every(free)).min(), rel=1e-5, abs=1e-5)
    if bound:
        paid = float(prices.bytes @ (np.array(problem.room) * problem.unit))  # whole experts of equal size
        paid += prices.move * (problem.max_moves or 0) + prices.move_bytes * (problem.max_bytes or 0)
        assert bound == pytest.approx(here - paid, rel=1e-4, abs=1 + 1e-4 * (here + paid))


def priced(problem: Problem, prices: Prices, holds: np.ndarray) -> np.ndarray:
    """float [N]: what N placements [N, L, E, P] cost at these prices, scenarios weighed by their groups."""
    total = (holds * problem.sizes * prices.bytes).sum(axis=(1, 2, 3))
    for s, group in enumerate(problem.groups):
        total += prices.groups[group] * costs(single(problem, s), holds)
    if problem.home is not None:
        came = holds & (problem.home[..., None] != np.arange(problem.host + 1))
        total += (came * (prices.move + prices.move_bytes * problem.sizes)).sum(axis=(1, 2, 3))
    return np.asarray(total)


def single(problem: Problem, s: int) -> Problem:
    """One scenario of a problem by itself."""
    return replace(problem, loads=problem.loads[s : s + 1], waits=problem.waits[s : s + 1], groups=(0,))


@few(25)
@given(problems(moves=True))
def test_bound_and_plan(problem: Problem) -> None:
    problem = apart(problem)
    assume(fits(problem))
    best = optimum(problem)
    relaxed = relax(build(problem, problem.classes))
    assume(best is not None and relaxed is not None)
    assert relaxed is not None and best is not None
    starts = [plan for plan in (greedy(problem),) if plan is not None and problem.feasible(plan)]
    bound, assignment = decompose(problem, relaxed[0], starts, 1e-6)
    assert bound <= best
    if starts:
        assert assignment is not None and problem.cost(assignment) <= problem.cost(starts[0])
    if assignment is not None:
        assert problem.feasible(assignment) and problem.cost(assignment) >= best
    if bound:
        assert bound >= lagrangian_bound(problem, replace(relaxed[0], singles=relaxed[0].singles * 0)) * (1 - 1e-5) - 1


def larger(max_moves: int) -> Problem:
    """Six layers of 24 experts on two cards, from a plan for other traffic."""
    rng = np.random.default_rng(1)
    counts = random_traffic(6, 24, 3, 500, 1).counts
    loads = counts[None, ..., None] * np.array([7, 7, 60])
    sizes = np.repeat(rng.integers(40, 60, size=(6, 24))[..., None], 3, axis=2)
    total = int(sizes[..., 0].sum())
    names = ("gpu0", "gpu1", "host")
    problem = Problem(names, sizes, (total // 3, total // 3, total), loads, counts[None] * 40, 1.0, counts)
    home = greedy(replace(problem, busy=random_traffic(6, 24, 3, 500, 2).counts))
    return replace(problem, home=home, max_moves=max_moves)


def test_it_closes_most_of_the_gap() -> None:
    """What moves a tenth of an expert in the relaxation cannot here."""
    problem = larger(40)
    relaxed = relax(build(problem, problem.classes))
    assert relaxed is not None and problem.home is not None
    start = improve(problem, round_moves(problem, problem.classes, relaxed[1]))
    bound, assignment = decompose(problem, relaxed[0], [start, problem.home], 1e-4)
    assert assignment is not None and problem.feasible(assignment)
    assert problem.cost(assignment) < problem.cost(start) < problem.cost(problem.home)
    assert 1.02 * lagrangian_bound(problem, relaxed[0]) < bound <= problem.cost(assignment) < 1.02 * bound


def test_where_it_is_not_used() -> None:
    problem = larger(12)
    assert fits(problem)
    assert not fits(replace(problem, home=None, max_moves=None))  # two cards alike
    wide = np.ones((1, module.COLUMNS, 2), np.int64)
    many = Problem(("gpu0", "host"), wide, (9, 9), wide[None], wide[None, ..., 0], 1.0, wide[..., 0])
    assert fits(many)
    wide = np.ones((1, module.COLUMNS + 1, 2), np.int64)
    assert not fits(Problem(("gpu0", "host"), wide, (9, 9), wide[None], wide[None, ..., 0], 1.0, wide[..., 0]))

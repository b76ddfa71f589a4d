"""The problem in whole numbers against plain enumeration, and what cannot fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from moefit.errors import PlanError
from moefit.placement.problem import Problem, check_fits, packing_error

from .cases import costs, every, few, problems


@few(40)
@given(problems(moves=True, copies=True), st.integers(0, 2**32 - 1))
def test_feasible_is_what_enumeration_keeps(problem: Problem, seed: int) -> None:
    keeps = {holds.tobytes() for holds in every(problem, copies=True)}
    rng = np.random.default_rng(seed)
    for _ in range(40):
        holds = rng.random(problem.sizes.shape) < rng.random()
        assert problem.feasible(holds) == (holds.tobytes() in keeps)
    plans = every(problem)
    for holds in plans[:: max(1, len(plans) // 5)]:
        assert problem.feasible(holds) and problem.feasible(holds.argmax(axis=2))
    overfull = [
        replace(problem, free=tuple(u - (q == p) for q, u in enumerate(problem.used(h))))
        for h in plans[:1]
        for p in range(problem.host + 1)
    ]
    assert not any(tight.feasible(plans[0]) for tight in overfull)  # to the byte


@few(40)
@given(problems(copies=True))
def test_cost_is_what_enumeration_finds(problem: Problem) -> None:
    holds = every(problem, copies=True)
    found = costs(problem, holds)
    for number in range(0, len(holds), max(1, len(holds) // 20)):
        assert problem.cost(holds[number]) == found[number]
        if (holds[number].sum(axis=2) == 1).all():
            assert problem.cost(holds[number].argmax(axis=2)) == found[number]
        used = [
            sum(int(problem.sizes[at]) for at in np.ndindex(*holds[number].shape) if holds[number][at] and at[2] == p)
            for p in range(problem.host + 1)
        ]
        assert problem.used(holds[number]) == tuple(used)


@few(40)
@given(problems(moves=True))
def test_rooms_lose_nothing_and_classes_are_interchangeable(problem: Problem) -> None:
    for place in range(problem.host + 1):
        sizes, unit = problem.sizes[..., place], problem.unit[place]
        assert (problem.units[..., place] * unit == sizes).all()
        assert 0 <= problem.free[place] - problem.room[place] * unit < unit
    assert sorted(card for members in problem.classes for card in members) == list(range(problem.host))
    holds = every(problem)
    assume(len(holds))
    known = {plan.tobytes(): cost for plan, cost in zip(holds, costs(problem, holds), strict=True)}
    for members in problem.classes:
        order = list(range(problem.host + 1))
        for card, other in zip(members, members[1:] + members[:1], strict=True):
            order[card] = other
        for plan, cost in zip(holds, costs(problem, holds), strict=True):
            assert known[plan[..., order].copy().tobytes()] == cost


def test_equal_cards_are_one_class() -> None:
    assert small((10, 10, 9), 3).classes == [[0, 1], [2]]
    home = np.zeros((1, 4), np.int64)
    assert replace(small((10, 10), 3), home=home).classes == [[0, 1]]
    assert replace(small((10, 10), 3), home=home, max_bytes=0).classes == [[0], [1]]


def small(free: tuple[int, ...], size: int, experts: int = 4) -> Problem:
    places = len(free) + 1
    loads = np.ones((1, 1, experts, places), np.int64)
    names = (*(f"gpu{card}" for card in range(len(free))), "host")
    sizes = np.full((1, experts, places), size, np.int64)
    return Problem(names, sizes, (*free, 100), loads, loads[..., 0] * 0, 1.0, loads[0, ..., 0])


@few(50)
@given(problems())
def test_what_check_fits_refuses_cannot_fit_and_its_mend_is_enough_room(problem: Problem) -> None:
    problem = replace(problem, sizes=np.repeat(problem.sizes[..., :1], problem.host + 1, axis=2) * 7)
    bare = replace(problem, allowed=None, least=None, most=None)
    zeros = (0,) * (problem.host + 1)
    try:
        check_fits(bare, zeros, bare.free)
    except PlanError as error:
        assert not len(every(bare))
        assert "do not fit" in error.what and "--host" in error.mend
        missing = int(error.mend.split()[1].replace(",", ""))
        check_fits(replace(bare, free=(*bare.free[:-1], bare.free[-1] + missing)), zeros, bare.free)


@few(50)
@given(problems())
def test_what_packing_error_promises_is_true(problem: Problem) -> None:
    bare = replace(problem, allowed=None, least=None, most=None)
    try:
        check_fits(bare, (0,) * (problem.host + 1), bare.free)
    except PlanError:
        return
    error = packing_error(bare)
    assert "(that is always enough)" in error.mend
    extra = int(error.mend.split()[1].replace(",", ""))
    for place in range(problem.host + 1):
        free = tuple(f + extra * (p == place) for p, f in enumerate(bare.free))
        assert len(every(replace(bare, free=free)))


def test_packing_error_with_limits_promises_nothing() -> None:
    limited = replace(small((3, 3), 3), least=np.array([3]))
    error = packing_error(limited)
    assert "keeps the limits" in error.what and "always enough" not in error.mend
    assert "--min-per-layer" in error.mend


def test_tensors_that_are_no_experts_alone_are_too_many() -> None:
    problem = replace(small((10, 10), 3), free=(10, -5, 100))
    with pytest.raises(PlanError, match=r"overflow gpu1 by 5 B.*at most 20 B, found 25 B.*gpu1 5 B more or reserve"):
        check_fits(problem, (0, 25, 0), (10, 20, 100))
    problem = replace(problem, free=(10, 10, -1))
    with pytest.raises(PlanError, match=r"overflow host by 1 B.*Give host 1 B more\.$"):
        check_fits(problem, (0, 0, 101), (10, 10, 100))


@pytest.mark.parametrize(("name", "low"), [("sizes", 0), ("loads", -1), ("waits", -1), ("busy", -1)])
def test_arrays_that_do_not_belong_together(name: str, low: int) -> None:
    problem = small((10, 10), 3)
    array = getattr(problem, name)
    for bad in (array[..., :-1], array.astype(np.int32), np.where(np.arange(array.shape[-1]) == 0, low, array)):
        with pytest.raises(PlanError, match=rf"does not fit together \[{name}\]"):
            replace(problem, **{name: bad})


def test_every_finds_all() -> None:
    """The reference itself: 3 places, 2 experts: 9 ways, and with copies on two cards 4 each."""
    problem = small((100, 100), 3, experts=2)
    assert len(every(problem)) == 9 and len(every(problem, copies=True)) == 16
    tight = replace(problem, free=(3, 3, 0))
    assert sorted(holds.argmax(axis=2).tolist() for holds in every(tight)) == [[[0, 1]], [[1, 0]]]


@few(40)
@given(problems(moves=True, copies=True), st.floats(0, 1))
def test_no_plan_of_at_most_a_cost_is_lost_below_it(problem: Problem, share: float) -> None:
    """Nor any that costs otherwise; with copies too."""
    holds = every(problem, copies=True)
    assume(len(holds))
    found = costs(problem, holds)
    cost = int(np.sort(found)[int(share * (len(found) - 1))])
    fewer = problem.below(cost, problem.host)
    for number in np.flatnonzero(found <= cost)[:: max(1, len(found) // 50)]:
        assert fewer.feasible(holds[number]) and fewer.cost(holds[number]) == found[number]
    assert problem.below(int(problem.loads.max() + problem.waits.max())) is problem

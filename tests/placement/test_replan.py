"""Plans within a number of moves against the best by enumeration, and moves replayed one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from moefit.errors import PlanError
from moefit.placement import Aim, Gpu, Limits, Machine, Plan, TrafficTable, solve
from moefit.placement.problem import Problem
from moefit.placement.replan import Move, Replan, order_moves, replan, within_limits
from moefit.placement.solve import GAP

from .cases import Case, cases, costs, every, few, problems, random_traffic

some = st.sampled_from([None, 0, 1, 2, 3])


def other_traffic(table: TrafficTable, seed: int) -> TrafficTable:
    """The same model, other routing; sources keep their names."""
    rng = np.random.default_rng(seed)
    order = rng.permuted(np.tile(np.arange(table.counts.shape[1]), (len(table.layers), 1)), axis=1)
    sources = {name: np.take_along_axis(counts, order, axis=1) for name, counts in table.sources.items()}
    counts = np.take_along_axis(table.counts, order, axis=1)
    return TrafficTable(counts, table.tokens, table.layers, table.top_k, sources=sources)


def replay(problem: Problem, home: np.ndarray, moves: tuple[Move, ...], layers: tuple[int, ...]) -> np.ndarray:
    """Where everything lies after the moves; no place ever holds too much."""
    at = home.copy()
    for move in moves:
        expert = (layers.index(move.layer), move.expert)
        here, there = problem.places.index(move.here), problem.places.index(move.there)
        assert at[expert] == here != there
        at[expert] = there
        assert move.bytes == problem.sizes[(*expert, there)]
        assert all(used <= free for used, free in zip(problem.used(at), problem.free, strict=True))
    return at


@few(30)
@given(cases(), st.integers(0, 9999), some, st.sampled_from([None, 0, 3, 9]), st.booleans())
def test_the_best_within_the_limits(case: Case, seed: int, moves: int | None, size: int | None, curve: bool) -> None:
    assume(len(every(case.problem())))
    old = case.solve()
    traffic = other_traffic(case.traffic, seed)
    max_bytes = None if size is None else size * int(case.card_sizes.max()) // 2
    problem = replace(case, traffic=traffic).problem()
    limited = replace(problem, home=old.assignment, max_moves=moves, max_bytes=max_bytes)
    plans = every(limited)
    best = problem.value(int(costs(limited, plans).min()))
    try:
        found = replan(old, traffic, moves, max_bytes, curve=curve)
    except PlanError as error:
        assert "cannot be put in an order" in error.what
        return
    plan = found.plan
    assert limited.feasible(plan.holds)
    assert found.stay == problem.value(problem.cost(old.holds))
    assert plan.bound <= best <= plan.value == problem.value(problem.cost(plan.holds)) <= found.stay
    assert plan.gap <= GAP
    assert (plan.greedy is None) or plan.greedy >= plan.value
    assert (plan.machine, plan.aim, plan.limits, plan.fixed) == (old.machine, old.aim, old.limits, old.fixed)
    final = [move for move in found.moves if not move.parked]
    assert len(final) == (plan.assignment != old.assignment).sum()
    assert moves is None or len(final) <= moves
    assert max_bytes is None or sum(move.bytes for move in final) <= max_bytes
    assert (replay(problem, old.assignment, found.moves, old.layers) == plan.assignment).all()
    if moves == 0:
        assert (plan.holds == old.holds).all() and not found.moves and plan.value == found.stay
    assert bool(found.curve) == curve


@few(60)
@given(problems(moves=True))
def test_searches_within_limits(problem: Problem) -> None:
    """Homes that may themselves break bytes or rules."""
    plans = every(problem)
    search, _ = within_limits(problem)
    if not len(plans):
        assert search.best is None
        return
    best = int(costs(problem, plans).min())
    assert search.best is not None and problem.feasible(search.best)
    assert search.bound <= best <= search.cost == problem.cost(search.best)
    assert search.cost - search.bound <= GAP * search.cost
    assert problem.home is not None
    assert not problem.feasible(problem.home) or search.cost <= problem.cost(problem.home)


def example(seed: int = 0, free: int = 20_000) -> tuple[Plan, TrafficTable]:
    """A plan for 3 layers of 24 experts of 10 kB, half of them on two cards, and other traffic."""
    sizes = np.full((3, 24), 10_000)
    machine = Machine((Gpu(180_000),) * 2, 360_000 + free)
    traffic = random_traffic(3, 24, 3, 400, seed)
    return solve(sizes, traffic, machine), random_traffic(3, 24, 3, 400, seed + 100)


def test_the_curve_falls() -> None:
    old, traffic = example()
    found = replan(old, traffic, 7)
    limits = [point.limit for point in found.curve]
    assert limits[:2] == [7, 20] and limits[-1] is None
    for point, after in zip(found.curve, found.curve[1:], strict=False):
        assert after.value <= point.value and after.bound <= point.value
        assert point.bound <= point.value <= found.stay
        assert point.limit is not None and point.moves <= point.limit
    seven = found.curve[0]
    assert (seven.value, seven.bound) == (found.plan.value, found.plan.bound)
    moved = found.plan.assignment != old.assignment
    assert seven.moves == moved.sum() and seven.bytes == 10_000 * seven.moves
    free = replan(old, traffic, curve=False)
    assert found.curve[-1].value == pytest.approx(free.plan.value, rel=GAP)
    assert free.plan.value < found.plan.value < found.stay
    # As good as a plan from nothing.
    assert free.plan.value <= solve(old.card_sizes, traffic, old.machine).value * (1 + 5e-4)


def test_the_same_traffic_moves_nothing() -> None:
    old, _ = example()
    found = replan(old, random_traffic(3, 24, 3, 400, 0), curve=False)
    assert found.plan.value <= found.stay == old.value
    assert found.plan.value >= old.bound
    if found.plan.value == old.value:
        assert not found.moves


def test_the_same_bytes_twice() -> None:
    old, traffic = example()
    one, two = (replan(old, traffic, 9, curve=False) for _ in range(2))
    assert one.plan.to_bytes() == two.plan.to_bytes() and one.moves == two.moves


def test_bytes_of_moves_count_where_they_are_written() -> None:
    """To a card 10 kB, to the host 16,384 B."""
    old, traffic = example()
    old = replace(old, machine=replace(old.machine, pinning="power-of-two", host_bytes=10**6))
    found = replan(old, traffic, max_bytes=10_000 * 2 + 16_384, curve=False)
    assert sum(move.bytes for move in found.moves) <= 10_000 * 2 + 16_384
    assert {move.bytes for move in found.moves} <= {10_000, 16_384}
    assert all((move.bytes == 16_384) == (move.there == "host") for move in found.moves)
    assert found.plan.value < found.stay


def test_new_rules_and_aims() -> None:
    old, traffic = example()
    limits = Limits(pins=("*:0-2=gpu1",), forbidden=("0:5-9=host",), least=2)
    found = replan(old, traffic, 30, aim=Aim.parse("host-bytes"), limits=limits, curve=False)
    allowed = limits.allowed(old.layers, 24, old.machine.places)
    assert allowed is not None and not (found.plan.holds & ~allowed).any()
    assert str(found.plan.aim) == "host-bytes" and found.plan.limits == limits


def test_a_plan_that_breaks_more_rules_than_may_be_mended() -> None:
    """Also on the curve, whose smaller numbers of moves no plan keeps."""
    old, traffic = example()
    limits = Limits(pins=("*:0-9=gpu1",), forbidden=("*:0-9=gpu0",))
    broken = int((old.assignment[:, :10] != 1).sum())
    assert broken > 20
    machine = replace(old.machine, gpus=(Gpu(180_000), Gpu(400_000)))
    old = replace(old, machine=machine)
    with pytest.raises(PlanError, match=r"no plan within the limit.*more experts than may move.*Allow more moves"):
        replan(old, traffic, broken - 1, limits=limits)
    found = replan(old, traffic, broken, limits=limits)
    assert (found.plan.assignment[:, :10] == 1).all()
    assert all(point.limit is None or point.limit >= broken for point in found.curve)
    assert found.curve[-1].limit is None


def test_rules_are_mended_in_models_too_large_for_the_whole_program() -> None:
    rng = np.random.default_rng(0)
    counts = random_traffic(10, 100, 4, 500, 0)
    sizes = rng.integers(900, 1_100, size=(10, 100))
    machine = Machine((Gpu(300_000), Gpu(300_000)), 600_000)
    old = solve(sizes, counts, machine, target=0.05)
    limits = Limits(pins=("*:0-3=gpu0",), forbidden=("*:7=cards",), most=60)
    found = replan(old, random_traffic(10, 100, 4, 500, 1), 100, limits=limits, curve=False, target=0.05)
    assert (found.plan.assignment[:, :4] == 0).all() and (found.plan.assignment[:, 7] == 2).all()
    assert len(found.moves) <= 100 + sum(move.parked for move in found.moves)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"traffic": random_traffic(2, 24, 3, 400, 0)}, "traffic is not of the plan's model"),
        ({"traffic": random_traffic(3, 23, 3, 400, 0)}, "traffic is not of the plan's model"),
        ({"traffic": random_traffic(3, 24, 2, 400, 0)}, "traffic is not of the plan's model"),
        ({"max_moves": -1}, r"below 0 \[--max-moves\]"),
        ({"max_bytes": -1}, r"below 0 \[--max-bytes\]"),
        ({"limits": Limits(pins=("9:0=gpu0",))}, "names layers beyond"),
        ({"aim": Aim.parse("decode", worst=True)}, "tells no sources apart"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    old, traffic = example()
    with pytest.raises(PlanError, match=message):
        replan(old, **{"traffic": traffic, **change})


def test_plans_with_replicas_and_other_layer_numbers_are_refused() -> None:
    old, traffic = example()
    holds = old.holds.copy()
    holds[0, np.argmax(holds[0, :, 0]), 1] = True
    with pytest.raises(PlanError, match="replicas cannot be moved from"):
        replan(replace(old, holds=holds), traffic)
    shifted = TrafficTable(traffic.counts, traffic.tokens, (1, 2, 3), traffic.top_k)
    with pytest.raises(PlanError, match="not of the plan's model"):
        replan(old, shifted)


@few(100)
@given(problems(), st.integers(0, 2**32 - 1))
def test_orders_of_moves(problem: Problem, seed: int) -> None:
    """Between any two plans that fit: every step fits, and nothing is parked where it could go at once."""
    problem = replace(problem, allowed=None, least=None, most=None)
    plans = every(problem).argmax(axis=3)
    assume(len(plans) > 1)
    rng = np.random.default_rng(seed)
    home, new = plans[rng.integers(len(plans), size=2)]
    layers = tuple(range(3, 3 + len(home)))
    try:
        moves = order_moves(problem, home, new, layers)
    except PlanError as error:
        assert "cannot be put in an order" in error.what and "leave that much free" in error.mend
        return
    assert (replay(problem, home, moves, layers) == new).all()
    final = [move for move in moves if not move.parked]
    assert len(final) == (home != new).sum()
    at = home.copy()
    for move in moves:
        if move.parked:  # nothing that has yet to move fits where it is to go
            for layer, expert in np.argwhere(at != new):
                wanted = at.copy()
                wanted[layer, expert] = new[layer, expert]
                assert problem.used(wanted)[new[layer, expert]] > problem.free[new[layer, expert]]
        at[move.layer - 3, move.expert] = problem.places.index(move.there)


def swap(room: tuple[int, int, int]) -> tuple[Problem, np.ndarray, np.ndarray]:
    """Four experts of 3 B on two cards that are to change places, pair by pair."""
    loads = np.array([[[[k, k, k] for k in (5, 6, 7, 8)]]])
    sizes = np.full((1, 4, 3), 3)
    problem = Problem(("gpu0", "gpu1", "host"), sizes, room, loads, loads[..., 0] * 0, 1.0, loads[0, ..., 0])
    return problem, np.array([[0, 0, 1, 1]]), np.array([[1, 1, 0, 0]])


def test_parking() -> None:
    """One place for an expert is enough, on the host or on a card; the coldest is parked."""
    problem, home, new = swap((6, 6, 3))
    moves = order_moves(problem, home, new, [4])
    assert [(move.expert, move.here, move.there, move.parked) for move in moves] == [
        (0, "gpu0", "host", True),
        (3, "gpu1", "gpu0", False),
        (1, "gpu0", "gpu1", False),
        (2, "gpu1", "gpu0", False),
        (0, "host", "gpu1", False),
    ]
    problem, home, new = swap((9, 6, 0))
    moves = order_moves(problem, home, new, [4])
    assert not any(move.parked for move in moves) and len(moves) == 4


def test_a_machine_that_is_full() -> None:
    problem, home, new = swap((6, 8, 2))
    with pytest.raises(PlanError, match=r"gpu0 0 B free, gpu1 2 B free, host 2 B free.*room for one expert, 3 B"):
        order_moves(problem, home, new, [4])


def test_parking_comes_to_an_end() -> None:
    """Experts could go to and fro between two cards for ever: neither can be emptied for what waits on the host."""
    sizes = np.repeat(np.array([[1, 1, 2, 1, 4, 4]])[..., None], 3, axis=2)
    loads = np.ones((1, 1, 6, 3), np.int64)
    problem = Problem(("gpu0", "gpu1", "host"), sizes, (4, 4, 8), loads, loads[..., 0], 1.0, loads[0, ..., 0])
    home, new = np.array([[0, 0, 1, 1, 2, 2]]), np.array([[2, 2, 2, 2, 0, 1]])
    with pytest.raises(PlanError, match="cannot be put in an order"):
        order_moves(problem, home, new, [0])
    smaller = replace(problem, sizes=sizes - (sizes == 2))  # all four fit on one card
    assert (replay(smaller, home, order_moves(smaller, home, new, [0]), (0,)) == new).all()


def test_hot_experts_come_onto_cards_first() -> None:
    loads = np.array([[[[k, k, k] for k in (1, 2, 8, 9)]]])
    sizes = np.ones((1, 4, 2), np.int64)
    problem = Problem(("gpu0", "host"), sizes, (2, 4), loads[..., :2], loads[..., 0] * 0, 1.0, loads[0, ..., 0])
    moves = order_moves(problem, np.array([[0, 0, 1, 1]]), np.array([[1, 1, 0, 0]]), [0])
    assert [move.expert for move in moves] == [0, 3, 1, 2]


def test_a_replan_says_what_it_is() -> None:
    old, traffic = example()
    found = replan(old, traffic, 5, curve=False, inputs={"plan": "0" * 64})
    assert isinstance(found, Replan) and found.plan.inputs["plan"] == "0" * 64
    assert found.plan.steps[0].startswith("as it is: plan") and not found.curve

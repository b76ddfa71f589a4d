"""Plans against the optimum found by enumeration, and the promises of docs/plan.md."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from moefit.errors import PlanError
from moefit.placement import Aim, Gpu, Limits, Machine, TrafficTable, check_plan, solve
from moefit.placement import solve as solve_function
from moefit.placement.problem import Problem
from moefit.placement.search import greedy
from moefit.placement.solve import GAP, Search, canonical

from .cases import Case, cases, every, few, optimum, plain_value, problems, random_traffic


def tiny(seed: int, cards: tuple[float, float] = (0.34, 0.34), equal: bool = True) -> Case:
    """3 layers x 24 experts on two cards that hold these shares of the bytes, and a host."""
    sizes = np.full((3, 24), 39_180, dtype=np.int64)
    if not equal:
        sizes = np.random.default_rng(seed).integers(26_000, 52_000, size=(3, 24))
    total = int(sizes.sum())
    machine = Machine(tuple(Gpu(int(total * share)) for share in cards), 64_000_000)
    traffic = random_traffic(3, 24, 4, 5_000, seed)
    return Case(sizes, sizes, traffic, machine, (0, 0, 0), Aim(), Limits())


@few(60)
@given(cases())
def test_bound_optimum_value(case: Case) -> None:
    problem = case.problem()
    best = optimum(problem)
    if best is None:
        with pytest.raises(PlanError, match=r"fit there|do not fit|no placement of whole experts") as caught:
            case.solve()
        assert " B" in str(caught.value) and caught.value.mend
        return
    plan = case.solve()
    assert problem.feasible(plan.holds) and (plan.holds.sum(axis=2) == 1).all()
    assert plan.used == tuple(int(problem.sizes[..., p][plan.holds[..., p]].sum()) for p in range(problem.host + 1))
    assert all(u + f <= b for u, f, b in zip(plan.used, case.fixed, case.machine.budgets, strict=True))
    assert plan.bound <= problem.value(best) <= plan.value
    assert plan.value == problem.value(problem.cost(plan.assignment))
    assert plan.value == pytest.approx(plain_value(case, plan.holds), rel=1e-9, abs=0)
    assert 0 <= plan.gap <= GAP
    assert plan.greedy is None or plan.value <= plan.greedy
    plain = greedy(problem)
    if plain is None or not problem.feasible(plain):
        assert plan.greedy is None
    else:
        assert plan.greedy == problem.value(problem.cost(plain))
    assert sum(plan.shares) == pytest.approx(1)
    served = [case.traffic.counts[plan.holds[..., p]].sum() for p in range(problem.host + 1)]
    assert plan.shares == pytest.approx(np.array(served) / case.traffic.counts.sum())
    assert plan.bound_from in ("nothing", "linear relaxation", "integer program")
    check_plan(plan, case.traffic)


@few(60)
@given(problems(moves=True))
def test_searches_of_any_numbers_end_within_the_gap(problem: Problem) -> None:
    best = optimum(problem)
    search = Search(problem)
    start = search.run()
    if best is None:
        assert search.best is None and start is None
        return
    assert search.best is not None and problem.feasible(search.best)
    assert search.bound <= best <= search.cost == problem.cost(search.best)
    assert search.closed and search.cost - search.bound <= GAP * search.cost
    assert start is None or search.cost <= start


@few(25)
@given(cases(), st.integers(0, 3), st.integers(1, 100_000_000))
def test_more_memory_is_never_worse(case: Case, place: int, extra: int) -> None:
    problem = case.problem()
    best = optimum(problem)
    assume(best is not None)
    gpus, host = list(case.machine.gpus), case.machine.host_bytes
    if place < len(gpus):
        gpus[place] = replace(gpus[place], bytes=gpus[place].bytes + extra)
    else:
        host += extra
    roomier = replace(case, machine=replace(case.machine, gpus=tuple(gpus), host_bytes=host))
    better = optimum(roomier.problem())
    assert better is not None and better <= best  # type: ignore[operator]
    assert roomier.solve().value <= case.solve().value / (1 - GAP)


@few(25)
@given(cases(), st.integers(0, 2**32 - 1))
def test_names_of_layers_experts_and_cards_do_not_matter(case: Case, seed: int) -> None:
    case = replace(case, limits=Limits())
    assume(optimum(case.problem()) is not None)
    rng = np.random.default_rng(seed)
    layers, experts = case.card_sizes.shape
    order = rng.permuted(np.tile(np.arange(experts), (layers, 1)), axis=1)
    rows = rng.permutation(layers)

    def mixed(table: np.ndarray) -> np.ndarray:
        return np.take_along_axis(table, order, axis=1)[rows]

    traffic = TrafficTable(mixed(case.traffic.counts), case.traffic.tokens, case.traffic.layers, case.traffic.top_k)
    aim = replace(case.aim, worst=False, sources=())
    machine = replace(case.machine, gpus=case.machine.gpus[::-1])
    counts_only = TrafficTable(case.traffic.counts, traffic.tokens, traffic.layers, traffic.top_k)
    plan = replace(case, aim=aim, traffic=counts_only).solve()
    other = Case(mixed(case.card_sizes), mixed(case.host_sizes), traffic, machine, case.fixed, aim, Limits()).solve()
    assert other.value == pytest.approx(plan.value, rel=GAP)


@pytest.mark.parametrize("cards", [(0.34, 0.34), (0.75, 0.75), (0.2, 0.2), (0.45, 0.2)])
def test_tiny_model_is_solved_to_the_gap(cards: tuple[float, float]) -> None:
    plan = tiny(0, cards).solve()
    assert plan.gap <= 2 * GAP  # the search tree ends after a number of nodes
    assert plan.greedy is not None and plan.value <= plan.greedy


def test_mixed_sizes_come_close_and_fit_to_the_byte() -> None:
    case = tiny(0, equal=False)
    plan = case.solve()
    assert plan.gap <= 1e-2
    assert case.problem().feasible(plan.holds)
    assert plan.value == pytest.approx(plain_value(case, plan.holds), rel=1e-9, abs=0)


def test_real_size_is_within_the_gap() -> None:
    """40 x 384 experts of 13,315,596 B, two cards that hold two thirds of them."""
    rng = np.random.default_rng(0)
    popular = rng.dirichlet(np.full(384, 0.35), size=40)
    counts = np.minimum(np.floor(popular * 6e5).astype(np.int64), 100_000)
    for row in counts:
        order = np.argsort(-row, kind="stable")
        while missing := 600_000 - int(row.sum()):
            order = order[row[order] < 100_000]
            row[order[:missing]] += 1
    traffic = TrafficTable(counts, 100_000, tuple(range(40)), 6)
    sizes = np.full((40, 384), 13_315_596, dtype=np.int64)
    machine = Machine.from_flags(["68.2GB", "68.2GB"], "96GiB")
    plan = solve(sizes, traffic, machine)
    assert plan.gap <= GAP
    assert plan.greedy is not None and plan.value <= plan.greedy
    assert sum(plan.used) == 204_527_554_560


def test_coprime_sizes_at_hundreds_of_gigabytes_fit_to_the_byte() -> None:
    """Byte rows near 2e11 are beyond HiGHS's tolerance: the plan is checked in integers all the same."""
    sizes = np.random.default_rng(5).integers(10**9, 4 * 10**9, size=(3, 12))
    total = int(sizes.sum())
    machine = Machine((Gpu(total // 3), Gpu(total // 4)), total - total // 3 - total // 4 + 10**8)
    case = replace(
        tiny(1), card_sizes=sizes, host_sizes=sizes, traffic=random_traffic(3, 12, 4, 2_000, 1), machine=machine
    )
    plan = case.solve()
    assert case.problem().feasible(plan.holds)
    assert plan.bound <= plan.value == pytest.approx(plain_value(case, plan.holds), rel=1e-9)


SCRIPT = """
import sys
from tests.placement.test_solve import tiny
sys.stdout.buffer.write(tiny(0, (0.45, 0.2)).solve(target=1e-7).to_bytes())
"""


def test_same_bytes_whatever_the_threads() -> None:
    """A case that needs every step up to the integer program, in fresh processes on one and on all CPUs."""
    here = tiny(0, (0.45, 0.2)).solve(target=1e-7)
    assert any(step.startswith("integer program") for step in here.steps)
    cpus = sorted(os.sched_getaffinity(0))
    for allowed in ({cpus[0]}, set(cpus)):
        path = os.pathsep.join(entry for entry in [str(Path(__file__).parents[2]), *sys.path] if entry)
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(len(allowed))},
            preexec_fn=lambda allowed=allowed: os.sched_setaffinity(0, allowed),
            stdout=subprocess.PIPE,
            check=True,
        )
        assert done.stdout == here.to_bytes()


@few(15)
@given(cases(copies=True), st.booleans())
def test_the_same_input_gives_the_same_bytes(case: Case, replicas: bool) -> None:
    assume(optimum(case.problem()) is not None)
    assert case.solve(replicas=replicas).to_bytes() == case.solve(replicas=replicas).to_bytes()


def test_equal_cards_are_numbered_by_their_first_expert() -> None:
    flat = tiny(0).solve().assignment.ravel()
    assert np.argmax(flat == 0) < np.argmax(flat == 1)


@few(40)
@given(problems())
def test_canonical_plans_cost_and_hold_the_same(problem: Problem) -> None:
    plans = every(problem)
    for holds in plans[:: max(1, len(plans) // 10)]:
        plan = holds.argmax(axis=2)
        renamed = canonical(problem, plan)
        assert problem.cost(renamed) == problem.cost(plan) and problem.feasible(renamed)
        assert (canonical(problem, renamed) == renamed).all()
        for members in problem.classes:
            first = [int(np.argmax(renamed == card)) if (renamed == card).any() else plan.size for card in members]
            assert first == sorted(first)


def test_too_large_says_by_how_much_and_what_to_do() -> None:
    sizes = np.full((2, 8), 1_000, dtype=np.int64)
    traffic = random_traffic(2, 8, 2, 50, 0)
    machine = Machine((Gpu(5_500, 500), Gpu(5_999)), 3_000)
    with pytest.raises(PlanError) as caught:
        solve(sizes, traffic, machine, (0, 1_000, 0))
    text = str(caught.value)
    assert "4,000 B too many" in text  # 5,000 + 4,000 + 3,000 B of whole experts for 16,000 B
    assert "gpu0 5,000, gpu1 4,999, host 3,000" in text
    assert "Add 4,000 B of host memory" in text and "75.0 % of their size" in text
    # What the message promises is true:
    assert solve(sizes, traffic, Machine(machine.gpus, 7_000), (0, 1_000, 0)).used == (5_000, 4_000, 7_000)
    assert solve(sizes * 3 // 4, traffic, machine, (0, 1_000, 0))


def test_fixed_bytes_alone_too_many() -> None:
    sizes, traffic = np.full((2, 8), 10, dtype=np.int64), random_traffic(2, 8, 2, 50, 0)
    with pytest.raises(PlanError, match=r"overflow gpu1 by 500 B \[gpu1\].*at most 1,000 B, found 1,500 B"):
        solve(sizes, traffic, Machine((Gpu(1_000), Gpu(1_500, 500)), 10**6), (0, 1_500, 0))
    with pytest.raises(PlanError, match="overflow host by 1 B"):
        solve(sizes, traffic, Machine((Gpu(1_000),), 10), (0, 11))


def test_whole_experts_that_cannot_be_packed() -> None:
    sizes = np.array([[6, 6, 6, 6]])
    traffic = random_traffic(1, 4, 2, 50, 0)
    with pytest.raises(PlanError, match="do not fit: 6 B too many"):  # room is counted in whole experts
        solve(sizes, traffic, Machine((Gpu(11), Gpu(11)), 6))
    sizes = np.array([[6, 6, 6, 5]])
    with pytest.raises(
        PlanError, match=r"no placement of whole experts.*gpu0 9 B, gpu1 9 B, host 6 B; largest expert 6"
    ):
        solve(sizes, traffic, Machine((Gpu(9), Gpu(9)), 6))
    for place in range(3):  # add 18 B to any place
        cards = [9 + 18 * (place == 0), 9 + 18 * (place == 1)]
        assert solve(sizes, traffic, Machine(tuple(map(Gpu, cards)), 6 + 18 * (place == 2)))


def test_limits_that_bytes_cannot_keep() -> None:
    sizes, traffic = np.full((1, 4), 6), random_traffic(1, 4, 2, 50, 0)
    machine = Machine((Gpu(12), Gpu(6)), 24)
    for limits in (Limits(least=4), Limits(pins=("0:0-2=gpu0",)), Limits(pins=("0:0-1=gpu1",))):
        with pytest.raises(PlanError, match="fit there|no placement of whole experts was found that keeps the limits"):
            solve(sizes, traffic, machine, limits=limits)
    for limits in (Limits(least=3), Limits(pins=("0:0-1=gpu0",)), Limits(most=0)):
        assert solve(sizes, traffic, machine, limits=limits).gap <= GAP


@pytest.mark.parametrize("bound", [10**30, 2**61])
def test_an_impossible_bound_from_the_solver_is_not_used(monkeypatch: pytest.MonkeyPatch, bound: int) -> None:
    module = sys.modules[solve_function.__module__]
    monkeypatch.setattr(module, "solve_program", lambda *_, **__: (bound, None))
    monkeypatch.setattr(module, "PROGRAM_COLUMNS", 10**9)
    plan = tiny(0, (0.45, 0.2), equal=False).solve()
    assert plan.bound <= plan.value
    assert plan.bound_from == "linear relaxation"


def test_a_plan_that_fails_its_recheck_is_not_given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Search, "run", lambda self: setattr(self, "best", np.zeros((3, 24), np.int64)))
    with pytest.raises(PlanError, match="failed its re-check"):
        tiny(0).solve()


def test_check_plan_wants_this_traffic_and_these_numbers() -> None:
    case = tiny(0)
    plan = case.solve()
    check_plan(plan, case.traffic)
    with pytest.raises(PlanError, match="not the traffic this plan was made for"):
        check_plan(plan, tiny(1).traffic)
    with pytest.raises(PlanError, match="plan and traffic disagree"):
        check_plan(replace(plan, value=plan.value * 1.001), case.traffic)
    with pytest.raises(PlanError, match="plan and traffic disagree"):
        check_plan(replace(plan, shares=plan.shares[::-1]), case.traffic)


def test_placement_does_not_import_torch() -> None:
    code = "import sys, moefit.placement; sys.exit('torch' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    assert subprocess.run([sys.executable, "-c", code], env=env).returncode == 0


def test_a_card_slower_than_any_plan_can_use_does_not_blunt_the_bound() -> None:
    """One byte per second: frequency-greedy is 10^10 times slower than what can be had without that card."""
    case = tiny(0)
    slow, fast = case.machine.gpus
    box = replace(case.machine, shared_root=True)  # the host is as fast with one card as with two
    plan = case.solve(machine=replace(box, gpus=(replace(slow, bandwidth=1), fast)))
    alone = replace(case, machine=replace(box, gpus=(fast,)), fixed=(0, 0)).solve()
    assert plan.greedy is not None and plan.greedy > 1e9 * plan.value
    assert not plan.holds[case.traffic.counts > 0, 0].any() and plan.gap <= GAP
    assert plan.value == pytest.approx(alone.value, rel=GAP)

"""Plans against the optimum found by enumeration, and the promises of docs/plan.md."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from moefit.errors import PlanError
from moefit.placement import Gpu, Machine, Plan, check_plan, solve
from moefit.placement import solve as solve_function
from moefit.placement.problem import Problem
from moefit.placement.solve import GAP

from .cases import optimum, plain_seconds, problems, random_traffic

slow_solver = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])


def planned(problem: Problem) -> Plan:
    return solve(problem.sizes, problem.traffic, problem.machine, problem.fixed)


def tiny(seed: int, cards: tuple[float, float] = (0.34, 0.34), equal: bool = True) -> Problem:
    """6 layers x 32 experts on two cards that hold these shares of the bytes, and a host."""
    sizes = np.full((6, 32), 39_180, dtype=np.int64)
    if not equal:
        sizes = np.random.default_rng(seed).integers(26_000, 52_000, size=(6, 32))
    total = int(sizes.sum())
    machine = Machine(tuple(Gpu(int(total * share)) for share in cards), 64_000_000)
    return Problem(sizes, random_traffic(6, 32, 4, 5_000, seed), machine, (0, 0, 0))


@slow_solver
@given(problems())
def test_bound_optimum_objective(problem: Problem) -> None:
    best = optimum(problem)
    if best is None:
        with pytest.raises(PlanError, match=r"fit only if some were cut|do not fit"):
            planned(problem)
        return
    plan = planned(problem)
    exact = problem.seconds(best)
    assert problem.feasible(plan.assignment)
    assert plan.used == tuple(int(problem.sizes[plan.assignment == p].sum()) for p in range(3))
    assert all(u + f <= b for u, f, b in zip(plan.used, problem.fixed, problem.machine.budgets, strict=True))
    assert plan.bound <= float(exact) <= plan.seconds
    assert plan.seconds == float(plain_seconds(problem, plan.assignment))
    assert plan.gap <= GAP
    assert plan.greedy is None or plan.seconds <= plan.greedy
    assert sum(plan.shares) == pytest.approx(1)
    check_plan(plan, problem.traffic)


@slow_solver
@given(problems(), st.integers(0, 2), st.integers(1, 100_000))
def test_more_memory_is_never_worse(problem: Problem, place: int, extra: int) -> None:
    assume(optimum(problem) is not None)
    plan = planned(problem)
    gpus, host = list(problem.machine.gpus), problem.machine.host_bytes
    if place == 2:
        host += extra
    else:
        gpus[place] = Gpu(gpus[place].bytes + extra)
    roomier = Machine(tuple(gpus), host, problem.machine.gpu_bandwidth, problem.machine.host_bandwidth)
    better = solve(problem.sizes, problem.traffic, roomier, problem.fixed)
    assert better.bound <= plan.seconds
    assert better.seconds <= plan.seconds / (1 - GAP)


@slow_solver
@given(problems(), st.integers(0, 2**32))
def test_names_of_layers_experts_and_cards_do_not_matter(problem: Problem, seed: int) -> None:
    assume(optimum(problem) is not None)
    plan = planned(problem)
    rng = np.random.default_rng(seed)
    order = rng.permuted(np.tile(np.arange(problem.sizes.shape[1]), (len(problem.sizes), 1)), axis=1)
    rows = rng.permutation(len(problem.sizes))

    def mixed(table: np.ndarray) -> np.ndarray:
        return np.take_along_axis(table, order, axis=1)[rows]

    traffic = problem.traffic
    renamed = type(traffic)(mixed(traffic.counts), traffic.tokens, traffic.layers, traffic.top_k)
    machine = problem.machine
    swapped = Machine(machine.gpus[::-1], machine.host_bytes, machine.gpu_bandwidth, machine.host_bandwidth)
    fixed = (problem.fixed[1], problem.fixed[0], problem.fixed[2])
    other = solve(mixed(problem.sizes), renamed, swapped, fixed)
    assert other.seconds == pytest.approx(plan.seconds, rel=GAP)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("cards", [(0.34, 0.34), (0.75, 0.75), (0.2, 0.2), (0.45, 0.2)])
def test_tiny_model_is_solved_to_the_gap(seed: int, cards: tuple[float, float]) -> None:
    plan = planned(tiny(seed, cards))
    assert plan.gap <= GAP
    assert plan.greedy is not None and plan.seconds <= plan.greedy


def test_mixed_sizes_come_close_and_fit_to_the_byte() -> None:
    problem = tiny(0, equal=False)
    plan = planned(problem)
    assert plan.gap <= 2e-3
    assert problem.feasible(plan.assignment)
    assert plan.seconds == float(plain_seconds(problem, plan.assignment))


def test_real_size_is_within_the_gap() -> None:
    """40 x 384 experts of 13,315,596 B, two cards that hold two thirds of them (facts: about 1 s)."""
    rng = np.random.default_rng(0)
    popular = rng.dirichlet(np.full(384, 0.35), size=40)
    counts = np.minimum(np.floor(popular * 6e5).astype(np.int64), 100_000)
    for row in counts:
        order = np.argsort(-row, kind="stable")
        while missing := 600_000 - int(row.sum()):
            order = order[row[order] < 100_000]
            row[order[:missing]] += 1
    traffic = type(tiny(0).traffic)(counts, 100_000, tuple(range(40)), 6)
    sizes = np.full((40, 384), 13_315_596, dtype=np.int64)
    machine = Machine.from_flags(["68.2GB", "68.2GB"], "96GiB")
    plan = solve(sizes, traffic, machine)
    assert plan.gap <= GAP
    assert plan.greedy is not None and plan.seconds <= plan.greedy
    assert sum(plan.used) == 204_527_554_560


def test_coprime_sizes_at_hundreds_of_gigabytes_fit_to_the_byte() -> None:
    """Byte rows near 2e11 are beyond HiGHS's tolerance: the plan is checked in integers all the same."""
    sizes = np.random.default_rng(5).integers(10**9, 4 * 10**9, size=(6, 16))
    total = int(sizes.sum())
    machine = Machine((Gpu(total // 3), Gpu(total // 4)), total - total // 3 - total // 4 + 10**8)
    problem = Problem(sizes, random_traffic(6, 16, 4, 2_000, 1), machine, (0, 0, 0))
    plan = planned(problem)
    assert problem.feasible(plan.assignment)
    assert plan.bound <= plan.seconds == float(plain_seconds(problem, plan.assignment))


SCRIPT = """
import sys
from tests.placement.test_solve import planned, tiny
sys.stdout.buffer.write(planned(tiny(0, (0.45, 0.2))).to_bytes())
"""


def test_same_bytes_whatever_the_threads() -> None:
    """A case that needs every step up to the integer program, in fresh processes on one and on all CPUs."""
    here = planned(tiny(0, (0.45, 0.2)))
    assert any(step.startswith("split program") for step in here.steps)
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


def test_equal_cards_are_numbered_by_their_first_expert() -> None:
    plan = planned(tiny(0))
    flat = plan.assignment.ravel()
    assert np.argmax(flat == 0) < np.argmax(flat == 1)


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
    with pytest.raises(PlanError, match="only if some were cut in two") as caught:
        solve(sizes, traffic, Machine((Gpu(9), Gpu(9)), 6))
    enough = 3 * 5 - 1  # places * (largest - 1) - slack
    assert f"Add {enough} B to any place" in str(caught.value)
    for place in range(3):
        cards = [9 + enough * (place == 0), 9 + enough * (place == 1)]
        assert solve(sizes, traffic, Machine(tuple(map(Gpu, cards)), 6 + enough * (place == 2)))


def test_wrong_shapes_are_refused() -> None:
    traffic = random_traffic(2, 8, 2, 50, 0)
    machine = Machine((Gpu(10**6),), 10**6)
    for sizes in (np.ones((2, 7), np.int64), np.ones((2, 8)), np.zeros((2, 8), np.int64)):
        with pytest.raises(PlanError, match="sizes"):
            solve(sizes, traffic, machine)
    for fixed in ((0, 0, 0), (0, -1), ()):
        with pytest.raises(PlanError, match="fixed"):
            solve(np.ones((2, 8), np.int64), traffic, machine, fixed)


def test_an_impossible_bound_from_the_solver_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[solve_function.__module__]
    monkeypatch.setattr(module, "solve_program", lambda *_, **__: (10**30, None))
    plan = planned(tiny(0, (0.45, 0.2)))
    assert plan.bound <= plan.seconds
    assert plan.bound_from in ("pooled bound", "linear relaxation")


def test_placement_does_not_import_torch() -> None:
    code = "import sys, moefit.placement; sys.exit('torch' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    assert subprocess.run([sys.executable, "-c", code], env=env).returncode == 0

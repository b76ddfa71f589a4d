"""The objective from its definition, aims and the cost model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moefit.errors import PlanError, TraceError
from moefit.placement import Aim, Cpu, Gpu, Machine, TrafficTable
from moefit.placement.aim import MAX_WINDOW, UNITS, Term
from moefit.placement.costs import card_ways, host_ways, stored_sizes
from moefit.placement.objective import make_problem

from .cases import Case, cases, costs, every, few, plain_value, random_traffic


@few(40)
@given(cases(copies=True))
def test_cost_is_the_objective(case: Case) -> None:
    problem = case.problem()
    holds = every(replace(problem, free=(10**15,) * len(problem.free)), copies=True)
    found = costs(problem, holds)
    for number in range(0, len(holds), max(1, len(holds) // 3)):
        plain = plain_value(case, holds[number])
        assert problem.value(problem.cost(holds[number])) == pytest.approx(plain, rel=1e-9, abs=0)
        assert problem.cost(holds[number]) == found[number]


@few(40)
@given(cases())
def test_numbers_fit_and_sizes_are_stored_sizes(case: Case) -> None:
    problem = case.problem()
    assert int(problem.loads.max(axis=3).sum(dtype=object)) + int(problem.waits.sum(dtype=object)) < 2**62
    assert problem.loads.max() > 2**40  # nor is any precision thrown away
    host = case.host_sizes
    rounded = host if case.machine.pinning == "exact" else 2 ** np.ceil(np.log2(host)).astype(np.int64)
    assert (problem.sizes[..., -1] == rounded).all()
    assert (problem.sizes[..., :-1] == case.card_sizes[..., None]).all()
    budgets = zip(case.machine.budgets, case.fixed, strict=True)
    assert problem.free == tuple(budget - fixed for budget, fixed in budgets)


def simple(machine: Machine, text: str = "decode:1", **changes: object) -> float:
    """Value of one layer of 4 experts of 10 kB, asked for by 8, 4, 2, 2 of 16 tokens, the last two on the host."""
    counts = np.array([[8, 4, 2, 2]])
    traffic = TrafficTable(counts, 16, (0,), 1)
    sizes = np.full((1, 4), 10_000)
    host = sizes * (len(machine.gpus) if machine.mode == "tp" else 1)
    fixed = (0,) * len(machine.places)
    problem, _ = make_problem(machine, traffic, sizes, host, fixed, Aim.parse(text))
    last = len(machine.places) - 1
    return problem.value(problem.cost(np.array([[0, min(1, last - 1), last, last]])))


def test_by_hand() -> None:
    """A card reads an expert in 1 us, the host (links of both cards) in 5 us; a quarter of the tokens reads there."""
    gpus = (Gpu(10**6, 0, 10**10),) * 2
    machine = Machine(gpus, 10**6, zero_copy=10**9)
    # One step reads 1 us of experts, spread over two cards. Two experts on the host add 1/8 * (5 - 0.5) us each.
    assert simple(machine) == pytest.approx(0.5e-6 + 2 * 4.5e-6 / 8)
    assert simple(replace(machine, shared_root=True)) == pytest.approx(0.5e-6 + 2 * 9.5e-6 / 8)
    # The processor is faster: 2 us and 1 us to start.
    assert simple(replace(machine, cpu=Cpu(5 * 10**9, 1_000))) == pytest.approx(0.5e-6 + 2 * 2.5e-6 / 8)
    # Slices on both cards: the hot ones take 0.75 us, waiting begins after 1 us.
    assert simple(replace(machine, mode="tp")) == pytest.approx(0.75e-6 + 2 * (10e-6 - 1e-6) / 8)
    assert simple(machine, "host-bytes") == pytest.approx(10_000 / 4)
    assert simple(machine, "memory") == pytest.approx(20_000)
    assert simple(machine, "2*memory+host-bytes") == pytest.approx(42_500)
    # Slow cards: the host is done first, and nobody waits.
    slow = Machine((Gpu(10**6, 0, 10**8),) * 2, 10**6, zero_copy=10**10)
    assert simple(slow) == pytest.approx(50e-6)
    # Slow host, whose experts come in nearly every step: its own time counts. 15/16 of 2-token windows miss none.
    assert simple(Machine(gpus, 10**6, zero_copy=10**6)) == pytest.approx(0.5e-6 + 2 * (5e-3 - 0.5e-6) / 8)


def test_what_is_assumed_is_said() -> None:
    traffic = random_traffic(1, 4, 2, 30, 0)
    machine, sizes = Machine((Gpu(10**6),), 10**6), np.full((1, 4), 10)
    for text, notes in (("decode:1", 0), ("decode:2", 1), ("decode:2+decode:3", 2), ("prefill", 0), ("memory", 0)):
        _, assumed = make_problem(machine, traffic, sizes, sizes, (0, 0), Aim.parse(text))
        assert len(assumed) == notes
        assert all("independently" in note for note in assumed)


def test_what_does_not_fit_together() -> None:
    traffic, machine = random_traffic(2, 4, 2, 30, 0), Machine((Gpu(10**6),), 10**6)
    good = np.full((2, 4), 10)
    for bad in (np.ones((2, 3), np.int64), np.ones((2, 4)), np.zeros((2, 4), np.int64)):
        with pytest.raises(PlanError, match=r"sizes do not fit.*card sizes"):
            make_problem(machine, traffic, bad, good, (0, 0))
        with pytest.raises(PlanError, match=r"sizes do not fit.*host sizes"):
            make_problem(machine, traffic, good, bad, (0, 0))
    for fixed in ((0, 0, 0), (0, -1), (1,)):
        with pytest.raises(PlanError, match="fixed bytes do not fit"):
            make_problem(machine, traffic, good, good, fixed)
    with pytest.raises(PlanError, match="tells no sources apart"):
        make_problem(machine, traffic, good, good, (0, 0), Aim.parse("decode", worst=True))
    with pytest.raises(TraceError, match="no such source"):
        make_problem(machine, traffic, good, good, (0, 0), Aim.parse("decode", sources=(("x", 1.0),)))


terms = st.builds(
    lambda weight, measure, window: Term(weight, measure, window if measure == "decode" else 1),
    st.one_of(st.just(1.0), st.floats(1e-300, 9e29)),
    st.sampled_from(sorted(UNITS)),
    st.integers(1, MAX_WINDOW),
)


@few(200)
@given(st.lists(terms, min_size=1, max_size=4, unique_by=lambda term: term[1:]))
def test_an_aim_is_read_as_it_is_written(several: list[Term]) -> None:
    aim = Aim(tuple(several))
    assert Aim.parse(str(aim)) == aim
    assert aim.unit == (UNITS[several[0].measure] if len(several) == 1 and several[0].weight == 1 else "weighted sum")


def test_aims_in_words() -> None:
    assert Aim.parse("decode") == Aim.parse(" decode:1 ") == Aim()
    mixed = Aim.parse("decode:6 + 0.2*prefill")
    assert mixed.terms == (Term(1.0, "decode", 6), Term(0.2, "prefill", 1)) and str(mixed) == "decode:6+0.2*prefill"
    assert Aim.parse("decode", sources=(("b", 1), ("a", 2))).sources == (("a", 2.0), ("b", 1.0))


@pytest.mark.parametrize(
    "text",
    ["", "speed", "decode:0", "decode:9", "prefill:2", "decode+decode:1", "0*decode", "-1*decode", "1e40*decode"]
    + ["nan*decode", "decode+", "2 decode", "1.2.3*decode", "decode:6+prefill+prefill"],
)
def test_what_is_no_aim(text: str) -> None:
    with pytest.raises(PlanError, match="not an objective"):
        Aim.parse(text)


@pytest.mark.parametrize("sources", [(("a", 0.0),), (("a", -1.0),), (("a", 1.0), ("a", 2.0)), (("a", float("nan")),)])
def test_weights_of_sources_that_cannot_be(sources: tuple[tuple[str, float], ...]) -> None:
    with pytest.raises(PlanError, match="weights of sources"):
        Aim(sources=sources)


def test_ways() -> None:
    gpus = (Gpu(10, 0, 10**9, 40), Gpu(10, 0, 3 * 10**9, 20))
    machine = Machine(gpus, 10, zero_copy=10**8, copy_engine=5 * 10**8, cpu=Cpu(10**7, 500, 7))
    one, two = np.array([1_000]), np.array([2])
    assert [float(way.seconds(one, two, one)[0]) for way in card_ways(machine)] == pytest.approx(
        [42e-6, 20e-6 + 2e-6 / 3]
    )
    (both,) = card_ways(replace(machine, mode="tp"))
    assert float(both.seconds(one, two, one)[0]) == pytest.approx(2e-6 + 20e-6)  # the slowest, half the arithmetic each
    links, cpu = host_ways(machine, prefill=False)
    assert float(links.seconds(one, two, one)[0]) == pytest.approx(10e-6 + 10e-6)
    assert float(cpu.seconds(one, two, one)[0]) == pytest.approx(1e-6 + 200e-6 + 7e-6)
    assert host_ways(machine, prefill=True)[0].bandwidth == 10**9
    assert host_ways(replace(machine, shared_root=True), prefill=True)[0].bandwidth == 5 * 10**8
    assert len(host_ways(replace(machine, cpu=None), prefill=False)) == 1
    sizes = np.array([[5, 8, 9]])
    stored = stored_sizes(replace(machine, pinning="power-of-two"), sizes, sizes)
    assert stored.tolist() == [[[5, 5, 8], [8, 8, 8], [9, 9, 16]]]

"""plan.json: round trips of any plan, canonical bytes, and plans held against their traffic."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moefit.errors import PlanError
from moefit.files import json_bytes
from moefit.placement import Aim, Cpu, Gpu, Limits, Machine, Plan, TrafficTable, check_plan, solve
from moefit.placement.aim import Term
from moefit.placement.costs import stored_sizes
from moefit.placement.machine import MAX_NS
from moefit.placement.replan import replan

from .cases import Case, cases, few, random_traffic

TRAFFIC = random_traffic(2, 6, 2, 100, 0)
LARGEST = 2**63 - 1


@cache
def example() -> Plan:
    """As `solve` makes it, with a processor, a pin and a limit."""
    sizes = np.array([[100] * 6, [100, 100, 100, 60, 60, 60]], dtype=np.int64)
    machine = Machine((Gpu(450, 50), Gpu(300)), 2_000, cpu=Cpu(10**9, 100, 5))
    limits = Limits(pins=("1:0=host",), forbidden=("*:1=host",), least=1)
    return solve(sizes, TRAFFIC, machine, (10, 20, 1_000), inputs={"pack/config.json": "ab" * 32}, limits=limits)


def content() -> dict[str, Any]:
    value: dict[str, Any] = json.loads(example().to_bytes())
    return value


# Round trips

speeds, times = st.integers(1, LARGEST), st.integers(0, MAX_NS)
weights = st.floats(1e-300, 1e29)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9)
measures = st.tuples(st.just("decode"), st.integers(1, 8)) | st.tuples(
    st.sampled_from(["prefill", "host-bytes", "memory"]), st.just(1)
)
aims = st.builds(
    Aim,
    st.lists(st.builds(lambda weight, m: Term(weight, *m), st.just(1.0) | weights, measures), min_size=1, max_size=9)
    .map(lambda terms: {term[1:]: term for term in terms}.values())
    .map(tuple),
    st.booleans(),
    st.dictionaries(names, weights, max_size=3).map(lambda found: tuple(found.items())),
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans of any numbers, that no solver made: all that a file can say."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count, experts, cards = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    mode = draw(st.sampled_from(["ep", "tp"]))
    places = 2 if mode == "tp" else cards + 1
    holds = rng.random((count, experts, places)) < draw(st.sampled_from([0.1, 0.5, 0.9]))
    holds[..., -1] = ~holds[..., :-1].any(axis=2)
    most = draw(st.sampled_from([1, 255, 13_315_596, 2**56]))
    card_sizes, host_sizes = rng.integers(1, most + 1, (2, count, experts))
    if draw(st.booleans()):
        card_sizes[:] = card_sizes[0, 0]
    pinning = draw(st.sampled_from(["exact", "power-of-two"]))
    exact = Machine((Gpu(0),) * cards, 0, mode, pinning=pinning)
    stored = stored_sizes(exact, card_sizes, host_sizes)
    used = [int(stored[..., p][holds[..., p]].sum()) for p in range(places)]
    fixed = tuple(draw(st.integers(0, 10**9)) for _ in range(places))
    budgets = [here + taken + draw(st.sampled_from([0, 1, 10**12])) for here, taken in zip(used, fixed, strict=True)]
    gpus = []
    for card in range(cards):
        reserve, budget = draw(st.integers(0, 10**10)), budgets[0 if mode == "tp" else card]
        gpus.append(Gpu(budget + reserve, reserve, draw(speeds), draw(times)))
    machine = replace(
        exact,
        gpus=tuple(gpus),
        host_bytes=budgets[-1],
        zero_copy=draw(speeds),
        copy_engine=draw(speeds),
        shared_root=draw(st.booleans()),
        cpu=draw(st.none() | st.builds(Cpu, speeds, times, times)),
    )
    start = draw(st.sampled_from([0, 3, LARGEST - 30]))
    layers = tuple(range(start, start + 9 * count, 9))
    shares = rng.dirichlet(np.ones(places)).tolist()
    bound, value, greedy = sorted(draw(st.lists(st.floats(0, 1e300), min_size=3, max_size=3)))
    return Plan(
        machine=machine,
        aim=draw(aims),
        limits=_kept(draw, layers, holds, machine.places),
        layers=layers,
        card_sizes=card_sizes,
        host_sizes=host_sizes,
        holds=holds,
        fixed=fixed,
        shares=tuple(shares),
        value=value,
        greedy=draw(st.sampled_from([None, value, greedy])),
        bound=bound,
        tokens=draw(st.integers(1, LARGEST)),
        top_k=draw(st.integers(1, experts)),
        solver=("moefit", "0.1"),
        steps=("greedy: plan 1", "a step: no plan"),
        plan_from="greedy",
        bound_from="nothing",
        inputs={"traffic": "0" * 64, "pack/config.json": "a" * 64},
    )


def _kept(draw: st.DrawFn, layers: tuple[int, ...], holds: np.ndarray, places: tuple[str, ...]) -> Limits:
    """Limits that hold."""
    layer, expert = draw(st.integers(0, len(layers) - 1)), draw(st.integers(0, holds.shape[1] - 1))
    here, on_cards = holds[layer, expert], (~holds[..., -1]).sum(axis=1)
    rule = f"{layers[layer]}-{layers[layer]}:{expert}={{}}"
    pin = "host" if here[-1] else "cards"
    pins = draw(st.sampled_from([(), (rule.format(pin),)]))
    forbidden = draw(
        st.sampled_from([(), tuple(rule.format(places[p]) for p in np.flatnonzero(~here) if pins == () or p >= 9)])
    )
    least, most = draw(st.sampled_from([None, int(on_cards.min())])), draw(st.sampled_from([None, int(on_cards.max())]))
    return Limits(pins, forbidden, least, most)


def same_plan(one: Plan, two: Plan) -> None:
    for field in fields(Plan):
        here, there = getattr(one, field.name), getattr(two, field.name)
        if isinstance(here, np.ndarray):
            assert here.dtype == there.dtype and np.array_equal(here, there), field.name
        else:
            assert here == there, field.name


@few(150)
@given(plans())
def test_any_plan_comes_back(plan: Plan) -> None:
    content = plan.to_bytes()
    again = Plan.from_bytes(content)
    same_plan(plan, again)
    assert again.to_bytes() == content == json_bytes(json.loads(content))
    sizes = stored_sizes(plan.machine, plan.card_sizes, plan.host_sizes)
    assert plan.used == tuple(int(sizes[..., p][plan.holds[..., p]].sum()) for p in range(sizes.shape[2]))


@few(50)
@given(cases(), st.booleans(), st.sampled_from([None, 0, 2]))
def test_what_is_solved_can_be_read(case: Case, replicas: bool, moves: int | None) -> None:
    """Also where frequency-greedy would break a limit, of experts per layer or of moves, and be better for it."""
    try:
        plan = case.solve(replicas=replicas)
    except PlanError:
        return
    same_plan(plan, Plan.from_bytes(plan.to_bytes()))
    other = np.roll(case.traffic.counts, 1, axis=1)
    traffic = TrafficTable(other, case.traffic.tokens, case.traffic.layers, case.traffic.top_k)
    try:
        moved = replan(plan, traffic, moves, aim=Aim(case.aim.terms), curve=False).plan
    except PlanError:
        return
    same_plan(moved, Plan.from_bytes(moved.to_bytes()))


def test_files(tmp_path: Path) -> None:
    plan, path = example(), tmp_path / "plan.json"
    plan.save(path)
    again = Plan.load(path)
    assert again.to_bytes() == plan.to_bytes() == path.read_bytes()
    assert list(tmp_path.iterdir()) == [path]
    check_plan(again, TRAFFIC)


def test_what_the_file_says() -> None:
    plan, value = example(), content()
    assert value["places"][0]["budget_bytes"] == 400 and value["places"][2]["name"] == "host"
    assert [place["expert_bytes"] for place in value["places"]] == list(plan.used)
    assert value["layers"][0]["card_bytes"] == value["layers"][0]["host_bytes"] == 100
    assert value["layers"][1]["card_bytes"] == [100, 100, 100, 60, 60, 60]
    assert value["layers"][1]["experts"]["gpu0"] == plan.experts_on(1, "gpu0")
    served = sum(int(TRAFFIC.counts[plan.assignment == place].sum()) for place in (0, 1))
    assert sum(place["activation_share"] for place in value["places"][:2]) == pytest.approx(served / (100 * 2 * 2))
    assert value["objective"]["value"] >= value["objective"]["bound"] > 0
    assert (value["objective"]["name"], value["objective"]["unit"]) == ("decode:1", "seconds per step")
    assert set(value["inputs"]) == {"traffic", "pack/config.json"}
    assert value["limits"]["pins"] == ["1:0=host"] and 0 in value["layers"][1]["experts"]["host"]


def test_white_space_in_rules_is_left_out() -> None:
    plan = replace(example(), limits=Limits(pins=(" 1 : 0\t=host\n",)))
    assert Plan.from_bytes(plan.to_bytes()).limits.pins == ("1:0=host",)


def test_numbers_beyond_float64_stay_exact() -> None:
    """Sizes that float64 and int64 sums would round or overflow."""
    sizes = np.array([[2**53 + 1, 2**61, 2**61 + 1, 2**61 + 3]])
    holds = np.array([[[True, False], [True, False], [True, False], [False, True]]])
    machine = Machine((Gpu(LARGEST),), LARGEST, pinning="power-of-two")
    whole = replace(example(), machine=machine, layers=(0,), card_sizes=sizes, host_sizes=sizes, holds=holds)
    plan = replace(whole, limits=Limits(), fixed=(0, 0), shares=(0.5, 0.5))
    assert plan.used == (2**53 + 2**62 + 2, 2**62)
    same_plan(plan, Plan.from_bytes(plan.to_bytes()))


# Against the traffic


def test_check_plan_needs_the_same_traffic_and_numbers() -> None:
    with pytest.raises(PlanError, match=r"inputs\.traffic"):
        check_plan(example(), random_traffic(2, 6, 2, 100, 1))
    value = content()
    for key in ("value", "greedy", "bound"):
        value["objective"][key] = value["objective"][key] and 2 * value["objective"][key]
    forged = Plan.from_bytes(json.dumps(value).encode())
    with pytest.raises(PlanError, match=r"objective\.value"):
        check_plan(forged, TRAFFIC)
    shares = list(example().shares)
    shares[0], shares[1] = shares[1], shares[0]
    assert shares != list(example().shares) and math.isclose(sum(shares), 1)
    with pytest.raises(PlanError, match="plan and traffic disagree"):
        check_plan(replace(example(), shares=tuple(shares)), TRAFFIC)


def test_same_input_same_bytes() -> None:
    sizes, traffic = np.full((2, 6), 10, dtype=np.int64), TrafficTable(TRAFFIC.counts, 100, (4, 9), 2)
    machine = Machine((Gpu(30), Gpu(30)), 200)
    assert solve(sizes, traffic, machine).to_bytes() == solve(sizes.copy(), traffic, machine).to_bytes()

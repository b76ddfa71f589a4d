"""Lists of moves: from replan to file and back, replayed without overflow, and every refusal of docs/plan.md."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moefit.errors import PlanError
from moefit.files import json_bytes
from moefit.placement import Gpu, Machine, Plan, TrafficTable, solve
from moefit.placement.moves_file import MoveList, apply_moves, check_moves, moves_bytes, parse_moves, read_moves
from moefit.placement.problem import Problem
from moefit.placement.replan import Move, Replan, order_moves, replan

from .cases import Case, cases, every, few, problems, random_traffic

Change = Callable[[dict[str, Any]], object]


@cache
def example() -> tuple[Plan, Replan]:
    """Two cards that hold four experts each, full; of other traffic others come onto them. One expert fits beside."""
    sizes = np.full((2, 6), 100, dtype=np.int64)
    old = solve(sizes, random_traffic(2, 6, 2, 100, 0), Machine((Gpu(400), Gpu(400)), 500))
    return old, replan(old, random_traffic(2, 6, 2, 100, 8), curve=False)


def content() -> dict[str, Any]:
    old, moved = example()
    value: dict[str, Any] = json.loads(moves_bytes(moved, old))
    return value


def test_from_replan_to_file_and_back(tmp_path: Path) -> None:
    old, moved = example()
    path = tmp_path / "moves.json"
    path.write_bytes(moves_bytes(moved, old))
    found = read_moves(path)
    assert found.moves == moved.moves and len(found.moves) > 2
    assert (found.stay, found.value, found.unit) == (moved.stay, moved.plan.value, "seconds per step")
    assert found.stay > found.value
    assert path.read_bytes() == json_bytes(json.loads(path.read_bytes()))
    check_moves(found, old, moved.plan)


def test_no_moves_at_all() -> None:
    old, moved = example()
    stay = replan(moved.plan, random_traffic(2, 6, 2, 100, 8), max_moves=0, curve=False)
    found = parse_moves(moves_bytes(stay, moved.plan))
    assert found.moves == () and found.stay == found.value
    assert (apply_moves(old, ()) == old.holds).all()


@few(60)
@given(cases(), st.integers(0, 5), st.sampled_from([None, None, 2]))
def test_moves_of_any_replan_lead_to_its_plan(case: Case, shift: int, most: int | None) -> None:
    """Also in mode tp, with pinned memory rounded up, with experts of different sizes, with limits."""
    traffic = TrafficTable(
        np.roll(case.traffic.counts, shift, axis=1), case.traffic.tokens, case.traffic.layers, case.traffic.top_k
    )
    try:
        old = replace(case, aim=replace(case.aim, worst=False, sources=())).solve()
        moved = replan(old, traffic, most, curve=False)
    except PlanError:
        return
    found = parse_moves(moves_bytes(moved, old))
    assert found.moves == moved.moves
    check_moves(found, old, moved.plan)


@few(200)
@given(problems(), st.data())
def test_moves_between_any_two_placements_overflow_no_place(problem: Problem, data: st.DataObject) -> None:
    """Played back on the sizes themselves. Where no order is found, every place is too full for the largest expert."""
    fitting = every(problem)
    if not len(fitting):
        return
    home, new = (fitting[data.draw(st.integers(0, len(fitting) - 1))].argmax(axis=2) for _ in range(2))
    try:
        moves = order_moves(problem, home, new, range(len(home)))
    except PlanError as error:
        room = np.array(problem.free) - problem.used(home)
        assert "cannot be put in an order" in str(error)
        assert room.sum() < len(room) * problem.sizes.max()
        return
    at = home.copy()
    for move in moves:
        assert problem.places[at[move.layer, move.expert]] == move.here != move.there
        at[move.layer, move.expert] = problem.places.index(move.there)
        assert move.bytes == problem.sizes[move.layer, move.expert, at[move.layer, move.expert]]
        assert all(used <= free for used, free in zip(problem.used(at), problem.free, strict=True))
    assert (at == new).all()
    assert len(moves) - sum(move.parked for move in moves) == (home != new).sum()


def test_experts_are_parked_where_every_place_is_full() -> None:
    """Two full cards swap two experts each over a host that has room for one."""
    sizes, loads = np.full((1, 5, 3), 10), np.ones((1, 1, 5, 3), np.int64)
    busy = np.array([[5, 4, 3, 2, 1]])
    places = ("gpu0", "gpu1", "host")
    problem = Problem(places, sizes, (20, 20, 20), loads, np.zeros((1, 1, 5), np.int64), 1.0, busy)
    home, new = np.array([[0, 0, 1, 1, 2]]), np.array([[1, 1, 0, 0, 2]])
    moves = order_moves(problem, home, new, (3,))
    assert moves[0] == Move(3, 3, "gpu1", "host", 10, parked=True)
    assert [move.parked for move in moves].count(True) == 1 and len(moves) == 5
    full = Problem(places, sizes, (20, 20, 10), loads, np.zeros((1, 1, 5), np.int64), 1.0, busy)
    with pytest.raises(PlanError, match="cannot be put in an order.*at least|cannot be put in an order.*room for one"):
        order_moves(full, home, new, (3,))


def put(*path: str | int, value: object) -> Change:
    def change(root: Any) -> None:
        for key in path[:-1]:
            root = root[key]
        root[path[-1]] = value

    return change


def back(move: dict[str, Any]) -> dict[str, Any]:
    """The same expert, which was not parked, moved on from where it came."""
    assert not move["parked"]
    return move | {"from": move["to"], "to": move["from"]}


REFUSED: list[tuple[str, Change]] = [
    ("top level", lambda root: root.pop("format")),
    ("format", put("format", value="moefit.plan")),
    ("version", put("version", value=2)),
    ("version", put("version", value=True)),
    ("version", put("version", value=0)),
    ("top level", put("comment", value="")),
    ("top level", lambda root: root.pop("stay")),
    ("from", put("from", value="AB" * 32)),
    ("to", put("to", value=None)),
    ("stay", put("stay", value=-1)),
    ("stay", put("stay", value=10**400)),
    ("value", put("value", value="1")),
    ("unit", put("unit", value="joules")),
    ("unit", put("unit", value=[])),
    ("moves", put("moves", value={})),
    ("moves[0]", put("moves", 0, value=[])),
    ("moves[0]", lambda root: root["moves"][0].pop("bytes")),
    ("moves[0].layer", put("moves", 0, "layer", value=-1)),
    ("moves[0].expert", put("moves", 0, "expert", value=65_536)),
    ("moves[0].expert", put("moves", 0, "expert", value=1.0)),
    ("moves[0].from", put("moves", 0, "from", value="gpu")),
    ("moves[0].to", put("moves", 0, "to", value="gpu100")),
    ("moves[0].to", lambda root: root["moves"][0].update(to=root["moves"][0]["from"])),
    ("moves[0].bytes", put("moves", 0, "bytes", value=0)),
    ("moves[0].bytes", put("moves", 0, "bytes", value=2**63)),
    ("moves[0].parked", put("moves", 0, "parked", value=0)),
    ("moves[1]", lambda root: root["moves"].insert(1, root["moves"][0])),
    ("moves[1]", lambda root: root["moves"].insert(1, back(root["moves"][0]))),
    ("moves", lambda root: root["moves"][-1].update(parked=True)),
]


@pytest.mark.parametrize(("field", "change"), REFUSED)
def test_refusals_name_the_field(field: str, change: Change) -> None:
    value = content()
    change(value)
    with pytest.raises(PlanError) as caught:
        parse_moves(json.dumps(value).encode(), "m.json")
    assert f"[m.json, {field}]" in str(caught.value)


def test_what_is_no_list_of_moves(tmp_path: Path) -> None:
    for bad in (b"", b"[]", b"\xff", example()[0].to_bytes(), b'{"format": "moefit.moves", "format": 1, "version": 1}'):
        with pytest.raises(PlanError, match=r"moves\.json"):
            parse_moves(bad)
    path = tmp_path / "moves.json"
    with pytest.raises(PlanError, match="cannot be read"):
        read_moves(path)
    with path.open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(PlanError, match="too large"):
        read_moves(path)


@few(200)
@given(st.integers(0, 10**6), st.binary(max_size=3), st.integers(0, 3))
def test_spoilt_bytes_raise_only_plan_errors(at: int, patch: bytes, cut: int) -> None:
    old, moved = example()
    whole = moves_bytes(moved, old)
    at %= len(whole)
    try:
        apply_moves(old, parse_moves(whole[:at] + patch + whole[at + cut :]).moves)
    except PlanError as error:
        assert "moves" in str(error)


def test_moves_that_do_not_fit_the_plan() -> None:
    old, moved = example()
    first, *_ = moved.moves
    elsewhere = next(place for place in old.machine.places if place not in (first.here, first.there))
    for change, message in (
        ({"layer": 7}, "expected an expert of the plan"),
        ({"expert": 6}, "expected an expert of the plan"),
        ({"there": "gpu2"}, "expected places among gpu0, gpu1, host"),
        ({"here": elsewhere}, f"expected expert {first.expert} of layer {first.layer} on {elsewhere}"),
        ({"bytes": 99}, "expected 100 B, found 99 B"),
    ):
        with pytest.raises(PlanError, match=message):
            apply_moves(old, (replace(first, **change),))  # type: ignore[arg-type]


def test_an_order_that_overflows_a_place_is_refused() -> None:
    old, _ = example()
    full = next(place for place in range(2) if old.used[place] == 400)
    onto = next(e for e in range(6) if old.holds[0, e, 2])
    with pytest.raises(PlanError, match=f"room for 100 B on gpu{full}, found 0 B free"):
        apply_moves(old, (Move(0, onto, "host", f"gpu{full}", 100),))


def test_other_plans_than_the_moves_are_of() -> None:
    old, moved = example()
    found = parse_moves(moves_bytes(moved, old))
    with pytest.raises(PlanError, match=r"of another plan \[from\]"):
        check_moves(found, moved.plan, moved.plan)
    with pytest.raises(PlanError, match=r"of another plan \[to\]"):
        check_moves(found, old, old)
    shorter = MoveList(found.old, found.new, found.stay, found.value, found.unit, found.moves[:-1])
    with pytest.raises(PlanError, match="do not lead to the new plan"):
        check_moves(shorter, old, moved.plan)


def test_experts_on_several_cards_cannot_be_moved() -> None:
    old, _ = example()
    holds = old.holds.copy()
    expert = next(e for e in range(6) if holds[0, e, 0])
    holds[0, expert, 1] = True
    with pytest.raises(PlanError, match="found it on gpu0 and gpu1"):
        apply_moves(replace(old, holds=holds), (Move(0, expert, "gpu0", "host", 100),))

"""plan.json: round trip, canonical bytes, and every refusal of docs/plan.md."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefit.errors import PlanError
from moefit.files import json_bytes
from moefit.placement import Gpu, Machine, Plan, TrafficTable, check_plan, solve

from .cases import random_traffic

Change = Callable[[dict[str, Any]], object]
TRAFFIC = random_traffic(2, 6, 2, 100, 0)


@cache
def example() -> Plan:
    sizes = np.array([[100] * 6, [100, 100, 100, 60, 60, 60]], dtype=np.int64)
    machine = Machine((Gpu(450, 50), Gpu(300)), 2_000)
    return solve(sizes, TRAFFIC, machine, (10, 20, 1_000), inputs={"pack/config.json": "ab" * 32})


def content() -> dict[str, Any]:
    value: dict[str, Any] = json.loads(example().to_bytes())
    return value


def test_round_trip(tmp_path: Path) -> None:
    plan = example()
    path = tmp_path / "plan.json"
    plan.save(path)
    again = Plan.load(path)
    assert again.to_bytes() == plan.to_bytes() == path.read_bytes()
    assert (again.assignment == plan.assignment).all() and (again.sizes == plan.sizes).all()
    assert (again.machine, again.fixed, again.shares) == (plan.machine, plan.fixed, plan.shares)
    check_plan(again, TRAFFIC)


def test_what_the_file_says() -> None:
    plan, value = example(), content()
    assert value["places"][0]["budget_bytes"] == 400 and value["places"][2]["name"] == "host"
    assert [place["expert_bytes"] for place in value["places"]] == list(plan.used)
    assert value["layers"][0]["bytes_per_expert"] == 100
    assert value["layers"][1]["bytes_per_expert"] == [100, 100, 100, 60, 60, 60]
    assert value["layers"][1]["experts"]["gpu0"] == plan.experts_on(1, "gpu0")
    served = sum(int(TRAFFIC.counts[plan.assignment == place].sum()) for place in (0, 1))
    assert sum(place["activation_share"] for place in value["places"][:2]) == pytest.approx(served / (100 * 2 * 2))
    assert value["objective"]["greedy"] >= value["objective"]["value"] >= value["objective"]["bound"] > 0
    assert set(value["inputs"]) == {"traffic", "pack/config.json"}


def put(*path: str | int, value: object) -> Change:
    """A change that sets the field at `path`."""

    def change(root: Any) -> None:
        for key in path[:-1]:
            root = root[key]
        root[path[-1]] = value

    return change


def move(expert: int, old: str, new: str) -> Change:
    def change(root: dict[str, Any]) -> None:
        experts = root["layers"][0]["experts"]
        experts[old].remove(expert)
        experts[new] = sorted([*experts[new], expert])

    return change


HOT = example().experts_on(0, "gpu0")[0]

REFUSED: list[tuple[str, Change]] = [
    ("top level", lambda root: root.pop("format")),
    ("format", put("format", value="other")),
    ("version", put("version", value=2)),
    ("version", put("version", value=True)),
    ("version", put("version", value=1.0)),
    ("top level", put("comment", value="hello")),
    ("top level", lambda root: root.pop("solver")),
    ("mode", put("mode", value="tp")),
    ("machine", put("machine", "numa", value=1)),
    ("machine.gpus", put("machine", "gpus", value=[])),
    ("machine.gpus[0].reserve_bytes", put("machine", "gpus", 0, "reserve_bytes", value=451)),
    ("machine.gpus[0].bytes", put("machine", "gpus", 0, "bytes", value=-1)),
    ("machine.gpus[0].bytes", put("machine", "gpus", 0, "bytes", value=450.0)),
    ("machine.gpus[0].bytes", put("machine", "gpus", 0, "bytes", value=2**63)),
    ("machine.gpu_bandwidth", put("machine", "gpu_bandwidth", value=0)),
    ("experts_per_layer", put("experts_per_layer", value=0)),
    ("experts_per_layer", put("experts_per_layer", value=65_537)),
    ("layers[0].experts", put("experts_per_layer", value=7)),
    ("layers", put("layers", value=[])),
    ("layers", put("layers", value={})),
    ("layers[1].layer", put("layers", 1, "layer", value=0)),
    ("layers[0].bytes_per_expert", put("layers", 0, "bytes_per_expert", value=0)),
    ("layers[1].bytes_per_expert", put("layers", 1, "bytes_per_expert", value=[60] * 5)),
    ("layers[1].bytes_per_expert[2]", put("layers", 1, "bytes_per_expert", 2, value="100")),
    ("layers[0].experts", lambda root: root["layers"][0]["experts"].pop("host")),
    ("layers[0].experts", put("layers", 0, "experts", "gpu2", value=[])),
    ("layers[0].experts", lambda root: root["layers"][0]["experts"]["gpu0"].pop()),
    ("layers[0].experts.gpu0[0]", put("layers", 0, "experts", "gpu0", 0, value=6)),
    ("layers[0].experts.gpu0[0]", put("layers", 0, "experts", "gpu0", 0, value=-1)),
    ("layers[1].experts.gpu0[1]", lambda root: root["layers"][1]["experts"]["gpu0"].reverse()),
    (
        "layers[0].experts.host[0]",
        lambda root: root["layers"][0]["experts"].update(gpu0=[0, 1], gpu1=[2, 3], host=[3, 4]),
    ),
    ("places", lambda root: root["places"].pop()),
    ("places[0].name", lambda root: root["places"].reverse()),
    ("places[0].budget_bytes", put("places", 0, "budget_bytes", value=401)),
    ("places[0].fixed_bytes", put("places", 0, "fixed_bytes", value=400)),
    ("places[0].experts", move(HOT, "gpu0", "host")),
    ("places[0].expert_bytes", put("places", 0, "expert_bytes", value=1)),
    ("places", put("places", 0, "activation_share", value=0.0)),
    ("places[0].activation_share", put("places", 0, "activation_share", value=1.5)),
    ("objective.name", put("objective", "name", value="joules")),
    ("objective.bound", put("objective", "bound", value=1.0)),
    ("objective.bound", put("objective", "bound", value=-1.0)),
    ("objective.value", put("objective", "value", value=0)),
    ("objective.value", put("objective", "value", value="fast")),
    ("objective.gap", put("objective", "gap", value=0.5)),
    ("objective.greedy", put("objective", "greedy", value=0.0)),
    ("traffic.tokens", put("traffic", "tokens", value=0)),
    ("traffic.top_k", put("traffic", "top_k", value=7)),
    ("solver.steps", put("solver", "steps", value=[])),
    ("solver.name", put("solver", "name", value="")),
    ("solver.version", put("solver", "version", value="\ud800")),
    ("inputs", put("inputs", value={})),
    ("inputs", put("inputs", "sp ace", value="ab" * 32)),
    ("inputs.traffic", put("inputs", "traffic", value="AB" * 32)),
]


@pytest.mark.parametrize(("field", "change"), REFUSED)
def test_hostile_plans_are_refused_with_the_field_named(field: str, change: Change) -> None:
    value = content()
    change(value)
    with pytest.raises(PlanError) as caught:
        Plan.from_bytes(json.dumps(value).encode(), "p.json")
    assert f"[p.json, {field}]" in str(caught.value)


def test_over_budget_is_refused() -> None:
    """A plan that is right in every sum but puts one expert too many on a card."""
    value = content()
    move(example().experts_on(0, "host")[0], "host", "gpu0")(value)
    gpu, host = value["places"][0], value["places"][2]
    gpu["experts"], host["experts"] = gpu["experts"] + 1, host["experts"] - 1
    gpu["expert_bytes"], host["expert_bytes"] = gpu["expert_bytes"] + 100, host["expert_bytes"] - 100
    with pytest.raises(PlanError, match=r"places\[0\]\.fixed_bytes"):
        Plan.from_bytes(json.dumps(value).encode())


BAD_JSON = (
    *(b"", b"\xff", b"[]", b"null", b"{", b"[" * 100_000, b'{"a": NaN}', b'{"a": Infinity}', b"9" * 5_000),
    b'{"format": "moefit.plan", "format": "moefit.plan", "version": 1}',
)


@pytest.mark.parametrize("bad", BAD_JSON)
def test_bad_json_is_refused(bad: bytes) -> None:
    with pytest.raises(PlanError, match=r"plan\.json"):
        Plan.from_bytes(bad)


def test_overflowing_numbers_and_large_files_are_refused(tmp_path: Path) -> None:
    text = json_bytes(content()).decode().replace('"gap": ', '"gap": 1e999, "x": ')
    with pytest.raises(PlanError):
        Plan.from_bytes(text.encode())
    path = tmp_path / "plan.json"
    with path.open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(PlanError, match="too large"):
        Plan.load(path)
    with pytest.raises(PlanError, match=r"none\.json"):
        Plan.load(tmp_path / "none.json")


def paths(value: Any, prefix: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every leaf of a JSON value."""
    if isinstance(value, dict):
        return [leaf for key in value for leaf in paths(value[key], (*prefix, key))]
    if isinstance(value, list):
        return [leaf for index, item in enumerate(value) for leaf in paths(item, (*prefix, index))]
    return [prefix]


JUNK = st.sampled_from([None, True, -1, 0, 1, 2**63, 0.5, -0.0, 1e308, "", "x", [], {}, [[]]])


@settings(max_examples=300)
@given(st.data())
def test_any_single_change_is_refused_or_means_what_it_says(data: st.DataObject) -> None:
    """No other exception, no silent repair: what is accepted writes back the same value."""
    value = content()
    path = data.draw(st.sampled_from(paths(value)))
    put(*path, value=data.draw(JUNK))(value)
    changed = copy.deepcopy(value)
    try:
        plan = Plan.from_bytes(json.dumps(value).encode())
    except PlanError:
        return
    assert json.loads(plan.to_bytes()) == changed


@settings(max_examples=300)
@given(st.integers(0, 10**6), st.binary(max_size=3), st.integers(0, 3))
def test_spoilt_bytes_raise_only_plan_errors(at: int, patch: bytes, cut: int) -> None:
    whole = example().to_bytes()
    at %= len(whole)
    try:
        Plan.from_bytes(whole[:at] + patch + whole[at + cut :])
    except PlanError as error:
        assert "plan.json" in str(error)


def test_check_plan_needs_the_same_traffic_and_numbers() -> None:
    with pytest.raises(PlanError, match=r"inputs\.traffic"):
        check_plan(example(), random_traffic(2, 6, 2, 100, 1))
    value = content()
    for key in ("value", "greedy", "bound"):
        value["objective"][key] *= 2
    forged = Plan.from_bytes(json.dumps(value).encode())
    with pytest.raises(PlanError, match=r"objective\.value"):
        check_plan(forged, TRAFFIC)


def test_same_input_same_bytes() -> None:
    sizes, traffic = np.full((2, 6), 10, dtype=np.int64), TrafficTable(TRAFFIC.counts, 100, (4, 9), 2)
    machine = Machine((Gpu(30), Gpu(30)), 200)
    assert solve(sizes, traffic, machine).to_bytes() == solve(sizes.copy(), traffic, machine).to_bytes()


def test_the_example_of_the_spec_is_a_plan() -> None:
    text = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    plan = Plan.from_bytes(text.split("```json")[1].split("```")[0].encode())
    assert plan.experts_on(0, "gpu0") == [0, 2]
    check_plan(plan, TrafficTable(np.array([[80, 25, 75, 20]]), 100, (0,), 2))

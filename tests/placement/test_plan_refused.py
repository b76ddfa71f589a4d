"""plan.json: every refusal of docs/plan.md by field, hostile input, and memory in proportion to the file."""

from __future__ import annotations

import copy
import json
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moefit.errors import PlanError
from moefit.placement import Plan
from moefit.placement.machine import MAX_NS
from moefit.placement.plan import KIND, MAX_CELLS, MAX_SIZE

from .cases import few
from .test_plan import content, example

Change = Callable[[dict[str, Any]], object]
Path_ = tuple[str | int, ...]


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


def experts(**places: list[int]) -> Change:
    return lambda root: root["layers"][0]["experts"].update(places)


HOT = example().experts_on(0, "gpu0")[0]
DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]

REFUSED: list[tuple[str, Change]] = [
    ("top level", lambda root: root.pop("format")),
    ("top level", lambda root: root.pop("version")),
    ("format", put("format", value="other")),
    ("version", put("version", value=0)),
    ("version", put("version", value=3)),
    ("version", put("version", value=True)),
    ("version", put("version", value=2.0)),
    ("top level", put("comment", value="hello")),
    ("top level", lambda root: root.pop("solver")),
    ("mode", put("mode", value="pp")),
    ("mode", put("mode", value=["ep"])),
    ("layers[0].experts", put("mode", value="tp")),
    ("machine", put("machine", "numa", value=1)),
    ("machine", lambda root: root["machine"].pop("cpu")),
    ("machine.gpus", put("machine", "gpus", value=[])),
    ("machine.gpus", put("machine", "gpus", value=[{}] * 65)),
    ("machine.gpus[0]", lambda root: root["machine"]["gpus"][0].pop("token_ns")),
    ("machine.gpus[0].reserve_bytes", put("machine", "gpus", 0, "reserve_bytes", value=451)),
    ("machine.gpus[0].bytes", put("machine", "gpus", 0, "bytes", value=-1)),
    ("machine.gpus[0].bytes", put("machine", "gpus", 0, "bytes", value=450.0)),
    ("machine.gpus[0].bytes", put("machine", "gpus", 0, "bytes", value=2**63)),
    ("machine.gpus[1].bandwidth", put("machine", "gpus", 1, "bandwidth", value=0)),
    ("machine.gpus[1].token_ns", put("machine", "gpus", 1, "token_ns", value=MAX_NS + 1)),
    ("machine.host_bytes", put("machine", "host_bytes", value=-1)),
    ("machine.zero_copy", put("machine", "zero_copy", value=0)),
    ("machine.copy_engine", put("machine", "copy_engine", value="56GB")),
    ("machine.shared_root", put("machine", "shared_root", value=0)),
    ("machine.pinning", put("machine", "pinning", value="page")),
    ("machine.cpu", put("machine", "cpu", value={})),
    ("machine.cpu.bandwidth", put("machine", "cpu", "bandwidth", value=0)),
    ("machine.cpu.fixed_ns", put("machine", "cpu", "fixed_ns", value=0.5)),
    ("machine.cpu.token_ns", put("machine", "cpu", "token_ns", value=None)),
    ("experts_per_layer", put("experts_per_layer", value=0)),
    ("experts_per_layer", put("experts_per_layer", value=65_537)),
    ("layers[0].experts", put("experts_per_layer", value=7)),
    ("layers[0].experts.gpu0", put("experts_per_layer", value=1)),
    ("layers", put("layers", value=[])),
    ("layers", put("layers", value={})),
    ("layers[1].layer", put("layers", 1, "layer", value=0)),
    ("layers[1].layer", put("layers", 1, "layer", value=2**63)),
    ("layers[0].card_bytes", put("layers", 0, "card_bytes", value=0)),
    ("layers[0].card_bytes", put("layers", 0, "card_bytes", value=MAX_SIZE + 1)),
    ("layers[0].host_bytes", put("layers", 0, "host_bytes", value=None)),
    ("layers[1].card_bytes", put("layers", 1, "card_bytes", value=[60] * 5)),
    ("layers[1].host_bytes", put("layers", 1, "host_bytes", value=[60] * 7)),
    ("layers[1].card_bytes[2]", put("layers", 1, "card_bytes", 2, value="100")),
    ("layers[0]", put("layers", 0, "bytes_per_expert", value=100)),
    ("layers[0].experts", lambda root: root["layers"][0]["experts"].pop("host")),
    ("layers[0].experts", experts(gpu2=[])),
    ("layers[0].experts", lambda root: root["layers"][0]["experts"]["gpu0"].pop()),
    ("layers[0].experts.gpu0[0]", put("layers", 0, "experts", "gpu0", 0, value=6)),
    ("layers[0].experts.gpu0[0]", put("layers", 0, "experts", "gpu0", 0, value=-1)),
    ("layers[0].experts.gpu0[1]", experts(gpu0=[1, 0])),
    ("layers[0].experts.gpu0[1]", experts(gpu0=[1, 1])),
    ("layers[0].experts.gpu0", experts(gpu0=list(range(6)) * 2)),
    ("layers[0].experts.host[0]", experts(gpu0=[0, 1], gpu1=[2, 3], host=[3, 4, 5])),
    ("limits", put("limits", "most", value=1)),
    ("limits.min_per_layer", put("limits", "min_per_layer", value=7)),
    ("limits.max_per_layer", put("limits", "max_per_layer", value=-1)),
    ("limits", lambda root: root["limits"].update(min_per_layer=2, max_per_layer=1)),
    ("limits", put("limits", "min_per_layer", value=6)),
    ("limits", put("limits", "max_per_layer", value=1)),
    ("limits", put("limits", "pins", value=["1:0=gpu0"])),
    ("limits", put("limits", "pins", value=["1:0=gpu2"])),
    ("limits", put("limits", "pins", value=["2:0=gpu0"])),
    ("limits", put("limits", "pins", value=["anything"])),
    ("limits", put("limits", "forbidden", value=["1:0=host"])),
    ("limits", put("limits", "forbidden", value=["0:0-5=cards"])),
    ("limits", put("limits", "forbidden", value=["0:0=cards", "0:0=host"])),
    ("limits.pins[0]", put("limits", "pins", value=["1:0 =host"])),
    ("limits.pins[0]", put("limits", "pins", value=["1:" + "0," * 5_000 + "0=host"])),
    ("limits.forbidden", put("limits", "forbidden", value=["1:0=gpu0"] * 1001)),
    ("limits.forbidden[0]", put("limits", "forbidden", value=[None])),
    ("places", lambda root: root["places"].pop()),
    ("places[0]", put("places", 0, "experts_bytes", value=1)),
    ("places[0].name", lambda root: root["places"].reverse()),
    ("places[0].budget_bytes", put("places", 0, "budget_bytes", value=401)),
    ("places[0].budget_bytes", put("machine", "gpus", 0, "reserve_bytes", value=51)),
    ("places[0].fixed_bytes", put("places", 0, "fixed_bytes", value=400)),
    ("places[0].fixed_bytes", put("places", 0, "fixed_bytes", value=-1)),
    ("places[0].experts", move(HOT, "gpu0", "host")),
    ("places[0].expert_bytes", put("places", 0, "expert_bytes", value=1)),
    ("places[2].expert_bytes", put("machine", "pinning", value="power-of-two")),
    ("places", put("places", 0, "activation_share", value=0.0)),
    ("places[0].activation_share", put("places", 0, "activation_share", value=1.5)),
    ("objective.name", put("objective", "name", value="joules")),
    ("objective.name", put("objective", "name", value="decode")),
    ("objective.name", put("objective", "name", value="1.0*decode:1")),
    ("objective.name", put("objective", "name", value="decode:9")),
    ("objective.name", put("objective", "name", value="decode:" + "9" * 900)),
    ("objective.name", put("objective", "name", value="memory+memory")),
    ("objective.unit", put("objective", "unit", value="bytes")),
    ("objective.worst_case", put("objective", "worst_case", value=None)),
    ("objective.sources", put("objective", "sources", value=[])),
    ("objective.sources", put("objective", "sources", value={"": 1})),
    ("objective.sources", put("objective", "sources", value={"\ud800": 1})),
    ("objective.sources", put("objective", "sources", value={"a" * 1001: 1})),
    ("objective.sources", put("objective", "sources", value={str(n): 1 for n in range(1001)})),
    ("objective.sources.a", put("objective", "sources", value={"a": 0})),
    ("objective.sources.a", put("objective", "sources", value={"a": 1e30})),
    ("objective.sources.'\\n'", put("objective", "sources", value={"\n": True})),
    ("objective.bound", put("objective", "bound", value=1.0)),
    ("objective.bound", put("objective", "bound", value=-1.0)),
    ("objective.value", put("objective", "value", value="fast")),
    ("objective.value", put("objective", "value", value=10**400)),
    ("objective.value", put("objective", "value", value=2**53 + 1)),
    ("objective.gap", put("objective", "gap", value=0.5)),
    ("objective.greedy", put("objective", "greedy", value=0.0)),
    ("traffic.tokens", put("traffic", "tokens", value=0)),
    ("traffic.top_k", put("traffic", "top_k", value=7)),
    ("solver.steps", put("solver", "steps", value=[])),
    ("solver.steps", put("solver", "steps", value=["x"] * 101)),
    ("solver.name", put("solver", "name", value="")),
    ("solver.name", put("solver", "name", value="x" * 201)),
    ("solver.version", put("solver", "version", value="\ud800")),
    ("solver.plan_from", put("solver", "plan_from", value="a\nb")),
    ("solver.bound_from", put("solver", "bound_from", value=DEEP)),
    ("inputs", put("inputs", value={})),
    ("inputs", lambda root: root["inputs"].pop("traffic")),
    ("inputs", put("inputs", "sp ace", value="ab" * 32)),
    ("inputs", put("inputs", value={"traffic": "ab" * 32, **{str(n): "ab" * 32 for n in range(64)}})),
    ("inputs.traffic", put("inputs", "traffic", value="AB" * 32)),
]


@pytest.mark.parametrize(("field", "change"), REFUSED)
def test_hostile_plans_are_refused_with_the_field_named(field: str, change: Change) -> None:
    value = content()
    change(value)
    with pytest.raises(PlanError) as caught:
        Plan.from_bytes(json.dumps(value).encode(), "p.json")
    assert f"[p.json, {field}]" in str(caught.value)
    assert len(str(caught.value)) < 1000 and str(caught.value).isprintable()
    assert caught.value.mend


def test_other_versions_say_what_to_do() -> None:
    value = content()
    value["version"] = 1
    with pytest.raises(PlanError, match=r"expected 2, found 1\. Make the plan again with this version of moefit"):
        Plan.from_bytes(json.dumps({"format": "moefit.plan", "version": 1, "layers": []}).encode())
    value["version"] = 3
    with pytest.raises(PlanError, match=r"plan of a later version.*newer moefit"):
        Plan.from_bytes(json.dumps(value).encode())


def test_over_budget_is_refused() -> None:
    """A plan that is right in every sum but puts one expert too many on a card."""
    value = content()
    value["limits"] = {"pins": [], "forbidden": [], "min_per_layer": None, "max_per_layer": None}
    moved, left = 0, (400 - 10 - example().used[0]) // 100
    for expert in example().experts_on(0, "host")[: left + 1]:
        move(expert, "host", "gpu0")(value)
        moved += 1
    assert moved == left + 1
    gpu, host = value["places"][0], value["places"][2]
    gpu["experts"], host["experts"] = gpu["experts"] + moved, host["experts"] - moved
    gpu["expert_bytes"], host["expert_bytes"] = gpu["expert_bytes"] + 100 * moved, host["expert_bytes"] - 100 * moved
    with pytest.raises(PlanError, match=r"places\[0\]\.fixed_bytes"):
        Plan.from_bytes(json.dumps(value).encode())


BAD_JSON = (
    *(b"", b"\xff", b"[]", b"null", b"{", b"[" * 100_000, b'{"a": NaN}', b'{"a": -Infinity}', b"9" * 5_000),
    b'{"format": "moefit.plan", "format": "moefit.plan", "version": 2}',
    b'{"format": "moefit.plan", "version": 2, "inputs": {"' + b"a" * 10_000 + b'": 1, "' + b"a" * 10_000 + b'": 1}}',
    b"\xef\xbb\xbf" + example().to_bytes(),
    example().to_bytes().decode().encode("utf-16"),
    example().to_bytes().decode().encode("utf-32-le"),
    example().to_bytes() + b"x",
    example().to_bytes()[:-3],
)


@pytest.mark.parametrize("bad", BAD_JSON, ids=range(len(BAD_JSON)))
def test_bad_json_is_refused(bad: bytes) -> None:
    with pytest.raises(PlanError, match=r"plan\.json") as caught:
        Plan.from_bytes(bad)
    assert len(str(caught.value)) < 500


def test_every_depth_of_nesting_is_refused() -> None:
    """Also those that can be read but, from further down the stack, not written back."""
    for depth in range(900, 1010):
        with pytest.raises(PlanError):
            Plan.from_bytes(b'{"format": ' + b"[" * depth + b"]" * depth + b', "version": 2}')


def test_overflowing_numbers_and_large_files_are_refused(tmp_path: Path) -> None:
    text = example().to_bytes().decode().replace('"gap": ', '"gap": 1e999, "x": ')
    with pytest.raises(PlanError):
        Plan.from_bytes(text.encode())
    path = tmp_path / "plan.json"
    with path.open("wb") as file:
        file.truncate(KIND.most + 1)
    with pytest.raises(PlanError, match="too large"):
        Plan.load(path)
    for unreadable in (tmp_path / "none.json", tmp_path):
        with pytest.raises(PlanError, match="cannot be read"):
            Plan.load(unreadable)


def parts(value: Any, prefix: Path_ = ()) -> Iterator[Path_]:
    """Every value within a JSON value."""
    if prefix:
        yield prefix
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from parts(item, (*prefix, key))


def same(one: Any, two: Any) -> bool:
    """JSON values that mean the same: 1 is 1.0, but not true."""
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(same, one, two))
    return isinstance(one, bool) == isinstance(two, bool) and bool(one == two)


JUNK = (None, True, False, -1, 0, 1, 2**53 + 1, 2**63, 10**400, 0.5, -0.0, 5e-324, 1e308, "", "x", "\ud800", "\n")
JUNK += ("x" * 300, [], {}, [[]], {"": 0}, [None] * 6, {"gpu0": [], "gpu1": [], "host": []})  # type: ignore[assignment]


def test_any_single_change_is_refused_or_means_what_it_says() -> None:
    """No other exception, no silent repair: what is accepted writes back the same value."""
    accepted = 0
    for path in parts(content()):
        for junk in JUNK:
            value = content()
            put(*path, value=copy.deepcopy(junk))(value)
            try:
                plan = Plan.from_bytes(json.dumps(value).encode())
            except PlanError:
                continue
            assert same(json.loads(plan.to_bytes()), value), path
            accepted += 1
    assert accepted > 50


@few(300)
@given(st.integers(0, 10**6), st.binary(max_size=3), st.integers(0, 3))
def test_spoilt_bytes_raise_only_plan_errors(at: int, patch: bytes, cut: int) -> None:
    whole = example().to_bytes()
    at %= len(whole)
    try:
        Plan.from_bytes(whole[:at] + patch + whole[at + cut :])
    except PlanError as error:
        assert "plan.json" in str(error)


# Size


def wide(cards: int, count: int, layers: int) -> bytes:
    """A plan with everything on the host, in as few bytes as JSON takes."""
    places = [*(f"gpu{card}" for card in range(cards)), "host"]
    gpu = {"bandwidth": 1, "bytes": 0, "reserve_bytes": 0, "token_ns": 0}
    used = layers * count
    value = content() | {
        "experts_per_layer": count,
        "layers": [
            {
                "card_bytes": 1,
                "experts": {name: list[int]() for name in places} | {"host": list(range(count))},
                "host_bytes": 1,
                "layer": layer,
            }
            for layer in range(layers)
        ],
        "limits": {"forbidden": [], "max_per_layer": None, "min_per_layer": None, "pins": []},
        "places": [
            {
                "activation_share": float(name == "host"),
                "budget_bytes": used if name == "host" else 0,
                "expert_bytes": used if name == "host" else 0,
                "experts": used if name == "host" else 0,
                "fixed_bytes": 0,
                "name": name,
            }
            for name in places
        ],
    }
    value["machine"] |= {"gpus": [gpu] * cards, "host_bytes": used}
    return json.dumps(value, separators=(",", ":")).encode()


@pytest.mark.parametrize(("cards", "times"), [(1, 20), (8, 20), (64, 40)])
def test_memory_is_in_proportion_to_the_file(cards: int, times: int) -> None:
    content = wide(cards, 5_000, 4)
    tracemalloc.start()
    plan = Plan.from_bytes(content)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert plan.used[-1] == 20_000
    assert peak < times * len(content)


def test_more_experts_than_memory_should_hold_are_refused_before_they_are_read() -> None:
    value = json.loads(wide(64, 10, 1))
    value["experts_per_layer"] = 65_536
    value["layers"] *= 1 + MAX_CELLS // (65_536 * 65)
    tracemalloc.start()
    with pytest.raises(PlanError, match=r"\[plan\.json, layers\]: expected a list of 1 to 15, found a list of 16"):
        Plan.from_bytes(json.dumps(value).encode())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20

"""plan.json: which expert lies where, how good that is, and how good it could be. Spec: docs/plan.md."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import PlanError
from ..files import json_bytes, sha256_bytes, write_atomic
from .machine import LARGEST, Gpu, Machine
from .problem import Problem
from .traffic import MAX_EXPERTS, MAX_LAYERS, TrafficTable

FORMAT, VERSION = "moefit.plan", 1
MAX_FILE = 64 << 20
INPUT_NAME = "[A-Za-z0-9_./-]{1,200}"
OBJECTIVE = "expected seconds per token"
MEND = "make the plan again with this version of moefit"


@dataclass(frozen=True, eq=False)
class Plan:
    """A placement. P places in the order of `machine.places` (gpu0, ..., host), L layers, E experts a layer.

    layers: layer numbers [L]. sizes: int64 [L, E] bytes. assignment: int64 [L, E] place numbers.
    fixed: bytes of other tensors on each place [P]. shares: share of expert activations per place [P].
    seconds, greedy, bound: expected seconds per token of this plan, of frequency-greedy (None where greedy
    does not fit) and of the proven lower bound. tokens, top_k: of the traffic planned for.
    solver: (name, version). steps: what was tried, in order, with what came of it; plan_from and bound_from:
    the steps that gave the plan and the bound. inputs: name -> sha256.
    """

    machine: Machine
    layers: tuple[int, ...]
    sizes: np.ndarray
    assignment: np.ndarray
    fixed: tuple[int, ...]
    shares: tuple[float, ...]
    seconds: float
    greedy: float | None
    bound: float
    tokens: int
    top_k: int
    solver: tuple[str, str]
    steps: tuple[str, ...]
    plan_from: str
    bound_from: str
    inputs: Mapping[str, str]

    @property
    def gap(self) -> float:
        """How much of `seconds` a perfect plan could still save at most: (seconds - bound) / seconds."""
        return (self.seconds - self.bound) / self.seconds

    @property
    def used(self) -> tuple[int, ...]:
        """Expert bytes on each place, exactly."""
        places = range(len(self.machine.places))
        return tuple(int(self.sizes[self.assignment == p].sum(dtype=object)) for p in places)

    def experts_on(self, layer: int, place: str) -> list[int]:
        """Expert ids of a layer (by its number) on a place (by its name), ascending."""
        row = self.assignment[self.layers.index(layer)]
        return [int(expert) for expert in np.flatnonzero(row == self.machine.places.index(place))]

    def to_bytes(self) -> bytes:
        """Canonical bytes of plan.json."""
        machine, names = self.machine, self.machine.places
        places = [
            {
                "activation_share": self.shares[p],
                "budget_bytes": machine.budgets[p],
                "expert_bytes": self.used[p],
                "experts": int((self.assignment == p).sum()),
                "fixed_bytes": self.fixed[p],
                "name": name,
            }
            for p, name in enumerate(names)
        ]
        layers = [
            {
                "bytes_per_expert": int(row[0]) if (row == row[0]).all() else row.tolist(),
                "experts": {name: self.experts_on(layer, name) for name in names},
                "layer": layer,
            }
            for layer, row in zip(self.layers, self.sizes, strict=True)
        ]
        return json_bytes(
            {
                "experts_per_layer": self.sizes.shape[1],
                "format": FORMAT,
                "inputs": dict(self.inputs),
                "layers": layers,
                "machine": {
                    "gpu_bandwidth": machine.gpu_bandwidth,
                    "gpus": [{"bytes": gpu.bytes, "reserve_bytes": gpu.reserve} for gpu in machine.gpus],
                    "host_bandwidth": machine.host_bandwidth,
                    "host_bytes": machine.host_bytes,
                },
                "mode": machine.mode,
                "objective": {
                    "bound": self.bound,
                    "gap": self.gap,
                    "greedy": self.greedy,
                    "name": OBJECTIVE,
                    "value": self.seconds,
                },
                "places": places,
                "solver": {
                    "bound_from": self.bound_from,
                    "name": self.solver[0],
                    "plan_from": self.plan_from,
                    "steps": list(self.steps),
                    "version": self.solver[1],
                },
                "traffic": {"tokens": self.tokens, "top_k": self.top_k},
                "version": VERSION,
            }
        )

    def save(self, path: Path) -> None:
        """Write plan.json atomically."""
        write_atomic(path, self.to_bytes())

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read and validate plan.json. PlanError names the file and the field."""
        try:
            size = path.stat().st_size
            if size > MAX_FILE:
                raise PlanError("plan too large", where=str(path), found=f"expected <= {MAX_FILE} B, found {size}")
            content = path.read_bytes()
        except OSError as error:
            raise PlanError("plan cannot be read", where=str(path), found=str(error)) from error
        return cls.from_bytes(content, str(path))

    @classmethod
    def from_bytes(cls, content: bytes, where: str = "plan.json") -> Plan:
        """Plan from the file's bytes; see `load`."""
        try:
            value = json.loads(content, object_pairs_hook=_no_duplicates, parse_constant=_no_constants)
        except (ValueError, RecursionError) as error:
            raise PlanError("plan is not JSON", where=where, found=str(error), mend=MEND) from error
        return _parse(_Field(value, where, ""))


def check_plan(plan: Plan, traffic: TrafficTable) -> None:
    """Compute objective and shares of `plan` again, exactly, from the traffic it names.

    PlanError: another traffic table, or other numbers.
    """
    digest = sha256_bytes(traffic.to_bytes())
    if plan.inputs.get("traffic") != digest:
        found = f"expected sha256 {plan.inputs.get('traffic')}, found {digest}"
        raise PlanError("not the traffic this plan was made for", where="inputs.traffic", found=found)
    problem = Problem(plan.sizes, traffic, plan.machine, plan.fixed)
    seconds = float(problem.seconds(problem.cost(plan.assignment)))
    if seconds != plan.seconds or problem.shares(plan.assignment) != plan.shares:
        found = f"expected {seconds!r} s per token, found {plan.seconds!r}"
        raise PlanError("plan and traffic disagree", where="objective.value", found=found, mend=MEND)


@dataclass(frozen=True)
class _Field:
    """A JSON value and its path, so that each refusal names file and field."""

    value: Any
    file: str
    path: str

    def wrong(self, expected: str) -> PlanError:
        text = json.dumps(self.value)
        found = text if len(text) <= 80 else text[:77] + "..."
        where = f"{self.file}, {self.path or 'top level'}"
        return PlanError("plan refused", where=where, found=f"expected {expected}, found {found}", mend=MEND)

    def child(self, key: str | int) -> _Field:
        path = f"{self.path}[{key}]" if isinstance(key, int) else f"{self.path}.{key}".lstrip(".")
        return _Field(self.value[key], self.file, path)

    def object(self, *keys: str) -> dict[str, _Field]:
        """An object with exactly these keys."""
        if not isinstance(self.value, dict) or set(self.value) != set(keys):
            raise self.wrong(f"an object with exactly {', '.join(sorted(keys))}")
        return {key: self.child(key) for key in keys}

    def array(self, low: int, high: int) -> list[_Field]:
        if not isinstance(self.value, list) or not low <= len(self.value) <= high:
            raise self.wrong(f"a list of {low} to {high}" if low != high else f"a list of {low}")
        return [self.child(index) for index in range(len(self.value))]

    def integer(self, low: int, high: int = LARGEST) -> int:
        if type(self.value) is not int or not low <= self.value <= high:
            raise self.wrong(f"an integer from {low} to {high}")
        return self.value

    def number(self, low: float, high: float = math.inf) -> float:
        if type(self.value) not in (int, float) or not low <= self.value <= high or math.isinf(self.value):
            raise self.wrong(f"a finite number from {low} to {high}")
        return float(self.value)

    def text(self, pattern: str = r".{1,200}") -> str:
        printable = isinstance(self.value, str) and self.value.isprintable()
        if not printable or not re.fullmatch(pattern, self.value):
            raise self.wrong(f"printable text like {pattern}")
        return str(self.value)

    def exactly(self, value: Any) -> None:
        if type(self.value) is not type(value) or self.value != value:
            raise self.wrong(json.dumps(value))


def _parse(root: _Field) -> Plan:
    if not isinstance(root.value, dict) or "format" not in root.value or "version" not in root.value:
        raise root.wrong("an object with format and version")
    root.child("format").exactly(FORMAT)
    root.child("version").exactly(VERSION)  # before the other keys: another version may have others
    top = root.object(
        *("experts_per_layer", "format", "inputs", "layers", "machine", "mode", "objective", "places"),
        *("solver", "traffic", "version"),
    )
    top["mode"].exactly("ep")
    machine = _parse_machine(top["machine"])
    experts = top["experts_per_layer"].integer(1, MAX_EXPERTS)
    layers, sizes, assignment = _parse_layers(top["layers"], experts, machine)
    fixed, shares = _parse_places(top["places"], machine, sizes, assignment)
    seconds, greedy, bound = _parse_objective(top["objective"])
    traffic = top["traffic"].object("tokens", "top_k")
    solver = top["solver"].object("bound_from", "name", "plan_from", "steps", "version")
    return Plan(
        machine=machine,
        layers=layers,
        sizes=sizes,
        assignment=assignment,
        fixed=fixed,
        shares=shares,
        seconds=seconds,
        greedy=greedy,
        bound=bound,
        tokens=traffic["tokens"].integer(1),
        top_k=traffic["top_k"].integer(1, experts),
        solver=(solver["name"].text(), solver["version"].text()),
        steps=tuple(step.text() for step in solver["steps"].array(1, 100)),
        plan_from=solver["plan_from"].text(),
        bound_from=solver["bound_from"].text(),
        inputs=_parse_inputs(top["inputs"]),
    )


def _parse_inputs(field: _Field) -> dict[str, str]:
    named = isinstance(field.value, dict) and all(re.fullmatch(INPUT_NAME, name) for name in field.value)
    if not named or not 1 <= len(field.value) <= 64:
        raise field.wrong(f"an object of 1 to 64 digests with names like {INPUT_NAME}")
    return {name: field.child(name).text("[0-9a-f]{64}") for name in field.value}


def _parse_machine(field: _Field) -> Machine:
    entry = field.object("gpu_bandwidth", "gpus", "host_bandwidth", "host_bytes")
    gpus = []
    for card in entry["gpus"].array(1, 64):
        fields = card.object("bytes", "reserve_bytes")
        size = fields["bytes"].integer(0)
        gpus.append(Gpu(size, fields["reserve_bytes"].integer(0, size)))
    bandwidths = entry["gpu_bandwidth"].integer(1), entry["host_bandwidth"].integer(1)
    return Machine(tuple(gpus), entry["host_bytes"].integer(0), *bandwidths)


def _parse_layers(field: _Field, experts: int, machine: Machine) -> tuple[tuple[int, ...], np.ndarray, np.ndarray]:
    """(layer numbers [L], sizes int64 [L, E], assignment int64 [L, E])."""
    layers: list[int] = []
    sizes, assignment = [], []  # row by row, so that memory stays in proportion to the file
    for entry in field.array(1, MAX_LAYERS):
        fields = entry.object("bytes_per_expert", "experts", "layer")
        layers.append(fields["layer"].integer(layers[-1] + 1 if layers else 0))
        assignment.append(_parse_experts(fields["experts"], experts, machine))
        size = fields["bytes_per_expert"]
        if isinstance(size.value, list):
            sizes.append(np.array([item.integer(1) for item in size.array(experts, experts)], dtype=np.int64))
        else:
            sizes.append(np.full(experts, size.integer(1), dtype=np.int64))
    return tuple(layers), np.stack(sizes), np.stack(assignment)


def _parse_experts(field: _Field, experts: int, machine: Machine) -> np.ndarray:
    """Place numbers int64 [E] of one layer."""
    lists = field.object(*machine.places)
    total = sum(len(ids.array(0, experts)) for ids in lists.values())
    if total != experts:
        raise field.wrong(f"each of {experts} experts once ({total} ids are given)")
    row = np.full(experts, -1, dtype=np.int64)
    for place, ids in enumerate(lists.values()):
        previous = -1
        for item in ids.array(0, experts):
            previous = item.integer(previous + 1, experts - 1)  # ascending, so none twice in one list
            if row[previous] >= 0:
                raise item.wrong(f"each expert once ({machine.places[row[previous]]} has it too)")
            row[previous] = place
    return row  # as many ids as experts and none twice: all are there


def _parse_places(
    field: _Field, machine: Machine, sizes: np.ndarray, assignment: np.ndarray
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """(fixed bytes [P], activation shares [P])."""
    fixed, shares = [], []
    for place, entry in enumerate(field.array(len(machine.places), len(machine.places))):
        here = assignment == place
        used, budget = int(sizes[here].sum(dtype=object)), machine.budgets[place]
        fields = entry.object("activation_share", "budget_bytes", "expert_bytes", "experts", "fixed_bytes", "name")
        fields["name"].exactly(machine.places[place])
        fields["budget_bytes"].exactly(budget)
        fields["experts"].exactly(int(here.sum()))
        fields["expert_bytes"].exactly(used)
        fixed.append(fields["fixed_bytes"].integer(0))
        if fixed[-1] + used > budget:
            raise fields["fixed_bytes"].wrong(f"at most {budget - used} B beside {used} B of experts")
        shares.append(fields["activation_share"].number(0, 1))
    if abs(math.fsum(shares) - 1) > 1e-9:
        raise field.wrong("activation shares that add up to 1")
    return tuple(fixed), tuple(shares)


def _parse_objective(field: _Field) -> tuple[float, float | None, float]:
    """(value, greedy, bound) in seconds per token."""
    fields = field.object("bound", "gap", "greedy", "name", "value")
    fields["name"].exactly(OBJECTIVE)
    value = fields["value"].number(5e-324)
    bound = fields["bound"].number(0, value)
    gap = (value - bound) / value
    if fields["gap"].number(0, 1) != gap:
        raise fields["gap"].wrong(f"(value - bound) / value = {gap!r}")
    greedy = None if fields["greedy"].value is None else fields["greedy"].number(value)
    return value, greedy, bound


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError(f"a key occurs twice among {[key for key, _ in pairs][:12]}")
    return value


def _no_constants(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")

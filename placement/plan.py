"""plan.json: which expert lies where, how good that is, and how good it could be. Spec: docs/plan.md."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import PlanError
from ..files import json_bytes, write_atomic
from .aim import Aim
from .fields import DIGEST, Field, Kind, parse, read_bytes, shortened
from .limits import MAX_RULE, MAX_RULES, Limits
from .machine import MAX_NS, MODES, PINNING, Cpu, Gpu, Machine
from .traffic import MAX_EXPERTS, MAX_LAYERS

KIND = Kind("plan", "moefit.plan", 2, 64 << 20, "make the plan again with this version of moefit")
KEYS = (
    *("experts_per_layer", "inputs", "layers", "limits", "machine"),
    *("mode", "objective", "places", "solver", "traffic"),
)
INPUT_NAME = "[A-Za-z0-9_./-]{1,200}"
MAX_SOURCES, MAX_NAME, WEIGHT = 1000, 1000, math.nextafter(1e30, 0)
MAX_SIZE = 2**62  # of an expert: what its pinned memory is rounded up to still fits int64
MAX_CELLS = 2**26  # layers x experts x places: `holds` takes as many bytes


@dataclass(frozen=True, eq=False)
class Plan:
    """A placement. P places in the order of `machine.places` (gpu0, ..., host), L layers, E experts a layer.

    layers: layer numbers [L]. card_sizes, host_sizes: int64 [L, E], bytes that an expert takes on a card (in mode "tp":
    its slice, on each card) and whole, as the host stores it before its allocator rounds up. holds: bool [L, E, P], the
    places that hold an expert: the host alone, or one card or more. fixed: bytes of other tensors on each place [P].
    shares: share of expert activations per place [P], of an expert on several cards the same on each.
    value, greedy, bound: of `aim`, for this plan, for frequency-greedy (None where it does not fit or breaks a limit)
    and the proven lower bound. tokens, top_k: of the traffic planned for.
    solver: (name, version). steps: what was tried, in order, with what came of it; plan_from and bound_from:
    the steps that gave the plan and the bound. inputs: name -> sha256.
    """

    machine: Machine
    aim: Aim
    limits: Limits
    layers: tuple[int, ...]
    card_sizes: np.ndarray
    host_sizes: np.ndarray
    holds: np.ndarray
    fixed: tuple[int, ...]
    shares: tuple[float, ...]
    value: float
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
    def assignment(self) -> np.ndarray:
        """int64 [L, E]: the first place that holds each expert; the last place is the host."""
        return self.holds.argmax(axis=2)

    @property
    def gap(self) -> float:
        """How much of `value` a perfect plan could still save at most: (value - bound) / value; 0 where nothing."""
        return (self.value - self.bound) / self.value if self.value else 0.0

    @property
    def used(self) -> tuple[int, ...]:
        """Expert bytes on each place, exactly."""
        return used_bytes(self.machine, self.card_sizes, self.host_sizes, self.holds)

    def experts_on(self, layer: int, place: str) -> list[int]:
        """Expert ids of a layer (by its number) on a place (by its name), ascending."""
        row = self.holds[self.layers.index(layer), :, self.machine.places.index(place)]
        return [int(expert) for expert in np.flatnonzero(row)]

    def to_bytes(self) -> bytes:
        """Canonical bytes of plan.json."""
        machine, names, used = self.machine, self.machine.places, self.used
        places = [
            {
                "activation_share": self.shares[p],
                "budget_bytes": machine.budgets[p],
                "expert_bytes": used[p],
                "experts": int(self.holds[:, :, p].sum()),
                "fixed_bytes": self.fixed[p],
                "name": name,
            }
            for p, name in enumerate(names)
        ]
        layers = [
            {
                "card_bytes": int(card[0]) if (card == card[0]).all() else card.tolist(),
                "experts": {name: self.experts_on(layer, name) for name in names},
                "host_bytes": int(host[0]) if (host == host[0]).all() else host.tolist(),
                "layer": layer,
            }
            for layer, card, host in zip(self.layers, self.card_sizes, self.host_sizes, strict=True)
        ]
        cpu = machine.cpu and {
            "bandwidth": machine.cpu.bandwidth,
            "fixed_ns": machine.cpu.fixed_ns,
            "token_ns": machine.cpu.token_ns,
        }
        return json_bytes(
            {
                "experts_per_layer": self.card_sizes.shape[1],
                "format": KIND.format,
                "inputs": dict(self.inputs),
                "layers": layers,
                "limits": {
                    "forbidden": ["".join(rule.split()) for rule in self.limits.forbidden],
                    "max_per_layer": self.limits.most,
                    "min_per_layer": self.limits.least,
                    "pins": ["".join(rule.split()) for rule in self.limits.pins],
                },
                "machine": {
                    "copy_engine": machine.copy_engine,
                    "cpu": cpu,
                    "gpus": [
                        {
                            "bandwidth": gpu.bandwidth,
                            "bytes": gpu.bytes,
                            "reserve_bytes": gpu.reserve,
                            "token_ns": gpu.token_ns,
                        }
                        for gpu in machine.gpus
                    ],
                    "host_bytes": machine.host_bytes,
                    "pinning": machine.pinning,
                    "shared_root": machine.shared_root,
                    "zero_copy": machine.zero_copy,
                },
                "mode": machine.mode,
                "objective": {
                    "bound": self.bound,
                    "gap": self.gap,
                    "greedy": self.greedy,
                    "name": str(self.aim),
                    "sources": dict(self.aim.sources),
                    "unit": self.aim.unit,
                    "value": self.value,
                    "worst_case": self.aim.worst,
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
                "version": KIND.version,
            }
        )

    def save(self, path: Path) -> None:
        """Write plan.json atomically."""
        write_atomic(path, self.to_bytes())

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read and validate plan.json. PlanError names the file and the field."""
        return cls.from_bytes(read_bytes(path, KIND), str(path))

    @classmethod
    def from_bytes(cls, content: bytes, where: str = "plan.json") -> Plan:
        """Plan from the file's bytes; see `load`. where: the file's name for messages."""
        return _parse(parse(content, where, KIND, *KEYS))


def used_bytes(machine: Machine, card_sizes: np.ndarray, host_sizes: np.ndarray, holds: np.ndarray) -> tuple[int, ...]:
    """Expert bytes on each place, exactly, as the host's allocator rounds them. Arguments as in `Plan`."""
    used = []
    for place, name in enumerate(machine.places):
        on_host = name == "host"
        sizes, counts = np.unique((host_sizes if on_host else card_sizes)[holds[:, :, place]], return_counts=True)
        stored = [machine.pinned(size) if on_host else size for size in sizes.tolist()]
        used.append(sum(size * count for size, count in zip(stored, counts.tolist(), strict=True)))
    return tuple(used)


def _parse(top: dict[str, Field]) -> Plan:
    machine = _parse_machine(top["machine"], top["mode"])
    experts = top["experts_per_layer"].integer(1, MAX_EXPERTS)
    layers, card_sizes, host_sizes, holds = _parse_layers(top["layers"], experts, machine)
    fixed, shares = _parse_places(top["places"], machine, used_bytes(machine, card_sizes, host_sizes, holds), holds)
    aim, value, greedy, bound = _parse_objective(top["objective"])
    traffic = top["traffic"].object("tokens", "top_k")
    solver = top["solver"].object("bound_from", "name", "plan_from", "steps", "version")
    return Plan(
        machine=machine,
        aim=aim,
        limits=_parse_limits(top["limits"], machine, layers, holds),
        layers=layers,
        card_sizes=card_sizes,
        host_sizes=host_sizes,
        holds=holds,
        fixed=fixed,
        shares=shares,
        value=value,
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


def _parse_inputs(field: Field) -> dict[str, str]:
    named = isinstance(field.value, dict) and all(re.fullmatch(INPUT_NAME, name) for name in field.value)
    if not named or len(field.value) > 64 or "traffic" not in field.value:
        raise field.wrong(f"an object of up to 64 digests, traffic among them, with names like {INPUT_NAME}")
    return {name: field.child(name).text(DIGEST) for name in field.value}


def _parse_machine(field: Field, mode: Field) -> Machine:
    entry = field.object(
        *("copy_engine", "cpu", "gpus", "host_bytes", "pinning", "shared_root", "zero_copy"),
    )
    gpus = []
    for card in entry["gpus"].array(1, 64):
        fields = card.object("bandwidth", "bytes", "reserve_bytes", "token_ns")
        size = fields["bytes"].integer(0)
        reserve, token = fields["reserve_bytes"].integer(0, size), fields["token_ns"].integer(0, MAX_NS)
        gpus.append(Gpu(size, reserve, fields["bandwidth"].integer(1), token))
    cpu = None
    if entry["cpu"].value is not None:
        fields = entry["cpu"].object("bandwidth", "fixed_ns", "token_ns")
        times = (fields[name].integer(0, MAX_NS) for name in ("fixed_ns", "token_ns"))
        cpu = Cpu(fields["bandwidth"].integer(1), *times)
    return Machine(
        tuple(gpus),
        entry["host_bytes"].integer(0),
        mode.one_of(MODES),
        entry["zero_copy"].integer(1),
        entry["copy_engine"].integer(1),
        entry["shared_root"].boolean(),
        cpu,
        entry["pinning"].one_of(PINNING),
    )


def _parse_limits(field: Field, machine: Machine, layers: tuple[int, ...], holds: np.ndarray) -> Limits:
    """Limits that the plan keeps. holds: bool [L, E, P]."""
    count, experts, _ = holds.shape
    fields = field.object("forbidden", "max_per_layer", "min_per_layer", "pins")
    least, most = (
        None if fields[name].value is None else fields[name].integer(0, experts)
        for name in ("min_per_layer", "max_per_layer")
    )
    pins, forbidden = (
        tuple(rule.text(rf"\S{{1,{MAX_RULE}}}") for rule in fields[name].array(0, MAX_RULES))
        for name in ("pins", "forbidden")
    )
    limits = Limits(pins, forbidden, least, most)
    try:
        allowed = limits.allowed(layers, experts, machine.places)
        limits.per_layer(count, experts)
    except PlanError as error:
        raise field.wrong("limits of this machine and model", f"{error.what}: {error.where} {error.found}") from error
    on_cards = holds[:, :, :-1].any(axis=2).sum(axis=1)  # [L]
    broken = allowed is not None and bool((holds & ~allowed).any())
    if broken or on_cards.min() < (least or 0) or on_cards.max() > (experts if most is None else most):
        raise field.wrong("limits that this plan keeps", "an expert that may not be where it is, or too many or few")
    return limits


def _parse_layers(
    field: Field, experts: int, machine: Machine
) -> tuple[tuple[int, ...], np.ndarray, np.ndarray, np.ndarray]:
    """(layer numbers [L], card sizes and host sizes int64 [L, E], holds bool [L, E, P])."""
    most = MAX_CELLS // (experts * len(machine.places))
    layers: list[int] = []
    sizes: dict[str, list[np.ndarray]] = {"card_bytes": [], "host_bytes": []}
    holds = []  # row by row, so that memory stays in proportion to the file
    for entry in field.array(1, min(MAX_LAYERS, most)):
        fields = entry.object("card_bytes", "experts", "host_bytes", "layer")
        layers.append(fields["layer"].integer(layers[-1] + 1 if layers else 0))
        holds.append(_parse_experts(fields["experts"], experts, machine))
        for name, rows in sizes.items():
            size = fields[name]
            if isinstance(size.value, list):
                rows.append(
                    np.array([item.integer(1, MAX_SIZE) for item in size.array(experts, experts)], dtype=np.int64)
                )
            else:
                rows.append(np.full(experts, size.integer(1, MAX_SIZE), dtype=np.int64))
    card, host, held = np.stack(sizes["card_bytes"]), np.stack(sizes["host_bytes"]), np.stack(holds)
    for array in (card, host, held):
        array.setflags(write=False)
    return tuple(layers), card, host, held


def _parse_experts(field: Field, experts: int, machine: Machine) -> np.ndarray:
    """bool [E, P] of one layer."""
    lists = field.object(*machine.places)
    holds = np.zeros((experts, len(machine.places)), dtype=bool)
    for place, (name, listed) in enumerate(lists.items()):
        ids: list[int] = []
        for item in listed.array(0, experts):
            ids.append(item.integer(ids[-1] + 1 if ids else 0, experts - 1))  # ascending, so none twice in one list
        elsewhere = np.flatnonzero(holds[ids].any(axis=1))
        if name == "host" and elsewhere.size:
            raise listed.child(int(elsewhere[0])).wrong("each expert on the host or on cards, not on both")
        holds[ids, place] = True
    missing = np.flatnonzero(~holds.any(axis=1))
    if missing.size:
        raise field.wrong(f"each of {experts} experts somewhere (expert {missing[0]} is not)")
    return holds


def _parse_places(
    field: Field, machine: Machine, used: tuple[int, ...], holds: np.ndarray
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """(fixed bytes [P], activation shares [P])."""
    fixed, shares = [], []
    for place, entry in enumerate(field.array(len(machine.places), len(machine.places))):
        here = holds[:, :, place]
        budget = machine.budgets[place]
        fields = entry.object("activation_share", "budget_bytes", "expert_bytes", "experts", "fixed_bytes", "name")
        fields["name"].exactly(machine.places[place])
        fields["budget_bytes"].exactly(budget)
        fields["experts"].exactly(int(here.sum()))
        fields["expert_bytes"].exactly(used[place])
        fixed.append(fields["fixed_bytes"].integer(0))
        if fixed[-1] + used[place] > budget:
            raise fields["fixed_bytes"].wrong(f"at most {budget - used[place]} B beside {used[place]} B of experts")
        shares.append(fields["activation_share"].number(0, 1))
    if abs(math.fsum(shares) - 1) > 1e-9:
        raise field.wrong("activation shares that add up to 1")
    return tuple(fixed), tuple(shares)


def _parse_objective(field: Field) -> tuple[Aim, float, float | None, float]:
    """(aim, value, greedy, bound)."""
    fields = field.object("bound", "gap", "greedy", "name", "sources", "unit", "value", "worst_case")
    weights = fields["sources"]
    if not isinstance(weights.value, dict) or len(weights.value) > MAX_SOURCES:
        raise weights.wrong(f"an object of at most {MAX_SOURCES} sources with their weights")
    sources = []
    for source in weights.value:
        if not 1 <= len(source) <= MAX_NAME or any("\ud800" <= letter <= "\udfff" for letter in source):
            raise weights.wrong(f"names of sources of 1 to {MAX_NAME} characters", shortened(ascii(source)))
        sources.append((source, weights.child(source).number(5e-324, WEIGHT)))
    name, worst = fields["name"].text(".{1,1000}"), fields["worst_case"].boolean()
    try:
        aim = Aim.parse(name, worst, tuple(sources))
    except PlanError as error:
        raise fields["name"].wrong("an objective as moefit plan writes it") from error
    if str(aim) != name:
        raise fields["name"].wrong(f"{aim} for it")
    fields["unit"].exactly(aim.unit)
    value = fields["value"].number(0)
    bound = fields["bound"].number(0, value)
    gap = (value - bound) / value if value else 0.0
    if fields["gap"].number(0, 1) != gap:
        raise fields["gap"].wrong(f"(value - bound) / value = {gap!r}")
    greedy = None if fields["greedy"].value is None else fields["greedy"].number(value)
    return aim, value, greedy, bound

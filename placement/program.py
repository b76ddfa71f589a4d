"""The integer program and its linear relaxation, for scipy's HiGHS. Nothing they return is trusted unchecked.

Variables, each class of interchangeable cards taken as one place of all their room:
x[l, e, c], the share of expert e of layer l on the cards of class c, and on the host what is left;
t[s, l], the slowest place of layer l in scenario s; z, the worst group of scenarios.

    minimise   z
    subject to sum_c x[l, e, c] <= 1
               sum_{l,e} units * x[l, e, c] <= room[c], and the host's likewise        bytes of each place
               sum_e loads[s, l, e, c] * x[l, e, c] / cards of c + waits * x[host] <= t[s, l], the slowest place
               sum_e loads[s, l, e, host] * x[l, e, host] <= t[s, l]                   or the host
               sum_p loads[s, l, e, p] * x[l, e, p] <= t[s, l]                         no expert is in two halves
               sum_{s in g, l} t[s, l] <= z
               least[l] <= sum_{e,c} x[l, e, c] <= most[l]; moved experts, moved bytes

HiGHS works in float64 with an absolute tolerance of 1e-6, and budgets run to 2e11 bytes. So rows are scaled
(a place holds 1000, a layer carries 1, the objective is 1000 or so), an answer is re-checked in whole bytes, and the
bound is evaluated again from the duals in exact integers (`bound.py`).

Stopping is by relative gap and by nodes of the search tree, never by the clock: the same input gives the same
plan on a slow machine.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil, isfinite

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from .bound import Multipliers
from .problem import Problem

OBJECTIVE = 1000.0  # about the scaled objective
RETRIES = 5  # after an answer that overflows a place
TRUST = Fraction(1, 10**6)  # relative error granted to a bound that HiGHS reports
SINGLES = 4  # experts of a layer and scenario for which "no expert is in two halves" is worth a row
WORTH = 0.25  # share of a layer's balanced load from which on it may be


@dataclass
class _Rows:
    """Rows `sum of values * columns <= bound` as they come."""

    columns: list[np.ndarray] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)

    def add(self, columns: np.ndarray, values: np.ndarray, bound: float) -> None:
        self.columns.append(columns)
        self.values.append(values)
        self.bounds.append(bound)

    def matrix(self, width: int) -> sparse.csr_array:
        lengths = [len(columns) for columns in self.columns]
        return sparse.csr_array(
            (np.concatenate(self.values), np.concatenate(self.columns), np.cumsum([0, *lengths])),
            shape=(len(lengths), width),
        )


@dataclass
class Program:
    """The program in arrays. Columns: x in C order of [L, E, C], then t [S, L], then z.

    names: of each row, what its dual is a multiplier of. scale: of each row, its dual's unit in units of load.
    """

    problem: Problem
    classes: list[list[int]]
    cost: np.ndarray
    rows: sparse.csr_array
    bounds: np.ndarray
    upper: np.ndarray  # of each column
    names: list[tuple[str, int, int, int]]
    scale: np.ndarray
    per_cost: float  # load of one unit of the scaled objective


def build(problem: Problem, classes: list[list[int]], replicas: bool = False, about: int | None = None) -> Program:
    """The program of `problem` with each class of cards as one place. replicas: experts may lie on several cards.

    about: cost of a plan that is not far from the best, by which it is scaled; None where none is known.
    """
    layers, experts, _ = problem.sizes.shape
    scenarios, groups = len(problem.groups), sorted(set(problem.groups))
    count = layers * experts * len(classes)
    column = np.arange(count).reshape(layers, experts, len(classes))
    slowest = count + np.arange(scenarios * layers).reshape(scenarios, layers)
    worst = count + scenarios * layers
    cards = np.array([len(members) for members in classes])
    host = problem.host

    # A layer of any scenario carries about 1: its part of a plan, or its experts balanced over all places.
    typical = float(problem.loads.max(axis=3).sum(axis=2).mean()) / (host + 1)
    if about is not None:
        typical = about / (scenarios * layers)
    typical = max(typical, 1.0)
    weight = OBJECTIVE / (scenarios * layers)
    rows, names, scale = _Rows(), list[tuple[str, int, int, int]](), list[float]()

    def add(
        name: tuple[str, int, int, int], columns: np.ndarray, values: np.ndarray, bound: float, unit: float
    ) -> None:
        rows.add(columns, values, bound)
        names.append(name)
        scale.append(unit)

    for number, members in enumerate([*classes, [host]]):
        room = sum(problem.room[place] for place in members)
        unit = _byte_scale(room)
        units = problem.units[:, :, members[0]].ravel() * unit
        if members != [host]:
            add(("bytes", number, 0, 0), column[:, :, number].ravel(), units, room * unit, unit)
        else:  # what is not on a card is on the host
            spread = np.repeat(units, len(classes))
            add(("bytes", number, 0, 0), column.ravel(), -spread, room * unit - float(units.sum()), unit)
    for s in range(scenarios):
        for layer in range(layers):
            loads = problem.loads[s, layer].astype(np.float64) / typical  # [E, P]
            waits = problem.waits[s, layer].astype(np.float64) / typical  # [E]
            t = slowest[s, layer]
            columns = np.append(column[layer].ravel(), t)
            for number, members in enumerate(classes):
                values = np.tile(-waits[:, None], len(classes))  # [E, C]; what is not on a card is on the host
                values[:, number] += loads[:, members[0]] / cards[number]
                add(("place", s, layer, number), columns, np.append(values.ravel(), -1.0), -float(waits.sum()), 1.0)
            on_host = loads[:, host]
            values = np.append(-np.repeat(on_host, len(classes)), -1.0)
            add(("place", s, layer, len(classes)), columns, values, -float(on_host.sum()), 1.0)
            if replicas:
                continue
            least = loads[:, [*(members[0] for members in classes), host]].min(axis=1)
            floor = WORTH * least.sum() / host
            for expert in np.argsort(-least, kind="stable")[:SINGLES]:
                if least[expert] >= floor:
                    values = np.array([*(loads[expert, members[0]] - on_host[expert] for members in classes), -1.0])
                    columns = np.append(column[layer, expert], t)
                    add(("single", s, layer, int(expert)), columns, values, -float(on_host[expert]), 1.0)
    for group in groups:
        columns = np.append(np.concatenate([slowest[s] for s, g in enumerate(problem.groups) if g == group]), worst)
        add(("group", group, 0, 0), columns, np.append(np.ones(len(columns) - 1), -1.0), 0.0, 1.0)
    for layer in range(layers):
        flat = column[layer].ravel()
        if problem.most is not None and problem.most[layer] < experts:
            add(("most", layer, 0, 0), flat, np.ones(len(flat)), float(problem.most[layer]), 1.0)
        if problem.least is not None and problem.least[layer] > 0:
            add(("least", layer, 0, 0), flat, -np.ones(len(flat)), -float(problem.least[layer]), 1.0)
    if len(classes) > 1:
        for flat in column.reshape(-1, len(classes)):
            add(("one", 0, 0, 0), flat, np.ones(len(classes)), 1.0, 1.0)
    if problem.home is not None:
        _limit_moves(problem, classes, column, add)
    upper = np.ones(worst + 1)
    upper[count:] = np.inf
    if problem.allowed is not None:
        for number, members in enumerate(classes):
            upper[column[:, :, number][~problem.allowed[:, :, members[0]]]] = 0
        for layer, expert in np.argwhere(~problem.allowed[:, :, host]):
            add(("one", 0, 0, 0), column[layer, expert], -np.ones(len(classes)), -1.0, 1.0)
    cost = np.zeros(worst + 1)
    cost[worst] = weight
    matrix = rows.matrix(worst + 1)
    return Program(
        problem, classes, cost, matrix, np.array(rows.bounds), upper, names, np.array(scale), typical / weight
    )


def _limit_moves(problem: Problem, classes: list[list[int]], column: np.ndarray, add: object) -> None:
    """Rows of moved experts and moved bytes: of an expert at home on a card, one less what stays; else what comes."""
    assert problem.home is not None
    home = np.full(problem.home.shape, len(classes))
    for number, members in enumerate(classes):
        home[np.isin(problem.home, members)] = number
    here = home[:, :, None] == np.arange(len(classes))  # [L, E, C]
    at_host = home == len(classes)
    sizes = problem.sizes.astype(np.float64)
    into = np.stack([sizes[:, :, members[0]] for members in classes], axis=2)  # bytes moved onto a card of the class
    out = np.where(at_host, 0.0, sizes[:, :, problem.host])[..., None]  # onto the host
    # sum over places other than home of weight * x; the host's x is 1 - sum of the others.
    for name, limit, weights, leave, total in (
        ("move", problem.max_moves, ~here, np.where(at_host, 0.0, 1.0)[..., None], float((~at_host).sum())),
        ("move_bytes", problem.max_bytes, np.where(here, 0.0, into), out, float(out.sum())),
    ):
        if limit is not None:
            unit = _byte_scale(limit) if name == "move_bytes" else 1.0
            values = (weights.astype(np.float64) - leave).ravel() * unit
            add((name, 0, 0, 0), column.ravel(), values, (limit - total) * unit, unit)  # type: ignore[operator]


def _byte_scale(room: int) -> float:
    """Of a byte row: one unit should exceed the tolerance, yet rounding x = 0.999999 stay within it."""
    return float(np.clip(1e-5 * room, 1, 1000)) / max(room, 1)


def relax(program: Program) -> tuple[Multipliers, np.ndarray] | None:
    """Linear relaxation: (multipliers for `lagrangian_bound`, shares [L, E, C + 1] with the host's last)."""
    result = linprog(
        program.cost,
        A_ub=program.rows,
        b_ub=program.bounds,
        bounds=np.stack([np.zeros_like(program.upper), program.upper], axis=1),
        method="highs-ds",
    )
    if result.x is None:
        return None
    problem, classes = program.problem, program.classes
    layers, experts, _ = problem.sizes.shape
    duals = np.maximum(-result.ineqlin.marginals, 0) * program.scale
    weight = program.cost[-1]  # of z, which the groups' duals share
    scenarios = len(problem.groups)
    unit = program.per_cost  # duals of rows in loads are per unit of scaled objective
    places = np.zeros((scenarios, layers, len(classes) + 1))
    singles = np.zeros((scenarios, layers, experts))
    byte, most, least = np.zeros(len(classes) + 1), np.zeros(layers), np.zeros(layers)
    groups, move, move_bytes = dict.fromkeys(sorted(set(problem.groups)), 0.0), 0.0, 0.0
    for (name, one, two, three), dual in zip(program.names, duals, strict=True):
        if name == "place":
            places[one, two, three] = dual / weight
        elif name == "single":
            singles[one, two, three] = dual / weight
        elif name == "bytes":
            byte[one] = dual * unit
        elif name == "group":
            groups[one] = dual / weight
        elif name == "most":
            most[one] = dual * unit
        elif name == "least":
            least[one] = dual * unit
        elif name == "move":
            move = dual * unit
        elif name == "move_bytes":
            move_bytes = dual * unit
    share = result.x[: layers * experts * len(classes)].reshape(layers, experts, len(classes))
    shares = np.concatenate([share, 1 - share.sum(axis=2, keepdims=True)], axis=2)
    return Multipliers(groups, places, singles, byte, most, least, move, move_bytes), shares


def margins(problem: Problem, multipliers: Multipliers) -> np.ndarray:
    """float [L, E]: by how much an expert's cheapest place undercuts its next one at these prices, classes of cards
    taken as one place. 0 is undecided."""
    prices = []
    for number, members in enumerate([*problem.classes, [problem.host]]):
        place = members[0]
        weight = multipliers.places[:, :, number, None] / len(members) + multipliers.singles  # [S, L, E]
        here = (weight * problem.loads[..., place]).sum(axis=0) + multipliers.bytes[number] * problem.units[..., place]
        if place != problem.host:
            here = here + (multipliers.most - multipliers.least)[:, None]
        else:
            here = here + (multipliers.places[:, :, :-1].sum(axis=2)[..., None] * problem.waits).sum(axis=0)
        if problem.home is not None:
            moved = ~np.isin(problem.home, members)
            here = here + moved * (multipliers.move + multipliers.move_bytes * problem.sizes[..., place])
        prices.append(here)
    ranked = np.sort(np.stack(prices, axis=2), axis=2)
    return ranked[..., 1] - ranked[..., 0]


def solve_program(
    problem: Problem, gap: float, nodes: int, keep: np.ndarray | None = None, about: int | None = None
) -> tuple[int, np.ndarray | None]:
    """Solve the program with every card by itself until relative `gap` or `nodes`: (lower bound, assignment or None).

    keep: int64 [L, E], the place of each expert that is not to be decided, -1 for the others; the bound then holds for
    such plans only. about: see `build`. The assignment is feasible to the byte.
    """
    classes = [[card] for card in range(problem.host)]
    layers, experts, _ = problem.sizes.shape
    count = layers * experts * len(classes)
    trial, bound = problem, 0
    for attempt in range(RETRIES):
        program = build(trial, classes, about=about)
        lower, upper = np.zeros(len(program.upper)), program.upper.copy()
        low, high = (side[:count].reshape(layers, experts, len(classes)) for side in (lower, upper))  # views
        if keep is None:
            _break_symmetry(problem, high)
        else:
            fixed = keep >= 0
            on = keep[..., None] == np.arange(len(classes))
            low[fixed], high[fixed] = on[fixed], on[fixed]
        with quiet():
            result = milp(
                program.cost,
                integrality=(np.arange(len(program.upper)) < count).astype(int),
                bounds=Bounds(lower, upper),
                constraints=[LinearConstraint(program.rows, ub=program.bounds)],
                options={"mip_rel_gap": gap, "node_limit": nodes},
            )
        if attempt == 0 and result.mip_dual_bound is not None and isfinite(result.mip_dual_bound):
            bound = max(0, ceil(Fraction(result.mip_dual_bound) * Fraction(program.per_cost) * (1 - TRUST)))
        if result.x is None:
            break
        share = result.x[:count].reshape(layers, experts, len(classes))
        shares = np.concatenate([share, 1 - share.sum(axis=2, keepdims=True)], axis=2)
        assignment = np.argmax(shares, axis=2)
        if problem.feasible(assignment):
            return bound, assignment
        over = [max(0, used - free) for used, free in zip(problem.used(assignment), problem.free, strict=True)]
        if not any(over):
            break
        trial = replace(trial, free=tuple(free - more for free, more in zip(trial.free, over, strict=True)))
    return bound, None


def _break_symmetry(problem: Problem, allowed: np.ndarray) -> None:
    """Of cards that no expert can tell apart, the busiest expert may use only the first."""
    layer, expert = divmod(int(np.argmax(problem.busy)), problem.busy.shape[1])
    for members in problem.classes:
        allowed[layer, expert, members[1:]] = 0


_stdout = threading.Lock()


@contextmanager
def quiet() -> Iterator[None]:
    """Keep C's stdout silent.

    HiGHS 1.12 has a stray printf in transformNewIntegerFeasibleSolution that no option silences and that
    would corrupt `--json`.
    """
    libc = ctypes.CDLL(None)
    with _stdout:
        libc.fflush(None)
        try:
            saved = os.dup(1)
        except OSError:  # stdout is closed: nothing to protect
            yield
            return
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        try:
            yield
        finally:
            libc.fflush(None)  # C's buffer still holds what was printed
            os.dup2(saved, 1)
            os.close(nowhere)
            os.close(saved)

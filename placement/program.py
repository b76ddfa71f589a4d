"""The integer program and its linear relaxation, for scipy's HiGHS. Nothing they return is trusted unchecked.

Variables: x[l, e, p] in {0, 1}, expert e of layer l lies on place p; t[l], the slowest card of layer l.

    minimise   sum_l card_price * t[l] + sum_{l,e} host_price * work[l, e] * x[l, e, host]
    subject to sum_p x[l, e, p] = 1                                  each expert on one place
               sum_{l,e} units[l, e] * x[l, e, p] <= room[p]         bytes of each place
               sum_e work[l, e] * x[l, e, g] <= t[l]                 each card g of each layer

HiGHS works in float64 with an absolute tolerance of 1e-6, and budgets run to 2e11 bytes. So rows are scaled
(a place holds 1000, a layer carries 1, the objective is about 1000 or more), an answer is re-checked in whole
bytes, and a place that overflowed is made smaller and the program solved again.

Stopping is by relative gap and by nodes of the search tree, never by the clock: the same input gives the same
plan on a slow machine.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, isfinite

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from .bound import SCALE, integer_multipliers, lagrangian_bound
from .problem import Problem

OBJECTIVE = 1000.0  # scaled objective of a perfectly balanced plan that never reads the host
RETRIES = 5  # after an answer that overflows a place
TRUST = Fraction(1, 10**6)  # relative error granted to a bound that HiGHS reports


@dataclass(frozen=True)
class Model:
    """The program in arrays. Columns: x in C order of [L, E, P], then t [L]."""

    cost: np.ndarray
    one_place: sparse.csr_array  # [L * E, columns], = 1
    limits: sparse.csr_array  # [P + L * N, columns], <= bounds
    bounds: np.ndarray
    upper: np.ndarray  # of each column
    per_cost: float  # Problem.cost of one unit of the scaled objective


def build(problem: Problem, room: list[int]) -> Model:
    """The program of `problem` with `room` units on each place."""
    layers, experts = problem.sizes.shape
    places, cards = problem.host + 1, problem.host
    count = layers * experts * places
    card_price, host_price = problem.prices
    layer_work = problem.work.astype(np.float64).sum() / layers
    work = problem.work.astype(np.float64) / layer_work  # [L, E], a layer carries about 1
    column = np.arange(count).reshape(layers, experts, places)

    factor = OBJECTIVE * cards / layers  # of the scaled cost of one t
    cost = np.zeros(count + layers)
    cost[column[:, :, -1].ravel()] = factor * (host_price / card_price) * work.ravel()
    cost[count:] = factor
    per_cost = card_price * layer_work / factor

    one_place = sparse.csr_array(
        (np.ones(count), column.ravel(), np.arange(0, count + 1, places)),
        shape=(layers * experts, count + layers),
    )
    rows, columns, values, bounds = [], [], [], []  # of the limits, in pieces
    for place in range(places):
        scale = _byte_scale(room[place])
        rows.append(np.full(layers * experts, place))
        columns.append(column[:, :, place].ravel())
        values.append(problem.units.ravel() * scale)
        bounds.append(room[place] * scale)
    for card in range(cards):
        row = places + card * layers + np.arange(layers)
        rows += [np.repeat(row, experts), row]
        columns += [column[:, :, card].ravel(), count + np.arange(layers)]
        values += [work.ravel(), np.full(layers, -1.0)]
    limits = sparse.csr_array(
        (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))),
        shape=(places + cards * layers, count + layers),
    )
    upper = np.concatenate([np.ones(count), np.full(layers, np.inf)])
    return Model(cost, one_place, limits, np.concatenate([bounds, np.zeros(cards * layers)]), upper, per_cost)


def _byte_scale(room: int) -> float:
    """Of a byte row: one unit should exceed the tolerance, yet rounding x = 0.999999 stay within it."""
    return float(np.clip(1e-5 * room, 1, 1000)) / max(room, 1)


def relax(problem: Problem) -> tuple[int, np.ndarray] | None:
    """Linear relaxation: (exact lower bound on `Problem.cost` from its duals, fractions [L, E, P])."""
    model = build(problem, list(problem.room))
    layers, places = len(problem.sizes), problem.host + 1
    result = linprog(
        model.cost,
        A_ub=model.limits,
        b_ub=model.bounds,
        A_eq=model.one_place,
        b_eq=np.ones(model.one_place.shape[0]),
        bounds=np.stack([np.zeros_like(model.upper), model.upper], axis=1),
        method="highs-ds",
    )
    if result.x is None:
        return None
    duals = -result.ineqlin.marginals
    weights = duals[places:].reshape(problem.host, layers).T / model.cost[-1]  # [L, N]
    prices = duals[:places] * [_byte_scale(room) for room in problem.room]
    weights, byte_prices = integer_multipliers(weights, prices, model.per_cost)
    bound = lagrangian_bound(problem, weights, byte_prices, SCALE)
    return bound, result.x[: problem.sizes.size * places].reshape(*problem.sizes.shape, places)


def solve_program(
    problem: Problem, gap: float, nodes: int, on_host: np.ndarray | None = None
) -> tuple[int, np.ndarray | None]:
    """Solve the program until relative `gap` or `nodes`: (lower bound, assignment or None if none was found).

    on_host: bool [L, E] fixes which experts lie on the host, so that only the split over the cards is sought;
    the bound then holds for such plans only. The assignment is feasible to the byte.
    """
    layers, experts = problem.sizes.shape
    places, count = problem.host + 1, problem.sizes.size * (problem.host + 1)
    room, bound = list(problem.room), 0
    for attempt in range(RETRIES):
        model = build(problem, room)
        upper = model.upper.copy()
        allowed = upper[:count].reshape(layers, experts, places)  # a view
        _break_symmetry(problem, allowed)
        if on_host is not None:
            allowed[:, :, :-1][on_host] = 0
            allowed[:, :, -1][~on_host] = 0
        with _quiet():
            result = milp(
                model.cost,
                integrality=np.concatenate([np.ones(count), np.zeros(layers)]),
                bounds=Bounds(0, upper),
                constraints=[
                    LinearConstraint(model.one_place, 1, 1),
                    LinearConstraint(model.limits, ub=model.bounds),
                ],
                options={"mip_rel_gap": gap, "node_limit": nodes},
            )
        if attempt == 0 and result.mip_dual_bound is not None and isfinite(result.mip_dual_bound):
            value = Fraction(result.mip_dual_bound) * Fraction(model.per_cost)
            bound = max(0, ceil(value * (1 - TRUST)))
        if result.x is None:
            break
        assignment = np.argmax(result.x[:count].reshape(layers, experts, places), axis=2)
        if problem.feasible(assignment):
            return bound, assignment
        used = [int(problem.units[assignment == place].sum()) for place in range(places)]
        room = [left - max(0, taken - limit) for left, taken, limit in zip(room, used, problem.room, strict=True)]
    return bound, None


def _break_symmetry(problem: Problem, allowed: np.ndarray) -> None:
    """Of cards with the same room, the busiest expert may use only the first: their names do not matter."""
    layer, expert = divmod(int(np.argmax(problem.work)), problem.sizes.shape[1])
    cards = problem.room[:-1]
    for card, room in enumerate(cards):
        if room in cards[:card]:
            allowed[layer, expert, card] = 0


_stdout = threading.Lock()


@contextmanager
def _quiet() -> Iterator[None]:
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

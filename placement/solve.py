"""From traffic, sizes and a machine to a plan with a proven gap. Cheap means first, integer programs last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil

import numpy as np
import scipy

from .. import __version__
from ..errors import PlanError
from ..files import sha256_bytes
from .bound import pooled_bound
from .machine import Gpu, Machine
from .plan import Plan
from .problem import Problem, check_fits, packing_error
from .program import relax, solve_program
from .search import first_fit, greedy, improve, round_fractions
from .traffic import TrafficTable

GAP = 1e-4
# Above these sizes, in columns, a step is left out. HiGHS needs 98 s of CPU for the first search node of 40 x
# 384 experts on 3 places (46,080 columns), where no node limit can stop it, and 10 s for that of 12 x 80. The
# local search has more experts to balance with there and does better (benchmarks/placement.py).
RELAX_COLUMNS = 100_000
PROGRAM_COLUMNS = 1_500
NODES = 300  # of each program's search tree


def solve(
    sizes: np.ndarray,
    traffic: TrafficTable,
    machine: Machine,
    fixed: tuple[int, ...] | None = None,
    inputs: Mapping[str, str] | None = None,
    target: float = GAP,
) -> Plan:
    """Best placement found, with a lower bound that no placement can beat.

    sizes: int64 [L, E], exact bytes of each expert, rows as in `traffic`. fixed: bytes already taken on each
    place, host last (default none). inputs: sha256 of whatever sizes and traffic came from, kept in the plan;
    "traffic" (the table's own digest) is added. target: relative gap at which to stop.
    The same input gives the same bytes of plan.json: no clock, no thread count and no randomness enters.
    PlanError: the experts do not fit, with the missing bytes and the mend.
    """
    sizes = np.array(sizes)  # a copy: the plan must not change
    sizes.setflags(write=False)
    problem = Problem(sizes, traffic, machine, (0,) * len(machine.places) if fixed is None else fixed)
    check_fits(problem)
    search = _Search(problem, target)
    start = search.run()
    if search.best is None:
        raise packing_error(problem)
    assignment = _canonical(problem, search.best)
    if not problem.feasible(assignment) or problem.cost(assignment) != search.cost:
        raise PlanError("the solver's plan failed its re-check", mend="report this as a bug, with the plan's inputs")
    return Plan(
        machine=machine,
        layers=traffic.layers,
        sizes=sizes,
        assignment=assignment,
        fixed=problem.fixed,
        shares=problem.shares(assignment),
        seconds=float(problem.seconds(search.cost)),
        greedy=None if start is None else float(problem.seconds(start)),
        bound=float(problem.seconds(search.bound)),
        tokens=traffic.tokens,
        top_k=traffic.top_k,
        solver=search.solver,
        steps=tuple(search.steps),
        plan_from=search.plan_from,
        bound_from=search.bound_from,
        inputs={**(inputs or {}), "traffic": sha256_bytes(traffic.to_bytes())},
    )


@dataclass
class _Search:
    """The best plan and the best bound so far, and how they came about."""

    problem: Problem
    target: float
    best: np.ndarray | None = None
    cost: int = 0
    plan_from: str = ""
    bounds: dict[str, int] = field(default_factory=dict)
    steps: list[str] = field(default_factory=list)

    def run(self) -> int | None:
        """Go down the ladder until the gap is closed. Returns greedy's cost, None where it does not fit."""
        problem = self.problem
        self.note("pooled bound", bound=pooled_bound(problem))
        plain = greedy(problem)
        start = None if plain is None else problem.cost(plain)
        self.note("greedy", plain)
        self.offer("local search", first_fit(problem) if plain is None else plain)
        columns = problem.sizes.size * (problem.host + 1)
        if self.closed and columns > PROGRAM_COLUMNS:
            return start
        if not self.closed and self.small("linear relaxation", columns, RELAX_COLUMNS):
            relaxed = relax(problem)
            if relaxed is not None:
                bound, fractions = relaxed
                self.note("linear relaxation", bound=bound)
                self.offer("rounded relaxation", round_fractions(problem, fractions))
        if self.small("integer program", columns, PROGRAM_COLUMNS):
            if not self.closed:
                self.pool_then_split()
            # Even within the target: a second opinion costs little at this size.
            if self.best is None or self.cost > self.bound:
                bound, assignment = solve_program(problem, self.target / 2, NODES)
                self.note("integer program", bound=bound)
                self.offer("integer program", assignment)
        return start

    def pool_then_split(self) -> None:
        """First which experts go to the host, with all cards as one big fast card; then how the cards share.

        The first program has no symmetric cards to search through, and its bound holds for the whole problem:
        cards that could share every byte and every load are never slower than real ones.
        """
        problem, cards = self.problem, self.problem.host
        machine = problem.machine
        merged = replace(
            machine,
            gpus=(Gpu(sum(problem.room[:-1]) * problem.unit),),
            host_bytes=problem.free[-1],
            gpu_bandwidth=machine.gpu_bandwidth * cards,
        )
        pooled = Problem(problem.sizes, problem.traffic, merged, (0, 0))
        bound, assignment = solve_program(pooled, self.target / 10, NODES)
        self.note("pooled program", bound=ceil(pooled.seconds(bound) / problem.seconds(1)))
        if assignment is not None and not self.closed and cards > 1:
            _, split = solve_program(problem, self.target / 2, NODES, on_host=assignment == pooled.host)
            self.offer("split program", split)

    @property
    def solver(self) -> tuple[str, str]:
        """Name and version of the solver that was called; ours where bound and search closed the gap alone."""
        if self.bounds.keys() & {"linear relaxation", "pooled program", "integer program"}:
            return "scipy-highs", scipy.__version__
        return "moefit", __version__

    @property
    def bound_from(self) -> str:
        """The step with the best bound. One above a plan that exists is a solver's mistake: not used."""
        usable = {step: bound for step, bound in self.bounds.items() if self.best is None or bound <= self.cost}
        return max(usable, key=lambda step: usable[step])

    @property
    def bound(self) -> int:
        return self.bounds[self.bound_from]

    @property
    def closed(self) -> bool:
        return self.best is not None and self.cost - self.bound <= self.target * self.cost

    def small(self, step: str, columns: int, limit: int) -> bool:
        if columns > limit:
            self.steps.append(f"{step}: left out, {columns} columns are more than {limit}")
        return columns <= limit

    def offer(self, step: str, assignment: np.ndarray | None) -> None:
        """Improve a plan and keep it if it is the best so far."""
        if assignment is not None:
            enough = int(self.bound * (1 + self.target))
            assignment = improve(self.problem, assignment, enough)
        self.note(step, assignment)

    def note(self, step: str, assignment: np.ndarray | None = None, bound: int | None = None) -> None:
        """Write down what a step found, and keep it if it is the best so far."""
        seconds = self.problem.seconds
        if bound is not None:
            self.steps.append(f"{step}: bound {float(seconds(bound)):.6g} s")
            self.bounds[step] = bound
        elif assignment is None or not self.problem.feasible(assignment):
            self.steps.append(f"{step}: no plan")
        else:
            cost = self.problem.cost(assignment)
            self.steps.append(f"{step}: plan {float(seconds(cost)):.6g} s")
            if self.best is None or cost < self.cost:
                self.best, self.cost, self.plan_from = assignment, cost, step


def _canonical(problem: Problem, assignment: np.ndarray) -> np.ndarray:
    """Cards with the same free bytes are interchangeable: number them by the first expert they hold."""
    flat = assignment.ravel()
    first = [int(np.argmax(flat == p)) if (flat == p).any() else flat.size for p in range(problem.host)]
    renamed = np.arange(problem.host + 1)
    for free in set(problem.free[:-1]):
        alike = [card for card in range(problem.host) if problem.free[card] == free]
        for name, card in zip(alike, sorted(alike, key=lambda card: (first[card], card)), strict=True):
            renamed[card] = name
    return renamed[assignment]

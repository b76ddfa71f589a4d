"""From traffic, sizes and a machine to a plan with a proven gap. Cheap means first, integer programs last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import scipy

from .. import __version__
from ..errors import PlanError
from ..files import sha256_bytes
from .aim import DECODE, Aim
from .bound import Multipliers, lagrangian_bound
from .decompose import decompose, fits
from .limits import NO_LIMITS, Limits
from .machine import Machine
from .objective import make_problem
from .plan import Plan
from .problem import Problem, check_fits, check_limits_fit, packing_error
from .program import build, margins, relax, solve_program
from .replicas import replicate, spread
from .search import INTEGRAL, first_fit, greedy, improve, round_moves, round_shares
from .traffic import TrafficTable

GAP = 3e-4  # below the noise of any traffic; the relaxation's rounding ends there in seconds
# In columns. HiGHS needs 98 s of CPU for the first search node of 40 x 384 experts on 3 places, where no node limit can
# stop it, and 10 s for that of 12 x 80: above this only the experts nearest to the decision are left to it.
PROGRAM_COLUMNS = 1_500
ROUNDS = 3  # of the relaxation, each for what the plan so far has left worth looking at
NODES = 300  # of each program's search tree
LAYERS_TARGET = 5e-4  # a round of programs by layer takes seconds: not for less than this


def solve(
    sizes: np.ndarray,
    traffic: TrafficTable,
    machine: Machine,
    fixed: tuple[int, ...] | None = None,
    inputs: Mapping[str, str] | None = None,
    *,
    host_sizes: np.ndarray | None = None,
    aim: Aim = DECODE,
    limits: Limits = NO_LIMITS,
    replicas: bool = False,
    target: float = GAP,
) -> Plan:
    """Best placement found, with a lower bound that no placement can beat.

    sizes: int64 [L, E], exact bytes of each expert on a card (in mode "tp": of its slice on each card), rows as in
    `traffic`. host_sizes: of the whole expert, where that is not the same. fixed: bytes already taken on each
    place, host last (default none). inputs: sha256 of whatever sizes and traffic came from, kept in the plan;
    "traffic" (the table's own digest) is added. replicas: experts may lie on several
    cards, which then share its load. target: relative gap at which to stop.
    The same input gives the same bytes of plan.json: no clock, no thread count and no randomness enters.
    PlanError: the experts do not fit, with the missing bytes and the mend.
    """
    fixed = (0,) * len(machine.places) if fixed is None else fixed
    whole = sizes if host_sizes is None else host_sizes
    problem, assumed = make_problem(machine, traffic, sizes, whole, fixed, aim, limits)
    check_fits(problem, fixed, machine.budgets)
    check_limits_fit(problem)
    search = Search(problem, target, copies=replicas and machine.mode == "ep")
    start = search.run()
    if search.best is None:
        raise packing_error(problem)
    return make_plan(search, start, machine, aim, traffic, sizes, whole, fixed, assumed, inputs, limits)


def make_plan(
    search: Search,
    start: int | None,
    machine: Machine,
    aim: Aim,
    traffic: TrafficTable,
    sizes: np.ndarray,
    host_sizes: np.ndarray,
    fixed: tuple[int, ...],
    assumed: list[str],
    inputs: Mapping[str, str] | None,
    limits: Limits = NO_LIMITS,
) -> Plan:
    """The plan of a finished search, checked again. start: cost of frequency-greedy, None where it does not fit."""
    problem = search.problem
    assert search.best is not None
    holds = problem.holding(search.best)
    if not problem.feasible(holds) or problem.cost(holds) != search.cost:
        raise PlanError("the solver's plan failed its re-check", mend="report this as a bug, with the plan's inputs")
    return Plan(
        machine=machine,
        aim=aim,
        limits=limits,
        layers=traffic.layers,
        card_sizes=_frozen(sizes),
        host_sizes=_frozen(host_sizes),
        holds=_frozen(holds),
        fixed=fixed,
        shares=activation_shares(traffic.counts, holds),
        value=problem.value(search.cost),
        greedy=None if start is None else problem.value(start),
        bound=problem.value(search.bound),
        tokens=traffic.tokens,
        top_k=traffic.top_k,
        solver=search.solver,
        steps=(*assumed, *search.steps),
        plan_from=search.plan_from,
        bound_from=search.bound_from,
        inputs={**(inputs or {}), "traffic": sha256_bytes(traffic.to_bytes())},
    )


def check_plan(plan: Plan, traffic: TrafficTable) -> None:
    """Compute objective and shares of `plan` again, exactly, from the traffic it names.

    PlanError: another traffic table, or other numbers.
    """
    digest = sha256_bytes(traffic.to_bytes())
    if plan.inputs.get("traffic") != digest:
        found = f"expected sha256 {plan.inputs.get('traffic')}, found {digest}"
        raise PlanError("not the traffic this plan was made for", where="inputs.traffic", found=found)
    problem, _ = make_problem(
        plan.machine, traffic, plan.card_sizes, plan.host_sizes, plan.fixed, plan.aim, plan.limits
    )
    value = problem.value(problem.cost(plan.holds))
    if value != plan.value or activation_shares(traffic.counts, plan.holds) != plan.shares:
        found = f"expected {value!r} {plan.aim.unit}, found {plan.value!r}"
        raise PlanError("plan and traffic disagree", where="objective.value", found=found, mend="make the plan again")


def activation_shares(counts: np.ndarray, holds: np.ndarray) -> tuple[float, ...]:
    """Share of all activations that each place serves [P]; the cards that hold an expert share its evenly."""
    copies = holds.sum(axis=2)  # [L, E]
    served = [float((counts / copies)[holds[:, :, place]].sum()) for place in range(holds.shape[2])]
    return tuple(share / int(counts.sum()) for share in served)


def _frozen(array: np.ndarray) -> np.ndarray:
    kept = np.array(array)
    kept.setflags(write=False)
    return kept


@dataclass
class Search:
    """The best placement and the best bound so far, and how they came about."""

    problem: Problem
    target: float = GAP
    copies: bool = False
    best: np.ndarray | None = None
    cost: int = 0
    plan_from: str = ""
    bounds: dict[str, int] = field(default_factory=lambda: {"nothing": 0})
    steps: list[str] = field(default_factory=list)
    multipliers: Multipliers | None = None
    shares: np.ndarray | None = None  # of the linear relaxation [L, E, C + 1]

    def run(self) -> int | None:
        """Go down the ladder until the gap is closed. Returns greedy's cost, None where it does not fit or breaks a
        limit."""
        problem = self.problem
        plain = greedy(problem)
        start = None if plain is None or not problem.feasible(plain) else problem.cost(plain)
        self.note("greedy", plain)
        for _ in range(ROUNDS):
            before = self.cost
            self.relax(plain)
            if self.closed or self.best is None or self.cost > before / 2 > 0:
                break
        if not self.closed:
            self.program()
        if self.copies and self.best is not None:
            single = self.best
            self.note("replicas", replicate(problem, single))
            self.note("replicas, laid out anew", replicate(problem, spread(problem, single)))
        if self.best is not None and self.best.ndim == 2:
            self.best = canonical(problem, self.best)
        return start

    def relax(self, plain: np.ndarray | None) -> None:
        """The linear relaxation of what can still be better, rounded, and local search. plain: frequency-greedy."""
        about = None
        if self.best is not None:
            self.problem, about = self.problem.below(self.cost, self.problem.host if self.copies else 1), self.cost
        problem = self.problem
        relaxed = relax(build(problem, problem.classes, self.copies, about))
        if relaxed is not None:
            self.multipliers, self.shares = relaxed
            self.note("linear relaxation", bound=lagrangian_bound(problem, self.multipliers))
            rounding = round_shares if problem.home is None else round_moves
            self.offer("rounded relaxation", rounding(problem, problem.classes, self.shares))
        if not self.closed:
            start = problem.home if problem.home is not None else plain
            if start is None or not problem.feasible(start):
                start = first_fit(problem) if self.best is None else self.best
            self.offer("local search", start)

    def program(self) -> None:
        """The integer program: whole where it is small, else around the best plan so far."""
        problem = self.problem
        columns = problem.busy.size * problem.host
        if columns <= PROGRAM_COLUMNS:
            bound, assignment = solve_program(problem, self.target / 2, NODES, about=self.cost or None)
            if not self.copies:  # it has no replicas, which may be better still
                self.note("integer program", bound=bound)
            self.offer("integer program", assignment)
            return
        if self.best is None:
            self.near(self.whole())
        if self.closed or self.best is None or self.multipliers is None:
            return
        if fits(problem):
            starts = [self.best]
            if problem.home is not None and problem.feasible(problem.home):
                starts.append(problem.home)
            bound, assignment = decompose(problem, self.multipliers, starts, max(self.target, LAYERS_TARGET))
            if not self.copies:
                self.note("programs by layer", bound=bound)
            self.offer("programs by layer", assignment)
        else:
            self.near(self.best)

    def whole(self) -> np.ndarray | None:
        """int64 [L, E], where the linear relaxation puts whole experts, -1 for the others. None where cards are pooled
        there."""
        if self.shares is None or self.shares.shape != self.problem.sizes.shape:
            return None
        return np.where(self.shares.max(axis=2) >= INTEGRAL, self.shares.argmax(axis=2), -1)

    def near(self, keep: np.ndarray | None) -> None:
        """The integer program of the experts nearest to the decision, the others kept where they are."""
        if keep is None or self.multipliers is None:
            return
        keep = keep.copy()
        nearest = np.argsort(margins(self.problem, self.multipliers), axis=None, kind="stable")
        keep.ravel()[nearest[: PROGRAM_COLUMNS // self.problem.host]] = -1
        _, assignment = solve_program(self.problem, self.target / 2, NODES, keep, self.cost or None)
        self.offer("integer program of the nearest", assignment)

    @property
    def solver(self) -> tuple[str, str]:
        """Name and version of the solver that was called; ours where none was."""
        if self.multipliers is not None or "integer program" in self.bounds:
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

    def offer(self, step: str, assignment: np.ndarray | None) -> None:
        """Improve a plan and keep it if it is the best so far."""
        if assignment is not None and self.problem.feasible(assignment):
            weights = None if self.multipliers is None else self.multipliers.groups
            better = improve(self.problem, assignment, int(self.bound * (1 + self.target)), weights)
            assignment = min(assignment, better, key=self.problem.cost)
        self.note(step, assignment)

    def note(self, step: str, placement: np.ndarray | None = None, bound: int | None = None) -> None:
        """Write down what a step found, and keep it if it is the best so far."""
        value = self.problem.value
        if bound is not None:
            self.steps.append(f"{step}: bound {value(bound):.6g}")
            self.bounds[step] = bound
        elif placement is None or not self.problem.feasible(placement):
            self.steps.append(f"{step}: no plan")
        else:
            cost = self.problem.cost(placement)
            self.steps.append(f"{step}: plan {value(cost):.6g}")
            if self.best is None or cost < self.cost:
                self.best, self.cost, self.plan_from = placement, cost, step


def canonical(problem: Problem, assignment: np.ndarray) -> np.ndarray:
    """Number cards that no expert can tell apart by the first expert they hold. Where plans start from another one
    (`home`) names stay."""
    if problem.home is not None:
        return assignment
    flat = assignment.ravel()
    first = [int(np.argmax(flat == p)) if (flat == p).any() else flat.size for p in range(problem.host)]
    renamed = np.arange(problem.host + 1)
    for alike in problem.classes:
        for name, card in zip(alike, sorted(alike, key=lambda card: (first[card], card)), strict=True):
            renamed[card] = name
    return renamed[assignment]

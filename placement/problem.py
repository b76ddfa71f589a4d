"""The placement problem in exact integers: sizes, traffic, room on each place, and the one objective.

Expected seconds per token, expert parallel (each expert whole on one place):

    sum over layers of [ max over cards of load(card) + load(host) ]
    load(place) = sum over its experts of (count / tokens) * bytes / bandwidth(place)

The cards work at the same time, so a layer waits for the slowest; host reads come on top. Everything here is
whole numbers (Python integers, no overflow), so a plan is compared, bounded and re-checked to the last unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import gcd

import numpy as np

from ..errors import PlanError
from .machine import Machine
from .traffic import TrafficTable


@dataclass(frozen=True, eq=False)
class Problem:
    """What to place and where it may go.

    sizes: int64 [L, E], exact bytes of each expert. traffic: counts [L, E] of the same layers and experts.
    fixed: bytes already taken on each place (non-expert tensors on the cards, Engram tables on the host),
    host last, [P] with P = cards + 1. An assignment is an integer array [L, E] of place numbers, host P - 1.
    """

    sizes: np.ndarray
    traffic: TrafficTable
    machine: Machine
    fixed: tuple[int, ...]

    def __post_init__(self) -> None:
        shape = self.traffic.counts.shape
        if self.sizes.shape != shape or self.sizes.dtype != np.int64 or self.sizes.min() < 1:
            raise PlanError(
                "expert sizes do not fit the traffic table",
                where="sizes",
                found=f"expected positive int64 {list(shape)}, found {self.sizes.dtype} {list(self.sizes.shape)}",
                mend="take sizes and traffic from the same model",
            )
        if len(self.fixed) != len(self.machine.places) or min(self.fixed) < 0:
            found = f"expected {len(self.machine.places)} numbers >= 0 (host last), found {self.fixed}"
            raise PlanError("fixed bytes do not fit the machine", where="fixed", found=found)

    @property
    def host(self) -> int:
        """Place number of the host."""
        return len(self.machine.gpus)

    @cached_property
    def free(self) -> tuple[int, ...]:
        """Bytes left for experts on each place, host last (negative where the fixed bytes are too many)."""
        return tuple(budget - used for budget, used in zip(self.machine.budgets, self.fixed, strict=True))

    @cached_property
    def unit(self) -> int:
        """Greatest common divisor of all sizes: the grain in which room can be used at all."""
        return int(np.gcd.reduce(self.sizes, axis=None))

    @cached_property
    def units(self) -> np.ndarray:
        """int64 [L, E]: sizes in `unit`s."""
        return self.sizes // self.unit

    @cached_property
    def room(self) -> tuple[int, ...]:
        """`free` in whole `unit`s. No plan is lost by rounding down, and equal sizes become plain counts."""
        return tuple(free // self.unit for free in self.free)

    @cached_property
    def work(self) -> np.ndarray:
        """Python integers [L, E]: tokens * bytes (in `unit`s) that an expert is read, wherever it lies."""
        return self.traffic.counts.astype(object) * self.units.astype(object)

    @cached_property
    def prices(self) -> tuple[int, int]:
        """(card, host) cost of one unit of work: the bandwidths crosswise, in lowest terms."""
        common = gcd(self.machine.gpu_bandwidth, self.machine.host_bandwidth)
        return self.machine.host_bandwidth // common, self.machine.gpu_bandwidth // common

    def loads(self, assignment: np.ndarray) -> np.ndarray:
        """Python integers [L, P]: work on each place."""
        places = range(self.host + 1)
        return np.stack([np.where(assignment == place, self.work, 0).sum(axis=1) for place in places], axis=1)

    def cost(self, assignment: np.ndarray) -> int:
        """The objective as a whole number; `seconds` gives it its unit."""
        card_price, host_price = self.prices
        loads = self.loads(assignment)  # [L, P]
        return int(card_price * loads[:, :-1].max(axis=1).sum() + host_price * loads[:, -1].sum())

    def seconds(self, cost: int) -> Fraction:
        """Expected seconds per token of a `cost`, exactly."""
        return Fraction(cost * self.unit, self.traffic.tokens * self.prices[0] * self.machine.gpu_bandwidth)

    def used(self, assignment: np.ndarray) -> tuple[int, ...]:
        """Expert bytes on each place, host last, exactly."""
        places = range(self.host + 1)
        return tuple(int(np.where(assignment == place, self.sizes, 0).sum(dtype=object)) for place in places)

    def feasible(self, assignment: np.ndarray) -> bool:
        """Every expert on a place that exists, and every place within its room, to the byte."""
        known = assignment.shape == self.sizes.shape and 0 <= assignment.min() <= assignment.max() <= self.host
        return bool(known) and all(u <= f for u, f in zip(self.used(assignment), self.free, strict=True))

    def shares(self, assignment: np.ndarray) -> tuple[float, ...]:
        """Share of all expert activations that each place serves (the hit rate, place by place)."""
        counts = self.traffic.counts
        on = (int(counts[assignment == place].sum()) for place in range(self.host + 1))
        return tuple(count / int(counts.sum()) for count in on)


def check_fits(problem: Problem) -> None:
    """PlanError, with the missing bytes and the mend, when the bytes cannot fit in any arrangement."""
    places = problem.machine.places
    for place, free, budget in zip(places, problem.free, problem.machine.budgets, strict=True):
        if free < 0:
            raise PlanError(
                f"tensors that are not experts overflow {place} by {-free:,} B",
                where=place,
                found=f"expected at most {budget:,} B, found {budget - free:,} B",
                mend=f"give {place} {-free:,} B more" + (" or reserve less there" if place != "host" else ""),
            )
    total, available = int(problem.sizes.sum(dtype=object)), sum(problem.room) * problem.unit
    if total > available:
        short = total - available
        each = ", ".join(f"{place} {free:,}" for place, free in zip(places, problem.free, strict=True))
        raise PlanError(
            f"the experts do not fit: {short:,} B too many",
            where="all places",
            found=f"expected at most {available:,} B of whole experts (free: {each}), found {total:,} B in "
            f"{problem.sizes.size:,} experts",
            mend=f"add {_whole(short, problem.unit):,} B of host memory (--host) or of card memory (--gpu), "
            f"reserve less, or use fewer bits: experts at {100 * available / total:.1f} % of their size fit",
        )


def packing_error(problem: Problem) -> PlanError:
    """The error for bytes that would fit if experts could be cut, when no packing of whole ones was found."""
    largest = int(problem.units.max())
    # First fit fails only when every place has less room than one expert, so this much slack always suffices.
    slack = sum(problem.room) - int(problem.units.sum())
    enough = (len(problem.room) * (largest - 1) - slack) * problem.unit
    return PlanError(
        "the experts would fit only if some were cut in two",
        where="all places",
        found=f"{slack * problem.unit:,} B of slack in {len(problem.room)} places, largest expert "
        f"{largest * problem.unit:,} B",
        mend=f"add {enough:,} B to any place (that is always enough), or use fewer bits",
    )


def _whole(value: int, unit: int) -> int:
    return -(-value // unit) * unit

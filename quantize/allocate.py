"""Bits where they matter: choose K per group of linears under a byte budget, by an integer program.

Second-order KL adds up over linears (their errors are independent and small), so the choice is a multiple-choice
knapsack: one K per group, least predicted KL, total bytes within the budget. What a group is decides who can load the
pack: all experts of a layer's projection alike (exllamav3's loader asks for that), or every expert on its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array
from torch import Tensor

from ..errors import QuantizeError

Group = TypeVar("Group", bound=Hashable)
Number = TypeVar("Number", float, Tensor)


@dataclass(frozen=True)
class Choice:
    """What one K costs a group: nbytes stored, kl: predicted KL it adds, nats per token (`predicted_kl`)."""

    bits: float
    nbytes: int
    kl: float


@dataclass(frozen=True)
class Allocation(Generic[Group]):
    """bits: K of every group. nbytes: total. kl: predicted, nats per token. bound: no allocation is predicted lower."""

    bits: dict[Group, float]
    nbytes: int
    kl: float
    bound: float


def predicted_kl(error: Number, trace: Number, k: int, n: int, tokens: int) -> Number:
    """Second-order KL of one linear's error, nats per token of the traffic.

    error: tr(E^T Hin E Hout) under factors of mean diagonal 1. trace: of the Fisher matrix over the linear's tokens
    (`kronecker.FactorSums`); both may be tensors over experts. tokens: of the whole traffic, routed here or not, so
    that rare experts weigh little.
    """
    return 0.5 * error * trace / (k * n) / tokens


def hedged(kl: Tensor) -> Tensor:
    """What to choose K by, one for each expert: the geometric mean of its predicted KL and the mean of all experts.

    kl: [E], a layer's projection at one K (`predicted_kl`), finite and not negative; returns [E].
    Which experts a text needs changes with the text more than what an error in one of them costs a token, so the
    traffic's own figures starve the experts of texts it lacks. Halving their spread on the log scale gives up some of
    the gain on the traffic's kind of text for less loss on others.
    """
    return (kl * kl.mean()).sqrt()


def allocate(choices: Mapping[Group, list[Choice]], budget: int, *, gap: float = 1e-4) -> Allocation[Group]:
    """K of every group with the least predicted KL within `budget` bytes; HiGHS, to a relative `gap`.

    Raises QuantizeError when even the smallest K of every group does not fit, or a number is not finite.
    """
    groups = list(choices)
    flat = [(g, choice) for g, group in enumerate(groups) for choice in choices[group]]
    kl = np.array([c.kl for _, c in flat])
    size = np.array([c.nbytes for _, c in flat], dtype=np.float64)
    if not np.isfinite(kl).all() or (kl < 0).any():
        bad = flat[int(np.flatnonzero(~np.isfinite(kl) | (kl < 0))[0])]
        raise QuantizeError("a predicted KL is no number", where=str(groups[bad[0]]), found=f"{bad[1].kl}")
    smallest = sum(min(c.nbytes for c in choices[group]) for group in groups)
    if smallest > budget:
        raise QuantizeError(
            "the bit budget is too small",
            found=f"the smallest K everywhere takes {smallest:,} bytes, the budget is {budget:,}",
            mend="raise the budget, or allow a smaller K",
        )
    owner = np.array([g for g, _ in flat])
    one_each = coo_array((np.ones(len(flat)), (owner, np.arange(len(flat)))), shape=(len(groups), len(flat)))
    scale = kl.max() or 1.0  # HiGHS works with absolute tolerances
    solved = milp(
        kl / scale,
        integrality=np.ones(len(flat)),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(one_each.tocsc(), 1, 1), LinearConstraint(size / budget, -np.inf, 1.0)],
        options={"mip_rel_gap": gap},
    )
    if solved.x is None:
        raise QuantizeError("the bit allocation was not solved", found=solved.message)
    taken = [flat[i] for i in np.flatnonzero(solved.x > 0.5)]
    total = sum(c.nbytes for _, c in taken)
    if len(taken) != len(groups) or total > budget:
        raise QuantizeError("the bit allocation came back wrong", found=f"{total:,} bytes of {budget:,}")
    bits = {groups[g]: c.bits for g, c in taken}
    return Allocation(bits, total, sum(c.kl for _, c in taken), float(solved.mip_dual_bound) * scale)

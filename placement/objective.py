"""From traffic, sizes, a machine and an aim to a problem in whole numbers.

Of seconds, a layer's expected critical path is estimated from below twice, and the larger estimate counts. The mean of
the slowest place is at least the slowest mean: of the host, of each card. And while the host computes, cards are done
after c seconds: an expert on the host, asked for in a share h of steps for t seconds each, adds h * (t - c), in
whatever step it comes. That is what an expert on the host makes the cards wait, with c the layer's experts spread
evenly over all cards. The second holds as far as no card has more than c to do and the host is asked in steps like any
other. Which of the two is larger depends on how rare and how slow reads from the host are.
"""

from __future__ import annotations

import math

import numpy as np

from ..errors import PlanError
from .aim import DECODE, Aim, Term
from .costs import card_ways, host_ways, stored_sizes
from .limits import NO_LIMITS, Limits
from .machine import Machine
from .problem import Problem
from .rates import CHUNK, rates
from .traffic import TrafficTable

LOAD_BITS = 60
"""All loads together stay below 2**LOAD_BITS, so that no sum overflows an int64."""


def make_problem(
    machine: Machine,
    traffic: TrafficTable,
    card_sizes: np.ndarray,
    host_sizes: np.ndarray,
    fixed: tuple[int, ...],
    aim: Aim = DECODE,
    limits: Limits = NO_LIMITS,
) -> tuple[Problem, list[str]]:
    """The problem, and what had to be assumed about the traffic, in sentences.

    card_sizes, host_sizes: int64 [L, E], as in `Plan`. fixed: bytes already taken on each place, host last.
    PlanError or TraceError for what does not fit together.
    """
    places, counts = machine.places, traffic.counts
    layers, experts = counts.shape
    for name, sizes in (("card sizes", card_sizes), ("host sizes", host_sizes)):
        if sizes.shape != counts.shape or sizes.dtype != np.int64 or sizes.min() < 1:
            found = f"expected positive int64 {list(counts.shape)}, found {sizes.dtype} {list(sizes.shape)}"
            mend = "take sizes and traffic from the same model"
            raise PlanError("expert sizes do not fit the traffic table", where=name, found=found, mend=mend)
    if len(fixed) != len(places) or min(fixed) < 0:
        found = f"expected {len(places)} numbers >= 0 (host last), found {fixed}"
        raise PlanError("fixed bytes do not fit the machine", where="fixed", found=found)
    weights = _source_weights(traffic, aim)
    values, waiting, groups, assumed = [], [], [], list[str]()
    for number, (source, weight) in enumerate(weights):
        for term in aim.terms:
            value, wait, note = _loads(machine, traffic, card_sizes, host_sizes, term, source)
            values.append(value * (weight * term.weight))
            waiting.append(wait * (weight * term.weight))
            groups.append(number if aim.worst else 0)
            assumed += [note] if note and note not in assumed else []
    loads, waits = np.stack(values), np.stack(waiting)  # [S, L, E, P], [S, L, E]
    total = math.fsum((loads.max(axis=3) + waits).ravel().tolist())
    exponent = LOAD_BITS - math.frexp(total)[1] if total > 0 else 0
    whole = [np.rint(np.ldexp(part, exponent)).astype(np.int64) for part in (loads, waits)]
    least, most = limits.per_layer(layers, experts)
    allowed = limits.allowed(traffic.layers, experts, places)
    limits.check_together(allowed, traffic.layers)
    problem = Problem(
        places,
        stored_sizes(machine, card_sizes, host_sizes),
        tuple(budget - taken for budget, taken in zip(machine.budgets, fixed, strict=True)),
        whole[0],
        whole[1],
        math.ldexp(1.0, -exponent),
        counts,
        tuple(groups),
        allowed,
        least,
        most,
    )
    return problem, assumed


def _source_weights(traffic: TrafficTable, aim: Aim) -> list[tuple[str | None, float]]:
    if not aim.worst and not aim.sources:
        return [(None, 1.0)]
    chosen = dict(aim.sources) or dict.fromkeys(traffic.sources, 1.0)
    if not chosen:
        mend = "give traffic with sources, or leave out --worst-case"
        raise PlanError("the traffic tells no sources apart", where="sources", mend=mend)
    total = 1.0 if aim.worst else math.fsum(chosen.values())
    return [(name, 1.0 if aim.worst else weight / total) for name, weight in chosen.items()]


def _loads(
    machine: Machine,
    traffic: TrafficTable,
    card_sizes: np.ndarray,
    host_sizes: np.ndarray,
    term: Term,
    source: str | None,
) -> tuple[np.ndarray, np.ndarray, str]:
    """(loads float64 [L, E, P] and waits float64 [L, E] in the term's unit, what was assumed)."""
    loads = np.zeros((*card_sizes.shape, len(machine.places)))
    nothing = np.zeros(card_sizes.shape)
    if term.measure == "memory":
        loads[..., -1] = stored_sizes(machine, card_sizes, host_sizes)[..., -1]
        return loads, nothing, ""
    if term.measure == "host-bytes":
        found, _ = rates(traffic, "all", 1, source)
        loads[..., -1] = host_sizes * (found.tokens / found.steps)
        return loads, nothing, ""
    found, assumed = rates(traffic, term.measure, term.window, source)
    prefill = term.measure == "prefill"
    per = found.steps * (CHUNK if prefill else 1)
    for place, way in enumerate(card_ways(machine)):
        loads[..., place] = way.seconds(card_sizes, found.hits, found.tokens) / per
    ways = host_ways(machine, prefill)
    loads[..., -1] = np.min([way.seconds(host_sizes, found.hits, found.tokens) for way in ways], axis=0) / per
    # Sums one by one, whose last bit is the same on every machine.
    alone = np.cumsum(loads[..., :-1], axis=1)[:, -1]  # [L, P - 1], when each card would be done with all experts
    even = 1 / np.cumsum(1 / alone, axis=1)[:, -1:] * (per / found.steps)  # [L, 1], all cards together, of one step
    waits = np.maximum(loads[..., -1] - found.hits / per * even, 0)
    note = ""
    if assumed and not prefill:
        note = (
            f"the traffic has no counts of {term.window}-token windows: tokens of a step were taken to choose experts "
            "independently, which asks for more experts than is true"
        )
    return loads, waits, note

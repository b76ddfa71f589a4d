"""Plans built without a solver, small and random, for the exports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from moefit.errors import PlanError
from moefit.placement.aim import Aim
from moefit.placement.limits import Limits
from moefit.placement.machine import Gpu, Machine
from moefit.placement.plan import Plan
from moefit.placement.traffic import TrafficTable

ROOMY = 1 << 40


def make_plan(
    holds: Any,
    layers: Sequence[int] | None = None,
    mode: str = "ep",
    sizes: Any = 100,
    cards: Sequence[int] | None = None,
    host: int = ROOMY,
    fixed: Sequence[int] | None = None,
) -> Plan:
    """holds: [L, E, P]. sizes: bytes on a card. cards: bytes of each; in mode "tp" two roomy ones where not given."""
    holds = np.asarray(holds, dtype=bool)
    count, experts, places = holds.shape
    budgets = [ROOMY] * (2 if mode == "tp" else places - 1) if cards is None else cards
    sizes = np.broadcast_to(np.asarray(sizes, dtype=np.int64), (count, experts)).copy()
    on_host = float(holds[:, :, -1].mean())
    return Plan(
        machine=Machine(tuple(Gpu(size) for size in budgets), host, mode),
        aim=Aim(),
        limits=Limits(),
        layers=tuple(range(count)) if layers is None else tuple(layers),
        card_sizes=sizes,
        host_sizes=sizes * (2 if mode == "tp" else 1),
        holds=holds,
        fixed=tuple(fixed) if fixed is not None else (0,) * places,
        shares=(*((1 - on_host) / (places - 1),) * (places - 1), on_host),
        value=1.0,
        greedy=None,
        bound=1.0,
        tokens=1,
        top_k=1,
        solver=("test", "0"),
        steps=("test",),
        plan_from="test",
        bound_from="test",
        inputs={"traffic": "0" * 64},
    )


def make_traffic(plan: Plan, seed: int, experts: int | None = None) -> TrafficTable:
    """50 tokens to 2 experts (or 1) each, unevenly."""
    count = experts or plan.holds.shape[1]
    top_k = min(2, count)
    random = np.random.default_rng(seed)
    noise = random.random(count) * 2 + random.random((len(plan.layers), 50, count))
    chosen = noise.argsort(axis=2)[:, :, :top_k].reshape(len(plan.layers), -1)
    return TrafficTable(np.stack([np.bincount(row, minlength=count) for row in chosen]), 50, plan.layers, top_k)


@st.composite
def plans(draw: st.DrawFn, host: bool = True, modes: Sequence[str] = ("ep", "tp")) -> Plan:
    """Up to 4 layers of up to 7 experts on up to 3 cards, some of them on several; one size or many."""
    mode = draw(st.sampled_from(modes))
    layers, experts = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    cards = 1 if mode == "tp" else draw(st.integers(1, 3))
    choices = [*range(1, 1 << cards)] + ([1 << cards] if host else [])  # bits: the places that hold an expert
    masks = np.array(draw(st.lists(st.sampled_from(choices), min_size=layers * experts, max_size=layers * experts)))
    holds = (masks[:, None] >> np.arange(cards + 1)) & 1
    first = draw(st.integers(0, 2))
    sizes = np.array(draw(st.lists(st.integers(1, 9), min_size=layers * experts, max_size=layers * experts)))
    return make_plan(
        holds.reshape(layers, experts, cards + 1),
        range(first, first + layers),
        mode,
        sizes.reshape(layers, experts) if draw(st.booleans()) else 5,
    )


def four_parts(refused: pytest.ExceptionInfo[PlanError]) -> str:
    """The message of an error that says what, where, what was found and what to do."""
    error = refused.value
    assert all((error.what, error.where, error.found, error.mend)), error
    return str(error)

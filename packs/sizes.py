"""What a plan has to place, to the byte: experts on a card, in slices or whole, and everything else."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..calibrate.checkpoint import Checkpoint
from ..calibrate.layout import Layout, parts
from ..errors import PlanError
from ..placement import Machine, TrafficTable
from ..placement.objective import make_problem
from ..placement.problem import check_fits
from ..quantize.linear import stored_layout
from .layout import expert_shapes
from .recipe import Recipe

HADAMARD = 128
"""A slice of an expert is cut between the blocks of the Hadamard transforms."""


class ExpertBytes(NamedTuple):
    """Of one routed expert: whole, and what it takes on a card (in mode "tp": its slice, on each card)."""

    whole: int
    card: int


def expert_bytes(layout: Layout, recipe: Recipe, machine: Machine) -> ExpertBytes:
    """A slice holds its part of the intermediate width: gate's and up's columns with their svh, down's rows with its
    suh; gate's and up's suh, down's svh and the markers are on every card.

    PlanError: mode "tp" on a number of cards into which that width cannot be cut.
    """
    shapes = expert_shapes(layout)
    whole = sum(_bytes(k, n, recipe) for k, n in shapes.values())
    if machine.mode != "tp":
        return ExpertBytes(whole, whole)
    cards, width = len(machine.gpus), shapes["w1"][1]
    if width % (cards * HADAMARD):
        raise PlanError(
            f"experts cannot be cut into {cards} slices",
            where="mode tp",
            found=f"expected an intermediate width that is a multiple of {cards} x {HADAMARD}, found {width:,}",
            mend="plan with --mode ep, or for fewer cards",
        )
    card = sum(
        _bytes(k // cards, n, recipe) if projection == "w2" else _bytes(k, n // cards, recipe)
        for projection, (k, n) in shapes.items()
    )
    return ExpertBytes(whole, card)


def _bytes(k: int, n: int, recipe: Recipe) -> int:
    return sum(nbytes for _, _, nbytes in stored_layout(k, n, recipe.bits, recipe.codebook).values())


def size_tables(layout: Layout, size: ExpertBytes) -> tuple[np.ndarray, np.ndarray]:
    """(card sizes, host sizes) int64 [L, E], as `solve` takes them."""
    shape = len(layout.moe_layers), layout.experts
    return np.full(shape, size.card, dtype=np.int64), np.full(shape, size.whole, dtype=np.int64)


def fixed_bytes(checkpoint: Checkpoint, machine: Machine) -> tuple[int, ...]:
    """Bytes of everything but routed experts, per place: Engram tables on the host (the engines' default), as its
    allocator rounds them, the rest split evenly over the cards, each share rounded up. checkpoint: the original or a
    pack."""
    sizes = [(part, checkpoint.tensors[name].nbytes) for name, part in parts(checkpoint).items()]
    engram = sum(machine.pinned(size) for part, size in sizes if part == "engram tables")
    dense = sum(size for part, size in sizes if part not in ("engram tables", "routed experts"))
    share = -(-dense // len(machine.gpus))
    return (*(share for _ in machine.places[:-1]), engram)


def check_machine(layout: Layout, recipe: Recipe, machine: Machine, fixed: tuple[int, ...]) -> None:
    """Refuse (PlanError) a machine on which the pack cannot fit, whatever the traffic will be."""
    card, host = size_tables(layout, expert_bytes(layout, recipe, machine))
    check_fits(make_problem(machine, even_traffic(layout), card, host, fixed)[0], fixed, machine.budgets)


def even_traffic(layout: Layout) -> TrafficTable:
    """Traffic that asks for every expert alike, for what does not depend on it."""
    counts = np.full((len(layout.moe_layers), layout.experts), layout.experts_per_token)
    return TrafficTable(counts, layout.experts, layout.moe_layers, layout.experts_per_token)

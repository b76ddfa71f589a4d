"""The moves from one plan.json to the next as a file, in an order in which no place overflows. Spec: docs/plan.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import PlanError
from ..files import json_bytes, sha256_bytes
from .aim import UNITS
from .costs import stored_sizes
from .fields import DIGEST, Field, Kind, parse, read_bytes
from .plan import MAX_SIZE, Plan
from .replan import Move, Replan
from .traffic import MAX_EXPERTS

KIND = Kind("list of moves", "moefit.moves", 1, 64 << 20, "make it again with moefit plan --from PLAN --moves FILE")
PLACE = "gpu[0-9]{1,2}|cards|host"
MAX_MOVES = 1_000_000


@dataclass(frozen=True)
class MoveList:
    """old, new: sha256 of the two plan.json files. stay: value of the old plan on the new plan's traffic, value: of the
    new one, both in `unit`. moves: in order."""

    old: str
    new: str
    stay: float
    value: float
    unit: str
    moves: tuple[Move, ...]


def moves_bytes(moved: Replan, old: Plan) -> bytes:
    """Canonical bytes of the moves from `old` to `moved.plan`."""
    moves = [
        {
            "bytes": move.bytes,
            "expert": move.expert,
            "from": move.here,
            "layer": move.layer,
            "parked": move.parked,
            "to": move.there,
        }
        for move in moved.moves
    ]
    return json_bytes(
        {
            "format": KIND.format,
            "from": sha256_bytes(old.to_bytes()),
            "moves": moves,
            "stay": moved.stay,
            "to": sha256_bytes(moved.plan.to_bytes()),
            "unit": moved.plan.aim.unit,
            "value": moved.plan.value,
            "version": KIND.version,
        }
    )


def read_moves(path: Path) -> MoveList:
    """Read and validate a list of moves. PlanError names the file and the field."""
    return parse_moves(read_bytes(path, KIND), str(path))


def parse_moves(content: bytes, where: str = "moves.json") -> MoveList:
    """`read_moves` of a file's bytes."""
    top = parse(content, where, KIND, "from", "moves", "stay", "to", "unit", "value")
    moves: list[Move] = []
    latest: dict[tuple[int, int], Move] = {}
    for field in top["moves"].array(0, MAX_MOVES):
        move = _parse_move(field)
        before = latest.get((move.layer, move.expert))
        if before is not None and (not before.parked or before.there != move.here):
            expected = f"from {before.there}" if before.parked else "one more move only of what was parked"
            raise field.wrong(expected, f"expert {move.expert} of layer {move.layer} moved from {move.here}")
        latest[move.layer, move.expert] = move
        moves.append(move)
    for move in latest.values():
        if move.parked:
            raise top["moves"].wrong(
                "a last move for all that is parked", f"expert {move.expert} of layer {move.layer} parked"
            )
    return MoveList(
        old=top["from"].text(DIGEST),
        new=top["to"].text(DIGEST),
        stay=top["stay"].number(0),
        value=top["value"].number(0),
        unit=top["unit"].one_of((*UNITS.values(), "weighted sum")),
        moves=tuple(moves),
    )


def _parse_move(field: Field) -> Move:
    entry = field.object("bytes", "expert", "from", "layer", "parked", "to")
    here, there = entry["from"].text(PLACE), entry["to"].text(PLACE)
    if here == there:
        raise entry["to"].wrong("another place than the one it is moved from")
    return Move(
        entry["layer"].integer(0),
        entry["expert"].integer(0, MAX_EXPERTS - 1),
        here,
        there,
        entry["bytes"].integer(1, MAX_SIZE),
        entry["parked"].boolean(),
    )


def apply_moves(old: Plan, moves: Sequence[Move]) -> np.ndarray:
    """Where everything lies after the moves, bool [L, E, P]: replayed one by one from the old plan.

    PlanError: an expert that is not where it is moved from, or is no such expert; bytes that it does not have; a place
    that would hold more than it can at any moment.
    """
    places, sizes, holds = (
        old.machine.places,
        stored_sizes(old.machine, old.card_sizes, old.host_sizes),
        old.holds.copy(),
    )
    room = [budget - fixed - used for budget, fixed, used in zip(old.machine.budgets, old.fixed, old.used, strict=True)]
    rows = {layer: row for row, layer in enumerate(old.layers)}

    def wrong(number: int, expected: str, found: str) -> PlanError:
        mend = "give the plan that the moves start from"
        return PlanError(
            "the moves do not fit the plan",
            where=f"moves[{number}]",
            found=f"expected {expected}, found {found}",
            mend=mend,
        )

    for number, move in enumerate(moves):
        if move.layer not in rows or not 0 <= move.expert < holds.shape[1]:
            raise wrong(number, "an expert of the plan", f"expert {move.expert} of layer {move.layer}")
        if not {move.here, move.there} <= set(places):
            raise wrong(number, f"places among {', '.join(places)}", f"{move.here} to {move.there}")
        at, here, there = (rows[move.layer], move.expert), places.index(move.here), places.index(move.there)
        if np.flatnonzero(holds[at]).tolist() != [here]:
            lies = " and ".join(places[place] for place in np.flatnonzero(holds[at]))
            raise wrong(number, f"expert {move.expert} of layer {move.layer} on {move.here}", f"it on {lies}")
        size = int(sizes[(*at, there)])
        if move.bytes != size:
            raise wrong(number, f"{size:,} B", f"{move.bytes:,} B")
        if here == there or size > room[there]:
            raise wrong(number, f"room for {size:,} B on {move.there}", f"{room[there]:,} B free")
        room[here] += int(sizes[(*at, here)])
        room[there] -= size
        holds[at] = np.arange(len(places)) == there
    return holds


def check_moves(found: MoveList, old: Plan, new: Plan) -> None:
    """PlanError unless the list leads from `old` to `new`, replayed without overflowing a place."""
    for name, plan, digest in (("from", old, found.old), ("to", new, found.new)):
        if (own := sha256_bytes(plan.to_bytes())) != digest:
            mend = "give the plans that the moves were made for"
            raise PlanError(
                "the moves are of another plan", where=name, found=f"expected {digest}, found {own}", mend=mend
            )
    if not np.array_equal(apply_moves(old, found.moves), new.holds):
        raise PlanError("the moves do not lead to the new plan", where="moves", mend=KIND.mend)

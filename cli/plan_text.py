"""The plan command's output for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..placement.heldout import comparison_text, cross_sources_text
from ..placement.report import quantity
from .tables import human, plan_lines

if TYPE_CHECKING:
    from ..packs.plan import PlanOutcome

LISTED = 10
"""Moves shown."""


def plan_text(made: PlanOutcome) -> str:
    """The plan, its score on unseen traffic, and the way to it from the plan in use."""
    found = made.summary
    lines = [*plan_lines(found), "bytes         " + ", ".join(f"{p} {human(b)}" for p, b in found["bytes"].items())]
    traffic = found["traffic"]
    held = traffic["tokens"] - traffic["planned"]
    lines.append(
        f"traffic       {traffic['planned']:,} tokens planned for, "
        + (f"{held:,} held out" if held else f"none held out: {traffic['not_held_out']}")
    )
    if made.rows:
        lines += ["", comparison_text(made.rows)]
    if made.sources:
        lines += ["", "Each source left out once:", cross_sources_text(made.sources)]
    if "drift" in found:
        lines += ["", found["drift"]["verdict"]]
    if "replan" in found:
        lines += ["", *_moving(found["replan"], found["unit"])]
    return "\n".join([*lines, "", f"written to {found['out']}"])


def _moving(again: Mapping[str, Any], unit: str) -> list[str]:
    stay, moves = again["stay"], again["moves"]
    gain, written = (stay - again["value"]) / stay if stay else 0.0, human(sum(move["bytes"] for move in moves))
    lines = [
        f"The plan in use: {quantity(stay, unit)} on this traffic, of which at most {again['stale']:.2%} can be saved.",
        f"The new plan saves {gain:.2%} of it with {len(moves):,} moves, {written} written.",
        f"On held-out traffic: {again['gain']['verdict']} ({again['gain']['why']}).",
    ]
    if again["curve"]:
        lines.append(f"{'moves':>10} {'written':>12} {'saved':>8} {'at most':>8}")
        for point in again["curve"]:
            saved, most = ((stay - point[key]) / stay if stay else 0.0 for key in ("value", "bound"))
            limit = "all" if point["limit"] is None else f"{point['limit']:,}"
            lines.append(f"{limit:>10} {human(point['bytes']):>12} {saved:>8.2%} {most:>8.2%}")
    for move in moves[:LISTED]:
        parked = ", out of the way" if move["parked"] else ""
        lines.append(f"  layer {move['layer']} expert {move['expert']}: {move['here']} -> {move['there']}{parked}")
    if len(moves) > LISTED:
        lines.append(f"  and {len(moves) - LISTED:,} more (--moves FILE has all)")
    return lines

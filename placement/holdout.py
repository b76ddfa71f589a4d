"""Traffic in two parts, by conversation: one to plan for, one that the plan has not seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from .recorded import Recorded, split, table
from .traffic import TrafficTable
from .windows import Windows

FEWEST = 5
"""Conversations below which none is held out."""


class Parts(NamedTuple):
    """planned: what to plan for. held_out: conversations that are not in it; None where none could be held out, and
    then `why` says why."""

    planned: TrafficTable
    held_out: Recorded | None
    why: str


def hold_out(whole: TrafficTable, recorded: Recorded | None, share: float) -> Parts:
    """Hold `share` of the recorded conversations out of the traffic. recorded: all of the traffic, or a sample."""
    if not share:
        return Parts(whole, None, "no conversation was held out, as told")
    if recorded is None:
        return Parts(whole, None, "the traffic is counts alone, no conversation's routing was recorded")
    if recorded.conversations < FEWEST:
        return Parts(whole, None, f"{recorded.conversations} conversations, and at least {FEWEST} are needed")
    _, kept = split(recorded, 1 - share)
    return Parts(without(whole, table(kept)), kept, "")


def without(whole: TrafficTable, part: TrafficTable) -> TrafficTable:
    """The traffic of `whole` that is not in `part`, which must be a part of it."""
    nothing = np.zeros_like(whole.counts)

    # A part without decode tokens has windows of all its tokens, which a whole with some does not count.
    alike = (whole.decode is None) == (part.decode is None)
    gone: Mapping[int, Windows] = part.windows if alike else {}
    of_sources = part.source_windows if alike else {}

    def rest(mine: np.ndarray, theirs: np.ndarray | None) -> np.ndarray:
        return mine if theirs is None else mine - theirs

    return TrafficTable(
        whole.counts - part.counts,
        whole.tokens - part.tokens,
        whole.layers,
        whole.top_k,
        None if whole.prefill is None else rest(whole.prefill, part.prefill),
        None if whole.decode is None else rest(whole.decode, part.decode),
        {name: rest(counts, part.sources.get(name, nothing)) for name, counts in whole.sources.items()},
        _fewer(whole.windows, gone),
        {name: _fewer(sizes, of_sources.get(name, {})) for name, sizes in whole.source_windows.items()},
    )


def _fewer(mine: Mapping[int, Windows], theirs: Mapping[int, Windows]) -> dict[int, Windows]:
    found = {}
    for size, all_of_them in mine.items():
        gone = theirs.get(size)
        kept = all_of_them
        if gone is not None:
            kept = Windows(kept.steps - gone.steps, kept.hits - gone.hits, kept.tokens - gone.tokens)
        if kept.steps:
            found[size] = kept
    return found

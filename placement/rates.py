"""How often each expert is asked for in steps of a kind, from a traffic table."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..errors import TraceError
from .traffic import TrafficTable

CHUNK = 4096
"""Tokens that an engine takes through the experts at once in prefill."""


class Rates(NamedTuple):
    """steps: how many. hits: int64 [L, E], steps that ask for an expert. tokens: int64 [L, E], tokens that do."""

    steps: int
    hits: np.ndarray
    tokens: np.ndarray


def rates(table: TrafficTable, measure: str, window: int = 1, source: str | None = None) -> tuple[Rates, bool]:
    """Rates of decode steps of `window` tokens ("decode") or of prefill chunks ("prefill"), of all traffic or a source.

    The second value says whether tokens of a step were taken to choose experts independently of each other, because the
    table holds no counts of windows of this size; they do choose alike, so this asks for more experts than is true.
    Where no token is known to be of the phase, all count. TraceError: no such source.
    """
    counts = table.counts
    if source is not None:
        if source not in table.sources:
            found = f"expected one of {', '.join(table.sources) or 'none'}, found {source!r}"
            mend = "moefit traffic lists a table's sources"
            raise TraceError("no such source in the traffic table", found=found, mend=mend)
        counts = table.sources[source]
    elif measure in table.phases:
        counts = table.phases[measure]
    if measure == "decode" and source is None and window in table.windows:
        found_windows = table.windows[window]
        return Rates(found_windows.steps, found_windows.hits, found_windows.tokens), False
    if measure == "decode" and source is not None and window in table.source_windows.get(source, {}):
        found_windows = table.source_windows[source][window]
        return Rates(found_windows.steps, found_windows.hits, found_windows.tokens), False
    tokens = int(counts[0].sum()) // table.top_k
    size = CHUNK if measure == "prefill" else window
    if size == 1:
        return Rates(tokens, counts, counts), False
    missed = _power(1 - counts / tokens, size)
    # As many steps as tokens, each of `size` tokens, so that nothing is lost in rounding.
    hits = np.rint(tokens * (1 - missed)).astype(np.int64)
    return Rates(tokens, hits, counts * size), True


def _power(base: np.ndarray, exponent: int) -> np.ndarray:
    """By squaring: `pow` has not the same last bit on every machine."""
    result = np.ones_like(base)
    while exponent:
        if exponent & 1:
            result = result * base
        base, exponent = base * base, exponent >> 1
    return result

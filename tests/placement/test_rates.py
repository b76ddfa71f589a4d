"""How often experts are asked for in a step: counted where the table has windows, by independence where it has none."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moefit.errors import TraceError
from moefit.placement.rates import CHUNK, rates
from moefit.placement.recorded import table
from moefit.placement.windows import SIZES

from .cases import random_traffic
from .test_recorded import recording


def test_counted_windows_are_taken_as_they_are() -> None:
    made = table(recording([60, 50, 40, 30, 45], decode=1))
    for size in SIZES:
        found, assumed = rates(made, "decode", size)
        assert not assumed
        assert (found.steps, found.hits.tolist()) == (made.windows[size].steps, made.windows[size].hits.tolist())
        for name, windows in made.source_windows.items():
            mine, assumed = rates(made, "decode", size, name)
            assert not assumed
            assert mine.tokens.tolist() == windows[size].tokens.tolist()


@given(st.integers(0, 999), st.integers(1, 8))
def test_other_windows_are_of_independent_tokens(seed: int, size: int) -> None:
    """T steps of w tokens each, as many as tokens; exact to one step by fractions."""
    made = random_traffic(2, 6, 2, 50, seed)
    found, assumed = rates(made, "decode", size)
    assert assumed == (size > 1)
    assert found.steps == 50
    assert np.array_equal(found.tokens, made.counts * size)
    assert (found.hits <= np.minimum(found.steps, found.tokens)).all()
    for count, hits in zip(made.counts.ravel().tolist(), found.hits.ravel().tolist(), strict=True):
        assert abs(50 * (1 - (1 - Fraction(count, 50)) ** size) - hits) <= Fraction(501, 1000)


def test_a_chunk_of_prefill_is_large() -> None:
    made = table(recording([200, 300], decode=0.5))
    found, assumed = rates(made, "prefill")
    assert assumed
    assert made.prefill is not None
    assert np.array_equal(found.tokens, made.prefill * CHUNK)
    assert found.steps * CHUNK * made.top_k == found.tokens[0].sum()
    assert (found.hits[made.prefill > 0] == found.steps).all()  # of 4,096 tokens, some ask for each of five experts
    silent = replace(made, prefill=None, decode=None, windows={}, source_windows={})
    assert np.array_equal(rates(silent, "prefill")[0].tokens, made.counts * CHUNK)


def test_the_counts_behind_a_phase_that_is_not_known() -> None:
    made = table(recording([60, 50, 40, 30, 45], decode=0.6))
    alone = replace(made, windows={}, source_windows={})
    assert np.array_equal(rates(alone, "decode")[0].tokens, made.decode)
    assert np.array_equal(rates(alone, "decode", 1, "a")[0].tokens, made.sources["a"])
    with pytest.raises(TraceError, match="no such source.*expected one of a, .*found 'z'"):
        rates(made, "decode", 1, "z")

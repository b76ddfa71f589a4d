"""Drift: distances against plain loops, and chance told from change, also where conversations are alike."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefit.errors import TraceError
from moefit.placement import TrafficTable
from moefit.placement.drift import FEW, Drift, design_effect, distance, drift
from moefit.placement.recorded import Recorded, select, table
from moefit.placement.skew import window_shares

LAYERS, EXPERTS, TOP_K, LENGTH = 4, 48, 4, 60


def log(conversations: int, seed: int, change: float = 0.0, alike: float = 0.0, decode: int = LENGTH) -> Recorded:
    """Conversations of one traffic, moved away from it by `change`; alike: how much each has a taste of its own."""
    rng, shape = np.random.default_rng(seed), (LAYERS, 1, EXPERTS)
    popular = np.random.default_rng(99).gumbel(size=shape) * 1.2 + change * np.random.default_rng(7).gumbel(size=shape)
    ids = [
        np.argsort(-(popular + alike * rng.gumbel(size=shape) + rng.gumbel(size=(LAYERS, LENGTH, EXPERTS))), axis=2)
        for _ in range(conversations)
    ]
    phase = np.tile(np.arange(LENGTH) >= LENGTH - decode, conversations)
    return Recorded(
        list(np.concatenate(ids, axis=1)[:, :, :TOP_K].astype(np.uint16)),
        tuple(range(2, 2 + LAYERS)),
        EXPERTS,
        np.arange(conversations + 1) * LENGTH,
        phase.astype(np.int8),
        np.zeros(conversations, np.int16),
        ("a",),
    )


def compare(one: Recorded, other: Recorded, conversations: bool = True) -> Drift:
    return drift(table(one), table(other), (one, other) if conversations else (None, None))


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=6, max_size=6).filter(any), min_size=2, max_size=2),
)
def test_distances_are_those_of_plain_loops(rows: list[list[int]]) -> None:
    found = distance(np.array(rows[:1]), np.array(rows[1:]))
    p, q = ([count / sum(row) for count in row] for row in rows)
    variation = sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
    divergence = sum(
        part * math.log2(part / ((a + b) / 2)) / 2 for a, b in zip(p, q, strict=True) for part in (a, b) if part
    )
    assert found.variation[0] == pytest.approx(variation, abs=1e-12)
    assert found.divergence[0] == pytest.approx(divergence, abs=1e-12)
    assert 0 <= found.changed <= 1


def test_the_ends_of_the_scale() -> None:
    one = np.array([[5, 5, 0, 0, 0, 0], [5, 5, 0, 0, 0, 0]])
    same, opposite = distance(one, 3 * one), distance(one, one[:, ::-1])
    assert same.variation.tolist() == same.divergence.tolist() == [0, 0]
    assert opposite.variation.tolist() == opposite.divergence.tolist() == [1, 1]
    assert (same.changed, opposite.changed) == (0, 1)
    half = distance(one, np.array([[5, 0, 5, 0, 0, 0], [5, 5, 0, 0, 0, 0]]))
    assert half.variation.tolist() == [0.5, 0]
    assert half.changed == 0.25


@pytest.mark.parametrize("alike", [0.0, 0.7])
@pytest.mark.parametrize("seed", [1, 2])
def test_chance_is_told_from_change(alike: float, seed: int) -> None:
    """Other conversations of one traffic are at the floor; a traffic that moved is clear of it."""
    old = log(60, seed, alike=alike)
    same, moved = compare(old, log(40, seed + 10, alike=alike)), compare(old, log(40, seed + 20, 0.6, alike))
    assert 0.7 < same.times < 1.4
    assert not same.drifted
    assert "No drift to be seen" in same.verdict
    assert moved.drifted
    assert moved.found.changed > same.found.changed
    assert f"{moved.times:.1f} times what sampling alone gives" in moved.verdict
    assert moved.to_json()["variation_worst"] == moved.found.variation.max()


def test_conversations_that_are_alike_are_not_taken_for_drift() -> None:
    old, new = log(60, 1, alike=0.7), log(40, 2, alike=0.7)
    assert all(effect > 4 for effect in compare(old, new).effects)
    alone = compare(old, new, conversations=False)
    assert alone.effects == (1, 1)
    assert alone.drifted  # the trap that conversations keep from
    assert "Conversations were not recorded" in alone.verdict
    one_known = drift(table(old), table(new), (old, None))
    assert one_known.effects[0] == one_known.effects[1] > 4
    assert not one_known.drifted


def test_independent_tokens_have_no_design_effect_and_few_conversations_none_at_all() -> None:
    effect = design_effect(log(60, 3), decode=False)
    assert effect is not None
    assert 1 <= effect < 1.2
    assert design_effect(log(FEW - 1, 3), decode=False) is None
    assert design_effect(replace(log(20, 3), phase=np.zeros(20 * LENGTH, np.int8)), decode=True) is None


def test_decode_is_compared_where_both_have_some() -> None:
    old, new = log(20, 1, decode=20), log(20, 2, decode=30)
    found = compare(old, new)
    assert (found.compared, found.tokens) == ("decode", (400, 600))
    silent = replace(new, phase=np.full(20 * LENGTH, -1, np.int8))
    found = compare(old, silent)
    assert (found.compared, found.tokens) == ("all", (1200, 1200))
    assert compare(old, silent).to_json() == found.to_json()


def test_other_models_cannot_be_compared() -> None:
    one = table(log(3, 1))
    other = replace(one, layers=(0, 1, 2, 3))
    with pytest.raises(TraceError, match="different models cannot be compared"):
        drift(one, other)


@settings(max_examples=10)
@given(st.integers(0, 99))
def test_shares_of_windows(seed: int) -> None:
    """Distinct experts per activation fall with the window; independent tokens ask for what chance says."""
    recorded = select(log(20, seed), np.arange(20))
    shares = window_shares(table(recorded))
    assert [share.size for share in shares] == list(range(1, 9))
    assert shares[0].distinct == 1
    assert shares[0].independent == pytest.approx(1)
    for one, longer in pairwise(shares):
        assert one.distinct >= longer.distinct - 0.01
    assert shares[5].distinct == pytest.approx(shares[5].independent, abs=0.03)
    taste = window_shares(table(log(20, seed, alike=2.0)))
    assert taste[5].distinct < taste[5].independent - 0.03
    assert window_shares(TrafficTable(np.array([[2, 2]]), 2, (0,), 2)) == []

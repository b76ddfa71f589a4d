"""Bit allocation: optimal on small cases, within budget, honest about its prediction."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefit.errors import QuantizeError
from moefit.quantize.allocate import Choice, allocate, hedged, predicted_kl

KS = (2.0, 2.5, 3.0, 3.5, 4.0)


def random_choices(groups: int, seed: int) -> dict[str, list[Choice]]:
    rng = np.random.default_rng(seed)
    weight = np.exp(rng.standard_normal(groups))
    size = rng.integers(1, 4, groups) * 1000
    return {
        f"g{g}": [Choice(k, int(size[g] * k), float(weight[g] * 4.0**-k * rng.uniform(0.9, 1.1))) for k in KS]
        for g in range(groups)
    }


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(0, 10_000), st.floats(2.0, 4.2))
def test_small_cases_are_optimal(groups: int, seed: int, mean_bits: float) -> None:
    choices = random_choices(groups, seed)
    budget = int(sum(c[0].nbytes for c in choices.values()) / 2 * mean_bits)
    found = allocate(choices, budget, gap=0.0)
    best = min(
        sum(c.kl for c in picked)
        for picked in itertools.product(*choices.values())
        if sum(c.nbytes for c in picked) <= budget
    )
    assert found.kl == pytest.approx(best, rel=1e-6)
    assert found.nbytes <= budget
    assert found.bound <= found.kl * (1 + 1e-9)


def test_every_group_is_counted_as_chosen() -> None:
    choices = random_choices(40, 3)
    found = allocate(choices, int(sum(c[2].nbytes for c in choices.values())))
    taken = {g: next(c for c in choices[g] if c.bits == k) for g, k in found.bits.items()}
    assert set(found.bits) == set(choices)
    assert found.nbytes == sum(c.nbytes for c in taken.values())
    assert found.kl == pytest.approx(sum(c.kl for c in taken.values()))
    assert found.kl < sum(c[2].kl for c in choices.values())  # better than K = 3 everywhere
    assert found.kl - found.bound <= 1e-4 * found.kl * 1.01


def test_a_real_models_worth_of_experts_is_solved_to_the_gap() -> None:
    choices = random_choices(15_360, 5)
    found = allocate(choices, int(sum(c[2].nbytes for c in choices.values())))
    assert found.kl - found.bound <= 1e-4 * found.kl * 1.01


def test_sensitive_groups_get_more_bits() -> None:
    choices = {g: [Choice(k, int(1000 * k), s * 4.0**-k) for k in KS] for g, s in (("a", 1.0), ("b", 16.0))}
    assert allocate(choices, 6000).bits == {"a": 2.0, "b": 4.0}


def test_hedging_halves_the_spread_and_keeps_what_each_bit_buys() -> None:
    kl = torch.tensor([0.0, 1.0, 4.0, 15.0], dtype=torch.float64)  # mean 5
    assert hedged(kl).tolist() == pytest.approx([0.0, 5**0.5, 20**0.5, 75**0.5])
    assert torch.allclose(hedged(kl / 4), hedged(kl) / 4)  # one bit more: the same quarter for every expert
    assert hedged(torch.full((3,), 0.2)).tolist() == pytest.approx([0.2] * 3)
    assert hedged(torch.zeros(3)).tolist() == [0.0] * 3


def test_hedged_bits_lose_less_when_the_text_is_another() -> None:
    def cost(guide: torch.Tensor, truth: torch.Tensor) -> float:
        choices = {e: [Choice(k, int(1000 * k), float(g) * 4.0**-k) for k in KS] for e, g in enumerate(guide)}
        return sum(float(truth[e]) * 4.0**-k for e, k in allocate(choices, 3000 * len(guide)).bits.items())

    plain, tempered, uniform = 0.0, 0.0, 0.0
    for seed in range(8):
        draw = torch.Generator().manual_seed(seed)
        shared, first, second = torch.randn(3, 64, generator=draw, dtype=torch.float64)
        traffic, other = (shared + first).exp(), (shared + second).exp()  # agree by half, on the log scale
        plain += cost(traffic, other)
        tempered += cost(hedged(traffic), other)
        uniform += float(other.sum()) * 4.0**-3
    assert tempered < plain
    assert tempered < uniform


def test_bad_input_is_refused() -> None:
    choices = random_choices(3, 0)
    with pytest.raises(QuantizeError, match="too small"):
        allocate(choices, 10)
    choices["g1"][2] = Choice(3.0, 1000, math.nan)
    with pytest.raises(QuantizeError, match="no number") as caught:
        allocate(choices, 10**9)
    assert caught.value.where == "g1"


def test_predicted_kl_is_half_the_fisher_form() -> None:
    rng = np.random.default_rng(0)
    hin, hout = np.diag(rng.uniform(0.5, 1.5, 6)), np.diag(rng.uniform(0.5, 1.5, 4))
    hin, hout = hin * 6 / np.trace(hin), hout * 4 / np.trace(hout)
    error = rng.standard_normal((6, 4))
    fisher = 7.5 / 24 * np.kron(hin, hout)  # trace 7.5, summed over 10 tokens
    assert np.trace(fisher) == pytest.approx(7.5)
    form = np.trace(error.T @ hin @ error @ hout)
    expected = 0.5 * error.flatten() @ fisher @ error.flatten() / 10
    assert predicted_kl(form, 7.5, 6, 4, 10) == pytest.approx(expected)

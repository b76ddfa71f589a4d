"""Kronecker factors: exact where the Fisher matrix is a Kronecker product, shrunk and judged as documented."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefit.quantize.codebook import table_float32
from moefit.quantize.encode import encode_tiles
from moefit.quantize.hadamard import rotate_columns, rotate_rows
from moefit.quantize.kronecker import SHRINK_GRID, FactorSums, choose_regularization, held_out_error, shrink, unit
from moefit.quantize.ldlq import block_ldl, energy, ldlq

from .test_ldlq import correlated_hessian, random


def tokens(count: int, k: int, n: int, samples: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    x = random(count, k, seed=seed) @ random(k, k, seed=seed + 1)
    return x, torch.stack([random(count, n, seed=seed + 2 + s) @ random(n, n, seed=seed + 9) for s in range(samples)])


def test_sums_are_their_definition_in_any_order_and_batching() -> None:
    x, d = tokens(30, 16, 8, samples=3)
    once, parts = FactorSums(2, 16, 8), FactorSums(2, 16, 8)
    once.add(1, x, d)
    for piece in (slice(20, 30), slice(0, 20)):
        parts.add(1, x[piece], d[:, piece])
    hin = sum(d[s, t].square().sum() / 3 * torch.outer(x[t], x[t]) for s in range(3) for t in range(30))
    hout = sum(x[t].square().sum() / 3 * torch.outer(d[s, t], d[s, t]) for s in range(3) for t in range(30))
    torch.testing.assert_close(once.hin[1], hin, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(once.hout[1], hout, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(parts.hin, once.hin, rtol=1e-4, atol=1e-2)
    assert float(once.trace[1]) == pytest.approx(float(once.hin[1].trace()), rel=1e-4)
    assert float(once.trace[1]) == pytest.approx(float(once.hout[1].trace()), rel=1e-4)
    assert once.tokens.tolist() == [0, 30] and not once.hin[0].any()


def test_a_kronecker_fisher_matrix_is_found_again() -> None:
    """Every x with every d: sum of (x x^T) (x) (d d^T) is the product of both sums, up to the trace."""
    xs, ds = random(12, 16), random(9, 8, seed=4)
    sums = FactorSums(1, 16, 8)
    sums.add(0, xs.repeat_interleave(9, 0), ds.repeat(12, 1)[None])
    hin, hout = sums.factors(0.0, 0.0)
    form = float(sums.trace[0]) / (16 * 8) * torch.kron(hin[0], hout[0])
    torch.testing.assert_close(form, torch.kron(xs.T @ xs, ds.T @ ds), rtol=1e-3, atol=1e-3)


def test_shrinking_goes_by_tokens_and_leaves_the_layer_to_experts_without() -> None:
    sums = FactorSums(3, 16, 8)
    for expert, count in ((0, 10), (1, 1000)):
        sums.add(expert, *tokens(count, 16, 8, 1, seed=expert))
    hin, hout = sums.factors(100.0, 1e12)
    pooled = unit(sums.hin.sum(0))
    torch.testing.assert_close(hin[2], pooled)
    torch.testing.assert_close(hin[0], 10 / 110 * unit(sums.hin[0]) + 100 / 110 * pooled, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(hin[1], 1000 / 1100 * unit(sums.hin[1]) + 100 / 1100 * pooled, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(hout, unit(sums.hout.sum(0)).expand(3, -1, -1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(hin.diagonal(dim1=1, dim2=2).mean(1), torch.ones(3))


def test_an_untouched_layer_gives_zeros_not_nan() -> None:
    hin, hout = FactorSums(2, 16, 8).factors(1.0, 1.0)
    assert not hin.any() and not hout.any()
    assert not shrink(torch.zeros(1, 4, 4), torch.zeros(1, 4, 4), 0.5).any()


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1000))
def test_held_out_error_is_least_for_the_hessian_itself(seed: int) -> None:
    test = correlated_hessian(128, 400, seed=seed)[None]
    other = correlated_hessian(128, 400, seed=seed + 50)[None]
    own, wrong, none = (float(held_out_error(h, test, 0.01)) for h in (test, other, torch.eye(128)[None]))
    assert own < none < wrong or own < wrong
    assert none == pytest.approx(float(test.diagonal(dim1=1, dim2=2).mean()), rel=1e-4)


def test_held_out_error_predicts_what_ldlq_does() -> None:
    """Relative to plain rounding, on a white weight, for a trained Hessian that is not the tested one."""
    test, train = correlated_hessian(128, 500), correlated_hessian(128, 40) + 20 * torch.eye(128)
    weight = 0.94 * random(128, 256)[None]

    def encode(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        states = encode_tiles(np.ascontiguousarray(tiles.numpy()), "mul1", 3.0)
        return torch.from_numpy(states), torch.from_numpy(table_float32("mul1")[states])

    def measured(hessian: torch.Tensor) -> float:
        lower = block_ldl(hessian[None], 0.05).lower
        return float(energy(weight - ldlq(weight, lower, None, encode)[1], test, None))

    plain = float(energy(weight - ldlq(weight, torch.zeros(1, 128, 128), None, encode)[1], test, None))
    # held_out_error rotates first, which this weight, white either way, does not notice
    rotated = rotate_rows(rotate_columns(test)), rotate_rows(rotate_columns(train))
    predicted = float(held_out_error(rotated[1][None], rotated[0][None], 0.05)) / float(
        held_out_error(torch.eye(128)[None], rotated[0][None], 0.05)
    )
    assert measured(train) / plain == pytest.approx(predicted, rel=0.15)


def halves(experts: int, count: int, latent: int) -> tuple[FactorSums, FactorSums]:
    """Experts whose inputs and gradients have the same few directions, seen through `count` tokens a half."""
    mix_in, mix_out = random(latent, 128, seed=1), random(latent, 128, seed=2)
    both = []
    for half in range(2):
        sums = FactorSums(experts, 128, 128)
        for e in range(experts):
            seed = 100 * half + 10 * e
            x = random(count, latent, seed=seed) @ mix_in + 0.1 * random(count, 128, seed=seed + 1)
            d = random(count, latent, seed=seed + 2) @ mix_out + 0.1 * random(count, 128, seed=seed + 3)
            sums.add(e, x, d[None])
        both.append(sums)
    return both[0], both[1]


def test_little_traffic_is_shrunk_more_than_much() -> None:
    """All experts are alike here, so that with few tokens the layer's Hessian is the better estimate."""
    few = choose_regularization(*halves(4, 24, 16))
    assert few.shrink_in >= 8_000 and few.shrink_out >= 8_000
    # Experts that differ, with much traffic each: their own Hessians must be kept.
    first, second = FactorSums(4, 128, 128), FactorSums(4, 128, 128)
    for e in range(4):
        mix = random(16, 128, seed=50 + e)
        for sums, seed in ((first, e), (second, e + 7)):
            x = random(4000, 16, seed=seed) @ mix + 0.1 * random(4000, 128, seed=seed + 20)
            sums.add(e, x, random(4000, 16, seed=seed + 30)[None] @ mix)
    much = choose_regularization(first, second)
    assert much.shrink_in == SHRINK_GRID[0] and much.shrink_out == SHRINK_GRID[0]


def test_without_common_experts_the_strongest_is_taken() -> None:
    first, second = FactorSums(2, 128, 128), FactorSums(2, 128, 128)
    first.add(0, *tokens(5, 128, 128, 1))
    second.add(1, *tokens(5, 128, 128, 1))
    chosen = choose_regularization(first, second)
    assert (chosen.shrink_in, chosen.damping_out) == (SHRINK_GRID[-1], 0.2)


def test_sums_add_up() -> None:
    first, second = halves(2, 10, 4)
    merged = first + second
    assert merged.tokens.tolist() == [20, 20]
    torch.testing.assert_close(merged.hin, first.hin + second.hin)
    assert float(merged.trace[0]) == pytest.approx(float(first.trace[0] + second.trace[0]))

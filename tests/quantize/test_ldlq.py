"""Hadamards, block LDL and LDLQ: identities, grouped against plain, and the gain on correlated input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import hadamard

from moefit.errors import QuantizeError
from moefit.quantize.hadamard import matrix, rotate_columns, rotate_rows
from moefit.quantize.ldlq import block_ldl, ldlq, ldlq_reference, proxy_error


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).float()


def correlated_hessian(k: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """x x^T of tokens whose channels share a few strong directions, as activations do."""
    x = random(tokens, k, seed=seed) * 0.3 + random(tokens, 8, seed=seed + 1) @ random(8, k, seed=seed + 2)
    return x.T @ x


def round_to_grid(x: torch.Tensor) -> torch.Tensor:
    return torch.round(x * 2) / 2


def test_hadamard_is_sylvesters() -> None:
    np.testing.assert_allclose(matrix().numpy(), hadamard(128) / np.sqrt(128), rtol=1e-6)


def test_rotations_are_their_own_inverse_and_block_diagonal() -> None:
    x = random(256, 384)
    torch.testing.assert_close(rotate_rows(rotate_rows(x)), x, atol=1e-5, rtol=0)
    torch.testing.assert_close(rotate_columns(rotate_columns(x)), x, atol=1e-5, rtol=0)
    torch.testing.assert_close(rotate_rows(x)[128:], matrix() @ x[128:], atol=1e-5, rtol=0)
    torch.testing.assert_close(rotate_columns(x), rotate_rows(x.T).T, atol=1e-5, rtol=0)


@pytest.mark.parametrize("k", [16, 128, 256])
def test_block_ldl_reproduces_the_hessian(k: int) -> None:
    hessian = correlated_hessian(k, 4 * k)
    factor = block_ldl(hessian, 0.01)
    damped = hessian.double() + 0.01 * hessian.diagonal().mean().double() * torch.eye(k, dtype=torch.double)
    lower = factor.lower.double() + torch.eye(k, dtype=torch.double)
    inverse = torch.linalg.inv(lower)
    middle = inverse @ damped @ inverse.T  # D
    outside = middle.clone()
    for b in range(0, k, 16):
        outside[b : b + 16, b : b + 16] = 0
        assert torch.linalg.eigvalsh(middle[b : b + 16, b : b + 16]).min() > 0
        assert not factor.lower[b : b + 16, b:].any()  # strictly below the diagonal blocks
    assert outside.abs().max() < 1e-4 * middle.diagonal().max()


def test_block_ldl_of_nothing_and_of_one_token() -> None:
    assert not block_ldl(torch.zeros(32, 32), 0.05).lower.any()
    x = random(1, 64)
    assert torch.isfinite(block_ldl(x.T @ x, 0.025).lower).all()


def test_impossible_hessians_are_refused() -> None:
    with pytest.raises(QuantizeError, match="not finite"):
        block_ldl(torch.full((32, 32), float("nan")), 0.05)
    indefinite = torch.eye(32)
    indefinite[0, 0] = -1e6
    indefinite[1, 1] = 2e6
    with pytest.raises(QuantizeError, match="semidefinite"):
        block_ldl(indefinite, 1e-6)


def test_a_slightly_negative_pivot_raises_the_damping_and_says_so() -> None:
    hessian = correlated_hessian(64, 8)
    hessian[3, 3] -= 0.02 * hessian.diagonal().mean()
    assert block_ldl(hessian, 1e-3).damping > 1e-3


@pytest.mark.parametrize(("k", "n"), [(16, 16), (128, 32), (272, 48)])
def test_grouped_equals_plain(k: int, n: int) -> None:
    weight = random(k, n).double()
    lower = block_ldl(correlated_hessian(k, 2 * k), 0.05).lower.double()
    torch.testing.assert_close(
        ldlq(weight, lower, round_to_grid), ldlq_reference(weight, lower, round_to_grid), rtol=0, atol=0
    )


def test_without_rounding_nothing_changes() -> None:
    weight, lower = random(64, 32), block_ldl(correlated_hessian(64, 100), 0.05).lower
    torch.testing.assert_close(ldlq(weight, lower, lambda x: x), weight, rtol=0, atol=1e-4)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_feedback_beats_nearest_rounding_on_correlated_inputs(seed: int) -> None:
    weight, hessian = random(128, 32, seed=seed), correlated_hessian(128, 300, seed=seed)
    fed_back = ldlq(weight, block_ldl(hessian, 0.02).lower, round_to_grid)
    nearest = ldlq(weight, torch.zeros(128, 128), round_to_grid)
    torch.testing.assert_close(nearest, round_to_grid(weight))
    assert proxy_error(weight, fed_back, hessian) < 0.8 * proxy_error(weight, nearest, hessian)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.floats(1e-6, 1e6))
def test_invariances(seed: int, scale: float) -> None:
    """Columns are independent, and the scale of the Hessian does not matter."""
    weight, hessian = random(64, 48, seed=seed).double(), correlated_hessian(64, 200, seed=seed).double()
    lower = block_ldl(hessian, 0.05).lower
    whole = ldlq(weight, lower.double(), round_to_grid)
    torch.testing.assert_close(ldlq(weight[:, 16:32], lower.double(), round_to_grid), whole[:, 16:32], rtol=0, atol=0)
    torch.testing.assert_close(block_ldl(hessian * scale, 0.05).lower, lower, rtol=1e-4, atol=1e-5)
    error = proxy_error(weight, whole, hessian)
    assert proxy_error(weight * 2, whole * 2, hessian * scale) == pytest.approx(error, rel=1e-6)


def test_proxy_error_of_special_cases() -> None:
    weight = random(32, 16)
    assert proxy_error(weight, weight, None) == 0
    assert proxy_error(weight, torch.zeros(32, 16), torch.eye(32)) == pytest.approx(1)
    assert proxy_error(torch.zeros(32, 16), torch.zeros(32, 16), None) == 0

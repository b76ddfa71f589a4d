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
from moefit.quantize.ldlq import block_ldl, energy, from_ring, ldlq, ldlq_reference, proxy_error, to_ring
from moefit.quantize.trellis import to_tiles


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).float()


def correlated_hessian(k: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """x x^T of tokens whose channels share a few strong directions, as activations do."""
    x = random(tokens, k, seed=seed) * 0.3 + random(tokens, 8, seed=seed + 1) @ random(8, k, seed=seed + 2)
    return x.T @ x


def round_to_grid(x: torch.Tensor) -> torch.Tensor:
    return torch.round(x * 2) / 2


def on_a_grid(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An encoder without a trellis; its states number the tiles of one call, so that a misplaced one is seen."""
    states = torch.arange(len(tiles))[:, None].expand(-1, 256).to(torch.uint16)
    return states, round_to_grid(tiles)


def unchanged(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(tiles.shape, dtype=torch.uint16), tiles


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
    hessians = torch.stack([correlated_hessian(k, 4 * k, seed) for seed in (0, 5)])
    factor = block_ldl(hessians, 0.01)
    for hessian, lower in zip(hessians, factor.lower, strict=True):
        damped = hessian.double() + 0.01 * hessian.diagonal().mean().double() * torch.eye(k, dtype=torch.double)
        inverse = torch.linalg.inv(lower.double() + torch.eye(k, dtype=torch.double))
        middle = inverse @ damped @ inverse.T  # D
        outside = middle.clone()
        for i in range(0, k, 16):
            outside[i : i + 16, i : i + 16] = 0
            assert not lower[i : i + 16, i:].any()  # zero on and above the diagonal blocks
        assert float(outside.abs().max()) < 1e-4 * float(damped.abs().max())
    assert factor.damping.tolist() == [0.01, 0.01]


def test_block_ldl_of_nothing_and_of_one_token() -> None:
    x = random(1, 64)
    factor = block_ldl(torch.stack([torch.zeros(64, 64), x.T @ x]), 0.025)
    assert not factor.lower[0].any()
    assert torch.isfinite(factor.lower).all() and factor.lower[1].any()


def test_impossible_hessians_are_refused() -> None:
    with pytest.raises(QuantizeError, match="not finite"):
        block_ldl(torch.full((1, 32, 32), float("nan")), 0.05)
    indefinite = torch.eye(32)
    indefinite[0, 0] = -1e6
    indefinite[1, 1] = 2e6
    with pytest.raises(QuantizeError, match="semidefinite"):
        block_ldl(torch.stack([torch.eye(32), indefinite]), 1e-6)


def test_a_slightly_negative_pivot_raises_that_matrix_damping_and_says_so() -> None:
    hessian = correlated_hessian(64, 8)
    broken = hessian.clone()
    broken[3, 3] -= 0.02 * hessian.diagonal().mean()
    damping = block_ldl(torch.stack([hessian, broken]), 1e-3).damping
    assert damping[0] == 1e-3 and damping[1] > 1e-3


SHAPES = [(16, 16), (128, 32), (272, 48), (48, 144)]


@pytest.mark.parametrize("two_sided", [False, True])
@pytest.mark.parametrize(("k", "n"), SHAPES)
@pytest.mark.parametrize("shared", [False, True])
def test_batched_equals_the_formula(k: int, n: int, shared: bool, two_sided: bool) -> None:
    weights = torch.stack([random(k, n, seed=s) for s in range(3)]).double()
    hin = torch.stack([correlated_hessian(k, 2 * k, seed=s) for s in range(1 if shared else 3)])
    hout = torch.stack([correlated_hessian(n, 2 * n, seed=s + 9) for s in range(1 if shared else 3)])
    inner = block_ldl(hin, 0.05).lower.double()
    outer = block_ldl(hout, 0.05).lower.double() if two_sided else None
    states, values = ldlq(weights, inner, outer, on_a_grid)
    assert states.shape == (3, k // 16, n // 16, 256) and states.dtype == torch.uint16
    for i, weight in enumerate(weights):
        mine = slice(0, 1) if shared else slice(i, i + 1)
        plain = ldlq_reference(weight, inner[mine][0], None if outer is None else outer[mine][0], on_a_grid)
        torch.testing.assert_close(values[i], plain, rtol=0, atol=0)


@pytest.mark.parametrize("two_sided", [False, True])
def test_states_lie_where_their_values_do(two_sided: bool) -> None:
    """The encoder here returns tiles of one random value each, and that value's bits as states."""
    values = torch.rand(4096, generator=torch.Generator().manual_seed(1)).half()
    drawn = 0

    def encode(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal drawn
        take = values[drawn : drawn + len(tiles)]
        drawn += len(tiles)
        return take.view(torch.uint16)[:, None].expand(-1, 256), take.float()[:, None].expand(-1, 256)

    outer = block_ldl(correlated_hessian(48, 200)[None], 0.05).lower if two_sided else None
    states, quantized = ldlq(torch.zeros(2, 64, 48), torch.zeros(1, 64, 64), outer, encode)
    assert drawn == 2 * 4 * 3
    expected = states.view(torch.float16).float()[..., 0]  # [2, 4, 3]
    torch.testing.assert_close(quantized.view(2, 4, 16, 3, 16).amax(dim=(2, 4)), expected)
    torch.testing.assert_close(quantized.view(2, 4, 16, 3, 16).amin(dim=(2, 4)), expected)


def test_tile_order_is_the_trellis() -> None:
    x = random(16, 32)
    torch.testing.assert_close(to_ring(x.view(16, 2, 16).transpose(0, 1)), torch.from_numpy(to_tiles(x.numpy())[0]))
    torch.testing.assert_close(from_ring(to_ring(x[:, :16])), x[:, :16])


@pytest.mark.parametrize("two_sided", [False, True])
def test_without_rounding_nothing_changes(two_sided: bool) -> None:
    weight, lower = random(64, 32)[None], block_ldl(correlated_hessian(64, 100)[None], 0.05).lower
    outer = block_ldl(correlated_hessian(32, 100)[None], 0.05).lower if two_sided else None
    torch.testing.assert_close(ldlq(weight, lower, outer, unchanged)[1], weight, rtol=0, atol=1e-4)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_feedback_beats_nearest_rounding_on_each_side(seed: int) -> None:
    weight = random(128, 64, seed=seed)[None]
    hin, hout = correlated_hessian(128, 300, seed=seed), correlated_hessian(64, 200, seed=seed + 3)
    inner, outer = block_ldl(hin[None], 0.02).lower, block_ldl(hout[None], 0.02).lower
    nearest = ldlq(weight, torch.zeros(1, 128, 128), None, on_a_grid)[1]
    torch.testing.assert_close(nearest, round_to_grid(weight))
    one, two = (ldlq(weight, inner, o, on_a_grid)[1] for o in (None, outer))
    assert proxy_error(weight, one, hin) < 0.8 * proxy_error(weight, nearest, hin)
    assert proxy_error(weight, two, hin, hout) < 0.8 * proxy_error(weight, one, hin, hout)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.floats(1e-6, 1e6))
def test_invariances(seed: int, scale: float) -> None:
    """One-sided, columns are independent; transposed, both sides change places; a Hessian's scale does not matter."""
    weight, hessian = random(64, 48, seed=seed).double()[None], correlated_hessian(64, 200, seed=seed).double()
    other = correlated_hessian(48, 200, seed=seed + 1).double()
    lower, outer = (block_ldl(h[None], 0.05).lower.double() for h in (hessian, other))
    whole = ldlq(weight, lower, None, on_a_grid)[1]
    torch.testing.assert_close(ldlq(weight[..., 16:32], lower, None, on_a_grid)[1], whole[..., 16:32], rtol=0, atol=0)
    torch.testing.assert_close(block_ldl(hessian[None] * scale, 0.05).lower.double(), lower, rtol=1e-4, atol=1e-5)
    both = ldlq(weight, lower, outer, on_a_grid)[1]
    torch.testing.assert_close(ldlq(weight.mT, outer, lower, on_a_grid)[1].mT, both, rtol=0, atol=0)
    error = proxy_error(weight, both, hessian, other)
    assert proxy_error(weight * 2, both * 2, hessian * scale, other) == pytest.approx(error, rel=1e-6)


def test_energy_is_the_kronecker_form() -> None:
    error = random(16, 8).double()
    hin, hout = correlated_hessian(16, 40).double(), correlated_hessian(8, 40).double()
    flat = error.flatten()
    assert float(energy(error, hin, hout)) == pytest.approx(float(flat @ torch.kron(hin, hout) @ flat), rel=1e-9)
    assert float(energy(error, None, None)) == pytest.approx(float(flat @ flat), rel=1e-12)


def test_proxy_error_of_special_cases() -> None:
    weight = random(32, 16)
    assert proxy_error(weight, weight, None) == 0
    assert proxy_error(weight, torch.zeros(32, 16), torch.eye(32)) == pytest.approx(1)
    assert proxy_error(torch.zeros(32, 16), torch.zeros(32, 16), None) == 0

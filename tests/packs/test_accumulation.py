"""Hessians and Kronecker factors are summed in float32: how far that is from float64 (docs/calibration.md says it)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from moefit.calibrate.borders import GROUP_TOKENS
from moefit.packs.expert import mixed_hessian
from moefit.quantize.kronecker import FactorSums

TOKENS, WIDTH, OUT = 200_000, 64, 48
BOUND = 3e-5
"""Of the mean diagonal, for every entry."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in a build's workers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def heavy(tokens: int, width: int, seed: int) -> Tensor:
    """Like hidden states: heavy tails between tokens, a few channels 30 times as large, a mean that is not zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, width, generator=generator) + 0.3
    x *= torch.randn(tokens, 1, generator=generator).exp()
    x[:, :3] *= 30
    return x


def error(found: Tensor, exact: Tensor) -> float:
    """Largest error of an entry, as a share of the mean diagonal (the trace over the width)."""
    return float((found.double() - exact).abs().max() / exact.diagonal().mean())


def test_the_input_hessian_of_many_tokens() -> None:
    x, none = heavy(TOKENS, WIDTH, 0), torch.zeros(0, WIDTH)
    exact = x.double().T @ x.double() / TOKENS
    found = error(mixed_hessian(x, none, x[:1], 0.0), exact)
    print(f"input Hessian: {found:.1e}")
    assert 0 < found < BOUND
    rounded = x.bfloat16().float()
    assert error(rounded.T @ rounded / TOKENS, exact) > 3 * BOUND  # inputs kept in bfloat16 would be noticed


def test_both_factors_summed_group_by_group() -> None:
    x, d = heavy(TOKENS, WIDTH, 1), heavy(TOKENS, OUT, 2) * 1e-4
    sums = FactorSums(1, WIDTH, OUT)
    for start in range(0, TOKENS, GROUP_TOKENS):
        part = slice(start, start + GROUP_TOKENS)
        sums.add(0, x[part], d[None, part])
    wide, narrow = x.double(), d.double()
    hin = (wide * narrow.square().sum(1)[:, None]).T @ wide
    hout = (narrow * wide.square().sum(1)[:, None]).T @ narrow
    trace = (wide.square().sum(1) * narrow.square().sum(1)).sum()
    found = {"hin": error(sums.hin[0], hin), "hout": error(sums.hout[0], hout)}
    print(f"factors: {found}, trace {abs(float(sums.trace / trace) - 1):.1e}")
    assert all(0 < value < BOUND for value in found.values())
    assert float(sums.trace) == pytest.approx(float(trace), rel=1e-6)
    assert int(sums.tokens) == TOKENS

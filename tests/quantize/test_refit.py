"""Scale refit: lowers the metric it is given, finds exact scales back, and leaves dead channels alone."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefit.quantize.ldlq import energy
from moefit.quantize.refit import refit_scales

from .test_ldlq import correlated_hessian, random


def problem(seed: int, noise: float = 0.2) -> tuple[torch.Tensor, ...]:
    weights = torch.stack([random(48, 32, seed=seed + i) for i in range(2)])
    codes = weights + noise * torch.stack([random(48, 32, seed=seed + 10 + i) for i in range(2)])
    hin = torch.stack([correlated_hessian(48, 100, seed=seed + i) for i in range(2)])
    hout = correlated_hessian(32, 100, seed=seed + 7)[None]
    return weights, codes, torch.ones(2, 48), torch.ones(2, 32), hin, hout


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.booleans(), st.booleans())
def test_the_metric_falls_with_every_round(seed: int, with_in: bool, with_out: bool) -> None:
    w, codes, suh, svh, hin, hout = problem(seed)
    metric = hin if with_in else None, hout if with_out else None
    last = energy(w - codes * suh[:, :, None] * svh[:, None, :], *metric)
    for rounds in (1, 2, 4):
        a, b = refit_scales(w, codes, suh, svh, *metric, rounds)
        now = energy(w - codes * a[:, :, None] * b[:, None, :], *metric)
        assert bool((now <= last * (1 + 1e-6)).all())
        last = now


def test_each_step_is_the_least_squares_solution() -> None:
    """After svh's step alone, no other svh does better: the gradient with respect to it vanishes."""
    w, codes, suh, svh, hin, hout = (t.double() for t in problem(3, noise=0.01))
    hin, hout = (h + h.diagonal(dim1=1, dim2=2).mean() * torch.eye(h.shape[1]) for h in (hin, hout))
    one = refit_scales(w, codes, suh, svh, hin, hout, 1)
    svh_only = refit_scales(w.mT, codes.mT, svh, suh, hout.expand(2, -1, -1), hin, 1)  # suh goes first here
    for scales, transposed in ((one, False), (svh_only, True)):
        a, b = (scales[1], scales[0]) if transposed else scales
        left = a.double().requires_grad_()
        right = b.double().requires_grad_()
        total = energy(w - codes * left[:, :, None] * right[:, None, :], hin, hout).sum()
        gradient = torch.autograd.grad(total, right if transposed else left)[0]  # of the side fitted last
        assert float(gradient.abs().max()) < 1e-4 * float(total.detach())


def test_true_scales_are_found_back() -> None:
    codes = random(48, 32)[None]
    suh, svh = 1 + 0.2 * random(1, 48).clamp(-1, 1), 1 + 0.2 * random(1, 32, seed=1).clamp(-1, 1)
    w = codes * suh[:, :, None] * svh[:, None, :]
    a, b = refit_scales(w, codes, torch.ones(1, 48), torch.ones(1, 32), None, correlated_hessian(32, 90)[None], 20)
    torch.testing.assert_close(codes * a[:, :, None] * b[:, None, :], w, rtol=2e-3, atol=2e-3)


def test_dead_channels_and_hopeless_codes_keep_their_scales() -> None:
    w, codes, suh, svh, hin, hout = problem(0)
    suh[0, 3] = svh[1, 4] = 0
    a, b = refit_scales(w, codes, suh, svh, hin, hout)
    assert a[0, 3] == 0 and b[1, 4] == 0 and torch.isfinite(a).all() and torch.isfinite(b).all()
    a, b = refit_scales(w, -codes, suh, svh, hin, hout)  # every refit would turn a sign
    assert bool((a >= 0).all()) and bool((b >= 0).all())
    a, b = refit_scales(torch.zeros_like(w), torch.zeros_like(codes), suh, svh, hin, hout)
    torch.testing.assert_close((a, b), (suh, svh))


@pytest.mark.parametrize("rounds", [0, 2])
def test_weights_of_a_group_do_not_mix(rounds: int) -> None:
    w, codes, suh, svh, hin, hout = problem(1)
    both = refit_scales(w, codes, suh, svh, hin, hout, rounds)
    for i in range(2):
        one = slice(i, i + 1)
        alone = refit_scales(w[one], codes[one], suh[one], svh[one], hin[one], hout, rounds)
        torch.testing.assert_close(tuple(t[one] for t in both), alone, rtol=1e-6, atol=0)


def test_a_group_ends_after_the_thread_count_was_set() -> None:
    """torch 2.13's batched LU then never ends on the CPU; the trap is in another process, so that it can be killed."""
    script = (
        "import torch; from moefit.quantize.refit import refit_scales; torch.set_num_threads(2);"
        "w = torch.randn(2, 384, 384); c = w + torch.randn(2, 384, 384) / 8;"
        "ones = torch.ones(2, 384); refit_scales(w, c, ones, ones, None, None)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)

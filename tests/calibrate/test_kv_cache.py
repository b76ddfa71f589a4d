"""The rounding of the key/value caches: properties, a plain reference, and its size on the goldens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moefit.calibrate.backward import sample_targets
from moefit.calibrate.borders import forward_borders
from moefit.calibrate.checkpoint import Checkpoint
from moefit.calibrate.deepseek_v41 import V41Model
from moefit.calibrate.deepseek_v41.kv_cache import round_index, round_latents, round_window
from moefit.calibrate.stream import run_model
from moefit.errors import CalibrationError, CheckpointError

from . import test_backward
from .oracle import E2M1, E4M3, nearest, rounded
from .test_v41_config import released

ROUND: dict[str, Callable[[Tensor], Tensor]] = {
    "window": round_window,
    "latent": round_latents,
    "index": round_index,
}
BLOCK = {"window": 32, "latent": 16, "index": 32}
NUMBERS = {"window": E4M3, "latent": E2M1, "index": E2M1}
kinds = st.sampled_from(sorted(ROUND))


def random(seed: int, size: float, rows: int = 5, columns: int = 96) -> Tensor:
    """Blocks of many magnitudes around 2**size, some all zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns // 16, 16, generator=generator)
    x = x * torch.exp2(size + 4 * torch.randn(rows, columns // 16, 1, generator=generator)).clamp(max=64)
    x[0, 0] = 0
    return x.flatten(1)


def scales(x: Tensor, kind: str) -> Tensor:
    """The scale of each block, float64 [..., blocks, 1]."""
    largest = x.unflatten(-1, (-1, BLOCK[kind])).abs().amax(-1, keepdim=True).double()
    if kind == "window":
        return torch.exp2(torch.ceil(torch.log2(largest.clamp(min=1e-4) / 448)))
    if kind == "index":
        return torch.exp2(torch.ceil(torch.log2((largest / 6).clamp(min=2.0**-126))))
    return torch.from_numpy(nearest((largest / 6).clamp(2.0**-9, 448).numpy(), E4M3))


@given(kinds, st.integers(0, 2**31), st.floats(-8, 4))
@settings(max_examples=80, deadline=None)
def test_against_the_plain_reference(kind: str, seed: int, size: float) -> None:
    """oracle.rounded searches in a list of all numbers; blocks share a scale and nothing else."""
    x = random(seed, size)
    found = ROUND[kind](x)
    expected = np.stack([rounded(row, kind) for row in x.numpy().astype(np.float64)])
    assert found.dtype == torch.float32 and np.array_equal(found.numpy(), expected.astype(np.float32))


@given(kinds, st.integers(0, 2**31), st.floats(-8, 4))
@settings(max_examples=80, deadline=None)
def test_every_value_is_on_the_grid_and_near(kind: str, seed: int, size: float) -> None:
    x = random(seed, size)
    y = ROUND[kind](x)
    scale = scales(x, kind)
    blocks, values = (t.double().unflatten(-1, (-1, BLOCK[kind])) for t in (x, y))
    assert torch.isin((values / scale).abs(), torch.from_numpy(NUMBERS[kind])).all()
    # Half a step: of the smallest numbers, or relative to the number's size (E2M1: 1 between 4 and 6 seen from 5).
    least, relative = (2.0**-10, 2.0**-4) if kind == "window" else (0.25, 0.2)
    if kind == "latent":  # below the smallest scale but one, the largest magnitudes are cut off at 6
        ordinary = scale >= 2.0**-6
        blocks, values, scale = (t[ordinary.expand_as(t)] for t in (blocks, values, scale.expand_as(blocks)))
    assert ((blocks - values).abs() <= torch.maximum(least * scale, relative * blocks.abs()) * (1 + 1e-6)).all()


@given(kinds, st.integers(0, 2**31), st.floats(-2, 4))
@settings(max_examples=80, deadline=None)
def test_rounding_again_changes_nothing(kind: str, seed: int, size: float) -> None:
    """Except where an E4M3 scale is subnormal: blocks of a latent whose magnitudes all lie below 6 * 2^-6 = 0.09."""
    x = random(seed, size)
    if kind == "latent":
        blocks = x.unflatten(-1, (-1, 16))
        x = blocks.where(blocks.abs().amax(-1, keepdim=True) >= 6 * 2.0**-6, 0.0).flatten(1)
    once = ROUND[kind](x)
    assert torch.equal(ROUND[kind](once), once)
    assert torch.equal(ROUND[kind](-x), -once)
    if kind == "index":  # whose scales have no smallest one within reach
        assert torch.equal(ROUND[kind](4 * x), 4 * once)


@given(kinds, st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_blocks_do_not_look_at_each_other(kind: str, seed: int) -> None:
    x = random(seed, 0.0)
    other = x.clone()
    other[2, BLOCK[kind] : 2 * BLOCK[kind]] *= 100
    same = torch.ones_like(x, dtype=torch.bool)
    same[2, BLOCK[kind] : 2 * BLOCK[kind]] = False
    assert torch.equal(ROUND[kind](x)[same], ROUND[kind](other)[same])
    assert not torch.equal(ROUND[kind](x), ROUND[kind](other))


def test_ties_go_to_the_even_code_and_the_ends_hold() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 4)
    even = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0] * 4)
    assert torch.equal(round_index(ties), even) and torch.equal(round_latents(ties), even)
    for kind, function in ROUND.items():
        assert not function(torch.zeros(64)).any(), kind
        assert function(torch.full((64,), 1e-30)).isfinite().all(), kind
    assert torch.equal(round_latents(torch.full((16,), 1e6)), torch.full((16,), 6 * 448.0))
    assert torch.equal(round_window(torch.full((32,), 448.0)), torch.full((32,), 448.0))
    assert round_window(torch.full((32,), float("nan"))).isnan().all(), "left for the forward's own check"


def test_gradients_pass_through() -> None:
    for function in ROUND.values():
        x = torch.randn(3, 64, requires_grad=True)
        weights = torch.randn(3, 64)
        (function(x) * weights).sum().backward()
        assert torch.equal(x.grad, weights)


# In the model


def test_kl_to_the_goldens(tiny_v41: Path, shared: Path) -> None:
    """The goldens have no rounding; with it, KL is known to be 0.01 to 0.03 on this model (../shared/models)."""
    golden = safetensors.torch.load_file(shared / "golden" / "tiny_v41_logits.safetensors")
    names = sorted(key.removesuffix(".ids") for key in golden if key.endswith(".ids"))
    model = V41Model(Checkpoint.open(tiny_v41), kv_quantization=True)
    states = run_model(model, [golden[f"{name}.ids"].long() for name in names], threads=2)
    divergence = []
    for name, state in zip(names, states, strict=True):
        p = golden[f"{name}.logits"].double().log_softmax(-1)
        q = model.logits(state, slice(-len(p), None)).double().log_softmax(-1)
        divergence.append((p.exp() * (p - q)).sum(-1))
    assert all(0.005 < float(kl.mean()) < 0.05 for kl in divergence), [float(kl.mean()) for kl in divergence]
    assert 0.01 < float(torch.cat(divergence).mean()) < 0.03  # measured: 0.0158 over 605 positions


def test_the_number_of_threads_does_not_show(tiny_v41: Path) -> None:
    model = V41Model(Checkpoint.open(tiny_v41), kv_quantization=True)
    windows = test_backward.random_windows((130, 3, 70))
    one, three = (run_model(model, windows, threads) for threads in (1, 3))
    for a, b in zip(one, three, strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_it_is_off_unless_asked_for(tiny_v41: Path) -> None:
    checkpoint = Checkpoint.open(tiny_v41)
    assert not V41Model(checkpoint).config.kv_quantization
    assert V41Model(checkpoint, kv_quantization=True).config.kv_quantization
    assert not V41Model(checkpoint).config.served_with_kv_quantization
    assert released().served_with_kv_quantization


def test_widths_that_do_not_divide_are_refused() -> None:
    for name in ("head_dim", "index_head_dim"):
        config = dataclasses.replace(released(), **{name: 80})
        with pytest.raises(CheckpointError, match=rf"text_config\.{name}.*a multiple of 32"):
            config.with_kv_quantization()


def test_the_streamed_backward_equals_autograd(tiny_v41: Path, tmp_path: Path) -> None:
    """With rounding in the forward, straight through on the way back."""
    model = test_backward.open_model(tiny_v41, test_backward.DoubleCheckpoint)
    model = V41Model(model.checkpoint, kv_quantization=True)
    windows = test_backward.random_windows((70, 3))
    borders = forward_borders(model, windows, tmp_path, 2)
    targets = sample_targets(borders, 1, 0, 2)
    found = test_backward.gathered(borders, targets)
    expected = test_backward.whole_model(model, windows, targets)
    test_backward.assert_close(found, expected, lambda layer: test_backward.EXACT)


def test_borders_of_another_arithmetic_are_refused(tiny_v41: Path, tmp_path: Path) -> None:
    checkpoint, windows = Checkpoint.open(tiny_v41), test_backward.random_windows((3,))
    forward_borders(V41Model(checkpoint), windows, tmp_path, 2)
    with pytest.raises(CalibrationError, match="changed since it began: kv_quantization"):
        forward_borders(V41Model(checkpoint, kv_quantization=True), windows, tmp_path, 2)

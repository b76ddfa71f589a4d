"""The streamed backward: equal to autograd over the whole model; the hand-written gradients of the forward's parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moefit.calibrate.backward import ExpertGradients, backward_layers, sample_targets
from moefit.calibrate.borders import Borders, forward_borders
from moefit.calibrate.checkpoint import Checkpoint
from moefit.calibrate.deepseek_v41 import V41Layer, V41Model
from moefit.calibrate.deepseek_v41.blocks import mean_square
from moefit.calibrate.deepseek_v41.experts import route, routing_weights
from moefit.calibrate.deepseek_v41.hyper import sinkhorn
from moefit.calibrate.family import Model

from ..small_model import Inputs

LENGTHS = (40, 1, 150)
"""The last is longer than the sliding window (64) and, at ratio 1, than index_topk (128)."""
GROUP_TOKENS = 100
EXACT = 1e-10
"""Largest difference in float64, relative to a layer's largest gradient; measured: 4e-12."""
FLOAT32 = {3: 2e-5, 0: 2e-2}
"""First layer -> the same in float32, from there on; measured: 2.3e-6 and 2.1e-3. At the Engram of layers 3 and 1 the
gradient of sqrt(|dot|) amplifies the rounding of single tokens whose dot is nearly 0, whoever computes it."""


def random_windows(lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(16, 4096, (length,), generator=generator) for length in lengths]


@dataclass(frozen=True)
class DoubleCheckpoint(Checkpoint):
    """All weights in float64, and so all arithmetic."""

    def weight(self, *given: Any) -> Tensor:
        return super().weight(*given).double()

    def rows(self, prefix: str, indices: Tensor) -> Tensor:
        return super().rows(prefix, indices).double()


def open_model(path: Path, kind: type[Checkpoint] = Checkpoint) -> V41Model:
    return V41Model(
        kind(**{f.name: getattr(found, f.name) for found in [Checkpoint.open(path)] for f in fields(found)})
    )


Gradients = dict[tuple[int, int], ExpertGradients]


def gathered(borders: Borders, targets: list[Tensor], threads: int = 2) -> Gradients:
    """All that a pass hands out, the groups of each expert put together."""
    parts: dict[tuple[int, int], list[ExpertGradients]] = {}
    for layer in backward_layers(borders, targets, threads):
        for piece in layer.experts():
            parts.setdefault((layer.layer, piece.expert), []).append(piece)
    return {
        (layer, expert): ExpertGradients(
            expert,
            *(torch.cat([getattr(p, name) for p in pieces]) for name in ("tokens", "x", "a")),
            *(torch.cat([getattr(p, name) for p in pieces], dim=1) for name in ("d_gate", "d_up", "d_down")),
        )
        for (layer, expert), pieces in parts.items()
    }


def whole_model(model: Model, windows: list[Tensor], targets: list[Tensor]) -> Gradients:
    """The plain reference: autograd over everything at once, token by token nothing clever."""
    kept: dict[tuple[int, int], list[tuple[Tensor, ...]]] = {}
    losses: list[list[Tensor]] = []
    first = 0
    layers = [model.load_layer(index) for index in range(model.layers)]
    experts = [[layer.expert(e) for e in range(layer.experts)] for layer in layers]
    with torch.enable_grad():
        for ids, target in zip(windows, targets, strict=True):
            state = model.embed(ids)
            for layer in layers:
                before = layer.before_experts(state, ids)
                x, topk_ids, topk_weights = before.x, before.topk_ids, before.topk_weights
                out = torch.zeros_like(x)
                for expert, (w1, w3, w2) in enumerate(experts[layer.index]):
                    tokens, slots = (topk_ids == expert).nonzero(as_tuple=True)
                    if not len(tokens):
                        continue
                    gate, up = x[tokens] @ w1.T, x[tokens] @ w3.T
                    if not gate.requires_grad:  # layer 0 before anything needs a gradient
                        gate.requires_grad_(), up.requires_grad_()
                    a = layer.activation(gate, up)
                    y = a @ w2.T
                    out = out.index_add(0, tokens, y * topk_weights[tokens, slots].unsqueeze(1))
                    kept.setdefault((layer.index, expert), []).append((tokens + first, x[tokens], a, gate, up, y))
                state = layer.after_experts(before.state, out)
            losses.append([F.cross_entropy(model.logits(state), row, reduction="sum") for row in target])
            first += len(ids)
    wanted = {key: [t for row in rows for t in row[3:]] for key, rows in kept.items()}
    flat = [tensor for tensors in wanted.values() for tensor in tensors]
    samples = []
    for number in range(len(targets[0])):
        loss = torch.stack([window[number] for window in losses]).sum()
        found = iter(torch.autograd.grad(loss, flat, retain_graph=True))
        samples.append({key: [next(found) for _ in tensors] for key, tensors in wanted.items()})
    return {
        key: ExpertGradients(
            key[1],
            *(torch.cat([row[column] for row in rows]).detach() for column in range(3)),
            *(torch.stack([torch.cat(sample[key][part::3]) for sample in samples]) for part in range(3)),
        )
        for key, rows in kept.items()
    }


def assert_close(found: Gradients, expected: Gradients, tolerance: Callable[[int], float]) -> None:
    assert found.keys() == expected.keys()
    for name in ("x", "a", "d_gate", "d_up", "d_down"):
        largest: dict[int, float] = {}
        for (layer, _), piece in expected.items():
            largest[layer] = max(largest.get(layer, 0.0), float(getattr(piece, name).abs().max()))
        for key, piece in expected.items():
            ours, theirs = getattr(found[key], name), getattr(piece, name)
            assert ours.shape == theirs.shape
            assert float((ours - theirs).abs().max()) <= tolerance(key[0]) * largest[key[0]], (key, name)
    for key, piece in expected.items():
        assert torch.equal(found[key].tokens, piece.tokens)


@dataclass(frozen=True)
class Exact:
    """tiny-v41 in float64: two samples, two groups of windows, and the gradients of the reference."""

    borders: Borders
    targets: list[Tensor]
    expected: Gradients


@pytest.fixture(scope="module")
def exact(tiny_v41: Path, tmp_path_factory: pytest.TempPathFactory) -> Exact:
    model, windows = open_model(tiny_v41, DoubleCheckpoint), random_windows()
    borders = forward_borders(model, windows, tmp_path_factory.mktemp("exact"), 2, group_tokens=GROUP_TOKENS)
    targets = sample_targets(borders, 2, 0, 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # thousands of small operations: a team of threads would mostly wait for itself
    try:
        return Exact(borders, targets, whole_model(model, windows, targets))
    finally:
        torch.set_num_threads(threads)


def test_equal_to_autograd_over_the_whole_model(exact: Exact) -> None:
    """In float64, where a gradient that goes missing anywhere cannot hide.

    All that layers share is there: compressed latents of two sources, read one layer and more behind, candidates, pre.
    """
    assert [list(group) for group in exact.borders.groups] == [[0, 1], [2]]
    assert any(not torch.equal(*target) for target in exact.targets)
    found = gathered(exact.borders, exact.targets)
    assert {layer for layer, _ in found} == set(range(6))
    assert_close(found, exact.expected, lambda layer: EXACT)


def test_equal_in_float32(tiny_v41: Path, exact: Exact, tmp_path: Path) -> None:
    """To the reference in float64, for the same targets."""
    borders = forward_borders(open_model(tiny_v41), list(exact.borders.windows), tmp_path, 2)
    assert_close(gathered(borders, exact.targets), exact.expected, lambda layer: FLOAT32[3 if layer >= 3 else 0])


@pytest.mark.parametrize("forgotten", ["compressed_kv", "pre"])
def test_the_comparison_would_notice(exact: Exact, monkeypatch: pytest.MonkeyPatch, forgotten: str) -> None:
    """A pass that does not carry a shared tensor's gradient back is told from the right one."""
    carried = tuple(name for name in V41Model.smooth if name != forgotten)
    monkeypatch.setattr(V41Model, "smooth", carried)
    with pytest.raises(AssertionError):
        assert_close(gathered(exact.borders, exact.targets), exact.expected, lambda layer: EXACT)


# The hand-written gradients of the forward's parts


def test_hand_written_gradients() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    assert torch.equal(mean_square(x), x.square().mean(-1))
    assert torch.autograd.gradcheck(mean_square, x)
    logits = torch.randn(2, 4, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: sinkhorn(t, 20, 1e-6), logits)
    assert torch.autograd.gradcheck(lambda t: sinkhorn(t, 1, 1e-6), logits)


def test_routing_weights_of_chosen_experts(small: Inputs) -> None:
    layer = V41Layer.load(open_model(small.model), 0)
    x = torch.randn(20, 256, generator=torch.Generator().manual_seed(4))
    ids, weights = route(x, layer.gate, layer.gate_bias, layer.config)
    torch.testing.assert_close(routing_weights(x, ids, layer.gate, layer.config), weights)
    # Logits of the third expert that underflow: its score is 0, where the square root has no gradient.
    gate = torch.zeros(3, 256)
    gate[2, 0] = -200.0
    x = torch.ones(1, 256, requires_grad=True)
    routing_weights(x, torch.tensor([[0, 1]]), gate, layer.config)[0, 0].backward()
    assert x.grad is not None and x.grad.isfinite().all()

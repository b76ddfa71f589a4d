"""Layer streaming: routed experts against a plain loop, and no trace of how many threads did the work."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moefit.calibrate.checkpoint import Checkpoint
from moefit.calibrate.deepseek_v41 import V41Layer, V41Model, clamped_swiglu
from moefit.calibrate.family import State
from moefit.calibrate.stream import (
    Capture,
    Experts,
    adjacent_tokens,
    capture_layer,
    expert_forward,
    finish_layer,
    routed_experts,
    run_layer,
    run_model,
    tokens_by_expert,
)
from moefit.errors import CalibrationError


@pytest.fixture(scope="module")
def model(tiny_v41: Path) -> V41Model:
    return V41Model(Checkpoint.open(tiny_v41))


@pytest.fixture(scope="module")
def ids() -> list[Tensor]:
    """Windows of different lengths; what they say does not matter here."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(16, 4096, (length,), generator=generator) for length in (70, 1, 33, 150)]


Matrices = tuple[Tensor, Tensor, Tensor]


def random_moe(seed: int, tokens: int, experts: int, k: int) -> tuple[Tensor, Tensor, Tensor, list[Matrices]]:
    """x [N, 16], expert ids and weights [N, k], and each expert's w1 [8, 16], w3 [8, 16], w2 [16, 8]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 16, generator=generator)
    ids = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :k]
    weights = torch.rand(tokens, k, generator=generator)
    shapes = ((8, 16), (8, 16), (16, 8))
    matrices = []
    for _ in range(experts):
        w1, w3, w2 = (torch.randn(*shape, generator=generator) for shape in shapes)
        matrices.append((w1, w3, w2))
    return x, ids, weights, matrices


@given(st.integers(0, 2**31), st.integers(1, 30), st.integers(1, 9), st.data())
@settings(max_examples=40, deadline=None)
def test_routed_experts_against_a_loop(seed: int, tokens: int, experts: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, experts))
    x, ids, weights, matrices = random_moe(seed, tokens, experts, k)
    found = routed_experts(x, ids, weights, lambda e: matrices[e], partial(clamped_swiglu, limit=2.0), threads=2)
    for token in range(tokens):
        expected = torch.zeros(16, dtype=torch.float64)
        for expert, weight in zip(ids[token].tolist(), weights[token].double(), strict=True):
            w1, w3, w2 = (w.double() for w in matrices[expert])
            gate, up = (w1 @ x[token].double()).clamp(max=2.0), (w3 @ x[token].double()).clamp(-2.0, 2.0)
            expected += weight * (w2 @ (gate * torch.sigmoid(gate) * up))
        assert torch.allclose(found[token].double(), expected, atol=1e-4)


def test_experts_that_nobody_reaches_are_not_loaded() -> None:
    x, _, weights, matrices = random_moe(1, 6, 8, 2)
    ids = torch.tensor([[1, 5]] * 3 + [[5, 2]] * 3)
    loaded = []

    def weights_of(expert: int) -> Matrices:
        loaded.append(expert)
        return matrices[expert]

    routed_experts(x, ids, weights, weights_of, partial(clamped_swiglu, limit=10.0), threads=1)
    assert loaded == [1, 2, 5]


def test_tokens_by_expert() -> None:
    groups = tokens_by_expert(torch.tensor([[3, 0], [0, 7], [7, 3]]), torch.tensor([[1.0, 2], [3, 4], [5, 6]]))
    assert {e: (t.tolist(), w.tolist()) for e, (t, w) in groups.items()} == {
        0: ([0, 1], [2.0, 3.0]),
        3: ([0, 2], [1.0, 6.0]),
        7: ([1, 2], [4.0, 5.0]),
    }
    assert list(groups) == [0, 3, 7]


def with_router(layer: V41Layer, gate: Tensor, bias: Tensor, k: int) -> V41Layer:
    """The layer with another router: gate [E, H], bias [E], top-k."""
    config = replace(layer.config, n_routed_experts=len(gate), num_experts_per_tok=k)
    return replace(layer, gate=gate, gate_bias=bias, config=config)


def captured(layer: V41Layer, x: Tensor, bounds: list[int]) -> Capture:
    return Capture(x, *layer.route(x), bounds)


def pieces(capture: Capture) -> list[tuple[Tensor, Tensor]]:
    """The capture as `adjacent_tokens` takes it, window by window."""
    cuts = [capture.window(index) for index in range(len(capture.bounds) - 1)]
    return [(capture.x[at], capture.topk_ids[at]) for at in cuts]


@given(st.integers(0, 2**31), st.integers(1, 30), st.integers(1, 9), st.integers(0, 40), st.data())
@settings(max_examples=60, deadline=None)
def test_adjacent_tokens_against_a_loop(
    model: V41Model, seed: int, tokens: int, experts: int, enough: int, data: st.DataObject
) -> None:
    """By the plain definition, from every token's whole order of the experts."""
    k = data.draw(st.integers(1, experts))
    generator = torch.Generator().manual_seed(seed)
    x, gate, bias = (torch.randn(*shape, generator=generator) for shape in ((tokens, 16), (experts, 16), (experts,)))
    layer = with_router(model.load_layer(0), gate, bias, k)
    cut = data.draw(st.integers(0, tokens))
    capture = captured(layer, x, sorted({0, cut, tokens}))
    order = ((1 + (x @ gate.T).exp()).log().sqrt() + bias).argsort(descending=True)  # [N, E]
    expected = {}
    for expert in range(experts):
        own = [t for t in range(tokens) if expert in order[t, :k]]
        behind = [t for rank in range(k, min(2 * k, experts)) for t in range(tokens) if order[t, rank] == expert]
        if len(own) < enough and behind:
            expected[expert] = behind[: enough - len(own)]
    found = adjacent_tokens(layer, pieces(capture), enough, 2)
    assert {expert: places.tolist() for expert, places in found.items()} == expected


def test_an_expert_nobody_chose_gets_the_tokens_that_nearly_did(model: V41Model) -> None:
    """Rank 2 of all tokens, in traffic order, before rank 3 ... ; experts beyond rank 2k get nothing."""
    bias = torch.tensor([400.0, 300.0, 200.0, 100.0, 0.0])
    layer = with_router(model.load_layer(0), torch.zeros(5, 16), bias, 2)  # every token ranks 0, 1, 2, 3, 4
    capture = captured(layer, torch.randn(6, 16), [0, 4, 6])
    assert {e: t.tolist() for e, t in adjacent_tokens(layer, pieces(capture), 4, 1).items()} == {
        2: [0, 1, 2, 3],
        3: [0, 1, 2, 3],
    }
    assert adjacent_tokens(layer, pieces(capture), 7, 1)[2].tolist() == [0, 1, 2, 3, 4, 5]
    assert adjacent_tokens(layer, pieces(capture), 0, 1) == {}


def test_the_router_is_not_asked_again_without_need(model: V41Model, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = with_router(model.load_layer(0), torch.zeros(3, 16), torch.zeros(3), 3)  # every token chooses all
    capture = captured(layer, torch.randn(6, 16), [0, 6])
    assert adjacent_tokens(layer, pieces(capture), 7, 1) == {}  # nobody stands behind the top-k
    monkeypatch.setattr(V41Layer, "next_ranks", None)
    assert adjacent_tokens(layer, pieces(capture), 6, 1) == {}


def same(a: Capture, b: Capture) -> bool:
    pairs = ((a.x, b.x), (a.topk_ids, b.topk_ids), (a.topk_weights, b.topk_weights))
    return a.bounds == b.bounds and all(torch.equal(x, y) for x, y in pairs)


def test_the_number_of_threads_does_not_show(model: V41Model, ids: list[Tensor]) -> None:
    """Bit for bit, whatever the caller's own setting is."""
    runs = []
    before = torch.get_num_threads()
    for threads, callers in ((1, 1), (2, 2), (3, 1)):
        torch.set_num_threads(callers)
        states = [model.embed(window) for window in ids]
        captures = []
        for index in range(model.config.num_hidden_layers):
            layer = model.load_layer(index)
            captures.append(run_layer(layer, states, ids, layer.expert, threads))
        assert torch.get_num_threads() == callers
        adjacent = [
            adjacent_tokens(model.load_layer(index), pieces(capture), 40, threads)
            for index, capture in enumerate(captures)
        ]
        runs.append((states, captures, adjacent))
    torch.set_num_threads(before)
    assert any(runs[0][2])
    for states, captures, adjacent in runs[1:]:
        for found, expected in zip(adjacent, runs[0][2], strict=True):
            assert found.keys() == expected.keys() and all(torch.equal(found[e], expected[e]) for e in found)
        assert all(same(a, b) for a, b in zip(captures, runs[0][1], strict=True))
        for a, b in zip(states, runs[0][0], strict=True):
            assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_capture_holds_what_each_window_sends_to_the_experts(model: V41Model, ids: list[Tensor]) -> None:
    layer = model.load_layer(0)
    states = [model.embed(window) for window in ids]
    capture = capture_layer(layer, states, ids, threads=2)
    assert capture.bounds == [0, 70, 71, 104, 254]
    finish_layer(layer, states, capture, layer.expert, threads=2)
    originals = [layer.expert(expert) for expert in range(model.config.n_routed_experts)]
    for w, window in enumerate(ids):
        before = layer.before_experts(model.embed(window), window)
        tokens, x = capture.window(w), before.x
        topk_ids, topk_weights = layer.route(x)
        assert torch.allclose(capture.x[tokens], x, atol=1e-5)
        assert torch.equal(capture.topk_ids[tokens], topk_ids)
        assert torch.allclose(capture.topk_weights[tokens], topk_weights, atol=1e-6)
        routed = torch.zeros_like(x)
        for t in range(len(x)):
            for expert, weight in zip(topk_ids[t].tolist(), topk_weights[t], strict=True):
                routed[t] += weight * expert_forward(x[t : t + 1], originals[expert], layer.activation)[0]
        expected = layer.after_experts(before.state, routed)
        assert torch.allclose(states[w]["residual"], expected["residual"], atol=1e-4)


def test_experts_can_be_replaced(model: V41Model, ids: list[Tensor]) -> None:
    """Swapping in the same weights changes nothing; zeroing one layer's experts changes the outcome."""
    reference = run_model(model, ids, threads=2)

    def zeroed(index: int) -> list[State]:
        def experts(layer: V41Layer) -> Experts:
            def weights(expert: int) -> Matrices:
                w1, w3, w2 = layer.expert(expert)
                return w1, w3, w2 * (layer.index != index)

            return weights

        return run_model(model, ids, 2, experts)

    for a, b, c in zip(reference, zeroed(-1), zeroed(5), strict=True):
        assert torch.equal(a["residual"], b["residual"])
        assert not torch.allclose(a["residual"], c["residual"], atol=1e-2)


def test_a_value_that_is_not_finite_is_named(model: V41Model, ids: list[Tensor]) -> None:
    states = [model.embed(window) for window in ids]
    states[2]["residual"][3, 0, 7] = torch.nan
    with pytest.raises(CalibrationError, match="layer 0, window 2"):
        capture_layer(model.load_layer(0), states, ids, threads=2)

"""Passes over the traffic and its copies: what stays of them, and what they show of a layer's experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from moefit.calibrate import passes as passes_module
from moefit.calibrate.backward import backward_layers, sample_targets
from moefit.calibrate.borders import Borders, forward_borders
from moefit.calibrate.checkpoint import Checkpoint
from moefit.calibrate.deepseek_v41.model import V41Model
from moefit.calibrate.passes import LayerTraffic, run_passes
from moefit.calibrate.stream import capture_layer, finish_layer, tokens_by_expert
from moefit.progress import Silent

from ..small_model import Inputs, digests

LENGTHS = (40, 9, 23, 31)
GROUP = 60  # tokens: two groups of windows


@pytest.fixture(scope="module")
def model(mini: Inputs) -> V41Model:
    return V41Model(Checkpoint.open(mini.model))


@pytest.fixture(scope="module")
def windows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(20, 4000, (length,), generator=generator) for length in LENGTHS]


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    def grouped(*given: object, **named: object) -> Borders:
        return forward_borders(*given, group_tokens=GROUP, **named)  # type: ignore[arg-type]

    def opened(*given: object) -> Borders:
        return borders_module_open(*given, group_tokens=GROUP)  # type: ignore[arg-type]

    borders_module_open = passes_module.open_borders
    monkeypatch.setattr(passes_module, "forward_borders", grouped)
    monkeypatch.setattr(passes_module, "open_borders", opened)


def test_gradients_are_those_of_the_backward(model: V41Model, windows: list[Tensor], tmp_path: Path) -> None:
    """Every pass's, expert by expert, computed again from what stayed on disk; the halves are windows by eights."""
    passes = run_passes(model, windows, tmp_path / "passes", 1, 2, Silent())
    assert [len(borders.groups) for borders in passes] == [2, 2]
    assert [torch.equal(a, b) for a, b in zip(passes[0].windows, passes[1].windows, strict=True)] != [True] * 4
    index, expert = 1, 1
    expected: dict[str, list[Tensor]] = {name: [] for name in ("x", "a", "d_gate", "d_up", "d_down")}
    for number, kept in enumerate(passes):
        borders = forward_borders(model, kept.windows, tmp_path / f"again-{number}", 1, group_tokens=GROUP)
        for layer in backward_layers(borders, sample_targets(borders, 1, number, 1), 1):
            for piece in layer.experts():
                if (layer.layer, piece.expert) == (index, expert):
                    for name, parts in expected.items():
                        parts.append(getattr(piece, name))
    layer = model.load_layer(index)
    found = list(LayerTraffic(layer, passes).gradients(expert, layer.expert(expert)))
    assert {half for half, _ in found} == {0}  # four windows: all in the first eight
    for name, parts in expected.items():
        rows = [part.flatten(0, -2) for part in parts]
        again = torch.cat([getattr(piece, name).flatten(0, -2) for _, piece in found])
        torch.testing.assert_close(again, torch.cat(rows), rtol=1e-6, atol=1e-9, msg=name)


def test_halves_go_by_eights(model: V41Model, tmp_path: Path) -> None:
    windows = [torch.arange(500, 504) + n for n in range(18)]
    layer = model.load_layer(0)
    traffic = LayerTraffic(layer, run_passes(model, windows, tmp_path, 0, 1, Silent()))
    seen = [0, 0]
    for expert in range(2):
        for half, piece in traffic.gradients(expert, layer.expert(expert)):
            seen[half] += len(piece.tokens)
    assert seen == [10 * 4, 8 * 4]


def test_what_a_layer_saw_is_the_streamed_forward_s(model: V41Model, windows: list[Tensor], tmp_path: Path) -> None:
    """Inputs, routing, own, spread and adjacent tokens over groups against one capture of all windows."""
    (borders,) = run_passes(model, windows, tmp_path, None, 2, Silent())
    assert not list(tmp_path.rglob("states-*")) and not list(tmp_path.rglob("outputs-*"))
    states = [model.embed(window) for window in windows]
    for index in range(3):
        layer = model.load_layer(index)
        capture = capture_layer(layer, states, windows, 1)
        traffic = LayerTraffic(layer, [borders])
        assert traffic.tokens == sum(LENGTHS)
        assert torch.equal(traffic.topk_ids, capture.topk_ids)
        chosen = torch.tensor([70, 0, 102, 39, 40, 70])
        assert torch.equal(traffic.inputs(chosen), capture.x[chosen])
        assert torch.equal(traffic.spread(7), capture.x[torch.linspace(0, 102, 7).long()])
        routed = tokens_by_expert(capture.topk_ids, capture.topk_weights)
        for expert in range(2):
            own = capture.x[routed[expert][0]] if expert in routed else capture.x[:0]
            assert torch.equal(traffic.own(expert), own)
            assert traffic.counts[expert] == len(own)
        near = traffic.adjacent(60, 2)
        assert near
        for expert, tokens in near.items():  # top-1 of two experts: whoever did not choose it, nearly did
            others = torch.tensor([t for t in range(103) if t not in routed[expert][0].tolist()])
            assert torch.equal(tokens, others[: 60 - len(routed[expert][0])])
        finish_layer(layer, states, capture, layer.expert, 1)


class Killed(BaseException):
    """Stands for kill -9."""


@pytest.mark.parametrize("copies", [None, 1])
def test_stopped_before_and_after_every_commit(
    model: V41Model, windows: list[Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: int | None
) -> None:
    windows = windows[1:3]
    run_passes(model, windows, tmp_path / "whole", copies, 1, Silent())
    expected = digests(tmp_path / "whole")
    kinds = {Path(name).name[:6] for name in expected}
    assert kinds == {"border", "inputs"} | ({"output", "backwa", "done.j", "next.s"} if copies else set())
    rename, stops, hit = Path.replace, 0, True
    while hit:
        hit = False

        def renamed(path: Path, target: Path, after: bool = stops % 2 == 1) -> Path:
            nonlocal hit
            if hit or target.exists():
                return rename(path, target)
            hit = True
            if after:
                rename(path, target)
            raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", renamed)
            try:
                run_passes(model, windows, tmp_path / "killed", copies, 1, Silent())
            except Killed:
                stops += 1
    assert digests(tmp_path / "killed") == expected
    assert stops > (6 if copies is None else 40)

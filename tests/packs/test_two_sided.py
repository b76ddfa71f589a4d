"""Two-sided experts: their bytes and reported errors against the definition, put together here from gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moefit.calibrate.checkpoint import Checkpoint
from moefit.calibrate.deepseek_v41.experts import clamped_swiglu
from moefit.calibrate.deepseek_v41.model import V41Model
from moefit.calibrate.passes import LayerTraffic, run_passes
from moefit.packs.build import prepare
from moefit.packs.expert import ADJACENT_WEIGHT
from moefit.packs.factors import layer_factors, quantize_two_sided
from moefit.packs.reader import Pack
from moefit.progress import Silent
from moefit.quantize.kronecker import DAMPING_GRID
from moefit.quantize.ldlq import proxy_error

from ..small_model import RECIPE, Built
from .test_build import experts_of


def test_two_sided_experts_are_what_the_passes_say(mini_pack: Built, tmp_path: Path) -> None:
    """The written bytes again, and the reported errors from them, with Hessians put together by their definition."""
    index, expert = 1, 0
    prepared = prepare(mini_pack.inputs.request(tmp_path / "pack", gate=False))
    model = V41Model(prepared.source)
    windows = [torch.from_numpy(window.ids).long() for window in prepared.windows]
    layer = model.load_layer(index)
    traffic = LayerTraffic(layer, run_passes(model, windows, tmp_path / "passes", 0, 2, Silent()))
    weights = layer.expert(expert)
    factors = layer_factors(traffic, 2)
    adjacent = traffic.adjacent(RECIPE.enough_tokens, 1)
    near = traffic.inputs(adjacent[expert])
    torch.set_num_threads(1)
    ((tensors, report),) = quantize_two_sided(traffic, [expert], adjacent, factors, RECIPE, prepared.layout.layout)
    row = experts_of(mini_pack.path)[2 * index + expert]
    assert vars(report) == row
    pack = Checkpoint.open(mini_pack.path)
    for name, tensor in tensors.items():
        assert pack.bytes(name) == tensor.reshape(-1).view(torch.uint8).numpy().tobytes(), name

    pieces = {e: [piece for _, piece in traffic.gradients(e, layer.expert(e))] for e in range(len(traffic.counts))}

    def sums(e: int, p: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hin, Hout and the trace of one expert, in float64."""
        x = torch.cat([piece.a if p == "w2" else piece.x for piece in pieces[e]]).double()
        name = {"w1": "d_gate", "w3": "d_up", "w2": "d_down"}[p]
        d = torch.cat([getattr(piece, name)[0] for piece in pieces[e]]).double()
        d2, x2 = d.square().sum(1), x.square().sum(1)
        return (x * d2[:, None]).T @ x, (d * x2[:, None]).T @ d, (x2 * d2).sum()

    inner = clamped_swiglu(near @ weights[0].T, near @ weights[1].T, model.config.swiglu_limit)
    for p, source, decoded in zip(("w1", "w3", "w2"), weights, Pack(mini_pack.path).expert(index, expert), strict=True):
        every = [sums(e, p) for e in pieces]
        prior_in, prior_out, trace = (sum(parts) for parts in zip(*every, strict=True))
        own_in, own_out, _ = every[expert]
        seen = (inner if p == "w2" else near).double()
        own_in = own_in + ADJACENT_WEIGHT * trace / traffic.tokens * (seen.T @ seen) / seen.square().sum(1).mean()
        shrink_in, damping_in, shrink_out, damping_out = row["regularization"][p]
        assert row["damping"][p] == damping_in and damping_out in DAMPING_GRID
        tokens = row["tokens"] + ADJACENT_WEIGHT * row["adjacent"]

        def mixed(own: torch.Tensor, prior: torch.Tensor, share: float) -> torch.Tensor:
            return share * own / own.diagonal().mean() + (1 - share) * prior / prior.diagonal().mean()

        hin = mixed(own_in, prior_in, tokens / (tokens + shrink_in))
        hout = mixed(own_out, prior_out, row["tokens"] / (row["tokens"] + shrink_out))
        computed = proxy_error(source.T, decoded.T, hin, hout)
        assert computed == pytest.approx(row["proxy_error"][p], rel=2e-3), p
        assert abs(proxy_error(source.T, decoded.T, hin, None) - computed) > 0.01 * computed

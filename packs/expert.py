"""Quantize one routed expert from what the traffic showed of it, and the small file that keeps the result."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from ..calibrate.deepseek_v41.experts import clamped_swiglu
from ..calibrate.layout import expert_prefix
from ..errors import CalibrationError, QuantizeError
from ..files import write_atomic
from ..quantize.linear import decode, quantize_linears
from .recipe import Recipe


@dataclass(frozen=True)
class ExpertReport:
    """tokens: that the router sent to this expert. adjacent: further ones, for which it came just behind the top-k.
    own_share, adjacent_share, prior_share: what they and the prior weigh in its Hessian, 1 in all. proxy_error: projection -> tr(E^T H E) / tr(W^T H W) as decoded from the stored
    bytes. damping: projection -> the share that Cholesky needed. identity: projections quantized without any
    Hessian, because even the prior carried nothing."""

    layer: int
    expert: int
    tokens: int
    adjacent: int
    own_share: float
    adjacent_share: float
    prior_share: float
    proxy_error: dict[str, float]
    damping: dict[str, float]
    identity: list[str]

    @staticmethod
    def from_json(value: dict[str, Any]) -> ExpertReport:
        return ExpertReport(**value)


def mixed_hessian(own: Tensor, prior: Tensor, shrinkage: float) -> Tensor:
    """float32 [k, k]: mean of x x^T over an expert's own tokens [n, k], shrunk towards the prior's [m, k].

    Few tokens make a noisy estimate; the prior is biased but steady. With n = 0 the prior stands alone.
    """
    count = len(own)
    share = count / (count + shrinkage) if count else 0.0
    hessian = (prior.T @ prior) * ((1 - share) / len(prior))
    if count:
        hessian += (own.T @ own) * (share / count)
    return hessian


def quantize_expert(
    layer: int,
    expert: int,
    weights: tuple[Tensor, Tensor, Tensor],
    own: Tensor,
    adjacent: Tensor,
    prior: Tensor,
    limit: float,
    recipe: Recipe,
) -> tuple[dict[str, Tensor], ExpertReport]:
    """EXL3 tensors of one expert and how well they fit.

    weights: w1 (gate) [I, H], w3 (up) [I, H], w2 (down) [H, I], as in the checkpoint. own: float32 [n, H], inputs
    the router sent here. adjacent: float32 [a, H], inputs it nearly sent here, which count as much as its own; prior:
    float32 [m, H], inputs spread over all traffic. limit: of the clamped SwiGLU. Gate and up share one Hessian; down's is taken behind gate and up as decoded from their packed bytes.
    """
    names = {p: expert_prefix(layer, expert, p) for p in ("w1", "w3", "w2")}
    gate, up, down = (w.T.contiguous() for w in weights)  # [H, I], [H, I], [I, H]
    near = torch.cat([own, adjacent]) if len(adjacent) else own  # [n + a, H]
    linears = quantize_linears(
        {names["w1"]: gate, names["w3"]: up}, mixed_hessian(near, prior, recipe.shrinkage), None, recipe.options
    )
    decoded = {
        p: decode(q.trellis, q.suh, q.svh, q.codebook)[: q.shape[0], : q.shape[1]]
        for p in ("w1", "w3")
        for q in (linears[names[p]],)
    }
    inner_near, inner_prior = (
        clamped_swiglu(x @ decoded["w1"], x @ decoded["w3"], limit) for x in (near, prior)
    )  # [n + a, I], [m, I]
    if not inner_prior.isfinite().all() or not inner_near.isfinite().all():
        raise CalibrationError("the expert's activations are not finite", where=names["w2"])
    linears |= quantize_linears(
        {names["w2"]: down}, mixed_hessian(inner_near, inner_prior, recipe.shrinkage), None, recipe.options
    )
    tensors = {
        name: torch.from_numpy(array)
        for prefix, linear in linears.items()
        for name, array in linear.tensors(prefix).items()
    }
    weight = len(near) + recipe.shrinkage if len(near) else 1.0
    report = ExpertReport(
        layer,
        expert,
        len(own),
        len(adjacent),
        len(own) / weight,
        len(adjacent) / weight,
        recipe.shrinkage / weight if len(near) else 1.0,
        {p: linears[name].proxy_error for p, name in names.items()},
        {p: linears[name].damping for p, name in names.items()},
        [p for p, name in names.items() if linears[name].identity_hessian],
    )
    if not all(torch.isfinite(torch.tensor(list(report.proxy_error.values())))):
        raise QuantizeError("the error of a quantized expert is not finite", where=names["w1"])
    return tensors, report


class ExpertFile:
    """One finished expert on disk, before its shard is written: its tensors and its report."""

    def __init__(self, folder: Path, layer: int, expert: int) -> None:
        self.path = folder / f"expert-{layer:03d}-{expert:04d}.safetensors"

    def exists(self) -> bool:
        return self.path.is_file()

    def write(self, tensors: dict[str, Tensor], report: ExpertReport) -> None:
        write_atomic(self.path, save(tensors, metadata={"report": json.dumps(asdict(report), sort_keys=True)}))

    def report(self) -> ExpertReport:
        with safe_open(self.path, "pt") as file:
            return ExpertReport.from_json(json.loads(file.metadata()["report"]))

    def tensor(self, name: str) -> bytes:
        with safe_open(self.path, "pt") as file:
            return file.get_tensor(name).reshape(-1).view(torch.uint8).numpy().tobytes()

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

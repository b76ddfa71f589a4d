"""Quantize one routed expert from what the traffic showed of it, and the small file that keeps the result."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..calibrate.layout import Layout
from ..calibrate.stream import Activation
from ..errors import CalibrationError, PackError, QuantizeError
from ..files import write_atomic
from ..quantize.linear import Linear, decode, quantize_linears
from .recipe import Recipe

ADJACENT_WEIGHT: Final = 0.25
"""What a token just behind the top-k counts against one that chose the expert.

Measured by `quantize.kronecker.held_out_error` on examples/tiny-v41, calibrated on 2 to 8 windows of its traffic (64 to
380 tokens per expert in the median) against 40 others. At shrinkage 1000 a weight of 0.25 lowers the mean error of gate
by 0.04 to 0.17 % and of down by 0.01 to 0.05 %; 0.1 and 0.5 win less, 1 loses up to 0.5 %. At shrinkage 100 it wins up
to 2.5 %.
"""


@dataclass(frozen=True)
class ExpertReport:
    """tokens: of the traffic, that the router sent to this expert. adjacent: further ones, for which it came just
    behind the top-k. own_share, adjacent_share, prior_share: what they and the prior weigh in its input Hessian
    (`shares`); own tokens are those of the rewritten copies too. By projection: proxy_error, error of the decoded
    tensors relative to the weight, as the Hessians see both, four digits; damping, the share that Cholesky needed;
    regularization, shrinkage and damping of the input side, and of the output side where there is one. damped:
    projections that needed more damping. identity: projections quantized without any Hessian, because even the prior
    carried nothing."""

    layer: int
    expert: int
    tokens: int
    adjacent: int
    own_share: float
    adjacent_share: float
    prior_share: float
    proxy_error: dict[str, float]
    damping: dict[str, float]
    damped: list[str]
    regularization: dict[str, list[float]]
    identity: list[str]

    @staticmethod
    def from_json(value: dict[str, Any]) -> ExpertReport:
        return ExpertReport(**value)


def shares(own: int, adjacent: int, shrinkage: float) -> tuple[float, float, float]:
    """What own tokens, adjacent ones and the prior weigh in an expert's Hessian, 1 in all.

    A token weighs 1, an adjacent one ADJACENT_WEIGHT, the prior as much as `shrinkage` tokens; all where there is none.
    """
    tokens = own + ADJACENT_WEIGHT * adjacent
    if not tokens:
        return 0.0, 0.0, 1.0
    own_share, adjacent_share = own / (tokens + shrinkage), ADJACENT_WEIGHT * adjacent / (tokens + shrinkage)
    return own_share, adjacent_share, max(0.0, 1 - own_share - adjacent_share)


def mixed_hessian(own: Tensor, adjacent: Tensor, prior: Tensor, shrinkage: float) -> Tensor:
    """float32 [k, k]: mean of x x^T over the expert's tokens, own [n, k] and adjacent [a, k], and the prior's [m, k].

    Few tokens make a noisy estimate; the prior is biased but steady, adjacent tokens lie in between. See `shares`.
    """
    own_share, adjacent_share, prior_share = shares(len(own), len(adjacent), shrinkage)
    hessian = (prior.T @ prior) * (prior_share / len(prior))
    for x, share in ((own, own_share), (adjacent, adjacent_share)):
        if len(x):
            hessian += (x.T @ x) * (share / len(x))
    return hessian


def quantize_expert(
    layer: int,
    expert: int,
    weights: tuple[Tensor, Tensor, Tensor],
    own: Tensor,
    adjacent: Tensor,
    prior: Tensor,
    activation: Activation,
    recipe: Recipe,
    layout: Layout,
) -> tuple[dict[str, Tensor], ExpertReport]:
    """EXL3 tensors of one expert and how well they fit.

    weights: w1 (gate) [I, H], w3 (up) [I, H], w2 (down) [H, I], as in the checkpoint. own: float32 [n, H], inputs
    the router sent here. adjacent: float32 [a, H], inputs it nearly sent here. prior: float32 [m, H], inputs spread
    over all traffic. activation: the layer's. layout: names the tensors.
    Gate and up share one Hessian; down's is taken behind gate and up as decoded from their packed bytes.
    """
    names = {p: layout.expert_prefix(layer, expert, p) for p in ("w1", "w3", "w2")}
    gate, up, down = (w.T.contiguous() for w in weights)  # [H, I], [H, I], [I, H]
    hessian = mixed_hessian(own, adjacent, prior, recipe.shrinkage)
    linears = quantize_linears({names["w1"]: gate, names["w3"]: up}, hessian, None, recipe.options)
    decoded = {
        p: decode(q.trellis, q.suh, q.svh, q.codebook)[: q.shape[0], : q.shape[1]].to(gate.device)
        for p in ("w1", "w3")
        for q in (linears[names[p]],)
    }
    own, adjacent, prior = (activation(x @ decoded["w1"], x @ decoded["w3"]) for x in (own, adjacent, prior))
    if not all(x.isfinite().all() for x in (own, adjacent, prior)):
        raise CalibrationError("the expert's activations are not finite", where=names["w2"])
    hessian = mixed_hessian(own, adjacent, prior, recipe.shrinkage)
    linears |= quantize_linears({names["w2"]: down}, hessian, None, recipe.options)
    counts = (len(own), len(adjacent), *shares(len(own), len(adjacent), recipe.shrinkage))
    asked = {p: [recipe.shrinkage, recipe.damping] for p in names}
    return packed(linears, names), report(layer, expert, counts, linears, names, asked)


def packed(linears: dict[str, Linear], names: dict[str, str]) -> dict[str, Tensor]:
    """Name -> tensor as stored, gate before up before down."""
    return {
        name: torch.from_numpy(array)
        for prefix in names.values()
        for name, array in linears[prefix].tensors(prefix).items()
    }


def report(
    layer: int,
    expert: int,
    counts: tuple[int, int, float, float, float],
    linears: dict[str, Linear],
    names: dict[str, str],
    asked: dict[str, list[float]],
) -> ExpertReport:
    """counts: tokens to prior_share of the report. names: projection -> linear. asked: `regularization`.

    Raises QuantizeError where an error is not finite.
    """
    found = {p: linears[name] for p, name in names.items()}
    for p, linear in found.items():
        if not math.isfinite(linear.proxy_error):
            raise QuantizeError("the error of a quantized expert is not finite", where=names[p])
    return ExpertReport(
        layer,
        expert,
        *counts,
        {p: float(f"{linear.proxy_error:.4g}") for p, linear in found.items()},
        {p: linear.damping for p, linear in found.items()},
        [p for p, linear in found.items() if linear.damping > asked[p][1]],
        asked,
        [p for p, linear in found.items() if linear.identity_hessian],
    )


class ExpertFile:
    """One finished expert on disk, before its shard is written: its tensors and its report."""

    def __init__(self, folder: Path, layer: int, expert: int) -> None:
        self.path = folder / f"expert-{layer:03d}-{expert:04d}.safetensors"

    def exists(self) -> bool:
        return self.path.is_file()

    def write(self, tensors: dict[str, Tensor], report: ExpertReport) -> None:
        write_atomic(self.path, save(tensors, metadata={"report": json.dumps(asdict(report), sort_keys=True)}))

    def report(self) -> ExpertReport:
        """Raises PackError if the file is damaged."""
        with self._open() as file:
            return ExpertReport.from_json(json.loads(file.metadata()["report"]))

    def tensor(self, name: str) -> bytes:
        """Raises PackError if the file is damaged."""
        with self._open() as file:
            return file.get_tensor(name).reshape(-1).view(torch.uint8).numpy().tobytes()

    def _open(self) -> safe_open:
        try:
            return safe_open(self.path, "pt")
        except SafetensorError as error:
            raise PackError(
                "a finished expert's file is damaged",
                where=str(self.path),
                found=str(error),
                mend="remove it, and the layer's report beside it, and run the same command again",
            ) from None

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

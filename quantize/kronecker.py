"""The second-order picture of an expert's projection as two small matrices: F ~ trace / (k n) * Hin (x) Hout.

The expected rise of the loss from an error E [k, n] of a projection y = x W is 1/2 vec(E)^T F vec(E) with the Fisher
matrix F = sum over tokens of (x x^T) (x) (d d^T), d [n] the gradient of the log-likelihood at y for a target drawn from
the model's own distribution. Per token of the traffic that is also the KL divergence, to second order.
Sources: K-FAC (arXiv 1503.05671); as the metric of rounding, YAQA (arXiv 2505.22988), whose sketch A this is: the first
step of the power iteration for the nearest Kronecker product. Further steps made held-out KL worse (docs/quality.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from .hadamard import rotate_columns, rotate_rows
from .ldlq import block_ldl
from .regularize import pad, padded


class FactorSums:
    """Factors of all experts of one layer's projection [k, n], summed over tokens on `device`.

    hin: float32 [E, k, k], sum of |d|^2 x x^T. hout: [E, n, n], sum of |x|^2 d d^T. trace: float64 [E], sum of
    |x|^2 |d|^2. tokens: int64 [E]. The d are averaged over samples of the target.
    """

    def __init__(self, experts: int, k: int, n: int, device: torch.device | str = "cpu") -> None:
        self.hin = torch.zeros(experts, k, k, device=device)
        self.hout = torch.zeros(experts, n, n, device=device)
        self.trace = torch.zeros(experts, dtype=torch.float64, device=device)
        self.tokens = torch.zeros(experts, dtype=torch.int64, device=device)

    def add(self, expert: int, x: Tensor, gradients: Tensor) -> None:
        """x: float32 [t, k], inputs of tokens routed to `expert`; gradients: [S, t, n], for S sampled targets each."""
        energy_out = gradients.square().sum(dim=2).mean(dim=0)  # [t]
        energy_in = x.square().sum(dim=1)  # [t]
        self.hin[expert] += (x * energy_out[:, None]).T @ x
        scaled = (gradients * energy_in.sqrt()[None, :, None]).flatten(0, 1)  # [S t, n]
        self.hout[expert] += scaled.T @ scaled / len(gradients)
        self.trace[expert] += (energy_in.double() * energy_out.double()).sum()
        self.tokens[expert] += len(x)

    def __add__(self, other: FactorSums) -> FactorSums:
        """The sums of both sets of tokens."""
        merged = FactorSums(len(self.tokens), self.hin.shape[1], self.hout.shape[1], self.hin.device)
        for name in ("hin", "hout", "trace", "tokens"):
            setattr(merged, name, getattr(self, name) + getattr(other, name))
        return merged

    @staticmethod
    def stacked(parts: Sequence[FactorSums]) -> FactorSums:
        """The experts of all parts, one after the other."""
        merged = FactorSums(0, parts[0].hin.shape[1], parts[0].hout.shape[1], parts[0].hin.device)
        for name in ("hin", "hout", "trace", "tokens"):
            setattr(merged, name, torch.cat([getattr(part, name) for part in parts]))
        return merged

    def total(self) -> FactorSums:
        """All experts' sums as one's."""
        merged = FactorSums(1, self.hin.shape[1], self.hout.shape[1], self.hin.device)
        for name in ("hin", "hout", "trace", "tokens"):
            setattr(merged, name, getattr(self, name).sum(dim=0, keepdim=True))
        return merged

    def factors(self, shrink_in: float, shrink_out: float, prior: FactorSums | None = None) -> tuple[Tensor, Tensor]:
        """Hin [E, k, k] and Hout [E, n, n], mean diagonal 1, shrunk towards the prior: one expert's sums, those of all
        experts together unless given.

        An expert that t tokens reach keeps t / (t + shrink) of its own; with none, the prior stands alone.
        """
        prior = prior or self.total()
        return self.shrunk("hin", shrink_in, prior), self.shrunk("hout", shrink_out, prior)

    def shrunk(self, side: str, constant: float, prior: FactorSums) -> Tensor:
        """One side ("hin" or "hout") of `factors`."""
        share = self.tokens / (self.tokens + constant).clamp(min=1e-9)
        return shrink(getattr(self, side), getattr(prior, side), share)


@dataclass(frozen=True)
class Regularization:
    """shrink_in, shrink_out: as `FactorSums.factors` takes them, tokens. damping_in, damping_out: shares of the mean
    diagonal."""

    shrink_in: float
    damping_in: float
    shrink_out: float
    damping_out: float


SHRINK_GRID: Final = (500.0, 2_000.0, 8_000.0, 32_000.0, 128_000.0)
DAMPING_GRID: Final = (0.02, 0.05, 0.1, 0.2)


def choose_regularization(
    first: FactorSums,
    second: FactorSums,
    experts: int = 8,
    priors: tuple[FactorSums, FactorSums] | None = None,
) -> Regularization:
    """The shrinkage and damping under which LDLQ, guided by one half of the traffic, errs least on the other.

    first, second: sums over halves that share no document. experts: how many are tried, the ones of most traffic and
    least and between, each weighing by its trace. priors: of each half, its experts' total unless given. Both sides of
    the Kronecker product are chosen apart. With no expert known to both halves the strongest regularisation is taken.
    """
    priors = priors or (first.total(), second.total())
    known = ((first.tokens > 0) & (second.tokens > 0) & (first.trace > 0) & (second.trace > 0)).nonzero()[:, 0]
    if len(known) == 0:
        return Regularization(SHRINK_GRID[-1], DAMPING_GRID[-1], SHRINK_GRID[-1], DAMPING_GRID[-1])
    by_traffic = known[(first.tokens + second.tokens)[known].argsort(stable=True)]
    spread = torch.linspace(0, len(by_traffic) - 1, min(experts, len(by_traffic))).round().long()
    sample = by_traffic[spread.to(by_traffic.device)]
    best = []
    for side in ("hin", "hout"):
        errors = {
            (constant, damping): sum(
                float((held_out_error(train, unit(getattr(test, side)[sample]), damping) * test.trace[sample]).sum())
                for given, prior, test in ((first, priors[0], second), (second, priors[1], first))
                for train in (given.shrunk(side, constant, prior)[sample],)
            )
            for constant in SHRINK_GRID
            for damping in DAMPING_GRID
        }
        best.append(min(errors, key=lambda choice: (errors[choice], choice)))
    return Regularization(*best[0], *best[1])


def unit(hessian: Tensor) -> Tensor:
    """The Hessian [..., m, m] divided by its mean diagonal; zeros stay."""
    mean = hessian.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[..., None, None]
    return torch.where(mean > 0, hessian / mean, 0.0)


def shrink(own: Tensor, prior: Tensor, share: Tensor | float) -> Tensor:
    """share * own + (1 - share) * prior, both [b or 1, m, m] brought to mean diagonal 1; share: [b] or one number.

    An own Hessian that is all zero (nobody was routed there) leaves the prior alone.
    """
    own, prior = unit(own), unit(prior)
    known = own.diagonal(dim1=-2, dim2=-1).mean(dim=-1) > 0
    share = torch.where(known, torch.as_tensor(share).to(own), 0.0)[..., None, None]
    return share * own + (1 - share) * prior


def held_out_error(train: Tensor, test: Tensor, damping: float) -> Tensor:
    """Error [b] that LDLQ guided by `train` makes as `test` sees it, relative to plain rounding's under the identity.

    train, test: float32 [b or 1, m, m]. LDLQ leaves L^-T times what the encoder leaves, which is white, so the error to
    expect is tr(L^-1 H L^-T) / m. No weight is encoded, so that shrinkage and damping can be chosen by it.
    """
    size = padded(train.shape[-1])
    train, test = (rotate_rows(rotate_columns(pad(h, size, size))) for h in (train, test))
    lower = block_ldl(train, damping).lower.double()
    identity = torch.eye(size).to(lower)
    inverse = torch.linalg.solve_triangular(lower + identity, identity, upper=False, unitriangular=True)
    return ((inverse @ test.double()) * inverse).sum(dim=(-2, -1)) / size

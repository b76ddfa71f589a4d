"""The figures of a pack that its manifest carries and its summary shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .coverage import percentiles
from .expert import ExpertReport
from .layout import PackLayout, expert_shapes


def size_summary(layout: PackLayout) -> dict[str, Any]:
    """Exact bytes; bits_per_weight counts everything stored for a routed expert."""
    sizes = layout.layout
    weights = sum(k * n for k, n in expert_shapes(sizes).values())
    return {
        "tensor_bytes": layout.tensor_bytes,
        "routed_bytes": layout.routed_bytes,
        "routed_experts": sizes.routed_experts,
        "expert_bytes": layout.expert_bytes,
        "bits_per_weight": layout.expert_bytes * 8 / weights,
    }


def calibration_summary(
    reports: Sequence[ExpertReport],
    traces: dict[str, Any],
    documents: int,
    windows: int,
    tokens: int,
) -> dict[str, Any]:
    """Coverage (tokens per expert), what stood in for tokens (`rungs`), and mean proxy error per projection.

    unreached: experts that no token was routed to. mostly_prior: experts in whose Hessian the prior weighs more than
    their tokens. identity: projections quantized without any Hessian. damped: projections whose Hessian needed more
    damping than was asked for.
    """
    counts = np.array([report.tokens for report in reports])
    return {
        "traces": traces,
        "documents": documents,
        "windows": windows,
        "tokens": tokens,
        "coverage": {
            **percentiles(counts),
            "unreached": int((counts == 0).sum()),
            "mostly_prior": sum(report.prior_share > 0.5 for report in reports),
            "identity": sum(len(report.identity) for report in reports),
            "damped": sum(len(report.damped) for report in reports),
        },
        "rungs": rungs(reports),
        "proxy_error": {
            name: float(np.mean([report.proxy_error[projection] for report in reports]))
            for name, projection in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        },
    }


def rungs(reports: Sequence[ExpertReport]) -> dict[str, dict[str, float]]:
    """The coverage ladder from the top: how many experts stood on each rung, and what it gave them.

    natural, adjacent: experts that got such tokens, and (token, expert) pairs. prior: experts that had no other
    Hessian, and the prior's mean weight over all experts. identity: experts with a projection that not even the
    prior informed, and such projections. An expert counts on every rung that it used.
    """
    return {
        "natural": {
            "experts": sum(report.tokens > 0 for report in reports),
            "tokens": sum(report.tokens for report in reports),
        },
        "adjacent": {
            "experts": sum(report.adjacent > 0 for report in reports),
            "tokens": sum(report.adjacent for report in reports),
        },
        "prior": {
            "experts": sum(not report.tokens + report.adjacent for report in reports),
            "weight": float(np.mean([report.prior_share for report in reports])),
        },
        "identity": {
            "experts": sum(bool(report.identity) for report in reports),
            "linears": sum(len(report.identity) for report in reports),
        },
    }

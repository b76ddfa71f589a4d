"""The figures of a pack that its manifest carries and its summary shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .expert import ExpertReport
from .layout import PackLayout, expert_shapes
from .recipe import Recipe


def size_summary(layout: PackLayout) -> dict[str, Any]:
    """Exact bytes; bits_per_weight counts everything stored for a routed expert."""
    sizes = layout.layout
    weights = sum(k * n for k, n in expert_shapes(sizes).values())
    return {
        "tensor_bytes": layout.tensor_bytes,
        "routed_bytes": layout.routed_bytes,
        "routed_experts": sizes.layers * sizes.experts,
        "expert_bytes": layout.expert_bytes,
        "bits_per_weight": layout.expert_bytes * 8 / weights,
    }


def calibration_summary(
    reports: Sequence[ExpertReport],
    recipe: Recipe,
    traces: dict[str, Any],
    documents: int,
    windows: int,
    tokens: int,
) -> dict[str, Any]:
    """Coverage (tokens per expert) and mean proxy error per projection.

    unreached: experts that no token was routed to; they were quantized with the prior Hessian. mostly_prior: experts
    whose own tokens weigh less than the prior. identity: projections quantized without any Hessian. damped:
    projections whose Hessian needed more damping than the recipe's.
    """
    counts = np.array([report.tokens for report in reports])
    percentiles = {f"p{p}": int(np.percentile(counts, p, method="lower")) for p in (1, 5, 50, 95)}
    return {
        "traces": traces,
        "documents": documents,
        "windows": windows,
        "tokens": tokens,
        "coverage": {
            "min": int(counts.min()),
            **percentiles,
            "max": int(counts.max()),
            "unreached": int((counts == 0).sum()),
            "mostly_prior": sum(report.own_share < 0.5 for report in reports),
            "identity": sum(len(report.identity) for report in reports),
            "damped": sum(d > recipe.damping for report in reports for d in report.damping.values()),
        },
        "proxy_error": {
            name: float(np.mean([report.proxy_error[projection] for report in reports]))
            for name, projection in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        },
    }

"""The coverage report as a picture: tokens per expert, layer by layer."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from ..placement import TrafficTable
from .coverage import percentiles

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "moefit", "font.size": 8}
"""Text as text; the same identifiers every time."""


def picture(table: TrafficTable, floor: int) -> str:
    """`figure` as SVG. The same table gives the same text, with the same matplotlib."""
    import matplotlib

    written = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure(table, floor).savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    return written.getvalue()


def figure(table: TrafficTable, floor: int) -> Figure:
    """A heat map of layer x expert, and each layer's percentiles beside it, both over a logarithmic scale of tokens.

    floor: tokens marked in both; experts below it are red, above it blue, those without a token black. Where it is 0,
    the median expert takes its place in the colours and no line is drawn.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    counts = table.counts  # [L, E]
    layers, experts = counts.shape
    middle = floor or max(1, int(np.percentile(counts, 50, method="lower")))
    reach = max(10.0, counts.max() / middle)  # as far above the middle as below it
    drawn = Figure(figsize=(13, 1.6 + max(1.6, 0.16 * layers)), layout="constrained")
    where = f"floor {floor:,} tokens" if floor else f"no floor; median {middle:,} tokens"
    drawn.suptitle(
        f"Tokens per expert: {layers} layers x {experts} experts, {table.tokens:,} tokens, top-{table.top_k}, {where}"
    )
    left, right = drawn.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    image = left.imshow(
        np.ma.masked_equal(counts, 0),
        norm=LogNorm(middle / reach, middle * reach),
        cmap="RdYlBu",
        aspect="auto",
        interpolation="none",
    )
    left.set_facecolor("black")
    rows = range(0, layers, -(-layers // 40))
    left.set_yticks(rows, [str(table.layers[row]) for row in rows])
    left.set(xlabel="expert", ylabel="layer")
    bar = drawn.colorbar(image, ax=left, location="top", shrink=0.5, label="tokens", extend="both")
    found = [percentiles(layer) for layer in counts]
    at = range(layers)
    right.hlines(at, [f["min"] for f in found], [f["max"] for f in found], "0.6", linewidth=1, label="min to max")
    right.hlines(at, [f["p5"] for f in found], [f["p95"] for f in found], "tab:blue", linewidth=3, label="5 to 95 %")
    right.plot([f["p50"] for f in found], at, "o", color="navy", markersize=3, label="median")
    if floor:
        bar.ax.axvline(floor, color="tab:red")
        right.axvline(floor, color="tab:red", linestyle="--", label=f"floor {floor:,}")
    right.set_xscale("symlog", linthresh=1)
    right.set(xlabel="tokens per expert", xlim=(0, None))
    right.legend(loc="lower center", bbox_to_anchor=(0.5, 1.02), ncols=2, frameon=False)
    return drawn

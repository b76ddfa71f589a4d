"""A plan as pictures: where experts lie, what they serve, how long each place works, what moves gain."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import PlanError
from .aim import Aim, Term
from .machine import Machine
from .objective import make_problem
from .plan import Plan
from .traffic import TrafficTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

STYLE: Any = {"svg.fonttype": "none", "font.size": 8, "text.parse_math": False}
"""Text as text, and a name with dollars in it as it stands."""
COLORS = ("#332288", "#CC6677", "#117733", "#88CCEE", "#882255", "#DDCC77", "#44AA99", "#AA4499", "#999933")
"""Paul Tol's "muted" scheme, told apart with any colour vision; of cards and of sources, in this order."""
HOST, COPIES = "#E4E4E4", "#000000"
MAX_ROWS, MAX_COLUMNS, MAX_POINTS = 512, 2048, 400
NAMED_LAYERS = 96
"""Up to so many every layer has its number at the axis."""


def placement_map(plan: Plan, table: TrafficTable) -> str:
    """SVG: traffic of every expert of every layer, hottest first, and below it the place of each.

    Heat map and places are pixels in the SVG, so it stays small. Beyond MAX_ROWS layers or MAX_COLUMNS experts evenly
    spaced ones are drawn. PlanError: plan and table of different models.
    """
    return _svg("placement-map", lambda: placement_map_figure(plan, table))


def hit_curve(plan: Plan, table: TrafficTable) -> str:
    """SVG: share of activations served by the n hottest experts, of all traffic and of each source, and by this plan.

    All curves take the experts in one order, hottest in all traffic first: a source whose curve runs low asks for
    others. PlanError: plan and table of different models.
    """
    return _svg("hit-curve", lambda: hit_curve_figure(plan, table))


def layer_loads(plan: Plan, table: TrafficTable) -> str:
    """SVG: microseconds per decode step of each layer's slowest place, and when every place is done beside it.

    See `finish_times` for what a step is. PlanError: plan and table of different models.
    """
    return _svg("layer-loads", lambda: layer_loads_figure(plan, table))


def gain_curve(points: Sequence[tuple[int, float, float]], limit: int | None = None, unit: str = "") -> str:
    """SVG: gain against number of moves.

    points: (moves, gain, best_possible), gain of our plan and proven limit of any plan with up to so many moves, both
    in `unit`, e.g. "seconds per step". limit: the number of moves chosen, marked.
    PlanError: no points, or one that is not finite.
    """
    return _svg("gain-curve", lambda: gain_curve_figure(points, limit, unit))


def placement_map_figure(plan: Plan, table: TrafficTable) -> Figure:
    """The figure of `placement_map`."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm, to_rgb
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.patheffects import Normal, Stroke
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    _check(plan, table)
    places = plan.machine.places
    layers, experts = table.counts.shape
    order = np.argsort(-table.counts, axis=1, kind="stable")  # [L, E]
    rows, columns = _spread(layers, MAX_ROWS), _spread(experts, MAX_COLUMNS)
    heat = np.take_along_axis(table.counts, order, axis=1)[np.ix_(rows, columns)]
    held = np.take_along_axis(plan.holds, order[..., None], axis=1)  # [L, E, P]
    copied = held.sum(axis=2) > 1
    kind = np.where(copied, len(places), held.argmax(axis=2))  # [L, E], a colour each
    colors = np.array([to_rgb(color) for color in (*_colors(plan.machine), COPIES)])
    low = int(table.counts[table.counts > 0].min())
    high = max(int(table.counts.max()), 2 * low)
    norm = LogNorm(low, high)

    height = min(8.0, layers * min(0.25, max(0.1, 2 / layers)))
    drawn = Figure(figsize=(12, 2 * height + 2), layout="constrained")
    upper, lower = drawn.subplots(2, 1, sharex=True)
    extent = (-0.5, experts - 0.5, layers - 0.5, -0.5)
    style: Any = {"extent": extent, "aspect": "auto", "interpolation": "none"}
    cmap = colormaps["viridis"]
    upper.imshow(np.where(heat[..., None] > 0, cmap(norm(np.maximum(heat, low)))[..., :3], 1.0), **style)
    lower.imshow(colors[kind[np.ix_(rows, columns)]], **style)
    on_cards = (~plan.holds[..., -1]).sum(axis=1)  # [L]
    edges = np.repeat(np.arange(layers + 1) - 0.5, 2)[1:-1]  # each layer's upper and lower edge
    outline = [Stroke(linewidth=3, foreground="black"), Normal()]
    (frontier,) = upper.plot(np.repeat(on_cards, 2) - 0.5, edges, "white", linewidth=1.2, path_effects=outline)
    for axes, title in ((upper, "Traffic"), (lower, "Place")):
        axes.set(ylabel="layer")
        axes.set_title(title, loc="left", fontweight="bold")
        _name_layers(axes, table.layers, vertical=True)
    lower.set(xlabel="experts of each layer, hottest first")
    bar = drawn.colorbar(ScalarMappable(norm, cmap), ax=upper, location="right", pad=0.01, label="tokens (white: none)")
    subs = (1.0,) if high >= 100 * low else (1.0, 2.0, 5.0)
    bar.ax.yaxis.set_major_locator(LogLocator(subs=subs))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    bar.ax.yaxis.set_minor_formatter(NullFormatter())
    upper.legend([frontier], ["number on cards"], loc="lower right", fontsize=7)
    named = [f"{name}: {int(plan.holds[..., p].sum()):,}" for p, name in enumerate(places)]
    patches: list[Patch] = [Patch(facecolor=color, edgecolor="0.4") for color in colors]
    named.append(f"on several cards: {int(copied.sum()):,}")
    kinds = len(places) + bool(copied.any())
    drawn.legend(patches[:kinds], named[:kinds], loc="outside lower center", ncols=min(10, kinds), frameon=False)
    drawn.suptitle(f"{layers} layers x {experts} experts, {table.tokens:,} tokens, top-{table.top_k}")
    return drawn


def hit_curve_figure(plan: Plan, table: TrafficTable) -> Figure:
    """The figure of `hit_curve`."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, PercentFormatter

    _check(plan, table)
    order = np.argsort(-table.counts, axis=None, kind="stable")
    on_cards = ~plan.holds[..., -1].ravel()
    count = int(on_cards.sum())
    at = np.union1d(_spread(len(order) + 1, MAX_POINTS), [count])

    drawn = Figure(figsize=(9, 4.6), layout="constrained")
    axes = drawn.subplots()
    lines, names = [], []

    def draw(counts: np.ndarray, name: str, marker: str, **style: Any) -> str:
        """A curve, and the plan's point on or below it; how much the hottest serve."""
        served = np.concatenate([[0], np.cumsum(counts.ravel()[order])]) / counts.sum()  # [L E + 1]
        of_plan = float(counts.ravel()[on_cards].sum() / counts.sum())
        lines.extend(axes.plot(at, served[at], **style))
        axes.plot([count], [of_plan], marker, color=style["color"], zorder=style["zorder"])
        names.append(f"{of_plan:.2%} of {name}")
        return f"{served[count]:.2%}, by this plan {of_plan:.2%}"

    served = draw(table.counts, "all traffic", "D", color="black", linewidth=2, zorder=4)
    tokens = table.source_tokens
    ranked = sorted(tokens, key=lambda name: (-tokens[name], name))
    for color, name in zip(COLORS, ranked, strict=False):
        draw(table.sources[name], _plain(name), ".", color=color, linewidth=1, zorder=3)
    if others := ranked[len(COLORS) :]:
        shown = len(lines) + 1
        for name in others:
            draw(table.sources[name], name, ".", color="0.75", linewidth=1, zorder=2)
        del lines[shown:], names[shown - 1 :]
        names.append(f"{len(others)} smaller source{'s' * (len(others) > 1)}")
    axes.axvline(count, color="0.6", linewidth=0.8, linestyle=":", zorder=0)
    axes.grid(color="0.92")
    axes.set(xlim=(0, len(order)), ylim=(0, 1.02), ylabel="activations served by cards")
    axes.set_xlabel(f"experts on cards, of {len(order):,}, hottest first (dotted: {count:,} in this plan)")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.legend(
        lines, names, title="this plan's cards serve", loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False
    )
    axes.set_title(f"Of all traffic the {count:,} hottest experts serve {served}")
    return drawn


def layer_loads_figure(plan: Plan, table: TrafficTable) -> Figure:
    """The figure of `layer_loads`."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    done, window, assumed = finish_times(plan, table)
    done = done * 1e6
    places, colors = plan.machine.places, _colors(plan.machine)
    layers = np.arange(len(done))
    slowest, last = done.max(axis=1), done.argmax(axis=1)
    share = np.divide(done, slowest[:, None], out=np.zeros_like(done), where=slowest[:, None] > 0)
    total = float(slowest.sum())

    drawn = Figure(figsize=(12, 3.4 + 0.17 * len(places)), layout="constrained")
    upper, lower = drawn.subplots(2, 1, sharex=True, height_ratios=(2.4, 0.17 * len(places) + 0.1))
    upper.bar(layers, slowest, color=[colors[p] for p in last], edgecolor="0.3", linewidth=0.4)
    upper.set(ylabel="microseconds per step", xlim=(-0.6, len(layers) - 0.4), ylim=(0, 1.08 * slowest.max() or 1))
    upper.set_title("Slowest place of each layer, for which the layer waits", loc="left", fontweight="bold")
    waited = [int((last == p).sum()) for p in range(len(places))]
    handles = [Patch(facecolor=color, edgecolor="0.4") for color in colors]
    names = [
        f"{name}: {float(done[:, p].sum()):,.1f} us/step, slowest in {waited[p]} layers"
        for p, name in enumerate(places)
    ]
    drawn.legend(handles, names, loc="outside lower center", ncols=min(5, len(places)), frameon=False, fontsize=7)
    extent = (-0.5, len(layers) - 0.5, len(places) - 0.5, -0.5)
    image = lower.imshow(share.T, cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="none", extent=extent)
    lower.plot(layers, last, "o", color="black", markeredgecolor="white", markersize=4)
    lower.set_yticks(range(len(places)), places)
    lower.set(xlabel="layer")
    lower.set_title("When each place is done, against the slowest (marked)", loc="left", fontweight="bold")
    _name_layers(lower, table.layers, vertical=False)
    bar = drawn.colorbar(image, ax=lower, location="right", pad=0.01, ticks=[0, 1], aspect=6)
    bar.ax.set_yticklabels(["at once", "as late"])
    tokens = f"{window} token{'s' * (window > 1)}" + (", taken to choose experts independently" if assumed else "")
    drawn.suptitle(f"Expected {total:,.1f} microseconds of experts per decode step of {tokens}")
    return drawn


def gain_curve_figure(points: Sequence[tuple[int, float, float]], limit: int | None = None, unit: str = "") -> Figure:
    """The figure of `gain_curve`."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    if not points or not np.isfinite(np.array(points, dtype=np.float64)).all():
        raise PlanError(
            "a curve of gain against moves needs finite points", where="points", found=f"found {points!r:.80}"
        )
    moves, gain, best = (np.array(column) for column in zip(*sorted(points), strict=True))
    scale, named = (1e6, "micro" + unit) if unit.startswith("seconds") else (1.0, unit)
    drawn = Figure(figsize=(9, 4), layout="constrained")
    axes = drawn.subplots()
    axes.fill_between(moves, gain * scale, best * scale, color="0.9", label="not known to be possible or not")
    axes.plot(moves, best * scale, "--", color="0.35", label="proven limit of any plan")
    axes.plot(moves, gain * scale, "o-", color=COLORS[0], markersize=3, label="this plan's moves")
    if limit is not None:
        here = int(np.searchsorted(moves, limit, side="right")) - 1  # what is known up to the limit
        axes.axvline(limit, color=COLORS[1], linestyle=":", label=f"chosen limit: {limit:,} moves")
        if here >= 0:
            label = f"{moves[here]:,} moves: {gain[here] * scale:,.4g} of at most {best[here] * scale:,.4g}"
            axes.plot([moves[here]], [gain[here] * scale], "D", color=COLORS[1], markersize=7, zorder=4, label=label)
    axes.set(xlabel="experts moved", ylabel=f"gain, {_plain(named)}" if named else "gain")
    axes.set_xlim(0, max(int(moves.max()), limit or 0, 1) * 1.02)
    axes.set_ylim(bottom=min(0.0, float(gain.min()) * scale))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.grid(color="0.92")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return drawn


def finish_times(plan: Plan, table: TrafficTable) -> tuple[np.ndarray, int, list[str]]:
    """(seconds [L, P] until each place is done with a layer, tokens of a step, what had to be assumed of the traffic).

    Expected, of all traffic, in a decode step: that of the plan's first decode term, of one token where it has none.
    These are the times of the objective (`problem.py`). PlanError: plan and table of different models.
    """
    _check(plan, table)
    term = next((term for term in plan.aim.terms if term.measure == "decode"), Term(1.0, "decode", 1))
    aim = Aim((term._replace(weight=1.0),))
    problem, assumed = make_problem(plan.machine, table, plan.card_sizes, plan.host_sizes, plan.fixed, aim)
    return problem.finish(plan.holds)[0] * problem.grain, term.window, assumed


def _check(plan: Plan, table: TrafficTable) -> None:
    if plan.layers != table.layers or plan.holds.shape[:2] != table.counts.shape:
        found = (
            f"expected the plan's {len(plan.layers)} layers of {plan.holds.shape[1]} experts, "
            f"found {len(table.layers)} of {table.counts.shape[1]}"
        )
        raise PlanError("plan and traffic are of different models", where="traffic", found=found)


def _colors(machine: Machine) -> list[str]:
    """One for each place. More cards than COLORS has take shades in order."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    cards = len(machine.places) - 1
    if cards <= len(COLORS):
        return [*COLORS[:cards], HOST]
    return [*(to_hex(colormaps["viridis"](card / (cards - 1))) for card in range(cards)), HOST]


def _spread(count: int, most: int) -> np.ndarray:
    """Up to `most` of 0..count-1, evenly spaced, first and last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))


def _name_layers(axes: Axes, layers: tuple[int, ...], vertical: bool) -> None:
    """Layer numbers at the axis, every one up to NAMED_LAYERS."""
    at = range(0, len(layers), -(-len(layers) // NAMED_LAYERS))
    names = [str(layers[row]) for row in at]
    small = 6 if len(names) > 24 else 7
    if vertical:
        axes.set_yticks(at, names, fontsize=small)
    else:
        axes.set_xticks(at, names, fontsize=small, rotation=90 if len(names) > 48 else 0)


def _plain(name: str) -> str:
    """A name as one short printable line; XML holds no control characters."""
    shown = "".join(char if char.isprintable() else "\ufffd" for char in name)
    return shown if len(shown) <= 40 else shown[:39] + "…"


def _svg(name: str, draw: Callable[[], Figure]) -> str:
    """A figure as SVG text: the same input gives the same text, with the same matplotlib.

    Identifiers start with `name`, so that several pictures can stand in one page.
    """
    import matplotlib

    written = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}), warnings.catch_warnings():
        # A name in a script that the measuring font lacks: whoever shows the SVG chooses another font.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        draw().savefig(written, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    refers = re.compile(r'(\bid="|href="#|url\(#)')
    return re.sub(r"<[^<>]*>", lambda tag: refers.sub(rf"\g<1>{name}-", tag[0]), written.getvalue())

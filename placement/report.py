"""A plan as one self-contained HTML page: numbers first, then pictures, then where everything came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from ..files import sha256_bytes
from .pictures import gain_curve, hit_curve, layer_loads, placement_map
from .plan import Plan
from .traffic import TrafficTable

MOVES = 200
"""Moves listed."""
SHARES = ("gap", "rate", "share", "touched", "change", "saved", "oracle", "everything")
TIMES = ("seconds", "p50", "p95", "p99", "longest")
"""Words that tell a column's unit by its name; "bytes" is another."""
HEADINGS = {
    "seconds": "time per step",
    "longest": "longest step",
    "host_bytes": "host reads per token",
    "here": "from",
    "there": "to",
}
REPLAYED = ("window", "conversations", "steps", "no_interval")
"""Columns of a comparison that are often the same in all rows."""
CSS = """
:root { color-scheme: light dark; --line: #d5d5d5; --soft: #f4f4f4; --dim: #5c5c5c; }
@media (prefers-color-scheme: dark) { :root { --line: #444; --soft: #242424; --dim: #a8a8a8; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
div.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .6rem 0; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .8rem .25rem 0; text-align: right; vertical-align: top;
  white-space: nowrap; }
th { font-weight: 600; } thead th { background: var(--soft); }
th:first-child, td:first-child, table.facts td { text-align: left; white-space: normal; }
figure { margin: 1.2rem 0; } figcaption, .note, small { color: var(--dim); }
figure svg { background: #fff; border-radius: 6px; max-width: 100%; height: auto; }
code { font-size: .9em; overflow-wrap: anywhere; }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def plan_report(
    plan: Plan,
    table: TrafficTable,
    comparison: Sequence[Mapping[str, Any]] | None = None,
    curve: Sequence[tuple[int, float, float]] | None = None,
    moves: Sequence[Mapping[str, Any]] | None = None,
    verdict: str | None = None,
    drift: Mapping[str, Any] | None = None,
    limit: int | None = None,
) -> str:
    """HTML of a plan, with nothing to load and no script; the same input gives the same text.

    comparison: rows with the same keys, a name first, on held-out traffic. curve: see `pictures.gain_curve`, gains in
    the unit of the plan's aim; limit: the number of moves chosen on it. moves: rows with the same keys, in order.
    verdict: a sentence. drift: its numbers. What is None is left out.
    A column's name tells its unit: ...bytes, ...seconds (p50, p95, p99, longest too), ...rate, ...share, change and the
    like are shares of one; an interval is {"value", "low", "high"}, low and high None where there is none.
    PlanError: plan and table of different models.
    """
    layers, experts = plan.holds.shape[:2]
    machine = plan.machine
    cards = f"{len(machine.gpus)} card{'s' * (len(machine.gpus) > 1)}"
    title = f"Placement of {layers} x {experts} experts on {cards} and host"
    same = plan.inputs.get("traffic") == sha256_bytes(table.to_bytes())
    parts = [f"<h1>{title}</h1>", _facts(_summary(plan)), _rows(_places(plan))]
    if machine.mode == "tp":
        parts.append('<p class="note">Every expert on the cards is cut into slices; bytes are those of each card.</p>')
    if verdict is not None:
        parts += ["<h2>Verdict</h2>", f"<p>{_text(verdict)}</p>"]
    if drift is not None:
        parts += ["<h2>Drift</h2>", _facts([(_heading(key), _cell(key, value)) for key, value in drift.items()])]
    source = "the traffic that the plan was made for" if same else "other traffic than the plan was made for"
    parts += ["<h2>Pictures</h2>", f'<p class="note">They show {source}: {table.tokens:,} tokens.</p>']
    parts += [
        _figure(
            placement_map(plan, table),
            "Tokens that each expert was asked by, hottest first in each layer, and the place it lies on.",
        ),
        _figure(
            hit_curve(plan, table),
            "Share of activations that the hottest experts serve, whatever their layer, and that this plan's cards do.",
        ),
        _figure(
            layer_loads(plan, table),
            "A layer takes as long as its slowest place, and the others wait; cards wait for the host too.",
        ),
    ]
    if curve:
        caption = "What moving experts gains, and the most that any plan with as many moves could."
        parts.append(_figure(gain_curve(curve, limit, plan.aim.unit), caption))
    if comparison is not None:
        parts += ["<h2>On traffic it has not seen</h2>", _comparison(comparison)]
    if moves is not None:
        shown = f"the first {MOVES} of {len(moves):,}" if len(moves) > MOVES else f"{len(moves):,}"
        parts += [f"<h2>Moves, in this order: {shown}</h2>", _rows(moves[:MOVES])]
    inputs = [(_text(name), f"<code>{_text(digest)}</code>") for name, digest in sorted(plan.inputs.items())]
    parts += ["<h2>Inputs, sha256</h2>", _facts(inputs), "<h2>Solver steps</h2>", _steps(plan)]
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{CSS}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _summary(plan: Plan) -> list[tuple[str, str]]:
    unit = plan.aim.unit
    modes = {"ep": "each expert whole on one place", "tp": "each expert on all cards in slices, or on the host"}
    greedy = "does not fit"
    if plan.greedy is not None:
        saved = (plan.greedy - plan.value) / plan.greedy if plan.greedy else 0.0
        greedy = f"{quantity(plan.greedy, unit)}; this plan is {100 * saved:.2f} % below it"
    copied = int((plan.holds.sum(axis=2) > 1).sum())
    facts = [
        ("mode", f"{plan.machine.mode}: {modes[plan.machine.mode]}"),
        ("objective", f"{plan.aim}{', worst source' * plan.aim.worst}, {unit}"),
        ("this plan", quantity(plan.value, unit)),
        ("frequency-greedy", greedy),
        ("proven bound", f"{quantity(plan.bound, unit)}; no plan is below it"),
        ("gap", f"{100 * plan.gap:.4f} %: the most that a perfect plan could still save"),
        *([("experts on several cards", f"{copied:,}, counted on each")] if copied else []),
        ("made for", f"{plan.tokens:,} tokens, {plan.top_k} experts each"),
        ("made by", f"moefit, {' '.join(plan.solver)}; plan from {plan.plan_from}, bound from {plan.bound_from}"),
    ]
    return [(name, _text(value)) for name, value in facts]


def _places(plan: Plan) -> list[dict[str, Any]]:
    budgets, used = plan.machine.budgets, plan.used
    return [
        {
            "place": name,
            "budget_bytes": budgets[p],
            "fixed_bytes": plan.fixed[p],
            "experts": int(plan.holds[..., p].sum()),
            "expert_bytes": used[p],
            "free_bytes": budgets[p] - plan.fixed[p] - used[p],
            "activation_share": plan.shares[p],
        }
        for p, name in enumerate(plan.machine.places)
    ]


def _comparison(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows; what was replayed stands once above them where it is the same for all."""
    replayed = {
        key: rows[0].get(key) for key in REPLAYED if rows and all(row.get(key) == rows[0].get(key) for row in rows)
    }
    notes = [
        _cell(key, value) if key == "no_interval" else f"{_heading(key)}: {_cell(key, value)}"
        for key, value in replayed.items()
        if value not in (None, "")
    ]
    if any(isinstance(value, Mapping) and value.get("low") is not None for row in rows for value in row.values()):
        notes.append("small: 95 % intervals, by drawing conversations again")
    note = f'<p class="note">{"; ".join(notes)}.</p>' if notes else ""
    return note + _rows([{key: value for key, value in row.items() if key not in replayed} for row in rows])


def _steps(plan: Plan) -> str:
    return f"<ol>{''.join(f'<li>{_text(step)}</li>' for step in plan.steps)}</ol>"


def _figure(svg: str, caption: str) -> str:
    """The picture without its XML prologue, which has no place in HTML."""
    return f"<figure>\n{svg[svg.index('<svg') :]}<figcaption>{caption}</figcaption>\n</figure>"


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    """Two columns of HTML."""
    lines = "".join(f'<tr><th scope="row">{name}</th><td>{value}</td></tr>\n' for name, value in facts)
    return f'<div class="wide"><table class="facts"><tbody>\n{lines}</tbody></table></div>'


def _rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table with a column for each key."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    if not keys:
        return "<p>None.</p>"
    head = "".join(f'<th scope="col">{_heading(key)}</th>' for key in keys)
    lines = ["".join(f"<td>{_cell(key, row.get(key))}</td>" for key in keys) for row in rows]
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _heading(key: str) -> str:
    return _text(HEADINGS.get(key, key.replace("_", " ")))


def _cell(key: str, value: Any) -> str:
    """HTML of a value under the name `key`."""
    if value is None:
        return "–"
    if isinstance(value, Mapping) and {"value", "low", "high"} <= value.keys():
        number, low, high = (_cell(key, value[name]) for name in ("value", "low", "high"))
        return number if value["low"] is None else f"{number}<br><small>{low} to {high}</small>"
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if not isinstance(value, int | float | np.integer | np.floating):
        return _text(str(value))
    words = key.replace("-", "_").split("_")
    if "bytes" in words:
        exact = f"{value:,} B" if float(value).is_integer() else f"{value:,.1f} B"
        return f'<span title="{exact}">{quantity(float(value), "bytes")}</span>'
    if any(word in TIMES for word in words):
        return quantity(float(value), "seconds")
    if any(word in SHARES for word in words):
        return f"{100 * value:{'+' * ('change' in words)}.2f} %"
    return f"{value:,}" if isinstance(value, int | np.integer) else f"{value:.4g}"


def quantity(value: float, unit: str) -> str:
    """A number with its unit: "bytes per token" and "seconds per step" in the prefix that suits, others as they are."""
    base, _, per = unit.partition(" ")
    per = f" {per}" if per else ""
    if base == "bytes":
        for prefix, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
            if abs(value) >= scale:
                return f"{value / scale:.2f} {prefix}{per}"
        return f"{value:.4g} B{per}"
    if base == "seconds":
        name, scale = ("s", 1.0) if abs(value) >= 1 else ("ms", 1e-3) if abs(value) >= 1e-3 else ("µs", 1e-6)
        return f"{value / scale:.5g} {name}{per}"
    return f"{value:.6g}" + (f" ({unit})" if unit else "")


def _text(text: str) -> str:
    """As HTML; what cannot be printed, line breaks too, is replaced."""
    return escape("".join(char if char.isprintable() else "\ufffd" for char in text))

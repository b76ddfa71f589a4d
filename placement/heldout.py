"""How good placements are on traffic they have not seen, with intervals, and whether a new one is worth the move.

The conversation, not the step, is what was sampled: steps of one ask for much the same experts, and intervals that took
them for independent would be several times too short. Every number is a ratio of two sums over conversations, and
every interval comes from drawing conversations again; of few there is none, and it is said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.special import stdtrit

from ..errors import PlanError
from .machine import Machine
from .recorded import Recorded
from .simulate import Simulation, simulate
from .traffic import TrafficTable

FEW = 8
"""Conversations below which no interval is given."""
LEAST_GAIN = 1e-3
"""Share of a step's time below which a new plan is not worth the move, however sure it is."""
BLOCK = 1 << 20  # draws held at once
ORACLE = "oracle (knew this traffic)"


@dataclass(frozen=True)
class Interval:
    """A number and its interval, None where there are too few conversations for one (see `bootstrap`)."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Row:
    """One placement on held-out traffic. seconds: per step, the mean, then quantiles and the longest of all `steps`.

    hit_rate: share of activations that cards serve. host_bytes: read from the host, per token. host_touched: share of
    (step, layer) pairs that ask the host for anything. change: of the mean step against the first placement's,
    relative, conversation by conversation: +0.1 is 10 % slower; None in the first row. no_interval: why there is none,
    or "".
    """

    name: str
    window: int
    conversations: int
    steps: int
    seconds: Interval
    p50: float
    p95: float
    p99: float
    longest: float
    hit_rate: Interval
    host_bytes: Interval
    host_touched: float
    change: Interval | None
    no_interval: str


@dataclass(frozen=True)
class SourceRow:
    """One source of traffic, left out. hit_rate: on it, of the placement made for all the others; oracle: of the one
    made for it alone; everything: of the one made for all sources, this one among them."""

    source: str
    tokens: int
    hit_rate: float
    oracle: float
    everything: float


@dataclass(frozen=True)
class Gain:
    """What a new placement saves on traffic that neither was made for. saved: share of the old one's time. seconds: per
    step. verdict: "worth it", "not worth it" (not more than the traffic's own noise) or "unknown". why: in words."""

    saved: Interval
    seconds: Interval
    conversations: int
    verdict: str
    why: str


def bootstrap(
    values: np.ndarray, weights: np.ndarray, n: int = 2000, seed: int = 0, level: float = 0.95
) -> tuple[float, float] | None:
    """Interval of sum(values) / sum(weights) over conversations, [C] each, those without weight left out.

    The wider, end by end, of the percentile bootstrap of n draws and Student's t about the linearised error. Of 4,000
    simulated samples of 8, 20 and 60 conversations (log-normal, log-sd 1.0 of lengths and 0.3 of means) it held the
    truth in 90, 91 and 93 % at a level of 95, the bootstrap alone in 86, 89 and 92 %.
    None where there is no telling: fewer than 8 conversations, or one with more than half of all weight.
    The same numbers give the same interval, on every machine and version of numpy.
    """
    kept = np.asarray(weights) > 0
    values, weights = np.asarray(values, dtype=np.float64)[kept], np.asarray(weights, dtype=np.float64)[kept]
    count = len(values)
    if _why_none(weights):
        return None
    totals = np.empty((2, n))
    bits = np.random.PCG64(seed)
    for start in range(0, n, step := max(1, BLOCK // count)):
        stop = min(start + step, n)
        raw = bits.random_raw((stop - start) * count) >> np.uint64(32)  # its stream is fixed, a Generator's is not
        drawn = (raw * np.uint64(count) >> np.uint64(32)).astype(np.intp).reshape(-1, count)
        totals[:, start:stop] = values[drawn].sum(axis=1), weights[drawn].sum(axis=1)
    tail = (1 - level) / 2
    low, high = (float(end) for end in np.quantile(totals[0] / totals[1], [tail, 1 - tail]))
    total = math.fsum(weights)
    mean = math.fsum(values) / total
    error = math.sqrt(count / (count - 1) * math.fsum((values - mean * weights) ** 2)) / total
    reach = float(stdtrit(count - 1, 1 - tail)) * error
    low, high = min(low, mean - reach), max(high, mean + reach)
    return low, high


def ratio(values: np.ndarray, weights: np.ndarray, least: float = -math.inf, most: float = math.inf) -> Interval:
    """sum(values) / sum(weights) over conversations [C], with its `bootstrap` interval, cut to what there can be."""
    value = math.fsum(values) / math.fsum(weights)
    ends = bootstrap(values, weights)
    return Interval(value, None, None) if ends is None else Interval(value, max(ends[0], least), min(ends[1], most))


def paired_change(old: Simulation, new: Simulation) -> tuple[Interval, Interval]:
    """(seconds per step, share of the old mean) by which `new` is slower than `old`, both replays of the same steps.

    Paired: a conversation that is slow on both counts as no difference, so that placements which agree on most experts
    are told apart by far fewer conversations. PlanError: replays of other steps.
    """
    if not np.array_equal(old.steps, new.steps) or old.window != new.window:
        raise PlanError("replays of other steps cannot be compared", mend="replay the same recording, window and steps")
    more = new.conversation_seconds - old.conversation_seconds
    return ratio(more, old.steps), ratio(more, old.conversation_seconds)


def compare(
    plans: Mapping[str, np.ndarray],
    recorded: Recorded,
    machine: Machine,
    card_sizes: np.ndarray,
    host_sizes: np.ndarray,
    window: int = 1,
    max_steps: int = 20_000,
    oracle: Callable[[Recorded], np.ndarray] | None = None,
) -> list[Row]:
    """One row per placement, in order, all against the first.

    plans: name -> holds bool [L, E, P]. recorded: traffic that none of them was made for. oracle: makes the placement
    for `recorded` itself, for the last row: what no plan of other traffic can be asked to beat by much.
    The other arguments are `simulate`'s, and so are the errors.
    """
    if oracle is not None:
        plans = {**plans, ORACLE: oracle(recorded)}
    replays = {
        name: simulate(recorded, holds, machine, card_sizes, host_sizes, window, max_steps)
        for name, holds in plans.items()
    }
    first = next(iter(replays.values()), None)
    return [
        Row(
            name=name,
            window=window,
            conversations=int((replay.steps > 0).sum()),
            steps=len(replay.seconds),
            seconds=ratio(replay.conversation_seconds, replay.steps, 0),
            p50=replay.quantile(0.5),
            p95=replay.quantile(0.95),
            p99=replay.quantile(0.99),
            longest=replay.quantile(1.0),
            hit_rate=ratio(replay.hits, replay.steps * replay.activations_per_step, 0, 1),
            host_bytes=ratio(replay.host_bytes, replay.steps * window, 0),
            host_touched=replay.host_touched,
            change=None if first is None or replay is first else paired_change(first, replay)[1],
            no_interval=_why_none(replay.steps),
        )
        for name, replay in replays.items()
    ]


def cross_sources(table: TrafficTable, solve: Callable[[TrafficTable], np.ndarray]) -> list[SourceRow]:
    """Leave one source out: how a placement made for the others serves it. Most lost first; empty for one source.

    solve: makes holds bool [L, E, P] for a table. The tables it gets have no phases, which are not known by source,
    and no traffic of unknown source.
    """
    if len(table.sources) < 2:
        return []
    everything = solve(_of_sources(table, list(table.sources)))
    rows = []
    for name, tokens in table.source_tokens.items():
        others = solve(_of_sources(table, [other for other in table.sources if other != name]))
        placements = (others, solve(_of_sources(table, [name])), everything)
        rows.append(SourceRow(name, tokens, *(_hit_rate(table.sources[name], holds) for holds in placements)))
    return sorted(rows, key=lambda row: (row.hit_rate - row.oracle, row.source))


def noise_gain(old: Simulation, new: Simulation) -> Gain:
    """Is `new` worth the move from `old`? Replays of the same held-out steps, of traffic that `new` was not made for
    either: on its own traffic every plan gains.

    "worth it" where the whole interval of the gain is above zero, "not worth it" where it is not, "unknown" where the
    conversations are too few for an interval.
    """
    more, relative = paired_change(old, new)
    seconds, saved = _negated(more), _negated(relative)
    conversations = int((old.steps > 0).sum())
    if saved.low is None or saved.high is None:
        return Gain(saved, seconds, conversations, "unknown", _why_none(old.conversation_seconds))
    if saved.value < LEAST_GAIN:
        why = f"saves {_with_interval(saved, 100, '.2f')} % of the time, less than {LEAST_GAIN:.1%}"
        return Gain(saved, seconds, conversations, "not worth it", why)
    why = f"saves {_with_interval(saved, 100, '.2f')} % of the time, by {conversations} held-out conversations"
    return Gain(saved, seconds, conversations, "worth it" if saved.low > 0 else "not worth it", why)


def as_json(rows: Sequence[Row] | Sequence[SourceRow]) -> list[dict[str, Any]]:
    """Rows as objects of JSON, every number with its interval [low, high] or null."""
    return [asdict(row) for row in rows]


def comparison_text(rows: Sequence[Row]) -> str:
    """The rows of `compare` as a table for people, with units, n and what the intervals are."""
    if not rows:
        return "no placement to compare"
    first = rows[0]
    unit, scale = ("ms", 1e3) if first.seconds.value >= 1e-3 else ("µs", 1e6)
    head = ["placement", f"{unit}/step", "p50", "p95", "p99", "max", "hit rate %", "host MB/token", "touch host %"]
    lines = [[*head, f"slower than {first.name} %"]]
    for row in rows:
        times = [f"{scale * value:.4g}" for value in (row.p50, row.p95, row.p99, row.longest)]
        lines.append(
            [
                row.name,
                _with_interval(row.seconds, scale, ".4g"),
                *times,
                _with_interval(row.hit_rate, 100, ".2f"),
                f"{row.host_bytes.value / 1e6:.4g}",
                f"{100 * row.host_touched:.1f}",
                "" if row.change is None else _with_interval(row.change, 100, "+.2f"),
            ]
        )
    tokens = "1 token" if first.window == 1 else f"{first.window} tokens"
    what = f"{first.steps:,} steps of {tokens}, {first.conversations:,} conversations"
    note = "[95 % intervals, by drawing conversations again]" if first.seconds.low is not None else first.no_interval
    return f"Held-out traffic: {what}; {note}\n{_table(lines)}"


def cross_sources_text(rows: Sequence[SourceRow]) -> str:
    """The rows of `cross_sources` as a table for people."""
    if not rows:
        return "one source of traffic: none to leave out"
    lines = [["source left out", "tokens", "hit rate %", "its own plan %", "lost", "plan of all %"]]
    for row in rows:
        rates = [f"{100 * rate:.2f}" for rate in (row.hit_rate, row.oracle, row.oracle - row.hit_rate, row.everything)]
        lines.append([row.source, f"{row.tokens:,}", *rates])
    return _table(lines)


def _why_none(weights: np.ndarray) -> str:
    """Why conversations of these weights [C] cannot tell how far they vary, or ""."""
    count = int((weights > 0).sum())
    if count < FEW:
        return f"no interval: {count} conversations, and at least {FEW} are needed"
    return "no interval: one conversation is more than half of the traffic" if 2 * weights.max() > weights.sum() else ""


def _negated(number: Interval) -> Interval:
    if number.low is None or number.high is None:
        return Interval(-number.value, None, None)
    return Interval(-number.value, -number.high, -number.low)


def _of_sources(table: TrafficTable, names: list[str]) -> TrafficTable:
    sources = {name: table.sources[name] for name in names}
    counts = np.sum(list(sources.values()), axis=0)
    tokens = sum(table.source_tokens[name] for name in names)
    return TrafficTable(counts, tokens, table.layers, table.top_k, sources=sources)


def _hit_rate(counts: np.ndarray, holds: np.ndarray) -> float:
    return float(counts[~holds[..., -1]].sum() / counts.sum())


def _with_interval(number: Interval, scale: float, form: str) -> str:
    text = f"{scale * number.value:{form}}"
    if number.low is None or number.high is None:
        return text
    return f"{text} [{scale * number.low:{form}}, {scale * number.high:{form}}]"


def _table(lines: Sequence[Sequence[str]]) -> str:
    """Columns, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))]
        ).rstrip()
        for line in lines
    )

"""Intervals that hold the truth about as often as they say, paired comparisons, and few conversations."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moefit.errors import PlanError
from moefit.placement.baselines import baselines, frequency_greedy
from moefit.placement.heldout import (
    FEW,
    ORACLE,
    as_json,
    bootstrap,
    compare,
    comparison_text,
    cross_sources,
    cross_sources_text,
    noise_gain,
    paired_change,
    ratio,
)
from moefit.placement.machine import Gpu, Machine
from moefit.placement.recorded import Recorded
from moefit.placement.simulate import Simulation, simulate
from moefit.placement.traffic import TrafficTable

LAYERS, EXPERTS, TOP_K, SIZE = 4, 24, 3, 1_000_000
SIZES = np.full((LAYERS, EXPERTS), SIZE)
ROOM = (30 * SIZE, 30 * SIZE, 60 * SIZE)
MACHINE = Machine((Gpu(ROOM[0]), Gpu(ROOM[1])), ROOM[2])


def traffic(conversations: int, seed: int, own: float = 0.7, length: int = 30) -> Recorded:
    """Every conversation has its own taste, `own` strong, beside the common one: seed 0's whatever `seed` is."""
    rng = np.random.default_rng(seed)
    common = np.random.default_rng(0).gumbel(size=(LAYERS, 1, EXPERTS)) * 1.5
    lengths = rng.integers(length // 2, length * 2, conversations)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    taste = np.repeat(rng.normal(size=(LAYERS, conversations, EXPERTS)) * own, lengths, axis=1)
    noise = rng.gumbel(size=(LAYERS, starts[-1], EXPERTS))
    ids = np.argsort(-(common + taste + noise), axis=2)[..., :TOP_K].astype(np.uint16)
    phase, source = np.ones(starts[-1], np.int8), np.zeros(conversations, np.int16)
    return Recorded(list(ids), tuple(range(LAYERS)), EXPERTS, starts, phase, source, ("a",))


def counted(recorded: Recorded) -> np.ndarray:
    return np.stack([np.bincount(ids.ravel(), minlength=recorded.experts) for ids in recorded.ids])


def greedy_for(recorded: Recorded) -> np.ndarray:
    return frequency_greedy(counted(recorded), SIZES, SIZES, ROOM)


def replay(recorded: Recorded, holds: np.ndarray, **options: Any) -> Simulation:
    return simulate(recorded, holds, MACHINE, SIZES, SIZES, **options)


def plain_bootstrap(values: np.ndarray, weights: np.ndarray, n: int, seed: int) -> list[float]:
    """Ratio of every draw, one conversation at a time."""
    bits = np.random.PCG64(seed)
    found = []
    for _ in range(n):
        chosen = [(int(bits.random_raw()) >> 32) * len(values) >> 32 for _ in values]
        found.append(sum(float(values[i]) for i in chosen) / sum(float(weights[i]) for i in chosen))
    return found


def test_fast_bootstrap_equals_the_plain_loop() -> None:
    rng = np.random.default_rng(3)
    weights = rng.integers(1, 40, 300).astype(float)
    values = weights * rng.lognormal(0, 0.5, 300)
    low, high = np.quantile(plain_bootstrap(values, weights, 100, 5), [0.05, 0.95])
    found = bootstrap(values, weights, n=100, seed=5, level=0.9)
    assert found is not None
    mean = values.sum() / weights.sum()
    error = np.sqrt(300 / 299 * ((values - mean * weights) ** 2).sum()) / weights.sum()
    assert found[0] == pytest.approx(min(low, mean - 1.649966 * error), rel=1e-6)  # t of 299 degrees, 95 %
    assert found[1] == pytest.approx(max(high, mean + 1.649966 * error), rel=1e-6)
    padded = np.concatenate([values, [0.0]]), np.concatenate([weights, [0.0]])  # one that had no step
    assert bootstrap(*padded, n=100, seed=5, level=0.9) == found
    assert bootstrap(values, weights, n=100, seed=6, level=0.9) != found


@pytest.mark.parametrize(("conversations", "least"), [(8, 0.86), (30, 0.88)])
def test_intervals_hold_the_truth_about_as_often_as_they_say(conversations: int, least: float) -> None:
    rng = np.random.default_rng(1)
    held = []
    for seed in range(400):
        weights = rng.lognormal(0, 0.7, conversations)
        found = bootstrap(weights * rng.normal(3, 0.5, conversations), weights, n=200, seed=seed)
        if found is not None:
            held.append(found[0] <= 3 <= found[1])
    assert len(held) > 380 and least < np.mean(held) < 0.99


def test_steps_of_a_conversation_are_not_independent() -> None:
    """An interval that took every step for a draw of its own would be far too short here."""
    recorded = traffic(30, 1, own=1.5, length=100)
    steps = replay(recorded, greedy_for(traffic(30, 2)))
    clustered = ratio(steps.conversation_seconds, steps.steps)
    single = ratio(steps.seconds, np.ones(len(steps.seconds)))
    assert clustered.value == pytest.approx(single.value)
    assert None not in (clustered.low, clustered.high, single.low, single.high)
    assert clustered.high - clustered.low > 2 * (single.high - single.low)  # type: ignore[operator]


def test_few_conversations_have_no_interval_and_it_is_said() -> None:
    ones = np.ones(FEW - 1)
    assert bootstrap(ones, ones) is None and bootstrap(np.ones(FEW), np.ones(FEW)) == (1.0, 1.0)
    heavy = np.array([FEW + 1.0, *np.ones(FEW)])
    assert bootstrap(heavy, heavy) is None
    recorded = traffic(FEW - 1, 1)
    old, new = greedy_for(traffic(20, 2)), greedy_for(recorded)
    rows = compare({"ours": old, "other": new}, recorded, MACHINE, SIZES, SIZES)
    assert rows[0].seconds.low is None and rows[0].hit_rate.high is None and rows[1].change is not None
    text = comparison_text(rows)
    assert "no interval: 7 conversations, and at least 8 are needed" in text and text.count("[") == 0
    gain = noise_gain(replay(recorded, old), replay(recorded, new))
    assert gain.verdict == "unknown" and "at least 8" in gain.why and gain.saved.low is None
    long = traffic(FEW, 3)
    starts = np.array([*long.starts[:-1], long.starts[-1] + 2000])
    ids = [np.concatenate([part, np.tile(part[:1], (2000, 1))]) for part in long.ids]
    long = Recorded(ids, long.layers, EXPERTS, starts, np.ones(starts[-1], np.int8), long.source, ("a",))
    rows = compare({"ours": old}, long, MACHINE, SIZES, SIZES)
    assert "one conversation is more than half" in comparison_text(rows) and rows[0].seconds.low is None


def test_comparison_of_baselines_and_oracle_on_unseen_traffic() -> None:
    seen, unseen = traffic(40, 1), traffic(40, 2)
    plans, failed = baselines(counted(seen), SIZES, SIZES, ROOM)
    assert not failed
    rows = compare(plans, unseen, MACHINE, SIZES, SIZES, window=2, oracle=greedy_for)
    assert [row.name for row in rows] == [*plans, ORACLE]
    by_name = {row.name: row for row in rows}
    greedy, oracle, front = by_name["frequency-greedy"], by_name[ORACLE], by_name["front-loading"]
    assert rows[0] is greedy and greedy.change is None
    assert oracle.hit_rate.value >= greedy.hit_rate.value > front.hit_rate.value
    assert front.change is not None and front.change.low is not None and front.change.low > 0
    assert front.change.value == pytest.approx(front.seconds.value / greedy.seconds.value - 1)
    for row in rows:
        assert (row.window, row.conversations) == (2, 40) and row.p50 <= row.p95 <= row.p99 <= row.longest
        for number in (row.seconds, row.hit_rate, row.host_bytes):
            assert number.low is not None and number.high is not None and 0 <= number.low <= number.value <= number.high
        assert row.hit_rate.high is not None and row.hit_rate.high <= 1
    alone = replay(unseen, plans["EPLB"], window=2)
    eplb = by_name["EPLB"]
    assert (eplb.hit_rate.value, eplb.host_touched) == (pytest.approx(alone.hit_rate), alone.host_touched)
    assert eplb.seconds.value == pytest.approx(alone.mean)
    assert eplb.host_bytes.value == pytest.approx(alone.host_bytes_per_token)
    assert json.loads(json.dumps(as_json(rows), allow_nan=False))[1]["change"]["value"] == rows[1].change.value  # type: ignore[union-attr]
    lines = comparison_text(rows).splitlines()
    assert lines[0].startswith(
        f"Held-out traffic: {rows[0].steps:,} steps of 2 tokens, 40 conversations; [95 % intervals"
    )
    assert "µs/step" in lines[1] and "slower than frequency-greedy %" in lines[1] and len(lines) == 2 + len(rows)
    assert lines[-1].startswith(ORACLE) and max(map(len, lines)) < 200
    assert comparison_text([]) == "no placement to compare"


def test_pairing_makes_the_interval_short() -> None:
    recorded, new = traffic(30, 1), greedy_for(traffic(30, 2))
    first = replay(recorded, new)
    second = simulate(recorded, new, MACHINE, SIZES * 99 // 100, SIZES * 99 // 100)
    seconds, share = paired_change(first, second)
    alone = ratio(first.conversation_seconds, first.steps)
    assert seconds.value == pytest.approx(second.mean - first.mean)
    for end in (share.low, share.value, share.high):
        assert end == pytest.approx(-0.01, rel=1e-6)
    assert seconds.high - seconds.low < 0.011 * (alone.high - alone.low)  # type: ignore[operator]
    assert noise_gain(first, second).verdict == "worth it"
    assert noise_gain(first, second).seconds.value == pytest.approx(first.mean - second.mean)
    with pytest.raises(PlanError, match="other steps"):
        paired_change(first, replay(recorded, new, max_steps=100))
    with pytest.raises(PlanError, match="other steps"):
        paired_change(first, replay(recorded, new, window=2))


def test_a_gain_within_the_noise_is_not_worth_a_move() -> None:
    recorded = traffic(30, 1)
    plan, same_traffic = greedy_for(traffic(40, 2)), greedy_for(traffic(40, 3))
    random = baselines(counted(recorded), SIZES, SIZES, ROOM)[0]["random"]
    real = noise_gain(replay(recorded, random), replay(recorded, plan))
    assert real.verdict == "worth it" and real.saved.low is not None and real.saved.low > 0.05
    assert "30 held-out conversations" in real.why and real.conversations == 30
    back = noise_gain(replay(recorded, plan), replay(recorded, random))
    assert back.verdict == "not worth it" and back.saved.high is not None and back.saved.high < 0
    nothing = noise_gain(replay(recorded, plan), replay(recorded, plan))
    assert nothing.verdict == "not worth it" and nothing.saved.value == 0
    # Two plans made for samples of one traffic: neither may be called better more often than the level allows.
    verdicts = [
        noise_gain(replay(r, plan), replay(r, same_traffic)).verdict for r in (traffic(12, s) for s in range(9, 29))
    ]
    other = [
        noise_gain(replay(r, same_traffic), replay(r, plan)).verdict for r in (traffic(12, s) for s in range(9, 29))
    ]
    assert min(verdicts.count("worth it"), other.count("worth it")) <= 2


def test_leaving_a_source_out_shows_what_the_others_do_not_know() -> None:
    """All but c ask for the same experts; the cards hold half of all."""
    popular = np.array([8, 8, 1, 1]) * 10
    sources = {"a": popular, "b": popular, "c": popular[::-1], "d": popular}
    table = TrafficTable(
        np.tile(np.sum(list(sources.values()), axis=0), (2, 1)),
        360,
        (0, 1),
        2,
        sources={name: np.tile(counts, (2, 1)) for name, counts in sources.items()},
    )
    asked: list[tuple[int, tuple[str, ...]]] = []

    def solve(part: TrafficTable) -> np.ndarray:
        asked.append((part.tokens, tuple(part.sources)))
        sizes = np.ones((2, 4), dtype=np.int64)
        return frequency_greedy(part.counts, sizes, sizes, (4, 4))

    rows = cross_sources(table, solve)
    assert [row.source for row in rows] == ["c", "a", "b", "d"]
    assert [(row.hit_rate, row.oracle, row.everything) for row in rows] == [
        (pytest.approx(2 / 18), pytest.approx(16 / 18), pytest.approx(2 / 18)),
        *[(pytest.approx(16 / 18),) * 3] * 3,
    ]
    assert asked[:3] == [(360, ("a", "b", "c", "d")), (270, ("b", "c", "d")), (90, ("a",))]
    assert asked[5:7] == [(270, ("a", "b", "d")), (90, ("c",))] and len(asked) == 9
    assert cross_sources_text(rows).splitlines()[1].split() == ["c", "90", "11.11", "88.89", "77.78", "11.11"]
    assert cross_sources(TrafficTable(table.counts, 360, (0, 1), 2), solve) == []
    assert "none to leave out" in cross_sources_text([])


def test_a_gain_too_small_to_matter_is_not_worth_a_move() -> None:
    """However sure it is: half a thousandth of the time, in every conversation alike."""
    recorded = traffic(20, 5)
    old = replay(recorded, greedy_for(recorded))
    new = replace(old, conversation_seconds=old.conversation_seconds * (1 - 5e-4))
    found = noise_gain(old, new)
    assert (found.verdict, found.saved.value) == ("not worth it", pytest.approx(5e-4))
    assert "less than 0.1%" in found.why

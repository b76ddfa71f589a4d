"""The vectorised replay against plain loops, and cases worked out by hand."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefit.errors import PlanError, TraceError
from moefit.placement.costs import card_ways, host_ways
from moefit.placement.machine import Cpu, Gpu, Machine
from moefit.placement.recorded import Recorded, window_counts
from moefit.placement.simulate import _plain_steps, decode_steps, expert_seconds, simulate, simulate_plainly

GB = 10**9
module = sys.modules[simulate.__module__]  # the package may give its name to the function


def recording(lengths: list[int], layers: int, experts: int, top_k: int, seed: int, decode: float = 1.0) -> Recorded:
    """Conversations of these lengths; each token is decode with this probability, else prefill or unknown."""
    rng = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = int(starts[-1])
    popular = rng.gumbel(size=(layers, 1, experts)) * 1.5
    order = np.argsort(-(popular + rng.gumbel(size=(layers, tokens, experts))), axis=2)
    phase = np.where(rng.random(tokens) < decode, 1, rng.integers(-1, 1, tokens)).astype(np.int8)
    source = np.zeros(len(lengths), dtype=np.int16)
    ids = list(order[:, :, :top_k].astype(np.uint16))
    return Recorded(ids, tuple(range(3, 3 + layers)), experts, starts, phase, source, ("a",))


def random_holds(rng: np.random.Generator, layers: int, experts: int, places: int, copies: float) -> np.ndarray:
    holds = np.eye(places, dtype=bool)[rng.integers(0, places, (layers, experts))]
    more = (rng.random((layers, experts, places)) < copies) & ~holds[..., -1:]
    more[..., -1] = False
    return holds | more


@st.composite
def replays(draw: st.DrawFn) -> dict[str, Any]:
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(lambda values: sum(values) > 0))
    layers, experts, seed = draw(st.integers(1, 3)), draw(st.integers(2, 7)), draw(st.integers(0, 2**32 - 1))
    top_k = draw(st.integers(1, experts))
    gpus = tuple(
        Gpu(GB, bandwidth=draw(st.integers(1, 2000)) * GB, token_ns=draw(st.integers(0, 500)))
        for _ in range(draw(st.integers(1, 3)))
    )
    cpu = draw(st.none() | st.builds(Cpu, st.integers(GB, 90 * GB), st.integers(0, 9_000), st.integers(0, 9_000)))
    mode = draw(st.sampled_from(["ep", "tp"]))
    machine = Machine(gpus, GB, mode, draw(st.integers(1, 60)) * GB, cpu=cpu, shared_root=draw(st.booleans()))
    rng = np.random.default_rng(seed)
    return {
        "recorded": recording(lengths, layers, experts, top_k, seed, draw(st.sampled_from([0.0, 0.7, 1.0]))),
        "holds": random_holds(rng, layers, experts, len(machine.places), draw(st.sampled_from([0.0, 0.5]))),
        "machine": machine,
        "card_sizes": rng.integers(1, 20_000, (layers, experts)),
        "host_sizes": rng.integers(1, 20_000, (layers, experts)),
        "window": draw(st.integers(1, 4)),
        "max_steps": draw(st.sampled_from([1, 3, 7, 20_000])),
    }


@settings(deadline=None, max_examples=150)
@given(replays(), st.sampled_from([1, 40, 1 << 19]))
def test_fast_replay_equals_plain_loops(case: dict[str, Any], block: int) -> None:
    if not any(_plain_steps(case["recorded"], case["window"], case["max_steps"])):
        with pytest.raises(TraceError, match="no step to replay"):
            simulate(**case)
        return
    plain = simulate_plainly(**case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        fast = simulate(**case)
    assert (fast.window, fast.top_k, fast.layers) == (plain.window, plain.top_k, plain.layers)
    assert np.array_equal(fast.steps, plain.steps)
    assert np.array_equal(fast.hits, plain.hits) and np.array_equal(fast.host_bytes, plain.host_bytes)
    assert fast.host_touched == plain.host_touched
    for mine, theirs in (
        (fast.seconds, plain.seconds),
        (fast.loads, plain.loads),
        (fast.conversation_seconds, plain.conversation_seconds),
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=0)
    assert fast.conversation_seconds.sum() == pytest.approx(fast.mean * len(fast.seconds))


def by_hand() -> tuple[Recorded, np.ndarray, Machine, np.ndarray, np.ndarray]:
    """One layer, 4 experts, two tokens: {0, 2} and {0, 3}. Expert 0 on gpu0, 1 on gpu1, 2 and 3 on the host."""
    ids = [np.array([[2, 0], [0, 3]], dtype=np.uint16)]
    recorded = Recorded(ids, (7,), 4, np.array([0, 2]), np.array([1, 1], np.int8), np.zeros(1, np.int16), ("a",))
    holds = np.eye(3, dtype=bool)[[[0, 1, 2, 2]]]
    machine = Machine((Gpu(GB, 0, 1000, 5 * 10**8), Gpu(GB, 0, 1000)), GB, zero_copy=100, cpu=Cpu(50, 10**9, 2 * 10**9))
    return recorded, holds, machine, np.array([[3000, 1000, 9, 9]]), np.array([[9, 9, 1000, 100]])


def test_numbers_worked_out_by_hand() -> None:
    """Card 3000 B / 1000 B/s + 0.5 s a token; host 2 x 100 B/s over both links, or 1 s + B / 50 + 2 s a token."""
    single = simulate(*by_hand())
    # Step 1: card 3 + 0.5, host min(1000 / 200, 1 + 20 + 2) = 5. Step 2: card 3.5, host min(0.5, 5) = 0.5.
    assert single.seconds.tolist() == [5.0, 3.5]
    assert single.loads.tolist() == [[3.5, 0.0, 2.75]]
    assert (single.mean, single.hit_rate, single.host_bytes_per_token, single.host_touched) == (4.25, 0.5, 550.0, 1.0)
    assert single.quantile(1.0) == 5.0 and single.place_loads.tolist() == [3.5, 0.0, 2.75]
    both = simulate(*by_hand(), window=2)
    # One step: expert 0 is read once for both tokens, 3 + 2 x 0.5; the host reads 2 and 3 one after the other.
    assert both.seconds.tolist() == [5.5]
    assert (both.hit_rate, both.host_bytes_per_token) == (0.5, 550.0)
    assert (both.steps.tolist(), both.hits.tolist(), both.host_bytes.tolist()) == ([1], [2.0], [1100.0])


def test_the_host_takes_its_fastest_way_for_each_expert() -> None:
    machine = Machine((Gpu(GB),), GB, zero_copy=GB, cpu=Cpu(4 * GB, 10_000, 3_000))
    sizes = np.array([[1_000, 100_000]])
    seconds = expert_seconds(machine, sizes, sizes, 2)[0, -1]
    np.testing.assert_allclose(seconds[0] * 1e6, [0, 1, 1])  # zero-copy, 1 us whatever the tokens
    np.testing.assert_allclose(seconds[1] * 1e6, [0, 10 + 25 + 3, 10 + 25 + 6])  # the processor


@pytest.mark.parametrize("block", [1, 1 << 19])
def test_copies_take_turns_and_start_apart(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step asks for experts 0 and 1, both on both cards: each card reads one of them, in turn."""
    ids = [np.tile(np.array([[0, 1]], dtype=np.uint8), (4, 1))]
    phase = np.ones(4, np.int8)
    recorded = Recorded(ids, (0,), 2, np.array([0, 4]), phase, np.zeros(1, np.int16), ("a",))
    holds = np.ones((1, 2, 3), dtype=bool)
    holds[..., -1] = False
    sizes = np.array([[1000, 3000]])
    machine = Machine((Gpu(GB, 0, 1000), Gpu(GB, 0, 1000)), GB)
    monkeypatch.setattr(module, "BLOCK", block)
    found = simulate(recorded, holds, machine, sizes, sizes)
    assert found.seconds.tolist() == [3.0] * 4 and found.loads.tolist() == [[2.0, 2.0, 0.0]]
    assert found.hit_rate == 1.0 and found.host_touched == 0.0 and found.host_bytes_per_token == 0.0


def test_steps_stay_within_runs_of_decode_tokens_of_one_conversation() -> None:
    recorded = recording([5, 4, 0, 6], 1, 4, 1, 0)
    phase = np.array([1, 1, 1, 0, 1, 1, 1, 1, 1, -1, 1, 1, 0, 1, 1], dtype=np.int8)
    first, conversation = decode_steps(replace(recorded, phase=phase), 2, 100)
    assert first.tolist() == [0, 5, 7, 10, 13] and conversation.tolist() == [0, 1, 1, 3, 3]
    unknown = replace(recorded, phase=np.full(15, -1, dtype=np.int8))
    first, conversation = decode_steps(unknown, 2, 100)
    assert first.tolist() == [0, 2, 5, 7, 9, 11, 13] and conversation.tolist() == [0, 0, 1, 1, 3, 3, 3]


@pytest.mark.parametrize("window", [1, 3])
def test_mean_loads_are_the_expected_loads_of_the_windows_counted(window: int) -> None:
    """What a plan's objective takes from counts of windows; the mean slowest is no less than the slowest mean."""
    recorded = recording([40, 7, 55], 3, 12, 3, 4, decode=0.9)
    rng = np.random.default_rng(0)
    cards, host = rng.integers(1_000, 20_000, (2, 3, 12))
    machine = Machine((Gpu(GB, token_ns=30), Gpu(GB, bandwidth=7 * GB)), GB)
    holds = random_holds(rng, 3, 12, 3, 0.0)
    found, counted = simulate(recorded, holds, machine, cards, host, window), window_counts(recorded, window)
    assert counted.steps == len(found.seconds) > 20
    ways = [*card_ways(machine), host_ways(machine, prefill=False)[0]]
    sizes = (cards, cards, host)
    loads = [way.seconds(size, counted.hits, counted.tokens) for way, size in zip(ways, sizes, strict=True)]
    expected = np.where(holds, np.stack(loads, axis=2), 0).sum(axis=1) / counted.steps  # [L, P]
    np.testing.assert_allclose(found.loads, expected, rtol=1e-12)
    assert found.mean >= expected.max(axis=1).sum()
    assert found.hit_rate == pytest.approx(counted.tokens[~holds[..., -1]].sum() / counted.tokens.sum())
    bytes_read = (counted.hits * host)[holds[..., -1]].sum()
    assert found.host_bytes_per_token == pytest.approx(bytes_read / (counted.steps * window))


def test_thinning_is_even_and_does_not_fall_in_step_with_turns() -> None:
    """1,000 conversations of 10 tokens, one step in 10 taken: every place within a conversation must occur."""
    recorded = recording([10] * 1000, 1, 2, 1, 0)
    first, conversation = decode_steps(recorded, 1, 1000)
    assert np.array_equal(first // 10, np.arange(1000)) and np.array_equal(conversation, np.arange(1000))
    places = np.bincount(first % 10, minlength=10)
    assert places.min() > 80 and places.max() < 120
    assert len(decode_steps(recorded, 3, 20_000)[0]) == 3000
    assert len(np.unique(decode_steps(recorded, 1, 7001)[0])) == 7001


def test_a_thinned_mean_is_near_the_whole() -> None:
    recorded = recording([40] * 50, 4, 16, 3, 1)
    rng = np.random.default_rng(0)
    sizes = rng.integers(1_000, 20_000, (4, 16))
    holds = random_holds(rng, 4, 16, 3, 0.0)
    machine = Machine((Gpu(GB), Gpu(GB)), GB)
    whole, thin = (simulate(recorded, holds, machine, sizes, sizes, 1, steps) for steps in (20_000, 400))
    assert len(whole.seconds) == 2000 and len(thin.seconds) == 400
    assert thin.mean == pytest.approx(whole.mean, rel=0.05) and thin.mean != whole.mean


def test_what_does_not_fit_is_refused() -> None:
    recorded, holds, machine, cards, host = by_hand()
    with pytest.raises(PlanError, match="does not fit the recorded routing"):
        simulate(recorded, holds[:, :, 1:], machine, cards, host)
    with pytest.raises(PlanError, match="holds of int64"):
        simulate(recorded, holds.astype(np.int64), machine, cards, host)
    both = holds.copy()
    both[0, 2, 1] = True
    with pytest.raises(PlanError, match=r"layer 7, expert 2.*gpu1 and host"):
        simulate(recorded, both, machine, cards, host)
    both[0, 2] = False
    with pytest.raises(PlanError, match="no place"):
        simulate(recorded, both, machine, cards, host)
    with pytest.raises(PlanError, match="window and max_steps"):
        simulate(recorded, holds, machine, cards, host, window=0)
    with pytest.raises(TraceError, match="no run of 3 decode tokens"):
        simulate(recorded, holds, machine, cards, host, window=3)
    for wrong in (4, -1):
        ids = [np.array([[2, 0], [0, wrong]], dtype=np.int32)]
        with pytest.raises(TraceError, match="id out of range.*layer 7"):
            simulate(replace(recorded, ids=ids), holds, machine, cards, host)

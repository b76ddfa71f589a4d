"""Every baseline fits to the byte, is the same twice, and is what its name says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefit.errors import PlanError
from moefit.placement.baselines import (
    BASELINES,
    baselines,
    eplb,
    frequency_greedy,
    front_loading,
    global_top_k,
    random_placement,
    uniform,
)


@st.composite
def cases(draw: st.DrawFn, equal: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int]]:
    """(counts, card_sizes, host_sizes, room): from no card at all to room for everything on one."""
    layers, experts, cards = draw(st.integers(1, 5)), draw(st.integers(1, 9)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    counts = rng.integers(0, draw(st.sampled_from([2, 1000])), (layers, experts))
    size = draw(st.sampled_from([1, 7, 13_315_596, 2**40]))
    card_sizes = np.full((layers, experts), size)
    if not equal:
        card_sizes = size * rng.integers(1, 6, (layers, experts))
    host_sizes = card_sizes + draw(st.integers(0, 3))
    total = int(card_sizes.sum())
    room = [total * draw(st.integers(0, 10)) // 10 + draw(st.integers(-2, 2)) for _ in range(cards)]
    return counts, card_sizes, host_sizes, [*room, int(host_sizes.sum()) * draw(st.sampled_from([10, 10, 3, 0])) // 10]


def check(holds: np.ndarray, case: tuple[Any, ...], copies: bool = False) -> None:
    counts, card_sizes, host_sizes, room = case
    assert holds.dtype == bool and holds.shape == (*counts.shape, len(room))
    number = holds.sum(axis=2)
    assert (number >= 1).all() and (copies or (number == 1).all()) and (number[holds[..., -1]] == 1).all()
    for place, size in enumerate(room):
        sizes = host_sizes if place == len(room) - 1 else card_sizes
        used = sum(int(s) for s in sizes[holds[..., place]])
        assert used <= max(size, 0)


@settings(deadline=None, max_examples=120)
@given(cases())
def test_all_fit_to_the_byte_and_are_the_same_twice(case: tuple[Any, ...]) -> None:
    plans, failed = baselines(*case)
    assert plans.keys() | failed.keys() == BASELINES.keys() and not plans.keys() & failed.keys()
    for name, holds in plans.items():
        check(holds, case)
        assert np.array_equal(holds, BASELINES[name](*case))
    *_, host_sizes, room = case
    if int(host_sizes.sum()) <= room[-1]:
        assert not failed  # whatever lies nowhere else fits on the host


@settings(deadline=None, max_examples=60)
@given(cases())
def test_greedy_leaves_on_the_host_only_what_no_card_can_take(case: tuple[Any, ...]) -> None:
    _, card_sizes, host_sizes, room = case
    room[-1] = int(host_sizes.sum())
    holds = frequency_greedy(*case)
    left = [size - int(card_sizes[holds[..., card]].sum()) for card, size in enumerate(room[:-1])]
    assert (card_sizes[holds[..., -1]] > max(left)).all()


@settings(deadline=None, max_examples=60)
@given(cases(equal=True))
def test_who_is_on_the_cards_where_all_experts_have_one_size(case: tuple[Any, ...]) -> None:
    counts, card_sizes, host_sizes, room = case
    room[-1] = int(host_sizes.sum())
    size = int(card_sizes[0, 0])
    slots = sum(max(free, 0) // size for free in room[:-1])
    layers, experts = counts.shape
    number = min(slots, counts.size)
    on = {name: ~baseline(*case)[..., -1] for name, baseline in BASELINES.items()}
    for name in ("frequency-greedy", "front-loading", "random", "global top-k"):
        assert on[name].sum() == number, name
    hottest = np.zeros(counts.size, dtype=bool)
    hottest[np.lexsort((np.arange(counts.size), -counts.ravel()))[:number]] = True
    for name in ("frequency-greedy", "global top-k"):
        assert np.array_equal(on[name].ravel(), hottest), name
    assert np.array_equal(on["front-loading"].ravel(), np.arange(counts.size) < number)
    each = min(slots // layers, experts)
    assert np.array_equal(on["uniform"], np.tile(np.arange(experts) < each, (layers, 1)))
    equal = min(max(free, 0) // size // layers for free in room[:-1])  # slots that EPLB has on each card and layer
    for row, cold in zip(counts, ~on["EPLB"], strict=True):
        assert (~cold).sum() == min(equal * (len(room) - 1), experts)
        assert cold.all() or not cold.any() or row[cold].max() <= row[~cold].min()


def test_greedy_goes_to_the_card_with_least_to_read() -> None:
    counts = np.array([[9, 5, 4, 3, 1]])
    sizes = np.full((1, 5), 10)
    holds = frequency_greedy(counts, sizes, sizes, (30, 20, 10))
    assert holds[0].argmax(axis=1).tolist() == [0, 1, 1, 0, 0]  # 9 | 5 4 and full | then gpu0
    assert frequency_greedy(counts, sizes, sizes, (20, 20, 10))[0, 4, -1]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 5), st.integers(0, 6))
def test_eplb_gives_equal_slots_and_copies_to_the_hottest(seed: int, cards: int, slots: int, redundant: int) -> None:
    rng = np.random.default_rng(seed)
    layers, experts, size = 3, 16, 100
    counts = rng.integers(1, 10_000, (layers, experts))
    sizes = np.full((layers, experts), size)
    case = (counts, sizes, sizes, [layers * slots * size + 7] * cards + [layers * experts * size])
    holds = eplb(*case, redundant=redundant)
    check(holds, case, copies=True)
    distinct = slots * cards - redundant
    for row, counted in zip(holds, counts, strict=True):
        on = row[:, :-1].sum(axis=1)
        if distinct < 1:
            assert not on.any()
            continue
        assert (row[:, :-1].sum(axis=0) <= slots).all()
        assert (on > 0).sum() == min(distinct, experts)
        assert on.max() <= cards
        # A copy went to the highest load per copy: taking one away leaves none that is lower than another's load.
        load = counted[on > 0] / on[on > 0]
        for hot, number in zip(counted[on > 1], on[on > 1], strict=True):
            open_ones = load[on[on > 0] < cards]
            assert hot / (number - 1) >= open_ones.max(initial=0) or row[:, :-1].sum() < slots * cards


def test_eplb_packs_the_heaviest_first_on_the_lightest_card() -> None:
    counts = np.array([[10, 9, 8, 3, 2, 1]])
    sizes = np.full((1, 6), 1)
    holds = eplb(counts, sizes, sizes, (2, 2, 9))
    assert holds[0].argmax(axis=1).tolist() == [0, 1, 1, 0, 2, 2]  # 10 | 9 8 and no free slot | 3 fills gpu0
    twice = eplb(counts, sizes, sizes, (2, 2, 9), redundant=1)
    assert twice[0].tolist()[:3] == [[True, True, False], [True, False, False], [False, True, False]]
    assert twice[0, 3:, -1].all()  # copies of 5 and 5; 9 and 8 take the other two slots
    # 80 | 50, and the other 50 not beside it, though that card is lighter.
    apart = eplb(np.array([[100, 80, 1]]), sizes[:, :3], sizes[:, :3], (2, 2, 9), redundant=1)
    assert apart[0].tolist() == [[True, True, False], [True, False, False], [False, True, False]]


def test_room_that_no_whole_expert_fills_is_none() -> None:
    """5 + 5 half experts of room are 4 experts, not 5: the coldest is left out, wherever it stands."""
    counts = np.array([[1, 9], [9, 9], [9, 9]])
    sizes = np.full((3, 2), 2)
    assert np.argwhere(global_top_k(counts, sizes, sizes, (5, 5, 99))[..., -1]).tolist() == [[0, 0], [2, 1]]


def test_shards_are_runs_of_ids_in_proportion_to_the_room() -> None:
    counts = np.zeros((2, 9), dtype=np.int64)
    sizes = np.full((2, 9), 4)
    holds = front_loading(counts, sizes, sizes, (2 * 6 * 4, 2 * 3 * 4, 0))
    assert holds.argmax(axis=2).tolist() == [[0] * 6 + [1] * 3] * 2
    chosen = global_top_k(np.array([[0, 5, 0, 5, 5, 0, 5, 0, 0]]), sizes[:1], sizes[:1], (8, 8, 20))
    assert chosen[0].argmax(axis=1).tolist() == [2, 0, 2, 0, 1, 2, 1, 2, 2]


def test_random_is_even_and_its_seed_counts() -> None:
    counts = np.zeros((20, 100), dtype=np.int64)
    sizes = np.full((20, 100), 3)
    case = (counts, sizes, sizes, (1500, 1500, 3000))
    on = ~random_placement(*case)[..., -1]
    assert on.sum() == 1000 and on.sum(axis=1).min() >= 30 and on.sum(axis=1).max() <= 70
    assert not np.array_equal(on, ~random_placement(*case, seed=1)[..., -1])
    assert np.flatnonzero(on[0])[:5].tolist() == [1, 4, 8, 9, 10]  # golden: the same on every machine


@pytest.mark.parametrize("name", BASELINES)
def test_a_full_host_is_refused_with_the_missing_bytes(name: str) -> None:
    counts = np.arange(8).reshape(2, 4)
    sizes = np.full((2, 4), 1000)
    with pytest.raises(PlanError, match=r"host is full: 1 B too many.*4,000 B in 4 experts.*1 B more"):
        BASELINES[name](counts, sizes, sizes, (2000, 2000, 3999))
    assert BASELINES[name](counts, sizes, sizes, (2000, 2000, 4000))[..., -1].sum() == 4
    assert uniform(counts, sizes, sizes, (2000, 2999, 4000))[..., -1].sum() == 4  # 4,999 B are room for 4

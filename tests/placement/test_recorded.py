"""Recorded routing: windows against plain loops, splitting, files, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefit.errors import TraceError
from moefit.placement import TrafficTable, merge, stack, windows
from moefit.placement.recorded import (
    Recorded,
    all_window_counts,
    load_recorded,
    per_conversation,
    select,
    split,
    table,
    window_counts,
)
from moefit.placement.windows import SIZES, count_plainly


def recording(
    lengths: list[int], layers: int = 2, experts: int = 5, top_k: int = 2, seed: int = 0, decode: float = 0.7
) -> Recorded:
    """Conversations of these lengths with sticky routing, phases in stretches, three sources and an unknown one."""
    rng = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = int(starts[-1])
    noise = rng.random((layers, tokens, experts))
    noise[:, 1:] = np.where(rng.random((layers, tokens - 1, 1)) < 0.6, noise[:, :-1], noise[:, 1:])
    ids = list(np.argsort(noise, axis=2)[:, :, :top_k].astype(np.uint16))
    phase = np.where(rng.random(tokens) < decode, 1, rng.integers(-1, 1, tokens)).astype(np.int8)
    source = rng.integers(-1, 3, len(lengths)).astype(np.int16)
    return Recorded(ids, tuple(range(3, 3 + layers)), experts, starts, phase, source, ("b", "a", "c"))


@st.composite
def recordings(draw: st.DrawFn) -> Recorded:
    lengths = draw(st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(lambda values: sum(values) > 1))
    experts = draw(st.integers(2, 9))
    top_k, seed = draw(st.integers(2, experts)), draw(st.integers(0, 9999))
    return recording(lengths, draw(st.integers(1, 3)), experts, top_k, seed, draw(st.sampled_from([0, 0.5, 0.95, 1])))


def plain_runs(recorded: Recorded, decode_only: bool) -> list[tuple[int, int, int]]:
    """(first token, tokens, source), token by token."""
    only = decode_only and 1 in recorded.phase.tolist()
    runs: list[tuple[int, int, int]] = []
    for conversation in range(recorded.conversations):
        begun = False
        for token in range(int(recorded.starts[conversation]), int(recorded.starts[conversation + 1])):
            wanted = not only or int(recorded.phase[token]) == 1
            if wanted and begun:
                first, length, source = runs[-1]
                runs[-1] = (first, length + 1, source)
            elif wanted:
                runs.append((token, 1, int(recorded.source[conversation])))
            begun = wanted
    return runs


def agree(found: windows.Windows, plain: tuple[int, list[list[int]], list[list[int]]]) -> bool:
    return (found.steps, found.hits.tolist(), found.tokens.tolist()) == plain


@given(recordings(), st.booleans())
def test_windows_are_those_of_plain_loops(recorded: Recorded, decode_only: bool) -> None:
    runs = plain_runs(recorded, decode_only)
    for size in SIZES:
        plain = count_plainly(recorded.ids, recorded.experts, [run[:2] for run in runs], size)
        assert agree(window_counts(recorded, size, decode_only), plain), size


@settings(max_examples=30)
@given(recordings())
def test_a_table_holds_phases_sources_and_windows(recorded: Recorded) -> None:
    made = table(recorded)
    runs = plain_runs(recorded, True)
    assert made.tokens == recorded.tokens
    assert (made.decode is not None) == (1 in recorded.phase)
    for size in SIZES:
        steps, hits, tokens = count_plainly(recorded.ids, recorded.experts, [run[:2] for run in runs], size)
        if steps:
            assert agree(made.windows[size], (steps, hits, tokens))
            assert (made.windows[size].tokens.sum(axis=1) == steps * size * recorded.top_k).all()
        else:
            assert size not in made.windows
        for number, name in enumerate(recorded.sources):
            mine = [(first, length) for first, length, source in runs if source == number]
            plain = count_plainly(recorded.ids, recorded.experts, mine, size)
            found = made.source_windows.get(name, {}).get(size)
            assert (not plain[0]) if found is None else agree(found, plain)
    if made.decode is not None:
        assert np.array_equal(made.windows[1].hits, made.decode)


def test_long_runs_are_counted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = recording([3, 5000, 0, 840, 41, 1700], experts=40, top_k=4)
    whole = all_window_counts(recorded)
    everything = all_window_counts(recorded, decode_only=False)
    monkeypatch.setattr(windows, "PIECE", 840)
    for expected, decode_only in ((whole, True), (everything, False)):
        found = all_window_counts(recorded, decode_only)
        assert found.keys() == expected.keys() == set(SIZES)
        assert all(agree(found[n], (w.steps, w.hits.tolist(), w.tokens.tolist())) for n, w in expected.items())


def test_a_window_worked_out_by_hand() -> None:
    """Tokens 0 1 | 1 2 | 0, of one conversation: two windows of two, the last token in none."""
    ids = np.array([[0, 1], [1, 2], [0, 2], [0, 1], [0, 2]])
    recorded = Recorded([ids], (7,), 4, np.array([0, 5]), np.full(5, -1), np.array([-1]), ())
    steps, hits, tokens = window_counts(recorded, 2)
    assert (steps, hits.tolist(), tokens.tolist()) == (2, [[2, 2, 2, 0]], [[3, 3, 2, 0]])


def test_no_window_of_another_size_and_none_where_runs_are_short() -> None:
    recorded = recording([3, 2], decode=0)
    found = window_counts(recorded, 4)
    assert (found.steps, found.hits.any(), found.tokens.any(), found.hits.shape) == (0, False, False, (2, 5))
    for size in (0, 9, -1):
        with pytest.raises(TraceError, match="no such window.*1..8"):
            window_counts(recorded, size)


def test_conversations_one_by_one_and_chosen() -> None:
    recorded = recording([4, 0, 7, 1, 9])
    talks = list(per_conversation(recorded))
    assert [talk.number for talk in talks] == [0, 2, 3, 4]
    assert all(np.shares_memory(ids, recorded.ids[0]) for talk in talks for ids in talk.ids[:1])
    joined = np.concatenate([talk.ids[1] for talk in talks])
    assert np.array_equal(joined, recorded.ids[1])
    chosen = select(recorded, np.array([4, 2, 4]))
    assert chosen.starts.tolist() == [0, 9, 16, 25]
    for number, original in enumerate((4, 2, 4)):
        one, other = select(chosen, np.array([number])), select(recorded, np.array([original]))
        assert np.array_equal(np.stack(one.ids), np.stack(other.ids))
        assert np.array_equal(one.phase, other.phase)
        assert np.array_equal(one.source, other.source)
    flags = np.array([False, True, True, True, False])
    assert select(recorded, flags).starts.tolist() == [0, 0, 7, 8]
    assert np.shares_memory(select(recorded, flags).ids[0], recorded.ids[0])
    for wrong in (np.array([5]), np.array([-1]), np.zeros(5, bool), np.ones(4, bool), np.array([0.5])):
        with pytest.raises(TraceError, match="conversation"):
            select(recorded, wrong)


@given(recordings(), st.floats(0.01, 0.99), st.integers(0, 3))
def test_a_split_parts_no_conversation_and_keeps_every_source_in_both(
    recorded: Recorded, share: float, seed: int
) -> None:
    filled = np.flatnonzero(np.diff(recorded.starts))
    if len(filled) < 2:
        with pytest.raises(TraceError, match="cannot be split"):
            split(recorded, share, seed)
        return
    one, other = split(recorded, share, seed)
    assert one.tokens > 0 < other.tokens
    assert one.conversations + other.conversations == len(filled)
    merged = merge([table(one), table(other)])
    assert np.array_equal(merged.counts, table(recorded).counts)
    for number in range(-1, 3):
        if (recorded.source[filled] == number).sum() >= 2:
            assert number in one.source
            assert number in other.source
    again, _ = split(recorded, share, seed)
    assert np.array_equal(np.stack(again.ids), np.stack(one.ids))


def test_a_split_has_the_share_and_follows_its_seed() -> None:
    recorded = recording([2] * 400)
    one, other = split(recorded, 0.25)
    assert abs(one.conversations - 100) <= 2
    assert not np.array_equal(np.stack(split(recorded, 0.25, 1)[0].ids), np.stack(one.ids))
    swapped = split(select(recorded, np.arange(400)), 0.25)[1]
    assert np.array_equal(np.stack(swapped.ids), np.stack(other.ids))
    for share in (0.0, 1.0, float("nan")):
        with pytest.raises(TraceError, match="splits nothing"):
            split(recorded, share)


def test_recorded_routing_survives_its_file(tmp_path: Path) -> None:
    recorded, path = recording([40, 0, 7, 13]), tmp_path / "traffic.safetensors"
    made = table(recorded)
    made.save(path, recorded)
    assert TrafficTable.load(path) == made
    found = load_recorded(path)
    assert found is not None
    assert isinstance(found.ids[0].base, np.memmap)
    for name in ("starts", "phase", "source"):
        assert np.array_equal(getattr(found, name), getattr(recorded, name))
    assert np.array_equal(np.stack(found.ids), np.stack(recorded.ids))
    assert (found.layers, found.experts, found.sources) == (recorded.layers, recorded.experts, recorded.sources)
    assert table(found) == made
    first = path.read_bytes()
    made.save(path, found)  # over the file that it is mapped from
    assert path.read_bytes() == first
    made.save(tmp_path / "plain")
    assert load_recorded(tmp_path / "plain") is None
    assert TrafficTable.load(tmp_path / "plain") == made
    assert not list(tmp_path.glob("*.tmp"))


def test_a_part_may_be_kept_but_not_another_model_s(tmp_path: Path) -> None:
    recorded = recording([40, 7, 13])
    made, path = table(recorded), tmp_path / "t"
    made.save(path, select(recorded, np.array([2])))
    part = load_recorded(path)
    assert part is not None
    assert part.tokens == 13
    for wrong in (
        replace(recorded, layers=(0, 1)),
        replace(recorded, experts=6),
        select(recorded, np.array([0, 1, 2, 0])),
    ):
        with pytest.raises(TraceError, match="not of this table's traffic"):
            made.save(path, wrong)
    twice = [ids.copy() for ids in recorded.ids]
    twice[1][5, 1] = twice[1][5, 0]
    with pytest.raises(TraceError, match="twice.*layer 4, row 5"):
        made.save(path, replace(recorded, ids=twice))
    assert load_recorded(path) is not None  # the file is still the old one


def spoilt(path: Path, change: Callable[[dict[str, Any], bytearray, int], None]) -> None:
    """Change the header's JSON or the bytes behind it."""
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    header, body = json.loads(content[8 : 8 + length]), content[8 + length :]
    change(header, body, 0)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def put(name: str, place: int, value: int, width: int) -> Callable[[dict[str, Any], bytearray, int], None]:
    def change(header: dict[str, Any], body: bytearray, _: int) -> None:
        offset = header[name]["data_offsets"][0] + place * width
        body[offset : offset + width] = value.to_bytes(width, "little", signed=value < 0)

    return change


def head(**changes: Any) -> Callable[[dict[str, Any], bytearray, int], None]:
    def change(header: dict[str, Any], body: bytearray, _: int) -> None:
        about = json.loads(header["__metadata__"]["moefit"]) | changes
        header["__metadata__"]["moefit"] = json.dumps(about)

    return change


def shape(name: str, size: list[int]) -> Callable[[dict[str, Any], bytearray, int], None]:
    def change(header: dict[str, Any], body: bytearray, _: int) -> None:
        header[name]["shape"] = size

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("topk_ids", 7, 5, 2), "out of range.*layer 3, row 3.*expected 0 <= id < 5, found 5"),
        (put("starts", 1, 99, 8), "out of order.*starts"),
        (put("starts", 0, 1, 8), "out of order.*starts"),
        (put("starts", 3, 59, 8), "phase.*expected 59 numbers"),
        (put("phase", 3, 2, 1), "labels.*phase.*-1..2"),
        (put("phase", 3, -2, 1), "labels.*phase"),
        (put("source", 0, 3, 2), "labels.*source"),
        (head(recorded_sources=["a", "a"]), "names of the sources"),
        (head(recorded_sources=["a"]), "labels.*source"),
        (head(recorded_sources=None), "names of the sources"),
        (head(version=3), "wrong tensors"),
        (shape("topk_ids", [2, 40, 3]), "wrong shape.*layer 3"),
        (shape("topk_ids", [2, 120, 1]), "wrong shape.*layer 3"),
    ],
)
def test_recordings_that_cannot_be_true_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    recorded, path = recording([40, 7, 13]), tmp_path / "traffic.safetensors"
    table(recorded).save(path, recorded)
    spoilt(path, change)
    with pytest.raises(TraceError, match=message) as caught:
        load_recorded(path)
    assert str(path) in str(caught.value)


def test_cut_files_are_refused(tmp_path: Path) -> None:
    recorded, path = recording([40, 7, 13]), tmp_path / "traffic.safetensors"
    table(recorded).save(path, recorded)
    content = path.read_bytes()
    for size in (0, 7, 200, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        for read in (load_recorded, TrafficTable.load):
            with pytest.raises(TraceError, match=r"not a traffic table.*traffic\.safetensors"):
                read(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"starts": np.array([0, 40, 30, 60])}, "out of order"),
        ({"starts": np.array([0])}, "out of order"),
        ({"starts": np.array([0.0, 60.0])}, "integers.*starts|starts.*integers"),
        ({"phase": np.zeros(59, int)}, "expected 60 numbers from -1 to 1, found 59"),
        ({"source": np.zeros(2, int)}, "expected 3 numbers"),
        ({"sources": ("a", "", "b")}, "names of the sources"),
        ({"layers": (4, 3)}, "layer numbers"),
        ({"layers": (3,)}, "layer numbers"),
        ({"experts": 1}, "wrong shape.*layer 3"),
        ({"ids": [np.zeros((60, 2)), np.zeros((60, 2))]}, "not integers"),
        ({"ids": [np.zeros((60, 2), int), np.zeros((60, 3), int)]}, "wrong shape.*layer 4"),
        ({"ids": [np.zeros((60,), int), np.zeros((60, 2), int)]}, "wrong shape.*layer 3"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        replace(recording([40, 7, 13]), **change)


def test_ids_that_no_expert_has_do_not_reach_the_counting() -> None:
    recorded = recording([9])
    bad = np.stack(recorded.ids).astype(np.int64)
    bad[1, 4, 0] = -3
    for read in (all_window_counts, table, Recorded.check):
        with pytest.raises(TraceError, match="out of range.*layer 4, row 4.*found -3"):
            read(replace(recorded, ids=list(bad)))


def test_layers_stack_and_parts_merge_with_their_windows() -> None:
    recorded = recording([40, 7, 13, 25])
    made = table(recorded)
    layers = [
        table(replace(recorded, ids=[ids], layers=(layer,)))
        for layer, ids in zip(recorded.layers, recorded.ids, strict=True)
    ]
    assert stack(layers) == made
    parts = [select(recorded, np.array(numbers)) for numbers in ([0, 1], [2], [3])]
    assert merge([table(part) for part in parts]) == made
    other = table(replace(recorded, layers=(3, 4), phase=np.zeros(85, np.int8)))
    with pytest.raises(TraceError, match="other tokens.*table 1"):
        stack([made, other])


def test_merging_counts_windows_as_if_all_had_been_recorded_together() -> None:
    """With decode tokens anywhere, windows of traffic without them no longer stand for steps."""
    recorded = recording([40, 30, 20], decode=1)
    silent = replace(recorded, phase=np.full(90, -1, np.int8), source=np.array([0, 1, 2]))
    whole = table(silent)
    parts = [select(silent, np.array([number])) for number in range(3)]
    assert merge([table(part) for part in parts]) == whole
    both = merge([table(recorded), whole])
    assert both.tokens == 180
    assert windows.same_windows(both.windows, table(recorded).windows)
    assert both.source_windows == {} or both.source_windows.keys() <= set(recorded.sources)


def test_impossible_windows_are_refused(tmp_path: Path) -> None:
    made = table(recording([40, 7, 13]))
    size = 3
    steps, hits, tokens = made.windows[size]
    more = hits.copy()
    more[0, 0] = tokens[0, 0] + 1
    odd = tokens.copy()
    odd[1, 2] += 1
    for change, message in (
        ({size: windows.Windows(steps + 1, hits, tokens)}, "add up|impossible"),
        ({size: windows.Windows(steps, more, tokens)}, "impossible counts of windows.*layer 3, expert 0"),
        ({size: windows.Windows(steps, hits, odd)}, "add up|impossible"),
        ({size: windows.Windows(steps, hits * 0, tokens)}, "impossible counts"),
        ({size: windows.Windows(steps, hits[:1], tokens)}, "wrong shape"),
        ({0: made.windows[size]}, "impossible windows"),
        ({9: made.windows[size]}, "impossible windows"),
        ({size: windows.Windows(0, hits * 0, tokens * 0)}, "impossible windows"),
    ):
        with pytest.raises(TraceError, match=message):
            replace(made, windows=change, source_windows={})
    for of_sources, message in (
        ({"nobody": made.windows}, "without its counts"),
        ({"a": made.windows, "b": made.windows}, "more than the whole|impossible"),
    ):
        with pytest.raises(TraceError, match=message):
            replace(made, source_windows=of_sources)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("window_sizes", 0, 2, 8), "sizes"),
        (put("window_steps", 0, 0, 8), "none of a size"),
        (put("window_steps", 0, -4, 8), "impossible windows"),
        (put("window_hits", 0, -1, 8), "impossible counts"),
        (put("source_window_steps", 0, 77, 8), "add up|impossible"),
        (put("window_sizes", 7, 9, 8), "impossible windows"),
        (shape("window_sizes", [4, 2]), "wrong tensors"),
    ],
)
def test_files_with_impossible_windows_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "traffic.safetensors"
    table(recording([40, 30, 33], decode=1)).save(path)
    assert TrafficTable.load(path).windows.keys() == set(SIZES)
    spoilt(path, change)
    with pytest.raises(TraceError, match=message) as caught:
        TrafficTable.load(path)
    assert str(path) in str(caught.value)

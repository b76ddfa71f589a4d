"""Captures token by token: windows on the stream, and the sample of conversations that is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefit.placement import TrafficTable
from moefit.placement import recorded as routing
from moefit.placement.captures import MoeShape, Recording, read_captures, recording, vllm
from moefit.placement.holdout import without
from moefit.placement.recorded import Recorded, load_recorded

from . import writers as w

SHAPE = MoeShape(6, (2, 3, 4, 5), 8, 3)


def read(paths: list[Path], keep: int = 10_000) -> tuple[TrafficTable, Recorded | None]:
    sample = Recording(SHAPE, keep)
    table, _ = read_captures(paths, SHAPE, recording=sample)
    return table, sample.recorded()


def whole(conversations: list[tuple[np.ndarray, int | None]]) -> Recorded:
    """ids [T, L, k] and tokens of the prompt (None: unknown) of each conversation."""
    ids = np.concatenate([ids for ids, _ in conversations])
    phase = [
        np.full(len(ids), -1) if prompt is None else np.where(np.arange(len(ids)) < prompt, 0, 1)
        for ids, prompt in conversations
    ]
    return Recorded(
        [ids[:, layer] for layer in range(ids.shape[1])],
        SHAPE.layers,
        SHAPE.experts,
        np.cumsum([0, *(len(ids) for ids, _ in conversations)]),
        np.concatenate(phase),
        np.full(len(conversations), -1),
        (),
    )


def same(one: Recorded | None, other: Recorded) -> bool:
    return one is not None and all(
        np.array_equal(mine, theirs)
        for mine, theirs in (
            (one.starts, other.starts),
            (one.phase, other.phase),
            (one.source, other.source),
            *zip(one.ids, other.ids, strict=True),
        )
    )


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=6),
    st.sampled_from(["decode", "prompts", "arrays", "mixed"]),
    st.integers(1, 60),
)
def test_the_stream_gives_what_the_whole_recording_gives(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[tuple[int, int]], kind: str, piece: int
) -> None:
    """Answers of both engines and arrays; phases known, unknown, mixed and of prompts alone; buffers of any size."""
    folder, conversations, paths = tmp_path_factory.mktemp("captures"), [], []
    for number, (prompt, generated) in enumerate(sizes):
        ids = w.random_ids(SHAPE, prompt + (0 if kind == "prompts" else generated), number)
        array = kind == "arrays" or (kind == "mixed" and number % 2)
        conversations.append((ids, None if array else prompt))
        if array:
            paths.append(folder / f"{number}.npy")
            np.save(paths[-1], ids)
        else:
            answer = w.sglang_answer(ids, SHAPE, prompt) if number % 3 == 0 else w.vllm_answer(ids, prompt)
            paths.append(w.json_lines(folder / f"{number}.jsonl", answer))
    expected = whole(conversations)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "PIECE", piece)
        table, found = read(paths)
    assert table == routing.table(expected)
    assert same(found, expected)


def test_long_arrays_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "PIECE", 840)
    ids = [w.random_ids(SHAPE, size, size) for size in (2000, 30)]
    np.savez(tmp_path / "a.npz", one=ids[0], two=ids[1])
    table, found = read([tmp_path / "a.npz"])
    expected = whole([(ids[0], None), (ids[1], None)])
    assert table == routing.table(expected)
    assert found is not None
    assert found.starts.tolist() == [0, 1160, 1190]  # at most an eighth of what is kept
    assert np.array_equal(found.ids[1], np.concatenate([ids[0][840:, 1], ids[1][:, 1]]))
    bad = ids[0].copy()
    bad[1500, 2] = bad[1500, 2, 0]
    np.save(tmp_path / "bad.npy", bad)
    with pytest.raises(Exception, match="twice.*layer 4, row 1500"):
        read([tmp_path / "bad.npy"])


def test_halves_and_choices_of_one_answer(tmp_path: Path) -> None:
    """vLLM 0.21 gives prompt and generation apart; a second choice is a conversation of its own."""
    ids, more = w.random_ids(SHAPE, 12, 1), w.random_ids(SHAPE, 7, 2)
    answer = w.vllm_021_answer(ids, 5)
    answer["choices"].append({"index": 1, "routed_experts": more.tolist()})
    _, found = read([w.json_lines(tmp_path / "a.jsonl", answer, w.vllm_answer(more, 3, cached=2))])
    expected = whole([(ids, 5), (more, 0), (more[2:], 1)])
    assert same(found, expected)


def test_batches_and_counts_hold_no_conversation(tmp_path: Path) -> None:
    """A pass of SGLang's recorder is a step of several sequences."""
    ids, mapping = w.random_ids(SHAPE, 9), w.expert_map(SHAPE, 0)
    path = w.sglang_records(tmp_path / "token.pt", [(1, ids[:4]), (2, ids[4:])], SHAPE, mapping, True)
    torch.save(torch.tensor(w.plain_counts(ids, 8)), tmp_path / "kt.pt")
    table, found = read([path, tmp_path / "kt.pt"])
    assert found is None
    assert table.windows == {}
    assert table.tokens == 18


def test_tables_hand_on_their_windows_and_their_recording(tmp_path: Path) -> None:
    ids = [w.random_ids(SHAPE, size, size) for size in (30, 21, 17)]
    first = whole([(ids[0], 8), (ids[1], 9)])
    first = replace(first, source=np.array([0, 1]), sources=("agent", "web"))
    table = routing.table(first)
    table.save(tmp_path / "t", first)
    again, found = read([tmp_path / "t"])
    assert again == table
    assert same(found, first)
    assert found is not None
    assert found.sources == first.sources
    again.save(tmp_path / "again", found)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "t").read_bytes()
    capture = w.json_lines(tmp_path / "a.jsonl", w.vllm_answer(ids[2], 6))
    both, found = read([tmp_path / "t", capture])
    assert found is not None
    assert routing.table(found) == both
    assert both.source_windows.keys() == {"agent", "web"}
    assert read([tmp_path / "t", capture], keep=0)[1] is None


def test_the_sample_is_bounded_repeatable_and_fair(tmp_path: Path) -> None:
    """Of 3,000 conversations, every second one ten times as long, a tenth of the tokens."""
    ids = w.random_ids(SHAPE, 20)
    kept = []
    for _ in range(2):
        sample = Recording(SHAPE, 3300)
        for number in range(3000):
            sample.add(number, ids[: 20 if number % 2 else 2].astype(np.uint16), "decode")
        kept.append(sample.recorded())
    one, other = kept
    assert one is not None
    assert other is not None
    assert same(other, one)
    assert 3280 < one.tokens <= 3300
    sizes = np.diff(one.starts)
    assert 120 < (sizes == 20).sum() < 180
    assert 120 < (sizes == 2).sum() < 180


def test_a_giant_conversation_leaves_room_for_others() -> None:
    ids = w.random_ids(SHAPE, 500).astype(np.uint16)
    sample = Recording(SHAPE, 80)
    for number in range(30):
        sample.add(number, ids[: 500 if number % 5 == 0 else 4], "prefill")
        sample.add(number, ids[:2], "decode")
    found = sample.recorded()
    assert found is not None
    assert found.tokens <= 80
    assert np.diff(found.starts).max() == 10  # an eighth
    assert len(np.unique(np.diff(found.starts))) == 2
    ends = found.starts[1:] - 1
    assert (found.phase[ends] == 1).all()


def test_a_run_that_is_cut_keeps_its_windows(tmp_path: Path) -> None:
    """What is kept can be taken out of the whole again; a run that is too long and too short to be cut is left out."""
    rng = np.random.default_rng(0)
    for keep in (8, 400, 9_000, 16_000):
        for phases in (True, False):
            sample, pieces = Recording(SHAPE, keep), []
            for number in range(12):
                ids = w.random_ids(SHAPE, int(rng.integers(1, 4000)), number)
                prompt = int(rng.integers(0, len(ids))) if phases else None
                pieces.append((ids, prompt))
                for part, phase in ((ids[:prompt], "prefill"), (ids[prompt:], "decode")) if phases else ((ids, None),):
                    sample.add(number, part.astype(np.uint16), phase)
            table, found = routing.table(whole(pieces)), sample.recorded()
            if found is None:
                assert keep < 8 * 840
                continue
            assert keep // 2 < found.tokens <= keep or keep < 8 * 840
            assert np.diff(found.starts).max() <= keep // 8
            rest = without(table, routing.table(found))
            assert rest.tokens == table.tokens - found.tokens


def test_what_was_kept_is_written_with_the_table(tmp_path: Path) -> None:
    answers: list[Any] = [w.vllm_answer(w.random_ids(SHAPE, 20, seed), 8) for seed in range(9)]
    table, found = read([w.json_lines(tmp_path / "a.jsonl", *answers)], keep=165)
    table.save(tmp_path / "t", found)
    loaded = load_recorded(tmp_path / "t")
    assert loaded is not None
    assert TrafficTable.load(tmp_path / "t") == table
    assert loaded.tokens == 160 < table.tokens == 180

"""Traffic tables: counting, refusals, files, merging."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from moefit.errors import TraceError
from moefit.placement import TokenLabels, TrafficTable, merge, stack

Ids = dict[int, np.ndarray]


@st.composite
def routings(draw: st.DrawFn) -> tuple[Ids, int]:
    """Valid recorded ids of 1-3 layers, with the number of experts."""
    experts = draw(st.integers(2, 9))
    k = draw(st.integers(2, experts))
    tokens = draw(st.integers(1, 12))
    row = st.permutations(range(experts)).map(lambda ids: list(ids[:k]))
    layers = draw(st.sets(st.integers(0, 60), min_size=1, max_size=3))
    rows = st.lists(row, min_size=tokens, max_size=tokens)
    return {layer: np.array(draw(rows), dtype=np.uint16) for layer in layers}, experts


def small_table() -> TrafficTable:
    return TrafficTable.from_topk({3: np.array([[0, 1], [2, 1]]), 5: np.array([[3, 1], [1, 2]])}, experts=4)


@given(routings())
def test_counts_are_those_of_a_plain_loop(routing: tuple[Ids, int]) -> None:
    ids, experts = routing
    table = TrafficTable.from_topk(ids, experts)
    assert table.layers == tuple(sorted(ids))
    for row, layer in zip(table.counts, table.layers, strict=True):
        expected = [0] * experts
        for chosen in ids[layer].tolist():
            for expert in chosen:
                expected[expert] += 1
        assert row.tolist() == expected


@given(routings(), st.integers(0, 12))
def test_merging_parts_gives_the_whole(routing: tuple[Ids, int], cut: int) -> None:
    ids, experts = routing
    whole = TrafficTable.from_topk(ids, experts)
    cut = min(cut, whole.tokens)
    parts = [{layer: rows[:cut] for layer, rows in ids.items()}, {layer: r[cut:] for layer, r in ids.items()}]
    tables = [TrafficTable.from_topk(part, experts) for part in parts if len(part[whole.layers[0]])]
    assert merge(tables) == whole


@settings(max_examples=20)
@given(routings())
def test_file_round_trip_and_same_bytes(tmp_path_factory: pytest.TempPathFactory, routing: tuple[Ids, int]) -> None:
    table = TrafficTable.from_topk(*routing)
    path = tmp_path_factory.mktemp("traffic") / "traffic.safetensors"
    table.save(path)
    assert TrafficTable.load(path) == table
    assert path.read_bytes() == table.to_bytes() == TrafficTable.from_topk(*routing).to_bytes()


def test_bytes_are_pinned() -> None:
    """The file's layout is a format: header, then counts, then layers, little-endian."""
    content = small_table().to_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert json.loads(header["__metadata__"]["moefit"]) == {
        **{"format": "moefit.traffic", "tokens": 2, "top_k": 2, "version": 1},
    }
    assert list(header["__metadata__"]) == ["moefit"]  # several keys would come in no fixed order
    numbers = np.frombuffer(content[8 + length :], dtype="<i8").tolist()
    assert numbers == [1, 2, 1, 0, 0, 2, 1, 1, 3, 5]


def test_a_table_cannot_be_changed() -> None:
    counts = np.array([[2, 2]])
    table = TrafficTable(counts, 2, (0,), 2)
    counts[0, 0] = 9
    assert table.counts.tolist() == [[2, 2]]
    with pytest.raises(ValueError, match="read-only"):
        table.counts[0, 0] = 1


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ({}, "no layer"),
        ({0: np.zeros((0, 2), int)}, "layer 0"),
        ({0: np.array([0, 1])}, "layer 0"),
        (
            {0: np.array([[0, 1]]), 1: np.array([[0, 1], [1, 2]])},
            r"layer 1.*expected.*\[1, 2\], found \[2, 2\]",
        ),
        ({7: np.array([[0, 1], [1, 4]])}, "layer 7, row 1.*expected 0 <= id < 4, found 4"),
        ({0: np.array([[0, 1], [-1, -1]])}, "layer 0, row 1.*found -1"),
        ({0: np.array([[0, 1], [2, 2]])}, "layer 0, row 1.*twice|twice.*layer 0, row 1"),
        ({0: np.array([[0, 1], [0, 0], [0, 0]])}, "all-zero.*layer 0, row 1.*2 of 3 rows"),
        ({0: np.zeros((4, 1), int)}, "all-zero"),
        ({0: np.array([[0.0, 1.0]])}, "not integers"),
    ],
)
def test_broken_captures_are_refused(ids: Ids, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        TrafficTable.from_topk(ids, experts=4)


def test_top_1_may_use_expert_0() -> None:
    assert TrafficTable.from_topk({0: np.array([[0], [0], [1]])}, 4).counts.tolist() == [[2, 1, 0, 0]]


@pytest.mark.parametrize(
    ("counts", "tokens", "layers", "top_k", "message"),
    [
        ([[2, 1]], 2, (0,), 2, "add up.*layer 0.*expected 2 tokens x 2 = 4, found 3"),
        ([[3, 1]], 2, (0,), 2, "impossible"),
        ([[-1, 5]], 5, (0,), 2, "impossible"),
        ([[0, 0]], 0, (0,), 2, "impossible"),
        ([[2, 2]], 2, (0,), 3, "top_k"),
        ([[2, 2]], 2, (0, 1), 2, "layers"),
        ([[2, 2], [2, 2]], 2, (1, 0), 2, "layers"),
        ([2, 2], 2, (0,), 2, "shape"),
    ],
)
def test_impossible_tables_are_refused(
    counts: list[list[int]], tokens: int, layers: tuple[int, ...], top_k: int, message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        TrafficTable(np.array(counts), tokens, layers, top_k)


def test_hostile_files_are_refused(tmp_path: Path) -> None:
    good = small_table()
    head = {"format": "moefit.traffic", "tokens": 2, "top_k": 2, "version": 1}
    tensors = {"counts": good.counts, "layers": np.array(good.layers)}

    def file(head: object, tensors: dict[str, np.ndarray]) -> bytes:
        return save(tensors, metadata={"moefit": json.dumps(head)})

    assert file(head, tensors)  # the unspoilt one is fine
    cases = {
        "not a traffic table": [b"", b"garbage", good.to_bytes()[:-1], save(tensors), file([], tensors)],
        "unknown traffic version": [file({**head, "version": v}, tensors) for v in (0, 5, "1", True)],
        "tokens": [file({**head, "tokens": "2"}, tensors), file({**head, "tokens": True}, tensors)],
        "wrong tensors": [
            file(head, {"counts": good.counts}),
            file(head, {**tensors, "stray": good.counts}),
            file(head, {**tensors, "counts": good.counts.astype(np.int32)}),
            file(head, {**tensors, "decode": good.counts}),
            file({**head, "version": 2}, tensors),
            file({**head, "version": 2}, {**tensors, "decode": good.counts.astype(np.int32)}),
        ],
        "add up": [file({**head, "tokens": 3}, tensors)],
    }
    for message, contents in cases.items():
        for content in contents:
            path = tmp_path / "traffic.safetensors"
            path.write_bytes(content)
            with pytest.raises(TraceError, match=message) as caught:
                TrafficTable.load(path)
            assert str(path) in str(caught.value)
    with pytest.raises(TraceError, match=r"missing\.safetensors"):
        TrafficTable.load(tmp_path / "missing.safetensors")


def test_merging_keeps_phases_apart() -> None:
    """What came in an unknown phase is in the counts alone."""
    plain = small_table()
    prefill = TrafficTable(plain.counts, 2, plain.layers, 2, prefill=plain.counts)
    decode = TrafficTable(plain.counts, 2, plain.layers, 2, np.zeros_like(plain.counts), plain.counts)
    merged = merge([plain, prefill, decode, decode])
    assert (merged.tokens, merged.phase_tokens) == (8, {"prefill": 2, "decode": 4})
    assert merged.decode is not None
    assert np.array_equal(merged.decode, 2 * plain.counts)
    assert decode.prefill is None
    assert prefill != plain
    assert merge([plain, plain]).to_bytes() == TrafficTable(2 * plain.counts, 4, plain.layers, 2).to_bytes()


def labelled(seed: int, tokens: int = 40) -> tuple[Ids, TokenLabels, TrafficTable]:
    """Random routing of two layers and three experts, some of it in a known phase and from a known source."""
    rng = np.random.default_rng(seed)
    ids = {layer: np.argsort(rng.random((tokens, 3)))[:, :2].astype(np.uint16) for layer in (1, 4)}
    labels = TokenLabels(rng.integers(-1, 2, tokens), rng.integers(-1, 3, tokens), ("b", "a", "nobody's"))
    labels.source[labels.source == 2] = 1
    return ids, labels, TrafficTable.from_topk(ids, 3, labels)


def test_phases_and_sources_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    ids, labels, table = labelled(0)
    expected = {name: np.zeros((2, 3), int) for name in ("prefill", "decode", "a", "b")}
    for row, layer in enumerate((1, 4)):
        for token, chosen in enumerate(ids[layer].tolist()):
            phase, source = int(labels.phase[token]), int(labels.source[token])
            for expert in chosen:
                if phase >= 0:
                    expected[("prefill", "decode")[phase]][row, expert] += 1
                if source >= 0:
                    expected[("b", "a")[source]][row, expert] += 1
    found = table.phases | dict(table.sources)
    assert list(table.sources) == ["a", "b"]  # by name; one that no token came from is not known
    for name, counts in expected.items():
        assert np.array_equal(found[name], counts), name
        assert (table.phase_tokens | table.source_tokens)[name] * 2 == counts[0].sum()
    assert table.counts.tolist() == TrafficTable.from_topk(ids, 3).counts.tolist()
    assert 0 < sum(table.source_tokens.values()) < table.tokens
    table.save(tmp_path / "t")
    assert TrafficTable.load(tmp_path / "t") == table != TrafficTable.from_topk(ids, 3)
    assert (tmp_path / "t").read_bytes() == table.to_bytes()


def test_a_version_for_what_a_table_tells_apart() -> None:
    """Older readers take every table that does not need a newer one."""
    ids, labels, table = labelled(1)
    plain = TrafficTable.from_topk(ids, 3)
    phases = TrafficTable.from_topk(ids, 3, TokenLabels(labels.phase, np.full(40, -1), ()))
    sources = TrafficTable.from_topk(ids, 3, TokenLabels(np.full(40, -1), labels.source, labels.sources))
    for written, version in ((plain, 1), (phases, 2), (sources, 3), (table, 3)):
        assert b'\\"version\\": %d}' % version in written.to_bytes()


def test_layers_of_the_same_tokens_stack_and_tables_of_the_same_layers_merge() -> None:
    ids, labels, table = labelled(2)
    layers = [TrafficTable.from_topk({layer: ids[layer]}, 3, labels) for layer in ids]
    assert stack(layers) == table
    cuts = [slice(0, 25), slice(25, 40)]
    parts = [
        TrafficTable.from_topk(
            {layer: rows[cut] for layer, rows in ids.items()},
            3,
            TokenLabels(labels.phase[cut], labels.source[cut], labels.sources),
        )
        for cut in cuts
    ]
    assert merge(parts) == table
    with pytest.raises(TraceError, match="other tokens.*table 1"):
        stack([layers[0], TrafficTable.from_topk({4: ids[4]}, 3)])
    with pytest.raises(TraceError, match="layer numbers"):
        stack(layers[::-1])
    with pytest.raises(TraceError, match="no traffic table"):
        stack([])


def test_impossible_sources_are_refused(tmp_path: Path) -> None:
    good = small_table()
    for sources, message in (
        ({"a": good.counts, "b": good.counts}, "the sources are more than the whole"),
        ({"": good.counts}, "impossible"),
        ({"a": -good.counts}, "impossible"),
        ({"a": good.counts[:1]}, "impossible"),
        ({"a": good.counts * [[1], [0]]}, "add up"),
    ):
        with pytest.raises(TraceError, match=message):
            TrafficTable(good.counts, 2, good.layers, 2, sources=sources)
    head = {"format": "moefit.traffic", "tokens": 2, "top_k": 2, "version": 3}
    tensors = {"counts": good.counts, "layers": np.array(good.layers), "sources": good.counts[None]}
    for names in (None, [], ["a", "b"], [3], "a", ["b", "a"]):
        path = tmp_path / "t"
        path.write_bytes(save(tensors, metadata={"moefit": json.dumps({**head, "sources": names})}))
        with pytest.raises(TraceError, match="names of the sources"):
            TrafficTable.load(path)
    path.write_bytes(save(tensors, metadata={"moefit": json.dumps({**head, "sources": ["a"]})}))
    assert TrafficTable.load(path).source_tokens == {"a": 2}


def test_merge_refuses_other_models() -> None:
    one = small_table()
    with pytest.raises(TraceError, match="table 1"):
        merge([one, TrafficTable.from_topk({0: np.array([[0, 1]])}, 4)])
    with pytest.raises(TraceError, match="no traffic table"):
        merge([])


def test_a_shard_of_a_model_is_no_table(tiny_v41: Path) -> None:
    """Its BF16 is a dtype that numpy does not know."""
    with pytest.raises(TraceError, match="not a traffic table"):
        TrafficTable.load(tiny_v41 / "model-00001-of-00011.safetensors")

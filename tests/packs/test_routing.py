"""A pack's recorded routing read back as conversations, and which windows of the traffic are one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moefit.calibrate.render import Span
from moefit.calibrate.splits import tied
from moefit.calibrate.trace_set import Row, vocabulary_hash, write_rows
from moefit.calibrate.traces import Window, load_tokenizer, read_documents, together, windows
from moefit.errors import TraceError
from moefit.packs.routing import (
    TOKENS,
    label_tokens,
    layer_table,
    pack_recorded,
    routing_file,
    write_routing,
    write_tokens,
)
from moefit.placement import recorded as routing
from moefit.placement import stack
from moefit.placement.traffic import PACK_TABLE
from moefit.tensors import write_tensors

LAYERS, EXPERTS = (2, 3, 5), 6


def cut(conversation: str, document: str, source: str, start: int, decode: str) -> Window:
    """decode: a character per token, d for decode."""
    written = np.array([character == "d" for character in decode])
    return Window(np.arange(len(decode), dtype=np.int32), document, source, start, written, conversation)


WINDOWS = [
    cut("a", "a", "web", 0, "ppppdddd"),
    cut("a", "a", "web", 8, "dddpp"),  # the run goes on over the border of two windows
    cut("a", "a#2", "web", 0, "ppdddd"),
    cut("a", "a#3", "agent", 0, "pdddddddddd"),  # the same task in another log
    cut("", "d", "", 0, "pp"),
]


def write_pack(pack: Path) -> list[Any]:
    rng = np.random.default_rng(0)
    labels, tokens, layers = label_tokens(WINDOWS), sum(len(window.ids) for window in WINDOWS), []
    for layer in LAYERS:
        ids = torch.from_numpy(np.argsort(rng.random((tokens, EXPERTS)), axis=1)[:, :2])
        layers.append(
            SimpleNamespace(
                layer=SimpleNamespace(index=layer),
                topk_ids=ids,
                topk_weights=torch.ones(tokens, 2),
                counts=torch.zeros(EXPERTS),
            )
        )
        write_routing(pack, layers[-1])
    stack([layer_table(layer, labels) for layer in layers]).save(pack / PACK_TABLE)
    write_tokens(pack, WINDOWS, labels)
    return layers


def test_a_pack_s_routing_by_conversation(tmp_path: Path) -> None:
    layers = write_pack(tmp_path)
    found = pack_recorded(tmp_path)
    assert found is not None
    assert found.starts.tolist() == [0, 19, 30, 32]
    assert [found.sources[place] if place >= 0 else "" for place in found.source] == ["web", "agent", ""]
    assert "".join("pd"[phase] for phase in found.phase) == "ppppdddd" + "dddpp" + "ppdddd" + "pdddddddddd" + "pp"
    assert (found.layers, found.experts) == (LAYERS, EXPERTS)
    assert all(isinstance(ids, np.memmap) for ids in found.ids)
    for ids, layer in zip(found.ids, layers, strict=True):
        assert np.array_equal(ids, layer.topk_ids.numpy())
    table = stack([layer_table(layer, label_tokens(WINDOWS)) for layer in layers])
    assert routing.table(found) == table
    assert {size: counted.steps for size, counted in table.windows.items()} == {
        **{1: 21, 2: 10, 3: 6, 4: 4, 5: 3, 6: 2, 7: 2, 8: 1},  # runs of 7, 4 and 10 tokens
    }
    assert table.source_windows.keys() == {"web", "agent"}


def test_packs_of_earlier_versions_and_without_routing(tmp_path: Path) -> None:
    assert pack_recorded(tmp_path) is None
    write_pack(tmp_path)
    labels = label_tokens(WINDOWS)
    starts = torch.tensor([0, 8, 13, 19, 30, 32])
    old = {"starts": starts, "phase": torch.from_numpy(labels.phase), "source": torch.from_numpy(labels.source)}
    write_tensors(tmp_path / TOKENS, old)
    found = pack_recorded(tmp_path)
    assert found is not None
    assert found.starts.tolist() == starts.tolist()
    for change in (
        {"starts": starts[:-1]},
        {"starts": starts.flip(0)},
        {"phase": old["phase"][1:]},
        {"phase": old["phase"] + 1},
        {"document": torch.tensor([0, 1, 0, 1, 2])},
        {"document": torch.arange(4)},
    ):
        write_tensors(tmp_path / TOKENS, old | change)
        with pytest.raises(TraceError, match="recorded routing is damaged.*moefit verify"):
            pack_recorded(tmp_path)
    write_tensors(tmp_path / TOKENS, {"starts": starts})
    with pytest.raises(TraceError, match="damaged.*tokens.safetensors.*phase"):
        pack_recorded(tmp_path)


def test_damaged_routing_is_refused(tmp_path: Path) -> None:
    layers = write_pack(tmp_path)
    path = routing_file(tmp_path, LAYERS[1])
    good = path.read_bytes()
    path.write_bytes(good[:-9])
    with pytest.raises(TraceError, match=r"layer-003\.safetensors"):
        pack_recorded(tmp_path)
    ids = layers[1].topk_ids.to(torch.uint16)
    for tensors, message in (
        ({"topk_ids": ids[:-1].clone()}, "wrong shape.*layer 3"),
        ({"topk_ids": (ids.int() + 1).to(torch.uint16)}, "out of range.*layer 3"),
        ({"other": ids}, "no topk_ids"),
    ):
        write_tensors(path, tensors)
        with pytest.raises(TraceError, match=message):
            pack_recorded(tmp_path)
    path.unlink()
    with pytest.raises(TraceError, match=r"layer-003\.safetensors"):
        pack_recorded(tmp_path)


def test_what_an_import_holds_together_is_one_conversation(tiny_v41: Path, tmp_path: Path) -> None:
    """Documents that share a conversation or a task, in whatever order they stand."""
    named = [("x", ""), ("y", "t"), ("", ""), ("x", "u"), ("z", "t"), ("", ""), ("w", "u")]
    assert tied(named) == [0, 1, 2, 0, 1, 5, 0]
    assert tied([("t", ""), ("", "t")]) == [0, 1]  # a task is no conversation
    tokenizer = load_tokenizer(tiny_v41)
    ids = np.arange(5, dtype=np.int32)
    rows = [
        Row(f"d{number}", conversation, task, "st"[number == 3], "calibrate", 0, ids, [Span("user", 0, 5)])
        for number, (conversation, task) in enumerate(named)
    ]
    path = tmp_path / "t.parquet"
    with path.open("wb") as file:
        write_rows(file, rows, {"tokenizer": vocabulary_hash(tokenizer)})
    documents = read_documents(path, tokenizer)
    assert [document.conversation for document in documents] == ["d0", "d1", "d2", "d0", "d1", "d5", "d0"]
    ordered = together(documents)
    assert [document.id for document in ordered] == [
        "d0",
        "d6",
        "d3",
        "d1",
        "d4",
        "d2",
        "d5",
    ]  # d3 is of another source
    cut_up = windows(ordered, 3)
    labels = label_tokens(cut_up)
    assert labels.starts is not None
    assert labels.starts.tolist() == [0, 10, 15, 25, 30, 35]

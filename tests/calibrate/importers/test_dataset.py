"""Data sets: saved on disk, Parquet, by name (never from the network)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moefit.calibrate.importers import dataset, detect, find_inputs
from moefit.errors import TraceError

from .samples import CHAT, ERRAND, read, said

ROWS = [
    {"id": str(n), "messages": [{**m, "content": m["content"] or ""} for m in CHAT if m["role"] != "user"]}
    for n in range(3)
]


def save(path: Path, table: pa.Table, file: bool = False) -> None:
    """What `Dataset.save_to_disk` leaves."""
    path.mkdir(parents=True)
    writer = pa.ipc.new_file if file else pa.ipc.new_stream
    with writer(str(path / "data-00000-of-00001.arrow"), table.schema) as out:
        out.write_table(table, max_chunksize=2)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (path / "dataset_info.json").write_text("{}")


def expected() -> list[Any]:
    return [m for m in ERRAND if m[0] != "user"]


@pytest.mark.parametrize("file", [False, True])
def test_saved_dataset(tmp_path: Path, file: bool) -> None:
    save(tmp_path / "set", pa.Table.from_pylist(ROWS), file)
    (found,) = find_inputs([str(tmp_path / "set")])
    form, why = detect(found)
    assert (form.name, why) == ("dataset", "a data set saved on disk")
    conversations = list(form.read(found, None))
    assert [said(c) for c in conversations] == [expected()] * 3  # type: ignore[arg-type]
    assert conversations[2].where == "set/data-00000-of-00001.arrow:3"


def test_saved_dictionary(tmp_path: Path) -> None:
    for split in ("test", "train"):
        save(tmp_path / "set" / split, pa.table({"text": [f"of {split}", "x"]}))
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (found,) = find_inputs([str(tmp_path / "set")])
    assert [c.text for c in detect(found)[0].read(found, None)] == ["of train", "x", "of test", "x"]  # type: ignore[union-attr]


def test_parquet_rows_of_every_form(tmp_path: Path) -> None:
    rows = [
        {"messages": json.dumps(CHAT)},
        {"conversations": [{"from": "human", "value": "Hi"}]},
        {"prompt": "Hi", "response": "Ho"},
        {"content": "words"},
        {"label": 3},
    ]
    found = []
    for number, row in enumerate(rows):
        path = tmp_path / f"{number}.parquet"
        pq.write_table(pa.Table.from_pylist([row]), path)
        assert detect(find_inputs([str(path)])[0])[0].name == "dataset"
        found += read(path, "dataset")
    assert said(found[0]) == ERRAND
    assert said(found[1]) == [("user", "Hi", "", [])]
    assert said(found[2]) == [("user", "Hi", "", []), ("assistant", "Ho", "", [])]
    assert found[3].text == "words"
    assert "messages or text, found label" in found[4].why


def test_damaged_parquet(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": ["x"] * 100}), path)
    path.write_bytes(path.read_bytes()[:-20])
    (bad,) = read(path, "dataset")
    assert "cannot be read" in bad.why


def test_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, split: str, streaming: bool) -> list[Any]:
        asked.append((name, split, streaming))
        return ROWS

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    (found,) = find_inputs(["hf:owner/name:train_sft"])
    form, _ = detect(found)
    conversations = list(form.read(found, None))
    assert asked == [("owner/name", "train_sft", True)]
    assert [said(c) for c in conversations] == [expected()] * 3  # type: ignore[arg-type]
    assert conversations[0].where == "hf:owner/name:train_sft:1"


def test_by_name_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (found,) = find_inputs(["hf:owner/name"])
    with pytest.raises(TraceError, match=r"need the package `datasets` .*moefit\[datasets\]"):
        list(dataset.by_name(found))

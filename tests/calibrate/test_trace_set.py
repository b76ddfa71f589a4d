"""The trace set on disk: what is written is read, and what cannot be right is refused."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moefit.calibrate import trace_set
from moefit.calibrate.render import Span
from moefit.calibrate.trace_set import SCHEMA, Row, read_rows, vocabulary_hash, write_rows
from moefit.calibrate.traces import load_tokenizer, read_documents, windows
from moefit.errors import TraceError


@pytest.fixture(scope="module")
def tokenizer(tiny_v41: Path) -> Any:
    return load_tokenizer(tiny_v41)


def row(name: str, split: str, size: int = 5) -> Row:
    ids = np.arange(size, dtype=np.int32)
    return Row(name, f"of {name}", "t", "s", split, 3, ids, [Span("user", 0, 2), Span("assistant", 2, size)])


def save(path: Path, rows: list[Row], tokenizer: Any, **about: Any) -> Path:
    with path.open("wb") as file:
        write_rows(file, rows, {"tokenizer": vocabulary_hash(tokenizer), **about})
    return path


def test_round_trip(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_set, "ROW_GROUP_TOKENS", 12)
    rows = [row(str(n), ("calibrate", "plan", "held-out")[n % 3], 5 + n) for n in range(9)]
    path = save(tmp_path / "t.parquet", rows, tokenizer)
    assert pq.ParquetFile(path).num_row_groups > 2
    for split in ("calibrate", "plan", "held-out"):
        found = list(read_rows(path, tokenizer, split))
        wanted = [r for r in rows if r.split == split]
        assert [r.document for r in found] == [r.document for r in wanted]
        for one, two in zip(found, wanted, strict=True):
            assert one.ids.dtype == np.int32
            assert np.array_equal(one.ids, two.ids)
            assert (one.roles, one.conversation, one.task, one.source, one.shared_tokens) == (
                two.roles,
                two.conversation,
                two.task,
                two.source,
                two.shared_tokens,
            )


def test_the_same_rows_are_the_same_bytes(tokenizer: Any) -> None:
    files = [io.BytesIO(), io.BytesIO()]
    for file in files:
        write_rows(file, [row("a", "plan")], {"x": 1})
    assert files[0].getvalue() == files[1].getvalue()


def test_read_as_documents(tokenizer: Any, tmp_path: Path) -> None:
    """Windows keep the document, and where in it they are: the spans can be found."""
    path = save(tmp_path / "t.parquet", [row("a", "calibrate"), row("a", "calibrate"), row("b", "held-out")], tokenizer)
    documents = read_documents(path, tokenizer)
    assert [d.id for d in documents] == ["a", "a#2"]
    assert documents[0].roles == (Span("user", 0, 2), Span("assistant", 2, 5))
    assert [(w.document, w.start) for w in windows(documents, 3)] == [("a", 0), ("a", 3), ("a#2", 0), ("a#2", 3)]
    assert [d.id for d in read_documents(path, tokenizer, part="held-out")] == ["b"]
    with pytest.raises(TraceError, match=r"no document of the part plan .*t\.parquet.*--shares"):
        read_documents(path, tokenizer, part="plan")
    with pytest.raises(TraceError, match="expected ids below 4, found 4"):
        read_documents(path, tokenizer, vocabulary=4)
    with pytest.raises(TraceError, match="no such split"):
        read_documents(path, tokenizer, part="test")


def test_another_tokenizer_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    path = save(tmp_path / "t.parquet", [row("a", "calibrate")], tokenizer)

    class Other:
        def get_vocab(self) -> dict[str, int]:
            return tokenizer.get_vocab() | {"the": 4095}

        def __len__(self) -> int:
            return len(tokenizer)

    with pytest.raises(TraceError, match=r"another tokenizer .*t\.parquet.*--model"):
        read_documents(path, Other())


def test_the_hash_follows_every_token() -> None:
    class Vocabulary:
        def __init__(self, **tokens: int) -> None:
            self.tokens = tokens

        def get_vocab(self) -> dict[str, int]:
            return self.tokens

    assert vocabulary_hash(Vocabulary(a=0, b=1)) == vocabulary_hash(Vocabulary(b=1, a=0))
    hashes = {
        vocabulary_hash(v) for v in (Vocabulary(a=0, b=1), Vocabulary(a=1, b=0), Vocabulary(a=0), Vocabulary(a=0, c=1))
    }
    assert len(hashes) == 4


def write_table(path: Path, tokenizer: Any, metadata: Any = None, **columns: Any) -> Path:
    """A file that write_rows would not write."""
    about = {"format": "moefit-traces", "version": 1, "tokenizer": vocabulary_hash(tokenizer)} | (metadata or {})
    values = {
        **{name: ["x"] for name in ("document", "conversation", "task", "source")},
        "split": ["calibrate"],
        "shared_tokens": [0],
        "ids": [[1, 2]],
        "roles": [[{"role": "user", "start": 0, "stop": 2}]],
    }
    table = pa.table(values | columns, SCHEMA.with_metadata({b"moefit": json.dumps(about).encode()}))
    pq.write_table(table, path)
    return path


@pytest.mark.parametrize(
    "columns",
    [
        {"ids": [[]], "roles": [[]]},
        {"ids": [None]},
        {"ids": [[1, None]]},
        {"ids": [[1, -2]]},
        {"ids": [[1, 4096]]},
        {"document": [None]},
        {"roles": [[]]},
        {"roles": [None]},
        {"roles": [[{"role": "user", "start": 0, "stop": 3}]]},
        {"roles": [[{"role": "user", "start": 1, "stop": 2}]]},
        {"roles": [[{"role": "a", "start": 0, "stop": 2}, {"role": "b", "start": 1, "stop": 2}]]},
        {"roles": [[{"role": "a", "start": 0, "stop": None}]]},
    ],
)
def test_rows_that_cannot_be_right(tokenizer: Any, tmp_path: Path, columns: Any) -> None:
    assert read_documents(write_table(tmp_path / "t.parquet", tokenizer), tokenizer)
    with pytest.raises(TraceError, match=r"cannot be right .*t\.parquet, document"):
        read_documents(write_table(tmp_path / "t.parquet", tokenizer, **columns), tokenizer)


def test_other_files(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"text": ["x"]}), path)
    with pytest.raises(TraceError, match=r"not a trace set .*moefit traces"):
        read_documents(path, tokenizer)
    with pytest.raises(TraceError, match="expected version 1 .*found version 2"):
        read_documents(write_table(path, tokenizer, {"version": 2}), tokenizer)
    with pytest.raises(TraceError, match="not a trace set"):
        read_documents(write_table(path, tokenizer, {"format": "other"}), tokenizer)
    whole = save(path, [row("a", "calibrate")], tokenizer).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match=r"cannot be read .*t\.parquet"):
        read_documents(path, tokenizer)

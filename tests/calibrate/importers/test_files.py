"""Records out of files: layouts, compression, damage; a streamed array against json.load."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefit.calibrate.conversation import Bad
from moefit.calibrate.importers import files
from moefit.calibrate.importers.files import Input, layout, lines, records


def values(path: Path) -> list[Any]:
    return [value for _, value in records(Input(path, path.name))]


def wheres(path: Path) -> list[str]:
    return [where for where, _ in records(Input(path, path.name))]


def compress(data: bytes, kind: str) -> bytes:
    if kind == "gzip":
        return gzip.compress(data, mtime=0)
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return bytes(sink.getvalue())


@pytest.mark.parametrize(
    ("text", "how", "found", "places"),
    [
        ('{"a": 1}\n\n{"a": 2}\n', "lines", [{"a": 1}, {"a": 2}], ["f:1", "f:3"]),
        ('{"a": 1}', "lines", [{"a": 1}], ["f:1"]),
        ('[1]\n["x"]\n', "lines", [[1], ["x"]], ["f:1", "f:2"]),
        ('\ufeff[{"a": 1},\n {"a":\n 2}, {"a": 3}]\n', "array", [{"a": 1}, {"a": 2}, {"a": 3}], ["f:1", "f:2", "f:3"]),
        ("[]", "array", [], []),
        ('[{"role": "user"},\n{"role": "x"}]', "one", [[{"role": "user"}, {"role": "x"}]], ["f"]),
        ('{\n "a": 1\n}\n', "one", [{"a": 1}], ["f"]),
        ("plain words\n", "", None, None),
        ("", "", None, None),
    ],
)
def test_layouts(tmp_path: Path, text: str, how: str, found: Any, places: Any) -> None:
    path = tmp_path / "f"
    path.write_text(text)
    assert layout(Input(path, "f")) == how
    if how:
        assert values(path) == found
        assert wheres(path) == places


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)
objects = st.lists(st.dictionaries(st.text(max_size=5), json_values, max_size=4), max_size=12)


@settings(max_examples=80, deadline=None)
@given(objects, st.sampled_from([None, 1]), st.booleans(), st.integers(1, 40))
def test_streamed_arrays_are_what_json_says(made: list[Any], indent: int | None, ascii_only: bool, chunk: int) -> None:
    """Wherever a chunk ends, inside a character or a number."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(files, "CHUNK", chunk):
        path = Path(folder) / "f"
        path.write_text(json.dumps(made, indent=indent, ensure_ascii=ascii_only))
        assert [value for _, value in files._elements(Input(path, "f"), None)] == made


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_compressed_files(tmp_path: Path, kind: str) -> None:
    """By content, whatever the name; several streams in one file, as rotated logs have."""
    path = tmp_path / "log"
    parts = [b'{"a": 1}\n', b'{"a": 2}\n' * 1000]
    path.write_bytes(b"".join(compress(part, kind) for part in parts))
    assert values(path) == [{"a": 1}] + [{"a": 2}] * 1000
    whole = path.read_bytes()
    told: list[int] = []
    list(records(Input(path, "log"), told.append))
    assert sum(told) == len(whole)

    path.write_bytes(whole[:-9])
    *good, last = values(path)
    assert isinstance(last, Bad)
    assert "decompressed" in last.why
    assert all(value in ({"a": 1}, {"a": 2}) for value in good)


def test_bad_lines_do_not_stop_the_file(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"a": 1\n{"a": 2}\n{"b": "\xff"}\n{"a": 3}\n')
    first, second, third, fourth = values(path)
    assert (second, fourth) == ({"a": 2}, {"a": 3})
    assert (first.where, third.where) == ("log.jsonl:1", "log.jsonl:3")
    assert "not JSON" in first.why
    assert "utf-8" in third.why


def test_a_broken_array_ends_there(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    for text in ('[{"a": 1},\n{"a": 2},\n{"a" 3}, {"a": 4}]', '[{"a": 1},\n{"a": 2},\n{"a": '):
        path.write_text(text)
        one, two, bad = values(path)
        assert (one, two) == ({"a": 1}, {"a": 2})
        assert bad.where == "log.json:3"
        assert "rest of the file" in bad.why


def test_records_beyond_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_RECORD", 2000)
    monkeypatch.setattr(files, "CHUNK", 100)
    path = tmp_path / "log.jsonl"
    big = json.dumps({"a": "x" * 5000})
    path.write_text(f'{{"a": 1}}\n{big}\n{{"a": 2}}\n')
    one, bad, two = values(path)
    assert (one, two) == ({"a": 1}, {"a": 2})
    assert "more than" in bad.why
    path.write_text(f'[{{"a": 1}}, {big}]')
    assert layout(Input(path, "f")) == "array"
    one, bad = values(path)
    assert "rest of the file" in bad.why
    path.write_text(f'{{"a":\n"{"x" * 5000}"}}')
    (bad,) = [value for _, value in files._whole(Input(path, "f"), None)]
    assert "more than" in bad.why


def test_lines_are_numbered(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"\n\na\n \nb")
    assert list(lines(Input(path, "f"))) == [("f:3", b"a\n"), ("f:5", b"b")]


def test_deep_nesting_is_a_bad_record(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"a": 1}\n' + "[" * 100_000 + "\n")
    good, bad = values(path)
    assert good == {"a": 1}
    assert isinstance(bad, Bad)

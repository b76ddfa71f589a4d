"""Hugging Face data sets: as saved on disk (Arrow), as Parquet files, or by name through `datasets`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ...errors import TraceError
from ..conversation import Bad, BadRecord, Conversation, Message
from . import agents, anthropic, gateway, openai, responses
from .files import Input, convert

BY_NAME = "hf:"
"""`hf:OWNER/NAME`, `hf:OWNER/NAME:SPLIT`: a data set from the hub."""
PAIRS = (("prompt", "response"), ("prompt", "completion"), ("instruction", "output"), ("question", "answer"))
TEXTS = ("text", "content", "code")


def is_dataset(path: Path) -> bool:
    """A directory that `save_to_disk` wrote."""
    return path.is_dir() and any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))


def arrow_files(path: Path) -> list[Path]:
    """The Arrow files of a saved data set in its own order, of all splits of a DatasetDict; caches are left out."""
    dictionary = path / "dataset_dict.json"
    if dictionary.is_file():
        splits = json.loads(dictionary.read_text())["splits"]
        return [file for name in splits for file in arrow_files(path / name)]
    state = path / "state.json"
    if state.is_file():
        return [path / entry["filename"] for entry in json.loads(state.read_text())["_data_files"]]
    return sorted(path.glob("*.arrow"))


def on_disk(file: Input, tell: Callable[[int], None] | None = None) -> Iterator[Conversation | Bad]:
    """Rows of a saved data set, an .arrow or a .parquet file, a batch at a time."""
    paths = arrow_files(file.path) if file.path.is_dir() else [file.path]
    if not paths:
        yield Bad(file.name, "the data set has no Arrow file")
    for path in paths:
        name = f"{file.name}/{path.relative_to(file.path)}" if file.path.is_dir() else file.name
        yield from convert(_rows(path, name, tell), lambda row, where: conversations(row, where, file.name))


def _rows(path: Path, name: str, tell: Callable[[int], None] | None) -> Iterator[tuple[str, Any]]:
    number = 0
    try:
        for batch in _batches(path):
            for row in batch.to_pylist():
                number += 1
                yield f"{name}:{number}", without_none(row)
    except (OSError, pa.ArrowException) as error:
        yield name, Bad(f"{name}:{number + 1}", f"the rest of the data set cannot be read ({error})")
    if tell:
        tell(path.stat().st_size if path.is_file() else 0)


def _batches(path: Path, rows: int = 64) -> Iterator[pa.RecordBatch]:
    with path.open("rb") as file:
        magic = file.read(6)
    if magic[:4] == b"PAR1":
        with pq.ParquetFile(path) as parquet:
            yield from parquet.iter_batches(rows)
        return
    with pa.OSFile(str(path)) as source:
        batches = pa.ipc.open_file(source) if magic == b"ARROW1" else None
        stream = (
            (batches.get_batch(n) for n in range(batches.num_record_batches)) if batches else pa.ipc.open_stream(source)
        )
        for batch in stream:
            for start in range(0, batch.num_rows, rows):
                yield batch.slice(start, rows)


def without_none(value: Any) -> Any:
    """A row without the nulls with which Arrow fills fields that a record does not have."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value


def by_name(file: Input, tell: Callable[[int], None] | None = None) -> Iterator[Conversation | Bad]:
    """Rows of a data set on the hub, streamed by `datasets`, which is an optional dependency."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise TraceError(
            "data sets by name need the package `datasets`", where=file.name, mend="pip install 'moefit[datasets]'"
        ) from None
    name, _, split = file.name.removeprefix(BY_NAME).partition(":")
    try:
        rows = load_dataset(name, split=split or "train", streaming=True)
    except Exception as error:  # anything: no network, no such set, no such split
        raise TraceError("the data set cannot be loaded", where=file.name, found=str(error)) from None
    found = ((f"{file.name}:{n}", without_none(row)) for n, row in enumerate(rows, start=1))
    yield from convert(found, lambda row, where: conversations(row, where, file.name))


def conversations(row: Any, where: str, source: str) -> Iterator[Conversation]:
    """A row of any form that another importer knows, by its columns; a prompt and its answer; or a text."""
    if not isinstance(row, dict):
        raise BadRecord(f"expected a row of columns, found {type(row).__name__}")
    for column in ("messages", "conversations", "traj", "history"):
        if isinstance(row.get(column), str) and row[column][:1] == "[":
            row = {**row, column: json.loads(row[column])}
    if gateway.looks_like(row):
        yield from gateway.conversations(row, where, source)
    elif anthropic.looks_like(row):
        yield from anthropic.conversations(row, where, source)
    elif "messages" in row or "conversations" in row:
        yield from openai.conversations(row, where, source)
    elif isinstance(row.get("traj"), list):
        yield from agents.tau_bench(row, where, source, source)
    elif isinstance(row.get("history"), list):
        yield from agents.swe_agent(row, where, source, str(row.get("instance_id") or where))
    elif responses.looks_like(row):
        yield from responses.conversations(row, where, source)
    elif found := next((p for p in PAIRS if all(isinstance(row.get(column), str) for column in p)), None):
        messages = (Message("user", row[found[0]]), Message("assistant", row[found[1]]))
        yield Conversation(where, messages=messages, **openai.names(row, source))
    elif column := next((column for column in TEXTS if isinstance(row.get(column), str) and row[column]), ""):
        yield from openai.conversations({**row, "text": row[column]}, where, source)
    else:
        raise BadRecord(f"expected a column of messages or text, found {', '.join(map(str, row)):.80}")

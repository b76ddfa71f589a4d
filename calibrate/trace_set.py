"""The trace set: documents as token ids in a Parquet file (its one-page spec is docs/traces.md)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..errors import TraceError
from .render import Span
from .splits import PARTS

FORMAT, VERSION = "moefit-traces", 1
ROW_GROUP_TOKENS = 1 << 20
"""A row group is written once it has so many tokens: the writer holds no more."""
SCHEMA = pa.schema(
    [
        ("document", pa.string()),
        ("conversation", pa.string()),
        ("task", pa.string()),
        ("source", pa.string()),
        ("split", pa.string()),
        ("shared_tokens", pa.int32()),
        ("ids", pa.list_(pa.int32())),
        ("roles", pa.list_(pa.struct([("role", pa.string()), ("start", pa.int32()), ("stop", pa.int32())]))),
    ]
)


@dataclass(frozen=True, eq=False)
class Row:
    """One document. ids: int32 [T], T >= 1; roles: spans that cover 0..T.

    shared_tokens: so many tokens came before these in the conversation and stand in an earlier document.
    """

    document: str
    conversation: str
    task: str
    source: str
    split: str
    shared_tokens: int
    ids: np.ndarray
    roles: list[Span]


def vocabulary_hash(tokenizer: Any) -> str:
    """sha256 of the tokens with their ids: equal where the same id means the same token."""
    pairs = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(pairs, ensure_ascii=False).encode(errors="surrogatepass")).hexdigest()


def write_rows(file: BinaryIO, rows: Iterable[Row], about: dict[str, Any]) -> None:
    """Write the file, a row group at a time. about: what the metadata says besides format and version."""
    metadata = json.dumps({"format": FORMAT, "version": VERSION, **about}, sort_keys=True).encode()
    with pq.ParquetWriter(file, SCHEMA.with_metadata({b"moefit": metadata}), compression="zstd") as writer:
        held: list[Row] = []
        tokens = 0
        for row in rows:
            held.append(row)
            tokens += row.ids.size
            if tokens >= ROW_GROUP_TOKENS:
                writer.write_table(_table(held))
                held, tokens = [], 0
        if held:
            writer.write_table(_table(held))


def _table(rows: list[Row]) -> pa.Table:
    columns = {name: [getattr(row, name) for row in rows] for name in SCHEMA.names if name not in ("ids", "roles")}
    columns["ids"] = pa.array([row.ids for row in rows], SCHEMA.field("ids").type)
    columns["roles"] = [[{"role": s.role, "start": s.start, "stop": s.stop} for s in row.roles] for row in rows]
    return pa.table(columns, SCHEMA)


def read_rows(path: Path, tokenizer: Any, split: str) -> Iterator[Row]:
    """The documents of one split, a row group at a time.

    Raises TraceError for a file that is damaged, of another format or version, or made with another tokenizer, and for
    a row that cannot be right.
    """
    if split not in PARTS:
        raise TraceError("there is no such split", found=f"expected one of {', '.join(PARTS)}, found {split}")
    try:
        with pq.ParquetFile(path) as parquet:
            _check_metadata(path, parquet, tokenizer)
            for group in range(parquet.num_row_groups):
                table = parquet.read_row_group(group)
                yield from _rows(path, table.filter(pc.equal(table["split"], split)), len(tokenizer))
    except (pa.ArrowException, OSError) as error:
        mend = "write it again with `moefit traces`"
        raise TraceError("the trace set cannot be read", where=str(path), found=str(error), mend=mend) from None


def _check_metadata(path: Path, parquet: pq.ParquetFile, tokenizer: Any) -> None:
    try:
        about = json.loads((parquet.schema_arrow.metadata or {}).get(b"moefit", b"null"))
    except ValueError:
        about = None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise TraceError(
            "a Parquet file is not a trace set", where=str(path), mend="import it first, with `moefit traces`"
        )
    if about.get("version") != VERSION or not parquet.schema_arrow.equals(SCHEMA):
        raise TraceError(
            "the trace set is of another version",
            where=str(path),
            found=f"expected version {VERSION} and its columns, found version {about.get('version')}",
            mend="write it again with `moefit traces`",
        )
    ours = vocabulary_hash(tokenizer)
    if about.get("tokenizer") != ours:
        raise TraceError(
            "the trace set was made with another tokenizer",
            where=str(path),
            found=f"expected {ours:.12}, found {about.get('tokenizer')!s:.12}",
            mend="import the logs again with --model of this model",
        )


def _rows(path: Path, table: pa.Table, vocabulary: int) -> Iterator[Row]:
    for number in range(table.num_rows):
        values = {name: table[name][number] for name in SCHEMA.names}
        plain = {name: values[name].as_py() for name in SCHEMA.names if name != "ids"}
        tokens = values["ids"].values
        spans = [Span(**span) for span in plain.pop("roles") or []]
        bad = None in plain.values() or tokens is None or not len(tokens) or tokens.null_count
        if not bad:
            ids = tokens.to_numpy(zero_copy_only=False)  # int32 [T]
            edges = [0, *(span.stop for span in spans)]
            bad = [s.start for s in spans] != edges[:-1] or edges[-1] != ids.size or edges != sorted(set(edges))
            bad = bad or ids.min() < 0 or ids.max() >= vocabulary
        if bad:
            raise TraceError(
                "a document of the trace set cannot be right",
                where=f"{path}, document {plain.get('document')}",
                found=f"expected ids in 0..{vocabulary - 1} and role spans that cover them",
                mend="write the file again with `moefit traces`",
            )
        yield Row(**plain, ids=np.array(ids, np.int32), roles=spans)

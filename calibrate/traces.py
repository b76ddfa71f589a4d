"""Real traffic as token windows.

A trace file is JSON lines; a line is one document, either a conversation in OpenAI's format or plain text:

    {"messages": [{"role": ..., "content": ..., "tool_calls"?: [...]}, ...], "tools"?: [...]}
    {"text": ...}

with optional `id`, `source` and `task` strings; other keys are ignored. A conversation goes through the
tokenizer's chat template, which writes its own special tokens; plain text becomes `[bos] + encode(text)`.
Or it is a trace set (trace_set.py), which holds the tokens already and says which part each document belongs to.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import TraceError
from ..files import sha256_file
from .checkpoint import read_json
from .splits import tied

if TYPE_CHECKING:
    from .render import Span

WRITTEN_BY_MODEL = frozenset({"assistant", "reasoning", "tool_call"})
"""Roles of a trace set's spans whose tokens the model itself writes when it is served."""

SPARE_SHARE = 0.05
"""A model may have this share of vocabulary rows that no token uses (padding, reserved ids), not more."""


@dataclass(frozen=True, eq=False)
class Document:
    """One line of a trace file. ids: int32 [T], T >= 1; `id` is unique within the file. corpus: "" if not said.

    roles: spans that cover 0..T, from a trace set; () where the file does not say. conversation: the same for documents
    that must not be parted (see `splits.tied`): the id of the first of them; "" for a document that stands alone.
    """

    id: str
    source: str
    task: str
    ids: np.ndarray
    corpus: str = ""
    roles: tuple[Span, ...] = ()
    conversation: str = ""

    @property
    def generated(self) -> np.ndarray | None:
        """bool [T]: tokens that the model wrote, by role; None where the file does not say."""
        if not self.roles:
            return None
        written = np.zeros(self.ids.size, bool)
        for span in self.roles:
            written[span.start : span.stop] = span.role in WRITTEN_BY_MODEL
        return written


@dataclass(frozen=True, eq=False)
class Window:
    """Consecutive tokens of one document. ids: int32 [T]; document: its id; start: of the first in the document.

    generated: bool [T], as the document's. conversation: the document's, or its id where it stands alone."""

    ids: np.ndarray
    document: str
    source: str
    start: int = 0
    generated: np.ndarray | None = None
    conversation: str = ""


def load_tokenizer(model_dir: Path) -> Any:
    """The model's own tokenizer, a transformers `PreTrainedTokenizerFast`.

    Raises TraceError where tokenizer.json is missing or unreadable, or where the tokenizer does not fit the
    vocabulary of config.json: ids beyond it, far fewer tokens than it has rows, another bos id.
    """
    model_dir = Path(model_dir)
    if not model_dir.is_dir():
        raise TraceError("no model directory", where=str(model_dir), mend="give the folder that holds config.json")
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise TraceError(
            "there is no tokenizer",
            where=str(path),
            mend="download tokenizer.json and tokenizer_config.json from the model's release",
        )
    from transformers import PreTrainedTokenizerFast  # seconds to import, and most commands need no tokenizer

    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(model_dir))
    except Exception as error:  # the tokenizers library raises bare Exception on a damaged file
        mend = "download tokenizer.json and tokenizer_config.json again"
        raise TraceError("the tokenizer cannot be read", where=str(path), found=str(error), mend=mend) from None

    config = read_json(model_dir / "config.json")
    vocabulary = config.get("text_config", config).get("vocab_size")
    size = max(tokenizer.get_vocab().values()) + 1
    if type(vocabulary) is not int or not vocabulary * (1 - SPARE_SHARE) <= size <= vocabulary:
        raise TraceError(
            "tokenizer and model do not belong together",
            where=str(path),
            found=f"expected ids for the vocabulary of {vocabulary} in config.json, found 0..{size - 1}",
            mend="use the tokenizer of the model's own release",
        )
    bos = config.get("bos_token_id", config.get("text_config", config).get("bos_token_id"))
    if bos is not None and tokenizer.bos_token_id != bos:
        raise TraceError(
            "tokenizer and model do not belong together",
            where=str(model_dir / "tokenizer_config.json"),
            found=f"expected the bos token {bos} of config.json, found {tokenizer.bos_token_id}",
            mend="use the tokenizer of the model's own release",
        )
    return tokenizer


def read_documents(
    path: Path, tokenizer: Any, vocabulary: int | None = None, part: str = "calibrate"
) -> list[Document]:
    """The documents of a trace file, in file order; blank lines are skipped.

    vocabulary: refuse ids of this size and above (default: the tokenizer's own size). part: of a trace set, the split
    to read (calibrate, plan, held-out); JSON lines have no splits, all of their documents are read.
    A document without an id is called `<file name>:<line>`; of several with one id, the later ones get `#2`,
    `#3`, ... Raises TraceError naming file and line where a line cannot be read, and where there is no token.
    """
    path = Path(path)
    if not path.is_file():
        raise TraceError("there is no trace file", where=str(path), mend="give a file of JSON lines")
    limit = len(tokenizer) if vocabulary is None else vocabulary
    if is_parquet(path):
        return _read_trace_set(path, tokenizer, limit, part)
    documents: list[Document] = []
    taken: set[str] = set()
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            where = f"{path}:{number}"
            line = _parse_line(raw, where)
            ids = np.array(_encode(line, tokenizer, where), np.int32)
            if not ids.size:
                raise TraceError("a document has no tokens", where=where, mend="remove the line")
            _check_ids(ids, limit, where)
            label = unused(line.get("id") or f"{path.name}:{number}", taken)
            documents.append(
                Document(label, line.get("source") or "", line.get("task") or "", ids, line.get("corpus") or "")
            )
    if not documents:
        raise TraceError("the trace file is empty", where=str(path), mend="give at least one document")
    return documents


def is_parquet(path: Path) -> bool:
    """Whether a file is Parquet by its first bytes: a trace set, if it can be read at all."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


def _read_trace_set(path: Path, tokenizer: Any, limit: int, part: str) -> list[Document]:
    from .trace_set import read_rows  # pyarrow, which JSON lines do not need

    documents: list[Document] = []
    names: list[tuple[str, str]] = []
    taken: set[str] = set()
    for row in read_rows(path, tokenizer, part):
        _check_ids(row.ids, limit, f"{path}, document {row.document}")
        label = unused(row.document, taken)
        documents.append(Document(label, row.source, row.task, row.ids, roles=tuple(row.roles)))
        names.append((row.conversation, row.task))
    if not documents:
        mend = "import more traffic, or give this part a larger share with --shares"
        raise TraceError(f"the trace set has no document of the part {part}", where=str(path), mend=mend)
    first = tied(names)
    return [replace(one, conversation=documents[head].id) for one, head in zip(documents, first, strict=True)]


def together(documents: Sequence[Document]) -> list[Document]:
    """The same documents, those of one conversation and of one source side by side, where the first of them stood."""
    of_conversation: dict[str, dict[str, list[Document]]] = {}
    for document in documents:
        of_source = of_conversation.setdefault(document.conversation or document.id, {})
        of_source.setdefault(document.source, []).append(document)
    return [document for of_source in of_conversation.values() for group in of_source.values() for document in group]


def _check_ids(ids: np.ndarray, limit: int, where: str) -> None:
    if ids.max() >= limit:
        raise TraceError(
            "a token lies outside the vocabulary",
            where=where,
            found=f"expected ids below {limit}, found {ids.max()}",
            mend="use the tokenizer of the model's own release",
        )


def split(documents: Sequence[Document], every: int) -> tuple[list[Document], list[Document]]:
    """(kept, held out): every `every`-th document is held out, none for 0.

    Raises TraceError if there are too few documents to hold one out.
    """
    held = [document for number, document in enumerate(documents, start=1) if every and number % every == 0]
    kept = [document for number, document in enumerate(documents, start=1) if not every or number % every]
    if every and not held:
        raise TraceError(
            "there are too few documents to hold some out for the gate",
            found=f"expected at least {every}, found {len(documents)}",
            mend="give more traces, or held-out documents of their own with --eval",
        )
    return kept, held


def windows(
    documents: Sequence[Document], length: int, per_document: int | None = None, minimum: int = 2
) -> list[Window]:
    """Consecutive windows of `length` tokens from each document's start, in document order.

    per_document: at most so many of each. The last window of a document may be shorter, down to `minimum`
    tokens; a shorter rest is dropped. Raises TraceError if no window is left.
    """
    if not 1 <= minimum <= length or (per_document is not None and per_document < 1):
        raise TraceError(
            "windows cannot be cut like this",
            found=f"expected 1 <= minimum <= length and 1 <= per_document, found {minimum=}, {length=}, "
            f"{per_document=}",
            mend="ask for longer windows",
        )
    cut = []
    for document in documents:
        written = document.generated
        for start in range(0, document.ids.size, length)[:per_document]:
            part = slice(start, start + length)
            if document.ids[part].size >= minimum:
                own = None if written is None else written[part]
                conversation = document.conversation or document.id
                cut.append(Window(document.ids[part], document.id, document.source, start, own, conversation))
    if not cut:
        longest = max((document.ids.size for document in documents), default=0)
        raise TraceError(
            "there is no window to run",
            found=f"expected a document of {minimum} tokens, found {len(documents)} of at most {longest}",
            mend="give longer documents",
        )
    return cut


def trace_identity(path: Path) -> dict[str, Any]:
    """{"sha256", "bytes"} of a trace file: what a resumed build and a receipt compare."""
    return {"sha256": sha256_file(path), "bytes": path.stat().st_size}


def _parse_line(raw: bytes, where: str) -> dict[str, Any]:
    """One line as an object that is a conversation or a text, and not both."""
    try:
        line = json.loads(raw.decode("utf-8-sig"))
        json.dumps(line, ensure_ascii=False).encode()  # half a surrogate pair parses, but is no text
    except (ValueError, RecursionError) as error:
        mend = "repair or remove the line"
        raise TraceError("a line is not JSON", where=where, found=str(error), mend=mend) from None
    if not isinstance(line, dict) or ("messages" in line) == ("text" in line):
        keys = ", ".join(map(str, line)) if isinstance(line, dict) else type(line).__name__
        raise _wrong_line(where, '{"messages": [...]} or {"text": "..."}', keys or "{}")
    if type(line.get("id")) is int:
        line["id"] = str(line["id"])
    for key in ("id", "source", "task", "corpus", "text"):
        if line.get(key, "") is not None and not isinstance(line.get(key, ""), str):
            raise _wrong_line(where, f"{key} as a string", f"{line[key]!r:.60}")
    return line


def _encode(line: dict[str, Any], tokenizer: Any, where: str) -> list[int]:
    if "messages" in line:
        text, start = _render(line, tokenizer, where), []
    else:
        text = line["text"] or ""
        start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return start + ids if ids else []


def _render(line: dict[str, Any], tokenizer: Any, where: str) -> str:
    """A conversation as text, through the tokenizer's chat template."""
    if not tokenizer.chat_template:
        raise TraceError(
            "conversations need a chat template and the tokenizer has none",
            where=where,
            mend="put chat_template.jinja beside tokenizer.json, or import it with `moefit traces`, which "
            "can use the encoding code of the release",
        )
    messages, tools = line["messages"], line.get("tools") or None
    if not isinstance(messages, list) or not messages:
        raise _wrong_line(where, "messages as a list of at least one", f"{messages!r:.60}")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise _wrong_line(where, "tools as a list of objects", f"{tools!r:.60}")
    messages = [_plain(message, where) for message in messages]
    try:
        return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))
    except Exception as error:  # a template may raise anything: its own errors, TypeError, UndefinedError
        raise TraceError(
            "the chat template refuses a conversation",
            where=where,
            found=f"{type(error).__name__}: {error}",
            mend="check roles and their order, and the form of tool calls",
        ) from None


def _plain(message: Any, where: str) -> dict[str, Any]:
    """An OpenAI message with its content as one string: parts joined, null as ''."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _wrong_line(where, "a message with a role", f"{message!r:.60}")
    content = message.get("content")
    parts = [{"type": "text", "text": content or ""}] if content is None or isinstance(content, str) else content
    if not isinstance(parts, list):
        raise _wrong_line(where, "content as a string, null or a list of parts", f"{content!r:.60}")
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise _wrong_line(where, 'content parts {"type": "text", "text": "..."}', f"{part!r:.60}")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(_is_call(call) for call in calls):
        raise _wrong_line(where, "tool_calls with function.name and function.arguments", f"{calls!r:.60}")
    return {**message, "content": "".join(part["text"] for part in parts)}


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), str | dict)
    )


def unused(label: str, taken: set[str]) -> str:
    """`label`, or `label#2`, `label#3`, ..., whichever is free first; it is taken then."""
    unique, times = label, 1
    while unique in taken:
        times += 1
        unique = f"{label}#{times}"
    taken.add(unique)
    return unique


def _wrong_line(where: str, expected: str, found: str) -> TraceError:
    return TraceError(
        "a line is not a document",
        where=where,
        found=f"expected {expected}, found {found}",
        mend="repair or remove the line",
    )

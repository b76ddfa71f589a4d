"""Logs to a trace set: read twice (what repeats, then what is new), rendered, split, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import TraceError
from ..files import write_atomic
from ..progress import Progress, Silent
from .conversation import Bad, BadRecord, Conversation, chain, size
from .dedup import Prefixes, shared_part
from .importers import Format, detect, find_inputs
from .importers.dataset import BY_NAME
from .importers.files import Input
from .languages import languages
from .redact import redact_conversation
from .render import Rendered, Writer, find_writer, render, shared_text
from .splits import DEFAULT_SHARES, PARTS, Groups, Shares
from .trace_set import Row, vocabulary_hash, write_rows
from .traces import load_tokenizer, unused

MAX_CONVERSATION = 4 << 20
"""Characters of one conversation, a million tokens or so. Its tokenizer takes some 200 bytes for each meanwhile."""
LISTED = 20
"""Bad records that the result names one by one; all are counted."""


@dataclass(frozen=True)
class ImportRequest:
    """imports: files, directories, `hf:` names. form: force this format. max_bad: share of bad records to accept.

    run_encoding: allow the checkpoint's own Python code to write conversations. out: None writes nothing.
    """

    imports: tuple[str, ...]
    model: Path
    out: Path | None
    form: str = ""
    shares: Shares = DEFAULT_SHARES
    max_bad: float = 0.05
    redact: bool = True
    run_encoding: bool = False


@dataclass
class _Tally:
    """What was read, found bad, and written."""

    max_bad: float
    records: int = 0
    bad: list[Bad] = field(default_factory=list)
    bad_count: int = 0
    repeated: int = 0
    shared: int = 0
    tokens: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # source, role, language
    documents: Counter[str] = field(default_factory=Counter)  # by source
    parts: dict[str, Counter[str]] = field(default_factory=lambda: {part: Counter() for part in PARTS})
    redacted: Counter[str] = field(default_factory=Counter)

    def refuse(self, bad: Bad) -> None:
        self.bad_count += 1
        if len(self.bad) < LISTED:
            self.bad.append(bad)

    def check(self) -> None:
        """Stop where too large a share is bad."""
        if self.bad_count > self.max_bad * self.records:
            first = self.bad[0]
            raise TraceError(
                "too many records cannot be read",
                where=first.where,
                found=f"expected at most {self.max_bad:.2%} bad, found {self.bad_count} of {self.records}, "
                f"the first of them: {first.why}",
                mend="repair or remove them, name the format with --format, or accept more with --max-bad",
            )


def import_traces(request: ImportRequest, progress: Progress | None = None) -> dict[str, Any]:
    """Import logs; the result says what became of them, token counts by source, role and language among it.

    Memory: one record, one conversation and its tokens, one row group, and about 300 bytes per different message.
    Raises TraceError for a request that makes no sense, unreadable input, a model without a way to write
    conversations, and too many bad records; then no file is written.
    """
    progress = progress or Silent()
    tokenizer = load_tokenizer(request.model)
    write = find_writer(request.model, tokenizer, request.run_encoding)
    everything = find_inputs(request.imports)
    inputs = [(file, *found) for file in everything if (found := _detect(file, request.form))]
    taken = {file.path for file, _, _ in inputs}
    if not inputs:
        raise TraceError("no file is in a format that can be imported", mend="name it with --format")
    _check_request(request, [file for file, _, _ in inputs])
    before = _stamps(inputs)
    tally = _Tally(request.max_bad)
    prefixes, groups = Prefixes(), Groups()
    files = []

    for file, conversations in _pass(inputs, "read", progress):
        records, bad = tally.records, tally.bad_count
        for conversation in conversations:
            tally.records += 1
            if isinstance(conversation, Bad):
                tally.refuse(conversation)
                if tally.records >= 1000:
                    tally.check()
                continue
            prefixes.note(conversation, chain(conversation))
            groups.add(conversation)
        files.append({"name": file.name, "records": tally.records - records, "bad": tally.bad_count - bad})
    tally.check()

    def rows() -> Iterator[Row]:
        found = (c for _, several in _pass(inputs, "render", progress) for c in several if not isinstance(c, Bad))
        yield from _rows(request, found, tokenizer, write, prefixes, groups, tally)
        tally.check()
        if _stamps(inputs) != before:
            mend = "copy the logs first, or wait until nothing writes them"
            raise TraceError("a file changed while it was read", mend=mend)
        _check_parts(request, tally)

    about = {
        "tokenizer": vocabulary_hash(tokenizer),
        "shares": dict(zip(PARTS, request.shares, strict=True)),
        "redacted": request.redact,
    }
    if request.out is None:
        for _ in rows():
            pass
    else:
        try:
            write_atomic(request.out, lambda file: write_rows(file, rows(), about))
        except BaseException:
            request.out.with_name(request.out.name + ".tmp").unlink(missing_ok=True)
            raise
    described = [made | {"format": form.name, "why": why} for made, (_, form, why) in zip(files, inputs, strict=True)]
    return {
        "out": str(request.out or ""),
        "files": described,
        "skipped": [file.name for file in everything if file.path not in taken],
        "redact": request.redact,
        **_summary(tally),
    }


def _detect(file: Input, forced: str) -> tuple[Format, str] | None:
    """The format; None for a file below a given directory that is in none."""
    try:
        return detect(file, forced)
    except TraceError:
        if forced or "/" not in file.name:
            raise
        return None


def _check_request(request: ImportRequest, inputs: list[Input]) -> None:
    if not 0 <= request.max_bad <= 1:
        mend = "give a share, 0.05 for 5 %"
        raise TraceError("--max-bad makes no sense", found=f"expected 0 to 1, found {request.max_bad:g}", mend=mend)
    out = request.out
    if out is None:
        return
    if not out.parent.is_dir() or out.is_dir():
        mend = "give a file name in a directory that exists"
        raise TraceError("the trace set cannot be written there", where=str(out), mend=mend)
    if any(out.resolve() == file.path.resolve() for file in inputs):
        raise TraceError("the trace set would replace a log", where=str(out), mend="give another --out")


def _check_parts(request: ImportRequest, tally: _Tally) -> None:
    if not sum(part["tokens"] for part in tally.parts.values()):
        raise TraceError("the logs hold no text", mend="check the format with --format")
    if request.shares[0] and not tally.parts[PARTS[0]]["documents"]:
        raise TraceError(
            "no conversation fell into the part for calibration",
            found=f"{sum(part['documents'] for part in tally.parts.values())} documents in all",
            mend="import more traffic, or give it all with --shares 1,0,0",
        )


def _stamps(inputs: list[tuple[Input, Format, str]]) -> list[tuple[int, int]]:
    """(size, time of change) of every file: an agent may be writing its log while it is read."""
    found = [file.path.stat() for file, _, _ in inputs if file.path.is_file()]
    return [(stat.st_size, stat.st_mtime_ns) for stat in found]


def _pass(
    inputs: list[tuple[Input, Format, str]], name: str, progress: Progress
) -> Iterator[tuple[Input, Iterator[Conversation | Bad]]]:
    """Every file with its conversations. A conversation that cannot be a document is a Bad in both passes."""
    paths = [file.path for file, _, _ in inputs if not file.name.startswith(BY_NAME)]
    files = [f for path in paths for f in (path.rglob("*") if path.is_dir() else [path]) if f.is_file()]
    progress.stage(name, sum(file.stat().st_size for file in files) // 1000, "kB")
    rest = 0

    def tell(count: int) -> None:
        nonlocal rest
        rest += count
        progress.advance(rest // 1000)
        rest %= 1000

    for file, form, _ in inputs:
        yield file, map(_checked, form.read(file, tell))
    progress.finish()


def _checked(conversation: Conversation | Bad) -> Conversation | Bad:
    if isinstance(conversation, Bad):
        return conversation
    if size(conversation) > MAX_CONVERSATION:
        return Bad(conversation.where, f"a conversation of more than {MAX_CONVERSATION:,} characters")
    try:
        for text in (conversation.text, *(part for m in conversation.messages for part in (m.text, m.reasoning))):
            text.encode()
        chain(conversation)
    except UnicodeEncodeError as error:
        return Bad(conversation.where, f"half a character ({error.reason})")
    return conversation


def _rows(
    request: ImportRequest,
    conversations: Iterator[Conversation],
    tokenizer: Any,
    write: Writer,
    prefixes: Prefixes,
    groups: Groups,
    tally: _Tally,
) -> Iterator[Row]:
    taken: set[str] = set()
    seen: set[bytes] = set()
    for conversation in conversations:
        keys = chain(conversation)
        known = prefixes.known(keys)
        if known is None:
            tally.repeated += 1
            continue
        part = groups.part(conversation, request.shares)
        full = prefixes.with_reasoning(conversation, keys)
        if request.redact:
            full = redact_conversation(full, tally.redacted)
        try:
            whole = render(full, tokenizer, write)
            known = shared_part(full, known)
            made = whole.after(shared_text(full, known, write, whole.text)) if known else whole
        except BadRecord as error:
            tally.refuse(Bad(conversation.where, str(error)))
            continue
        prefixes.place(keys)
        if not made.ids.size:
            continue
        label = groups.label(conversation)
        tally.parts[part].update(documents=1, tokens=int(made.ids.size), conversations=int(label not in seen))
        seen.add(label)
        tally.documents[full.source] += 1
        shared = int(whole.ids.size - made.ids.size)
        tally.shared += shared
        _count(tally.tokens, full.source, made)
        document = unused(full.id or full.where, taken)
        yield Row(document, full.conversation, full.task, full.source, part, shared, made.ids, made.roles())


def _count(tokens: Counter[tuple[str, str, str]], source: str, made: Rendered) -> None:
    """Add a document's tokens by source, role and language; what the template and the calls write is `markup`."""
    cuts: list[int] = []
    kinds: list[tuple[str, str]] = []
    stops = [start for start, _ in made.marks[1:]] + [len(made.text)]
    for (start, role), stop in zip(made.marks, stops, strict=True):
        if role in ("template", "tool_call"):
            cuts.append(start)
            kinds.append((role, "markup"))
        else:
            for offset, language in languages(made.text[start:stop]):
                cuts.append(start + offset)
                kinds.append((role, language))
    index = np.searchsorted(cuts, made.starts, side="right") - 1  # [T]
    for number, count in zip(*np.unique(index, return_counts=True), strict=True):
        tokens[(source, *kinds[number])] += int(count)


def _summary(tally: _Tally) -> dict[str, Any]:
    by: list[Counter[str]] = [Counter(), Counter(), Counter()]
    for key, count in tally.tokens.items():
        for table, name in zip(by, key, strict=True):
            table[name] += count
    return {
        "records": tally.records,
        "bad": tally.bad_count,
        "bad_records": [{"where": bad.where, "why": bad.why} for bad in tally.bad],
        "repeated": tally.repeated,
        "shared_tokens": tally.shared,
        "documents": sum(tally.documents.values()),
        "tokens": sum(by[0].values()),
        "parts": {
            part: {key: counts[key] for key in ("conversations", "documents", "tokens")}
            for part, counts in tally.parts.items()
        },
        "tokens_by_source": dict(by[0].most_common()),
        "tokens_by_role": dict(by[1].most_common()),
        "tokens_by_language": dict(by[2].most_common()),
        "redacted": {kind: tally.redacted[kind] for kind in ("keys", "emails", "homes")},
    }

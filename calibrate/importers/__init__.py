"""Readers of the logs that people have: which formats there are, and which one a file is in.

Every reader yields `Conversation`s and, for what it cannot read, `Bad`s, one at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import TraceError
from ..conversation import ODD, Bad, Conversation
from . import agents, anthropic, dataset, gateway, openai, responses, sessions, text
from .files import HEAD, Input, convert, layout, opened, records

Read = Callable[[Input, Callable[[int], None] | None], Iterator[Conversation | Bad]]
PROBE = 20
"""Records at which detection looks."""


class Head(NamedTuple):
    """What detection sees of a file: its first text, and its first records if it is JSON."""

    name: str
    text: str
    records: list[Any]


class Format(NamedTuple):
    """sniff: why a file is in this format, or "". read: its conversations."""

    name: str
    sniff: Callable[[Head], str]
    read: Read


def _each(one: Callable[[Any, str, str], Iterable[Conversation]]) -> Read:
    """A reader of files in which every JSON record stands by itself."""

    def read(file: Input, tell: Callable[[int], None] | None = None) -> Iterator[Conversation | Bad]:
        return convert(records(file, tell), lambda value, where: one(value, where, file.name))

    return read


def _each_named(one: Callable[[Any, str, str, str], Iterable[Conversation]]) -> Read:
    """The same, where the file's name says something too."""

    def read(file: Input, tell: Callable[[int], None] | None = None) -> Iterator[Conversation | Bad]:
        return convert(records(file, tell), lambda value, where: one(value, where, file.name, file.stem))

    return read


def _any(looks_like: Callable[[Any], str]) -> Callable[[Head], str]:
    """The first reason among the records."""

    def sniff(head: Head) -> str:
        for record in head.records:
            try:
                if why := looks_like(record):
                    return f"records with {why}"
            except ODD:  # a strange record says nothing about the others
                continue
        return ""

    return sniff


def _key(record: Any, key: str, kind: type) -> bool:
    return isinstance(record, dict) and isinstance(record.get(key), kind)


def _claude_code(record: Any) -> str:
    session = isinstance(record, dict) and "sessionId" in record and record.get("type") in ("user", "assistant")
    return "`sessionId` and a `message`" if session and _key(record, "message", dict) else ""


def _codex(record: Any) -> str:
    kinds = ("session_meta", "response_item", "event_msg", "turn_context")
    if _key(record, "payload", dict) and record.get("type") in kinds:
        return f"`type` {record['type']} and a `payload`"
    old = isinstance(record, dict) and {"id", "timestamp", "instructions"} <= record.keys()
    return "the header of a Codex session" if old else ""


def _swe_agent(record: Any) -> str:
    return next((f"a `{key}` list" for key in ("history", "trajectory") if _key(record, key, list)), "")


def _mini(head: Head) -> str:
    first = head.records[0] if head.records else None
    if isinstance(first, dict) and str(first.get("trajectory_format", "")).startswith("mini-swe-agent"):
        return "its `trajectory_format`"
    return "its name ends in .traj.json" if first is not None and ".traj.json" in head.name else ""


def _tau(record: Any) -> str:
    return "a `traj` list and a `task_id`" if _key(record, "traj", list) and "task_id" in record else ""


def _openai(record: Any) -> str:
    if _key(record, "messages", list) or (isinstance(record, list) and record):
        return "`messages`"
    if _key(record, "conversations", list):
        return "`conversations`"
    return "`text`" if _key(record, "text", str) else ""


def _aider(head: Head) -> str:
    return f'a line "{text.STARTED} ..."' if f"\n{text.STARTED}" in "\n" + head.text else ""


def _dataset(head: Head) -> str:
    return "Parquet or Arrow by its first bytes" if head.text[:4] in ("PAR1", "ARRO") else ""


def _plain(head: Head) -> str:
    readable = head.text.strip() and "\0" not in head.text and head.text.count("\ufffd") <= len(head.text) // 100
    return "none of the others, and readable text" if readable and not head.records else ""


FORMATS = (
    Format("claude-code", _any(_claude_code), sessions.claude_code),
    Format("codex", _any(_codex), sessions.codex),
    Format("mini-swe-agent", _mini, _each_named(agents.mini_swe_agent)),
    Format("swe-agent", _any(_swe_agent), _each_named(agents.swe_agent)),
    Format("tau-bench", _any(_tau), _each_named(agents.tau_bench)),
    Format("gateway", _any(gateway.looks_like), _each(gateway.conversations)),
    Format("responses", _any(responses.looks_like), _each(responses.conversations)),
    Format("anthropic", _any(anthropic.looks_like), _each(anthropic.conversations)),
    Format("openai", _any(_openai), _each(openai.conversations)),
    Format("dataset", _dataset, dataset.on_disk),
    Format("aider", _aider, text.aider),
    Format("text", _plain, text.plain),
)
"""In the order in which they are tried."""
NAMES = tuple(form.name for form in FORMATS)


def find_inputs(imports: Iterable[str]) -> list[Input]:
    """The files to read: each as given, `hf:` names, data sets, and the files below other directories in order of name.

    Hidden files and directories below a directory are left out. Raises TraceError where there is nothing, and where a
    file comes twice.
    """
    found: list[Input] = []
    for given in imports:
        path = Path(given)
        if given.startswith(dataset.BY_NAME):
            found.append(Input(path, given))
        elif path.is_file() or dataset.is_dataset(path):
            found.append(Input(path, path.name))
        elif path.is_dir():
            below = sorted(p for p in path.rglob("*") if p.is_file())
            names = [(p, p.relative_to(path)) for p in below]
            seen = [(p, name) for p, name in names if not any(part.startswith(".") for part in name.parts)]
            if not seen:
                raise TraceError("a directory holds no file to import", where=given, mend="name the files")
            found += [Input(p, f"{path.name}/{name.as_posix()}" if path.name else name.as_posix()) for p, name in seen]
        else:
            raise TraceError(
                "there is nothing to import", where=given, mend="give a file, a directory or hf:OWNER/NAME"
            )
    paths = [file.name if file.name.startswith(dataset.BY_NAME) else str(file.path.resolve()) for file in found]
    if twice := next((path for number, path in enumerate(paths) if path in paths[:number]), ""):
        raise TraceError("a file is given twice", where=twice, mend="give it once")
    return found


def detect(file: Input, forced: str = "") -> tuple[Format, str]:
    """(format, why). forced: its name instead. Raises TraceError for an unknown name or file."""
    if file.name.startswith(dataset.BY_NAME):
        return Format("dataset", lambda _: "", dataset.by_name), "a data set by name"
    if file.path.is_dir():
        return Format("dataset", lambda _: "", dataset.on_disk), "a data set saved on disk"
    if forced:
        chosen = next((form for form in FORMATS if form.name == forced), None)
        if chosen is None:
            raise TraceError(
                "there is no such format",
                found=f"expected one of {', '.join(NAMES)}, found {forced}",
                mend="choose one",
            )
        return chosen, "as told"
    head = read_head(file)
    for form in FORMATS:
        if why := form.sniff(head):
            return form, why
    raise TraceError(
        "the format of a file is not recognised",
        where=str(file.path),
        found=f"expected one of {', '.join(NAMES)}",
        mend="name it with --format, or leave the file out",
    )


def read_head(file: Input) -> Head:
    """The first text of a file and its first records; none of them if it is damaged from the start."""
    with opened(file.path) as stream:
        start = stream.read(HEAD)
    if stream.damage and not start:
        raise TraceError(
            "a file cannot be decompressed", where=str(file.path), found=stream.damage, mend="copy it again"
        )
    found = [] if not layout(file) else [value for _, value in itertools.islice(records(file), PROBE)]
    return Head(file.name, start.decode(errors="replace"), [value for value in found if not isinstance(value, Bad)])

"""aider's chat history (Markdown) and plain text."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator

from ..conversation import Bad, Conversation, Message
from .files import Input, lines, opened

STARTED = "# aider chat started at"
TEXT_PIECE = 1 << 20
"""Bytes of plain text in one document, cut behind the last line break before."""


def aider(file: Input, tell: Callable[[int], None] | None = None) -> Iterator[Conversation | Bad]:
    """`.aider.chat.history.md`: a conversation per "# aider chat started at" header.

    Lines with "#### " are the user's, with "> " what aider and its tools printed, all others the model's. A "> " line
    inside a code block is the model's too. What aider printed before the first question is its banner, which the
    model never saw: left out, as are sessions without a question.
    """
    start, count, messages, fenced = "", 0, list[tuple[str, list[str]]](), False
    for where, line in lines(file, tell, blank=True):
        if isinstance(line, Bad):
            yield line
            continue
        text = line.decode(errors="replace").rstrip("\r\n")
        if text.startswith(STARTED):
            yield from _session(file, start, count, messages)
            start, count, messages, fenced = where, count + 1, [], False
            continue
        role = "user" if text.startswith("####") and text[4:5] in ("", " ") else "assistant"
        if role == "assistant" and not fenced and text.startswith(">"):
            role = "tool"
        if role == "user":
            fenced, text = False, text[5:].removesuffix("  ")
        elif role == "tool":
            text = text[1:].removeprefix(" ").removesuffix("  ")
        elif text.startswith("```"):
            fenced = not fenced
        if not messages or messages[-1][0] != role:
            messages.append((role, []))
        messages[-1][1].append(text)
    yield from _session(file, start, count, messages)


def _session(file: Input, start: str, count: int, parts: list[tuple[str, list[str]]]) -> Iterator[Conversation]:
    messages = [Message(role, "\n".join(text).strip("\n")) for role, text in parts if "".join(text).strip()]
    asked = next((n for n, message in enumerate(messages) if message.role == "user"), None)
    if asked is not None:
        name = f"{file.name} session {count}"
        yield Conversation(start or f"{file.name}:1", file.name, tuple(messages[asked:]), id=name, conversation=name)


def plain(file: Input, tell: Callable[[int], None] | None = None) -> Iterator[Conversation | Bad]:
    """A text file, UTF-8, as one document; a long one as several of the same conversation."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    rest, line = "", 1
    with opened(file.path, tell) as stream:
        while True:
            where = f"{file.name}:{line}"
            try:
                content = stream.read(TEXT_PIECE)
                rest += decoder.decode(content, final=not content)
            except UnicodeDecodeError as error:
                yield Bad(where, f"no text in UTF-8 ({error}); the rest of the file was not read")
                return
            if stream.damage:
                yield Bad(where, f"the rest of the file cannot be decompressed ({stream.damage})")
                return
            cut = len(rest) if not content else rest.rfind("\n") + 1 or len(rest)
            if rest[:cut].strip():
                yield Conversation(where, file.name, text=rest[:cut], conversation=file.name)
            line += rest.count("\n", 0, cut)
            rest = rest[cut:]
            if not content:
                return

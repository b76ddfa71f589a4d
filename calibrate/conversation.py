"""The neutral form that every importer writes: one conversation, or one plain text, with where it came from."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

ROLES = {
    **{"system": "system", "developer": "system", "user": "user", "human": "user"},
    **{"assistant": "assistant", "gpt": "assistant", "model": "assistant", "ai": "assistant", "bot": "assistant"},
    **{"tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool", "ipython": "tool"},
}
"""What logs call a role -> what it is called here."""


class BadRecord(Exception):
    """A record that is not what its format says; the importer counts it and goes on."""


ODD = (AttributeError, TypeError, KeyError, ValueError, IndexError, RecursionError)
"""What reading a record raises that has another form than its format: a list where an object is expected, and so on."""


@dataclass(frozen=True, slots=True)
class Bad:
    """One record that could not be taken. where: file and line (or element); why: one clause."""

    where: str
    why: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """arguments: the object that the model wrote, or its raw text where that was no JSON object."""

    name: str
    arguments: dict[str, Any] | str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """role: system, user, assistant or tool. call_id: of a tool's result, the call that it answers.

    Raises BadRecord where text or reasoning is not text: logs hold all kinds of things.
    """

    role: str
    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        for value in (self.text, self.reasoning):
            if not isinstance(value, str):
                raise BadRecord(f"expected a text, found {value!r:.60}")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, or (without messages) a plain `text`.

    where: file and line. id: of the document, "" if the log has none. conversation, task: the log's own names, "" where
    it has none. links: names that other records of the same conversation share (the id of the response it continues).
    examples: this many messages after the system prompt are a worked example that every conversation of the log has.
    Raises BadRecord where there is neither message nor text.
    """

    where: str
    source: str
    messages: tuple[Message, ...] = ()
    text: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    id: str = ""
    conversation: str = ""
    task: str = ""
    links: tuple[str, ...] = ()
    examples: int = 0

    def __post_init__(self) -> None:
        if not self.messages and not self.text:
            raise BadRecord("a conversation without messages")


def tool_call(name: Any, arguments: Any, identifier: Any = "") -> ToolCall:
    """A call from a log: arguments as an object, as JSON text, as other text, or absent."""
    if not isinstance(name, str) or not name:
        raise BadRecord(f"expected a tool call with a name, found {name!r:.60}")
    if arguments is None or arguments == "":
        arguments = {}
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = arguments
        arguments = parsed if isinstance(parsed, dict) else arguments
    if not isinstance(arguments, str | dict):
        raise BadRecord(f"expected a tool call's arguments as an object or a string, found {arguments!r:.60}")
    return ToolCall(name, arguments, identifier if isinstance(identifier, str) else "")


def merge_assistant(messages: list[Message]) -> tuple[Message, ...]:
    """Messages with an assistant's reasoning, text and calls that were logged apart made one again."""
    merged: list[Message] = []
    for message in messages:
        last = merged[-1] if merged else None
        if last and last.role == message.role == "assistant" and not (last.calls and message.text):
            merged[-1] = replace(
                last,
                text=joined(last.text, message.text),
                reasoning=joined(last.reasoning, message.reasoning),
                calls=last.calls + message.calls,
            )
        else:
            merged.append(message)
    return tuple(merged)


def joined(*parts: str) -> str:
    """Parts that are not empty, a line break between them."""
    return "\n".join(part for part in parts if part)


def chain(conversation: Conversation) -> list[bytes]:
    """A 16-byte key for every prefix of the messages, the first of one message, the last of all.

    Two conversations agree in their first n messages exactly if they agree in key n. Reasoning, ids and the white space
    around a text do not count: clients drop or change them when they send a history back. Conversations that the log
    names apart have no key in common. A plain text has one key.
    """
    key = hashlib.blake2b(conversation.conversation.encode() if conversation.messages else b"", digest_size=16).digest()
    keys = []
    for message in conversation.messages or (Message("text", conversation.text),):
        calls = [[call.name, call.arguments] for call in message.calls]
        content = json.dumps([message.role, message.text.strip(), calls], sort_keys=True, ensure_ascii=False).encode()
        key = hashlib.blake2b(key + content, digest_size=16).digest()
        keys.append(key)
    return keys


def size(conversation: Conversation) -> int:
    """Characters of a conversation, roughly: texts, reasoning and calls."""
    calls = (call for message in conversation.messages for call in message.calls)
    return (
        len(conversation.text)
        + sum(len(message.text) + len(message.reasoning) for message in conversation.messages)
        + sum(len(str(call.arguments)) for call in calls)
    )

"""Anthropic Messages: content blocks with text, thinking, tool_use and tool_result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..conversation import BadRecord, Conversation, Message, ToolCall, joined, merge_assistant, tool_call
from .openai import names, tools

CALLS = ("tool_use", "server_tool_use", "mcp_tool_use")
BLOCKS = {"text", "thinking", "redacted_thinking", "tool_result", "image", "document", *CALLS}


def conversations(record: Any, where: str, source: str) -> Iterator[Conversation]:
    """A request body (`system`, `messages`, `tools`), with the answer as its last message where the log has it."""
    if not isinstance(record, dict) or not isinstance(record.get("messages"), list):
        raise BadRecord("expected messages as a list")
    found = system(record.get("system"))
    for turn in record["messages"]:
        found += messages(turn)
    yield Conversation(where, messages=merge_assistant(found), tools=tools(record), **names(record, source))


def system(value: Any) -> list[Message]:
    """The system prompt: a string or text blocks."""
    blocks = [value] if isinstance(value, str) else value or []
    text = joined(*(block if isinstance(block, str) else block.get("text") or "" for block in blocks))
    return [Message("system", text)] if text else []


def messages(turn: Any) -> list[Message]:
    """One message of Anthropic's form; a user's tool results become messages of their own, in order."""
    role = turn.get("role") if isinstance(turn, dict) else None
    if role not in ("user", "assistant", "system"):
        raise BadRecord(f"expected a message of user or assistant, found {role!r:.60}")
    blocks = turn.get("content")
    if isinstance(blocks, str) or blocks is None:
        return [Message(role, blocks or "")]
    if not isinstance(blocks, list):
        raise BadRecord(f"expected content as a string or a list of blocks, found {blocks!r:.60}")
    return assistant(blocks) if role == "assistant" else user(blocks, role)


def user(blocks: list[Any], role: str = "user") -> list[Message]:
    found: list[Message] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            text = block.get("text") or ""
            if found and found[-1].role == role:
                found[-1] = Message(role, joined(found[-1].text, text))
            else:
                found.append(Message(role, text))
        elif kind == "tool_result":
            found.append(
                Message("tool", result_text(block.get("content")), call_id=str(block.get("tool_use_id") or ""))
            )
        elif kind is None:
            raise BadRecord(f"expected content blocks with a type, found {block!r:.60}")
    return found


def assistant(blocks: list[Any]) -> list[Message]:
    text, thoughts = [], []
    made: list[ToolCall] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            text.append(block.get("text") or "")
        elif kind == "thinking":
            thoughts.append(block.get("thinking") or "")
        elif kind in CALLS:
            made.append(tool_call(block.get("name"), block.get("input"), block.get("id")))
        elif kind is None:
            raise BadRecord(f"expected content blocks with a type, found {block!r:.60}")
    if not (text or thoughts or made):
        return []
    return [Message("assistant", joined(*text), joined(*thoughts), tuple(made))]


def result_text(value: Any) -> str:
    """A tool result's content: a string or blocks, of which the text is kept."""
    if value is None or isinstance(value, str):
        return value or ""
    blocks = value if isinstance(value, list) else [value]
    return joined(*(b if isinstance(b, str) else b.get("text") or "" for b in blocks))


def looks_like(record: Any) -> str:
    """Why a record is in Anthropic's form, or ""."""
    if not isinstance(record, dict) or not isinstance(record.get("messages"), list):
        return ""
    if any(isinstance(tool, dict) and "input_schema" in tool for tool in record.get("tools") or []):
        return "tools with an `input_schema`"
    turns = [turn for turn in record["messages"] if isinstance(turn, dict)]
    if any(turn.get("role") == "tool" or turn.get("tool_calls") for turn in turns):  # OpenAI's, with parts like these
        return ""
    for turn in turns:
        blocks = turn.get("content")
        for block in blocks if isinstance(blocks, list) else []:
            kind = block.get("type") if isinstance(block, dict) else None
            if kind in ("tool_result", "thinking", "redacted_thinking", *CALLS):
                return f"`{kind}` blocks"
    return "a `system` prompt beside `messages`" if isinstance(record.get("system"), str | list) else ""

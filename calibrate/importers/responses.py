"""OpenAI Responses API: items (messages, reasoning, function calls and their outputs)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from ..conversation import BadRecord, Conversation, Message, joined, merge_assistant, tool_call
from .openai import content, message, names, tools

OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output", "mcp_tool_call_output")
ITEMS = ("message", "reasoning", "function_call", "custom_tool_call", "local_shell_call", *OUTPUTS)
"""Item types that are read; others (web searches, references to stored items) are left out."""


def conversations(record: Any, where: str, source: str) -> Iterator[Conversation]:
    """A request (`instructions`, `input`, `tools`), a response (`output`), both in one object, or a list of items."""
    if isinstance(record, list):
        record = {"input": record}
    if not isinstance(record, dict) or ("input" not in record and "output" not in record):
        raise BadRecord("expected input or output items")
    given = record.get("input") or []
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not isinstance(record.get("output") or [], list):
        raise BadRecord("expected input and output as lists of items")
    instructions = record.get("instructions")
    start = [Message("system", instructions)] if isinstance(instructions, str) and instructions else []
    found = merge_assistant(start + messages([*items, *(record.get("output") or [])]))
    named = names(record, source)
    if isinstance(record.get("conversation"), dict):
        named["conversation"] = str(record["conversation"].get("id", ""))
    links = tuple(f"response {record[key]}" for key in ("previous_response_id", "id") if record.get(key))
    yield Conversation(where, messages=found, tools=tools(record), links=links, **named)


def messages(items: Iterable[Any]) -> list[Message]:
    """Items as messages: reasoning goes to the message or call behind it."""
    found: list[Message] = []
    for item in items:
        if not isinstance(item, dict):
            raise BadRecord(f"expected an item as an object, found {item!r:.60}")
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "message":
            found.append(message({key: item.get(key) for key in ("role", "content")}))
        elif kind == "reasoning":
            parts = [*(item.get("summary") or []), *(item.get("content") or [])]
            text = joined(*(content([part])[0] for part in parts))
            if text:
                found.append(Message("assistant", reasoning=text))
        elif kind in ("function_call", "custom_tool_call"):
            arguments = item.get("arguments") if kind == "function_call" else {"input": item.get("input")}
            call = tool_call(item.get("name"), arguments, item.get("call_id"))
            found.append(Message("assistant", calls=(call,)))
        elif kind == "local_shell_call":
            call = tool_call("local_shell", item.get("action"), item.get("call_id"))
            found.append(Message("assistant", calls=(call,)))
        elif kind in OUTPUTS:
            found.append(Message("tool", output_text(item.get("output")), call_id=str(item.get("call_id") or "")))
    return found


def output_text(value: Any) -> str:
    """A call's output: text, parts, or an object; some clients wrap the text as JSON with `output` or `content`."""
    if isinstance(value, str) and value.startswith("{"):
        try:
            inner = json.loads(value)
        except (ValueError, RecursionError):
            return value
        if isinstance(inner, dict) and isinstance(inner.get("output"), str) and "metadata" in inner:
            return str(inner["output"])
        return value
    if isinstance(value, dict):
        inner = value.get("content")
        return inner if isinstance(inner, str) else json.dumps(value, ensure_ascii=False)
    return content(value)[0]


def looks_like(record: Any) -> str:
    """Why a record is in the form of the Responses API, or ""."""
    items = record if isinstance(record, list) else []
    if isinstance(record, dict) and "messages" not in record:
        if record.get("object") == "response" and isinstance(record.get("output"), list):
            return '`"object": "response"` with `output`'
        if isinstance(record.get("input"), str) and ("instructions" in record or "model" in record):
            return "`input` beside `model` or `instructions`"
        items = next((record[key] for key in ("input", "output") if isinstance(record.get(key), list)), [])
    kinds = [item.get("type") for item in items if isinstance(item, dict)]
    kind = next((kind for kind in kinds if kind in ITEMS), "")
    return f"items of type `{kind}`" if kind else ""

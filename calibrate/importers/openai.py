"""OpenAI chat completions messages, ShareGPT turns, and `{"text": ...}` records."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ..conversation import ROLES, BadRecord, Conversation, Message, ToolCall, joined, tool_call

CONVERSATION_KEYS = ("conversation_id", "session_id", "sessionId", "thread_id", "chat_id", "conversation")
TASK_KEYS = ("task_id", "task", "instance_id")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text")
OTHER_PARTS = ("image", "image_url", "input_image", "audio", "input_audio", "file", "input_file", "video", "document")
"""Content that is not text: left out."""


def conversations(record: Any, where: str, source: str) -> Iterator[Conversation]:
    """`{"messages": [...], "tools"?: [...]}`, `{"conversations": [{"from", "value"}]}`, `{"text"}`, a bare list."""
    if isinstance(record, list):
        record = {"messages": record}
    if not isinstance(record, dict):
        raise BadRecord(f"expected an object, found {type(record).__name__}")
    named = names(record, source)
    turns = next((record[key] for key in ("messages", "conversations") if record.get(key) is not None), None)
    if turns is None and isinstance(record.get("text"), str):
        if record["text"]:
            yield Conversation(where, text=record["text"], **named)
            return
        raise BadRecord("a text without a character")
    if isinstance(turns, str):  # data sets keep it as JSON text now and then
        turns = json.loads(turns)
    if not isinstance(turns, list):
        found = ", ".join(map(str, record)) or "{}"
        raise BadRecord(f"expected messages as a list, or text, found {found:.80}")
    found_messages = tuple(message(turn) for turn in turns)
    yield Conversation(where, messages=found_messages, tools=tools(record), **named)


def names(record: dict[str, Any], source: str) -> dict[str, Any]:
    """id, conversation, task and source that a record states, itself or in its `metadata`."""
    metadata = record.get("metadata")
    places = [record, metadata] if isinstance(metadata, dict) else [record]

    def first(keys: tuple[str, ...]) -> str:
        values = (place.get(key) for place in places for key in keys)
        return next((str(v) for v in values if isinstance(v, str | int) and not isinstance(v, bool) and v != ""), "")

    stated = record.get("source")
    return {
        "id": first(("id",)),
        "conversation": first(CONVERSATION_KEYS),
        "task": first(TASK_KEYS),
        "source": stated if isinstance(stated, str) and stated else source,
    }


def tools(record: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """The functions offered, in OpenAI's form; older logs call them `functions`, Anthropic's have an `input_schema`."""
    offered = record.get("tools") or record.get("functions") or []
    if isinstance(offered, str):
        offered = json.loads(offered)
    if not isinstance(offered, list) or not all(isinstance(tool, dict) for tool in offered):
        raise BadRecord(f"expected tools as a list of objects, found {offered!r:.60}")
    return tuple(_tool(tool) for tool in offered)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if isinstance(tool.get("function"), dict):
        return {"type": "function", "function": tool["function"]}
    function = {key: tool[key] for key in ("name", "description", "parameters") if key in tool}
    if "input_schema" in tool:
        function["parameters"] = tool["input_schema"]
    if "name" not in function:  # a tool that the provider runs: web search, a shell
        function["name"] = str(tool.get("type", "tool"))
    return {"type": "function", "function": function}


def message(turn: Any) -> Message:
    """One message in OpenAI's form, or one ShareGPT turn."""
    if not isinstance(turn, dict):
        raise BadRecord(f"expected a message as an object, found {turn!r:.60}")
    said = turn.get("role", turn.get("from"))
    role = ROLES.get(said) if isinstance(said, str) else None
    if said == "function_call":  # ShareGPT with tools: the value is the call
        call = json.loads(turn.get("value") or turn.get("content") or "null")
        return Message("assistant", calls=(tool_call(call.get("name"), call.get("arguments")),))
    if role is None:
        raise BadRecord(f"expected a message with a role, found {said!r:.60}")
    text, reasoning = content(turn.get("content", turn.get("value")))
    if role != "assistant":
        ids = turn.get("tool_call_ids") or []
        call_id = turn.get("tool_call_id") or (ids[0] if isinstance(ids, list) and ids else "")
        name = turn.get("name")
        return Message(role, text, call_id=str(call_id), name=name if isinstance(name, str) else "")
    thought = next((turn[key] for key in REASONING_KEYS if isinstance(turn.get(key), str) and turn[key]), "")
    if not thought and isinstance(turn.get("reasoning_details"), list):
        thought = joined(*(part.get("text") or "" for part in turn["reasoning_details"]))
    return Message(role, text, thought or reasoning, calls(turn))


def calls(turn: dict[str, Any]) -> tuple[ToolCall, ...]:
    """`tool_calls`, or the older single `function_call`."""
    found = turn.get("tool_calls") or []
    if turn.get("function_call"):
        found = [{"function": turn["function_call"]}]
    if not isinstance(found, list):
        raise BadRecord(f"expected tool_calls as a list, found {found!r:.60}")
    made = []
    for call in found:
        if not isinstance(call, dict):
            raise BadRecord(f"expected a tool call as an object, found {call!r:.60}")
        function = call.get("function") or call.get("custom") or call
        arguments = function.get("arguments", function.get("input"))
        made.append(tool_call(function.get("name"), arguments, call.get("id")))
    return tuple(made)


def content(value: Any) -> tuple[str, str]:
    """(text, reasoning) of a message's content: a string, null, or a list of parts. Images and files are left out."""
    if value is None or isinstance(value, str):
        return value or "", ""
    if isinstance(value, dict):  # a tool's answer that was never made a string
        return json.dumps(value, ensure_ascii=False), ""
    if not isinstance(value, list):
        raise BadRecord(f"expected content as a string, null or a list of parts, found {value!r:.60}")
    text, reasoning = [], []
    for part in value:
        if isinstance(part, str):
            text.append(part)
            continue
        kind = part.get("type", "text") if isinstance(part, dict) else None
        if kind in TEXT_PARTS:
            words = part.get("text", part.get("refusal"))
            if words is not None and not isinstance(words, str):
                raise BadRecord(f"expected a part's text as a string, found {words!r:.60}")
            text.append(words or "")
        elif kind in ("thinking", "reasoning"):
            reasoning.append(part.get("thinking") or part.get("text") or "")
        elif kind not in OTHER_PARTS:
            raise BadRecord(f"expected content parts of text, found {part!r:.60}")
    return "".join(text), joined(*reasoning)

"""Request and response pairs as gateways and proxies log them, around any of the chat APIs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ..conversation import BadRecord, Conversation
from . import anthropic, openai, responses

REQUEST = ("request", "request_body", "req", "body", "input", "kwargs", "requestBody")
RESPONSE = ("response", "response_body", "resp", "output", "completion", "result", "responseBody")


def conversations(record: Any, where: str, source: str) -> Iterator[Conversation]:
    """One conversation per answer (several with `n`); the request alone where the answer is missing or an error."""
    found = pair(record)
    if found is None:
        raise BadRecord("expected a request with messages or input, and its response")
    request, answers = found
    named = {key: value for key, value in openai.names(record, source).items() if value}
    outer = {**request, **{key: named[key] for key in named if key != "source"}}
    outer.pop("id", None)  # of the call, not of a document
    if "source" in record:
        outer["source"] = named["source"]
    if "messages" not in request:
        for answer in answers or [{}]:
            links = {key: answer[key] for key in ("id",) if key in answer}
            yield from responses.conversations({**outer, "output": answer.get("output", []), **links}, where, source)
        return
    taken = anthropic if any(map(anthropic.looks_like, (request, *_with(request, answers)))) else openai
    for full in _with(outer, answers) or [outer]:
        yield from taken.conversations(full, where, source)


def pair(record: Any) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """(request body, answers): for the chat APIs messages, for the Responses API its response; None if it is no pair.

    A body may be an object, JSON text, or either of them below `body`; the request may also be the record itself.
    """
    if not isinstance(record, dict):
        return None
    request = next((body for key in REQUEST if _is_request(body := _body(record.get(key)))), None)
    has_answer = any(key in record for key in RESPONSE)
    if request is None and has_answer and isinstance(record.get("messages"), list):
        request = {key: value for key, value in record.items() if key not in RESPONSE}
    if request is None:
        return None
    if isinstance(request, list):
        request = {"messages": request}
    answer = next((_body(record[key]) for key in RESPONSE if key in record), None)
    if "messages" not in request:
        return request, [answer] if isinstance(answer, dict) and isinstance(answer.get("output"), list) else []
    return request, _answers(answer)


def _body(value: Any) -> Any:
    """What lies inside JSON text and `body` wrappers."""
    for _ in range(4):
        if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                return value
        elif isinstance(value, dict) and "body" in value:
            value = value["body"]
        else:
            return value
    return value


def _is_request(body: Any) -> bool:
    if isinstance(body, list):  # tracers log the bare messages
        return (
            bool(body)
            and all(isinstance(turn, dict) and {"role", "content"} <= turn.keys() for turn in body)
            and not (
                any("type" in turn for turn in body)  # items of the Responses API
            )
        )
    return isinstance(body, dict) and (
        isinstance(body.get("messages"), list) or ("model" in body and isinstance(body.get("input"), str | list))
    )


def _with(request: dict[str, Any], answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**request, "messages": [*request["messages"], answer]} for answer in answers]


def _answers(answer: Any) -> list[dict[str, Any]]:
    """The assistant messages of an answer of either chat API."""
    if isinstance(answer, str):
        events = [line.removeprefix("data:").strip() for line in answer.splitlines() if line.startswith("data:")]
        if not events:
            return [{"role": "assistant", "content": answer}] if answer else []
        answer = [json.loads(event) for event in events if event != "[DONE]"]
    if isinstance(answer, list):
        return _from_chunks(answer)
    if not isinstance(answer, dict):
        return []
    if isinstance(answer.get("choices"), list):
        return [choice["message"] for choice in answer["choices"] if isinstance(choice.get("message"), dict)]
    return [answer] if answer.get("role") == "assistant" else []


def _from_chunks(chunks: list[Any]) -> list[dict[str, Any]]:
    """A streamed chat completion put together from its chunks' deltas."""
    made: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.get("choices") or [] if isinstance(chunk, dict) else []:
            whole = made.setdefault(choice.get("index", 0), {"role": "assistant", "content": "", "tool_calls": {}})
            delta = choice.get("delta") or {}
            for key in ("content", *openai.REASONING_KEYS):
                if isinstance(delta.get(key), str):
                    whole[key] = whole.get(key, "") + delta[key]
            for call in delta.get("tool_calls") or []:
                slot = whole["tool_calls"].setdefault(call.get("index", 0), {"function": {"name": "", "arguments": ""}})
                slot["id"] = call.get("id") or slot.get("id", "")
                for key in ("name", "arguments"):
                    slot["function"][key] += (call.get("function") or {}).get(key) or ""
    return [{**whole, "tool_calls": list(whole["tool_calls"].values())} for whole in made.values()]


def looks_like(record: Any) -> str:
    """Why a record is a logged exchange, or ""."""
    if pair(record) is None:
        return ""
    request = next((key for key in REQUEST if _is_request(_body(record.get(key)))), "messages")
    answer = next((key for key in RESPONSE if key in record), "")
    if not answer and request in ("input",):  # a request of the Responses API, not a log of one
        return ""
    return f"a request in `{request}`" + (f" and its answer in `{answer}`" if answer else "")

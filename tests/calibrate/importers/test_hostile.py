"""No record stops an import: whatever JSON holds, a reader gives conversations or says what is bad."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefit.calibrate.conversation import Bad, Conversation, chain, size
from moefit.calibrate.importers import NAMES, detect, find_inputs
from moefit.calibrate.importers.dataset import conversations
from moefit.calibrate.importers.files import convert
from moefit.calibrate.redact import redact_conversation
from moefit.calibrate.render import messages_for
from moefit.calibrate.splits import names
from moefit.errors import TraceError

from .samples import ANTHROPIC, CHAT, ITEMS, LS, read, write

KEYS = [
    "messages",
    "conversations",
    "text",
    "tools",
    "functions",
    "role",
    "from",
    "content",
    "value",
    "type",
    "name",
    "arguments",
    "input",
    "output",
    "tool_calls",
    "function",
    "function_call",
    "tool_call_id",
    "tool_call_ids",
    "reasoning",
    "reasoning_details",
    "thinking",
    "system",
    "request",
    "response",
    "body",
    "choices",
    "message",
    "delta",
    "index",
    "id",
    "model",
    "instructions",
    "call_id",
    "summary",
    "action",
    "payload",
    "sessionId",
    "isSidechain",
    "agentId",
    "isCompactSummary",
    "history",
    "trajectory",
    "is_demo",
    "traj",
    "task_id",
    "trial",
    "metadata",
    "conversation_id",
    "session_id",
    "source",
    "prompt",
    "timestamp",
    "base_instructions",
    "replacement_history",
    "previous_response_id",
    "conversation",
    "object",
    "tool_use_id",
    "index",
]
WORDS = [
    "user",
    "assistant",
    "system",
    "tool",
    "message",
    "text",
    "tool_use",
    "tool_result",
    "thinking",
    "reasoning",
    "function_call",
    "session_meta",
    "function_call_output",
    "response_item",
    "compacted",
    "response",
    "local_shell_call",
    "image",
    "x",
]
scalars = st.none() | st.booleans() | st.integers(-2, 5) | st.sampled_from([*WORDS, "", "{}", "[", '{"messages": []}'])
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3)
)
SAMPLES: dict[str, Any] = {
    "claude-code": {"type": "assistant", "sessionId": "s", "message": ANTHROPIC["messages"][1]},
    "codex": {"type": "response_item", "payload": ITEMS[3]},
    "mini-swe-agent": {"messages": CHAT, "trajectory_format": "mini-swe-agent-1"},
    "swe-agent": {"history": [{**turn, "is_demo": False} for turn in CHAT]},
    "tau-bench": {"task_id": 1, "trial": 0, "traj": CHAT},
    "gateway": {"request": {"messages": CHAT[:2], "tools": [LS]}, "response": {"choices": [{"message": CHAT[2]}]}},
    "responses": {"model": "m", "instructions": "i", "input": ITEMS, "tools": [LS["function"]]},
    "anthropic": ANTHROPIC,
    "openai": {"messages": CHAT, "tools": [LS], "task": "t", "metadata": {"session_id": "s"}},
}
STEPS = {"trajectory": [{"response": "r", "thought": "t", "observation": "o"}]}


@st.composite
def spoiled(draw: st.DrawFn, sample: Any) -> Any:
    """A sound record with something else in one to three places."""
    made = json.loads(json.dumps(sample))
    for _ in range(draw(st.integers(1, 3))):
        place = made
        while True:
            keys = list(place) if isinstance(place, dict) else range(len(place))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(place[key], dict | list) and draw(st.integers(0, 3)):
                place = place[key]
            else:
                place[key] = draw(values)
                break
    return made


anything = values | st.sampled_from([*SAMPLES.values(), STEPS]).flatmap(spoiled)


def check(found: list[Any]) -> None:
    """What comes next can work with it."""
    for conversation in found:
        assert isinstance(conversation, Conversation | Bad)
        if isinstance(conversation, Bad):
            assert conversation.where
            assert conversation.why
            continue
        assert conversation.messages or conversation.text
        assert len(chain(conversation)) == max(1, len(conversation.messages))
        assert size(conversation) >= 0
        assert names(conversation)
        messages_for(redact_conversation(conversation, Counter()), lambda call: call.arguments)


@pytest.mark.parametrize("form", SAMPLES)
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_readers(form: str, data: st.DataObject) -> None:
    record = spoiled(SAMPLES[form]) if form != "swe-agent" else spoiled(SAMPLES[form]) | spoiled(STEPS)
    made = data.draw(st.lists(record, min_size=1, max_size=3))
    with tempfile.TemporaryDirectory() as folder:
        check(read(write(Path(folder) / "log.jsonl", *made), form))


@settings(max_examples=60, deadline=None)
@given(anything)
def test_rows(row: Any) -> None:
    check(list(convert([("f:1", row)], lambda value, where: conversations(value, where, "f"))))


@settings(max_examples=60, deadline=None)
@given(st.lists(anything, min_size=1, max_size=3), st.binary(max_size=20))
def test_detection(made: list[Any], tail: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "log.jsonl", *made)
        path.write_bytes(path.read_bytes() + tail)
        try:
            form, why = detect(find_inputs([str(path)])[0])
        except TraceError as error:
            assert "not recognised" in str(error)
        else:
            assert form.name in NAMES
            assert why

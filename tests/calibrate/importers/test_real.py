"""The real logs of the shared folder, each in its program's own format, against counts taken in another way."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from moefit.calibrate.conversation import Conversation
from moefit.calibrate.importers import detect, find_inputs

FILES = {
    "swe-agent-1.traj": "swe-agent",
    "swe-agent-2.traj": "swe-agent",
    "swe-agent-function-calling.traj": "swe-agent",
    "mini-swe-agent.traj.json": "mini-swe-agent",
    "tau-bench.json": "tau-bench",
    "claude-code.jsonl": "claude-code",
    "aider-chat-history.md": "aider",
}


def load(shared: Path, name: str) -> list[Conversation]:
    (file,) = find_inputs([str(shared / "raw-traces" / name)])
    form, _ = detect(file)
    assert form.name == FILES[name]
    found = list(form.read(file, None))
    assert all(isinstance(c, Conversation) for c in found)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("swe-agent")])
def test_swe_agent(shared: Path, name: str) -> None:
    history = json.loads((shared / "raw-traces" / name).read_text())["history"]
    (found,) = load(shared, name)
    assert [(m.role, m.text) for m in found.messages] == [(m["role"], m["content"]) for m in history]
    assert sum(len(m.calls) for m in found.messages) == sum(len(m.get("tool_calls") or []) for m in history)
    assert found.task == name.removesuffix(".traj")


def test_mini_swe_agent(shared: Path) -> None:
    turns = json.loads((shared / "raw-traces" / "mini-swe-agent.traj.json").read_text())
    (found,) = load(shared, "mini-swe-agent.traj.json")
    assert [(m.role, m.text) for m in found.messages] == [(m["role"], m["content"]) for m in turns]


def test_tau_bench(shared: Path) -> None:
    runs = json.loads((shared / "raw-traces" / "tau-bench.json").read_text())
    found = load(shared, "tau-bench.json")
    assert len(found) == len(runs)
    for conversation, run in zip(found, runs, strict=True):
        assert [m.text for m in conversation.messages] == [m.get("content") or "" for m in run["traj"]]
        calls = [json.loads(c["function"]["arguments"]) for m in run["traj"] for c in m.get("tool_calls") or []]
        assert [call.arguments for m in conversation.messages for call in m.calls] == calls
    assert sum(len(m.calls) for c in found for m in c.messages) > 10


def test_claude_code(shared: Path) -> None:
    events = [json.loads(line) for line in (shared / "raw-traces" / "claude-code.jsonl").open()]
    blocks = [b for e in events if "message" in e for b in e["message"]["content"]]
    (found,) = load(shared, "claude-code.jsonl")
    for kind, count in (
        ("tool_use", sum(len(m.calls) for m in found.messages)),
        ("tool_result", sum(m.role == "tool" for m in found.messages)),
    ):
        assert count == sum(block["type"] == kind for block in blocks) > 0
    assert "".join(m.text for m in found.messages if m.role == "user") == "".join(
        b["text"] for e in events if e["type"] == "user" for b in e["message"]["content"] if b["type"] == "text"
    )


def test_aider(shared: Path) -> None:
    """Every line of the user's is there, in order; sessions are those whose header a user's line follows."""
    text = (shared / "raw-traces" / "aider-chat-history.md").read_text()
    sessions = [part for part in text.split("# aider chat started at") if re.search(r"^#### +\S", part, re.M)]
    found = load(shared, "aider-chat-history.md")
    assert len(found) == len(sessions) > 20
    for conversation, session in zip(found, sessions, strict=True):
        asked = "\n".join(m.text for m in conversation.messages if m.role == "user")
        lines = [line[5:].rstrip() for line in session.splitlines() if re.match(r"####( |$)", line)]
        assert [line.rstrip() for line in asked.splitlines() if line.strip()] == [line for line in lines if line]
    answers = sum(m.role == "assistant" for c in found for m in c.messages)
    assert answers > len(found)
    assert all(m.text for c in found for m in c.messages)

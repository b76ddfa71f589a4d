"""Every format's reader and its detection, on small samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moefit.calibrate.conversation import Bad, Conversation
from moefit.calibrate.importers import NAMES, detect, find_inputs
from moefit.errors import TraceError

from .samples import AIDER, ANTHROPIC, CALL, CHAT, ERRAND, ITEMS, LS, read, said, write


def taken(path: Path) -> str:
    (file,) = find_inputs([str(path)])
    form, why = detect(file)
    assert why
    return form.name


def one(path: Path, form: str) -> Conversation:
    """The only conversation of a file, in the format that detection takes it for."""
    assert taken(path) == form
    (found,) = read(path, form)
    assert isinstance(found, Conversation), found
    return found


# Chat APIs


def test_openai(tmp_path: Path) -> None:
    record = {"messages": CHAT, "tools": [LS], "id": 7, "session_id": "s", "task": "t", "source": "mine"}
    found = one(write(tmp_path / "log.jsonl", record), "openai")
    assert said(found) == ERRAND
    assert found.tools == (LS,)
    assert (found.id, found.conversation, found.task, found.source) == ("7", "s", "t", "mine")
    assert (found.where, found.messages[3].call_id) == ("log.jsonl:1", "c1")


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "content": "", "reasoning": "I must look.", "tool_calls": [CALL]},
        {"role": "assistant", "content": None, "thinking": "I must look.", "function_call": CALL["function"]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "I must look."}], "tool_calls": [CALL]},
        {"role": "assistant", "reasoning_details": [{"text": "I must look."}], "tool_calls": [CALL]},
    ],
)
def test_openai_dialects(tmp_path: Path, turn: dict[str, Any]) -> None:
    record = {"messages": [{"role": "developer", "content": "You list files."}, CHAT[1], turn, *CHAT[3:]]}
    assert said(one(write(tmp_path / "log.jsonl", record), "openai")) == ERRAND


def test_openai_images_are_left_out(tmp_path: Path) -> None:
    parts = [{"type": "image_url", "image_url": {"url": "data:..."}}, {"type": "text", "text": "What?"}]
    found = one(write(tmp_path / "log.jsonl", {"messages": [{"role": "user", "content": parts}]}), "openai")
    assert said(found) == [("user", "What?", "", [])]


def test_sharegpt_bare_lists_and_texts(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
    path = write(tmp_path / "log.jsonl", {"conversations": turns}, CHAT, {"text": "plain", "id": "p"})
    assert taken(path) == "openai"
    first, second, third = read(path, "openai")
    assert said(first) == [("user", "Hi", "", []), ("assistant", "Ho", "", [])]
    assert said(second) == ERRAND
    assert (third.text, third.messages, third.id) == ("plain", (), "p")


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"messages": []}, "without messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "with a role, found 'wizard'"),
        ({"messages": ["x"]}, "message as an object"),
        ({"messages": [{"role": "user", "content": 5}]}, "content as a string"),
        ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "parts of text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "a tool call with a name"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}]},
            "arguments",
        ),
        ({"messages": CHAT, "tools": ["ls"]}, "tools as a list of objects"),
        ({"prompt": "x"}, "messages as a list, or text, found prompt"),
        (17, "an object, found int"),
    ],
)
def test_openai_bad_records(tmp_path: Path, record: Any, why: str) -> None:
    good, bad, after = read(write(tmp_path / "log.jsonl", {"messages": CHAT}, record, {"messages": CHAT}), "openai")
    assert isinstance(bad, Bad)
    assert bad.where == "log.jsonl:2"
    assert why in bad.why
    assert said(good) == said(after) == ERRAND


def test_arguments_that_are_no_object_stay_text(tmp_path: Path) -> None:
    calls = [{"function": {"name": "f", "arguments": text}} for text in ('{"cut": ', "[1]", "", '{"a": 1}')]
    path = write(tmp_path / "log.jsonl", {"messages": [CHAT[1], {"role": "assistant", "tool_calls": calls}]})
    (found,) = read(path, "openai")
    assert [call.arguments for call in found.messages[1].calls] == ['{"cut": ', "[1]", {}, {"a": 1}]


def test_anthropic(tmp_path: Path) -> None:
    found = one(write(tmp_path / "log.jsonl", ANTHROPIC), "anthropic")
    assert said(found) == ERRAND
    assert found.tools == (
        {"type": "function", "function": {"name": "ls", "description": "d", "parameters": {"type": "object"}}},
    )
    assert found.messages[3].call_id == "c1"


def test_anthropic_results_and_words_of_one_turn_stay_in_order(tmp_path: Path) -> None:
    result = {"type": "tool_result", "tool_use_id": "c", "content": "r"}
    blocks = [result, {"type": "text", "text": "a"}, {"type": "text", "text": "b"}, {"type": "image", "source": {}}]
    path = write(tmp_path / "log.jsonl", {"messages": [{"role": "user", "content": blocks}]})
    assert said(one(path, "anthropic")) == [("tool", "r", "", []), ("user", "a\nb", "", [])]


def test_responses(tmp_path: Path) -> None:
    both = {"model": "m", "instructions": "You list files.", "input": ITEMS[:1], "output": ITEMS[1:], "id": "resp_2"}
    path = write(
        tmp_path / "log.jsonl",
        both | {"previous_response_id": "resp_1", "tools": [{"type": "function", **LS["function"]}]},
    )
    found = one(path, "responses")
    assert said(found) == ERRAND
    assert found.tools == (LS,)
    assert set(found.links) == {"response resp_1", "response resp_2"}


def test_responses_of_a_string_and_bare_items(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", {"model": "m", "input": "Hi"}, ITEMS)
    assert taken(path) == "responses"
    first, second = read(path, "responses")
    assert said(first) == [("user", "Hi", "", [])]
    assert said(second) == ERRAND[1:]


def test_gateway_pairs_of_each_api(tmp_path: Path) -> None:
    """As an object, as JSON text, below `body`; answers of chat completions, Messages, Responses, a stream."""
    answer = {"choices": [{"index": 0, "message": CHAT[4]}], "usage": {}}
    request = {"model": "m", "messages": CHAT[:4], "tools": [LS]}
    chunks = [{"choices": [{"index": 0, "delta": {"content": word}}]} for word in ("One", " file.")]
    events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n"
    message = {"type": "message", "role": "assistant", "content": ANTHROPIC["messages"][3]["content"]}
    path = write(
        tmp_path / "log.jsonl",
        {"request": request, "response": answer, "session_id": "s", "id": "call-1"},
        {"request_body": json.dumps(request), "response_body": json.dumps(answer)},
        {"request": {"body": request}, "response": {"status": 200, "body": answer}},
        {**request, "response": answer},
        {"request": request, "response": chunks},
        {"request": request, "response": events},
        {"request": {**ANTHROPIC, "messages": ANTHROPIC["messages"][:3]}, "response": message},
        {
            "request": {"model": "m", "instructions": "You list files.", "input": ITEMS[:1]},
            "response": {"object": "response", "output": ITEMS[1:]},
        },
    )
    assert taken(path) == "gateway"
    found = read(path, "gateway")
    assert [said(c) for c in found] == [ERRAND] * len(found)
    assert len(found) == 8
    assert (found[0].conversation, found[0].source) == ("s", "log.jsonl")
    assert found[0].tools == (LS,)


def test_gateway_streamed_calls_several_choices_and_errors(tmp_path: Path) -> None:
    request = {"messages": CHAT[:2]}
    deltas = [
        {"reasoning_content": "I must"},
        {"reasoning_content": " look.", "tool_calls": [{"index": 0, "id": "c1", "function": {"name": "ls"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"path"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ': "."}'}}]},
    ]
    path = write(
        tmp_path / "log.jsonl",
        {"request": request, "response": [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]},
        {"request": request, "response": {"choices": [{"message": m} for m in (CHAT[4], CHAT[2])]}},
        {"request": request, "response": {"error": "overloaded"}},
        {"request": {"model": "m"}, "response": {}},
    )
    streamed, first, second, alone, bad = read(path, "gateway")
    assert said(streamed) == said(second) == ERRAND[:3]
    assert said(first) == [*ERRAND[:2], ERRAND[4]]
    assert said(alone) == ERRAND[:2]
    assert "request with messages" in bad.why


# Agents


def test_swe_agent(tmp_path: Path) -> None:
    history = [
        {**CHAT[0], "agent": "main"},
        {"role": "user", "content": "An example.", "is_demo": True},
        {**CHAT[1], "message_type": "observation"},
        {**CHAT[2], "thought": "t", "action": "ls"},
        {"role": "tool", "content": "a.py", "tool_call_ids": ["c1"]},
    ]
    path = tmp_path / "repo__issue-1.traj"
    path.write_text(json.dumps({"history": history, "trajectory": [], "info": {}}, indent=1))
    found = one(path, "swe-agent")
    assert said(found)[2:] == ERRAND[1:4]
    assert (found.task, found.examples, found.messages[4].call_id) == ("repo__issue-1", 1, "c1")


def test_swe_agent_of_steps(tmp_path: Path) -> None:
    steps = [
        {"response": "I look.", "observation": "a.py"},
        {"thought": "Done.", "action": "submit", "observation": ""},
    ]
    path = tmp_path / "old.traj"
    path.write_text(json.dumps({"trajectory": steps}))
    assert said(one(path, "swe-agent")) == [
        ("assistant", "I look.", "", []),
        ("user", "a.py", "", []),
        ("assistant", "Done.\nsubmit", "", []),
    ]


@pytest.mark.parametrize("bare", [True, False])
def test_mini_swe_agent(tmp_path: Path, bare: bool) -> None:
    turns = [*CHAT, {"role": "exit", "content": "submitted"}]
    whole = {"info": {}, "messages": turns, "trajectory_format": "mini-swe-agent-1", "instance_id": "i-1"}
    path = tmp_path / "x.traj.json"
    path.write_text(json.dumps(turns if bare else whole, indent=2))
    found = one(path, "mini-swe-agent")
    assert said(found) == ERRAND
    assert found.task == ("x" if bare else "i-1")


def test_tau_bench(tmp_path: Path) -> None:
    runs = [{"task_id": 3, "trial": trial, "reward": 1.0, "info": {}, "traj": CHAT} for trial in (0, 1)]
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(runs))
    assert taken(path) == "tau-bench"
    found = read(path, "tau-bench")
    assert [said(c) for c in found] == [ERRAND] * 2
    assert {c.task for c in found} == {"tau-bench 3"}
    assert len({c.conversation for c in found}) == 2


def claude(kind: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": kind, "sessionId": "s", "uuid": "u", "message": {"role": kind, "content": content}, **more}


def test_claude_code(tmp_path: Path) -> None:
    """An answer comes a block a line; side chains and what follows a compaction are conversations of one session."""
    use, result = ANTHROPIC["messages"][1]["content"], ANTHROPIC["messages"][2]["content"]
    path = write(
        tmp_path / "log.jsonl",
        {"type": "summary", "summary": "x", "leafUuid": "u"},
        claude("user", "What is here?"),
        claude("assistant", use[:1]),
        claude("user", "Look for b.", isSidechain=True, agentId="a1"),
        claude("assistant", use[1:]),
        {"type": "file-history-snapshot", "snapshot": {}},
        claude("user", result, toolUseResult="a.py"),
        claude("assistant", [{"type": "text", "text": "One file."}]),
        claude("user", "So far: one file.", isCompactSummary=True),
        claude("assistant", [{"type": "text", "text": "Go on."}]),
    )
    assert taken(path) == "claude-code"
    first, *others = read(path, "claude-code")
    assert said(first) == ERRAND[1:]
    assert [said(c)[0][1] for c in others] == ["Look for b.", "So far: one file."]
    assert [c.conversation for c in (first, *others)] == ["s", "s a1", "s"]
    assert {c.links for c in (first, *others)} == {("session s",)}


@pytest.mark.parametrize("envelope", [True, False])
def test_codex(tmp_path: Path, envelope: bool) -> None:
    stamp = {"timestamp": "2026-01-01T00:00:00Z"}
    if envelope:
        head = {
            "type": "session_meta",
            "payload": {"id": "s", "base_instructions": {"text": "You list files."}},
            **stamp,
        }
        items: list[Any] = [{"type": "response_item", "payload": item, **stamp} for item in ITEMS]
        items.insert(1, {"type": "event_msg", "payload": {"type": "agent_reasoning", "text": "I must look."}, **stamp})
    else:
        head = {"id": "s", "instructions": "You list files.", **stamp}
        items = [{"record_type": "state"}, *ITEMS]
    path = write(tmp_path / "rollout-1.jsonl", head, *items)
    found = one(path, "codex")
    assert said(found) == ERRAND
    assert found.conversation == "s"


def test_codex_compaction_and_shells(tmp_path: Path) -> None:
    def item(**payload: Any) -> dict[str, Any]:
        return {"type": "response_item", "payload": payload}

    path = write(
        tmp_path / "rollout-1.jsonl",
        {"type": "session_meta", "payload": {"id": "s"}},
        item(**ITEMS[0]),
        item(type="local_shell_call", call_id="c", action={"command": ["ls"]}),
        item(type="function_call_output", call_id="c", output='{"output": "a.py", "metadata": {"exit_code": 0}}'),
        item(type="custom_tool_call", call_id="d", name="apply_patch", input="*** Begin"),
        {"type": "compacted", "payload": {"message": "One file."}},
        item(**ITEMS[4]),
    )
    first, second = read(path, "codex")
    assert [(m.role, m.text, [c.arguments for c in m.calls]) for m in first.messages[1:]] == [
        ("assistant", "", [{"command": ["ls"]}]),
        ("tool", "a.py", []),
        ("assistant", "", [{"input": "*** Begin"}]),
    ]
    assert said(second) == [("user", "One file.", "", []), ("assistant", "One file.", "", [])]
    assert first.conversation == second.conversation


# Text


def test_aider(tmp_path: Path) -> None:
    path = tmp_path / "history.md"
    path.write_text(AIDER)
    found = one(path, "aider")  # the second session asks nothing
    assert said(found) == [
        ("user", "What is here?\nLook well.", "", []),
        ("assistant", "One file:\n\n```\n> a.py\n```", "", []),
        ("tool", "Applied edit to a.py", "", []),
        ("user", "Thanks.", "", []),
        ("assistant", "You are welcome.", "", []),
    ]


def test_plain_text_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moefit.calibrate.importers.text.TEXT_PIECE", 1000)
    text = "".join(f"{number}: größer als zuvor\n" for number in range(300))
    path = tmp_path / "notes.txt"
    path.write_text(text)
    assert taken(path) == "text"
    found = read(path, "text")
    assert len(found) > 5
    assert "".join(c.text for c in found) == text
    assert all(c.text.endswith("\n") for c in found)
    assert {c.conversation for c in found} == {"notes.txt"}
    lines = [text[: text.index(c.text)].count("\n") + 1 for c in found]
    assert [c.where for c in found] == [f"notes.txt:{line}" for line in lines]


def test_text_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine\n" + b"\xff\xfe" * 50)
    (bad,) = read(tmp_path / "a.txt", "text")
    assert "UTF-8" in bad.why


# Detection


def test_every_format_is_tested() -> None:
    source = Path(__file__).read_text() + Path(__file__).with_name("test_dataset.py").read_text()
    for name in NAMES:
        assert f'"{name}"' in source, name


def test_unknown_files_and_formats(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(range(256)) * 10)
    (tmp_path / "b.json").write_text('{"weights": [1, 2]}')
    for name in ("a.bin", "b.json"):
        with pytest.raises(TraceError, match=rf"not recognised .*{name}.*openai.*--format"):
            detect(find_inputs([str(tmp_path / name)])[0])
    with pytest.raises(TraceError, match=r"no such format: expected one of claude-code, .* found opnai"):
        detect(find_inputs([str(tmp_path / "b.json")])[0], "opnai")
    assert detect(find_inputs([str(tmp_path / "b.json")])[0], "text")[1] == "as told"


def test_inputs(tmp_path: Path) -> None:
    (tmp_path / "logs" / "deep").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "deep/c.txt", ".hidden"):
        (tmp_path / "logs" / name).write_text("x")
    assert [file.name for file in find_inputs([str(tmp_path / "logs")])] == [
        "logs/a.txt",
        "logs/b.txt",
        "logs/deep/c.txt",
    ]
    with pytest.raises(TraceError, match="given twice"):
        find_inputs([str(tmp_path / "logs"), str(tmp_path / "logs" / "a.txt")])
    with pytest.raises(TraceError, match=r"nothing to import .*absent"):
        find_inputs([str(tmp_path / "absent")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match="no file to import"):
        find_inputs([str(tmp_path / "empty")])

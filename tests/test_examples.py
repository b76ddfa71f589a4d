"""The embedded traffic and evaluation text: well formed, held out, and recorded by the script beside it."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
FILES = ("traffic.jsonl", "eval.jsonl")
PYTHON_TYPES = {"string": str, "integer": int, "array": list, "object": dict}


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (EXAMPLES / name).read_text(encoding="utf-8").splitlines()]


def strings(line: dict[str, Any]) -> list[str]:
    """Everything a reader of the document sees, tool descriptions aside."""
    if "text" in line:
        return [line["text"]]
    calls = [c["function"]["arguments"] for m in line["messages"] for c in m.get("tool_calls", ())]
    return [m["content"] for m in line["messages"] if m["content"]] + calls


@pytest.fixture(scope="module")
def script() -> Any:
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module("make_traffic")
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def token_counts(tiny_v41: Path) -> dict[str, list[tuple[str, int]]]:
    """Per file: (corpus, tokens) of each document as the chat template writes it."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_v41)

    def count(line: dict[str, Any]) -> int:
        text = line.get("text")
        if text is None:
            text = tokenizer.apply_chat_template(line["messages"], tools=line.get("tools"), tokenize=False)
        return len(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)

    return {name: [(line.get("corpus", ""), count(line)) for line in read(name)] for name in FILES}


def test_the_script_reproduces_the_committed_files(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "make_traffic.py"), "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (EXAMPLES / name).read_bytes(), f"record {name} again"


def test_results_come_from_the_project_and_not_from_the_script(script: Any) -> None:
    """Another harvest gives another record: nothing that a tool says is written into the conversation."""
    project = script.sections(script.TEXT / "project.txt")
    task = script.sections(script.TEXT / "tasks_data.txt")["harvest-per-square-metre"]
    recorded, _ = script.play(task, project)
    project["data/harvest.csv"] = project["data/harvest.csv"].replace("tomato,8.8", "tomato,9.8")
    changed, _ = script.play(task, project)
    assert "sum=27.5 " in recorded[2]["content"]
    assert "sum=28.5 " in changed[2]["content"]


@pytest.mark.parametrize("name", FILES)
def test_lines_are_well_formed(name: str) -> None:
    lines = read(name)
    assert len({line["id"] for line in lines}) == len(lines)
    for line in lines:
        assert line["source"] == "moefit examples"
        assert ("messages" in line) != ("text" in line)
        assert set(line) <= {"id", "source", "task", "messages", "tools", "text", "corpus"}
        assert ("corpus" in line) == (name == "eval.jsonl")
        assert all(text.strip() for text in strings(line))


@pytest.mark.parametrize("name", FILES)
def test_every_call_is_answered_in_order_and_fits_its_schema(name: str, script: Any) -> None:
    for line in read(name):
        open_calls: list[str] = []
        for message in line.get("messages", ()):
            if message["role"] == "tool":
                assert message["tool_call_id"] == open_calls.pop(0), line["id"]
                continue
            assert not open_calls, f"{line['id']}: a call without an answer"
            assert message["content"] or message.get("tool_calls"), f"{line['id']}: an empty turn"
            for call in message.get("tool_calls", ()):
                assert message["role"] == "assistant"
                open_calls.append(call["id"])
                schema = script.tool_schema(call["function"]["name"])
                assert schema in line.get("tools", [schema]), f"{line['id']}: a tool it does not offer"
                arguments = json.loads(call["function"]["arguments"])
                parameters = schema["function"]["parameters"]
                assert set(parameters["required"]) <= set(arguments) <= set(parameters["properties"])
                for key, value in arguments.items():
                    assert isinstance(value, PYTHON_TYPES[parameters["properties"][key]["type"]])
        if "messages" in line:
            assert not open_calls
            assert line["messages"][-1]["role"] == "assistant"


def test_sizes(token_counts: dict[str, list[tuple[str, int]]]) -> None:
    assert all((EXAMPLES / name).stat().st_size < 400_000 for name in FILES)
    assert 36 <= sum("messages" in line for line in read("traffic.jsonl")) <= 48
    assert 60_000 <= sum(n for _, n in token_counts["traffic.jsonl"]) <= 90_000
    for corpus in ("agentic", "prose", "code"):
        counts = [n for c, n in token_counts["eval.jsonl"] if c == corpus]
        assert len(counts) >= 20
        assert all(150 <= n <= 600 for n in counts)


def test_the_readme_tells_the_sizes(token_counts: dict[str, list[tuple[str, int]]]) -> None:
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for name in FILES:
        assert f"{sum(n for _, n in token_counts[name]):,} tokens" in readme


def test_evaluation_text_is_held_out() -> None:
    def passages(name: str) -> set[tuple[str, ...]]:
        found = set()
        for text in (text for line in read(name) for text in strings(line)):
            words = re.findall(r"\w+", text.lower())
            found |= {tuple(words[i : i + 8]) for i in range(len(words) - 7)}
        return found

    assert not passages("traffic.jsonl") & passages("eval.jsonl")


@pytest.mark.parametrize("name", FILES)
def test_nothing_private(name: str) -> None:
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    private = r"/home/|/root/|/Users/|/tmp/|[\w.]+@[\w-]+\.\w+|BEGIN [A-Z ]*KEY|(?i:api[_-]?key|password)"
    assert not re.findall(private, text)

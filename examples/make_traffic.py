"""Records the example traffic: plays the scripted conversations of text/ and writes down what the tools said.

    python examples/make_traffic.py --out examples

Standard library only. Each conversation starts from a fresh copy of its small project in a temporary folder;
the words are fixed, every tool call is really executed, and its result recorded: same scripts, same bytes.

Bundles hold sections that begin with a line `=== NAME`. A task begins with `tools: ...` (the tools it
offers), then come turns: `--- system`, `--- user` or `--- assistant` with the text below, and
`--- call TOOL {arguments}` for the calls of the assistant turn above. Lines below a call are a long argument
(see BODY), so that code needs no escaping; for edit_file: the old passage, a line `=>`, the new one.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from traffic_tools import call_tool, tool_schema

TEXT = Path(__file__).resolve().parent / "text"
BODY = {"run_python": "code", "write_file": "content", "sql": "query", "wrap_text": "text"}


def sections(path: Path) -> dict[str, str]:
    """Sections of a bundle by name, in file order."""
    parts = re.split(r"^=== (.+)\n", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    names, bodies = parts[1::2], parts[2::2]
    if len(set(names)) != len(names):
        raise ValueError(f"{path}: a section name occurs twice")
    return dict(zip(names, bodies, strict=True))


def arguments_of(name: str, given: str, body: str) -> dict:
    arguments = json.loads(given or "{}")
    if name == "edit_file":
        arguments["old"], arguments["new"] = body.split("\n=>\n")
    elif body:
        arguments[BODY[name]] = body
    return arguments


def play(task: str, project: dict[str, str]) -> tuple[list[dict], list[str]]:
    """Messages of one scripted conversation with the recorded tool results, and the tools it offers."""
    head, *turns = re.split(r"^--- (?=system|user|assistant|call )", task, flags=re.MULTILINE)
    tools = re.findall(r"\w+", head.partition("tools:")[2])
    messages: list[dict] = []
    results: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        for path, text in project.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text, encoding="utf-8")
        for turn in turns:
            first, _, body = turn.partition("\n")
            kind, _, rest = first.partition(" ")
            if kind != "call":
                messages += results
                results = []
                messages.append({"role": kind, "content": body.strip() or None})
                continue
            name, _, given = rest.partition(" ")
            arguments = arguments_of(name, given, body.strip("\n"))
            id = f"call_{sum(m['role'] == 'tool' for m in messages + results) + 1}"
            function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
            messages[-1].setdefault("tool_calls", []).append({"id": id, "type": "function", "function": function})
            results.append({"role": "tool", "tool_call_id": id, "content": call_tool(root, name, arguments)})
    return messages + results, tools


def conversations(bundle: str, project: dict[str, str]) -> Iterator[dict]:
    for name, task in sections(TEXT / bundle).items():
        messages, tools = play(task, project)
        line = {"id": name, "source": "moefit examples", "task": name, "messages": messages}
        yield line | ({"tools": [tool_schema(t) for t in tools]} if tools else {})


def texts(bundle: str) -> Iterator[dict]:
    for name, text in sections(TEXT / bundle).items():
        yield {"id": name, "source": "moefit examples", "text": text.strip("\n") + "\n"}


def traffic() -> Iterator[dict]:
    project = sections(TEXT / "project.txt")
    for bundle in ("tasks_code.txt", "tasks_data.txt", "tasks_desk.txt", "tasks_numbers.txt"):
        yield from conversations(bundle, project)
    yield from texts("pieces.txt")


def evaluation() -> Iterator[dict]:
    for line in conversations("eval_tasks.txt", sections(TEXT / "eval_project.txt")):
        yield {"corpus": "agentic"} | line
    for corpus in ("prose", "code"):
        for line in texts(f"eval_{corpus}.txt"):
            yield {"corpus": corpus} | line


def main() -> None:
    parser = argparse.ArgumentParser(description="Record examples/traffic.jsonl and examples/eval.jsonl.")
    parser.add_argument("--out", type=Path, default=TEXT.parent, help="folder to write to (default: examples)")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, lines in (("traffic.jsonl", traffic()), ("eval.jsonl", evaluation())):
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (out / name).write_text(text, encoding="utf-8")
        print(f"{out / name}: {text.count(chr(10))} documents, {len(text.encode())} bytes")


if __name__ == "__main__":
    main()

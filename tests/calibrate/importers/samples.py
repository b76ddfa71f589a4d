"""One small log per format, made by hand: the same short errand (list files, answer) as each program would log it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moefit.calibrate.conversation import Conversation
from moefit.calibrate.importers import FORMATS, find_inputs

LS = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"path": "."}'}}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "You list files."},
    {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "here?"}]},
    {"role": "assistant", "content": None, "reasoning_content": "I must look.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "a.py"},
    {"role": "assistant", "content": "One file."},
]
ANTHROPIC: dict[str, Any] = {
    "model": "m",
    "system": [{"type": "text", "text": "You list files."}],
    "tools": [{"name": "ls", "description": "d", "input_schema": {"type": "object"}}],
    "messages": [
        {"role": "user", "content": "What is here?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I must look.", "signature": "s"},
                {"type": "tool_use", "id": "c1", "name": "ls", "input": {"path": "."}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "a.py"}]}],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "One file."}]},
    ],
}
ITEMS: list[dict[str, Any]] = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is here?"}]},
    {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "I must look."}]},
    {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": '{"path": "."}'},
    {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "One file."}]},
]
ERRAND = [
    ("system", "You list files.", "", []),
    ("user", "What is here?", "", []),
    ("assistant", "", "I must look.", [("ls", {"path": "."})]),
    ("tool", "a.py", "", []),
    ("assistant", "One file.", "", []),
]
"""What every sample says, as `said` gives it."""
AIDER = """
# aider chat started at 2024-08-05 19:33:02

> aider --model m  
> Aider v0.1  

#### What is here?  
#### Look well.  

One file:

```
> a.py
```

> Applied edit to a.py  

#### Thanks.  

You are welcome.

# aider chat started at 2024-08-05 20:00:00

> Aider v0.1  
"""  # noqa: W291  (aider ends such lines with two blanks)


def write(path: Path, *records: Any) -> Path:
    """JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(path: Path, form: str) -> list[Any]:
    """Everything a reader yields."""
    reader = next(f.read for f in FORMATS if f.name == form)
    (file,) = find_inputs([str(path)])
    return list(reader(file, None))


def said(conversation: Conversation) -> list[tuple[str, str, str, list[tuple[str, Any]]]]:
    """(role, text, reasoning, calls) of each message."""
    return [(m.role, m.text, m.reasoning, [(c.name, c.arguments) for c in m.calls]) for m in conversation.messages]

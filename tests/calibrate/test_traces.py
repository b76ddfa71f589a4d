"""Traffic to tokens: what is accepted, what is refused and where, and how windows are cut."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from moefit.calibrate.traces import Document, load_tokenizer, read_documents, trace_identity, windows
from moefit.errors import CheckpointError, TraceError

CHAT = [
    {"role": "system", "content": "You list files."},
    {"role": "user", "content": "What is here?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "ls", "arguments": '{"path": "."}'}}],
    },
    {"role": "tool", "content": "a.py\nb.py"},
    {"role": "assistant", "content": "Two files."},
]


@pytest.fixture(scope="module")
def tokenizer(tiny_v41: Path) -> Any:
    return load_tokenizer(tiny_v41)


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


# --- documents


def test_text_is_bos_then_text(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", {"text": "def f(x): return x", "id": "one", "source": "s", "task": "t"})
    (document,) = read_documents(path, tokenizer)
    assert (document.id, document.source, document.task) == ("one", "s", "t")
    assert document.ids.dtype == np.int32
    assert document.ids[0] == 0
    assert tokenizer.decode(document.ids[1:]) == "def f(x): return x"


def test_conversation_goes_through_the_template(tokenizer: Any, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}]
    path = write(tmp_path / "t.jsonl", {"messages": CHAT, "tools": tools})
    (document,) = read_documents(path, tokenizer)
    text = tokenizer.decode(document.ids)
    assert text.startswith("<|bos|><|tools|>{")
    assert '<|tool_call|>{"name": "ls", "arguments": {"path": "."}}<|/tool_call|><|end|>' in text
    assert text.endswith("<|assistant|>Two files.<|end|>")
    assert "None" not in text
    assert (document.ids == 0).sum() == 1  # the template wrote bos; it is not added again


def test_content_parts_are_joined(tokenizer: Any, tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": " here?"}]
    path = write(
        tmp_path / "t.jsonl",
        {"messages": [{"role": "user", "content": "What is here?"}]},
        {"messages": [{"role": "user", "content": parts}]},
    )
    one, two = read_documents(path, tokenizer)
    assert np.array_equal(one.ids, two.ids)


def test_ids_are_unique_and_blank_lines_skipped(tokenizer: Any, tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        "",
        {"text": "x", "id": "a"},
        "   ",
        {"text": "x"},
        {"text": "x", "id": "a"},
        {"text": "x", "id": "a#2"},
        {"text": "x", "id": "a"},
        {"text": "x", "id": None},
    )
    ids = [document.id for document in read_documents(path, tokenizer)]
    assert ids == ["a", "t.jsonl:4", "a#2", "a#2#2", "a#3", "t.jsonl:8"]


def test_against_the_golden_protocol(tokenizer: Any, shared: Path) -> None:
    """The ids the golden logits were computed from."""
    golden = load_file(shared / "golden" / "tiny_v41_logits.safetensors")["code127.ids"].ravel()
    documents = {d.id: d for d in read_documents(shared / "eval" / "code.jsonl", tokenizer)}
    assert np.array_equal(documents["python3.13/zipapp.py"].ids[: golden.size], golden)


def test_real_conversations_are_read(tokenizer: Any, shared: Path) -> None:
    path = shared / "traffic" / "traffic_calib.jsonl"
    documents = read_documents(path, tokenizer)
    assert len(documents) == sum(1 for _ in path.open())
    assert all(document.ids[0] == 0 and document.task for document in documents)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "x"', r"not JSON .*t\.jsonl:2\]: .*column"),
        ("[1, 2]", r"t\.jsonl:2\]: expected .*messages.*found list"),
        ({"prompt": "x", "answer": "y"}, "found prompt, answer"),
        ({}, "found {}"),
        ({"text": "x", "messages": []}, "found text, messages"),
        ({"text": 3}, "expected text as a string, found 3"),
        ({"text": "x", "id": 7.5}, "expected id as a string, found 7.5"),
        (r'{"text": "cut \ud83d"}', "surrogates not allowed"),
        ({"text": ""}, "has no tokens"),
        ({"messages": []}, "messages as a list of at least one"),
        ({"messages": "hello"}, "messages as a list"),
        ({"messages": ["hello"]}, "a message with a role"),
        ({"messages": [{"content": "x"}]}, "a message with a role"),
        ({"messages": [{"role": "user", "content": 5}]}, "content as a string, null or a list"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content parts"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "ls"}]}]},
            "tool_calls with function.name",
        ),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [1]}, "tools as a list of objects"),
    ],
)
def test_bad_line_is_named(tokenizer: Any, tmp_path: Path, line: Any, message: str) -> None:
    path = write(tmp_path / "t.jsonl", {"text": "fine"}, line, {"text": "fine"})
    with pytest.raises(TraceError, match=message) as error:
        read_documents(path, tokenizer)
    assert "t.jsonl:2" in str(error.value)


def test_bytes_that_are_not_utf8(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"text": "x"}\n{"text": "\xff"}\n')
    with pytest.raises(TraceError, match=r"t\.jsonl:2.*utf-8"):
        read_documents(path, tokenizer)


@pytest.mark.parametrize("content", ["", "\n\n  \n"])
def test_empty_file(tokenizer: Any, tmp_path: Path, content: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(content)
    with pytest.raises(TraceError, match="empty"):
        read_documents(path, tokenizer)
    with pytest.raises(TraceError, match="no trace file"):
        read_documents(tmp_path / "absent.jsonl", tokenizer)


def test_ids_beyond_the_vocabulary(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", {"text": "hello world"})
    highest = int(read_documents(path, tokenizer)[0].ids.max())
    assert len(read_documents(path, tokenizer, vocabulary=highest + 1)) == 1
    with pytest.raises(TraceError, match=f"expected ids below {highest}, found {highest}"):
        read_documents(path, tokenizer, vocabulary=highest)


# --- tokenizers


@pytest.fixture
def model(tiny_v41: Path, tmp_path: Path) -> Path:
    """config.json and tokenizer of the example, to damage."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_v41 / name, tmp_path / name)
    return tmp_path


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_missing_and_damaged_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(TraceError, match=r"cannot be read .*tokenizer\.json"):
        load_tokenizer(model)
    (model / "tokenizer.json").unlink()
    with pytest.raises(TraceError, match=r"no tokenizer .*tokenizer\.json"):
        load_tokenizer(model)


def test_config_of_the_model_is_needed(model: Path) -> None:
    (model / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"missing .*config\.json"):
        load_tokenizer(model)


@pytest.mark.parametrize("vocabulary", [4095, 8192, 129280, None])
def test_tokenizer_of_another_vocabulary(model: Path, vocabulary: int | None) -> None:
    text = json.loads((model / "config.json").read_text())["text_config"]
    edit(model / "config.json", text_config=text | {"vocab_size": vocabulary})
    with pytest.raises(TraceError, match=rf"vocabulary of {vocabulary} in config\.json, found 0\.\.4095"):
        load_tokenizer(model)


def test_padded_vocabulary_is_accepted(model: Path) -> None:
    text = json.loads((model / "config.json").read_text())["text_config"]
    edit(model / "config.json", text_config=text | {"vocab_size": 4224})
    assert len(load_tokenizer(model)) == 4096


def test_other_bos(model: Path) -> None:
    edit(model / "config.json", bos_token_id=5)
    with pytest.raises(TraceError, match=r"expected the bos token 5 of config\.json, found 0"):
        load_tokenizer(model)


def test_no_chat_template(model: Path, tmp_path: Path) -> None:
    """Only conversations need one."""
    edit(model / "tokenizer_config.json", chat_template=None)
    tokenizer = load_tokenizer(model)
    assert len(read_documents(write(tmp_path / "t.jsonl", {"text": "x"}), tokenizer)) == 1
    with pytest.raises(TraceError, match=r"c\.jsonl:1\].*chat_template\.jinja"):
        read_documents(write(tmp_path / "c.jsonl", {"messages": CHAT}), tokenizer)


def test_template_that_refuses(model: Path, tmp_path: Path) -> None:
    edit(model / "tokenizer_config.json", chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TraceError, match=r"template refuses .*t\.jsonl:1\]: .*roles must alternate"):
        read_documents(write(tmp_path / "t.jsonl", {"messages": CHAT}), load_tokenizer(model))


# --- windows


def document(size: int, name: str = "d") -> Document:
    return Document(name, "s", "t", np.arange(size, dtype=np.int32))


def test_windows_from_the_start() -> None:
    cut = windows([document(10, "a"), document(4, "b"), document(1, "c")], 4, minimum=2)
    assert [(w.document, w.ids.tolist()) for w in cut] == [
        ("a", [0, 1, 2, 3]),
        ("a", [4, 5, 6, 7]),
        ("a", [8, 9]),
        ("b", [0, 1, 2, 3]),
    ]
    assert cut[0].source == "s"
    assert [w.ids.size for w in windows([document(10)], 4, per_document=2)] == [4, 4]
    assert [w.ids.size for w in windows([document(10)], 4, minimum=3)] == [4, 4]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 60), st.integers(1, 20), st.integers(1, 20), st.none() | st.integers(1, 5))
def test_windows_tile_the_document(size: int, length: int, minimum: int, most: int | None) -> None:
    if minimum > length:
        with pytest.raises(TraceError, match="cannot be cut"):
            windows([document(size)], length, most, minimum)
        return
    if size < minimum:
        with pytest.raises(TraceError, match=f"no window .*{minimum} tokens"):
            windows([document(size)], length, most, minimum)
        return
    cut = windows([document(size)], length, most, minimum)
    joined = np.concatenate([window.ids for window in cut])
    assert np.array_equal(joined, np.arange(joined.size))
    assert all(window.ids.size == length for window in cut[:-1])
    assert minimum <= cut[-1].ids.size <= length
    assert most is None or len(cut) <= most
    if most is None:
        assert size - joined.size < minimum


def test_trace_identity(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", {"text": "x"})
    first = trace_identity(path)
    assert first["bytes"] == path.stat().st_size
    assert trace_identity(write(tmp_path / "other.jsonl", {"text": "x"})) == first
    assert trace_identity(write(path, {"text": "y"})) != first

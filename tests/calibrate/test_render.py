"""Conversations in the model's own form: template or encoding code, spans, cuts."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefit.calibrate.conversation import BadRecord, Conversation, Message, ToolCall
from moefit.calibrate.importers.openai import conversations
from moefit.calibrate.render import Span, find_writer, plainer, render, shared_text
from moefit.calibrate.traces import load_tokenizer, read_documents
from moefit.errors import TraceError

from .importers.samples import CHAT, LS

CODE = '''
def encode_messages(messages, thinking_mode, context=None, drop_thinking=True, add_default_bos_token=True):
    """A stand-in for a release's own code: tools in the system message, arguments as JSON text."""
    import json

    if thinking_mode == "thinking" and messages[0]["content"] == "picky":
        raise ValueError("an answer without reasoning")
    text = f"<{thinking_mode},{drop_thinking}>"
    for message in messages:
        tools = "".join(tool["function"]["name"] for tool in message.get("tools", []))
        calls = "".join(str(json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", []))
        if message["role"] == "tool" and not message["content"]:
            raise ValueError("an empty result")
        text += f"[{message['role']}{tools}]{message.get('reasoning_content', '')}|{message['content']}{calls}"
    return text
'''


@pytest.fixture(scope="module")
def tokenizer(tiny_v41: Path) -> Any:
    return load_tokenizer(tiny_v41)


def errand(**more: Any) -> Conversation:
    (found,) = conversations({"messages": CHAT, "tools": [LS]}, "f:1", "f")
    return replace(found, **more)


def test_same_tokens_as_json_lines(tokenizer: Any, tiny_v41: Path, tmp_path: Path) -> None:
    """A conversation imported is the conversation that `build` reads from JSON lines."""
    flat = [{key: value for key, value in turn.items() if key != "reasoning_content"} for turn in CHAT]
    flat[1]["content"] = "What is here?"
    (tmp_path / "t.jsonl").write_text(json.dumps({"messages": flat, "tools": [LS]}) + "\n" + '{"text": "plain"}\n')
    write = find_writer(tiny_v41, tokenizer, False)
    conversation, text = read_documents(tmp_path / "t.jsonl", tokenizer)
    (found,) = conversations({"messages": flat, "tools": [LS]}, "f:1", "f")
    assert np.array_equal(render(found, tokenizer, write).ids, conversation.ids)
    plain = render(Conversation("f:1", "f", text="plain"), tokenizer, write)
    assert np.array_equal(plain.ids, text.ids)
    assert plain.roles() == [Span("text", 0, plain.ids.size)]


def test_spans(tokenizer: Any, tiny_v41: Path) -> None:
    made = render(errand(), tokenizer, find_writer(tiny_v41, tokenizer, False))
    spans = made.roles()
    said = [(span.role, tokenizer.decode(made.ids[span.start : span.stop]).strip()) for span in spans]
    assert [role for role, _ in said if role != "template"] == ["system", "user", "tool_call", "tool", "assistant"]
    for role, text in (
        ("system", "You list files."),
        ("user", "What is here?"),
        ("tool", "a.py"),
        ("assistant", "One file."),
    ):
        assert (role, text) in said
    call = dict(said)["tool_call"]
    assert '{"name": "ls", "arguments": {"path": "."}}' in call
    assert said[0][0] == "template"
    assert '"name": "ls"' in said[0][1]  # the tool definitions


texts = st.text(alphabet="ab \né<|>usertool", min_size=0, max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), texts), min_size=1, max_size=6))
def test_spans_cover_every_token(tokenizer: Any, tiny_v41: Path, turns: list[tuple[str, str]]) -> None:
    """Whatever is said, the template's own words among it."""
    conversation = Conversation("f:1", "f", tuple(Message(role, text) for role, text in turns))
    made = render(conversation, tokenizer, find_writer(tiny_v41, tokenizer, False))
    spans = made.roles()
    assert spans[0].start == 0
    assert spans[-1].stop == made.ids.size
    assert all(one.stop == two.start and one.role != two.role for one, two in itertools.pairwise(spans))
    assert all(span.start < span.stop for span in spans)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), texts), min_size=2, max_size=6), st.data())
def test_a_cut_loses_and_repeats_nothing(
    tokenizer: Any, tiny_v41: Path, turns: list[tuple[str, str]], data: st.DataObject
) -> None:
    """Tokens of the first messages alone, then what is left of the whole behind them."""
    write = find_writer(tiny_v41, tokenizer, False)
    whole = Conversation("f:1", "f", tuple(Message(role, text) for role, text in turns))
    known = data.draw(st.integers(1, len(turns) - 1))
    made = render(whole, tokenizer, write)
    begun = render(replace(whole, messages=whole.messages[:known]), tokenizer, write)
    rest = made.after(shared_text(whole, known, write, made.text))
    assert np.array_equal(np.concatenate([begun.ids, rest.ids]), made.ids)
    spans = rest.roles()
    assert (spans[0].start, spans[-1].stop) == (0, rest.ids.size)


class Bare:
    """A tokenizer without a chat template."""

    chat_template = None


def test_neither_template_nor_code(tmp_path: Path) -> None:
    write = find_writer(tmp_path, Bare(), run_encoding=True)
    with pytest.raises(TraceError, match=r"chat template or the release's encoding code, and the model has neither"):
        write(errand())


def test_code_of_the_checkpoint_is_not_run_unasked(tmp_path: Path) -> None:
    (tmp_path / "encoding").mkdir()
    (tmp_path / "encoding" / "encoding.py").write_text("raise SystemExit('was run')")
    write = find_writer(tmp_path, Bare(), run_encoding=False)
    with pytest.raises(TraceError, match=r"ships Python code .*encoding\.py.*--run-encoding"):
        write(errand())


def test_code_of_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "encoding").mkdir()
    (tmp_path / "encoding" / "encoding_dsv41.py").write_text(CODE)
    write = find_writer(tmp_path, Bare(), run_encoding=True)
    assert write(errand()) == (
        "<thinking,False>[systemls]|You list files.[user]|What is here?[assistant]I must look.|{'path': '.'}"
        "[tool]|a.py[assistant]|One file."
    )
    silent = errand(messages=(Message("user", "Hi"), Message("assistant", calls=(ToolCall("f", "raw"),))))
    assert write(silent) == "<chat,False>[systemls]|[user]|Hi[assistant]|{'input': 'raw'}"
    picky = errand(messages=(Message("user", "picky"), Message("assistant", "a", "hm")), tools=())
    assert write(picky).startswith("<chat,False>[user]|picky")
    with pytest.raises(BadRecord, match="encoding code refuses it .*an empty result"):
        write(errand(messages=(Message("assistant", calls=(ToolCall("f", {}),)), Message("tool", ""))))


@pytest.mark.parametrize("code", ["x = 1", "def encode_messages(:", "import absent_module"])
def test_broken_code_of_the_checkpoint(tmp_path: Path, code: str) -> None:
    (tmp_path / "encoding").mkdir()
    (tmp_path / "encoding" / "encoding.py").write_text(code)
    with pytest.raises(TraceError, match="expected a function encode_messages"):
        find_writer(tmp_path, Bare(), run_encoding=True)


def test_template_that_refuses(tokenizer: Any, tiny_v41: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BadRecord, match="template refuses it .*roles must alternate"):
        find_writer(tiny_v41, tokenizer, False)(errand())


def test_a_strict_template_gets_the_plainer_form(
    tokenizer: Any, tiny_v41: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two user turns in a row, a result without a call: as aider logs them."""
    strict = """{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('roles') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"""
    monkeypatch.setattr(tokenizer, "chat_template", strict)
    roles = ("user", "tool", "user", "assistant", "tool")
    conversation = errand(messages=tuple(Message(role, f"{role} {n}") for n, role in enumerate(roles)))
    made = render(conversation, tokenizer, find_writer(tiny_v41, tokenizer, False))
    assert made.text == "<user>user 0\ntool 1\nuser 2<assistant>assistant 3<user>tool 4"
    assert [role for _, role in made.marks if role != "template"] == list(roles)
    with pytest.raises(BadRecord, match="roles"):
        find_writer(tiny_v41, tokenizer, False)(errand(messages=(Message("assistant", "first"),)))


def test_plainer_keeps_what_answers_a_call() -> None:
    whole = errand()
    assert plainer(whole) == whole


def test_the_common_part_is_written_as_the_whole_is(tmp_path: Path) -> None:
    """DeepSeek's code begins a conversation differently if there is reasoning in it, be it later on."""
    (tmp_path / "encoding").mkdir()
    (tmp_path / "encoding" / "encoding.py").write_text(CODE)
    write = find_writer(tmp_path, Bare(), run_encoding=True)
    text = write(errand())
    assert text[: shared_text(errand(), 2, write, text)].endswith("What is here?")

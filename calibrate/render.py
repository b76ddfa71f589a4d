"""Conversations to tokens in the model's own form, with the role of every token."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import TraceError
from .conversation import BadRecord, Conversation, Message, ToolCall


class Writer(Protocol):
    """A conversation as text. whole: what it is the beginning of, where it is one: both are written in one mode."""

    def __call__(self, conversation: Conversation, whole: Conversation | None = None) -> str: ...


LITERAL = 4096
"""Characters of the template's own between two messages, at most: where the next one's text is looked for."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens start..stop (exclusive) of a document. role: system, user, assistant, reasoning, tool_call, tool, text, or
    template (what the chat template itself writes: markers, tool definitions)."""

    role: str
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Rendered:
    """ids: int32 [T]; starts: int64 [T], the character of `text` where each token begins; marks: where roles begin."""

    text: str
    ids: np.ndarray
    starts: np.ndarray
    marks: list[tuple[int, str]]

    def roles(self) -> list[Span]:
        """The spans, in order, from token 0 to T."""
        names, cuts = [role for _, role in self.marks], [start for start, _ in self.marks]
        index = np.searchsorted(cuts, self.starts, side="right") - 1  # [T]
        edges = [0, *(np.flatnonzero(np.diff(index)) + 1).tolist(), len(index)]
        spans: list[Span] = []
        for start, stop in itertools.pairwise(edges):
            role = names[index[start]]
            if spans and spans[-1].role == role:
                spans[-1] = Span(role, spans[-1].start, stop)
            else:
                spans.append(Span(role, start, stop))
        return spans

    def after(self, character: int) -> Rendered:
        """Only the tokens that reach beyond a character."""
        ends = np.append(self.starts[1:], len(self.text))
        first = int(np.searchsorted(ends, character, side="right"))
        return replace(self, ids=self.ids[first:], starts=self.starts[first:])


def find_writer(model: Path, tokenizer: Any, run_encoding: bool) -> Writer:
    """How this model writes conversations: its chat template, or the Python code that its release ships instead.

    run_encoding: the user allows to run that code (`encoding/encoding*.py` of the checkpoint, in this process).
    The writer raises TraceError where there is no way, BadRecord where template or code refuse a conversation.
    """
    if tokenizer.chat_template:
        return _lenient(lambda conversation, _: _by_template(tokenizer, conversation))
    code = sorted((model / "encoding").glob("encoding*.py"))
    if code and run_encoding:
        encode = _load(code[0])
        return _lenient(lambda conversation, whole: _by_code(encode, conversation, whole))
    if code:
        problem = TraceError(
            "the model has no chat template but ships Python code that writes conversations",
            where=str(code[0]),
            mend="read that file, and if you trust it give --run-encoding: it runs with all your rights",
        )
    else:
        problem = TraceError(
            "conversations need a chat template or the release's encoding code, and the model has neither",
            where=str(model),
            mend="put chat_template.jinja beside tokenizer.json, or import plain text only",
        )

    def refuse(conversation: Conversation, whole: Conversation | None = None) -> str:
        raise problem

    return refuse


def _lenient(write: Callable[[Conversation, Conversation], str]) -> Writer:
    """What is refused as it was logged is tried in a plainer form."""

    def lenient(conversation: Conversation, whole: Conversation | None = None) -> str:
        try:
            return write(conversation, whole or conversation)
        except BadRecord:
            plain = plainer(conversation)
            if plain == conversation:
                raise
            return write(plain, whole or conversation)

    return lenient


def plainer(conversation: Conversation) -> Conversation:
    """For strict templates: results that answer no call are a user's, and a user's words in a row one."""
    messages: list[Message] = []
    called = False
    for message in conversation.messages:
        if message.role == "assistant":
            called = bool(message.calls)
        elif message.role != "tool":
            called = False
        elif not called:
            message = Message("user", message.text)
        if messages and messages[-1].role == message.role == "user":
            message = Message("user", f"{messages.pop().text}\n{message.text}")
        messages.append(message)
    return replace(conversation, messages=tuple(messages))


def render(conversation: Conversation, tokenizer: Any, write: Writer) -> Rendered:
    """Text, tokens and roles. A plain text becomes [bos] + encode(text); special tokens are written by the template."""
    text = write(conversation) if conversation.messages else conversation.text
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = np.array(encoded["input_ids"], np.int32)  # [T]
    starts = np.array([start for start, _ in encoded["offset_mapping"]], np.int64)  # [T]
    if conversation.messages:
        return Rendered(text, ids, starts, role_marks(text, conversation))
    if ids.size and tokenizer.bos_token_id is not None:
        ids, starts = np.append(np.int32(tokenizer.bos_token_id), ids), np.append(0, starts)
    return Rendered(text, ids, starts, [(0, "text")])


def role_marks(text: str, conversation: Conversation) -> list[tuple[int, str]]:
    """Where each role begins in a rendered conversation: [(character, role), ...], the first at 0.

    A message is where its own text is found next; what lies between two messages is the template's, and behind an
    assistant's message with calls those calls. A message that the template left out or rewrote gets no span.
    """
    marks = [(0, "template")]
    position, reach = 0, len(text)
    for message in conversation.messages:
        for piece, role in ((message.reasoning.strip(), "reasoning"), (message.text.strip(), message.role)):
            if not piece:
                continue
            start = text.find(piece, position, position + reach + len(piece))
            if start < 0:
                reach += LITERAL + len(piece)
                continue
            position, reach = start + len(piece), LITERAL
            marks += [(start, role), (position, "template")]
        if message.calls:
            marks.append((position, "tool_call"))
            reach += 2 * sum(len(str(call.arguments)) + len(call.name) + 200 for call in message.calls)
    return marks


def shared_text(conversation: Conversation, known: int, write: Writer, text: str) -> int:
    """Characters at the start of `text`, this conversation rendered, that its first `known` messages account for."""
    begun = write(replace(conversation, messages=conversation.messages[:known]), conversation)
    low, high = 0, min(len(begun), len(text))
    while low < high:  # the longest common prefix; for most templates all of `begun`
        middle = (low + high + 1) // 2
        low, high = (middle, high) if text[:middle] == begun[:middle] else (low, middle - 1)
    return low


def messages_for(conversation: Conversation, arguments: Callable[[ToolCall], Any]) -> list[dict[str, Any]]:
    """The messages as chat templates take them: OpenAI's form, reasoning as `reasoning_content`."""
    turns: list[dict[str, Any]] = []
    for message in conversation.messages:
        turn: dict[str, Any] = {"role": message.role, "content": message.text}
        if message.reasoning:
            turn["reasoning_content"] = message.reasoning
        if message.calls:
            turn["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments(call)}}
                for call in message.calls
            ]
        if message.call_id:
            turn["tool_call_id"] = message.call_id
        if message.name:
            turn["name"] = message.name
        turns.append(turn)
    return turns


def _by_template(tokenizer: Any, conversation: Conversation) -> str:
    turns, tools = messages_for(conversation, lambda call: call.arguments), list(conversation.tools) or None
    try:
        return str(tokenizer.apply_chat_template(turns, tools=tools, tokenize=False))
    except Exception as error:  # a template may raise anything: its own errors, TypeError, UndefinedError
        raise BadRecord(f"the chat template refuses it ({type(error).__name__}: {error})") from None


def _load(path: Path) -> Callable[..., Any]:
    """`encode_messages` of the checkpoint's own module."""
    spec = importlib.util.spec_from_file_location("moefit_model_encoding", path)
    try:
        if spec is None or spec.loader is None:
            raise ImportError("it is no Python file")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        encode: Callable[..., Any] = module.encode_messages
    except Exception as error:  # whatever that code does
        raise TraceError(
            "the checkpoint's encoding code cannot be used",
            where=str(path),
            found=f"expected a function encode_messages, found {type(error).__name__}: {error}",
            mend="download it again, or put chat_template.jinja beside tokenizer.json",
        ) from None
    return encode


def _by_code(encode: Callable[..., Any], conversation: Conversation, whole: Conversation) -> str:
    """DeepSeek's convention: tools stand in the system message, arguments are JSON text, all reasoning is kept.

    V3.2's code wants reasoning in every answer to the last question or in none: where it refuses, none is rendered.
    """
    turns = messages_for(conversation, _json_arguments)
    if conversation.tools:
        if turns[0]["role"] != "system":
            turns.insert(0, {"role": "system", "content": ""})
        turns[0]["tools"] = list(conversation.tools)
    thinking = any(message.reasoning for message in whole.messages)
    taken = inspect.signature(encode).parameters
    for mode in ("thinking", "chat") if thinking else ("chat",):
        wanted = {"thinking_mode": mode, "drop_thinking": False}
        try:
            written = encode(copy.deepcopy(turns), **{key: value for key, value in wanted.items() if key in taken})
            break
        except Exception as error:  # whatever that code raises
            problem = f"the checkpoint's encoding code refuses it ({type(error).__name__}: {error})"
    else:
        raise BadRecord(problem)
    text = written[0] if isinstance(written, tuple) else written
    if not isinstance(text, str):
        raise BadRecord(f"the checkpoint's encoding code gave {type(text).__name__}, not text")
    return text


def _json_arguments(call: ToolCall) -> str:
    arguments = call.arguments if isinstance(call.arguments, dict) else {"input": call.arguments}
    return json.dumps(arguments, ensure_ascii=False)

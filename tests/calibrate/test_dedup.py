"""Each token once: prefixes of conversations, in any order of the log."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from moefit.calibrate.conversation import Conversation, Message, ToolCall, chain
from moefit.calibrate.dedup import Prefixes, shared_part

words = st.sampled_from(["a", "b", "c"])
turns = st.lists(st.builds(Message, st.sampled_from(["user", "assistant", "tool"]), words), min_size=1, max_size=7)
logs = st.lists(turns, min_size=1, max_size=8)


def talk(messages: list[Message], conversation: str = "") -> Conversation:
    return Conversation("f:1", "f", tuple(messages), conversation=conversation)


def every_request(talks: list[list[Message]]) -> list[Conversation]:
    """What an agent's log holds: the history again with every message."""
    return [talk(messages[:n]) for messages in talks for n in range(1, len(messages) + 1)]


def counted(log: list[Conversation]) -> list[bytes]:
    """Keys of the messages that end up in documents, with repetition."""
    prefixes = Prefixes()
    for conversation in log:
        prefixes.note(conversation, chain(conversation))
    found = []
    for conversation in log:
        keys = chain(conversation)
        known = prefixes.known(keys)
        if known is not None:
            found += keys[known:]
            prefixes.place(keys)
    return found


@settings(max_examples=200, deadline=None)
@given(logs, st.integers(0, 1000))
def test_every_message_is_counted_exactly_once(talks: list[list[Message]], seed: int) -> None:
    log = every_request(talks)
    distinct = {tuple(c.messages) for c in log}
    first = counted(log)
    assert len(first) == len(set(first)) == len(distinct)
    random.Random(seed).shuffle(log)
    assert sorted(counted(log)) == sorted(first)


@settings(max_examples=100, deadline=None)
@given(turns)
def test_of_one_history_only_the_longest_record_becomes_a_document(messages: list[Message]) -> None:
    prefixes = Prefixes()
    log = every_request([messages])
    for conversation in log:
        prefixes.note(conversation, chain(conversation))
    assert [prefixes.known(chain(c)) for c in log] == [None] * (len(log) - 1) + [0]


@settings(max_examples=200, deadline=None)
@given(turns, turns)
def test_keys_agree_as_far_as_the_messages_do(one: list[Message], two: list[Message]) -> None:
    agreeing = [a == b for a, b in zip(chain(talk(one)), chain(talk(two)), strict=False)]
    assert agreeing == [one[:n] == two[:n] for n in range(1, len(agreeing) + 1)]


def test_what_keys_ignore() -> None:
    call = ToolCall("f", {"a": 1, "b": 2}, "id1")
    message = Message("assistant", "Yes.", "hm", (call,))
    other = Message("assistant", " Yes.\n", "", (ToolCall("f", {"b": 2, "a": 1}, "id2"),))
    assert chain(talk([message])) == chain(talk([other]))
    for changed in (
        replace(message, role="user"),
        replace(message, text="No."),
        replace(message, calls=(replace(call, arguments={"a": 1}),)),
        replace(message, calls=()),
    ):
        assert chain(talk([message])) != chain(talk([changed]))
    assert chain(talk([message], "x")) != chain(talk([message], "y"))


def test_reasoning_comes_back_whatever_the_order() -> None:
    """Clients send their history back without it."""
    asked, bare = Message("user", "q"), Message("assistant", "a")
    thought = [replace(bare, reasoning=text) for text in ("short", "longer", "longes")]
    later = talk([asked, bare, Message("user", "more")])
    for order in (thought, thought[::-1]):
        prefixes = Prefixes()
        for conversation in (*(talk([asked, m]) for m in order), later):
            prefixes.note(conversation, chain(conversation))
        full = prefixes.with_reasoning(later, chain(later))
        assert [m.reasoning for m in full.messages] == ["", "longer", ""]


def test_a_system_prompt_alone_is_not_left_out() -> None:
    roles = ["system", "user", "assistant"]
    messages = [Message(role, role) for role in roles]
    assert [shared_part(talk(messages), known) for known in range(4)] == [0, 0, 2, 3]
    example = Conversation("f:1", "f", tuple(messages + messages[1:]), examples=2)
    assert [shared_part(example, known) for known in range(6)] == [0, 0, 0, 0, 4, 5]
    assert shared_part(Conversation("f:1", "f", text="x"), 1) == 0

"""Parts by hash: stable, near the shares, and never a conversation or task in two."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefit.calibrate.conversation import Conversation, Message
from moefit.calibrate.splits import DEFAULT_SHARES, PARTS, Groups, parse_shares, part_of
from moefit.errors import TraceError

name = st.sampled_from(["", "a", "b", "c", "d", "e"])
records = st.lists(
    st.builds(
        lambda conversation, task, question: Conversation(
            "f:1", "f", (Message("user", question),), conversation=conversation, task=task
        ),
        name,
        name,
        st.sampled_from(["q1", "q2", "q3"]),
    ),
    min_size=1,
    max_size=12,
)


def parts(log: list[Conversation], shares: tuple[float, float, float] = (0.4, 0.3, 0.3)) -> dict[Conversation, str]:
    groups = Groups()
    for conversation in log:
        groups.add(conversation)
    return {conversation: groups.part(conversation, shares) for conversation in log}


@settings(max_examples=200, deadline=None)
@given(records, st.integers(0, 1000))
def test_no_conversation_and_no_task_in_two_parts(log: list[Conversation], seed: int) -> None:
    found = parts(log)
    for one in log:
        for other in log:
            tied = one.conversation == other.conversation != "" or one.task == other.task != ""
            tied |= not (one.conversation or other.conversation) and one.messages == other.messages
            assert not tied or found[one] == found[other]
    shuffled = log.copy()
    random.Random(seed).shuffle(shuffled)
    assert parts(shuffled) == found


def test_ties_go_through_others() -> None:
    """a and c share nothing, but b shares the task of one and the conversation of the other."""
    log = [
        Conversation("f:1", "f", (Message("user", "1"),), conversation="a", task="t"),
        Conversation("f:2", "f", (Message("user", "2"),), conversation="b", task="t"),
        Conversation("f:3", "f", (Message("user", "3"),), conversation="b"),
    ]
    for _ in range(3):
        log = log[1:] + log[:1]
        assert len(set(parts(log).values())) == 1


def test_other_traffic_moves_nothing() -> None:
    log = [Conversation("f:1", "f", (Message("user", str(n)),)) for n in range(200)]
    before = parts(log[:100])
    after = parts(log)
    assert all(after[conversation] == part for conversation, part in before.items())


def test_shares_are_met() -> None:
    """Also where a group has many names, of which the smallest hash is its label."""
    log = [Conversation("f", "f", text=f"{n}", task=str(n // 4)) for n in range(16_000)]
    found = list(parts(log, DEFAULT_SHARES).values())[::4]
    for part, share in zip(PARTS, DEFAULT_SHARES, strict=True):
        assert abs(found.count(part) / 4000 - share) < 0.03


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=16, max_size=16), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_only_adds(label: bytes, one: float, two: float) -> None:
    low, high = sorted((one, two))
    if part_of(label, (low, 1 - low, 0)) == "calibrate":
        assert part_of(label, (high, 1 - high, 0)) == "calibrate"
    assert part_of(label, (1, 0, 0)) == "calibrate"
    assert part_of(label, (0, 0, 1)) == "held-out"
    assert part_of(label, (low, 1 - low, 0)) != "held-out"


def test_an_example_before_the_question_ties_nothing() -> None:
    example = Message("user", "the example")
    log = [Conversation("f", "f", (example, Message("user", str(n))), examples=1) for n in range(50)]
    assert len(set(parts(log).values())) == 3


def test_parse_shares() -> None:
    assert parse_shares("0.7,0.2,0.1") == (0.7, 0.2, 0.1)
    assert parse_shares("1,0,0") == (1, 0, 0)
    for text in ("", "1", "0.5,0.5", "0.5,0.5,0.5", "-1,1,1", "a,b,c", "nan,0,1", "1,0,0,0"):
        with pytest.raises(TraceError, match="three numbers that add up to 1"):
            parse_shares(text)

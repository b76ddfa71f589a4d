"""Secrets: what goes, what stays, and that a second time changes nothing."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefit.calibrate.conversation import Conversation, Message, ToolCall
from moefit.calibrate.redact import redact, redact_conversation

KEYS = [
    "sk-" + "a1B2" * 10,
    "sk-proj-" + "a1_2" * 10,
    "sk-ant-api03-" + "a1-2" * 10,
    "ghp_" + "a1B2" * 9,
    "github_pat_" + "a1B2" * 6,
    "glpat-" + "a1B2" * 5,
    "AKIA" + "A1B2" * 4,
    "AIza" + "a1B2c" * 7,
    "hf_" + "aBcD" * 8 + "ab",
    "xoxb-" + "1234-" * 4,
    "npm_" + "a1B2" * 9,
    "sk_live_" + "a1B2" * 5,
    "eyJ" + "a1B2" * 4 + "." + "a1B2" * 4 + "." + "a1B2" * 4,
    "-----BEGIN RSA PRIVATE KEY-----\nMII\nabc\n-----END RSA PRIVATE KEY-----",
]
"""Made up; none was ever anyone's."""


@pytest.mark.parametrize("key", KEYS)
def test_keys(key: str) -> None:
    for text in (f"key={key}", f'"{key}"', f"({key}) and", key):
        counts: Counter[str] = Counter()
        assert redact(text, counts) == text.replace(key, "[key]")
        assert counts == {"keys": 1}


def test_bearer() -> None:
    counts: Counter[str] = Counter()
    assert redact("Authorization: Bearer abcdefghij0123456789==, next", counts) == "Authorization: Bearer [key], next"
    assert counts["keys"] == 1


@pytest.mark.parametrize(
    ("text", "clean", "kind"),
    [
        ("mail jane.doe+x@mail.corp-site.co.uk.", "mail someone@example.com.", "emails"),
        ("<a@b.io>, <c@b.io>", "<someone@example.com>, <someone@example.com>", "emails"),
        ("cd /home/jane/src", "cd /home/user/src", "homes"),
        ("/Users/jean-luc.p/x", "/Users/user/x", "homes"),
        (r"C:\Users\Jane\x C:\\Users\\Jane\\x", r"C:\Users\user\x C:\\Users\\user\\x", "homes"),
        ("projects/-Users-jane-src", "projects/-Users-user-src", "homes"),
        ("file:/home/jane", "file:/home/user", "homes"),
    ],
)
def test_addresses_and_homes(text: str, clean: str, kind: str) -> None:
    counts: Counter[str] = Counter()
    assert redact(text, counts) == clean
    assert counts.keys() == {kind}


@pytest.mark.parametrize(
    "text",
    [
        "git@github.com:owner/name.git",
        "someone@example.com and someone.else@example.org",
        "@decorator a@b matrix@vector",
        "https://example.com/home/page and x/home/y",
        "/home/user/x /Users/Shared/y /home/runner/z",
        "the sk-learn task-list, hf_hub_download, ghp_short, AKIA and bearer of news",
        "git sha 0123456789abcdef0123456789abcdef01234567",
        "plain words",
    ],
)
def test_what_stays(text: str) -> None:
    counts: Counter[str] = Counter()
    assert redact(text, counts) == text
    assert not counts


pieces = st.sampled_from(
    [*KEYS, "/home/", "/Users/", "jane", "a.b@c.de", "-home-x_y-", "\\", "/", " ", "\n", "Bearer ", "-", "é"]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(pieces | st.text(max_size=6), max_size=8).map("".join))
def test_twice_is_once(text: str) -> None:
    once = redact(text, Counter())
    counts: Counter[str] = Counter()
    assert redact(once, counts) == once
    assert not counts


@pytest.mark.parametrize("tail", [".", "-", ". And", "-.", ".-x", "/x.", "\\"])
@pytest.mark.parametrize("start", ["/home/", "/Users/", "-home-", "C:\\Users\\"])
def test_names_that_punctuation_follows_are_replaced_once(start: str, tail: str) -> None:
    for name in ("jane", "user"):
        counts: Counter[str] = Counter()
        once = redact(start + name + tail, counts)
        assert once.startswith(start + "user") and "jane" not in once
        assert counts["homes"] <= 1 and redact(once, Counter()) == once


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(KEYS), st.text(alphabet="xyz 1.,\n", max_size=10), st.text(alphabet="xyz .,\n", max_size=10))
def test_no_key_survives_between_words(key: str, before: str, after: str) -> None:
    assert key not in redact(f"{before} {key} {after}", Counter())


def test_every_place_of_a_conversation() -> None:
    key, counts = KEYS[0], Counter[str]()
    call = ToolCall("f", {key: [f"{key}!"], "n": 1}, "c")
    dirty = Conversation(
        "f:1",
        "f",
        (Message("assistant", key, f"so {key}", (call, ToolCall("g", f"text {key}"))),),
        tools=({"function": {"description": key}},),
        conversation="/Users/jane/x",
    )
    clean = redact_conversation(dirty, counts)
    assert key not in repr(clean)
    assert counts == {"keys": 6}
    assert clean.messages[0].calls[0].arguments == {"[key]": ["[key]!"], "n": 1}
    assert clean.conversation == "/Users/user/x"

"""The stated rule for languages."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefit.calibrate.languages import languages, script


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Hello there", "latin"),
        ("größer", "latin"),
        ("Привет, world", "cyrillic"),
        ("你好，世界", "han"),
        ("これは漢字です", "kana"),
        ("안녕하세요", "hangul"),
        ("γειά", "greek"),
        ("مرحبا", "arabic"),
        ("שלום", "hebrew"),
        ("नमस्ते", "devanagari"),
        ("สวัสดี", "thai"),
        ("12 + 3 = ☃", "none"),
        ("", "none"),
    ],
)
def test_script(text: str, name: str) -> None:
    assert script(text) == name


def test_fences_and_paragraphs() -> None:
    text = "Look:\n\n```py\nx = 1\n```\nПривет\n\nfine\n```\n1\n```\n"
    marks = languages(text)
    assert [name for _, name in marks] == ["latin", "code:python", "cyrillic", "latin", "code", "none"]
    starts = {name: start for start, name in marks}
    assert text[starts["code:python"] :].startswith("```py")
    assert text[starts["cyrillic"] :].strip().startswith("Привет")


def test_a_fence_without_end_goes_to_the_end() -> None:
    assert [name for _, name in languages("```sh\nls\n\nmore words")] == ["code:bash"]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["```", "```py", "~~~", "\n", "\n\n", "a", "я", "1", " "]), max_size=20).map("".join))
def test_marks_are_in_order_from_the_start(text: str) -> None:
    marks = languages(text)
    starts = [start for start, _ in marks]
    assert starts == sorted(set(starts))
    assert starts[:1] == ([0] if text else [])
    assert all(one != two for (_, one), (_, two) in itertools.pairwise(marks))

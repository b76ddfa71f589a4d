"""In which language a stretch of text is, by a rule simple enough to state.

Text in a code fence: `code:TAG` with the fence's own tag, `code` without one. Other text, paragraph by paragraph: the
script of most of its letters, `none` where it has no letter. Code outside of fences counts as the script it is in.
"""

from __future__ import annotations

import itertools
import re

FENCE = re.compile(
    r"^[ \t]*(?P<mark>```+|~~~+)[ \t]*(?P<tag>[\w+#.-]*)[^\n]*\n(?P<code>.*?)(?:^[ \t]*(?P=mark)|\Z)", re.M | re.S
)
PARAGRAPH = re.compile(r"\n[ \t]*\n")
SCRIPTS = {
    "latin": re.compile(r"[A-Za-z\u00aa-\u024f]"),
    "greek": re.compile(r"[\u0370-\u03ff]"),
    "cyrillic": re.compile(r"[\u0400-\u052f]"),
    "hebrew": re.compile(r"[\u0590-\u05ff]"),
    "arabic": re.compile(r"[\u0600-\u06ff\u0750-\u077f]"),
    "devanagari": re.compile(r"[\u0900-\u097f]"),
    "thai": re.compile(r"[\u0e00-\u0e7f]"),
    "hangul": re.compile(r"[\u1100-\u11ff\uac00-\ud7af]"),
    "kana": re.compile(r"[\u3040-\u30ff]"),
    "han": re.compile(r"[\u3400-\u9fff\uf900-\ufaff]"),
}
LETTER = re.compile(r"[A-Za-z]")
TAGS = {"py": "python", "js": "javascript", "ts": "typescript", "sh": "bash", "shell": "bash", "yml": "yaml"}
"""Fence tags that mean the same."""


def languages(text: str) -> list[tuple[int, str]]:
    """Where each language begins, in order: [(character, language), ...], the first at 0; [] for an empty text."""
    marks: list[tuple[int, str]] = []

    def mark(start: int, language: str) -> None:
        if not marks or marks[-1][1] != language:
            marks.append((start, language))

    position = 0
    for fence in [*FENCE.finditer(text), None]:
        stop = fence.start() if fence else len(text)
        for start, paragraph in _paragraphs(text, position, stop):
            mark(start, script(paragraph))
        if fence:
            tag = fence["tag"].lower()
            mark(fence.start(), f"code:{TAGS.get(tag, tag)}" if tag else "code")
            position = fence.end()
    return marks


def _paragraphs(text: str, start: int, stop: int) -> list[tuple[int, str]]:
    cuts = [start, *(found.end() for found in PARAGRAPH.finditer(text, start, stop)), stop]
    return [(low, text[low:high]) for low, high in itertools.pairwise(cuts) if high > low]


def script(text: str) -> str:
    """The script of most letters; kana makes a text Japanese, whatever its Chinese characters."""
    if text.isascii():
        return "latin" if LETTER.search(text) else "none"
    counts = {name: sum(1 for _ in pattern.finditer(text)) for name, pattern in SCRIPTS.items()}
    if counts["kana"] and counts["kana"] * 4 > counts["han"]:
        counts["kana"] += counts["han"]
    best = max(counts, key=lambda name: counts[name])
    return best if counts[best] else "none"

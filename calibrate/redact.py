"""Secrets out of traffic: API keys of common shapes, e-mail addresses, names in home directories.

By pattern, so neither complete nor without false hits. What replaces a secret is none itself: twice is once.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

from .conversation import Conversation

KEY = re.compile(
    r"-----BEGIN (?P<pem>[A-Z ]*PRIVATE KEY)-----.*?-----END (?P=pem)-----"
    r"|(?<![A-Za-z0-9])(?:"
    r"sk-[A-Za-z0-9_-]{20,}"  # OpenAI, Anthropic, DeepSeek and those that followed
    r"|(?:gh[opusr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{22,}|glpat-[A-Za-z0-9_-]{20,})"
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}(?![0-9A-Za-z])|AIza[A-Za-z0-9_-]{35}"
    r"|hf_[A-Za-z0-9]{30,}|xox[abeprs]-[A-Za-z0-9-]{10,}|npm_[A-Za-z0-9]{36}|pypi-[A-Za-z0-9_-]{50,}"
    r"|(?:sk|rk|pk)_(?:live|test)_[A-Za-z0-9]{16,}"
    r"|eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}"  # JSON web token
    r")"
    r"|(?i:(?<=bearer ))[A-Za-z0-9._~+/-]{20,}=*",
    re.S,
)
EMAIL = re.compile(r"(?<![A-Za-z0-9._%+-])(?!git@)[A-Za-z0-9._%+-]+@(?:[A-Za-z0-9-]+\.)+[A-Za-z]{2,24}(?![A-Za-z0-9])")
KEPT = ("user", "Shared", "Public", "runner")  # not a person's name
HOME = re.compile(
    r"(?P<before>(?<![\w.])/(?:home|Users)/|\b[A-Za-z]:(?:\\{1,2}|/)Users(?:\\{1,2}|/))(?P<name>\w(?:[\w.-]*\w)?)"
    # Claude Code's names of project folders: -Users-NAME-project
    r"|(?P<folder>(?<!\w)-(?:home|Users)-)(?P<owner>\w(?:[\w.]*\w)?)"
)
NEW_KEY, NEW_EMAIL, NEW_HOME = "[key]", "someone@example.com", "user"


def redact(text: str, counts: Counter[str]) -> str:
    """The text without its secrets; counts gains how many "keys", "emails" and "homes" were replaced."""
    found = True
    while found:  # again after a replacement: what stood behind a secret may be one too
        text, keys = KEY.subn(NEW_KEY, text)
        text, emails = _emails(text) if "@" in text else (text, 0)
        text, homes = _homes(text) if "home" in text or "Users" in text else (text, 0)
        counts.update({k: n for k, n in (("keys", keys), ("emails", emails), ("homes", homes)) if n})
        found = bool(keys or emails or homes)
    return text


def _emails(text: str) -> tuple[str, int]:
    count = 0

    def replaced(match: re.Match[str]) -> str:
        nonlocal count
        if match[0].partition("@")[2].lower() in ("example.com", "example.org", "example.net"):
            return match[0]
        count += 1
        return NEW_EMAIL

    return EMAIL.sub(replaced, text), count


def _homes(text: str) -> tuple[str, int]:
    count = 0

    def replaced(match: re.Match[str]) -> str:
        nonlocal count
        if (match["name"] or match["owner"]) in KEPT:
            return match[0]
        count += 1
        return (match["before"] or match["folder"]) + NEW_HOME

    return HOME.sub(replaced, text), count


def redact_value(value: Any, counts: Counter[str]) -> Any:
    """Every string of a JSON value, keys too."""
    if isinstance(value, str):
        return redact(value, counts)
    if isinstance(value, dict):
        return {redact(str(key), counts): redact_value(item, counts) for key, item in value.items()}
    return [redact_value(item, counts) for item in value] if isinstance(value, list) else value


def redact_conversation(conversation: Conversation, counts: Counter[str]) -> Conversation:
    """Texts, reasoning, calls, tool definitions and names."""
    messages = tuple(
        replace(
            message,
            text=redact(message.text, counts),
            reasoning=redact(message.reasoning, counts),
            calls=tuple(replace(call, arguments=redact_value(call.arguments, counts)) for call in message.calls),
        )
        for message in conversation.messages
    )
    quiet: Counter[str] = Counter()  # names are not traffic
    named: dict[str, Any] = {
        key: redact(getattr(conversation, key), quiet) for key in ("id", "conversation", "task", "source")
    }
    tools = tuple(redact_value(tool, counts) for tool in conversation.tools)
    return replace(conversation, messages=messages, text=redact(conversation.text, counts), tools=tools, **named)

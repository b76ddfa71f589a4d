"""Count each token of a log once: an agent sends its whole history again with every request.

First pass: `note` every conversation. Second pass: of every conversation, `known` says whether another one holds all of
it, else how many of its first messages stand in a document already; `place` it once it has become a document.
Memory: a 16-byte key per different prefix; the reasoning lies in a temporary file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace

from .conversation import Conversation


class Prefixes:
    """The prefixes of all conversations of an import, as keys (`conversation.chain`)."""

    def __init__(self) -> None:
        self._continued: set[bytes] = set()  # prefixes that some conversation goes on from
        self._placed: set[bytes] = set()  # prefixes that stand in a document already
        self._reasoning: dict[bytes, tuple[int, int]] = {}  # where the longest of a message's reasoning is stored
        self._store = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the object)

    def note(self, conversation: Conversation, keys: Sequence[bytes]) -> None:
        """First pass. keys: `chain(conversation)`."""
        self._continued.update(keys[:-1])
        for message, key in zip(conversation.messages, keys, strict=False):
            if message.reasoning:
                self._keep(key, message.reasoning)

    def known(self, keys: Sequence[bytes]) -> int | None:
        """Second pass. None: nothing new in it. n: the first n messages are counted in a document placed before."""
        if keys[-1] in self._continued or keys[-1] in self._placed:
            return None
        return next((n for n in range(len(keys), 0, -1) if keys[n - 1] in self._placed), 0)

    def place(self, keys: Sequence[bytes]) -> None:
        """The conversation of these keys has become a document."""
        self._placed.update(keys)

    def with_reasoning(self, conversation: Conversation, keys: Sequence[bytes]) -> Conversation:
        """The conversation with the reasoning that its own log holds of it but this record left out.

        Clients drop earlier reasoning when they send a history back; whether it is rendered is up to the template.
        """
        if not any(key in self._reasoning for key in keys):
            return conversation
        messages = tuple(
            replace(message, reasoning=self._kept(key)) if key in self._reasoning else message
            for message, key in zip(conversation.messages, keys, strict=True)
        )
        return replace(conversation, messages=messages)

    def _keep(self, key: bytes, text: str) -> None:
        """Of several the longest, of those of one length the first in order of text: no order of records matters."""
        content = text.encode()
        if key in self._reasoning:
            size = self._reasoning[key][1]
            if len(content) < size or (len(content) == size and text >= self._kept(key)):
                return
        self._reasoning[key] = (self._store.seek(0, 2), len(content))
        self._store.write(content)

    def _kept(self, key: bytes) -> str:
        start, size = self._reasoning[key]
        self._store.seek(start)
        return self._store.read(size).decode()


def shared_part(conversation: Conversation, known: int) -> int:
    """How many of `known` messages to leave out: all, or none where they are but system prompt and worked example.

    A conversation keeps its own system prompt: without it, its first turn would stand for nothing real.
    """
    asked = next((n for n, m in enumerate(conversation.messages, start=1) if m.role == "user"), 0)
    return known if asked and known >= asked + conversation.examples else 0

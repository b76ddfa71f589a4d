"""Which part a conversation belongs to: calibrate, plan or held-out, by a hash of its name and nothing else."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from ..errors import TraceError
from .conversation import Conversation

PARTS = ("calibrate", "plan", "held-out")
Shares = tuple[float, float, float]
DEFAULT_SHARES: Shares = (0.8, 0.1, 0.1)


def parse_shares(text: str) -> Shares:
    """ "0.8,0.1,0.1" -> shares of calibrate, plan and held-out; they must add up to 1."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if len(values) != len(PARTS) or not all(0 <= v <= 1 for v in values) or not math.isclose(sum(values), 1):
        raise TraceError(
            "the shares of the parts make no sense",
            found=f"expected three numbers that add up to 1 ({', '.join(PARTS)}), found {text!r}",
            mend="give for example 0.8,0.1,0.1",
        )
    return values[0], values[1], values[2]


class Groups:
    """Records that must not be parted: those that share a conversation, a task, or (without either) a question."""

    def __init__(self) -> None:
        self._parent: dict[bytes, bytes] = {}

    def add(self, conversation: Conversation) -> None:
        """First pass: tie the names of a conversation together."""
        first, *others = names(conversation)
        for other in others:
            self._tie(first, other)

    def label(self, conversation: Conversation) -> bytes:
        """Second pass: the smallest hash among all names of the group. No order of records matters."""
        return self._root(names(conversation)[0])

    def part(self, conversation: Conversation, shares: Shares) -> str:
        """calibrate, plan or held-out."""
        return part_of(self.label(conversation), shares)

    def _root(self, name: bytes) -> bytes:
        path = []
        while (parent := self._parent.get(name, name)) != name:
            path.append(name)
            name = parent
        for passed in path:
            self._parent[passed] = name
        return name

    def _tie(self, one: bytes, other: bytes) -> None:
        low, high = sorted((self._root(one), self._root(other)))
        if low != high:
            self._parent[high] = low


def names(conversation: Conversation) -> list[bytes]:
    """Hashes of what a conversation is known by, at least one.

    Its conversation, its task, its links; without a conversation's name its first question, without one its first text.
    """
    known = [f"link {link}" for link in conversation.links]
    if conversation.conversation:
        known.append(f"conversation {conversation.conversation}")
    if conversation.task:
        known.append(f"task {conversation.task}")
    if not conversation.conversation:
        said = [m.text for m in conversation.messages if m.role == "user" and m.text.strip()]
        first = said[conversation.examples : conversation.examples + 1] or [m.text for m in conversation.messages][:1]
        known.append("says " + " ".join((first[0] if first else conversation.text).split()))
    return [hashlib.sha256(name.encode()).digest()[:16] for name in known]


def tied(names: Sequence[tuple[str, str]]) -> list[int]:
    """Of each document of a trace set, the number of the first one that it must not be parted from, maybe itself.

    names: of its conversation and its task, "" where there is none: what an import holds together, links apart, which
    a trace set does not keep.
    """
    first = list(range(len(names)))

    def root(number: int) -> int:
        while first[number] != number:
            first[number] = number = first[first[number]]
        return number

    seen: dict[tuple[int, str], int] = {}
    for number, both in enumerate(names):
        for kind, name in enumerate(both):
            if name:
                low, high = sorted((root(seen.setdefault((kind, name), number)), root(number)))
                first[high] = low
    return [root(number) for number in range(len(names))]


def part_of(label: bytes, shares: Shares) -> str:
    """The part in whose stretch of [0, 1) the label's hash falls; a larger first share only adds to the first part.

    Hashed once more, because the smallest of several hashes is not evenly spread.
    """
    place = int.from_bytes(hashlib.sha256(label).digest()[:8], "big") / (1 << 64)
    if place < shares[0]:
        return PARTS[0]
    return PARTS[1] if place < shares[0] + shares[1] or not shares[2] else PARTS[2]

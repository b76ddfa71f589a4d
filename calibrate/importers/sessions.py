"""Session logs of coding agents, one event a line: Claude Code and Codex.

A session is held in memory until its file ends, or until the agent compacts its context and so begins a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..conversation import ODD, Bad, BadRecord, Conversation, Message, merge_assistant
from . import anthropic, responses
from .files import Input, records


def claude_code(file: Input, tell: Callable[[int], None] | None = None) -> Iterator[Conversation | Bad]:
    """`~/.claude/projects/*/*.jsonl`, in the order of the file; sub-agents (side chains) are conversations apart.

    Lines that only Claude Code itself reads (summaries, snapshots, progress, hooks) are left out. A turn that the user
    took back and said again stays in the log, so both are kept.
    """
    open_talks: dict[tuple[str, str], tuple[str, list[Message]]] = {}
    for where, event in records(file, tell):
        if isinstance(event, Bad):
            yield event
            continue
        try:
            if event.get("type") not in ("user", "assistant") or not isinstance(event.get("message"), dict):
                continue
            if event["message"].get("model") == "<synthetic>":  # Claude Code's own words, such as an API's error
                continue
            session = str(event.get("sessionId") or file.stem)
            agent = str(event.get("agentId") or "side chain") if event.get("isSidechain") else ""
            found = anthropic.messages({**event["message"], "role": event["type"]})
        except (BadRecord, *ODD) as error:
            yield Bad(where, str(error))
            continue
        key = (session, agent)
        if event.get("isCompactSummary") and key in open_talks:
            yield from _session(file, *key, *open_talks.pop(key))
        open_talks.setdefault(key, (where, []))[1].extend(found)
    for key, talk in open_talks.items():
        yield from _session(file, *key, *talk)


def codex(file: Input, tell: Callable[[int], None] | None = None) -> Iterator[Conversation | Bad]:
    """`~/.codex/sessions/**/rollout-*.jsonl`: the `response_item` lines, which are items of the Responses API.

    Older files have the items without an envelope. Events (`event_msg`) repeat the items for display and are left out.
    """
    session, start, items = "", "", list[Any]()
    for where, event in records(file, tell):
        if isinstance(event, Bad):
            yield event
            continue
        if not isinstance(event, dict):
            yield Bad(where, f"expected an event as an object, found {event!r:.60}")
            continue
        payload = event.get("payload")
        payload = payload if isinstance(payload, dict) else {}
        kind = event.get("type")
        if kind == "session_meta" or (kind is None and "id" in event and "timestamp" in event):
            session = str({**event, **payload}.get("id", ""))
            instructions = payload.get("base_instructions", {**event, **payload}.get("instructions"))
            text = instructions.get("text") if isinstance(instructions, dict) else instructions
            if isinstance(text, str) and text and not items:
                items.append({"role": "system", "content": text})
        elif kind == "compacted":
            yield from _codex_session(file, session, start, items)
            kept = payload.get("replacement_history")
            items = (
                list(kept) if isinstance(kept, list) else [{"role": "user", "content": payload.get("message") or ""}]
            )
            start = ""
        elif kind == "response_item":
            items.append(payload)
            start = start or where
        elif kind in responses.ITEMS:
            items.append(event)
            start = start or where
    yield from _codex_session(file, session, start, items)


def _codex_session(file: Input, session: str, start: str, items: list[Any]) -> Iterator[Conversation | Bad]:
    if not start:
        return
    try:
        yield from _session(file, session or file.stem, "", start, responses.messages(items))
    except (BadRecord, *ODD) as error:
        yield Bad(start, str(error))


def _session(file: Input, session: str, agent: str, where: str, messages: list[Message]) -> Iterator[Conversation]:
    if messages:
        name, links = f"{session} {agent}".rstrip(), (f"session {session}",)
        yield Conversation(where, file.name, merge_assistant(messages), conversation=name, links=links)

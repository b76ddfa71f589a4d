"""Trajectories that agents write: SWE-agent, mini-swe-agent, tau-bench."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..conversation import BadRecord, Conversation, Message
from .openai import message, tools


def swe_agent(record: Any, where: str, source: str, stem: str) -> Iterator[Conversation]:
    """SWE-agent's `.traj`: `history` is what the model saw; older files hold only `trajectory` steps.

    The task is the file's name, which is the instance's. Messages marked `is_demo` are a worked example.
    """
    if not isinstance(record, dict):
        raise BadRecord(f"expected an object, found {type(record).__name__}")
    history, steps = record.get("history"), record.get("trajectory")
    if isinstance(history, list) and history:
        found = tuple(message(turn) for turn in history)
        examples = sum(bool(turn.get("is_demo")) for turn in history)
    elif isinstance(steps, list) and steps:
        found, examples = tuple(_steps(steps)), 0
    else:
        raise BadRecord("expected history or trajectory as a list of at least one")
    yield Conversation(
        where, source, found, tools=tools(record), conversation=f"{source}:{where}", task=stem, examples=examples
    )


def _steps(steps: list[Any]) -> Iterator[Message]:
    for step in steps:
        yield Message("assistant", step.get("response") or f"{step.get('thought', '')}\n{step.get('action', '')}")
        if step.get("observation"):
            yield Message("user", step["observation"])


def mini_swe_agent(record: Any, where: str, source: str, stem: str) -> Iterator[Conversation]:
    """mini-swe-agent's `.traj.json`: `messages`, or in older files the bare list. Its `exit` message is not said."""
    turns = record if isinstance(record, list) else record.get("messages") if isinstance(record, dict) else None
    if not isinstance(turns, list):
        raise BadRecord("expected messages as a list")
    found = tuple(message(turn) for turn in turns if not (isinstance(turn, dict) and turn.get("role") == "exit"))
    task = record.get("instance_id") if isinstance(record, dict) else None
    yield Conversation(where, source, found, conversation=f"{source}:{where}", task=str(task or stem))


def tau_bench(record: Any, where: str, source: str, stem: str) -> Iterator[Conversation]:
    """One run of tau-bench: `traj`, with `task_id` and `trial`. All trials of a task stay together."""
    if not isinstance(record, dict) or not isinstance(record.get("traj"), list) or not record["traj"]:
        raise BadRecord("expected traj as a list of at least one message")
    task, trial = record.get("task_id", where), record.get("trial", 0)
    found = tuple(message(turn) for turn in record["traj"])
    name = f"{stem} task {task} trial {trial}"
    yield Conversation(where, source, found, id=name, conversation=name, task=f"tau-bench {task}")

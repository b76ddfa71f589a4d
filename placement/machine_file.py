"""The machine file: `machine.toml`, a `Machine` that people can read, correct and keep (docs/machine.md)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from ..errors import PlanError
from .machine import (
    COPY_ENGINE,
    GPU_BANDWIDTH,
    LARGEST,
    MAX_NS,
    MODES,
    PINNING,
    ZERO_COPY,
    Cpu,
    Gpu,
    Machine,
    bytes_text,
    parse_bytes,
)

VERSION: Final = 1
MAX_FILE: Final = 1 << 20
MAX_CARDS: Final = 64
RESERVE_PARTS: Final = ("kv_cache", "graphs", "other")
DEFAULT_GPUS, DEFAULT_HOST = ("96GB:8GB", "96GB:8GB"), "128GB"

SPEED = "bytes per second"
KEYS: Final[dict[str, dict[str, str]]] = {
    "": {
        "version": "Of this format.",
        "mode": "ep: each expert lies whole on one place. tp: experts on the cards are cut into slices, one per card.",
        "card": "One [[card]] for each card; the first is gpu0.",
        "host": "Host memory.",
        "pcie": "How cards reach host memory.",
        "cpu": "Experts that the processor computes; leave the table out if it computes none.",
    },
    "card": {
        "memory": "The card's memory.",
        "reserve": f"What weights must leave free: a number, or parts ({', '.join(RESERVE_PARTS)}) that add up.",
        "bandwidth": f"How fast it reads experts from its own memory, {SPEED}.",
        "token_ns": "Arithmetic for each token of an expert, nanoseconds; it matters in prefill.",
    },
    "host": {
        "memory": "What experts and Engram tables may take of the host's memory.",
        "pinning": "exact, or power-of-two where the allocator of pinned memory rounds every expert up to one.",
    },
    "pcie": {
        "zero_copy": f"Kernels of a card reading host memory in place, {SPEED}; decoding.",
        "copy_engine": f"A card's copy engine bringing experts in, {SPEED}; prefill.",
        "shared_root": "true: the cards share one link to the host, and the two speeds are of all cards together.",
    },
    "cpu": {
        "bandwidth": f"Packed experts that all cores together read and decode, {SPEED}.",
        "fixed_ns": "For each expert of a step, nanoseconds.",
        "token_ns": "For each token of an expert besides, nanoseconds.",
    },
}
"""Tables and keys of the file, each with what it means."""

HEADER = """\
# What moefit places experts on; docs/machine.md says how each number is used.
# Bytes are whole numbers, or text such as "96GiB" (1024s) and "8GB" (thousands).
"""


def read_machine(path: Path) -> Machine:
    """Machine described by a machine file.

    PlanError, naming file and key: the file cannot be read or is not TOML; another version; a key that is missing,
    unknown or has a value of another type or out of range.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE + 1)
    except OSError as error:
        raise PlanError("the machine file cannot be read", where=str(path), found=str(error.strerror)) from error
    if len(content) > MAX_FILE:
        raise PlanError("the machine file is too large", where=str(path), found=f"expected at most {MAX_FILE:,} B")
    return parse_machine(content, str(path))


def parse_machine(content: bytes, where: str = "machine.toml") -> Machine:
    """`read_machine` of a file's bytes."""
    try:
        value = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        mend = "correct it, or write a new one with moefit doctor --write-machine"
        raise PlanError("the machine file is not TOML", where=where, found=str(error), mend=mend) from error
    if value.get("version", VERSION) != VERSION or isinstance(value.get("version"), bool | float):
        found = f"expected {VERSION}, found {value['version']!r:.80}"
        raise PlanError("another version of the machine file", where=f"{where}, version", found=found)
    top = _Table(value, where, "", "")
    top.required("version")
    cards = top.tables("card")
    host, pcie, cpu = top.table("host"), top.table("pcie"), top.table("cpu")
    if not cards:
        mend = 'add a table [[card]] with memory = "96GiB" for each card'
        raise PlanError("the machine has no card", where=f"{where}, card", mend=mend)
    if len(cards) > MAX_CARDS:
        raise PlanError(
            "too many cards", where=f"{where}, card", found=f"expected 1 to {MAX_CARDS}, found {len(cards)}"
        )
    if host is None:
        mend = 'add a table [host] with memory = "128GB"'
        raise PlanError("the machine has no host memory", where=f"{where}, host", mend=mend)
    pcie = pcie or _Table({}, where, "pcie", "pcie")
    return Machine(
        gpus=tuple(_read_card(card) for card in cards),
        host_bytes=host.bytes("memory"),
        mode=top.one_of("mode", MODES),
        zero_copy=pcie.bytes("zero_copy", ZERO_COPY, 1),
        copy_engine=pcie.bytes("copy_engine", COPY_ENGINE, 1),
        shared_root=pcie.flag("shared_root"),
        cpu=_read_cpu(cpu) if cpu is not None else None,
        pinning=host.one_of("pinning", PINNING),
    )


def _read_card(card: _Table) -> Gpu:
    memory, parts = card.bytes("memory"), card.value.get("reserve", 0)
    if isinstance(parts, dict):
        table = _Table(parts, card.file, f"{card.path}.reserve", "reserve")
        reserve = sum(table.bytes(part) for part in parts)
    else:
        reserve = card.bytes("reserve", 0)
    if reserve > memory:
        found = f"expected at most the card's {memory:,} B, found {reserve:,} B"
        raise PlanError("a card cannot reserve more than it has", where=card.at("reserve"), found=found)
    return Gpu(memory, reserve, card.bytes("bandwidth", GPU_BANDWIDTH, 1), card.nanoseconds("token_ns"))


def _read_cpu(cpu: _Table) -> Cpu:
    return Cpu(cpu.bytes("bandwidth", None, 1), cpu.nanoseconds("fixed_ns"), cpu.nanoseconds("token_ns"))


@dataclass(frozen=True)
class _Table:
    """A TOML table, its file, its path in it, and its kind: a key of KEYS or "reserve". It has no unknown keys."""

    value: dict[str, Any]
    file: str
    path: str
    kind: str

    def __post_init__(self) -> None:
        known = RESERVE_PARTS if self.kind == "reserve" else tuple(KEYS[self.kind])
        for key in self.value:
            if key not in known:
                raise PlanError("unknown key", where=self.at(key), mend=_suggestion(key, known))

    def at(self, key: str) -> str:
        key = key if key.isprintable() and len(key) <= 80 else repr(key[:80])
        return f"{self.file}, {self.path}.{key}" if self.path else f"{self.file}, {key}"

    def wrong(self, key: str, expected: str) -> PlanError:
        text = repr(self.value[key])
        found = f"expected {expected}, found {text if len(text) <= 80 else text[:77] + '...'}"
        return PlanError("a value that a machine cannot have", where=self.at(key), found=found)

    def required(self, key: str) -> Any:
        if key not in self.value:
            raise PlanError("a key is missing", where=self.at(key), mend=f"add it: {KEYS[self.kind][key]}")
        return self.value[key]

    def bytes(self, key: str, default: int | None = None, low: int = 0) -> int:
        """Of a whole number or of text for `parse_bytes`; without a default the key must be there."""
        if key not in self.value and default is not None:
            return default
        value = self.required(key) if self.kind != "reserve" else self.value[key]
        if isinstance(value, str):
            try:
                value = parse_bytes(value)
            except PlanError as error:
                found = f"{error.where} {error.found}".strip()
                raise PlanError(error.what, where=self.at(key), found=found, mend=error.mend) from None
        if type(value) is not int or not low <= value <= LARGEST:
            raise self.wrong(key, f'bytes, {low} to 2^63 - 1, such as "96GiB" or 8_000_000_000')
        return value

    def nanoseconds(self, key: str) -> int:
        value = self.value.get(key, 0)
        if type(value) is not int or not 0 <= value <= MAX_NS:
            raise self.wrong(key, f"whole nanoseconds, 0 to {MAX_NS}")
        return value

    def flag(self, key: str) -> bool:
        value = self.value.get(key, False)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def one_of(self, key: str, known: tuple[str, ...]) -> str:
        value = self.value.get(key, known[0])
        if not isinstance(value, str) or value not in known:
            raise self.wrong(key, " or ".join(f'"{name}"' for name in known))
        return value

    def table(self, key: str) -> _Table | None:
        if key not in self.value:
            return None
        if not isinstance(self.value[key], dict):
            raise self.wrong(key, f"a table [{key}]")
        return _Table(self.value[key], self.file, key, key)

    def tables(self, key: str) -> list[_Table]:
        value = self.value.get(key, [])
        if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
            raise self.wrong(key, f"tables [[{key}]], in double brackets")
        return [_Table(entry, self.file, f"{key}[{number}]", key) for number, entry in enumerate(value)]


def _suggestion(key: str, known: Sequence[str]) -> str:
    """What was probably meant: a near key of the same table, or the same key of another one."""
    if near := get_close_matches(key.lower(), known, 1):
        return f"did you mean {near[0]}?"
    elsewhere = [table for table, keys in KEYS.items() if table and key in keys]
    if key in RESERVE_PARTS:
        elsewhere.append("card.reserve")
    if elsewhere:
        return f"write {key} in {' or '.join(elsewhere)}"
    return f"the keys here are {', '.join(known)}"


def machine_toml(
    machine: Machine,
    comments: Mapping[str, str] | None = None,
    reserves: Sequence[Mapping[str, int]] | None = None,
) -> str:
    """The machine file of `machine`, every default written out: `parse_machine` gives the same machine again.

    comments: what stands behind a number, such as {"card[0].bandwidth": "measured"}, by the key's path in the file.
    reserves: parts of each card's reserve, {part of RESERVE_PARTS: bytes}; they must add up to it.
    ValueError: a comment for a key that the file does not have, or parts that do not add up.
    """
    left = dict(comments or {})

    def line(path: str, value: str, explain: bool = True) -> str:
        table, _, key = path.rpartition(".")
        what = KEYS[table.partition("[")[0]][key]
        comment = " ".join("".join(c if c.isprintable() else " " for c in left.pop(path, "")).split())
        return (f"# {what}\n" if explain else "") + f"{key} = {value}" + (f"  # {comment}" if comment else "") + "\n"

    text = HEADER + f"\nversion = {VERSION}\n\n" + line("mode", f'"{machine.mode}"')
    for number, gpu in enumerate(machine.gpus):
        at, first = f"card[{number}]", number == 0
        parts = reserves[number] if reserves is not None else {}
        if parts and (sum(parts.values()) != gpu.reserve or not set(parts) <= set(RESERVE_PARTS)):
            raise ValueError(f"{at}: the parts {dict(parts)} of the reserve do not add up to {gpu.reserve} B")
        reserve = ", ".join(f"{name} = {_bytes(value)}" for name, value in parts.items())
        text += f"\n[[card]]  # gpu{number}\n"
        text += line(f"{at}.memory", _bytes(gpu.bytes), first)
        text += line(f"{at}.reserve", f"{{ {reserve} }}" if parts else _bytes(gpu.reserve), first)
        text += line(f"{at}.bandwidth", _bytes(gpu.bandwidth), first)
        text += line(f"{at}.token_ns", str(gpu.token_ns), first)
    text += "\n[host]\n" + line("host.memory", _bytes(machine.host_bytes))
    text += line("host.pinning", f'"{machine.pinning}"')
    text += "\n[pcie]\n" + line("pcie.zero_copy", _bytes(machine.zero_copy))
    text += line("pcie.copy_engine", _bytes(machine.copy_engine))
    text += line("pcie.shared_root", str(machine.shared_root).lower())
    if machine.cpu is not None:
        text += "\n[cpu]\n" + line("cpu.bandwidth", _bytes(machine.cpu.bandwidth))
        text += line("cpu.fixed_ns", str(machine.cpu.fixed_ns)) + line("cpu.token_ns", str(machine.cpu.token_ns))
    if left:
        raise ValueError(f"comments for keys that the file does not have: {sorted(left)}")
    return text


def _bytes(value: int) -> str:
    """As TOML: text where a unit makes it short, else a whole number."""
    text = bytes_text(value)
    return f"{value:_}" if text.isdecimal() else f'"{text}"'


def machine_from_options(
    file: Path | None,
    gpu: Sequence[str] | None,
    host: str | None,
    gpu_bandwidth: str | None = None,
    host_bandwidth: str | None = None,
    mode: str | None = None,
) -> Machine:
    """The machine of a command line: from a machine file, or from flags as in `Machine.from_flags`.

    None: not given. Without a file: two cards of 96 GB with 8 GB of each kept free, 128 GB of host memory, mode ep.
    `mode` overrides the file's. PlanError: a file and any other flag, which would override it silently.
    """
    if file is None:
        return Machine.from_flags(
            gpu or DEFAULT_GPUS, host or DEFAULT_HOST, gpu_bandwidth, host_bandwidth, mode or "ep"
        )
    flags = {"--gpu": gpu, "--host": host, "--gpu-bandwidth": gpu_bandwidth, "--host-bandwidth": host_bandwidth}
    if given := [flag for flag, value in flags.items() if value]:
        mend = f"leave out {' and '.join(given)}, or --machine; change the numbers in the file"
        raise PlanError(
            "the machine is given twice", where=str(file), found=f"a machine file and {given[0]}", mend=mend
        )
    machine = read_machine(file)
    return machine if mode is None else replace(machine, mode=mode)

"""What can be learned about the CUDA cards: from nvidia-smi and /sys, and through torch, which also measures."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

SMI_FIELDS: Final = ("uuid", "name", "memory.total", "memory.used", "driver_version", "pci.bus_id", "compute_cap")
"""What nvidia-smi is asked for; old drivers do not know the last."""
SMI_SECONDS: Final = 30.0

CARD_BUFFER: Final = 2 << 30  # bytes copied within a card: far beyond its cache
HOST_BUFFER: Final = 256 << 20  # bytes brought to a card at once; a power of two, so that pinning takes no more
LAUNCHES: Final = 4
PASSES: Final = 4
SHARED: Final = 0.75  # cards that together reach less than this of the sum of each alone share a link


@dataclass(frozen=True)
class Card:
    """memory, used (by others; where nvidia-smi does not tell, with this process' own context): bytes.

    capability: "12.0", "" if unknown.

    pci: its address, such as "0000:01:00.0". port: address of the root port that it is behind, "" if it is behind none
    or unknown. lanes: PCIe lanes in use and at most, (0, 0) if unknown. bandwidth: measured, bytes per second.
    """

    name: str
    memory: int
    used: int
    capability: str = ""
    driver: str = ""
    pci: str = ""
    port: str = ""
    lanes: tuple[int, int] = (0, 0)
    bandwidth: int | None = None


@dataclass(frozen=True)
class LinkSpeed:
    """Bytes per second from host memory: each card alone, and all of them together."""

    each: tuple[int, ...]
    together: int

    @property
    def shared(self) -> bool:
        return len(self.each) > 1 and self.together < SHARED * sum(self.each)


# nvidia-smi and /sys


def run_nvidia_smi() -> tuple[str, tuple[str, ...], str]:
    """(CSV, its fields, "") or ("", (), what went wrong); all empty where there is no nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "", (), ""
    problem = ""
    for fields in (SMI_FIELDS, SMI_FIELDS[:-1]):
        words = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=SMI_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            return "", (), f"nvidia-smi does not answer: {error}"
        if done.returncode == 0:
            return done.stdout, fields, ""
        problem = " ".join((done.stdout + done.stderr).split())[:300] or f"nvidia-smi ended with {done.returncode}"
    return "", (), problem


def parse_nvidia_smi(text: str, fields: Sequence[str] = SMI_FIELDS) -> list[tuple[str, Card]]:
    """(uuid without "GPU-", card) of each line that tells a card's memory; MiB become bytes, "[N/A]" unknown."""
    cards = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(fields):
            continue
        known = {f: "" if c.startswith("[") or c == "N/A" else c for f, c in zip(fields, cells, strict=True)}
        total, used = known["memory.total"], known["memory.used"]
        if not total.isdecimal():
            continue
        card = Card(
            name=known["name"],
            memory=int(total) << 20,
            used=int(used) << 20 if used.isdecimal() else 0,
            capability=known.get("compute_cap", ""),
            driver=known["driver_version"],
            pci=pci_address(known["pci.bus_id"]),
        )
        cards.append((known["uuid"].removeprefix("GPU-").lower(), card))
    return cards


def pci_address(text: str) -> str:
    """As /sys writes it: "00000000:C1:00.0" -> "0000:c1:00.0"; "" for anything else."""
    match = re.fullmatch(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", text.strip().lower())
    return f"{int(match[1] or '0', 16):04x}:{match[2]}:{match[3]}.{match[4]}" if match else ""


def root_port(device: str) -> str:
    """The root port in a device's path under /sys/devices: what it shares with others there shares its link.

    "/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0" -> "0000:00:01.0"; "" for a device on the root bus itself.
    """
    parts = device.split("/")
    buses = [number for number, part in enumerate(parts) if re.fullmatch(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", part)]
    below = parts[buses[0] + 1 :] if buses else []
    return below[0] if len(below) > 1 else ""


def with_link(card: Card, root: Path = Path("/")) -> Card:
    """The card with root port and lanes from /sys."""
    device = root / "sys/bus/pci/devices" / card.pci
    if not card.pci or not device.exists():
        return card
    lanes = [0, 0]
    for number, name in enumerate(("current_link_width", "max_link_width")):
        with suppress(OSError, ValueError):
            lanes[number] = int((device / name).read_text())
    known = all(0 < count <= 64 for count in lanes)
    return replace(card, port=root_port(str(device.resolve())), lanes=(lanes[0], lanes[1]) if known else (0, 0))


def links(cards: Sequence[Card]) -> int:
    """How many ways to the host the cards have, as far as /sys tells: cards behind one root port share one."""
    return len({card.port or f"card {number}" for number, card in enumerate(cards)})


# torch


def torch_cards(smi: Sequence[tuple[str, Card]]) -> list[Card]:
    """The cards that torch can use, in its order; what nvidia-smi knows of them besides. Empty without any."""
    cards = []
    by_uuid, by_address = dict(smi), {card.pci: card for _, card in smi if card.pci}
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        found: Any = torch.cuda.get_device_properties(number)
        address = ""
        with suppress(AttributeError):  # torch before 2.8
            address = pci_address(f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0")
        told = by_uuid.get(str(getattr(found, "uuid", "")).lower()) or by_address.get(address)
        free, total = torch.cuda.mem_get_info(number)
        cards.append(
            Card(
                name=found.name,
                memory=total,
                used=min(told.used if told else total - free, total),
                capability=f"{found.major}.{found.minor}",
                driver=told.driver if told else "",
                pci=told.pci if told else address,
            )
        )
    return cards


def card_bandwidth(number: int) -> int | None:
    """Bytes per second that a plain copy within card `number` reads and writes together; None without the memory."""
    with torch.cuda.device(number):
        size = min(CARD_BUFFER, torch.cuda.mem_get_info(number)[0] // 4) // 4096 * 4096
        if size < HOST_BUFFER:
            return None
        try:
            source, target = (torch.zeros(size, dtype=torch.uint8, device=f"cuda:{number}") for _ in range(2))
            return int(_rate([number], lambda _: target.copy_(source), 2 * size))
        except RuntimeError:  # also out of memory
            return None
        finally:
            source = target = torch.empty(0)
            torch.cuda.empty_cache()


def link_speeds(count: int) -> tuple[LinkSpeed | None, LinkSpeed | None]:
    """(copy engine, zero-copy) of cards 0..count-1 from pinned host memory; None where it cannot be measured.

    The copy engine brings 256 MiB to each card. Zero-copy is an elementwise kernel that reads the same pinned memory
    in place. Takes 256 MiB of pinned host memory and of each card.
    """
    try:
        cards = range(count)
        targets = [torch.empty(HOST_BUFFER // 4, dtype=torch.float32, device=f"cuda:{card}") for card in cards]
        sources = []
        for card in cards:
            with torch.cuda.device(card):  # memory is mapped for the card that is current
                sources.append(torch.zeros(HOST_BUFFER // 4, dtype=torch.float32, pin_memory=True))
    except RuntimeError:
        return None, None
    copy = _link_speed(count, lambda card: targets[card].copy_(sources[card], non_blocking=True))
    zero = None
    with suppress(RuntimeError, TypeError, ValueError):
        mapped = [_mapped(source, card) for card, source in enumerate(sources)]
        zero = _link_speed(count, lambda card: torch.neg(mapped[card], out=targets[card]))
    return copy, zero


def _link_speed(count: int, launch: Callable[[int], object]) -> LinkSpeed | None:
    try:
        each = [int(_rate([card], launch, HOST_BUFFER)) for card in range(count)]
        return LinkSpeed(tuple(each), each[0] if count == 1 else int(_rate(range(count), launch, HOST_BUFFER)))
    except RuntimeError:
        return None


def _rate(cards: Sequence[int], launch: Callable[[int], object], size: int) -> float:
    """Bytes per second of all `cards` together, each doing `launch(card)`, which moves `size` bytes: the best pass."""
    best = float("inf")
    for number in range(PASSES + 1):
        _wait(cards)
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            for card in cards:
                with torch.cuda.device(card):
                    launch(card)
        _wait(cards)
        if number:  # the first pass warms up
            best = min(best, time.perf_counter() - start)
    return LAUNCHES * len(cards) * size / best


def _wait(cards: Sequence[int]) -> None:
    for card in cards:
        torch.cuda.synchronize(card)


def _mapped(pinned: torch.Tensor, card: int) -> torch.Tensor:
    """Pinned host memory as a tensor of the card that reads it in place; ValueError where torch made a copy of it."""

    class Memory:
        __cuda_array_interface__ = {  # noqa: RUF012  (the protocol's name)
            **{"shape": tuple(pinned.shape), "typestr": "<f4", "version": 3, "strides": None},
            "data": (pinned.data_ptr(), False),
        }

    view = torch.as_tensor(Memory(), device=f"cuda:{card}")
    if view.data_ptr() != pinned.data_ptr():
        raise ValueError("not mapped")
    return view

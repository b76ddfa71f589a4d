"""`moefit doctor`: what this machine has, what is wrong with it for moefit, and the machine file that describes it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

import torch

from ..errors import QuantizeError
from ..parallel import default_threads
from ..placement import Gpu, Machine
from ..placement.machine import COPY_ENGINE, GPU_BANDWIDTH, ZERO_COPY
from ..placement.machine_file import DEFAULT_GPUS, machine_toml
from ..progress import Progress, Silent
from ..quantize import cuda_encode
from ..quantize.encode import instruction_sets
from . import card_probe, host_probe
from .card_probe import Card, LinkSpeed
from .host_probe import Host

KV_CACHE, KV_SHARE = 5 * 10**9, 16
"""Bytes of each card kept for the KV cache, at most one KV_SHARE-th of it. An assumption: it depends on the context."""

GRAPHS, GRAPHS_SHARE = 10**9, 32
"""The same for CUDA graphs, contexts and workspaces."""

MARGIN_SHARE, MARGIN = 10, 4 * 10**9
"""Host memory left to the system and the engine: one MARGIN_SHARE-th of what is free, at least MARGIN bytes."""

DRIVERS: Final = {11: 450, 12: 525, 13: 580}
"""CUDA's major version -> the oldest driver branch that runs it (NVIDIA, CUDA Compatibility)."""

LOW_DISK: Final = 10 * 10**9
ROUND_SPEED: Final = 10**8

Outcome = Literal["pass", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. mend: what to do about it; empty where it passed."""

    name: str
    outcome: Outcome
    text: str
    mend: str = ""


@dataclass(frozen=True)
class Software:
    """torch: its version; cuda: that it was built for, "" without. usable: torch can use a card.

    encoders: builds of the native encoder that this CPU runs, fastest first. library: moefit's CUDA library is built
    and loads. smi: what went wrong with nvidia-smi, "" for nothing.
    """

    torch: str
    cuda: str
    usable: bool
    encoders: tuple[str, ...]
    library: bool
    smi: str = ""


@dataclass(frozen=True)
class Findings:
    """What `examine_machine` found. Speeds are bytes per second, None where they were not or cannot be measured.

    read: of host memory, by `threads` threads. copy, zero: from host memory to the cards.
    """

    host: Host
    cards: tuple[Card, ...]
    software: Software
    threads: int
    read: int | None = None
    copy: LinkSpeed | None = None
    zero: LinkSpeed | None = None

    @property
    def margin(self) -> int:
        """Bytes of free host memory that are left alone."""
        return min(self.host.free, max(MARGIN, self.host.free // MARGIN_SHARE))

    @property
    def reserves(self) -> list[dict[str, int]]:
        """Of each card's memory, by part of the machine file."""
        return [_reserve(card) for card in self.cards]

    @property
    def shared_root(self) -> bool:
        """Whether the cards share one link to the host: they all sit behind one root port, or are slow together."""
        behind_one = len(self.cards) > 1 and card_probe.links(self.cards) == 1
        return behind_one or any(speed.shared for speed in (self.copy, self.zero) if speed)

    def machine(self) -> Machine:
        """The machine as a plan sees it; without a card, this host with the default cards."""
        gpus = [
            Gpu(card.memory >> 20 << 20, sum(reserve.values()), _rounded(card.bandwidth) or GPU_BANDWIDTH)
            for card, reserve in zip(self.cards, self.reserves, strict=True)
        ]
        host = (self.host.free - self.margin) // 10**6 * 10**6
        zero, copy = self._link(self.zero, ZERO_COPY), self._link(self.copy, COPY_ENGINE)
        default = Machine.from_flags(DEFAULT_GPUS, "0").gpus
        return Machine(tuple(gpus) or default, host, zero_copy=zero, copy_engine=copy, shared_root=self.shared_root)

    def _link(self, speed: LinkSpeed | None, default: int) -> int:
        """Of all cards together where they share a link, else of one while all are at it."""
        if not self.cards:
            return default
        together = speed.together if speed else default * card_probe.links(self.cards)
        return _rounded(together if self.shared_root else together // len(self.cards)) or default

    def comments(self) -> dict[str, str]:
        """Where each number of the machine file comes from, for `machine_toml`."""
        said = {"host.pinning": "default: what is pinned is registered in its exact size"}
        for number in range(len(self.cards) or len(DEFAULT_GPUS)):
            at, unknown = f"card[{number}]", "default: no card was found here"
            said |= {f"{at}.{key}": unknown for key in ("memory", "reserve", "bandwidth")}
            said[f"{at}.token_ns"] = "default: depends on the engine's kernels"
        for number, (card, reserve) in enumerate(zip(self.cards, self.reserves, strict=True)):
            at, slow = f"card[{number}]", "default: of an RTX PRO 6000; correct it for another card"
            said[f"{at}.memory"] = f"read: {card.name}"
            said[f"{at}.reserve"] = f"read: {reserve['other']:,} B in use now; default: kv_cache, graphs"
            said[f"{at}.bandwidth"] = f"measured: a copy within {card.name}" if card.bandwidth else slow
        limit = " under the control group's limit" if self.host.limit else ""
        least = f"a tenth, at least {MARGIN // 10**9} GB"
        said["host.memory"] = f"read: {self.host.free:,} B free{limit}; {self.margin:,} B of it left alone ({least})"
        plain = "measured: a plain kernel; an engine's own may reach half of it"
        said["pcie.zero_copy"] = plain if self.zero else "default: of EXL3 kernels over PCIe 5.0 x16"
        said["pcie.copy_engine"] = "measured: pinned memory to the card" if self.copy else "default: PCIe 5.0 x16"
        said["pcie.shared_root"] = self._root_source()
        return said

    def _root_source(self) -> str:
        if len(self.cards) < 2:
            return "one card" if self.cards else "default: no card was found here"
        if card_probe.links(self.cards) == 1:
            return "read: all cards are behind one root port"
        if self.copy or self.zero:
            return "measured: all cards together against each alone"
        return "read: root ports under /sys" if all(card.port for card in self.cards) else "default: not known"

    def toml(self) -> str:
        """The machine file."""
        return machine_toml(self.machine(), self.comments(), self.reserves or None)

    def checks(self) -> list[Check]:
        """Everything that was looked at; `fail` where moefit cannot be used here."""
        return list(_checks(self))

    @property
    def failed(self) -> bool:
        return any(check.outcome == "fail" for check in self.checks())

    def summary(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "host": asdict(self.host) | {"free": self.host.free, "margin": self.margin, "read_bandwidth": self.read},
            "cards": [asdict(card) for card in self.cards],
            "software": asdict(self.software),
            "threads": self.threads,
            "copy_engine": self.copy and asdict(self.copy),
            "zero_copy": self.zero and asdict(self.zero),
            "shared_root": self.shared_root,
            "machine": asdict(self.machine()),
            "sources": self.comments(),
            "checks": [asdict(check) for check in self.checks()],
            "failed": self.failed,
        }


def examine_machine(threads: int = 0, quick: bool = False, progress: Progress | None = None) -> Findings:
    """Read and, unless `quick`, measure this machine. threads: for host memory; 0 takes every CPU.

    Measuring takes a few seconds, 1.3 GB or so of host memory and up to 4 GiB of each card, and raises nothing where
    it cannot be done. nvidia-smi is asked first, before this process itself takes memory of the cards.
    """
    progress, threads = progress or Silent(), threads or default_threads()
    progress.stage("examine", 4, "steps")
    host = host_probe.read_host()
    csv, fields, smi_problem = card_probe.run_nvidia_smi()
    told = card_probe.parse_nvidia_smi(csv, fields)
    usable = _usable_cards(told)
    cards = [card_probe.with_link(card) for card in usable or [card for _, card in told]]
    software = Software(
        torch=torch.__version__,
        cuda=torch.version.cuda or "",
        usable=bool(usable),
        encoders=tuple(instruction_sets()),
        library=_library_loads(),
        smi=smi_problem,
    )
    found = Findings(host, tuple(cards), software, threads)
    progress.advance(note="read")
    if not quick:
        found = replace(found, read=host_probe.read_bandwidth(threads, host.free))
        progress.advance(note="host memory")
        if usable:
            measured = [replace(c, bandwidth=card_probe.card_bandwidth(n)) for n, c in enumerate(cards)]
            found = replace(found, cards=tuple(measured))
            progress.advance(note="card memory")
            copy, zero = card_probe.link_speeds(len(cards))
            found = replace(found, copy=copy, zero=zero)
            progress.advance(note="PCIe")
    progress.finish()
    return found


def _usable_cards(told: Sequence[tuple[str, Card]]) -> list[Card]:
    """Those that torch can use; none where it stumbles over one (its driver, another's exclusive use)."""
    with warnings.catch_warnings(), suppress(RuntimeError):
        warnings.simplefilter("ignore")  # of drivers: there is a check for them
        return card_probe.torch_cards(told)
    return []


def _library_loads() -> bool:
    try:
        cuda_encode.library()
    except (QuantizeError, OSError):
        return False
    return True


def _rounded(speed: int | None) -> int:
    """Down to 0.1 GB/s: there is no more in a measurement. 0 for None and for less."""
    return (speed or 0) // ROUND_SPEED * ROUND_SPEED


def _reserve(card: Card) -> dict[str, int]:
    """Parts in whole MB; together never more than the card."""
    other = min(-(-card.used // 10**6) * 10**6, card.memory >> 20 << 20)
    left = (card.memory >> 20 << 20) - other
    kv_cache = min(KV_CACHE, card.memory // KV_SHARE // 10**6 * 10**6, left)
    graphs = min(GRAPHS, card.memory // GRAPHS_SHARE // 10**6 * 10**6, left - kv_cache)
    return {"kv_cache": kv_cache, "graphs": graphs, "other": other}


def _checks(found: Findings) -> Iterator[Check]:
    yield _check_encoder(found.software)
    yield from _check_cards(found)
    yield from _check_links(found)
    yield from _check_memory(found)
    host = found.host
    low = host.disk_free < LOW_DISK
    mend = "choose a larger disk for packs: DeepSeek-V4.1-Flash at K = 3 takes 332 GB" if low else ""
    yield Check("disk", "warn" if low else "pass", f"{host.disk_free:,} B free in {host.folder}", mend)


def _check_encoder(software: Software) -> Check:
    fastest = software.encoders[0] if software.encoders else "none"
    if fastest in ("avx2", "avx512"):
        return Check("encoder", "pass", f"the native encoder runs with {fastest.upper()}")
    on_card = software.usable and software.library
    text = f"this CPU has no AVX2: the native encoder runs as {fastest} code"
    mend = "encode on the card" if on_card else "use a machine with AVX2 (any x86-64 server since 2015) or a CUDA card"
    return Check("encoder", "warn" if on_card else "fail", text, mend)


def _check_cards(found: Findings) -> Iterator[Check]:
    software, cards = found.software, found.cards
    if software.smi:
        mend = "repair the driver's installation (nvidia-smi must list the cards)"
        yield Check("nvidia-smi", "warn", software.smi, mend)
    if not cards:
        text = "no CUDA card was found: builds run on the CPU, and the machine file gets two default cards"
        yield Check("cards", "warn", text, "correct [[card]] in the machine file, or run this where the cards are")
        return
    names = ", ".join(f"gpu{number} {card.name}" for number, card in enumerate(cards))
    if software.usable:
        yield Check("cards", "pass", f"torch can use {names}")
    else:
        why = f"torch {software.torch} was built " + (f"for CUDA {software.cuda}" if software.cuda else "without CUDA")
        mend = "install a CUDA build of torch that the driver can run"
        yield Check("cards", "warn", f"torch cannot use {names}: {why}", mend)
    yield from _check_driver(found)
    if software.usable and not software.library:
        mend = "install with CUDA's nvcc present: pip install . -C cmake.define.MOEFIT_CUDA=ON"
        yield Check("CUDA library", "warn", "moefit's CUDA library is not built: experts are encoded on the CPU", mend)
    elif software.usable:
        yield Check("CUDA library", "pass", "moefit's CUDA library is built")
    for number, (card, reserve) in enumerate(zip(cards, found.reserves, strict=True)):
        if sum(reserve.values()) >= card.memory >> 20 << 20:
            text = f"gpu{number} has no room: {card.used:,} of its {card.memory:,} B are in use"
            yield Check("card memory", "warn", text, "stop what runs there, or leave the card out of the machine file")
        elif card.used > card.memory // 20:
            text = (
                f"others use {card.used:,} of the {card.memory:,} B of gpu{number}; that much is kept free of experts"
            )
            yield Check("card memory", "warn", text, "stop them and run this again if the card is to be moefit's alone")


def _check_driver(found: Findings) -> Iterator[Check]:
    driver = next((card.driver for card in found.cards if card.driver), "")
    branch = driver.partition(".")[0]
    if not branch.isdecimal():
        return
    cuda = found.software.cuda.partition(".")[0]
    wanted = int(cuda) if cuda.isdecimal() and int(cuda) in DRIVERS else max(DRIVERS)
    if int(branch) < DRIVERS[wanted]:
        mend = f"install driver {DRIVERS[wanted]} or newer"
        yield Check("driver", "warn", f"driver {driver} is too old for CUDA {wanted}", mend)
    else:
        yield Check("driver", "pass", f"driver {driver} runs CUDA {wanted}")


def _check_links(found: Findings) -> Iterator[Check]:
    cards = found.cards
    ports: dict[str, list[str]] = {}
    for number, card in enumerate(cards):
        ports.setdefault(card.port or f"card {number}", []).append(f"gpu{number}")
        if 0 < card.lanes[0] < card.lanes[1]:
            text = f"gpu{number} runs at x{card.lanes[0]} of x{card.lanes[1]} PCIe lanes"
            yield Check("PCIe", "warn", text, "move it to a slot with all lanes, or reseat it")
    together = [f"{' and '.join(names)} behind root port {port}" for port, names in ports.items() if len(names) > 1]
    mend = "give each card a slot of its own root port, or expect their host reads to share one link"
    if together:
        yield Check("PCIe", "warn", f"cards share a link to the host: {'; '.join(together)}", mend)
    elif found.shared_root:
        slow = next(speed for speed in (found.copy, found.zero) if speed and speed.shared)
        text = (
            f"cards share a link to the host: together {slow.together / 1e9:.1f} GB/s, "
            f"alone {sum(slow.each) / 1e9:.1f} GB/s in sum"
        )
        yield Check("PCIe", "warn", text, mend)
    elif len(cards) > 1:
        yield Check("PCIe", "pass", "every card has a link of its own to the host")


def _check_memory(found: Findings) -> Iterator[Check]:
    host = found.host
    experts = host.free - found.margin
    if host.limit is not None:
        text = f"a control group allows {host.limit.bytes:,} of {host.memory:,} B of memory ({host.limit.file})"
        yield Check("memory limit", "warn", text, "raise it (docker --memory, systemd MemoryMax=) if more is needed")
    if experts <= 0:
        text = f"no host memory is left for experts: {host.free:,} B free, {found.margin:,} B left to the system"
        yield Check("memory", "warn", text, "free memory, or place every expert on the cards")
    else:
        yield Check("memory", "pass", f"{experts:,} B for experts, of {host.free:,} B free")
    if found.cards and host.memlock is not None and host.memlock < experts:
        text = f"memlock is limited to {host.memlock:,} B, below the {experts:,} B that may be pinned"
        mend = (
            "set ulimit -l unlimited (systemd LimitMEMLOCK=infinity, docker --ulimit memlock=-1) for engines that lock"
        )
        yield Check("memlock", "warn", text, mend)
    elif found.cards:
        yield Check("memlock", "pass", "the memlock limit allows what may be pinned")

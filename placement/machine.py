"""The machine a plan is made for: cards, host memory, and how fast each place hands over expert bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from ..errors import PlanError

# NVIDIA RTX PRO 6000 Blackwell data sheet: 1,792 GB/s of GDDR7.
GPU_BANDWIDTH = 1_792_000_000_000
# Kernels reading pinned host memory in place (zero-copy) over PCIe 5.0 x16 reach 22-25 GB/s: the low end.
ZERO_COPY = 22_000_000_000
# A copy engine on the same link, both cards copying.
COPY_ENGINE = 56_000_000_000
MODES, PINNING = ("ep", "tp"), ("exact", "power-of-two")

UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}
MAX_NS = 10**12
LARGEST = 2**63 - 1  # what every reader of plan.json can hold


def parse_bytes(text: str) -> int:
    """Bytes in `text`: a number and a unit, e.g. "8MB" (8,000,000), "96GiB" (96 * 2**30), "1.5 GB", "4096".

    kB, MB, GB, TB count in thousands, KiB, MiB, GiB, TiB in 1024s; case does not matter; no unit means bytes.
    PlanError: anything else, a fraction of a byte, or more than 2**63 - 1.
    """
    mend = 'write a number and a unit such as "8MB" (8,000,000 B) or "96GiB" (96 x 1,073,741,824 B)'
    match = re.fullmatch(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)\s*", text, re.ASCII)
    if match is None:
        raise PlanError("not a number of bytes", where=repr(text), mend=mend)
    number, unit = match.groups()
    if unit.upper() not in UNITS and unit:
        if unit.upper() + "B" in UNITS:
            mend = f'write "{number}{unit}B" (thousands) or "{number}{unit}iB" (1024s)'
        raise PlanError("unknown unit of bytes", where=repr(text), found=f"unit {unit!r}", mend=mend)
    value = Fraction(number) * UNITS[unit.upper() or "B"]
    if value.denominator != 1:
        raise PlanError("a fraction of a byte", where=repr(text), found=f"{float(value)} B", mend=mend)
    if value > LARGEST:
        raise PlanError("more bytes than a plan can hold", where=repr(text), found=f"expected <= {LARGEST} B")
    return int(value)


def bytes_text(value: int) -> str:
    """`value` as `parse_bytes` reads it: with the unit that makes it shortest, else a plain whole number.

    At most seven characters before the unit, three of them behind the point: "96GiB", "1612.3GB", "84990435328".
    """
    texts = [str(value)]
    for unit, size in UNITS.items():
        if value and value * 1000 % size == 0:
            whole, part = divmod(value * 1000 // size, 1000)
            number = f"{whole}.{part:03d}".rstrip("0").rstrip(".")
            texts += [number + unit.replace("IB", "iB").replace("KB", "kB")] if len(number) <= 7 and whole else []
    return min(texts, key=len)


@dataclass(frozen=True)
class Gpu:
    """One card. bytes: its memory; reserve: bytes of it kept free of weights (KV cache, graphs, others).

    bandwidth: bytes per second at which it reads an expert from its own memory. token_ns: nanoseconds of arithmetic
    for each token of an expert, which matter in prefill only.
    """

    bytes: int
    reserve: int = 0
    bandwidth: int = GPU_BANDWIDTH
    token_ns: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.reserve <= self.bytes <= LARGEST:
            raise PlanError(
                "a card cannot reserve more than it has",
                where="gpu",
                found=f"expected 0 <= reserve <= bytes, found reserve {self.reserve} B of {self.bytes} B",
                mend="give --gpu BYTES or --gpu BYTES:RESERVE",
            )
        _check_speed("gpu", bandwidth=self.bandwidth)
        _check_time("gpu", token_ns=self.token_ns)


@dataclass(frozen=True)
class Cpu:
    """Experts computed by the processor: fixed_ns + bytes / bandwidth + token_ns * tokens for one expert in one step.

    bandwidth: bytes per second of packed experts that all its cores together read and decode.
    """

    bandwidth: int
    fixed_ns: int = 0
    token_ns: int = 0

    def __post_init__(self) -> None:
        _check_speed("cpu", bandwidth=self.bandwidth)
        _check_time("cpu", fixed_ns=self.fixed_ns, token_ns=self.token_ns)


@dataclass(frozen=True)
class Machine:
    """Cards and host of one box. Places are named gpu0, gpu1, ..., host (mode "tp": cards, host), in this order.

    gpus: the cards. host_bytes: host memory that experts and Engram tables may take.
    mode: "ep" (expert parallel: each expert is whole on one place) or "tp" (tensor parallel: each expert on the cards
    is cut into equal slices, one on every card).
    zero_copy: bytes per second at which one card's kernels read host memory in place; copy_engine: at which its copy
    engine does. shared_root: the cards share one PCIe root, and these two are of all cards together.
    cpu: None where the processor computes no experts.
    pinning: "exact", or "power-of-two" where the allocator of pinned memory rounds every expert and table up to one.
    """

    gpus: tuple[Gpu, ...]
    host_bytes: int
    mode: str = "ep"
    zero_copy: int = ZERO_COPY
    copy_engine: int = COPY_ENGINE
    shared_root: bool = False
    cpu: Cpu | None = None
    pinning: str = "exact"

    def __post_init__(self) -> None:
        if not 1 <= len(self.gpus) <= 64:
            raise PlanError("a machine has 1 to 64 cards", where="machine", found=f"found {len(self.gpus)}")
        if not 0 <= self.host_bytes <= LARGEST:
            raise PlanError("host memory out of range", where="machine", found=f"found {self.host_bytes} B")
        _check_speed("machine", zero_copy=self.zero_copy, copy_engine=self.copy_engine)
        for name, value, known in (("mode", self.mode, MODES), ("pinning", self.pinning, PINNING)):
            if value not in known:
                found = f"expected {' or '.join(known)}, found {value!r}"
                raise PlanError(f"unknown {name} of a machine", where=f"machine, {name}", found=found)

    @classmethod
    def from_flags(
        cls,
        gpus: Sequence[str],
        host: str,
        gpu_bandwidth: str | None = None,
        host_bandwidth: str | None = None,
        mode: str = "ep",
    ) -> Machine:
        """Machine from command-line words, e.g. `--gpu 96GiB:8GiB --gpu 96GiB --host 128GB`.

        A card is BYTES or BYTES:RESERVE. Bandwidths are bytes per second in the same units ("1792GB"), of every card
        and of its zero-copy reads; None takes the defaults of this module.
        """
        cards = []
        bandwidth = GPU_BANDWIDTH if gpu_bandwidth is None else parse_bytes(gpu_bandwidth)
        for text in gpus:
            size, colon, reserve = text.partition(":")
            cards.append(Gpu(parse_bytes(size), parse_bytes(reserve) if colon else 0, bandwidth))
        zero_copy = ZERO_COPY if host_bandwidth is None else parse_bytes(host_bandwidth)
        return cls(tuple(cards), parse_bytes(host), mode, zero_copy)

    @property
    def places(self) -> tuple[str, ...]:
        """("gpu0", ..., "host"), or ("cards", "host") where every expert lies on all cards in slices."""
        if self.mode == "tp":
            return ("cards", "host")
        return (*(f"gpu{card}" for card in range(len(self.gpus))), "host")

    @property
    def budgets(self) -> tuple[int, ...]:
        """Bytes that weights may take on each place, host last. "cards" is what each of the cards may hold."""
        cards = tuple(gpu.bytes - gpu.reserve for gpu in self.gpus)
        return (*((min(cards),) if self.mode == "tp" else cards), self.host_bytes)

    @property
    def links(self) -> int:
        """How many cards read host memory at `zero_copy` and `copy_engine` at the same time."""
        return 1 if self.shared_root else len(self.gpus)

    def pinned(self, size: int) -> int:
        """Bytes of host memory that one expert or table of `size` bytes takes."""
        return size if self.pinning == "exact" or size < 2 else 1 << (size - 1).bit_length()


def _check_speed(where: str, **speeds: int) -> None:
    for name, value in speeds.items():
        if type(value) is not int or not 0 < value <= LARGEST:
            found = f"found {name} {value!r}"
            raise PlanError("bandwidths are whole, positive bytes per second", where=f"{where}, {name}", found=found)


def _check_time(where: str, **times: int) -> None:
    for name, value in times.items():
        if type(value) is not int or not 0 <= value <= MAX_NS:
            found = f"expected 0 to 10^12, found {value!r}"
            raise PlanError("times are whole nanoseconds", where=f"{where}, {name}", found=found)

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
HOST_BANDWIDTH = 22_000_000_000

UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}
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


@dataclass(frozen=True)
class Gpu:
    """One card. bytes: its memory; reserve: bytes of it kept free of weights (KV cache, graphs, others)."""

    bytes: int
    reserve: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.reserve <= self.bytes <= LARGEST:
            raise PlanError(
                "a card cannot reserve more than it has",
                where="gpu",
                found=f"expected 0 <= reserve <= bytes, found reserve {self.reserve} B of {self.bytes} B",
                mend="give --gpu BYTES or --gpu BYTES:RESERVE",
            )


@dataclass(frozen=True)
class Machine:
    """Cards and host of one box. Places are named gpu0, gpu1, ..., host, in this order everywhere.

    gpus: the cards. host_bytes: host memory that experts and Engram tables may take.
    gpu_bandwidth, host_bandwidth: bytes per second at which a card reads an expert from its own memory and
    from the host.
    mode: "ep" (expert parallel: each expert is whole on one place).
    """

    gpus: tuple[Gpu, ...]
    host_bytes: int
    gpu_bandwidth: int = GPU_BANDWIDTH
    host_bandwidth: int = HOST_BANDWIDTH
    mode: str = "ep"

    def __post_init__(self) -> None:
        if not 1 <= len(self.gpus) <= 64:
            raise PlanError("a machine has 1 to 64 cards", where="machine", found=f"found {len(self.gpus)}")
        if not 0 <= self.host_bytes <= LARGEST:
            raise PlanError("host memory out of range", where="machine", found=f"found {self.host_bytes} B")
        if not (0 < self.gpu_bandwidth <= LARGEST and 0 < self.host_bandwidth <= LARGEST):
            raise PlanError(
                "bandwidths are whole, positive bytes per second",
                where="machine",
                found=f"found gpu {self.gpu_bandwidth}, host {self.host_bandwidth}",
            )
        if self.mode != "ep":
            raise PlanError("unknown placement mode", where="machine", found=f"expected ep, found {self.mode!r}")

    @classmethod
    def from_flags(
        cls,
        gpus: Sequence[str],
        host: str,
        gpu_bandwidth: str | None = None,
        host_bandwidth: str | None = None,
    ) -> Machine:
        """Machine from command-line words, e.g. `--gpu 96GiB:8GiB --gpu 96GiB --host 128GB`.

        A card is BYTES or BYTES:RESERVE. Bandwidths are bytes per second in the same units ("1792GB"); None
        takes the defaults of this module.
        """
        cards = []
        for text in gpus:
            size, colon, reserve = text.partition(":")
            cards.append(Gpu(parse_bytes(size), parse_bytes(reserve) if colon else 0))
        return cls(
            tuple(cards),
            parse_bytes(host),
            GPU_BANDWIDTH if gpu_bandwidth is None else parse_bytes(gpu_bandwidth),
            HOST_BANDWIDTH if host_bandwidth is None else parse_bytes(host_bandwidth),
        )

    @property
    def places(self) -> tuple[str, ...]:
        """("gpu0", ..., "host")."""
        return (*(f"gpu{card}" for card in range(len(self.gpus))), "host")

    @property
    def budgets(self) -> tuple[int, ...]:
        """Bytes that weights may take on each place, host last."""
        return (*(gpu.bytes - gpu.reserve for gpu in self.gpus), self.host_bytes)

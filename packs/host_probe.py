"""What Linux says about this machine's host, and how fast its memory is read. Parsing is apart from reading files."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from ..parallel import default_threads, ordered_map

FEATURES: Final = (
    *("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512vbmi", "avx512_vbmi2"),
    *("avx_vnni", "amx_int8", "amx_bf16", "asimd", "sve"),
)
"""Flags of /proc/cpuinfo that encoders and CPU experts ask for."""

UNLIMITED: Final = 1 << 60  # cgroup v1 writes 2^63 rounded down to a page where there is no limit
CHUNK: Final = 16 << 20
MEASURED: Final = 1 << 30  # bytes read in one pass, and at least four times the last-level cache
PASSES: Final = 4


@dataclass(frozen=True)
class MemoryLimit:
    """The tightest memory limit of the process's control groups. used: bytes, without cache that can be dropped."""

    bytes: int
    used: int
    file: str


@dataclass(frozen=True)
class NumaNode:
    """cpus: a list as Linux writes it, such as "0-15". memory: bytes."""

    number: int
    cpus: str
    memory: int


@dataclass(frozen=True)
class Host:
    """This machine without its cards. cpus: those the process may use. memory, available, swap, disk_free: bytes.

    memlock: RLIMIT_MEMLOCK in bytes, None for no limit. huge_pages: (bytes of a page, how many are set aside).
    transparent: the mode of transparent huge pages.
    """

    system: str
    cpu: str
    features: tuple[str, ...]
    cpus: int
    memory: int
    available: int
    limit: MemoryLimit | None
    memlock: int | None
    swap: int
    huge_pages: tuple[tuple[int, int], ...]
    transparent: str
    numa: tuple[NumaNode, ...]
    folder: str
    disk_free: int

    @property
    def free(self) -> int:
        """Bytes that a new process could have, under the limit too."""
        return self.available if self.limit is None else max(0, min(self.available, self.limit.bytes - self.limit.used))


def read_host(root: Path = Path("/"), folder: Path | None = None) -> Host:
    """Host as the files under `root` describe it. folder: whose disk is meant; None for the working directory."""
    folder = folder or Path.cwd()
    memory = parse_meminfo(_text(root / "proc/meminfo"))
    pages = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_AVPHYS_PAGES")
    total, available = (count * os.sysconf("SC_PAGE_SIZE") for count in pages)
    cpu, flags = parse_cpuinfo(_text(root / "proc/cpuinfo"))
    total = memory.get("MemTotal", total)
    limit = cgroup_limit(root)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Host(
        system=f"{parse_os_release(_text(root / 'etc/os-release')) or platform.system()}, kernel {platform.release()}",
        cpu=cpu or platform.machine(),
        features=tuple(name for name in FEATURES if name in flags),
        cpus=default_threads(),
        memory=total,
        available=memory.get("MemAvailable", available),
        limit=limit if limit is not None and limit.bytes < total else None,
        memlock=None if soft == resource.RLIM_INFINITY else soft,
        swap=memory.get("SwapTotal", 0),
        huge_pages=_huge_pages(root / "sys/kernel/mm/hugepages"),
        transparent=parse_choice(_text(root / "sys/kernel/mm/transparent_hugepage/enabled")),
        numa=_numa(root / "sys/devices/system/node"),
        folder=str(folder),
        disk_free=shutil.disk_usage(folder).free,
    )


def parse_meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo, or a NUMA node's: bytes of every line that counts kB."""
    return {name: int(number) * 1024 for name, number in re.findall(r"([\w()]+):\s+([0-9]{1,15}) kB\b", text)}


def parse_cpuinfo(text: str) -> tuple[str, frozenset[str]]:
    """(model name, flags) of the first processor in /proc/cpuinfo; "" and no flags where they are not told."""
    first: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            first.setdefault(name.strip(), value.strip())
    return first.get("model name", ""), frozenset(first.get("flags", first.get("Features", "")).split())


def parse_os_release(text: str) -> str:
    """The name for people in /etc/os-release, or ""."""
    for line in text.splitlines():
        if line.startswith("PRETTY_NAME="):
            return line.partition("=")[2].strip("\"' ")
    return ""


def parse_choice(text: str) -> str:
    """The word in brackets: "always [madvise] never" -> "madvise"; else ""."""
    return text.partition("[")[2].partition("]")[0]


def cgroup_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """The tightest limit of the process's own control group and those above it, version 1 or 2; None without one.

    In a container the path in /proc/self/cgroup may be the host's, and not be there: its groups are then skipped.
    """
    tightest: MemoryLimit | None = None
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = ([*line.split(":", 2), "", ""])[:3]
        if number == "0" and not controllers:
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        inner = Path(path.lstrip("/"))
        for group in (inner, *inner.parents):
            limit = _group_limit(mount / group, *names)
            if limit is not None and (tightest is None or limit.bytes - limit.used < tightest.bytes - tightest.used):
                tightest = limit
    return tightest


def _group_limit(group: Path, limit: str, usage: str, cache: str) -> MemoryLimit | None:
    value, used = _text(group / limit).strip(), _text(group / usage).strip()
    if not value.isdecimal() or int(value) >= UNLIMITED:
        return None
    droppable = 0
    for line in _text(group / "memory.stat").splitlines():
        match line.split():
            case [name, number] if name == cache and number.isdecimal():
                droppable = int(number)
    return MemoryLimit(int(value), max(0, (int(used) if used.isdecimal() else 0) - droppable), str(group / limit))


def _huge_pages(folder: Path) -> tuple[tuple[int, int], ...]:
    found = []
    for entry in folder.glob("hugepages-*kB"):
        size, count = entry.name.removeprefix("hugepages-").removesuffix("kB"), _text(entry / "nr_hugepages").strip()
        if size.isdecimal() and count.isdecimal():
            found.append((int(size) * 1024, int(count)))
    return tuple(sorted(found))


def _numa(folder: Path) -> tuple[NumaNode, ...]:
    nodes = []
    for entry in folder.glob("node[0-9]*"):
        memory = parse_meminfo(_text(entry / "meminfo")).get("MemTotal", 0)
        nodes.append(NumaNode(int(entry.name.removeprefix("node")), _text(entry / "cpulist").strip(), memory))
    return tuple(sorted(nodes, key=lambda node: node.number))


def _text(path: Path) -> str:
    """A small file of the system, or "" where there is none that may be read."""
    with suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def last_level_cache(root: Path = Path("/")) -> int:
    """Bytes of the largest cache of CPU 0, 0 where Linux does not tell."""
    sizes = [_text(file).strip() for file in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) * 1024 for size in sizes if size[:-1].isdecimal() and size.endswith("K")), default=0)


def read_bandwidth(threads: int, free: int, size: int | None = None) -> int | None:
    """Bytes per second at which `threads` threads together read host memory: the best of a few passes of plain sums.

    A pass reads `size` bytes, by default 1 GiB or four times the last-level cache, in chunks of 16 MiB.
    None where `free` bytes are less than four times that.
    """
    size = max(MEASURED, 4 * last_level_cache()) if size is None else size
    if free < 4 * size:
        return None
    chunks = torch.ones(size // 4, dtype=torch.float32).split(CHUNK // 4)
    best = float("inf")
    for _ in range(PASSES):
        start = time.perf_counter()
        for _total in ordered_map(torch.Tensor.sum, chunks, threads):
            pass
        best = min(best, time.perf_counter() - start)
    return int(size // 4 * 4 / best)

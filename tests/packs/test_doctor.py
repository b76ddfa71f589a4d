"""`examine_machine`: recorded texts through the parsers, what follows from findings, this machine, and a real card."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moefit.packs import card_probe, doctor, host_probe
from moefit.packs.card_probe import Card, LinkSpeed, link_speeds, parse_nvidia_smi, pci_address, root_port, with_link
from moefit.packs.doctor import Findings, Software, examine_machine
from moefit.packs.host_probe import Host, MemoryLimit, cgroup_limit, parse_cpuinfo, parse_meminfo, read_host
from moefit.placement.machine import COPY_ENGINE, GPU_BANDWIDTH, ZERO_COPY
from moefit.placement.machine_file import parse_machine

needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card")
two_cards = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA cards")
GB, MIB = 10**9, 1 << 20

SMI = """\
GPU-0d1f2c33-85b2-b4a8-826b-41e27da2881e, NVIDIA RTX PRO 6000 Blackwell Workstation Edition, 97887, 2412, 580.95.05, 00000000:C1:00.0, 12.0
GPU-FF1f2c33-85b2-b4a8-826b-41e27da2881e, NVIDIA RTX PRO 6000 Blackwell Workstation Edition, 97887, 4, 580.95.05, 00000000:E1:00.0, 12.0
"""  # noqa: E501
"""As nvidia-smi prints its fields in CSV, without header and units."""

MEMINFO = """\
MemTotal:       131841812 kB
MemFree:         1822548 kB
MemAvailable:   98304000 kB
SwapTotal:       8388604 kB
Active(anon):   12345 kB
HugePages_Total:       3
"""

CPUINFO = """\
processor\t: 0
model name\t: AMD Ryzen 9 7950X 16-Core Processor
flags\t\t: fpu avx2 fma f16c avx512f avx512bw avx512vl avx512_vnni avx512vbmi avx512_vbmi2 sse

processor\t: 1
model name\t: another
"""


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


# Parsers


def test_meminfo() -> None:
    found = parse_meminfo(MEMINFO)
    assert (found["MemTotal"], found["SwapTotal"]) == (131_841_812 * 1024, 8_388_604 * 1024)
    assert found["Active(anon)"] == 12_345 * 1024
    assert "HugePages_Total" not in found
    assert parse_meminfo("Node 1 MemTotal:       65536 kB\nnonsense\nA: -3 kB") == {"MemTotal": 1 << 26}


def test_cpuinfo() -> None:
    model, flags = parse_cpuinfo(CPUINFO)
    assert model == "AMD Ryzen 9 7950X 16-Core Processor"
    assert {"avx2", "avx512vbmi"} < flags
    assert parse_cpuinfo("processor : 0\nFeatures : fp asimd sve\n") == ("", frozenset({"fp", "asimd", "sve"}))
    assert parse_cpuinfo("") == ("", frozenset())


def test_nvidia_smi() -> None:
    (uuid, first), (_, second) = parse_nvidia_smi(SMI)
    assert uuid == "0d1f2c33-85b2-b4a8-826b-41e27da2881e"
    assert first == Card(
        *("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97_887 * MIB, 2_412 * MIB, "12.0", "580.95.05"),
        pci="0000:c1:00.0",
    )
    assert (second.used, second.pci) == (4 * MIB, "0000:e1:00.0")


@pytest.mark.parametrize(
    "text",
    ["", "No devices were found\n", "a, b\n", SMI.replace("97887", "[N/A]"), SMI.replace("97887", "[Not Supported]")],
)
def test_nvidia_smi_without_cards(text: str) -> None:
    assert parse_nvidia_smi(text) == []


def test_nvidia_smi_that_does_not_know_everything() -> None:
    fields = card_probe.SMI_FIELDS[:-1]
    (entry,) = parse_nvidia_smi("GPU-aa, Tesla, 16160, [N/A], 470.82.01, 00000000:3B:00.0\n", fields)
    assert entry == ("aa", Card("Tesla", 16_160 * MIB, 0, "", "470.82.01", "0000:3b:00.0"))


def fake_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(card_probe.shutil, "which", lambda _: str(program))


def test_running_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_probe.shutil, "which", lambda _: None)
    assert card_probe.run_nvidia_smi() == ("", (), "")
    fake_smi(
        tmp_path,
        monkeypatch,
        "case $1 in *compute_cap*) echo 'Field \"compute_cap\" is not valid'; exit 2;; esac; echo x",
    )
    assert card_probe.run_nvidia_smi() == ("x\n", card_probe.SMI_FIELDS[:-1], "")
    fake_smi(tmp_path, monkeypatch, "echo 'Failed to initialize NVML:'; echo 'Driver mismatch'; exit 18")
    assert card_probe.run_nvidia_smi() == ("", (), "Failed to initialize NVML: Driver mismatch")

    def late(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", 30)

    monkeypatch.setattr(card_probe.subprocess, "run", late)
    assert "does not answer" in card_probe.run_nvidia_smi()[2]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("00000000:C1:00.0", "0000:c1:00.0"),
        ("0001:3b:00.1", "0001:3b:00.1"),
        ("10000:01:00.0", "10000:01:00.0"),
        ("3B:00.0", "0000:3b:00.0"),
        ("", ""),
        ("../../etc", ""),
    ],
)
def test_pci_addresses(text: str, address: str) -> None:
    assert pci_address(text) == address


def test_root_ports() -> None:
    assert root_port("/sys/devices/pci0000:c0/0000:c0:01.1/0000:c1:00.0") == "0000:c0:01.1"
    assert root_port("/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:08.0/0000:03:00.0") == "0000:00:01.0"
    assert root_port("/sys/devices/pci0000:00/0000:00:06.0") == ""  # a virtual machine's
    assert root_port("/sys/devices/platform/x") == ""


def test_links_from_sys(tmp_path: Path) -> None:
    """Two cards behind a switch, one on a slot of its own at half its lanes, one that /sys does not know."""
    behind = {"01": "pci0000:00/0000:00:01.0/0000:02:00.0", "03": "pci0000:00/0000:00:01.0/0000:04:00.0"}
    paths = behind | {"41": "pci0000:40/0000:40:01.1"}
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    for bus, path in paths.items():
        device = tmp_path / "sys/devices" / path / f"0000:{bus}:00.0"
        write(device, {"current_link_width": "8\n" if bus == "41" else "16\n", "max_link_width": "16\n"})
        (tmp_path / f"sys/bus/pci/devices/0000:{bus}:00.0").symlink_to(device)
    cards = [with_link(Card("c", 1, 0, pci=f"0000:{bus}:00.0"), tmp_path) for bus in ("01", "03", "41", "51")]
    assert [card.port for card in cards] == ["0000:00:01.0", "0000:00:01.0", "0000:40:01.1", ""]
    assert [card.lanes for card in cards] == [(16, 16), (16, 16), (8, 16), (0, 0)]
    assert card_probe.links(cards) == 3
    assert card_probe.links(cards[:2]) == 1
    assert card_probe.links([Card("c", 1, 0)] * 2) == 2


def test_cgroup_version_2(tmp_path: Path) -> None:
    """The tightest of the group and those above it; cache that can be dropped is not in use."""
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user/job\n",
            "sys/fs/cgroup/user/memory.max": f"{64 * GB}\n",
            "sys/fs/cgroup/user/memory.current": f"{10 * GB}\n",
            "sys/fs/cgroup/user/memory.stat": f"anon 5\ninactive_file {4 * GB}\n",
            "sys/fs/cgroup/user/job/memory.max": "max\n",
            "sys/fs/cgroup/user/job/memory.current": "5\n",
        },
    )
    assert cgroup_limit(tmp_path) == MemoryLimit(64 * GB, 6 * GB, str(tmp_path / "sys/fs/cgroup/user/memory.max"))
    write(tmp_path, {"sys/fs/cgroup/user/job/memory.max": f"{20 * GB}\n"})
    assert cgroup_limit(tmp_path) == MemoryLimit(20 * GB, 5, str(tmp_path / "sys/fs/cgroup/user/job/memory.max"))


def test_cgroup_version_1(tmp_path: Path) -> None:
    """In a container that sees the host's path: its own group is mounted as the root."""
    memory = "sys/fs/cgroup/memory"
    write(
        tmp_path,
        {
            "proc/self/cgroup": "8:pids:/a\n4:cpu,memory:/docker/0123\n0::/\nnonsense\n",
            f"{memory}/memory.limit_in_bytes": f"{32 * GB}\n",
            f"{memory}/memory.usage_in_bytes": f"{3 * GB}\n",
            f"{memory}/memory.stat": f"inactive_file 1\ntotal_inactive_file {GB}\n",
        },
    )
    found = cgroup_limit(tmp_path)
    assert found == MemoryLimit(32 * GB, 2 * GB, str(tmp_path / memory / "memory.limit_in_bytes"))
    write(tmp_path, {f"{memory}/memory.limit_in_bytes": "9223372036854771712\n"})
    assert cgroup_limit(tmp_path) is None
    assert cgroup_limit(tmp_path / "nothing") is None


def test_a_host_from_its_files(tmp_path: Path) -> None:
    node = "sys/devices/system/node/node"
    pages = "sys/kernel/mm/hugepages/hugepages"
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/cpuinfo": CPUINFO,
            "proc/self/cgroup": "0::/\n",
            "etc/os-release": 'NAME="x"\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n',
            "sys/fs/cgroup/memory.max": f"{48 * GB}",
            "sys/fs/cgroup/memory.current": f"{8 * GB}",
            f"{pages}-2048kB/nr_hugepages": "0\n",
            f"{pages}-1048576kB/nr_hugepages": "3\n",
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
            f"{node}1/cpulist": "8-15\n",
            f"{node}1/meminfo": "Node 1 MemTotal: 1024 kB\n",
            f"{node}0/cpulist": "0-7\n",
            "sys/devices/system/cpu/cpu0/cache/index3/size": "32768K\n",
        },
    )
    host = read_host(tmp_path, tmp_path)
    assert host.system.startswith("Debian GNU/Linux 12 (bookworm), kernel ")
    assert host.features == ("avx2", "fma", "f16c", *("avx512f", "avx512bw", "avx512vl", "avx512_vnni"), "avx512vbmi", "avx512_vbmi2")  # fmt: skip  # noqa: E501
    assert (host.memory, host.available) == (131_841_812 * 1024, 98_304_000 * 1024)
    assert host.free == 40 * GB
    assert host.huge_pages == ((2 * MIB, 0), (1024 * MIB, 3))
    assert host.transparent == "madvise"
    assert [(n.number, n.cpus, n.memory) for n in host.numa] == [(0, "0-7", 0), (1, "8-15", MIB)]
    assert host_probe.last_level_cache(tmp_path) == 32 * MIB
    write(tmp_path, {"sys/fs/cgroup/memory.max": f"{480 * GB}"})
    assert read_host(tmp_path, tmp_path).limit is None  # above the memory there is


# What follows from findings


HOST = Host("Linux", "cpu", ("avx2",), 16, 128 * GB, 100 * GB, None, None, 0, (), "", (), "packs", 500 * GB)
SOFTWARE = Software("2.11.0", "13.0", True, ("avx512", "avx2", "plain"), True)
CARD = Card("NVIDIA RTX PRO 6000", 97_887 * MIB, 2_412 * MIB, "12.0", "580.95.05", bandwidth=1_612_345_678_901)


def findings(*cards: Card, host: Host = HOST, software: Software = SOFTWARE, **more: LinkSpeed) -> Findings:
    return Findings(host, cards, software, 16, **more)


def outcomes(found: Findings) -> dict[str, str]:
    return {check.name: check.outcome for check in found.checks()}


def says(found: Findings, name: str) -> str:
    (check,) = (check for check in found.checks() if check.name == name)
    assert (check.outcome == "pass") == (not check.mend)
    return f"{check.text}. {check.mend}"


def test_the_machine_that_was_found() -> None:
    other = replace(CARD, used=0)
    speed = LinkSpeed((56 * GB, 55 * GB), 108_345_678_901)
    found = findings(CARD, other, copy=speed, zero=LinkSpeed((25 * GB, 25 * GB), 49 * GB))
    machine = found.machine()
    assert found.reserves[0] == {"kv_cache": 5 * GB, "graphs": GB, "other": 2_530_000_000}
    assert [gpu.reserve for gpu in machine.gpus] == [8_530_000_000, 6 * GB]
    assert machine.gpus[0].bytes == 97_887 * MIB
    assert machine.gpus[0].bandwidth == 1_612_300_000_000
    assert (machine.copy_engine, machine.zero_copy) == (54_100_000_000, 24_500_000_000)  # of each, all at it
    assert (machine.shared_root, machine.cpu, machine.host_bytes) == (False, None, 90 * GB)
    assert outcomes(found) == dict.fromkeys(
        ("encoder", "cards", "driver", "CUDA library", "PCIe", "memory", "memlock", "disk"), "pass"
    )
    assert not found.failed
    assert parse_machine(found.toml().encode()) == machine
    assert '{ kv_cache = "5GB", graphs = "1GB", other = "2530MB" }' in found.toml()


def test_every_number_of_the_file_says_where_it_is_from() -> None:
    for found in (findings(), findings(CARD), findings(replace(CARD, bandwidth=None), CARD)):
        for line in found.toml().splitlines():
            if " = " in line and not line.startswith(("#", "version", "mode")):
                assert any(f"# {word}" in line for word in ("read:", "measured:", "default", "one card")), line


def test_small_cards_keep_less_free_and_full_ones_everything() -> None:
    assert findings(Card("small", 24 * GB, 0)).reserves == [
        {"kv_cache": 1_500 * 10**6, "graphs": 750 * 10**6, "other": 0}
    ]
    full = findings(Card("full", 24_000 * MIB, 23_990 * MIB))
    assert full.machine().budgets[0] == 0
    assert "no room" in says(full, "card memory")
    assert "others use" in says(findings(replace(CARD, used=9 * GB)), "card memory")


@pytest.mark.parametrize(
    ("free", "margin"), [(100 * GB, 10 * GB), (40 * GB, 4 * GB), (10 * GB, 4 * GB), (3 * GB, 3 * GB), (0, 0)]
)
def test_the_margin(free: int, margin: int) -> None:
    found = findings(CARD, host=replace(HOST, available=free))
    assert (found.margin, found.machine().host_bytes) == (margin, free - margin)
    assert outcomes(found)["memory"] == ("pass" if free > margin else "warn")


def test_cards_behind_one_root_port() -> None:
    """Without a measurement one link's speed is of all cards; two pairs behind two ports get half of it each."""
    ports = [replace(CARD, port=port) for port in ("0000:00:01.0", "0000:00:01.0", "0000:40:01.1", "0000:40:01.1")]
    pair = findings(*ports[:2])
    assert pair.shared_root
    assert (pair.machine().zero_copy, pair.machine().copy_engine) == (ZERO_COPY, COPY_ENGINE)
    assert "gpu0 and gpu1 behind root port 0000:00:01.0" in says(pair, "PCIe")
    four = findings(*ports)
    assert not four.shared_root
    assert (four.machine().zero_copy, four.machine().copy_engine) == (ZERO_COPY // 2, COPY_ENGINE // 2)
    assert "gpu2 and gpu3 behind root port 0000:40:01.1" in says(four, "PCIe")


def test_cards_that_are_slow_together() -> None:
    found = findings(
        CARD, CARD, copy=LinkSpeed((50 * GB, 50 * GB), 52 * GB), zero=LinkSpeed((24 * GB, 24 * GB), 25 * GB)
    )
    machine = found.machine()
    assert (machine.shared_root, machine.links, machine.copy_engine, machine.zero_copy) == (True, 1, 52 * GB, 25 * GB)
    assert "together 52.0 GB/s, alone 100.0 GB/s" in says(found, "PCIe")
    assert not LinkSpeed((50 * GB,), 20 * GB).shared


def test_no_card() -> None:
    found = findings(software=replace(SOFTWARE, cuda="", usable=False, library=False))
    assert outcomes(found) == {"encoder": "pass", "cards": "warn", "memory": "pass", "disk": "pass"}
    machine = found.machine()
    assert [gpu.bytes - gpu.reserve for gpu in machine.gpus] == [88 * GB, 88 * GB]
    assert machine.gpus[0].bandwidth == GPU_BANDWIDTH
    assert "default: no card was found here" in found.toml()


def test_neither_avx2_nor_a_card_is_a_failure() -> None:
    plain = replace(SOFTWARE, encoders=("plain",))
    assert outcomes(findings(CARD, software=plain))["encoder"] == "warn"
    for usable, library in ((False, True), (True, False)):
        found = findings(CARD, software=replace(plain, usable=usable, library=library))
        assert found.failed
        assert outcomes(found)["encoder"] == "fail"


@pytest.mark.parametrize(
    ("driver", "cuda", "outcome"),
    [
        ("580.95.05", "13.0", "pass"),
        ("575.51.03", "13.0", "warn"),
        ("575.51.03", "12.8", "pass"),
        ("470.82.01", "12.1", "warn"),
        ("575.51.03", "", "warn"),
        ("", "13.0", None),
    ],
)
def test_drivers(driver: str, cuda: str, outcome: str | None) -> None:
    found = findings(replace(CARD, driver=driver), software=replace(SOFTWARE, cuda=cuda))
    assert outcomes(found).get("driver") == outcome


def test_other_warnings() -> None:
    limit = MemoryLimit(32 * GB, 2 * GB, "memory.max")
    host = replace(HOST, limit=limit, memlock=8 * MIB, disk_free=GB)
    software = replace(SOFTWARE, usable=False, cuda="", smi="Failed to initialize NVML")
    found = findings(replace(CARD, lanes=(8, 16)), host=host, software=software)
    assert "gpu0 runs at x8 of x16 PCIe lanes" in says(found, "PCIe")
    assert "32,000,000,000 of 128,000,000,000 B" in says(found, "memory limit")
    assert "below the 26,000,000,000 B that may be pinned" in says(found, "memlock")
    assert "1,000,000,000 B free" in says(found, "disk")
    assert "torch 2.11.0 was built without CUDA" in says(found, "cards")
    assert "Failed to initialize NVML" in says(found, "nvidia-smi")
    assert not found.failed


def test_the_page() -> None:
    """docs/machine.md names the sizes and limits of the code."""
    page = " ".join((Path(__file__).resolve().parents[2] / "docs" / "machine.md").read_text().split())
    for text in (
        f"a copy of {card_probe.CARD_BUFFER >> 30} GiB within the card, ",
        f"best of {card_probe.PASSES} passes",
        f"{card_probe.HOST_BUFFER >> 20} MiB of pinned memory to each card",
        f"less than {card_probe.SHARED:g} of the sum of each alone",
        f"at least {doctor.MARGIN // GB} GB",
        f"`reserve.kv_cache` ({doctor.KV_CACHE // GB} GB, at most 1/{doctor.KV_SHARE} of the card)",
        f"`reserve.graphs` ({doctor.GRAPHS // GB} GB, at most 1/{doctor.GRAPHS_SHARE})",
    ):
        assert text in page, text


# This machine


def test_host_memory_is_read_at_some_speed() -> None:
    speed = host_probe.read_bandwidth(2, 1 << 40, size=64 * MIB)
    assert speed is not None
    assert 10**8 < speed < 10**13
    assert host_probe.read_bandwidth(2, 255 * MIB, size=64 * MIB) is None


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_probe, "MEASURED", 64 * MIB)
    monkeypatch.setattr(host_probe, "last_level_cache", lambda: 0)
    found = examine_machine(threads=2)
    assert found.host.memory > found.host.free > 0
    assert found.host.cpus >= 1
    assert found.software.encoders[-1] == "plain"
    assert found.read is not None
    assert parse_machine(found.toml().encode()) == found.machine()
    assert found.summary()["machine"]["host_bytes"] == found.machine().host_bytes
    quick = examine_machine(quick=True)
    assert (quick.read, quick.copy, quick.zero) == (None, None, None)
    assert all(card.bandwidth is None for card in quick.cards)


def test_cards_that_torch_stumbles_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are told of as nvidia-smi knows them, and nothing is measured on them."""

    def broken(_: object) -> list[Card]:
        raise RuntimeError("CUDA driver initialization failed")

    (tmp_path / "csv").write_text(SMI)
    fake_smi(tmp_path, monkeypatch, f"cat {tmp_path / 'csv'}")
    monkeypatch.setattr(card_probe, "torch_cards", broken)
    monkeypatch.setattr(host_probe, "read_bandwidth", lambda *_: 10**10)
    found = examine_machine()
    assert [card.memory for card in found.cards] == [97_887 * MIB] * 2
    assert not found.software.usable
    assert "torch cannot use gpu0 NVIDIA RTX PRO 6000" in says(found, "cards")
    assert found.machine().gpus[1].reserve == 6 * GB + 5 * 10**6
    assert "default: of an RTX PRO 6000" in found.toml()


@needs_card
def test_a_real_card() -> None:
    """Its own memory is faster than PCIe, zero-copy is no faster than the link, and nothing stays taken."""
    before = torch.cuda.memory_allocated()
    found = examine_machine()
    assert torch.cuda.memory_allocated() == before
    assert found.software.usable
    assert len(found.cards) == torch.cuda.device_count()
    for card in found.cards:
        assert 0 <= card.used <= card.memory
        assert card.bandwidth is not None
        assert 10**11 < card.bandwidth < 2 * 10**13
    assert found.copy is not None
    assert found.zero is not None
    assert max(found.copy.each) < min(card.bandwidth or 0 for card in found.cards)
    assert 10**9 < min(found.zero.each) < 2 * max(found.copy.each)
    assert found.copy.together >= 0.8 * max(found.copy.each)
    assert parse_machine(found.toml().encode()) == found.machine()


@needs_card
def test_pinned_memory_is_read_in_place() -> None:
    pinned = torch.arange(1024, dtype=torch.float32).pin_memory()
    view = card_probe._mapped(pinned, 0)
    pinned[3] = 77.0
    assert view.is_cuda
    assert torch.equal(view.cpu(), pinned)


@needs_card
def test_nvidia_smi_and_torch_mean_the_same_card() -> None:
    csv, fields, problem = card_probe.run_nvidia_smi()
    if not csv:
        pytest.skip(problem or "no nvidia-smi")
    for card in card_probe.torch_cards(parse_nvidia_smi(csv, fields)):
        assert card.driver
        assert card.pci


@two_cards
def test_cards_together() -> None:
    copy, zero = link_speeds(torch.cuda.device_count())
    assert copy is not None
    assert zero is not None
    assert copy.together <= 1.2 * sum(copy.each)

"""Byte units and machine descriptions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moefit.errors import PlanError
from moefit.placement import Gpu, Machine, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("4096", 4096),
        ("17 B", 17),
        ("8MB", 8_000_000),
        ("8mb", 8_000_000),
        (" 64 KiB ", 65_536),
        ("24GB", 24_000_000_000),
        ("96GiB", 103_079_215_104),
        ("1.5GiB", 1_610_612_736),
        ("0.001kB", 1),
        ("2TB", 2_000_000_000_000),
        ("2TiB", 2_199_023_255_552),
        ("97887MiB", 102_641_958_912),
    ],
)
def test_units(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


NONSENSE = (
    *("", "MB", "8 M", "8M", "8GG", "-8MB", "+8MB", "8,5MB", "1e9", "nan", "inf", "0x10", "8MB8", "٣MB", "1_000"),
    *("0.5B", "0.3KiB", "9" * 31, "9223372036854775808", "8388608TiB", "8 MB MB", ".5GB", "5.GB"),
)


@pytest.mark.parametrize("text", NONSENSE)
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_bytes(text)
    assert text in str(caught.value)


def test_a_missing_b_is_suggested() -> None:
    with pytest.raises(PlanError, match=r'"8GB" \(thousands\) or "8GiB" \(1024s\)'):
        parse_bytes("8G")


@given(st.integers(0, 2**63 - 1))
def test_plain_bytes_come_back(value: int) -> None:
    assert parse_bytes(str(value)) == parse_bytes(f"{value}B") == value


def test_machine_from_flags() -> None:
    machine = Machine.from_flags(["8MB", "8MB:1MiB"], "64MB")
    assert machine.places == ("gpu0", "gpu1", "host")
    assert machine.budgets == (8_000_000, 8_000_000 - 2**20, 64_000_000)
    assert (machine.gpu_bandwidth, machine.host_bandwidth) == (1_792_000_000_000, 22_000_000_000)
    assert Machine.from_flags(["1GB"], "0", "1TB", "56GB").host_bandwidth == 56_000_000_000


@pytest.mark.parametrize(
    ("gpus", "host", "message"),
    [
        ([], "1GB", "1 to 64 cards"),
        (["1GB"] * 65, "1GB", "found 65"),
        (["1GB:2GB"], "1GB", "reserve 2000000000 B of 1000000000 B"),
        (["1GB:"], "1GB", "not a number of bytes"),
        (["1GB"], "lots", "lots"),
    ],
)
def test_impossible_machines_are_refused(gpus: list[str], host: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Machine.from_flags(gpus, host)


def test_zero_bandwidth_and_unknown_mode_are_refused() -> None:
    with pytest.raises(PlanError, match="bandwidths"):
        Machine((Gpu(1),), 1, gpu_bandwidth=0)
    with pytest.raises(PlanError, match="mode"):
        Machine((Gpu(1),), 1, mode="tp")

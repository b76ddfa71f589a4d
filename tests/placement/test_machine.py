"""Byte units and machine descriptions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moefit.errors import PlanError
from moefit.placement.machine import UNITS, Cpu, Gpu, Machine, bytes_text, parse_bytes


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


@given(
    st.integers(0, 2**63 - 1) | st.builds(lambda n, u: n * u, st.integers(0, 9999), st.sampled_from([*UNITS.values()]))
)
def test_bytes_as_text_come_back(value: int) -> None:
    text = bytes_text(value)
    assert parse_bytes(text) == value
    assert len(text) <= max(1, len(str(value)))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (450, "450"),
        (8_000_000_000, "8GB"),
        (96 * 2**30, "96GiB"),
        (1_612_300_000_000, "1612.3GB"),
        (143_771 * 2**20, "143771MiB"),
        (13_315_596, "13315596"),
    ],
)
def test_bytes_as_text(value: int, text: str) -> None:
    assert bytes_text(value) == text


def test_machine_from_flags() -> None:
    machine = Machine.from_flags(["8MB", "8MB:1MiB"], "64MB")
    assert machine.places == ("gpu0", "gpu1", "host")
    assert machine.budgets == (8_000_000, 8_000_000 - 2**20, 64_000_000)
    assert {gpu.bandwidth for gpu in machine.gpus} == {1_792_000_000_000}
    assert (machine.mode, machine.zero_copy, machine.copy_engine) == ("ep", 22_000_000_000, 56_000_000_000)
    other = Machine.from_flags(["1GB"], "0", "1TB", "25GB", "tp")
    assert (other.mode, other.gpus[0].bandwidth, other.zero_copy) == ("tp", 10**12, 25 * 10**9)


def test_tensor_parallel_cards_are_one_place() -> None:
    machine = Machine((Gpu(100, 10), Gpu(80, 5)), 50, "tp")
    assert machine.places == ("cards", "host")
    assert machine.budgets == (75, 50)


def test_links() -> None:
    cards = (Gpu(1), Gpu(1), Gpu(1))
    assert Machine(cards, 1).links == 3
    assert Machine(cards, 1, shared_root=True).links == 1


@given(st.integers(0, 2**40))
def test_pinned_memory_is_rounded_up_to_a_power_of_two(size: int) -> None:
    exact, rounded = (Machine((Gpu(1),), 1, pinning=pinning).pinned(size) for pinning in ("exact", "power-of-two"))
    assert exact == size
    assert size <= rounded <= max(2 * size - 1, size)
    assert rounded & (rounded - 1) == 0


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gpu(1, bandwidth=0), "gpu, bandwidth.*found bandwidth 0"),
        (lambda: Gpu(1, bandwidth=1.5), "gpu, bandwidth"),  # type: ignore[arg-type]
        (lambda: Gpu(1, token_ns=-1), "gpu, token_ns.*found -1"),
        (lambda: Gpu(1, -1), "reserve -1 B"),
        (lambda: Cpu(0), "cpu, bandwidth"),
        (lambda: Cpu(1, fixed_ns=10**12 + 1), "cpu, fixed_ns"),
        (lambda: Cpu(1, token_ns=True), "cpu, token_ns"),
        (lambda: Machine((Gpu(1),), -1), "host memory out of range"),
        (lambda: Machine((Gpu(1),), 1, zero_copy=0), "machine, zero_copy"),
        (lambda: Machine((Gpu(1),), 1, copy_engine=2**63), "machine, copy_engine"),
        (lambda: Machine((Gpu(1),), 1, "pp"), "unknown mode.*expected ep or tp, found 'pp'"),
        (lambda: Machine((Gpu(1),), 1, pinning="pages"), "unknown pinning.*exact or power-of-two"),
    ],
)
def test_numbers_that_no_machine_has(make: Callable[[], object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()

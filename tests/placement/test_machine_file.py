"""The machine file: read and written without loss, refused by file and key, and given instead of flags."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moefit.errors import PlanError
from moefit.placement.machine import LARGEST, PINNING, Cpu, Gpu, Machine
from moefit.placement.machine_file import (
    KEYS,
    MAX_FILE,
    machine_from_options,
    machine_toml,
    parse_machine,
    read_machine,
)

SMALLEST = """
version = 1
[[card]]
memory = "96GiB"
[host]
memory = "128GB"
"""

FULL = """
version = 1
mode = "tp"
[[card]]
memory = "96GiB"
reserve = { kv_cache = "5GB", graphs = 1_000_000_000, other = "2GB" }
bandwidth = "1500GB"
token_ns = 180
[[card]]
memory = 1_000
reserve = 10
[host]
memory = "128GB"
pinning = "power-of-two"
[pcie]
zero_copy = "25GB"
copy_engine = "50GB"
shared_root = true
[cpu]
bandwidth = "44GB"
fixed_ns = 110_000
token_ns = 160
"""

speeds, times, memory = st.integers(1, LARGEST), st.integers(0, 10**12), st.integers(0, LARGEST)


@st.composite
def cards(draw: st.DrawFn) -> Gpu:
    size = draw(memory)
    return Gpu(size, draw(st.integers(0, size)), draw(speeds), draw(times))


machines = st.builds(
    Machine,
    st.lists(cards(), min_size=1, max_size=4).map(tuple),
    memory,
    st.sampled_from(["ep", "tp"]),
    *(speeds, speeds, st.booleans()),
    st.none() | st.builds(Cpu, speeds, times, times),
    st.sampled_from(["exact", "power-of-two"]),
)


@given(machines, st.text(), st.booleans())
def test_a_machine_comes_back(machine: Machine, comment: str, parts: bool) -> None:
    """Whatever a comment says, and with the reserve in parts or as one number."""
    split = [{"kv_cache": gpu.reserve // 3, "other": gpu.reserve - gpu.reserve // 3} for gpu in machine.gpus]
    said = {"mode": comment, "card[0].reserve": comment, "host.memory": comment, "pcie.shared_root": comment}
    text = machine_toml(machine, said, split if parts else None)
    assert parse_machine(text.encode()) == machine
    assert text == machine_toml(machine, said, split if parts else None)


def test_every_key(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(FULL)
    assert read_machine(path) == Machine(
        (Gpu(96 * 2**30, 8 * 10**9, 1500 * 10**9, 180), Gpu(1000, 10)),
        *(128 * 10**9, "tp", 25 * 10**9, 50 * 10**9, True, Cpu(44 * 10**9, 110_000, 160), "power-of-two"),
    )


def test_defaults() -> None:
    assert parse_machine(SMALLEST.encode()) == Machine((Gpu(96 * 2**30),), 128 * 10**9)


def test_what_is_written_says_what_each_number_means() -> None:
    machine = parse_machine(FULL.encode())
    text = machine_toml(machine, {"card[1].memory": "read: another"}, [{"kv_cache": 8 * 10**9}, {"other": 10}])
    for table, keys in KEYS.items():
        for key, meaning in keys.items():
            if table or key == "mode":
                assert text.count(f"# {meaning}\n{key} = ") == 1, key
    assert 'reserve = { kv_cache = "8GB" }\n' in text
    assert "memory = 1_000  # read: another\n" in text or 'memory = "1kB"  # read: another\n' in text
    assert set(tomllib.loads(text)) == {"version", "mode", "card", "host", "pcie", "cpu"}


def test_comments_and_parts_that_do_not_fit_are_refused() -> None:
    machine = parse_machine(SMALLEST.encode())
    with pytest.raises(ValueError, match=r"card\[1\]\.memory"):
        machine_toml(machine, {"card[1].memory": "read"})
    for parts in ({"other": 1}, {"others": 0, "other": 1}):
        with pytest.raises(ValueError, match="do not add up to 0 B"):
            machine_toml(machine, None, [parts])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("version = 1", "", "m.toml, version]"),
        ("version = 1", "version = 2", "version]: expected 1, found 2"),
        ("version = 1", "version = true", "version]: expected 1, found True"),
        ('mode = "tp"', 'mode = "pp"', """mode]: expected "ep" or "tp", found 'pp'"""),
        ('mode = "tp"', "mode = 1", "mode]: expected"),
        ('mode = "tp"', 'mood = "tp"', "m.toml, mood]. Did you mean mode?"),
        ('mode = "tp"', "gpus = 2", "m.toml, gpus]. The keys here are version, mode, card, host, pcie, cpu."),
        ("bandwidth = \"1500GB\"", "bandwith = 1", "card[0].bandwith]. Did you mean bandwidth?"),
        ("token_ns = 180", "zero_copy = 1", "card[0].zero_copy]. Write zero_copy in pcie."),
        ("kv_cache =", "kvcache =", "card[0].reserve.kvcache]. Did you mean kv_cache?"),
        ("shared_root = true", 'other = "2GB"', "pcie.other]. Write other in card.reserve."),
        ("token_ns = 180", "token_ns = 1.5", "card[0].token_ns]: expected whole nanoseconds, 0 to 1000000000000, "),
        ("token_ns = 180", "token_ns = -1", "found -1"),
        ("token_ns = 160", "token_ns = true", "cpu.token_ns]: expected whole nanoseconds"),
        ('"1500GB"', "nan", "card[0].bandwidth]: expected bytes, 1 to"),
        ('"1500GB"', "inf", "found inf"),
        ('"1500GB"', '"fast"', "not a number of bytes [m.toml, card[0].bandwidth]: 'fast'. Write a number"),
        ('"1500GB"', '"0B"', "card[0].bandwidth]: expected bytes, 1 to"),
        ("memory = 1_000", "memory = [1]", "card[1].memory]: expected bytes"),
        ("memory = 1_000", "memory = -1", "card[1].memory]: expected bytes, 0 to 2^63 - 1"),
        ("memory = 1_000", "memory = 9223372036854775808", "found 9223372036854775808"),
        ("memory = 1_000", "", "a key is missing [m.toml, card[1].memory]. Add it: The card's memory."),
        ("reserve = 10", "reserve = 1_001", "card[1].reserve]: expected at most the card's 1,000 B, found 1,001 B"),
        ('kv_cache = "5GB"', "kv_cache = 2e9", "card[0].reserve.kv_cache]: expected bytes"),
        ("shared_root = true", "shared_root = 1", "pcie.shared_root]: expected true or false, found 1"),
        ('"power-of-two"', '"pages"', 'host.pinning]: expected "exact" or "power-of-two"'),
        ('bandwidth = "44GB"', "", "a key is missing [m.toml, cpu.bandwidth]"),
        ("[cpu]", "[[cpu]]", "cpu]: expected a table [cpu]"),
        ("mode =", "mode", "not TOML [m.toml]"),
        ('mode = "tp"', 'mode = "tp"\nmode = "ep"', "not TOML [m.toml]"),
    ],
)  # fmt: skip
def test_refusals_name_file_and_key(old: str, new: str, message: str) -> None:
    assert FULL.count(old) >= 1
    with pytest.raises(PlanError, match=re.escape(message)):
        parse_machine(FULL.replace(old, new, 1).encode(), "m.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version = 1\n[host]\nmemory = 1", "no card [m.toml, card]"),
        ("version = 1\ncard = []\n[host]\nmemory = 1", "no card [m.toml, card]"),
        ("version = 1\n[card]\nmemory = 1\n[host]\nmemory = 1", "expected tables [[card]], in double brackets"),
        ("version = 1\n[[card]]\nmemory = 1", "no host memory [m.toml, host]"),
        ("version = 1\nhost = 3\n[[card]]\nmemory = 1", "host]: expected a table [host], found 3"),
        ("version = 1\n" + "[[card]]\nmemory = 1\n" * 65 + "[host]\nmemory = 1", "card]: expected 1 to 64, found 65"),
        ("version = 1\na = " + "[" * 5000, "not TOML"),
        ("version = 1\nmode = " + "9" * 9000, "not TOML"),
    ],
)
def test_files_without_a_machine(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        parse_machine(text.encode(), "m.toml")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"absent\.toml.*No such file"):
        read_machine(tmp_path / "absent.toml")
    with pytest.raises(PlanError, match="not TOML"):
        parse_machine(b"\xff\xfe")
    (tmp_path / "large.toml").write_bytes(b"#" * (MAX_FILE + 1))
    with pytest.raises(PlanError, match="too large"):
        read_machine(tmp_path / "large.toml")


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: (SMALLEST + text).encode(errors="replace")))
def test_hostile_files_are_errors_with_a_place(content: bytes) -> None:
    try:
        machine = parse_machine(content, "m.toml")
    except PlanError as error:
        assert error.where.startswith("m.toml")
    else:
        assert machine.gpus


def test_the_command_line_gives_a_file_or_flags(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(SMALLEST)
    machine = read_machine(path)
    assert machine_from_options(path, None, None) == machine
    assert machine_from_options(path, [], None, mode="tp") == Machine(machine.gpus, machine.host_bytes, "tp")
    flags = machine_from_options(None, ["8MB", "9MB:1MB"], "64MB", "1TB", "25GB", "tp")
    assert flags == Machine.from_flags(["8MB", "9MB:1MB"], "64MB", "1TB", "25GB", "tp")
    assert machine_from_options(None, None, None) == Machine.from_flags(["96GB:8GB"] * 2, "128GB")


@pytest.mark.parametrize(
    ("flag", "given"),
    [
        ("--gpu", {"gpu": ["8MB"]}),
        ("--host", {"host": "8MB"}),
        ("--gpu-bandwidth", {"gpu_bandwidth": "1TB"}),
        ("--host-bandwidth", {"host_bandwidth": "1GB"}),
    ],
)
def test_a_file_and_flags_are_refused(tmp_path: Path, flag: str, given: dict[str, object]) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(SMALLEST)
    with pytest.raises(PlanError, match=f"given twice.*machine.toml.*{flag}"):
        machine_from_options(path, **({"gpu": None, "host": None} | given))  # type: ignore[arg-type]


def test_the_page() -> None:
    """The example of docs/machine.md is a machine, its defaults are those of the code, and it misses no key."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "machine.md").read_text()
    (example,) = re.findall(r"^```toml\n(.*?)^```$", page, re.M | re.S)
    machine = parse_machine(example.encode())
    assert [gpu.reserve for gpu in machine.gpus] == [8 * 10**9] * 2
    assert machine.cpu is not None
    least = parse_machine(SMALLEST.encode())
    shown = dict(re.findall(r"^\| `([a-z.\[\]_]+)` \| `?([^|]*?)`? \|", page.split("\n# What")[0], re.M))
    defaults = machine_toml(least)
    for key in ("bandwidth", "pinning", "zero_copy", "copy_engine", "shared_root", "mode"):
        (default,) = {value for name, value in shown.items() if name.split(".")[-1] == key and "cpu" not in name}
        assert f"\n{key} = {default}\n" in defaults, key
    for table, keys in KEYS.items():
        for key in keys:
            assert (f"`{table}{'[]' if table == 'card' else ''}.{key}`" if table else f"{key}") in page, key
    sizes = [Machine((Gpu(1),), 1, pinning=pinning).pinned(13_315_596) for pinning in PINNING]
    assert f"An expert of\n{sizes[0]:,} B takes {sizes[1]:,} B" in page
    assert [f"{5_120 * size / 1e9:.1f} GB" in page for size in sizes] == [True, True]

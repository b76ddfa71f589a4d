"""`moefit doctor`: what it prints, writes and refuses, and its exit code."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from moefit.cli.doctor import doctor, doctor_text
from moefit.errors import MoefitError
from moefit.packs import doctor as examination
from moefit.packs.card_probe import LinkSpeed
from moefit.placement.machine_file import read_machine

from ..packs.test_doctor import CARD, HOST, SOFTWARE, findings

GB = 10**9
app = typer.Typer()
app.command()(doctor)


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [*map(str, words)])


def refusal(*words: object) -> str:
    error = run(*words).exception
    assert isinstance(error, MoefitError)
    return str(error)


def test_this_machine_in_text_and_json() -> None:
    done = run("--quick")
    assert done.exit_code == 0, done.output
    for label in (
        "system",
        "cpu",
        "memory",
        "disk",
        "software",
        "host memory   not measured",
        "pass  encoder: ",
    ):
        assert f"\n{label}" in f"\n{done.stdout}"
    assert "examine: 4 steps" in done.stderr
    done = run("--quick", "--quiet", "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    made = json.loads(done.stdout)
    assert made["host"]["cpus"] >= 1
    assert made["out"] is None
    assert {check["outcome"] for check in made["checks"]} <= {"pass", "warn"}


def test_the_machine_file_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    done = run("--quick", "--quiet", "--write-machine", path)
    assert done.stdout.splitlines()[-1] == f"written to {path}"
    machine = read_machine(path)
    path.write_text("mine")
    assert "there already" in refusal("--quick", "--write-machine", path)
    assert path.read_text() == "mine"
    done = run("--quick", "--quiet", "--json", "--write-machine", path, "--force")
    assert json.loads(done.stdout)["out"] == str(path)
    assert read_machine(path).gpus == machine.gpus
    assert list(tmp_path.iterdir()) == [path]


def test_targets_are_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "examine_machine", lambda *_: pytest.fail("examined"))
    for path in (tmp_path, tmp_path / "absent" / "machine.toml"):
        assert "cannot be written there" in refusal("--write-machine", path, "--force")


def test_a_machine_that_cannot_be_used_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = findings(software=replace(SOFTWARE, usable=False, encoders=("plain",)))
    monkeypatch.setattr(examination, "examine_machine", lambda *_: broken)
    done = run("--quiet")
    assert done.exit_code == 1
    assert "fail  encoder: this CPU has no AVX2: the native encoder runs as plain code. Use a machine" in done.stdout


def test_cards_in_text() -> None:
    cards = replace(CARD, lanes=(16, 16), port="0000:00:01.0"), replace(CARD, bandwidth=None)
    found = replace(findings(*cards, copy=LinkSpeed((56 * GB, 56 * GB), 110 * GB)), read=84_600_000_000)
    lines = doctor_text(found).splitlines()
    for line in (
        "gpu0          NVIDIA RTX PRO 6000 (12.0), 102.64 GB, 2.53 GB in use, reads 1612.3 GB/s, PCIe x16 "
        "behind 0000:00:01.0, driver 580.95.05",
        "gpu1          NVIDIA RTX PRO 6000 (12.0), 102.64 GB, 2.53 GB in use, reads 1792.0 GB/s (default), "
        "driver 580.95.05",
        "host memory   read at 84.6 GB/s by 16 threads",
        "PCIe          copy engine 55.0 GB/s, zero-copy 22.0 GB/s (default) per card",
        "for experts   gpu0 94.11 GB, gpu1 94.11 GB, host 90.00 GB",
    ):
        assert line in lines
    limited = findings(host=replace(HOST, memlock=8 << 20, huge_pages=((1 << 30, 4),)))
    text = doctor_text(limited)
    assert "memlock 8.39 MB" in text
    assert "4 x 1.07 GB" in text
    assert "gpu0 88.00 GB (default), gpu1 88.00 GB (default), host 90.00 GB" in text

"""Progress for people: bars on a terminal, lines with an estimate in a log, nothing when quiet; never on stdout."""

from __future__ import annotations

import threading

import pytest

from moefit.cli import progress as module
from moefit.cli.progress import Display
from moefit.cli.tables import human


def work(display: Display) -> None:
    with display as progress:
        progress.stage("calibrate", 10, "windows", done=4)
        for _ in range(3):
            progress.advance(2, "layer 1/6")
        progress.finish()
        progress.stage("hash", 0, "B")
        progress.advance(0)
        progress.finish()


def test_lines_in_a_log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter(range(0, 1000, 20))
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))
    work(Display())
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "calibrate: 10 windows, 4 done before",
        "calibrate: 6/10 windows, ETA 40 s  layer 1/6",  # 2 in 20 s, 4 are left
        "calibrate: 8/10 windows, ETA 20 s  layer 1/6",
        "calibrate: 10/10 windows, ETA 0 s  layer 1/6",
        "hash: 0 B",
        "hash: 0/0 B, ETA 0 s  ",
    ]


def test_lines_are_rare(capsys: pytest.CaptureFixture[str]) -> None:
    work(Display())
    assert capsys.readouterr().err.splitlines() == ["calibrate: 10 windows, 4 done before", "hash: 0 B"]


def test_bars_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    work(Display())
    out, err = capsys.readouterr()
    assert out == ""
    assert "calibrate" in err
    assert "10/10" in err
    assert "ETA" in err


def test_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    work(Display(quiet=True))
    assert capsys.readouterr() == ("", "")


def test_threads_may_report_at_once() -> None:
    display = Display(quiet=True)
    display.stage("quantize", 4000, "experts")
    workers = [threading.Thread(target=lambda: [display.advance() for _ in range(1000)]) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert display._done == 4000


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (13_315_596, "13.32 MB"),
        (204_527_554_560, "204.53 GB"),
        (1.5e15, "1500.00 TB"),
    ],
)
def test_bytes_for_people(count: float, text: str) -> None:
    assert human(count) == text

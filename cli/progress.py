"""Progress bars with an estimate of the time left; plain lines where there is no terminal."""

from __future__ import annotations

import sys
import threading
import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

LINE_EVERY = 10.0
"""Seconds between two lines of a stage in a log file."""


class Display:
    """`moefit.progress.Progress` on standard error, so that standard output stays machine-readable."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self._console = Console(stderr=True)
        self._live = self._console.is_terminal and not quiet
        self._lock = threading.Lock()
        self._bars = Bars(
            TextColumn("{task.description:24}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self._console,
        )
        self._stage, self._unit, self._total, self._done, self._before = "", "", 0, 0, 0
        self._start = self._printed = 0.0

    def __enter__(self) -> Self:
        if self._live:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._bars.stop()

    def stage(self, name: str, total: int, unit: str, done: int = 0) -> None:
        with self._lock:
            self._stage, self._unit, self._total, self._done, self._before = name, unit, total, done, done
            self._start = self._printed = time.monotonic()
            if self._live:
                self._task = self._bars.add_task(name, total=total, completed=done, unit=unit, note="")
            elif not self.quiet:
                resumed = f", {done} done before" if done else ""
                print(f"{name}: {total} {unit}{resumed}", file=sys.stderr, flush=True)

    def advance(self, count: int = 1, note: str = "") -> None:
        with self._lock:
            self._done += count
            if self._live:
                self._bars.update(self._task, advance=count, note=note)
                return
            now = time.monotonic()
            if self.quiet or now - self._printed < LINE_EVERY:
                return
            self._printed = now
            left = (now - self._start) / max(1, self._done - self._before) * (self._total - self._done)
            print(
                f"{self._stage}: {self._done}/{self._total} {self._unit}, ETA {left:.0f} s  {note}",
                file=sys.stderr,
                flush=True,
            )

    def finish(self) -> None:
        with self._lock:
            if self._live:
                self._bars.update(self._task, completed=self._total)

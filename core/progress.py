"""How a long job tells its caller how far it is. The command line draws bars; libraries pass nothing."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receiver of progress. Calls may come from worker threads."""

    def stage(self, name: str, total: int, unit: str, done: int = 0) -> None:
        """A stage begins: `total` units of work, `done` of them finished by an earlier run."""

    def advance(self, count: int = 1, note: str = "") -> None:
        """`count` more units of the current stage are done."""

    def finish(self) -> None:
        """The current stage is over."""


class Silent:
    """Progress that goes nowhere."""

    def stage(self, name: str, total: int, unit: str, done: int = 0) -> None:
        pass

    def advance(self, count: int = 1, note: str = "") -> None:
        pass

    def finish(self) -> None:
        pass


class Within:
    """Progress of a part that runs several times: its stages under a longer name."""

    def __init__(self, progress: Progress, part: str) -> None:
        self._progress, self._part = progress, part
        self.advance, self.finish = progress.advance, progress.finish

    def stage(self, name: str, total: int, unit: str, done: int = 0) -> None:
        self._progress.stage(f"{self._part}, {name}", total, unit, done)

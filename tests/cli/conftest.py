"""The command, run in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from moefit.cli.main import main


@dataclass(frozen=True)
class Outcome:
    """Exit code, standard output and standard error of one command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def refusal(self) -> str:
        """The sentence of a refusal: exit code 2, nothing on standard output, one line, no traceback."""
        assert self.code == 2, self
        assert self.out == ""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("moefit: ")
        assert lines[0][-1] in ".?"
        assert "Traceback" not in self.err
        return lines[0]


Moefit = Callable[..., Outcome]


@pytest.fixture
def moefit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Moefit:
    """`moefit(...)` runs the command with these words."""

    def run(*words: object) -> Outcome:
        monkeypatch.setattr("sys.argv", ["moefit", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as done:
            main()
        out, err = capsys.readouterr()
        assert isinstance(done.value.code, int)
        return Outcome(done.value.code, out, err)

    return run

"""What a plan is to make small: terms with weights, e.g. `decode:6 + 0.2*prefill`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import PlanError

MAX_WINDOW = 8
UNITS = {
    "decode": "seconds per step",
    "prefill": "seconds per token",
    "host-bytes": "bytes per token",
    "memory": "bytes",
}


class Term(NamedTuple):
    """weight times one measure. measure: a key of UNITS. window: tokens per decode step (decode only, else 1)."""

    weight: float
    measure: str
    window: int

    def __str__(self) -> str:
        name = f"decode:{self.window}" if self.measure == "decode" else self.measure
        # A sum's + stands between terms only.
        return name if self.weight == 1 else f"{self.weight!r}*{name}".replace("e+", "e")


@dataclass(frozen=True)
class Aim:
    """The weighted sum of `terms`.

    sources: (name, weight) of sources of traffic that are to count by these weights, by name; none: all traffic as it
    came. worst: the worst of these sources counts, or of all where none is named.
    """

    terms: tuple[Term, ...] = (Term(1.0, "decode", 1),)
    worst: bool = False
    sources: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", tuple(sorted((name, float(weight)) for name, weight in self.sources)))
        if not all(0 < weight < 1e30 for _, weight in self.sources) or len(dict(self.sources)) != len(self.sources):
            found = f"found {', '.join(f'{name}={weight!r}' for name, weight in self.sources)}"
            mend = "name each source once, with a positive weight"
            raise PlanError("weights of sources that cannot be", where="sources", found=found, mend=mend)

    def __str__(self) -> str:
        return "+".join(map(str, self.terms))

    @property
    def unit(self) -> str:
        """Of the objective's value."""
        (first, *others) = self.terms
        return UNITS[first.measure] if not others and first.weight == 1 else "weighted sum"

    @classmethod
    def parse(cls, text: str, worst: bool = False, sources: tuple[tuple[str, float], ...] = ()) -> Aim:
        """`decode:W` (W = 1..8 tokens a step), `prefill`, `host-bytes`, `memory`, or a sum of them with weights.

        PlanError for anything else. Example: `decode:6+0.2*prefill`.
        """
        terms: list[Term] = []
        for part in text.split("+"):
            found = re.fullmatch(r"\s*(?:([0-9.]+(?:e-?[0-9]+)?)\s*\*)?\s*([a-z-]+)(?::([0-9]{1,9}))?\s*", part)
            measure, window = (found[2], found[3]) if found else ("", None)
            weight = _number(found[1]) if found and found[1] else 1.0
            steps = int(window or 1)
            bad_window = window is not None and (measure != "decode" or not 1 <= steps <= MAX_WINDOW)
            if measure not in UNITS or bad_window or not weight or any(t[1:] == (measure, steps) for t in terms):
                raise PlanError(
                    "not an objective",
                    where=repr(text),
                    found=f"found {part.strip()!r}",
                    mend=f"write decode:W (W = 1..{MAX_WINDOW}), prefill, host-bytes, memory, or a sum such as "
                    "decode:6+0.2*prefill, each once",
                )
            terms.append(Term(weight, measure, steps))
        return cls(tuple(terms), worst, sources)


DECODE = Aim()
"""Seconds per step of one token, of all traffic."""


def _number(text: str) -> float:
    """0 where it is none that can weigh a term."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0 < value < 1e30 else 0.0

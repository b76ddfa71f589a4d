"""What a plan must keep besides bytes: experts pinned to places or kept off them, least and most per layer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import PlanError

RULE = re.compile(
    r"\s*([0-9]+(?:-[0-9]+)?|\*)\s*:\s*([0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*|\*)\s*=\s*([a-z]+[0-9]*)\s*"
)
MAX_RULES, MAX_RULE = 1000, 10_000  # of pins, of forbidden; characters of one
MEND = 'write LAYERS:EXPERTS=PLACE, e.g. "3:0-7,12=gpu0" or "*:5=host"; "cards" stands for every card'


@dataclass(frozen=True)
class Limits:
    """pins, forbidden: rules `LAYERS:EXPERTS=PLACE`. least, most: experts of each layer on cards, together.

    LAYERS is a number, a range a-b or *; EXPERTS a list of numbers and ranges or *; PLACE a place's name or "cards".
    """

    pins: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()
    least: int | None = None
    most: int | None = None

    def allowed(self, layers: Sequence[int], experts: int, places: Sequence[str]) -> np.ndarray | None:
        """bool [L, E, P], or None where everything is. PlanError: a rule that names nothing, or leaves no place."""
        if not (self.pins or self.forbidden):
            return None
        for rules in (self.pins, self.forbidden):
            if len(rules) > MAX_RULES or max(map(len, rules), default=0) > MAX_RULE:
                found = f"expected at most {MAX_RULES:,} rules of {MAX_RULE:,} characters"
                mend = "write ranges and lists of experts: 3:0-7,12=gpu0"
                raise PlanError("more rules of placement than a plan can hold", found=found, mend=mend)
        allowed = np.ones((len(layers), experts, len(places)), dtype=bool)
        pinned = np.zeros_like(allowed)
        for rule in self.pins:
            pinned |= _matches(rule, layers, experts, places)
        has_pin = pinned.any(axis=2)
        allowed[has_pin] = pinned[has_pin]
        for rule in self.forbidden:
            allowed &= ~_matches(rule, layers, experts, places)
        nowhere = np.argwhere(~allowed.any(axis=2))
        if nowhere.size:
            layer, expert = (int(i) for i in nowhere[0])
            where = f"expert {expert} of layer {layers[layer]}"
            raise PlanError("an expert may lie nowhere", where=where, mend="loosen --pin or --forbid")
        return allowed

    def per_layer(self, layers: int, experts: int) -> tuple[np.ndarray | None, np.ndarray | None]:
        """(least, most) int64 [L], None where there is none. PlanError: not 0 <= least <= most <= E."""
        least, most = (self.least or 0), (experts if self.most is None else self.most)
        if not 0 <= least <= most <= experts:
            found = f"expected 0 <= least <= most <= {experts}, found {least} and {most}"
            mend = "change --min-per-layer or --max-per-layer"
            raise PlanError("experts per layer on cards out of range", found=found, mend=mend)
        return (
            np.full(layers, least) if least else None,
            np.full(layers, most) if most < experts else None,
        )

    def check_together(self, allowed: np.ndarray | None, layers: Sequence[int]) -> None:
        """PlanError where the rules leave a layer more experts on cards than `most`, or fewer than `least`.

        allowed: bool [L, E, P], the host last, or None.
        """
        if allowed is None:
            return
        must, may = (~allowed[:, :, -1]).sum(axis=1), allowed[:, :, :-1].any(axis=2).sum(axis=1)  # [L]
        for layer, at_least, at_most in zip(layers, must.tolist(), may.tolist(), strict=True):
            found = ""
            if self.most is not None and at_least > self.most:
                found = f"expected at most {self.most} experts on cards, found {at_least} that may not lie on the host"
            if self.least is not None and at_most < self.least:
                found = f"expected at least {self.least} experts on cards, found {at_most} that may lie there"
            if found:
                mend = "loosen --pin, --forbid, --min-per-layer or --max-per-layer"
                raise PlanError(
                    "rules and experts per layer contradict", where=f"layer {layer}", found=found, mend=mend
                )


NO_LIMITS = Limits()


def _matches(rule: str, layers: Sequence[int], experts: int, places: Sequence[str]) -> np.ndarray:
    """bool [L, E, P] of one rule."""
    match = RULE.fullmatch(rule)
    if match is None:
        raise PlanError("not a rule of placement", where=repr(rule), mend=MEND)
    wanted = [place == match[3] or (match[3] == "cards" and place != "host") for place in places]
    if not any(wanted):
        found = f"expected one of {', '.join(places)}, cards; found {match[3]}"
        raise PlanError("a rule names no place of the machine", where=repr(rule), found=found, mend=MEND)
    on_layers, on_experts = _within(match[1], layers), _within(match[2], range(experts))
    for name, chosen, known in (("layer", on_layers, layers), ("expert", on_experts, range(experts))):
        text = match[1] if name == "layer" else match[2]
        beyond = any(int(number) > known[-1] for number in re.findall("[0-9]+", text))
        if beyond:
            found = f"expected {name}s up to {known[-1]}, found {text:.80}"
            raise PlanError(f"a rule names {name}s beyond the model's", where=repr(rule), found=found, mend=MEND)
        if not any(chosen):
            found = f"expected {name}s within {known[0]}..{known[-1]}"
            raise PlanError(f"a rule names no {name} of the model", where=repr(rule), found=found, mend=MEND)
    return np.array(on_layers)[:, None, None] & np.array(on_experts)[:, None] & np.array(wanted)


def _within(text: str, known: Sequence[int]) -> list[bool]:
    if text == "*":
        return [True] * len(known)
    spans = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return [any(span[0] <= number <= span[-1] for span in spans) for number in known]

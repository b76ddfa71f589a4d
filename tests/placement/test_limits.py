"""Rules of placement: how they are written, what they allow, and rules that contradict each other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moefit.errors import PlanError
from moefit.placement import Gpu, Limits, Machine, solve

from .cases import few, random_traffic

LAYERS, EXPERTS, PLACES = (3, 4, 7), 6, ("gpu0", "gpu1", "host")
Rule = tuple[list[int], list[int], str]


@st.composite
def rules(draw: st.DrawFn) -> tuple[str, set[tuple[int, int, int]]]:
    """(a rule, the layers, experts and places it names)."""
    low, high = sorted(draw(st.lists(st.integers(0, 7), min_size=2, max_size=2)))
    text, layers = draw(
        st.sampled_from(
            [("*", LAYERS), (f"{low}-{high}", tuple(range(low, high + 1))), ("4", (4,)), (" 7 ", (7,))],
        )
    )
    parts = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=3))
    experts = {e for first, more in parts for e in range(first, first + more + 1)}
    names = ",".join(f"{first}-{first + more}" if more else str(first) for first, more in parts)
    if draw(st.booleans()):
        names, experts = "*", set(range(EXPERTS))
    place = draw(st.sampled_from([*PLACES, "cards"]))
    there = [0, 1] if place == "cards" else [PLACES.index(place)]
    named = {(LAYERS.index(n), e, p) for n in layers if n in LAYERS for e in experts if e < EXPERTS for p in there}
    return f"{text}:{names}={place}", named


@few(200)
@given(st.lists(rules(), max_size=3), st.lists(rules(), max_size=3))
def test_allowed_is_what_the_rules_say(
    pins: list[tuple[str, set[tuple[int, int, int]]]], forbidden: list[tuple[str, set[tuple[int, int, int]]]]
) -> None:
    limits = Limits(tuple(rule for rule, _ in pins), tuple(rule for rule, _ in forbidden))
    pinned = set().union(*(named for _, named in pins))
    never = set().union(*(named for _, named in forbidden))
    expected = np.zeros((3, EXPERTS, 3), bool)
    for layer, expert, place in np.ndindex(3, EXPERTS, 3):
        has_pin = any((layer, expert, p) in pinned for p in range(3))
        wanted = (layer, expert, place) in pinned if has_pin else True
        expected[layer, expert, place] = wanted and (layer, expert, place) not in never
    if any(not named for _, named in pins + forbidden):
        with pytest.raises(PlanError, match="names no layer of the model"):
            limits.allowed(LAYERS, EXPERTS, PLACES)
    elif not expected.any(axis=2).all():
        with pytest.raises(PlanError, match=r"an expert may lie nowhere \[expert \d of layer [347]\]"):
            limits.allowed(LAYERS, EXPERTS, PLACES)
    else:
        allowed = limits.allowed(LAYERS, EXPERTS, PLACES)
        if allowed is None:
            assert not (pins or forbidden)
        else:
            assert (allowed == expected).all()


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("", "not a rule"),
        ("3:0", "not a rule"),
        ("3:0-=gpu0", "not a rule"),
        ("3,4:0=gpu0", "not a rule"),
        ("3:0,*=gpu0", "not a rule"),
        ("-1:0=gpu0", "not a rule"),
        ("3:0=GPU0", "not a rule"),
        ("3:0=gpu0 gpu1", "not a rule"),
        ("3-8:0=gpu0", "beyond the model's"),
        ("3:0-6=gpu0", "beyond the model's"),
        ("3:0=gpu2", "names no place"),
        ("3:0=card", "names no place"),
        ("5:0=host", "names no layer"),
        ("5-6:0=host", "names no layer"),
        ("4-3:0=host", "names no layer"),
        ("3:6=host", "names experts beyond the model's"),
        ("3:5-2=host", "names no expert"),
    ],
)
def test_what_is_no_rule(rule: str, message: str) -> None:
    for limits in (Limits(pins=(rule,)), Limits(forbidden=(rule,))):
        with pytest.raises(PlanError, match=message) as caught:
            limits.allowed(LAYERS, EXPERTS, PLACES)
        assert repr(rule) in str(caught.value) and "LAYERS:EXPERTS=PLACE" in caught.value.mend


def test_per_layer() -> None:
    assert Limits().per_layer(3, EXPERTS) == (None, None)
    assert Limits(least=0, most=EXPERTS).per_layer(3, EXPERTS) == (None, None)
    least, most = Limits(least=2, most=5).per_layer(3, EXPERTS)
    assert least is not None and least.tolist() == [2, 2, 2] and least.dtype == np.int64
    assert most is not None and most.tolist() == [5, 5, 5]
    least, most = Limits(most=0).per_layer(3, EXPERTS)
    assert least is None and most is not None and most.tolist() == [0, 0, 0]
    for bad in (Limits(least=-1), Limits(most=EXPERTS + 1), Limits(least=3, most=2), Limits(least=7)):
        with pytest.raises(PlanError, match="experts per layer on cards out of range"):
            bad.per_layer(3, EXPERTS)


MACHINE = Machine((Gpu(10**6),) * 2, 10**6)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(pins=("1:0-2=gpu0",), most=2), "layer 1.*at most 2.*3"),
        (Limits(pins=("*:0=gpu0", "0:3=cards"), forbidden=("0:5=host",), most=2), "layer 0.*at most 2.*3"),
        (Limits(pins=("1:0-2=host",), least=4), "layer 1.*at least 4.*3"),
        (Limits(forbidden=("0-1:1-5=cards",), least=2), "layer 0.*at least 2.*1"),
        (Limits(forbidden=("*:0=gpu0",), pins=("*:0=gpu0",)), "may lie nowhere"),
        (Limits(forbidden=("1:3=host", "1:3=cards")), "may lie nowhere.*expert 3 of layer 1"),
    ],
)
def test_limits_that_contradict_each_other(limits: Limits, message: str) -> None:
    """There is room for everything everywhere."""
    traffic, sizes = random_traffic(2, 6, 2, 30, 0), np.full((2, 6), 10)
    with pytest.raises(PlanError, match=message) as caught:
        solve(sizes, traffic, MACHINE, limits=limits)
    assert "loosen" in caught.value.mend


@pytest.mark.parametrize(
    "limits",
    [
        Limits(pins=("1:0-2=gpu0",), most=3),
        Limits(pins=("1:0-2=host",), least=3),
        Limits(forbidden=("*:1-5=cards",), least=1, most=1),
        Limits(pins=("*:0=cards",), forbidden=("*:0=gpu0",)),
    ],
)
def test_limits_that_just_do_not(limits: Limits) -> None:
    traffic, sizes = random_traffic(2, 6, 2, 30, 0), np.full((2, 6), 10)
    plan = solve(sizes, traffic, MACHINE, limits=limits)
    allowed = limits.allowed((0, 1), 6, MACHINE.places)
    assert allowed is None or not (plan.holds & ~allowed).any()
    on_cards = plan.holds[..., :-1].any(axis=2).sum(axis=1)
    assert (on_cards >= (limits.least or 0)).all() and (on_cards <= (6 if limits.most is None else limits.most)).all()

"""Pictures of a plan: well-formed, the same every time, small, and showing what the numbers say."""

from __future__ import annotations

import re
from collections.abc import Callable
from xml.etree import ElementTree

import numpy as np
import pytest

from moefit.errors import PlanError
from moefit.placement import Aim, Cpu, Gpu, Machine, solve
from moefit.placement.pictures import (
    finish_times,
    gain_curve,
    hit_curve,
    hit_curve_figure,
    layer_loads,
    placement_map,
    placement_map_figure,
)

from .plans import plan, table

HOSTILE = "</text><script>alert(1)</script>&\"'$\\frac$\x00\x1b\ud800\n" + "x" * 300


def texts(svg: str) -> list[str]:
    """All text of a picture, which must be well-formed XML with identifiers that occur once and references to them."""
    root = ElementTree.fromstring(svg.encode())
    named = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(named) == len(set(named))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg)) <= set(named)
    assert not re.findall(r"<script|<foreignObject|<a |\bon\w+=|href=\"(?!#|data:image/png)", svg)
    return ["".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("draw", [placement_map, hit_curve, layer_loads])
def test_same_input_same_picture(draw: Callable[..., str]) -> None:
    traffic = table(3, 8, sources=("chat", "code"))
    made = plan(traffic, 2, 0.6, copied=2)
    drawn = draw(made, traffic)
    assert drawn == draw(made, traffic)
    texts(drawn)
    other = table(3, 8, first=1)
    with pytest.raises(PlanError, match="different models"):
        draw(made, other)


def test_a_large_plan_is_small_and_names_every_layer_and_place() -> None:
    traffic = table(61, 384, top_k=8, first=3)
    made = plan(traffic, 8, 0.8)
    for draw in (placement_map, layer_loads):
        drawn = draw(made, traffic)
        found = texts(drawn)
        assert len(drawn) < 400_000
        assert {str(layer) for layer in range(3, 64)} <= set(found)
        for place in ("gpu0", "gpu7", "host"):
            assert any(text.startswith(f"{place}: ") for text in found)


@pytest.mark.parametrize(
    ("cards", "on_cards", "copied", "mode", "named"),
    [
        (2, 0.5, 0, "tp", ["cards: 48", "host: 48"]),
        (3, 1.0, 0, "ep", ["gpu0: 32", "gpu1: 32", "gpu2: 32", "host: 0"]),
        (2, 0.5, 6, "ep", ["gpu0: 27", "gpu1: 27", "host: 48", "on several cards: 6"]),
        (12, 0.5, 0, "ep", [f"gpu{card}: 4" for card in range(12)]),
    ],
)
def test_places_of_every_kind(cards: int, on_cards: float, copied: int, mode: str, named: list[str]) -> None:
    traffic = table(3, 32)
    found = texts(placement_map(plan(traffic, cards, on_cards, copied, mode=mode), traffic))
    assert [text for text in found if text in named] == named
    assert any(text.startswith("on several") for text in found) == (copied > 0)


def test_map_shows_each_expert_where_it_lies() -> None:
    traffic = table(2, 6)
    made = plan(traffic, 2, 0.7, copied=1)
    upper, lower = placement_map_figure(made, traffic).axes[:2]
    shown = np.asarray(lower.images[0].get_array())  # [L, E, 3]
    seen: dict[tuple[bool, ...], tuple[float, ...]] = {}
    for layer, row in enumerate(traffic.counts):
        for rank, expert in enumerate(np.argsort(-row, kind="stable")):
            here = tuple(made.holds[layer, expert].tolist())
            color = tuple(shown[layer, rank].tolist())
            assert seen.setdefault(here, color) == color
    assert len(seen) == 4 == len(set(seen.values()))  # two cards, host, both cards
    at, _ = upper.lines[0].get_data()
    assert np.array_equal(np.asarray(at)[::2] + 0.5, (~made.holds[..., -1]).sum(axis=1))


def test_names_of_sources_are_text() -> None:
    names = ("_hidden", "$x_1$", "数学", HOSTILE, *(f"small{number}" for number in range(9)))
    traffic = table(2, 8, sources=names)
    found = texts(hit_curve(plan(traffic, 1, 0.5), traffic))
    assert any(text.endswith(" of $x_1$") for text in found)
    assert any(text.endswith(" of _hidden") for text in found)
    assert any("</text><script>alert(1)</script>&\"'$" in text and len(text) < 60 for text in found)
    assert "4 smaller sources" in found  # of 13, nine are named


def test_hit_curve_puts_the_plan_on_or_below_the_curve() -> None:
    traffic = table(4, 16, sources=("chat", "code"))
    hottest = plan(traffic, 2, 0.5)
    worst = plan(traffic, 2, 0.5, holds=hottest.holds[:, ::-1])
    for made, best in ((hottest, True), (worst, False)):
        axes = hit_curve_figure(made, traffic).axes[0]
        at, served = (np.asarray(data) for data in axes.lines[0].get_data())
        assert (
            served[0] == 0 and served[-1] == 1 and (np.diff(served) >= 0).all() and (np.diff(served, 2) <= 1e-12).all()
        )
        (count,), (share,) = axes.lines[1].get_data()
        assert count == (~made.holds[..., -1]).sum()
        assert share == pytest.approx(traffic.counts[~made.holds[..., -1]].sum() / traffic.counts.sum())
        curve = served[list(at).index(count)]
        assert share == pytest.approx(curve) if best else share < curve


def test_times_are_those_of_the_objective() -> None:
    traffic = table(3, 8)
    sizes = np.full((3, 8), 1_000_000, dtype=np.int64)
    machine = Machine((Gpu(8_000_000, token_ns=30), Gpu(6_000_000, bandwidth=10**12)), 10**9, cpu=Cpu(10**9, 1000, 5))
    for window in (1, 4):
        made = solve(sizes, traffic, machine, aim=Aim.parse(f"decode:{window}"))
        done, tokens, assumed = finish_times(made, traffic)
        assert done.shape == (3, 3) and tokens == window and bool(assumed) == (window > 1)
        assert done.max(axis=1).sum() == pytest.approx(made.value, rel=1e-12)
        found = texts(layer_loads(made, traffic))
        assert any(text.startswith(f"Expected {1e6 * made.value:,.1f} microseconds of experts") for text in found)
    assert finish_times(plan(traffic, 1, 0.5, aim=Aim.parse("memory")), traffic)[1] == 1


def test_times_of_cards_follow_from_bytes() -> None:
    """Without the host: count / tokens * bytes / bandwidth, copies in equal parts."""
    traffic = table(3, 8)
    made = plan(traffic, 2, 1.0, copied=3, aim=Aim.parse("prefill+0.5*decode:1"))
    assert (made.holds.sum(axis=2) == 2).sum() == 3
    expected = np.zeros((3, 3))
    for layer, expert, card in np.argwhere(made.holds):
        seconds = traffic.counts[layer, expert] / traffic.tokens * 1_000_000 / made.machine.gpus[card].bandwidth
        expected[layer, card] += seconds / made.holds[layer, expert].sum()
    assert finish_times(made, traffic)[0] == pytest.approx(expected)


def test_a_plan_of_nothing_to_do() -> None:
    """One expert that takes all traffic, equal counts: no spread to take logarithms of."""
    traffic = table(1, 1, top_k=1)
    made = plan(traffic, 1, 0.0)
    for draw in (placement_map, hit_curve, layer_loads):
        texts(draw(made, traffic))


def test_gain_curve() -> None:
    points = [(0, 0.0, 0.0), (100, 8e-6, 9e-6), (10, 2e-6, 3e-6)]
    drawn = gain_curve(points, 50, "seconds per step")
    assert drawn == gain_curve(points[::-1], 50, "seconds per step")
    found = texts(drawn)
    assert {"gain, microseconds per step", "chosen limit: 50 moves", "10 moves: 2 of at most 3"} <= set(found)
    texts(gain_curve([(3, -1.0, 0.0)], unit=HOSTILE))
    for bad in ([], [(1, float("nan"), 1.0)]):
        with pytest.raises(PlanError, match="finite points"):
            gain_curve(bad)

"""The HTML report of a plan: whole, self-contained, escaped, with what it is given and nothing else."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from moefit.errors import PlanError
from moefit.files import sha256_bytes
from moefit.placement import Aim
from moefit.placement.report import plan_report, quantity

from .plans import plan, table

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>&\"'\x00\ud800"
VOID = {"meta", "br", "link", "img"}


class Page(HTMLParser):
    """Text, tags and attributes of a page whose tags all close in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.names: list[str] = []
        self.addresses: list[str] = []
        self.cells: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.names += [value or "" for name, value in attrs if name == "id"]
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src", "xlink:href", "action")]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag in ("td", "th"):
            self.cells.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            self.cells[-1] += data


def test_everything_in_one_page() -> None:
    traffic = table(3, 8, sources=("chat", HOSTILE))
    made = plan(
        traffic, 2, 0.6, 2, inputs={"traffic": sha256_bytes(traffic.to_bytes()), HOSTILE: "a" * 64}, steps=(HOSTILE,)
    )
    replayed = {"window": 2, "conversations": 40, "steps": 500}
    rows = [
        {
            "name": HOSTILE,
            **replayed,
            "seconds": _number(1.5e-3, 1.4e-3, 1.6e-3),
            "p50": 1e-3,
            "hit_rate": _number(0.5),
        },
        {"name": "random", **replayed, "seconds": _number(3e-3), "p50": None, "change": _number(1.0)},
    ]
    moves = [
        {"layer": 2, "expert": number, "here": "host", "there": HOSTILE, "bytes": 2_500_000, "parked": False}
        for number in range(250)
    ]
    curve = [(0, 0.0, 0.0), (250, 2e-4, 3e-4)]
    given = (rows, curve, moves, HOSTILE, {"hit_rate_now": 0.9, HOSTILE: HOSTILE})
    html = plan_report(made, traffic, *given, limit=250)
    assert html == plan_report(made, traffic, *given, limit=250)
    html.encode()  # no lone surrogate is left
    page = Page(html)
    assert not page.tags & {"script", "img", "link", "iframe", "object", "base", "form"}
    assert all(address.startswith(("#", "data:image/png;base64,")) for address in page.addresses)
    assert "window: 2; conversations: 40; steps: 500; small: 95 % intervals" in html
    assert "@import" not in html and html.count("<svg ") == 4
    assert len(page.names) == len(set(page.names))
    for cell in ("1.25 ms per step", "1.5 ms1.4 ms to 1.6 ms", "+100.00 %", "90.00 %", "2.50 MB", "9.00 GB", "a" * 64):
        assert cell in page.cells
    assert "They show the traffic that the plan was made for" in html
    assert html.count("2.50 MB") == 200 and "the first 200 of 250" in html
    assert html.index("<table") < html.index("<svg")


def test_what_is_not_given_is_absent() -> None:
    traffic = table(2, 8)
    html = plan_report(plan(traffic, 2, 0.5, greedy=None), traffic)
    Page(html)
    for absent in ("Verdict", "Drift", "Moves", "not seen", "gain-curve", "several cards", "None", "nan"):
        assert absent not in html
    assert "does not fit" in html and "other traffic than the plan was made for" in html
    Page(plan_report(plan(traffic, 2, 0.5, mode="tp"), traffic, [], [], [], "", {}))
    with pytest.raises(PlanError, match="different models"):
        plan_report(plan(traffic, 2, 0.5), table(3, 8))


def test_summary_of_places_adds_up() -> None:
    traffic = table(2, 8)
    cells = Page(plan_report(plan(traffic, 2, 0.5), traffic)).cells
    card = cells.index("gpu0")
    assert cells[card : card + 6] == ["gpu0", "9.00 GB", "100.00 MB", "4", "4.00 MB", "8.90 GB"]
    host = cells.index("host")
    assert cells[host : host + 6] == ["host", "100.00 GB", "100.00 MB", "8", "8.00 MB", "99.89 GB"]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0, "seconds per step", "0 µs per step"),
        (1.25e-5, "seconds per token", "12.5 µs per token"),
        (2.0, "seconds", "2 s"),
        (1_500_000, "bytes per token", "1.50 MB per token"),
        (-2_000.0, "bytes", "-2.00 kB"),
        (999, "bytes", "999 B"),
        (0.5, Aim.parse("0.5*prefill").unit, "0.5 (weighted sum)"),
    ],
)
def test_quantities_have_units(value: float, unit: str, text: str) -> None:
    assert quantity(value, unit) == text


def _number(value: float, low: float | None = None, high: float | None = None) -> dict[str, float | None]:
    return {"value": value, "low": low, "high": high}

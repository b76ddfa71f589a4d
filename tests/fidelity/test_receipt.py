"""fidelity.json: canonical bytes, a round trip, and receipts that were damaged or edited."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefit.errors import FidelityError
from moefit.fidelity import receipt as receipts
from moefit.fidelity.gate import Control, Corpus, Policy
from moefit.fidelity.receipt import (
    Protocol,
    Receipt,
    make_receipt,
    read_receipt,
    receipt_bytes,
    write_receipt,
)
from moefit.fidelity.statistics import Bootstrap, WindowRow

PROTOCOL = Protocol(512, 2, 100, "float32", "[bos] + encode(text)")
INPUTS = {"reference": "a" * 64, "candidate": "b" * 64, "tokenizer": "c" * 64}
CONTROL = Control(kl=9.0, top1=0.001, self_kl=0.0, tokens=64)


def corpus(documents: int, mean: float) -> Corpus:
    rows = []
    for d in range(documents):
        kl = mean * (1 + 0.1 * (-1) ** d)
        for tokens in (512, 200):
            rows.append(WindowRow(f"doc-{d}", tokens, tokens * kl, 2 * tokens * kl**2, tokens - 7, 1000.125, 1030.75))
    return Corpus("d" * 64, tuple(rows), CONTROL)


def receipt(**limits: Any) -> Receipt:
    policy = Policy(**({"max_kl": 0.1} | limits), bootstrap=Bootstrap(resamples=500))
    return make_receipt(PROTOCOL, INPUTS, policy, {"prose": corpus(9, 0.05), "code": corpus(25, 0.02)})


def edited(tmp_path: Path, edit: Callable[[dict[str, Any]], object], **limits: Any) -> Path:
    value = json.loads(receipt_bytes(receipt(**limits)))
    edit(value)
    path = tmp_path / "fidelity.json"
    path.write_text(json.dumps(value))
    return path


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_kl": 1},
        {"min_top1": 0.5},
        {"max_kl": {"prose": 0.1, "code": 0.01}, "min_top1": {"code": 0.9}},
    ],
)
def test_round_trip(tmp_path: Path, limits: dict[str, Any]) -> None:
    made = receipt(**limits)
    path = tmp_path / "fidelity.json"
    write_receipt(path, made)
    read = read_receipt(path)
    assert read == made
    assert receipt_bytes(read) == path.read_bytes()


def test_same_measurement_same_bytes() -> None:
    policy = Policy(max_kl=0.1)
    one = make_receipt(PROTOCOL, INPUTS, policy, {"prose": corpus(9, 0.05), "code": corpus(25, 0.02)})
    two = make_receipt(
        PROTOCOL, dict(reversed(INPUTS.items())), policy, {"code": corpus(25, 0.02), "prose": corpus(9, 0.05)}
    )
    assert receipt_bytes(one) == receipt_bytes(two)


def test_content() -> None:
    value = json.loads(receipt_bytes(receipt(min_top1=0.5)))
    assert (value["format"], value["version"]) == ("moefit-fidelity", 1)
    assert value["verdict"]["outcome"] == "pass"
    assert len(value["verdict"]["findings"]) == 4
    prose = value["corpora"]["prose"]
    assert prose["measured"]["documents"] == 9
    assert prose["measured"]["kl"]["few_documents"] is True
    assert prose["measured"]["kl"]["low"] < prose["measured"]["kl"]["value"] < prose["measured"]["kl"]["high"]
    assert len(prose["windows"]) == 18
    assert prose["windows"][0]["tokens"] == 512


def test_one_document_round_trips_without_an_interval(tmp_path: Path) -> None:
    made = make_receipt(PROTOCOL, INPUTS, Policy(max_kl=0.1), {"prose": corpus(1, 0.05)})
    write_receipt(tmp_path / "f.json", made)
    assert read_receipt(tmp_path / "f.json") == made
    assert json.loads(receipt_bytes(made))["corpora"]["prose"]["measured"]["kl"]["high"] is None
    assert made.verdict.exit_code == 3


def window(value: dict[str, Any]) -> dict[str, Any]:
    return value["corpora"]["prose"]["windows"][3]


def put(value: dict[str, Any], key: str, new: Any) -> None:
    value[key] = new


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "other version": (lambda v: put(v, "version", 2), "expected moefit-fidelity 1, found moefit-fidelity 2"),
    "version true": (lambda v: put(v, "version", True), "version"),
    "other format": (lambda v: put(v, "format", ["x"]), "format"),
    "field missing": (lambda v: v.pop("policy"), r"missing \['policy'\]"),
    "field unknown": (lambda v: put(v, "note", 1), r"unknown \['note'\]"),
    "verdict edited": (lambda v: put(v["verdict"], "outcome", "inconclusive"), "verdict.outcome"),
    "corpus outcome edited": (lambda v: put(v["corpora"]["code"], "outcome", "fail"), "corpora.code.outcome"),
    "interval edited": (
        lambda v: put(v["corpora"]["prose"]["measured"]["kl"], "high", 0.05),
        "corpora.prose.measured.kl.high",
    ),
    "count edited": (lambda v: put(v["corpora"]["code"]["measured"], "tokens", 10**6), "measured.tokens"),
    "finding removed": (lambda v: v["verdict"]["findings"].pop(), "expected 2 entries"),
    "limit edited": (lambda v: put(v["policy"], "max_kl", 1.0), "limit"),
    "limit of the wrong type": (lambda v: put(v["policy"], "max_kl", "0.1"), "policy.max_kl"),
    "limit null": (lambda v: put(v["policy"], "max_kl", None), "policy.max_kl"),
    "limit huge": (lambda v: put(v["policy"], "max_kl", 10**400), "policy.max_kl"),
    "limits list": (lambda v: put(v["policy"], "min_top1", []), "policy.min_top1"),
    "resamples huge": (lambda v: put(v["policy"]["bootstrap"], "resamples", 10**12), "out of range"),
    "resamples true": (lambda v: put(v["policy"]["bootstrap"], "resamples", True), "bootstrap.resamples"),
    "window removed": (lambda v: v["corpora"]["prose"]["windows"].pop(), "contradicts"),
    "window twice": (
        lambda v: v["corpora"]["prose"]["windows"].append(dict(window(v))),
        r"windows\[18\].*doc-1",
    ),
    "no windows": (lambda v: put(v["corpora"]["prose"], "windows", []), "no window"),
    "windows not a list": (lambda v: put(v["corpora"]["prose"], "windows", {}), "not a list"),
    "window not an object": (lambda v: put(v["corpora"]["prose"]["windows"], 3, 7), r"windows\[3\]"),  # type: ignore[arg-type]
    "kl edited": (lambda v: put(window(v), "kl", window(v)["kl"] * 0.9), "contradicts"),
    "kl negative": (lambda v: put(window(v), "kl", -1.0), r"windows\[3\].kl.*>= 0"),
    "kl huge": (lambda v: put(window(v), "kl", 1e300), r"windows\[3\].kl"),
    "squares too small": (lambda v: put(window(v), "kl_squares", 0.0), "sum of squares"),
    "squares too large": (lambda v: put(window(v), "kl_squares", 1e30), "sum of squares"),
    "hits above tokens": (lambda v: put(window(v), "top1_hits", 513), "more agreements"),
    "hits fractional": (lambda v: put(window(v), "top1_hits", 5.5), "top1_hits"),
    "tokens above protocol": (lambda v: put(window(v), "tokens", 513), "expected 2 to 512, found 513"),
    "tokens zero": (lambda v: put(window(v), "tokens", 0), "found 0"),
    "tokens true": (lambda v: put(window(v), "tokens", True), "tokens"),
    "protocol huge": (lambda v: put(v["protocol"], "window_tokens", 10**30), "protocol"),
    "protocol shortest": (lambda v: put(v["protocol"], "shortest_window", 600), "protocol"),
    "hash short": (lambda v: put(v["inputs"], "reference", "abc"), "sha256.*reference"),
    "hash number": (lambda v: put(v["inputs"], "reference", 7), "inputs.reference"),
    "input missing": (lambda v: v["inputs"].pop("candidate"), "inputs.candidate"),
    "corpus hash": (lambda v: put(v["corpora"]["prose"], "sha256", "z" * 64), "sha256.*prose"),
    "no corpora": (lambda v: put(v, "corpora", {}), "nothing was measured"),
    "corpora null": (lambda v: put(v, "corpora", None), "not an object"),
    "control passes": (lambda v: put(v["corpora"]["prose"]["control"], "kl", 0.01), "did not fail"),
    "self not zero": (lambda v: put(v["corpora"]["code"]["control"], "self_kl", 1e-9), "differs from itself"),
    "control empty": (lambda v: put(v["corpora"]["code"]["control"], "tokens", 0), "impossible control"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_receipts_are_refused_and_named(tmp_path: Path, case: str) -> None:
    edit, message = HOSTILE[case]
    path = edited(tmp_path, edit)
    with pytest.raises(FidelityError, match=message) as caught:
        read_receipt(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a JSON receipt"),
        (b"{", "not a JSON receipt"),
        (b"\xff\xfe\x00", "not a JSON receipt"),
        (b"[]", "not an object"),
        (b'{"format": "a", "format": "b"}', "stands twice"),
        (b'{"format": NaN}', "NaN is not a JSON number"),
        (b'{"version": ' + b"9" * 5000 + b"}", "not a JSON receipt"),
        (b"[" * 100_000, "not a JSON receipt"),
    ],
)
def test_what_is_not_a_receipt(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "fidelity.json"
    path.write_bytes(content)
    with pytest.raises(FidelityError, match=message):
        read_receipt(path)


def test_size_and_absence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FidelityError, match="cannot read"):
        read_receipt(tmp_path / "absent.json")
    path = edited(tmp_path, lambda v: None)
    monkeypatch.setattr(receipts, "MAX_WINDOWS", 67)
    with pytest.raises(FidelityError, match="too many windows"):
        read_receipt(path)
    monkeypatch.setattr(receipts, "MAX_BYTES", 100)
    with pytest.raises(FidelityError, match="too large"):
        read_receipt(path)


def test_the_last_digits_of_another_library_release_do_not_refuse(tmp_path: Path) -> None:
    def nudge(value: dict[str, Any]) -> None:
        value["corpora"]["prose"]["measured"]["kl"]["high"] *= 1 + 1e-12

    assert read_receipt(edited(tmp_path, nudge)).verdict.exit_code == 0


WHOLE = receipt_bytes(receipt(min_top1=0.5))


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_bytes_are_refused_or_harmless(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A changed or cut piece of the file raises FidelityError or leaves the same verdict; nothing else."""
    start = data.draw(st.integers(0, len(WHOLE) - 1))
    stop = data.draw(st.integers(start, min(len(WHOLE), start + 20)))
    new = data.draw(st.one_of(st.binary(max_size=4), st.sampled_from([b"0", b"1e999", b"null", b"{}", b'"x"'])))
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    path.write_bytes(WHOLE[:start] + new + WHOLE[stop:])
    try:
        read = read_receipt(path)
    except FidelityError:
        return
    assert read.verdict.outcome == "pass"

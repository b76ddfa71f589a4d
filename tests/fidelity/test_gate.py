"""The verdict table, the few-document rules, and the controls without which nothing is judged."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moefit.errors import FidelityError
from moefit.fidelity.divergence import compare
from moefit.fidelity.gate import Control, Corpus, Outcome, Policy, judge, negative_control
from moefit.fidelity.statistics import WindowRow

GOOD_CONTROL = Control(kl=9.0, top1=0.001, self_kl=0.0, tokens=64)


def corpus(means: list[float], top1: list[float] | None = None, control: Control = GOOD_CONTROL) -> Corpus:
    """One window of 1,000 tokens per document with these mean KLs and agreements."""
    agreements = top1 or [0.9] * len(means)
    windows = tuple(
        WindowRow(f"{d:03}", 1000, 1000 * kl, 1500 * kl**2, round(1000 * agree), 2000.0, 2100.0)
        for d, (kl, agree) in enumerate(zip(means, agreements, strict=True))
    )
    return Corpus("0" * 64, windows, control)


def steady(documents: int, mean: float, spread: float = 0.1) -> Corpus:
    """Means that alternate by +-spread around `mean`."""
    return corpus([mean * (1 + spread * (-1) ** d) for d in range(documents)])


@pytest.mark.parametrize("documents", [6, 9, 19, 40])
@pytest.mark.parametrize(
    ("limit", "outcome", "code"),
    [(0.2, Outcome.PASS, 0), (0.05, Outcome.FAIL, 1), (0.1, Outcome.INCONCLUSIVE, 3)],
)
def test_verdict_table(documents: int, limit: float, outcome: Outcome, code: int) -> None:
    verdict = judge({"prose": steady(documents, 0.1)}, Policy(max_kl=limit))
    assert (verdict.outcome, verdict.exit_code) == (outcome, code)
    assert verdict.corpus("prose") == outcome


def test_the_ends_of_the_interval_decide() -> None:
    measured = {"prose": steady(30, 0.1)}
    estimate = judge(measured, Policy(max_kl=1.0)).findings[0].estimate
    assert estimate.low is not None and estimate.high is not None

    def at(limit: float) -> Outcome:
        return judge(measured, Policy(max_kl=limit)).outcome

    assert at(estimate.high) is Outcome.PASS
    assert at(math.nextafter(estimate.high, 0)) is Outcome.INCONCLUSIVE
    assert at(estimate.low) is Outcome.INCONCLUSIVE
    assert at(math.nextafter(estimate.low, 0)) is Outcome.FAIL


@pytest.mark.parametrize(
    ("documents", "limit", "outcome", "reason"),
    [
        (1, 10.0, Outcome.INCONCLUSIVE, "one document"),
        (1, 0.001, Outcome.INCONCLUSIVE, "one document"),
        (4, 10.0, Outcome.INCONCLUSIVE, "4 documents, a pass needs 5"),
        (4, 0.001, Outcome.FAIL, "beyond"),
        (5, 10.0, Outcome.PASS, "keeps"),
    ],
)
def test_few_documents(documents: int, limit: float, outcome: Outcome, reason: str) -> None:
    finding = judge({"prose": steady(documents, 0.1)}, Policy(max_kl=limit)).findings[0]
    assert finding.outcome is outcome
    assert reason in finding.reason
    assert finding.estimate.few_documents


def test_a_small_corpus_needs_more_room_than_the_bootstrap_says() -> None:
    """9 uneven documents, a limit between the bootstrap's upper end (0.15) and that of log t (0.18)."""
    means = [0.02, 0.03, 0.03, 0.05, 0.06, 0.08, 0.1, 0.2, 0.3]
    assert judge({"agentic": corpus(means)}, Policy(max_kl=0.165)).outcome is Outcome.INCONCLUSIVE
    assert judge({"agentic": corpus(means)}, Policy(max_kl=0.25)).outcome is Outcome.PASS


def test_every_corpus_must_pass_and_none_is_pooled() -> None:
    good, bad, unsure = steady(40, 0.01), steady(20, 0.2), steady(20, 0.1)
    policy = Policy(max_kl=0.1)
    assert judge({"a": good}, policy).exit_code == 0
    assert judge({"a": good, "b": unsure}, policy).exit_code == 3
    # Pooled by token the mean would be 0.073: a pass.
    verdict = judge({"a": good, "b": bad}, policy)
    assert (verdict.exit_code, verdict.corpus("a"), verdict.corpus("b")) == (1, "pass", "fail")
    assert judge({"a": unsure, "b": bad, "c": good}, policy).exit_code == 1
    with pytest.raises(KeyError):
        verdict.corpus("c")


@pytest.mark.parametrize(("floor", "outcome"), [(0.8, Outcome.PASS), (0.9, Outcome.INCONCLUSIVE), (0.95, Outcome.FAIL)])
def test_top1(floor: float, outcome: Outcome) -> None:
    measured = {"prose": corpus([0.01] * 30, [0.88, 0.92] * 15)}
    verdict = judge(measured, Policy(max_kl=0.1, min_top1=floor))
    assert [f.outcome for f in verdict.findings] == [Outcome.PASS, outcome]
    assert verdict.outcome is outcome


def test_limits_per_corpus() -> None:
    measured = {"prose": steady(30, 0.1), "code": steady(30, 0.01)}
    assert judge(measured, Policy(max_kl={"prose": 0.2, "code": 0.02})).exit_code == 0
    assert judge(measured, Policy(max_kl={"prose": 0.02, "code": 0.2})).exit_code == 1
    verdict = judge(measured, Policy(max_kl=0.2, min_top1={"code": 0.5}))
    assert [(f.corpus, f.metric) for f in verdict.findings] == [
        ("prose", "kl"),
        ("code", "kl"),
        ("code", "top1"),
    ]
    with pytest.raises(FidelityError, match=r"without a limit.*code"):
        judge(measured, Policy(max_kl={"prose": 0.2}))
    with pytest.raises(FidelityError, match=r"prosa.*Did you mean 'prose'"):
        judge(measured, Policy(max_kl={"prosa": 0.2, "prose": 0.2, "code": 0.2}))


def test_line_says_all() -> None:
    line = judge({"prose": steady(9, 0.1)}, Policy(max_kl=0.2, min_top1=0.5)).findings[0].line()
    for part in ("prose", "KL", "nats/token", "limit <= 0.2", "9 documents", "pass", "["):
        assert part in line
    alone = judge({"prose": steady(1, 0.1)}, Policy(max_kl=0.2)).findings[0].line()
    assert "no interval" in alone and "inconclusive" in alone


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_kl": 0.0},
        {"max_kl": math.nan},
        {"max_kl": math.inf},
        {"max_kl": {}},
        {"max_kl": {"prose": -1.0}},
        {"max_kl": 0.1, "min_top1": 1.1},
        {"max_kl": 0.1, "min_top1": {"prose": math.nan}},
        {"max_kl": 0.1, "min_documents": 1},
    ],
)
def test_impossible_policies_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(FidelityError):
        Policy(**wrong)  # type: ignore[arg-type]


def peaked(length: int = 16, vocabulary: int = 200) -> torch.Tensor:
    return torch.randn(length, vocabulary, generator=torch.Generator().manual_seed(0)) * 4


def test_negative_control_of_a_peaked_model_fails_as_it_must() -> None:
    control = negative_control(peaked())
    assert control.self_kl == 0
    assert control.kl > 1
    assert control.top1 < 0.1
    assert control.tokens == 16
    candidate = peaked() + 0.1 * torch.ones(200).cumsum(0).sin()
    rolled = negative_control(peaked(), candidate)
    assert rolled.kl > 1 and rolled.top1 < 0.1 and rolled.kl != control.kl


def test_the_control_moves_ids_not_positions() -> None:
    """Token v gets the logit of token v-1 at the same position."""
    reference = peaked()
    shifted = torch.cat([reference[:, -1:], reference[:, :-1]], dim=1)
    rows = compare(reference, shifted, torch.zeros(16, dtype=torch.int64))
    control = negative_control(reference)
    assert (control.kl, control.top1) == (rows.kl.mean(), rows.agree.mean())


def test_negative_control_of_a_trained_model(shared: Path) -> None:
    golden = load_file(shared / "golden" / "tiny_v41_logits.safetensors")
    names = [name for name in golden if name.endswith(".logits")]
    assert len(names) == 5
    for name in names:
        control = negative_control(golden[name][:64], window=name)
        assert control.self_kl == 0
        assert control.kl > 1 and control.top1 < 0.1


def test_a_model_that_knows_nothing_cannot_be_measured() -> None:
    control = negative_control(peaked() * 1e-3)  # nearly uniform: being off by one changes nothing
    with pytest.raises(FidelityError, match=r"negative control did not fail \[prose\].*found KL"):
        judge({"prose": replace(steady(30, 0.01), control=control)}, Policy(max_kl=0.1))


@pytest.mark.parametrize(
    "control",
    [
        replace(GOOD_CONTROL, kl=0.1),
        replace(GOOD_CONTROL, top1=0.1),
        replace(GOOD_CONTROL, kl=math.nan),
        replace(GOOD_CONTROL, top1=math.nan),
        replace(GOOD_CONTROL, self_kl=1e-12),
        replace(GOOD_CONTROL, self_kl=math.nan),
    ],
)
def test_a_control_that_comes_out_wrong_refuses_the_measurement(control: Control) -> None:
    good = steady(30, 0.01)
    with pytest.raises(FidelityError, match="code"):
        judge({"prose": good, "code": replace(good, control=control)}, Policy(max_kl=0.1))


def test_nothing_measured_is_not_a_pass() -> None:
    with pytest.raises(FidelityError, match="nothing was measured"):
        judge({}, Policy(max_kl=0.1))
    with pytest.raises(FidelityError, match="no window"):
        judge({"prose": replace(steady(1, 0.1), windows=())}, Policy(max_kl=0.1))

"""Pass, fail or inconclusive: a policy held against what was measured, one corpus at a time.

A limit is passed when the whole 95 % interval lies on the good side of it, failed when the whole interval
lies on the bad side, and inconclusive otherwise. The interval is two-sided, so either error has about 2.5 %.
Corpora are never pooled: each must pass by itself, and since all must, no correction for their number is due
(an intersection-union test).

Few documents: below 20 the interval is the wider one of `statistics`, and the same rule holds, so that a
small held-out set still decides clear cases. Below `Policy.min_documents` (5) nothing passes, however good it
looks; it can still fail. One document has no interval and decides nothing.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from ..errors import FidelityError
from .divergence import compare
from .statistics import Bootstrap, Estimate, Summary, WindowRow, summarise

# What a comparison with every token id off by one must look like; a healthy model is far beyond both.
CONTROL_MIN_KL = 0.1
CONTROL_MAX_TOP1 = 0.1


class Outcome(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"

    @property
    def exit_code(self) -> int:
        return {"pass": 0, "fail": 1, "inconclusive": 3}[self.value]


@dataclass(frozen=True)
class Policy:
    """Limits a candidate must keep on every corpus.

    max_kl: mean KL(reference || candidate) per token, nats; one number, or one per corpus.
    min_top1: least top-1 agreement, 0 to 1; one number, one per corpus, or None for no such rule. A mapping
        may leave corpora out.
    min_documents: with fewer documents a corpus cannot pass.
    """

    max_kl: float | Mapping[str, float]
    min_top1: float | Mapping[str, float] | None = None
    min_documents: int = 5
    bootstrap: Bootstrap = field(default_factory=Bootstrap)

    def __post_init__(self) -> None:
        limits = dict(self.max_kl) if isinstance(self.max_kl, Mapping) else {"": self.max_kl}
        if not limits or not all(math.isfinite(limit) and limit > 0 for limit in limits.values()):
            raise FidelityError("max_kl must be positive, in nats", found=f"found {self.max_kl}")
        floors = dict(self.min_top1) if isinstance(self.min_top1, Mapping) else {"": self.min_top1}
        if not all(floor is None or 0 < floor <= 1 for floor in floors.values()):
            raise FidelityError("min_top1 must be above 0 and at most 1", found=f"found {self.min_top1}")
        if self.min_documents < 2:
            raise FidelityError("min_documents must be at least 2", found=f"found {self.min_documents}")


@dataclass(frozen=True)
class Control:
    """What the comparison says where the answer is known.

    kl, top1: mean KL(reference || rolled), nats, and top-1 agreement, logits rolled by one vocabulary id.
    self_kl: the largest KL(reference || reference) of any position; it must be 0 exactly.
    tokens: positions compared.
    """

    kl: float
    top1: float
    self_kl: float
    tokens: int


@dataclass(frozen=True)
class Corpus:
    """One corpus as measured. sha256: hex digest of the corpus file (or of its token windows)."""

    sha256: str
    windows: tuple[WindowRow, ...]
    control: Control


@dataclass(frozen=True)
class Finding:
    """One rule on one corpus. metric: "kl" (limit is a ceiling) or "top1" (limit is a floor)."""

    corpus: str
    metric: str
    estimate: Estimate
    limit: float
    outcome: Outcome
    reason: str

    def line(self) -> str:
        """One line for a terminal: number, interval, limit, n, outcome."""
        e = self.estimate
        name, relation, unit = ("KL", "<=", " nats/token") if self.metric == "kl" else ("top-1", ">=", "")
        interval = "no interval" if e.low is None or e.high is None else f"[{e.low:.4g}, {e.high:.4g}]"
        number = f"{self.corpus}: {name} {e.value:.4g} {interval}{unit}, limit {relation} {self.limit:g}"
        return f"{number}, {e.documents} documents: {self.outcome.value} ({self.reason})"


@dataclass(frozen=True)
class Verdict:
    """outcome: fail if any finding fails, else inconclusive if any is, else pass."""

    outcome: Outcome
    findings: tuple[Finding, ...]
    summaries: Mapping[str, Summary]

    @property
    def exit_code(self) -> int:
        """0 pass, 1 fail, 3 inconclusive."""
        return self.outcome.exit_code

    def corpus(self, name: str) -> Outcome:
        """Outcome of one corpus."""
        if name not in self.summaries:
            raise KeyError(name)
        return _worst([f.outcome for f in self.findings if f.corpus == name])


def negative_control(
    reference_logits: torch.Tensor, candidate_logits: torch.Tensor | None = None, *, window: str = ""
) -> Control:
    """Compare where the answer is known: the reference with itself, and with logits rolled by one id.

    reference_logits: [T, V]. candidate_logits: [T, V], what is rolled; the reference's own if None. A few
    dozen positions are enough; the roll takes a copy.
    """
    ids = torch.zeros(reference_logits.shape[0], dtype=torch.int64)  # the KL does not look at them
    same = compare(reference_logits, reference_logits, ids, window=window)
    rolled = reference_logits if candidate_logits is None else candidate_logits
    other = compare(reference_logits, torch.roll(rolled, 1, dims=-1), ids, window=window)
    return Control(float(other.kl.mean()), float(other.agree.mean()), float(same.kl.max()), other.tokens)


def judge(corpora: Mapping[str, Corpus], policy: Policy) -> Verdict:
    """Hold every corpus against the policy.

    Raises FidelityError where the measurement itself means nothing: no corpus, no window, a control that does
    not come out as it must, or a policy and a measurement that name different corpora.
    """
    if not corpora:
        raise FidelityError("nothing was measured", mend="name at least one corpus")
    for name, corpus in corpora.items():
        _check_control(corpus.control, name)
    max_kl = _limits(policy.max_kl, corpora, "max_kl")
    min_top1 = _limits(policy.min_top1, corpora, "min_top1")
    for name in corpora:
        if name not in max_kl:
            raise FidelityError(
                "corpus without a limit",
                where=name,
                found=f"max_kl names {sorted(max_kl)}",
                mend="add it to max_kl",
            )
    summaries = {name: summarise(corpus.windows, policy.bootstrap) for name, corpus in corpora.items()}
    findings = []
    for name, summary in summaries.items():
        findings.append(_finding(name, "kl", summary.kl, max_kl[name], policy))
        if name in min_top1:
            findings.append(_finding(name, "top1", summary.top1, min_top1[name], policy))
    return Verdict(_worst([f.outcome for f in findings]), tuple(findings), summaries)


def _finding(corpus: str, metric: str, estimate: Estimate, limit: float, policy: Policy) -> Finding:
    def found(outcome: Outcome, reason: str) -> Finding:
        return Finding(corpus, metric, estimate, float(limit), outcome, reason)

    low, high = estimate.low, estimate.high
    if low is None or high is None:
        return found(Outcome.INCONCLUSIVE, "one document has no interval")
    if (low > limit) if metric == "kl" else (high < limit):
        return found(Outcome.FAIL, "the whole interval is beyond the limit")
    if (high > limit) if metric == "kl" else (low < limit):
        return found(Outcome.INCONCLUSIVE, "the limit lies inside the interval")
    if estimate.documents < policy.min_documents:
        return found(Outcome.INCONCLUSIVE, f"{estimate.documents} documents, a pass needs {policy.min_documents}")
    return found(Outcome.PASS, "the whole interval keeps the limit")


def _worst(outcomes: list[Outcome]) -> Outcome:
    for outcome in (Outcome.FAIL, Outcome.INCONCLUSIVE):
        if outcome in outcomes:
            return outcome
    return Outcome.PASS


def _limits(value: float | Mapping[str, float] | None, corpora: Mapping[str, Corpus], rule: str) -> dict[str, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        return dict.fromkeys(corpora, value)
    for name in value:
        if name not in corpora:
            close = difflib.get_close_matches(name, corpora, n=1)
            raise FidelityError(
                f"{rule} names a corpus that was not measured",
                where=name,
                found=f"expected one of {sorted(corpora)}",
                mend=f"Did you mean {close[0]!r}?" if close else "remove it from the policy or measure it",
            )
    return dict(value)


def _check_control(control: Control, corpus: str) -> None:
    if control.self_kl != 0:
        raise FidelityError(
            "the reference differs from itself",
            where=corpus,
            found=f"expected KL(reference || reference) of exactly 0, found {control.self_kl}",
            mend="the comparison is broken; nothing it says about the candidate can be used",
        )
    # Written so that a NaN is refused too.
    if not (control.kl > CONTROL_MIN_KL and control.top1 < CONTROL_MAX_TOP1):
        raise FidelityError(
            "the negative control did not fail",
            where=corpus,
            found=f"with logits off by one id, expected KL above {CONTROL_MIN_KL} and top-1 below "
            f"{CONTROL_MAX_TOP1}, found KL {control.kl:.4g} and top-1 {control.top1:.4g}",
            mend="check that the logits are a trained model's and belong to these tokens",
        )

"""Estimates against hand-worked and plain versions, coverage of the intervals, effect of clustering."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefit.errors import FidelityError
from moefit.fidelity import statistics
from moefit.fidelity.divergence import compare
from moefit.fidelity.statistics import (
    Bootstrap,
    WindowRow,
    paired,
    resampled_totals,
    summarise,
    window_row,
)

QUICK = Bootstrap(resamples=1000)


def row(document: str, tokens: int, mean_kl: float, hits: int | None = None) -> WindowRow:
    """A window whose positions all have the same KL."""
    return WindowRow(
        document=document,
        tokens=tokens,
        kl=tokens * mean_kl,
        kl_squares=tokens * mean_kl**2,
        top1_hits=tokens if hits is None else hits,
        reference_nll=2.0 * (tokens - 1),
        candidate_nll=(2.0 + mean_kl) * (tokens - 1),
    )


def corpus(seed: int, documents: int, log_sd: float = 0.6, within: float = 0.5, windows: int = 2) -> list[WindowRow]:
    """Document means log-normal around exactly 1, gamma tokens within a document (CV `within`)."""
    rng = np.random.default_rng(seed)
    rows = []
    for d in range(documents):
        mean = math.exp(rng.normal(-(log_sd**2) / 2, log_sd))
        for _ in range(windows):
            tokens = int(rng.integers(100, 512))
            kl = rng.gamma(within**-2, mean * within**2, tokens)
            hits = int((rng.random(tokens) < 0.9).sum())
            rows.append(WindowRow(f"d{d:03}", tokens, float(kl.sum()), float((kl**2).sum()), hits, 900.0, 950.0))
    return rows


def test_window_row_sums_positions() -> None:
    logits = torch.randn(9, 30, generator=torch.Generator().manual_seed(0))
    other = torch.randn(9, 30, generator=torch.Generator().manual_seed(1))
    tokens = compare(logits, other, torch.arange(9))
    summed = window_row("a", tokens)
    assert (summed.document, summed.tokens, summed.top1_hits) == ("a", 9, int(tokens.agree.sum()))
    assert summed.kl == pytest.approx(tokens.kl.sum(), rel=1e-14)
    assert summed.kl_squares == pytest.approx((tokens.kl**2).sum(), rel=1e-14)
    assert summed.reference_nll == pytest.approx(tokens.reference_nll.sum(), rel=1e-14)
    assert summed.candidate_nll == pytest.approx(tokens.candidate_nll.sum(), rel=1e-14)


def test_by_hand() -> None:
    """a: 100 tokens at 0.1 and 300 at 0.2; b: 100 at 0.4. Token mean (10+60+40)/500, window mean 0.7/3."""
    rows = [row("a", 100, 0.1, 90), row("a", 300, 0.2, 270), row("b", 100, 0.4, 50)]
    result = summarise(rows, QUICK)
    assert (result.documents, result.windows, result.tokens) == (2, 3, 500)
    assert result.kl.value == pytest.approx(0.22)
    assert result.kl_window_mean.value == pytest.approx(0.7 / 3)
    assert result.top1.value == pytest.approx(410 / 500)
    assert result.reference_nll == pytest.approx(2.0)
    assert result.nll_difference.value == pytest.approx((9.9 + 59.8 + 39.6) / 497)
    # Residuals 70 - 0.22*400 = -18 and 40 - 22 = 18; SE = sqrt(2/1 * 2 * 324) / 500.
    assert result.kl.standard_error == pytest.approx(math.sqrt(4 * 324) / 500)
    # Independent tokens: (sum of squares / N - mean^2) / (N - 1).
    independent = ((1 + 12 + 16) / 500 - 0.22**2) / 499
    assert result.kl.design_effect == pytest.approx((4 * 324 / 500**2) / independent)


def test_fast_bootstrap_equals_the_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = np.random.default_rng(5).random((3, 17))
    options = Bootstrap(resamples=200, seed=9)
    bits, plain = np.random.PCG64(9), np.empty((3, 200))
    for b in range(200):
        chosen = [(int(bits.random_raw()) >> 32) * 17 >> 32 for _ in range(17)]
        for c in range(3):
            plain[c, b] = math.fsum(columns[c, d] for d in chosen)
    np.testing.assert_allclose(resampled_totals(columns, options), plain, rtol=1e-14)
    monkeypatch.setattr(statistics, "BLOCK_DRAWS", 40)  # two resamples at a time
    np.testing.assert_allclose(resampled_totals(columns, options), plain, rtol=1e-14)


def test_draws_are_uniform_over_documents() -> None:
    counts = resampled_totals(np.eye(7), Bootstrap(resamples=20_000))  # [7, B]: how often each was drawn
    assert (counts.sum(axis=0) == 7).all()
    np.testing.assert_allclose(counts.mean(axis=1), 1.0, atol=0.04)  # SE 0.0066
    np.testing.assert_allclose(counts.var(axis=1), 6 / 7, atol=0.06)


def test_deterministic_and_blind_to_order() -> None:
    rows = corpus(3, 12)
    shuffled = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    assert repr(summarise(rows)) == repr(summarise(list(rows))) == repr(summarise(shuffled))
    many = corpus(3, 25)
    assert summarise(many).kl.low != summarise(many, Bootstrap(seed=1)).kl.low


@given(st.integers(0, 10**6), st.integers(2, 30))
@settings(max_examples=30, deadline=None)
def test_the_interval_holds_the_value(seed: int, documents: int) -> None:
    result = summarise(corpus(seed, documents), QUICK)
    for estimate in (result.kl, result.kl_window_mean, result.top1, result.nll_difference):
        assert estimate.low is not None and estimate.high is not None
        assert estimate.low - 1e-12 <= estimate.value <= estimate.high + 1e-12
        assert estimate.few_documents == (documents < 20)
    assert result.kl.low is not None and result.kl.low > 0
    assert result.top1.low is not None and 0 <= result.top1.low <= 1


def coverage(documents: int, log_sd: float, simulations: int) -> tuple[float, float]:
    """Share of corpora whose interval holds the true mean 1, and share where the truth lies above it."""
    held = above = 0
    rng = np.random.default_rng(documents)
    for seed in range(simulations):
        rows = []
        for d in range(documents):
            tokens = int(rng.integers(100, 1024))
            rows.append(row(f"{d:03}", tokens, math.exp(rng.normal(-(log_sd**2) / 2, log_sd))))
        kl = summarise(rows, Bootstrap(resamples=1000, seed=seed)).kl
        assert kl.low is not None and kl.high is not None
        held += kl.low <= 1 <= kl.high
        above += kl.high < 1
    return held / simulations, above / simulations


def test_a_nominal_95_percent_interval_covers_with_30_documents() -> None:
    held, _ = coverage(30, 0.4, 400)
    assert 0.90 <= held <= 0.985  # SE of the simulation 0.011


def test_few_documents_get_an_interval_that_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    held, above = coverage(9, 0.6, 400)
    assert held >= 0.88
    monkeypatch.setattr(statistics, "FEW_DOCUMENTS", 0)  # what the bootstrap alone would have said
    bootstrap_held, bootstrap_above = coverage(9, 0.6, 400)
    assert held > bootstrap_held
    assert above < 0.8 * bootstrap_above


@given(st.integers(0, 10**6), st.integers(2, 19))
@settings(max_examples=30, deadline=None)
def test_few_documents_never_shorten_the_interval(seed: int, documents: int) -> None:
    rows = corpus(seed, documents)
    wide = summarise(rows, QUICK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "FEW_DOCUMENTS", 0)
        plain = summarise(rows, QUICK)
    for name in ("kl", "kl_window_mean", "top1", "nll_difference"):
        wider, narrower = getattr(wide, name), getattr(plain, name)
        assert wider.low <= narrower.low and wider.high >= narrower.high
        assert wider.method.startswith("wider of") and narrower.method == "percentile bootstrap"


def test_clustering_matters() -> None:
    """With document-level spread the design effect is large; with none it is about 1."""
    spread = summarise(corpus(1, 120, log_sd=0.6, windows=1)).kl
    assert spread.design_effect is not None and spread.design_effect > 20
    level = [summarise(corpus(s, 120, log_sd=0.0, windows=1), QUICK).kl.design_effect for s in range(20)]
    assert np.mean([d for d in level if d is not None]) == pytest.approx(1.0, abs=0.1)
    assert len(level) == 20


def test_bootstrap_agrees_with_the_linearised_error() -> None:
    kl = summarise(corpus(2, 200)).kl
    assert kl.low is not None and kl.high is not None and kl.standard_error is not None
    assert (kl.high - kl.low) / (2 * 1.96) == pytest.approx(kl.standard_error, rel=0.05)


def test_one_document_has_no_interval() -> None:
    kl = summarise([row("a", 100, 0.1), row("a", 100, 0.2)]).kl
    assert (kl.low, kl.high, kl.standard_error, kl.design_effect) == (None, None, None, None)
    assert kl.value == pytest.approx(0.15)
    assert kl.few_documents


def test_a_disagreement_never_seen_is_not_a_disagreement_ruled_out() -> None:
    """Clopper-Pearson for 0 of n: the rate may still be up to 1 - 0.025^(1/n)."""
    top1 = summarise([row(str(d), 100, 0.01) for d in range(25)]).top1
    assert (top1.value, top1.high) == (1.0, 1.0)
    assert top1.low == pytest.approx(0.025 ** (1 / 2500), abs=1e-12)
    assert summarise([row(str(d), 100, 0.01, 99) for d in range(25)]).top1.low == pytest.approx(0.99)


def test_an_identical_candidate_is_exactly_zero() -> None:
    kl = summarise([row(str(d), 100, 0.0) for d in range(7)]).kl
    assert (kl.value, kl.low, kl.high, kl.standard_error, kl.design_effect) == (0, 0, 0, 0, None)


def test_the_headline_does_not_depend_on_how_documents_are_cut() -> None:
    whole = [row("a", 400, 0.1), row("b", 200, 0.3), row("c", 300, 0.2)]
    cut = [row("a", 300, 0.1), row("a", 100, 0.1), row("b", 200, 0.3), row("c", 150, 0.2), row("c", 150, 0.2)]
    assert summarise(whole).kl.value == pytest.approx(summarise(cut).kl.value, rel=1e-14)
    assert summarise(whole).kl.high == pytest.approx(summarise(cut).kl.high, rel=1e-12)
    assert summarise(whole).kl_window_mean.value != pytest.approx(summarise(cut).kl_window_mean.value)


@pytest.mark.parametrize("estimator", ["token mean", "window mean"])
def test_pairing_separates_what_single_intervals_cannot(estimator: str) -> None:
    baseline = corpus(4, 25)
    candidate = [replace(w, kl=w.kl * 0.95, kl_squares=w.kl_squares * 0.95**2) for w in baseline]
    result = paired(baseline, candidate, estimator=estimator)  # type: ignore[arg-type]
    single, other = summarise(baseline).kl, summarise(candidate).kl
    assert single.low is not None and other.high is not None
    assert other.high > single.low  # alone they overlap
    assert result.difference.high is not None and result.difference.high < 0
    assert result.ratio is not None
    assert result.ratio.value == pytest.approx(0.95)
    assert (result.ratio.low, result.ratio.high) == (pytest.approx(0.95), pytest.approx(0.95))
    value = single.value if estimator == "token mean" else summarise(baseline).kl_window_mean.value
    assert result.difference.value == pytest.approx(-0.05 * value)


def test_paired_refuses_other_windows_and_a_zero_baseline() -> None:
    rows = [row("a", 100, 0.1), row("b", 100, 0.1)]
    with pytest.raises(FidelityError, match=r"window 1.*baseline has 'b'.*candidate 'c'"):
        paired(rows, [rows[0], row("c", 100, 0.1)])
    with pytest.raises(FidelityError, match="baseline has 2, candidate 1"):
        paired(rows, rows[:1])
    assert paired([row("a", 100, 0.0), row("b", 100, 0.1)], rows).ratio is None


def test_bad_input_is_refused() -> None:
    with pytest.raises(FidelityError, match="no window"):
        summarise([])
    for options in ({"confidence": 1.0}, {"resamples": 10}, {"seed": -1}, {"confidence": math.nan}):
        with pytest.raises(FidelityError, match="out of range"):
            Bootstrap(**options)  # type: ignore[arg-type]


def test_120_documents_take_a_fraction_of_a_second() -> None:
    rows = corpus(0, 120)
    seconds = []
    for _ in range(3):
        start = time.process_time()
        summarise(rows)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.2

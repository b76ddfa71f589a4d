"""From windows to numbers with intervals. The document, not the token, is the unit that was sampled.

Tokens of one document share its subject, language and difficulty, so a standard error that treats them as
independent can be several times too small. Everything here resamples documents; `Estimate.design_effect` says
how much that mattered. Every number is a ratio of two sums over documents (Cochran,
Sampling Techniques, ch. 6):

- token mean, the headline: sum of KL over sum of tokens. It is the KL of a token drawn at random from the
  corpus, does not change when a document is cut into other windows, and gives a short last window only the
  weight of its tokens.
- window mean: the mean over windows of each window's mean KL, as several published tables report it. Short
  windows weigh as much as full ones. Computed beside the headline, for comparison with such tables.
- top-1 agreement, and the NLL difference per token, whose exp is the paired ratio of perplexities.

With 20 documents or more the interval is the percentile bootstrap. With fewer, that interval is too short:
for log-normal document means (log-sd 0.6) and 9 documents the truth lay above its 95 % upper end in 12 % of
1,500 simulated corpora, instead of 2.5 %; BCa did no better (11 %), a Student t interval for the logarithm of
the mean did (7.5 %), and keeps the lower end positive. So a small corpus gets the wider of bootstrap and log
t (plain t for signed numbers), and carries `few_documents`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from ..errors import FidelityError
from .divergence import TokenRows

FEW_DOCUMENTS = 20
BLOCK_DRAWS = 1 << 20  # document draws held at once, 8 MiB an array

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class WindowRow:
    """One window, summed over its positions: enough to judge again without logits.

    document: id of the document the window was cut from (the cluster).
    tokens: T, positions compared. The NLL sums cover the T-1 positions that have a next token.
    kl, kl_squares: sum of KL and of KL squared over the T positions, nats and nats squared.
    top1_hits: positions where both models have the same top-1 token.
    reference_nll, candidate_nll: sum of minus ln p(next token), nats.
    """

    document: str
    tokens: int
    kl: float
    kl_squares: float
    top1_hits: int
    reference_nll: float
    candidate_nll: float


@dataclass(frozen=True)
class Bootstrap:
    """How intervals are drawn: two-sided `confidence`, `resamples` resamples of documents, PCG64 `seed`."""

    confidence: float = 0.95
    resamples: int = 10_000
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0.5 <= self.confidence < 1 and 100 <= self.resamples <= 100_000 and 0 <= self.seed < 2**63):
            raise FidelityError(
                "bootstrap options out of range",
                found="expected confidence 0.5 to 1, resamples 100 to 100,000, seed 0 to 2^63-1, "
                f"found {self.confidence}, {self.resamples}, {self.seed}",
            )


@dataclass(frozen=True)
class Estimate:
    """A number with its interval.

    low, high: ends of the two-sided interval; None with one document, where no interval can be had.
    standard_error: of the ratio, clustered by document (linearised); None with one document.
    method: how low and high were made.
    few_documents: fewer than FEW_DOCUMENTS; the interval is the wider of two, and still only approximate.
    design_effect: clustered variance over the variance of as many independent tokens; None where it cannot be
        had (one document, no variance, or a number that is not a mean over tokens).
    """

    value: float
    low: float | None
    high: float | None
    standard_error: float | None
    documents: int
    method: str
    few_documents: bool
    design_effect: float | None = None


@dataclass(frozen=True)
class Summary:
    """One corpus: counts, the numbers, and their intervals. KL and NLL in nats per token."""

    documents: int
    windows: int
    tokens: int
    kl: Estimate
    kl_window_mean: Estimate
    top1: Estimate
    reference_nll: float
    candidate_nll: float
    nll_difference: Estimate


@dataclass(frozen=True)
class Paired:
    """A candidate against a baseline on the same windows.

    difference: KL(candidate) - KL(baseline), nats per token (or per window).
    ratio: KL(candidate) / KL(baseline); None if the baseline is exactly the reference on some document.
    """

    difference: Estimate
    ratio: Estimate | None


def window_row(document: str, rows: TokenRows) -> WindowRow:
    """Sum one window's positions. The sums are exact (`math.fsum`), so they do not depend on order."""
    return WindowRow(
        document=document,
        tokens=rows.tokens,
        kl=math.fsum(rows.kl),
        kl_squares=math.fsum(rows.kl**2),
        top1_hits=int(rows.agree.sum()),
        reference_nll=math.fsum(rows.reference_nll),
        candidate_nll=math.fsum(rows.candidate_nll),
    )


def summarise(windows: Sequence[WindowRow], options: Bootstrap | None = None) -> Summary:
    """All numbers of one corpus; the order of `windows` does not matter.

    Raises FidelityError if there is no window.
    """
    options = options or Bootstrap()
    clusters = _clusters(windows)
    sums = {
        "tokens": _sums(clusters, lambda w: w.tokens),
        "predicted": _sums(clusters, lambda w: w.tokens - 1),
        "windows": _sums(clusters, lambda w: 1),
        "kl": _sums(clusters, lambda w: w.kl),
        "window kl": _sums(clusters, lambda w: w.kl / w.tokens),
        "misses": _sums(clusters, lambda w: w.tokens - w.top1_hits),
        "added nll": _sums(clusters, lambda w: w.candidate_nll - w.reference_nll),
    }  # each [D]
    draws = dict(zip(sums, resampled_totals(np.stack(list(sums.values())), options), strict=True))  # each [B]

    def ratio(over: str, under: str, signed: bool = False) -> Estimate:
        return _ratio(sums[over], sums[under], draws[over], draws[under], options, signed)

    tokens = sum(w.tokens for w in windows)
    predicted = tokens - len(windows)
    return Summary(
        documents=len(clusters),
        windows=len(windows),
        tokens=tokens,
        kl=_with_design_effect(ratio("kl", "tokens"), math.fsum(w.kl_squares for w in windows), tokens),
        kl_window_mean=ratio("window kl", "windows"),
        top1=_agreement(ratio("misses", "tokens"), tokens, options),
        reference_nll=math.fsum(w.reference_nll for w in windows) / predicted,
        candidate_nll=math.fsum(w.candidate_nll for w in windows) / predicted,
        nll_difference=ratio("added nll", "predicted", signed=True),
    )


def paired(
    baseline: Sequence[WindowRow],
    candidate: Sequence[WindowRow],
    options: Bootstrap | None = None,
    estimator: Literal["token mean", "window mean"] = "token mean",
) -> Paired:
    """Difference and ratio of two candidates' mean KL, both resampled with the same documents.

    What a document does to both cancels, so this separates candidates whose own intervals overlap.
    Raises FidelityError unless both hold the same windows (document, tokens) in the same order.
    """
    options = options or Bootstrap()
    for index, (old, new) in enumerate(zip(baseline, candidate, strict=False)):
        if (old.document, old.tokens) != (new.document, new.tokens):
            raise FidelityError(
                "the two candidates were not scored on the same windows",
                where=f"window {index}",
                found=f"baseline has {old.document!r} with {old.tokens} tokens, "
                f"candidate {new.document!r} with {new.tokens}",
                mend="score both on one corpus with one window protocol",
            )
    if len(baseline) != len(candidate):
        raise FidelityError(
            "the two candidates were not scored on the same windows",
            found=f"baseline has {len(baseline)}, candidate {len(candidate)}",
            mend="score both on one corpus with one window protocol",
        )
    before, after = _clusters(baseline), _clusters(candidate)
    by_token = estimator == "token mean"
    weight = _sums(before, lambda w: w.tokens if by_token else 1)
    old_kl = _sums(before, lambda w: w.kl if by_token else w.kl / w.tokens)
    new_kl = _sums(after, lambda w: w.kl if by_token else w.kl / w.tokens)
    draw_weight, draw_old, draw_new = resampled_totals(np.stack([weight, old_kl, new_kl]), options)
    difference = _ratio(new_kl - old_kl, weight, draw_new - draw_old, draw_weight, options, signed=True)
    comparable = bool((old_kl > 0).all())
    return Paired(difference, _ratio(new_kl, old_kl, draw_new, draw_old, options) if comparable else None)


def resampled_totals(columns: Floats, options: Bootstrap) -> Floats:
    """Bootstrap totals: [k, D] sums per document -> [k, B] sums over D documents drawn with replacement.

    All columns share the draws, which is what makes ratios and paired differences paired. Documents are
    chosen by the top 32 bits of PCG64's raw output times D (Lemire's multiply-shift, bias below D/2^32),
    because numpy keeps raw streams fixed across versions but not those of `Generator` (NEP 19).
    """
    documents = columns.shape[1]
    bits = np.random.PCG64(options.seed)
    totals = np.empty((len(columns), options.resamples))
    step = max(1, BLOCK_DRAWS // documents)
    for start in range(0, options.resamples, step):
        stop = min(start + step, options.resamples)
        raw = bits.random_raw((stop - start) * documents) >> np.uint64(32)
        chosen = (raw * np.uint64(documents) >> np.uint64(32)).astype(np.intp).reshape(-1, documents)  # [b, D]
        for total, column in zip(totals, columns, strict=True):
            total[start:stop] = column[chosen].sum(axis=1)
    return totals


def _clusters(windows: Sequence[WindowRow]) -> list[list[WindowRow]]:
    """Windows by document, documents sorted by id so that the draws do not depend on the order of windows."""
    if not windows:
        raise FidelityError("no window to take statistics of", mend="give the corpus at least one document")
    clusters: dict[str, list[WindowRow]] = {}
    for window in windows:
        clusters.setdefault(window.document, []).append(window)
    return [clusters[document] for document in sorted(clusters)]


def _sums(clusters: Iterable[list[WindowRow]], value: Callable[[WindowRow], float]) -> Floats:
    return np.array([math.fsum(map(value, cluster)) for cluster in clusters])  # [D]


def _ratio(
    numerators: Floats,
    denominators: Floats,
    drawn_numerators: Floats,
    drawn_denominators: Floats,
    options: Bootstrap,
    signed: bool = False,
) -> Estimate:
    """sum(numerators) / sum(denominators) over documents [D], with its interval from the draws [B]."""
    documents = len(numerators)
    total = math.fsum(denominators)
    value = math.fsum(numerators) / total
    if documents == 1:
        return Estimate(value, None, None, None, 1, "none: one document", few_documents=True)
    residuals = numerators - value * denominators
    error = math.sqrt(documents / (documents - 1) * math.fsum(residuals**2)) / total
    tail = (1 - options.confidence) / 2
    low, high = (float(q) for q in np.quantile(drawn_numerators / drawn_denominators, [tail, 1 - tail]))
    method, few = "percentile bootstrap", documents < FEW_DOCUMENTS
    if few:
        reach = float(stdtrit(documents - 1, 1 - tail)) * error
        if signed:
            low, high = min(low, value - reach), max(high, value + reach)
            method = "wider of percentile bootstrap and t"
        elif value > 0:
            stretch = math.exp(min(reach / value, 700.0))  # e^700 is still a float
            low, high = min(low, value / stretch), max(high, value * stretch)
            method = "wider of percentile bootstrap and log t"
    return Estimate(value, low, high, error, documents, method, few)


def _with_design_effect(estimate: Estimate, squares: float, tokens: int) -> Estimate:
    """Clustered variance over that of `tokens` independent tokens whose squares sum to `squares`."""
    independent = max(0.0, squares / tokens - estimate.value**2) / (tokens - 1)
    if estimate.standard_error is None or independent == 0:
        return estimate
    return replace(estimate, design_effect=estimate.standard_error**2 / independent)


def _agreement(missed: Estimate, tokens: int, options: Bootstrap) -> Estimate:
    """Turn a rate of disagreement round; the interval was made on the rate, which is the small number.

    Where nothing disagreed no resample does either. The upper end is then the exact binomial bound for none
    of `tokens` (Clopper-Pearson), the least that tokens alone leave open.
    """
    low, high = missed.low, missed.high
    if high is not None and missed.value == 0:
        high = 1 - ((1 - options.confidence) / 2) ** (1 / tokens)
    design = _with_design_effect(missed, missed.value * tokens, tokens).design_effect
    return replace(
        missed,
        value=1 - missed.value,
        low=None if high is None else max(0.0, 1 - high),
        high=None if low is None else 1 - low,
        design_effect=design,
    )

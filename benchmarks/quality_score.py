"""Calibration windows, and KL(original || candidate) on held-out text with paired intervals.

Evaluation protocol: windows of 512 tokens from each document's start, at most two per document, none under 100; the
mean over corpora of the mean over windows of each window's mean KL, nats per token, float32 models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from quality_models import Experts, TinyModel, Weights
from torch import Tensor

from moefit.calibrate.traces import Window, load_tokenizer, read_documents, windows
from moefit.errors import FidelityError
from moefit.fidelity.statistics import Bootstrap, WindowRow, resampled_totals

SHARED: Final = Path(__file__).resolve().parents[2] / "shared"
"""Models, traffic and held-out text, beside the repository."""

Rows = Mapping[str, Sequence[WindowRow]]
"""Corpus -> its windows, in the evaluation's order."""

Floats = NDArray[np.float64]


def calibration_windows(model: Path, files: Sequence[Path], window: int = 512) -> list[Tensor]:
    """All windows of the files' documents as int64 [T] on the CPU, 2 <= T <= window, through the model's tokenizer."""
    tokenizer = load_tokenizer(model)
    cut = [w for file in files for w in windows(read_documents(file, tokenizer), window)]
    return [torch.from_numpy(w.ids).long() for w in cut]


def evaluation(model: Path, folder: Path = SHARED / "eval") -> dict[str, list[Window]]:
    """Corpus (prose, code, agentic) -> held-out windows by the protocol above."""
    tokenizer = load_tokenizer(model)
    read = {corpus: read_documents(folder / f"{corpus}.jsonl", tokenizer) for corpus in ("prose", "code", "agentic")}
    return {corpus: windows(documents, 512, per_document=2, minimum=100) for corpus, documents in read.items()}


class Scorer:
    """Holds the original's log-probabilities of every held-out window on the device: 16 KB a token at 4,096 entries."""

    def __init__(self, model: TinyModel, corpora: Mapping[str, Sequence[Window]], batch: int = 16) -> None:
        self.model, self.batch = model, batch
        self.windows = [(corpus, window) for corpus, cut in corpora.items() for window in cut]
        self.ids = [torch.from_numpy(window.ids).long() for _, window in self.windows]
        with torch.no_grad():
            original = model.logits(self.ids, model.experts_from(model.weights), batch)
            self.original = [logits.log_softmax(-1) for logits in original]

    def score(self, candidate: Experts | Sequence[Weights]) -> dict[str, list[WindowRow]]:
        """Every window of the model with these experts; corpora and windows in their given order.

        Raises FidelityError if a logit is not finite.
        """
        experts = candidate if callable(candidate) else self.model.experts_from(candidate)
        rows: dict[str, list[WindowRow]] = {}
        with torch.no_grad():
            every = self.model.logits(self.ids, experts, self.batch)
            for (corpus, window), ids, log_p, logits in zip(self.windows, self.ids, self.original, every, strict=True):
                row = _row(window.document, ids.to(logits.device), log_p, logits.log_softmax(-1))
                if not np.isfinite(row.kl):
                    raise FidelityError("the candidate's logits are not finite", where=f"{corpus}/{window.document}")
                rows.setdefault(corpus, []).append(row)
        return rows


def _row(document: str, ids: Tensor, log_p: Tensor, log_q: Tensor) -> WindowRow:
    """float32 [T, V] log-probabilities -> sums in float64 (`fidelity.divergence` is the exact reference)."""
    kl = (log_p.exp() * (log_p - log_q)).sum(-1, dtype=torch.float64)  # [T]
    next_p, next_q = (-side[:-1].gather(1, ids[1:, None]).sum(dtype=torch.float64) for side in (log_p, log_q))
    hits = (log_p.argmax(-1) == log_q.argmax(-1)).sum()
    numbers = torch.stack([kl.sum(), kl.square().sum(), hits.double(), next_p, next_q]).tolist()
    return WindowRow(document, len(ids), numbers[0], numbers[1], int(numbers[2]), numbers[3], numbers[4])


@dataclass(frozen=True)
class Interval:
    """A number and its two-sided 95 % percentile bootstrap interval over windows."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Measured:
    """One number of the mean over corpora, and of each corpus: KL in nats per token, a ratio of KLs, or top-1."""

    mean: Interval
    corpora: dict[str, Interval]


def summary(runs: Rows | Sequence[Rows], options: Bootstrap | None = None) -> tuple[Measured, Measured]:
    """(KL, top-1 agreement). Several runs (seeds) are averaged window by window first."""
    runs = _as_list(runs)
    means = _resampled([_kl(runs), _top1(runs)], options or Bootstrap())
    return _measured({c: kl for c, (kl, _) in means.items()}), _measured({c: top1 for c, (_, top1) in means.items()})


def paired(
    baseline: Rows | Sequence[Rows], candidate: Rows | Sequence[Rows], options: Bootstrap | None = None
) -> Measured:
    """KL(candidate) / KL(baseline): ratio of the means over corpora, and of each corpus.

    Both sides are resampled with the same windows, each corpus on its own. Several runs (seeds) of a side are averaged
    window by window first. Raises FidelityError unless all runs hold the same windows.
    """
    before, after = _as_list(baseline), _as_list(candidate)
    _check_same_windows([*before, *after])
    means = _resampled([_kl(before), _kl(after)], options or Bootstrap())
    old, new = sum(old for old, _ in means.values()), sum(new for _, new in means.values())
    return Measured(_interval(new / old), {c: _interval(new / old) for c, (old, new) in means.items()})


def _as_list(runs: Rows | Sequence[Rows]) -> list[Rows]:
    return [runs] if isinstance(runs, Mapping) else list(runs)


def _kl(runs: Sequence[Rows]) -> dict[str, Floats]:
    """Corpus -> each window's mean KL [W], mean over runs."""
    return {c: np.mean([[w.kl / w.tokens for w in run[c]] for run in runs], axis=0) for c in runs[0]}


def _top1(runs: Sequence[Rows]) -> dict[str, Floats]:
    """Corpus -> each window's share of positions with the same top-1 token [W], mean over runs."""
    return {c: np.mean([[w.top1_hits / w.tokens for w in run[c]] for run in runs], axis=0) for c in runs[0]}


def _resampled(columns: Sequence[dict[str, Floats]], options: Bootstrap) -> dict[str, Floats]:
    """Corpus -> means over windows [columns, 1 + B]: as measured, then B resamples that all columns share."""
    means = {}
    for index, corpus in enumerate(columns[0]):
        values = np.stack([column[corpus] for column in columns])  # [columns, W]
        draws = resampled_totals(values, replace(options, seed=options.seed + index)) / values.shape[1]
        means[corpus] = np.concatenate([values.mean(axis=1, keepdims=True), draws], axis=1)
    return means


def _measured(means: dict[str, Floats]) -> Measured:
    return Measured(_interval(np.mean(list(means.values()), axis=0)), {c: _interval(v) for c, v in means.items()})


def _interval(values: Floats) -> Interval:
    """values [1 + B]: the number, then its resamples."""
    low, high = np.quantile(values[1:], [0.025, 0.975])
    return Interval(float(values[0]), float(low), float(high))


def _check_same_windows(runs: Sequence[Rows]) -> None:
    first, *others = [{c: [(w.document, w.tokens) for w in rows] for c, rows in run.items()} for run in runs]
    if any(other != first for other in others):
        raise FidelityError("the candidates were not scored on the same windows", mend="score all with one Scorer")

"""Exact divergences of a candidate's next-token distributions from the reference's, position by position."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import FidelityError

# KL is never negative; rounding may take it below zero by about 1e-14 (float64 rounding of log-probabilities
# of order ln V). What lies lower than this is a defect, and is refused rather than clipped.
ROUNDING = 1e-12

# Elements converted to float64 at a time: 1 MiB an array, so that the seven or so alive stay in cache.
# Rows are independent: the numbers do not depend on it.
CHUNK_ELEMENTS = 1 << 17


@dataclass(frozen=True)
class TokenRows:
    """What one window of T tokens says. Position t holds the prediction of token t+1.

    kl: float64 [T], KL(reference || candidate) in nats over the full vocabulary.
    agree: bool [T], both have the same top-1 token (among equal logits the lowest id is the top).
    margin: float64 [T], the reference's top-1 log-probability minus that of its runner-up, nats (0: a tie).
    reference_nll, candidate_nll: float64 [T-1], minus ln p of the token that came next, nats. The last
        position has no next token.
    """

    kl: NDArray[np.float64]
    agree: NDArray[np.bool_]
    margin: NDArray[np.float64]
    reference_nll: NDArray[np.float64]
    candidate_nll: NDArray[np.float64]

    @property
    def tokens(self) -> int:
        return len(self.kl)


def compare(
    reference_logits: torch.Tensor, candidate_logits: torch.Tensor, ids: torch.Tensor, *, window: str = ""
) -> TokenRows:
    """Compare two models' logits over the same tokens.

    reference_logits, candidate_logits: [T, V], T >= 2, V >= 2, any floating dtype and device (float32
        expected; the arithmetic is float64 from the logits on).
    ids: int [T], the tokens of the window.
    window: how errors call this window, e.g. "prose/17#0".

    KL(P || Q) = sum_v p_v (ln p_v - ln q_v), the direction in which the reference says what matters. Memory
    beyond the inputs is bounded (about 10 MB, or 60 V bytes if that is more). Reductions are numpy's, on one
    thread.

    Raises FidelityError for other vocabularies, other lengths, ids outside the vocabulary and non-finite
    logits.
    """
    _check_shapes(reference_logits, candidate_logits, ids, window)
    length, vocabulary = reference_logits.shape
    following = ids[1:].cpu().numpy()  # [T-1]
    kl = np.empty(length)
    margin = np.empty(length)
    agree = np.empty(length, dtype=np.bool_)
    nll = np.empty((2, length - 1))
    step = max(1, CHUNK_ELEMENTS // vocabulary)
    for start in range(0, length, step):
        rows = slice(start, min(start + step, length))
        logits_p = _float64_rows(reference_logits, rows, window, "reference")  # [R, V]
        logits_q = _float64_rows(candidate_logits, rows, window, "candidate")  # [R, V]
        top_p = logits_p.argmax(axis=1)  # [R]; numpy takes the first of equals
        agree[rows] = top_p == logits_q.argmax(axis=1)
        log_p, log_q = _log_softmax(logits_p), _log_softmax(logits_q)
        kl[rows] = _kl(log_p, log_q)

        predicted = following[rows]  # one short in the last chunk
        each = np.arange(len(predicted))
        nll[0, start : start + len(predicted)] = -log_p[each, predicted]
        nll[1, start : start + len(predicted)] = -log_q[each, predicted]

        each = np.arange(len(top_p))
        highest = log_p[each, top_p]
        log_p[each, top_p] = -np.inf
        margin[rows] = highest - log_p.max(axis=1)
    return TokenRows(_clip_rounding(kl, window), agree, margin, nll[0], nll[1])


def _check_shapes(reference: torch.Tensor, candidate: torch.Tensor, ids: torch.Tensor, window: str) -> None:
    for side, logits in (("reference", reference), ("candidate", candidate)):
        if logits.ndim != 2 or not logits.is_floating_point():
            raise FidelityError(
                f"{side} logits must be a floating tensor [T, V]",
                where=window,
                found=f"found {logits.dtype} {list(logits.shape)}",
                mend="pass one window at a time, one row per token",
            )
    if reference.shape[1] != candidate.shape[1]:
        raise FidelityError(
            "reference and candidate have different vocabularies",
            where=window,
            found=f"reference has {reference.shape[1]}, candidate {candidate.shape[1]}",
            mend="compare models of one tokenizer, and cut padding rows off both heads alike",
        )
    if reference.shape[0] != candidate.shape[0] or ids.shape != reference.shape[:1]:
        raise FidelityError(
            "reference, candidate and ids must cover the same positions",
            where=window,
            found=f"reference has {reference.shape[0]}, candidate {candidate.shape[0]}, ids {list(ids.shape)}",
            mend="score both models on the same window",
        )
    length, vocabulary = reference.shape
    if length < 2 or vocabulary < 2:
        raise FidelityError(
            "window too small to compare",
            where=window,
            found=f"expected at least 2 tokens and 2 vocabulary entries, found {length} and {vocabulary}",
            mend="leave out windows of a single token",
        )
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise FidelityError("token ids must be integers", where=window, found=f"found {ids.dtype}")
    outside = (ids < 0) | (ids >= vocabulary)
    if bool(outside.any()):
        position = int(outside.nonzero()[0, 0])
        raise FidelityError(
            "token id outside the vocabulary",
            where=f"{window} position {position}".strip(),
            found=f"expected 0 to {vocabulary - 1}, found {int(ids[position])}",
            mend="tokenize the documents with the reference's tokenizer",
        )


def _float64_rows(logits: torch.Tensor, rows: slice, window: str, side: str) -> NDArray[np.float64]:
    part = logits[rows].detach().cpu()
    if part.dtype not in (torch.float32, torch.float64):
        part = part.float()  # exact from 16 bits, which numpy does not know
    block = part.numpy().astype(np.float64)  # [R, V]; numpy converts on this thread alone, torch on all
    finite = np.isfinite(block)
    if not finite.all():
        row, token = np.argwhere(~finite)[0]
        raise FidelityError(
            f"{side} logits are not finite",
            where=f"{window} position {rows.start + int(row)}".strip(),
            found=f"logit of token id {int(token)} is {block[row, token]}",
            mend="find the layer that overflows or reads a broken scale before comparing",
        )
    return block


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def _kl(log_p: NDArray[np.float64], log_q: NDArray[np.float64]) -> NDArray[np.float64]:
    terms = np.exp(log_p)
    terms *= log_p - log_q
    return terms.sum(axis=1)


def _clip_rounding(kl: NDArray[np.float64], window: str) -> NDArray[np.float64]:
    lowest = int(kl.argmin())
    if not kl[lowest] >= -ROUNDING:  # true for NaN, which argmin finds first
        raise FidelityError(
            "negative KL: the comparison itself is broken",
            where=f"{window} position {lowest}".strip(),
            found=f"expected at least -{ROUNDING}, found {kl[lowest]}",
            mend="report this with the two rows of logits",
        )
    return np.maximum(kl, 0.0)

"""KL, top-1, margin and NLL against scipy, against figures worked by hand, and as properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax, rel_entr
from scipy.stats import entropy

import moefit.fidelity.divergence as divergence
from moefit.errors import FidelityError
from moefit.fidelity.divergence import TokenRows, compare


def logits(seed: int, length: int = 7, vocabulary: int = 50, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(length, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def some_ids(length: int = 7, vocabulary: int = 50) -> torch.Tensor:
    return torch.arange(length) * 13 % vocabulary


def by_scipy(reference: torch.Tensor, candidate: torch.Tensor, ids: torch.Tensor) -> TokenRows:
    """The plain reference: scipy, one whole float64 array."""
    log_p = log_softmax(reference.double().numpy(), axis=1)
    log_q = log_softmax(candidate.double().numpy(), axis=1)
    ordered = np.sort(log_p, axis=1)
    at = np.arange(len(ids) - 1)
    return TokenRows(
        kl=rel_entr(np.exp(log_p), np.exp(log_q)).sum(axis=1),
        agree=np.array([row.argmax() for row in log_p]) == np.array([row.argmax() for row in log_q]),
        margin=ordered[:, -1] - ordered[:, -2],
        reference_nll=-log_p[at, ids[1:].numpy()],
        candidate_nll=-log_q[at, ids[1:].numpy()],
    )


@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
@pytest.mark.parametrize("chunk", [1, 120, 1 << 20])
def test_equals_scipy(scale: float, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "CHUNK_ELEMENTS", chunk)
    reference, candidate, ids = logits(1, scale=scale), logits(2, scale=scale), some_ids()
    rows, plain = compare(reference, candidate, ids), by_scipy(reference, candidate, ids)
    for name in ("kl", "margin", "reference_nll", "candidate_nll"):
        np.testing.assert_allclose(getattr(rows, name), getattr(plain, name), rtol=1e-11, atol=1e-13)
    np.testing.assert_array_equal(rows.agree, plain.agree)
    p, q = (torch.softmax(x.double(), 1).numpy() for x in (reference, candidate))
    np.testing.assert_allclose(rows.kl, entropy(p, q, axis=1), rtol=1e-9, atol=1e-12)


def test_chunks_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, candidate, ids = logits(1, 40, 300), logits(2, 40, 300), some_ids(40, 300)
    whole = compare(reference, candidate, ids)
    monkeypatch.setattr(divergence, "CHUNK_ELEMENTS", 1)
    single = compare(reference, candidate, ids)
    for name in ("kl", "agree", "margin", "reference_nll", "candidate_nll"):
        assert getattr(whole, name).tobytes() == getattr(single, name).tobytes()


def test_by_hand() -> None:
    """P = (1/2, 1/4, 1/4), Q = (1/4, 1/4, 1/2): KL = 1/2 ln 2 + 0 - 1/4 ln 2 = 1/4 ln 2."""
    p = torch.tensor([[0.5, 0.25, 0.25]] * 2).log()
    q = torch.tensor([[0.25, 0.25, 0.5]] * 2).log()
    rows = compare(p, q, torch.tensor([0, 2]))
    np.testing.assert_allclose(rows.kl, math.log(2) / 4, rtol=1e-6)
    np.testing.assert_allclose(rows.margin, math.log(2), rtol=1e-6)
    np.testing.assert_allclose(rows.reference_nll, [math.log(4)], rtol=1e-6)
    np.testing.assert_allclose(rows.candidate_nll, [math.log(2)], rtol=1e-6)
    assert rows.agree.tolist() == [False, False]
    assert (rows.tokens, len(rows.reference_nll)) == (2, 1)


def test_direction_is_reference_to_candidate() -> None:
    """KL(P || Q) of P = (1-e, e) against Q = (1/2, 1/2) tends to ln 2, the other way round to infinity."""
    sharp, flat = torch.tensor([[60.0, 0.0]] * 2), torch.zeros(2, 2)
    ids = torch.tensor([0, 0])
    np.testing.assert_allclose(compare(sharp, flat, ids).kl, math.log(2))
    np.testing.assert_allclose(compare(flat, sharp, ids).kl, 30 - math.log(2))


def test_a_tie_goes_to_the_first_id() -> None:
    tied = torch.tensor([[1.0, 5.0, 5.0], [1.0, 5.0, 5.0]])
    first, second = torch.tensor([[0.0, 9.0, 0.0]] * 2), torch.tensor([[0.0, 0.0, 9.0]] * 2)
    ids = torch.tensor([0, 1])
    rows = compare(tied, first, ids)
    assert rows.agree.all()
    assert rows.margin.tolist() == [0.0, 0.0]
    assert not compare(tied, second, ids).agree.any()


@given(st.integers(0, 2**31), st.sampled_from([1e-3, 1.0, 30.0, 1e4]), st.floats(0, 1e-3))
@settings(max_examples=60, deadline=None)
def test_kl_is_not_negative_beyond_rounding(seed: int, scale: float, nudge: float) -> None:
    """Before clipping; near-equal rows are where rounding could show."""
    p = logits(seed, 5, 64, scale).double().numpy()
    q = p + nudge * logits(seed + 1, 5, 64, 1.0).double().numpy()
    raw = divergence._kl(divergence._log_softmax(p), divergence._log_softmax(q))
    assert raw.min() >= -divergence.ROUNDING


@given(st.integers(0, 2**31), st.sampled_from([0.1, 3.0, 30.0]))
@settings(max_examples=40, deadline=None)
def test_zero_if_equal_and_positive_if_not(seed: int, scale: float) -> None:
    reference, ids = logits(seed, scale=scale), some_ids()
    assert (compare(reference, reference, ids).kl == 0).all()
    moved = reference.clone()
    moved[:, 3] += 0.5 * scale
    weight = torch.softmax(reference.double(), 1)[:, 3].numpy()
    assert (compare(reference, moved, ids).kl[weight > 1e-6] > 0).all()


@given(st.integers(0, 2**31), st.sampled_from([-64.0, 0.25, 1024.0]), st.permutations(range(20)))
@settings(max_examples=40, deadline=None)
def test_invariant_to_a_constant_and_to_the_order_of_the_vocabulary(
    seed: int, constant: float, order: list[int]
) -> None:
    reference, candidate = (logits(s, 4, 20).double() for s in (seed, seed + 1))
    ids = torch.tensor([0, 19, 7, 7])
    rows = compare(reference, candidate, ids)
    moved = compare(reference + constant, candidate - constant, ids)
    shuffled = compare(reference[:, order], candidate[:, order], torch.tensor([order.index(i) for i in ids]))
    for other in (moved, shuffled):
        for name in ("kl", "margin", "reference_nll", "candidate_nll"):
            np.testing.assert_allclose(getattr(other, name), getattr(rows, name), rtol=1e-9, atol=1e-11)
        np.testing.assert_array_equal(other.agree, rows.agree)


def test_precision_of_a_small_kl() -> None:
    """At KL 1e-9 float32 arithmetic has nothing left; float64 keeps six digits. KL ~ half Var_p[delta]."""
    reference = logits(3, 2, 1000)
    delta = logits(4, 2, 1000, 1.0).double() * 1e-4
    p = torch.softmax(reference.double(), 1)
    variance = (p * delta**2).sum(1) - (p * delta).sum(1) ** 2
    kl = compare(reference.double(), reference.double() + delta, torch.tensor([0, 1])).kl
    np.testing.assert_allclose(kl, (variance / 2).numpy(), rtol=1e-3)
    assert 1e-10 < kl.max() < 1e-8


def test_extreme_logits_stay_finite() -> None:
    top = torch.finfo(torch.float32).max
    p, q = torch.tensor([[top, -top, 0.0]] * 2), torch.tensor([[-top, top, 0.0]] * 2)
    rows = compare(p, q, torch.tensor([0, 1]))
    np.testing.assert_allclose(rows.kl, 2 * float(top))


def test_half_precision_logits_are_taken_as_they_are() -> None:
    reference, candidate, ids = logits(1).bfloat16(), logits(2).bfloat16(), some_ids()
    np.testing.assert_array_equal(
        compare(reference, candidate, ids).kl, compare(reference.float(), candidate.float(), ids).kl
    )


@pytest.mark.parametrize("side", ["reference", "candidate"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_logits_are_named(side: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "CHUNK_ELEMENTS", 100)
    pair = {"reference": logits(1), "candidate": logits(2)}
    pair[side][5, 17] = value
    with pytest.raises(FidelityError, match=rf"{side} logits .*prose/3#1 position 5.*id 17 is"):
        compare(pair["reference"], pair["candidate"], some_ids(), window="prose/3#1")


def test_mismatches_are_refused() -> None:
    ids = some_ids()
    with pytest.raises(FidelityError, match="reference has 4096, candidate 4000"):
        compare(torch.zeros(7, 4096), torch.zeros(7, 4000), ids)
    with pytest.raises(FidelityError, match="reference has 7, candidate 6"):
        compare(logits(1), logits(1, 6), ids)
    with pytest.raises(FidelityError, match=r"ids \[6\]"):
        compare(logits(1), logits(1), ids[:6])
    with pytest.raises(FidelityError, match=r"position 6.*expected 0 to 49, found 50"):
        compare(logits(1), logits(1), torch.tensor([0, 1, 2, 3, 4, 5, 50]))
    with pytest.raises(FidelityError, match="must be integers"):
        compare(logits(1), logits(1), ids.float())
    with pytest.raises(FidelityError, match="floating tensor"):
        compare(logits(1).long(), logits(1), ids)
    with pytest.raises(FidelityError, match="too small"):
        compare(logits(1, 1), logits(1, 1), ids[:1])


def test_a_negative_kl_is_refused_not_clipped() -> None:
    assert divergence._clip_rounding(np.array([1.0, -1e-14]), "").tolist() == [1.0, 0.0]
    for broken in (-1e-9, math.nan):
        with pytest.raises(FidelityError, match="position 1"):
            divergence._clip_rounding(np.array([1.0, broken]), "w")

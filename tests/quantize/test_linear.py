"""The whole linear: what is stored decodes to what was reported; hostile weights are survived or named."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moefit.errors import QuantizeError
from moefit.quantize.codebook import CODEBOOKS, HALF_BITS, INTEGER_BITS, table
from moefit.quantize.ldlq import proxy_error
from moefit.quantize.linear import Linear, Options, decode, quantize_linears, stored_layout
from moefit.quantize.regularize import CODEBOOK_SCALE
from moefit.quantize.trellis import RING, TILE, unpack

from .test_ldlq import correlated_hessian, random


def quantize(weight: torch.Tensor, hessian: torch.Tensor | None, **options: object) -> Linear:
    return quantize_linears({"w": weight}, hessian, None, Options(**options))["w"]


def decode_plainly(linear: Linear) -> np.ndarray:
    """diag(suh) P C P diag(svh) by loops over tiles and a Hadamard from popcounts, in float64."""
    rows, columns, _ = linear.trellis.shape
    codes = np.zeros((rows * TILE, columns * TILE))
    states = unpack(linear.trellis, linear.bits)
    for i in range(rows):
        for j in range(columns):
            for t in range(RING):
                lane, place = t // 8, t % 8
                r = 2 * (lane % 4) + (place & 1) + 8 * ((place >> 1) & 1)
                c = lane // 4 + 8 * (place >> 2)
                codes[i * TILE + r, j * TILE + c] = table(linear.codebook)[states[i, j, t]]
    h = np.array([[(-1.0) ** bin(a & b).count("1") for b in range(128)] for a in range(128)]) / np.sqrt(128)
    left, right = np.kron(np.eye(rows // 8), h), np.kron(np.eye(columns // 8), h)
    return linear.suh.astype(float)[:, None] * (left @ codes @ right) * linear.svh.astype(float)


@pytest.mark.parametrize(("codebook", "bits"), [("mul1", 3.0), ("mul1", 2.5), ("mcg", 4.0), ("3inst", 2.0)])
def test_decode_equals_the_plain_formula(codebook: str, bits: float) -> None:
    linear = quantize(random(128, 256), None, codebook=codebook, bits=bits)
    decoded = decode(linear.trellis, linear.suh, linear.svh, linear.codebook)
    np.testing.assert_allclose(decoded.numpy(), decode_plainly(linear), atol=2e-5)


@pytest.mark.parametrize(
    ("codebook", "bits"),
    [("mul1", b) for b in sorted(INTEGER_BITS + HALF_BITS)] + [("mcg", 3.0), ("3inst", 3.0)],
)
def test_error_falls_with_k_and_is_reported_truly(codebook: str, bits: float) -> None:
    weight, hessian = random(128, 128), correlated_hessian(128, 400)
    linear = quantize(weight, hessian, codebook=codebook, bits=bits)
    decoded = decode(linear.trellis, linear.suh, linear.svh, codebook)
    assert linear.proxy_error == pytest.approx(proxy_error(weight, decoded, hessian), rel=1e-6)
    relative = float((decoded - weight).square().sum() / weight.square().sum())
    assert relative < 3.5 * 4.0**-bits  # rate-distortion bound times the price of shaping the error to H
    assert linear.trellis.shape == (8, 8, 16 * bits)


def test_every_supported_k_has_a_scale() -> None:
    for codebook in CODEBOOKS:
        halves = HALF_BITS if codebook == "mul1" else ()
        assert sorted(CODEBOOK_SCALE[codebook]) == sorted(INTEGER_BITS + halves)


def test_hessian_lowers_the_error_it_measures() -> None:
    weight, hessian = random(256, 128), correlated_hessian(256, 600)
    informed, blind = quantize(weight, hessian), quantize(weight, None)
    blind_error = proxy_error(weight, decode(blind.trellis, blind.suh, blind.svh, "mul1"), hessian)
    assert informed.proxy_error < 0.7 * blind_error
    assert blind.identity_hessian and not informed.identity_hessian


def test_a_group_equals_each_weight_alone() -> None:
    weights = {"gate": random(128, 256, seed=1), "up": random(128, 256, seed=2) * 3}
    hin, hout = correlated_hessian(128, 300), torch.stack([correlated_hessian(256, 600, s) for s in (3, 4)])
    pair = quantize_linears(weights, hin, hout, Options())
    for i, (name, weight) in enumerate(weights.items()):
        alone = quantize_linears({name: weight}, hin, hout[i], Options())[name]
        for a, b in zip(alone.tensors("w").values(), pair[name].tensors("w").values(), strict=True):
            np.testing.assert_array_equal(a, b)
        assert alone.proxy_error == pytest.approx(pair[name].proxy_error, rel=1e-9)


def test_two_sides_lower_the_two_sided_error_and_report_it() -> None:
    weight, hin, hout = random(256, 128), correlated_hessian(256, 600), correlated_hessian(128, 300, seed=5)

    def quantized(output_hessian: torch.Tensor | None, **options: object) -> tuple[float, Linear]:
        linear = quantize_linears({"w": weight}, hin, output_hessian, Options(**options))["w"]
        decoded = decode(linear.trellis, linear.suh, linear.svh, "mul1")
        return proxy_error(weight, decoded, hin, hout), linear

    one, _ = quantized(None)
    two, linear = quantized(hout)
    assert two < 0.7 * one
    assert linear.proxy_error == pytest.approx(two, rel=1e-6)
    assert two < quantized(hout, refit=0)[0]


def test_deterministic_and_seeded() -> None:
    weight, hessian = random(128, 128), correlated_hessian(128, 300)
    first, again, other = (quantize(weight, hessian, seed=s) for s in (0, 0, 1))
    for a, b in zip(first.tensors("w").values(), again.tensors("w").values(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert (first.suh != other.suh).any()


@pytest.mark.parametrize("shape", [(130, 200), (1, 1), (128, 130), (255, 128)])
def test_odd_shapes_are_padded(shape: tuple[int, int]) -> None:
    weight = random(*shape)
    linear = quantize(weight, correlated_hessian(shape[0], 300), bits=4.0)
    decoded = decode(linear.trellis, linear.suh, linear.svh, "mul1")
    assert decoded.shape[0] % 128 == 0 and decoded.shape[1] % 128 == 0
    k, n = shape
    assert not decoded[k:].any() and not decoded[:, n:].any()
    assert float((decoded[:k, :n] - weight).norm() / weight.norm()) < 0.2


HOSTILE = {
    "zeros": torch.zeros(128, 128),
    "constant": torch.full((128, 128), 0.02),
    "one column": torch.nn.functional.pad(random(128, 1), (0, 127)),
    "one row": torch.nn.functional.pad(random(1, 128), (0, 0, 0, 127)),
    "outlier channel": random(128, 128) * torch.where(torch.arange(128) == 7, 1e4, 1.0),
    "outlier row": random(128, 128) * torch.where(torch.arange(128) == 7, 1e4, 1.0)[:, None],
    "tiny": random(128, 128) * 1e-7,
    "fp16's edge": random(128, 128) * 2e4,
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("hessian", ["identity", "rank 1", "zero", "rich"])
def test_hostile_weights_give_finite_packs(name: str, hessian: str) -> None:
    x = random(1, 128)
    h = {
        "identity": None,
        "rank 1": x.T @ x,
        "zero": torch.zeros(128, 128),
        "rich": correlated_hessian(128, 300),
    }
    weight = HOSTILE[name]
    linear = quantize(weight, h[hessian])
    decoded = decode(linear.trellis, linear.suh, linear.svh, "mul1")
    assert torch.isfinite(decoded).all() and np.isfinite(linear.proxy_error)
    assert np.isfinite(linear.suh.astype(float)).all() and np.isfinite(linear.svh.astype(float)).all()
    if name == "zeros":
        assert not decoded.any()
    elif hessian in ("identity", "zero"):
        assert linear.proxy_error < (
            0.15 if name in ("constant", "one row", "one column") else 0.05
        )  # rank 1 stays heavy-tailed
    dead = ~weight.any(dim=0)
    assert not decoded[:, dead].any()


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("sides", ["both rank 1", "rank 1 and zero", "zero and rank 1"])
def test_hostile_weights_survive_two_sides(name: str, sides: str) -> None:
    x = random(1, 128)
    one, none = x.T @ x, torch.zeros(128, 128)
    hin, hout = {"both rank 1": (one, one), "rank 1 and zero": (one, none), "zero and rank 1": (none, one)}[sides]
    linear = quantize_linears({"w": HOSTILE[name]}, hin, hout, Options())["w"]
    decoded = decode(linear.trellis, linear.suh, linear.svh, "mul1")
    assert torch.isfinite(decoded).all() and np.isfinite(linear.proxy_error)
    assert np.isfinite(linear.suh.astype(float)).all() and np.isfinite(linear.svh.astype(float)).all()
    assert not decoded[:, ~HOSTILE[name].any(dim=0)].any()


@pytest.mark.parametrize(
    ("weight", "hessian", "word"),
    [
        (torch.full((128, 128), float("nan")), None, "gate.*|w.*not finite"),
        (random(128, 128), torch.full((128, 128), float("inf")), "Hessian is not finite"),
        (random(128, 128), torch.eye(64), "expected 128 x 128"),
        (random(128, 128) * 1e-16, None, "fp16"),
        (torch.zeros(0, 128), None, "shape"),
        (random(128, 128), -torch.eye(128), "semidefinite"),
    ],
)
def test_impossible_input_names_the_tensor(weight: torch.Tensor, hessian: torch.Tensor | None, word: str) -> None:
    with pytest.raises(QuantizeError, match=word) as caught:
        quantize(weight, hessian)
    assert "w" in caught.value.where


def test_an_expert_without_a_hessian_is_reported_on_its_own() -> None:
    weights = {name: random(128, 128, seed=i) for i, name in enumerate(("seen", "unseen"))}
    hin = torch.stack([correlated_hessian(128, 300), torch.zeros(128, 128)])
    pair = quantize_linears(weights, hin, None, Options())
    assert not pair["seen"].identity_hessian and pair["unseen"].identity_hessian
    assert quantize(random(130, 128), torch.zeros(130, 130)).identity_hessian
    assert not quantize(random(128, 128), torch.eye(128)).identity_hessian  # measured, and so it happens to be
    blind = quantize(weights["unseen"], None)
    assert pair["unseen"].proxy_error < 1.2 * blind.proxy_error


def test_output_hessians_are_checked_too() -> None:
    for bad, word in (
        (torch.full((128, 128), torch.nan), "output Hessian is not finite"),
        (torch.eye(64), "128 x 128"),
    ):
        with pytest.raises(QuantizeError, match=word):
            quantize_linears({"w": random(128, 128)}, None, bad, Options())


@pytest.mark.parametrize("seed", range(3))
def test_one_nan_row_of_the_weight_is_named_among_many(seed: int) -> None:
    weights = {name: random(128, 128) for name in ("a", "b", "c")}
    weights["b"][seed, 0] = torch.nan
    with pytest.raises(QuantizeError, match="not finite") as caught:
        quantize_linears(weights, None, None, Options())
    assert caught.value.where == "b"


def test_options_are_checked() -> None:
    for bad in (
        {"bits": 2.5, "codebook": "mcg"},
        {"damping": 0.0},
        {"damping": float("nan")},
        {"output_damping": 1.5},
        {"refit": -1},
        {"codebook": "x"},
    ):
        with pytest.raises(QuantizeError):
            Options(**bad)


def test_layout_is_what_is_stored_and_weighs_what_the_format_says() -> None:
    linear = quantize(random(130, 128), None, bits=2.5)
    layout = stored_layout(130, 128, 2.5, "mul1")
    tensors = linear.tensors("w")
    assert {f"w.{s}" for s in layout} == set(tensors)
    for suffix, (_, shape, size) in layout.items():
        assert tensors[f"w.{suffix}"].shape == shape and tensors[f"w.{suffix}"].nbytes == size
    expert = 2 * [(5120, 2304)] + [(2304, 5120)]
    for bits, published in ((2, 8_891_916), (3, 13_315_596), (4, 17_739_276)):
        assert sum(e[2] for k, n in expert for e in stored_layout(k, n, bits, "mul1").values()) == published


def test_tensors_that_do_not_belong_together_are_refused() -> None:
    linear = quantize(random(128, 128), None)
    with pytest.raises(QuantizeError, match="belong together"):
        decode(linear.trellis, linear.suh[:64], linear.svh, "mul1")
    with pytest.raises(QuantizeError, match="no such K"):
        decode(linear.trellis[..., :-1], linear.suh, linear.svh, "mul1")

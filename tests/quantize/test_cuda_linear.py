"""Whole linears on a CUDA card: as good as on the CPU, deterministic, and as robust."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moefit.errors import QuantizeError
from moefit.quantize import cuda_encode
from moefit.quantize.ldlq import proxy_error
from moefit.quantize.linear import Linear, Options, decode, quantize_linears

from .test_ldlq import correlated_hessian, random
from .test_linear import HOSTILE

pytestmark = pytest.mark.skipif(not cuda_encode.available(), reason="no CUDA card, or built without MOEFIT_CUDA")


def on_card(
    weights: dict[str, torch.Tensor], hin: torch.Tensor | None, hout: torch.Tensor | None, options: Options
) -> dict[str, Linear]:
    hin, hout = (None if h is None else h.cuda() for h in (hin, hout))
    return quantize_linears({name: w.cuda() for name, w in weights.items()}, hin, hout, options)


def damped(hessian: torch.Tensor) -> torch.Tensor:
    return hessian + hessian.diagonal().mean() * torch.eye(len(hessian))


@pytest.mark.parametrize("two_sided", [False, True])
@pytest.mark.parametrize(
    ("bits", "codebook"), [(2.0, "mul1"), (2.5, "mul1"), (3.0, "mul1"), (3.0, "mcg"), (4.0, "mul1")]
)
def test_as_good_as_on_the_cpu_and_reported_truly(bits: float, codebook: str, two_sided: bool) -> None:
    weights = {f"w{i}": random(256, 384, seed=i) for i in range(3)}
    # Damped until the signs' luck, up to 20 % of the error under a few strong directions, is 0.3 % over three matrices.
    hin = torch.stack([damped(correlated_hessian(256, 600, seed=i)) for i in range(3)])
    hout = torch.stack([damped(correlated_hessian(384, 900, seed=i + 5)) for i in range(3)]) if two_sided else None
    options = Options(bits, codebook)
    card, host = on_card(weights, hin, hout, options), quantize_linears(weights, hin, hout, options)
    for i, (name, weight) in enumerate(weights.items()):
        q = card[name]
        decoded = decode(q.trellis, q.suh, q.svh, codebook)
        error = proxy_error(weight, decoded, hin[i], None if hout is None else hout[i])
        assert q.proxy_error == pytest.approx(error, rel=1e-3)
    total = [sum(linear.proxy_error for linear in side.values()) for side in (card, host)]
    assert total[0] == pytest.approx(total[1], rel=0.03)


def test_deterministic() -> None:
    weights = {f"w{i}": random(128, 256, seed=i) for i in range(4)}
    hin = torch.stack([correlated_hessian(128, 300, seed=i) for i in range(4)])
    hout = correlated_hessian(256, 600)
    options = Options()
    first, again = (on_card(weights, hin, hout, options) for _ in range(2))
    for name, linear in first.items():
        for a, b in zip(linear.tensors("w").values(), again[name].tensors("w").values(), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("hessian", ["none", "rank 1"])
def test_hostile_weights_give_finite_packs(name: str, hessian: str) -> None:
    x = random(1, 128)
    h = x.T @ x if hessian == "rank 1" else None
    linear = on_card({"w": HOSTILE[name]}, h, h, Options())["w"]
    decoded = decode(linear.trellis, linear.suh, linear.svh, "mul1")
    assert torch.isfinite(decoded).all() and np.isfinite(linear.proxy_error)
    assert not decoded[:, ~HOSTILE[name].any(dim=0)].any()


@pytest.mark.parametrize("shape", [(130, 200), (1, 1), (255, 128)])
def test_odd_shapes_are_padded(shape: tuple[int, int]) -> None:
    linear = on_card({"w": random(*shape)}, correlated_hessian(shape[0], 300), None, Options(4.0))["w"]
    k, n = shape
    decoded = decode(linear.trellis, linear.suh, linear.svh, "mul1")
    assert not decoded[k:].any() and not decoded[:, n:].any()
    assert float((decoded[:k, :n] - random(*shape)).norm() / random(*shape).norm()) < 0.2


def test_a_nan_is_named() -> None:
    weights = {"a": random(128, 128), "b": torch.full((128, 128), torch.nan)}
    with pytest.raises(QuantizeError, match="not finite") as caught:
        on_card(weights, None, None, Options())
    assert caught.value.where == "b"

"""Builds on a CUDA card: as good as on the CPU, the same bytes each time; and the choice of the device."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from moefit.errors import MoefitError, PackError
from moefit.fidelity.examine import examiner
from moefit.packs.build import prepare
from moefit.packs.device import settle_device
from moefit.progress import Silent
from moefit.quantize import cuda_encode

from ..small_model import ONE_SIDED, RECIPE, Built, Inputs, digests
from .test_build import experts_of

build_module = sys.modules["moefit.packs.build"]  # the package exports a function of that name

needs_card = pytest.mark.skipif(not cuda_encode.available(), reason="no CUDA card, or built without MOEFIT_CUDA")


def test_without_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert settle_device("auto") == settle_device("cpu") == "cpu"
    with pytest.raises(PackError, match="no CUDA card that torch can use.*use --device cpu"):
        settle_device("cuda")


def test_a_card_without_our_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda_encode, "LIBRARY", tmp_path / "none.so")
    cuda_encode.library.cache_clear()
    assert settle_device("auto") == "cpu"
    with pytest.raises(MoefitError, match="no CUDA encoder.*MOEFIT_CUDA=ON"):
        settle_device("cuda")
    cuda_encode.library.cache_clear()


def test_a_build_does_not_go_on_elsewhere(mini: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes depend on the device within rounding: half a pack from each is refused."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(build_module, "run_passes", stop)
    with pytest.raises(KeyboardInterrupt):
        mini.build(tmp_path / "pack", gate=False)
    with pytest.raises(PackError, match="device: cpu -> cuda"):
        prepare(mini.request(tmp_path / "pack", gate=False, device="cuda"))


@needs_card
@pytest.mark.parametrize("recipe", [RECIPE, ONE_SIDED], ids=["two-sided", "one-sided"])
def test_as_good_as_on_the_cpu(mini: Inputs, tmp_path: Path, recipe: object) -> None:
    found = {}
    for device in ("cuda", "cpu"):
        mini.build(tmp_path / device, gate=False, recipe=recipe, device=device)
        rows = experts_of(tmp_path / device)
        found[device] = sum(row["proxy_error"][p] for row in rows for p in ("w1", "w3", "w2"))
    assert found["cuda"] == pytest.approx(found["cpu"], rel=0.01)


@needs_card
def test_the_gate_on_a_card_reads_what_it_reads_on_the_cpu(mini_pack: Built) -> None:
    values = []
    for device in ("cuda", "cpu"):
        examine = examiner(mini_pack.inputs.model, [mini_pack.inputs.held_out], 5.0, 2, device=device)
        (corpus,) = examine.run(mini_pack.path, Silent()).summary["corpora"].values()
        values.append(corpus["kl"])
    assert values[0] == pytest.approx(values[1], rel=1e-3)


@needs_card
def test_the_same_bytes_after_a_stop(small: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of two experts; the second of layer 0 is cut short."""
    monkeypatch.setattr(build_module, "GROUP_ON_CARD", 2)
    small.build(tmp_path / "whole", gate=False, device="cuda")
    real, calls = build_module.quantize_two_sided, []

    def stops(*given: object) -> object:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(build_module, "quantize_two_sided", stops)
    with pytest.raises(KeyboardInterrupt):
        small.build(tmp_path / "stopped", gate=False, device="cuda")
    small.build(tmp_path / "stopped", gate=False, device="cuda")
    assert digests(tmp_path / "whole") == digests(tmp_path / "stopped")

"""The streamed backward of transformers' families: equal to autograd over the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moefit.calibrate.backward import sample_targets
from moefit.calibrate.borders import forward_borders
from moefit.calibrate.checkpoint import Checkpoint
from moefit.calibrate.families import open_model

from ..tiny_families import save_family
from .test_backward import assert_close, gathered, whole_model

FLOAT32 = 2e-5
"""Largest difference relative to a layer's largest gradient; measured: 2.2e-6."""


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "qwen3_5_moe_text", "deepseek_v4"])
def test_equal_to_autograd_over_the_whole_model(family: str, tmp_path: Path) -> None:
    """Plain residuals; a dense first layer and groups; linear attention; hyper-connections and hash routing."""
    model = open_model(Checkpoint.open(save_family(family, tmp_path / "model")))
    generator = torch.Generator().manual_seed(2)
    windows = [torch.randint(256, (length,), generator=generator) for length in (40, 1, 30)]
    borders = forward_borders(model, windows, tmp_path / "passes", 2, group_tokens=50)
    assert len(borders.groups) == 2
    targets = sample_targets(borders, 2, 0, 2)
    expected = whole_model(model, windows, targets)
    assert {layer for layer, _ in expected} == {n for n in range(model.layers) if model.load_layer(n).experts}
    assert_close(gathered(borders, targets), expected, lambda layer: FLOAT32)

"""What a pass keeps in memory: one layer and one group of windows, whatever the numbers of layers and windows.

Counted exactly, in bytes of living tensors whenever a layer is loaded. benchmarks/calibrate_memory.py measures whole
processes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from moefit.calibrate import passes as passes_module
from moefit.calibrate.borders import forward_borders, open_borders
from moefit.calibrate.checkpoint import Checkpoint
from moefit.calibrate.deepseek_v41.model import V41Model
from moefit.calibrate.passes import LayerTraffic, run_passes
from moefit.progress import Silent

from .synthetic import random_v41

WINDOW, GROUP = 24, 96  # tokens


def living() -> int:
    """Bytes of the tensors that Python can reach and that were made since `gc.freeze`, each storage once."""
    gc.collect()
    found = (thing for thing in gc.get_objects() if type(thing) is torch.Tensor)
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}
    return sum(sizes.values())


class Watched(V41Model):
    """Notes the living bytes when a layer has been loaded."""

    def load_layer(self, layer: int) -> Any:
        loaded = super().load_layer(layer)
        self.__dict__.setdefault("seen", []).append(living())
        return loaded


@pytest.fixture(scope="module")
def models(tiny_v41: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Two checkpoints that differ in their number of layers alone; every kind of layer stands among the first five."""
    return {
        layers: random_v41(
            tmp_path_factory.mktemp("memory") / "model",
            tiny_v41,
            num_hidden_layers=layers,
            compress_ratios=[0, 2, 2, *[1] * (layers - 3)],
            index_source_layer_ids=[1, 3, 4],
            engram_layer_ids=[1],
            engram_num_embeddings=[384],
        )
        for layers in (5, 12)
    }


@pytest.fixture
def peak(
    models: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int, int, int | None], int]:
    """Living bytes, beyond those at the start, of a pass with so many layers and windows; copies as `run_passes`'."""
    monkeypatch.setattr(passes_module, "forward_borders", partial(forward_borders, group_tokens=GROUP))
    monkeypatch.setattr(passes_module, "open_borders", partial(open_borders, group_tokens=GROUP))

    def run(layers: int, windows: int, copies: int | None) -> int:
        generator = torch.Generator().manual_seed(0)
        ids = [torch.randint(16, 4000, (WINDOW,), generator=generator) for _ in range(windows)]
        gc.collect()
        gc.freeze()  # what is there already is not looked at, which makes looking quick
        model = Watched(Checkpoint.open(models[layers]))
        passes = run_passes(model, ids, tmp_path / f"{layers}-{windows}", copies, 1, Silent())
        if copies is not None:
            for index in range(layers):
                traffic = LayerTraffic(model.load_layer(index), passes)
                for expert in range(4):
                    for _ in traffic.gradients(expert, traffic.layer.expert(expert)):
                        pass
                model.__dict__["seen"].append(living())
        gc.unfreeze()
        return max(model.__dict__["seen"])

    return run


@pytest.mark.parametrize("copies", [None, 0])
def test_layers_and_windows_add_nothing(peak: Callable[[int, int, int | None], int], copies: int | None) -> None:
    """More layers, three times the windows, each in full groups."""
    once = peak(5, 8, copies)
    assert peak(12, 8, copies) <= 1.02 * once
    assert peak(5, 24, copies) <= 1.1 * once


def test_it_would_be_noticed(peak: Callable[[int, int, int | None], int], monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    load = Watched.load_layer
    monkeypatch.setattr(Watched, "load_layer", lambda model, layer: kept.append(load(model, layer)) or kept[-1])
    once = peak(5, 8, None)
    kept.clear()
    assert peak(12, 8, None) > 1.5 * once

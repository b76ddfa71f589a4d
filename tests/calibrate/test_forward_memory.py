"""What the forward of one layer allocates: no tensor with the extent [heads, T, T] or [T, T], whatever T.

One thing does grow with T squared: the candidate mask, at a byte per query and block of latents (33 MB for a window of
16,384 tokens at the real widths, where the residual takes 1.3 GB).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moefit.calibrate.checkpoint import Checkpoint
from moefit.calibrate.deepseek_v41 import V41Model, attention, blocks, indexer

from .synthetic import random_v41

LENGTHS = (256, 512, 1024)
QUERY_BLOCK = 32
KEY_BLOCK = 128


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that any operation gave out."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for found in result if isinstance(result, tuple | list) else [result]:
            if isinstance(found, Tensor) and not func.is_view:
                self.bytes = max(self.bytes, found.nbytes)
        return result


@pytest.fixture(scope="module")
def model(tiny_v41: Path, tmp_path_factory: pytest.TempPathFactory) -> V41Model:
    return V41Model(Checkpoint.open(random_v41(tmp_path_factory.mktemp("memory") / "model", tiny_v41)), True)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Of thousands of small operations; a team of threads would mostly wait for itself."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def largest_of_layers(model: V41Model, length: int) -> list[int]:
    """Of each layer; the routed experts are left out."""
    ids = torch.randint(16, 4096, (length,), generator=torch.Generator().manual_seed(1))
    state, found = model.embed(ids), []
    for index in range(model.config.num_hidden_layers):
        layer = model.load_layer(index)
        with Largest() as largest:
            before = layer.before_experts(state, ids)
            state = layer.after_experts(before.state, torch.zeros_like(before.x))
        found.append(largest.bytes)
    return found


def test_the_largest_tensor_grows_with_the_length_alone(model: V41Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the residual, or no larger than what a query block may take; twice the length, at most twice as large."""
    monkeypatch.setattr(blocks, "QUERY_BLOCK", QUERY_BLOCK)
    monkeypatch.setattr(indexer, "KEY_BLOCK", KEY_BLOCK)
    config = model.config
    # the keys of a block's dense attention, and those that the indexer scores at once
    dense = attention.SPARSE * config.index_topk + config.sliding_window + QUERY_BLOCK
    products = max(config.num_attention_heads * dense, config.index_n_heads * KEY_BLOCK)
    found = {length: largest_of_layers(model, length) for length in LENGTHS}
    for length in LENGTHS:
        residual = 4 * length * config.hc_mult * config.hidden_size
        assert max(found[length]) <= max(residual, 4 * QUERY_BLOCK * products, 4 * QUERY_BLOCK * length)
    for once, twice in pairwise(LENGTHS):
        assert all(b <= 2 * a for a, b in zip(found[once], found[twice], strict=True))


def test_the_bound_would_notice(model: V41Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all queries and all keys at once, four times as much is taken for twice the length."""
    for where, name in ((blocks, "QUERY_BLOCK"), (indexer, "KEY_BLOCK"), (attention, "SPARSE")):
        monkeypatch.setattr(where, name, 10**9)
    once, twice = (max(largest_of_layers(model, length)) for length in LENGTHS[:2])
    assert twice > 3.5 * once

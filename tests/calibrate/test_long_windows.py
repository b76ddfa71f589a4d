"""Windows in which everything selects, against an oracle that goes token by token (oracle.py), in float64.

The goldens reach 2.7 times index_topk; here windows have up to 33 times as many positions as a query may attend to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from moefit.calibrate.checkpoint import Checkpoint
from moefit.calibrate.deepseek_v41 import V41Model, attention, blocks, indexer
from moefit.calibrate.deepseek_v41.kv_cache import round_index, round_window
from moefit.calibrate.stream import run_layer, run_model

from .oracle import Oracle
from .synthetic import random_v41
from .test_backward import DoubleCheckpoint

LENGTH = 200
EXACT = 5e-6
"""Largest |logit difference| to the oracle, of logits up to 5 in magnitude; measured: 9e-7. Both are float64, but the
forward takes its rotary angles in float32, as the release does."""
SAME = 1e-10
"""The same between two ways of computing within the forward."""


@pytest.fixture(scope="module")
def checkpoint(tiny_v41: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    found = Checkpoint.open(random_v41(tmp_path_factory.mktemp("random") / "model", tiny_v41))
    return DoubleCheckpoint(**{field.name: getattr(found, field.name) for field in fields(found)})


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(16, 4096, (LENGTH,), generator=torch.Generator().manual_seed(7))


def oracle_of(checkpoint: Checkpoint, kv_quantization: bool = False) -> Oracle:
    classes = V41Model(checkpoint).classes
    return Oracle(checkpoint.config["text_config"], checkpoint.weight, classes, kv_quantization)


@pytest.fixture(scope="module", params=[False, True], ids=["exact", "kv-quantization"])
def expected(request: pytest.FixtureRequest, checkpoint: Checkpoint, ids: Tensor) -> tuple[bool, Oracle, Tensor]:
    oracle = oracle_of(checkpoint, request.param)
    return request.param, oracle, torch.from_numpy(oracle.run(ids))


def logits_of(model: V41Model, ids: Tensor) -> Tensor:
    (state,) = run_model(model, [ids], threads=2)
    return model.logits(state)


def difference(a: Tensor, b: Tensor) -> float:
    assert a.dtype == b.dtype == torch.float64
    return float((a - b).abs().max())


@pytest.mark.parametrize("block", [256, 32, 7])
def test_logits_agree_with_the_oracle(
    checkpoint: Checkpoint,
    ids: Tensor,
    expected: tuple[bool, Oracle, Tensor],
    block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one query block and across the borders of many, which n-grams, windows and groups of two straddle."""
    kv_quantization, _, logits = expected
    monkeypatch.setattr(blocks, "QUERY_BLOCK", block)
    monkeypatch.setattr(indexer, "KEY_BLOCK", 3 * block)
    assert difference(logits_of(V41Model(checkpoint, kv_quantization), ids), logits) <= EXACT


def test_the_same_latents_are_selected(
    checkpoint: Checkpoint, ids: Tensor, expected: tuple[bool, Oracle, Tensor]
) -> None:
    """And the choice is a real one, at every level: of all that can be seen, and inside the candidates."""
    kv_quantization, oracle, _ = expected
    model = V41Model(checkpoint, kv_quantization)
    text = checkpoint.config["text_config"]
    states = [model.embed(ids)]
    outside = 0
    for index in range(model.config.num_hidden_layers):
        layer = model.load_layer(index)
        run_layer(layer, states, [ids], layer.expert, threads=2)
        if index in text["index_source_layer_ids"] and "selected" in states[0]:
            found = [set(row[row >= 0].tolist()) for row in states[0]["selected"]]
            assert found == oracle.selected[index]
            assert max(map(len, found)) == text["index_topk"] < LENGTH // text["compress_ratios"][index] // 10
        if index == text["candidate_source_layer_id"]:
            size = text["candidate_block_size"]
            for mask, kept in zip(states[0]["candidates"], oracle.candidates, strict=True):
                assert set(mask.nonzero().flatten().tolist()) == {latent // size for latent in kept}
            alone = oracle_of(checkpoint, kv_quantization)
            alone.text["candidate_source_layer_id"] = -1
            alone.run(ids[:100])
            later = [layer for layer in text["index_source_layer_ids"] if layer > index]
            outside = sum(alone.selected[n][t] != oracle.selected[n][t] for n in later for t in range(100))
    assert outside > 100, "candidates keep later index sources from what they would choose"


MUTATIONS: dict[str, Callable[[Oracle], object]] = {
    "selects one latent more": lambda oracle: oracle.text.update(index_topk=7),
    "one candidate block more": lambda oracle: oracle.text.update(candidate_topk_blocks=5),
    "no candidates": lambda oracle: oracle.text.update(candidate_source_layer_id=-1),
    "no YaRN": lambda oracle: setattr(oracle, "yarn", False),
    "compressed layers turn like window layers": lambda oracle: oracle.text.update(compress_rope_theta=10000),
    "n-grams end at blocks of 32": lambda oracle: setattr(oracle, "forget_ngrams_every", 32),
    "a longer sliding window": lambda oracle: oracle.text.update(sliding_window=9),
    "rounded caches": lambda oracle: setattr(oracle, "rounding", True),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_would_notice(checkpoint: Checkpoint, ids: Tensor, mutation: str) -> None:
    """An oracle that differs in one thing gives other logits, by far more than the tolerance."""
    oracle = oracle_of(checkpoint)
    MUTATIONS[mutation](oracle)
    some = ids[:80]
    assert difference(logits_of(V41Model(checkpoint), some), torch.from_numpy(oracle.run(some))) > 1e-4


ROUNDINGS: dict[str, tuple[ModuleType, str, Callable[[Tensor], Tensor]]] = {
    "window keys but for the rotated channels": (
        attention,
        "round_window",
        lambda x: torch.cat([round_window(x)[:, :-16], x[:, -16:]], dim=1),
    ),
    "latents as index keys are": (attention, "round_latents", round_index),
    "index keys alone": (indexer, "round_index", lambda x: round_index(x) if x.dim() == 2 else x),
    "index queries alone": (indexer, "round_index", lambda x: round_index(x) if x.dim() == 3 else x),
}


@pytest.mark.parametrize("wrong", ROUNDINGS)
def test_the_comparison_would_notice_other_roundings(
    checkpoint: Checkpoint, ids: Tensor, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*ROUNDINGS[wrong])
    some = ids[:80]
    expected = torch.from_numpy(oracle_of(checkpoint, True).run(some))
    assert difference(logits_of(V41Model(checkpoint, True), some), expected) > 1e-2


def test_windows_of_unequal_lengths_together_are_each_as_alone(checkpoint: Checkpoint, ids: Tensor) -> None:
    lengths = (1, 150, 2, 8, 9, 33, LENGTH)
    windows = [ids[len(ids) - length :] for length in lengths]
    for kv_quantization in (False, True):
        model = V41Model(checkpoint, kv_quantization)
        for window, state in zip(windows, run_model(model, windows, threads=2), strict=True):
            assert difference(model.logits(state), logits_of(model, window)) <= SAME


@pytest.mark.parametrize("kv_quantization", [False, True])
def test_gathering_does_not_change_the_result(
    checkpoint: Checkpoint, ids: Tensor, kv_quantization: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = V41Model(checkpoint, kv_quantization)
    found = []
    for sparse in (0, attention.SPARSE, 10**9):
        monkeypatch.setattr(attention, "SPARSE", sparse)
        found.append(logits_of(model, ids))
    assert difference(found[0], found[2]) <= SAME and difference(found[1], found[2]) <= SAME


def test_gathered_attention_against_a_mask() -> None:
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(70, 3, 8, generator=generator).double()
    keys = torch.randn(50, 8, generator=generator).double()
    visible = torch.rand(70, 50, generator=generator) < 0.3
    visible[5] = False
    places = torch.full((70, 50), -1)
    for row, mask in zip(places, visible, strict=True):
        chosen = mask.nonzero().flatten()
        row[torch.randperm(50, generator=generator)[: len(chosen)]] = chosen  # anywhere in the row, in any order
    sink = torch.randn(3, generator=generator).double()
    found = attention.attend_gathered(q, keys, places, sink)
    assert torch.allclose(found, attention.attend(q, keys, visible, sink), atol=1e-12)
    assert not found[5].any()

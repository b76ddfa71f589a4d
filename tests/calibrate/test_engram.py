"""Engram: the hash against a slow loop, the tokenizer's classes, and the table read on demand."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from moefit.calibrate.checkpoint import Checkpoint
from moefit.calibrate.deepseek_v41 import V41Model
from moefit.calibrate.deepseek_v41.engram import NgramHash, compressed_vocabulary, load_classes, next_primes
from moefit.errors import CheckpointError

from .test_v41_config import released


@pytest.fixture(scope="module")
def model(tiny_v41: Path) -> V41Model:
    return V41Model(Checkpoint.open(tiny_v41))


def slow_rows(hashing: NgramHash, ids: list[int]) -> list[list[int]]:
    """Row numbers from the definition, in Python integers: one n-gram after the other."""
    result = []
    for position in range(len(ids)):
        row, start = [], 0
        for order in range(2, len(hashing.multipliers) + 1):
            mixed = 0
            for back in range(order):
                at = position - back
                token = int(hashing.classes[ids[at]]) if at >= 0 else hashing.pad
                product = token * int(hashing.multipliers[back])
                assert product < 2**63
                mixed ^= product
            for prime in hashing.primes[order - 2].tolist():
                row.append(start + mixed % prime)
                start += prime
        result.append(row)
    return result


@given(st.lists(st.integers(0, 4095), min_size=1, max_size=40), st.sampled_from([1, 3]))
@settings(max_examples=30, deadline=None)
def test_rows_against_a_slow_loop(model: V41Model, ids: list[int], layer: int) -> None:
    hashing = NgramHash.from_config(model.config, layer, model.classes)
    found = hashing.rows(np.array(ids))
    assert found.tolist() == slow_rows(hashing, ids)
    assert found.max() < model.checkpoint.tensors[f"layers.{layer}.engram.embed.weight"].shape[0]


def test_equal_text_in_another_case_reads_the_same_rows(model: V41Model, tiny_v41: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_v41 / "tokenizer.json"))
    lower, upper = tokenizer.token_to_id("Ġthe"), tokenizer.token_to_id("ĠThe")
    assert lower != upper
    hashing = NgramHash.from_config(model.config, 1, model.classes)
    assert np.array_equal(hashing.rows(np.array([5, lower])), hashing.rows(np.array([5, upper])))
    assert not np.array_equal(hashing.rows(np.array([5, lower])), hashing.rows(np.array([lower, 5])))


def test_classes_of_the_example_tokenizer(tiny_v41: Path, model: V41Model) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_v41 / "tokenizer.json"))
    classes = compressed_vocabulary(tokenizer)
    assert classes.shape == (4096,) and classes.max() + 1 == model.config.engram_compressed_vocab_size == 2860
    assert classes[0] == 0 and len(set(classes[:16].tolist())) == 16, "special tokens keep apart"
    space, newline, dot = (tokenizer.token_to_id(t) for t in ("Ġ", "Ċ", "."))
    assert classes[space] == classes[newline] != classes[dot]


def test_primes() -> None:
    assert next_primes(0, 6) == [2, 3, 5, 7, 11, 13]
    assert next_primes(90, 3) == [97, 101, 103]
    found = next_primes(1000, 100)
    sieve = [n for n in range(1000, 3000) if all(n % d for d in range(2, 55))]
    assert found == sieve[:100]


def test_released_tables_have_the_published_sizes() -> None:
    """384,006,168 and 384,016,682 rows follow from engram_vocab_size alone: the primes are the right ones."""
    config = released()
    for layer in config.engram_layer_ids:
        hashing = NgramHash.from_config(config, layer, np.zeros(config.vocab_size, dtype=np.int64))
        assert hashing.primes.shape == (3, 8)
        assert int(hashing.multipliers.max()) * config.engram_compressed_vocab_size < 2**63
        assert (hashing.multipliers % 2 == 1).all()


def test_a_table_of_another_size_is_refused(tiny_v41: Path) -> None:
    checkpoint = Checkpoint.open(tiny_v41)
    checkpoint.config["text_config"]["engram_num_embeddings"] = [6126, 6334]
    with pytest.raises(CheckpointError, match=r"engram_num_embeddings\[1\].*expected 6332, found 6334"):
        V41Model(checkpoint).load_layer(3)


def test_another_tokenizer_is_refused(tiny_v41: Path, tmp_path: Path, model: V41Model) -> None:
    content = json.loads((tiny_v41 / "tokenizer.json").read_text())
    other = copy.deepcopy(content)
    del other["added_tokens"][15]
    del other["model"]["vocab"]["<|noise|>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(other))
    with pytest.raises(CheckpointError, match=r"does not belong.*2860 classes"):
        load_classes(tmp_path, model.config)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_classes(tmp_path, model.config)


def test_lookup_against_the_whole_table(model: V41Model) -> None:
    """Rows read one by one from the shard, and the gate, from their definition in float64."""
    config = model.config
    ids = torch.arange(40, 75)
    layer = model.load_layer(1)
    engram = layer.engram
    assert engram is not None
    residual = torch.randn(35, 4, 256, generator=torch.Generator().manual_seed(0))
    found = engram.forward(residual, ids, config)

    table = model.checkpoint.weight("layers.1.engram.embed").double()
    wkv = model.checkpoint.weight("layers.1.engram.wkv").double()
    q, k = (model.checkpoint.weight(f"layers.1.engram.{n}_weight").double() for n in "qk")
    rows = engram.hash.rows(ids.numpy())
    for t in range(35):
        projected = wkv @ table[rows[t]].flatten()
        value = projected[4 * 256 :]
        for stream in range(4):
            h, key = residual[t, stream].double(), projected[stream * 256 : (stream + 1) * 256]
            normed_h, normed_key = (v / v.square().mean().sqrt() for v in (h, key))
            dot = (normed_h * q[stream]) @ (normed_key * k[stream]) / 256**0.5
            gate = torch.sigmoid(dot.abs().clamp(min=1e-6).sqrt() * dot.sign())
            assert torch.allclose(found[t, stream].double(), h + gate * value, atol=1e-5)

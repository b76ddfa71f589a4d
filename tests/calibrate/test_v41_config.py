"""Every field of config.json that the forward relies on is checked, and named when it is wrong."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from moefit.calibrate.deepseek_v41 import V41Config
from moefit.errors import CheckpointError

from .synthetic import REAL_CONFIG


def released() -> V41Config:
    """DeepSeek-V4.1-Flash."""
    return V41Config.from_checkpoint(REAL_CONFIG)


@pytest.fixture
def config(tiny_v41: Path) -> dict[str, Any]:
    return json.loads((tiny_v41 / "config.json").read_text())


def test_released_model_shares_what_its_layers_need() -> None:
    config = released()
    assert len(config.compress_ratios) == 40
    shared = {"compressed_kv", "selected"}
    assert config.shared_carried(0) == config.shared_carried(1) == set()
    for layer in [*range(2, 7), *range(8, 13), *range(14, 19)]:
        assert config.shared_carried(layer) == shared
    for layer in (7, 13, 19, 39):  # the next layer makes everything anew
        assert config.shared_carried(layer) == set()
    assert config.shared_carried(20) == shared | {"index_keys", "candidates"}
    assert config.shared_carried(23) == {"compressed_kv", "index_keys", "candidates"}
    assert config.shared_carried(36) == config.shared_carried(38) == shared


def test_example_is_read(config: dict[str, Any]) -> None:
    found = V41Config.from_checkpoint(config)
    assert found.compress_ratios == (0, 0, 2, 2, 1, 1)
    assert (found.yarn_factor, found.yarn_original_positions) == (16.0, 256)
    assert found.image_token_id == 14


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scoring_func", "sigmoid"),
        ("topk_method", "greedy"),
        ("norm_topk_prob", False),
        ("hidden_act", "gelu"),
        ("n_shared_experts", 2),
        ("num_key_value_heads", 8),
        ("attention_bias", True),
        ("tie_word_embeddings", True),
        ("gate_temp", 0.5),
        ("hidden_size", 0),
        ("hidden_size", "256"),
        ("hidden_size", True),
        ("sliding_window", 64.0),
        ("rms_norm_eps", -1e-6),
        ("rms_norm_eps", float("nan")),
        ("swiglu_limit", 0),
        ("routed_scaling_factor", None),
        ("rope_theta", float("inf")),
        ("compress_ratios", [0, 0, 2, 2, 1]),
        ("compress_ratios", [0, 0, 2, 2, 1, 1, 1]),
        ("compress_ratios", [0, 0, 2, 1, 1, 1, 0]),
        ("compress_ratios", [0, 2, 2, 2, 1, 1, 0]),
        ("compress_ratios", [0, 0, 0, 2, 1, 1, 0]),
        ("compress_ratios", "0022110"),
        ("kv_source_layer_ids", [4, 2]),
        ("kv_source_layer_ids", [4]),
        ("kv_source_layer_ids", [2, 4, 6]),
        ("index_source_layer_ids", [2, 5]),
        ("candidate_source_layer_id", 3),
        ("candidate_source_layer_id", 2),
        ("candidate_topk_blocks", -1),
        ("qk_rope_head_dim", 31),
        ("qk_rope_head_dim", 128),
        ("o_groups", 3),
        ("num_experts_per_tok", 33),
        ("engram_max_ngram_size", 1),
        ("engram_num_embeddings", [6126]),
        ("engram_layer_ids", [1, 1]),
        ("engram_pad_id", 3),
        ("engram_pad_token_id", 4096),
        ("rope_scaling", None),
        ("rope_scaling", {"rope_type": "linear", "factor": 2}),
        ("rope_scaling", {"rope_type": "yarn", "type": "linear"}),
    ],
)
def test_a_bad_value_is_named(config: dict[str, Any], field: str, value: object) -> None:
    text = config["text_config"]
    text[field] = value
    # a field that must agree with the changed one may be named instead of it
    also = {
        "candidate_source_layer_id": "compress_ratios",
        "compress_ratios": "kv_source_layer_ids",
        "engram_pad_token_id": "engram_pad_id",
    }
    pattern = f"text_config.({field}|{also.get(field, field)})"
    with pytest.raises(CheckpointError, match=pattern):
        V41Config.from_checkpoint(config)


def test_every_field_is_needed(config: dict[str, Any]) -> None:
    optional = {
        *("model_type", "max_position_embeddings", "initializer_range", "attention_dropout", "use_cache"),
        *("gate_temp", "dtype", "bos_token_id", "eos_token_id", "pad_token_id", "num_nextn_predict_layers"),
        *("engram_pad_id", "engram_pad_token_id"),  # one of the two is enough
    }
    for field in config["text_config"]:
        if field in optional or field.startswith("dspark_"):
            continue
        damaged = copy.deepcopy(config)
        del damaged["text_config"][field]
        with pytest.raises(CheckpointError, match=f"text_config.({field}|compress_ratios)"):
            V41Config.from_checkpoint(damaged)
    for key in ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings"):
        damaged = copy.deepcopy(config)
        del damaged["text_config"]["rope_scaling"][key]
        with pytest.raises(CheckpointError, match=f"rope_scaling.{key}"):
            V41Config.from_checkpoint(damaged)


def test_another_model_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="model_type"):
        V41Config.from_checkpoint(config | {"model_type": "deepseek_v4"})
    with pytest.raises(CheckpointError, match="text_config"):
        V41Config.from_checkpoint(config | {"text_config": []})

"""Whether a build calibrates with rounded key/value caches: settled before it begins, and seen in the recipe."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moefit.calibrate.deepseek_v41 import config as config_module
from moefit.packs.build import Prepared, prepare

from ..small_model import RECIPE, Built, Inputs, digests


def prepared(inputs: Inputs, folder: Path, choice: bool | None) -> Prepared:
    return prepare(inputs.request(folder / "pack", gate=False, recipe=replace(RECIPE, kv_quantization=choice)))


def test_it_follows_the_model_unless_told(mini: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert RECIPE.kv_quantization is None
    own, off, on = (prepared(mini, tmp_path, choice) for choice in (None, False, True))
    assert own.identity["recipe"]["kv_quantization"] is False, "the example is served without"
    assert own.request_hash == off.request_hash != on.request_hash
    assert on.identity["recipe"]["kv_quantization"] is True
    # a model with the release's cache rows
    monkeypatch.setattr(config_module, "RELEASED_HEAD_DIM", 64)
    monkeypatch.setattr(config_module, "RELEASED_INDEX_HEAD_DIM", 64)
    assert prepared(mini, tmp_path, None).request_hash == on.request_hash
    assert prepared(mini, tmp_path, False).request_hash == off.request_hash


def test_a_build_calibrates_with_it(mini: Inputs, mini_pack: Built, tmp_path: Path) -> None:
    """The experts' inputs are others, and so are their bytes; everything that is not quantized is the same."""
    mini.build(tmp_path / "pack", gate=False, recipe=replace(RECIPE, kv_quantization=True))
    assert mini_pack.manifest["recipe"]["kv_quantization"] is False
    assert json.loads((tmp_path / "pack" / "moefit.json").read_bytes())["recipe"]["kv_quantization"] is True
    rounded, exact = digests(tmp_path / "pack"), digests(mini_pack.path)
    shards = {name for name in exact if name.endswith(".safetensors")}
    assert {name for name in shards if rounded[name] != exact[name]}
    assert rounded["config.json"] == exact["config.json"]

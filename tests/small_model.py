"""Small but real: checkpoints cut out of examples/tiny-v41, traffic for them, and packs built once for all tests.

`small` keeps all six layers and three experts of each, `mini` the first three layers and two experts. Every number in
them is trained. `mini` is cut into shards every 300 kB wherever that falls, with an expert of the first layer and one
of the last in the same shard; `small` is dealt out tensor by tensor, so that no shard can be written before the last
layer is done, and a weight and its scale lie in different shards.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moefit.calibrate.checkpoint import Checkpoint
from moefit.calibrate.deepseek_v41.layout import expected_tensors
from moefit.fidelity.examine import examiner
from moefit.packs import BuildRequest, Recipe
from moefit.packs.build import BuildResult, build, prepare
from moefit.placement import Machine

from .calibrate.synthetic import Stored, write_checkpoint

COMPANIONS = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")
MACHINE = Machine.from_flags(["6MB", "6MB"], "16MB")
# 1400: more than the router sends to some of small's experts, and to any of mini's
RECIPE = Recipe(window=128, prior_tokens=300, enough_tokens=1400, copies=0)
ONE_SIDED = replace(RECIPE, two_sided=False)
CLI = [sys.executable, "-c", "from moefit.cli.main import main; main()"]
SHARD_BYTES = 300_000
DEALT = 5


def cut_checkpoint(
    source: Path,
    folder: Path,
    layers: int,
    experts: int,
    top_k: int,
    intermediate: int = 128,
    deal: bool = False,
    late: tuple[str, ...] = (),
) -> Path:
    """Keep the first `layers` layers, `experts` experts (the drafter's too) and `intermediate` channels of each.

    deal: over DEALT shards, one tensor after the other; else a new shard after SHARD_BYTES. late: tensors whose names
    begin so come at the end.
    """
    original = Checkpoint.open(source)
    config = json.loads(json.dumps(original.config))
    text = config["text_config"]
    text |= {
        "num_hidden_layers": layers,
        "n_routed_experts": experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": intermediate,
        "dspark_n_routed_experts": experts,
        "dspark_num_experts_per_tok": 1,
        "dspark_target_layer_ids": [layers - 3, layers - 2, layers - 1],
        "compress_ratios": text["compress_ratios"][:layers] + [0],
    }
    for key in ("kv_source_layer_ids", "index_source_layer_ids"):
        text[key] = [layer for layer in text[key] if layer < layers]
    if text["candidate_source_layer_id"] >= layers:
        text["candidate_source_layer_id"] = -1
    engram = [layer for layer in text["engram_layer_ids"] if layer < layers]
    text["engram_num_embeddings"] = text["engram_num_embeddings"][: len(engram)]
    text["engram_layer_ids"] = engram

    shards: list[Stored] = [{}]
    size = 0
    for name, (dtype, shape) in sorted(expected_tensors(config).items(), key=lambda item: item[0].startswith(late)):
        info = original.info(name)
        stored = np.frombuffer(original.bytes(name), np.uint8).reshape(*info.shape, -1)  # last axis: an item's bytes
        data = np.ascontiguousarray(stored[tuple(slice(length) for length in shape)]).tobytes()
        if size + len(data) > SHARD_BYTES and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = (dtype, shape, data)
        size += len(data)
    if deal:
        tensors = [item for shard in shards for item in shard.items()]
        shards = [dict(tensors[start::DEALT]) for start in range(DEALT)]
    count = len(shards)
    named = {f"model-{number:05d}-of-{count:05d}.safetensors": shard for number, shard in enumerate(shards, 1)}
    write_checkpoint(folder, named, config)
    for companion in COMPANIONS:
        shutil.copy(source / companion, folder)
    (folder / "encoding").mkdir()
    (folder / "encoding" / "encoding.py").write_text("# how messages become tokens\n")
    return folder


def head(source: Path, target: Path, count: int, longest: int, corpus: str | None = None) -> Path:
    """The first `count` lines of a JSONL file that have at most `longest` bytes (and are of a corpus)."""
    lines = [line for line in source.read_text().splitlines() if len(line) <= longest]
    chosen = [line for line in lines if corpus is None or json.loads(line).get("corpus") == corpus][:count]
    assert len(chosen) == count
    target.write_text("".join(line + "\n" for line in chosen))
    return target


def digests(folder: Path) -> dict[str, str]:
    """sha256 of every file under a directory, by relative path."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def poke(folder: Path, name: str, offset: int, data: bytes) -> None:
    """Write `data` at a byte offset of a tensor, in place."""
    info = Checkpoint.open(folder).info(name)
    assert offset + len(data) <= info.nbytes
    with (folder / info.file).open("r+b") as file:
        file.seek(info.start + offset)
        file.write(data)


@dataclass(frozen=True)
class Inputs:
    """A checkpoint with traffic and held-out text for it."""

    model: Path
    traces: Path
    held_out: Path

    def request(self, out: Path, gate: bool = True, **changes: Any) -> BuildRequest:
        """A build of this, two threads unless told otherwise."""
        request = BuildRequest(self.model, self.traces, out, MACHINE, RECIPE, 2)
        if gate:
            examine = examiner(self.model, [self.held_out], 5.0, 2)
            request = replace(request, examine=examine.run, examine_identity=examine.identity)
        return replace(request, **changes)

    def build(self, out: Path, gate: bool = True, **changes: Any) -> BuildResult:
        return build(prepare(self.request(out, gate, **changes)))

    def copy(self, folder: Path) -> Inputs:
        """The same in a directory of its own, to damage."""
        shutil.copytree(self.model, folder / "model")
        for path in (self.traces, self.held_out):
            shutil.copy(path, folder)
        return Inputs(folder / "model", folder / self.traces.name, folder / self.held_out.name)


@pytest.fixture(scope="session")
def small(tiny_v41: Path, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Six layers, three experts, top-2; about 1,000 tokens of traffic and six held-out documents."""
    folder = tmp_path_factory.mktemp("small")
    examples = tiny_v41.parent
    return Inputs(
        cut_checkpoint(tiny_v41, folder / "model", 6, 3, 2, deal=True),
        head(examples / "traffic.jsonl", folder / "traffic.jsonl", 4, 2500),
        head(examples / "eval.jsonl", folder / "eval.jsonl", 6, 1500),
    )


@pytest.fixture(scope="session")
def mini(tiny_v41: Path, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Three layers, two experts, top-1; fewer tokens."""
    folder = tmp_path_factory.mktemp("mini")
    examples = tiny_v41.parent
    return Inputs(
        cut_checkpoint(
            tiny_v41, folder / "model", 3, 2, 1, late=("layers.0.ffn.experts.1.", "layers.2.ffn.experts.1.")
        ),
        head(examples / "traffic.jsonl", folder / "traffic.jsonl", 2, 2500),
        head(examples / "eval.jsonl", folder / "eval.jsonl", 2, 1500),
    )


@dataclass(frozen=True)
class Built:
    """A finished pack. Tests copy it before they damage it."""

    inputs: Inputs
    path: Path
    result: BuildResult

    @property
    def manifest(self) -> dict[str, Any]:
        return self.result.manifest

    def copy(self, folder: Path) -> Path:
        return Path(shutil.copytree(self.path, folder / "pack"))


def _built(inputs: Inputs, folder: Path, recipe: Recipe) -> Built:
    return Built(inputs, folder / "pack", inputs.build(folder / "pack", recipe=recipe))


@pytest.fixture(scope="session")
def small_pack(small: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """One-sided."""
    return _built(small, tmp_path_factory.mktemp("small-pack"), ONE_SIDED)


@pytest.fixture(scope="session")
def mini_pack(mini: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Two-sided."""
    return _built(mini, tmp_path_factory.mktemp("mini-pack"), RECIPE)

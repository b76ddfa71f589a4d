"""Packs of other families than DeepSeek-V4.1: built, verified, gated, planned; the same from fused experts."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moefit.calibrate.checkpoint import INDEX, Checkpoint
from moefit.calibrate.layout import check_layout, parts
from moefit.errors import CheckpointError, FidelityError
from moefit.fidelity.score import read_held_out, score
from moefit.packs import Pack, Recipe, verify
from moefit.packs.inspect import inspect_model
from moefit.packs.layout import pack_config, pack_layout
from moefit.packs.plan import TRAFFIC, PlanRequest, make_plan
from moefit.placement import Plan, TrafficTable

from ..small_model import COMPANIONS, MACHINE, Built, Inputs, digests, head, poke
from ..tiny_families import save_family

LAYERS, EXPERTS = 2, 3
RECIPE = Recipe(window=128, prior_tokens=300, enough_tokens=0, two_sided=False, copies=0)


def write_sharded(folder: Path, shards: list[dict[str, torch.Tensor]], config: dict[str, Any], source: Path) -> Path:
    """A checkpoint as the safetensors library writes it, with the source's tokenizer."""
    folder.mkdir(parents=True)
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    for companion in COMPANIONS:
        shutil.copy(source / companion, folder)
    return folder


def counted(experts: int) -> dict[str, int]:
    """Both names of one value in Qwen3-MoE's config.json; transformers takes the second."""
    return {"num_experts": experts, "num_local_experts": experts}


def cut_qwen3(source: Path, folder: Path, fused: bool = False) -> Path:
    """tiny-qwen3-moe's first layers, and of each the first experts; two shards, an expert's matrices in both.

    fused: all experts of a layer in one tensor, as Qwen3.5-MoE is released.
    """
    original = Checkpoint.open(source)
    config = original.config | {"num_hidden_layers": LAYERS, "num_experts_per_tok": 2} | counted(EXPERTS)
    shards: list[dict[str, torch.Tensor]] = [{}, {}]
    for name in original.tensors:
        parts = name.split(".")
        if parts[1] == "layers" and int(parts[2]) >= LAYERS:
            continue
        if "experts" in parts and (fused or int(parts[5]) >= EXPERTS):
            continue
        tensor = original.stored(name)
        if name.endswith("mlp.gate.weight"):
            tensor = tensor[:EXPERTS].clone()
        shards["down_proj" in name][name] = tensor
    for layer in range(LAYERS if fused else 0):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([original.stored(f"{prefix}.{expert}.{p}_proj.weight") for expert in range(EXPERTS)])
            for p in ("gate", "up", "down")
        )
        shards[0][f"{prefix}.gate_up_proj"] = torch.cat([gate, up], dim=1)
        shards[1][f"{prefix}.down_proj"] = down
    return write_sharded(folder, shards, config, source)


@pytest.fixture(scope="module")
def qwen3(shared: Path, tiny_v41: Path, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    folder = tmp_path_factory.mktemp("qwen3")
    examples = tiny_v41.parent
    return Inputs(
        cut_qwen3(shared / "models" / "tiny-qwen3-moe", folder / "model"),
        head(examples / "traffic.jsonl", folder / "traffic.jsonl", 2, 2500),
        head(examples / "eval.jsonl", folder / "eval.jsonl", 2, 1500),
    )


@pytest.fixture(scope="module")
def qwen3_pack(qwen3: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Built:
    path = tmp_path_factory.mktemp("qwen3-pack") / "pack"
    return Built(qwen3, path, qwen3.build(path, recipe=RECIPE))


def routed(checkpoint: Checkpoint) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {i.name: (i.dtype, i.shape) for i in checkpoint.tensors.values() if ".mlp.experts." in i.name}


def test_a_pack_has_the_tensors_that_exllamav3_writes(shared: Path, qwen3_pack: Built) -> None:
    """The golden pack was made by exllamav3 itself from the same model, at the same bits."""
    golden = routed(Checkpoint.open(shared / "golden" / "exllamav3-tiny-qwen3-moe-3bpw"))
    source = Checkpoint.open(shared / "models" / "tiny-qwen3-moe")
    layout = pack_layout(source, check_layout(source), Recipe())
    assert {t.name: (t.dtype, t.shape) for ts in layout.shards.values() for t in ts if t.expert} == golden

    built = Checkpoint.open(qwen3_pack.path)
    kept = {
        name: entry
        for name, entry in golden.items()
        if int(name.split(".")[2]) < LAYERS and int(name.split(".")[5]) < EXPERTS
    }
    assert routed(built) == kept
    marker = "model.layers.0.mlp.experts.0.gate_proj.mul1"
    with safe_open(shared / "golden" / "exllamav3-tiny-qwen3-moe-3bpw" / "model.safetensors", "pt") as file:
        assert torch.equal(built.stored(marker), file.get_tensor(marker))


def test_a_pack_of_exllamav3_is_read(shared: Path) -> None:
    source = Checkpoint.open(shared / "models" / "tiny-qwen3-moe")
    pack = Pack(shared / "golden" / "exllamav3-tiny-qwen3-moe-3bpw")
    for projection, decoded in zip(("gate", "up", "down"), pack.expert(4, 9), strict=True):
        weight = source.weight(f"model.layers.4.mlp.experts.9.{projection}_proj")
        assert 0.1 < (decoded - weight).norm() / weight.norm() < 0.2


def test_everything_else_keeps_its_bytes(qwen3_pack: Built) -> None:
    source, pack = Checkpoint.open(qwen3_pack.inputs.model), Checkpoint.open(qwen3_pack.path)
    others = [name for name in source.tensors if ".mlp.experts." not in name]
    assert len(others) == len(pack.tensors) - len(routed(pack)) == 2 + 9 * LAYERS
    for name in others:
        assert (pack.info(name).file, pack.info(name).shape) == (source.info(name).file, source.info(name).shape)
        assert pack.bytes(name) == source.bytes(name), name
    config = json.loads((qwen3_pack.path / "config.json").read_bytes())
    assert config.pop("quantization_config") == {
        "quant_method": "exl3",
        "scope": "routed_experts",
        "bits": 3,
        "codebook": "mul1",
        "head_bits": 16,
        "non_routed_quantization": None,
    }
    assert config == source.config  # the tied embedding stays tied: the head is not quantized


def test_the_sources_own_quantization_is_told() -> None:
    config = {"architectures": ["DeepseekV4ForCausalLM"], "quantization_config": {"quant_method": "fp8"}}
    quantization = pack_config(config, Recipe(bits=2.5))["quantization_config"]
    assert quantization["non_routed_quantization"] == {"quant_method": "fp8"}
    assert quantization["bits"] == 2.5


def test_verified_gated_planned(qwen3_pack: Built, tmp_path: Path) -> None:
    found = verify(qwen3_pack.path)
    assert (found.problems, found.experts) == ([], LAYERS * EXPERTS)
    manifest = qwen3_pack.manifest
    assert manifest["sizes"]["routed_experts"] == LAYERS * EXPERTS
    assert manifest["calibration"]["coverage"]["min"] > 0
    agentic = manifest["fidelity"]["corpora"]["agentic"]
    assert 0.001 < agentic["kl"] < 0.2
    assert agentic["top1"] > 0.6
    table = TrafficTable.load(qwen3_pack.path / TRAFFIC)
    assert (table.layers, table.top_k, table.counts.shape) == ((0, 1), 2, (LAYERS, EXPERTS))
    assert make_plan(PlanRequest(qwen3_pack.path, MACHINE, tmp_path / "plan.json")).summary["gap"] < 0.5
    assert Plan.load(tmp_path / "plan.json").layers == (0, 1)


def test_a_second_build_finds_it_done(qwen3_pack: Built) -> None:
    before = digests(qwen3_pack.path)
    assert qwen3_pack.inputs.build(qwen3_pack.path, recipe=RECIPE).already
    assert digests(qwen3_pack.path) == before


def test_a_pack_is_not_compared_with_another_architecture(qwen3_pack: Built, tiny_v41: Path) -> None:
    held_out = read_held_out(qwen3_pack.inputs.model, [qwen3_pack.inputs.held_out])
    with pytest.raises(FidelityError, match=r"different models \[.*architectures\].*DeepseekV41.*Qwen3Moe"):
        score(tiny_v41, qwen3_pack.path, held_out, 1)


def test_fused_experts_give_the_same_pack(qwen3_pack: Built, shared: Path, tmp_path: Path) -> None:
    """Names, bytes, shards; the sources differ only in how they store the experts."""
    model = cut_qwen3(shared / "models" / "tiny-qwen3-moe", tmp_path / "model", fused=True)
    replace(qwen3_pack.inputs, model=model).build(tmp_path / "pack", gate=False, recipe=RECIPE)
    assert verify(tmp_path / "pack").problems == []
    ours, theirs = Checkpoint.open(tmp_path / "pack"), Checkpoint.open(qwen3_pack.path)
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name in theirs.tensors:
        assert ours.info(name).file == theirs.info(name).file
        assert ours.bytes(name) == theirs.bytes(name), name


def test_a_damaged_pack_is_told(qwen3_pack: Built, tmp_path: Path) -> None:
    pack = qwen3_pack.copy(tmp_path)
    poke(pack, "model.layers.1.mlp.experts.2.up_proj.mul1", 0, b"\1")
    said = verify(pack).problems
    assert any("model.layers.1.mlp.experts.2.up_proj.mul1" in problem for problem in said)
    config = json.loads((pack / "config.json").read_bytes())
    (pack / "config.json").write_text(json.dumps(config | counted(2)))
    assert any("a stray tensor" in p and "experts.2." in p for p in verify(pack, quick=True).problems)
    (pack / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 1}))
    assert any("self_attn.k_proj.weight" in p and "found [128, 256]" in p for p in verify(pack, quick=True).problems)


@dataclass(frozen=True)
class Random:
    """A tiny random checkpoint of a family. moe: its layers with routed experts."""

    family: str
    moe: tuple[int, ...]
    prefix: str
    recipe: Recipe
    config: dict[str, Any] = field(default_factory=dict)


RANDOM = {
    "DeepSeek-V4 in its native names, the first layer hash-routed, two-sided": Random(
        "deepseek_v4",
        (0, 1),
        "layers.{}.ffn.experts.1.w2.",
        replace(RECIPE, two_sided=True),
        {
            "num_hidden_layers": 2,
            "n_routed_experts": 3,
            "mlp_layer_types": ["hash_moe", "moe"],
            "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
        },
    ),
    "DeepSeek-V3, the first layer dense, with adjacent tokens": Random(
        "deepseek_v3",
        (1,),
        "model.layers.{}.mlp.experts.1.down_proj.",
        replace(RECIPE, enough_tokens=1000),
        {"num_hidden_layers": 2, "n_routed_experts": 4, "n_group": 2, "topk_group": 1},
    ),
}


@pytest.mark.parametrize("name", RANDOM)
def test_other_families_build_verify_gate(name: str, qwen3: Inputs, tmp_path: Path) -> None:
    random = RANDOM[name]
    model = save_family(random.family, tmp_path / "model", vocab_size=4096, **random.config)
    for companion in COMPANIONS:
        shutil.copy(qwen3.model / companion, model)
    inputs = replace(qwen3, model=model)
    assert inspect_model(model, random.recipe)["moe_layers"] == len(random.moe)
    result = inputs.build(tmp_path / "pack", recipe=random.recipe)
    assert verify(tmp_path / "pack").problems == []
    assert inputs.build(tmp_path / "pack", recipe=random.recipe).already

    source, pack = Checkpoint.open(model), Checkpoint.open(tmp_path / "pack")
    stored = ("trellis", "suh", "svh", "mul1")
    for layer in random.moe:
        prefix = random.prefix.format(layer)
        assert [name for name in pack.tensors if name.startswith(prefix)] == [f"{prefix}{s}" for s in sorted(stored)]
        assert pack.info(f"{prefix}trellis").shape == (8, 8, 48)  # 32 and 64 channels, padded to 128
    others = {name for name, part in parts(source).items() if part != "routed experts"}
    assert source.tensors.keys() & pack.tensors.keys() == others
    assert all(pack.bytes(name) == source.bytes(name) for name in others)
    agentic = result.manifest["fidelity"]["corpora"]["agentic"]
    assert 0 < agentic["kl"] < 0.2
    plan = Plan.load(tmp_path / "pack" / "plan.json")
    assert plan.layers == random.moe
    reports = json.loads((tmp_path / "pack" / "calibration" / "experts.json").read_bytes())
    assert [row["layer"] for row in reports] == [layer for layer in random.moe for _ in range(plan.host_sizes.shape[1])]


def test_damaged_sources_are_refused(qwen3: Inputs, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.1.down_proj.weight"
    nan = qwen3.copy(tmp_path / "nan")
    poke(nan.model, name, 0, np.uint16(0x7FC0).tobytes())
    with pytest.raises(CheckpointError, match=f"NaN.*{name}"):
        nan.build(tmp_path / "nan" / "pack", gate=False, recipe=RECIPE)
    assert not (tmp_path / "nan" / "pack.partial").exists()

    other = qwen3.copy(tmp_path / "other")
    config = json.loads((other.model / "config.json").read_bytes())
    (other.model / "config.json").write_text(json.dumps(config | counted(EXPERTS + 1)))
    with pytest.raises(CheckpointError, match=r"lacks 6 of the 24 .*experts\.3\."):
        other.build(tmp_path / "other" / "pack", gate=False, recipe=RECIPE)
    (other.model / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}))
    with pytest.raises(CheckpointError, match="nearest supported one is Qwen3MoeForCausalLM"):
        other.build(tmp_path / "other" / "pack", gate=False, recipe=RECIPE)

"""Where other families than DeepSeek-V4.1 keep their routed experts: found by name, counted, refused when damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moefit.calibrate.checkpoint import Checkpoint
from moefit.calibrate.deepseek_v41.layout import Expected
from moefit.calibrate.layout import Layout, census, check_layout, expert_tensors, parts
from moefit.errors import CheckpointError

from .synthetic import write_checkpoint

HIDDEN, INTERMEDIATE, EXPERTS, LAYERS = 64, 32, 4, 3
SIZES = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_experts_per_tok": 2,
    "num_attention_heads": 2,
    "vocab_size": 96,
}
NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def config_of(architecture: str, **more: Any) -> dict[str, Any]:
    return {"architectures": [architecture]} | SIZES | more


CONFIGS = {
    "mixtral": config_of("MixtralForCausalLM", num_local_experts=EXPERTS, intermediate_size=INTERMEDIATE),
    "qwen3": config_of("Qwen3MoeForCausalLM", num_experts=EXPERTS, moe_intermediate_size=INTERMEDIATE),
    "fused": config_of("Qwen3_5MoeForCausalLM", num_experts=EXPERTS, moe_intermediate_size=INTERMEDIATE),
    "v3": config_of(
        "DeepseekV3ForCausalLM",
        n_routed_experts=EXPERTS,
        moe_intermediate_size=INTERMEDIATE,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
    ),
    "v4": config_of("DeepseekV4ForCausalLM", n_routed_experts=EXPERTS, moe_intermediate_size=INTERMEDIATE),
}


def shape(projection: str) -> tuple[int, int]:
    return (HIDDEN, INTERMEDIATE) if projection == "w2" else (INTERMEDIATE, HIDDEN)


def tensors_of(family: str) -> Expected:
    """The routed experts, and one tensor of some other parts."""
    found: Expected = {}
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for w, hugging_face in NAMES.items():
                if family == "mixtral":
                    name = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{w}.weight"
                    found[name] = ("F16", shape(w))
                elif family == "v4":  # as released: MXFP4
                    rows, columns = shape(w)
                    prefix = f"layers.{layer}.ffn.experts.{expert}.{w}"
                    found[f"{prefix}.weight"] = ("I8", (rows, columns // 2))
                    found[f"{prefix}.scale"] = ("F8_E8M0", (rows, columns // 32))
                elif family != "fused" and not (family == "v3" and layer == 0):
                    found[f"model.layers.{layer}.mlp.experts.{expert}.{hugging_face}.weight"] = ("BF16", shape(w))
        if family == "fused":
            prefix = f"model.language_model.layers.{layer}.mlp.experts"
            found[f"{prefix}.gate_up_proj"] = ("BF16", (EXPERTS, 2 * INTERMEDIATE, HIDDEN))
            found[f"{prefix}.down_proj"] = ("BF16", (EXPERTS, HIDDEN, INTERMEDIATE))
    if family == "v3":  # a dense layer before, the drafter behind
        found["model.layers.0.mlp.gate_proj.weight"] = ("BF16", (INTERMEDIATE, HIDDEN))
        found["model.layers.3.mlp.experts.0.gate_proj.weight"] = ("BF16", shape("w1"))
    return found


def written(folder: Path, family: str, tensors: Expected | None = None) -> Checkpoint:
    """Zeros, in one shard."""
    stored = {name: (*entry, None) for name, entry in (tensors or tensors_of(family)).items()}
    return Checkpoint.open(write_checkpoint(folder, {"model-00001-of-00001.safetensors": stored}, CONFIGS[family]))


@pytest.mark.parametrize("family", CONFIGS)
def test_every_experts_numbers_are_found_once(family: str, tmp_path: Path) -> None:
    checkpoint = written(tmp_path, family)
    layout = check_layout(checkpoint)
    moe = range(family == "v3", LAYERS)
    assert (layout.layers, layout.experts, layout.experts_per_token, layout.hidden) == (LAYERS, EXPERTS, 2, HIDDEN)
    assert (layout.intermediate, layout.vocabulary, layout.drafter_layers) == (INTERMEDIATE, 96, 0)
    assert layout.moe_layers == tuple(moe)
    assert layout.routed_experts == len(moe) * EXPERTS

    held = expert_tensors(checkpoint, layout)
    places = [place for places in held.values() for place in places]
    assert sorted(places) == [(layer, e, p) for layer in moe for e in range(EXPERTS) for p in ("w1", "w2", "w3")]
    assert set(held) == {name for name in tensors_of(family) if ".experts." in name and "layers.3" not in name}
    elements = HIDDEN * INTERMEDIATE * 3 * len(places) // 3
    size = {"v4": elements // 2 + elements // 32}.get(family, elements * 2)
    assert sum(census(checkpoint)["routed experts"].values()) == size


def test_names_in_a_pack(tmp_path: Path) -> None:
    """As on disk; a fused expert gets the name that it has elsewhere in its family."""
    prefixes = {
        family: check_layout(written(tmp_path / family, family)).expert_prefix(2, 3, "w3") for family in CONFIGS
    }
    assert prefixes == {
        "mixtral": "model.layers.2.block_sparse_moe.experts.3.w3",
        "qwen3": "model.layers.2.mlp.experts.3.up_proj",
        "fused": "model.language_model.layers.2.mlp.experts.3.up_proj",
        "v3": "model.layers.2.mlp.experts.3.up_proj",
        "v4": "layers.2.ffn.experts.3.w3",
    }


def test_layers_without_experts_by_step_and_list(tmp_path: Path) -> None:
    config = CONFIGS["qwen3"] | {"decoder_sparse_step": 2, "mlp_only_layers": [3], "num_hidden_layers": 6}
    found = Layout.of(Checkpoint(tmp_path, config, written(tmp_path, "qwen3").tensors, []))
    assert found.moe_layers == (1, 5)


def test_parts_of_other_families(tmp_path: Path) -> None:
    named = {
        "v4": {
            "layers.0.ffn.gate.tid2eid": "router",
            "layers.0.ffn.gate.bias": "router",
            "layers.0.ffn.shared_experts.w1.weight": "shared experts",
            "layers.0.attn.wq_a.weight": "attention",
            "layers.0.attn.indexer.wq_b.weight": "indexer/compressor",
            "layers.0.attn.compressor.norm.weight": "indexer/compressor",
            "layers.0.attn_norm.weight": "norms",
            "layers.0.hc_attn_fn": "hyper-connections",
            "hc_head_fn": "hyper-connections",
            "embed.weight": "embedding",
            "head.weight": "head",
            "norm.weight": "norms",
            "mtp.0.ffn.experts.0.w1.weight": "drafter",
        },
        "v3": {
            "model.embed_tokens.weight": "embedding",
            "model.norm.weight": "norms",
            "lm_head.weight": "head",
            "model.layers.0.mlp.gate_proj.weight": "dense MLPs",
            "model.layers.1.mlp.gate.e_score_correction_bias": "router",
            "model.layers.1.mlp.shared_experts.up_proj.weight": "shared experts",
            "model.layers.1.self_attn.kv_a_layernorm.weight": "attention",
            "model.layers.1.input_layernorm.weight": "norms",
            "model.layers.1.mlp.experts.0.gate_proj.weight": "routed experts",
            "model.layers.3.mlp.experts.0.gate_proj.weight": "drafter",
            "model.something": "other",
        },
        "fused": {
            "model.language_model.layers.0.linear_attn.A_log": "attention",
            "model.language_model.layers.0.mlp.shared_expert_gate.weight": "shared experts",
            "model.language_model.layers.0.mlp.experts.down_proj": "routed experts",
            "model.visual.blocks.0.attn.qkv.weight": "vision",
            "mtp.layers.0.mlp.experts.gate_up_proj": "drafter",
        },
    }
    for family, expected in named.items():
        tensors = tensors_of(family) | {name: ("BF16", (1,)) for name in expected if name not in tensors_of(family)}
        found = parts(written(tmp_path / family, family, tensors))
        assert {name: found[name] for name in expected} == expected


def refused(folder: Path, family: str, tensors: Expected) -> str:
    with pytest.raises(CheckpointError) as error:
        check_layout(written(folder, family, tensors))
    return str(error.value)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    tensors = tensors_of("qwen3")
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    tensors["model.layers.1.mlp.experts.4.up_proj.weight"] = ("BF16", shape("w3"))
    said = refused(tmp_path / "a", "qwen3", tensors)
    assert f"lacks 1 of the {LAYERS * EXPERTS * 3} tensors" in said
    assert "model.layers.1.mlp.experts.3.up_proj.weight]" in said
    assert "found only model.layers.1.mlp.experts.4.up_proj.weight" in said

    tensors = tensors_of("fused")
    del tensors["model.language_model.layers.2.mlp.experts.down_proj"]
    assert "lacks 1 of the 6" in refused(tmp_path / "b", "fused", tensors)
    said = refused(tmp_path / "c", "qwen3", {"model.norm.weight": ("BF16", (HIDDEN,))})
    assert "holds no routed experts under the names of its family" in said


@pytest.mark.parametrize(
    ("family", "name", "stored"),
    [
        ("qwen3", "model.layers.0.mlp.experts.1.down_proj.weight", ("BF16", (INTERMEDIATE, HIDDEN))),
        ("qwen3", "model.layers.0.mlp.experts.1.down_proj.weight", ("F8_E4M3", (HIDDEN, INTERMEDIATE))),  # no scale
        ("mixtral", "model.layers.2.block_sparse_moe.experts.0.w1.weight", ("I32", shape("w1"))),
        (
            "fused",
            "model.language_model.layers.0.mlp.experts.gate_up_proj",
            ("BF16", (EXPERTS, INTERMEDIATE, HIDDEN)),
        ),
        ("v4", "layers.1.ffn.experts.2.w2.scale", ("F8_E8M0", (HIDDEN, 2))),
        ("v4", "layers.1.ffn.experts.2.w2.weight", ("I8", (HIDDEN, INTERMEDIATE))),
    ],
)
def test_another_dtype_or_shape_is_named(
    family: str, name: str, stored: tuple[str, tuple[int, ...]], tmp_path: Path
) -> None:
    said = refused(tmp_path, family, tensors_of(family) | {name: stored})
    assert "another dtype or shape" in said
    assert name.removesuffix("scale") in said


def test_a_tensor_that_nobody_understands_is_not_dropped(tmp_path: Path) -> None:
    """DeepSeek-V3's own FP8 has float32 scales of 128x128 blocks: not decoded, so not silently ignored either."""
    name = "model.layers.1.mlp.experts.0.gate_proj.weight_scale_inv"
    said = refused(tmp_path, "v3", tensors_of("v3") | {name: ("F32", (1, 1))})
    assert "1 tensor(s) that are not understood" in said
    assert name in said


def test_more_experts_than_promised_are_counted(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.0.gate_proj.weight"
    tensors = tensors_of("v3")
    beyond = name.replace("experts.0", "experts.99")
    said = refused(tmp_path, "v3", tensors | {beyond: tensors[name]})
    assert beyond in said and "expected experts 0 to " in said and "config.json and shards of the same release" in said

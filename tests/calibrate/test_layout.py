"""Names, dtypes and shapes of the family, against the real model's published figures and the example."""

from __future__ import annotations

import copy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from moefit.calibrate.checkpoint import Checkpoint
from moefit.calibrate.deepseek_v41.layout import drafter_expert_prefix, expected_tensors, expert_prefix, part_of
from moefit.calibrate.layout import ARCHITECTURES, PARTS, Layout, census, check_layout
from moefit.errors import CheckpointError

from .synthetic import REAL_CONFIG, header_only


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek-V4.1-Flash from headers alone: 48 shards, 510 GB of holes."""
    return header_only(tmp_path_factory.mktemp("real-v41"), REAL_CONFIG)


def test_real_model_to_the_byte(real: Path) -> None:
    """Published: 48 shards, 96,085 tensors, the payload, and the bytes of each group."""
    checkpoint = Checkpoint.open(real)
    layout = check_layout(checkpoint)
    assert (layout.layers, layout.experts, layout.drafter_layers, layout.drafter_experts) == (40, 384, 3, 128)
    assert len(checkpoint.shards) == 48
    assert len(checkpoint.tensors) == 96_085

    table = {part: sum(row.values()) for part, row in census(checkpoint).items()}
    assert tuple(table) == tuple(part for part in PARTS if part not in ("dense MLPs", "other"))
    assert sum(table.values()) == 510_286_023_000
    assert table["routed experts"] == 288_777_830_400
    assert table["drafter experts"] == 7_219_445_760
    assert table["drafter experts"] + table["drafter"] == 7_932_874_632
    assert table["engram tables"] == 202_758_032_400
    apart = ("routed experts", "drafter experts", "drafter", "engram tables")
    assert sum(size for part, size in table.items() if part not in apart) == 10_817_285_568
    # Vision names are the fixture's, not the layout's: this is what the published totals leave for them.
    assert table["vision"] == 970_536_960

    dtypes: dict[str, int] = {}
    for row in census(checkpoint).values():
        for dtype, size in row.items():
            dtypes[dtype] = dtypes.get(dtype, 0) + size
    rounded = {dtype: round(size / 1e9, 2) for dtype, size in dtypes.items()}
    assert rounded == {"I8": 278.59, "F8_E4M3": 204.02, "F8_E8M0": 23.56, "BF16": 3.95, "F32": 0.17}
    one = sum(
        checkpoint.info(f"{expert_prefix(0, 0, projection)}.{suffix}").nbytes
        for projection in ("w1", "w2", "w3")
        for suffix in ("weight", "scale")
    )
    assert one == 18_800_640


def test_real_model_opens_quickly_in_little_memory(real: Path) -> None:
    """In a process of its own, so that the peak is this and nothing else."""
    code = (
        "import re, sys; from pathlib import Path\n"
        "from moefit.calibrate.checkpoint import Checkpoint, source_identity\n"
        "from moefit.calibrate.layout import check_layout\n"
        "checkpoint = Checkpoint.open(Path(sys.argv[1]))\n"
        "check_layout(checkpoint)\n"
        "source_identity(checkpoint)\n"
        # ru_maxrss would count this process's own peak too
        "print(re.search(r'VmHWM:\\s*(\\d+)', Path('/proc/self/status').read_text())[1])"
    )
    start = time.monotonic()
    run = subprocess.run([sys.executable, "-c", code, str(real)], capture_output=True, text=True, check=True)
    assert time.monotonic() - start < 60  # seconds; about 5 on two cores
    assert int(run.stdout) * 1024 < 500e6


def test_example_is_accepted_exactly(tiny_v41: Path) -> None:
    checkpoint = Checkpoint.open(tiny_v41)
    assert check_layout(checkpoint) == Layout(6, 32, 4, 256, 128, 4096, 1, 16, (0, 1, 2, 3, 4, 5))
    expected = expected_tensors(checkpoint.config)
    assert expected == {name: (info.dtype, info.shape) for name, info in checkpoint.tensors.items()}
    assert sum(sum(row.values()) for row in census(checkpoint).values()) == 21_229_292  # the index's total_size


def small_config(tiny_v41: Path) -> dict[str, Any]:
    """The example's config with two layers of two experts and no drafter."""
    config = copy.deepcopy(Checkpoint.open(tiny_v41).config)
    config["text_config"] |= {
        "num_hidden_layers": 2,
        "n_routed_experts": 2,
        "num_nextn_predict_layers": 0,
        "engram_layer_ids": [1],
        "kv_source_layer_ids": [1],
        "index_source_layer_ids": [1],
    }
    return config


def test_missing_tensor_is_named(tiny_v41: Path, tmp_path: Path) -> None:
    config = small_config(tiny_v41)
    tensors = expected_tensors(config)
    del tensors["layers.1.ffn.experts.1.w2.scale"]
    checkpoint = Checkpoint.open(header_only(tmp_path, config, tensors))
    with pytest.raises(CheckpointError, match=r"lacks 1 of .* \[.*layers\.1\.ffn\.experts\.1\.w2\.scale\]"):
        check_layout(checkpoint)


def test_renamed_tensor_is_suggested(tiny_v41: Path, tmp_path: Path) -> None:
    config = small_config(tiny_v41)
    tensors = expected_tensors(config)
    tensors["layers.0.attention.wkv.weight"] = tensors.pop("layers.0.attn.wkv.weight")
    checkpoint = Checkpoint.open(header_only(tmp_path, config, tensors))
    with pytest.raises(CheckpointError, match=r"found only layers\.0\.attention\.wkv\.weight"):
        check_layout(checkpoint)


@pytest.mark.parametrize(
    ("stored", "found"),
    [
        (("BF16", (64, 256)), r"expected F8_E4M3 \[64, 256\], found BF16 \[64, 256\]"),
        (("F8_E4M3", (64, 128)), r"expected F8_E4M3 \[64, 256\], found F8_E4M3 \[64, 128\]"),
    ],
)
def test_wrong_dtype_and_shape(tiny_v41: Path, tmp_path: Path, stored: tuple[str, tuple[int, ...]], found: str) -> None:
    config = small_config(tiny_v41)
    tensors = expected_tensors(config) | {"layers.0.attn.wkv.weight": stored}
    checkpoint = Checkpoint.open(header_only(tmp_path, config, tensors))
    with pytest.raises(CheckpointError, match=r"layers\.0\.attn\.wkv\.weight\]: " + found):
        check_layout(checkpoint)


@pytest.mark.parametrize("name", ["layers.0.attn.extra.weight", "vision.norm.weight", "layers.0.ffn.tid2eid"])
def test_unexpected_tensor(tiny_v41: Path, tmp_path: Path, name: str) -> None:
    config = small_config(tiny_v41)
    checkpoint = Checkpoint.open(header_only(tmp_path, config, expected_tensors(config) | {name: ("BF16", (8,))}))
    with pytest.raises(CheckpointError, match=f"does not promise .*{name}"):
        check_layout(checkpoint)


def test_vision_is_allowed_with_a_vision_config(tiny_v41: Path, tmp_path: Path) -> None:
    config = small_config(tiny_v41) | {"vision_config": {"hidden_size": 8}}
    tensors = expected_tensors(config) | {"vision.norm.weight": ("BF16", (8,))}
    checkpoint = Checkpoint.open(header_only(tmp_path, config, tensors))
    check_layout(checkpoint)
    assert census(checkpoint)["vision"] == {"BF16": 16}


def test_parts_and_names(tiny_v41: Path) -> None:
    assert expert_prefix(3, 7, "w1") == "layers.3.ffn.experts.7.w1"
    assert drafter_expert_prefix(0, 7, "w2") == "mtp.0.ffn.experts.7.w2"
    parts = {part_of(name) for name in Checkpoint.open(tiny_v41).tensors}
    assert parts == set(PARTS) - {"dense MLPs", "other", "vision"}
    assert part_of("layers.1.engram.embed.scale") == "engram tables"
    assert part_of("layers.2.attn.indexer.wq_b.weight") == "indexer/compressor"
    assert part_of("mtp.0.ffn.shared_experts.w1.weight") == "drafter"
    for name in ("model.embed_tokens.weight", "layers.x.attn.wkv.weight", "layers.0.mlp.w1.weight", ""):
        with pytest.raises(CheckpointError, match="no known part"):
            part_of(name)


def test_unsupported_architecture_is_refused_by_name(tiny_v41: Path) -> None:
    checkpoint = Checkpoint.open(tiny_v41)
    for found, mend in (
        (["DeepseekV42ForCausalLM"], "nearest supported one is DeepseekV4"),
        (["Qwen3ForCausalLM"], "nearest supported one is Qwen3MoeForCausalLM"),
        (["LlavaModel"], "supported"),
        ([], "supported"),
        (None, "supported"),
        (7, "supported"),
    ):
        checkpoint.config["architectures"] = found
        with pytest.raises(CheckpointError, match="not supported") as error:
            check_layout(checkpoint)
        assert all(name in str(error.value) for name in ARCHITECTURES)
        assert mend in str(error.value)


def test_config_values_are_checked(tiny_v41: Path) -> None:
    for key, value in (
        ("n_routed_experts", None),
        ("hidden_size", 256.0),
        ("num_hidden_layers", 0),
        ("compress_ratios", [0]),
        ("kv_source_layer_ids", "2"),
        ("n_routed_experts", True),
    ):
        config = small_config(tiny_v41)
        config["text_config"][key] = value
        with pytest.raises(CheckpointError, match=rf"text_config\.{key}"):
            expected_tensors(config)
    config = small_config(tiny_v41)
    config["quantization_config"]["weight_block_size"] = [128, 128]
    with pytest.raises(CheckpointError, match=r"weight_block_size.*expected \[32, 32\], found \[128, 128\]"):
        expected_tensors(config)
    del config["quantization_config"]
    with pytest.raises(CheckpointError, match="quantization_config"):
        expected_tensors(config)

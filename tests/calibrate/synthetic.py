"""Checkpoints made for tests: small ones to damage, and the real model's headers over sparse files.

Header-only shards take no disk: the header is written and the file is truncated to its full length, so
reading any tensor gives zeros.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moefit.calibrate.checkpoint import DTYPES, INDEX
from moefit.calibrate.deepseek_v41.layout import Expected, expected_tensors

Stored = dict[str, tuple[str, tuple[int, ...], bytes | None]]
"""Tensor name -> (dtype code, shape, data); None leaves a hole of zeros."""

REAL_CONFIG: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "benchmarks" / "deepseek_v41_flash.json").read_text()
)
"""DeepSeek-V4.1-Flash's released values that decide names, shapes and arithmetic."""


def vision_tensors(config: dict[str, Any]) -> Expected:
    """The vision tower, its aligner and the three image marks, all BF16.

    moefit never reads these. With these names and shapes the real model has its published 96,085 tensors and
    510,286,023,000 bytes.
    """
    vision, hidden = config["vision_config"], config["text_config"]["hidden_size"]
    width, inner = vision["hidden_size"], vision["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "vision.patch_embed.proj.weight": (width, 3 * vision["patch_size"] ** 2),
        "vision.patch_embed.proj.bias": (width,),
        "vision.norm.weight": (width,),
        "aligner.w1.weight": (hidden, width * vision["downsample_ratio"] ** 2),
        "aligner.w1.bias": (hidden,),
        "aligner.w2.weight": (hidden, hidden),
        "aligner.w2.bias": (hidden,),
    } | {f"image_{mark}": (hidden,) for mark in ("start", "end", "newline")}
    for block in range(vision["num_hidden_layers"]):
        prefix = f"vision.blocks.{block}"
        shapes |= {
            f"{prefix}.norm1.weight": (width,),
            f"{prefix}.attn.wqkv.weight": (3 * width, width),
            f"{prefix}.attn.wqkv.bias": (3 * width,),
            f"{prefix}.attn.wo.weight": (width, width),
            f"{prefix}.attn.wo.bias": (width,),
            f"{prefix}.norm2.weight": (width,),
            f"{prefix}.mlp.w1.weight": (2 * inner, width),
            f"{prefix}.mlp.w2.weight": (width, inner),
        }
    return {name: ("BF16", shape) for name, shape in shapes.items()}


def shard_of(name: str, config: dict[str, Any]) -> int:
    """A tensor's shard number, as in the release: 3 + N for layer N, then head, drafter, Engram tables."""
    text = config["text_config"]
    layers, drafters = text["num_hidden_layers"], text.get("num_nextn_predict_layers", 0)
    if name == "embed.weight":
        return 1
    if name in ("norm.weight", "head.weight"):
        return layers + 3
    start, _, rest = name.partition(".")
    if start == "mtp":
        return layers + 4 + int(rest.split(".")[0])
    if start == "layers":
        layer = int(rest.split(".")[0])
        if ".engram.embed." in name:
            return layers + 4 + drafters + text["engram_layer_ids"].index(layer)
        return 3 + layer
    return 2


def header_only(folder: Path, config: dict[str, Any], tensors: Expected | None = None) -> Path:
    """A checkpoint of `config` with sparse data, sharded as the release is.

    tensors: what to store (default: all that the config promises, with vision where it has a vision_config).
    """
    if tensors is None:
        tensors = expected_tensors(config) | (vision_tensors(config) if "vision_config" in config else {})
    shards: dict[int, Stored] = {}
    for name, (dtype, shape) in tensors.items():
        shards.setdefault(shard_of(name, config), {})[name] = (dtype, shape, None)
    names = {f"model-{number:05d}-of-{max(shards):05d}.safetensors": shards[number] for number in sorted(shards)}
    return write_checkpoint(folder, names, config)


def write_checkpoint(folder: Path, shards: dict[str, Stored], config: dict[str, Any]) -> Path:
    """Shards, index and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, tensors in shards.items():
        write_shard(folder / file, tensors)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_shard(path: Path, tensors: Stored) -> None:
    """One safetensors file, written without the safetensors library."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, _) in tensors.items():
        start, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for name, (_, _, data) in tensors.items():
            if data is not None:
                file.seek(8 + len(raw) + header[name]["data_offsets"][0])
                file.write(data)
        file.truncate(8 + len(raw) + end)


def edit_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a shard's header and keep its data."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    new = json.dumps(header).encode()
    path.write_bytes(len(new).to_bytes(8, "little") + new + raw[8 + length :])


def small(folder: Path, seed: int = 0) -> Path:
    """Two shards with one finite tensor of every kind: MXFP4, FP8 blocks, FP8 rows, BF16, F16, F32."""
    rng = np.random.default_rng(seed)

    def data(*shape: int, below: int = 256) -> bytes:
        return rng.integers(0, below, shape, np.uint8).tobytes()

    def scales(*shape: int) -> bytes:
        return rng.integers(110, 140, shape, np.uint8).tobytes()

    numbers = rng.standard_normal((6, 40)).astype(np.float32)
    one: Stored = {
        "expert.weight": ("I8", (12, 32), data(12, 32)),
        "expert.scale": ("F8_E8M0", (12, 2), scales(12, 2)),
        "dense.weight": ("F8_E4M3", (70, 48), data(70, 48, below=0x7F)),
        "dense.scale": ("F8_E8M0", (3, 2), scales(3, 2)),
    }
    two: Stored = {
        "table.weight": ("F8_E4M3", (50, 64), data(50, 64, below=0x7F)),
        "table.scale": ("F8_E8M0", (50, 2), scales(50, 2)),
        "norm.weight": ("BF16", (6, 40), (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()),
        "half.weight": ("F16", (6, 40), numbers.astype(np.float16).tobytes()),
        "sink": ("F32", (6, 40), numbers.tobytes()),
        "scalar": ("F32", (), np.float32(2.5).tobytes()),
    }
    return write_checkpoint(folder, {"a.safetensors": one, "b.safetensors": two}, {"architectures": ["Toy"]})


def random_v41(folder: Path, example: Path, seed: int = 0, **text: Any) -> Path:
    """A DeepSeek-V4.1 checkpoint of untrained weights with every kind of layer, narrow enough for a slow oracle.

    Everything that selects does so within 100 tokens: index_topk 6, candidates 16 of up to T latents, a sliding window
    of 8, YaRN from 32 positions on. Many index heads, so that no latent's score is exactly 0 and no choice is a tie.
    example: examples/tiny-v41, for its tokenizer. text: other values for text_config.
    """
    config = json.loads((example / "config.json").read_text())
    config["text_config"] |= {
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 7,
        "num_nextn_predict_layers": 0,
        "num_attention_heads": 4,
        "head_dim": 32,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 32,
        "o_lora_rank": 16,
        "o_groups": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "compress_ratios": [0, 2, 2, 1, 1, 1, 1],
        "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 3, 4, 6],
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 6,
        "candidate_source_layer_id": 3,
        "candidate_topk_blocks": 4,
        "candidate_block_size": 4,
        "engram_layer_ids": [1, 5],
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "engram_vocab_size": 50,
        "engram_num_embeddings": [384, 552],  # sums of six primes each, from 53 on
    }
    config["text_config"]["rope_scaling"]["original_max_position_embeddings"] = 32
    config["text_config"] |= text
    rng = np.random.default_rng(seed)
    tensors: Stored = {}
    for name, (dtype, shape) in expected_tensors(config).items():
        normal = rng.standard_normal(shape).astype(np.float32)
        if dtype == "F8_E8M0":  # weights then have a variance of about 1 / columns
            power = 122 if ".ffn.experts." in name else 124
            data = rng.integers(power - 1, power + 1, shape, np.uint8)
        elif dtype == "I8":
            data = rng.integers(0, 256, shape, np.uint8)
        elif dtype == "F8_E4M3":
            data = torch.from_numpy(normal).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        else:
            if name.endswith(("norm.weight", "q_weight", "k_weight", "_scale")):
                data = 1 + 0.2 * normal
            elif name.endswith(("bias", "bias_vl")):
                data = 0.1 * normal
            elif len(shape) == 2 and name != "embed.weight":
                data = normal / np.float32(shape[-1]) ** 0.5
            else:
                data = normal
            if dtype == "BF16":
                data = (data.view(np.uint32) >> 16).astype(np.uint16)
        tensors[name] = (dtype, shape, np.ascontiguousarray(data).tobytes())
    write_checkpoint(folder, {"model.safetensors": tensors}, config)
    shutil.copy(example / "tokenizer.json", folder)
    return folder

"""Captures as the engines write them, from known routing: real torch, NumPy, base64 and JSON; GGUF by its layout."""

from __future__ import annotations

import base64
import io
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moefit.placement.captures import MoeShape


def random_ids(shape: MoeShape, tokens: int, seed: int = 0) -> np.ndarray:
    """int64 [tokens, L, top_k]: a different set of experts in every row, never all zero."""
    noise = np.random.default_rng(seed).random((tokens, len(shape.layers), shape.experts))
    return noise.argsort(axis=2)[:, :, : shape.top_k]


def plain_counts(ids: np.ndarray, experts: int) -> np.ndarray:
    """int64 [L, E], by loops."""
    counts = np.zeros((ids.shape[1], experts), dtype=np.int64)
    for row in ids.tolist():
        for layer, chosen in enumerate(row):
            for expert in chosen:
                counts[layer, expert] += 1
    return counts


def all_layers(values: np.ndarray, shape: MoeShape, axis: int, fill: int = 0) -> np.ndarray:
    """The same on an axis of every decoder layer, the dense ones holding `fill`."""
    sizes = list(values.shape)
    sizes[axis] = shape.hidden_layers
    whole = np.full(sizes, fill, dtype=values.dtype)
    index: list[Any] = [slice(None)] * values.ndim
    index[axis] = list(shape.layers)
    whole[tuple(index)] = values
    return whole


def npy_base64(ids: np.ndarray, dtype: str = "uint16") -> str:
    """vLLM 0.22 and later."""
    file = io.BytesIO()
    np.save(file, ids.astype(dtype), allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def raw_base64(ids: np.ndarray, dtype: str = "int32") -> str:
    """SGLang: int32 without a header."""
    return base64.b64encode(np.ascontiguousarray(ids, dtype=dtype).tobytes()).decode()


def usage(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    details = {"cached_tokens": cached} if cached else None
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": details,
    }


def vllm_answer(ids: np.ndarray, prompt: int, cached: int = 0, routed: Any = None) -> dict[str, Any]:
    """A chat completion of vLLM 0.22 and later: a row per token but the last sampled one."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant"},
                "routed_experts": npy_base64(ids) if routed is None else routed,
            }
        ],
        "usage": usage(prompt, len(ids) + 1 - prompt, cached),
    }


def vllm_021_answer(ids: np.ndarray, prompt: int) -> dict[str, Any]:
    return {
        "choices": [{"index": 0, "routed_experts": ids[prompt:].tolist()}],
        "prompt_routed_experts": ids[:prompt].tolist(),
        "usage": usage(prompt, len(ids) - prompt),
    }


def sglang_answer(ids: np.ndarray, shape: MoeShape, prompt: int, cached: int = 0) -> dict[str, Any]:
    """What /generate answers; every decoder layer is in it."""
    return {
        "text": "",
        "meta_info": {
            "routed_experts": raw_base64(all_layers(ids, shape, 1)),
            "prompt_tokens": prompt,
            "completion_tokens": len(ids) + 1 - prompt,
            "cached_tokens": cached,
        },
    }


def json_lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def sglang_stat(path: Path, counts: np.ndarray, shape: MoeShape) -> Path:
    """counts: [steps, L, E]; two unused steps of the ring buffer follow."""
    whole = all_layers(counts, shape, 1)
    whole = np.concatenate([whole, np.zeros_like(whole[:1]), np.zeros_like(whole[:1])])
    value = {
        "rank": 0,
        "logical_count": torch.tensor(whole, dtype=torch.int32),
        "average_utilization_rate_over_window": None,
    }
    torch.save(value, path)
    return path


def expert_map(shape: MoeShape, replicas: int, seed: int = 0) -> np.ndarray:
    """int64 [hidden layers, E + replicas]: physical to logical, shuffled, with redundant copies."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(shape.hidden_layers):
        row = np.concatenate([np.arange(shape.experts), rng.integers(0, shape.experts, replicas)])
        rows.append(rng.permutation(row))
    return np.array(rows)


def physical_ids(ids: np.ndarray, mapping: np.ndarray, shape: MoeShape, seed: int = 0) -> np.ndarray:
    """Some physical copy of each logical id: [tokens, L, k]."""
    rng = np.random.default_rng(seed)
    physical = np.empty_like(ids)
    for place, expert in np.ndenumerate(ids):
        copies = np.flatnonzero(mapping[shape.layers[place[1]]] == expert)
        physical[place] = rng.choice(copies)
    return physical


def sglang_records(
    path: Path, steps: list[tuple[int, np.ndarray]], shape: MoeShape, mapping: np.ndarray, per_token: bool
) -> Path:
    """steps: (forward mode, logical ids [tokens, L, k]) per forward pass."""
    records = []
    for number, (mode, ids) in enumerate(steps):
        physical = physical_ids(ids, mapping, shape, number)  # [T, L, k]
        rows = np.full((shape.hidden_layers, len(ids), 8), -1, dtype=np.int32)
        rows[list(shape.layers), :, : shape.top_k] = physical.transpose(1, 0, 2)
        counts = np.zeros(mapping.shape, dtype=np.int32)
        for layer, row in enumerate(rows):
            np.add.at(counts[layer], row[row >= 0], 1)
        record: dict[str, Any] = {"forward_pass_id": number, "rank": 0, "gatherer_key": "primary"}
        if per_token:
            record |= {
                "input_ids": list(range(len(ids))),
                "positions": list(range(len(ids))),
                "extend_seq_lens": [len(ids)] if mode == 1 else None,
                "forward_mode": mode,
                "topk_ids_of_layer": torch.tensor(rows),
                "misc_objects": [],
            }
        records.append(record | {"global_physical_count": torch.tensor(counts)})
    torch.save({"records": records, "last_physical_to_logical_map": torch.tensor(mapping)}, path)
    return path


def exl3_stats(path: Path, decode: np.ndarray, prefill: np.ndarray, shape: MoeShape) -> Path:
    """decode, prefill: [L, E]."""
    pairs = np.stack([decode, prefill], axis=1).astype(np.float64)
    names = [f"language_model.model.layers.{layer}.ffn.experts" for layer in shape.layers]
    torch.save({name: torch.tensor(pair) for name, pair in zip(names, pairs, strict=True)}, path)
    return path


def gguf_bytes(tensors: dict[str, np.ndarray], kind: str = "imatrix", version: int = 3) -> bytes:
    """A GGUF file with llama-imatrix's keys. tensors: float32; ggml's dimensions are NumPy's, reversed."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), 4)
    head += text("general.type") + struct.pack("<I", 8) + text(kind)
    head += text("imatrix.datasets") + struct.pack("<IIQ", 9, 8, 1) + text("calibration.txt")
    head += text("imatrix.chunk_count") + struct.pack("<II", 4, 1)
    head += text("imatrix.chunk_size") + struct.pack("<II", 4, 512)
    body = b""
    for name, tensor in tensors.items():
        sizes = tensor.shape[::-1]
        head += text(name) + struct.pack("<I", len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes)
        head += struct.pack("<IQ", 0, len(body))
        body += tensor.astype("<f4").tobytes()
        body += b"\0" * (-len(body) % 32)
    return head + b"\0" * (-len(head) % 32) + body


def imatrix_tensors(counts: np.ndarray, shape: MoeShape) -> dict[str, np.ndarray]:
    """What llama-imatrix stores of [L, E] counts, by name in order, with sums of one column and a dense weight."""
    tensors: dict[str, np.ndarray] = {}
    for layer, row in zip(shape.layers, counts, strict=True):
        for part in ("down", "gate", "up"):
            name = f"blk.{layer}.ffn_{part}_exps.weight"
            tensors[f"{name}.in_sum2"] = np.ones((len(row), 1), dtype=np.float32)
            tensors[f"{name}.counts"] = row.astype(np.float32)[:, None]
    tensors["blk.0.attn_q.weight.in_sum2"] = np.ones((1, 4), dtype=np.float32)
    tensors["blk.0.attn_q.weight.counts"] = np.ones((1, 1), dtype=np.float32)
    return dict(sorted(tensors.items()))

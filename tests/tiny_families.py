"""Tiny random checkpoints of every supported transformers family, written as transformers itself writes them.

Every parameter and stored buffer is random, also those that training starts at zero or one, so that none can be read
wrongly and still fit. Sliding windows and compression are far shorter than the tests' windows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, logging

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "num_experts_per_tok": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_hidden_layers": 2, "intermediate_size": 32, "num_local_experts": 6, "sliding_window": 16},
    "olmoe": {"num_hidden_layers": 2, "intermediate_size": 32, "num_experts": 6},
    "qwen2_moe": {
        "num_hidden_layers": 4,
        "decoder_sparse_step": 2,  # layers 1 and 3
        "intermediate_size": 48,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "num_experts": 6,
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 3,
    },
    "qwen3_moe": {
        "num_hidden_layers": 2,
        "moe_intermediate_size": 32,
        "num_experts": 6,
        "head_dim": 16,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
    },
    "deepseek_v3": {
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "intermediate_size": 48,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_key_value_heads": 4,
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    "glm4_moe": {
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "intermediate_size": 48,
        "moe_intermediate_size": 32,
        "n_routed_experts": 6,
        "head_dim": 16,
        "use_qk_norm": True,
        "attention_bias": True,
        "routed_scaling_factor": 1.5,
    },
    "qwen3_5_moe_text": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 6,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "deepseek_v4": {
        "num_hidden_layers": 4,
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "rope_parameters": YARN,
        "moe_intermediate_size": 32,
        "n_routed_experts": 6,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "hc_mult": 2,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 3,  # of up to 17 compressed positions
        "sliding_window": 8,
        "swiglu_limit": 0.5,  # small enough to clamp
        "partial_rotary_factor": 0.5,
    },
}
"""Model type of transformers -> its configuration."""


def save_family(family: str, folder: Path, *, max_shard_size: str = "1GB", **changes: Any) -> Path:
    """Write a random checkpoint of a family, float32. changes: to its configuration."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    config = AutoConfig.for_model(family, **COMMON | FAMILIES[family] | changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model, config)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if family == "deepseek_v4":
        rewrite(folder, native_v4)
    return folder


def randomize(model: torch.nn.Module, config: Any) -> None:
    """Overwrite all that is stored. Matrices keep the size of their input, vectors lie around what they start from."""
    rng = torch.Generator().manual_seed(0)
    for name, tensor in model.state_dict().items():
        if name.endswith("tid2eid"):
            scores = torch.rand(len(tensor), config.n_routed_experts, generator=rng)
            tensor.copy_(scores.topk(config.num_experts_per_tok).indices)
        elif tensor.dim() > 1:
            tensor.normal_(0.0, 1.5 * tensor.shape[-1] ** -0.5, generator=rng)
        else:
            tensor.add_(torch.randn(tensor.shape, generator=rng), alpha=0.1)


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Change the tensors of a checkpoint of one shard."""
    file = folder / "model.safetensors"
    tensors = change(load_file(file))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)


def reconfigure(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(change(json.loads(file.read_text())), indent=2))


def native_v4(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names of DeepSeek-V4's release, where transformers saves a mixture of those and its own."""
    whole = {
        "model.embed_tokens.weight": "embed.weight",
        "model.hc_head.hc_fn": "hc_head_fn",
        "model.hc_head.hc_base": "hc_head_base",
        "model.hc_head.hc_scale": "hc_head_scale",
    }
    names = {name: whole.get(name, name.removeprefix("model.")) for name in tensors}
    return {names[name].replace(".attn.norm.", ".attn.kv_norm."): tensor for name, tensor in tensors.items()}


def fuse(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """All experts of a layer in two tensors, as Qwen3.5-MoE has them: gate_up_proj [E, 2I, H], down_proj [E, H, I]."""
    rest = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    prefixes = sorted({name.split("experts.")[0] + "experts." for name in tensors if ".mlp.experts." in name})
    for prefix in prefixes:
        experts = range(sum(name.startswith(prefix) and name.endswith("gate_proj.weight") for name in tensors))

        def stack(projection: str, prefix: str = prefix, experts: range = experts) -> Tensor:
            return torch.stack([tensors[f"{prefix}{expert}.{projection}.weight"] for expert in experts])

        rest[f"{prefix}gate_up_proj"] = torch.cat([stack("gate_proj"), stack("up_proj")], 1)
        rest[f"{prefix}down_proj"] = stack("down_proj")
    return rest

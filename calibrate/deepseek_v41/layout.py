"""What DeepSeek-V4.1 stores: tensor names, dtypes and shapes, all derived from `config.json`."""

from __future__ import annotations

import difflib
from typing import Any

from ...errors import CheckpointError
from ..checkpoint import Checkpoint
from ..decode import GROUP

ARCHITECTURE = "DeepseekV41ForCausalLM"

Expected = dict[str, tuple[str, tuple[int, ...]]]
"""Tensor name -> (safetensors dtype code, shape)."""

VISION = ("vision.", "aligner.", "image_")
"""How names of vision tensors begin."""


def expert_prefix(layer: int, expert: int, projection: str) -> str:
    """`layers.3.ffn.experts.7.w1`; `.weight` and `.scale` follow. Projections: w1 gate, w2 down, w3 up."""
    return f"layers.{layer}.ffn.experts.{expert}.{projection}"


def drafter_expert_prefix(layer: int, expert: int, projection: str) -> str:
    """`mtp.0.ffn.experts.7.w1`: of the drafter (DSpark)."""
    return f"mtp.{layer}.ffn.experts.{expert}.{projection}"


def part_of(name: str) -> str:
    """Which of `calibrate.layout.PARTS` a tensor belongs to; CheckpointError for a name of no part."""
    if name.startswith(VISION):
        return "vision"
    if name.startswith("mtp."):
        return "drafter experts" if ".ffn.experts." in name else "drafter"
    whole = {"embed.weight": "embedding", "head.weight": "head", "norm.weight": "norms"}
    if name in whole:
        return whole[name]
    start, _, rest = name.partition(".")
    number, _, rest = rest.partition(".")
    if start == "layers" and number.isdecimal():
        for prefix, part in _LAYER_PARTS:
            if rest.startswith(prefix):
                return part
    raise CheckpointError(
        "a tensor of no known part",
        where=name,
        found=f"expected a name of {ARCHITECTURE}",
        mend="check that the tensor belongs to this checkpoint",
    )


# The first prefix that fits decides, so the narrower one stands first.
_LAYER_PARTS = (
    ("ffn.experts.", "routed experts"),
    ("ffn.shared_experts.", "shared experts"),
    ("ffn.gate.", "router"),
    ("attn.compressor.", "indexer/compressor"),
    ("attn.indexer.", "indexer/compressor"),
    ("attn.", "attention"),
    ("hc_", "hyper-connections"),
    ("attn_norm.", "norms"),
    ("ffn_norm.", "norms"),
    ("engram.embed.", "engram tables"),
    ("engram.", "engram"),
)


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The `text_config`; CheckpointError where there is none, or the weights are not stored as in the release."""
    storage = config.get("quantization_config")
    for key, value in {
        "weight_block_size": [GROUP, GROUP],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    }.items():
        if not isinstance(storage, dict) or storage.get(key) != value:
            raise CheckpointError(
                "the weights are not stored as in the original release",
                where=f"config.json, quantization_config.{key}",
                found=f"expected {value}, found {storage.get(key) if isinstance(storage, dict) else storage}",
                mend="start from the original release: MXFP4 experts, FP8 32x32 blocks",
            )
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError(
            "config.json has no text_config",
            where="config.json",
            mend="download config.json from the original release",
        )
    for key in ("hidden_size", "moe_intermediate_size"):
        if count(text, key) % GROUP:
            raise _config_error(key, f"expected a multiple of {GROUP} (an MXFP4 scale's columns), found {text[key]}")
    return text


def count(text: dict[str, Any], key: str, least: int = 1) -> int:
    """An integer of the text config, at least `least`."""
    value = text.get(key)
    if type(value) is not int or value < least:
        raise _config_error(key, f"expected an integer of at least {least}, found {value!r:.60}")
    return value


def drafter_layers(text: dict[str, Any]) -> int:
    """0 where there is no drafter."""
    return count(text, "num_nextn_predict_layers", least=0) if "num_nextn_predict_layers" in text else 0


def counts(text: dict[str, Any], key: str, length: int = 0) -> list[int]:
    """A list of non-negative integers of the text config, with at least `length` entries."""
    value = text.get(key)
    if not isinstance(value, list) or len(value) < length or any(type(n) is not int or n < 0 for n in value):
        raise _config_error(key, f"expected a list of {length or 'any number of'} counts, found {value!r:.60}")
    return value


def _config_error(key: str, found: str) -> CheckpointError:
    return CheckpointError(
        "a config value is missing or wrong",
        where=f"config.json, text_config.{key}",
        found=found,
        mend="download config.json from the original release",
    )


def expected_tensors(config: dict[str, Any]) -> Expected:
    """Every tensor of the text backbone and the drafter, in the order of the original shards.

    Source: the header census of the original release; the sums over it are tested to the byte.
    Raises CheckpointError for a size that is missing or no count, and as `text_config` does.
    """
    text = text_config(config)
    layers, hidden, vocabulary = (count(text, key) for key in ("num_hidden_layers", "hidden_size", "vocab_size"))
    drafters = drafter_layers(text)
    expected: Expected = {"embed.weight": ("BF16", (vocabulary, hidden))}
    for layer in range(layers):
        expected |= _block(text, f"layers.{layer}", count(text, "n_routed_experts"), layer)
    expected["norm.weight"] = ("BF16", (hidden,))
    expected["head.weight"] = ("BF16", (vocabulary, hidden))
    for layer in range(drafters):
        expected |= _block(text, f"mtp.{layer}", count(text, "dspark_n_routed_experts"), None)
    return expected | (_drafter_ends(text, drafters) if drafters else {})


def _fp8(prefix: str, rows: int, columns: int) -> Expected:
    return {
        f"{prefix}.weight": ("F8_E4M3", (rows, columns)),
        f"{prefix}.scale": ("F8_E8M0", (-(-rows // GROUP), -(-columns // GROUP))),
    }


def _mxfp4(prefix: str, rows: int, columns: int) -> Expected:
    return {
        f"{prefix}.weight": ("I8", (rows, columns // 2)),
        f"{prefix}.scale": ("F8_E8M0", (rows, columns // GROUP)),
    }


def _bf16(name: str, *shape: int) -> Expected:
    return {name: ("BF16", shape)}


def _block(text: dict[str, Any], prefix: str, experts: int, layer: int | None) -> Expected:
    """One decoder block. `layer` is its number in the backbone, None in the drafter."""
    hidden, intermediate = count(text, "hidden_size"), count(text, "moe_intermediate_size")
    copies = count(text, "hc_mult")
    block = _attention(text, f"{prefix}.attn", layer)
    for name in ("attn", "ffn"):
        block |= _bf16(f"{prefix}.{name}_norm.weight", hidden)
        mixes = (2 + copies) * copies
        block[f"{prefix}.hc_{name}_fn"] = ("F32", (mixes, copies * hidden))
        block[f"{prefix}.hc_{name}_base"] = ("F32", (mixes,))
        block[f"{prefix}.hc_{name}_scale"] = ("F32", (3,))
    block |= _bf16(f"{prefix}.ffn.gate.weight", experts, hidden)
    block[f"{prefix}.ffn.gate.bias"] = ("F32", (experts,))
    block[f"{prefix}.ffn.gate.bias_vl"] = ("F32", (experts,))
    shapes = {"w1": (intermediate, hidden), "w2": (hidden, intermediate), "w3": (intermediate, hidden)}
    shared = count(text, "n_shared_experts")
    for projection, (rows, columns) in shapes.items():
        # Several shared experts are stored as one that is as many times wider.
        wide = (rows, columns * shared) if projection == "w2" else (rows * shared, columns)
        block |= _fp8(f"{prefix}.ffn.shared_experts.{projection}", *wide)
    for expert in range(experts):
        for projection, (rows, columns) in shapes.items():
            block |= _mxfp4(f"{prefix}.ffn.experts.{expert}.{projection}", rows, columns)
    return block | (_engram(text, f"{prefix}.engram", layer) if layer is not None else {})


def _attention(text: dict[str, Any], prefix: str, layer: int | None) -> Expected:
    hidden, heads, width = (
        count(text, "hidden_size"),
        count(text, "num_attention_heads"),
        count(text, "head_dim"),
    )
    q_rank, o_rank, groups = count(text, "q_lora_rank"), count(text, "o_lora_rank"), count(text, "o_groups")
    tensors = _fp8(f"{prefix}.wq_a", q_rank, hidden)
    tensors |= _fp8(f"{prefix}.wq_b", heads * width, q_rank)
    tensors |= _fp8(f"{prefix}.wkv", width, hidden)  # one key that is also the value
    tensors |= _fp8(f"{prefix}.wo_a", groups * o_rank, heads * width // groups)  # block-diagonal
    tensors |= _fp8(f"{prefix}.wo_b", hidden, groups * o_rank)
    tensors |= _bf16(f"{prefix}.q_norm.weight", q_rank) | _bf16(f"{prefix}.kv_norm.weight", width)
    tensors[f"{prefix}.attn_sink"] = ("F32", (heads,))
    if layer is None:
        return tensors
    index_heads, index_width = count(text, "index_n_heads"), count(text, "index_head_dim")
    source = layer in counts(text, "kv_source_layer_ids")
    if source:
        tensors |= _bf16(f"{prefix}.compressor.wkv.weight", width, hidden)
        if counts(text, "compress_ratios", count(text, "num_hidden_layers"))[layer] > 1:
            tensors |= _bf16(f"{prefix}.compressor.wgate.weight", width, hidden)
        tensors |= _bf16(f"{prefix}.compressor.norm.weight", width)
    if layer in counts(text, "index_source_layer_ids"):
        tensors |= _fp8(f"{prefix}.indexer.wq_b", index_heads * index_width, q_rank)
        tensors |= _bf16(f"{prefix}.indexer.weights_proj.weight", index_heads, hidden)
    if source:
        tensors |= _bf16(f"{prefix}.indexer.wk.weight", index_width, width)
        tensors |= _bf16(f"{prefix}.indexer.k_norm.weight", index_width)
    return tensors


def _engram(text: dict[str, Any], prefix: str, layer: int) -> Expected:
    """The n-gram memory of a layer that has one: a table of FP8 rows and the projection into the stream."""
    layers = counts(text, "engram_layer_ids") if text.get("engram_layer_ids") else []
    if layer not in layers:
        return {}
    hidden, copies, width = count(text, "hidden_size"), count(text, "hc_mult"), count(text, "engram_head_dim")
    orders = count(text, "engram_max_ngram_size", least=2) - 1  # n-grams of 2, 3, ... tokens
    rows = counts(text, "engram_num_embeddings", len(layers))[layers.index(layer)]
    columns = orders * count(text, "engram_n_heads") * width
    tensors = _fp8(f"{prefix}.wkv", (copies + 1) * hidden, columns)  # a key per copy, one value
    tensors |= _bf16(f"{prefix}.q_weight", copies, hidden) | _bf16(f"{prefix}.k_weight", copies, hidden)
    tensors[f"{prefix}.embed.weight"] = ("F8_E4M3", (rows, width))
    tensors[f"{prefix}.embed.scale"] = ("F8_E8M0", (rows, -(-width // GROUP)))
    return tensors


def _drafter_ends(text: dict[str, Any], layers: int) -> Expected:
    """What the first drafter layer has before its block, and the last one after it."""
    hidden, vocabulary, rank = (count(text, key) for key in ("hidden_size", "vocab_size", "dspark_markov_rank"))
    targets = len(counts(text, "dspark_target_layer_ids", 1))
    first, last = "mtp.0", f"mtp.{layers - 1}"
    tensors = _fp8(f"{first}.main_proj", hidden, targets * hidden)
    tensors |= _bf16(f"{first}.main_norm.weight", hidden) | _bf16(f"{last}.norm.weight", hidden)
    tensors |= _bf16(f"{last}.markov_head.embed.weight", vocabulary, rank)
    tensors |= _bf16(f"{last}.markov_head.head.weight", vocabulary, rank)
    return tensors | _bf16(f"{last}.confidence_head.proj.weight", 1, hidden + rank)


def is_vision(config: dict[str, Any], name: str) -> bool:
    """Vision tensors pass through unread: they are allowed where there is a `vision_config`."""
    return config.get("vision_config") is not None and name.startswith(VISION)


def check_tensors(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError naming the first tensor that is missing, of another dtype or shape, or unexpected."""
    expected = expected_tensors(checkpoint.config)
    extra = [name for name in checkpoint.tensors if name not in expected and not is_vision(checkpoint.config, name)]
    for name, (dtype, shape) in expected.items():
        info = checkpoint.tensors.get(name)
        if info is None:
            near = difflib.get_close_matches(name, extra[:1000], n=1)
            missing = sum(other not in checkpoint.tensors for other in expected)
            raise CheckpointError(
                f"the checkpoint lacks {missing} of the {len(expected)} tensors its config promises",
                where=f"{checkpoint.path}, {name}",
                found=f"expected {dtype} {list(shape)}, found {'only ' + near[0] if near else 'none'}",
                mend="download the original release again, all shards from one revision",
            )
        if (info.dtype, info.shape) != (dtype, shape):
            raise CheckpointError(
                "a tensor is not what the config promises",
                where=checkpoint.where(name),
                found=f"expected {dtype} {list(shape)}, found {info.dtype} {list(info.shape)}",
                mend="use config.json and shards from the same revision of the original release",
            )
    if extra:
        raise CheckpointError(
            f"the checkpoint holds {len(extra)} tensor(s) that its config does not promise",
            where=checkpoint.where(extra[0]),
            found=f"expected {len(expected)} tensors",
            mend="use config.json and shards from the same revision of the original release",
        )

"""What the DeepSeek-V4.1 family stores: tensor names, dtypes and shapes, all derived from `config.json`.

`check_layout` compares a checkpoint with it before any tensor is read: a missing, extra or misshapen tensor
is named at once. Vision tensors pass through unread: they are allowed where there is a `vision_config`.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError
from .checkpoint import Checkpoint
from .decode import GROUP

ARCHITECTURES = ("DeepseekV41ForCausalLM",)
"""`architectures` of `config.json` that this package can read."""

PARTS = (
    "routed experts",
    "shared experts",
    "router",
    "attention",
    "indexer/compressor",
    "hyper-connections",
    "norms",
    "embedding",
    "head",
    "engram tables",
    "engram",
    "drafter experts",
    "drafter",
    "vision",
)
"""Every part that `part_of` can answer, in the order of a census table."""

PROJECTIONS = ("w1", "w2", "w3")
"""An expert's matrices: gate, down, up."""

Expected = dict[str, tuple[str, tuple[int, ...]]]
"""Tensor name -> (safetensors dtype code, shape)."""


@dataclass(frozen=True)
class Layout:
    """The sizes that the rest of the toolkit asks for. Drafter sizes are 0 where there is no drafter."""

    layers: int
    experts: int
    experts_per_token: int
    hidden: int
    intermediate: int
    vocabulary: int
    drafter_layers: int
    drafter_experts: int

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Layout:
        """Raises CheckpointError for an unsupported architecture, or a size that is missing or no count."""
        text = text_config(config)
        drafters = count(text, "num_nextn_predict_layers", least=0) if "num_nextn_predict_layers" in text else 0
        for key in ("hidden_size", "moe_intermediate_size"):
            if count(text, key) % GROUP:
                raise _config_error(
                    key, f"expected a multiple of {GROUP} (an MXFP4 scale's columns), found {text[key]}"
                )
        return cls(
            layers=count(text, "num_hidden_layers"),
            experts=count(text, "n_routed_experts"),
            experts_per_token=count(text, "num_experts_per_tok"),
            hidden=count(text, "hidden_size"),
            intermediate=count(text, "moe_intermediate_size"),
            vocabulary=count(text, "vocab_size"),
            drafter_layers=drafters,
            drafter_experts=count(text, "dspark_n_routed_experts") if drafters else 0,
        )


def expert_prefix(layer: int, expert: int, projection: str) -> str:
    """`layers.3.ffn.experts.7.w1`; `.weight` and `.scale` follow. Projections: w1 gate, w2 down, w3 up."""
    return f"layers.{layer}.ffn.experts.{expert}.{projection}"


def drafter_expert_prefix(layer: int, expert: int, projection: str) -> str:
    """`mtp.0.ffn.experts.7.w1`: the same in the drafter (DSpark)."""
    return f"mtp.{layer}.ffn.experts.{expert}.{projection}"


def part_of(name: str) -> str:
    """Which of PARTS a tensor belongs to; CheckpointError for a name of no part."""
    if name.startswith(("vision.", "aligner.", "image_")):
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
        found=f"expected a name of {', '.join(ARCHITECTURES)}",
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
    """The `text_config` of a supported model; CheckpointError for any other architecture or quantization."""
    found = config.get("architectures")
    if not isinstance(found, list) or len(found) != 1 or found[0] not in ARCHITECTURES:
        name = str(found[0] if isinstance(found, list) and found else found)
        near = difflib.get_close_matches(name, ARCHITECTURES, n=1)
        raise CheckpointError(
            "this architecture is not supported",
            where="config.json, architectures",
            found=f"expected one of {', '.join(ARCHITECTURES)}, found {name}",
            mend=f"did you mean a {near[0]} checkpoint?" if near else "use a checkpoint of a supported family",
        )
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
    return text


def count(text: dict[str, Any], key: str, least: int = 1) -> int:
    """An integer of the text config, at least `least`."""
    value = text.get(key)
    if type(value) is not int or value < least:
        raise _config_error(key, f"expected an integer of at least {least}, found {value!r:.60}")
    return value


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
    Raises CheckpointError as `Layout.from_config` does.
    """
    layout, text = Layout.from_config(config), text_config(config)
    hidden, vocabulary = layout.hidden, layout.vocabulary
    expected: Expected = {"embed.weight": ("BF16", (vocabulary, hidden))}
    for layer in range(layout.layers):
        expected |= _block(text, f"layers.{layer}", layout.experts, layer)
    expected["norm.weight"] = ("BF16", (hidden,))
    expected["head.weight"] = ("BF16", (vocabulary, hidden))
    for layer in range(layout.drafter_layers):
        expected |= _block(text, f"mtp.{layer}", layout.drafter_experts, None)
    if layout.drafter_layers:
        expected |= _drafter_ends(text, layout)
    return expected


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


def _drafter_ends(text: dict[str, Any], layout: Layout) -> Expected:
    """What the first drafter layer has before its block, and the last one after it."""
    hidden, rank = layout.hidden, count(text, "dspark_markov_rank")
    targets = len(counts(text, "dspark_target_layer_ids", 1))
    first, last = "mtp.0", f"mtp.{layout.drafter_layers - 1}"
    tensors = _fp8(f"{first}.main_proj", hidden, targets * hidden)
    tensors |= _bf16(f"{first}.main_norm.weight", hidden) | _bf16(f"{last}.norm.weight", hidden)
    tensors |= _bf16(f"{last}.markov_head.embed.weight", layout.vocabulary, rank)
    tensors |= _bf16(f"{last}.markov_head.head.weight", layout.vocabulary, rank)
    return tensors | _bf16(f"{last}.confidence_head.proj.weight", 1, hidden + rank)


def check_layout(checkpoint: Checkpoint) -> Layout:
    """The checkpoint's sizes, once its tensors are those its config promises.

    Raises CheckpointError naming the first tensor that is missing, of another dtype or shape, or unexpected.
    """
    expected = expected_tensors(checkpoint.config)
    vision = checkpoint.config.get("vision_config") is not None
    extra = [
        name
        for name in checkpoint.tensors
        if name not in expected and not (vision and name.startswith(("vision.", "aligner.", "image_")))
    ]
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
    return Layout.from_config(checkpoint.config)


def census(checkpoint: Checkpoint) -> dict[str, dict[str, int]]:
    """Bytes of each part by dtype, {part: {dtype: bytes}}, in the order of PARTS, empty parts left out."""
    table: dict[str, dict[str, int]] = {part: {} for part in PARTS}
    for info in checkpoint.tensors.values():
        row = table[part_of(info.name)]
        row[info.dtype] = row.get(info.dtype, 0) + info.nbytes
    return {part: row for part, row in table.items() if row}

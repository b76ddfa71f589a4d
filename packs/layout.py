"""What a pack will hold, to the byte, known from the source's headers alone.

A pack keeps the source's shards: same file names, and every tensor that is no routed expert's stays in its shard
byte for byte. In place of an expert's `.weight` and `.scale`, or of the one tensor of all experts of a layer, come
`.trellis`, `.suh`, `.svh` and the marker of each expert, in the shard that held the weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..calibrate.checkpoint import Checkpoint, TensorInfo
from ..calibrate.layout import PROJECTIONS, Layout, expert_tensors, is_v41
from ..quantize.linear import stored_layout
from .recipe import Recipe

Part = tuple[str, tuple[int, ...], int]
"""dtype, shape, bytes of one stored tensor."""

NON_ROUTED = "non_routed_quantization"
"""In a pack's `quantization_config`: how all but the routed experts is stored."""

ITEMSIZE = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}  # others: 1


@dataclass(frozen=True)
class PackTensor:
    """One tensor of a pack. source: where to copy it from, or None when it comes from expert (layer, expert)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    source: TensorInfo | None
    expert: tuple[int, int] | None


@dataclass(frozen=True)
class PackLayout:
    """shards: file name -> its tensors in file order. expert_bytes: of one routed expert. Order is fixed."""

    layout: Layout
    shards: dict[str, list[PackTensor]]
    expert_bytes: int

    @property
    def routed_bytes(self) -> int:
        return self.layout.routed_experts * self.expert_bytes

    @property
    def tensor_bytes(self) -> int:
        return sum(tensor.nbytes for tensors in self.shards.values() for tensor in tensors)

    def experts_in(self, shard: str) -> list[tuple[int, int]]:
        """(layer, expert) of which this shard holds a tensor, ascending."""
        return sorted({tensor.expert for tensor in self.shards[shard] if tensor.expert})


def expert_shapes(layout: Layout) -> dict[str, tuple[int, int]]:
    """Projection -> (k, n) = (in, out)."""
    return {p: layout.shape(p)[::-1] for p in PROJECTIONS}


def expert_layout(layout: Layout, recipe: Recipe) -> dict[str, dict[str, Part]]:
    """Projection -> suffix -> dtype, shape, bytes."""
    return {p: stored_layout(k, n, recipe.bits, recipe.codebook) for p, (k, n) in expert_shapes(layout).items()}


def pack_layout(checkpoint: Checkpoint, layout: Layout, recipe: Recipe) -> PackLayout:
    """Lay out the pack of a checkpoint that `check_layout` accepted."""
    experts = expert_tensors(checkpoint, layout)
    parts = expert_layout(layout, recipe)
    shards: dict[str, list[PackTensor]] = {shard: [] for shard in checkpoint.shards}
    for info in checkpoint.tensors.values():
        if info.name not in experts:
            shards[info.file].append(PackTensor(info.name, info.dtype, info.shape, info.nbytes, info, None))
        for layer, expert, projection in experts.get(info.name, ()):
            prefix = layout.expert_prefix(layer, expert, projection)
            for stored, (dtype, shape, nbytes) in parts[projection].items():
                shards[info.file].append(PackTensor(f"{prefix}.{stored}", dtype, shape, nbytes, None, (layer, expert)))
    for tensors in shards.values():
        # Widest items first, as the safetensors library writes them, so that every tensor is aligned.
        tensors.sort(key=lambda tensor: (-ITEMSIZE.get(tensor.dtype, 1), tensor.name))
    one = sum(nbytes for projection in parts.values() for _, _, nbytes in projection.values())
    return PackLayout(layout, shards, one)


def pack_config(source: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    """config.json of the pack: the source's, with the `quantization_config` that EXL3 loaders read.

    Routed experts are EXL3; everything else, the drafter's experts included, keeps the source's own format,
    which moves to `non_routed_quantization`: null where the source has none, that is, plain floating point.
    """
    bits = int(recipe.bits) if recipe.bits == int(recipe.bits) else recipe.bits
    stored: dict[str, Any] = {"quant_method": "exl3", "bits": bits, "codebook": recipe.codebook}
    if not is_v41(source):
        # head_bits 16 is exllamav3's word for a head that is not quantized
        stored |= {"scope": "routed_experts", "head_bits": 16, NON_ROUTED: source.get("quantization_config")}
        return source | {"quantization_config": stored}
    original = source["quantization_config"]
    return source | {
        "quantization_config": stored
        | {
            "scope": "deepseek_v41_routed_experts",
            "mtp_experts": "source",
            "mtp_experts_start_layer": source["text_config"]["num_hidden_layers"],
            "weight_block_size": original["weight_block_size"],
            NON_ROUTED: {
                "quant_method": "deepseek_v4_fp8",
                "fmt": "e4m3",
                "activation_scheme": original.get("activation_scheme", "dynamic"),
                "scale_fmt": original["scale_fmt"],
                "weight_block_size": original["weight_block_size"],
                "expert_dtype": original["expert_dtype"],
            },
        }
    }


def is_pack_config(config: dict[str, Any]) -> bool:
    """Whether a config.json is a pack's."""
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == "exl3"


def source_config(pack: dict[str, Any]) -> dict[str, Any]:
    """A pack's config.json as far as the source's forward and layout are concerned: with the source's own format."""
    config = {key: value for key, value in pack.items() if key != "quantization_config"}
    original = pack["quantization_config"].get(NON_ROUTED)
    return config if original is None else config | {"quantization_config": original}

"""What a checkpoint stores, whatever its family: sizes, layers with routed experts, the experts' tensors, a census.

DeepSeek-V4.1's names are all known (`deepseek_v41.layout`): a missing, extra or misshapen tensor is named before any is
read. Of other families (`transformers_moe.names`) only the routed experts are checked here; whether the rest is what
transformers' modules need shows when these are loaded.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError
from .checkpoint import PLAIN, Checkpoint, TensorInfo
from .decode import GROUP, fp8_scale_shapes
from .deepseek_v41 import layout as v41
from .transformers_moe.names import FAMILIES, ExpertNames, expert_names

ARCHITECTURES = (v41.ARCHITECTURE, *FAMILIES)
"""`architectures` of `config.json` that this package can read."""

PARTS = (
    "routed experts",
    "shared experts",
    "dense MLPs",
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
    "other",
)
"""Every part that a tensor can belong to, in the order of a census table."""

PROJECTIONS = ("w1", "w2", "w3")
"""An expert's matrices: gate, down, up. Names on disk differ, see `Layout.expert_prefix`."""

Place = tuple[int, int, str]
"""Layer, expert, projection."""


@dataclass(frozen=True)
class Layout:
    """The sizes that the rest of the toolkit asks for.

    layers: of the backbone; moe_layers: those with routed experts, ascending. experts, experts_per_token: of each of
    them. intermediate: an expert's width. Drafter sizes are 0 where there is no drafter that this package knows.
    names: of the routed experts on disk, None for DeepSeek-V4.1.
    """

    layers: int
    experts: int
    experts_per_token: int
    hidden: int
    intermediate: int
    vocabulary: int
    drafter_layers: int
    drafter_experts: int
    moe_layers: tuple[int, ...]
    names: ExpertNames | None = None

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Layout:
        """Of an original checkpoint or a pack, from `config.json` and the names of the experts' tensors.

        Raises CheckpointError for an unsupported architecture, or a size that is missing or no count.
        """
        if is_v41(checkpoint.config):
            return _v41_layout(checkpoint.config)
        names = expert_names(checkpoint)
        found = names.sizes
        sizes = (found.layers, found.experts, found.experts_per_token, found.hidden, found.intermediate)
        return cls(*sizes, found.vocabulary, 0, 0, found.moe_layers, names)

    @property
    def routed_experts(self) -> int:
        """Of all layers."""
        return len(self.moe_layers) * self.experts

    def expert_prefix(self, layer: int, expert: int, projection: str) -> str:
        """`model.layers.3.mlp.experts.7.gate_proj`, or `layers.3.ffn.experts.7.w1`: a projection's name in a pack."""
        if self.names is None:
            return v41.expert_prefix(layer, expert, projection)
        return self.names.prefix(layer, expert, projection)

    def shape(self, projection: str) -> tuple[int, int]:
        """Rows and columns [out, in] of an expert's matrix."""
        return (self.hidden, self.intermediate) if projection == "w2" else (self.intermediate, self.hidden)

    def places(self) -> Iterator[Place]:
        """Every matrix of a routed expert, layer by layer, expert by expert."""
        for layer in self.moe_layers:
            for expert in range(self.experts):
                for projection in PROJECTIONS:
                    yield layer, expert, projection


def is_v41(config: dict[str, Any]) -> bool:
    """Whether a config.json is DeepSeek-V4.1's."""
    return config.get("architectures") == [v41.ARCHITECTURE]


def _v41_layout(config: dict[str, Any]) -> Layout:
    text = v41.text_config(config)
    drafters = v41.drafter_layers(text)
    layers = v41.count(text, "num_hidden_layers")
    return Layout(
        layers=layers,
        experts=v41.count(text, "n_routed_experts"),
        experts_per_token=v41.count(text, "num_experts_per_tok"),
        hidden=v41.count(text, "hidden_size"),
        intermediate=v41.count(text, "moe_intermediate_size"),
        vocabulary=v41.count(text, "vocab_size"),
        drafter_layers=drafters,
        drafter_experts=v41.count(text, "dspark_n_routed_experts") if drafters else 0,
        moe_layers=tuple(range(layers)),
    )


def check_layout(checkpoint: Checkpoint) -> Layout:
    """The checkpoint's sizes, once the tensors that its config promises are known to be there.

    Raises CheckpointError naming the first one that is missing, of another dtype or shape, or unexpected, and for an
    unsupported architecture.
    """
    layout = Layout.of(checkpoint)
    if layout.names is None:
        v41.check_tensors(checkpoint)
    else:
        _check_experts(checkpoint, layout)
    return layout


def expert_tensors(checkpoint: Checkpoint, layout: Layout) -> dict[str, list[Place]]:
    """Tensor name -> the matrices whose numbers it holds: one, all of a layer where they are fused, none for a scale.

    Every tensor of the routed experts that a sound checkpoint has, whether or not this one has it.
    """
    found: dict[str, list[Place]] = {}
    fused = layout.names if layout.names is not None and layout.names.fused else None
    for place in layout.places():
        if fused is not None:
            found.setdefault(fused.source(*place).name, []).append(place)
            continue
        prefix = layout.expert_prefix(*place)
        found[f"{prefix}.weight"] = [place]
        if f"{prefix}.scale" in checkpoint.tensors:
            found[f"{prefix}.scale"] = []
    return found


def _check_experts(checkpoint: Checkpoint, layout: Layout) -> None:
    """Every routed expert is there, in a shape and dtype that `Checkpoint.weight` decodes, and nothing beside it."""
    names = layout.names
    assert names is not None
    expected = expert_tensors(checkpoint, layout)
    extra = [name for name in checkpoint.tensors if names.owns(name) and name not in expected]
    if missing := [name for name in expected if name not in checkpoint.tensors]:
        near = difflib.get_close_matches(missing[0], extra[:1000], n=1)
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} of the {len(expected)} tensors of its routed experts",
            where=f"{checkpoint.path}, {missing[0]}",
            found=f"expected {layout.experts} experts in each of {len(layout.moe_layers)} layers, found "
            + (f"only {near[0]}" if near else "none of that name"),
            mend="give the original release, not a quantized version of it, all shards from one revision",
        )
    if extra:
        raise CheckpointError(
            f"the routed experts have {len(extra)} tensor(s) that are not understood",
            where=checkpoint.where(extra[0]),
            found=f"expected experts 0 to {layout.experts - 1}: weights, and E8M0 scales beside MXFP4 or FP8 ones",
            mend="use config.json and shards of the same release, or a BF16 version of it",
        )
    for name, places in expected.items():
        if not places:
            continue  # a scale, looked at with its weight
        info = checkpoint.tensors[name]
        rows, columns = layout.shape(places[0][2])
        if not name.endswith(".weight"):
            projections = len({projection for _, _, projection in places})
            sound = info.dtype in PLAIN and info.shape == (layout.experts, projections * rows, columns)
            wanted = f"BF16, F16 or F32 {[layout.experts, projections * rows, columns]}"
        else:
            scale = checkpoint.tensors.get(name.removesuffix("weight") + "scale")
            sound = _decodes(info, scale, rows, columns)
            wanted = f"{[rows, columns]} in BF16, F16 or F32, or in MXFP4 or FP8 with E8M0 scales"
        if not sound:
            raise CheckpointError(
                "a routed expert's tensor has another dtype or shape",
                where=checkpoint.where(name),
                found=f"expected {wanted}, found {info.dtype} {list(info.shape)}",
                mend="use config.json and shards of the same release, or a BF16 version of it",
            )


def _decodes(info: TensorInfo, scale: TensorInfo | None, rows: int, columns: int) -> bool:
    """Whether `Checkpoint.weight` makes [rows, columns] of these."""
    if info.dtype in PLAIN:
        return info.shape == (rows, columns) and scale is None
    if scale is None or scale.dtype != "F8_E8M0":
        return False
    across = -(-columns // GROUP)
    if info.dtype == "I8":
        return info.shape == (rows, columns // 2) and scale.shape == (rows, across)
    scales = fp8_scale_shapes(rows, columns)
    return info.dtype == "F8_E4M3" and info.shape == (rows, columns) and scale.shape in scales


def parts(checkpoint: Checkpoint) -> dict[str, str]:
    """Tensor name -> which of PARTS it belongs to, of an original checkpoint or a pack.

    Raises CheckpointError for a name that is not DeepSeek-V4.1's, or an unsupported architecture.
    """
    if is_v41(checkpoint.config):
        return {name: v41.part_of(name) for name in checkpoint.tensors}
    names = expert_names(checkpoint)
    return {name: _part_of(name, names) for name in checkpoint.tensors}


# The first pattern found in a name decides, so the narrower one stands first.
_PARTS = (
    (re.compile(r"(^|\.)(visual|vision\w*)\."), "vision"),
    (re.compile(r"(^|\.)mtp\."), "drafter"),
    (re.compile(r"\.shared_experts?(_gate)?\."), "shared experts"),
    (re.compile(r"\.(mlp|ffn|block_sparse_moe)\.gate\."), "router"),
    (re.compile(r"\.(mlp|ffn)\."), "dense MLPs"),
    (re.compile(r"\.(indexer|compressor)\."), "indexer/compressor"),
    (re.compile(r"\.(self_attn|linear_attn|attn)\."), "attention"),
    (re.compile(r"(^|\.)(hc_|attn_hc\.|ffn_hc\.)"), "hyper-connections"),
    (re.compile(r"norm\.(weight|bias)$"), "norms"),
    (re.compile(r"(^|\.)embed(_tokens)?\."), "embedding"),
    (re.compile(r"(^|\.)(lm_)?head\."), "head"),
)


def _part_of(name: str, names: ExpertNames) -> str:
    if names.owns(name):
        return "routed experts"
    layer = re.search(r"(^|\.)layers\.(\d+)\.", name)
    if layer is not None and int(layer[2]) >= names.sizes.layers:
        return "drafter"  # DeepSeek-V3 and GLM-4 store it as one more layer
    return next((part for pattern, part in _PARTS if pattern.search(name)), "other")


def census(checkpoint: Checkpoint) -> dict[str, dict[str, int]]:
    """Bytes of each part by dtype, {part: {dtype: bytes}}, in the order of PARTS, empty parts left out."""
    table: dict[str, dict[str, int]] = {part: {} for part in PARTS}
    for name, part in parts(checkpoint).items():
        info, row = checkpoint.tensors[name], table[part]
        row[info.dtype] = row.get(info.dtype, 0) + info.nbytes
    return {part: row for part, row in table.items() if row}

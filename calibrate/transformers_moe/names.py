"""The supported architectures: their sizes, and the names of their routed experts on disk and in a pack.

Three ways to store an expert's projections are known, all of them found in released checkpoints:

    model.layers.3.mlp.experts.7.gate_proj.weight [I, H], up_proj, down_proj [H, I]        most families
    model.layers.3.block_sparse_moe.experts.7.w1.weight, w3, w2                            Mixtral
    layers.3.ffn.experts.7.w1.weight, w3, w2, each perhaps with a .scale beside it         DeepSeek-V4 (native names)
    model.layers.3.mlp.experts.gate_up_proj [E, 2I, H], down_proj [E, H, I]                fused (Qwen3.5-MoE)

Inside moefit a projection is w1 (gate), w3 (up) or w2 (down) in every family. In a pack an expert is named as it is on
disk, or, where the checkpoint fuses all experts of a layer, as the per-expert names of its family.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import CheckpointError
from ..checkpoint import Checkpoint
from ..deepseek_v41.layout import ARCHITECTURE as DEEPSEEK_V41

HUGGING_FACE = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
NATIVE = {"w1": "w1", "w3": "w3", "w2": "w2"}


@dataclass(frozen=True)
class Family:
    """How one architecture names things.

    model_type: transformers' name of the text backbone's configuration.
    experts, intermediate: attributes of that configuration. dense: which rule names the layers without experts.
    roots: what may stand before `layers.` on disk. block: the module that holds `experts`.
    projections: w1, w3, w2 -> its name below `experts.{e}.`.
    """

    model_type: str
    experts: str = "num_experts"
    intermediate: str = "moe_intermediate_size"
    dense: str = ""  # "first": the first `first_k_dense_replace`; "step": `decoder_sparse_step` and `mlp_only_layers`
    roots: tuple[str, ...] = ("model.",)
    block: str = "mlp"
    projections: tuple[tuple[str, str], ...] = tuple(HUGGING_FACE.items())


FAMILIES: dict[str, Family] = {
    "MixtralForCausalLM": Family(
        "mixtral",
        experts="num_local_experts",
        intermediate="intermediate_size",
        block="block_sparse_moe",
        projections=tuple(NATIVE.items()),
    ),
    "OlmoeForCausalLM": Family("olmoe", intermediate="intermediate_size"),
    "Qwen2MoeForCausalLM": Family("qwen2_moe", dense="step"),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", dense="step"),
    "DeepseekV3ForCausalLM": Family("deepseek_v3", experts="n_routed_experts", dense="first"),
    "Glm4MoeForCausalLM": Family("glm4_moe", experts="n_routed_experts", dense="first"),
    "Qwen3_5MoeForCausalLM": Family("qwen3_5_moe_text", roots=("model.", "model.language_model.")),
    # the release's architecture, with a vision tower that is left alone
    "Qwen3_5MoeForConditionalGeneration": Family("qwen3_5_moe_text", roots=("model.language_model.", "model.")),
    "DeepseekV4ForCausalLM": Family(
        "deepseek_v4",
        experts="n_routed_experts",
        roots=("", "model."),
        block="ffn",
        projections=tuple(NATIVE.items()),
    ),
}
"""`architectures` of config.json -> how the family names things."""


@dataclass(frozen=True)
class Sizes:
    """What everything but the forward asks of a configuration.

    layers: of the backbone. moe_layers: those with routed experts, ascending; experts and experts_per_token are theirs.
    hidden H, intermediate I: an expert's width. vocabulary: rows of the embedding.
    """

    architecture: str
    layers: int
    moe_layers: tuple[int, ...]
    experts: int
    experts_per_token: int
    hidden: int
    intermediate: int
    vocabulary: int


def architecture(config: dict[str, Any]) -> str:
    """The architecture that a config.json names, if this package has its family.

    Raises CheckpointError with the supported ones and the nearest match.
    """
    named = config.get("architectures")
    found = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
    if found in FAMILIES:
        return found
    supported = [DEEPSEEK_V41, *FAMILIES]
    stems = {name.lower().removesuffix("forcausallm"): name for name in supported}  # all share that, near or not
    stem = found.lower().removesuffix("forcausallm")
    near = [stems[name] for cutoff in (0.6, 0.0) for name in difflib.get_close_matches(stem, stems, 1, cutoff)]
    mend = "give a checkpoint of one of these" + (f", by name the nearest is {near[0]}" if near and found else "")
    raise CheckpointError(
        "this architecture is not supported",
        where="config.json, architectures",
        found=f"expected one of {', '.join(supported)}, found {found or repr(named)}",
        mend=f"the nearest supported one is {near[0]}" if len(near) > 1 else mend,
    )


def sizes(config: dict[str, Any]) -> Sizes:
    """Sizes of a config.json. Raises CheckpointError for an unsupported architecture, or one without experts."""
    from .config import text_config  # imports transformers

    name = architecture(config)
    family, text = FAMILIES[name], text_config(config)
    layers, experts = text.num_hidden_layers, getattr(text, family.experts) or 0
    moe: Sequence[int]
    if family.dense == "first":
        moe = range(text.first_k_dense_replace, layers)
    elif family.dense == "step":
        if (step := text.decoder_sparse_step) < 1:
            raise _impossible("decoder_sparse_step", f"expected 1 or more, found {step}")
        moe = [layer for layer in range(layers) if layer not in text.mlp_only_layers and (layer + 1) % step == 0]
    else:
        moe = range(layers)
    if experts < 1 or not moe:
        raise CheckpointError(
            "this model has no routed experts",
            where=f"config.json, {family.experts}",
            found=f"expected layers with experts, found {len(moe)} of {layers} layers and {experts} experts",
            mend="moefit fits mixture-of-experts models; a dense one needs no expert placement",
        )
    if not 1 <= text.num_experts_per_tok <= experts:
        raise _impossible("num_experts_per_tok", f"expected 1 to {experts}, found {text.num_experts_per_tok}")
    if family.dense == "first":
        _check_groups(experts, text.n_group, text.topk_group, text.num_experts_per_tok)
    return Sizes(
        architecture=name,
        layers=layers,
        moe_layers=tuple(moe),
        experts=experts,
        experts_per_token=text.num_experts_per_tok,
        hidden=text.hidden_size,
        intermediate=getattr(text, family.intermediate),
        vocabulary=text.vocab_size,
    )


def _check_groups(experts: int, groups: int, chosen: int, top_k: int) -> None:
    """DeepSeek-V3's router first takes `chosen` of `groups` groups of experts, each by its best two."""
    if groups < 1 or experts % groups or experts < 2 * groups:
        raise _impossible("n_group", f"expected a divisor of {experts} with 2 experts or more each, found {groups}")
    if not 1 <= chosen <= groups or chosen * experts // groups < top_k:
        least = -(-top_k * groups // experts)
        raise _impossible("topk_group", f"expected {least} to {groups} for top-{top_k}, found {chosen}")


def _impossible(key: str, found: str) -> CheckpointError:
    mend = "compare it with the release's own config.json"
    return CheckpointError("a config value is out of range", where=f"config.json, {key}", found=found, mend=mend)


@dataclass(frozen=True)
class Source:
    """Where one projection of one expert lies.

    name: without fusion the prefix that `Checkpoint.weight` takes (`.weight` and perhaps `.scale` follow); with fusion
    the whole tensor's name [E, R, C], of which `expert` is the first index and `rows` the part of R.
    """

    name: str
    expert: int | None = None
    rows: tuple[int, int] | None = None


@dataclass(frozen=True)
class ExpertNames:
    """Names of the routed experts of one checkpoint; made by `expert_names`.

    root: what stands before `layers.`. fused: all experts of a layer in one tensor.
    """

    sizes: Sizes
    root: str
    fused: bool

    def layer_prefix(self, layer: int) -> str:
        """`model.layers.3.`: before every tensor of a layer, on disk and in a pack."""
        return f"{self.root}layers.{layer}."

    def prefix(self, layer: int, expert: int, projection: str) -> str:
        """An expert's projection in a pack: `model.layers.3.mlp.experts.7.gate_proj`; `.trellis` and others follow."""
        family = FAMILIES[self.sizes.architecture]
        return f"{self._experts(layer)}{expert}.{dict(family.projections)[projection]}"

    def source(self, layer: int, expert: int, projection: str) -> Source:
        """Where that projection lies in the checkpoint. projection: w1 (gate), w3 (up) or w2 (down)."""
        if not self.fused:
            return Source(self.prefix(layer, expert, projection))
        inter = self.sizes.intermediate
        if projection == "w2":
            return Source(f"{self._experts(layer)}down_proj", expert, (0, self.sizes.hidden))
        start = 0 if projection == "w1" else inter
        return Source(f"{self._experts(layer)}gate_up_proj", expert, (start, start + inter))

    def owns(self, name: str) -> bool:
        """Whether a checkpoint's tensor belongs to the routed experts of the backbone (`moe_layers`)."""
        block = FAMILIES[self.sizes.architecture].block
        match = re.match(rf"{re.escape(self.root)}layers\.(\d+)\.{block}\.experts\.", name)
        return match is not None and int(match[1]) in self.sizes.moe_layers

    def _experts(self, layer: int) -> str:
        return f"{self.layer_prefix(layer)}{FAMILIES[self.sizes.architecture].block}.experts."


def expert_names(checkpoint: Checkpoint) -> ExpertNames:
    """How an original checkpoint, or a pack, names its routed experts.

    Raises CheckpointError if it has none where its family keeps them.
    """
    found = sizes(checkpoint.config)
    tried = []
    for root in FAMILIES[found.architecture].roots:
        for fused in (False, True):
            names = ExpertNames(found, root, fused)
            name = names.source(found.moe_layers[0], 0, "w1").name
            tried.append(name if fused else f"{name}.weight")
            # In a pack an expert's tensors have other suffixes.
            if name in checkpoint.tensors or any(tensor.startswith(f"{name}.") for tensor in checkpoint.tensors):
                return names
    raise CheckpointError(
        "the checkpoint holds no routed experts under the names of its family",
        where=f"{checkpoint.path}, layer {found.moe_layers[0]}",
        found=f"expected {' or '.join(tried)}, found neither",
        mend="check that the checkpoint is complete and not already quantized by another tool",
    )

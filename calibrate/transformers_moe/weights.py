"""A checkpoint's tensors under the names of transformers' modules, and modules filled with them.

Names come from transformers' own conversion table (`conversion_mapping.py`), so a release in its native names
(DeepSeek-V4) needs no table here. The whole mapping is checked when a model is opened, from headers alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ...errors import CheckpointError
from ..checkpoint import DTYPES, PLAIN, Checkpoint, wrong_shape
from ..decode import finite
from .names import ExpertNames, Source

OLD_BUFFERS = r"rotary_emb\.inv_freq$"  # stored per layer by old releases, computed by today's modules


@dataclass(frozen=True)
class Weights:
    """Parameters and persistent buffers of one model, routed experts left out, by their names in transformers.

    stored: name in transformers -> tensor in the checkpoint. expected: the same names -> the module's (meta) tensor.
    """

    checkpoint: Checkpoint
    stored: dict[str, str]
    expected: dict[str, Tensor]

    @classmethod
    def of(cls, checkpoint: Checkpoint, model: PreTrainedModel, names: ExpertNames) -> Weights:
        """model: on the meta device, its experts already taken out.

        Raises CheckpointError naming a tensor that is missing, not understood, or not of the shape config.json implies.
        """
        expected = dict(model.state_dict())
        tied = _tied(model)
        stored = _renamed(checkpoint, model, names, expected)
        for name, target in tied.items():
            if name not in stored and target in stored:
                stored[name] = stored[target]
        if missing := sorted(expected.keys() - stored.keys()):
            raise CheckpointError(
                f"the checkpoint lacks {len(missing)} tensor(s) of this architecture",
                where=f"{checkpoint.path}, {missing[0]}",
                found=f"expected the {len(expected)} tensors outside the routed experts (transformers' names)",
                mend="use config.json and shards of the same release, all of them",
            )
        for name, tensor in expected.items():
            found = _decoded_shape(checkpoint, stored[name])
            if found != tuple(tensor.shape):
                raise wrong_shape(checkpoint, stored[name], tuple(tensor.shape), found)
        return cls(checkpoint, stored, expected)

    def read(self, name: str, device: torch.device) -> Tensor:
        """One tensor, decoded: float32, or the module's own integers. name: in transformers."""
        stored, dtype = self.stored[name], self.expected[name].dtype
        if dtype.is_floating_point:
            return self.checkpoint.weight(stored, device)
        return self.checkpoint.stored(stored).to(device, dtype)

    def fill(self, module: nn.Module, prefix: str, model: PreTrainedModel, device: torch.device) -> None:
        """Give a module on the meta device its tensors. prefix: its name in the model, with a dot behind it.

        What no checkpoint stores (rotary frequencies) is computed by `model`'s own initialization.
        """
        for part in module.modules():
            if part._non_persistent_buffers_set and any(b.is_meta for b in part.buffers(recurse=False)):
                part.to_empty(device=device, recurse=False)
                model._init_weights(part)
        values = {name: self.read(prefix + name, device) for name in module.state_dict()}
        module.load_state_dict(values, assign=True)
        module.requires_grad_(False)


def read_expert(
    checkpoint: Checkpoint,
    source: Source,
    shape: tuple[int, int],
    device: torch.device,
    kept: dict[str, Tensor] | None = None,
) -> Tensor:
    """One projection of one expert, float32 [out, in]. Of a fused tensor only its own rows are read.

    kept: stored bytes on the device, as of `Checkpoint.weight`. Raises CheckpointError where the tensor is missing, of
    another shape or dtype, or not finite.
    """
    if source.expert is None:
        weight = checkpoint.weight(source.name, device, kept)
        if tuple(weight.shape) != shape:
            raise wrong_shape(checkpoint, source.name, shape, tuple(weight.shape))
        return weight
    info = checkpoint.info(source.name)
    start, stop = source.rows or (0, shape[0])
    fits = len(info.shape) == 3 and source.expert < info.shape[0] and stop <= info.shape[1]
    if info.dtype not in PLAIN or not fits or info.shape[2] != shape[1]:
        raise CheckpointError(
            "fused experts are not stored as their family does",
            where=checkpoint.where(source.name),
            found=f"expected BF16, F16 or F32 [E, at least {stop}, {shape[1]}], found {info.dtype} {list(info.shape)}",
            mend="start from the original release, or a BF16 version of it",
        )
    key = f"{source.name}[{source.expert}, {start}:{stop}]"
    raw = None if kept is None else kept.get(key)
    if check := raw is None:
        row = info.nbytes // (info.shape[0] * info.shape[1])
        first = source.expert * info.shape[1]
        raw = checkpoint.read(source.name, (first + start) * row, (first + stop) * row).to(device)
        if kept is not None:
            kept[key] = raw
    values = raw.view(DTYPES[info.dtype]).view(shape).to(torch.float32)
    return finite(values, checkpoint.where(source.name)) if check else values


def _renamed(
    checkpoint: Checkpoint, model: PreTrainedModel, names: ExpertNames, expected: dict[str, Tensor]
) -> dict[str, str]:
    """Name in transformers -> name in the checkpoint, but for routed experts and what is no part of the backbone."""
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    ignored = _ignored(model, names)
    found: dict[str, str] = {}
    for name in checkpoint.tensors:
        if names.owns(name) or ignored.search(name) or _is_scale(name, checkpoint):
            continue
        # transformers' loader takes a name as it is when the table would make a stranger of it
        as_is, _ = rename_source_key(name, [], [], model.base_model_prefix, expected)
        target, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, expected)
        target = target if target in expected else as_is
        if ignored.search(target):
            continue
        if target not in expected or target in found:
            raise CheckpointError(
                "the checkpoint holds a tensor that its architecture has no place for",
                where=checkpoint.where(name),
                found=f"expected a tensor of {type(model).__name__}, found {target}"
                + (f", which {found[target]} is too" if target in found else ""),
                mend="use config.json and shards of the same release"
                if not name.endswith("_scale_inv")
                else "start from a BF16 version of the release: weights with float scales are not decoded",
            )
        found[target] = name
    return found


def _ignored(model: PreTrainedModel, names: ExpertNames) -> re.Pattern[str]:
    """Tensors that are no part of the text backbone: drafters (multi-token prediction), vision, computed buffers."""
    patterns = [OLD_BUFFERS, *(model._keys_to_ignore_on_load_unexpected or ())]
    drafters = getattr(model.config, "num_nextn_predict_layers", 0) or 0
    patterns += [rf"^{re.escape(names.layer_prefix(names.sizes.layers + extra))}" for extra in range(drafters)]
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))


def _is_scale(name: str, checkpoint: Checkpoint) -> bool:
    """Whether a tensor is read with the weight beside it."""
    return name.endswith(".scale") and f"{name.removesuffix('scale')}weight" in checkpoint.tensors


def _tied(model: PreTrainedModel) -> dict[str, str]:
    """Parameters that may be missing because they are another one: {"lm_head.weight": "model.embed_tokens.weight"}."""
    keys = model._tied_weights_keys
    return dict(keys) if model.config.tie_word_embeddings and isinstance(keys, dict) else {}


def _decoded_shape(checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
    info = checkpoint.info(name)
    if info.dtype == "I8" and len(info.shape) == 2:  # MXFP4: two columns a byte
        return info.shape[0], 2 * info.shape[1]
    return info.shape

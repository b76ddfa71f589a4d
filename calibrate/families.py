"""The model family of a checkpoint."""

from __future__ import annotations

import torch

from ..errors import CheckpointError
from .checkpoint import Checkpoint
from .deepseek_v41.model import V41Model
from .family import Model
from .layout import is_v41
from .transformers_moe.names import architecture


def open_model(
    checkpoint: Checkpoint, kv_quantization: bool | None = False, device: str | torch.device = "cpu"
) -> Model:
    """The forward of a checkpoint's architecture.

    kv_quantization: round what the key/value caches hold as the release does; None: if the release serves it so.
    Raises CheckpointError for an architecture or option that is not supported.
    """
    if is_v41(checkpoint.config):
        return V41Model(checkpoint, kv_quantization, device)
    name = architecture(checkpoint.config)
    if kv_quantization:
        raise CheckpointError(
            "rounding of the key/value caches is known for DeepSeek-V4.1 only",
            where=str(checkpoint.path / "config.json"),
            found=f"expected DeepseekV41ForCausalLM, found {name}",
            mend="leave the option off: this family's caches are then kept as computed",
        )
    from .transformers_moe.model import TransformersModel  # imports transformers, which takes seconds

    return TransformersModel(checkpoint, device)

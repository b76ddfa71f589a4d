"""Reading a part of the model by its tensor names, with the shapes that config.json implies."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..checkpoint import Checkpoint, wrong_shape


@dataclass(frozen=True)
class Weights:
    """The tensors of `checkpoint` whose names begin with `prefix` (which ends in a dot), decoded on `device`.

    kept: see `Checkpoint.weight`.
    """

    checkpoint: Checkpoint
    prefix: str
    device: torch.device
    kept: dict[str, Tensor] | None = None

    def __call__(self, name: str, *shape: int) -> Tensor:
        """`prefix + name` decoded to float32; CheckpointError unless it has this shape."""
        full = self.prefix + name
        tensor = self.checkpoint.weight(full, self.device, self.kept)
        if tuple(tensor.shape) != shape:
            raise wrong_shape(self.checkpoint, full, shape, tuple(tensor.shape))
        return tensor

    def under(self, name: str) -> Weights:
        """The tensors whose names go on with `name` and a dot."""
        return replace(self, prefix=f"{self.prefix}{name}.")

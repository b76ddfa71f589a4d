"""Read a pack back: experts decoded from the written bytes, everything else as in the original."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..calibrate.checkpoint import Checkpoint
from ..calibrate.families import open_model
from ..calibrate.family import ExpertWeights, Layer, Model
from ..calibrate.layout import Layout
from ..calibrate.stream import Experts
from ..errors import PackError, QuantizeError
from ..quantize.codebook import CODEBOOKS, Codebook, marker
from ..quantize.linear import decode
from ..quantize.regularize import padded
from .layout import expert_shapes, is_pack_config, source_config


class Pack:
    """A pack directory, opened by its headers; nothing is decoded until asked for.

    checkpoint: all its tensors. source: the same under the original's config.json, which the forward reads. layout:
    the model's sizes and names. Raises CheckpointError for damaged files and PackError for a directory that is no pack.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.checkpoint = Checkpoint.open(self.path)
        if not is_pack_config(self.checkpoint.config):
            quantization = self.checkpoint.config.get("quantization_config")
            raise PackError(
                "this directory is not a pack",
                where=str(self.path / "config.json"),
                found=f"expected quantization_config.quant_method exl3, found {quantization!r:.80}",
                mend="give the directory that moefit build wrote",
            )
        self.source = replace(self.checkpoint, config=source_config(self.checkpoint.config))
        self.layout = Layout.of(self.source)

    def model(self, device: str | torch.device = "cpu") -> Model:
        """The forward over the pack's unquantized tensors; pass `experts` along with it."""
        return open_model(self.source, device=device)

    def experts(self, layer: Layer, device: str | torch.device = "cpu") -> Experts:
        """A layer's routed experts, for `calibrate.stream.run_model`; decoded on the CPU, then brought to `device`."""

        def one(expert: int) -> ExpertWeights:
            w1, w3, w2 = self.expert(layer.index, expert)
            return w1.to(device), w3.to(device), w2.to(device)

        return one

    def expert(self, layer: int, expert: int) -> ExpertWeights:
        """w1 [I, H], w3 [I, H], w2 [H, I], float32, decoded from the stored tensors."""
        w1, w3, w2 = (self.linear(layer, expert, projection) for projection in ("w1", "w3", "w2"))
        return w1, w3, w2

    def linear(self, layer: int, expert: int, projection: str) -> Tensor:
        """One projection as the checkpoint stores it, float32 [out, in].

        Raises PackError, naming the tensor, where the stored ones cannot be decoded.
        """
        prefix = self.layout.expert_prefix(layer, expert, projection)
        k, n = expert_shapes(self.layout)[projection]
        trellis, suh, svh = (
            self._stored(f"{prefix}.{suffix}", dtype)
            for suffix, dtype in (("trellis", torch.int16), ("suh", torch.float16), ("svh", torch.float16))
        )
        for name, scale in (("suh", suh), ("svh", svh)):
            if not np.isfinite(scale).all():
                raise PackError("a scale is not finite", where=self.checkpoint.where(f"{prefix}.{name}"))
        codebook, where = self.codebook(prefix), self.checkpoint.where(f"{prefix}.trellis")
        if (suh.shape, svh.shape) != ((padded(k),), (padded(n),)):
            raise PackError(
                "the scales do not fit the model",
                where=where,
                found=f"expected suh and svh {[padded(k), padded(n)]}, found {[*suh.shape, *svh.shape]}",
            )
        try:
            return decode(trellis, suh, svh, codebook)[:k, :n].T.contiguous()
        except QuantizeError as error:  # which knows no names
            raise PackError(error.what, where=where, found=error.found, mend=error.mend) from None

    def _stored(self, name: str, dtype: torch.dtype) -> np.ndarray:
        tensor = self.checkpoint.stored(name)
        if tensor.dtype != dtype:
            raise PackError(
                "a tensor has the wrong dtype",
                where=self.checkpoint.where(name),
                found=f"expected {dtype}, found {tensor.dtype}",
                mend="restore that shard, or build the pack again",
            )
        return tensor.numpy()

    def codebook(self, prefix: str) -> Codebook:
        """Which codebook the linear's marker names. Raises PackError for a wrong or a second marker."""
        present = [(c, m) for c in CODEBOOKS if (m := marker(c)) and f"{prefix}.{m[0]}" in self.checkpoint.tensors]
        if not present:
            return "3inst"
        if len(present) > 1:
            raise PackError("a linear has two codebook markers", where=f"{self.path}, {prefix}")
        codebook, (suffix, value) = present[0]
        stored = self.checkpoint.stored(f"{prefix}.{suffix}")
        if stored.dtype != torch.int32 or stored.numel() != 1 or int(stored) != value:
            raise PackError(
                "a codebook marker has the wrong value",
                where=self.checkpoint.where(f"{prefix}.{suffix}"),
                found=f"expected int32 {value}, found {stored.dtype} {stored.flatten().tolist()[:2]}",
                mend="decoding it would give noise; build the pack again",
            )
        return codebook

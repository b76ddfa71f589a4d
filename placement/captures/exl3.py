"""vllm-exl3's `expert_stats.pt` (EXL3_EXPERT_STATS=<dir>): `{layer name: float64 [2, experts]}`.

Row 0 counts calls of up to 64 tokens (decode), row 1 larger ones (prefill). Written by rank 0 after every
EXL3_EXPERT_STATS_EVERY-th call of a layer, which lies between two steps only if that is a multiple of the layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...errors import TraceError
from .shape import MoeShape
from .tally import Counts, Piece
from .torchfile import is_tensor, to_numpy

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")
_DRAFTER = re.compile(r"(?:^|\.)mtp\.")


def looks_like(value: Any) -> str:
    if not isinstance(value, dict) or not any(isinstance(name, str) and _LAYER.search(name) for name in value):
        return ""
    pairs = all(is_tensor(tensor, (2,)) and len(tensor) == 2 for tensor in value.values())
    return "two rows of counts per layer name" if pairs else ""


def pieces(value: Any, where: str, shape: MoeShape) -> Iterator[Piece]:
    if not looks_like(value):
        raise TraceError("not vllm-exl3's statistics", where=where, found="expected {layer name: float64 [2, experts]}")
    layers: dict[int, np.ndarray] = {}
    for name, tensor in value.items():
        if _DRAFTER.search(str(name)):
            continue
        match = _LAYER.search(str(name))
        if match is None or int(match[1]) in layers:
            found = "expected ...layers.N..., each once"
            raise TraceError("a layer name cannot be placed", where=f"{where}, {name}", found=found)
        layers[int(match[1])] = to_numpy(tensor, f"{where}, {name}")
    both = shape.stack(layers, where)  # [L, 2, E]
    yield Counts(f"{where}, decode row", both[:, 0], "decode")
    yield Counts(f"{where}, prefill row", both[:, 1], "prefill")

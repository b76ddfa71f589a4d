"""kTransformers' activation counts: what `--kt-expert-placement-strategy frequency` reads.

`--init-expert-location` names it: a .pt file with a tensor, or `{"logical_count": tensor}`, [layers, experts] or
[steps, layers, experts] (sglang-kt 0.7.2, layers/moe/kt_ep_wrapper.py). What `--record-kt-gpu-expert-distribution`
writes is SGLang's recorder file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...errors import TraceError
from .shape import MoeShape
from .tally import Counts, Piece
from .torchfile import is_tensor, to_numpy


def looks_like(value: Any) -> str:
    if is_tensor(value, (2, 3)):
        return f"a tensor {list(value.shape)}"
    return "`logical_count` alone" if isinstance(value, dict) and set(value) == {"logical_count"} else ""


def pieces(value: Any, where: str, shape: MoeShape) -> Iterator[Piece]:
    counts = value.get("logical_count") if isinstance(value, dict) else value
    if counts is None:
        raise TraceError("not kTransformers' counts", where=where, found="expected a tensor, or `logical_count`")
    yield Counts(where, to_numpy(counts, where))

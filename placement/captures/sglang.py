"""SGLang's expert distribution recorder (`--expert-distribution-recorder-mode`): `expert_distribution_recorder_*.pt`.

From python/sglang/srt/eplb/expert_distribution.py, 0.5.23. `stat` and `stat_approx` write `logical_count` int32
[steps, layers, experts] (unused steps of a ring buffer are zero); `per_pass` and `per_token` write one file per rank
with `records` and `last_physical_to_logical_map` [layers, physical experts]. Ids in records are physical, and only the
last map is kept: a record from before a rebalance is counted wrongly, which the file does not show.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ...errors import TraceError
from ..traffic import Phase
from .shape import OTHER_MODEL, MoeShape
from .tally import Counts, Piece, TopK
from .torchfile import to_numpy

FORWARD_MODES: dict[int, Phase] = {1: "prefill", 2: "decode", 5: "decode"}
"""ForwardMode EXTEND, DECODE, TARGET_VERIFY; MIXED (3) is both, and later numbers changed between versions."""


def looks_like(value: Any) -> str:
    """Why a .pt file is the recorder's, or ""."""
    if not isinstance(value, dict):
        return ""
    if "records" in value and "last_physical_to_logical_map" in value:
        return "`records` and `last_physical_to_logical_map`"
    return "`logical_count` of a `rank`" if "logical_count" in value and "rank" in value else ""


def pieces(value: Any, where: str, shape: MoeShape) -> Iterator[Piece]:
    """One piece of a `stat` file, one per forward pass of the others."""
    if isinstance(value, dict) and "logical_count" in value:
        yield Counts(f"{where}, logical_count", to_numpy(value["logical_count"], f"{where}, logical_count"))
        return
    if not isinstance(value, dict) or not isinstance(value.get("records"), list):
        raise TraceError(
            "not a file of SGLang's recorder", where=where, found="expected `logical_count` or a list of `records`"
        )
    logical = _map(value.get("last_physical_to_logical_map"), where, shape)  # [L', P]
    for number, record in enumerate(value["records"]):
        at = f"{where}, record {number}"
        if not isinstance(record, dict):
            raise TraceError("a record is no dict", where=at, found=f"found {type(record).__name__}")
        phase = FORWARD_MODES.get(record.get("forward_mode", 0))
        if "topk_ids_of_layer" in record:
            yield TopK(at, _ids(record, logical, at, shape), phase)
        else:
            counts = to_numpy(record.get("global_physical_count"), f"{at}, global_physical_count")  # [L', P]
            yield Counts(at, _logical_counts(counts, logical, at, shape), phase)


def _map(value: Any, where: str, shape: MoeShape) -> np.ndarray:
    """[L', P]: the logical expert of each physical one."""
    where = f"{where}, last_physical_to_logical_map"
    logical = to_numpy(value, where)
    if logical.ndim != 2 or logical.dtype.kind not in "iu" or not logical.size:
        raise TraceError("the expert map has the wrong shape", where=where, found=f"found {list(logical.shape)}")
    if logical.min() < 0 or logical.max() >= shape.experts:
        raise TraceError(
            "the expert map names experts that the model lacks",
            where=where,
            found=f"expected 0..{shape.experts - 1}, found {logical.min()}..{logical.max()}",
            mend=OTHER_MODEL,
        )
    return logical


def _ids(record: dict[str, Any], logical: np.ndarray, where: str, shape: MoeShape) -> np.ndarray:
    """Logical ids [T, L', k] of a per_token record. The recorder's rows are 8 wide, padded with -1."""
    ids = to_numpy(record["topk_ids_of_layer"], f"{where}, topk_ids_of_layer")  # [L', T, 8]
    tokens = record.get("input_ids")
    if ids.ndim != 3 or len(ids) != len(logical) or ids.dtype.kind not in "iu":
        found = f"expected integers [{len(logical)}, tokens, 8], found {ids.dtype} {list(ids.shape)}"
        raise TraceError("topk_ids_of_layer has the wrong shape", where=where, found=found)
    if isinstance(tokens, list) and len(tokens) != ids.shape[1]:
        found = f"expected {len(tokens)} as in input_ids, found {ids.shape[1]}"
        raise TraceError("a record has lost tokens", where=where, found=found, mend="record again with smaller batches")
    ranks = ids.shape[2]
    if ranks < shape.top_k or (ids[:, :, shape.top_k :] != -1).any():
        used = int((ids != -1).any(axis=(0, 1)).sum())
        raise TraceError(
            "the recorder's top-k is not the model's",
            where=where,
            found=f"expected {shape.top_k} experts per token, found {used} of {ranks} columns used",
            mend="record with --disable-shared-experts-fusion; the recorder holds at most 8 experts per token",
        )
    ids = ids[:, :, : shape.top_k]
    if ids.size and (ids.min() < -1 or ids.max() >= logical.shape[1]):
        found = f"expected -1..{logical.shape[1] - 1}, found {ids.min()}..{ids.max()}"
        raise TraceError("routing id out of range", where=where, found=found)
    mapped = np.take_along_axis(logical[:, None, :], np.maximum(ids, 0).astype(np.int64), axis=2)  # [L', T, k]
    return np.where(ids == -1, -1, mapped).transpose(1, 0, 2)


def _logical_counts(counts: np.ndarray, logical: np.ndarray, where: str, shape: MoeShape) -> np.ndarray:
    """int64 [L', E] of physical counts [L', P]: replicas of an expert add up."""
    if counts.shape != logical.shape or counts.dtype.kind not in "iu":
        found = f"expected integers {list(logical.shape)}, found {counts.dtype} {list(counts.shape)}"
        raise TraceError("global_physical_count has the wrong shape", where=where, found=found)
    total = np.zeros((len(counts), shape.experts), dtype=np.int64)
    np.add.at(total, (np.arange(len(counts))[:, None], logical), counts)
    return total

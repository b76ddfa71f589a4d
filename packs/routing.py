"""What the router chose for every token of the traffic: counts by phase and source for the plan, and the ids.

The traffic is given to the model as text, so its phases are those that it would have when served: tokens that the model
wrote (assistant turns, by the role spans of a trace set) pass through the experts while it decodes, all others in
prefill. Documents that do not say who wrote them count as prefill.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Final

import numpy as np
import torch

from ..calibrate.passes import LayerTraffic
from ..calibrate.traces import Window
from ..placement import TokenLabels, TrafficTable
from ..placement.traffic import PHASES
from ..tensors import write_tensors

ROUTING: Final = "calibration/routing"
TOKENS: Final = f"{ROUTING}/tokens.safetensors"

MAX_SOURCES: Final = 32
"""Sources told apart, those of most tokens: a log's file name may be one, and a table holds counts of each."""


def label_tokens(windows: Sequence[Window]) -> TokenLabels:
    """Phase and source of every token, window after window. Sources beyond MAX_SOURCES, and "", are unknown."""
    sizes: Counter[str] = Counter()
    for window in windows:
        sizes[window.source] += len(window.ids)
    largest = sorted((name for name in sizes if name), key=lambda name: (-sizes[name], name))[:MAX_SOURCES]
    sources = tuple(sorted(largest))
    number = {name: place for place, name in enumerate(sources)}
    prefill, decode = (PHASES.index(phase) for phase in ("prefill", "decode"))
    phase = [
        np.full(len(w.ids), prefill, np.int8)
        if w.generated is None
        else np.where(w.generated, decode, prefill).astype(np.int8)
        for w in windows
    ]
    source = [np.full(len(w.ids), number.get(w.source, -1), np.int8) for w in windows]
    return TokenLabels(np.concatenate(phase), np.concatenate(source), sources)


def layer_table(traffic: LayerTraffic, labels: TokenLabels) -> TrafficTable:
    """The traffic table of one layer. Raises TraceError where the routing cannot be true."""
    return TrafficTable.from_topk({traffic.layer.index: traffic.topk_ids.numpy()}, len(traffic.counts), labels)


def routing_file(pack: Path, layer: int) -> Path:
    """Of one layer: topk_ids uint16 [N, k], topk_weights float16 [N, k], N tokens in the order of the windows."""
    return pack / ROUTING / f"layer-{layer:03d}.safetensors"


def write_routing(pack: Path, traffic: LayerTraffic) -> None:
    """`routing_file` of a layer."""
    path = routing_file(pack, traffic.layer.index)
    path.parent.mkdir(parents=True, exist_ok=True)
    ids, weights = traffic.topk_ids.to(torch.uint16), traffic.topk_weights.to(torch.float16)
    write_tensors(path, {"topk_ids": ids, "topk_weights": weights})


def write_tokens(pack: Path, windows: Sequence[Window], labels: TokenLabels) -> None:
    """What the rows of all `routing_file`s are: starts int64 [windows + 1], the first row of each window, and N;
    phase int8 [N], 0 prefill, 1 decode; source int8 [N], index into the traffic table's sources, -1 for others."""
    starts = np.array([0, *accumulate(len(window.ids) for window in windows)], np.int64)
    named = {"starts": starts, "phase": labels.phase, "source": labels.source}
    write_tensors(pack / TOKENS, {name: torch.from_numpy(array) for name, array in named.items()})

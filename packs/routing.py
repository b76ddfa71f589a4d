"""What the router chose for every token of the traffic: counts by phase and source for the plan, and the ids.

The traffic is given to the model as text, so its phases are those that it would have when served: tokens that the model
wrote (assistant turns, by the role spans of a trace set) pass through the experts while it decodes, all others in
prefill. Documents that do not say who wrote them count as prefill.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Final

import numpy as np
import torch

from ..calibrate.passes import LayerTraffic
from ..calibrate.traces import Window
from ..errors import TraceError
from ..placement import Recorded, TokenLabels, TrafficTable
from ..placement.recorded import check_range
from ..placement.traffic import PACK_TABLE, PHASES
from ..placement.traffic_file import map_tensors
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
    starts = conversation_starts(window_starts(windows), documents(windows))
    return TokenLabels(np.concatenate(phase), np.concatenate(source), sources, starts)


def window_starts(windows: Sequence[Window]) -> np.ndarray:
    """int64 [windows + 1]: the first token of each window, and N."""
    return np.array([0, *accumulate(len(window.ids) for window in windows)], np.int64)


def documents(windows: Sequence[Window]) -> np.ndarray:
    """int64 [windows]: the number of each window's conversation, whose windows follow on each other: those of one
    `Window.conversation` and one source (`traces.together`)."""
    names = [(window.conversation or window.document, window.source) for window in windows]
    return np.cumsum([0, *(one != other for one, other in pairwise(names))], dtype=np.int64)


def conversation_starts(starts: np.ndarray, document: np.ndarray) -> np.ndarray:
    """int64 [C + 1]: the first token of each conversation, and N."""
    return np.append(starts[:-1][np.diff(document, prepend=-1) != 0], starts[-1])


def layer_table(traffic: LayerTraffic, labels: TokenLabels) -> TrafficTable:
    """The traffic table of one layer, with windows. Raises TraceError where the routing cannot be true."""
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
    document int64 [windows], the number of each window's conversation; phase int8 [N], 0 prefill, 1 decode; source int8
    [N], index into the traffic table's sources, -1 for others."""
    named = {
        "starts": window_starts(windows),
        "document": documents(windows),
        "phase": labels.phase,
        "source": labels.source,
    }
    write_tensors(pack / TOKENS, {name: torch.from_numpy(array) for name, array in named.items()})


def pack_recorded(pack: Path) -> Recorded | None:
    """The recorded routing of a pack, its ids memory-mapped; None for a pack that holds none (`--no-routing`).

    Packs of earlier versions do not say which conversation a window
    belongs to: each of their windows counts as a conversation of its own. TraceError for files that are damaged or do
    not fit each other.
    """
    if not (pack / TOKENS).is_file():
        return None
    table = TrafficTable.load(pack / PACK_TABLE)
    of_tokens = map_tensors(pack / TOKENS)
    ids = [_topk_ids(routing_file(pack, layer)) for layer in table.layers]
    try:
        starts, phase, source = (np.array(of_tokens[name]) for name in ("starts", "phase", "source"))
        document = np.array(of_tokens.get("document", np.arange(len(starts) - 1)))
        sizes = (len(document) + 1, len(phase), starts.size and starts[-1])
        if sizes != (len(starts), len(source), len(phase)) or not len(phase) or (np.diff(document) < 0).any():
            found = f"found {len(starts)} starts, {len(document)} windows, {len(phase)} and {len(source)} tokens"
            raise TraceError("the recorded routing does not say whose it is", where="tokens.safetensors", found=found)
        first = conversation_starts(starts, document)
        layers, experts = table.layers, table.counts.shape[1]
        recorded = Recorded(ids, layers, experts, first, phase, source[first[:-1]], tuple(table.sources))
        check_range(recorded)
    except (KeyError, IndexError) as error:
        raise _damaged(pack / TOKENS, f"found no {error}") from error
    except TraceError as error:
        raise _damaged(pack / ROUTING, f"{error.what} ({error.where}: {error.found})") from error
    return recorded


def _topk_ids(path: Path) -> np.ndarray:
    try:
        return map_tensors(path)["topk_ids"]
    except KeyError as error:
        raise _damaged(path, "found no topk_ids") from error


def _damaged(path: Path, found: str) -> TraceError:
    mend = "restore it from a copy of the pack; moefit verify finds what is damaged"
    return TraceError("the pack's recorded routing is damaged", where=str(path), found=found, mend=mend)

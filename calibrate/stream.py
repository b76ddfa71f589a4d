"""Run many windows through a model one layer at a time, and hand out what calibration needs on the way.

A layer is taken in two steps, so that experts can be replaced between them: `capture_layer` runs everything
up to the experts, `finish_layer` the experts (original, or decoded from a pack) and the rest. Every result is
the same for any number of threads: work is cut by window and by expert, and sums are taken in expert order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import CalibrationError
from ..parallel import ordered_map
from .family import ExpertWeights, Layer, Model, Routed, State

Experts = Callable[[int], ExpertWeights]
"""Expert number -> its weights. Called from worker threads."""

Activation = Callable[[Tensor, Tensor], Tensor]
"""`Layer.activation`."""


@dataclass(frozen=True)
class Capture:
    """What reaches one layer's experts, all windows one after the other (N tokens). See `family.Routed`.

    x: float32 [N, H], the experts' input.
    topk_ids: int64 [N, k]; topk_weights: float32 [N, k], scaling factors included.
    bounds: int [windows + 1], first token of each window, and N.
    """

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    bounds: list[int]

    def window(self, index: int) -> slice:
        """Tokens of one window."""
        return slice(self.bounds[index], self.bounds[index + 1])


def _places(ids: Tensor) -> dict[int, Tensor]:
    """Value -> its places int64 [n] in `ids` [M], ascending; values ascending, those that occur."""
    order = ids.argsort(stable=True)
    found, counts = ids[order].unique_consecutive(return_counts=True)
    return dict(zip(found.tolist(), order.split(counts.tolist()), strict=True))


def tokens_by_expert(topk_ids: Tensor, topk_weights: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
    """Expert -> (its tokens int64 [n], ascending; their weights [n]), for experts with at least one token."""
    weights = topk_weights.flatten()
    return {
        expert: (place // topk_ids.shape[1], weights[place]) for expert, place in _places(topk_ids.flatten()).items()
    }


def adjacent_tokens(
    layer: Layer, windows: Sequence[tuple[Tensor, Tensor]], enough: int, threads: int
) -> dict[int, Tensor]:
    """Tokens int64 [n] for which an expert came just behind the top-k, for experts that fewer than `enough` chose.

    windows: (x [T, H], topk_ids [T, k]) of the layer. Tokens count over all of them, and are handed out on the CPU.
    Ranks k+1 to 2k, the better rank first, tokens in traffic order within a rank, as many as the expert lacks. The
    router is only asked again if some expert lacks any.
    """
    topk_ids = torch.cat([ids for _, ids in windows])
    tokens, k = topk_ids.shape
    counts = topk_ids.flatten().bincount(minlength=layer.experts)  # [E]
    starved = (counts < enough).nonzero().flatten().tolist()
    if not starved:
        return {}

    def one(window: tuple[Tensor, Tensor]) -> Tensor:
        x, ids = window
        return layer.next_ranks(x, ids, k).cpu()

    behind = torch.cat(list(ordered_map(one, windows, threads)))  # [N, at most k]
    places = _places(behind.T.flatten())  # rank by rank, each over all tokens
    return {expert: places[expert][: enough - int(counts[expert])] % tokens for expert in starved if expert in places}


def expert_forward(x: Tensor, weights: ExpertWeights, activation: Activation) -> Tensor:
    """One expert on x [n, H] -> [n, H]."""
    w1, w3, w2 = weights
    return activation(x @ w1.T, x @ w3.T) @ w2.T


def routed_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, weights: Experts, activation: Activation, threads: int
) -> Tensor:
    """Weighted sum of each token's experts: x [N, H], ids and weights [N, k] -> [N, H].

    weights is called once for each expert that a token is routed to, and for no other.
    """
    groups = tokens_by_expert(topk_ids, topk_weights)

    def one(expert: int) -> tuple[Tensor, Tensor]:
        tokens, share = groups[expert]
        return tokens, expert_forward(x[tokens], weights(expert), activation) * share.unsqueeze(1)

    out = torch.zeros_like(x)
    for tokens, y in ordered_map(one, groups, threads):
        out.index_add_(0, tokens, y)  # an expert has a token at most once; experts come in ascending order
    return out


def capture_layer(layer: Layer, states: list[State], ids: Sequence[Tensor], threads: int) -> Capture:
    """Everything up to the routed experts, of every window; ids: int64 [T] per window.

    `states` is updated in place, window by window, to lie between `before_experts` and `after_experts`, so
    that there are never two residuals of every window. Raises CalibrationError on a value that is not finite.
    """

    def one(window: int) -> Routed:
        routed = layer.before_experts(states[window], ids[window])
        if not routed.x.isfinite().all():
            raise CalibrationError(
                "the hidden state is not finite",
                where=f"layer {layer.index}, window {window}",
                mend="check the checkpoint's weights (moefit inspect)",
            )
        return routed

    parts = []
    bounds = [0]
    for window, routed in enumerate(ordered_map(one, range(len(states)), threads)):
        states[window] = routed.state
        parts.append((routed.x, routed.topk_ids, routed.topk_weights))
        bounds.append(bounds[-1] + len(routed.x))
    x, topk_ids, topk_weights = (torch.cat(column) for column in zip(*parts, strict=True))
    return Capture(x, topk_ids, topk_weights, bounds)


def finish_layer(layer: Layer, states: list[State], capture: Capture, experts: Experts, threads: int) -> Tensor:
    """Routed experts, on all windows' tokens together, and what follows.

    `states` is updated in place, to lie before the next layer. Returns what the routed experts gave, [N, H].
    """
    routing = capture.topk_ids, capture.topk_weights
    output = routed_experts(capture.x, *routing, experts, layer.activation, threads)

    def one(window: int) -> State:
        return layer.after_experts(states[window], output[capture.window(window)])

    for window, state in enumerate(ordered_map(one, range(len(states)), threads)):
        states[window] = state
    return output


def run_layer(layer: Layer, states: list[State], ids: Sequence[Tensor], experts: Experts, threads: int) -> Capture:
    """`capture_layer`, then `finish_layer`; `states` is updated in place."""
    capture = capture_layer(layer, states, ids, threads)
    finish_layer(layer, states, capture, experts, threads)
    return capture


def run_model(
    model: Model,
    ids: Sequence[Tensor],
    threads: int,
    experts: Callable[[Layer], Experts] = lambda layer: layer.expert,
) -> list[State]:
    """States after the last layer of every window (ids: int64 [T] each), ready for `model.logits`.

    experts: the routed experts of a layer; the original ones unless given.
    """
    states = [model.embed(window) for window in ids]
    for index in range(model.layers):
        layer = model.load_layer(index)
        run_layer(layer, states, ids, experts(layer), threads)
    return states

"""What the streamed passes ask of a model family: everything about a model but its routed experts' arithmetic.

A layer is run in two steps, with its routed experts between them, so that all windows' tokens go through an expert
together and experts can be replaced:

    routed = layer.before_experts(state, ids)      # attention, norms, shared experts, router
    output = ...                                   # weighted sum of the routed experts, [T, H]
    state = layer.after_experts(routed.state, output)

Families: `deepseek_v41` (own code) and `transformers_moe` (transformers' own modules).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..errors import TraceError
from .checkpoint import Checkpoint

State = dict[str, Tensor]
"""All that later layers need of one window, on the model's device; every tensor contiguous, first dimension tokens or
something else that grows with the window. Each family names its own tensors."""

ExpertWeights = tuple[Tensor, Tensor, Tensor]
"""w1 (gate) [I, H], w3 (up) [I, H], w2 (down) [H, I], float32 on the model's device."""


@dataclass(frozen=True)
class Routed:
    """One window of T tokens in front of a layer's routed experts.

    state: what `after_experts` adds their output to. x: float32 [T, H], their input. topk_ids: int64 [T, k].
    topk_weights: float32 [T, k], scaling factors included. A layer without routed experts has H = k = 0 here.
    """

    state: State
    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor


class Layer(Protocol):
    """One layer, loaded without its routed experts. experts: how many it has, 0 if it is dense. hidden_size: H."""

    @property
    def index(self) -> int: ...
    @property
    def experts(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...

    def before_experts(self, state: State, ids: Tensor, chosen: Tensor | None = None) -> Routed:
        """Everything up to the routed experts. ids: int64 [T]. Differentiable in the tensors of `Model.smooth`.

        chosen: int64 [T, k], experts chosen before; the weights are then theirs, whatever rounding makes of ties.
        """
        ...

    def after_experts(self, state: State, output: Tensor) -> State:
        """The state before the next layer. state: of `Routed`. output [T, H]: weighted sum of the routed experts."""
        ...

    def kept(self, state: State) -> State:
        """What `output_gradient` needs of a `Routed.state`, by the names in `Model.kept`; may be nothing."""
        ...

    def output_gradient(self, kept: State, behind: State) -> Tensor:
        """Gradients [S, T, H] at the routed experts' output from those [S, T, ...] at the state behind the layer."""
        ...

    def next_ranks(self, x: Tensor, chosen: Tensor, ranks: int) -> Tensor:
        """Experts int64 [T, min(ranks, E - k)] that come just behind `chosen` [T, k] in the router's order; x [T, H].

        [T, 0] where the router does not rank experts (hash routing)."""
        ...

    def expert(self, expert: int) -> ExpertWeights:
        """The original routed expert, read and decoded now. May be called from several threads."""
        ...

    def activation(self, gate: Tensor, up: Tensor) -> Tensor:
        """The down projection's input from the outputs of gate and up, any shape."""
        ...


class Model(Protocol):
    """A checkpoint's configuration; holds no layer.

    layers: of the backbone. vocabulary: V. device: where states live and layers compute. smooth: names of the state's
    tensors that carry a gradient. head_reads: those of them that `logits` depends on, one row per token.
    kept: names of what `Layer.kept` gives.
    kv_quantization: whether what key/value caches hold is rounded as the release does.
    banned: tokens that no window may hold.
    """

    @property
    def checkpoint(self) -> Checkpoint: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def layers(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def head_reads(self) -> tuple[str, ...]: ...
    @property
    def kept(self) -> tuple[str, ...]: ...
    @property
    def smooth(self) -> tuple[str, ...]: ...
    @property
    def kv_quantization(self) -> bool: ...
    @property
    def banned(self) -> tuple[int, ...]: ...

    def embed(self, ids: Tensor) -> State:
        """State before layer 0 of one window. ids: int64 [T], T > 0, on the CPU. Raises TraceError for a bad token."""
        ...

    def check_ids(self, ids: Tensor, where: str = "") -> None:
        """Raise TraceError unless `ids` is a window this forward takes; `where` names it in the message."""
        ...

    def load_layer(self, layer: int) -> Layer:
        """Read layer `layer` without its routed experts, float32. Raises CheckpointError."""
        ...

    def read_ahead(self, layer: int) -> None:
        """Layer `layer` comes next: begin to read it (`Checkpoint.read_ahead`), if there is such a layer."""
        ...

    def logits(self, state: State, positions: slice = slice(None)) -> Tensor:
        """Logits float32 [T, V] of the state behind the last layer, or of some positions.

        Differentiable in `head_reads`; `state` may hold no more than these.

        The first call loads the output head, which stays in memory.
        """
        ...


def check_window(ids: Tensor, vocabulary: int, banned: tuple[int, ...], where: str) -> None:
    """`Model.check_ids` of a model with this vocabulary and these tokens that stand for images."""
    if ids.dtype != torch.int64 or ids.dim() != 1 or not len(ids):
        raise TraceError(
            "a window is not a row of token ids",
            where=where,
            found=f"expected int64 [T], T above 0, found {ids.dtype} {list(ids.shape)}",
        )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        raise TraceError(
            "a token does not exist in this model",
            where=where,
            found=f"expected ids from 0 to {vocabulary - 1}, found {low} to {high}",
            mend="tokenize with the checkpoint's own tokenizer.json",
        )
    images = torch.isin(ids, torch.tensor(banned, dtype=torch.int64))
    if images.any():
        position = int(images.nonzero()[0])
        raise TraceError(
            "a window contains an image",
            where=f"{where} position {position}".strip(),
            found=f"expected text, found image token {int(ids[position])}",
            mend="leave documents with images out",
        )

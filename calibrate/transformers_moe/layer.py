"""One decoder layer of transformers, run up to its routed experts and on from there.

The experts module is replaced by one that keeps what it is given and answers zero. The layer then computes everything
else: attention, norms, shared experts, router, residual streams. What it returns is the state behind the layer but for
the routed experts' part, which every supported family adds linearly (docs/families.md):

    plain residual       hidden [T, H]      += output
    hyper-connections    hidden [T, hc, H]  += post [T, hc, 1] * output [T, 1, H]        (DeepSeek-V4)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint import Checkpoint
from ..family import ExpertWeights, Routed, State
from .names import ExpertNames
from .weights import read_expert

HIDDEN = "hidden"
POST = "ffn_post"
HYPER_CONNECTION = "ffn_hc"  # a layer's module that returns (post [1, T, hc], comb, collapsed)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a layer behind its hidden state."""


class Experts(nn.Module):
    """Stands where a layer's routed experts were: keeps its arguments, thread by thread, and answers zero.

    original: the module that was there, on the meta device; only its activation is used.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.seen = threading.local()
        self.originals = (original,)  # a tuple, or it would be a submodule whose weights are missing

    def __deepcopy__(self, memo: dict[int, Any]) -> Experts:
        return Experts(*self.originals)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        self.seen.routed = hidden_states, top_k_index, top_k_weights
        return torch.zeros_like(hidden_states)


def take_out_experts(layer: nn.Module) -> bool:
    """Replace a decoder layer's routed experts by `Experts`; False for a dense layer, which has none."""
    for block in layer.modules():
        for name, module in block.named_children():
            weights = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
            if all(isinstance(weight, nn.Parameter) and weight.dim() == 3 for weight in weights):
                setattr(block, name, Experts(module))
                return True
    return False


class TransformersLayer:
    """A decoder layer without its routed experts, float32, on one device. See `calibrate.family.Layer`.

    Windows may go through it from several threads at once. On a card, an expert's stored bytes stay there once it was
    read, until the layer goes.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        arguments: Callable[[Tensor], Arguments],
        checkpoint: Checkpoint,
        names: ExpertNames,
        device: torch.device,
    ) -> None:
        """module: filled, its experts taken out. arguments: of a window's ids [T], what the model hands this layer."""
        self.index = index
        self.module = module
        self.arguments = arguments
        self.checkpoint, self.names, self.device = checkpoint, names, device
        self._stub = next((part for part in module.modules() if isinstance(part, Experts)), None)
        blocks = (part for part in module.modules() if self._stub is not None and self._stub in part.children())
        self._router: Any = next((block.gate for block in blocks), None)  # returns logits, weights, ids
        self._kept: dict[str, Tensor] | None = None if device.type == "cpu" else {}
        self._post = threading.local()
        if (hyper := getattr(module, HYPER_CONNECTION, None)) is not None:
            hyper.register_forward_hook(self._keep_post)

    @property
    def experts(self) -> int:
        return 0 if self._stub is None else self.names.sizes.experts

    @property
    def hidden_size(self) -> int:
        return self.names.sizes.hidden

    def before_experts(self, state: State, ids: Tensor, chosen: Tensor | None = None) -> Routed:
        """See `calibrate.family.Layer`; state: {"hidden": [T, H] or [T, hc, H]}."""
        positional, keywords = self.arguments(ids)
        hidden = self.module(state[HIDDEN].unsqueeze(0), *positional, **keywords).squeeze(0).contiguous()
        if self._stub is None:
            nothing = hidden.new_zeros(len(ids), 0)
            return Routed({HIDDEN: hidden}, nothing, nothing.long(), nothing)
        x, topk_ids, topk_weights = self._stub.seen.routed
        del self._stub.seen.routed
        after = {HIDDEN: hidden}
        if hasattr(self._post, "value"):
            after[POST] = self._post.value
            del self._post.value
        if chosen is None:
            return Routed(after, x, topk_ids, topk_weights)
        chosen = chosen.to(topk_ids.device)
        return Routed(after, x, chosen, aligned(topk_weights, topk_ids, chosen))

    def after_experts(self, state: State, output: Tensor) -> State:
        """The state before the next layer; a dense layer's is `state` as it is."""
        if self._stub is None:
            return state
        if POST in state:
            output = state[POST].unsqueeze(-1) * output.unsqueeze(1)  # [T, hc, H]
        return {HIDDEN: state[HIDDEN] + output}

    def kept(self, state: State) -> State:
        """ffn_post [T, hc] with hyper-connections, else nothing."""
        return {POST: state[POST]} if POST in state else {}

    def output_gradient(self, kept: State, behind: State) -> Tensor:
        """[S, T, H]; [S, T, 0] of a dense layer."""
        gradient = behind[HIDDEN]  # [S, T, H] or [S, T, hc, H]
        if self._stub is None:
            return gradient.new_zeros(*gradient.shape[:2], 0)
        return (gradient * kept[POST].unsqueeze(-1)).sum(2) if POST in kept else gradient

    def next_ranks(self, x: Tensor, chosen: Tensor, ranks: int) -> Tensor:
        """See `calibrate.family.Layer`. Where a router first limits itself to groups of experts (DeepSeek-V3), the
        order is that of all experts' scores, as if there were no groups."""
        router = self._router
        if router is None or hasattr(router, "tid2eid"):  # dense, or routed by token id
            return chosen.new_zeros(len(chosen), 0)
        order = router(x)[0]  # logits [T, E]
        if (bias := getattr(router, "e_score_correction_bias", None)) is not None:
            order = getattr(router, "score_fn", torch.sigmoid)(order) + bias
        others = order.scatter(1, chosen, -torch.inf)
        return others.topk(min(ranks, self.experts - chosen.shape[1]), dim=-1).indices

    def expert(self, expert: int) -> ExpertWeights:
        """The original routed expert, read now: w1 [I, H], w3 [I, H], w2 [H, I], float32."""
        sizes = self.names.sizes

        def read(projection: str, *shape: int) -> Tensor:
            source = self.names.source(self.index, expert, projection)
            return read_expert(self.checkpoint, source, (shape[0], shape[1]), self.device, self._kept)

        wide = sizes.intermediate, sizes.hidden
        return read("w1", *wide), read("w3", *wide), read("w2", sizes.hidden, sizes.intermediate)

    def activation(self, gate: Tensor, up: Tensor) -> Tensor:
        """By the code of the experts module itself (DeepSeek-V4 clamps both)."""
        if self._stub is None:
            raise ValueError(f"layer {self.index} has no routed experts")
        original: Any = self._stub.originals[0]
        return original._apply_gate(torch.cat([gate, up], -1))

    def _keep_post(self, module: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        self._post.value = output[0].squeeze(0).contiguous()  # [T, hc]


def aligned(weights: Tensor, ids: Tensor, chosen: Tensor) -> Tensor:
    """Weights [T, k] of the experts `chosen` [T, k], from those of `ids` [T, k], which are the same but for ties.

    A chosen expert that is no longer among `ids` tied with one that is: it takes the weight of those that came instead
    (their mean), as a constant.
    """
    same = chosen.unsqueeze(2) == ids.unsqueeze(1)  # [T, chosen k, k]
    found = same.any(2)
    taken = (weights.unsqueeze(1) * same).sum(2)
    if found.all():
        return taken
    instead = (weights * ~same.any(1)).sum(1, keepdim=True) / (~found).sum(1, keepdim=True).clamp(min=1)
    return torch.where(found, taken, instead.detach())

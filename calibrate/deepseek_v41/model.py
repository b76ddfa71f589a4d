"""The text backbone of DeepSeek-V4.1, one layer in memory at a time.

    model = V41Model(checkpoint)  # kv_quantization=True: with the release's rounding of its key/value caches
    state = model.embed(ids)
    for i in range(model.layers):
        layer = model.load_layer(i)
        routed = layer.before_experts(state, ids)
        output = routed_experts(routed.x, routed.topk_ids, routed.topk_weights, layer.expert, ...)  # calibrate.stream
        state = layer.after_experts(routed.state, output)
    logits = model.logits(state)

Arithmetic: weights decoded to float32, float32 throughout, no quantization of activations; the KV cache is rounded only
when asked for (`kv_cache.py`).
One window (a piece of one document) at a time, no padding. Text only: image tokens are refused.

A window's `State` (`calibrate.family`) holds:
residual [T, hc, H], pre [T, hc]: the streams and the weights that fold them for the next sub-layer.
compressed_kv [C, D]: rotated latents of the last key/value source. index_keys [C, index D]: its index keys.
selected int32 [T, k], k at most index_topk: latents each query attends to, ascending; -1 first, for none.
candidates bool [T, blocks]: blocks of latents among which later index sources select.
ffn_post [T, hc]: how the routed experts' output is spread over the streams; only in front of `after_experts`.
A shared tensor is dropped as soon as no later layer reads it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ...errors import CalibrationError
from ..checkpoint import Checkpoint, wrong_shape
from ..family import ExpertWeights, Routed, State, check_window
from . import experts
from .attention import Attention
from .blocks import rms_norm
from .config import V41Config
from .engram import Engram, load_classes
from .hyper import HyperConnection, add_spread, fold, spread
from .weights import Weights


class V41Model:
    """A checkpoint's configuration and tokenizer classes; holds no layer. See `calibrate.family.Model`."""

    smooth = ("residual", "pre", "compressed_kv")  # the others only serve discrete choices, or are made of these
    head_reads = ("residual", "pre")
    kept = ("ffn_post",)

    def __init__(
        self,
        checkpoint: Checkpoint,
        kv_quantization: bool | None = False,
        device: torch.device | str = "cpu",
    ) -> None:
        """kv_quantization: round what the key/value caches hold as the release does (`kv_cache.py`); None: if the
        release serves the model so.

        Raises CheckpointError if config.json asks for anything this forward does not implement.
        """
        self.checkpoint, self.device = checkpoint, torch.device(device)
        config = V41Config.from_checkpoint(checkpoint.config)
        rounded = config.served_with_kv_quantization if kv_quantization is None else kv_quantization
        self.config = config.with_kv_quantization() if rounded else config
        shape = (self.config.vocab_size, self.config.hidden_size)
        found = checkpoint.info("embed.weight").shape
        if found != shape:
            raise wrong_shape(checkpoint, "embed.weight", shape, found)
        self._head_lock = threading.Lock()
        self._head: tuple[Tensor, Tensor] | None = None

    @property
    def layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def vocabulary(self) -> int:
        return self.config.vocab_size

    @property
    def kv_quantization(self) -> bool:
        return self.config.kv_quantization

    @property
    def banned(self) -> tuple[int, ...]:
        image = self.config.image_token_id
        return (image,) if image >= 0 else ()

    def embed(self, ids: Tensor) -> State:
        """State before layer 0 of one window. ids: int64 [T], T > 0. Raises TraceError for a bad token."""
        self.check_ids(ids)
        rows = self.checkpoint.rows("embed", ids).to(self.device)  # [T, H]
        streams = rows.unsqueeze(1).repeat(1, self.config.hc_mult, 1)  # [T, hc, H]
        pre = torch.zeros(len(ids), self.config.hc_mult, device=self.device)
        pre[:, 0] = 1.0  # the first sub-layer reads stream 0 alone
        return {"residual": streams, "pre": pre}

    def check_ids(self, ids: Tensor, where: str = "") -> None:
        """Raise TraceError unless `ids` is a window this forward takes; `where` names it in the message."""
        check_window(ids, self.vocabulary, self.banned, where)

    def load_layer(self, layer: int) -> V41Layer:
        """Read layer `layer`'s tensors, except routed experts and the Engram table, as float32."""
        return V41Layer.load(self, layer)

    def read_ahead(self, layer: int) -> None:
        """See `calibrate.family.Model`. The Engram table stays out: its rows are read on demand."""
        prefix = f"layers.{layer}."
        names = (name for name in self.checkpoint.tensors if name.startswith(prefix))
        self.checkpoint.read_ahead(name for name in names if ".engram.embed." not in name)

    def logits(self, state: State, positions: slice = slice(None)) -> Tensor:
        """Logits float32 [T, vocab] of the state after the last layer, or of some positions of it.

        The first call loads the output head, which stays in memory.
        """
        norm, head = self._load_head()
        x = fold(state["residual"][positions], state["pre"][positions])
        return rms_norm(x, norm, self.config.rms_norm_eps) @ head.T

    @cached_property
    def classes(self) -> np.ndarray:
        """The tokenizer's classes that Engram hashes (`engram.load_classes`)."""
        return load_classes(self.checkpoint.path, self.config)

    def _load_head(self) -> tuple[Tensor, Tensor]:
        with self._head_lock:  # windows are scored in parallel; the head must not be read twice
            if self._head is None:
                weights, hidden = Weights(self.checkpoint, "", self.device), self.config.hidden_size
                self._head = weights("norm", hidden), weights("head", self.config.vocab_size, hidden)
            return self._head


@dataclass(frozen=True)
class V41Layer:
    """One layer without its routed experts; all weights float32. See `calibrate.family.Layer`.

    On a card, an expert's stored bytes stay there once it was read, until the layer goes: groups of windows need it
    again and again.
    """

    weights: Weights  # the checkpoint's tensors of this layer
    config: V41Config
    index: int
    engram: Engram | None
    hc_attn: HyperConnection
    hc_ffn: HyperConnection
    attn_norm: Tensor  # [H]
    ffn_norm: Tensor  # [H]
    attention: Attention
    gate: Tensor  # [E, H]
    gate_bias: Tensor  # [E]
    shared_w1: Tensor  # [I, H]
    shared_w3: Tensor  # [I, H]
    shared_w2: Tensor  # [H, I]

    @staticmethod
    def load(model: V41Model, layer: int) -> V41Layer:
        """Raises CheckpointError naming a tensor that is missing or not of the shape config.json implies."""
        config = model.config
        weights = Weights(model.checkpoint, f"layers.{layer}.", model.device)
        hidden, inter = config.hidden_size, config.moe_intermediate_size
        has_engram = layer in config.engram_layer_ids
        return V41Layer(
            weights=weights,
            config=config,
            index=layer,
            engram=Engram.load(weights.under("engram"), config, layer, model.classes) if has_engram else None,
            hc_attn=HyperConnection.load(weights, "hc_attn", config),
            hc_ffn=HyperConnection.load(weights, "hc_ffn", config),
            attn_norm=weights("attn_norm", hidden),
            ffn_norm=weights("ffn_norm", hidden),
            attention=Attention.load(weights.under("attn"), config, layer),
            gate=weights("ffn.gate", config.n_routed_experts, hidden),
            gate_bias=weights("ffn.gate.bias", config.n_routed_experts),
            shared_w1=weights("ffn.shared_experts.w1", inter, hidden),
            shared_w3=weights("ffn.shared_experts.w3", inter, hidden),
            shared_w2=weights("ffn.shared_experts.w2", hidden, inter),
        )

    def expert(self, expert: int) -> ExpertWeights:
        """The original routed expert, read now: w1 [I, H], w3 [I, H], w2 [H, I], float32."""
        weights = self.expert_weights.under(f"{expert}")
        hidden, inter = self.config.hidden_size, self.config.moe_intermediate_size
        return weights("w1", inter, hidden), weights("w3", inter, hidden), weights("w2", hidden, inter)

    @cached_property
    def expert_weights(self) -> Weights:
        kept: dict[str, Tensor] | None = None if self.weights.device.type == "cpu" else {}
        return replace(self.weights.under("ffn.experts"), kept=kept)

    @property
    def experts(self) -> int:
        return self.config.n_routed_experts

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    def before_experts(self, state: State, ids: Tensor, chosen: Tensor | None = None) -> Routed:
        """Engram, attention, the shared expert and what surrounds them.

        ids: int64 [T], the window's tokens (Engram hashes them). chosen: experts [T, k] instead of the router's choice.
        """
        config, eps = self.config, self.config.rms_norm_eps
        residual = state["residual"]
        if self.engram is not None:
            residual = self.engram.forward(residual, ids, config)

        attn_pre, post, comb = self.hc_attn.coefficients(residual, config)
        x = rms_norm(fold(residual, state["pre"]), self.attn_norm, eps)
        output, shared = self.attention.forward(x, self._shared(state))
        residual = spread(output, residual, post, comb)

        ffn_pre, post, comb = self.hc_ffn.coefficients(residual, config)
        x = rms_norm(fold(residual, attn_pre), self.ffn_norm, eps)
        residual = spread(self.shared_expert(x), residual, post, comb)  # the routed experts' output is added later
        streams = {"residual": residual, "pre": ffn_pre, "ffn_post": post}
        merged = state | shared
        carried = {name: merged[name] for name in sorted(config.shared_carried(self.index))}
        state = {name: tensor.contiguous() for name, tensor in (carried | streams).items()}
        if chosen is None:
            return Routed(state, x, *self.route(x))
        return Routed(state, x, chosen, experts.routing_weights(x, chosen, self.gate, config))

    def _shared(self, state: State) -> State:
        """The tensors this layer takes over from earlier ones."""
        wanted = self.config.shared_read(self.index) - self.config.shared_made(self.index)
        if missing := sorted(wanted - state.keys()):
            raise CalibrationError(
                "a window's state is not the one before this layer",
                where=f"layer {self.index}",
                found=f"expected {', '.join(missing)}, found {', '.join(sorted(state))}",
                mend="go on from the layer at which the state was saved",
            )
        return {name: state[name] for name in sorted(wanted)}

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Routed experts of x [T, H]: ids int64 [T, k], weights float32 [T, k]."""
        return experts.route(x, self.gate, self.gate_bias, self.config)

    def next_ranks(self, x: Tensor, chosen: Tensor, ranks: int) -> Tensor:
        """Ids int64 [T, min(ranks, E - k)] that come next in the router's order for x [T, H], after `chosen` [T, k]."""
        return experts.next_ranks(x, chosen, ranks, self.gate, self.gate_bias)

    def shared_expert(self, x: Tensor) -> Tensor:
        """Output [T, H] of the shared expert."""
        return self.activation(x @ self.shared_w1.T, x @ self.shared_w3.T) @ self.shared_w2.T

    def after_experts(self, state: State, output: Tensor) -> State:
        """Spread the routed experts' output [T, H] over the streams: the next layer's state."""
        state = dict(state)
        post = state.pop("ffn_post")
        state["residual"] = add_spread(output, state["residual"], post)
        return state

    def kept(self, state: State) -> State:
        """ffn_post [T, hc]."""
        return {"ffn_post": state["ffn_post"]}

    def output_gradient(self, kept: State, behind: State) -> Tensor:
        """`after_experts` made streams[j] = ... + post[j] output: [S, T, H]."""
        return (behind["residual"] * kept["ffn_post"].unsqueeze(-1)).sum(2)

    def activation(self, gate: Tensor, up: Tensor) -> Tensor:
        """`experts.clamped_swiglu` at the model's limit."""
        return experts.clamped_swiglu(gate, up, self.config.swiglu_limit)

"""Compressed sparse attention (CSA2): a sliding window plus selected compressed key/value latents.

One latent of `head_dim` serves all heads as key and as value. Source layers compute compressed latents and
select some of them per query; the layers after them share both, through the state. Queries go through in blocks, and
where many latents are there and few are selected, those are gathered: no tensor has the extent [heads, T, T] or [T, T].
Source: the DeepSeek-V4.1 reference inference code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .blocks import by_blocks, rms_norm
from .config import V41Config
from .indexer import Indexer, mask
from .kv_cache import round_latents, round_window
from .rope import frequencies, rotate
from .weights import Weights

SPARSE = 4
"""Selected latents are gathered where more than so many times as many are there; below, one product with all of them
and a mask is faster (measured, two CPU cores)."""
GATHERED_QUERIES = {"cpu": 16, "cuda": 256}
"""Queries whose keys are gathered at a time, by device: at V4.1's widths 21 and 336 MB. A card needs many."""


@dataclass(frozen=True)
class Compressor:
    """Pools `ratio` positions into one latent: wkv, wgate [D, H] (no gate at ratio 1), norm [D]."""

    wkv: Tensor
    wgate: Tensor | None
    norm: Tensor

    @staticmethod
    def load(weights: Weights, config: V41Config, layer: int) -> Compressor:
        hidden, dim = config.hidden_size, config.head_dim
        return Compressor(
            wkv=weights("wkv", dim, hidden),
            wgate=weights("wgate", dim, hidden) if config.compress_ratios[layer] > 1 else None,
            norm=weights("norm", dim),
        )

    def forward(self, x: Tensor, ratio: int, eps: float) -> Tensor:
        """x [T, H] -> latents [T // ratio, D], not yet rotated; an incomplete last group is left out."""
        if self.wgate is None:
            return rms_norm(x @ self.wkv.T, self.norm, eps)
        groups = x[: len(x) - len(x) % ratio].unflatten(0, (-1, ratio))  # [C, ratio, H]
        share = (groups @ self.wgate.T).softmax(dim=1)  # [C, ratio, D]
        return rms_norm((groups @ self.wkv.T * share).sum(dim=1), self.norm, eps)


@dataclass(frozen=True)
class Attention:
    """Weights of one layer's attention, float32, and what it owns as a source layer."""

    config: V41Config
    layer: int
    wq_a: Tensor  # [q_lora, H]
    q_norm: Tensor
    wq_b: Tensor  # [heads D, q_lora]
    wkv: Tensor  # [D, H]
    kv_norm: Tensor
    sink: Tensor  # [heads]
    wo_a: Tensor  # [groups, o_lora, heads D / groups]
    wo_b: Tensor  # [H, groups o_lora]
    compressor: Compressor | None
    indexer: Indexer | None

    @staticmethod
    def load(weights: Weights, config: V41Config, layer: int) -> Attention:
        hidden, dim, q_lora = config.hidden_size, config.head_dim, config.q_lora_rank
        heads, groups, o_lora = config.num_attention_heads, config.o_groups, config.o_lora_rank
        is_kv_source = layer in config.kv_source_layer_ids
        is_index_source = layer in config.index_source_layer_ids
        return Attention(
            config=config,
            layer=layer,
            wq_a=weights("wq_a", q_lora, hidden),
            q_norm=weights("q_norm", q_lora),
            wq_b=weights("wq_b", heads * dim, q_lora),
            wkv=weights("wkv", dim, hidden),
            kv_norm=weights("kv_norm", dim),
            sink=weights("attn_sink", heads),
            wo_a=weights("wo_a", groups * o_lora, heads * dim // groups).unflatten(0, (groups, o_lora)),
            wo_b=weights("wo_b", hidden, groups * o_lora),
            compressor=Compressor.load(weights.under("compressor"), config, layer) if is_kv_source else None,
            indexer=Indexer.load(weights.under("indexer"), config, layer) if is_index_source else None,
        )

    def forward(self, x: Tensor, shared: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Attention of one window.

        x: [T, H], normed. shared: what this layer takes over from earlier ones (`V41Config.shared_read`).
        Returns the output [T, H] and `shared` with what this layer made itself.
        """
        config, ratio = self.config, self.config.compress_ratios[self.layer]
        eps = config.rms_norm_eps
        freqs = frequencies(config, compressing=ratio > 0).to(x.device)
        positions = torch.arange(len(x), device=x.device)
        queries = rms_norm(x @ self.wq_a.T, self.q_norm, eps)  # [T, q_lora]
        window = rotate(rms_norm(x @ self.wkv.T, self.kv_norm, eps), positions, freqs)  # [T, D]
        if config.kv_quantization:
            window = round_window(window)

        shared = dict(shared)
        if self.compressor is not None:
            latents = self.compressor.forward(x, ratio, eps)  # [C, D]
            starts = ratio * torch.arange(len(latents), device=x.device)  # a group stands at its first position
            rotated = rotate(latents, starts, freqs)
            shared["compressed_kv"] = round_latents(rotated) if config.kv_quantization else rotated
            if self.indexer is not None:
                shared["index_keys"] = self.indexer.keys(latents, starts, freqs)  # of latents as they were
        if self.indexer is not None:
            shared |= self.indexer.select(x, queries, shared, freqs)

        return by_blocks(lambda block: self._block(block, queries, window, shared, freqs), len(x)), shared

    def _block(self, block: slice, queries: Tensor, window: Tensor, shared: dict[str, Tensor], freqs: Tensor) -> Tensor:
        """Attention of the positions in `block` -> [B, H]."""
        config = self.config
        positions = torch.arange(block.start, block.stop, device=queries.device)  # [B]
        q = (queries[block] @ self.wq_b.T).unflatten(-1, (config.num_attention_heads, config.head_dim))
        q = rotate(q, positions, freqs)  # [B, heads, D]

        first = max(0, block.start - config.sliding_window + 1)
        keys = window[first : block.stop]  # [W, D]
        ratio = config.compress_ratios[self.layer]
        complete = block.stop // ratio if ratio else 0
        selected = shared["selected"][block] if ratio else positions.new_empty(len(positions), 0)  # [B, k]
        if ratio:
            keys = torch.cat([keys, shared["compressed_kv"][:complete]])  # [W + complete, D]
        if complete > SPARSE * selected.shape[1]:
            places = near(positions, config.sliding_window) - first  # [B, sliding]
            far = selected.long() + (block.stop - first)
            places = torch.cat([places.clamp(min=-1), far.where(selected >= 0, -1)], dim=1)
            mixed = attend_gathered(q, keys, places, self.sink)
        else:
            distance = positions[:, None] - torch.arange(first, block.stop, device=positions.device)  # [B, W]
            visible = (distance >= 0) & (distance < config.sliding_window)
            visible = torch.cat([visible, mask(selected, complete)], dim=1)  # [B, W + complete]
            mixed = attend(q, keys, visible, self.sink)
        # Values carry their position's rotation; turning back by the query's leaves the relative one.
        mixed = rotate(mixed, positions, freqs, inverse=True)
        grouped = mixed.reshape(len(mixed), config.o_groups, -1).transpose(0, 1)  # [groups, B, D']
        low = (grouped @ self.wo_a.mT).transpose(0, 1).flatten(1)  # [B, groups o_lora]
        return low @ self.wo_b.T


def near(positions: Tensor, width: int) -> Tensor:
    """The last `width` positions up to each of `positions` [B]: int64 [B, width], below 0 before the text."""
    return positions[:, None] - torch.arange(width - 1, -1, -1, device=positions.device)


def attend(q: Tensor, keys: Tensor, visible: Tensor, sink: Tensor) -> Tensor:
    """Softmax attention of q [B, heads, D] over keys [K, D], where visible [B, K] -> [B, heads, D].

    The keys are also the values.
    sink [heads] is the logit of a key without value: it only takes its share of the softmax.
    """
    return _attend(q, _with_sink(keys), visible, sink)


def attend_gathered(q: Tensor, keys: Tensor, places: Tensor, sink: Tensor) -> Tensor:
    """`attend` where each query sees the keys at its places int64 [B, k] and no others; -1 stands for none."""
    keys = _with_sink(keys)
    parts = []
    size = GATHERED_QUERIES[q.device.type]
    for some, at in zip(q.split(size), places.split(size), strict=True):
        chosen = F.pad(at.clamp(min=0), (0, 1), value=len(keys) - 1)  # [b, k + 1]
        own = keys.index_select(0, chosen.flatten()).unflatten(0, chosen.shape)  # [b, k + 1, D]
        parts.append(_attend(some, own, at >= 0, sink))
    return torch.cat(parts)


def _with_sink(keys: Tensor) -> Tensor:
    """The sink is one more key, visible to all, with a logit of its own and a value of 0: [K, D] -> [K + 1, D]."""
    return F.pad(keys, (0, 0, 0, 1))


def _attend(q: Tensor, keys: Tensor, visible: Tensor, sink: Tensor) -> Tensor:
    """`attend` over keys [K + 1, D] that end with the sink, or [B, K + 1, D] where each query has keys of its own."""
    bias = torch.zeros(len(visible), keys.shape[-2], device=keys.device)  # [B, K + 1]
    bias[:, :-1].masked_fill_(~visible, -torch.inf)
    scores = (q @ keys.mT).mul_(q.shape[-1] ** -0.5).add_(bias.unsqueeze(1))  # [B, heads, K + 1]
    with torch.no_grad():  # a constant; and what came back here would end at the key of zeros
        scores[..., -1] = sink
    return scores.softmax(-1) @ keys

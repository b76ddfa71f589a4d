"""The indexer of compressed sparse attention: which compressed latents each query attends to.

Two levels: the candidate source keeps the best blocks of latents per query, and the index sources after it
choose inside those. The choice is discrete: nothing here is differentiated.
Source: the DeepSeek-V4.1 reference inference code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .blocks import query_blocks, rms_norm
from .config import V41Config
from .kv_cache import round_index
from .rope import rotate
from .weights import Weights

KEY_BLOCK = 4096
"""Index keys at a time: with 32 heads and 256 queries their products take 134 MB."""


@dataclass(frozen=True)
class Indexer:
    """Weights of one index source: wq_b [heads D, q_lora], weights_proj [heads, H].

    wk [D, head_dim] and k_norm [D] at key/value sources only.
    """

    config: V41Config
    layer: int
    wq_b: Tensor
    weights_proj: Tensor
    wk: Tensor | None
    k_norm: Tensor | None

    @staticmethod
    def load(weights: Weights, config: V41Config, layer: int) -> Indexer:
        heads, dim = config.index_n_heads, config.index_head_dim
        owns_keys = layer in config.kv_source_layer_ids
        return Indexer(
            config=config,
            layer=layer,
            wq_b=weights("wq_b", heads * dim, config.q_lora_rank),
            weights_proj=weights("weights_proj", heads, config.hidden_size),
            wk=weights("wk", dim, config.head_dim) if owns_keys else None,
            k_norm=weights("k_norm", dim) if owns_keys else None,
        )

    @torch.no_grad()
    def keys(self, latents: Tensor, positions: Tensor, freqs: Tensor) -> Tensor:
        """Index keys [C, D] of a key/value source's latents [C, head_dim], before those are rotated."""
        if self.wk is None or self.k_norm is None:
            raise ValueError(f"layer {self.layer} is not a key/value source")
        keys = rotate(rms_norm(latents @ self.wk.T, self.k_norm, self.config.rms_norm_eps), positions, freqs)
        return round_index(keys) if self.config.kv_quantization else keys

    @torch.no_grad()
    def select(self, x: Tensor, queries: Tensor, shared: dict[str, Tensor], freqs: Tensor) -> dict[str, Tensor]:
        """x [T, H], queries [T, q_lora] -> "selected" (`best`), and "candidates" at their source (`best_blocks`)."""
        config = self.config
        keys = shared["index_keys"]
        ratio = config.compress_ratios[self.layer]
        selected, candidates = [], []
        for block in query_blocks(len(x)):
            scores = self._scores(block, x, queries, keys, freqs)  # [B, C]
            complete = (torch.arange(block.start, block.stop, device=x.device)[:, None] + 1) // ratio  # [B, 1]
            scores.masked_fill_(torch.arange(len(keys), device=x.device) >= complete, -torch.inf)
            if self.layer == config.candidate_source_layer_id:
                candidates.append(best_blocks(scores, complete, config))
            elif "candidates" in shared:
                inside = shared["candidates"][block].repeat_interleave(config.candidate_block_size, dim=1)
                scores.masked_fill_(~inside[:, : len(keys)], -torch.inf)
            selected.append(best(scores, config.index_topk))  # [B, k]
        made = {"selected": torch.cat(selected)}
        return made | {"candidates": torch.cat(candidates)} if candidates else made

    def _scores(self, block: slice, x: Tensor, queries: Tensor, keys: Tensor, freqs: Tensor) -> Tensor:
        """Score of every latent for the queries in `block`, [B, C]: sum over heads of weight * relu(q k)."""
        heads, dim = self.config.index_n_heads, self.config.index_head_dim
        q = (queries[block] @ self.wq_b.T).unflatten(-1, (heads, dim))
        q = rotate(q, torch.arange(block.start, block.stop, device=q.device), freqs)  # [B, heads, D]
        if self.config.kv_quantization:
            q = round_index(q)
        weights = (x[block] @ self.weights_proj.T) * (dim**-0.5 * heads**-0.5)  # [B, heads]
        parts = [(weights.unsqueeze(1) @ (q @ some.T).relu_()).squeeze(1) for some in keys.split(KEY_BLOCK)]
        return torch.cat(parts, dim=1)


def best(scores: Tensor, count: int) -> Tensor:
    """Places of the `count` largest finite scores of each row [B, C]: int32 [B, min(count, C)], ascending.

    Where a row has fewer, -1 comes first, in place of the missing.

    Many latents score exactly 0 (no head's product is positive), and the model does not say which of them to
    prefer. The choice is `torch.topk`'s over the whole row, so it depends on that row alone; another
    implementation, or a row of another length, may choose others of equal score.
    """
    top = scores.topk(min(count, scores.shape[1]), dim=-1, sorted=False)
    return top.indices.where(top.values > -torch.inf, -1).to(torch.int32).sort(dim=-1).values


def mask(places: Tensor, width: int) -> Tensor:
    """bool [B, width], true at the places [B, k] that `best` found; all are below `width`."""
    marked = torch.zeros(len(places), width + 1, dtype=torch.bool, device=places.device)
    return marked.scatter_(1, places.long() + 1, True)[:, 1:]


def best_blocks(scores: Tensor, complete: Tensor, config: V41Config) -> Tensor:
    """Candidate blocks [B, ceil(C / block)]: the best by their best latent, the newest one always among them.

    complete [B, 1]: how many latents each query can see.
    """
    size = config.candidate_block_size
    padded = F.pad(scores, (0, -scores.shape[1] % size), value=-torch.inf)
    blocks = padded.unflatten(-1, (-1, size)).amax(-1)  # [B, blocks]
    newest = (complete - 1) // size
    blocks.masked_fill_(torch.arange(blocks.shape[1], device=blocks.device) == newest, torch.inf)
    return mask(best(blocks, config.candidate_topk_blocks), blocks.shape[1])

"""DeepSeek-V4.1 token by token, in float64: slow and plain, written from the facts, no code shared with the forward.

One token at a time goes through all layers against caches of everything before it, as when text is generated: no
windows, no query blocks, no masks, no gathering; n-grams in Python integers, rounding by search in lists of all numbers
that a format has. Weights come from `Checkpoint.weight`, whose decoding has goldens of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

Array = np.ndarray
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E4M3 = np.array([(m / 8 if not e else 1 + m / 8) * 2.0 ** (max(e, 1) - 7) for e in range(16) for m in range(8)][:127])


def nearest(x: Array, numbers: Array) -> Array:
    """The nearest of ascending `numbers` and their negatives to each x; of two as near, the even code."""
    distance = abs(abs(x)[..., None] - numbers)  # [..., codes]
    as_near = distance == distance.min(-1, keepdims=True)
    odd = np.arange(len(numbers)) % 2
    return np.copysign(numbers[np.where(as_near, odd, 2).argmin(-1)], x)


def power_of_two(least: float) -> float:
    """The smallest power of two that is not below `least`."""
    scale = 1.0
    while scale < least:
        scale *= 2
    while scale / 2 >= least:
        scale /= 2
    return scale


def rounded(x: Array, kind: str) -> Array:
    """x [D] as the cache of this kind ("window", "latent" or "index") holds it."""
    size = 16 if kind == "latent" else 32
    result = []
    for start in range(0, len(x), size):
        block = x[start : start + size]
        largest = float(abs(block).max())
        if kind == "window":
            numbers, scale = E4M3, power_of_two(max(largest, 1e-4) / 448)
        elif kind == "latent":
            numbers, scale = E2M1, float(nearest(np.array(max(largest / 6, 2.0**-9)), E4M3))
        else:
            numbers, scale = E2M1, power_of_two(max(largest / 6, 2.0**-126))
        result.append(nearest(block / scale, numbers) * scale)
    return np.concatenate(result)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def softmax(x: Array, axis: int = -1) -> Array:
    x = np.exp(x - x.max(axis, keepdims=True))
    return x / x.sum(axis, keepdims=True)


@dataclass
class Caches:
    """Of one layer: what the tokens so far have left behind."""

    window: list[Array] = field(default_factory=list)
    latents: list[Array] = field(default_factory=list)
    index_keys: list[Array] = field(default_factory=list)
    pending: list[tuple[Array, Array]] = field(default_factory=list)  # of an incomplete group


class Oracle:
    """text: `text_config`. weight: a tensor of the checkpoint by name. classes: int64 [V], the tokenizer's classes.

    rounding: of the caches. Attributes may be changed, to see whether a comparison would notice.
    """

    def __init__(
        self, text: dict[str, Any], weight: Callable[[str], Tensor], classes: Array, rounding: bool = False
    ) -> None:
        self.text = dict(text)
        self.read = weight
        self.classes = classes
        self.rounding = rounding
        self.yarn = True
        self.forget_ngrams_every = 10**9
        self.kept: dict[str, Array] = {}
        self.tokens: list[int] = []
        self.caches = [Caches() for _ in range(text["num_hidden_layers"])]
        self.selected: dict[int, list[set[int]]] = {}
        self.candidates: list[set[int]] = []

    def weight(self, name: str) -> Array:
        if name not in self.kept:
            self.kept[name] = self.read(name).double().numpy()
        return self.kept[name]

    def run(self, ids: Tensor) -> Array:
        """Logits [T, V] of one text from its beginning. ids: int64 [T]."""
        return np.stack([self.step(token) for token in ids.tolist()])

    def step(self, token: int) -> Array:
        text = self.text
        self.tokens.append(token)
        streams = [self.weight("embed")[token] for _ in range(text["hc_mult"])]
        pre = np.eye(text["hc_mult"])[0]
        shared: dict[str, Any] = {}
        for layer in range(text["num_hidden_layers"]):
            name = f"layers.{layer}"
            if layer in text["engram_layer_ids"]:
                streams = self.engram(layer, streams)
            attn_pre, post, comb = self.mixes(f"{name}.hc_attn", streams)
            x = self.norm(sum(p * s for p, s in zip(pre, streams, strict=True)), f"{name}.attn_norm")
            streams = self.spread(self.attention(layer, x, shared), streams, post, comb)
            pre, post, comb = self.mixes(f"{name}.hc_ffn", streams)
            x = self.norm(sum(p * s for p, s in zip(attn_pre, streams, strict=True)), f"{name}.ffn_norm")
            streams = self.spread(self.experts(layer, x), streams, post, comb)
        return self.weight("head") @ self.norm(sum(p * s for p, s in zip(pre, streams, strict=True)), "norm")

    def unit(self, x: Array) -> Array:
        return x / np.sqrt(np.mean(x**2) + self.text["rms_norm_eps"])

    def norm(self, x: Array, name: str) -> Array:
        return self.unit(x) * self.weight(name)

    # hyper-connections

    def mixes(self, name: str, streams: list[Array]) -> tuple[Array, Array, Array]:
        n, eps = self.text["hc_mult"], self.text["hc_eps"]
        mixed = self.weight(f"{name}_fn") @ self.unit(np.concatenate(streams))
        scale, base = self.weight(f"{name}_scale"), self.weight(f"{name}_base")
        pre = sigmoid(mixed[:n] * scale[0] + base[:n]) + eps
        post = 2 * sigmoid(mixed[n : 2 * n] * scale[1] + base[n : 2 * n])
        comb = softmax((mixed[2 * n :] * scale[2] + base[2 * n :]).reshape(n, n)) + eps
        comb = comb / (comb.sum(0, keepdims=True) + eps)
        for _ in range(self.text["hc_sinkhorn_iters"] - 1):
            comb = comb / (comb.sum(1, keepdims=True) + eps)
            comb = comb / (comb.sum(0, keepdims=True) + eps)
        return pre, post, comb

    def spread(self, y: Array, streams: list[Array], post: Array, comb: Array) -> list[Array]:
        n = len(streams)
        return [post[j] * y + sum(comb[i, j] * streams[i] for i in range(n)) for j in range(n)]

    # Engram

    def engram(self, layer: int, streams: list[Array]) -> list[Array]:
        text, name = self.text, f"layers.{layer}.engram"
        orders, heads = text["engram_max_ngram_size"] - 1, text["engram_n_heads"]
        which = text["engram_layer_ids"].index(layer)
        primes = self.primes[which * orders * heads : (which + 1) * orders * heads]
        bound = max(1, (2**63 - 1) // text["engram_compressed_vocab_size"] // 2)
        generator = np.random.default_rng(10007 * layer)
        odd = [2 * int(draw) + 1 for draw in generator.integers(0, bound, orders + 1, dtype=np.int64)]
        position = len(self.tokens) - 1
        history = []  # classes of this token, the one before, ...
        for back in range(orders + 1):
            gone = position - back < 0 or back > position % self.forget_ngrams_every
            history.append(int(self.classes[text["engram_pad_token_id"] if gone else self.tokens[position - back]]))
        table, rows, start = self.weight(f"{name}.embed"), [], 0
        for column, prime in enumerate(primes):
            mixed = 0
            for back in range(column // heads + 2):
                mixed ^= history[back] * odd[back]
            rows.append(table[start + mixed % prime])
            start += prime
        projected = self.weight(f"{name}.wkv") @ np.concatenate(rows)
        hidden = text["hidden_size"]
        value, result = projected[text["hc_mult"] * hidden :], []
        for stream, x in enumerate(streams):
            key = projected[stream * hidden : (stream + 1) * hidden]
            q = self.unit(x) * self.weight(f"{name}.q_weight")[stream]
            k = self.unit(key) * self.weight(f"{name}.k_weight")[stream]
            dot = float(q @ k) / hidden**0.5
            gate = 1 / (1 + math.exp(-math.copysign(math.sqrt(max(abs(dot), 1e-6)), dot)))
            result.append(x + gate * value)
        return result

    @cached_property
    def primes(self) -> list[int]:
        text, found, number = self.text, [], self.text["engram_vocab_size"]
        count = len(text["engram_layer_ids"]) * (text["engram_max_ngram_size"] - 1) * text["engram_n_heads"]
        while len(found) < count:
            if all(number % divisor for divisor in range(2, number)):
                found.append(number)
            number += 1
        return found

    # attention

    def rotated(self, x: Array, position: int, compressing: bool, backwards: bool = False) -> Array:
        """The last qk_rope_head_dim channels of x [..., D], pair by pair as complex numbers."""
        dims = self.text["qk_rope_head_dim"]
        turns = np.exp(1j * position * (-1 if backwards else 1) * self.speeds[compressing])
        pairs = x[..., -dims::2] + 1j * x[..., -dims + 1 :: 2]
        result = x.copy()
        result[..., -dims::2], result[..., -dims + 1 :: 2] = (pairs * turns).real, (pairs * turns).imag
        return result

    @cached_property
    def speeds(self) -> dict[bool, Array]:
        """Radians per position of each pair, in window layers (False) and in compressing ones (True)."""
        text = self.text
        exponents = [-2 * pair / text["qk_rope_head_dim"] for pair in range(text["qk_rope_head_dim"] // 2)]
        near = [text["rope_theta"] ** exponent for exponent in exponents]
        far = [text["compress_rope_theta"] ** exponent for exponent in exponents]
        if self.yarn:
            far = [self.stretched(pair, speed) for pair, speed in enumerate(far)]
        return {False: np.array(near), True: np.array(far)}

    def stretched(self, pair: int, speed: float) -> float:
        """YaRN: pairs that turn often in the original context keep their speed, slow ones are slowed by `factor`."""
        scaling, dims = self.text["rope_scaling"], self.text["qk_rope_head_dim"]
        length, theta = scaling["original_max_position_embeddings"], self.text["compress_rope_theta"]

        def pair_of(turns: float) -> float:
            return dims / 2 * math.log(length / (2 * math.pi * turns)) / math.log(theta)

        low = max(math.floor(pair_of(scaling["beta_fast"])), 0)
        high = min(math.ceil(pair_of(scaling["beta_slow"])), dims - 1)
        slowed = min(max((pair - low) / max(high - low, 0.001), 0.0), 1.0)
        return speed * (1 - slowed) + speed / scaling["factor"] * slowed

    def rounded(self, x: Array, kind: str) -> Array:
        return rounded(x, kind) if self.rounding else x

    def attention(self, layer: int, x: Array, shared: dict[str, Any]) -> Array:
        text, name, cache = self.text, f"layers.{layer}.attn", self.caches[layer]
        position, ratio = len(self.tokens) - 1, text["compress_ratios"][layer]
        low = self.norm(self.weight(f"{name}.wq_a") @ x, f"{name}.q_norm")
        key = self.norm(self.weight(f"{name}.wkv") @ x, f"{name}.kv_norm")
        cache.window.append(self.rounded(self.rotated(key, position, ratio > 0), "window"))
        seen = cache.window[-text["sliding_window"] :]
        if layer in text["kv_source_layer_ids"]:
            self.compress(layer, x)
            shared["source"] = layer
        if layer in text["index_source_layer_ids"]:
            shared["selected"] = self.index(layer, x, low, self.caches[shared["source"]].index_keys, shared)
            self.selected.setdefault(layer, []).append(set(shared["selected"]))
        if ratio:
            seen = seen + [self.caches[shared["source"]].latents[i] for i in shared["selected"]]

        dim, heads, groups = text["head_dim"], text["num_attention_heads"], text["o_groups"]
        q = (self.weight(f"{name}.wq_b") @ low).reshape(heads, dim)
        keys = np.stack(seen)
        outputs = []
        for head in range(heads):
            scores = keys @ self.rotated(q[head], position, ratio > 0) / dim**0.5
            sink = self.weight(f"{name}.attn_sink")[head]
            shares = softmax(np.append(scores, sink))[:-1]
            outputs.append(self.rotated(shares @ keys, position, ratio > 0, backwards=True))
        wide = np.concatenate(outputs).reshape(groups, -1)
        wo_a = self.weight(f"{name}.wo_a").reshape(groups, text["o_lora_rank"], -1)
        return self.weight(f"{name}.wo_b") @ np.concatenate([wo_a[group] @ wide[group] for group in range(groups)])

    def compress(self, layer: int, x: Array) -> None:
        """Latent and index key of a group of tokens, once it is complete."""
        name, cache = f"layers.{layer}.attn", self.caches[layer]
        ratio = self.text["compress_ratios"][layer]
        gate = self.weight(f"{name}.compressor.wgate") @ x if ratio > 1 else np.zeros(self.text["head_dim"])
        cache.pending.append((self.weight(f"{name}.compressor.wkv") @ x, gate))
        if len(cache.pending) < ratio:
            return
        shares = softmax(np.stack([gate for _, gate in cache.pending]), axis=0)
        pooled = (shares * np.stack([value for value, _ in cache.pending])).sum(0)
        cache.pending.clear()
        latent = self.norm(pooled, f"{name}.compressor.norm")
        position = len(self.tokens) - ratio  # of the group's first token
        key = self.norm(self.weight(f"{name}.indexer.wk") @ latent, f"{name}.indexer.k_norm")
        cache.index_keys.append(self.rounded(self.rotated(key, position, True), "index"))
        cache.latents.append(self.rounded(self.rotated(latent, position, True), "latent"))

    def index(self, layer: int, x: Array, low: Array, keys: list[Array], shared: dict[str, Any]) -> list[int]:
        """The latents that this token attends to; at the candidate source also what later layers may choose from."""
        text, name = self.text, f"layers.{layer}.attn.indexer"
        heads, dim, position = text["index_n_heads"], text["index_head_dim"], len(self.tokens) - 1
        q = (self.weight(f"{name}.wq_b") @ low).reshape(heads, dim)
        q = np.stack([self.rounded(self.rotated(head, position, True), "index") for head in q])
        share = self.weight(f"{name}.weights_proj") @ x / (dim * heads) ** 0.5
        scores = [float(share @ np.maximum(q @ key, 0)) for key in keys]
        allowed = set(range(len(keys)))
        source, size = text["candidate_source_layer_id"], text["candidate_block_size"]
        if layer == source:
            blocks = range(-(-len(keys) // size))
            strength = {b: max(scores[b * size : (b + 1) * size]) for b in blocks}
            if blocks:
                strength[blocks[-1]] = math.inf  # the newest is only partly filled
            kept = sorted(blocks, key=lambda b: -strength[b])[: text["candidate_topk_blocks"]]
            shared["candidates"] = {i for b in kept for i in range(b * size, (b + 1) * size)}
            self.candidates.append(shared["candidates"] & allowed)
        elif 0 <= source < layer:
            allowed &= shared["candidates"]
        return sorted(sorted(allowed, key=lambda i: -scores[i])[: text["index_topk"]])

    # experts

    def experts(self, layer: int, x: Array) -> Array:
        text, name = self.text, f"layers.{layer}.ffn"
        scores = np.sqrt(np.log1p(np.exp(self.weight(f"{name}.gate") @ x)))
        order = np.argsort(-(scores + self.weight(f"{name}.gate.bias")))
        chosen = order[: text["num_experts_per_tok"]].tolist()
        y = self.expert(f"{name}.shared_experts", x)
        for e in chosen:
            share = text["routed_scaling_factor"] * scores[e] / scores[chosen].sum()
            y = y + share * self.expert(f"{name}.experts.{e}", x)
        return y

    def expert(self, name: str, x: Array) -> Array:
        limit = self.text["swiglu_limit"]
        gate = np.minimum(self.weight(f"{name}.w1") @ x, limit)
        up = np.clip(self.weight(f"{name}.w3") @ x, -limit, limit)
        return self.weight(f"{name}.w2") @ (gate * sigmoid(gate) * up)

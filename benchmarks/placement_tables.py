"""Traffic for `placement.py`: tables and recorded routing made from published numbers, and tiny-v41's real routing."""

from __future__ import annotations

import tempfile
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
from scipy.interpolate import PchipInterpolator

from moefit.placement import Recorded, TrafficTable

HIT_CURVE = {
    **{0: 0.0, 500: 0.256, 850: 0.337, 1000: 0.366, 2000: 0.509, 4000: 0.692, 6000: 0.808, 8000: 0.889},
    **{10000: 0.943, 12000: 0.976, 15360: 1.0},
}
"""Slots in card memory -> share of expert activations they serve: DeepSeek-V4.1-Flash's 40 x 384 experts under static
placement, decode, as published with the Strata runtime."""
DISTINCT = {2: 0.844, 4: 0.704, 6: 0.629, 8: 0.578}
"""Tokens of a window -> distinct experts over all that they ask for, from the same source."""

SOURCE, CONVERSATION, PASSAGE = 0.35, 0.55, 1.77
"""Log-normal spread of an expert's popularity from source to source, from conversation to conversation within one, and
from passage to passage within that: found by trial so that windows share experts as in `DISTINCT`."""
SHARPER = 1.15
"""Power of `HIT_CURVE`'s popularity that the spreads above flatten to about `HIT_CURVE` again, by trial."""
PASSAGE_TOKENS = 48
SOURCES = ("agents", "chat", "code")


def popularity(layers: int, experts: int, seed: int, drift: float = 0.0) -> np.ndarray:
    """float64 [L, E], shares of all activations by `HIT_CURVE` (stretched to L * E slots), shuffled by `seed`.

    drift: log-normal spread of what each is multiplied by."""
    total = layers * experts
    slots = np.array(list(HIT_CURVE)) * total / max(HIT_CURVE)
    curve = PchipInterpolator(slots, list(HIT_CURVE.values()))
    ranked = np.sort(np.diff(curve(np.arange(total + 1))))[::-1]
    shuffled = np.random.default_rng(seed).permutation(ranked).reshape(layers, experts)
    return shuffled * np.exp(drift * np.random.default_rng([seed, 1]).standard_normal(shuffled.shape))


def chances(popular: np.ndarray, top_k: int) -> np.ndarray:
    """float64 [..., E], chance that a token asks for each expert: in proportion, at most 1, top_k in all."""
    chance = popular * (top_k / popular.sum(axis=-1, keepdims=True))
    while (over := chance > 1).any():
        chance = np.where(over, 1, chance)
        free = np.where(chance < 1, chance, 0)
        left = top_k - (chance >= 1).sum(axis=-1, keepdims=True)
        scale = left / np.maximum(free.sum(axis=-1, keepdims=True), 1e-300)
        chance = np.where(chance < 1, free * scale, 1)
        if (scale < 1 + 1e-12).all():
            break
    return np.minimum(chance, 1)


def table_of(popular: np.ndarray, top_k: int, tokens: int) -> TrafficTable:
    """Expected counts of so many tokens. popular: [L, E]."""
    counts = np.floor(chances(popular, top_k) * tokens).astype(np.int64)
    for row in counts:
        open_ones = np.flatnonzero(row < tokens)  # they share what rounding lost, most frequent first
        row[open_ones[np.argsort(-row[open_ones], kind="stable")][: tokens * top_k - row.sum()]] += 1
    return TrafficTable(counts, tokens, tuple(range(len(counts))), top_k)


@cache
def table_from_hit_curve(
    layers: int, experts: int, top_k: int, tokens: int = 1_000_000, drift: float = 0.0
) -> TrafficTable:
    return table_of(popularity(layers, experts, 0, drift), top_k, tokens)


@cache
def recorded_from_hit_curve(
    layers: int, experts: int, top_k: int, conversations: int, drift: float = 0.0, seed: int = 0
) -> Recorded:
    """Conversations of about 1,500 tokens, the first third of each its prompt, from three sources in turn.

    Tokens of a passage choose independently of each other, with chances that differ from passage to passage.
    seed: of the conversations; what experts are popular is always the same."""
    random = np.random.default_rng([seed, conversations])
    popular = popularity(layers, experts, 0, drift) ** SHARPER
    of_source = _tilt(np.random.default_rng(7), SOURCE, (len(SOURCES), *popular.shape))
    lengths = np.clip(1500 * np.exp(0.5 * random.standard_normal(conversations)), 200, 6000).astype(np.int64)
    ids = np.empty((layers, int(lengths.sum()), top_k), np.uint16)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    phase = np.empty(starts[-1], np.int8)
    for number, (low, high) in enumerate(pairwise(starts.tolist())):
        mine = popular * of_source[number % len(SOURCES)] * _tilt(random, CONVERSATION, popular.shape)
        phase[low:high] = np.arange(high - low) >= (high - low) // 3  # 0 prefill, 1 decode
        for layer in range(layers):
            ids[layer, low:high] = _draw(random, mine[layer], top_k, high - low)
    source = np.arange(conversations) % len(SOURCES)
    return Recorded(list(ids), tuple(range(layers)), experts, starts, phase, source, SOURCES)


def _tilt(random: np.random.Generator, spread: float, shape: tuple[int, ...]) -> np.ndarray:
    return np.exp(spread * random.standard_normal(shape, dtype=np.float32))


def _draw(random: np.random.Generator, popular: np.ndarray, top_k: int, tokens: int) -> np.ndarray:
    """Ids [tokens, k] of one layer by systematic sampling: experts in random order laid along a line, each as long as
    its chance, and every token takes those at k points one apart. Chances are kept exactly."""
    passages = -(-tokens // PASSAGE_TOKENS)
    chance = chances(popular * _tilt(random, PASSAGE, (passages, len(popular))), top_k)  # [n, E]
    order = np.argsort(random.random(chance.shape, dtype=np.float32), axis=1)
    ends = np.cumsum(np.take_along_axis(chance, order, axis=1), axis=1)
    ends[:, -1] = top_k
    ends += np.arange(passages)[:, None] * top_k
    points = random.random((passages, PASSAGE_TOKENS, 1)) + np.arange(top_k)
    points += np.arange(passages)[:, None, None] * top_k
    at = np.minimum(np.searchsorted(ends.ravel(), points.ravel(), side="right"), ends.size - 1)
    return order.ravel()[at].reshape(-1, top_k)[:tokens]


def distinct(table: TrafficTable) -> dict[int, float]:
    """Of every size of window, distinct experts over all that its tokens ask for."""
    return {size: float(found.hits.sum() / found.tokens.sum()) for size, found in table.windows.items()}


def served(table: TrafficTable, slots: int) -> float:
    """Share of activations of the `slots` most frequent experts."""
    ranked = np.sort(table.counts, axis=None)[::-1]
    return float(ranked[:slots].sum() / ranked.sum())


def tiny_v41_routing(documents: int | None = None) -> Recorded:
    """What tiny-v41's routers choose for every token of examples/traffic.jsonl; documents: the first so many only."""
    import torch  # the forward takes 100 MB more than all the rest does

    from moefit.calibrate.checkpoint import Checkpoint
    from moefit.calibrate.families import open_model
    from moefit.calibrate.passes import run_passes
    from moefit.calibrate.traces import load_tokenizer, read_documents, together, windows
    from moefit.packs.routing import label_tokens
    from moefit.progress import Silent

    examples = Path(__file__).resolve().parents[1] / "examples"
    checkpoint = Checkpoint.open(examples / "tiny-v41")
    model = open_model(checkpoint)
    tokenizer = load_tokenizer(examples / "tiny-v41")
    read = read_documents(examples / "traffic.jsonl", tokenizer)
    cut = windows(together(read[:documents]), 2048)
    with tempfile.TemporaryDirectory() as folder:
        ids = [torch.from_numpy(window.ids).long() for window in cut]
        (borders,) = run_passes(model, ids, Path(folder), None, 2, Silent())
        found = [
            [borders.inputs(layer, group)["topk_ids"] for group in range(len(borders.groups))]
            for layer in range(borders.layers)
        ]
        chosen = [torch.cat(groups).numpy().astype(np.uint16) for groups in found]  # [N, k] each
    labels = label_tokens(cut)
    assert labels.starts is not None
    source = labels.source[labels.starts[:-1]]
    experts = model.load_layer(0).experts
    return Recorded(chosen, tuple(range(len(chosen))), experts, labels.starts, labels.phase, source, labels.sources)

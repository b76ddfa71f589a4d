"""Placement at real sizes: seconds, greedy, ours, bound and gap, on traffic made from a published hit curve.

    python benchmarks/placement.py

The hit curve is DeepSeek-V4.1-Flash's under static placement (share of expert activations served by the n
most frequent of 15,360 experts; decode, as published with the Strata runtime). Sizes are those of EXL3
experts of 5120 x 2304. Times are process CPU seconds, one run each.
"""

from __future__ import annotations

import time

import numpy as np
from scipy.interpolate import PchipInterpolator

from moefit.placement import Gpu, Machine, TrafficTable, parse_bytes, solve

# Slots in card memory -> share of expert activations they serve.
HIT_CURVE = {
    **{0: 0.0, 500: 0.256, 850: 0.337, 1000: 0.366, 2000: 0.509, 4000: 0.692, 6000: 0.808, 8000: 0.889},
    **{10000: 0.943, 12000: 0.976, 15360: 1.0},
}
EXPERT_BYTES = {2: 8_891_916, 3: 13_315_596, 4: 17_739_276}  # K -> bytes of one expert
DENSE, DRAFTER = 10_817_285_568, 5_826_617_736  # split over the cards
ENGRAM_INT4 = 768_022_850 * 144  # on the host
CARD, RESERVE, HOST = parse_bytes("97887MiB"), parse_bytes("20GiB"), parse_bytes("250GiB")


def table_from_hit_curve(layers: int, experts: int, top_k: int, tokens: int, seed: int) -> TrafficTable:
    """Traffic whose hit curve is about `HIT_CURVE` (stretched to layers * experts), shuffled by `seed`."""
    total = layers * experts
    slots = np.array(list(HIT_CURVE)) * total / max(HIT_CURVE)
    curve = PchipInterpolator(slots, list(HIT_CURVE.values()))
    popularity = np.sort(np.diff(curve(np.arange(total + 1))))[::-1]
    shuffled = np.random.default_rng(seed).permutation(popularity).reshape(layers, experts)
    counts = np.zeros((layers, experts), dtype=np.int64)
    for row, popular in zip(counts, shuffled, strict=True):
        chance = np.minimum(popular * top_k / popular.sum(), 1)  # that a token goes to the expert
        while (free := chance < 1).sum() and not np.isclose(chance.sum(), top_k, rtol=1e-12):
            chance[free] *= (top_k - (~free).sum()) / chance[free].sum()
            chance = np.minimum(chance, 1)
        row[:] = chance * tokens
        open_ones = np.flatnonzero(row < tokens)  # they share what rounding lost, most frequent first
        row[open_ones[np.argsort(-row[open_ones], kind="stable")][: tokens * top_k - row.sum()]] += 1
    return TrafficTable(counts, tokens, tuple(range(layers)), top_k)


def run(name: str, traffic: TrafficTable, sizes: np.ndarray, machine: Machine, fixed: tuple[int, ...]) -> None:
    start = time.process_time()
    plan = solve(sizes, traffic, machine, fixed)
    seconds = time.process_time() - start
    greedy = float("nan") if plan.greedy is None else plan.greedy
    print(
        f"{name:34} {seconds:7.2f} s  greedy {1e6 * greedy:12.4f}  ours {1e6 * plan.seconds:12.4f}  "
        f"bound {1e6 * plan.bound:12.4f} us/token  gap {plan.gap:8.1e}  cards {1 - plan.shares[-1]:.4f}  "
        f"plan: {plan.plan_from}; bound: {plan.bound_from}",
        flush=True,
    )


def main() -> None:
    rng = np.random.default_rng(0)
    cards = (DENSE + DRAFTER) // 2
    two = Machine((Gpu(CARD, RESERVE), Gpu(CARD, RESERVE)), HOST)
    small = table_from_hit_curve(6, 32, 4, 30_000, seed=0)
    real = table_from_hit_curve(40, 384, 6, 1_000_000, seed=0)
    k3 = np.full((40, 384), EXPERT_BYTES[3], dtype=np.int64)
    mixed = rng.choice(list(EXPERT_BYTES.values()), size=(40, 384)).astype(np.int64)
    tiny = np.full((6, 32), 39_180, dtype=np.int64)  # K = 3, 256 x 128
    third = int(tiny.sum()) // 3
    run("6x32, 2 cards, all fit", small, tiny, Machine.from_flags(["8MB", "8MB"], "64MB"), (0, 0, 0))
    run("6x32, 2 cards, a third on host", small, tiny, Machine((Gpu(third), Gpu(third)), 1 << 26), (0, 0, 0))
    uneven = Machine((Gpu(third), Gpu(third // 2)), 1 << 26)
    run("6x32, uneven cards, half on host", small, tiny, uneven, (0, 0, 0))
    odd = rng.integers(26_000, 52_000, size=(6, 32))
    run("6x32, mixed sizes", small, odd, Machine((Gpu(third), Gpu(third)), 1 << 26), (0, 0, 0))
    run("40x384, 2 cards, K=3", real, k3, two, (cards, cards, ENGRAM_INT4))
    run("40x384, 2 cards, K=2/3/4 mixed", real, mixed, two, (cards, cards, ENGRAM_INT4))
    uneven = Machine((Gpu(CARD, RESERVE), Gpu(CARD // 2)), HOST)
    run("40x384, 96 + 48 GB, K=3", real, k3, uneven, (cards, cards, ENGRAM_INT4))
    wide = table_from_hit_curve(61, 384, 8, 1_000_000, seed=0)
    eight = Machine(tuple(Gpu(parse_bytes("32GB")) for _ in range(8)), HOST)
    sizes = np.full((61, 384), EXPERT_BYTES[3], dtype=np.int64)
    run("61x384, 8 cards of 32 GB, K=3", wide, sizes, eight, (0,) * 9)


if __name__ == "__main__":
    main()

"""Plans made by hand, for what shows them."""

from __future__ import annotations

from typing import Any

import numpy as np

from moefit.placement import Aim, Gpu, Limits, Machine, Plan, TrafficTable


def table(layers: int, experts: int, top_k: int = 4, sources: tuple[str, ...] = (), first: int = 0) -> TrafficTable:
    """Skewed, valid traffic, the same of every source, layer numbers from `first`."""
    rng = np.random.default_rng(0)
    tokens = 200
    counts = np.empty((layers, experts), dtype=np.int64)
    for row in counts:
        noisy = rng.gumbel(size=experts) * 1.5 + rng.gumbel(size=(tokens, experts))
        row[:] = np.bincount(np.argsort(-noisy, axis=1)[:, :top_k].ravel(), minlength=experts)
    parts = dict.fromkeys(sources, counts)
    total = counts * max(1, len(sources))
    numbers = tuple(range(first, first + layers))
    return TrafficTable(total, tokens * max(1, len(sources)), numbers, top_k, sources=parts)


def plan(traffic: TrafficTable, cards: int, on_cards: float, copied: int = 0, **changes: Any) -> Plan:
    """The hottest `on_cards` of all experts dealt to the cards in turn, the hottest `copied` of them on every card."""
    mode = changes.pop("mode", "ep")
    machine = changes.pop("machine", Machine((Gpu(10**10, 10**9),) * cards, 10**11, mode))
    layers, experts = traffic.counts.shape
    order = np.argsort(-traffic.counts, axis=None, kind="stable")
    host = len(machine.places) - 1
    place = np.full(order.size, host)
    hottest = order[: int(on_cards * order.size)]
    place[hottest] = np.arange(hottest.size) % host
    holds = place.reshape(layers, experts, 1) == np.arange(host + 1)
    holds.reshape(-1, host + 1)[order[:copied], :host] = True
    sizes = np.full((layers, experts), 1_000_000, dtype=np.int64)
    shared = traffic.counts[..., None] * holds / holds.sum(axis=2, keepdims=True)
    fields: dict[str, Any] = {
        "machine": machine,
        "aim": Aim.parse("decode:2"),
        "limits": Limits(),
        "layers": traffic.layers,
        "card_sizes": sizes // cards if mode == "tp" else sizes,
        "host_sizes": sizes,
        "holds": holds,
        "fixed": (10**8,) * (host + 1),
        "shares": tuple((shared.sum(axis=(0, 1)) / traffic.counts.sum()).tolist()),
        "value": 1.25e-3,
        "greedy": 1.5e-3,
        "bound": 1.2e-3,
        "tokens": traffic.tokens,
        "top_k": traffic.top_k,
        "solver": ("moefit", "0"),
        "steps": ("greedy: plan 0.0015", "local search: plan 0.00125"),
        "plan_from": "local search",
        "bound_from": "pooled bound",
        "inputs": {"traffic": "0" * 64},
    }
    return Plan(**{**fields, **changes})

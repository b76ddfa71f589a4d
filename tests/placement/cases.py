"""Small placement problems, and the optimum found by looking at every plan."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import strategies as st

from moefit.placement import Gpu, Machine, TrafficTable
from moefit.placement.problem import Problem


def random_traffic(layers: int, experts: int, top_k: int, tokens: int, seed: int) -> TrafficTable:
    """Skewed, valid traffic: the top_k largest of noisy popularity, token by token."""
    rng = np.random.default_rng(seed)
    counts = np.zeros((layers, experts), dtype=np.int64)
    for row in counts:
        noisy = rng.gumbel(size=experts) * 1.5 + rng.gumbel(size=(tokens, experts))
        row[:] = np.bincount(np.argsort(-noisy, axis=1)[:, :top_k].ravel(), minlength=experts)
    return TrafficTable(counts, tokens, tuple(range(layers)), top_k)


@st.composite
def problems(draw: st.DrawFn, layers: int = 3, experts: int = 4) -> Problem:
    """Up to `layers` x `experts` experts of 1-3 sizes on two cards and a host, from roomy to too tight."""
    layers = draw(st.integers(1, layers))
    traffic = random_traffic(layers, experts, draw(st.integers(1, experts - 1)), 40, draw(st.integers(0, 9999)))
    unit = draw(st.sampled_from([1, 12, 39_180]))
    kinds = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    sizes = st.lists(st.sampled_from(kinds), min_size=experts, max_size=experts)
    table = np.array([draw(sizes) for _ in range(layers)], dtype=np.int64) * unit
    total = int(table.sum())
    cards = draw(st.lists(st.integers(0, 12), min_size=2, max_size=2))
    fixed = (draw(st.integers(0, unit)), draw(st.integers(0, unit)), draw(st.integers(0, unit)))
    gpus = tuple(Gpu(total * card // 16 + used, 0) for card, used in zip(cards, fixed, strict=False))
    host = total * draw(st.sampled_from([0, 4, 8, 12, 16])) // 16 + fixed[-1]
    bandwidths = draw(st.sampled_from([(1792, 22), (100, 40), (7, 7), (10, 30)]))
    machine = Machine(gpus, host, *(value * 10**9 for value in bandwidths))
    return Problem(table, traffic, machine, fixed)


def plain_seconds(problem: Problem, assignment: np.ndarray) -> Fraction:
    """The objective written straight from its definition."""
    machine, traffic = problem.machine, problem.traffic
    total = Fraction(0)
    for layer in range(len(assignment)):
        load = [Fraction(0)] * len(machine.places)
        for expert, place in enumerate(assignment[layer]):
            speed = machine.host_bandwidth if place == problem.host else machine.gpu_bandwidth
            size, count = int(problem.sizes[layer, expert]), int(traffic.counts[layer, expert])
            load[place] += Fraction(count, traffic.tokens) * Fraction(size, speed)
        total += max(load[:-1]) + load[-1]
    return total


def optimum(problem: Problem) -> int | None:
    """Smallest cost over all plans that fit, by enumeration; None where none fits."""
    layers, experts = problem.sizes.shape
    places = problem.host + 1
    rows = np.array(np.unravel_index(np.arange(places**experts), (places,) * experts)).T  # [plans, E]
    card_price, host_price = problem.prices
    used = np.zeros((1, places), dtype=np.int64)
    cost = np.zeros(1, dtype=np.int64)
    for layer in range(layers):
        on = [rows == place for place in range(places)]
        size = np.stack([np.where(o, problem.sizes[layer], 0).sum(axis=1) for o in on], axis=1)
        work = problem.work[layer].astype(np.int64)
        load = np.stack([np.where(o, work, 0).sum(axis=1) for o in on], axis=1)
        here = card_price * load[:, :-1].max(axis=1) + host_price * load[:, -1]
        used = (used[:, None] + size).reshape(-1, places)
        cost = (cost[:, None] + here).ravel()
        fits = (used <= np.array(problem.free)).all(axis=1)
        used, cost = used[fits], cost[fits]
    return int(cost.min()) if len(cost) else None

"""Small placement problems, their value from its definition, and the optimum found by looking at every placement."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
from hypothesis import HealthCheck, reject, settings
from hypothesis import strategies as st

from moefit.errors import PlanError
from moefit.placement import Aim, Cpu, Gpu, Limits, Machine, Plan, TokenLabels, TrafficTable, solve
from moefit.placement.aim import Term
from moefit.placement.objective import make_problem
from moefit.placement.problem import Problem

PLACEMENTS = 4096  # that are looked at, at most
AIMS = ("decode:1", "decode:3", "decode:8", "prefill", "host-bytes", "memory", "decode:6+0.2*prefill")
AIMS += ("3*decode:2+1e-9*memory", "host-bytes+0.5*memory")


def few(examples: int) -> settings:
    """Hypothesis settings of that many examples."""
    slow = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    return settings(deadline=None, max_examples=examples, suppress_health_check=slow)


def random_traffic(layers: int, experts: int, top_k: int, tokens: int, seed: int) -> TrafficTable:
    """Skewed, valid traffic: the top_k largest of noisy popularity, token by token."""
    rng = np.random.default_rng(seed)
    counts = np.zeros((layers, experts), dtype=np.int64)
    for row in counts:
        noisy = rng.gumbel(size=experts) * 1.5 + rng.gumbel(size=(tokens, experts))
        row[:] = np.bincount(np.argsort(-noisy, axis=1)[:, :top_k].ravel(), minlength=experts)
    return TrafficTable(counts, tokens, tuple(range(layers)), top_k)


@dataclass(frozen=True)
class Case:
    """What `solve` is given."""

    card_sizes: np.ndarray
    host_sizes: np.ndarray
    traffic: TrafficTable
    machine: Machine
    fixed: tuple[int, ...]
    aim: Aim
    limits: Limits

    def problem(self) -> Problem:
        sizes = (self.card_sizes, self.host_sizes)
        return make_problem(self.machine, self.traffic, *sizes, self.fixed, self.aim, self.limits)[0]

    def solve(self, **changes: Any) -> Plan:
        fields = {"host_sizes": self.host_sizes, "aim": self.aim, "limits": self.limits, **changes}
        machine = fields.pop("machine", self.machine)
        return solve(self.card_sizes, self.traffic, machine, self.fixed, **fields)


def shapes(draw: st.DrawFn, choices: int, layers: int = 3) -> tuple[int, int]:
    """(layers, experts) with at most PLACEMENTS ways to give each expert one of `choices`."""
    most = int(np.log(PLACEMENTS) / np.log(choices) + 1e-9)
    count = draw(st.integers(1, layers))
    return count, draw(st.integers(2, max(2, most // count)))


def _traffic(draw: st.DrawFn, layers: int, experts: int) -> TrafficTable:
    """Counts only, or routing recorded by conversation with phases, sources and windows."""
    top_k, seed = draw(st.integers(1, experts - 1)), draw(st.integers(0, 9999))
    if draw(st.booleans()):
        return random_traffic(layers, experts, top_k, draw(st.integers(1, 40)), seed)
    lengths = np.array(draw(st.lists(st.integers(1, 17), min_size=2, max_size=4)))
    rng = np.random.default_rng(seed)
    heat = rng.gumbel(size=(len(lengths), layers, experts)) * 1.5  # of each conversation another
    noise = rng.gumbel(size=(int(lengths.sum()), layers, experts))
    ids = np.argsort(-(np.repeat(heat, lengths, axis=0) + noise), axis=2)[..., :top_k]
    if top_k == 1:
        ids[0] = 1  # a layer of nothing but expert 0 is refused
    number = np.arange(len(lengths))
    phase = np.repeat(number % 2 if draw(st.booleans()) else np.full(len(lengths), -1), lengths)
    source = np.repeat(number % draw(st.sampled_from([2, 3])), lengths)
    starts = np.append(0, np.cumsum(lengths)) if draw(st.booleans()) else None
    labels = TokenLabels(phase, source, ("a", "b", "c"), starts)
    return TrafficTable.from_topk({3 * layer: ids[:, layer] for layer in range(layers)}, experts, labels)


def _machine(draw: st.DrawFn, sizes: np.ndarray, fixed: int) -> Machine:
    """Roomy to too tight, beside `fixed` bytes on each place."""
    total, speeds = int(sizes.sum()), st.sampled_from([10**9, 7 * 10**9, 10**11, 1792 * 10**9])
    mode = draw(st.sampled_from(["ep", "ep", "ep", "tp"]))
    cards = draw(st.integers(1, 3))
    same = draw(st.booleans())
    gpus: list[Gpu] = []
    for card in range(cards):
        share = draw(st.sampled_from([0, 3, 4, 5, 8, 13])) / (1 if mode == "ep" else cards)
        reserve, token = draw(st.sampled_from([0, 1000])), draw(st.sampled_from([0, 50]))
        new = Gpu(int(total * share) // 16 + fixed + reserve, reserve, draw(speeds), token)
        gpus.append(gpus[0] if card and same else new)
    host = total * draw(st.sampled_from([2, 8, 12, 16, 24, 40])) // 16 + fixed
    cpu = draw(st.sampled_from([None, Cpu(20 * 10**9, 2_000, 30), Cpu(300 * 10**9, 10_000)]))
    pinning = draw(st.sampled_from(["exact", "power-of-two"]))
    return Machine(tuple(gpus), host, mode, draw(speeds), draw(speeds), draw(st.booleans()), cpu, pinning)


def _limits(draw: st.DrawFn, case: Case) -> Limits:
    experts = case.traffic.counts.shape[1]
    of_layer = st.sampled_from(["*", *map(str, case.traffic.layers)])
    of_expert = st.sampled_from(["0", "1", f"0-{experts - 1}", f"{experts - 1},0"])
    place = st.sampled_from([*case.machine.places, "cards"])
    rules = st.lists(st.builds("{}:{}={}".format, of_layer, of_expert, place), max_size=2).map(tuple)
    some = st.sampled_from([None, None, *range(experts + 1)])
    limits = Limits(draw(rules), draw(rules), draw(some), draw(some))
    try:
        make_problem(case.machine, case.traffic, case.card_sizes, case.host_sizes, case.fixed, case.aim, limits)
    except PlanError:  # rules that contradict each other; test_limits.py has those
        return Limits()
    return limits


@st.composite
def cases(draw: st.DrawFn, copies: bool = False) -> Case:
    """What `solve` takes, small enough for `every` placement of it. copies: also where experts lie on several cards."""
    layers, experts = shapes(draw, 8 if copies else 4)
    traffic = _traffic(draw, layers, experts)
    unit = draw(st.sampled_from([1, 12, 39_180, 13_315_596]))
    kinds = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    rows = st.lists(st.sampled_from(kinds), min_size=experts, max_size=experts)
    whole = np.array([draw(rows) for _ in range(layers)], dtype=np.int64) * unit
    fixed = draw(st.integers(0, unit))
    machine = _machine(draw, whole, fixed)
    card = whole if machine.mode == "ep" else -(-whole // len(machine.gpus))
    names, worst = list(traffic.sources), False
    chosen: tuple[tuple[str, float], ...] = ()
    if names:
        worst = draw(st.booleans())
        chosen = tuple((name, draw(st.sampled_from([0.5, 2.0]))) for name in names if draw(st.booleans()))
    aim = Aim.parse(draw(st.sampled_from(AIMS)), worst, chosen)
    case = Case(card, whole, traffic, machine, (fixed,) * len(machine.places), aim, Limits())
    if draw(st.booleans()):
        return case
    return Case(card, whole, traffic, machine, case.fixed, aim, _limits(draw, case))


@st.composite
def problems(draw: st.DrawFn, moves: bool = False, copies: bool = False, one_group: bool = False) -> Problem:
    """Problems of any small numbers, also of those that no machine gives rise to. moves: from a plan in use.

    copies: small enough for `every` placement where experts lie on several cards.
    """
    cards = draw(st.integers(1, 3))
    layers, experts = shapes(draw, 2**cards if copies else cards + 1)
    groups = draw(st.sampled_from([(0,), (0, 0)] if one_group else [(0,), (0,), (0, 0), (0, 1), (0, 1, 0), (7, 2)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    places, scenarios = cards + 1, len(groups)
    kinds = rng.integers(1, 12, size=int(rng.integers(1, 4)))
    sizes = np.repeat(rng.choice(kinds, size=(layers, experts))[..., None], places, axis=2)
    sizes[..., -1] *= rng.integers(1, 3)
    loads = rng.integers(0, 40, size=(scenarios, layers, experts, places)) ** rng.integers(1, 3)
    alike = draw(st.booleans())
    if alike:
        loads[..., :-1] = loads[..., :1]
    waits = rng.integers(0, 20, size=(scenarios, layers, experts)) * rng.integers(0, 2)
    free = [
        int(sizes[..., p].sum() * share) // 12 for p, share in enumerate(rng.choice([3, 5, 8, 12, 24], size=places))
    ]
    if alike:
        free[:-1] = [free[0]] * cards
    allowed = rng.random((layers, experts, places)) < 0.8 if draw(st.booleans()) else None
    if allowed is not None:
        allowed[~allowed.any(axis=2)] = True
    least = rng.integers(0, experts, size=layers) if draw(st.booleans()) else None
    most = rng.integers(0 if least is None else least, experts + 1, size=layers) if draw(st.booleans()) else None
    if most is not None and least is None and draw(st.booleans()):
        most = np.full(layers, experts)
    home, max_moves, max_bytes = None, None, None
    if moves:
        home = rng.integers(0, places, size=(layers, experts))
        fitting = every(Problem(_names(places), sizes, tuple(free), loads, waits, 1.0, _busy(loads), groups))
        if len(fitting) and draw(st.booleans()):
            home = fitting[int(rng.integers(len(fitting)))].argmax(axis=2)
        max_moves = draw(st.sampled_from([None, 0, 1, 2, 4]))
        max_bytes = draw(st.sampled_from([None, 0, 10, 40]))
    return Problem(
        _names(places),
        sizes,
        tuple(free),
        loads,
        waits,
        0.5,
        _busy(loads),
        groups,
        allowed,
        least,
        most,
        home,
        max_moves,
        max_bytes,
    )


def _names(places: int) -> tuple[str, ...]:
    return (*(f"gpu{card}" for card in range(places - 1)), "host")


def _busy(loads: np.ndarray) -> np.ndarray:
    return loads.sum(axis=(0, 3))


def every(problem: Problem, copies: bool = False) -> np.ndarray:
    """bool [N, L, E, P]: all placements that keep every limit. copies: an expert may lie on several cards."""
    layers, experts, places = problem.sizes.shape
    one = [row for row in product([False, True], repeat=places) if any(row) and not (row[-1] and any(row[:-1]))]
    choices = np.array([row for row in one if copies or sum(row) == 1])  # [K, P]
    number = np.indices((len(choices),) * (layers * experts)).reshape(layers * experts, -1).T
    holds = choices[number].reshape(-1, layers, experts, places)
    fits = (np.where(holds, problem.sizes, 0).sum(axis=(1, 2)) <= np.array(problem.free)).all(axis=1)
    if problem.allowed is not None:
        fits &= ~(holds & ~problem.allowed).any(axis=(1, 2, 3))
    on_cards = (~holds[..., -1]).sum(axis=2)  # [N, L]
    if problem.least is not None:
        fits &= (on_cards >= problem.least).all(axis=1)
    if problem.most is not None:
        fits &= (on_cards <= problem.most).all(axis=1)
    if problem.home is not None:
        came = holds & (problem.home[..., None] != np.arange(places))
        if problem.max_moves is not None:
            fits &= came.sum(axis=(1, 2, 3)) <= problem.max_moves
        if problem.max_bytes is not None:
            fits &= np.where(came, problem.sizes, 0).sum(axis=(1, 2, 3)) <= problem.max_bytes
    return np.asarray(holds[fits])


def costs(problem: Problem, holds: np.ndarray) -> np.ndarray:
    """int64 [N]: cost of each of N placements [N, L, E, P]."""
    total = np.zeros((len(holds), max(problem.groups) + 1), np.int64)
    copies = np.maximum(holds.sum(axis=3), 1)[..., None]
    for s, group in enumerate(problem.groups):
        finish = np.where(holds, (problem.loads[s] + copies - 1) // copies, 0).sum(axis=2)  # [N, L, P]
        waits = np.where(holds[..., -1], problem.waits[s], 0).sum(axis=2)  # [N, L]
        slowest = np.maximum(finish[..., :-1].max(axis=2) + waits, finish[..., -1])
        total[:, group] += slowest.sum(axis=1)
    return np.asarray(total.max(axis=1))


def optimum(problem: Problem, copies: bool = False) -> int | None:
    """Smallest cost over all placements, by enumeration; None where there is none."""
    holds = every(problem, copies)
    return int(costs(problem, holds).min()) if len(holds) else None


def plain_value(case: Case, holds: np.ndarray) -> float:
    """The objective of a placement bool [L, E, P], straight from its definition, in fractions."""
    aim, traffic = case.aim, case.traffic

    def of(source: str | None) -> Fraction:
        return sum((Fraction(term.weight) * _measure(case, term, source, holds) for term in aim.terms), Fraction())

    if aim.worst:
        return float(max(of(name) for name in dict(aim.sources) or traffic.sources))
    if aim.sources:
        whole = sum(Fraction(weight) for _, weight in aim.sources)
        return float(sum((Fraction(weight) * of(name) for name, weight in aim.sources), Fraction()) / whole)
    return float(of(None))


def _measure(case: Case, term: Term, source: str | None, holds: np.ndarray) -> Fraction:
    traffic, machine = case.traffic, case.machine
    layers, experts = case.card_sizes.shape
    counts = traffic.counts if source is None else traffic.sources[source]
    everyone = list(product(range(layers), range(experts)))
    if term.measure in ("memory", "host-bytes"):
        tokens = int(counts[0].sum()) // traffic.top_k
        weights = [Fraction(1) if term.measure == "memory" else Fraction(int(counts[at]), tokens) for at in everyone]
        sizes = {at: int(case.host_sizes[at]) for at in everyone}
        if term.measure == "memory":  # as the allocator rounds them
            sizes = {at: machine.pinned(size) for at, size in sizes.items()}
        there = [sizes[at] * int(holds[at][-1]) for at in everyone]
        return sum((size * weight for size, weight in zip(there, weights, strict=True)), Fraction())
    if source is None and term.measure in traffic.phases:
        counts = traffic.phases[term.measure]
    share, tokens_each = _asked(traffic, counts, term, source)
    chunk = 4096 if term.measure == "prefill" else 1
    ns, gpus = Fraction(1, 10**9), machine.gpus
    links = 1 if machine.shared_root else len(gpus)
    link = machine.copy_engine if term.measure == "prefill" else machine.zero_copy
    if machine.mode == "tp":
        cards = [(min(gpu.bandwidth for gpu in gpus), Fraction(max(gpu.token_ns for gpu in gpus), len(gpus)) * ns)]
    else:
        cards = [(gpu.bandwidth, gpu.token_ns * ns) for gpu in gpus]
    total = Fraction()
    for layer in range(layers):
        on_card, on_host = [], []  # seconds of each expert in a step
        for e in range(experts):
            hits, tokens = share[layer][e], tokens_each[layer][e]
            size = int(case.card_sizes[layer, e])
            on_card.append([hits * Fraction(size, speed) + tokens * token for speed, token in cards])
            size = int(case.host_sizes[layer, e])
            least = Fraction(min(gpu.token_ns for gpu in gpus), len(gpus)) * ns
            ways = [hits * Fraction(size, link * links) + tokens * least]
            if (cpu := machine.cpu) is not None:
                ways.append(hits * (cpu.fixed_ns * ns + Fraction(size, cpu.bandwidth)) + tokens * cpu.token_ns * ns)
            on_host.append(min(ways))
        together = 1 / sum(1 / sum(row[p] for row in on_card) for p in range(len(cards)))
        finish = [Fraction()] * len(cards)
        host = wait = Fraction()
        for e in range(experts):
            if holds[layer, e, -1]:
                host += on_host[e]
                wait += max(Fraction(), on_host[e] - share[layer][e] * together)
            for p in np.flatnonzero(holds[layer, e, :-1]):
                finish[p] += on_card[e][p] / int(holds[layer, e].sum())
        total += max(*(done + wait for done in finish), host)
    return total / chunk


def _asked(
    traffic: TrafficTable, counts: np.ndarray, term: Term, source: str | None
) -> tuple[list[list[Fraction]], list[list[Fraction]]]:
    """(share of steps that ask for an expert, tokens in a step that do), [L][E]."""
    windows = traffic.windows if source is None else traffic.source_windows.get(source, {})
    if term.measure == "decode" and term.window in windows:
        found = windows[term.window]
        return _per(found.hits, found.steps), _per(found.tokens, found.steps)
    tokens = int(counts[0].sum()) // traffic.top_k
    size = term.window if term.measure == "decode" else 4096
    hits = np.zeros(counts.shape, np.int64)
    for at, count in np.ndenumerate(counts):
        exact = tokens * (1 - (1 - Fraction(int(count), tokens)) ** size) if size < 4096 else Fraction(0)
        if size == 4096:  # so near to 0 or all that floats will do
            exact = Fraction(tokens * (1 - (1 - int(count) / tokens) ** size))
        if exact.denominator == 2:  # rounds either way
            reject()
        hits[at] = round(exact)
    return _per(hits, tokens), _per(counts * size, tokens)


def _per(values: np.ndarray, steps: int) -> list[list[Fraction]]:
    return [[Fraction(int(value), steps) for value in row] for row in values]

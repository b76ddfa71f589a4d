"""Replay of recorded routing on a placement: what each step would have taken, by the machine's cost model.

A step is what an engine computes at once: one token, or a drafted window of several. In a step each distinct expert of
a layer is read once where it lies; experts of one place come one after the other, places work at the same time, a layer
waits for its slowest place, and layers add up. A plan's objective takes the slowest of *expected* loads; this is the
mean over real steps of the slowest, which is never less, and it has a spread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..errors import PlanError, TraceError
from .costs import card_ways, host_ways
from .machine import Machine
from .recorded import Recorded
from .traffic import PHASES
from .windows import find_runs

BLOCK = 1 << 19  # activations sorted at once, some 30 MB of arrays


@dataclass(frozen=True, eq=False)
class Simulation:
    """What S replayed steps of C conversations took. Every share and mean is over the replayed steps.

    window: tokens of a step. top_k, layers: experts a token asks for in each of so many layers.
    seconds: float64 [S], of each step in the order recorded.
    loads: float64 [L, P], mean seconds that each place works for a layer in a step.
    host_touched: share of all (step, layer) pairs in which an expert on the host is asked for.
    By conversation, [C], all zero where no step of one was replayed: steps (int64), conversation_seconds, hits
    (activations served by cards) and host_bytes (read from the host, each distinct expert of a step once), float64.
    """

    window: int
    top_k: int
    layers: int
    seconds: np.ndarray
    loads: np.ndarray
    host_touched: float
    steps: np.ndarray
    conversation_seconds: np.ndarray
    hits: np.ndarray
    host_bytes: np.ndarray

    @property
    def activations_per_step(self) -> int:
        return self.window * self.top_k * self.layers

    @property
    def mean(self) -> float:
        """Seconds per step."""
        return float(self.seconds.mean())

    def quantile(self, share: float) -> float:
        """Seconds within which this share of the steps end, e.g. 0.95."""
        return float(np.quantile(self.seconds, share))

    @property
    def hit_rate(self) -> float:
        """Share of expert activations that cards serve."""
        return float(self.hits.sum() / (len(self.seconds) * self.activations_per_step))

    @property
    def host_bytes_per_token(self) -> float:
        return float(self.host_bytes.sum() / (len(self.seconds) * self.window))

    @property
    def place_loads(self) -> np.ndarray:
        """float64 [P]: mean seconds that each place works in a step."""
        return np.asarray(self.loads.sum(axis=0))


def simulate(
    recorded: Recorded,
    holds: np.ndarray,
    machine: Machine,
    card_sizes: np.ndarray,
    host_sizes: np.ndarray,
    window: int = 1,
    max_steps: int = 20_000,
) -> Simulation:
    """Replay decode steps of `recorded` on a placement.

    holds: bool [L, E, P], the places of `machine` that hold each expert: the host alone, or one card or more.
    card_sizes, host_sizes: int64 [L, E], bytes read for an expert on a card (in mode "tp": its slice) and on the host.
    window: tokens of a step; steps are cut as `decode_steps` says. An expert with several copies is served by one card
    in a step: its copies take turns with the step's number, and neighbours in the list of such experts start one card
    apart, so that they do not all go to the same. The host takes its fastest way for each expert.
    Memory does not grow with the recording; time does with max_steps * L * window * k.
    PlanError: arrays that do not fit each other, an expert that is nowhere or on host and card.
    TraceError: no step to replay, or ids that no expert has.
    """
    _check(recorded, holds, machine, card_sizes, host_sizes)
    first, conversation = decode_steps(recorded, window, max_steps)
    costs = expert_seconds(machine, card_sizes, host_sizes, window)  # [L, P, E, W + 1]
    steps, (layers, experts, places) = len(first), holds.shape
    width = window * recorded.top_k
    seconds, touched, loads = np.zeros(steps), 0, np.zeros((layers, places))
    hits, host_bytes = np.zeros(steps), np.zeros(steps)
    for layer in range(layers):
        place_of = _Copies(holds[layer])
        on_host = holds[layer, :, -1]
        for low in range(0, steps, max(1, BLOCK // width)):
            block = slice(low, min(low + max(1, BLOCK // width), steps))
            tokens = first[block, None] + np.arange(window)  # [b, W]
            asked = np.sort(np.asarray(recorded.ids[layer][tokens]).reshape(len(tokens), width), axis=1)  # [b, W k]
            if asked[:, 0].min() < 0 or asked[:, -1].max() >= experts:
                raise _outside(recorded, layer, asked)
            new = np.ones(asked.shape, dtype=bool)
            np.not_equal(asked[:, 1:], asked[:, :-1], out=new[:, 1:])
            at = np.flatnonzero(new)  # [d], one for each distinct expert of each step
            expert, step = asked.ravel()[at].astype(np.intp), at // width
            count = np.diff(at, append=asked.size)  # tokens of the step that ask for it
            place = place_of(expert, step + low)
            cost = costs[layer][place, expert, count]
            load = np.bincount(step * places + place, cost, len(tokens) * places).reshape(-1, places)  # [b, P]
            seconds[block] += load.max(axis=1)
            loads[layer] += load.sum(axis=0)
            away = np.flatnonzero(on_host[expert])
            host_bytes[block] += np.bincount(step[away], host_sizes[layer, expert[away]], len(tokens))
            missed = np.bincount(step[away], count[away], len(tokens))
            hits[block] += width - missed
            touched += int(np.count_nonzero(missed))
    conversations = recorded.conversations
    return Simulation(
        window,
        recorded.top_k,
        layers,
        seconds,
        loads / steps,
        touched / (steps * layers),
        np.bincount(conversation, minlength=conversations),
        *(np.bincount(conversation, of_steps, conversations) for of_steps in (seconds, hits, host_bytes)),
    )


def decode_steps(recorded: Recorded, window: int, max_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """(first token, conversation) of each step to replay, int64 [S] both, in the order recorded.

    Steps are windows as in windows.py: `window` consecutive decode tokens, without overlap, from the start of every
    unbroken run of them in a conversation; what is left over at a run's end is dropped. Where no token is known to be
    decode, all tokens count.
    Of more than max_steps, one is taken from each of max_steps equal stretches, at a place in the stretch that moves
    from one to the next: a fixed stride would fall in step with conversations of equal length.
    """
    if window < 1 or max_steps < 1:
        raise PlanError("nothing to replay", found=f"expected window and max_steps >= 1, found {window}, {max_steps}")
    decode = np.asarray(recorded.phase) == PHASES.index("decode")
    one_source = np.broadcast_to(np.int64(0), recorded.tokens)  # [N]; a conversation has one source anyway
    runs = find_runs(recorded.starts, decode if decode.any() else None, one_source)
    per_run = runs.length // window
    before = np.cumsum(per_run) - per_run
    total = int(per_run.sum())
    if not total:
        raise TraceError(
            "no step to replay",
            found=f"no run of {window} decode tokens in {recorded.conversations} conversations",
            mend="take a smaller window, or record longer conversations",
        )
    number = np.arange(min(total, max_steps), dtype=np.int64)
    if total > max_steps:
        low, high = number * total // max_steps, (number + 1) * total // max_steps
        number = low + ((high - low) * (number * 2_654_435_769 % 2**32) >> 32)  # 2**32 / golden ratio
    run = np.searchsorted(before, number, side="right") - 1
    first = runs.begin[run] + (number - before[run]) * window
    return first, np.searchsorted(recorded.starts, first, side="right") - 1


def expert_seconds(machine: Machine, card_sizes: np.ndarray, host_sizes: np.ndarray, tokens: int) -> np.ndarray:
    """float64 [L, P, E, tokens + 1]: seconds of an expert on a place for 0 (none), 1, ... tokens of a step."""
    count = np.arange(tokens + 1)
    once = np.minimum(count, 1)
    cards = [way.seconds(card_sizes[..., None], once, count) for way in card_ways(machine)]
    host = [way.seconds(host_sizes[..., None], once, count) for way in host_ways(machine, prefill=False)]
    return np.stack([*cards, np.minimum.reduce(host)], axis=1)


class _Copies:
    """Which place serves each expert of a layer in a step. holds: bool [E, P]."""

    def __init__(self, holds: np.ndarray) -> None:
        self.copies = holds.sum(axis=1)  # [E]
        self.home = holds.argmax(axis=1)
        self.several = bool((self.copies > 1).any())
        self.turn = np.cumsum(self.copies > 1)  # a number of its own for each expert with copies
        self.ranked = np.argsort(~holds, axis=1, kind="stable")  # [E, P], the places that hold it first, in order

    def __call__(self, expert: np.ndarray, step: np.ndarray) -> np.ndarray:
        if not self.several:
            return np.asarray(self.home[expert])
        return np.asarray(self.ranked[expert, (step + self.turn[expert]) % self.copies[expert]])


def simulate_plainly(
    recorded: Recorded,
    holds: np.ndarray,
    machine: Machine,
    card_sizes: np.ndarray,
    host_sizes: np.ndarray,
    window: int = 1,
    max_steps: int = 20_000,
) -> Simulation:
    """`simulate` in plain loops: the reference of its tests."""
    cards, hosts = card_ways(machine), host_ways(machine, prefill=False)
    steps = list(_plain_steps(recorded, window, max_steps))
    layers, _, places = holds.shape
    seconds, touched, loads = np.zeros(len(steps)), 0, np.zeros((layers, places))
    totals = np.zeros((4, recorded.conversations))  # steps, seconds, hits, host bytes
    for number, (conversation, tokens) in enumerate(steps):
        hits = host_bytes = 0
        for layer in range(layers):
            several = [e for e in range(recorded.experts) if holds[layer, e].sum() > 1]
            asked = [int(e) for token in tokens for e in recorded.ids[layer][token]]
            load = [0.0] * places
            for expert in sorted(set(asked)):
                count = asked.count(expert)
                where = [p for p in range(places) if holds[layer, expert, p]]
                turn = number + several.index(expert) + 1 if expert in several else 0
                place = where[turn % len(where)]
                size = int((host_sizes if place == places - 1 else card_sizes)[layer, expert])
                ways = hosts if place == places - 1 else [cards[place]]
                load[place] += min(way.fixed + size / way.bandwidth + way.token * count for way in ways)
                hits += count if place < places - 1 else 0
                host_bytes += size if place == places - 1 else 0
            seconds[number] += max(load)
            loads[layer] += load
            touched += any(holds[layer, expert, -1] for expert in asked)
        totals[:, conversation] += [1, seconds[number], hits, host_bytes]
    share = touched / (len(steps) * layers)
    by_conversation = (totals[0].astype(np.int64), *totals[1:])
    return Simulation(window, recorded.top_k, layers, seconds, loads / len(steps), share, *by_conversation)


def _plain_steps(recorded: Recorded, window: int, max_steps: int) -> Iterator[tuple[int, range]]:
    """(conversation, its tokens) of each step of `decode_steps`."""
    decode = PHASES.index("decode")
    known = any(int(phase) == decode for phase in recorded.phase)
    steps = []
    for conversation in range(recorded.conversations):
        token, stop = int(recorded.starts[conversation]), int(recorded.starts[conversation + 1])
        while token + window <= stop:
            wanted = [not known or int(recorded.phase[token + i]) == decode for i in range(window)]
            if all(wanted):
                steps.append((conversation, range(token, token + window)))
                token += window
            else:
                token += wanted.index(False) + 1
    if len(steps) <= max_steps:
        yield from steps
        return
    for i in range(max_steps):
        low, high = i * len(steps) // max_steps, (i + 1) * len(steps) // max_steps
        yield steps[low + ((high - low) * (i * 2_654_435_769 % 2**32) >> 32)]


def _check(
    recorded: Recorded, holds: np.ndarray, machine: Machine, card_sizes: np.ndarray, host_sizes: np.ndarray
) -> None:
    shape = (len(recorded.ids), recorded.experts)
    places = machine.places
    found = {"holds": holds.shape, "card_sizes": card_sizes.shape, "host_sizes": host_sizes.shape}
    expected = {"holds": (*shape, len(places)), "card_sizes": shape, "host_sizes": shape}
    if found != expected or holds.dtype != bool:
        raise PlanError(
            "the placement does not fit the recorded routing",
            found=f"expected {expected} of layers, experts and places, found {found}, holds of {holds.dtype}",
            mend="take plan and recording from the same model",
        )
    copies = holds.sum(axis=2)
    wrong = np.argwhere((copies < 1) | (holds[..., -1] & (copies > 1)))
    if wrong.size:
        layer, expert = (int(i) for i in wrong[0])
        on = [name for name, held in zip(places, holds[layer, expert], strict=True) if held]
        raise PlanError(
            "an expert lies on the host alone, or on one card or more",
            where=f"layer {recorded.layers[layer]}, expert {expert}",
            found=f"found {' and '.join(on) or 'no place'}",
        )


def _outside(recorded: Recorded, layer: int, asked: np.ndarray) -> TraceError:
    found = f"expected 0 <= id < {recorded.experts}, found {asked[:, 0].min()}..{asked[:, -1].max()}"
    mend = "record the routing again"
    return TraceError("routing id out of range", where=f"layer {recorded.layers[layer]}", found=found, mend=mend)

"""Copies of hot experts on further cards, into the room that is left."""

from __future__ import annotations

import numpy as np

from .problem import Problem

ROUNDS = 10_000
CLEAR = 1e-9  # gain of a copy, relative to its layer's cost, that is worth its bytes
SHARES = (1.0, 0.5, 0.25)  # of a card's mean load, from which on an expert is copied when a layer is laid out anew


def replicate(problem: Problem, assignment: np.ndarray) -> np.ndarray:
    """bool [L, E, P]: `assignment` with the copies that lower the cost most, one after the other, until none does.

    A copy shares its expert's load equally with those that are there. Only the slowest card of a layer can gain, so its
    experts are tried, on every card with room. Ties go to the lower layer, expert and card.
    """
    holds = problem.holding(assignment).copy()
    room = [free - used for free, used in zip(problem.free, problem.used(holds), strict=True)]
    best = {layer: _best_copy(problem, holds, layer, room) for layer in range(len(holds))}
    for _ in range(ROUNDS):
        layer = max(best, key=lambda layer: (best[layer][0], -layer))
        gain, expert, card = best[layer]
        if gain <= 0:
            break
        size = int(problem.sizes[layer, expert, card])
        if room[card] < size:  # taken by another layer's copy since
            best[layer] = _best_copy(problem, holds, layer, room)
            continue
        holds[layer, expert, card] = True
        room[card] -= size
        best[layer] = _best_copy(problem, holds, layer, room)
    return holds


def _best_copy(problem: Problem, holds: np.ndarray, layer: int, room: list[int]) -> tuple[float, int, int]:
    """(gain, expert, card) of the best further copy in a layer; gain 0 where there is none."""
    loads = problem.loads[:, layer].astype(np.float64)  # [S, E, P]
    here = holds[layer]  # [E, P]
    copies = here.sum(axis=1)  # [E]
    now = np.where(here, loads / copies[:, None], 0).sum(axis=1)  # [S, P]
    now[:, :-1] += np.where(here[:, -1], problem.waits[:, layer], 0).sum(axis=1)[:, None]
    cost = float(now.max(axis=1).sum())
    best = (CLEAR * cost, 0, 0)
    slowest = set(now.argmax(axis=1).tolist()) - {problem.host}
    experts = np.flatnonzero(here[:, sorted(slowest)].any(axis=1)) if slowest else np.array([], int)
    for card in range(problem.host):
        for expert in experts:
            free = room[card] >= problem.sizes[layer, expert, card]
            allowed = problem.allowed is None or problem.allowed[layer, expert, card]
            if here[expert, card] or not free or not allowed:
                continue
            more = here[expert].copy()
            more[card] = True
            then = now - np.where(here[expert], loads[:, expert] / copies[expert], 0)
            then = then + np.where(more, loads[:, expert] / (copies[expert] + 1), 0)
            gain = cost - float(then.max(axis=1).sum())
            if gain > best[0]:
                best = (gain, int(expert), card)
    return best if best[0] > CLEAR * cost else (0.0, 0, 0)


def spread(problem: Problem, assignment: np.ndarray) -> np.ndarray:
    """bool [L, E, P]: `assignment` with the cards' experts of a layer laid out anew, those too hot for one card first
    and on several, wherever that lowers the layer's cost within the room there is; what gains most per byte first.

    A single copy often gains nothing until others make way for it, which `replicate` does not see.
    """
    holds = problem.holding(assignment).copy()
    room = [free - used for free, used in zip(problem.free, problem.used(holds), strict=True)]
    found = {layer: _spread_layer(problem, holds[layer], layer, room) for layer in range(len(holds))}
    while any(gain > 0 for gain, _ in found.values()):
        layer = max(found, key=lambda layer: (found[layer][0], -layer))
        before, (_, after) = _bytes(problem, holds[layer], layer), found[layer]
        then = [left + old - new for left, old, new in zip(room, before, _bytes(problem, after, layer), strict=True)]
        if min(then[:-1]) < 0:  # another layer has taken the room
            found[layer] = _spread_layer(problem, holds[layer], layer, room)
            continue
        holds[layer], room, found[layer] = after, then, (0.0, after)
    return holds


def _bytes(problem: Problem, here: np.ndarray, layer: int) -> list[int]:
    """Of one layer on each place. here: bool [E, P]."""
    return [int(problem.sizes[layer, here[:, place], place].sum()) for place in range(here.shape[1])]


def _spread_layer(problem: Problem, here: np.ndarray, layer: int, room: list[int]) -> tuple[float, np.ndarray]:
    """(gain per byte more, bool [E, P]) of a layer's best new layout; gain 0 where there is none. room: what is left
    beside the layer as it is."""
    loads = problem.loads[:, layer].astype(np.float64)  # [S, E, P]
    waits = np.where(here[:, -1], problem.waits[:, layer], 0).sum(axis=1)  # [S]
    on_host = np.where(here[:, -1], loads[:, :, -1], 0).sum(axis=1)  # [S]
    on_cards = np.flatnonzero(~here[:, -1])

    def cost(cards: np.ndarray) -> float:
        """Of a layer whose cards finish at [S, P - 1]."""
        return float(np.maximum(cards.max(axis=1) + waits, on_host).sum())

    copies = here.sum(axis=1)  # [E]
    now = cost(np.where(here, loads / copies[:, None], 0).sum(axis=1)[:, :-1])
    before = sum(_bytes(problem, here, layer)[:-1])
    weight = loads[:, :, :-1].sum(axis=0).mean(axis=1)  # [E]
    mean = weight[on_cards].sum() / problem.host
    best = (0.0, here)
    if not mean:
        return best
    for share in SHARES:
        wanted = np.clip(np.ceil(weight / (share * mean)), 1, problem.host).astype(int)
        if not (wanted[on_cards] > 1).any():
            continue
        new = np.zeros_like(here)
        new[here[:, -1], -1] = True
        left = [free + old for free, old in zip(room, _bytes(problem, here, layer), strict=True)]
        finish = np.zeros((len(loads), problem.host))  # [S, P - 1]
        for expert in on_cards[np.argsort(-weight[on_cards] / wanted[on_cards], kind="stable")]:
            part = loads[:, expert, :-1] / wanted[expert]  # [S, P - 1]
            free = np.array([left[card] >= problem.sizes[layer, expert, card] for card in range(problem.host)])
            if problem.allowed is not None:
                free &= problem.allowed[layer, expert, :-1]
            order = np.argsort((finish + part).max(axis=0), kind="stable")
            cards = [int(card) for card in order if free[card]][: wanted[expert]]
            if not cards:
                break
            new[expert, cards] = True
            finish[:, cards] += loads[:, expert, cards] / len(cards)
            for card in cards:
                left[card] -= int(problem.sizes[layer, expert, card])
        else:
            gain = now - cost(finish)
            more = max(sum(_bytes(problem, new, layer)[:-1]) - before, 1)
            if gain > CLEAR * now and gain / more > best[0]:
                best = (gain / more, new)
    return best

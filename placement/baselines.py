"""Placements that others make, to hold a plan against: each takes counts, sizes and room, none a machine's speeds.

What each of them does is written from its documentation; where bytes, several cards or a full place are beyond it (most
know equal experts only), the rule added here is the plainest one, and said. All of them respect every byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..errors import PlanError

SEED = 42  # of kTransformers' random strategy

Baseline = Callable[[np.ndarray, np.ndarray, np.ndarray, Sequence[int]], np.ndarray]
"""(counts int64 [L, E], card_sizes int64 [L, E], host_sizes int64 [L, E], room [P]) -> holds bool [L, E, P].

counts: how often each expert is asked for. Sizes: bytes an expert takes of a card's and of the host's room. room: bytes
that experts may take on each place, the host last. PlanError: what goes to the host does not fit there."""


def frequency_greedy(
    counts: np.ndarray, card_sizes: np.ndarray, host_sizes: np.ndarray, room: Sequence[int]
) -> np.ndarray:
    """Hottest expert first, onto the card with room that has the least to read in its layer, else the host.

    To read: count times bytes. Ties go to the lower (layer, expert), the card with more room, the lower card.
    """
    places = _Places(card_sizes, host_sizes, room)
    work = np.zeros((len(counts), places.cards), dtype=object)  # Python integers [L, cards]
    for layer, expert in _pairs(_hottest(counts), counts.shape[1]):
        fitting = [card for card in range(places.cards) if places.fits(layer, expert, card)]
        card = min(fitting, key=lambda card: (work[layer, card], -places.left[card], card), default=None)
        places.put(layer, expert, card)
        if card is not None:
            work[layer, card] += int(counts[layer, expert]) * int(card_sizes[layer, expert])
    return places.finish()


def front_loading(
    counts: np.ndarray, card_sizes: np.ndarray, host_sizes: np.ndarray, room: Sequence[int]
) -> np.ndarray:
    """kTransformers' front-loading: the first layers whole on the cards, one in part, the others on the host."""
    return _by_shards(np.arange(counts.size), card_sizes, host_sizes, room)


def uniform(counts: np.ndarray, card_sizes: np.ndarray, host_sizes: np.ndarray, room: Sequence[int]) -> np.ndarray:
    """kTransformers' uniform: of every layer the same number on the cards, those with the lowest ids."""
    layers, experts = counts.shape
    order = np.arange(counts.size).reshape(layers, experts).T.ravel()  # expert 0 of every layer, then expert 1, ...
    fitting = _prefix(order, card_sizes, room)
    return _by_shards(order[: fitting // layers * layers], card_sizes, host_sizes, room)


def random_placement(
    counts: np.ndarray, card_sizes: np.ndarray, host_sizes: np.ndarray, room: Sequence[int], seed: int = SEED
) -> np.ndarray:
    """kTransformers' random: any experts on the cards, as many as fit. Not its own draws, but of the same kind."""
    draws = np.random.PCG64(seed).random_raw(counts.size)  # raw bits: the same for every version of numpy
    return _by_shards(np.argsort(draws, kind="stable"), card_sizes, host_sizes, room)


def global_top_k(counts: np.ndarray, card_sizes: np.ndarray, host_sizes: np.ndarray, room: Sequence[int]) -> np.ndarray:
    """kTransformers' frequency: the experts with the highest counts of all layers on the cards, as many as fit."""
    return _by_shards(_hottest(counts), card_sizes, host_sizes, room)


def eplb(
    counts: np.ndarray, card_sizes: np.ndarray, host_sizes: np.ndarray, room: Sequence[int], redundant: int = 0
) -> np.ndarray:
    """DeepSeek's EPLB (global mode), layer by layer: the same number of slots on every card and in every layer.

    The slots take the layer's hottest experts (EPLB itself has no host, and would place all), and `redundant` more
    copies of them, each of the expert with the highest load per copy. Copies are packed heaviest first on the lightest
    card with a free slot; unlike in EPLB, copies of one expert lie on different cards, as two on one are of no use.
    Slots: as many as would fit if all experts had the mean size of the hottest; what still finds no room goes to the
    host, and a copy is left out.
    """
    places = _Places(card_sizes, host_sizes, room)
    order = np.argsort(-counts, axis=1, kind="stable")  # [L, E], hottest first
    slots = _slots(np.take_along_axis(card_sizes, order, axis=1), room, redundant)
    for layer in range(len(counts)):
        hottest = order[layer, : max(0, slots * places.cards - redundant)]
        load = _copy_loads(counts[layer], hottest, redundant, places.cards)
        free, carried = [slots] * places.cards, [0.0] * places.cards
        for heat, expert in sorted(((-one, expert) for expert, copies in load.items() for one in copies)):
            fitting = [
                card
                for card in range(places.cards)
                if free[card] and places.fits(layer, expert, card) and not places.holds[layer, expert, card]
            ]
            card = min(fitting, key=lambda card: (carried[card], card), default=None)
            if card is not None:
                places.put(layer, expert, card)
                free[card] -= 1
                carried[card] -= heat
    return places.finish()


BASELINES: dict[str, Baseline] = {
    "frequency-greedy": frequency_greedy,
    "front-loading": front_loading,
    "uniform": uniform,
    "random": random_placement,
    "EPLB": eplb,
    "global top-k": global_top_k,
}


def baselines(
    counts: np.ndarray, card_sizes: np.ndarray, host_sizes: np.ndarray, room: Sequence[int]
) -> tuple[dict[str, np.ndarray], dict[str, PlanError]]:
    """(name -> holds of every baseline that fits, name -> why another does not). See `Baseline`."""
    plans, failed = {}, {}
    for name, baseline in BASELINES.items():
        try:
            plans[name] = baseline(counts, card_sizes, host_sizes, room)
        except PlanError as error:
            failed[name] = error
    return plans, failed


class _Places:
    """A placement in the making and the bytes left on each place."""

    def __init__(self, card_sizes: np.ndarray, host_sizes: np.ndarray, room: Sequence[int]) -> None:
        self.card_sizes, self.host_sizes = card_sizes, host_sizes
        self.left = [int(size) for size in room]
        self.cards = len(room) - 1
        self.holds = np.zeros((*card_sizes.shape, len(room)), dtype=bool)

    def fits(self, layer: int, expert: int, card: int) -> bool:
        return int(self.card_sizes[layer, expert]) <= self.left[card]

    def put(self, layer: int, expert: int, card: int | None) -> None:
        """On a card that has room; None leaves it to `finish`."""
        if card is not None:
            self.left[card] -= int(self.card_sizes[layer, expert])
            self.holds[layer, expert, card] = True

    def finish(self) -> np.ndarray:
        """The placement, with all that lies nowhere yet on the host."""
        rest = ~self.holds.any(axis=2)
        needed = int(self.host_sizes[rest].sum(dtype=object))
        if needed > max(self.left[-1], 0):
            raise PlanError(
                f"the host is full: {needed - self.left[-1]:,} B too many",
                where="host",
                found=f"expected at most {self.left[-1]:,} B of experts, found {needed:,} B in {rest.sum():,} experts",
                mend=f"give the host {needed - self.left[-1]:,} B more",
            )
        self.holds[rest, -1] = True
        return self.holds


def _pairs(order: np.ndarray, experts: int) -> list[tuple[int, int]]:
    """(layer, expert) of flat indices."""
    return [divmod(int(index), experts) for index in order]


def _hottest(counts: np.ndarray) -> np.ndarray:
    """Flat indices of all experts, highest count first, ties in order."""
    return np.argsort(-counts, axis=None, kind="stable")


def _prefix(order: np.ndarray, card_sizes: np.ndarray, room: Sequence[int]) -> int:
    """How many of the experts in `order` fit on all cards together, each card's room in whole units of size."""
    unit = int(np.gcd.reduce(card_sizes, axis=None))
    total = sum(max(int(size), 0) // unit for size in room[:-1]) * unit
    taken = np.cumsum(card_sizes.ravel()[order].astype(object))
    return int(np.searchsorted(taken, total, side="right"))


def _by_shards(order: np.ndarray, card_sizes: np.ndarray, host_sizes: np.ndarray, room: Sequence[int]) -> np.ndarray:
    """The first experts in `order` that fit on all cards together lie on cards, all others on the host.

    As an engine shards: each layer's experts on cards are cut, in the order of their ids, into one run per card, in
    proportion to the room that the cards still have. One whose card is full goes to the card with most room.
    """
    places = _Places(card_sizes, host_sizes, room)
    chosen = np.zeros(card_sizes.shape, dtype=bool)
    chosen.ravel()[order[: _prefix(order, card_sizes, room)]] = True
    for layer in range(len(chosen)):
        ids = np.flatnonzero(chosen[layer])
        left = [max(size, 0) for size in places.left[:-1]]
        upto = [sum(left[: card + 1]) for card in range(places.cards)]
        stops = [len(ids) * until // max(upto[-1], 1) for until in upto]
        shard = np.minimum(np.searchsorted(stops, np.arange(len(ids)), side="right"), places.cards - 1)
        for expert, own in zip(ids.tolist(), shard.tolist(), strict=True):
            cards = [own, *sorted(range(places.cards), key=lambda card: (-places.left[card], card))]
            places.put(layer, expert, next((card for card in cards if places.fits(layer, expert, card)), None))
    return places.finish()


def _slots(sizes: np.ndarray, room: Sequence[int], redundant: int) -> int:
    """Slots per card and layer. sizes: [L, E], each layer's hottest first."""
    experts, cards = sizes.shape[1], len(room) - 1
    taken = [0, *np.cumsum(sizes.astype(object).sum(axis=0))]  # bytes of the n hottest of every layer
    best = 0
    for slots in range(1, -(-(experts + redundant) // cards) + 1):
        distinct = min(slots * cards - redundant, experts)
        if distinct > 0 and taken[distinct] * slots <= min(room[:-1]) * distinct:
            best = slots
    return best


def _copy_loads(counts: np.ndarray, hottest: np.ndarray, redundant: int, cards: int) -> dict[int, list[float]]:
    """Expert -> the load of each of its copies, of a layer's experts on cards."""
    copies = {int(expert): 1 for expert in hottest}
    for _ in range(redundant):
        open_ones = [expert for expert, number in copies.items() if number < cards]
        if not open_ones:
            break
        copies[max(open_ones, key=lambda expert: (counts[expert] / copies[expert], -expert))] += 1
    return {expert: [counts[expert] / number] * number for expert, number in copies.items()}

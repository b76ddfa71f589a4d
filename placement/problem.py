"""The placement problem in exact integers: sizes, room on each place, loads, limits, and the one objective.

    minimise   max over groups of scenarios, sum over scenarios s of a group, sum over layers l of
                   max over places p of finish[s, l, p]
    finish[s, l, p] = sum of loads[s, l, e, p] over the experts e of layer l on place p
                      + for cards: sum of waits[s, l, e] over the experts of the layer on the host

A layer waits for its slowest place, cards and host alike. What loads and waits are (seconds, bytes) is `objective.py`'s
matter; here they are whole numbers whose sums fit int64, so that plans are compared, bounded and checked to the last
unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..errors import PlanError

TOLD_APART = 100_000


@dataclass(frozen=True, eq=False)
class Problem:
    """What to place and where it may go. P places, the host last; L layers of E experts; S scenarios.

    sizes: int64 [L, E, P], bytes an expert takes on each place. free: bytes left for experts on each place [P].
    loads: int64 [S, L, E, P] >= 0. waits: int64 [S, L, E] >= 0. All of them that can come together add up to less than
    2**62. grain: value of one unit of them.
    groups: of each scenario [S]; one group is a plain sum, several are the worst of them.
    busy: int64 [L, E], how often each expert is asked for: ties and the greedy order.
    allowed: bool [L, E, P], or None for everywhere. least, most: int64 [L], experts of each layer on cards, or None.
    home: int64 [L, E], where each expert lies now; with it max_moves experts may move at most, and max_bytes.
    """

    places: tuple[str, ...]
    sizes: np.ndarray
    free: tuple[int, ...]
    loads: np.ndarray
    waits: np.ndarray
    grain: float
    busy: np.ndarray
    groups: tuple[int, ...] = (0,)
    allowed: np.ndarray | None = None
    least: np.ndarray | None = None
    most: np.ndarray | None = None
    home: np.ndarray | None = None
    max_moves: int | None = None
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        layers, experts, places = self.sizes.shape
        expected = {
            "sizes": (self.sizes, (layers, experts, len(self.places)), np.int64, 1),
            "loads": (self.loads, (len(self.groups), layers, experts, places), np.int64, 0),
            "waits": (self.waits, (len(self.groups), layers, experts), np.int64, 0),
            "busy": (self.busy, (layers, experts), np.int64, 0),
        }
        for name, (array, shape, dtype, low) in expected.items():
            if array.shape != shape or array.dtype != dtype or array.min() < low:
                found = f"expected {np.dtype(dtype)} >= {low} {list(shape)}, found {array.dtype} {list(array.shape)}"
                mend = "take sizes and traffic from the same model"
                raise PlanError("the problem does not fit together", where=name, found=found, mend=mend)

    @property
    def host(self) -> int:
        """Place number of the host."""
        return len(self.places) - 1

    @cached_property
    def unit(self) -> tuple[int, ...]:
        """Greatest common divisor of all sizes on each place: the grain in which room can be used at all."""
        return tuple(int(np.gcd.reduce(self.sizes[:, :, place], axis=None)) for place in range(len(self.places)))

    @cached_property
    def units(self) -> np.ndarray:
        """int64 [L, E, P]: sizes in `unit`s."""
        return self.sizes // np.array(self.unit)

    @cached_property
    def room(self) -> tuple[int, ...]:
        """`free` in whole `unit`s. No plan is lost by rounding down, and equal sizes become plain counts."""
        return tuple(free // unit for free, unit in zip(self.free, self.unit, strict=True))

    def holding(self, placement: np.ndarray) -> np.ndarray:
        """bool [L, E, P] of place numbers [L, E], or of itself."""
        return placement if placement.ndim == 3 else placement[..., None] == np.arange(len(self.places))

    def finish(self, placement: np.ndarray) -> np.ndarray:
        """int64 [S, L, P], when each place is done. placement: int64 [L, E] place numbers, or bool [L, E, P] where an
        expert may lie on several cards, which then share its load equally, rounded up."""
        holds = self.holding(placement)
        copies = holds.sum(axis=2, keepdims=True)  # [L, E, 1]
        loads = self.loads if (copies == 1).all() else -(-self.loads // np.maximum(copies, 1))
        finish = np.where(holds, loads, 0).sum(axis=2)
        finish[..., :-1] += np.where(holds[:, :, -1], self.waits, 0).sum(axis=2)[..., None]
        return finish

    def cost(self, placement: np.ndarray) -> int:
        """The objective in units of `grain`."""
        return self.total(self.finish(placement))

    def below(self, cost: int, copies: int = 1) -> Problem:
        """The problem without the places where an expert's load alone is more than `cost`.

        Every plan of at most `cost` is one of both problems, and costs the same. What is left is of one order of
        magnitude, as solvers in floating point need it. copies: on how many cards an expert may lie.
        """
        heavy = np.asarray((self.loads > cost * copies).any(axis=0))  # [L, E, P]
        heavy[:, :, -1] |= np.asarray((self.waits > cost).any(axis=0))
        if not heavy.any():
            return self
        allowed = np.ones(heavy.shape, dtype=bool) if self.allowed is None else self.allowed.copy()
        allowed[heavy] = False
        waits = np.where(heavy[:, :, -1], 0, self.waits)
        return replace(self, allowed=allowed, loads=np.where(heavy, 0, self.loads), waits=waits)

    def total(self, finish: np.ndarray) -> int:
        """The objective of `finish`ing times [S, L, P]."""
        each = finish.max(axis=2).sum(axis=1)  # [S]
        pairs = list(zip(each.tolist(), self.groups, strict=True))
        return max(sum(cost for cost, g in pairs if g == group) for group in set(self.groups))

    def value(self, cost: int) -> float:
        """A cost in the objective's own unit."""
        return cost * self.grain

    def used(self, placement: np.ndarray) -> tuple[int, ...]:
        """Expert bytes on each place, exactly."""
        holds = self.holding(placement)
        return tuple(int(self.sizes[:, :, p][holds[:, :, p]].sum(dtype=object)) for p in range(len(self.places)))

    def feasible(self, placement: np.ndarray) -> bool:
        """Every expert on the host or on cards, where it may lie, every place within its bytes, every limit kept."""
        if placement.shape[:2] != self.busy.shape:
            return False
        holds = self.holding(placement)
        on_cards, on_host = holds[:, :, :-1].any(axis=2), holds[:, :, -1]
        if not (on_cards ^ on_host).all():
            return False
        if any(used > free for used, free in zip(self.used(holds), self.free, strict=True)):
            return False
        if self.allowed is not None and (holds & ~self.allowed).any():
            return False
        count = on_cards.sum(axis=1)  # [L]
        if (self.least is not None and (count < self.least).any()) or (
            self.most is not None and (count > self.most).any()
        ):
            return False
        if self.home is None:
            return True
        moved = holds & (self.home[..., None] != np.arange(len(self.places)))  # [L, E, P]
        return not (
            (self.max_moves is not None and int(moved.sum()) > self.max_moves)
            or (self.max_bytes is not None and int(self.sizes[moved].sum(dtype=object)) > self.max_bytes)
        )

    @cached_property
    def classes(self) -> list[list[int]]:
        """Cards that no expert can tell apart, each list a class; a home that may not be left tells them apart.

        Of more than `TOLD_APART` experts x cards it does not, as HiGHS takes minutes to relax 190,000 columns: moves
        between alike cards are then free to the relaxation, whose bound is lower for it.
        """
        alike: list[list[int]] = []
        limited = self.home is not None and (self.max_moves is not None or self.max_bytes is not None)
        limited = limited and self.busy.size * self.host <= TOLD_APART
        for card in range(self.host):
            for known in alike:
                if not limited and self._same(known[0], card):
                    known.append(card)
                    break
            else:
                alike.append([card])
        return alike

    def _same(self, one: int, two: int) -> bool:
        columns = [self.sizes, self.loads] + ([] if self.allowed is None else [self.allowed])
        return self.free[one] == self.free[two] and all(np.array_equal(c[..., one], c[..., two]) for c in columns)


def check_fits(problem: Problem, fixed: Sequence[int], budgets: Sequence[int]) -> None:
    """PlanError, with the missing bytes and the mend, when the bytes cannot fit in any arrangement."""
    for place, free, budget, taken in zip(problem.places, problem.free, budgets, fixed, strict=True):
        if free < 0:
            raise PlanError(
                f"tensors that are not experts overflow {place} by {-free:,} B",
                where=place,
                found=f"expected at most {budget:,} B, found {taken:,} B",
                mend=f"give {place} {-free:,} B more" + (" or reserve less there" if place != "host" else ""),
            )
    card, host = problem.sizes[:, :, 0].ravel(), problem.sizes[:, :, -1].ravel()
    total = int(host.sum(dtype=object))
    missing = total - _most_on_cards(problem, card, host) - problem.room[-1] * problem.unit[-1]
    if missing > 0:
        each = ", ".join(f"{place} {free:,}" for place, free in zip(problem.places, problem.free, strict=True))
        fewer = 100 * (1 - missing / total)
        raise PlanError(
            f"the experts do not fit: {missing:,} B too many",
            where="all places",
            found=f"{card.size:,} experts of {total:,} B in all, free for them: {each}",
            mend=f"add {-(-missing // problem.unit[-1]) * problem.unit[-1]:,} B of host memory (--host) or as much "
            f"card memory (--gpu), reserve less, or use fewer bits: experts at {max(fewer, 0):.1f} % of their size fit",
        )


def check_limits_fit(problem: Problem) -> None:
    """PlanError, with the missing bytes, where limits put more on the cards, or on the host, than there is room."""
    layers, experts = problem.busy.shape
    allowed = np.ones(problem.sizes.shape, dtype=bool)
    if problem.allowed is not None:
        allowed &= problem.allowed
    card, host = problem.sizes[:, :, 0], problem.sizes[:, :, -1]
    on_cards = np.logical_not(allowed[:, :, -1])  # [L, E], that must lie there
    on_host = np.logical_not(allowed[:, :, :-1].any(axis=2, keepdims=True))[..., 0]
    needed = {"cards": int(card[on_cards].sum()), "host": int(host[on_host].sum())}
    for layer in range(layers):
        free = np.sort(card[layer, ~on_cards[layer] & ~on_host[layer]])
        more = 0 if problem.least is None else int(problem.least[layer]) - int(on_cards[layer].sum())
        needed["cards"] += int(free[: max(more, 0)].sum())
        free = np.sort(host[layer, ~on_cards[layer] & ~on_host[layer]])
        more = 0 if problem.most is None else experts - int(problem.most[layer]) - int(on_host[layer].sum())
        needed["host"] += int(free[: max(more, 0)].sum())
    room = [whole * unit for whole, unit in zip(problem.room, problem.unit, strict=True)]
    for place, left in (("cards", sum(room[:-1])), ("host", room[-1])):
        if needed[place] > left:
            raise PlanError(
                f"the limits put {needed[place] - left:,} B more on the {place} than fit there",
                where="--pin, --forbid, --min-per-layer, --max-per-layer",
                found=f"{needed[place]:,} B of experts must lie there, room for {left:,} B",
                mend=f"loosen them, give the {place} {needed[place] - left:,} B more, or use fewer bits",
            )


def _most_on_cards(problem: Problem, card: np.ndarray, host: np.ndarray) -> int:
    """Host bytes that cards can take over at most, experts cut where that helps. card, host: sizes [L * E]."""
    room = sum(whole * unit for whole, unit in zip(problem.room[:-1], problem.unit[:-1], strict=True))
    order = np.argsort(-(host / card), kind="stable")
    taken = np.cumsum(card[order].astype(object))
    whole = int(np.searchsorted(taken, room, side="right"))
    saved = int(host[order[:whole]].sum(dtype=object))
    if whole < len(order):
        left = room - (int(taken[whole - 1]) if whole else 0)
        saved += -(-left * int(host[order[whole]]) // int(card[order[whole]]))
    return saved


def packing_error(problem: Problem) -> PlanError:
    """The error for bytes that would fit if experts could be cut, or for limits that no packing was found to keep."""
    limited = problem.allowed is not None or problem.least is not None or problem.most is not None
    slack = ", ".join(f"{place} {free:,} B" for place, free in zip(problem.places, problem.free, strict=True))
    largest = int(problem.sizes.max())
    return PlanError(
        "no placement of whole experts was found" + (" that keeps the limits" if limited else ""),
        where="all places",
        found=f"free for experts: {slack}; largest expert {largest:,} B",
        mend="loosen --pin, --forbid, --min-per-layer or --max-per-layer, give the places that they name more memory, "
        "or use fewer bits"
        if limited
        else f"add {largest * len(problem.places):,} B to any place (that is always enough), or use fewer bits",
    )

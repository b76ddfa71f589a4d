"""Placement at real sizes: times, proven gaps, replans, scores on traffic that plans have not seen, and counters.

    python benchmarks/placement.py [SECTION ...] [--quick]

Sections, all of them if none is named; --quick takes the cases of each that together end within a minute:

solve     One line per case: CPU seconds of this process and seconds by the clock of one solve, values of the objective
          for frequency-greedy, for the plan and for the proven bound, the gap, and which steps gave plan and bound.
          Cases are counts whose hit curve is DeepSeek-V4.1-Flash's as published (placement_tables.py), and the
          recorded routing below; sizes are EXL3's of 5120 x 2304 experts on cards of 97,887 MiB with 20 GiB reserved.
          A `!` marks what misses the bar: a gap above 0.1 %, worse than frequency-greedy, or more CPU seconds than 10
          (expert parallel on two cards 30, eight cards 60).
replan    From the plan for the recorded routing to plans for routing whose popularity has drifted by three strengths,
          at most 200 moves: time, gain and bound, the curve of gain against moves, the verdict on held-out
          conversations, and the comparison table on them.
recorded  Plans for four fifths of the conversations on the last fifth, against the baselines and the oracle; each
          source left out; the objective against the mean of simulated steps. Routing: tiny-v41's on
          examples/traffic.jsonl, and 100 synthetic conversations of 40 x 384 experts from three sources that follow
          the published hit curve and the published shares of distinct experts in windows of 2, 4, 6 and 8 tokens.
counters  Tokens per second and peak memory of a stream of routing through the counters of windows and the sample of
          conversations, 40 x 384 experts, top-6: one process for each length, whose peaks should be equal.

Everything is seeded; only times differ from run to run. Memory: 2 GB.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from multiprocessing import get_context

import numpy as np
from placement_tables import (
    DISTINCT,
    HIT_CURVE,
    chances,
    distinct,
    popularity,
    recorded_from_hit_curve,
    served,
    table_from_hit_curve,
    table_of,
    tiny_v41_routing,
)

from moefit.placement import Aim, Cpu, Gpu, Limits, Machine, Plan, Recorded, TrafficTable, parse_bytes, solve
from moefit.placement.baselines import baselines
from moefit.placement.captures import MoeShape
from moefit.placement.captures.recording import Recording, Steps
from moefit.placement.captures.tally import Tally, TopK
from moefit.placement.costs import stored_sizes
from moefit.placement.drift import drift
from moefit.placement.heldout import compare, comparison_text, cross_sources, cross_sources_text, noise_gain
from moefit.placement.recorded import split, table
from moefit.placement.replan import replan
from moefit.placement.simulate import simulate

EXPERT_BYTES = {2: 8_891_916, 3: 13_315_596, 4: 17_739_276}  # K -> bytes of one expert
TINY_BYTES = 39_180  # K = 3, 256 x 128
DENSE, DRAFTER = 10_817_285_568, 5_826_617_736  # split over the cards
ENGRAM_INT4 = 768_022_850 * 144  # on the host
CARD, RESERVE, HOST = parse_bytes("97887MiB"), parse_bytes("20GiB"), parse_bytes("250GiB")
BAR_GAP = 1e-3
HELD_OUT = 0.2
MOVES = 200
CONVERSATIONS = 100

TWO = Machine((Gpu(CARD, RESERVE), Gpu(CARD, RESERVE)), HOST)
FIXED = ((DENSE + DRAFTER) // 2, (DENSE + DRAFTER) // 2, ENGRAM_INT4)


def equal(layers: int, experts: int, size: int) -> np.ndarray:
    """int64 [L, E]"""
    return np.full((layers, experts), size, dtype=np.int64)


def peak() -> float:
    """MB of this process's largest resident set so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


class Clock:
    """CPU seconds of this process and seconds by the clock since it was made."""

    def __init__(self) -> None:
        self._start = time.process_time(), time.perf_counter()

    @property
    def seconds(self) -> tuple[float, float]:
        return time.process_time() - self._start[0], time.perf_counter() - self._start[1]

    def __str__(self) -> str:
        cpu, wall = self.seconds
        return f"{cpu:6.2f} s CPU {wall:6.2f} s"


def scale_of(plan: Plan) -> tuple[float, str]:
    """Factor and unit in which the objective is printed."""
    unit = plan.aim.unit
    return (1e6, unit.replace("seconds", "us")) if "seconds" in unit else (1.0, unit)


def line(name: str, plan: Plan, clock: Clock, bar: float) -> None:
    """bar: CPU seconds that the case may take."""
    taken = str(clock)
    wrong = [
        word
        for word, missed in (
            ("gap", plan.gap > BAR_GAP),
            ("greedy", plan.greedy is not None and plan.value > plan.greedy),
            ("time", clock.seconds[0] > bar),
        )
        if missed
    ]
    scale, unit = scale_of(plan)
    greedy = "breaks limits" if plan.greedy is None else f"{scale * plan.greedy:12.6g}"
    print(
        f"{name:38} {taken}  greedy {greedy:>13} ours {scale * plan.value:12.6g} bound {scale * plan.bound:12.6g} "
        f"{unit:17} gap {100 * plan.gap:7.4f} %  cards serve {100 * (1 - plan.shares[-1]):6.2f} %  "
        f"plan: {plan.plan_from}; bound: {plan.bound_from}{'  ! ' + ', '.join(wrong) if wrong else ''}",
        flush=True,
    )


# --- solve


@cache
def trace() -> tuple[Recorded, TrafficTable]:
    recorded = recorded_from_hit_curve(40, 384, 6, CONVERSATIONS)
    return recorded, table(recorded)


def run(
    name: str,
    traffic: TrafficTable,
    sizes: np.ndarray,
    machine: Machine,
    fixed: tuple[int, ...] | None = None,
    aim: str | Aim = "decode:1",
    limits: Limits | None = None,
    replicas: bool = False,
    host_sizes: np.ndarray | None = None,
    bar: float = 30,
) -> Plan:
    clock = Clock()
    plan = solve(
        sizes,
        traffic,
        machine,
        fixed,
        host_sizes=host_sizes,
        aim=Aim.parse(aim) if isinstance(aim, str) else aim,
        limits=limits or Limits(),
        replicas=replicas,
    )
    line(name, plan, clock, bar)
    return plan


def small_cases() -> None:
    rng = np.random.default_rng(0)
    traffic, sizes = table_from_hit_curve(6, 32, 4, 30_000), equal(6, 32, TINY_BYTES)
    third = int(sizes.sum()) // 3
    even = Machine((Gpu(third), Gpu(third)), 1 << 26)
    run("6x32, all fit", traffic, sizes, Machine.from_flags(["8MB", "8MB"], "64MB"), bar=10)
    run("6x32, a third on host", traffic, sizes, even, bar=10)
    run("6x32, uneven cards, half on host", traffic, sizes, Machine((Gpu(third), Gpu(third // 2)), 1 << 26), bar=10)
    mixed = rng.integers(26_000, 52_000, size=(6, 32))
    run("6x32, any sizes", traffic, mixed, even, bar=10)
    run("6x32, any sizes, decode:4", traffic, mixed, even, aim="decode:4", bar=10)


def large_cases(quick: bool) -> None:
    rng = np.random.default_rng(0)
    counts = table_from_hit_curve(40, 384, 6)
    k3 = equal(40, 384, EXPERT_BYTES[3])
    tp, half, fixed = replace(TWO, mode="tp"), -(-k3 // 2), (FIXED[0], FIXED[2])
    run("40x384 TP", counts, half, tp, fixed, host_sizes=k3, bar=10)
    run("40x384 EP decode:1", counts, k3, TWO, FIXED)
    mixed = rng.choice(list(EXPERT_BYTES.values()), size=(40, 384)).astype(np.int64)
    run("40x384 EP, K=2/3/4 mixed", counts, mixed, TWO, FIXED)
    if quick:
        return
    real = trace()[1]
    busy = replace(TWO, gpus=(Gpu(CARD, RESERVE, token_ns=200),) * 2)
    run("40x384 TP, K=2/3/4 mixed", counts, -(-mixed // 2), tp, fixed, host_sizes=mixed, bar=10)
    run("40x384 TP, recorded, decode:6", real, half, tp, fixed, "decode:6", host_sizes=k3, bar=10)
    run("40x384 EP, recorded, decode:1", real, k3, TWO, FIXED)
    run("40x384 EP, recorded, decode:6", real, k3, TWO, FIXED, "decode:6")
    run("40x384 EP, windows taken independent", counts, k3, TWO, FIXED, "decode:6")
    run("40x384 EP, recorded, host-bytes", real, k3, TWO, FIXED, "host-bytes")
    run("40x384 EP, mixed sizes, host-bytes", real, mixed, TWO, FIXED, "host-bytes")
    run("40x384 EP, mixed sizes, memory", real, mixed, TWO, FIXED, "memory")
    run("40x384 EP, recorded, prefill", real, k3, busy, FIXED, "prefill")
    run("40x384 EP, decode:6+0.2*prefill", real, k3, busy, FIXED, "decode:6+0.2*prefill")
    run("40x384 EP, worst of 3 sources", real, k3, TWO, FIXED, Aim(worst=True))
    run("40x384 EP, worst of 3, decode:6", real, k3, TWO, FIXED, Aim.parse("decode:6", worst=True))
    uneven = replace(TWO, gpus=(Gpu(CARD, RESERVE), Gpu(CARD // 2)))
    run("40x384 EP, cards of 96 and 48 GB", counts, k3, uneven, FIXED)
    slower = replace(TWO, gpus=(Gpu(CARD, RESERVE), Gpu(CARD // 2, bandwidth=900_000_000_000)))
    run("40x384 EP, 96 + 48 GB at half speed", counts, k3, slower, FIXED)
    limits = Limits(("0-3:0-7=gpu0", "*:5=host", "*:6=cards"), ("*:9=gpu1",), least=200, most=300)
    run("40x384 EP, pins, 200..300 per layer", counts, k3, TWO, FIXED, limits=limits)
    root = replace(TWO, shared_root=True)
    run("40x384 EP, cards share a root", counts, k3, root, FIXED)
    cpu = replace(root, cpu=Cpu(44_000_000_000, 10_000, 20_000))
    run("40x384 EP, CPU experts on the host", counts, k3, cpu, FIXED)
    run("40x384 EP, CPU experts, decode:6", real, k3, cpu, FIXED, "decode:6")


def replica_cases() -> None:
    """All fit with room to spare; one expert of each layer is asked for by nearly every token."""
    popular = popularity(40, 384, 0)
    popular[:, 17] = popular.max()
    chance = chances(popular, 6)
    chance[:, 17] = 6  # before it is capped at 1
    hot = table_of(chance, 6, 1_000_000)
    k2 = equal(40, 384, EXPERT_BYTES[2])
    eight = Machine((Gpu(parse_bytes("24GB")),) * 8, HOST)
    run("40x384, 8 cards, a hot expert", hot, k2, eight, bar=60)
    run("40x384, 8 cards, a hot expert, replicas", hot, k2, eight, replicas=True, bar=60)
    roomy = replace(TWO, gpus=(Gpu(CARD, 0), Gpu(CARD, 0)))
    run("40x384, 2 cards, room, replicas", table_from_hit_curve(40, 384, 6), k2, roomy, FIXED, replicas=True)


def wide_cases() -> None:
    wide, sizes = table_from_hit_curve(61, 384, 8), equal(61, 384, EXPERT_BYTES[3])
    tight = Machine((Gpu(parse_bytes("32GB")),) * 8, HOST)
    roomy = Machine((Gpu(parse_bytes("48GB")),) * 8, HOST)
    run("61x384, 8 cards, some on host", wide, sizes, tight, bar=60)
    run("61x384, 8 cards, all fit", wide, sizes, roomy, bar=60)
    run("61x384, 8 cards, all fit, replicas", wide, sizes, roomy, replicas=True, bar=60)
    run("61x384, 8 cards, some on host, decode:6", wide, sizes, tight, aim="decode:6", bar=60)
    halves = replace(tight, mode="tp")
    run("61x384, 8 cards, TP", wide, -(-sizes // 8), halves, host_sizes=sizes, bar=60)


def solve_section(quick: bool) -> None:
    small_cases()
    large_cases(quick)
    if not quick:
        replica_cases()
        wide_cases()


# --- recorded


def solver(
    sizes: np.ndarray, machine: Machine, fixed: tuple[int, ...] | None, aim: Aim
) -> Callable[[TrafficTable], np.ndarray]:
    def place(traffic: TrafficTable) -> np.ndarray:
        return solve(sizes, traffic, machine, fixed, aim=aim).holds

    return place


def room(machine: Machine, fixed: tuple[int, ...] | None) -> list[int]:
    taken = fixed or (0,) * len(machine.places)
    return [budget - part for budget, part in zip(machine.budgets, taken, strict=True)]


def others(traffic: TrafficTable, plan: Plan) -> dict[str, np.ndarray]:
    """The baselines' placements for the traffic that a plan was made for."""
    stored = stored_sizes(plan.machine, plan.card_sizes, plan.host_sizes)[:, :, -1]
    made, failed = baselines(traffic.counts, plan.card_sizes, stored, room(plan.machine, plan.fixed))
    for name, error in failed.items():
        print(f"{name} does not fit: {error.what}")
    return made


def score(
    name: str,
    recorded: Recorded,
    sizes: np.ndarray,
    machine: Machine,
    fixed: tuple[int, ...] | None,
    aim: Aim,
    bar: float,
) -> Plan:
    """Plan for the train part, print how it does on the other. Returns the plan."""
    window = aim.terms[0].window
    train, unseen = split(recorded, 1 - HELD_OUT)
    traffic = table(train)
    clock = Clock()
    plan = solve(sizes, traffic, machine, fixed, aim=aim)
    print()
    line(f"{name}, {aim}", plan, clock, bar)
    place = solver(sizes, machine, fixed, aim)
    clock = Clock()
    rows = compare(
        {"ours": plan.holds, **others(traffic, plan)},
        unseen,
        machine,
        sizes,
        sizes,
        window,
        oracle=lambda part: place(table(part)),
    )
    print(comparison_text(rows))
    own = simulate(train, plan.holds, machine, sizes, sizes, window).mean
    print(
        f"objective {1e6 * plan.value:.6g} us/step; simulated mean {1e6 * own:.6g} on the conversations planned for "
        f"({own / plan.value:.3f} times), {1e6 * rows[0].seconds.value:.6g} on the others; scores took {clock}"
    )
    slower = [row for row in rows[1:] if row.change and row.change.high is not None and row.change.high < 0]
    for row in slower:
        if not row.name.startswith("oracle"):
            print(f"! {row.name} is faster than ours by more than noise")
    return plan


def describe(name: str, recorded: Recorded, traffic: TrafficTable) -> None:
    slots = [round(slot * traffic.counts.size / max(HIT_CURVE)) for slot in HIT_CURVE]
    print(
        f"\n{name}: {recorded.tokens:,} tokens of {recorded.conversations} conversations, "
        f"{len(recorded.layers)} x {recorded.experts} experts, top-{recorded.top_k}\n  windows "
        + ", ".join(f"{size}: {share:.3f}" for size, share in distinct(traffic).items() if size in DISTINCT)
        + f" distinct (published {', '.join(map(str, DISTINCT.values()))})\n  hit curve "
        + ", ".join(f"{slot}: {served(traffic, slot):.3f}" for slot in slots[1:-1])
        + f" (published {', '.join(map(str, list(HIT_CURVE.values())[1:-1]))})",
        flush=True,
    )


def recorded_section(quick: bool) -> None:
    if not quick:
        synthetic()
    clock = Clock()
    tiny = tiny_v41_routing(10 if quick else None)
    describe(f"tiny-v41's own routing ({clock} to record)", tiny, table(tiny))
    sizes = equal(len(tiny.layers), tiny.experts, TINY_BYTES)
    third = int(sizes.sum()) // 3
    machine = Machine((Gpu(third), Gpu(third)), 1 << 26)
    for aim in ("decode:1", "decode:6"):
        score("tiny-v41, a third on host", tiny, sizes, machine, None, Aim.parse(aim), 10)
    print(cross_sources_text(cross_sources(table(tiny), solver(sizes, machine, None, Aim()))))


def synthetic() -> None:
    clock = Clock()
    recorded, traffic = trace()
    describe(f"synthetic ({clock} to make and count)", recorded, traffic)
    sizes = equal(40, 384, EXPERT_BYTES[3])
    for aim in ("decode:1", "decode:6"):
        score("synthetic 40x384", recorded, sizes, TWO, FIXED, Aim.parse(aim), 30)
    clock = Clock()
    print(cross_sources_text(cross_sources(traffic, solver(sizes, TWO, FIXED, Aim()))), f"\nsources took {clock}")


# --- replan


def replan_section(quick: bool) -> None:
    if quick:
        third = 4 * 128 * EXPERT_BYTES[3] // 3
        replans(4, 128, 40, Machine((Gpu(third), Gpu(third)), HOST), None, (0.3,), curve=False)
        return
    replans(40, 384, CONVERSATIONS, TWO, FIXED, (0.0, 0.1, 0.3, 0.8), curve=True)
    wide_replan()


def replans(
    layers: int,
    experts: int,
    conversations: int,
    machine: Machine,
    fixed: tuple[int, ...] | None,
    strengths: tuple[float, ...],
    curve: bool,
) -> None:
    """strengths: log-normal spreads of what each expert's popularity is multiplied by; 0: other conversations only."""
    sizes = equal(layers, experts, EXPERT_BYTES[3])
    before = recorded_from_hit_curve(layers, experts, 6, conversations)
    old_traffic = table(before)
    old = solve(sizes, old_traffic, machine, fixed)
    place = solver(sizes, machine, fixed, Aim())
    for strength in strengths:
        after = recorded_from_hit_curve(layers, experts, 6, conversations, strength, seed=1)
        train, unseen = split(after, 1 - HELD_OUT)
        traffic = table(train)
        print(f"\nreplan, popularity drifted by log-normal {strength}:")
        print(f"  {drift(old_traffic, traffic, (before, train)).verdict}")
        clock = Clock()
        found = replan(old, traffic, MOVES, curve=False)
        line(f"  at most {MOVES} moves", found.plan, clock, 30)
        clock = Clock()
        points = replan(old, traffic, MOVES).curve if curve else ()
        print(f"  with the curve {clock}; as it is {1e6 * found.stay:.6g} us per step")
        for point in points:
            gain, most = found.stay - point.value, found.stay - point.bound
            print(
                f"    {'any' if point.limit is None else point.limit:>6} moves: gain {1e6 * gain:9.4f} us "
                f"({100 * gain / found.stay:6.3f} %), at most {1e6 * most:9.4f}; {point.moves} moved"
            )
        stay, new = (simulate(unseen, holds, machine, sizes, sizes) for holds in (old.holds, found.plan.holds))
        verdict = noise_gain(stay, new)
        print(f"  at most {MOVES} moves, {len(found.moves)} steps: {verdict.verdict}: {verdict.why}")
        fresh = solve(sizes, traffic, machine, fixed)
        named = {f"{MOVES} moves": found.plan.holds, "in use": old.holds, "new plan": fresh.holds}
        named |= others(traffic, fresh)
        print(comparison_text(compare(named, unseen, machine, sizes, sizes, oracle=lambda part: place(table(part)))))


def wide_replan() -> None:
    sizes = equal(61, 384, EXPERT_BYTES[3])
    machine = Machine((Gpu(parse_bytes("32GB")),) * 8, HOST)
    old = solve(sizes, table_from_hit_curve(61, 384, 8), machine)
    print()
    clock = Clock()
    found = replan(old, table_from_hit_curve(61, 384, 8, drift=0.3), MOVES, curve=False)
    line(f"61x384, 8 cards, drift 0.3, {MOVES} moves", found.plan, clock, 60)
    gain, most = found.stay - found.plan.value, found.stay - found.plan.bound
    print(f"  gain {1e6 * gain:.4f} us ({100 * gain / found.stay:.3f} %), at most {1e6 * most:.4f}")


# --- counters

ANSWER = 1024  # tokens of a streamed conversation
LENGTHS = (2_000_000, 8_000_000)


def stream(tokens: int) -> tuple[float, float, float, int]:
    """(seconds of CPU in the counters, MB at most before the first token, MB at most, windows of 6 tokens counted)."""
    shape = MoeShape(40, tuple(range(40)), 384, 6)
    recorded = recorded_from_hit_curve(40, 384, 6, 8)
    ids = np.stack(list(recorded.ids), axis=1)  # [N, L, k]
    recorded_from_hit_curve.cache_clear()
    steps, recording = Steps(shape), Recording(shape, 500_000)
    tally = Tally(shape, steps, recording)
    before, clock = peak(), Clock()
    for number, _ in enumerate(range(0, tokens, ANSWER)):
        at = number * 777 % (len(ids) - ANSWER)  # another piece each time, without making new routing
        tally.add(TopK("stream", ids[at : at + ANSWER], "decode", 0, number))
    tally.table("stream")
    windows, _ = steps.result()
    kept = recording.recorded()
    assert kept is not None and kept.tokens <= recording.keep
    return clock.seconds[0], before, peak(), windows[6].steps


def counters_section(quick: bool) -> None:
    print()
    for tokens in (200_000,) if quick else LENGTHS:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            seconds, before, most, windows = pool.submit(stream, tokens).result()
        print(
            f"{tokens:>12,} tokens {seconds:8.1f} s CPU {tokens / seconds:9,.0f} tokens/s  peak {most:7,.0f} MB "
            f"({before:,.0f} before the first)  {windows:,} windows of 6; 10^9 tokens would take "
            f"{1e9 / tokens * seconds / 3600:.1f} h of one core",
            flush=True,
        )


SECTIONS = {
    "solve": solve_section,
    "recorded": recorded_section,
    "replan": replan_section,
    "counters": counters_section,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=[[], *SECTIONS], metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="fewer cases, within a minute")
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    clock = Clock()
    for name in args.sections or SECTIONS:
        SECTIONS[name](args.quick)
    print(f"\nall of it {clock}, peak {peak():,.0f} MB")


if __name__ == "__main__":
    main()

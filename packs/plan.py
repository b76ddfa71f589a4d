"""The plan of a pack or of one that is still to be built: exact bytes, real traffic, and a score on unseen traffic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..calibrate.checkpoint import Checkpoint
from ..calibrate.layout import Layout, check_layout
from ..errors import PlanError
from ..files import sha256_bytes, sha256_file, write_atomic
from ..placement import Aim, Limits, Machine, Plan, Recorded, TrafficTable, solve
from ..placement.baselines import baselines
from ..placement.captures import MoeShape, find_files, is_pack, read_captures
from ..placement.captures.recording import Recording
from ..placement.costs import stored_sizes
from ..placement.drift import drift
from ..placement.heldout import Row, SourceRow, as_json, compare, cross_sources, noise_gain
from ..placement.holdout import Parts, hold_out
from ..placement.moves_file import moves_bytes
from ..placement.recorded import table as recorded_table
from ..placement.replan import Replan, replan
from ..placement.report import plan_report
from ..placement.simulate import simulate
from ..placement.traffic import PACK_TABLE
from ..progress import Progress, Silent
from .layout import is_pack_config
from .manifest import MANIFEST, read_manifest
from .reader import Pack
from .recipe import Recipe
from .routing import pack_recorded
from .sizes import even_traffic, expert_bytes, fixed_bytes, size_tables

PLAN = "plan.json"
TRAFFIC = PACK_TABLE
EXL3_SUFFIXES = ("trellis", "suh", "svh", "mcg", "mul1")
KEEP_TOKENS = 500_000
"""Of captures: tokens of conversations kept to hold out from."""
UNSEEN = 0.2
"""Share of a build's conversations that its plan is scored on."""
OURS, STAY = "this plan", "the plan in use"


@dataclass(frozen=True)
class PlanRequest:
    """source: a finished pack, or an original checkpoint, which `recipe` would make one of.

    traffic: tables, packs, captures and directories of them; none: the pack's own. hold_out: share of the recorded
    conversations that the plan does not see and is scored on. start: the plan in use, to move from within max_moves and
    max_bytes; against: the traffic that it was made for. report: HTML; moves: the ordered list of moves.
    """

    source: Path
    machine: Machine | None
    out: Path
    traffic: tuple[Path, ...] = ()
    aim: Aim | None = None
    limits: Limits | None = None
    replicas: bool = False
    hold_out: float = 0.2
    recipe: Recipe = field(default_factory=Recipe)
    start: Path | None = None
    max_moves: int | None = None
    max_bytes: int | None = None
    against: Path | None = None
    moves: Path | None = None
    report: Path | None = None


@dataclass(frozen=True)
class Traffic:
    """table: of all of it. recorded: its conversations, or a sample of them; None where only counts are known."""

    table: TrafficTable
    recorded: Recorded | None
    files: dict[str, str]


@dataclass(frozen=True)
class PlanOutcome:
    """summary: everything as JSON values. rows: held-out scores; sources: each left out once."""

    summary: dict[str, Any]
    rows: list[Row]
    sources: list[SourceRow]


def plan_summary(plan: Plan) -> dict[str, Any]:
    """What the manifest and the summary show of a plan."""
    places = plan.machine.places
    return {
        "mode": plan.machine.mode,
        "objective": str(plan.aim),
        "unit": plan.aim.unit,
        "value": plan.value,
        "bound": plan.bound,
        "gap": plan.gap,
        "greedy": plan.greedy,
        "experts": {place: int(plan.holds[:, :, p].sum()) for p, place in enumerate(places)},
        "bytes": dict(zip(places, plan.used, strict=True)),
        "activation_share": dict(zip(places, plan.shares, strict=True)),
    }


def gather(paths: tuple[Path, ...], source: Path, layout: Layout) -> Traffic:
    """Traffic of all `paths` together. PlanError or TraceError for what is not of the model, damaged or given twice."""
    if not paths:
        if not is_pack(source):
            mend = "give --traffic: a pack of this model, a traffic table, or captures"
            raise PlanError("there is no traffic to plan for", where=str(source), mend=mend)
        paths = (source,)
    if len(paths) == 1 and is_pack(paths[0]):
        file = paths[0] / TRAFFIC
        found = Traffic(TrafficTable.load(file), pack_recorded(paths[0]), {"traffic_file": sha256_file(file)})
    else:
        shape, files = MoeShape.read(source), find_files(list(paths))
        recording = Recording(shape, KEEP_TOKENS)
        table, _ = read_captures(files, shape, recording=recording)
        for pack in filter(is_pack, paths):
            if (more := pack_recorded(pack)) is not None:
                recording.add_recorded(more)
        # One digest for all of them, however many: of their own, in hexadecimal, a line each.
        digests = "".join(f"{sha256_file(file)}\n" for file in files)
        found = Traffic(table, recording.recorded(), {"traffic_files": sha256_bytes(digests.encode())})
    check_same_model(found.table, layout, paths[0])
    return found


def check_same_model(given: TrafficTable, layout: Layout, where: Path) -> None:
    """Refuse (PlanError) traffic of other layers, experts or top-k than the pack's."""
    own = len(layout.moe_layers), layout.experts
    if (given.layers, given.counts.shape, given.top_k) != (layout.moe_layers, own, layout.experts_per_token):
        raise PlanError(
            "the traffic is not of this pack's model",
            where=str(where),
            found=f"expected {list(own)} layers and experts, top-{layout.experts_per_token}, found "
            f"{list(given.counts.shape)}, top-{given.top_k}",
            mend="import captures of the model that the pack was built from",
        )


def make_plan(request: PlanRequest, progress: Progress | None = None) -> PlanOutcome:
    """Plan, score on held-out conversations, write plan.json and what else was asked for; a pack is not touched.

    Raises MoefitError for input that does not fit together, before any solving.
    """
    progress = progress or Silent()
    layout, recipe, checkpoint = _opened(request)
    old = None if request.start is None else Plan.load(request.start)
    machine = _machine(request, old)
    aim = request.aim or (old.aim if old else Aim())
    fixed = fixed_bytes(checkpoint, machine)
    card, host = size_tables(layout, expert_bytes(layout, recipe, machine))
    if old is not None:
        _check_start(old, card, host, fixed, request)
    if request.traffic or is_pack(request.source) or any(term.measure != "memory" for term in aim.terms):
        traffic = gather(request.traffic, request.source, layout)
    else:  # where experts fit does not depend on who asks for them
        traffic = Traffic(even_traffic(layout), None, {})
    before = None if request.against is None else gather((request.against,), request.source, layout)
    parts = hold_out(traffic.table, traffic.recorded, request.hold_out)
    progress.stage("solve", 1, "plan")
    moved = None
    if old is None:
        limits = request.limits or Limits()
        plan = solve(
            card,
            parts.planned,
            machine,
            fixed,
            traffic.files,
            host_sizes=host,
            aim=aim,
            limits=limits,
            replicas=request.replicas,
        )
    else:
        moved = replan(
            old,
            parts.planned,
            request.max_moves,
            request.max_bytes,
            aim=request.aim,
            limits=request.limits,
            inputs=traffic.files,
        )
        plan = moved.plan
    progress.finish()
    plan.save(request.out)
    summary = plan_summary(plan) | {
        "out": str(request.out),
        "traffic": {"tokens": traffic.table.tokens, "planned": plan.tokens, "not_held_out": parts.why},
    }
    rows, sources = _score(plan, parts, old, progress)
    summary |= {"held_out": as_json(rows), "sources": as_json(sources)}
    if moved is not None and old is not None:
        summary |= {"replan": _moving(request, moved, old, parts)}
    if before is not None:
        found = drift(before.table, traffic.table, (before.recorded, traffic.recorded))
        summary |= {"drift": found.to_json()}
    if request.report is not None:
        write_atomic(request.report, _report(request, plan, parts.planned, summary, moved).encode())
    return PlanOutcome(summary, rows, sources)


def _opened(request: PlanRequest) -> tuple[Layout, Recipe, Checkpoint]:
    """The model's sizes, the recipe of its experts, and the tensors whose bytes are fixed."""
    finished = (request.source / MANIFEST).exists()
    manifest = read_manifest(request.source) if finished else {}
    source = Checkpoint.open(request.source)
    if not finished and not is_pack_config(source.config):
        return check_layout(source), request.recipe, source
    recipe = (manifest or read_manifest(request.source))["recipe"]
    pack = Pack(request.source)
    return pack.layout, Recipe(bits=recipe["bits"], codebook=recipe["codebook"]), pack.checkpoint


def _machine(request: PlanRequest, old: Plan | None) -> Machine:
    if request.machine is None:
        if old is None:
            raise PlanError("there is no machine to plan for", mend="give --machine, or --gpu and --host")
        return old.machine
    if old is not None and request.machine != old.machine:
        raise PlanError(
            "the plan in use is of another machine",
            where=str(request.start),
            mend="leave out --machine, --gpu and --host, or make a new plan without --from",
        )
    return request.machine


def _check_start(old: Plan, card: np.ndarray, host: np.ndarray, fixed: tuple[int, ...], request: PlanRequest) -> None:
    same = np.array_equal(old.card_sizes, card) and np.array_equal(old.host_sizes, host) and old.fixed == fixed
    if not same:
        mend = "give the plan that was made for it, or make a new one without --from"
        raise PlanError(
            f"the plan in use is of another pack than {request.source}", where=str(request.start), mend=mend
        )
    if request.replicas:
        mend = "leave out --replicas, or --from"
        raise PlanError("a plan with replicas cannot be reached by moves", where="--replicas", mend=mend)


def _placing(plan: Plan) -> Callable[[TrafficTable], np.ndarray]:
    """The placement that `solve` makes for other traffic on the same machine, with the same aim and limits."""

    def place(table: TrafficTable) -> np.ndarray:
        aim = Aim(plan.aim.terms)  # sources may be missing there
        made = solve(
            plan.card_sizes, table, plan.machine, plan.fixed, host_sizes=plan.host_sizes, aim=aim, limits=plan.limits
        )
        return made.holds

    return place


def _score(plan: Plan, parts: Parts, old: Plan | None, progress: Progress) -> tuple[list[Row], list[SourceRow]]:
    """(rows on held-out traffic, rows of sources left out), [] where there is none."""
    place = _placing(plan)
    rows: list[Row] = []
    if parts.held_out is not None:
        progress.stage("replay unseen traffic", 1, "plan")
        sizes = stored_sizes(plan.machine, plan.card_sizes, plan.host_sizes)
        room = [budget - taken for budget, taken in zip(plan.machine.budgets, plan.fixed, strict=True)]
        others, _ = baselines(parts.planned.counts, plan.card_sizes, sizes[:, :, -1], room)
        candidates = {OURS: plan.holds, **({STAY: old.holds} if old else {}), **others}
        rows = compare(
            candidates,
            parts.held_out,
            plan.machine,
            plan.card_sizes,
            plan.host_sizes,
            decode_window(plan.aim),
            oracle=lambda recorded: place(recorded_table(recorded)),
        )
        progress.finish()
    sources: list[SourceRow] = []
    if len(parts.planned.sources) > 1:
        progress.stage("leave sources out", 1, "plan")
        sources = cross_sources(parts.planned, place)
        progress.finish()
    return rows, sources


def unseen_score(plan: Plan, traffic: TrafficTable, recorded: Recorded | None) -> dict[str, Any]:
    """How a plan made as this one, for four fifths of the conversations, does on the others: a row of `compare` as JSON
    values, or {"why"} where it cannot be told. The plan itself has seen all of them."""
    parts = hold_out(traffic, recorded, UNSEEN)
    if parts.held_out is None:
        return {"why": parts.why}
    sizes = plan.card_sizes, plan.host_sizes
    holds = _placing(plan)(parts.planned)
    rows = compare({OURS: holds}, parts.held_out, plan.machine, *sizes, decode_window(plan.aim))
    return as_json(rows)[0]


def decode_window(aim: Aim) -> int:
    """Tokens of a step in a replay: the objective's, or 1 where it has no decode term."""
    return next((term.window for term in aim.terms if term.measure == "decode"), 1)


def _moving(request: PlanRequest, moved: Replan, old: Plan, parts: Parts) -> dict[str, Any]:
    """What the replan would gain and cost, and whether that is more than noise; writes the moves."""
    plan = moved.plan
    if parts.held_out is None:
        gain = {"verdict": "unknown", "why": parts.why}
    else:
        window, sizes = decode_window(plan.aim), (plan.card_sizes, plan.host_sizes)
        replays = [simulate(parts.held_out, holds, plan.machine, *sizes, window) for holds in (old.holds, plan.holds)]
        gain = asdict(noise_gain(*replays))
    best = min([moved.plan.bound, *(point.bound for point in moved.curve)])
    if request.moves is not None:
        write_atomic(request.moves, moves_bytes(moved, old))
    return {
        "stay": moved.stay,
        "value": plan.value,
        "stale": (moved.stay - best) / moved.stay if moved.stay else 0.0,
        "moves": [asdict(move) for move in moved.moves],
        "curve": [asdict(point) for point in moved.curve],
        "from": sha256_bytes(old.to_bytes()),
        "gain": gain,
    }


def _report(
    request: PlanRequest, plan: Plan, table: TrafficTable, summary: dict[str, Any], moved: Replan | None
) -> str:
    again = summary.get("replan")
    curve = moved and [(p.limit or p.moves, moved.stay - p.value, moved.stay - p.bound) for p in moved.curve]
    return plan_report(
        plan,
        table,
        comparison=summary["held_out"] or None,
        curve=curve or None,
        moves=again and again["moves"],
        verdict=again and f"{again['gain']['verdict']}: {again['gain']['why']}",
        drift=summary.get("drift"),
        limit=request.max_moves,
    )

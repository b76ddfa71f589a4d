"""The plan of a pack: exact bytes from its layout, traffic from its calibration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..calibrate.checkpoint import Checkpoint
from ..calibrate.layout import Layout, parts
from ..errors import PlanError
from ..files import sha256_file
from ..placement import Machine, Plan, TrafficTable, solve
from ..placement.problem import Problem, check_fits
from ..placement.traffic import PACK_TABLE
from .layout import PackLayout
from .manifest import read_manifest
from .reader import Pack

PLAN = "plan.json"
TRAFFIC = PACK_TABLE
EXL3_SUFFIXES = ("trellis", "suh", "svh", "mcg", "mul1")


def fixed_bytes(checkpoint: Checkpoint, machine: Machine) -> tuple[int, ...]:
    """Bytes of everything but routed experts, per place: Engram tables on the host (the engines' default), the rest
    split evenly over the cards, each share rounded up. checkpoint: the original or a pack."""
    sizes = [(part, checkpoint.tensors[name].nbytes) for name, part in parts(checkpoint).items()]
    engram = sum(size for part, size in sizes if part == "engram tables")
    dense = sum(size for part, size in sizes if part not in ("engram tables", "routed experts"))
    cards = len(machine.gpus)
    return (*(-(-dense // cards) for _ in range(cards)), engram)


def check_machine(layout: PackLayout, machine: Machine, fixed: tuple[int, ...]) -> None:
    """Refuse (PlanError) a machine on which the pack cannot fit, whatever the traffic will be."""
    sizes = layout.layout
    counts = np.full((len(sizes.moe_layers), sizes.experts), sizes.experts_per_token)
    even = TrafficTable(counts, sizes.experts, sizes.moe_layers, sizes.experts_per_token)
    check_fits(Problem(np.full(counts.shape, layout.expert_bytes, dtype=np.int64), even, machine, fixed))


def plan_summary(plan: Plan) -> dict[str, Any]:
    """What the manifest and the summary show of a plan."""
    places = plan.machine.places
    return {
        "seconds_per_token": plan.seconds,
        "bound": plan.bound,
        "gap": plan.gap,
        "greedy": plan.greedy,
        "experts": {place: int((plan.assignment == p).sum()) for p, place in enumerate(places)},
        "activation_share": dict(zip(places, plan.shares, strict=True)),
    }


def plan_pack(pack: Path, machine: Machine, out: Path, traffic_file: Path | None = None) -> dict[str, Any]:
    """Plan a finished pack for another machine and write plan.json to `out`; the pack itself is not touched.

    traffic_file: a traffic table instead of the pack's own. PlanError if either is not of this model.
    """
    manifest = read_manifest(pack)
    opened = Pack(pack)
    file = traffic_file or pack / TRAFFIC
    traffic = TrafficTable.load(file)
    check_same_model(traffic, opened.layout, file)
    sizes = np.full(traffic.counts.shape, manifest["sizes"]["expert_bytes"], dtype=np.int64)
    inputs = {"traffic_file": sha256_file(file)}
    plan = solve(sizes, traffic, machine, fixed_bytes(opened.checkpoint, machine), inputs)
    plan.save(out)
    return plan_summary(plan)


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

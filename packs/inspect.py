"""What a checkpoint holds, what its pack will weigh, and what fits: from headers alone."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..calibrate.check import check_values
from ..calibrate.checkpoint import Checkpoint
from ..calibrate.families import open_model
from ..calibrate.layout import census, check_layout
from ..parallel import default_threads
from ..placement import Machine
from ..progress import Progress
from .layout import PackLayout, pack_layout
from .recipe import Recipe
from .report import size_summary
from .sizes import expert_bytes, fixed_bytes


def inspect_model(
    model: Path,
    recipe: Recipe,
    machine: Machine | None = None,
    values: bool = False,
    threads: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Census of a checkpoint and the size of its pack, as JSON values.

    values: also read every number once. Raises CheckpointError for anything that is missing, misshapen or NaN.
    Memory: the headers (0.4 GB for the 96,085 tensors of DeepSeek-V4.1-Flash).
    """
    source = Checkpoint.open(model)
    sizes = check_layout(source)
    open_model(source)  # looks for every tensor that the forward needs, in the headers
    layout = pack_layout(source, sizes, recipe)
    table = census(source)
    return {
        "model": str(model),
        "architecture": source.config["architectures"][0],
        "layers": sizes.layers,
        "moe_layers": len(sizes.moe_layers),
        "experts": sizes.experts,
        "experts_per_token": sizes.experts_per_token,
        "tensors": len(source.tensors),
        "shards": len(source.shards),
        "census": table,
        "source_bytes": sum(sum(row.values()) for row in table.values()),
        "pack": {"bits": recipe.bits, "codebook": recipe.codebook, **size_summary(layout)},
        "fit": fit(source, layout, recipe, machine) if machine else None,
        "values": asdict(check_values(source, progress, threads or default_threads())) if values else None,
    }


def fit(source: Checkpoint, layout: PackLayout, recipe: Recipe, machine: Machine) -> dict[str, Any]:
    """Room for whole experts on every place, and whether all of them find one."""
    fixed, size = fixed_bytes(source, machine), expert_bytes(layout.layout, recipe, machine)
    each = [*(size.card for _ in machine.places[:-1]), machine.pinned(size.whole)]
    places, room = [], 0
    short = 0
    for name, budget, taken, one in zip(machine.places, machine.budgets, fixed, each, strict=True):
        experts = max(0, (budget - taken) // one)
        short += max(0, taken - budget)
        room += experts
        places.append({"name": name, "budget": budget, "fixed": taken, "experts": experts})
    count = layout.layout.routed_experts
    if short:
        verdict = f"does not fit: the tensors besides the experts are {short:,} B too large for their places"
    elif room < count:
        missing = (count - room) * each[-1]
        verdict = f"does not fit: {count - room:,} of {count:,} experts find no place; {missing:,} B more are needed"
    else:
        verdict = f"fits: room for {room:,} experts, {count:,} needed"
    return {"places": places, "fits": room >= count and not short, "verdict": verdict}

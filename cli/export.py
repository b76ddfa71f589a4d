"""`moefit export`: a plan in the format of the engine that serves it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..errors import PlanError
from .common import check_targets, show


def export(
    plan: Annotated[Path, typer.Argument(help="A plan.json.")],
    form: Annotated[
        Literal["vllm-exl3", "sglang", "ktransformers", "llama.cpp", "vllm-eplb"],
        typer.Option("--format", help="The engine's format."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to write the engine's file.")],
    traffic: Annotated[
        Path | None,
        typer.Option(help="A traffic table: which experts to copy or rank first, or their share on the host."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="The model's directory or config.json: checked, and layers behind the plan's last counted."),
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(help="Of vllm-exl3: a layer's experts, {i} its number; default model.layers.{i}.ffn.experts."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable result on standard output.")] = False,
) -> None:
    """Write a plan in a serving engine's own format; prints the flags to start it with and what gets lost."""
    from ..files import write_atomic
    from ..placement.exports import EXPORTS
    from ..placement.exports import export as run
    from ..placement.plan import Plan
    from ..placement.traffic import TrafficTable

    check_targets((out,), (traffic,))
    if out.resolve() == plan.resolve():
        found = "found the plan itself as --out"
        raise PlanError("the export would take the plan's place", where=str(out), found=found, mend="give another name")
    placed = Plan.load(plan)
    hidden = None if model is None else hidden_layers(placed, model)
    made = run(
        placed,
        form,
        str(out),
        prefix=prefix,
        traffic=None if traffic is None else TrafficTable.load(traffic),
        hidden_layers=hidden if "hidden_layers" in EXPORTS[form].options else None,
    )
    write_atomic(out, made.content)
    value = {
        "bytes": len(made.content),
        "flags": list(made.flags),
        "format": form,
        "lost": list(made.lost),
        "out": str(out),
    }
    show(as_json, value, export_text(value))


def hidden_layers(plan: Any, model: Path) -> int:
    """Decoder layers of `model`. PlanError where its experts are not the plan's."""
    from ..placement.captures import MoeShape

    shape = MoeShape.read(model)
    if (shape.layers, shape.experts) != (plan.layers, plan.holds.shape[1]):
        raise PlanError(
            "the plan is not of this model",
            where=str(model),
            found=f"expected {len(plan.layers)} layers from {plan.layers[0]} with {plan.holds.shape[1]} experts, "
            f"found {len(shape.layers)} from {shape.layers[0]} with {shape.experts}",
            mend="give the model that the plan is for",
        )
    return shape.hidden_layers


def export_text(made: dict[str, Any]) -> str:
    lost = made["lost"] or ["nothing"]
    return "\n".join(
        [
            f"written to    {made['out']} ({made['bytes']:,} B)",
            f"start with    {shlex.join(made['flags'])}",
            f"lost          {lost[0]}",
            *(f"              {sentence}" for sentence in lost[1:]),
        ]
    )

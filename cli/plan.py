"""`moefit plan`: place experts for real traffic, or move from the plan in use to a better one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import MoefitError
from .common import check_targets, show
from .options import Bits, CodebookFlag, GpuBandwidth, HostBandwidth, Json, MachineFile, Mode, Quiet


def plan(
    source: Annotated[
        Path, typer.Argument(metavar="PACK", help="A finished pack; or an original checkpoint, with --bits.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to write plan.json.")],
    traffic: Annotated[
        list[Path] | None,
        typer.Option(
            help="Traffic to plan for: tables, packs, captures, directories. Repeat; default: the pack's own."
        ),
    ] = None,
    machine: MachineFile = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option("--gpu", help="A card's memory, e.g. 96GB, or 96GB:8GB to keep 8 GB free. Repeat per card."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Host memory for experts and Engram tables, e.g. 128GB.")] = None,
    gpu_bandwidth: GpuBandwidth = None,
    host_bandwidth: HostBandwidth = None,
    mode: Mode = None,
    objective: Annotated[
        str | None,
        typer.Option(help="decode:W (W = 1..8 tokens a step), prefill, host-bytes, memory, or decode:6+0.2*prefill."),
    ] = None,
    worst_case: Annotated[
        bool, typer.Option("--worst-case", help="The worst source of traffic counts, not their mean.")
    ] = False,
    weight: Annotated[
        list[str] | None, typer.Option(help="SOURCE=WEIGHT: let sources count by weight. Repeat.")
    ] = None,
    pin: Annotated[
        list[str] | None, typer.Option(help="LAYERS:EXPERTS=PLACE, e.g. 3:0-7=gpu0 or *:5=cards. Repeat.")
    ] = None,
    forbid: Annotated[list[str] | None, typer.Option(help="LAYERS:EXPERTS=PLACE that may not be. Repeat.")] = None,
    min_per_layer: Annotated[int | None, typer.Option(help="Fewest experts of a layer on cards.")] = None,
    max_per_layer: Annotated[int | None, typer.Option(help="Most experts of a layer on cards.")] = None,
    replicas: Annotated[bool, typer.Option("--replicas", help="Copy hot experts to several cards, into room left.")] = (
        False
    ),
    hold_out: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share of conversations the plan does not see and is scored on.")
    ] = 0.2,
    start: Annotated[Path | None, typer.Option("--from", help="The plan in use: move from it, do not start anew.")] = (
        None
    ),
    max_moves: Annotated[int | None, typer.Option(min=0, help="With --from: experts that may move.")] = None,
    max_bytes: Annotated[str | None, typer.Option(help="With --from: bytes that may be written, e.g. 4GB.")] = None,
    moves: Annotated[Path | None, typer.Option(help="With --from: write the moves here, in a safe order.")] = None,
    against: Annotated[
        Path | None, typer.Option(help="Traffic of before: say how far the new traffic has drifted from it.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write a report with pictures here, an HTML file.")] = None,
    bits: Bits = 3.0,
    codebook: CodebookFlag = "mul1",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Place experts on cards and host for real traffic, with a proven gap, scored on traffic it has not seen."""
    from ..packs.plan import PlanRequest, make_plan
    from ..packs.recipe import Recipe
    from ..placement import Aim, Limits, parse_bytes
    from ..placement.machine_file import machine_from_options
    from .plan_text import plan_text
    from .progress import Display

    check_targets((out, moves, report), (*(traffic or ()), machine, start, against), source)
    moving: dict[str, Any] = {"--max-moves": max_moves, "--max-bytes": max_bytes, "--moves": moves}
    if start is None and (given := [flag for flag, value in moving.items() if value is not None]):
        mend = "add --from PLAN, the plan in use, or leave it out"
        raise MoefitError(f"{' and '.join(given)} would change nothing without --from", mend=mend)
    flags = (gpu, host, gpu_bandwidth, host_bandwidth)
    no_machine = start is not None and machine is None and mode is None and not any(flags)
    aimed = objective is not None or worst_case or bool(weight)
    limited = bool(pin or forbid) or min_per_layer is not None or max_per_layer is not None
    request = PlanRequest(
        source,
        None if no_machine else machine_from_options(machine, *flags, mode),
        out,
        tuple(traffic or ()),
        Aim.parse(objective or "decode:1", worst_case, _weights(weight or [])) if aimed or start is None else None,
        Limits(tuple(pin or ()), tuple(forbid or ()), min_per_layer, max_per_layer)
        if limited or start is None
        else None,
        replicas,
        hold_out,
        Recipe(bits=bits, codebook=codebook),  # type: ignore[arg-type]
        start,
        max_moves,
        None if max_bytes is None else parse_bytes(max_bytes),
        against,
        moves,
        report,
    )
    with Display(quiet) as progress:
        made = make_plan(request, progress)
    show(as_json, made.summary, plan_text(made))


def _weights(given: list[str]) -> tuple[tuple[str, float], ...]:
    """SOURCE=WEIGHT, each; the last = counts, since sources are file names."""
    found = []
    for text in given:
        name, equals, number = text.rpartition("=")
        try:
            found.append((name, float(number)))
        except ValueError:
            equals = ""
        if not (name and equals):
            raise MoefitError(
                "not a weight of a source", where=repr(text), mend='write SOURCE=WEIGHT, e.g. "agent=0.7"'
            )
    return tuple(found)

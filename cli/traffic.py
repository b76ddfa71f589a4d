"""`moefit traffic`: captured routing as a traffic table, how uneven it is, and how far it is from other traffic."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .common import check_target, show

KEEP_TOKENS = 500_000


def traffic(
    imports: Annotated[
        list[Path], typer.Argument(metavar="IMPORT...", help="Captured routing: files, directories, packs, tables.")
    ],
    model: Annotated[
        Path | None,
        typer.Option(help="The model it ran on: a checkpoint, a pack, or its config.json; packs and tables know it."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the traffic table, for `plan --traffic`.")
    ] = None,
    form: Annotated[str, typer.Option("--format", help="Refuse files that are not in this format.")] = "",
    keep_tokens: Annotated[
        int,
        typer.Option(
            min=0, help="Tokens whose routing the table keeps, of whole conversations drawn from all; 0: counts alone."
        ),
    ] = KEEP_TOKENS,
    against: Annotated[
        Path | None, typer.Option(help="Another traffic table, or a pack: how far this traffic has drifted from it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable result on standard output.")] = False,
) -> None:
    """Routing that serving engines captured, or a pack's own: tokens per expert, summed over files, and how uneven."""
    from ..packs.routing import pack_recorded
    from ..placement.captures import MoeShape, Recording, find_files, is_pack, read_captures, shape_of
    from ..placement.drift import drift
    from ..placement.recorded import load_recorded
    from ..placement.traffic import PACK_TABLE, TrafficTable
    from .tables import traffic_summary, traffic_text

    if out is not None:
        check_target(out)
    found = find_files(imports, out)
    shape = MoeShape.read(model) if model else shape_of(imports)
    recording = Recording(shape, keep_tokens if out is not None or against is not None else 0)
    table, files = read_captures(found, shape, form or None, recording)
    for path in imports:
        if recording.keep and is_pack(path) and (routing := pack_recorded(path)) is not None:
            recording.add_recorded(routing)
    kept = recording.recorded()
    drifted = None
    if against is not None:
        pack = is_pack(against)
        other = TrafficTable.load(against / PACK_TABLE if pack else against)
        drifted = drift(table, other, (kept, pack_recorded(against) if pack else load_recorded(against)))
    if out is not None:
        table.save(out, kept)
    made = traffic_summary(table, files, out, kept if out is not None else None, drifted)
    show(as_json, made, traffic_text(made))

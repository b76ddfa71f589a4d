"""Options that several commands take, worded once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

GpuBandwidth = Annotated[
    str | None, typer.Option(help="Bytes per second a card reads from its own memory, e.g. 1008GB; default 1792GB.")
]
HostBandwidth = Annotated[
    str | None, typer.Option(help="Bytes per second a card reads from host memory; default 22GB.")
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable result on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]
DeviceFlag = Annotated[
    Literal["auto", "cpu", "cuda"],
    typer.Option(help="Where to run layers and encode; auto: on the first card, if there is one that can."),
]
Threads = Annotated[int, typer.Option(min=0, help="Worker threads; 0 takes every CPU. Does not change a byte.")]
MaxKl = Annotated[float, typer.Option(help="Largest mean KL per corpus, nats per token.")]
EvalFiles = Annotated[
    list[Path] | None,
    typer.Option("--eval", help="Held-out JSONL or trace set. Repeat; corpus = file name or `corpus` field."),
]
Bits = Annotated[float, typer.Option(help="K of the routed experts: 1..8, and 1.5, 2.5, 3.5 with mul1.")]
CodebookFlag = Annotated[str, typer.Option(help="mul1, mcg or 3inst.")]
MachineFile = Annotated[
    Path | None,
    typer.Option("--machine", help="A machine file (`moefit doctor --write-machine`), instead of --gpu and --host."),
]
GpuFlags = Annotated[
    list[str] | None,
    typer.Option("--gpu", help="A card's memory, e.g. 96GB, or 96GB:8GB to keep 8 GB free. Repeat per card."),
]
HostFlag = Annotated[str | None, typer.Option("--host", help="Host memory for experts and Engram tables, e.g. 128GB.")]
Mode = Annotated[
    Literal["ep", "tp"] | None,
    typer.Option(help="ep: each expert whole on one place; tp: in slices on all cards, or on the host; default ep."),
]

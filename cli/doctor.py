"""`moefit doctor`: is this machine fit for moefit, and the machine file for `plan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import MoefitError
from .common import check_target, show
from .progress import Display

if TYPE_CHECKING:
    from ..packs.doctor import Findings


def doctor(
    write_machine: Annotated[
        Path | None, typer.Option("--write-machine", help="Write what was found as a machine file, for --machine.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the machine file.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Read, but measure nothing: speeds are defaults.")] = False,
    threads: Annotated[int, typer.Option(min=0, help="That read host memory at once; 0 takes every CPU.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable result on standard output.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """Look at this machine: cards, memory, PCIe, driver; say what is wrong with it, and write the machine file."""
    from ..files import write_atomic
    from ..packs.doctor import examine_machine

    if write_machine is not None:
        check_target(write_machine)
        if write_machine.exists() and not force:
            mend = "give another name, or --force to overwrite it"
            raise MoefitError("the machine file is there already", where=str(write_machine), mend=mend)
    with Display(quiet) as progress:
        found = examine_machine(threads, quick, progress)
    if write_machine is not None:
        write_atomic(write_machine, found.toml().encode())
    written = str(write_machine) if write_machine else None
    text = doctor_text(found) + (f"\nwritten to {written}" if written else "")
    show(as_json, found.summary() | {"out": written}, text)
    raise typer.Exit(1 if found.failed else 0)


def doctor_text(found: Findings) -> str:
    """Host, cards, speeds, room for experts, and every check with its mend."""
    from .tables import human  # and with it the solver's libraries, which the command line loads only when it must

    host, machine = found.host, found.machine()
    memlock = "unlimited" if host.memlock is None else human(host.memlock)
    pages = [f"{count} x {human(size)}" for size, count in host.huge_pages if count] or ["none set aside"]
    limit = f", limited to {human(host.limit.bytes)}" if host.limit else ""
    lines = [
        f"system        {host.system}",
        f"cpu           {host.cpu}, {host.cpus} CPUs: {' '.join(host.features) or 'no vector extensions'}",
        f"memory        {human(host.memory)}, {human(host.available)} available{limit}; swap {human(host.swap)}; "
        f"memlock {memlock}",
        f"huge pages    {', '.join(pages)}; transparent: {host.transparent or 'unknown'}",
        *(f"NUMA node {node.number:<3} CPUs {node.cpus}, {human(node.memory)}" for node in host.numa),
        f"disk          {human(host.disk_free)} free in {host.folder}",
        f"software      torch {found.software.torch}, encoder {found.software.encoders[0]}, "
        f"CUDA library {'built' if found.software.library else 'not built'}",
    ]
    for number, (card, gpu) in enumerate(zip(found.cards, machine.gpus, strict=False)):
        lanes = f", PCIe x{card.lanes[0]}" if card.lanes[0] else ""
        port = f" behind {card.port}" if card.port else ""
        lines.append(
            f"gpu{number:<10} {card.name} ({card.capability or '?'}), {human(card.memory)}, {human(card.used)} in use, "
            f"reads {_speed(gpu.bandwidth, card.bandwidth)}{lanes}{port}, driver {card.driver or 'unknown'}"
        )
    rooms = [f"{place} {human(room)}" for place, room in zip(machine.places, machine.budgets, strict=True)]
    if not found.cards:
        rooms[:-1] = [f"{room} (default)" for room in rooms[:-1]]
    host_read = f"read at {found.read / 1e9:.1f} GB/s by {found.threads} threads" if found.read else "not measured"
    each = " for all cards" if found.shared_root else " per card"
    lines += [
        f"host memory   {host_read}",
        f"PCIe          copy engine {_speed(machine.copy_engine, found.copy)}, "
        f"zero-copy {_speed(machine.zero_copy, found.zero)}{each if len(found.cards) > 1 else ''}",
        f"for experts   {', '.join(rooms)}",
        "",
    ]
    for check in found.checks():
        lines.append(
            f"{check.outcome:5} {check.name}: {check.text}." + (f" {_sentence(check.mend)}" if check.mend else "")
        )
    return "\n".join(lines)


def _speed(value: int, measured: object) -> str:
    return f"{value / 1e9:.1f} GB/s" + ("" if measured else " (default)")


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."

"""`moefit`: traces, traffic, inspect, build, verify, plan, export, doctor, gate, report, coverage.

Exit codes: 0 pass, 1 fail, 2 bad input or usage, 3 inconclusive, 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .. import __version__
from ..errors import MoefitError
from .common import check_target, show
from .doctor import doctor
from .export import export
from .options import (
    Bits,
    CodebookFlag,
    DeviceFlag,
    EvalFiles,
    GpuBandwidth,
    GpuFlags,
    HostBandwidth,
    HostFlag,
    Json,
    MachineFile,
    MaxKl,
    Mode,
    Quiet,
    Threads,
)
from .plan import plan
from .progress import Display
from .traffic import traffic

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Fit a huge mixture-of-experts model onto the cards you own, and prove it is still the same model.",
)

HOLD_OUT = 5


def refuse_unused(one_sided: bool, two_sided_only: dict[str, Any], one_sided_only: dict[str, Any]) -> None:
    """Refuse options that were given and would change nothing: flag -> value, None where it was not given."""
    what = "would not change a one-sided build" if one_sided else "would not change a two-sided build"
    unused = two_sided_only if one_sided else one_sided_only
    if given := [flag for flag, value in unused.items() if value is not None]:
        mend = "leave out --one-sided, or that option" if one_sided else "add --one-sided, or leave that option out"
        raise MoefitError(f"{' and '.join(given)} {what}", mend=mend)


@app.command()
def traces(
    imports: Annotated[list[str], typer.Argument(metavar="IMPORT...", help="Logs: files, directories, hf:OWNER/NAME.")],
    model: Annotated[Path, typer.Option(help="Directory of the original checkpoint: its tokenizer and chat template.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The trace set to write, a Parquet file.")],
    form: Annotated[str, typer.Option("--format", help="Take every file to be in this format.")] = "",
    shares: Annotated[
        str, typer.Option(help="Shares of the parts calibrate, plan and held-out; they add up to 1.")
    ] = "0.8,0.1,0.1",
    max_bad: Annotated[float, typer.Option(help="Share of bad records above which the import stops.")] = 0.05,
    no_redact: Annotated[
        bool, typer.Option("--no-redact", help="Leave secrets in: keys, e-mails, home names.")
    ] = False,
    run_encoding: Annotated[
        bool, typer.Option("--run-encoding", help="Trust and run the checkpoint's own encoding/*.py as its template.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Read and count, write nothing.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Import real traffic: logs of agents, gateways and chat APIs, each token once, as a trace set for `build`."""
    from ..calibrate.import_traces import ImportRequest, import_traces
    from ..calibrate.splits import parse_shares
    from .tables import traces_text

    request = ImportRequest(
        tuple(imports),
        model,
        None if dry_run else out,
        form,
        parse_shares(shares),
        max_bad,
        not no_redact,
        run_encoding,
    )
    with Display(quiet) as progress:
        made = import_traces(request, progress)
    show(as_json, made, traces_text(made))


app.command()(traffic)


@app.command()
def inspect(
    model: Annotated[Path, typer.Argument(help="Directory of the original checkpoint.")],
    bits: Bits = 3.0,
    codebook: CodebookFlag = "mul1",
    machine: MachineFile = None,
    gpu: GpuFlags = None,
    host: HostFlag = None,
    mode: Mode = None,
    values: Annotated[bool, typer.Option("--values", help="Also read every number and refuse NaN.")] = False,
    threads: Threads = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Census of a checkpoint, what its pack will weigh to the byte, and what fits on the given cards."""
    from ..packs.inspect import inspect_model
    from ..packs.recipe import Recipe
    from ..placement.machine_file import machine_from_options
    from .tables import inspection_text

    recipe = Recipe(bits=bits, codebook=codebook)  # type: ignore[arg-type]
    box = machine_from_options(machine, gpu, host or (None if machine else "0B"), mode=mode) if machine or gpu else None
    with Display(quiet) as progress:
        found = inspect_model(model, recipe, box, values, threads, progress)
    show(as_json, found, inspection_text(found))


@app.command()
def build(
    model: Annotated[Path, typer.Argument(help="Directory of the original checkpoint.")],
    traces: Annotated[Path, typer.Option(help="Trace set, or JSONL of conversations (OpenAI messages) or texts.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The pack's directory, absent or empty.")],
    machine: MachineFile = None,
    gpu: GpuFlags = None,
    host: HostFlag = None,
    gpu_bandwidth: GpuBandwidth = None,
    host_bandwidth: HostBandwidth = None,
    mode: Mode = None,
    evaluation: EvalFiles = None,
    max_kl: MaxKl = 0.1,
    bits: Bits = 3.0,
    codebook: CodebookFlag = "mul1",
    window: Annotated[int, typer.Option(help="Tokens per calibration window.")] = 512,
    one_sided: Annotated[bool, typer.Option("--one-sided", help="From inputs alone, without a backward pass.")] = False,
    copies: Annotated[
        int | None, typer.Option(help="Copies of the traffic that the model rewrites; default 3. Not one-sided.")
    ] = None,
    damping: Annotated[
        float | None, typer.Option(help="One-sided only: share of the Hessian's mean diagonal added; default 0.05.")
    ] = None,
    shrinkage: Annotated[
        float | None,
        typer.Option(help="One-sided only: tokens at which an expert's own Hessian outweighs the prior; default 1000."),
    ] = None,
    enough_tokens: Annotated[
        int, typer.Option(help="Tokens below which an expert also gets those that nearly chose it; 0: never.")
    ] = 1000,
    seed: Annotated[int, typer.Option(help="Of the sign vectors.")] = 0,
    kv_quantization: Annotated[
        Literal["auto", "on", "off"],
        typer.Option(help="Calibrate with the KV cache rounded as the release does; auto: if this is the release."),
    ] = "auto",
    no_routing: Annotated[
        bool, typer.Option("--no-routing", help="Leave each token's routing out of the pack; counts stay.")
    ] = False,
    device: DeviceFlag = "auto",
    threads: Threads = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check input, disk and memory, then stop.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Build a servable pack from original weights and traffic. Run the same command again to resume.

    Without --eval, the gate runs on the held-out part of a trace set; of JSON lines every 5th document is kept for it.
    Without --gpu and --host, the plan is for two 96 GB cards with 8 GB of each kept free, and 128 GB of host memory.
    """
    from ..calibrate.traces import is_parquet
    from ..fidelity.examine import examiner
    from ..packs import BuildRequest, Recipe
    from ..packs.build import build as run
    from ..packs.build import prepare
    from ..packs.device import settle_device
    from ..placement.machine_file import machine_from_options
    from .tables import build_text, needs_text

    hold_out = 0 if evaluation or is_parquet(traces) else HOLD_OUT
    refuse_unused(one_sided, {"--copies": copies}, {"--damping": damping, "--shrinkage": shrinkage})
    recipe = Recipe(
        bits,
        codebook,  # type: ignore[arg-type]
        seed,
        Recipe.damping if damping is None else damping,
        Recipe.shrinkage if shrinkage is None else shrinkage,
        enough_tokens=enough_tokens,
        window=window,
        hold_out=hold_out,
        two_sided=not one_sided,
        copies=0 if one_sided else Recipe.copies if copies is None else copies,
        kv_quantization={"auto": None, "on": True, "off": False}[kv_quantization],
        keep_routing=not no_routing,
    )
    where = settle_device(device)
    examine = examiner(model, evaluation or [traces], max_kl, threads, hold_out, where)
    request = BuildRequest(
        model,
        traces,
        out,
        machine_from_options(machine, gpu, host, gpu_bandwidth, host_bandwidth, mode),
        recipe,
        threads,
        where,
        examine.run,
        examine.identity,
        examine.tokens,
    )
    prepared = prepare(request)
    if dry_run:
        show(as_json, prepared.summary(), needs_text(prepared.summary()))
        return
    with Display(quiet) as progress:
        result = run(prepared, progress)
    manifest = {key: value for key, value in result.manifest.items() if key != "files"}
    show(
        as_json,
        manifest | {"seconds": result.seconds, "out": str(out), "already_built": result.already},
        build_text(manifest, result.seconds, out, result.already),
    )
    raise typer.Exit(outcome_code(manifest))


@app.command()
def verify(
    pack: Annotated[Path, typer.Argument(help="A pack's directory.")],
    quick: Annotated[bool, typer.Option("--quick", help="Sizes and headers only: no hashing, no decoding.")] = False,
    threads: Threads = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check every file, header, marker and expert of a pack; names whatever is wrong."""
    from ..packs import verify as check

    with Display(quiet) as progress:
        found = check(pack, quick, threads, progress)
    lines = found.problems or [f"{pack} is whole: {found.files} files, {found.experts} experts decoded."]
    show(
        as_json,
        {"problems": found.problems, "files": found.files, "experts": found.experts},
        "\n".join(lines),
    )
    raise typer.Exit(1 if found.problems else 0)


app.command()(plan)
app.command()(export)
app.command()(doctor)


@app.command()
def gate(
    pack: Annotated[Path, typer.Argument(help="Candidate: a pack's directory.")],
    reference: Annotated[Path, typer.Option(help="The original checkpoint's directory.")],
    evaluation: Annotated[list[Path], typer.Option("--eval", help="Held-out JSONL. Repeat for more corpora.")],
    max_kl: MaxKl = 0.1,
    receipt: Annotated[Path | None, typer.Option(help="Write the receipt (JSON) here.")] = None,
    device: DeviceFlag = "auto",
    threads: Threads = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run original and pack on held-out documents; pass or fail on KL per corpus."""
    from ..fidelity.examine import examiner
    from ..packs.device import settle_device
    from .tables import fidelity_lines

    if receipt is not None:
        check_target(receipt, pack)
    examine = examiner(reference, evaluation, max_kl, threads, device=settle_device(device))
    with Display(quiet) as progress:
        examination = examine.run(pack, progress)
    if receipt is not None:
        from ..files import write_atomic

        write_atomic(receipt, examination.receipt)
    show(as_json, examination.summary, "\n".join(fidelity_lines(examination.summary)))
    raise typer.Exit(outcome_code({"fidelity": examination.summary}))


@app.command()
def report(
    pack: Annotated[Path, typer.Argument(help="A finished pack.")],
    as_json: Json = False,
) -> None:
    """The one-screen summary of a finished pack, from its manifest."""
    from ..packs.manifest import read_manifest
    from .tables import build_text

    manifest = {key: value for key, value in read_manifest(pack).items() if key != "files"}
    show(as_json, manifest, build_text(manifest, {}, pack))
    raise typer.Exit(outcome_code(manifest))


@app.command()
def coverage(
    pack: Annotated[
        Path, typer.Argument(help="A finished pack, or the --out of a build at work: its finished layers.")
    ],
    picture: Annotated[Path | None, typer.Option(help="Write the picture here: an SVG of layers x experts.")] = None,
    as_json: Json = False,
) -> None:
    """How well the traffic covers the experts: tokens per expert, by layer and source, and what stood in for tokens."""
    from ..files import write_atomic
    from ..packs.coverage import pack_coverage
    from ..packs.coverage_picture import picture as draw
    from .tables import coverage_text

    if picture is not None:
        if picture.suffix != ".svg":
            raise MoefitError("the picture is an SVG", where=str(picture), mend="give a name that ends in .svg")
        check_target(picture, pack)
    found = pack_coverage(pack)
    if picture is not None:
        write_atomic(picture, draw(found.table, found.floor).encode())
    show(as_json, found.to_json(), coverage_text(found.to_json(), pack, found.finished))


def outcome_code(manifest: dict[str, Any]) -> int:
    """Exit code of the gate's outcome; a pack that no gate saw is 0."""
    from ..fidelity.gate import Outcome

    fidelity = manifest.get("fidelity")
    return Outcome(fidelity["outcome"]).exit_code if fidelity else 0


def version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moefit {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    _version: Annotated[bool, typer.Option("--version", callback=version, is_eager=True)] = False,
) -> None:
    global _debug
    _debug = debug


_debug = False


def main() -> None:
    """Entry point: typed errors become one sentence and exit code 2."""
    # The workers are threads of ours, each single-threaded inside; BLAS' own would only spin beside them.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its advice on faster kernels is not for our users
    try:
        app()
    except MoefitError as error:
        if _debug:
            raise
        typer.echo(f"moefit: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        if _debug:
            raise
        where = f" [{error.filename}]" if error.filename else ""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        mend = " Free disk space and run the same command again to go on." if full else ""
        typer.echo(f"moefit: {error.strerror or error}{where}.{mend}", err=True)
        sys.exit(2)
    except SystemExit as done:  # typer turns an interrupt into this
        if done.code == 130:
            typer.echo("moefit: interrupted; run the same command again to go on.", err=True)
        raise

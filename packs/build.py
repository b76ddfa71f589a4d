"""The build: original weights and traffic in, a servable pack out, resumable at any moment.

inspect -> calibrate: passes over the traffic and its copies -> for every layer: quantize its experts -> write shards ->
plan -> examine (the caller's gate) -> hash and publish. Work already on disk is never done again, and everything that
is done depends only on the source, the traces and the recipe, so an interrupted build ends in the same bytes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..calibrate.check import check_values
from ..calibrate.checkpoint import Checkpoint, source_identity
from ..calibrate.families import open_model
from ..calibrate.family import Model
from ..calibrate.layout import check_layout
from ..calibrate.passes import LayerTraffic, run_passes
from ..calibrate.traces import Window, load_tokenizer, read_documents, split, together, trace_identity, windows
from ..errors import MoefitError, PackError
from ..files import json_bytes, sha256_bytes, sha256_file, write_atomic, write_json
from ..memory import give_back_freed
from ..parallel import default_threads, ordered_map
from ..placement import Machine, TrafficTable, solve, stack
from ..progress import Progress, Silent
from .coverage import COVERAGE, EXPERTS, PICTURE, Coverage
from .coverage_picture import picture
from .device import start_card
from .expert import ExpertReport, quantize_expert
from .factors import GROUP_ON_CARD, layer_factors, quantize_two_sided
from .layout import PackLayout, pack_config, pack_layout
from .manifest import MANIFEST, read_manifest, write_manifest
from .needs import Needs, check_needs, free_card, free_disk, free_memory, needs
from .plan import PLAN, TRAFFIC, plan_summary, unseen_score
from .recipe import Recipe
from .report import calibration_summary, size_summary
from .routing import label_tokens, layer_table, pack_recorded, write_routing, write_tokens
from .shards import companion_files, copy_companions, write_index, write_shard
from .sizes import check_machine, expert_bytes, fixed_bytes, size_tables
from .source import changed_shards, record_shards
from .work import Work

RECEIPT = "fidelity.json"


@dataclass(frozen=True)
class Examination:
    """What the gate said of the written pack. receipt: bytes of fidelity.json. summary: goes into the manifest."""

    receipt: bytes
    summary: dict[str, Any]


@dataclass(frozen=True)
class BuildRequest:
    """What to build. out: the pack's directory, absent or empty. threads: 0 takes every CPU of this process.
    device: where layers are run and experts quantized, "cpu" or "cuda"; the bytes differ by it within rounding.

    examine: called with the written pack's directory before it is published; `examine_identity` says what it
    compares with (it decides whether a finished pack is the one asked for), `examine_tokens` how much.
    """

    model: Path
    traces: Path
    out: Path
    machine: Machine
    recipe: Recipe = field(default_factory=Recipe)
    threads: int = 0
    device: str = "cpu"
    examine: Callable[[Path, Progress], Examination] | None = None
    examine_identity: dict[str, Any] = field(default_factory=dict)
    examine_tokens: int = 0


@dataclass(frozen=True)
class Prepared:
    """Everything that could be checked before the work began."""

    request: BuildRequest
    source: Checkpoint
    layout: PackLayout
    windows: list[Window]
    documents: int
    needs: Needs
    identity: dict[str, Any]
    fixed: tuple[int, ...]

    @property
    def threads(self) -> int:
        return self.request.threads or default_threads()

    @property
    def workers(self) -> int:
        return workers(self.request)

    @property
    def tokens(self) -> int:
        return sum(len(window.ids) for window in self.windows)

    @property
    def request_hash(self) -> str:
        """Identity of the finished pack: besides what the weights depend on, the plan's machine and the gate."""
        return sha256_bytes(json_bytes([self.identity, asdict(self.request.machine), self.request.examine_identity]))

    def summary(self) -> dict[str, Any]:
        """What `--dry-run` shows."""
        work = Work(self.request.out)
        layers = self.layout.layout.moe_layers
        finished = work.root.is_dir() and sum(work.layer_done(n) for n in layers)
        state = "would begin"
        if finished_pack(self):
            state = "already built"
        elif work.root.is_dir():
            state = f"would resume: {finished} of {len(layers)} layers done"
        return {
            "out": str(self.request.out),
            "tensor_bytes": self.layout.tensor_bytes,
            "documents": self.documents,
            "windows": len(self.windows),
            "tokens": self.tokens,
            "disk": self.needs.disk,
            "disk_free": free_disk(self.request.out),
            "memory": self.needs.memory,
            "memory_free": free_memory(),
            "device": self.request.device,
            "card": self.needs.card,
            "card_free": free_card() if self.needs.card else 0,
            "state": state,
        }


def workers(request: BuildRequest) -> int:
    """Threads that share the device: on a card one reads while another computes, and more only take its memory."""
    threads = request.threads or default_threads()
    return threads if request.device == "cpu" else min(2, threads)


def prepare(request: BuildRequest) -> Prepared:
    """Check the input, the machine and the output directory; reads headers, the tokenizer and the traces only.

    Raises CheckpointError, TraceError, QuantizeError, PlanError or PackError, each naming the mend.
    """
    request = replace(request, out=request.out.resolve())
    source = Checkpoint.open(request.model)
    layout = pack_layout(source, check_layout(source), request.recipe)
    request, model = _settle_kv_quantization(request, source)
    tokenizer = load_tokenizer(request.model)
    everything = read_documents(request.traces, tokenizer, layout.layout.vocabulary)
    kept, _ = split(everything, request.recipe.hold_out)
    documents = together(kept)
    cut = windows(documents, request.recipe.window)
    for window in cut:
        model.check_ids(torch.from_numpy(window.ids).long(), where=f"{request.traces}, document {window.document}")
    fixed = fixed_bytes(source, request.machine)
    check_machine(layout.layout, request.recipe, request.machine, fixed)
    identity = {
        "moefit": __version__,
        "recipe": request.recipe.to_json(),
        "device": request.device,
        "source": source_identity(source),
        "traces": trace_identity(request.traces),
        "companions": {f.as_posix(): sha256_file(request.model / f) for f in companion_files(request.model)},
    }
    tokens, on_card = sum(len(w.ids) for w in cut), request.device != "cpu"
    need = needs(source, layout, request.recipe, tokens, workers(request), request.examine_tokens, on_card)
    prepared = Prepared(request, source, layout, cut, len(documents), need, identity, fixed)
    if not finished_pack(prepared):
        _check_output(request.out, request.model.resolve())
        Work(request.out).check_identity(identity)
        partial = Work(request.out).root
        written = sum(p.stat().st_size for p in partial.rglob("*") if p.is_file()) if partial.is_dir() else 0
        check_needs(need, request.out, written)
    return prepared


def _settle_kv_quantization(request: BuildRequest, source: Checkpoint) -> tuple[BuildRequest, Model]:
    """The request with the recipe's own choice, or the model's; refuses a config that the forward cannot follow."""
    model = open_model(source, request.recipe.kv_quantization)
    return replace(request, recipe=replace(request.recipe, kv_quantization=model.kv_quantization)), model


def finished_pack(prepared: Prepared) -> dict[str, Any] | None:
    """The manifest of `out`, if it already is the pack that this request would build."""
    if not (prepared.request.out / MANIFEST).is_file():
        return None
    manifest = read_manifest(prepared.request.out)
    return manifest if manifest.get("request") == prepared.request_hash else None


def _check_output(out: Path, model: Path) -> None:
    if out.is_relative_to(model):
        raise PackError(
            "the output lies inside the model's directory, whose files are copied into the pack",
            where=str(out),
            mend="choose an --out outside of it",
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        mend = "choose another --out, or remove it"
        if (out / MANIFEST).is_file():
            mend = "it holds a finished pack of another recipe, source, machine or gate: " + mend
        raise PackError("the output directory is not empty", where=str(out), mend=mend)
    parent = out.parent
    if not parent.is_dir():
        raise PackError("the output's parent directory does not exist", where=str(parent), mend="create it")


class Clock:
    """Seconds per stage, for the summary; never written into the pack."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start


@dataclass(frozen=True)
class BuildResult:
    """manifest: of the finished pack. seconds: per stage, of this run only. resumed: something was already done.
    already: everything was, and this run has touched nothing."""

    manifest: dict[str, Any]
    seconds: dict[str, float]
    resumed: bool
    already: bool = False


def build(prepared: Prepared, progress: Progress | None = None) -> BuildResult:
    """Build the pack, or finish a build that was interrupted."""
    progress = progress or Silent()
    give_back_freed()
    clock = Clock()
    work = Work(prepared.request.out)
    if manifest := finished_pack(prepared):
        _check_same_source(prepared, manifest, progress)
        work.discard()  # a run killed between publishing and cleaning up leaves it
        return BuildResult(manifest, {}, resumed=True, already=True)
    resumed = work.root.exists()
    with work.open(prepared.identity):
        _inspect(prepared, work, progress, clock)
        _quantize_layers(prepared, work, progress, clock)
        with clock.stage("write"):
            _write_rest(prepared, work)
        with clock.stage("plan"):
            plan = _plan(prepared, work)
        examination = None
        if prepared.request.examine is not None:
            with clock.stage("gate"):
                examination = prepared.request.examine(work.pack, progress)
                write_atomic(work.pack / RECEIPT, examination.receipt)
        with clock.stage("hash"):
            reports = _reports(prepared, work)
            facts = {
                "request": prepared.request_hash,
                "source": {
                    "config": prepared.identity["source"]["config"],
                    "shards": {
                        shard: {"bytes": entry["bytes"], "sha256": entry["sha256"]}
                        for shard, entry in json.loads(work.source_record.read_bytes()).items()
                    },
                },
                "recipe": prepared.identity["recipe"],
                "sizes": size_summary(prepared.layout),
                "calibration": calibration_summary(
                    reports,
                    prepared.identity["traces"],
                    prepared.documents,
                    len(prepared.windows),
                    prepared.tokens,
                ),
                "plan": plan,
                "fidelity": examination.summary if examination else None,
            }
            manifest = write_manifest(work.pack, facts, progress)
        work.publish()
    return BuildResult(manifest, clock.seconds, resumed)


def _check_same_source(prepared: Prepared, manifest: dict[str, Any], progress: Progress) -> None:
    """A finished pack is only the one asked for if every byte of the source is still what it was built from."""
    recorded = manifest["source"]["shards"]
    now = record_shards(prepared.source, progress, prepared.threads)
    if changed := [shard for shard, entry in now.items() if entry["sha256"] != recorded[shard]["sha256"]]:
        raise PackError(
            "the output directory holds a finished pack of another source",
            where=f"{prepared.request.out}, built from another {prepared.source.path / changed[0]}",
            found=f"expected sha256 {recorded[changed[0]]['sha256']}, found {now[changed[0]]['sha256']}",
            mend="choose another --out, or remove it",
        )


def _inspect(prepared: Prepared, work: Work, progress: Progress, clock: Clock) -> None:
    """Look at every stored number once; on resuming, make sure that they are still the same."""
    record = work.source_record
    with clock.stage("inspect"):
        if record.exists():
            work.refuse(changed_shards(prepared.source, json.loads(record.read_bytes()), prepared.threads))
        else:
            try:
                check_values(prepared.source, progress, prepared.threads)
            except MoefitError:
                work.remove()  # nothing is built yet, and the mended source will be another one
                raise
            write_json(record, record_shards(prepared.source, progress, prepared.threads))


def _quantize_layers(prepared: Prepared, work: Work, progress: Progress, clock: Clock) -> None:
    sizes, recipe = prepared.layout.layout, prepared.request.recipe
    waiting = [layer for layer in sizes.moe_layers if not work.layer_done(layer)]
    _write_ready_shards(prepared, work)
    if not waiting:
        return
    if prepared.request.device != "cpu":
        start_card()
    model = open_model(prepared.source, recipe.kv_quantization, prepared.request.device)
    ids = [torch.from_numpy(window.ids).long() for window in prepared.windows]
    with clock.stage("calibrate"):
        passes = run_passes(model, ids, work.passes, recipe.passes, prepared.workers, progress)
    labels = label_tokens(prepared.windows)
    started = sum(work.expert(waiting[0], expert).exists() for expert in range(sizes.experts))
    done = sizes.routed_experts - len(waiting) * sizes.experts + started
    progress.stage("quantize", sizes.routed_experts, "experts", done)
    for index in waiting:
        traffic = LayerTraffic(model.load_layer(index), passes)
        layer_table(traffic, labels).save(work.traffic(index))
        if recipe.keep_routing:
            write_routing(work.pack, traffic)
        with clock.stage("quantize"):
            _quantize_layer(prepared, work, traffic, progress)
        reports = [work.expert(index, expert).report() for expert in range(sizes.experts)]
        write_json(work.layer_report(index), [vars(report) for report in reports])
        with clock.stage("write"):
            _write_ready_shards(prepared, work)
    work.drop_passes()
    progress.finish()


def _quantize_layer(prepared: Prepared, work: Work, traffic: LayerTraffic, progress: Progress) -> None:
    """Quantize every expert of a layer that is not on disk yet, several at a time."""
    recipe, sizes, layer = prepared.request.recipe, prepared.layout.layout, traffic.layer
    waiting = {expert for expert in range(sizes.experts) if not work.expert(layer.index, expert).exists()}
    if not waiting:
        return
    adjacent = traffic.adjacent(recipe.enough_tokens, prepared.workers)
    nobody = torch.zeros(0, dtype=torch.int64)
    factors = layer_factors(traffic, prepared.workers) if recipe.two_sided else None
    prior = None if recipe.two_sided else traffic.spread(recipe.prior_tokens)  # [m, H]

    def quantized(experts: range) -> list[tuple[dict[str, torch.Tensor], ExpertReport]]:
        if factors is not None:
            return quantize_two_sided(traffic, experts, adjacent, factors, recipe, sizes)
        assert prior is not None
        return [
            quantize_expert(
                layer.index,
                expert,
                layer.expert(expert),
                traffic.own(expert),
                traffic.inputs(adjacent.get(expert, nobody)),
                prior,
                layer.activation,
                recipe,
                sizes,
            )
            for expert in experts
        ]

    def one(experts: range) -> list[ExpertReport]:
        reports = []
        for expert, (tensors, report) in zip(experts, quantized(experts), strict=True):
            if expert in waiting:
                work.expert(layer.index, expert).write(tensors, report)
                reports.append(report)
        return reports

    # A group is done again whole where one of its experts is missing: rounding may depend on who goes together.
    group = GROUP_ON_CARD if prepared.request.device != "cpu" else 1
    groups = (range(start, min(start + group, sizes.experts)) for start in range(0, sizes.experts, group))
    todo = (experts for experts in groups if not waiting.isdisjoint(experts))
    for reports in ordered_map(one, todo, prepared.workers):
        error = reports[-1].proxy_error["w2"]
        progress.advance(len(reports), f"layer {layer.index + 1}/{sizes.layers}, down error {error:.4f}")


def _write_ready_shards(prepared: Prepared, work: Work) -> None:
    """Write every shard whose experts are finished, and drop the experts that no unwritten shard needs."""
    layout = prepared.layout
    needed: set[tuple[int, int]] = set()
    for shard, tensors in layout.shards.items():
        if work.shard(shard).exists():
            continue
        experts = layout.experts_in(shard)
        if not all(work.layer_done(layer) for layer in {layer for layer, _ in experts}):
            needed.update(experts)
            continue
        write_shard(work.shard(shard), tensors, prepared.source, work.packed)
    for layer in layout.layout.moe_layers:
        if work.layer_done(layer):
            for expert in range(layout.layout.experts):
                if (layer, expert) not in needed:
                    work.expert(layer, expert).remove()


def _reports(prepared: Prepared, work: Work) -> list[ExpertReport]:
    return [r for layer in prepared.layout.layout.moe_layers for r in work.read_layer_report(layer)]


def _write_rest(prepared: Prepared, work: Work) -> None:
    """Index, config, tokenizer, and what calibration saw."""
    write_index(work.pack, prepared.layout)
    copy_companions(prepared.source.path, work.pack)
    write_json(work.pack / "config.json", pack_config(prepared.source.config, prepared.request.recipe))
    (work.pack / "calibration").mkdir(exist_ok=True)
    reports, recipe = _reports(prepared, work), prepared.request.recipe
    traffic = stack([TrafficTable.load(work.traffic(layer)) for layer in prepared.layout.layout.moe_layers])
    traffic.save(work.pack / TRAFFIC)
    write_json(work.pack / EXPERTS, [vars(report) for report in reports])
    write_json(work.pack / COVERAGE, Coverage(reports, traffic, recipe.enough_tokens).to_json())
    write_atomic(work.pack / PICTURE, picture(traffic, recipe.enough_tokens).encode())
    if recipe.keep_routing:
        write_tokens(work.pack, prepared.windows, label_tokens(prepared.windows))


def _plan(prepared: Prepared, work: Work) -> dict[str, Any]:
    request, layout = prepared.request, prepared.layout.layout
    card, host = size_tables(layout, expert_bytes(layout, request.recipe, request.machine))
    traffic = TrafficTable.load(work.pack / TRAFFIC)
    inputs = {"traces": prepared.identity["traces"]["sha256"]}
    plan = solve(card, traffic, request.machine, prepared.fixed, inputs, host_sizes=host)
    plan.save(work.pack / PLAN)
    return plan_summary(plan) | {"unseen": unseen_score(plan, traffic, pack_recorded(work.pack))}

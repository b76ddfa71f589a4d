"""A plan for the engines that serve it: their own files, the flags to start them with, and what gets lost.

Spec: docs/exports.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..errors import PlanError
from .export_files import (
    PREFIX,
    card_slots,
    decoder_layers,
    plan_counts,
    whole_layers,
    write_ktransformers,
    write_llama_cpp,
    write_sglang,
    write_vllm_eplb,
    write_vllm_exl3,
)
from .plan import Plan
from .traffic import TrafficTable

SHOWN = 8
"""Cards whose copies `lost` lists, and copies of each; the file has them all."""


@dataclass(frozen=True)
class Exported:
    """content: the file. flags: words of the engine's command line, or NAME=value for its environment.

    lost: sentences on what of the plan the engine will not do, or does at a price.
    """

    content: bytes
    flags: tuple[str, ...]
    lost: tuple[str, ...]


@dataclass(frozen=True)
class Options:
    """file: what the flags call the file. Others None where not given: see `export`."""

    file: str
    prefix: str | None = None
    traffic: TrafficTable | None = None
    hidden_layers: int | None = None


@dataclass(frozen=True)
class Format:
    """engine: who reads it. file: its usual name. suffix: how its name must end. options: those that change it."""

    engine: str
    file: str
    suffix: str
    options: frozenset[str]
    make: Callable[[Plan, Options], Exported]


def export(
    plan: Plan,
    form: str,
    file: str | None = None,
    *,
    prefix: str | None = None,
    traffic: TrafficTable | None = None,
    hidden_layers: int | None = None,
) -> Exported:
    """`plan` in the format `form`, a key of EXPORTS; the same plan and options give the same bytes.

    file: the path that the flags name; the format's usual name where None.
    prefix: of vllm-exl3, a layer's experts, with {i} for its number.
    traffic: whose busiest experts are copied where cards must be filled up (sglang, vllm-eplb), rank highest
    (ktransformers), and give the shares of activations (llama.cpp); the plan itself does not change.
    hidden_layers: decoder layers of the model (sglang, ktransformers), if any follow the last one with experts.
    PlanError: an unknown format, an option that would change nothing, a plan that the engine cannot run.
    """
    if form not in EXPORTS:
        mend = f"take one of {', '.join(EXPORTS)}"
        raise PlanError("unknown export format", where="format", found=f"found {form!r}", mend=mend)
    target = EXPORTS[form]
    given = {"prefix": prefix, "traffic": traffic, "hidden_layers": hidden_layers}
    if unused := [name for name, value in given.items() if value is not None and name not in target.options]:
        found = f"expected {' or '.join(sorted(target.options))}, found {' and '.join(unused)}"
        what = f"an option that does not change an export for {target.engine}"
        raise PlanError(what, where=form, found=found, mend="leave it out")
    options = Options(file or target.file, prefix, traffic, hidden_layers)
    if not options.file.endswith(target.suffix):
        found = f"expected a name that ends in {target.suffix}"
        mend = f"call it {target.file}"
        raise PlanError(f"{target.engine} would not read that file", where=options.file, found=found, mend=mend)
    return target.make(plan, options)


def _vllm_exl3(plan: Plan, options: Options) -> Exported:
    prefix = PREFIX if options.prefix is None else options.prefix
    return Exported(write_vllm_exl3(plan, prefix), (f"EXL3_HOST_EXPERTS={options.file}",), _lost_in_slices(plan))


def _sglang(plan: Plan, options: Options) -> Exported:
    slots = card_slots(plan, options.traffic)  # [L, C, S]
    cards = slots.shape[1]
    flags = ["--init-expert-location", options.file, "--tp-size", str(cards), "--ep-size", str(cards)]
    if copies := _copies(plan, slots):
        flags += ["--ep-num-redundant-experts", str(copies)]
    content = write_sglang(plan, options.hidden_layers, options.traffic)
    return Exported(content, tuple(flags), _lost_in_slots(plan, slots, "SGLang"))


def _vllm_eplb(plan: Plan, options: Options) -> Exported:
    slots = card_slots(plan, options.traffic)  # [L, C, S]
    config: dict[str, str | int] = {"expert_map_path": options.file}
    if copies := _copies(plan, slots):
        config["num_redundant_experts"] = copies
    flags = ("--tensor-parallel-size", str(slots.shape[1]), "--enable-expert-parallel", "--additional-config")
    lost = (
        *_lost_in_slots(plan, slots, "vLLM-Ascend"),
        "vLLM-Ascend's model runner V1 alone reads this file, vLLM on other cards does not; a loader that fills slots "
        "in its own order would mix experts up: compare answers before you serve.",
    )
    return Exported(write_vllm_eplb(plan, options.traffic), (*flags, json.dumps({"eplb_config": config})), lost)


def _ktransformers(plan: Plan, options: Options) -> Exported:
    layers, experts = plan.holds.shape[:2]
    hidden = decoder_layers(plan, options.hidden_layers)
    _check_counted_layers(plan, hidden)
    on_cards, everything = int((~plan.holds[:, :, -1]).sum()), layers * experts
    flags = ["--init-expert-location", options.file, "--kt-expert-placement-strategy", "frequency"]
    if on_cards % layers == 0:
        flags += ["--kt-num-gpu-experts", str(on_cards // layers)]
    else:  # the engine takes int(everything * ratio) experts: half an expert more is safe from rounding
        flags += ["--kt-gpu-experts-ratio", repr((on_cards + 0.5) / everything)]
    lost = list(_lost_in_slices(plan))
    if rest := on_cards % layers:
        lost.append(
            f"Where the engine lacks --kt-gpu-experts-ratio, {rest} of {on_cards} experts on cards, those that rank "
            f"lowest: --kt-num-gpu-experts {on_cards // layers} is for each of {layers} layers."
        )
    content = write_ktransformers(plan, options.hidden_layers, options.traffic)
    return Exported(content, tuple(flags), tuple(lost))


def _check_counted_layers(plan: Plan, hidden: int) -> None:
    """kTransformers knows layers with experts as those from the first on whose number divides by a step."""
    first = plan.layers[0]
    step = plan.layers[1] - first if len(plan.layers) > 1 else 1
    counted = [layer for layer in range(first, hidden) if layer % step == 0]
    if counted != list(plan.layers):
        found = f"expected {len(plan.layers)} from layer {first} on, every {step}, found {len(counted)} of {hidden}"
        mend = "serve this model with another engine"
        raise PlanError("kTransformers would count other layers with experts", where="layers", found=found, mend=mend)


def _llama_cpp(plan: Plan, options: Options) -> Exported:
    content, where = write_llama_cpp(plan), whole_layers(plan)
    host = int((where == len(plan.machine.gpus)).sum())
    if options.traffic is None:
        planned = plan.shares[-1]
    else:
        counts = plan_counts(plan, options.traffic)
        planned = float(counts[plan.holds[:, :, -1]].sum() / counts.sum())
    lost = (
        f"Single experts: a layer's experts are one tensor. {host} of {len(where)} layers are on the host, and with "
        f"them {host / len(where):.1%} of expert activations; under the plan it is {planned:.1%}.",
        "Sizes: layers were fitted by the bytes of the plan's experts; those of a GGUF may differ.",
    )
    return Exported(content, ("-ngl", "999", "-ot", content.decode().strip()), lost)


def _copies(plan: Plan, slots: np.ndarray) -> int:
    """Redundant experts per layer, as engines count them: slots [L, C, S] over all cards, less E."""
    return slots[0].size - plan.holds.shape[1]


def _lost_in_slots(plan: Plan, slots: np.ndarray, engine: str) -> tuple[str, ...]:
    """slots: int64 [L, C, S]."""
    added: list[str] = []
    count, size = 0, 0
    for layer, row in enumerate(slots):
        for card, ids in enumerate(row):
            new = ids[~plan.holds[layer, ids, card]]
            if new.size:
                count += new.size
                size += int(plan.card_sizes[layer, new].sum(dtype=object))
                names = ", ".join(map(str, new[:SHOWN].tolist())) + (", ..." if new.size > SHOWN else "")
                added.append(f"layer {plan.layers[layer]} {plan.machine.places[card]}: {names}")
    lost = []
    if added:
        shown = "; ".join(added[:SHOWN]) + (f"; and on {len(added) - SHOWN} more" if len(added) > SHOWN else "")
        lost.append(
            f"Unequal numbers: every card has {slots.shape[2]} slots in each layer, so copies of {count} experts "
            f"({size:,} B) fill cards up: {shown}."
        )
    if _copies(plan, slots):
        lost.append(f"How the tokens of an expert divide over its copies: {engine} does that by its own rule.")
    return tuple(lost)


def _lost_in_slices(plan: Plan) -> tuple[str, ...]:
    """Of an engine that cuts each expert over all cards. PlanError: whole experts that do not fit as slices."""
    cards = len(plan.machine.gpus)
    if plan.machine.mode == "tp" or cards == 1:
        return ()
    whole = int(plan.card_sizes[~plan.holds[:, :, -1]].sum(dtype=object))
    slices = -(-whole // cards)
    for card, name in enumerate(plan.machine.places[:-1]):
        room = plan.machine.budgets[card] - plan.fixed[card]
        if slices > room:
            raise PlanError(
                "the engine cuts every expert over all cards, and the slices do not fit",
                where=name,
                found=f"expected at most {room:,} B, found {slices:,} B of {whole:,} B on each of {cards} cards",
                mend="make the plan for a machine of mode tp",
            )
    return ("Which card an expert is on: the engine cuts every expert into slices over all cards (tensor parallel).",)


EXPORTS: dict[str, Format] = {
    "vllm-exl3": Format("vllm-exl3", "host-plan.json", "", frozenset({"prefix"}), _vllm_exl3),
    "sglang": Format("SGLang", "expert-location.json", ".json", frozenset({"traffic", "hidden_layers"}), _sglang),
    "ktransformers": Format(
        "kTransformers", "gpu-experts.pt", ".pt", frozenset({"traffic", "hidden_layers"}), _ktransformers
    ),
    "llama.cpp": Format("llama.cpp", "override-tensor.txt", "", frozenset({"traffic"}), _llama_cpp),
    "vllm-eplb": Format("vLLM-Ascend", "expert-map.json", ".json", frozenset({"traffic"}), _vllm_eplb),
}
"""Name -> format, in the order of docs/exports.md."""

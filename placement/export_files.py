"""The files of `exports`, written from a plan and read back. Spec, with where each format comes from: docs/exports.md.

Cards are counted C, layers with experts L (the plan's), decoder layers in all H, experts of a layer E. A reader gives
what the engine will make of a file and raises PlanError for one that the engine would refuse or misread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import PlanError
from .captures.torchfile import load_torch, save_torch, to_numpy
from .plan import Plan
from .traffic import TrafficTable

PREFIX = "model.layers.{i}.ffn.experts"
"""Name of a layer's experts in vllm-exl3, {i} being the layer's number; other families have mlp for ffn."""
EXACT_FLOAT32 = 2**24
"""kTransformers compares counts as float32, which is exact up to here."""
TENSORS = "gate|up|down|gate_up"
"""llama.cpp's expert tensors are blk.N.ffn_X_exps.weight; models have the first three, or down and gate_up."""


# vllm-exl3


def write_vllm_exl3(plan: Plan, prefix: str = PREFIX) -> bytes:
    """{layer name: ids of the experts on the host}, ascending; a layer that is all on cards is left out."""
    cold = plan.holds[:, :, -1]  # [L, E]
    names = [_layer_name(prefix, layer) for layer in plan.layers]
    lists = {name: np.flatnonzero(row).tolist() for name, row in zip(names, cold, strict=True) if row.any()}
    return _json(lists)


def read_vllm_exl3(content: bytes, layers: Sequence[int], experts: int, prefix: str = PREFIX) -> np.ndarray:
    """bool [L, E]: which experts are on the host."""
    cold = np.zeros((len(layers), experts), dtype=bool)
    value = _object(content, "vllm-exl3")
    numbers = {_layer_name(prefix, layer): index for index, layer in enumerate(layers)}
    for name, ids in value.items():
        if name not in numbers:
            raise _refused("vllm-exl3", name, f"expected names like {_layer_name(prefix, layers[0])}")
        cold[numbers[name], _ids(ids, experts, "vllm-exl3", name)] = True
    return cold


def _layer_name(prefix: str, layer: int) -> str:
    if prefix.count("{i}") != 1 or not prefix.isprintable():
        mend = f"give a name such as {PREFIX}"
        found = f"expected {{i}} once, found {prefix!r}"
        raise PlanError("not a name for the experts of a layer", where="prefix", found=found, mend=mend)
    return prefix.replace("{i}", str(layer))


# SGLang and vLLM-Ascend: physical slots, the same number on every card in every layer


def card_slots(plan: Plan, traffic: TrafficTable | None = None) -> np.ndarray:
    """int64 [L, C, S]: the different experts in each card's slots, ascending; S is the most any card has in any layer.

    Cards with fewer are filled up with copies of experts that they lack: those with the most tokens per copy in
    `traffic` first (without a table, those with the fewest copies), of equal ones the lowest id. PlanError: a plan in
    slices, one with experts on the host, or copies that do not fit.
    """
    mend = "make a plan for a machine of mode ep whose cards have room for every expert"
    if plan.machine.mode != "ep":
        raise PlanError("the plan cuts experts into slices", where="mode", found="expected ep, found tp", mend=mend)
    if plan.holds[:, :, -1].any():
        layer, expert = (int(i) for i in np.argwhere(plan.holds[:, :, -1])[0])
        count, every = int(plan.holds[:, :, -1].sum()), plan.holds.shape[0] * plan.holds.shape[1]
        found = f"found {count} of {every}, the first is expert {expert} of layer {plan.layers[layer]}"
        what = "the engine keeps no experts in host memory, and the plan does"
        raise PlanError(what, where="host", found=found, mend=mend)
    filled = plan.holds[:, :, :-1].copy()  # [L, E, C]
    most = int(filled.sum(axis=1).max())
    weights = np.ones(filled.shape[:2]) if traffic is None else plan_counts(plan, traffic).astype(np.float64)
    for on, weight in zip(filled, weights, strict=True):  # [E, C], [E]
        for card in on.T:  # a view: [E]
            while card.sum() < most:
                card[np.where(card, -1.0, weight / on.sum(axis=1)).argmax()] = True
    _check_room(plan, filled)
    return np.argwhere(filled.transpose(0, 2, 1))[:, 2].reshape(len(filled), -1, most)


def _check_room(plan: Plan, filled: np.ndarray) -> None:
    """filled: bool [L, E, C]."""
    added = filled & ~plan.holds[:, :, :-1]
    for card, name in enumerate(plan.machine.places[:-1]):
        used = int(plan.card_sizes[filled[:, :, card]].sum(dtype=object))
        room = plan.machine.budgets[card] - plan.fixed[card]
        if used > room:
            copies = int(added[:, :, card].sum())
            raise PlanError(
                "the copies that give every card equally many experts do not fit",
                where=name,
                found=f"expected at most {room:,} B of experts, found {used:,} B with {copies} copies",
                mend=f"free {used - room:,} B on {name}: a smaller reserve, or experts of fewer bits",
            )


def write_sglang(plan: Plan, hidden_layers: int | None = None, traffic: TrafficTable | None = None) -> bytes:
    """{"physical_to_logical_map": [H, C * S]}: card c has the slots c * S to (c + 1) * S - 1.

    SGLang looks a layer up by its number among all decoder layers; one without experts counts slots modulo E.
    """
    slots = card_slots(plan, traffic)
    physical, experts = slots[0].size, plan.holds.shape[1]
    rows = np.tile(np.arange(physical) % experts, (decoder_layers(plan, hidden_layers), 1))  # [H, C * S]
    rows[list(plan.layers)] = slots.reshape(len(slots), physical)
    return _json({"physical_to_logical_map": rows.tolist()})


def read_sglang(content: bytes, layers: Sequence[int], experts: int, cards: int) -> np.ndarray:
    """bool [L, E, C]: which cards have a copy of each expert."""
    value = _object(content, "sglang")
    if set(value) != {"physical_to_logical_map"}:
        raise _refused("sglang", "top level", "expected physical_to_logical_map alone")  # others are unknown arguments
    rows = value["physical_to_logical_map"]
    if not isinstance(rows, list) or len(rows) <= max(layers):
        raise _refused("sglang", "physical_to_logical_map", f"expected a row for each of {max(layers) + 1} layers")
    holds = []
    for layer in layers:
        row, where = rows[layer], f"physical_to_logical_map[{layer}]"
        if not isinstance(row, list) or len(row) != len(rows[0]) or len(row) % cards:
            raise _refused("sglang", where, f"expected a multiple of {cards} slots, the same in all rows")
        slots = len(row) // cards
        parts = [row[card * slots : (card + 1) * slots] for card in range(cards)]
        holds.append(_held(parts, experts, "sglang", where))
    return np.stack(holds)


def write_vllm_eplb(plan: Plan, traffic: TrafficTable | None = None) -> bytes:
    """vLLM-Ascend's expert map: of each layer with experts, counted from 0, the experts of each device."""
    layers = [
        {
            "layer_id": index,
            "device_count": len(cards),
            "device_list": [{"device_id": card, "device_expert": row.tolist()} for card, row in enumerate(cards)],
        }
        for index, cards in enumerate(card_slots(plan, traffic))
    ]
    return _json({"moe_layer_count": len(layers), "layer_list": layers})


def read_vllm_eplb(content: bytes, experts: int) -> np.ndarray:
    """bool [L, E, C]: which devices have a copy of each expert."""
    value = _object(content, "vllm-eplb")
    layers = value.get("layer_list")
    if not isinstance(layers, list) or not layers or value.get("moe_layer_count") != len(layers):
        raise _refused("vllm-eplb", "layer_list", "expected moe_layer_count layers, and at least one")
    try:
        lists = [[device["device_expert"] for device in layer["device_list"]] for layer in layers]
        counts = {(layer["device_count"], len(devices)) for layer, devices in zip(layers, lists, strict=True)}
        slots = {len(ids) for devices in lists for ids in devices}
    except (TypeError, KeyError) as error:
        raise _refused("vllm-eplb", "layer_list", f"expected device_list and device_expert ({error!r})") from error
    if counts != {(len(lists[0]),) * 2} or len(slots) != 1:
        found = f"expected equally many devices and slots everywhere, found {sorted(map(str, counts))}, {sorted(slots)}"
        raise _refused("vllm-eplb", "layer_list", found)
    return np.stack(
        [_held(devices, experts, "vllm-eplb", f"layer_list[{index}]") for index, devices in enumerate(lists)]
    )


def _held(cards: Sequence[Any], experts: int, form: str, where: str) -> np.ndarray:
    """bool [E, C] of the experts in each card's slots; each expert must be somewhere, and on no card twice."""
    held = np.zeros((experts, len(cards)), dtype=bool)
    for card, ids in enumerate(cards):
        held[_ids(ids, experts, form, f"{where}, card {card}"), card] = True
    if missing := np.flatnonzero(~held.any(axis=1)).tolist():
        raise _refused(form, where, f"expected every expert, without {missing[:8]}")
    return held


# kTransformers


def write_ktransformers(plan: Plan, hidden_layers: int | None = None, traffic: TrafficTable | None = None) -> bytes:
    """{"logical_count": int32 [1, H, E]}: ranks, of which kTransformers takes the N highest of all layers to cards.

    Every expert on a card outranks every one on the host; among each, more tokens in `traffic` rank higher, then lower
    layers and ids. Layers without experts are zero.
    """
    on_card = ~plan.holds[:, :, -1].ravel()  # [L * E]
    if on_card.size > EXACT_FLOAT32:
        found = f"expected at most {EXACT_FLOAT32} experts, found {on_card.size}"
        mend = "serve this model with another engine"
        raise PlanError("more experts than kTransformers can rank", where="layers", found=found, mend=mend)
    tokens = np.zeros(on_card.size) if traffic is None else plan_counts(plan, traffic).ravel()
    lowest_first = np.lexsort((-np.arange(on_card.size), tokens, on_card))
    ranks = np.empty(on_card.size, dtype=np.int32)
    ranks[lowest_first] = np.arange(1, on_card.size + 1)
    table = np.zeros((1, decoder_layers(plan, hidden_layers), plan.holds.shape[1]), dtype=np.int32)
    table[0, list(plan.layers)] = ranks.reshape(plan.holds.shape[:2])
    return save_torch({"logical_count": table})


def read_ktransformers(path: Path, layers: Sequence[int], gpu_experts: int) -> np.ndarray:
    """bool [L, E]: the `gpu_experts` experts that the strategy `frequency` takes to cards.

    PlanError: no counts, or a tie that leaves the choice open. TraceError: a damaged file.
    """
    value = load_torch(path)
    counts = to_numpy(value.get("logical_count") if isinstance(value, dict) else value, str(path))
    if counts.ndim != 3 or counts.shape[1] <= max(layers):
        found = f"expected [steps, {max(layers) + 1} layers or more, experts], found {list(counts.shape)}"
        raise _refused("ktransformers", "logical_count", found)
    summed = counts.sum(axis=0).astype(np.float32).ravel()
    order = np.argsort(-summed, kind="stable")
    if 0 < gpu_experts < order.size and summed[order[gpu_experts - 1]] == summed[order[gpu_experts]]:
        raise _refused("ktransformers", "logical_count", f"experts {gpu_experts} and {gpu_experts + 1} rank equally")
    mask = np.zeros(order.size, dtype=bool)
    mask[order[:gpu_experts]] = True
    return mask.reshape(counts.shape[1:])[list(layers)]


# llama.cpp


def whole_layers(plan: Plan) -> np.ndarray:
    """int64 [L]: the card that takes all experts of a layer, C for the host.

    The smallest layers first (of equal ones the lowest number), each on the first card with room for it: of layers of
    one size as many as can be are on cards, and so they are on a single card. PlanError: the rest exceeds the host.
    """
    on_card, on_host = (  # a plan in slices knows whole experts as the host stores them
        [int(row.sum(dtype=object)) for row in sizes]
        for sizes in (plan.card_sizes if plan.machine.mode == "ep" else plan.host_sizes, plan.host_sizes)
    )
    fixed = plan.fixed[:-1] if plan.machine.mode == "ep" else plan.fixed[:1] * len(plan.machine.gpus)
    room = [gpu.bytes - gpu.reserve - used for gpu, used in zip(plan.machine.gpus, fixed, strict=True)]
    host = len(room)
    where = np.full(len(on_card), host)
    for index in sorted(range(len(on_card)), key=on_card.__getitem__):
        card = next((card for card in range(host) if on_card[index] <= room[card]), host)
        where[index] = card
        if card < host:
            room[card] -= on_card[index]
    used = sum(size for size, place in zip(on_host, where, strict=True) if place == host)
    free = plan.machine.host_bytes - plan.fixed[-1]
    if used > free:
        raise PlanError(
            "the layers that do not fit on cards do not fit on the host",
            where="host",
            found=f"expected at most {free:,} B, found {used:,} B in {int((where == host).sum())} whole layers",
            mend=f"free {used - free:,} B of host memory, or take experts of fewer bits",
        )
    return where


def write_llama_cpp(plan: Plan) -> bytes:
    """The value of one `-ot`: pattern=buffer, separated by commas, on one line.

    One value, since of several `-ot` only the last would count.
    """
    where, cards = whole_layers(plan), len(plan.machine.gpus)
    parts = []
    for place in range(cards + 1):
        if numbers := [str(layer) for layer, card in zip(plan.layers, where, strict=True) if card == place]:
            buffer = f"CUDA{place}" if place < cards else "CPU"
            parts.append(rf"blk\.({'|'.join(numbers)})\.ffn_({TENSORS})_exps\.={buffer}")
    return (",".join(parts) + "\n").encode()


def read_llama_cpp(content: bytes, layers: Sequence[int]) -> tuple[str, ...]:
    """The buffer that all expert tensors of each layer go to; the first pattern found in a name counts."""
    rules = [rule.partition("=") for rule in content.decode(errors="replace").strip().split(",")]
    buffers = []
    for layer in layers:
        names = [f"blk.{layer}.ffn_{part}_exps.weight" for part in TENSORS.split("|")]
        try:
            found = {next((buffer for regex, _, buffer in rules if re.search(regex, name)), "") for name in names}
        except re.error as error:
            raise _refused("llama.cpp", "pattern", str(error)) from error
        if len(found) != 1 or "" in found:
            raise _refused("llama.cpp", f"layer {layer}", f"expected one buffer for all tensors, found {sorted(found)}")
        buffers.append(found.pop())
    return tuple(buffers)


# What they share


def decoder_layers(plan: Plan, given: int | None) -> int:
    """H: as given, or up to the last layer with experts. PlanError: fewer than that."""
    needed = plan.layers[-1] + 1
    if given is not None and given < needed:
        found = f"expected {needed} or more, found {given}"
        mend = "give the model that the plan is for"
        raise PlanError("the plan has layers that the model lacks", where="hidden layers", found=found, mend=mend)
    return needed if given is None else given


def plan_counts(plan: Plan, traffic: TrafficTable) -> np.ndarray:
    """int64 [L, E]: tokens of the plan's experts. PlanError: a table of another model."""
    if traffic.layers != plan.layers or traffic.counts.shape != plan.holds.shape[:2]:
        raise PlanError(
            "the traffic is not of the plan's model",
            where="traffic",
            found=f"expected {list(plan.holds.shape[:2])} layers and experts from layer {plan.layers[0]}, "
            f"found {list(traffic.counts.shape)} from layer {traffic.layers[0]}",
            mend="give a traffic table of the model that the plan is for",
        )
    return traffic.counts


def _json(value: dict[str, Any]) -> bytes:
    """On one line: `json_bytes` would give every number its own."""
    return (json.dumps(value) + "\n").encode()


def _object(content: bytes, form: str) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _refused(form, "top level", f"expected JSON ({error})") from error
    if not isinstance(value, dict):
        raise _refused(form, "top level", f"expected an object, found {type(value).__name__}")
    return value


def _ids(value: Any, experts: int, form: str, where: str) -> list[int]:
    """Different expert ids."""
    good = isinstance(value, list) and all(type(item) is int and 0 <= item < experts for item in value)
    if not good or len(set(value)) != len(value):
        found = json.dumps(value)
        raise _refused(form, where, f"expected different ids of 0..{experts - 1}, found {found:.80}")
    return value


def _refused(form: str, where: str, found: str) -> PlanError:
    return PlanError(f"not a {form} placement", where=where, found=found, mend="export the plan again")

"""Plans in the engines' formats, read as the engines read them: written here from the notes in docs/exports.md."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefit.errors import PlanError
from moefit.placement import export_files as files
from moefit.placement.exports import EXPORTS, SHOWN, export
from moefit.placement.plan import Plan
from moefit.placement.traffic import TrafficTable

from .export_plans import four_parts, make_plan, make_traffic, plans

# vllm-exl3


@given(plans(), st.sampled_from([files.PREFIX, "model.layers.{i}.mlp.experts"]))
def test_vllm_exl3(plan: Plan, prefix: str) -> None:
    made = export(plan, "vllm-exl3", prefix=prefix)
    written = json.loads(made.content)
    for layer, row in zip(plan.layers, plan.holds[:, :, -1].tolist(), strict=True):
        cold = [expert for expert, on_host in enumerate(row) if on_host]
        assert written.get(prefix.replace("{i}", str(layer)), []) == cold
    assert all(written.values())
    again = files.read_vllm_exl3(made.content, plan.layers, plan.holds.shape[1], prefix)
    assert np.array_equal(again, plan.holds[:, :, -1])
    assert made.flags == ("EXL3_HOST_EXPERTS=host-plan.json",)


def test_vllm_exl3_of_a_plan_without_a_host_is_empty() -> None:
    assert export(make_plan(np.tile([True, False], (2, 3, 1))), "vllm-exl3").content == b"{}\n"


def test_an_engine_that_cuts_experts_says_so_and_must_have_room() -> None:
    holds = np.zeros((1, 4, 3), dtype=bool)
    holds[0, :, 0] = True  # 400 B on gpu0, 200 B on each in slices
    for form in ("vllm-exl3", "ktransformers"):
        (sentence,) = export(make_plan(holds, cards=(400, 200)), form).lost
        assert "slices" in sentence
        with pytest.raises(PlanError) as refused:
            export(make_plan(holds, cards=(400, 199)), form)
        assert "[gpu1]: expected at most 199 B, found 200 B of 400 B on each of 2 cards" in four_parts(refused)
        with pytest.raises(PlanError):
            export(make_plan(holds, cards=(400, 210), fixed=(0, 11, 0)), form)
        with pytest.raises(PlanError, match="found 202 B of 404 B"):
            export(make_plan(holds, sizes=101, cards=(404, 201)), form)
        with pytest.raises(PlanError, match="found 2 B of 3 B"):
            export(make_plan(holds[:, :1], sizes=3, cards=(3, 1)), form)
        for whole in (make_plan(holds[:, :, :2], mode="tp"), make_plan(holds[:, :, :2])):
            assert export(whole, form).lost == ()


# SGLang, vLLM-Ascend


def holds_of_sglang(content: bytes, plan: Plan, flags: Sequence[str]) -> np.ndarray:
    """As SGLang starts: the rows of all decoder layers, E + redundant slots, equally many for each rank."""
    rows = json.loads(content)["physical_to_logical_map"]
    words = dict(zip(flags[::2], flags[1::2], strict=True))
    ranks, experts = int(words["--ep-size"]), plan.holds.shape[1]
    physical = experts + int(words.get("--ep-num-redundant-experts", 0))
    assert physical % ranks == 0
    holds = np.zeros((len(plan.layers), experts, ranks), dtype=int)
    for number, row in enumerate(rows):
        assert len(row) == physical
        assert set(row) == set(range(experts))  # logical_to_all_physical_map has no empty entry
        if number in plan.layers:
            for slot, logical in enumerate(row):
                holds[plan.layers.index(number), logical, slot // (physical // ranks)] += 1
        else:
            assert row == [slot % experts for slot in range(physical)]
    assert holds.max() == 1  # of two copies on one rank the second would get no weights
    return holds.astype(bool)


def holds_of_ascend(content: bytes, plan: Plan, flags: Sequence[str]) -> np.ndarray:
    """As vLLM-Ascend builds its maps: by position in layer_list; ids flat by the number of slots of device 0."""
    data = json.loads(content)
    config = json.loads(flags[-1])["eplb_config"]
    experts, ranks = plan.holds.shape[1], int(flags[1])
    assert data["moe_layer_count"] == len(data["layer_list"]) == len(plan.layers)
    holds = np.zeros((len(plan.layers), experts, ranks), dtype=bool)
    for index, layer in enumerate(data["layer_list"]):
        assert layer["layer_id"] == index
        assert layer["device_count"] == ranks
        placement = np.array([device["device_expert"] for device in layer["device_list"]])  # [ranks, slots]
        assert placement.size == experts + config.get("num_redundant_experts", 0)
        found = set()
        for rank, slots in enumerate(placement):
            expert_map = np.full(experts, -1)
            expert_map[slots] = np.arange(len(slots))
            assert (expert_map >= 0).sum() == len(slots)
            holds[index, expert_map >= 0, rank] = True
            found |= {rank * len(slots) + int(slot) for slot in expert_map if slot >= 0}
        assert found == set(range(placement.size))
        assert holds[index].any(axis=1).all()
    return holds


def plain_slots(plan: Plan, counts: np.ndarray | None) -> np.ndarray:
    """The rule of card_slots in exact fractions: bool [L, E, C]."""
    filled = plan.holds[:, :, :-1].tolist()
    most = max(sum(row[card] for row in layer) for layer in filled for card in range(len(layer[0])))
    for index, layer in enumerate(filled):
        for card in range(len(layer[0])):
            while sum(row[card] for row in layer) < most:
                lacking = [expert for expert, row in enumerate(layer) if not row[card]]
                loads = [Fraction(1 if counts is None else int(counts[index, e]), sum(layer[e])) for e in lacking]
                layer[lacking[loads.index(max(loads))]][card] = True
    return np.array(filled)


@settings(max_examples=60)
@given(plans(host=False, modes=("ep",)), st.none() | st.integers(0, 99))
def test_card_formats(plan: Plan, seed: int | None) -> None:
    traffic = None if seed is None else make_traffic(plan, seed)
    experts, places = plan.holds.shape[1:]
    expected = plain_slots(plan, None if traffic is None else traffic.counts)
    sglang, ascend = export(plan, "sglang", traffic=traffic), export(plan, "vllm-eplb", traffic=traffic)
    assert np.array_equal(holds_of_sglang(sglang.content, plan, sglang.flags), expected)
    assert np.array_equal(holds_of_ascend(ascend.content, plan, ascend.flags), expected)
    assert np.array_equal(files.read_sglang(sglang.content, plan.layers, experts, places - 1), expected)
    assert np.array_equal(files.read_vllm_eplb(ascend.content, experts), expected)
    assert (expected & plan.holds[:, :, :-1] == plan.holds[:, :, :-1]).all()
    assert len(json.loads(sglang.content)["physical_to_logical_map"]) == plan.layers[-1] + 1
    added = int((expected & ~plan.holds[:, :, :-1]).sum())
    for made in (sglang, ascend):
        assert any(f"copies of {added} experts" in sentence for sentence in made.lost) == bool(added)


def test_copies_are_named() -> None:
    holds = np.zeros((2, 4, 3), dtype=bool)
    holds[0, :3, 0] = holds[0, 3, 1] = True
    holds[1, :2, 0] = holds[1, 2:, 1] = True
    plan = make_plan(holds, (1, 2))
    sentence, rule = export(plan, "sglang").lost
    assert "every card has 3 slots in each layer, so copies of 4 experts (400 B) fill cards up" in sentence
    assert "layer 1 gpu1: 0, 1; layer 2 gpu0: 2; layer 2 gpu1: 0." in sentence
    assert "divide over its copies" in rule
    counts = np.array([[1, 2, 7, 10], [10, 5, 3, 2]])
    busy = export(plan, "sglang", traffic=TrafficTable(counts, 20, (1, 2), 1)).lost[0]
    assert "layer 1 gpu1: 1, 2; layer 2 gpu0: 2; layer 2 gpu1: 0." in busy
    even = np.zeros((1, 4, 3), dtype=bool)
    even[0, :2, 0] = even[0, 2:, 1] = True
    assert export(make_plan(even), "sglang").lost == ()
    assert "--ep-num-redundant-experts" not in export(make_plan(even), "sglang").flags
    many = export(make_plan(np.tile(holds[:1], (SHOWN + 3, 1, 1))), "sglang").lost[0]
    assert "and on 3 more." in many


def test_a_model_with_dense_layers_behind() -> None:
    plan = make_plan(np.tile([True, False], (2, 3, 1)), (1, 2))
    assert len(json.loads(export(plan, "sglang", hidden_layers=5).content)["physical_to_logical_map"]) == 5
    with pytest.raises(PlanError) as refused:
        export(plan, "sglang", hidden_layers=2)
    assert "expected 3 or more, found 2" in four_parts(refused)


@pytest.mark.parametrize("form", ["sglang", "vllm-eplb"])
def test_card_formats_refuse(form: str) -> None:
    holds = np.zeros((2, 4, 3), dtype=bool)
    holds[:, :, 0] = True
    holds[1, 2] = [False, False, True]
    with pytest.raises(PlanError) as refused:
        export(make_plan(holds, (3, 4)), form)
    assert "[host]: found 1 of 8, the first is expert 2 of layer 4" in four_parts(refused)
    with pytest.raises(PlanError) as refused:
        export(make_plan(np.tile([True, False], (2, 4, 1)), mode="tp"), form)
    assert "expected ep, found tp" in four_parts(refused)
    holds[1, 2] = [False, True, False]  # every card must have 4 slots in both layers
    assert export(make_plan(holds, cards=(800, 800)), form)
    with pytest.raises(PlanError) as refused:
        export(make_plan(holds, cards=(800, 800), fixed=(0, 1, 0)), form)
    message = four_parts(refused)
    assert "[gpu1]: expected at most 799 B of experts, found 800 B with 7 copies" in message
    assert "Free 1 B on gpu1" in message


# kTransformers


def mask_of_ktransformers(content: bytes, plan: Plan, flags: Sequence[str], hidden: int) -> np.ndarray:
    """As kTransformers starts: sum over steps, float32, the N largest of all layers."""
    words = dict(zip(flags[::2], flags[1::2], strict=True))
    experts = plan.holds.shape[1]
    counts = torch.load(io.BytesIO(content), weights_only=True)["logical_count"]
    assert counts.shape[1:] == (hidden, experts)
    frequency = counts.sum(dim=0).float().view(-1)
    moe = len(plan.layers)
    if "--kt-gpu-experts-ratio" in words:
        number = int(moe * experts * float(words["--kt-gpu-experts-ratio"]))
    else:
        number = int(words["--kt-num-gpu-experts"]) * moe
    mask = torch.zeros(len(frequency), dtype=torch.bool)
    mask[torch.topk(frequency, number, sorted=False).indices] = True
    return mask.view(hidden, experts).numpy()[list(plan.layers)]


@settings(max_examples=60)
@given(plans(), st.integers(0, 2), st.none() | st.integers(0, 99))
def test_ktransformers(tmp_path_factory: pytest.TempPathFactory, plan: Plan, behind: int, seed: int | None) -> None:
    traffic = None if seed is None else make_traffic(plan, seed)
    made = export(plan, "ktransformers", traffic=traffic)
    on_cards = ~plan.holds[:, :, -1]
    assert np.array_equal(mask_of_ktransformers(made.content, plan, made.flags, plan.layers[-1] + 1), on_cards)
    path = tmp_path_factory.getbasetemp() / "gpu-experts.pt"
    path.write_bytes(files.write_ktransformers(plan, plan.layers[-1] + 1 + behind, traffic))
    assert np.array_equal(files.read_ktransformers(path, plan.layers, int(on_cards.sum())), on_cards)
    assert ("--kt-num-gpu-experts" in made.flags) == (on_cards.sum() % len(plan.layers) == 0)


def test_ktransformers_keeps_the_least_used_on_the_host(tmp_path: Path) -> None:
    on_card = np.array([[True, True, True], [False, True, True]])  # 5 of 6
    plan = make_plan(np.stack([on_card, ~on_card], axis=2))
    traffic = TrafficTable(np.array([[5, 1, 4], [8, 0, 2]]), 10, (0, 1), 1)
    made = export(plan, "ktransformers", traffic=traffic)
    (sentence,) = made.lost
    assert "1 of 5 experts on cards, those that rank lowest: --kt-num-gpu-experts 2 is for each of 2 layers" in sentence
    path = tmp_path / "x.pt"
    path.write_bytes(made.content)
    assert np.array_equal(files.read_ktransformers(path, (0, 1), 4), [[True, True, True], [False, False, True]])
    assert np.array_equal(files.read_ktransformers(path, (0, 1), 2), [[True, False, True], [False, False, False]])


@pytest.mark.parametrize(
    ("layers", "hidden", "good"),
    [
        ((1, 2, 3), None, True),
        ((2, 4, 6), 8, True),
        ((1, 3, 5), None, False),
        ((1, 2, 3), 5, False),
        ((0, 2, 3), 4, False),
    ],
)
def test_ktransformers_counts_layers_with_experts(layers: tuple[int, ...], hidden: int | None, good: bool) -> None:
    plan = make_plan(np.tile([True, False], (3, 2, 1)), layers)
    if good:
        assert "--kt-num-gpu-experts" in export(plan, "ktransformers", hidden_layers=hidden).flags
        return
    with pytest.raises(PlanError, match="kTransformers would count other layers") as refused:
        export(plan, "ktransformers", hidden_layers=hidden)
    four_parts(refused)


def test_ktransformers_ranks_no_more_than_float32_tells_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "EXACT_FLOAT32", 5)
    with pytest.raises(PlanError, match="expected at most 5 experts, found 6"):
        export(make_plan(np.tile([True, False], (2, 3, 1))), "ktransformers")


# llama.cpp


def buffers_of_llama_cpp(value: str, layers: Sequence[int]) -> list[str]:
    """As llama.cpp reads `-ot`: cut at commas, then at the first "="; the first pattern found in a name counts."""
    buffers = []
    for layer in layers:
        found = set()
        for part in ("gate", "up", "down", "gate_up"):
            for rule in value.split(","):
                at = rule.index("=")
                if re.search(rule[:at], f"blk.{layer}.ffn_{part}_exps.weight"):
                    found.add(rule[at + 1 :])
                    break
        assert len(found) == 1
        buffers.append(found.pop())
    for name in ("blk.1.ffn_gate.weight", "blk.1.ffn_up_shexp.weight", "blk.1.attn_q.weight"):
        assert not any(re.search(rule.partition("=")[0], name) for rule in value.split(","))
    return buffers


@settings(max_examples=60)
@given(plans(), st.integers(0, 12), st.integers(0, 12))
def test_llama_cpp(plan: Plan, first: int, second: int) -> None:
    factor = 2 if plan.machine.mode == "tp" else 1
    sizes = plan.card_sizes.sum(axis=1) * factor
    cards = [int(sizes.sum()) * part // 12 for part in (first, second, second)][: len(plan.machine.gpus)]
    plan = make_plan(plan.holds, plan.layers, plan.machine.mode, plan.card_sizes, cards, int(sizes.sum()))
    made = export(plan, "llama.cpp")
    assert made.flags[:3] == ("-ngl", "999", "-ot")
    buffers = buffers_of_llama_cpp(made.flags[3], plan.layers)
    assert made.content.decode() == made.flags[3] + "\n"
    assert files.read_llama_cpp(made.content, plan.layers) == tuple(buffers)
    used = [
        sum(size for size, at in zip(sizes, buffers, strict=True) if at == f"CUDA{card}") for card in range(len(cards))
    ]
    room = [budget - size for budget, size in zip(cards, used, strict=True)]
    assert min(room) >= 0
    on_cards = sum(buffer != "CPU" for buffer in buffers)
    if len(set(sizes)) == 1:
        assert on_cards == min(len(sizes), sum(budget // sizes[0] for budget in cards))
    if len(cards) == 1:
        assert on_cards == sum(total <= cards[0] for total in np.cumsum(sorted(sizes)))
    for size, buffer in zip(sizes, buffers, strict=True):
        if buffer == "CPU":
            free = [
                b - sum(s for s, at in zip(sizes, buffers, strict=True) if at == f"CUDA{c}")
                for c, b in enumerate(cards)
            ]
            assert size > max(free)


def test_llama_cpp_takes_the_smallest_layers() -> None:
    holds = np.tile([True, False], (3, 1, 1))
    plan = make_plan(holds, sizes=[[9], [2], [4]], cards=(9,))
    assert files.whole_layers(plan).tolist() == [1, 0, 0]
    slices = make_plan(holds, sizes=[[2], [2], [2]], mode="tp", cards=(9, 9), fixed=(1, 0))  # 4 B each, 8 B free
    assert files.whole_layers(slices).tolist() == [0, 0, 1]
    assert files.whole_layers(make_plan(holds, sizes=2, mode="tp", cards=(9, 9), fixed=(6, 0))).tolist() == [2, 2, 2]


def test_llama_cpp_says_what_whole_layers_cost() -> None:
    holds = np.zeros((4, 2, 2), dtype=bool)
    holds[:, 0, 0] = holds[:, 1, 1] = True
    plan = make_plan(holds, cards=(499,))
    traffic = TrafficTable(np.array([[9, 1]] * 4), 10, (0, 1, 2, 3), 1)
    granularity, sizes = export(plan, "llama.cpp", traffic=traffic).lost
    assert "2 of 4 layers are on the host, and with them 50.0% of expert activations; under the plan it is 10.0%" in (
        granularity
    )
    assert "GGUF" in sizes
    assert "under the plan it is 50.0%" in export(plan, "llama.cpp").lost[0]  # the plan's own shares
    assert export(plan, "llama.cpp").content == (
        rb"blk\.(0|1)\.ffn_(gate|up|down|gate_up)_exps\.=CUDA0,blk\.(2|3)\.ffn_(gate|up|down|gate_up)_exps\.=CPU"
        + b"\n"
    )
    with pytest.raises(PlanError) as refused:
        export(make_plan(holds, cards=(499,), host=399), "llama.cpp")
    assert "[host]: expected at most 399 B, found 400 B in 2 whole layers. Free 1 B" in four_parts(refused)
    export(make_plan(holds, cards=(499,), host=400), "llama.cpp")
    with pytest.raises(PlanError):
        export(make_plan(holds, cards=(499,), host=400, fixed=(0, 1)), "llama.cpp")
    smaller = export(make_plan(holds, cards=(499,), fixed=(100, 0)), "llama.cpp")
    assert files.read_llama_cpp(smaller.content, range(4)) == ("CUDA0", "CPU", "CPU", "CPU")


# All of them


@given(plans(host=False, modes=("ep",)))
@settings(max_examples=15)
def test_the_same_plan_gives_the_same_bytes(plan: Plan) -> None:
    again = make_plan(plan.holds.copy(), plan.layers, sizes=plan.card_sizes.copy())
    for form in EXPORTS:
        assert export(plan, form) == export(again, form), form

"""A pack holds what it must, its numbers follow from its bytes, and nothing but the inputs decides those bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from moefit.calibrate.checkpoint import INDEX, Checkpoint
from moefit.calibrate.deepseek_v41.experts import clamped_swiglu
from moefit.calibrate.deepseek_v41.model import V41Model
from moefit.calibrate.layout import PROJECTIONS, Layout
from moefit.calibrate.stream import Capture, adjacent_tokens, capture_layer, finish_layer, tokens_by_expert
from moefit.calibrate.traces import load_tokenizer, read_documents, windows
from moefit.fidelity.examine import examiner
from moefit.packs import Pack
from moefit.packs.build import prepare
from moefit.packs.expert import ADJACENT_WEIGHT, ExpertReport, mixed_hessian, quantize_expert
from moefit.packs.layout import pack_layout
from moefit.packs.plan import TRAFFIC, unseen_score
from moefit.packs.recipe import Recipe
from moefit.packs.report import rungs
from moefit.packs.routing import pack_recorded
from moefit.packs.shards import copy_companions
from moefit.placement import Plan, TrafficTable, check_plan
from moefit.placement.holdout import FEWEST
from moefit.progress import Silent
from moefit.quantize.codebook import MCG_MULTIPLIER, MUL1_MULTIPLIER, Codebook
from moefit.quantize.ldlq import proxy_error

from ..small_model import COMPANIONS, MACHINE, ONE_SIDED, RECIPE, Built, Inputs, cut_checkpoint, digests, poke


def experts_of(pack: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((pack / "calibration" / "experts.json").read_bytes())
    return rows


def captures(inputs: Inputs, recipe: Recipe) -> list[Capture]:
    """What the experts of every layer were calibrated on, computed again."""
    model = V41Model(Checkpoint.open(inputs.model))
    cut = windows(read_documents(inputs.traces, load_tokenizer(inputs.model)), recipe.window)
    ids = [torch.from_numpy(window.ids).long() for window in cut]
    states, found = [model.embed(window) for window in ids], []
    for index in range(model.config.num_hidden_layers):
        layer = model.load_layer(index)
        found.append(capture_layer(layer, states, ids, 1))
        finish_layer(layer, states, found[-1], layer.expert, 1)
    return found


def inputs_of(inputs: Inputs, capture: Capture, layer: int, expert: int, recipe: Recipe) -> list[torch.Tensor]:
    """The expert's own inputs, adjacent ones and the prior's, as the build takes them."""
    loaded = V41Model(Checkpoint.open(inputs.model)).load_layer(layer)
    own = tokens_by_expert(capture.topk_ids, capture.topk_weights).get(expert, (torch.zeros(0).long(), None))[0]
    cuts = [capture.window(index) for index in range(len(capture.bounds) - 1)]
    windows = [(capture.x[at], capture.topk_ids[at]) for at in cuts]
    adjacent = adjacent_tokens(loaded, windows, recipe.enough_tokens, 1).get(expert, torch.zeros(0).long())
    prior = torch.linspace(0, len(capture.x) - 1, min(recipe.prior_tokens, len(capture.x))).long()
    return [capture.x[tokens] for tokens in (own, adjacent, prior)]


@pytest.fixture(scope="module")
def small_captures(small: Inputs) -> list[Capture]:
    return captures(small, RECIPE)


def test_all_but_routed_experts_is_the_source_byte_for_byte(small_pack: Built) -> None:
    source, pack = Checkpoint.open(small_pack.inputs.model), Checkpoint.open(small_pack.path)
    assert pack.shards == source.shards
    routed = {name for name in source.tensors if name.startswith("layers.") and ".ffn.experts." in name}
    assert len(routed) == 6 * 3 * 3 * 2
    others = source.tensors.keys() - routed
    assert others <= pack.tensors.keys()
    assert {"mtp.0.ffn.experts.2.w2.weight", "layers.1.engram.embed.scale", "layers.5.ffn.gate.bias_vl"} <= others
    for name in others:
        ours, theirs = source.info(name), pack.info(name)
        assert (theirs.dtype, theirs.shape, theirs.file) == (ours.dtype, ours.shape, ours.file)
        assert pack.bytes(name) == source.bytes(name), name
    expected = {
        f"layers.{layer}.ffn.experts.{expert}.{projection}.{suffix}": stored
        for layer in range(6)
        for expert in range(3)
        for projection in PROJECTIONS
        for suffix, stored in {
            "trellis": ("I16", (8, 16, 48) if projection == "w2" else (16, 8, 48)),
            "suh": ("F16", (128,) if projection == "w2" else (256,)),
            "svh": ("F16", (256,) if projection == "w2" else (128,)),
            "mul1": ("I32", ()),
        }.items()
    }
    assert {n: (i.dtype, i.shape) for n, i in pack.tensors.items() if n not in others} == expected
    for name in expected:  # in the shard that held the weight
        assert pack.info(name).file == source.info(name.rpartition(".")[0] + ".weight").file


def test_config_is_the_sources_with_exl3(small_pack: Built) -> None:
    source = json.loads((small_pack.inputs.model / "config.json").read_bytes())
    pack = json.loads((small_pack.path / "config.json").read_bytes())
    assert pack.pop("quantization_config") == {
        "quant_method": "exl3",
        "scope": "deepseek_v41_routed_experts",
        "bits": 3,
        "codebook": "mul1",
        "mtp_experts": "source",
        "mtp_experts_start_layer": 6,
        "weight_block_size": [32, 32],
        "non_routed_quantization": {
            "quant_method": "deepseek_v4_fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "scale_fmt": "ue8m0",
            "weight_block_size": [32, 32],
            "expert_dtype": "fp4",
        },
    }
    assert source.pop("quantization_config")["quant_method"] == "fp8"
    assert pack == source


def test_index_and_sizes(small_pack: Built) -> None:
    index = json.loads((small_pack.path / INDEX).read_bytes())
    stored: dict[str, str] = {}
    data = 0
    for path in sorted(small_pack.path.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                assert name not in stored
                stored[name] = path.name
        raw = path.read_bytes()
        data += len(raw) - 8 - int.from_bytes(raw[:8], "little")
    assert index["weight_map"] == stored
    assert index["metadata"] == {"total_size": data}
    sizes = small_pack.manifest["sizes"]
    # 2*16*3*(256/16)*(128/16) B of trellis + 2*(256+128) B of scales + 4 B of marker, three times
    assert sizes["expert_bytes"] == 3 * (2 * 16 * 3 * 16 * 8 + 2 * 384 + 4) == 39_180
    assert sizes["tensor_bytes"] == data
    assert sizes["routed_bytes"] == 18 * 39_180
    weight_bits = 39_180 * 8 / (3 * 256 * 128)
    assert sizes["bits_per_weight"] == pytest.approx(weight_bits)


def test_shards_load_with_the_safetensors_library(small_pack: Built) -> None:
    """Aligned: the library maps tensors in place, and so do the engines."""
    pack = Checkpoint.open(small_pack.path)
    for shard in pack.shards:
        with safe_open(small_pack.path / shard, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118
                tensor, info = file.get_tensor(name), pack.info(name)
                assert info.start % tensor.element_size() == 0, name
                assert tuple(tensor.shape) == info.shape
                assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == pack.bytes(name)


def test_manifest_names_every_file(small_pack: Built) -> None:
    manifest = json.loads((small_pack.path / "moefit.json").read_bytes())
    assert manifest == small_pack.manifest
    found = digests(small_pack.path)
    del found["moefit.json"]
    assert {name: entry["sha256"] for name, entry in manifest["files"].items()} == found
    assert all((small_pack.path / name).stat().st_size == entry["bytes"] for name, entry in manifest["files"].items())
    assert manifest["recipe"] == replace(ONE_SIDED, kv_quantization=False).to_json()
    assert manifest["source"]["shards"].keys() == set(Checkpoint.open(small_pack.inputs.model).shards)
    assert manifest["calibration"]["documents"] == 4
    assert not list(small_pack.path.parent.glob("*.partial"))


def test_nothing_of_the_machine_or_the_clock_is_in_a_pack(small_pack: Built) -> None:
    words = [str(folder).encode() for folder in (small_pack.path.parent, small_pack.inputs.model.parent, Path.home())]
    for path in small_pack.path.rglob("*"):
        if path.is_file():
            assert not [word for word in words if word in path.read_bytes()], path


def test_companions_are_copied(small_pack: Built) -> None:
    for name in (*COMPANIONS, "encoding/encoding.py"):
        assert (small_pack.path / name).read_bytes() == (small_pack.inputs.model / name).read_bytes()


def test_weights_in_other_formats_and_hidden_files_stay_behind(mini: Inputs, tmp_path: Path) -> None:
    inputs = mini.copy(tmp_path)
    for name in ("pytorch_model.bin", ".cache", "consolidated.00.pth", "encoding/half.tmp"):
        (inputs.model / name).write_text("x")
    (inputs.model / ".git").mkdir()
    (inputs.model / ".git" / "HEAD").write_text("x")
    (inputs.model / "README.md").write_text("the model's own")
    pack = tmp_path / "pack"
    pack.mkdir()
    copy_companions(inputs.model, pack)
    assert digests(pack).keys() == {*COMPANIONS, "README.md", "encoding/encoding.py"}


@pytest.mark.parametrize(("layer", "expert"), [(0, 1), (3, 0), (5, 2)])
def test_decoded_experts_equal_what_the_quantizer_reported(
    small_pack: Built, small_captures: list[Capture], layer: int, expert: int
) -> None:
    """tr(E^T H E) / tr(W^T H W) of the written bytes, H from the traffic, against the report that was written."""
    row = experts_of(small_pack.path)[3 * layer + expert]
    assert (row["layer"], row["expert"]) == (layer, expert)
    model = V41Model(Checkpoint.open(small_pack.inputs.model))
    source = dict(zip(("w1", "w3", "w2"), model.load_layer(layer).expert(expert), strict=True))
    decoded = dict(zip(("w1", "w3", "w2"), Pack(small_pack.path).expert(layer, expert), strict=True))

    capture = small_captures[layer]
    own, adjacent, prior = inputs_of(small_pack.inputs, capture, layer, expert, RECIPE)
    assert (row["tokens"], row["adjacent"]) == (len(own), len(adjacent))
    assert len(adjacent) == max(0, RECIPE.enough_tokens - len(own))
    whole = len(own) + ADJACENT_WEIGHT * len(adjacent) + RECIPE.shrinkage
    assert row["own_share"] == pytest.approx(len(own) / whole)
    assert row["adjacent_share"] == pytest.approx(ADJACENT_WEIGHT * len(adjacent) / whole)
    assert row["prior_share"] == pytest.approx(RECIPE.shrinkage / whole)

    def inner(x: torch.Tensor) -> torch.Tensor:
        return clamped_swiglu(x @ decoded["w1"].T, x @ decoded["w3"].T, model.config.swiglu_limit)

    hessians = {
        "w1": mixed_hessian(own, adjacent, prior, RECIPE.shrinkage),
        "w2": mixed_hessian(inner(own), inner(adjacent), inner(prior), RECIPE.shrinkage),
    }
    hessians["w3"] = hessians["w1"]
    for projection, reported in row["proxy_error"].items():
        computed = proxy_error(source[projection].T, decoded[projection].T, hessians[projection])
        assert computed == pytest.approx(reported, rel=1e-3), projection
        assert 0.002 < computed < 0.05
        others = proxy_error(source[projection].T, decoded[projection].T, None)
        assert abs(others - reported) > 0.01 * reported  # the Hessian matters: another one would not agree


def test_quantizing_an_expert_again_gives_the_written_bytes(small_pack: Built, small_captures: list[Capture]) -> None:
    layer, expert = 2, 1
    capture = small_captures[layer]
    model = V41Model(Checkpoint.open(small_pack.inputs.model))
    loaded = model.load_layer(layer)
    seen = inputs_of(small_pack.inputs, capture, layer, expert, RECIPE)
    torch.set_num_threads(1)
    tensors, report = quantize_expert(
        layer, expert, loaded.expert(expert), *seen, loaded.activation, RECIPE, Pack(small_pack.path).layout
    )
    pack = Checkpoint.open(small_pack.path)
    assert len(tensors) == 12
    for name, tensor in tensors.items():
        assert pack.bytes(name) == tensor.reshape(-1).view(torch.uint8).numpy().tobytes(), name
    assert vars(report) == experts_of(small_pack.path)[3 * layer + expert]


def test_kl_is_computed_from_the_written_bytes(mini_pack: Built, tmp_path: Path) -> None:
    """The gate on the untouched copy says what the build said; with two experts' trellises swapped it does not."""
    inputs, pack = mini_pack.inputs, mini_pack.copy(tmp_path)
    run = examiner(inputs.model, [inputs.held_out], 5.0, 2).run
    before = run(pack, Silent())
    assert before.receipt == (mini_pack.path / "fidelity.json").read_bytes()
    assert before.summary == mini_pack.manifest["fidelity"]
    names = [f"layers.1.ffn.experts.{expert}.w2.trellis" for expert in (0, 1)]
    first, second = (Checkpoint.open(pack).bytes(name) for name in names)
    poke(pack, names[0], 0, second)
    poke(pack, names[1], 0, first)
    after = run(pack, Silent())
    corpus = next(iter(before.summary["corpora"]))
    assert after.summary["corpora"][corpus]["kl"] > 1.5 * before.summary["corpora"][corpus]["kl"]


def test_traffic_table_counts_every_choice(small_pack: Built, small_captures: list[Capture]) -> None:
    table = TrafficTable.load(small_pack.path / "calibration" / "traffic.safetensors")
    assert (table.tokens, table.top_k, table.layers) == (
        small_pack.manifest["calibration"]["tokens"],
        2,
        tuple(range(6)),
    )
    assert (table.counts.sum(axis=1) == table.tokens * table.top_k).all()
    for layer, capture in enumerate(small_captures):
        assert table.counts[layer].tolist() == torch.bincount(capture.topk_ids.flatten(), minlength=3).tolist()
    assert [row["tokens"] for row in experts_of(small_pack.path)] == table.counts.flatten().tolist()
    coverage = small_pack.manifest["calibration"]["coverage"]
    assert (coverage["min"], coverage["max"]) == (table.counts.min(), table.counts.max())
    assert coverage["unreached"] == 0


def test_plan_is_of_this_pack(small_pack: Built) -> None:
    plan = Plan.load(small_pack.path / "plan.json")
    assert (plan.host_sizes == 39_180).all()
    assert plan.host_sizes.shape == (6, 3)
    checkpoint = Checkpoint.open(small_pack.path)
    routed = sum(i.nbytes for n, i in checkpoint.tensors.items() if n.startswith("layers.") and ".ffn.experts." in n)
    assert sum(plan.used) == routed == small_pack.manifest["sizes"]["routed_bytes"]
    engram = sum(i.nbytes for n, i in checkpoint.tensors.items() if ".engram.embed." in n)
    assert plan.fixed[-1] == engram
    everything = small_pack.manifest["sizes"]["tensor_bytes"]
    assert 0 <= sum(plan.fixed) + routed - everything < len(MACHINE.gpus)  # each card's share is rounded up
    traffic, recorded = TrafficTable.load(small_pack.path / TRAFFIC), pack_recorded(small_pack.path)
    check_plan(plan, traffic)
    unseen = small_pack.manifest["plan"]["unseen"]
    assert unseen == unseen_score(plan, traffic, recorded)
    assert 0 < unseen["hit_rate"]["value"] <= 1 if recorded and recorded.conversations >= FEWEST else "why" in unseen


@pytest.mark.parametrize("threads", [1, 3])
def test_same_bytes_for_any_number_of_threads(mini_pack: Built, tmp_path: Path, threads: int) -> None:
    """The fixture used two."""
    inputs = mini_pack.inputs
    examine = examiner(inputs.model, [inputs.held_out], 5.0, threads)
    inputs.build(tmp_path / "pack", threads=threads, examine=examine.run, examine_identity=examine.identity)
    assert digests(tmp_path / "pack") == digests(mini_pack.path)


def test_another_seed_gives_other_experts(mini_pack: Built, tmp_path: Path) -> None:
    mini_pack.inputs.build(tmp_path / "pack", gate=False, recipe=replace(RECIPE, seed=1))
    ours, theirs = Checkpoint.open(mini_pack.path), Checkpoint.open(tmp_path / "pack")
    for name in ours.tensors:
        same = ours.bytes(name) == theirs.bytes(name)
        routed = name.startswith("layers.") and name.endswith((".trellis", ".suh", ".svh"))
        assert same != routed, name


@pytest.mark.parametrize(("codebook", "bits"), [("mcg", 3.0), ("3inst", 2.0), ("mul1", 2.5), ("mul1", 4.0)])
def test_other_codebooks_and_bits(
    mini: Inputs, mini_pack: Built, tmp_path: Path, codebook: Codebook, bits: float
) -> None:
    path = tmp_path / "pack"
    manifest = mini.build(path, gate=False, recipe=replace(ONE_SIDED, codebook=codebook, bits=bits)).manifest
    pack = Pack(path)
    prefix = "layers.1.ffn.experts.1.w1"
    assert pack.codebook(prefix) == codebook
    assert pack.checkpoint.info(f"{prefix}.trellis").shape == (16, 8, int(16 * bits))
    markers = {"mcg": MCG_MULTIPLIER, "mul1": MUL1_MULTIPLIER}
    for name in ("mcg", "mul1"):
        assert (f"{prefix}.{name}" in pack.checkpoint.tensors) == (name == codebook)
        if name == codebook:
            stored = pack.checkpoint.stored(f"{prefix}.{name}")
            assert stored.shape == ()
            assert int(stored) & 0xFFFFFFFF == markers[name]
    config = pack.checkpoint.config["quantization_config"]
    assert (config["codebook"], config["bits"]) == (codebook, bits)
    assert isinstance(config["bits"], int) == (bits == int(bits))
    assert manifest["sizes"]["tensor_bytes"] == sum(info.nbytes for info in pack.checkpoint.tensors.values())
    source = V41Model(Checkpoint.open(mini.model)).load_layer(1).expert(1)
    for ours, theirs in zip(source, pack.expert(1, 1), strict=True):
        relative = float((ours - theirs).square().sum() / ours.square().sum())
        assert 0.3 * 4.0**-bits < relative < 3 * 4.0**-bits  # an ideal code at rate K leaves 4^-K


@pytest.mark.parametrize("enough", [0, 150])
def test_an_expert_no_token_reached_uses_the_next_rungs(mini: Inputs, tmp_path: Path, enough: int) -> None:
    """Expert 0 of layer 1 comes second for every token: the first of them stand in for its own, or else the prior."""
    inputs, recipe = mini.copy(tmp_path), replace(ONE_SIDED, enough_tokens=enough)
    poke(inputs.model, "layers.1.ffn.gate.bias", 0, np.float32(-1e4).tobytes())  # expert 0
    manifest = inputs.build(tmp_path / "pack", recipe=recipe).manifest
    assert manifest["calibration"]["coverage"]["unreached"] == 1
    assert manifest["calibration"]["coverage"]["min"] == 0
    row = experts_of(tmp_path / "pack")[2]
    assert (row["layer"], row["expert"], row["tokens"], row["own_share"]) == (1, 0, 0, 0.0)
    weight = ADJACENT_WEIGHT * enough
    assert row["adjacent"] == enough
    assert row["prior_share"] == pytest.approx(RECIPE.shrinkage / (weight + RECIPE.shrinkage))
    ladder = manifest["calibration"]["rungs"]
    assert ladder["natural"] == {"experts": 5, "tokens": 3 * manifest["calibration"]["tokens"]}
    assert (ladder["adjacent"]["experts"] > 0, ladder["prior"]["experts"]) == (enough > 0, int(enough == 0))
    capture = captures(inputs, recipe)[1]
    own, adjacent, prior = inputs_of(inputs, capture, 1, 0, recipe)
    assert len(own) == 0 and torch.equal(adjacent, capture.x[:enough])
    layer, layout = V41Model(Checkpoint.open(inputs.model)).load_layer(1), Pack(tmp_path / "pack").layout
    torch.set_num_threads(1)
    tensors, report = quantize_expert(1, 0, layer.expert(0), own, adjacent, prior, layer.activation, recipe, layout)
    assert vars(report) == row
    for name, tensor in tensors.items():
        written = Checkpoint.open(tmp_path / "pack").bytes(name)
        assert written == tensor.reshape(-1).view(torch.uint8).numpy().tobytes(), name
    assert row["identity"] == []
    assert all(0 < error < 0.05 for error in row["proxy_error"].values())
    for weight in Pack(tmp_path / "pack").expert(1, 0):
        assert weight.isfinite().all()
        assert weight.abs().max() > 0
    assert np.isfinite(manifest["fidelity"]["corpora"]["agentic"]["kl"])


def test_a_prior_that_carries_nothing_falls_back_to_no_hessian(mini: Inputs) -> None:
    """Inputs of exactly zero, as a broken norm would give: counted, never NaN."""
    source = Checkpoint.open(mini.model)
    layer, zeros = V41Model(source).load_layer(0), torch.zeros(5, 256)
    tensors, report = quantize_expert(
        0, 0, layer.expert(0), zeros[:0], zeros[:2], zeros, layer.activation, RECIPE, Layout.of(source)
    )
    assert report.identity == ["w1", "w3", "w2"]
    assert rungs([report])["identity"] == {"experts": 1, "linears": 3}
    assert all(0 < error < 0.05 for error in report.proxy_error.values())
    assert all(tensor.isfinite().all() for tensor in tensors.values() if tensor.dtype == torch.float16)


def test_own_hessian_takes_over_with_more_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    own, adjacent, prior = (torch.randn(n, 8, generator=generator) for n in (50, 30, 40))
    none = own[:0]
    mean, spread = own.T @ own / 50, prior.T @ prior / 40
    assert torch.allclose(mixed_hessian(own, none, prior, 150.0), (50 * mean + 150 * spread) / 200, rtol=1e-5)
    assert torch.allclose(mixed_hessian(own, none, prior, 0.0), mean, rtol=1e-5)
    assert torch.allclose(mixed_hessian(none, none, prior, 0.0), spread, rtol=1e-5)
    near = ADJACENT_WEIGHT * adjacent.T @ adjacent
    expected = (50 * mean + near + 150 * spread) / (200 + 30 * ADJACENT_WEIGHT)
    assert torch.allclose(mixed_hessian(own, adjacent, prior, 150.0), expected, rtol=1e-5)
    assert torch.allclose(mixed_hessian(none, adjacent, prior, 0.0), adjacent.T @ adjacent / 30, rtol=1e-5)


def test_without_adjacent_tokens_the_hessian_is_the_plain_mixture_bit_for_bit() -> None:
    """What `enough_tokens` 0 promises, and every expert with enough tokens gets."""
    generator = torch.Generator().manual_seed(1)
    own, prior = torch.randn(70, 16, generator=generator), torch.randn(40, 16, generator=generator)
    share = 70 / (70 + 1000.0)
    expected = (prior.T @ prior) * ((1 - share) / 40) + (own.T @ own) * (share / 70)
    assert torch.equal(mixed_hessian(own, own[:0], prior, 1000.0), expected)


def test_rungs_count_every_step_of_the_ladder() -> None:
    def report(tokens: int, adjacent: int, prior: float, identity: list[str]) -> ExpertReport:
        own = (1 - prior) * (tokens > 0)
        return ExpertReport(0, 0, tokens, adjacent, own, 1 - own - prior, prior, {}, {}, [], {}, identity)

    ladder = rungs([report(9, 0, 0.2, []), report(2, 5, 0.4, []), report(0, 3, 0.6, []), report(0, 0, 1.0, ["w2"])])
    assert ladder == {
        "natural": {"experts": 2, "tokens": 11},
        "adjacent": {"experts": 2, "tokens": 8},
        "prior": {"experts": 1, "weight": pytest.approx(0.55)},
        "identity": {"experts": 1, "linears": 1},
    }


def test_rungs_of_a_pack_are_the_sums_of_its_experts(small_pack: Built) -> None:
    rows, ladder = experts_of(small_pack.path), small_pack.manifest["calibration"]["rungs"]
    assert ladder["natural"] == {"experts": 18, "tokens": sum(row["tokens"] for row in rows)}
    assert ladder["adjacent"] == {
        "experts": sum(row["adjacent"] > 0 for row in rows),
        "tokens": sum(row["adjacent"] for row in rows),
    }
    assert 0 < ladder["adjacent"]["tokens"] < ladder["natural"]["tokens"]
    assert ladder["prior"]["experts"] == ladder["identity"]["experts"] == 0
    for row in rows:
        assert row["tokens"] + row["adjacent"] <= max(row["tokens"], RECIPE.enough_tokens)
        assert row["own_share"] + row["adjacent_share"] + row["prior_share"] == pytest.approx(1)


def test_experts_with_enough_tokens_do_not_change(mini: Inputs, tmp_path: Path) -> None:
    """Only the starved are another with the rung; the others keep their bytes."""
    for name, enough in (("off", 0), ("on", 450)):
        mini.build(tmp_path / name, gate=False, recipe=replace(ONE_SIDED, enough_tokens=enough))
    off, on = Checkpoint.open(tmp_path / "off"), Checkpoint.open(tmp_path / "on")
    rows = experts_of(tmp_path / "on")
    starved = {(row["layer"], row["expert"]) for row in rows if row["adjacent"]}
    assert starved == {(row["layer"], row["expert"]) for row in rows if row["tokens"] < 450}
    assert 0 < len(starved) < len(rows)
    for row in rows:
        place = row["layer"], row["expert"]
        name = "layers.{}.ffn.experts.{}.w1.trellis".format(*place)
        assert (off.bytes(name) != on.bytes(name)) == (place in starved), place


def test_dims_that_are_no_multiple_of_128_are_padded(tiny_v41: Path, mini: Inputs, tmp_path: Path) -> None:
    """As EXL3 stores them; the decoded expert has the source's shape again."""
    model = cut_checkpoint(tiny_v41, tmp_path / "model", 3, 2, 1, intermediate=96)
    inputs = replace(mini, model=model)
    inputs.build(tmp_path / "pack", recipe=replace(ONE_SIDED, bits=2.0))
    pack = Pack(tmp_path / "pack")
    assert pack.checkpoint.info("layers.0.ffn.experts.0.w1.trellis").shape == (16, 8, 32)
    assert pack.checkpoint.info("layers.0.ffn.experts.0.w1.svh").shape == (128,)
    w1, w3, w2 = pack.expert(0, 0)
    assert (tuple(w1.shape), tuple(w3.shape), tuple(w2.shape)) == ((96, 256), (96, 256), (256, 96))
    source = V41Model(Checkpoint.open(model)).load_layer(0).expert(0)
    for ours, theirs in zip(source, (w1, w3, w2), strict=True):
        assert float((ours - theirs).square().sum() / ours.square().sum()) < 0.15


def test_every_fifth_document_is_held_out(mini: Inputs, tiny_v41: Path, tmp_path: Path) -> None:
    lines = (tiny_v41.parent / "traffic.jsonl").read_text().splitlines()[:7]
    traces = tmp_path / "traffic.jsonl"
    traces.write_text("".join(line + "\n" for line in lines))
    inputs = replace(mini, traces=traces)
    prepared = prepare(inputs.request(tmp_path / "pack", gate=False, recipe=replace(RECIPE, hold_out=5)))
    names = [json.loads(line)["id"] for line in lines]
    assert list(dict.fromkeys(window.document for window in prepared.windows)) == names[:4] + names[5:]
    held = examiner(mini.model, [traces], 0.1, 1, every=5).held_out
    assert {window.document for cut in held.windows.values() for window in cut} == {names[4]}


def test_layout_of_the_pack_is_known_before_it_is_built(small_pack: Built) -> None:
    source = Checkpoint.open(small_pack.inputs.model)
    layout = pack_layout(source, Pack(small_pack.path).layout, RECIPE)
    written = Checkpoint.open(small_pack.path)
    assert {
        shard: [(t.name, t.dtype, t.shape, t.nbytes) for t in tensors] for shard, tensors in layout.shards.items()
    } == {
        shard: [(i.name, i.dtype, i.shape, i.nbytes) for i in written.tensors.values() if i.file == shard]
        for shard in written.shards
    }

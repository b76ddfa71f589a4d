"""Exports: options, traffic and files that are refused, and the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from moefit.cli import export as cli
from moefit.errors import PlanError
from moefit.placement import export_files as files
from moefit.placement.exports import EXPORTS, export

from .export_plans import four_parts, make_plan, make_traffic


@pytest.mark.parametrize(
    ("form", "options", "message"),
    [
        ("vllm", {}, "unknown export format [format]: found 'vllm'. Take one of vllm-exl3, sglang"),
        ("sglang", {"prefix": "x{i}"}, "[sglang]: expected hidden_layers or traffic, found prefix. Leave it out"),
        (
            "llama.cpp",
            {"hidden_layers": 9},
            "an option that does not change an export for llama.cpp [llama.cpp]: expected traffic",
        ),
        ("vllm-exl3", {"prefix": "experts"}, "[prefix]: expected {i} once, found 'experts'"),
        ("vllm-exl3", {"prefix": "{i}.{i}"}, "found '{i}.{i}'"),
        ("sglang", {"file": "map.txt"}, "[map.txt]: expected a name that ends in .json. Call it expert-location.json"),
        ("ktransformers", {"file": "x.json"}, "expected a name that ends in .pt"),
    ],
)
def test_options_are_refused(form: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as refused:
        export(make_plan(np.tile([True, False], (2, 3, 1))), form, **options)
    assert message in four_parts(refused)


@pytest.mark.parametrize("form", [form for form in EXPORTS if "traffic" in EXPORTS[form].options])
def test_traffic_of_another_model_is_refused(form: str) -> None:
    plan = make_plan(np.tile([True, False], (2, 3, 1)), (1, 2))
    moved = make_plan(plan.holds, (2, 3))
    for other in (make_traffic(plan, 0, experts=4), make_traffic(moved, 0)):
        with pytest.raises(PlanError, match="not of the plan's model") as refused:
            export(plan, form, traffic=other)
        four_parts(refused)
    assert export(plan, form, traffic=make_traffic(plan, 0))


def _sglang(*rows: Any) -> bytes:
    return json.dumps({"physical_to_logical_map": list(rows)}).encode()


def _ascend(*devices: Any, count: int = 1, device_count: int = 2) -> bytes:
    layer = {"device_count": device_count, "device_list": [{"device_expert": ids} for ids in devices]}
    return json.dumps({"moe_layer_count": count, "layer_list": [layer]}).encode()


@pytest.mark.parametrize(
    ("read", "content", "message"),
    [
        (lambda c: files.read_vllm_exl3(c, (0,), 4), b"[", "expected JSON"),
        (lambda c: files.read_vllm_exl3(c, (0,), 4), b"[]", "expected an object, found list"),
        (lambda c: files.read_vllm_exl3(c, (0,), 4), b'{"model.layers.1.ffn.experts": [0]}', "expected names like"),
        (lambda c: files.read_vllm_exl3(c, (0,), 4), b'{"model.layers.0.ffn.experts": [4]}', "ids of 0..3, found [4]"),
        (lambda c: files.read_vllm_exl3(c, (0,), 4), b'{"model.layers.0.ffn.experts": [1, 1]}', "different ids"),
        (lambda c: files.read_vllm_exl3(c, (0,), 4), b'{"model.layers.0.ffn.experts": [true]}', "different ids"),
        (lambda c: files.read_sglang(c, (0,), 2, 2), b'{"logical_count": []}', "physical_to_logical_map alone"),
        (lambda c: files.read_sglang(c, (1,), 2, 2), _sglang([0, 1]), "a row for each of 2 layers"),
        (lambda c: files.read_sglang(c, (0,), 2, 2), _sglang([0, 1, 0]), "a multiple of 2 slots"),
        (lambda c: files.read_sglang(c, (1,), 2, 2), _sglang([0, 1], [0, 1, 0, 1]), "the same in all rows"),
        (lambda c: files.read_sglang(c, (0,), 2, 2), _sglang([0, 0, 1, 0]), "card 0"),
        (lambda c: files.read_sglang(c, (0,), 3, 2), _sglang([0, 1, 1, 0]), "expected every expert, without [2]"),
        (lambda c: files.read_vllm_eplb(c, 2), b"{}", "moe_layer_count"),
        (lambda c: files.read_vllm_eplb(c, 2), _ascend([0], [1], count=2), "moe_layer_count"),
        (lambda c: files.read_vllm_eplb(c, 2), _ascend([0], [1], device_count=3), "equally many devices"),
        (lambda c: files.read_vllm_eplb(c, 2), _ascend([0], [1, 0]), "equally many devices and slots"),
        (lambda c: files.read_vllm_eplb(c, 2), _ascend([0, 0], [1, 0]), "card 0]: expected different ids"),
        (lambda c: files.read_vllm_eplb(c, 3), _ascend([0, 1], [1, 0]), "without [2]"),
        (lambda c: files.read_vllm_eplb(c, 2), b'{"moe_layer_count": 1, "layer_list": [7]}', "device_list"),
        (lambda c: files.read_llama_cpp(c, (0,)), b"blk", "expected one buffer for all tensors, found ['']"),
        (lambda c: files.read_llama_cpp(c, (0,)), rb"blk\.0\.ffn_up_exps=CPU", "found ['', 'CPU']"),
        (lambda c: files.read_llama_cpp(c, (0,)), b"(=CPU", "pattern"),
    ],
)
def test_files_that_engines_would_misread_are_refused(
    read: Callable[[bytes], Any], content: bytes, message: str
) -> None:
    with pytest.raises(PlanError) as refused:
        read(content)
    assert message in four_parts(refused)


@pytest.mark.parametrize(
    ("counts", "message"), [([[1, 2, 2]], "[steps, 1 layers or more"), ([[[1, 2, 2]]], "experts 1 and 2 rank equally")]
)
def test_ktransformers_files_are_refused(tmp_path: Path, counts: list[Any], message: str) -> None:
    path = tmp_path / "x.pt"
    torch.save({"logical_count": torch.tensor(counts)}, path)
    with pytest.raises(PlanError) as refused:
        files.read_ktransformers(path, (0,), 1)
    assert message in four_parts(refused)


# The command


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """`export` as a command, on a plan of two layers with two experts on each of two cards."""
    holds = np.zeros((2, 4, 3), dtype=bool)
    holds[:, :2, 0] = holds[:, 2:, 1] = True
    make_plan(holds, (1, 2)).save(tmp_path / "plan.json")
    app = typer.Typer()
    app.command()(cli.export)

    def call(*words: str) -> Any:
        monkeypatch.chdir(tmp_path)
        return CliRunner().invoke(app, ["plan.json", *words])

    return call


def test_command(run: Callable[..., Any], tmp_path: Path) -> None:
    done = run("--format", "sglang", "-o", "map.json")
    assert done.exit_code == 0, done.output
    start = "--init-expert-location map.json --tp-size 2 --ep-size 2"
    size = (tmp_path / "map.json").stat().st_size
    assert done.output == f"written to    map.json ({size} B)\nstart with    {start}\nlost          nothing\n"
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"num_hidden_layers": 5, "n_routed_experts": 4, "num_experts_per_tok": 1, "mlp_only_layers": [0, 3, 4]}
        )
    )
    done = run("--format", "sglang", "-o", "map.json", "--model", "config.json", "--json")
    assert json.loads(done.output)["flags"] == start.split()
    assert len(json.loads((tmp_path / "map.json").read_text())["physical_to_logical_map"]) == 5
    assert run("--format", "llama.cpp", "-o", "ot.txt", "--model", "config.json").exit_code == 0
    done = run("--format", "vllm-exl3", "-o", "host.json", "--prefix", "model.layers.{i}.mlp.experts")
    assert "start with    EXL3_HOST_EXPERTS=host.json\n" in done.output


def test_command_refuses(run: Callable[..., Any], tmp_path: Path) -> None:
    assert "take the plan's place" in str(run("--format", "sglang", "-o", "plan.json").exception)
    assert "cannot be written there" in str(run("--format", "sglang", "-o", "none/map.json").exception)
    (tmp_path / "config.json").write_text(
        json.dumps({"num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 1, "mlp_only_layers": [0]})
    )
    refused = run("--format", "vllm-exl3", "-o", "host.json", "--model", "config.json").exception
    assert "found 2 from 1 with 8" in str(refused)
    assert not list(tmp_path.glob("*.json.tmp"))
    assert not (tmp_path / "host.json").exists()


def test_command_offers_every_format() -> None:
    offered = get_type_hints(cli.export)["form"]
    assert get_args(offered) == tuple(EXPORTS)

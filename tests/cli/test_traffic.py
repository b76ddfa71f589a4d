"""`moefit traffic` and `moefit plan --traffic`, run in this process."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moefit.packs.plan import TRAFFIC
from moefit.placement import Plan, TrafficTable
from moefit.placement.captures import MoeShape

from ..placement import writers as w
from ..small_model import Built
from .conftest import Moefit

SHAPE = MoeShape(6, (2, 3, 4, 5), 8, 3)
CONFIG = {"num_hidden_layers": 6, "n_routed_experts": 8, "num_experts_per_tok": 3, "first_k_dense_replace": 2}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "model"


def test_captures_become_a_table(moefit: Moefit, model: Path, tmp_path: Path) -> None:
    ids, folder, out = w.random_ids(SHAPE, 20), tmp_path / "captures", tmp_path / "traffic.safetensors"
    folder.mkdir()
    w.json_lines(folder / "a.jsonl", w.vllm_answer(ids[:12], 7), {"choices": [{"routed_experts": None}]})
    w.sglang_stat(folder / "stat.pt", w.plain_counts(ids[12:], 8)[None], SHAPE)
    (folder / ".hidden").write_text("not a capture")
    done = moefit("traffic", folder, "--model", model, "--out", out)
    assert (done.code, done.err) == (0, "")
    table = TrafficTable.load(out)
    assert np.array_equal(table.counts, w.plain_counts(ids, 8))
    assert (table.tokens, table.phase_tokens, table.layers) == (20, {"prefill": 7, "decode": 5}, SHAPE.layers)
    assert done.out.splitlines()[:4] == [
        f"{folder}/a.jsonl: vllm (answers of vllm), 12 tokens (prefill 7, decode 5), "
        "left out: 1 answers without routing",
        f"{folder}/stat.pt: sglang-recorder (`logical_count` of a `rank`), 8 tokens",
        "",
        "traffic       20 tokens, 4 layers x 8 experts, top-3",
    ]
    assert "phases        prefill 7, decode 5, unknown 8" in done.out
    assert done.out.splitlines()[-1] == f"written to {out}"

    first = out.read_bytes()
    made = moefit("traffic", folder, "--model", model / "config.json", "--out", out, "--json").json
    assert out.read_bytes() == first
    assert [file["format"] for file in made["files"]] == ["vllm", "sglang-recorder"]
    assert [layer["layer"] for layer in made["skew"]] == list(SHAPE.layers)
    for layer, counts in zip(made["skew"], table.counts, strict=True):
        ranked = sorted(counts.tolist(), reverse=True)
        assert layer["busiest"] == pytest.approx(ranked[0] * 8 / 60)
        assert layer["tenth"] == pytest.approx(ranked[0] / 60)
        assert sum(ranked[: layer["half"]]) >= 30 > sum(ranked[: layer["half"] - 1])
        assert layer["unused"] == ranked.count(0)
        assert 0 < layer["entropy"] <= 3


def test_refusals(moefit: Moefit, model: Path, tmp_path: Path) -> None:
    ids, out = w.random_ids(SHAPE, 20), tmp_path / "traffic.safetensors"
    good = w.json_lines(tmp_path / "good.jsonl", w.vllm_answer(ids, 7))
    ids[3, 1] = 0
    bad = w.json_lines(tmp_path / "bad.jsonl", w.vllm_answer(ids, 7))
    (tmp_path / "empty").mkdir()
    dense = tmp_path / "dense.json"
    dense.write_text('{"num_hidden_layers": 6}')
    for words, parts in (
        ([good, bad], ("all-zero routing rows", bad, "line 1, choice 0, layer 3, row 3", "1 of 7 rows")),
        ([good, "--format", "imatrix"], ("another format", "found vllm")),
        ([good, "--format", "gguf"], ("no such capture format", "sglang-recorder")),
        ([good, good], ("given twice", good)),
        ([tmp_path / "missing.pt"], ("no such capture", "missing.pt")),
        ([tmp_path / "empty"], ("holds no capture",)),
        ([good, "--model", tmp_path / "empty"], ("config.json cannot be read",)),
        ([good, "--model", dense], ("does not say how its experts are routed",)),
        ([good, "--out", tmp_path / "no" / "t"], ("cannot be written",)),
        ([good, "--out", good], ("would replace a capture",)),
    ):
        message = moefit("traffic", "--model", model, "--out", out, *words).refusal()
        for part in parts:
            assert str(part) in message, message
    assert not out.exists()


def test_plans_for_captured_traffic(moefit: Moefit, mini_pack: Built, tmp_path: Path) -> None:
    """The pack's own table through `moefit traffic` gives the pack's own plan; other traffic another one."""
    own, shape, machine = (
        TrafficTable.load(mini_pack.path / TRAFFIC),
        MoeShape.read(mini_pack.path),
        ["--gpu", "12MB", "--host", "16MB"],
    )
    table = tmp_path / "own.safetensors"
    assert moefit("traffic", mini_pack.path / TRAFFIC, "--model", mini_pack.path, "--out", table).code == 0
    assert table.read_bytes() == (mini_pack.path / TRAFFIC).read_bytes()
    plans = {}
    other = w.json_lines(tmp_path / "other.jsonl", w.vllm_answer(w.random_ids(shape, 50, 1), 20))
    assert moefit("traffic", other, "--model", mini_pack.path, "--out", tmp_path / "other.safetensors").code == 0
    for name, more in (
        ("pack", []),
        ("own", ["--traffic", table]),
        ("other", ["--traffic", tmp_path / "other.safetensors"]),
    ):
        out = tmp_path / f"{name}.json"
        assert moefit("plan", mini_pack.path, *machine, *more, "--out", out).code == 0
        plans[name] = out.read_bytes()
        Plan.load(out)
    assert plans["pack"] == plans["own"] != plans["other"]
    assert json.loads(plans["other"])["traffic"] == {"tokens": 50, "top_k": shape.top_k}

    half = TrafficTable(own.counts[:1], own.tokens, own.layers[:1], own.top_k)
    half.save(tmp_path / "half.safetensors")
    message = moefit(
        "plan", mini_pack.path, *machine, "--traffic", tmp_path / "half.safetensors", "--out", tmp_path / "x"
    ).refusal()
    assert "not of this pack's model" in message


def test_a_pack_and_a_table_are_shown_as_they_are(moefit: Moefit, mini_pack: Built, tmp_path: Path) -> None:
    """Without --model and --out: both know their model, and nothing is written."""
    own = TrafficTable.load(mini_pack.path / TRAFFIC)
    shown = moefit("traffic", mini_pack.path)
    assert (shown.code, shown.err) == (0, "")
    assert f"traffic       {own.tokens:,} tokens, 3 layers x 2 experts, top-1" in shown.out
    assert f"phases        prefill {own.tokens:,}" in shown.out
    row = next(line.split() for line in shown.out.splitlines() if line.startswith("moefit examples"))
    assert row[2:] == [f"{own.tokens:,}", "100.0%", f"{own.counts.max() / own.counts.sum():.1%}", "0"]
    assert "written to" not in shown.out
    one = moefit("traffic", mini_pack.path, "--json").json
    assert one["out"] is None
    assert one["sources"][0] | {"tenth": 0} == {
        **{"source": "moefit examples", "tokens": own.tokens, "tenth": 0, "unused": 0},
    }
    other = moefit("traffic", mini_pack.path / TRAFFIC, "--json").json
    assert other == one | {"files": other["files"]}
    table = tmp_path / "copy.safetensors"
    assert moefit("traffic", mini_pack.path, "--out", table).code == 0
    assert table.read_bytes() == (mini_pack.path / TRAFFIC).read_bytes()
    capture = w.json_lines(tmp_path / "a.jsonl", w.vllm_answer(w.random_ids(MoeShape.read(mini_pack.path), 9), 4))
    assert "does not say which model it is of" in moefit("traffic", capture).refusal()
    both = moefit("traffic", capture, mini_pack.path, "--json").json
    assert both["tokens"] == own.tokens + 9
    assert both["phase_tokens"] == {"prefill": own.tokens + 4, "decode": 5}
    assert "(others)" in moefit("traffic", capture, mini_pack.path).out


def test_a_pack_without_a_table_of_its_own(moefit: Moefit, mini_pack: Built, tmp_path: Path) -> None:
    """Lost, not there yet, or another model's: neither shown nor planned for."""
    pack = mini_pack.copy(tmp_path)
    machine = ("--gpu", "8MB", "--host", "64MB", "--out", tmp_path / "plan.json")
    other = TrafficTable(np.array([[3, 1], [2, 2]]), 4, (0, 1), 1)
    other.save(pack / TRAFFIC)
    assert "the traffic is not of this pack's model" in moefit("plan", pack, *machine).refusal()
    (pack / TRAFFIC).unlink()
    assert "has lost its traffic table" in moefit("traffic", pack).refusal()
    unfinished = tmp_path / "other.partial"
    unfinished.mkdir()
    (unfinished / "identity.json").write_text("{}")
    assert "not finished" in moefit("traffic", unfinished).refusal()


def test_coverage(moefit: Moefit, mini_pack: Built, tmp_path: Path) -> None:
    shown, drawn = moefit("coverage", mini_pack.path), tmp_path / "coverage.svg"
    assert (shown.code, shown.err) == (0, "")
    written = json.loads((mini_pack.path / "calibration/coverage.json").read_bytes())
    assert moefit("coverage", mini_pack.path, "--json", "--picture", drawn).json == written
    assert drawn.read_bytes() == (mini_pack.path / "calibration/coverage.svg").read_bytes()
    lines = shown.out.splitlines()
    assert lines[1] == "below the floor of 1,400 tokens: 6 of 6 experts, 0 unreached"
    assert lines[2] == "last rung needed: natural 0, adjacent 6, prior 0, identity 0"
    assert [line.split()[0] for line in lines[5:9]] == ["all", "layer", "layer", "layer"]
    whole = written["overall"]
    numbers = [whole[key] for key in ("min", "p1", "p5", "p50", "p95", "max", "unreached")] + [6, 0, 6, 0, 0]
    assert lines[5].split()[1:] == [f"{number:,}" for number in numbers]
    assert any(line.split()[0] == "prefill" for line in lines if line)
    for target, part in (
        (tmp_path / "coverage.png", "ends in .svg"),
        (mini_pack.path / "more.svg", "written into the pack"),
    ):
        assert part in moefit("coverage", mini_pack.path, "--picture", target).refusal()
    assert "neither a pack" in moefit("coverage", tmp_path).refusal()

"""`moefit traffic` and `moefit plan --traffic`, run in this process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from moefit.packs.plan import TRAFFIC
from moefit.packs.routing import pack_recorded
from moefit.placement import Plan, TrafficTable
from moefit.placement.captures import MoeShape
from moefit.placement.recorded import load_recorded
from moefit.placement.recorded import table as recorded_table

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


def test_routing_is_kept_with_the_table(moefit: Moefit, model: Path, tmp_path: Path) -> None:
    answers = [w.vllm_answer(w.random_ids(SHAPE, 30, seed), 9) for seed in range(12)]
    capture, out = w.json_lines(tmp_path / "a.jsonl", *answers), tmp_path / "t"
    done = moefit("traffic", capture, "--model", model, "--out", out)
    assert "recorded      360 tokens of 12 conversations, kept for plans" in done.out
    windows = next(line for line in done.out.splitlines() if line.startswith("windows"))
    assert windows.startswith(
        "windows       distinct experts per activation in steps of so many tokens: 1: 100.0%, 2: "
    )
    found = load_recorded(out)
    assert found is not None
    assert found.conversations == 12
    table = TrafficTable.load(out)
    assert recorded_table(found) == table
    made = moefit("traffic", out, "--json").json
    for size, shown in zip(range(1, 9), made["windows"], strict=True):
        counted = table.windows[size]
        assert (shown["size"], shown["steps"]) == (size, counted.steps)
        assert shown["distinct"] == pytest.approx(counted.hits.sum() / counted.tokens.sum())
        assert shown["distinct"] <= 1
    assert made["windows"][0]["independent"] == pytest.approx(1)
    assert made["recorded"] is None  # nothing is written
    assert moefit("traffic", capture, "--model", model, "--out", out, "--keep-tokens", 250).code == 0
    part = load_recorded(out)
    assert part is not None
    assert part.tokens == 240
    assert TrafficTable.load(out) == table
    assert moefit("traffic", capture, "--model", model, "--out", out, "--keep-tokens", 0).code == 0
    assert load_recorded(out) is None
    assert "Invalid value" in moefit("traffic", capture, "--keep-tokens", "-1").err


def test_drift_from_another_log(moefit: Moefit, model: Path, tmp_path: Path) -> None:
    def skewed(seed: int, order: list[int]) -> dict[str, object]:
        noise = np.random.default_rng(seed).gumbel(size=(60, 4, 8)) + np.linspace(0, 3, 8)
        return w.vllm_answer(np.array(order)[noise.argsort(axis=2)[:, :, -3:]], 9)

    same, turned = list(range(8)), list(range(7, -1, -1))
    files = {
        "old": [skewed(seed, same) for seed in range(12)],
        "same": [skewed(seed, same) for seed in range(20, 32)],
        "new": [skewed(seed, turned) for seed in range(40, 52)],
    }
    for name, answers in files.items():
        w.json_lines(tmp_path / f"{name}.jsonl", *answers)
    old = tmp_path / "old.safetensors"
    assert moefit("traffic", tmp_path / "old.jsonl", "--model", model, "--out", old).code == 0
    words = ("--model", model, "--against", old)
    found = {name: moefit("traffic", tmp_path / f"{name}.jsonl", *words, "--json").json["drift"] for name in files}
    assert found["old"]["variation"] == 0
    assert [found[name]["drifted"] for name in files] == [False, False, True]
    assert found["new"]["compared"] == "decode"
    assert found["new"]["tokens"] == [12 * 51, 12 * 51]
    shown = moefit("traffic", tmp_path / "new.jsonl", *words).out
    assert "drift         of decode tokens, 612 here and 612 there" in shown
    assert found["new"]["verdict"] in shown
    assert "The traffic has drifted" in shown
    alone = moefit("traffic", tmp_path / "same.jsonl", *words, "--keep-tokens", 0, "--json").json["drift"]
    assert alone["by_conversation"]  # the other log's
    assert "not a traffic table" in moefit("traffic", old, "--against", tmp_path / "old.jsonl").refusal()
    other = TrafficTable(np.array([[3, 1], [2, 2]]), 4, (0, 1), 1)
    other.save(tmp_path / "other")
    assert "different models" in moefit("traffic", old, "--against", tmp_path / "other").refusal()


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
    """The pack's own table through `moefit traffic` gives the pack's own placement; other traffic is read too."""
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
        assert moefit("plan", mini_pack.path, *machine, *more, "--out", out, "--hold-out", 0).code == 0
        plans[name] = Plan.load(out)
    assert np.array_equal(plans["pack"].holds, plans["own"].holds)
    assert plans["pack"].value == plans["own"].value
    assert plans["pack"].tokens == plans["own"].tokens == own.tokens
    assert (plans["other"].tokens, plans["other"].top_k) == (50, shape.top_k)

    half = TrafficTable(own.counts[:1], own.tokens, own.layers[:1], own.top_k)
    half.save(tmp_path / "half.safetensors")
    message = moefit(
        "plan", mini_pack.path, *machine, "--traffic", tmp_path / "half.safetensors", "--out", tmp_path / "x", "--quiet"
    ).refusal()
    assert "a traffic table of another model" in message


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
    assert moefit("traffic", mini_pack.path, "--out", table, "--keep-tokens", 0).code == 0
    assert table.read_bytes() == (mini_pack.path / TRAFFIC).read_bytes()
    assert moefit("traffic", mini_pack.path, "--out", table).code == 0
    kept, routing = load_recorded(table), pack_recorded(mini_pack.path)
    assert kept is not None
    assert routing is not None
    assert recorded_table(kept) == recorded_table(routing) == own == TrafficTable.load(table)
    assert np.array_equal(kept.starts, routing.starts)
    drift = moefit("traffic", table, "--against", mini_pack.path, "--json").json["drift"]
    assert (drift["variation"], drift["drifted"]) == (0, False)
    capture = w.json_lines(tmp_path / "a.jsonl", w.vllm_answer(w.random_ids(MoeShape.read(mini_pack.path), 9), 4))
    assert "does not say which model it is of" in moefit("traffic", capture).refusal()
    both = moefit("traffic", capture, mini_pack.path, "--json").json
    assert both["tokens"] == own.tokens + 9
    assert both["phase_tokens"] == {"prefill": own.tokens + 4, "decode": 5}
    assert "(others)" in moefit("traffic", capture, mini_pack.path).out


def test_a_pack_without_a_table_of_its_own(moefit: Moefit, mini_pack: Built, tmp_path: Path) -> None:
    """Lost, not there yet, or another model's: neither shown nor planned for."""
    pack = mini_pack.copy(tmp_path)
    machine = ("--gpu", "8MB", "--host", "64MB", "--out", tmp_path / "plan.json", "--quiet")
    other = TrafficTable(np.array([[3, 1], [2, 2]]), 4, (0, 1), 1)
    other.save(pack / TRAFFIC)
    shutil.rmtree(pack / "calibration" / "routing")
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

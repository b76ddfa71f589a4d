"""`moefit plan` as a user runs it: a checkpoint or pack, real-looking traffic, a plan in use."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moefit.calibrate.checkpoint import Checkpoint
from moefit.packs.sizes import fixed_bytes
from moefit.placement import Gpu, Machine, Plan, Recorded
from moefit.placement.heldout import ORACLE
from moefit.placement.machine_file import machine_toml
from moefit.placement.moves_file import apply_moves, read_moves
from moefit.placement.recorded import table

from .conftest import Moefit

LAYERS, EXPERTS, TOP_K = 6, 32, 4  # of examples/tiny-v41
BOX = ("--gpu", "7.5MB", "--gpu", "7.5MB", "--host", "64MB")


def traffic(path: Path, seed: int, drift: float = 0.0, conversations: int = 20) -> Path:
    """A table with recorded routing: every conversation with its own taste, half of its tokens decoded."""
    rng, other = np.random.default_rng(7), np.random.default_rng(seed)
    common = rng.gumbel(size=(LAYERS, EXPERTS)) * 1.5 + other.normal(size=(LAYERS, EXPERTS)) * drift
    tokens = 40
    taste = np.repeat(other.normal(size=(conversations, LAYERS, EXPERTS)) * 0.5, tokens, axis=0)
    noise = other.gumbel(size=(conversations * tokens, LAYERS, EXPERTS))
    ids = np.argsort(-(common + taste + noise), axis=2)[..., :TOP_K].astype(np.uint16)  # [N, L, k]
    recorded = Recorded(
        [np.ascontiguousarray(ids[:, layer]) for layer in range(LAYERS)],
        tuple(range(LAYERS)),
        EXPERTS,
        np.arange(conversations + 1) * tokens,
        np.tile(np.repeat([0, 1], tokens // 2), conversations),
        np.arange(conversations) % 2,
        ("agent", "chat"),
    )
    table(recorded).save(path, recorded)
    return path


def test_a_checkpoint_is_planned_for_and_scored(moefit: Moefit, tiny_v41: Path, tmp_path: Path) -> None:
    """Before any pack is built: exact bytes, held-out rows against every baseline, each source left out, a report."""
    log, out, page = traffic(tmp_path / "t.safetensors", 1), tmp_path / "plan.json", tmp_path / "plan.html"
    done = moefit("plan", tiny_v41, "--traffic", log, *BOX, "--objective", "decode:4", "-o", out, "--report", page)
    assert done.code == 0
    plan = Plan.load(out)
    assert (plan.card_sizes == 39_180).all() and str(plan.aim) == "decode:4"
    assert plan.gap <= 1e-3 and plan.greedy is not None and plan.value <= plan.greedy
    assert "independently" not in " ".join(plan.steps)  # the log knows real windows
    assert "640 tokens planned for, 160 held out" in done.out
    for name in ("frequency-greedy", "front-loading", "uniform", "random", "EPLB", "global top-k", ORACLE):
        assert f"\n{name} " in done.out
    assert "4 conversations; no interval: 4 conversations" in done.out
    assert "\nagent " in done.out and "\nchat " in done.out
    assert page.read_text().startswith("<!doctype html>") and "decode:4" in page.read_text()
    again = tmp_path / "again.json"
    assert moefit("plan", tiny_v41, "--traffic", log, *BOX, "--objective", "decode:4", "-o", again, "--quiet").code == 0
    assert again.read_bytes() == out.read_bytes()


def test_replan_moves_what_it_may(moefit: Moefit, tiny_v41: Path, tmp_path: Path) -> None:
    """New traffic: a limit of moves is kept, the moves lead from one plan to the other, the verdict is the replay's."""
    old, new = traffic(tmp_path / "old.safetensors", 1), traffic(tmp_path / "new.safetensors", 2, drift=1.0)
    start, out, moves = tmp_path / "plan.json", tmp_path / "new.json", tmp_path / "moves.json"
    assert moefit("plan", tiny_v41, "--traffic", old, *BOX, "-o", start, "--quiet", "--hold-out", 0.5).code == 0
    words = ("plan", tiny_v41, "--traffic", new, "--from", start, "--max-moves", 8, "-o", out, "--moves", moves)
    made = moefit(*words, "--against", old, "--hold-out", 0.5, "--json", "--quiet").json
    before, after = Plan.load(start), Plan.load(out)
    assert 0 < (before.assignment != after.assignment).sum() <= 8
    assert np.array_equal(apply_moves(before, read_moves(moves).moves), after.holds)
    again = made["replan"]
    assert again["value"] == after.value < again["stay"] and 0 < again["stale"] < 1
    values = [point["value"] for point in again["curve"]]
    assert values == sorted(values, reverse=True) and again["curve"][-1]["limit"] is None
    assert all(point["bound"] <= point["value"] for point in again["curve"])
    assert made["drift"]["drifted"] is True
    assert [row["name"] for row in made["held_out"]][:2] == ["this plan", "the plan in use"]
    gain = again["gain"]
    assert gain["verdict"] == (
        "worth it" if gain["saved"]["low"] > 0 and gain["saved"]["value"] > 1e-3 else "not worth it"
    )
    few = moefit(*words[:6], "--max-bytes", "80kB", "-o", out, "--quiet", "--json").json
    assert few["replan"]["moves"] and sum(m["bytes"] for m in few["replan"]["moves"] if not m["parked"]) <= 80_000


def test_only_memory_needs_no_traffic(moefit: Moefit, tiny_v41: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    assert moefit("plan", tiny_v41, *BOX, "--objective", "memory", "-o", out, "--quiet").code == 0
    plan = Plan.load(out)
    room = [budget - fixed for budget, fixed in zip(plan.machine.budgets, plan.fixed, strict=True)]
    assert plan.value == plan.used[-1] == (192 - sum(left // 39_180 for left in room[:-1])) * 39_180
    assert plan.bound == pytest.approx(plan.value, rel=1e-12)


def test_limits_and_sources(moefit: Moefit, tiny_v41: Path, tmp_path: Path) -> None:
    log, out = traffic(tmp_path / "t.safetensors", 1), tmp_path / "plan.json"
    words = ("plan", tiny_v41, "--traffic", log, *BOX, "-o", out, "--quiet")
    limits = ("--pin", "0:0-3=host", "--forbid", "*:7=cards", "--min-per-layer", 15, "--max-per-layer", 25)
    assert moefit(*words, *limits, "--weight", "agent=3", "--weight", "chat=1").code == 0
    plan = Plan.load(out)
    assert plan.holds[0, :4, -1].all() and plan.holds[:, 7, -1].all()
    on_cards = (~plan.holds[..., -1]).sum(axis=1)
    assert ((on_cards >= 15) & (on_cards <= 25)).all()
    assert dict(plan.aim.sources) == {"agent": 3, "chat": 1}
    assert moefit(*words, "--worst-case").code == 0
    assert Plan.load(out).aim.worst


def test_a_machine_file(moefit: Moefit, tiny_v41: Path, tmp_path: Path) -> None:
    box = Machine((Gpu(9_000_000, 500_000), Gpu(8_000_000)), 64_000_000, zero_copy=10**9, shared_root=True)
    file, log, out = tmp_path / "machine.toml", traffic(tmp_path / "t.safetensors", 1), tmp_path / "plan.json"
    file.write_text(machine_toml(box))
    words = ("plan", tiny_v41, "--traffic", log, "--machine", file, "-o", out, "--quiet")
    assert moefit(*words).code == 0
    assert Plan.load(out).machine == box
    assert "given twice" in moefit(*words, "--gpu", "8MB").refusal()
    assert "cannot be cut into 2 slices" in moefit(*words, "--mode", "tp").refusal()
    assert moefit("inspect", tiny_v41, "--machine", file, "--json").json["fit"]["fits"] is True


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--moves", "m.json"), "--moves would change nothing without --from"),
        (("--max-moves", "3"), "--max-moves would change nothing without --from"),
        (("--objective", "speed"), "not an objective"),
        (("--objective", "decode:9"), "decode:W (W = 1..8)"),
        (("--weight", "agent"), "not a weight of a source"),
        (("--weight", "nobody=1"), "no such source"),
        (("--pin", "0:99=gpu0"), "beyond the model's"),
        (("--pin", "0:1=gpu7"), "names no place"),
        (("--pin", "0:1=gpu0", "--forbid", "0:1=cards"), "may lie nowhere"),
        (("--min-per-layer", "40"), "out of range"),
        (("--from", "nothing.json"), "nothing.json"),
        (("--traffic", "nothing"), "nothing"),
        (("--against", "nothing"), "nothing"),
    ],
)
def test_bad_input_is_one_sentence(
    moefit: Moefit, tiny_v41: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    log = traffic(tmp_path / "t.safetensors", 1, conversations=6)
    box = () if "--from" in more else BOX
    given = () if "--traffic" in more else ("--traffic", log)
    assert says in moefit("plan", tiny_v41, *given, *box, *more, "-o", "plan.json", "--quiet").refusal()
    assert not Path("plan.json").exists()


def test_a_plan_of_something_else_is_not_moved_from(moefit: Moefit, tiny_v41: Path, tmp_path: Path) -> None:
    """Another recipe's sizes, another machine, a plan with replicas."""
    log, start, out = traffic(tmp_path / "t.safetensors", 1), tmp_path / "plan.json", tmp_path / "new.json"
    assert moefit("plan", tiny_v41, "--traffic", log, *BOX, "-o", start, "--quiet").code == 0
    words = ("plan", tiny_v41, "--traffic", log, "--from", start, "-o", out, "--quiet")
    assert "of another pack" in moefit(*words, "--bits", 2).refusal()
    assert "of another machine" in moefit(*words, "--gpu", "9MB").refusal()
    assert "replicas" in moefit(*words, "--replicas").refusal()
    changed = json.loads(start.read_text())
    changed["version"] = 1
    start.write_text(json.dumps(changed))
    assert "again" in moefit(*words).refusal()
    assert not out.exists()


def test_what_does_not_fit_says_by_how_much(moefit: Moefit, tiny_v41: Path, tmp_path: Path) -> None:
    log = traffic(tmp_path / "t.safetensors", 1)
    engram = fixed_bytes(Checkpoint.open(tiny_v41), Machine((Gpu(0),), 0))[-1]
    host = engram + 50 * 39_180 - 1
    words = ("plan", tiny_v41, "--traffic", log, "-o", tmp_path / "plan.json", "--quiet", "--host", host)
    message = moefit(*words, "--gpu", "7MB", "--gpu", "6MB").refusal()
    for part in ("do not fit: ", " B too many", "--host", "--gpu", "reserve less", "use fewer bits", "% of their size"):
        assert part in message
    assert "overflow gpu0 by" in moefit(*words, "--gpu", "1MB").refusal()


def test_no_result_takes_the_place_of_another_file(moefit: Moefit, tiny_v41: Path, tmp_path: Path) -> None:
    """Not of an input, not of another result, not of a file in some pack."""
    log, out = traffic(tmp_path / "t.safetensors", 1, conversations=6), tmp_path / "plan.json"
    words, before = ("plan", tiny_v41, "--traffic", log, *BOX, "--quiet"), log.read_bytes()
    assert "would replace an input" in moefit(*words, "-o", log).refusal()
    assert "would replace another result" in moefit(*words, "-o", out, "--report", out).refusal()
    assert log.read_bytes() == before and not out.exists()
    assert moefit(*words, "-o", out).code == 0
    again = ("plan", tiny_v41, "--traffic", log, "--from", out, "--quiet")
    assert "would replace an input" in moefit(*again, "-o", out).refusal()
    assert "would replace another result" in moefit(*again, "-o", f"{out}2", "--moves", f"{out}2").refusal()
    assert (
        "would replace an input"
        in moefit(*("export", out, "--format", "llama.cpp", "--traffic", log, "-o", log)).refusal()
    )
    pack = tmp_path / "pack"
    pack.mkdir()
    (pack / "moefit.json").write_text("{}")
    assert "into the pack" in moefit("traffic", log, "--model", tiny_v41, "-o", pack / "t.safetensors").refusal()
    assert "into the pack" in moefit(*words, "-o", pack / "new.json").refusal()


def test_limits_that_cannot_hold_say_by_how_many_bytes(moefit: Moefit, tiny_v41: Path, tmp_path: Path) -> None:
    log, out = traffic(tmp_path / "t.safetensors", 1, conversations=6), tmp_path / "plan.json"
    words = ("plan", tiny_v41, "--traffic", log, *BOX, "--quiet", "-o", out)
    fixed = fixed_bytes(Checkpoint.open(tiny_v41), Machine.from_flags(["7.5MB", "7.5MB"], "64MB"))
    room = 2 * ((7_500_000 - fixed[0]) // 39_180)
    for limit, experts in (
        (("--forbid", "*:*=host"), 192),
        (("--min-per-layer", 30), 180),
        (("--pin", "*:0-27=cards"), 168),
    ):
        message = moefit(*words, *limit).refusal()
        assert f"put {(experts - room) * 39_180:,} B more on the cards than fit there" in message
    small = 2 * 39_180 + fixed[-1]
    many = ("plan", tiny_v41, "--traffic", log, "--gpu", "30MB", "--host", small, "--quiet", "-o", out)
    assert f"put {(6 * 12 - 2) * 39_180:,} B more on the host" in moefit(*many, "--max-per-layer", 20).refusal()

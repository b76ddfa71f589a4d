"""What the commands print, to which stream, with which exit code."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moefit import __version__
from moefit.fidelity import read_receipt
from moefit.packs.manifest import read_manifest
from moefit.placement import Plan

from ..packs.damage import flip
from ..small_model import CLI, Built, Inputs, digests, head
from .conftest import Moefit

MACHINE = ["--gpu", "12MB", "--host", "16MB"]


def build_words(inputs: Inputs, out: Path, *more: object) -> list[object]:
    return ["build", inputs.model, "--traces", inputs.traces, "--out", out, "--window", 128, *MACHINE, *more]


# build


def test_results_are_not_written_into_the_pack(moefit: Moefit, mini_pack: Built) -> None:
    before = digests(mini_pack.path)
    for words in (["plan", mini_pack.path, "--out", mini_pack.path / "plan.json"],):
        assert "written into the pack" in moefit(*words).refusal()
    assert digests(mini_pack.path) == before


def test_build_prints_json_on_stdout_and_progress_on_stderr(mini: Inputs, tmp_path: Path, moefit: Moefit) -> None:
    """A limit that no pack keeps: exit code 1, and the pack is there all the same, with its verdict."""
    out = tmp_path / "pack"
    words = build_words(mini, out, "--eval", mini.held_out, "--max-kl", "1e-6", "--threads", 2, "--json")
    first = moefit(*words)
    assert first.code == 1
    value = first.json
    assert value["fidelity"]["outcome"] == "fail"
    assert value["already_built"] is False
    assert value["seconds"].keys() == {"inspect", "calibrate", "quantize", "write", "plan", "gate", "hash"}
    manifest = read_manifest(out)
    del manifest["files"]
    assert {key: value[key] for key in manifest} == manifest
    for stage in (
        "check values",
        "hash source",
        "forward, keeping every border",
        "backward",
        "quantize",
        "gate",
        "hash",
    ):
        assert f"{stage}: " in first.err

    before = digests(tmp_path)
    again = moefit(*words)
    assert again.code == 1
    assert again.json["already_built"] is True
    assert [line.split(":")[0] for line in again.err.splitlines()] == ["hash source"]
    text = moefit(*words[:-1])
    assert "already built; nothing was touched" in text.out
    assert digests(tmp_path) == before


def test_build_holds_out_traffic_where_there_is_no_eval(
    mini: Inputs, tiny_v41: Path, tmp_path: Path, moefit: Moefit
) -> None:
    """One held-out document decides nothing: exit code 3."""
    traces = head(tiny_v41.parent / "traffic.jsonl", tmp_path / "traffic.jsonl", 5, 1500)
    inputs = Inputs(mini.model, traces, mini.held_out)
    done = moefit(*build_words(inputs, tmp_path / "pack", "--bits", 2, "--quiet"))
    assert (done.code, done.err) == (3, "")
    manifest = read_manifest(tmp_path / "pack")
    assert manifest["recipe"]["hold_out"] == 5
    assert manifest["calibration"]["documents"] == 4
    assert [corpus["documents"] for corpus in manifest["fidelity"]["corpora"].values()] == [1]
    lines = done.out.splitlines()
    assert len(lines) <= 20  # one screen
    assert max(map(len, lines)) <= 160
    for words in (
        *("pack  ", "K=2", "bits/weight with scales", "4 documents", "coverage", "unreached", "proxy error"),
        *("plan  ", "µs per step, proven bound", "KL, nats/token", "gate          inconclusive", "time  "),
    ):
        assert words in done.out, words


def test_dry_run_writes_nothing(mini: Inputs, tmp_path: Path, moefit: Moefit) -> None:
    words = build_words(mini, tmp_path / "pack", "--eval", mini.held_out, "--dry-run")
    before = digests(mini.model.parent)
    done = moefit(*words)
    assert (done.code, done.err) == (0, "")
    assert "would begin" in done.out
    value = moefit(*words, "--json").json
    assert value["state"] == "would begin"
    assert (value["documents"], value["windows"], value["tokens"]) == (2, 9, 1027)
    assert 0 < value["disk"] < value["disk_free"]
    assert 0 < value["memory"] < value["memory_free"]
    assert list(tmp_path.iterdir()) == []
    assert digests(mini.model.parent) == before


def test_output_below_the_working_directory(
    mini: Inputs, tmp_path: Path, moefit: Moefit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative --out, "." among them (the working directory itself, where it is empty)."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for out in (".", "pack", "../empty"):
        done = moefit(*build_words(mini, Path(out), "--eval", mini.held_out, "--dry-run", "--json"))
        assert done.code == 0
        assert done.json["out"] == str((tmp_path / "empty" / out).resolve())


@pytest.mark.slow
def test_interrupted_from_the_keyboard(mini: Inputs, tmp_path: Path) -> None:
    command = CLI + [str(word) for word in build_words(mini, tmp_path / "pack", "--eval", mini.held_out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while "forward" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "moefit: interrupted; run the same command again to go on."
    assert "Traceback" not in err


# inspect


def test_inspect(mini: Inputs, moefit: Moefit) -> None:
    done = moefit("inspect", mini.model, "--gpu", "12MB", "--host", "16MB", "--values", "--quiet")
    assert (done.code, done.err) == (0, "")
    for words in (
        *("DeepseekV41ForCausalLM, 3 layers x 2 experts (top-1)", "routed experts", "drafter", "engram tables"),
        *("K=3 mul1 pack: 39,180 B per expert, 235,080 B for 6 experts", "gpu0", "host", "fits: room for"),
        "all finite",
    ):
        assert words in done.out, words
    value = moefit("inspect", mini.model, "--json").json
    assert value["pack"]["routed_bytes"] == 235_080
    assert value["fit"] is None


# verify


def test_verify(mini_pack: Built, tmp_path: Path, moefit: Moefit) -> None:
    sound = moefit("verify", mini_pack.path)
    assert sound.code == 0
    assert sound.out == f"{mini_pack.path} is whole: {len(mini_pack.manifest['files'])} files, 6 experts decoded.\n"
    assert "decode: 6 experts" in sound.err
    quick = moefit("verify", mini_pack.path, "--quick")
    assert quick.code == 0
    assert quick.err == ""

    pack = mini_pack.copy(tmp_path)
    flip(pack / "tokenizer.json", 200)
    (pack / "notes").write_text("x")
    bad = moefit("verify", pack, "--json", "--quiet")
    assert (bad.code, bad.err) == (1, "")
    assert [
        str(pack / name) in problem
        for name, problem in zip(("notes", "tokenizer.json"), bad.json["problems"], strict=True)
    ] == [True, True]
    text = moefit("verify", pack, "--quiet")
    assert text.code == 1
    assert text.out.splitlines() == bad.json["problems"]
    (pack / "moefit.json").unlink()
    assert "no manifest" in moefit("verify", pack).refusal()


# gate


@pytest.mark.parametrize(("limit", "code", "outcome"), [("5", 0, "pass"), ("0.001", 1, "fail")])
def test_gate(small_pack: Built, tmp_path: Path, moefit: Moefit, limit: str, code: int, outcome: str) -> None:
    before = digests(small_pack.path)
    words = ["gate", small_pack.path, "--reference", small_pack.inputs.model, "--eval", small_pack.inputs.held_out]
    done = moefit(*words, "--max-kl", limit, "--receipt", tmp_path / "receipt.json", "--json")
    assert done.code == code
    assert done.json["outcome"] == outcome
    assert done.json["corpora"] == {
        name: corpus | {"outcome": outcome} for name, corpus in small_pack.manifest["fidelity"]["corpora"].items()
    }
    assert "gate: " in done.err
    assert read_receipt(tmp_path / "receipt.json").verdict.outcome == outcome
    assert digests(small_pack.path) == before


def test_gate_with_few_documents_is_inconclusive(mini_pack: Built, moefit: Moefit) -> None:
    inputs = mini_pack.inputs
    done = moefit(
        "gate", mini_pack.path, "--reference", inputs.model, "--eval", inputs.held_out, "--max-kl", 5, "--quiet"
    )
    assert (done.code, done.err) == (3, "")
    assert "gate          inconclusive" in done.out


# plan, report


def test_plan_for_another_machine(mini_pack: Built, tmp_path: Path, moefit: Moefit) -> None:
    before = digests(mini_pack.path)
    out = tmp_path / "plan.json"
    done = moefit("plan", mini_pack.path, "--out", out, "--gpu", "7.8MB", "--host", "16MB", "--quiet")
    assert (done.code, done.err) == (0, "")
    plan = Plan.load(out)
    assert plan.machine.budgets == (7_800_000, 16_000_000)
    assert f"written to {out}" in done.out
    value = moefit("plan", mini_pack.path, "--out", out, "--gpu", "12MB", "--host", "16MB", "--json").json
    assert value["experts"] == {"gpu0": 6, "host": 0}
    assert digests(mini_pack.path) == before


def test_report(mini_pack: Built, small_pack: Built, moefit: Moefit) -> None:
    done = moefit("report", small_pack.path)
    assert done.code == 0
    assert "gate          pass" in done.out
    assert moefit("report", mini_pack.path).code == 3
    value: dict[str, Any] = moefit("report", mini_pack.path, "--json").json
    assert value == {key: item for key, item in mini_pack.manifest.items() if key != "files"}


# the command itself


def test_version_and_help(moefit: Moefit) -> None:
    assert moefit("--version").out == f"moefit {__version__}\n"
    done = moefit("--help")
    assert done.code == 0
    for name in ("traces", "inspect", "build", "verify", "plan", "gate", "report"):
        assert name in done.out
        assert moefit(name, "--help").code == 0


@pytest.mark.parametrize(
    "words",
    [
        ["build"],
        ["bulid"],
        ["inspect", "m", "--bits", "three"],
        ["verify", "p", "--threads", "-1"],
        ["gate", "p", "--reference", "m"],
        ["inspect", "m", "--no-such-option"],
    ],
)
def test_usage_errors(moefit: Moefit, words: list[str]) -> None:
    done = moefit(*words)
    assert (done.code, done.out) == (2, "")
    assert "Traceback" not in done.err


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from moefit.cli.main import main
    from moefit.errors import MoefitError

    monkeypatch.setattr("sys.argv", ["moefit", "--debug", "verify", str(tmp_path)])
    with pytest.raises(MoefitError, match="no manifest"):
        main()


def test_json_is_json_for_every_command(mini_pack: Built, moefit: Moefit, tmp_path: Path) -> None:
    inputs, pack = mini_pack.inputs, mini_pack.path
    for words in (
        ["inspect", inputs.model],
        ["verify", pack, "--quick"],
        ["report", pack],
        ["plan", pack, "--out", tmp_path / "plan.json", *MACHINE],
    ):
        text = moefit(*words, "--json").out
        assert isinstance(json.loads(text, parse_constant=pytest.fail), dict)


def test_the_command_line_starts_without_the_solver() -> None:
    """Help and the version are there at once: numpy, scipy and torch come with the commands that need them."""
    script = "import sys, moefit.cli.main; print(sorted({'numpy', 'scipy', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

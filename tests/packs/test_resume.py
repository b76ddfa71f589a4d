"""Killed at any moment and started again, a build ends in the same bytes; anything else that has changed is refused.

Every commit point is covered twice, deterministically: a build is stopped before and after each new file takes its
place. The slow part kills the real command at random moments.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moefit.calibrate.checkpoint import Checkpoint
from moefit.calibrate.passes import LayerTraffic
from moefit.errors import MoefitError, PackError
from moefit.files import write_json
from moefit.packs import work as work_module
from moefit.packs.build import EXPERTS, build, prepare
from moefit.packs.work import Work, differences
from moefit.placement import Machine

from ..small_model import CLI, RECIPE, Built, Inputs, digests

build_module = importlib.import_module("moefit.packs.build")  # the package has a function of that name


class Killed(BaseException):
    """Stands for kill -9: nothing in the build may catch it."""


@contextmanager
def killed_at_next_commit(monkeypatch: pytest.MonkeyPatch, after: bool, when: str = "") -> Iterator[list[str]]:
    """Raise Killed at the first rename that makes a new file (whose path contains `when`), before or after it.

    Yields the names of such files, filled when it happens.
    """
    hit: list[str] = []

    def wrap(rename: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
        def renamed(path: Path, target: Path) -> Path:
            if hit or target.exists() or when not in str(target):
                return rename(path, target)
            hit.append(target.name)
            if after:
                rename(path, target)
            raise Killed

        return renamed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", wrap(Path.replace))
        patch.setattr(Path, "rename", wrap(Path.rename))
        yield hit


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_stopped_before_and_after_every_commit(
    mini_pack: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "pack"
    prepared = prepare(mini_pack.inputs.request(out, threads=1))
    committed, stops, most = [], 0, 0
    while True:
        after = stops % 2 == 1
        with killed_at_next_commit(monkeypatch, after) as hit:
            try:
                result = build(prepared)
                break
            except Killed:
                stops += 1
                committed += hit if after else []
                most = max(most, size_of(tmp_path))
    assert result.resumed
    assert digests(out) == digests(mini_pack.path)
    assert [path.name for path in tmp_path.iterdir()] == ["pack"]
    shards = Checkpoint.open(out).shards
    experts = [f"expert-{layer:03d}-{expert:04d}.safetensors" for layer in range(3) for expert in range(2)]
    layers = [f"{name}-00{n}.{kind}" for n in range(3) for name, kind in (
        ("traffic", "safetensors"), ("layer", "json"), ("layer", "safetensors"))]  # fmt: skip
    assert {
        *(
            "identity.json",
            "source.json",
            "borders.json",
            "backward.json",
            "done.json",
            "config.json",
        ),
        *("model.safetensors.index.json", "tokenizer.json", "encoding.py", "experts.json", "traffic.safetensors"),
        *("plan.json", "fidelity.json", "moefit.json", "pack", "coverage.json", "coverage.svg", "tokens.safetensors"),
        *shards,
        *experts,
        *layers,
        *(f"{kind}-00{n}-00000.safetensors" for kind in ("inputs", "outputs", "output-gradients") for n in range(3)),
        *(f"{kind}-00{n}-00000.safetensors" for kind in ("states", "gradients") for n in (1, 2, 3)),
    } <= set(committed)
    assert stops == 2 * len(committed)
    assert most < prepared.needs.disk  # the estimate holds at the worst moment, temporary files included


def test_resuming_does_not_repeat_finished_experts(
    mini_pack: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepare(mini_pack.inputs.request(tmp_path / "pack", gate=False, threads=1))
    with killed_at_next_commit(monkeypatch, True, "expert-001-0001"), pytest.raises(Killed):
        build(prepared)
    done: list[tuple[int, int]] = []
    original = build_module.quantize_two_sided

    def counting(traffic: LayerTraffic, experts: range, *rest: Any) -> Any:
        done.extend((traffic.layer.index, expert) for expert in experts)
        return original(traffic, experts, *rest)

    monkeypatch.setattr(build_module, "quantize_two_sided", counting)
    build(prepared)
    assert done == [(2, 0), (2, 1)]


@pytest.fixture(scope="module")
def interrupted(mini: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `model`, traffic, held-out text, and a build to `pack` that stopped within layer 1."""
    folder = tmp_path_factory.mktemp("interrupted")
    inputs = mini.copy(folder)
    with (
        pytest.MonkeyPatch.context() as patch,
        killed_at_next_commit(patch, True, "expert-001-0000"),
        pytest.raises(Killed),
    ):
        inputs.build(folder / "pack", gate=False, threads=1)
    return folder


@pytest.fixture
def begun(interrupted: Path, mini: Inputs, tmp_path: Path) -> Inputs:
    """`interrupted` in a directory of its own; resume it with `out=begun.model.parent / "pack"`."""
    folder = Path(shutil.copytree(interrupted, tmp_path / "begun"))  # keeps modification times
    return Inputs(folder / "model", folder / mini.traces.name, folder / mini.held_out.name)


def refused(inputs: Inputs, **changes: Any) -> str:
    out = inputs.model.parent / "pack"
    before = digests(Work(out).root)
    with pytest.raises(PackError, match="an unfinished build of something else is in the way") as error:
        inputs.build(out, gate=False, **changes)
    assert "remove that directory to begin anew" in str(error.value)
    assert digests(Work(out).root) == before
    return str(error.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("bits", 2.0, "recipe.bits: 3.0 -> 2.0"),
        ("codebook", "mcg", "recipe.codebook: mul1 -> mcg"),
        ("seed", 7, "recipe.seed: 0 -> 7"),
        ("damping", 0.1, "recipe.damping: 0.05 -> 0.1"),
        ("shrinkage", 10.0, "recipe.shrinkage: 1000.0 -> 10.0"),
        ("enough_tokens", 50, "recipe.enough_tokens: 1400 -> 50"),
        ("window", 64, "recipe.window: 128 -> 64"),
    ],
)
def test_changed_recipe_is_named(begun: Inputs, field: str, value: Any, message: str) -> None:
    assert message in refused(begun, recipe=replace(RECIPE, **{field: value}))


def test_a_build_begun_before_a_recipe_had_a_field_is_refused(begun: Inputs) -> None:
    path = Work(begun.model.parent / "pack").root / "identity.json"
    identity = json.loads(path.read_bytes())
    del identity["recipe"]["enough_tokens"]
    write_json(path, identity)
    assert "recipe.enough_tokens: None -> 1400" in refused(begun)


def test_changed_traces_are_named(begun: Inputs) -> None:
    with begun.traces.open("a") as file:
        file.write('{"text": "one more document"}\n')
    message = refused(begun)
    assert "traces.bytes: " in message
    assert "traces.sha256: " in message


def test_changed_config_and_tokenizer_are_named(begun: Inputs) -> None:
    config = begun.model / "config.json"
    config.write_text(config.read_text() + "\n")
    assert "source.config: " in refused(begun)


def test_changed_tokenizer_is_named(begun: Inputs) -> None:
    """Other tokens would be calibrated on from here on, and another file be copied into the pack."""
    path = begun.model / "tokenizer.json"
    path.write_text(path.read_text() + "\n")
    assert "companions.tokenizer.json: " in refused(begun)


def test_another_version_of_moefit_is_named(begun: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "__version__", "9.9")
    assert "moefit: 0.1.0 -> 9.9" in refused(begun)


@pytest.mark.parametrize("offset", [0, 70_000, -1])
def test_one_changed_byte_of_the_source_is_named(begun: Inputs, offset: int) -> None:
    """Also one that the quick identity, which samples 64 KiB here and there, does not see."""
    shard = "model-00003-of-00019.safetensors"
    data = bytearray((begun.model / shard).read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    data[header + offset if offset >= 0 else offset] ^= 1
    (begun.model / shard).write_bytes(data)
    assert f"source.shards.{shard}" in refused(begun)


def test_another_gate_or_machine_goes_on(begun: Inputs) -> None:
    """Neither decides a weight. And an empty output directory is as good as none."""
    out = begun.model.parent / "pack"
    out.mkdir()
    result = begun.build(out, gate=False, machine=Machine.from_flags(["9MB"], "9MB"))
    assert result.resumed
    assert result.manifest["plan"]["experts"].keys() == {"gpu0", "host"}
    assert (out / "moefit.json").is_file()


def test_a_copied_source_goes_on_and_leftover_temporary_files_are_not_published(
    begun: Inputs, mini_pack: Built
) -> None:
    """Copied: the same bytes with other times."""
    for path in begun.model.glob("*.safetensors"):
        os.utime(path, (1, 1))
    work = Work(begun.model.parent / "pack")
    for folder in (work.root, work.folder, work.pack, work.pack / "calibration"):
        folder.mkdir(exist_ok=True)
        (folder / "moefit.json.tmp").write_bytes(b"half")
        (folder / "model-00003-of-00019.safetensors.tmp").write_bytes(b"")
    begun.build(work.out)
    assert digests(work.out) == digests(mini_pack.path)
    assert not work.root.exists()


def test_dry_run_of_a_begun_build(begun: Inputs) -> None:
    out = begun.model.parent / "pack"
    before = digests(begun.model.parent)
    assert prepare(begun.request(out, gate=False)).summary()["state"] == "would resume: 1 of 3 layers done"
    with pytest.raises(PackError, match=r"recipe\.bits: 3\.0 -> 2\.0"):
        prepare(begun.request(out, gate=False, recipe=replace(RECIPE, bits=2.0)))
    assert digests(begun.model.parent) == before


def test_a_damaged_expert_is_named(begun: Inputs) -> None:
    out = begun.model.parent / "pack"
    path = Work(out).expert(1, 0).path
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(PackError, match=r"finished expert's file is damaged \[.*expert-001-0000.*Remove it"):
        begun.build(out, gate=False)


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_ino) for path in [folder, *folder.rglob("*")]}


def test_a_finished_build_is_left_alone(mini_pack: Built, tmp_path: Path) -> None:
    pack = mini_pack.copy(tmp_path)
    leftover = Work(pack)
    leftover.folder.mkdir(parents=True)  # of a run killed between publishing and cleaning up
    (leftover.folder / "expert-000-0000.safetensors").write_bytes(b"x")
    (leftover.root / "identity.json").write_text("{}")
    before = stamps(pack)
    prepared = prepare(mini_pack.inputs.request(pack))
    assert prepared.summary()["state"] == "already built"
    assert leftover.root.exists()
    result = build(prepared)
    assert result.already
    assert result.manifest == mini_pack.manifest
    assert result.seconds == {}
    assert stamps(pack) == before
    assert not leftover.root.exists()


def test_a_directory_that_is_not_ours_is_never_touched(mini_pack: Built, tmp_path: Path) -> None:
    mine = tmp_path / "new.partial" / "keep" / "notes.tmp"
    mine.parent.mkdir(parents=True)
    mine.write_text("precious")
    with pytest.raises(PackError, match="not moefit's"):
        prepare(mini_pack.inputs.request(tmp_path / "new"))
    pack = mini_pack.copy(tmp_path)
    other = Work(pack).root / "mine.txt"
    other.parent.mkdir()
    other.write_text("precious")
    assert build(prepare(mini_pack.inputs.request(pack))).already
    assert mine.read_text() == other.read_text() == "precious"


def test_a_finished_pack_of_a_source_that_changed_unseen_is_refused(mini_pack: Built, tmp_path: Path) -> None:
    """Outside the samples of `source_identity`, and with the same size."""
    pack = mini_pack.copy(tmp_path)
    inputs = mini_pack.inputs.copy(tmp_path)
    assert build(prepare(inputs.request(pack))).already
    shard = max(inputs.model.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    with shard.open("r+b") as file:
        file.seek(shard.stat().st_size * 3 // 8)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(PackError, match="another source|another recipe, source"):
        build(prepare(inputs.request(pack)))


def test_a_finished_build_of_something_else_is_not_overwritten(mini_pack: Built, tmp_path: Path) -> None:
    pack = mini_pack.copy(tmp_path)
    before = stamps(pack)
    for changes in ({"recipe": replace(RECIPE, seed=1)}, {"gate": False}):
        with pytest.raises(PackError, match="not empty.*finished pack of another recipe, source, machine or gate"):
            mini_pack.inputs.build(pack, **changes)  # type: ignore[arg-type]
    assert stamps(pack) == before


def test_two_builds_at_once(begun: Inputs) -> None:
    out = begun.model.parent / "pack"
    prepared = prepare(begun.request(out, gate=False))
    before = digests(Work(out).root)
    message = r"another process is building this pack \[.*pack\.partial\]\. Wait for it"
    with Work(out).open(prepared.identity), pytest.raises(PackError, match=message):
        build(prepared)
    assert digests(Work(out).root) == before


@pytest.mark.parametrize("gone", [True, False])
def test_another_process_finishes_just_before_the_lock(
    mini_pack: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    out = tmp_path / "pack"
    prepared = prepare(mini_pack.inputs.request(out))
    flock = work_module.fcntl.flock

    def late(handle: int, how: int) -> None:
        shutil.copytree(mini_pack.path, out)
        if gone:
            shutil.rmtree(Work(out).root)
        flock(handle, how)

    monkeypatch.setattr(work_module.fcntl, "flock", late)
    with pytest.raises(PackError, match=r"another process has just built this pack.*Run the same command again"):
        build(prepared)
    assert digests(out) == digests(mini_pack.path)
    monkeypatch.undo()
    assert build(prepare(mini_pack.inputs.request(out))).already


# A full disk


@contextmanager
def largest_file(count: int) -> Iterator[None]:
    """No file may grow beyond `count` bytes, as on a disk that fills up while it is written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_files_that_cannot_be_written(mini: Inputs, mini_pack: Built, tmp_path: Path) -> None:
    out = tmp_path / "pack"
    with largest_file(1_000_000), pytest.raises(OSError) as error:  # the embedding's shard has 2 MB
        mini.build(out)
    assert error.value.errno == errno.EFBIG
    assert error.value.filename == str(Work(out).pack / "model-00001-of-00019.safetensors")
    assert not list(tmp_path.rglob("*.tmp"))
    # Now the states between two layers, 4 MB, which go through the safetensors library.
    message = r"cannot be written \[.*states-001.*\].*Free disk space and run the same"
    with largest_file(3_000_000), pytest.raises(MoefitError, match=message):
        mini.build(out)
    assert not list(tmp_path.rglob("*.tmp"))
    mini.build(out)
    assert digests(out) == digests(mini_pack.path)


# Pieces


def test_differences_name_every_leaf() -> None:
    old = {"a": {"b": 1, "c": 2}, "d": [1], "e": "x"}
    assert differences(old, json.loads(json.dumps(old))) == []
    new = {"a": {"b": 1, "c": 3}, "d": [2], "f": None}
    assert differences(old, new) == ["a.c: 2 -> 3", "d: [1] -> [2]", "e: x -> None"]


# Real kills


def started(command: list[str]) -> subprocess.Popen[str]:
    """Run until the first line of progress."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    process.stderr.readline()
    return process


def changed_values(new: Path, old: Path) -> list[str]:
    """What differs in the JSON files of two packs, for the message of a failed test."""
    changed = []
    for name in (EXPERTS, "moefit.json"):
        first, second = (json.loads((folder / name).read_bytes()) for folder in (old, new))
        rows = [dict(enumerate(side)) if isinstance(side, list) else side for side in (first, second)]
        changed += differences(*[json.loads(json.dumps(side)) for side in rows], name)
    return changed


@pytest.mark.slow
def test_kill_9_at_random_moments(mini: Inputs, tmp_path: Path) -> None:
    """At least 20 kills of the real command, over as many builds as it takes; each ends in the same bytes."""
    seed = int(os.environ.get("MOEFIT_KILL_SEED", time.time_ns()))
    print(f"MOEFIT_KILL_SEED={seed}")  # shown when the test fails
    dice = random.Random(seed)

    def command(out: Path) -> list[str]:
        words = ["build", mini.model, "--traces", mini.traces, "--eval", mini.held_out, "--out", out, "--window", 128]
        words += ["--copies", 0]
        return CLI + [str(word) for word in [*words, "--max-kl", 5, "--gpu", "12MB", "--host", "16MB", "--threads", 2]]

    def finish(out: Path) -> float:
        process = started(command(out))
        begin = time.monotonic()
        _, errors = process.communicate()
        assert process.returncode == 3, errors  # two documents are inconclusive
        return time.monotonic() - begin

    seconds = finish(tmp_path / "whole")
    expected = digests(tmp_path / "whole")
    assert {"moefit.json", "fidelity.json"} <= expected.keys()
    kills, builds = 0, 0
    while kills < 20:
        out = tmp_path / f"pack-{builds}"
        builds += 1
        for _ in range(5):
            process = started(command(out))
            try:
                process.wait(dice.uniform(0, seconds / 2))
                break
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.communicate()
                kills += 1
        else:
            finish(out)
        assert digests(out) == expected, f"build {builds}: {changed_values(out, tmp_path / 'whole')}"
        assert not Work(out).root.exists()
        shutil.rmtree(out)

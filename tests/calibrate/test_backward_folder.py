"""The streamed backward's folder: the same bits for any threads and interruptions, refusals, and drawing from it.

On the small checkpoint: six layers, three experts, top-2.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moefit.calibrate import backward as backward_module
from moefit.calibrate.backward import ExpertGradients, backward_layers, resample, sample_targets
from moefit.calibrate.borders import Borders, forward_borders, load_tensors
from moefit.calibrate.deepseek_v41 import V41Model
from moefit.errors import CalibrationError, TraceError
from moefit.tensors import write_tensors

from ..small_model import Inputs, digests
from .test_backward import Gradients, gathered, open_model, random_windows


def assert_same_bits(found: Gradients, expected: Gradients) -> None:
    assert found.keys() == expected.keys()
    for key, piece in expected.items():
        for field in fields(piece):
            ours, theirs = getattr(found[key], field.name), getattr(piece, field.name)
            assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs)), (key, field.name)


@pytest.fixture(scope="module")
def windows() -> list[Tensor]:
    return random_windows((40, 9, 30, 1))


@pytest.fixture(scope="module")
def forward(small: Inputs, windows: list[Tensor], tmp_path_factory: pytest.TempPathFactory) -> Borders:
    """Two groups: the first window, and the others. Tests that write there copy it."""
    return forward_borders(open_model(small.model), windows, tmp_path_factory.mktemp("forward"), 1, group_tokens=45)


@pytest.fixture
def borders(forward: Borders, tmp_path: Path) -> Borders:
    return replace(forward, folder=Path(shutil.copytree(forward.folder, tmp_path / "copy")))


@pytest.fixture(scope="module")
def targets(forward: Borders) -> list[Tensor]:
    return sample_targets(forward, 2, 0, 1)


def test_threads_do_not_show(
    small: Inputs, windows: list[Tensor], borders: Borders, targets: list[Tensor], tmp_path: Path
) -> None:
    other = forward_borders(open_model(small.model), windows, tmp_path / "other", 3, group_tokens=45)
    assert digests(other.folder) == digests(borders.folder)
    for ours, theirs in zip(sample_targets(other, 2, 0, 3), targets, strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(resample(other, 0.7, 3, 3), resample(borders, 0.7, 3, 1), strict=True):
        assert torch.equal(ours, theirs)
    assert_same_bits(gathered(other, targets, 3), gathered(borders, targets, 1))


def test_a_sample_does_not_depend_on_the_others(borders: Borders, targets: list[Tensor], tmp_path: Path) -> None:
    alone = replace(borders, folder=Path(shutil.copytree(borders.folder, tmp_path / "alone")))
    both, second = gathered(borders, targets), gathered(alone, [target[1:] for target in targets])
    for key, piece in second.items():
        for name in ("d_gate", "d_up", "d_down"):
            torch.testing.assert_close(getattr(piece, name)[0], getattr(both[key], name)[1], rtol=1e-3, atol=1e-4)


def test_layers_need_not_be_looked_at(borders: Borders, targets: list[Tensor], tmp_path: Path) -> None:
    """What a caller does not ask for is run all the same."""
    other = replace(borders, folder=Path(shutil.copytree(borders.folder, tmp_path / "other")))
    expected = gathered(borders, targets)
    for layer in backward_layers(other, targets, 1):
        if layer.layer == 4:
            next(layer.experts())
        if layer.layer == 2:
            found = {(2, piece.expert): piece for piece in layer.experts() if piece.expert == 0}
            last = found[2, 0].d_down
            assert torch.equal(last, expected[2, 0].d_down[:, -last.shape[1] :])


# Interruptions


class Killed(BaseException):
    """Stands for kill -9."""


@contextmanager
def killed_at_next_commit(monkeypatch: pytest.MonkeyPatch, after: bool) -> Iterator[list[str]]:
    """Raise Killed at the next rename that makes a new file or goes on in the journal, before or after it.

    Yields the names of such files, filled when it happens.
    """
    hit: list[str] = []
    rename = Path.replace

    def renamed(path: Path, target: Path) -> Path:
        if hit or (target.exists() and target.name != "backward.json"):
            return rename(path, target)
        hit.append(target.name)
        if after:
            rename(path, target)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", renamed)
        yield hit


def all_of_it(model: V41Model, windows: list[Tensor], folder: Path, saved: Gradients) -> None:
    """A caller that saves each layer's gradients when it has them all, and is itself resumed."""
    borders = forward_borders(model, windows, folder, 1, group_tokens=45)
    for layer in backward_layers(borders, sample_targets(borders, 1, 0, 1), 1):
        fresh: dict[tuple[int, int], ExpertGradients] = {}
        for number, piece in enumerate(layer.experts()):
            fresh[layer.layer, 1000 * number + piece.expert] = piece
        saved |= fresh


def test_stopped_before_and_after_every_commit(mini: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, windows = open_model(mini.model), random_windows((40, 9))
    expected: Gradients = {}
    all_of_it(model, windows, tmp_path / "whole", expected)
    found: Gradients = {}
    committed, stops = [], 0
    while True:
        after = stops % 2 == 1
        with killed_at_next_commit(monkeypatch, after) as hit:
            try:
                all_of_it(model, windows, tmp_path / "killed", found)
                break
            except Killed:
                stops += 1
                committed += hit if after else []
    assert_same_bits(found, expected)
    assert digests(tmp_path / "killed") == digests(tmp_path / "whole")
    layers, groups = 3, 2
    forward, backward = (
        3 * layers * groups,
        2 * layers * groups,
    )  # of the gradients, border 0 lacks and the head has one
    assert len(committed) == 1 + forward + backward + (layers + 1)
    assert stops == 2 * len(committed)


SCRIPT = """
import sys, torch
from pathlib import Path
from typing import Any
from moefit.calibrate.backward import backward_layers, sample_targets
from moefit.calibrate.borders import forward_borders
from moefit.calibrate.checkpoint import Checkpoint
from moefit.calibrate.deepseek_v41 import V41Model
from moefit.tensors import write_tensors
windows = list(torch.load(sys.argv[2], weights_only=True))
borders = forward_borders(V41Model(Checkpoint.open(Path(sys.argv[1]))), windows, Path(sys.argv[3]), 2, group_tokens=45)
for layer in backward_layers(borders, sample_targets(borders, 2, 0, 2), 2):
    print(layer.layer, flush=True)
    if layer.layer == 3:
        next(layer.experts())
        sys.stdin.read()
"""


def test_killed_for_real(
    small: Inputs, windows: list[Tensor], borders: Borders, targets: list[Tensor], tmp_path: Path
) -> None:
    """kill -9 amid layer 3: it is handed out again, with the bits of an uninterrupted pass."""
    torch.save(windows, tmp_path / "windows.pt")
    command = [sys.executable, "-c", SCRIPT, small.model, tmp_path / "windows.pt", tmp_path / "folder"]
    process = subprocess.Popen(list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert [process.stdout.readline().strip() for _ in range(3)] == ["5", "4", "3"]
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.communicate()
    resumed = forward_borders(open_model(small.model), windows, tmp_path / "folder", 1, group_tokens=45)
    found, expected = gathered(resumed, targets, 1), gathered(borders, targets, 1)
    assert {layer for layer, _ in found} == {3, 2, 1, 0}
    assert_same_bits(found, {key: piece for key, piece in expected.items() if key[0] <= 3})


def test_a_finished_pass_hands_out_nothing_and_another_may_follow(borders: Borders, targets: list[Tensor]) -> None:
    first = gathered(borders, targets)
    assert not list(borders.folder.glob("gradients-*"))
    assert not gathered(borders, targets)
    other = [target.flip(0) for target in targets]
    second = gathered(borders, other)
    assert second.keys() == first.keys()
    assert_same_bits(gathered(borders, targets), first)


def test_an_unfinished_pass_of_other_targets_is_refused(borders: Borders, targets: list[Tensor]) -> None:
    passing = backward_layers(borders, targets, 1)
    next(passing), next(passing)
    passing.close()
    message = r"other targets is in the way \[.*backward\.json\].*down to layer 5.*remove that file to begin anew"
    with pytest.raises(CalibrationError, match=message):
        gathered(borders, [target.flip(0) for target in targets])
    assert {layer for layer, _ in gathered(borders, targets)} == {4, 3, 2, 1, 0}


def test_a_layer_given_up_is_not_finished(borders: Borders, targets: list[Tensor]) -> None:
    passing = backward_layers(borders, targets, 1)
    next(passing).experts().close()  # type: ignore[attr-defined]
    with pytest.raises(CalibrationError, match=r"given up \[layer 5\]"):
        next(passing)
    assert {layer for layer, _ in gathered(borders, targets)} == {5, 4, 3, 2, 1, 0}


# Bad input


def test_other_windows_checkpoints_and_group_sizes_are_refused(
    small: Inputs, mini: Inputs, windows: list[Tensor], borders: Borders
) -> None:
    before = digests(borders.folder)
    changed = [windows[0].roll(1), *windows[1:]]
    for model, given, size, name in (
        (small.model, changed, 45, "windows"),
        (small.model, windows[:-1], 45, "windows"),
        (mini.model, windows, 45, "source"),
        (small.model, windows, 46, "group_tokens"),
    ):
        with pytest.raises(CalibrationError, match=rf"borders of another forward .*changed since it began: {name}"):
            forward_borders(open_model(model), given, borders.folder, 1, group_tokens=size)
    assert digests(borders.folder) == before


def test_bad_windows_are_refused(small: Inputs, tmp_path: Path) -> None:
    model = open_model(small.model)
    with pytest.raises(CalibrationError, match="no window"):
        forward_borders(model, [], tmp_path / "none", 1)
    with pytest.raises(TraceError, match=r"does not exist in this model \[window 1"):
        forward_borders(model, [torch.tensor([5]), torch.tensor([4096])], tmp_path / "none", 1)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("name", ["states-003-00001", "inputs-004-00000", "outputs-004-00000", "gradients-006-00001"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "other windows"])
def test_damaged_files_are_named(borders: Borders, targets: list[Tensor], name: str, damage: str) -> None:
    passing = backward_layers(borders, targets, 1)
    next(passing)  # the gradients behind the head exist now
    path = borders.folder / f"{name}.safetensors"
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-5])
    else:
        write_tensors(path, {"000077/residual": torch.zeros(1)})
    with pytest.raises(CalibrationError, match=rf"missing or damaged \[.*{name}\.safetensors\]"):
        for _ in passing:
            pass


def test_the_forward_mends_what_is_missing(
    small: Inputs, windows: list[Tensor], borders: Borders, targets: list[Tensor], forward: Borders
) -> None:
    for name in ("states-003-00001", "inputs-004-00000"):
        (borders.folder / f"{name}.safetensors").unlink()
    again = forward_borders(open_model(small.model), windows, borders.folder, 1, group_tokens=45)
    assert digests(again.folder) == digests(forward.folder)


@pytest.mark.parametrize("layer", [6, 4])
def test_a_gradient_that_is_not_finite_is_named(borders: Borders, targets: list[Tensor], layer: int) -> None:
    passing = backward_layers(borders, targets, 1)
    next(passing)
    path = borders.states_file(layer, 1) if layer < 6 else borders.gradients_file(6, 1)
    tensors = load_tensors(path)
    broken = {key: tensor.clone() for key, tensor in tensors.items()}
    broken["000002/residual"].flatten()[0] = torch.nan
    write_tensors(path, broken)
    where = r"layer 5, expert \d, window 2" if layer == 6 else "layer 4, window 2"
    with pytest.raises(CalibrationError, match=rf"not finite \[{where}\]"):
        for _ in passing:
            pass


def test_bad_targets_are_refused(borders: Borders, targets: list[Tensor]) -> None:
    for bad, message in (
        (targets[:-1], "targets of 4 windows, found 3"),
        ([target[:0] for target in targets], "targets of 4 windows"),
        ([targets[0], targets[1][:, 1:], *targets[2:]], r"window 1\]: expected targets \[2, 9\], found \[2, 8\]"),
        ([targets[0][:1], *targets[1:]], r"window 1\]: expected targets \[1, 9\], found \[2, 9\]"),
        ([targets[0].clone().fill_(4096), *targets[1:]], r"window 0\]: expected int64 tokens"),
        ([targets[0].int(), *targets[1:]], r"window 0\]: expected int64 tokens"),
    ):
        with pytest.raises(CalibrationError, match=message):
            gathered(borders, bad)
    with pytest.raises(CalibrationError, match="at least 1 sample, found 0"):
        sample_targets(borders, 0, 0, 1)


# Drawing


def test_targets_follow_the_models_distribution(small: Inputs, tmp_path: Path) -> None:
    model = open_model(small.model)
    borders = forward_borders(model, random_windows((6,)), tmp_path, 1)
    (drawn,) = sample_targets(borders, 1500, 1, 1)  # [S, T]
    p = model.logits(borders.states(6, 0)[0]).softmax(-1)  # [T, V]
    for position in range(6):
        share = torch.bincount(drawn[:, position], minlength=4096) / len(drawn)
        likely = p[position].topk(5).indices
        assert torch.allclose(share[likely], p[position][likely], atol=0.06)
    found = [sample_targets(borders, 2, seed, 1)[0] for seed in (1, 1, 2)]
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_resampled_windows(borders: Borders, windows: list[Tensor]) -> None:
    every = resample(borders, 1.0, 5, 1)
    drawn = backward_module._draw(borders, 1, "resample 5", 1)
    assert all(torch.equal(a[1:], b[0, :-1]) for a, b in zip(every, drawn, strict=True)), (
        "not after the tokens before it"
    )
    some = resample(borders, 0.7, 5, 1)
    for window, all_new, mixed in zip(windows, every, some, strict=True):
        assert window[0] == all_new[0] == mixed[0] and mixed.dtype == torch.int64
        assert ((mixed == window) | (mixed == all_new)).all()
    replaced = sum(int((a != b).sum()) for a, b in zip(windows, some, strict=True))
    assert 0.5 < replaced / sum(len(w) - 1 for w in windows) < 0.85
    assert all(torch.equal(a, b) for a, b in zip(resample(borders, 0.0, 5, 1), windows, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(resample(borders, 0.7, 6, 1), some, strict=True))
    (target, *_) = sample_targets(borders, 1, 5, 1)
    assert not torch.equal(target[0, :-1], every[0][1:])  # the draws of the targets are others
    with pytest.raises(CalibrationError, match="expected 0 to 1, found 1.5"):
        resample(borders, 1.5, 0, 1)


def test_no_image_is_drawn_into_a_window(borders: Borders, monkeypatch: pytest.MonkeyPatch) -> None:
    """However likely the model finds one: the next pass would refuse the window."""
    image, logits = borders.model.config.image_token_id, V41Model.logits

    def keen(*given: Any) -> Tensor:
        found = logits(*given)
        found[:, image] = 1e6
        return found

    monkeypatch.setattr(V41Model, "logits", keen)
    assert all((drawn == image).all() for drawn in sample_targets(borders, 1, 0, 1))
    assert not any((window[1:] == image).any() for window in resample(borders, 1.0, 0, 1))


def test_a_damaged_journal_is_named(borders: Borders, targets: list[Tensor]) -> None:
    next(backward_layers(borders, targets, 1))
    (borders.folder / "backward.json").write_text('{"la')
    with pytest.raises(CalibrationError, match=r"backward\.json\]: expected JSON.*Remove the folder"):
        next(backward_layers(borders, targets, 1))

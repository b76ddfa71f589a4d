"""The forward with everything kept on disk that the backward (`backward.py`) needs: states at the layer borders.

Windows go through in groups, layer by layer: memory holds one layer and one group's states, whatever the number of
layers and windows. Every file is whole or absent, so a killed forward goes on after its last finished layer and group.
docs/calibration.md says what each file holds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..errors import CalibrationError
from ..files import write_json
from ..parallel import overlapped
from ..progress import Progress, Silent
from ..tensors import write_tensors
from .checkpoint import source_identity
from .family import Model, State
from .stream import capture_layer, finish_layer

VERSION = 1
GROUP_TOKENS = 32_768
"""Tokens of a group; at V4.1's widths the backward then holds 8 GB of states and gradients, and as much per sample."""

INPUTS = ("x", "topk_ids", "topk_weights")
"""What reaches a layer's experts (`Borders.inputs_file`)."""


@dataclass(frozen=True)
class Borders:
    """A folder of states at the layer borders, made by `forward_borders`.

    windows: int64 [T] each. groups: the windows that run together, by number. Border n lies before layer n; border
    `layers` after the last one.
    """

    model: Model
    folder: Path
    windows: tuple[Tensor, ...]
    groups: tuple[range, ...]

    @property
    def layers(self) -> int:
        return self.model.layers

    def states_file(self, border: int, group: int) -> Path:
        """`<window>/<name>`: the group's `State`s at a border. Border 0 has none: it is the embedding."""
        return self.folder / f"states-{border:03d}-{group:05d}.safetensors"

    def inputs_file(self, layer: int, group: int) -> Path:
        """x [N, H], topk_ids, topk_weights [N, k] of a layer's experts (as in `stream.Capture`)."""
        return self.folder / f"inputs-{layer:03d}-{group:05d}.safetensors"

    def outputs_file(self, layer: int, group: int) -> Path:
        """output [N, H] of a layer's routed experts, and `Layer.kept` of all windows one after the other."""
        return self.folder / f"outputs-{layer:03d}-{group:05d}.safetensors"

    def output_gradients_file(self, layer: int, group: int) -> Path:
        """d_output [S, N, H]: gradients at `output`. Written by the backward, and all that is left to keep of it."""
        return self.folder / f"output-gradients-{layer:03d}-{group:05d}.safetensors"

    def gradients_file(self, border: int, group: int) -> Path:
        """`<window>/<name>`: gradients [S, ...] at a border, of the tensors named in `Model.smooth`."""
        return self.folder / f"gradients-{border:03d}-{group:05d}.safetensors"

    def ids(self, group: int) -> list[Tensor]:
        return [self.windows[window] for window in self.groups[group]]

    def bounds(self, group: int) -> list[int]:
        """First token of each of the group's windows, counted within the group, and their number of tokens."""
        return _bounds(self.ids(group))

    def first_token(self, group: int) -> int:
        """Number of tokens in the groups before this one."""
        return sum(len(window) for window in self.windows[: self.groups[group].start])

    def states(self, border: int, group: int) -> list[State]:
        """The group's states at a border, from disk. Raises CalibrationError if their file is missing or damaged."""
        if border == 0:
            return [self.model.embed(ids) for ids in self.ids(group)]
        return self.by_window(self.states_file(border, group), group)

    def inputs(self, layer: int, group: int) -> dict[str, Tensor]:
        """What `inputs_file` holds, mapped, on the CPU. Raises CalibrationError if it is missing or damaged."""
        found = self._of_tokens(self.inputs_file(layer, group), group)
        if sorted(found) != sorted(INPUTS):
            raise damaged(self.inputs_file(layer, group), f"expected {', '.join(INPUTS)}, found {', '.join(found)}")
        return found

    def outputs(self, layer: int, group: int) -> dict[str, Tensor]:
        """What `outputs_file` holds. Raises CalibrationError if it is missing or damaged."""
        found = self._of_tokens(self.outputs_file(layer, group), group)
        if sorted(found) != sorted({"output", *self.model.kept}):
            expected = ", ".join(["output", *self.model.kept])
            raise damaged(self.outputs_file(layer, group), f"expected {expected}, found {', '.join(found)}")
        return {name: tensor.to(self.model.device) for name, tensor in found.items()}

    def _of_tokens(self, path: Path, group: int) -> dict[str, Tensor]:
        found, tokens = load_tensors(path), self.bounds(group)[-1]
        if not found or any(len(tensor) != tokens for tensor in found.values()):
            shapes = {name: list(tensor.shape) for name, tensor in found.items()}
            raise damaged(path, f"expected tensors of {tokens} tokens, found {shapes}")
        return found

    def drop(self, *kinds: str) -> None:
        """Remove the files of these kinds: states, outputs, gradients, output-gradients."""
        for kind in kinds:
            for path in self.folder.glob(f"{kind}-[0-9]*.safetensors"):
                path.unlink()

    def by_window(self, path: Path, group: int) -> list[State]:
        """The inverse of `keyed`. Raises CalibrationError also if the file holds other windows than the group's."""
        found: dict[str, State] = {}
        for key, tensor in load_tensors(path).items():
            window, _, name = key.partition("/")
            found.setdefault(window, {})[name] = tensor.to(self.model.device)
        expected = [f"{window:06d}" for window in self.groups[group]]
        if sorted(found) != expected:
            raise damaged(
                path, f"expected windows {expected[0]} to {expected[-1]}, found {', '.join(sorted(found)[:3])}"
            )
        return [found[window] for window in expected]

    def keyed(self, states: Sequence[State], group: int) -> dict[str, Tensor]:
        """One dictionary of the group's states, `<window>/<name>`."""
        named = zip(self.groups[group], states, strict=True)
        return {f"{window:06d}/{name}": tensor for window, state in named for name, tensor in state.items()}


def forward_borders(
    model: Model,
    windows: Sequence[Tensor],
    folder: Path,
    threads: int,
    progress: Progress | None = None,
    group_tokens: int = GROUP_TOKENS,
    inputs_only: bool = False,
) -> Borders:
    """Run windows (int64 [T] each) through all layers, keeping every border in `folder`; finish what was begun there.

    inputs_only: keep nothing but `inputs_file`, so that no backward can follow. group_tokens: windows run together up
    to this many tokens, and at least one. Disk: `Borders` of N tokens take 4 N layers (hc + 2) H bytes and little more,
    4.9 MB per token of V4.1-Flash, 0.8 MB with inputs_only; split the windows over several folders, one after the
    other, where that is too much. Only one process may work in a folder.
    Raises CalibrationError if the folder belongs to other windows, another checkpoint or another group size, TraceError
    for a bad token.
    """
    progress = progress or Silent()
    borders = open_borders(model, windows, folder, group_tokens)
    last = borders.layers - 1

    def made(layer: int, group: int) -> bool:
        after = [borders.outputs_file(layer, group), borders.states_file(layer + 1, group)]
        # Written last, so that it vouches for the states, which inputs_only drops once the layer behind has used them.
        return borders.inputs_file(layer, group).exists() and (inputs_only or all(path.exists() for path in after))

    todo = [(n, group) for n in range(borders.layers) for group in range(len(borders.groups)) if not made(n, group)]
    total = borders.layers * len(borders.groups)
    progress.stage("forward" if inputs_only else "forward, keeping every border", total, "groups", total - len(todo))
    on_card = model.device.type != "cpu"  # a card is faster than a disk: one group is written while the next is run
    loaded = None
    held: list[State] = []  # a single group's states, which then stay on the card
    with overlapped(on_card) as then:
        for index, group in todo:
            if loaded is None or loaded.index != index:
                loaded = model.load_layer(index)
                model.read_ahead(index + 1)
            states = held or borders.states(index, group)
            capture = capture_layer(loaded, states, borders.ids(group), threads)
            files: dict[Path, dict[str, Tensor]] = {}
            if not (inputs_only and index == last):
                kept = [loaded.kept(state) for state in states]
                output = finish_layer(loaded, states, capture, loaded.expert, threads)
                if not inputs_only:
                    joined = {name: torch.cat([one[name] for one in kept]) for name in kept[0]}
                    files[borders.outputs_file(index, group)] = {"output": output} | joined
                files[borders.states_file(index + 1, group)] = borders.keyed(states, group)
            inputs = (capture.x, capture.topk_ids, capture.topk_weights)
            files[borders.inputs_file(index, group)] = dict(zip(INPUTS, inputs, strict=True))
            used = borders.states_file(index, group) if inputs_only and index else None
            then(partial(keep, files, used))
            held = states if on_card and len(borders.groups) == 1 else []
            progress.advance(1, f"layer {index + 1}/{borders.layers}")
    progress.finish()
    return borders


def keep(files: dict[Path, dict[str, Tensor]], used: Path | None = None) -> None:
    """Write the files in their order, then remove the one that is of no further use."""
    for path, tensors in files.items():
        write_tensors(path, {name: tensor.cpu() for name, tensor in tensors.items()})
    if used is not None:
        used.unlink(missing_ok=True)


def open_borders(model: Model, windows: Sequence[Tensor], folder: Path, group_tokens: int = GROUP_TOKENS) -> Borders:
    """The folder of these windows, whatever it already holds, or a new one.

    Raises CalibrationError if it was begun with something else, TraceError for a bad token.
    """
    if not windows:
        raise CalibrationError("there is no window to run", where=str(folder), mend="give at least one window")
    for number, window in enumerate(windows):
        model.check_ids(window, f"window {number}")
    identity = {
        "version": VERSION,
        "source": source_identity(model.checkpoint),
        "kv_quantization": model.kv_quantization,
        "device": model.device.type,
        "windows": digest(windows),
        "group_tokens": group_tokens,
    }
    path = folder / "borders.json"
    if path.exists():
        found = json.loads(path.read_bytes())
        if changed := [name for name, value in identity.items() if found.get(name) != value]:
            raise CalibrationError(
                "the folder holds the borders of another forward",
                where=str(folder),
                found=f"changed since it began: {', '.join(changed)}",
                mend="run what it was begun with, or choose another folder",
            )
    else:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, identity)
    return Borders(model, folder, tuple(windows), tuple(_groups(windows, group_tokens)))


def _groups(windows: Sequence[Tensor], tokens: int) -> Iterator[range]:
    """Consecutive windows of at most `tokens` tokens together, or one window that has more."""
    start = size = 0
    for number, window in enumerate(windows):
        if number > start and size + len(window) > tokens:
            yield range(start, number)
            start, size = number, 0
        size += len(window)
    yield range(start, len(windows))


def _bounds(windows: Sequence[Tensor]) -> list[int]:
    bounds = [0]
    for window in windows:
        bounds.append(bounds[-1] + len(window))
    return bounds


def digest(rows: Sequence[Tensor]) -> str:
    """Hex sha256 of int64 tensors and their shapes."""
    found = hashlib.sha256()
    for row in rows:
        found.update(f"{list(row.shape)}".encode() + row.numpy().astype("<i8").tobytes())
    return found.hexdigest()


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The inverse of `tensors.write_tensors`. Raises CalibrationError if the file is missing or damaged."""
    try:
        return load_file(path)
    except FileNotFoundError:
        raise damaged(path, "expected it whole, found no such file") from None
    except SafetensorError as error:
        raise damaged(path, f"expected a whole safetensors file, found: {error}") from None


def damaged(path: Path, found: str) -> CalibrationError:
    """The error for a file of a pass, to raise; its folder can always be made again."""
    return CalibrationError(
        "a file of the forward or backward pass is missing or damaged",
        where=str(path),
        found=found,
        mend=f"remove the folder {path.parent} and run the same again",
    )

"""Forward and backward passes over the traffic and over copies that the model rewrote, and what they show of a layer.

The factors that guide rounding are noisy with little text, and the model can write more of it: each copy of the windows
is made from the one before, a share of its tokens drawn anew from the model's own distribution (docs/quality.md).
Of a finished pass only the experts' inputs, their routing and the gradients at their outputs stay on disk: 4 (1 + S) H
bytes per token and layer. Every expert's own gradients follow from these with its weights, so memory holds one expert's
tokens at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from ..files import write_json
from ..progress import Progress, Within
from ..tensors import write_tensors
from .backward import ExpertGradients, backward_layers, expert_gradients, resample, sample_targets
from .borders import Borders, forward_borders, load_tensors, open_borders
from .family import ExpertWeights, Layer, Model
from .stream import adjacent_tokens, tokens_by_expert

RESAMPLED: Final = 0.7
"""Share of a copy's tokens that the model draws anew."""


def run_passes(
    model: Model, windows: Sequence[Tensor], folder: Path, copies: int | None, threads: int, progress: Progress
) -> list[Borders]:
    """The traffic's pass and those of `copies`; None: the traffic's forward alone. Finishes what was begun in `folder`.

    windows: int64 [T] each. Raises CalibrationError if a gradient or state is not finite, or a file is damaged.
    """
    if copies is None:
        borders = forward_borders(model, windows, folder / "pass-00", threads, progress, inputs_only=True)
        borders.drop("states")  # a killed run leaves one
        return [borders]
    passes = []
    for number in range(copies + 1):
        here = folder / f"pass-{number:02d}"
        if not (here / "done.json").exists():
            told = Within(progress, f"pass {number + 1}/{copies + 1}")
            borders = forward_borders(model, windows, here, threads, told)
            targets = sample_targets(borders, 1, number, threads)
            for layer in backward_layers(borders, targets, threads, told):
                for _ in layer.experts():  # their gradients are computed again, expert by expert, when they are used
                    pass
            if number < copies:
                rewritten = resample(borders, RESAMPLED, number, threads)
                write_tensors(here / "next.safetensors", {f"{n:06d}": window for n, window in enumerate(rewritten)})
            write_json(here / "done.json", {})
        borders = open_borders(model, windows, here)
        borders.drop("states", "outputs", "gradients")
        passes.append(borders)
        if number < copies:
            found = load_tensors(here / "next.safetensors")
            windows = [found[name] for name in sorted(found)]
    return passes


class LayerTraffic:
    """What all passes saw of one layer's experts. Token numbers count the traffic's own pass, the first one.

    counts: int64 [E], tokens of the traffic that the router sent to each expert. topk_ids: int64 [N, k], the traffic's,
    topk_weights float32 [N, k]; both, and all token numbers, on the CPU, inputs and gradients on the model's device.
    Raises CalibrationError, here and in `gradients`, if a file of a pass is missing or damaged.
    """

    def __init__(self, layer: Layer, passes: Sequence[Borders]) -> None:
        self.layer, self.passes, self.device = layer, passes, passes[0].model.device
        self._groups = [(borders, group) for borders in passes for group in range(len(borders.groups))]
        self._inputs = [borders.inputs(layer.index, group) for borders, group in self._groups]  # mapped, not read
        self._routed = [tokens_by_expert(found["topk_ids"], found["topk_weights"]) for found in self._inputs]
        self._first = len(passes[0].groups)
        self.topk_ids = torch.cat([found["topk_ids"] for found in self._inputs[: self._first]])
        self.topk_weights = torch.cat([found["topk_weights"] for found in self._inputs[: self._first]])
        self.counts = self.topk_ids.flatten().bincount(minlength=layer.experts)

    @property
    def tokens(self) -> int:
        """Of the traffic."""
        return len(self.topk_ids)

    def inputs(self, tokens: Tensor) -> Tensor:
        """x [n, H] of tokens int64 [n] of the traffic, in their order."""
        x = [found["x"] for found in self._inputs[: self._first]]
        if len(x) == 1:
            return x[0][tokens].to(self.device)
        ends = torch.tensor([len(part) for part in x]).cumsum(0)
        group = torch.searchsorted(ends, tokens, right=True)
        out = torch.empty(len(tokens), x[0].shape[1])
        for number, part in enumerate(x):
            here = (group == number).nonzero().flatten()
            out[here] = part[tokens[here] - (ends[number] - len(part))]
        return out.to(self.device)

    def own(self, expert: int) -> Tensor:
        """x [n, H] of the traffic's tokens that the router sent to an expert."""
        parts = zip(self._inputs[: self._first], self._routed, strict=False)
        found = [inputs["x"][routed[expert][0]] for inputs, routed in parts if expert in routed]
        return torch.cat(found or [torch.zeros(0, self.layer.hidden_size)]).to(self.device)

    def spread(self, count: int) -> Tensor:
        """x [m, H] of at most `count` tokens spread evenly over the traffic."""
        return self.inputs(torch.linspace(0, self.tokens - 1, min(count, self.tokens)).long())

    def adjacent(self, enough: int, threads: int) -> dict[int, Tensor]:
        """`stream.adjacent_tokens` of the traffic."""
        windows = [
            (found["x"][start:stop].to(self.device), found["topk_ids"][start:stop].to(self.device))
            for group, found in enumerate(self._inputs[: self._first])
            for start, stop in pairwise(self.passes[0].bounds(group))
        ]
        return adjacent_tokens(self.layer, windows, enough, threads)

    def gradients(self, expert: int, weights: ExpertWeights) -> Iterator[tuple[int, ExpertGradients]]:
        """(half, gradients) of one expert in every pass, group by group.

        Halves 0 and 1 share next to no document: windows come in the documents' order, and go by eights; a copy's
        window lies in the half of the one that it was made from.
        """
        for (borders, group), found, routed in zip(self._groups, self._inputs, self._routed, strict=True):
            if expert not in routed:
                continue
            tokens, share = routed[expert]
            d_output = load_tensors(borders.output_gradients_file(self.layer.index, group))["d_output"]  # [S, N, H]
            bounds = torch.tensor(borders.bounds(group)[1:])
            window = torch.searchsorted(bounds, tokens, right=True) + borders.groups[group].start
            for half in range(2):
                here = (window // 8 % 2 == half).nonzero().flatten()
                if len(here):
                    at = tokens[here]
                    seen = (part.to(self.device) for part in (share[here], found["x"][at], d_output[:, at]))
                    yield half, expert_gradients(expert, weights, self.layer.activation, at, *seen)[0]

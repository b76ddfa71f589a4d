"""The backward pass, one layer at a time in reverse: gradients at the outputs of every routed expert's projections.

    borders = forward_borders(model, windows, folder, threads)
    targets = sample_targets(borders, samples=1, seed=0, threads=threads)
    for layer in backward_layers(borders, targets, threads):
        for expert in layer.experts():
            ...  # expert.x, expert.a, expert.d_gate, expert.d_up, expert.d_down

The loss is the sum, over all positions, of -ln p(target): minus the log-likelihood of tokens drawn from the model's own
distribution, so that squared gradients estimate the Fisher information. Discrete choices (routing, index selection)
carry no gradient.

One layer, going back (per group of windows):
1. Gradients [S, T, ...] at the border behind it come from disk. The experts' output was added to the state by
   `Layer.after_experts`, so its gradient [S, N, H] is known without recomputing anything.
2. Expert by expert: gate, up and activation are recomputed from the experts' input x that the forward kept; what goes
   back to x and to the routing weights is summed over experts in ascending order.
3. Window by window: everything but the routed experts is recomputed as one autograd graph from the state that the
   forward kept, and differentiated once per sample; that is the gradient at the border before the layer.
The routed experts' down projection and all that only feeds it are never recomputed.
Every result is the same for any number of threads.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from ..errors import CalibrationError
from ..files import write_json
from ..parallel import ordered_map, overlapped, slices
from ..progress import Progress, Silent
from .borders import Borders, damaged, digest, keep
from .family import ExpertWeights, Layer, State
from .stream import Activation, tokens_by_expert

LOGITS_BLOCK = 256
"""Positions whose logits are taken at once: 130 MB at V4.1's vocabulary."""


@dataclass(frozen=True)
class ExpertGradients:
    """n tokens of one group of windows that one expert computed. S: samples of the targets. All float32 but `tokens`.

    tokens: int64 [n], ascending, counted over all windows one after the other.
    x: [n, H], input of gate and up. a: [n, I], input of down.
    d_gate, d_up: [S, n, I], d_down: [S, n, H]: gradients of the loss at the projections' outputs; down's before the
    routing weight multiplies it, so that d_down contains that weight by the chain rule. d_gate[s]^T x, summed over all
    tokens, is the loss' gradient with respect to w1 [I, H], and likewise for the others.
    """

    expert: int
    tokens: Tensor
    x: Tensor
    a: Tensor
    d_gate: Tensor
    d_up: Tensor
    d_down: Tensor


class LayerGradients:
    """One layer's turn in `backward_layers`."""

    def __init__(self, layer: int, pieces: Iterator[ExpertGradients]) -> None:
        self.layer = layer
        self._pieces = pieces

    def experts(self) -> Iterator[ExpertGradients]:
        """Group by group, within a group by ascending expert, those that have tokens. Once only.

        While it runs, the caller's own torch operations keep to one thread (`ordered_map`).
        Raises CalibrationError naming layer, expert and window if a gradient is not finite.
        """
        return self._pieces


def sample_targets(borders: Borders, samples: int, seed: int, threads: int) -> list[Tensor]:
    """Tokens int64 [S, T] of each window, drawn from the model's distribution after every position.

    The same for the same windows and seed, whatever the groups and threads.
    """
    if samples < 1:
        raise CalibrationError("no target to sample", found=f"expected at least 1 sample, found {samples}")
    return _draw(borders, samples, f"targets {seed}", threads)


def resample(borders: Borders, share: float, seed: int, threads: int) -> list[Tensor]:
    """New windows int64 [T]: each token but the first is replaced, with probability `share`, by one that the model
    draws after the tokens before it.

    Reads the last border alone. Fed its own output again and again, the model drifts from the traffic to its own text.
    Draws are independent of `sample_targets`', and the same for the same windows and seed.
    """
    if not 0 <= share <= 1:
        raise CalibrationError("no such share of tokens", found=f"expected 0 to 1, found {share}")
    drawn = _draw(borders, 1, f"resample {seed}", threads, text_only=True)
    fresh = []
    for number, (window, tokens) in enumerate(zip(borders.windows, drawn, strict=True)):
        replaced = torch.rand(len(window) - 1, generator=_generator(f"replace {seed}", number)) < share
        fresh.append(torch.cat([window[:1], torch.where(replaced, tokens[0, :-1], window[1:])]))
    return fresh


def _draw(borders: Borders, samples: int, stream: str, threads: int, text_only: bool = False) -> list[Tensor]:
    """Tokens int64 [S, T] per window, on the CPU, each window with random numbers of its own. text_only: never a token
    that no window may hold."""

    def one(item: tuple[int, State]) -> Tensor:
        number, state = item
        generator = _generator(stream, number)
        drawn = []
        for block in slices(len(borders.windows[number]), LOGITS_BLOCK):
            logits = borders.model.logits(state, block).cpu()  # [B, V]; the noise is drawn there
            if text_only:
                logits[:, list(borders.model.banned)] = -torch.inf
            # The largest logit plus Gumbel noise. Rounding hardly ever changes it, unlike a search in cumulated
            # probabilities.
            noise = torch.empty(samples, *logits.shape).exponential_(generator=generator).log_()
            drawn.append((logits - noise).argmax(-1))  # [S, B]
        return torch.cat(drawn, dim=1)

    targets: list[Tensor] = []
    for group, numbers in enumerate(borders.groups):
        states = borders.states(borders.layers, group)
        targets += ordered_map(one, zip(numbers, states, strict=True), threads)
    return targets


def _generator(stream: str, window: int) -> torch.Generator:
    seed = hashlib.sha256(f"{stream}, window {window}".encode()).digest()[:8]
    return torch.Generator().manual_seed(int.from_bytes(seed, "little") >> 1)


def backward_layers(
    borders: Borders, targets: Sequence[Tensor], threads: int, progress: Progress | None = None
) -> Iterator[LayerGradients]:
    """Layers from the last to the first. targets: int64 [S, T] of each window (`sample_targets`).

    Going on to the next layer says that this one's gradients have been put to use and saved: it is then finished, and
    a later call with the same targets goes on behind it, to the same bits. A layer that was not finished is handed out
    again, whole. With all layers finished nothing is left to hand out, and a call with other targets begins anew.
    Raises CalibrationError if a pass of other targets is unfinished, if a file is missing or damaged, or if a gradient
    is not finite.
    """
    progress = progress or Silent()
    samples = _check_targets(borders, targets)
    journal = _Journal(borders, targets)
    if journal.layer is None:
        for group in range(len(borders.groups)):
            found = _behind_the_head(borders, group, targets, threads)
            keep({borders.gradients_file(borders.layers, group): found})
        journal.finish(borders.layers)
    start = journal.layer
    assert start is not None
    progress.stage("backward", borders.layers, "layers", borders.layers - start)
    for index in reversed(range(start)):
        finished: list[int] = []
        loaded = borders.model.load_layer(index)
        borders.model.read_ahead(index - 1)
        pieces = _experts(borders, loaded, samples, threads, finished)
        yield LayerGradients(index, pieces)
        for _ in pieces:  # what the caller left: the layers before this one need it
            pass
        if len(finished) < len(borders.groups):  # the caller closed the iterator, or went on after an error
            raise CalibrationError("a layer's backward pass was given up", where=f"layer {index}", mend="run it again")
        journal.finish(index)
        progress.advance(1, f"layer {index + 1}/{borders.layers}")
    progress.finish()


class _Journal:
    """`backward.json`: which targets, and from which layer on everything is finished (None: not even the head)."""

    def __init__(self, borders: Borders, targets: Sequence[Tensor]) -> None:
        self.path = borders.folder / "backward.json"
        self.folder, self.targets = borders.folder, digest(targets)
        self.layer: int | None = None
        if not self.path.exists():
            return
        try:
            found = json.loads(self.path.read_bytes())
        except ValueError as error:
            raise damaged(self.path, f"expected JSON, found: {error}") from None
        if found["targets"] == self.targets:
            self.layer = found["layer"]
            self._drop(found["layer"])
        elif found["layer"] > 0:
            raise CalibrationError(
                "an unfinished backward pass of other targets is in the way",
                where=str(self.path),
                found=f"expected {self.targets[:12]}, found {found['targets'][:12]}, down to layer {found['layer']}",
                mend="finish it with the targets it was begun with, or remove that file to begin anew",
            )

    def finish(self, layer: int) -> None:
        """The gradients at the border before `layer` are on disk, and those behind it of no further use."""
        write_json(self.path, {"layer": layer, "targets": self.targets})
        self.layer = layer
        self._drop(layer)

    def _drop(self, layer: int) -> None:
        keep = f"gradients-{layer:03d}-"
        for path in self.folder.glob("gradients-*.safetensors"):
            if path.name > keep and not path.name.startswith(keep):
                path.unlink()


def _check_targets(borders: Borders, targets: Sequence[Tensor]) -> int:
    """The number of samples. Raises CalibrationError unless targets are one token or more per position."""
    samples = len(targets[0]) if targets else 0
    shapes = [(samples, len(window)) for window in borders.windows]
    found = [tuple(target.shape) for target in targets]
    wrong = next((n for n, pair in enumerate(zip(shapes, found, strict=False)) if pair[0] != pair[1]), None)
    where, what = "", ""
    if len(found) != len(shapes) or not samples:
        what = f"expected targets of {len(shapes)} windows, found {len(found)}"
    elif wrong is not None:
        where, what = f"window {wrong}", f"expected targets {list(shapes[wrong])}, found {list(found[wrong])}"
    else:
        for number, target in enumerate(targets):
            if target.dtype != torch.int64 or target.min() < 0 or target.max() >= borders.model.vocabulary:
                where, what = f"window {number}", "expected int64 tokens of the model's vocabulary"
                break
    if what:
        mend = "draw them with sample_targets from the same borders"
        raise CalibrationError("the targets do not fit the windows", where=where, found=what, mend=mend)
    return samples


def _behind_the_head(borders: Borders, group: int, targets: Sequence[Tensor], threads: int) -> dict[str, Tensor]:
    """Gradients at the border after the last layer, keyed for its file."""

    def one(item: tuple[int, State]) -> State:
        number, state = item
        blocks = [
            _head_block(borders, state, block, targets[number][:, block])
            for block in slices(len(borders.windows[number]), LOGITS_BLOCK)
        ]
        gradients = {name: torch.cat([part[name] for part in blocks], dim=1) for name in blocks[0]}
        _check_finite(gradients, f"output head, window {number}")
        return gradients

    states = borders.states(borders.layers, group)
    return borders.keyed(list(ordered_map(one, zip(borders.groups[group], states, strict=True), threads)), group)


def _head_block(borders: Borders, state: State, block: slice, targets: Tensor) -> State:
    """targets: [S, B], of the positions in `block`. Returns the gradients [S, B, ...] of what the logits depend on."""
    leaves = {name: state[name][block].requires_grad_() for name in borders.model.head_reads}
    with torch.enable_grad():
        logits = borders.model.logits(leaves)  # [B, V]
    p = logits.detach().softmax(-1)
    rows = torch.arange(len(p), device=p.device)
    found = []
    for number, target in enumerate(targets.to(p.device), start=1):
        keep = number < len(targets)
        gradient = p.clone() if keep else p  # of -ln p(target) with respect to the logits: p - one-hot(target)
        gradient[rows, target] -= 1
        found.append(torch.autograd.grad(logits, list(leaves.values()), gradient, retain_graph=keep))
    return {name: torch.stack(column) for name, column in zip(leaves, zip(*found, strict=True), strict=True)}


def _experts(
    borders: Borders, layer: Layer, samples: int, threads: int, finished: list[int]
) -> Iterator[ExpertGradients]:
    """All experts of a layer, group by group; then the gradients at the border before it are on disk.

    Appends each group that is done to `finished`.
    """
    with overlapped(borders.model.device.type != "cpu") as then:
        for group in range(len(borders.groups)):
            run = _Group.load(borders, layer, group, samples)
            then(partial(keep, {borders.output_gradients_file(layer.index, group): {"d_output": run.d_output}}))
            routed = tokens_by_expert(run.topk_ids, run.topk_weights)
            first = borders.first_token(group)
            for piece, dx, d_share in ordered_map(partial(_expert, run, routed), routed, threads):
                slots = (run.topk_ids[piece.tokens] == piece.expert).int().argmax(1)  # [n]
                run.d_x.index_add_(1, piece.tokens, dx)  # an expert has a token at most once
                run.d_weights[:, piece.tokens, slots] = d_share
                yield replace(piece, tokens=piece.tokens.cpu() + first)
            if layer.index:  # the embedding is no quantized weight: nobody asks for its gradient
                gradients = list(ordered_map(partial(_window, run), range(len(run.behind)), threads))
                then(partial(keep, {borders.gradients_file(layer.index, group): borders.keyed(gradients, group)}))
            finished.append(group)


@dataclass(frozen=True)
class _Group:
    """One layer's turn for one group of windows, N tokens. Gradients are filled in as they become known.

    x, topk_ids, topk_weights, output: as in `Borders.inputs_file` and `outputs_file`. behind: gradients at the border
    behind the layer, per window. d_output [S, N, H]: at the experts' output. d_x [S, N, H]: at x, of the
    routed experts alone. d_weights [S, N, k]: at the routing weights.
    """

    borders: Borders
    layer: Layer
    number: int
    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    output: Tensor
    behind: list[State]
    d_output: Tensor
    d_x: Tensor
    d_weights: Tensor
    states: list[State]
    bounds: list[int]

    @staticmethod
    def load(borders: Borders, layer: Layer, number: int, samples: int) -> _Group:
        seen = {name: part.to(borders.model.device) for name, part in borders.inputs(layer.index, number).items()}
        kept = borders.outputs(layer.index, number)
        output = kept.pop("output")
        behind = borders.by_window(borders.gradients_file(layer.index + 1, number), number)
        bounds = borders.bounds(number)
        into = [
            layer.output_gradient({name: part[start:stop] for name, part in kept.items()}, gradient)  # [S, T, H]
            for gradient, (start, stop) in zip(behind, pairwise(bounds), strict=True)
        ]
        return _Group(
            borders,
            layer,
            number,
            **seen,
            output=output,
            behind=behind,
            d_output=torch.cat(into, dim=1),
            d_x=output.new_zeros(samples, *output.shape),
            d_weights=output.new_zeros(samples, *seen["topk_weights"].shape),
            states=borders.states(layer.index, number) if layer.index else [],
            bounds=bounds,
        )


def _expert(
    run: _Group, routed: dict[int, tuple[Tensor, Tensor]], expert: int
) -> tuple[ExpertGradients, Tensor, Tensor]:
    """One expert's n tokens, counted within the group: (gradients, at x [S, n, H], at the routing weight [S, n])."""
    tokens, share = routed[expert]
    weights, activation = run.layer.expert(expert), run.layer.activation
    seen = run.x[tokens], run.d_output[:, tokens]
    piece, d_share = expert_gradients(expert, weights, activation, tokens, share, *seen)
    d_x = piece.d_gate @ weights[0] + piece.d_up @ weights[1]
    if not (_finite(d_x) and _finite(d_share)):
        bad = int((~(d_x.isfinite().all(-1) & d_share.isfinite())).any(0).nonzero()[0])
        window = bisect_right(run.bounds, int(tokens[bad])) - 1
        raise _not_finite(f"layer {run.layer.index}, expert {expert}, window {run.borders.groups[run.number][window]}")
    return piece, d_x, d_share


def expert_gradients(
    expert: int,
    weights: ExpertWeights,
    activation: Activation,
    tokens: Tensor,
    share: Tensor,
    x: Tensor,
    d_output: Tensor,
) -> tuple[ExpertGradients, Tensor]:
    """Gradients inside one expert from those at the layer's experts' output, and at the routing weight [S, n].

    tokens, share [n]: routed here, and their routing weights. x [n, H] and d_output [S, n, H]: of these tokens.
    """
    w1, w3, w2 = weights
    gate, up = (x @ w1.T).requires_grad_(), (x @ w3.T).requires_grad_()  # [n, I]
    with torch.enable_grad():
        a = activation(gate, up)
    d_a = d_output @ w2  # [S, n, I], not yet times the routing weight
    d_share = (d_a * a.detach()).sum(-1)  # <d_output, y>, without y
    d_a *= share.unsqueeze(-1)
    parts = [torch.autograd.grad(a, (gate, up), d, retain_graph=True) for d in d_a]
    d_gate, d_up = (torch.stack(column) for column in zip(*parts, strict=True))  # [S, n, I]
    return ExpertGradients(expert, tokens, x, a.detach(), d_gate, d_up, d_output * share.unsqueeze(-1)), d_share


def _window(run: _Group, window: int) -> State:
    """Gradients [S, ...] at the border before the layer, of one window (counted within the group)."""
    layer, state, behind = run.layer, run.states[window], run.behind[window]
    at = slice(run.bounds[window], run.bounds[window + 1])
    leaves = {name: state[name].requires_grad_() for name in run.borders.model.smooth if name in state}
    with torch.enable_grad():
        routed = layer.before_experts(state | leaves, run.borders.ids(run.number)[window], run.topk_ids[at])
        after = layer.after_experts(routed.state, run.output[at])
    outputs, incoming = [after[name] for name in behind], list(behind.values())  # [..], [S, ...] each
    if layer.experts:
        outputs += [routed.x, routed.topk_weights]
        incoming += [run.d_x[:, at], run.d_weights[:, at]]
    samples = len(run.d_x)
    found = [
        torch.autograd.grad(
            outputs,
            list(leaves.values()),
            [gradient[sample] for gradient in incoming],
            retain_graph=sample + 1 < samples,
            allow_unused=True,
            materialize_grads=True,  # a carried latent that nobody reads any more gets zeros
        )
        for sample in range(samples)
    ]
    gradients = {name: torch.stack(column) for name, column in zip(leaves, zip(*found, strict=True), strict=True)}
    _check_finite(gradients, f"layer {layer.index}, window {run.borders.groups[run.number][window]}")
    return gradients


def _check_finite(gradients: State, where: str) -> None:
    if not all(_finite(gradient) for gradient in gradients.values()):
        raise _not_finite(where)


def _finite(values: Tensor) -> bool:
    return not values.numel() or all(end.isfinite() for end in values.aminmax())  # both ends carry NaN


def _not_finite(where: str) -> CalibrationError:
    return CalibrationError(
        "a gradient is not finite", where=where, mend="check the checkpoint's weights (moefit inspect)"
    )

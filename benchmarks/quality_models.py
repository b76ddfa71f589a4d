"""The two tiny models with their routed experts left to the caller, forward and backward, on any device.

Everything but the experts is the original in float32: calibrate/deepseek_v41 for DeepSeek-V4.1, transformers for
Qwen3-MoE. Weights here are in x W orientation, the transposes of the checkpoints'.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moefit.calibrate.checkpoint import Checkpoint, read_json
from moefit.calibrate.deepseek_v41 import V41Model, clamped_swiglu
from moefit.errors import CheckpointError

Weights = dict[str, Tensor]
"""All experts of one layer, float32: "gate" [E, H, I], "up" [E, H, I], "down" [E, I, H]."""

Experts = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, x [N, H], topk_ids int64 [N, k], topk_weights [N, k]) -> [N, H]; called once per layer and batch."""


class TinyModel(ABC):
    """A model small enough to hold whole. All tensors lie on `device` and require no gradient."""

    name: str
    device: torch.device
    layers: int
    experts: int
    hidden: int
    inner: int
    vocabulary: int
    weights: list[Weights]

    def original(self, layer: int) -> Weights:
        """The experts of the checkpoint. The tensors are the model's own: do not write to them."""
        return self.weights[layer]

    @abstractmethod
    def activation(self, gate: Tensor, up: Tensor) -> Tensor:
        """SwiGLU as the model does it: the input of the down projection."""

    def logits(self, windows: Sequence[Tensor], experts: Experts, batch: int = 16) -> Iterator[Tensor]:
        """Logits float32 [T, V] of each window (int64 [T], on the CPU), in order.

        batch: windows that run together; memory grows with it, results differ in rounding only. Gradients flow
        through everything unless the caller turns them off.
        """
        for start in range(0, len(windows), batch):
            yield from self.forward(windows[start : start + batch], experts)

    @abstractmethod
    def forward(self, windows: Sequence[Tensor], experts: Experts) -> list[Tensor]:
        """Logits [T, V] of windows that run together."""

    def experts_from(self, weights: Sequence[Weights]) -> Experts:
        """The expert computation with these weights, one entry per layer."""
        return lambda layer, x, ids, shares: run_experts(self, weights[layer], x, ids, shares)


def load_model(path: Path, device: str = "cpu") -> TinyModel:
    """Read a DeepseekV41ForCausalLM or Qwen3MoeForCausalLM whole, as float32. Turns TF32 off for this process."""
    torch.set_float32_matmul_precision("highest")
    kinds = {"DeepseekV41ForCausalLM": TinyV41, "Qwen3MoeForCausalLM": TinyQwen}
    found = read_json(Path(path) / "config.json").get("architectures")
    kind = kinds.get(found[0] if isinstance(found, list) and found else "")
    if kind is None:
        raise CheckpointError(
            "no forward for this architecture",
            where=str(Path(path) / "config.json"),
            found=f"expected {' or '.join(kinds)}, found {found}",
        )
    return kind(Path(path), device)


class TinyV41(TinyModel):
    """DeepSeek-V4.1 through calibrate/deepseek_v41; a batch runs window by window between the experts."""

    def __init__(self, path: Path, device: str) -> None:
        self.name, self.device = path.name, torch.device(device)
        self.model = V41Model(Checkpoint.open(path), device=device)
        config = self.config = self.model.config
        self.layers, self.experts = config.num_hidden_layers, config.n_routed_experts
        self.hidden, self.inner, self.vocabulary = config.hidden_size, config.moe_intermediate_size, config.vocab_size
        self.stack = [self.model.load_layer(index) for index in range(self.layers)]
        self.weights = []
        for layer in self.stack:
            w1, w3, w2 = zip(*(layer.expert(expert) for expert in range(self.experts)), strict=True)
            self.weights.append(_transposed(w1, w3, w2))

    def activation(self, gate: Tensor, up: Tensor) -> Tensor:
        return clamped_swiglu(gate, up, self.config.swiglu_limit)

    def forward(self, windows: Sequence[Tensor], experts: Experts) -> list[Tensor]:
        lengths = [len(window) for window in windows]
        states = [self.model.embed(window.cpu()) for window in windows]
        for layer in self.stack:
            before = [layer.before_experts(s, ids) for s, ids in zip(states, windows, strict=True)]
            x, topk_ids, topk_weights = (
                torch.cat([getattr(b, name) for b in before]) for name in ("x", "topk_ids", "topk_weights")
            )
            out = experts(layer.index, x, topk_ids, topk_weights).split(lengths)
            states = [layer.after_experts(b.state, o) for b, o in zip(before, out, strict=True)]
        return [self.model.logits(state) for state in states]


class TinyQwen(TinyModel):
    """Qwen3-MoE of transformers, its expert modules replaced. A batch is padded at the end, which causal masks hide."""

    def __init__(self, path: Path, device: str) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        # "eager": the fused kernels' backward adds in no fixed order
        net = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        self.net = net.requires_grad_(False).eval()
        config = net.config
        self.name, self.device = path.name, torch.device(device)
        self.layers, self.experts = config.num_hidden_layers, config.num_experts
        self.hidden, self.inner, self.vocabulary = config.hidden_size, config.moe_intermediate_size, config.vocab_size
        checkpoint = Checkpoint.open(path)
        self.weights = []
        for index, layer in enumerate(net.model.layers):
            layer.mlp.experts = SuppliedExperts(index)
            prefix = f"model.layers.{index}.mlp.experts"
            self.weights.append(
                _transposed(
                    *(
                        [checkpoint.weight(f"{prefix}.{expert}.{name}_proj", device) for expert in range(self.experts)]
                        for name in ("gate", "up", "down")
                    )
                )
            )
        nn.Module.to(net, self.device)

    def activation(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    def forward(self, windows: Sequence[Tensor], experts: Experts) -> list[Tensor]:
        lengths = torch.tensor([len(window) for window in windows])
        ids = nn.utils.rnn.pad_sequence(list(windows), batch_first=True)  # [B, T]
        real = (torch.arange(ids.shape[1]) < lengths[:, None]).flatten().nonzero().squeeze(1)  # [N]
        for layer in self.net.model.layers:
            layer.mlp.experts.supply(experts, real.to(self.device))
        logits = self.net(input_ids=ids.to(self.device), use_cache=False).logits  # [B, T, V]
        return [row[:length] for row, length in zip(logits, lengths.tolist(), strict=True)]


class SuppliedExperts(nn.Module):
    """Stands where a layer's experts stood and asks the caller's, for the tokens that are no padding."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    def supply(self, experts: Experts, real: Tensor) -> None:
        """real: int64 [N], the tokens of the flattened batch that are no padding."""
        self.compute, self.real = experts, real

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        real = self.real
        out = self.compute(self.layer, x.index_select(0, real), topk_ids[real], topk_weights.index_select(0, real))
        return torch.zeros_like(x).index_copy(0, real, out)


def _transposed(gate: Sequence[Tensor], up: Sequence[Tensor], down: Sequence[Tensor]) -> Weights:
    stacked = {"gate": torch.stack(list(gate)), "up": torch.stack(list(up)), "down": torch.stack(list(down))}
    return {name: tensor.mT.contiguous() for name, tensor in stacked.items()}


@dataclass(frozen=True)
class Routed:
    """What one layer's experts computed, one row per pair (token, expert), sorted by expert: P = N k rows.

    tokens: int64 [P]. counts: rows of each expert, length E. share: [P], the routing weight. x: [P, H].
    gate, up: [P, I], the projections' outputs. a: [P, I], the down projection's input. y: [P, H], its output, not yet
    times `share`.
    """

    tokens: Tensor
    counts: list[int]
    share: Tensor
    x: Tensor
    gate: Tensor
    up: Tensor
    a: Tensor
    y: Tensor


def routed(
    model: TinyModel, weights: Weights, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, track: bool = False
) -> tuple[Tensor, Routed]:
    """Grouped experts -> (out [N, H], what they computed). Differentiable; deterministic on the card too.

    track: gate and up require gradients even where nothing before them does.
    """
    n, k = topk_ids.shape
    flat = topk_ids.flatten()
    order = flat.argsort(stable=True)  # [P]
    counts = torch.bincount(flat, minlength=model.experts).tolist()
    # Rows are repeated before they are permuted, so that no backward adds two rows into one in no fixed order.
    rows = x.unsqueeze(1).expand(n, k, -1).flatten(0, 1).index_select(0, order)  # [P, H]
    gate, up = (_by_expert(rows, weights[name], counts) for name in ("gate", "up"))  # [P, I]
    if track and not gate.requires_grad:
        gate.requires_grad_(), up.requires_grad_()
    a = model.activation(gate, up)  # [P, I]
    y = _by_expert(a, weights["down"], counts)  # [P, H]
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    out = (y.index_select(0, inverse).unflatten(0, (n, k)) * topk_weights.unsqueeze(2)).sum(1)
    share = topk_weights.detach().flatten()[order]
    return out, Routed(order // k, counts, share, rows, gate, up, a, y)


def run_experts(model: TinyModel, weights: Weights, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """Weighted sum of each token's experts: x [N, H] -> [N, H]. Differentiable, with respect to the weights too."""
    return routed(model, weights, x, topk_ids, topk_weights)[0]


def _by_expert(rows: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
    """rows [P, in], sorted by expert, each times its expert's weight [E, in, out] -> [P, out]."""
    return torch.cat([part @ weights[expert] for expert, part in enumerate(rows.split(counts))])


class Recorder:
    """Experts that keep what every layer computed (`layers`, in order), for gradients at the projections' outputs."""

    def __init__(self, model: TinyModel, weights: Sequence[Weights]) -> None:
        self.model, self.weights = model, weights
        self.layers: list[Routed] = []

    def __call__(self, layer: int, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        out, kept = routed(self.model, self.weights[layer], x, topk_ids, topk_weights, track=True)
        self.layers.append(kept)
        return out


@dataclass(frozen=True)
class Capture:
    """One expert's n tokens of one batch. S: samples of the targets.

    tokens: int64 [n], their positions among the batch's tokens, windows one after the other. topk_weight: [n].
    x: [n, H], a: [n, I]: inputs of gate and up, and of down.
    delta_gate, delta_up: [S, n, I], delta_down: [S, n, H]: gradients of the loss at the projections' outputs.
    delta_down contains the routing weight. x^T delta_gate, summed over all batches, is the loss' gradient with respect
    to the gate weight [H, I], and likewise for the others.
    """

    tokens: Tensor
    topk_weight: Tensor
    x: Tensor
    a: Tensor
    delta_gate: Tensor
    delta_up: Tensor
    delta_down: Tensor


def backward_pass(
    model: TinyModel,
    windows: Sequence[Tensor],
    batch: int = 8,
    samples: int = 1,
    seed: int = 0,
    weights: Sequence[Weights] | None = None,
) -> Iterator[dict[tuple[int, int], Capture]]:
    """Per batch of windows: (layer, expert) -> Capture, for experts with a token.

    The loss is the sum over positions of -ln p(token), with the token drawn from the model's own distribution there
    (so squared gradients estimate the Fisher information). The draws depend on `seed`, the windows and the
    kind of device, not on `batch`.
    weights: experts to run with, per layer, instead of the original ones.
    """
    weights = model.weights if weights is None else weights
    generator = torch.Generator(model.device).manual_seed(seed)
    for start in range(0, len(windows), batch):
        chosen = windows[start : start + batch]
        recorder = Recorder(model, weights)
        with torch.enable_grad():
            logits = torch.cat(list(model.logits(chosen, recorder, batch)))  # [N, V]
            targets = sampled_tokens(logits, [len(window) for window in chosen], samples, generator)
            wanted = [tensor for kept in recorder.layers for tensor in (kept.gate, kept.up, kept.y)]
            gradients = []
            for sample, target in enumerate(targets, start=1):
                loss = F.cross_entropy(logits, target, reduction="sum")
                gradients.append(torch.autograd.grad(loss, wanted, retain_graph=sample < samples))
        del logits, loss, wanted
        yield {
            (layer, expert): capture
            for layer, kept in enumerate(recorder.layers)
            for expert, capture in _captures(kept, [torch.stack(g) for g in _layer(gradients, layer)])
        }


def sampled_tokens(logits: Tensor, lengths: Sequence[int], samples: int, generator: torch.Generator) -> Tensor:
    """Tokens int64 [S, N] from softmax(logits [N, V]); the random numbers are drawn window by window.

    By the largest logit plus Gumbel noise: unlike a search in cumulated probabilities, rounding hardly ever changes it.
    """
    drawn = []
    for rows in logits.detach().split(list(lengths)):  # [T, V]
        noise = rows.new_empty(samples, *rows.shape).exponential_(generator=generator).log_()
        drawn.append((rows - noise).argmax(-1))  # [S, T]
    return torch.cat(drawn, dim=1)


def _layer(gradients: list[tuple[Tensor, ...]], layer: int) -> Iterator[tuple[Tensor, ...]]:
    """Samples of the gradients at a layer's gate, up and down outputs, in this order."""
    return zip(*(sample[3 * layer : 3 * layer + 3] for sample in gradients), strict=True)


def _captures(kept: Routed, deltas: list[Tensor]) -> Iterator[tuple[int, Capture]]:
    parts = [t.detach().split(kept.counts) for t in (kept.tokens, kept.share, kept.x, kept.a)]
    parts += [delta.split(kept.counts, dim=1) for delta in deltas]
    for expert, tensors in enumerate(zip(*parts, strict=True)):
        if kept.counts[expert]:
            yield expert, Capture(*tensors)

"""What `quality.py` tells the quantizers about the traffic: input Hessians, and Kronecker factors by backward pass.

Both are sums over the model's original weights, so they are gathered once per model and kept in a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from quality_models import TinyModel, backward_pass, routed, sampled_tokens
from safetensors.torch import load_file, save_file
from torch import Tensor

from moefit.quantize.kronecker import FactorSums

PROJECTIONS = ("gate", "up", "down")
RESAMPLED = 0.7
"""Share of a window's tokens that every further copy draws anew (`resample`)."""


def shape(model: TinyModel, projection: str) -> tuple[int, int]:
    """(k, n) of a projection."""
    return (model.inner, model.hidden) if projection == "down" else (model.hidden, model.inner)


def resample(model: TinyModel, windows: Sequence[Tensor], share: float, seed: int, batch: int = 16) -> list[Tensor]:
    """New windows int64 [T]: each token but the first is replaced, with probability `share`, by one that the model
    draws after the tokens before it. Fed its own output it drifts from the traffic towards the model's own text."""
    draw = torch.Generator(model.device).manual_seed(seed)
    choose = torch.Generator().manual_seed(seed)
    experts, fresh = model.experts_from(model.weights), []
    for start in range(0, len(windows), batch):
        chosen = windows[start : start + batch]
        lengths = [len(window) for window in chosen]
        with torch.no_grad():
            logits = torch.cat(list(model.logits(chosen, experts, batch)))
            tokens = sampled_tokens(logits, lengths, 1, draw)[0].cpu().split(lengths)
        for window, drawn in zip(chosen, tokens, strict=True):
            replaced = torch.rand(len(window) - 1, generator=choose) < share
            fresh.append(torch.cat([window[:1], torch.where(replaced, drawn[:-1], window[1:])]))
    return fresh


def halves(windows: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Two halves that share next to no document: windows come in the documents' order, and go by eights."""
    parts: tuple[list[Tensor], list[Tensor]] = ([], [])
    for index, window in enumerate(windows):
        parts[index // 8 % 2].append(window)
    return parts


def gather_factors(
    model: TinyModel, windows: Sequence[Tensor], copies: int, seed: int, say: Callable[[str], None]
) -> dict[str, Tensor]:
    """ "layer.projection.half.hin" and so on (`FactorSums`), for the two `halves` of the windows and `copies` of them,
    each resampled from the one before; and "tokens", of the whole traffic that was summed."""
    flat = {"tokens": torch.tensor(0)}
    for half, current in enumerate(halves(windows)):
        sums = {
            (layer, projection): FactorSums(model.experts, *shape(model, projection), model.device)
            for layer in range(model.layers)
            for projection in PROJECTIONS
        }
        for copy in range(copies + 1):
            if copy:
                current = resample(model, current, RESAMPLED, seed + copy)
            for captured in backward_pass(model, current, seed=seed + 1000 + copy):
                for (layer, expert), c in captured.items():
                    gradients = zip(PROJECTIONS, (c.delta_gate, c.delta_up, c.delta_down), strict=True)
                    for projection, d in gradients:
                        sums[layer, projection].add(expert, c.a if projection == "down" else c.x, d)
            flat["tokens"] += sum(map(len, current))
            say(f"{model.name}: half {half}, backward pass {copy + 1} of {copies + 1}")
        for (layer, projection), s in sums.items():
            for name in ("hin", "hout", "trace", "tokens"):
                flat[f"{layer}.{projection}.{half}.{name}"] = getattr(s, name)
    return flat


def factor_sums(model: TinyModel, stored: dict[str, Tensor], layer: int, projection: str) -> list[FactorSums]:
    """One projection's sums of both halves back from `gather_factors`."""
    both = []
    for half in range(2):
        sums = FactorSums(model.experts, *shape(model, projection), model.device)
        for name in ("hin", "hout", "trace", "tokens"):
            setattr(sums, name, stored[f"{layer}.{projection}.{half}.{name}"].to(model.device))
        both.append(sums)
    return both


def gather_hessians(model: TinyModel, windows: Sequence[Tensor], say: Callable[[str], None]) -> dict[str, Tensor]:
    """Sums of x x^T. "layer.input" [H, H] over all tokens; "layer.down.all" [E, I, I] over all tokens, whichever
    experts they chose; "layer.input.routed" [E, H, H] and "layer.down.routed" [E, I, I] over those that chose it."""
    sums: dict[str, Tensor] = {}

    def add(name: str, value: Tensor) -> None:
        sums[name] = sums[name] + value if name in sums else value

    def capture(layer: int, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        weights = model.original(layer)
        out, kept = routed(model, weights, x, topk_ids, topk_weights)
        add(f"{layer}.input", x.T @ x)
        inner = [model.activation(x @ g, x @ u) for g, u in zip(weights["gate"], weights["up"], strict=True)]
        add(f"{layer}.down.all", torch.stack([a.T @ a for a in inner]))
        for name, rows in ((f"{layer}.input.routed", kept.x), (f"{layer}.down.routed", kept.a)):
            add(name, torch.stack([part.T @ part for part in rows.split(kept.counts)]))
        return out

    with torch.no_grad():
        for _ in model.logits(windows, capture, 16):
            pass
    say(f"{model.name}: input Hessians")
    return sums


def cached(path: Path | None, key: Sequence[object], gather: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """What `gather` returns, kept in the folder `path` under a name made of `key`."""
    if path is None:
        return gather()
    file = path / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.safetensors"
    if not file.is_file():
        path.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        save_file({name: tensor.cpu().contiguous() for name, tensor in gather().items()}, part)
        part.rename(file)
    return load_file(file)

"""What a build will take of disk and memory, from headers alone, and whether this machine has it."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from ..calibrate.borders import GROUP_TOKENS
from ..calibrate.checkpoint import Checkpoint
from ..calibrate.layout import Layout, is_v41, parts
from ..errors import PackError
from .factors import GROUP_ON_CARD, TRIED
from .layout import PackLayout, expert_shapes
from .recipe import Recipe

BASE_MEMORY = 600 << 20
"""Bytes of Python, torch and transformers before the first tensor (measured: 0.5 GB)."""

MARGIN = 1.1

BUSIEST = 4
"""Tokens of a layer's busiest expert, in those of the mean one (measured: 3.2 on tiny-qwen3-moe)."""

CUDA_MEMORY = 3 << 30
"""Bytes that a CUDA context and its libraries take of the host (measured: 2.2 GB with torch itself)."""

ENCODER_MEMORY = 2500 << 20
"""Bytes of the card that the encoder's scratch and the libraries' workspaces take at most."""

GATE_WINDOW = 512
"""Tokens of a window whose logits are compared at once."""


@dataclass(frozen=True)
class Needs:
    """Bytes. disk: in the output's file system, at the worst moment. memory: the host's peak, card: the card's, 0
    without one; both estimated from above."""

    disk: int
    memory: int
    card: int


def needs(
    source: Checkpoint,
    layout: PackLayout,
    recipe: Recipe,
    tokens: int,
    threads: int,
    gate_tokens: int = 0,
    on_card: bool = False,
) -> Needs:
    """Estimate the disk and memory of a build over `tokens` tokens of traffic and a gate over `gate_tokens`.

    threads: workers that share the device.
    """
    sizes = layout.layout
    forward = _forward(source, sizes, recipe.window)
    copies, streams = forward.copies, forward.streams
    # per token; inputs: the experts' inputs, their outputs, a temporary
    state, inputs = 4 * (streams + forward.latents), 4 * sizes.hidden * 3
    backbone = 4 * max(_per_layer(source, sizes))
    shapes = expert_shapes(sizes).values()
    one = sum(k * n for k, n in shapes)
    width = max(sizes.hidden, sizes.intermediate)
    group = min(tokens, GROUP_TOKENS)
    at_once = threads * (GROUP_ON_CARD if on_card else 1)  # experts in work
    reach = tokens * ((recipe.passes or 0) + 1) * sizes.experts_per_token // sizes.experts  # tokens of an expert
    # Per worker: the expert in float32 about six times over (read, transposed, rotated, decoded), the Hessian and its
    # factor in float64, twice each, and its share of the routed inputs: of one worker a busy expert's.
    seen = (threads + BUSIEST - 1) * 4 * reach  # bytes of one float for each of these tokens
    layer = backbone + at_once * (4 * one * 6 + 8 * width * width * 4)
    layer += _experts_of_a_layer(source, sizes) if on_card else 0  # as stored
    layer += seen * (sizes.hidden + 3 * sizes.intermediate) + threads * recipe.window * 4 * forward.held
    calibrating = group * (state + inputs) + layer
    if recipe.two_sided:
        factors = sum(4 * (k * k + n * n) for k, n in shapes)  # of one expert
        layer += at_once * 3 * factors + seen * (3 * sizes.hidden + 3 * sizes.intermediate)
        layer += (2 + 1 + 2 * TRIED) * factors  # the layer's own, and those of the experts by which it chooses
        # A window's graph: some forty arrays as wide as the streams, and the attention's scores about eight times over.
        layer += threads * recipe.window * 4 * (40 * streams + 8 * forward.scores)
        calibrating = group * (state + 4 * 16 * sizes.hidden) + layer
    head = 4 * sizes.vocabulary * sizes.hidden
    # The gate keeps the states of original and pack, and compares a window's logits per worker (about ten arrays).
    gating = gate_tokens * (2 * state + inputs) + max(layer, head + threads * 10 * 4 * GATE_WINDOW * sizes.vocabulary)
    computing = max(calibrating, gating if gate_tokens else 0)
    # Beside a card the host holds what is on its way to it and to the disk, and decodes the pack's experts.
    host = 2 * group * (state + inputs) + threads * 4 * one * 4 + head if on_card else computing
    pending = max(len(layout.experts_in(shard)) for shard in layout.shards) * layout.expert_bytes
    # Of every pass and layer, inputs, routing and output gradients stay; the pass at work keeps its borders besides.
    routing = 12 * sizes.experts_per_token
    if recipe.passes is None:
        passes = tokens * (sizes.layers * (4 * sizes.hidden + routing) + 2 * state)
    else:
        kept = sizes.layers * (8 * sizes.hidden + routing) * (recipe.passes + 1)
        passes = tokens * (kept + sizes.layers * (state + 4 * (sizes.hidden + copies)) + 3 * state)
    memory = BASE_MEMORY + (CUDA_MEMORY if on_card else 0) + host
    disk = layout.tensor_bytes + pending + passes
    return Needs(int(disk * MARGIN), int(memory * MARGIN), int((computing + ENCODER_MEMORY) * MARGIN) if on_card else 0)


@dataclass(frozen=True)
class _Forward:
    """Numbers per token. copies: of the residual stream. streams: in all copies and what mixes them. latents: that
    later layers share. scores: of the attention, over all heads; held: of them, while a layer's forward runs."""

    copies: int
    streams: int
    latents: int
    scores: int
    held: int


def _forward(source: Checkpoint, sizes: Layout, window: int) -> _Forward:
    if is_v41(source.config):
        text = source.config["text_config"]
        copies, keys = text["hc_mult"], text["sliding_window"] + min(window, text["index_topk"])
        latents, scores = 2 * (text["head_dim"] + text["index_head_dim"]), text["num_attention_heads"] * keys
        held = 0  # attention in blocks
    else:
        from ..calibrate.transformers_moe.config import text_config

        config = text_config(source.config)
        copies, latents, scores = getattr(config, "hc_mult", 0), 0, config.num_attention_heads * window
        held = 4 * scores  # of plain attention, with a quarter more keys (DeepSeek-V4), about three times over
    # Without hyper-connections there is one stream, and nothing to mix.
    streams = copies * (sizes.hidden + 2 * copies + 4) if copies else sizes.hidden
    return _Forward(copies, streams, latents, scores, held)


def _per_layer(source: Checkpoint, sizes: Layout) -> list[int]:
    """Elements of each layer besides its routed experts and Engram table."""
    found = [0] * sizes.layers
    for name, part in parts(source).items():
        layer = re.search(r"(^|\.)layers\.(\d+)\.", name)
        apart = part in ("routed experts", "engram tables", "vision", "drafter", "drafter experts")
        if layer is not None and not apart:
            found[int(layer[2])] += prod(source.tensors[name].shape)
    return found


def _experts_of_a_layer(source: Checkpoint, sizes: Layout) -> int:
    """Bytes as stored, at most."""
    routed = sum(source.tensors[n].nbytes for n, part in parts(source).items() if part == "routed experts")
    return -(-routed // max(1, len(sizes.moe_layers)))


def free_card() -> int:
    """Bytes free on the current card."""
    return torch.cuda.mem_get_info()[0]


def free_disk(out: Path) -> int:
    """Bytes free where `out` will lie."""
    parent = out
    while not parent.exists():
        parent = parent.parent
    return shutil.disk_usage(parent).free


def free_memory() -> int:
    """Bytes the kernel could give to a new process now, within this process's cgroup."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and (text := limit.read_text().strip()).isdecimal():
        available = min(available, int(text) - int(used.read_text()))
    return available


def check_needs(need: Needs, out: Path, written: int) -> None:
    """Raise PackError unless disk and memory suffice. written: bytes of an unfinished build already on disk."""
    disk, memory = free_disk(out) + written, free_memory()
    if need.disk > disk:
        raise PackError(
            "not enough disk",
            where=str(out.parent),
            found=f"expected {need.disk:,} B at the worst moment, found {disk:,} B free",
            mend=f"free {need.disk - disk:,} B, or choose another --out",
        )
    if need.memory > memory:
        raise PackError(
            "not enough memory",
            found=f"expected about {need.memory:,} B, found {memory:,} B available",
            mend="use fewer --threads, fewer traces, or a machine with more RAM",
        )
    if need.card and need.card > (card := free_card()):
        raise PackError(
            "not enough memory on the card",
            found=f"expected about {need.card:,} B, found {card:,} B free",
            mend="use --threads 1, a shorter --window, fewer traces, or --device cpu",
        )

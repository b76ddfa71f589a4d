"""What a build will take of disk and memory, from headers alone, and whether this machine has it."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from math import prod
from pathlib import Path

from ..calibrate.borders import GROUP_TOKENS
from ..calibrate.checkpoint import Checkpoint
from ..errors import PackError
from .factors import TRIED
from .layout import PackLayout, expert_shapes
from .recipe import Recipe

BASE_MEMORY = 600 << 20
"""Bytes of Python, torch and transformers before the first tensor (measured: 0.5 GB)."""

MARGIN = 1.1

GATE_WINDOW = 512
"""Tokens of a window whose logits are compared at once."""


@dataclass(frozen=True)
class Needs:
    """Bytes. disk: in the output's file system, at the worst moment. memory: peak, estimated from above."""

    disk: int
    memory: int


def needs(
    source: Checkpoint, layout: PackLayout, recipe: Recipe, tokens: int, threads: int, gate_tokens: int = 0
) -> Needs:
    """Estimate the disk and memory of a build over `tokens` tokens of traffic and a gate over `gate_tokens`."""
    text = source.config["text_config"]
    sizes = layout.layout
    streams = text["hc_mult"] * (sizes.hidden + 2 * text["hc_mult"] + 4)  # floats per token between layers
    latents = 2 * (text["head_dim"] + text["index_head_dim"])
    state, inputs = 4 * (streams + latents), 4 * sizes.hidden * 3  # per token; experts' inputs, outputs, a temporary
    per_layer = [0] * sizes.layers  # elements of each layer besides its experts and Engram table
    for name, info in source.tensors.items():
        if name.startswith("layers.") and ".ffn.experts." not in name and ".engram.embed." not in name:
            per_layer[int(name.split(".")[1])] += prod(info.shape)
    backbone = 4 * max(per_layer)
    shapes = expert_shapes(sizes).values()
    one = sum(k * n for k, n in shapes)
    width = max(sizes.hidden, sizes.intermediate)
    group = min(tokens, GROUP_TOKENS)
    reach = tokens * ((recipe.passes or 0) + 1) * sizes.experts_per_token // sizes.experts  # tokens of an expert
    # Per worker: the expert in float32 about six times over (read, transposed, rotated, decoded), the Hessian and its
    # factor in float64, twice each, and its share of the routed inputs.
    worker = 4 * one * 6 + 8 * width * width * 4 + 4 * reach * (sizes.hidden + 3 * sizes.intermediate)
    layer = backbone + threads * worker
    calibrating = group * (state + inputs) + layer
    if recipe.two_sided:
        factors = sum(4 * (k * k + n * n) for k, n in shapes)  # of one expert
        layer += threads * (3 * factors + 4 * reach * (3 * sizes.hidden + 3 * sizes.intermediate))
        layer += (2 + 1 + 2 * TRIED) * factors  # the layer's own, and those of the experts by which it chooses
        # A window's graph: some forty arrays as wide as the streams, and the attention's scores about eight times over.
        keys = text["sliding_window"] + min(recipe.window, text["index_topk"])
        layer += threads * recipe.window * 4 * (40 * streams + 8 * text["num_attention_heads"] * keys)
        calibrating = group * (state + 4 * 16 * sizes.hidden) + layer
    head = 4 * sizes.vocabulary * sizes.hidden
    # The gate keeps the states of original and pack, and compares a window's logits per worker (about ten arrays).
    gating = gate_tokens * (2 * state + inputs) + max(layer, head + threads * 10 * 4 * GATE_WINDOW * sizes.vocabulary)
    memory = BASE_MEMORY + max(calibrating, gating if gate_tokens else 0)
    pending = max(len(layout.experts_in(shard)) for shard in layout.shards) * layout.expert_bytes
    # Of every pass and layer, inputs, routing and output gradients stay; the pass at work keeps its borders besides.
    routing = 12 * sizes.experts_per_token
    if recipe.passes is None:
        passes = tokens * (sizes.layers * (4 * sizes.hidden + routing) + 2 * state)
    else:
        kept = sizes.layers * (8 * sizes.hidden + routing) * (recipe.passes + 1)
        passes = tokens * (kept + sizes.layers * (state + 4 * (sizes.hidden + text["hc_mult"])) + 3 * state)
    return Needs(int((layout.tensor_bytes + pending + passes) * MARGIN), int(memory * MARGIN))


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

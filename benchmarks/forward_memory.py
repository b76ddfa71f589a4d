"""Memory and speed of one layer's attention at DeepSeek-V4.1-Flash's real widths, on one long window.

    python benchmarks/forward_memory.py [--tokens 4096] [--layer 20] [--threads 2] [--exact]

Random weights, no routed experts: everything that `V41Layer.before_experts` does, for one window. Layer 20 is the
widest: a latent per token, its own indexer over all of them, and the candidates. Caches are rounded as in the release
unless --exact. Bound stated by the project: the layer's weights, two residuals, four more [T, H] and 1.5 GB of blocks
whatever the length; nothing of [heads, T, T] or [T, T]. Run it once per length: the peak is that of the whole process.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moefit.calibrate.checkpoint import Checkpoint
from moefit.calibrate.deepseek_v41 import V41Config, V41Layer
from moefit.calibrate.deepseek_v41.layout import expected_tensors

BLOCKS = 1_500_000_000
"""Bytes that query blocks may take, whatever the window's length."""

CONFIG: dict[str, Any] = json.loads(Path(__file__).with_name("deepseek_v41_flash.json").read_text())


@dataclass(frozen=True)
class RandomCheckpoint(Checkpoint):
    """Weights drawn when they are read, of about unit gain; norms and scales are 1."""

    shapes: dict[str, tuple[int, ...]]

    def weight(self, prefix: str, *_: object) -> Tensor:
        shape = self.shapes[prefix if prefix in self.shapes else f"{prefix}.weight"]
        if len(shape) == 1:
            return torch.ones(shape)
        generator = torch.Generator().manual_seed(len(prefix))
        return torch.randn(shape, generator=generator).mul_(shape[1] ** -0.5)


def peak() -> int:
    """Bytes of this process's largest resident set so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layer", type=int, default=20, help="one that reads nothing of earlier ones: 0, 2, 8 or 20")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--exact", action="store_true", help="without the release's rounding of its caches")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    config = V41Config.from_checkpoint(CONFIG)
    config = config if args.exact else config.with_kv_quantization()
    shapes = {name: shape for name, (_, shape) in expected_tensors(CONFIG).items()}
    checkpoint = RandomCheckpoint(Path("random"), CONFIG, {}, [], shapes)
    model = SimpleNamespace(checkpoint=checkpoint, config=config, classes=None, device=torch.device("cpu"))
    layer = V41Layer.load(model, args.layer)
    tokens, hc, hidden = args.tokens, config.hc_mult, config.hidden_size
    generator = torch.Generator().manual_seed(0)
    residual = torch.randn(tokens, hc, hidden, generator=generator)
    pre = torch.rand(tokens, hc, generator=generator)
    ids = torch.zeros(tokens, dtype=torch.int64)
    before = peak()

    start = time.monotonic()
    routed = layer.before_experts({"residual": residual, "pre": pre}, ids)
    seconds = time.monotonic() - start
    after = peak()
    assert routed.x.shape == (tokens, hidden) and bool(routed.x.isfinite().all())

    own = 4 * tokens * hidden
    bound = before + (hc + 4) * own + BLOCKS  # what was there before holds the weights and the first residual
    print(
        f"layer {args.layer}, {tokens:,} tokens, {args.threads} threads, {'exact' if args.exact else 'rounded'} caches"
    )
    print(f"  weights and the window's residual: {before / 1e9:.2f} GB resident")
    print(f"  before_experts: {seconds:.1f} s, {tokens / seconds:.0f} tokens/s")
    print(f"  peak: {after / 1e9:.2f} GB, stated bound {bound / 1e9:.2f} GB: {'holds' if after <= bound else 'BROKEN'}")
    kept = {name: tensor.nbytes for name, tensor in routed.state.items()}
    print("  state: " + ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in sorted(kept.items())))
    print(f"  a [heads, T, T] tensor would be {4 * config.num_attention_heads * tokens**2 / 1e9:.0f} GB")


if __name__ == "__main__":
    main()

"""One layer at DeepSeek-V4.1's real widths on a card: tokens/s with capture on, against its bare matrix products.

    python benchmarks/calibrate_scale.py [--tokens 32768] [--window 4096] [--layer 20] [--folder DIR]

A shard of one layer (384 experts of 5120 x 2304 in MXFP4, random) is written to DIR, and the layer run over one group
of windows as a build runs it: everything up to the experts, the experts, what follows, and then the Hessians of every
expert (gate/up shared, down behind the clamped SwiGLU). Layer 20 is the dearest: it compresses keys and values, indexes
them, and chooses candidates. The matrix products that this takes are recorded and run again alone, on random numbers of
the same shapes. Down's Hessian stands behind gate and up as the pack will have them, so capture runs these two again:
the share is printed with these products among the bare ones, and without.
Prints the share of that bare time, what 1,000,000 tokens x 40 layers take, and the floor that reading 289 GB of experts
sets at the disk's measured rate. Needs a card; 8 GB of disk and 30 GB of its memory.
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moefit.calibrate.checkpoint import DTYPES, SINGLE, Checkpoint
from moefit.calibrate.deepseek_v41 import V41Config, V41Layer
from moefit.calibrate.deepseek_v41.layout import expected_tensors
from moefit.calibrate.stream import Capture, capture_layer, finish_layer, tokens_by_expert
from moefit.tensors import write_tensors

CONFIG: dict[str, Any] = json.loads((Path(__file__).parent / "deepseek_v41_flash.json").read_text())
EXPERT_BYTES = 40 * 384 * 3 * 5120 * 2304 * 17 / 32
"""Of all routed experts on disk: half a byte a weight, and a scale byte per 32."""
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default)


def write_layer(folder: Path, layer: int) -> Checkpoint:
    """A checkpoint that holds one layer's tensors, random where that does no harm to the numbers' size."""
    tensors = {n: v for n, v in expected_tensors(CONFIG).items() if n.startswith(f"layers.{layer}.")}
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header).encode()
    random = np.random.default_rng(0)
    with (folder / SINGLE).open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for name, (dtype, shape) in tensors.items():
            columns = shape[-1] * (2 if dtype == "I8" else 1)
            if dtype == "F8_E8M0":  # scales of values about as large as 1: products then keep their inputs' size
                size = math.log2(tensors[name.replace(".scale", ".weight")][1][-1]) / 2
                data = np.full(shape, round(127 - size - (1 if ".experts." in name else 6)), np.uint8)
            elif dtype in ("I8", "F8_E4M3"):
                data = random.integers(0, 256, shape, np.uint8)
                data = data & 0xF7 if dtype == "F8_E4M3" else data  # never NaN
            else:
                values = torch.from_numpy(random.standard_normal(shape, np.float32)) * columns**-0.5
                values = torch.ones(shape) if len(shape) == 1 else values
                data = values.to(DTYPES[dtype]).view(torch.uint8).numpy()
            file.write(data.tobytes())
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return Checkpoint.open(folder)


class Recorder(TorchDispatchMode):
    """Every matrix product: the operation, and shape and strides of its factors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            self.calls.append((func, tuple((tuple(t.shape), tuple(t.stride())) for t in args)))
        return func(*args, **(kwargs or {}))


def replay(calls: list[tuple[Any, tuple[Any, ...]]]) -> Callable[[], None]:
    """The products alone, in their order, on random factors that are made once per shape."""
    made: dict[Any, Tensor] = {}

    def factor(number: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
        key = number, shape, stride
        if key not in made:
            room = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
            made[key] = torch.randn(room, device="cuda").as_strided(shape, stride)
        return made[key]

    prepared = [(op, [factor(n, *given) for n, given in enumerate(factors)]) for op, factors in calls]

    def run() -> None:
        for operation, factors in prepared:
            operation(*factors)

    return run


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Median; the first run is not counted."""
    found = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return sorted(found[1:])[repeats // 2]


def hessians(layer: V41Layer, capture: Capture) -> float:
    """Sums of x x^T of every expert, gate/up and down, as a build takes them expert by expert; returns their trace."""
    trace = torch.zeros((), device=capture.x.device)
    for expert, (tokens, _) in tokens_by_expert(capture.topk_ids, capture.topk_weights).items():
        w1, w3, _ = layer.expert(expert)
        x = capture.x[tokens]
        a = layer.activation(x @ w1.T, x @ w3.T)
        for seen in (x, a):
            trace += (seen.T @ seen).diagonal().sum()
    return float(trace)


def disk_rate(path: Path, most: int = 4 << 30) -> float:
    """Bytes per second of the file's first part, read around the page cache."""
    chunk = 16 << 20
    buffer = mmap.mmap(-1, chunk)  # aligned, as O_DIRECT asks
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        done, start = 0, time.perf_counter()
        while done < most and (got := os.preadv(file, [buffer], done)) == chunk:
            done += got
        return done / (time.perf_counter() - start)
    finally:
        os.close(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_768, help="of a group")
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--layer", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write the shard and the captured inputs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        measure(args, Path(folder))


@torch.no_grad()
def measure(args: argparse.Namespace, folder: Path) -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, float32, {args.tokens:,} tokens in windows of")
    print(f"{args.window:,}, layer {args.layer}", flush=True)
    checkpoint = write_layer(folder, args.layer)
    device = torch.device("cuda")
    config = V41Config.from_checkpoint(CONFIG).with_kv_quantization()
    model = SimpleNamespace(checkpoint=checkpoint, config=config, classes=None, device=device)
    start = time.perf_counter()
    layer = V41Layer.load(model, args.layer)
    for expert in range(layer.experts):
        layer.expert(expert)
    torch.cuda.synchronize()
    loading = time.perf_counter() - start
    windows = [torch.zeros(args.window, dtype=torch.int64)] * (args.tokens // args.window)
    generator = torch.Generator(device).manual_seed(0)
    shape = (args.window, config.hc_mult)
    start_states = [
        {
            "residual": torch.randn(*shape, config.hidden_size, device=device, generator=generator),
            "pre": torch.rand(*shape, device=device, generator=generator),
        }
        for _ in windows
    ]
    found: dict[str, Capture] = {}

    def forward(threads: int = 2) -> None:
        """Two workers, as in a build on a card; a recorder sees only what its own thread does."""
        states = list(start_states)
        found["capture"] = capture_layer(layer, states, windows, threads)
        finish_layer(layer, states, found["capture"], layer.expert, threads)

    def before() -> None:
        capture_layer(layer, list(start_states), windows, 2)

    parts: dict[str, tuple[float, ...]] = {}  # seconds, of the bare products, and of these without gate and up again
    with Recorder() as recorder:
        forward(threads=1)
    calls = recorder.calls
    with Recorder() as recorder:
        hessians(layer, found["capture"])
    for name, work, products in (
        ("forward", forward, calls),
        ("Hessians", lambda: hessians(layer, found["capture"]), recorder.calls),
    ):
        again = products if name == "forward" else [call for n, call in enumerate(products) if n % 4 > 1]
        parts[name] = tuple(seconds(run, args.repeats) for run in (work, replay(products), replay(again)))
    attention = seconds(before, args.repeats)
    counts = found["capture"].topk_ids.flatten().bincount(minlength=layer.experts)
    path = folder / "inputs.safetensors"
    captured = {"x": found["capture"].x.cpu(), "topk_ids": found["capture"].topk_ids.cpu()}
    start = time.perf_counter()
    write_tensors(path, captured)
    writing = time.perf_counter() - start

    print(f"  reading and decoding the layer: {loading:.2f} s ({checkpoint.path / SINGLE} from the page cache)")
    print(f"  tokens per expert: {int(counts.min())} to {int(counts.max())}")
    whole, bare, strict = (sum(part[i] for part in parts.values()) for i in range(3))
    for name, (taken, alone, once) in parts.items():
        print(f"  {name:9} {taken:.3f} s, bare products {alone:.3f} s ({once:.3f} without gate and up again): ", end="")
        print(f"{alone / taken:.0%} ({once / taken:.0%})")
    print(f"  of the forward, up to the experts: {attention:.3f} s")
    print(f"  together  {whole:.3f} s, {args.tokens / whole:,.0f} tokens/s, {bare / whole:.0%} ({strict / whole:.0%})")
    print(f"  writing the experts' inputs: {writing:.2f} s ({path.stat().st_size / writing / 1e9:.2f} GB/s, fsync)")
    print(f"  peak on the card: {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
    rate = disk_rate(folder / SINGLE)
    hours = 40 * 1e6 * whole / args.tokens / 3600
    print(
        f"1,000,000 tokens x 40 layers: {hours:.2f} h of computing, {40 * loading / 60:.0f} min of reading and decoding"
    )
    print(f"floor: {EXPERT_BYTES / 1e9:.0f} GB of experts at {rate / 1e9:.2f} GB/s: {EXPERT_BYTES / rate / 60:.1f} min")


if __name__ == "__main__":
    main()

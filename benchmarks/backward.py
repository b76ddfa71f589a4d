"""Time and peak memory of the layer-streamed backward pass, against the forward of the same windows in the same run.

    python benchmarks/backward.py [--model examples/tiny-v41] [--tokens 16384] [--samples 1] [--threads 2] [--repeat 3]

The forward is all layers and the logits of every position, with nothing kept. Bound stated by the project: everything
that gradients of one sample take (the forward that keeps its borders, drawing targets, the backward) at most 3 times
that. CPU seconds of all threads stand beside the wall time: other load on the machine falsifies them less.
Memory may not grow with the number of layers: processes of their own run the first 2 and all 6 layers, as they are and,
so that all layers need the same, with window attention alone.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from moefit.calibrate.backward import LayerGradients, backward_layers, resample, sample_targets
from moefit.calibrate.borders import forward_borders
from moefit.calibrate.checkpoint import Checkpoint
from moefit.calibrate.deepseek_v41 import V41Config, V41Model
from moefit.calibrate.deepseek_v41.blocks import query_blocks
from moefit.calibrate.stream import run_model
from moefit.calibrate.traces import load_tokenizer, read_documents, windows
from moefit.parallel import ordered_map

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
BOUND = 3.0
Result = TypeVar("Result")


def traffic(model: Path, tokens: int, length: int = 512) -> list[Tensor]:
    """Windows of the example traffic, documents from all its parts, up to `tokens` tokens."""
    cut = windows(read_documents(EXAMPLES / "traffic.jsonl", load_tokenizer(model)), length)
    order = torch.randperm(len(cut), generator=torch.Generator().manual_seed(0)).tolist()
    chosen: list[Tensor] = []
    for number in order:
        chosen.append(torch.from_numpy(cut[number].ids).long())
        if sum(map(len, chosen)) >= tokens:
            break
    return chosen


def plain_forward(model: V41Model, ids: list[Tensor], threads: int) -> None:
    """Every position's logits, block by block, as they are needed for drawing."""
    states = run_model(model, ids, threads)

    def one(window: int) -> None:
        for block in query_blocks(len(ids[window])):
            model.logits(states[window], block)

    for _ in ordered_map(one, range(len(ids)), threads):
        pass


class Stopwatch:
    """Wall and CPU seconds of every stage, one entry per repetition."""

    def __init__(self) -> None:
        self.wall: dict[str, list[float]] = {}
        self.cpu: dict[str, list[float]] = {}

    def __call__(self, name: str, work: Callable[[], Result]) -> Result:
        wall, cpu = time.perf_counter(), time.process_time()
        result = work()
        self.wall.setdefault(name, []).append(time.perf_counter() - wall)
        self.cpu.setdefault(name, []).append(time.process_time() - cpu)
        return result


def drain(layers: Iterator[LayerGradients]) -> None:
    for layer in layers:
        for _ in layer.experts():
            pass


def once(model: V41Model, ids: list[Tensor], samples: int, threads: int, clock: Stopwatch) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        borders = clock("forward, borders kept", lambda: forward_borders(model, ids, folder, threads))
        targets = clock("draw targets", lambda: sample_targets(borders, samples, 0, threads))
        clock("backward", lambda: drain(backward_layers(borders, targets, threads)))
        clock("resample", lambda: resample(borders, 0.7, 0, threads))


def peak_memory() -> int:
    """Peak resident bytes of this process alone: `getrusage` counts what its parent had when it was started."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def memory(args: argparse.Namespace, layers: int, kind: str) -> int:
    """Peak resident bytes of a process that goes forward and back through the first `layers` layers."""
    command = [sys.executable, __file__, "--model", args.model, "--tokens", args.tokens, "--samples", args.samples]
    command += ["--threads", args.threads, "--only-layers", layers, "--kind", kind]
    return int(subprocess.run(list(map(str, command)), check=True, capture_output=True).stdout)


def shortened(config: V41Config, layers: int, kind: str) -> V41Config:
    """The first layers alone; kind "equal": with window attention alone."""
    config = replace(config, num_hidden_layers=layers)
    if kind == "equal":
        ratios = (0,) * len(config.compress_ratios)
        sources = {"kv_source_layer_ids": (), "index_source_layer_ids": (), "candidate_source_layer_id": -1}
        config = replace(config, compress_ratios=ratios, **sources)
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=EXAMPLES / "tiny-v41")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only-layers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    args = parser.parse_args()
    model = V41Model(Checkpoint.open(args.model))
    ids = traffic(args.model, args.tokens)
    clock = Stopwatch()
    if args.only_layers:
        model.config = shortened(model.config, args.only_layers, args.kind)
        once(model, ids, args.samples, args.threads, clock)
        print(peak_memory())
        return

    plain_forward(model, ids[:2], args.threads)  # first use of libraries
    for _ in range(args.repeat):
        clock("forward", lambda: plain_forward(model, ids, args.threads))
        once(model, ids, args.samples, args.threads, clock)
    tokens = sum(map(len, ids))
    print(f"{args.model.name}, {tokens} tokens in {len(ids)} windows, {args.samples} sample(s), {args.threads} threads")
    print(f"{'stage':24}{'wall s':>9}{'ratio':>8}{'CPU s':>9}{'ratio':>8}   (medians of {args.repeat} repetitions)")
    total = "all for gradients"
    for times in (clock.wall, clock.cpu):
        parts = [times[name] for name in times if name not in ("forward", "resample")]
        times[total] = [sum(stage) for stage in zip(*parts, strict=True)]
    ratios = {}
    for name in clock.wall:
        row = ""
        for times in (clock.wall, clock.cpu):
            ratios[name] = statistics.median(a / b for a, b in zip(times[name], times["forward"], strict=True))
            row += f"{statistics.median(times[name]):9.2f}{ratios[name]:8.2f}"
        print(f"{name:24}{row}")
    for kind in ("equal", "own"):
        two, six = (memory(args, layers, kind) / 1e6 for layers in (2, 6))
        print(f"peak resident memory, {kind} layers: {two:.0f} MB with 2, {six:.0f} MB with 6 ({six / two - 1:+.1%})")
    if args.samples == 1:
        print(f"CPU ratio {ratios[total]:.2f} (bound {BOUND})")
        sys.exit(ratios[total] > BOUND)


if __name__ == "__main__":
    main()

"""Whole matrices and whole experts on one card, and the hours that 15,360 experts take on one card and on eight.

    python benchmarks/expert_cuda.py [--group 16] [--k 3] [--codebook mul1] [--exllamav3]

Weights and full Hessians lie on the card in float32, one of each for every matrix; packed tensors come out on the
host, by `quantize_linears` with everything it does by default. Not counted: reading the checkpoint, calibration. Needs
a card and -DMOEFIT_CUDA=ON.
--exllamav3 runs exllamav3's quantize_exl3_batch on the same matrices in the same process, if it can be imported, as
its converter would: gate and up share one Hessian and its factor, every down has its own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from moefit.quantize.codebook import Codebook
from moefit.quantize.ldlq import proxy_error
from moefit.quantize.linear import Linear, Options, decode, quantize_linears

SHAPES = {"gate/up": (5120, 2304), "down": (2304, 5120)}  # DeepSeek-V4.1's routed experts
EXPERTS = 40 * 384
PEER_GROUP = 8


def ours(weight: Tensor, hin: Tensor, hout: Tensor | None, options: Options) -> list[Linear]:
    """Packed matrices [b, k, n]."""
    return list(quantize_linears({f"matrix{i}": w for i, w in enumerate(weight)}, hin, hout, options).values())


def exllamav3(weight: Tensor, hessian: Tensor, codebook: Codebook, bits: float) -> list[dict[str, Tensor]]:
    """The same by exllamav3. hessian: [1, k, k] for all of them, or [b, k, k]."""
    from exllamav3.modules.quant.exl3_lib import quantize_exl3_batch  # type: ignore[import-not-found]

    captured = [
        {"H": h.clone(), "count": 1, "finalized": False, "device": h.device, "first_key": "matrix"} for h in hessian
    ]
    options = [
        {"K": int(bits), codebook: True, "devices": [0], "apply_out_scales": None, "seed": i}
        for i in range(len(weight))
    ]
    hessians = captured * len(weight) if len(captured) == 1 else captured
    return [tensors for _, tensors in quantize_exl3_batch([w.clone() for w in weight], hessians, options)]


def synthetic_hessians(count: int, size: int) -> Tensor:
    """Means of x x^T over 4,096 correlated tokens with unequal channels: float32 [count, size, size]."""
    result = torch.empty(count, size, size, device="cuda")
    for h in result:
        shared = torch.randn(4096, 64, device="cuda") @ torch.randn(64, size, device="cuda") / 8
        x = (torch.randn(4096, size, device="cuda") + shared) * torch.randn(size, device="cuda").mul(0.5).exp()
        torch.mm(x.T, x / 4096, out=h)
    return result


def relative_error(weight: Tensor, hin: Tensor, codebook: Codebook, stored: Sequence[np.ndarray]) -> float:
    """tr(E^T Hin E) / tr(W^T Hin W) of what a reader decodes from trellis, suh and svh."""
    return proxy_error(weight, decode(*stored, codebook).cuda(), hin)


def fastest(work: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest run."""
    seconds = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measure(projection: str, args: argparse.Namespace) -> dict[str, float]:
    """Prints and returns seconds a matrix by way."""
    k, n = SHAPES[projection]
    most = max(*args.group, PEER_GROUP)
    weight = torch.randn(most, k, n, device="cuda") * torch.randn(most, 1, n, device="cuda").mul(0.3).exp() / 50
    hin, hout = synthetic_hessians(most, k), synthetic_hessians(most, n)
    options = Options(args.k, args.codebook, refit=args.refit)
    ours(weight[:2], hin[:2], hout[:2], options)  # warm-up
    result = {}
    for sides, out in (("one-sided", None), ("two-sided", hout)):
        for b in args.group:
            given = weight[:b], hin[:b], None if out is None else out[:b]
            seconds = fastest(lambda given=given: ours(*given, options), args.repeats) / b
            result[f"{sides}, group {b}"] = seconds
            print(f"{projection:7} {k}x{n} {sides}, group {b:2}: {seconds:.4f}", flush=True)
    if args.exllamav3:
        given = hin[:1] if projection == "gate/up" else hin[:PEER_GROUP]
        exllamav3(weight[:2], given[:2], args.codebook, args.k)  # warm-up
        name, b = f"exllamav3, group {PEER_GROUP}", PEER_GROUP
        result[name] = fastest(lambda: exllamav3(weight[:b], given, args.codebook, args.k), 1) / b
        print(f"{projection:7} {k}x{n} {name}: {result[name]:.4f}", flush=True)
        mine = ours(weight[:1], hin[:1], None, options)[0]
        theirs = exllamav3(weight[:1], hin[:1], args.codebook, args.k)[0]
        ratio = [
            relative_error(weight[0], hin[0], args.codebook, stored)
            for stored in (
                (mine.trellis, mine.suh, mine.svh),
                [theirs[name].cpu().numpy() for name in ("trellis", "suh", "svh")],
            )
        ]
        print(f"        one-sided tr(E^T H E) / tr(W^T H W): {ratio[0]:.6f}, exllamav3 {ratio[1]:.6f}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", type=int, nargs="+", default=[16], help="matrices quantized together")
    parser.add_argument("--k", type=float, default=3.0)
    parser.add_argument("--codebook", default="mul1")
    parser.add_argument("--refit", type=int, default=Options().refit, help="rounds of scale refit")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--exllamav3", action="store_true", help=f"groups of {PEER_GROUP}, integer K")
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, K={args.k:g} {args.codebook}; seconds a matrix")
    results = {projection: measure(projection, args) for projection in SHAPES}
    gate, down = results["gate/up"], results["down"]
    for way in gate:
        expert = 2 * gate[way] + down[way]
        hours = expert * EXPERTS / 3600
        print(f"{way:20} {expert:.3f} s an expert; {EXPERTS:,}: {hours:.2f} h on one card, {hours / 8:.2f} h on eight")
    for peer in (way for way in gate if way.startswith("exllamav3")):
        for way in (way for way in gate if way != peer):
            print(f"{peer} / {way}: gate/up {gate[peer] / gate[way]:.2f}x, down {down[peer] / down[way]:.2f}x")


if __name__ == "__main__":
    main()

"""CUDA trellis encoder: tiles per second of one card and error, per codebook and K. Needs a card and -DMOEFIT_CUDA=ON.

    python benchmarks/encoder_cuda.py [--tiles 8192] [--k 2 3 4]

Median of five runs on unit Gaussian tiles, input check and scratch allocation included.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from moefit.quantize.codebook import table_float32
from moefit.quantize.cuda_encode import encode_tiles_cuda


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiles", type=int, default=8192)
    parser.add_argument("--k", type=float, nargs="+", default=[2, 3, 4])
    parser.add_argument("--codebook", nargs="+", default=["mul1", "mcg"])
    args = parser.parse_args()
    tiles = torch.randn((args.tiles, 256), generator=torch.Generator().manual_seed(9)).cuda()
    print(f"{torch.cuda.get_device_name()}, {args.tiles} tiles")
    for codebook in args.codebook:
        values = torch.from_numpy(table_float32(codebook).copy()).cuda()
        for bits in args.k:
            states, seconds = encode_tiles_cuda(tiles, codebook, bits), []
            for _ in range(5):
                torch.cuda.synchronize()
                start = time.perf_counter()
                encode_tiles_cuda(tiles, codebook, bits)
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - start)
            error = (values[states.to(torch.int64)] - tiles).double().square().mean().item()
            print(
                f"{codebook:6} K={bits:<4g} {args.tiles / statistics.median(seconds):10,.0f} tiles/s  MSE {error:.6f}"
            )


if __name__ == "__main__":
    main()

"""Trellis encoder: tiles per second and core, per instruction set and K, against the plain Python reference.

    python benchmarks/encoder.py [--k 2 3 4] [--codebook mul1] [--seconds 3]

Best of many short runs on one thread, Gaussian tiles; run it on an idle machine. `vs reference` is a ratio within
the same run; exllamav3 has no CPU encoder to stand beside.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from moefit.quantize.encode import decode_states, encode_tiles, instruction_sets
from moefit.quantize.regularize import CODEBOOK_SCALE


def tiles_per_second(tiles: np.ndarray, codebook: str, bits: float, isa: str, seconds: float) -> float:
    encode_tiles(tiles[:1], codebook, bits, isa=isa)
    end, best = time.perf_counter() + seconds, float("inf")
    while time.perf_counter() < end or best == float("inf"):
        start = time.perf_counter()
        encode_tiles(tiles, codebook, bits, isa=isa)
        best = min(best, time.perf_counter() - start)
    return len(tiles) / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--k", type=float, nargs="+", default=[2, 3, 4])
    parser.add_argument("--codebook", default="mul1")
    parser.add_argument("--seconds", type=float, default=3.0)
    args = parser.parse_args()
    noise = np.random.default_rng(0).standard_normal((32, 256)).astype(np.float32)
    print(f"{'codebook':9} {'K':>4} {'kernel':>10} {'tiles/s':>10} {'vs reference':>13} {'relative error':>15}")
    for bits in args.k:
        scale = np.float32(CODEBOOK_SCALE[args.codebook][bits])
        tiles = noise * scale
        slow = tiles_per_second(tiles[:1], args.codebook, bits, "reference", 0.0)
        for isa in instruction_sets():
            speed = tiles_per_second(tiles[: 4 if isa == "plain" else 32], args.codebook, bits, isa, args.seconds)
            values = decode_states(encode_tiles(tiles, args.codebook, bits, isa=isa), args.codebook)
            error = float(np.mean((values.astype(np.float64) - tiles) ** 2)) / float(scale) ** 2
            print(
                f"{args.codebook:9} {bits:4g} {isa:>10} {speed:10.0f} {speed / slow:12.0f}x {error:15.5f}", flush=True
            )


if __name__ == "__main__":
    main()

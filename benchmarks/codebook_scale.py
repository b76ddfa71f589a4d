"""Find the standard deviation at which Gaussian tiles cost least, per codebook and K.

    python benchmarks/codebook_scale.py [--tiles 400]

The printed numbers are `quantize.regularize.CODEBOOK_SCALE`: error divided by the scale squared, minimum of a parabola
through the best three points of the grid.
"""

from __future__ import annotations

import argparse

import numpy as np

from moefit.quantize.codebook import CODEBOOKS, HALF_BITS, INTEGER_BITS
from moefit.quantize.encode import decode_states, encode_tiles


def relative_error(tiles: np.ndarray, codebook: str, bits: float, scale: float, threads: int) -> float:
    scaled = tiles * np.float32(scale)
    values = decode_states(encode_tiles(scaled, codebook, bits, threads=threads), codebook)
    return float(np.mean((values.astype(np.float64) - scaled) ** 2)) / scale**2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiles", type=int, default=400)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    tiles = np.random.default_rng(0).standard_normal((args.tiles, 256)).astype(np.float32)
    step = 0.06
    for codebook in CODEBOOKS:
        for bits in sorted(INTEGER_BITS + (HALF_BITS if codebook == "mul1" else ())):
            errors: dict[float, float] = {}
            scale = 0.9 if codebook == "mul1" else 1.1
            while True:  # walk downhill
                for s in (scale - step, scale, scale + step):
                    s = round(s, 4)
                    if s not in errors:
                        errors[s] = relative_error(tiles, codebook, bits, s, args.threads)
                best = min(errors, key=errors.__getitem__)
                if best == round(scale, 4):
                    break
                scale = best
            low, mid, high = (errors[round(scale + d, 4)] for d in (-step, 0, step))
            scale += 0.5 * step * (low - high) / (low - 2 * mid + high)
            print(f"{codebook:5s} K={bits:<3g} scale {scale:.3f}  relative error {mid:.6f}", flush=True)


if __name__ == "__main__":
    main()

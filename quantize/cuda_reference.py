"""Plain numpy model of the CUDA encoder (quantize/cuda/encode.cu), bit for bit.

It differs from `trellis.encode_reference` in its arithmetic (fp16 costs, the smallest subtracted every eighth step)
and in meeting in the middle: a search runs forward and backward to a position where the sum of both costs is smallest
at the node on the best path. Reading the bits of a state in reverse turns a step backwards into a step forwards.
"""

from __future__ import annotations

import numpy as np

from .trellis import RING, reverse_bits, symbol_widths

LIMIT = 16.0  # weights are clamped: no codebook value reaches 4
RENORMALIZE = 8  # steps


def _candidates(cost: np.ndarray, values: np.ndarray, weight: np.float16, enter: int, leave: int) -> np.ndarray:
    """float16 [2^leave, nodes leaving]: one fused multiply-add each; float64 holds it exactly before it rounds."""
    d = (values - weight).astype(np.float64)
    return (np.repeat(cost, 1 << enter).astype(np.float64) + d * d).astype(np.float16).reshape(1 << leave, -1)


def _run(start: int | None, values: np.ndarray, weights: np.ndarray, width: np.ndarray) -> list[np.ndarray]:
    """Costs before and after each step. Step u enters with width[u] and leaves with width[u + 1]."""
    cost = np.zeros(1 << (16 - width[0]), np.float16)
    if start is not None:
        cost[:] = np.inf
        cost[start] = 0
    rows = [cost]
    smallest = np.float16(0)
    for u, weight in enumerate(weights):
        cost = _candidates(cost, values, weight, width[u], width[u + 1]).min(axis=0)
        if u % RENORMALIZE == RENORMALIZE - 2:
            smallest = cost.min()
        if u % RENORMALIZE == RENORMALIZE - 1:
            cost = cost - smallest
        rows.append(cost)
    return rows


def _trace(
    rows: list[np.ndarray], values: np.ndarray, weights: np.ndarray, width: np.ndarray, node: int
) -> tuple[np.ndarray, int]:
    """(states of the path that ends in `node`, the node it begins with)."""
    states = []
    for u in reversed(range(len(weights))):
        h = int(_candidates(rows[u], values, weights[u], width[u], width[u + 1])[:, node].argmin())
        states.append(h << int(16 - width[u + 1]) | node)
        node = states[-1] >> int(width[u])
    return np.array(states[::-1]), node


def encode_cuda_reference(tiles: np.ndarray, values: np.ndarray, bits: float, lead: int) -> np.ndarray:
    """tiles float32 [count, 256], values float32 [65536] -> states uint16 [count, 256]."""
    width, half = symbol_widths(bits), RING // 2
    values = values.astype(np.float16)
    mirrored = values[reverse_bits(np.arange(1 << 16), 16)]
    node_bits = 16 - int(width[0])
    flip = reverse_bits(np.arange(1 << node_bits), node_bits)
    width = np.concatenate([width, width])
    states = np.empty(tiles.shape, np.uint16)

    def meet(forward: list[np.ndarray], backward: list[np.ndarray]) -> int:
        return int((forward[-1].astype(np.float32) + backward[-1][flip].astype(np.float32)).argmin())

    for i, raw in enumerate(tiles):
        tile = np.clip(raw, -LIMIT, LIMIT).astype(np.float16)
        ahead, behind = tile[np.arange(-lead, 0) % RING], tile[np.arange(lead - 1, -1, -1) % RING]
        node = meet(_run(None, values, ahead, width), _run(None, mirrored, behind, width))
        ahead, behind = tile[:half], tile[half:][::-1]
        forward, backward = _run(node, values, ahead, width), _run(int(flip[node]), mirrored, behind, width)
        middle = meet(forward, backward)
        states[i, :half], _ = _trace(forward, values, ahead, width, middle)
        path, _ = _trace(backward, mirrored, behind, width, int(flip[middle]))
        states[i, half:] = reverse_bits(path, 16)[::-1]
    return states

"""The machine's cost model: how long one expert takes in one step, wherever it lies."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .machine import Machine


class Way(NamedTuple):
    """One way to compute an expert of b bytes for n tokens of a step: fixed + b / bandwidth + n * token seconds."""

    name: str
    fixed: float
    bandwidth: float
    token: float

    def seconds(self, size: np.ndarray, hits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Of experts of `size` bytes asked for in `hits` steps by `tokens` tokens in all; float64, broadcast."""
        return (self.fixed + size / self.bandwidth) * hits + self.token * tokens


def card_ways(machine: Machine) -> tuple[Way, ...]:
    """One for each place that is not the host. In mode "tp" the slowest card counts, and each does a slice's work."""
    ways = [Way("card", 0.0, float(gpu.bandwidth), gpu.token_ns / 1e9) for gpu in machine.gpus]
    if machine.mode == "tp":
        token = max(way.token for way in ways) / len(ways)
        return (Way("cards", 0.0, min(way.bandwidth for way in ways), token),)
    return tuple(ways)


def host_ways(machine: Machine, prefill: bool) -> tuple[Way, ...]:
    """The ways for an expert on the host, of which an engine takes the fastest.

    Cards read host memory over all links at once: different experts in mode "ep", their slices in mode "tp". In
    prefill the copy engines bring experts in, in decoding kernels read them in place.
    """
    speed = machine.copy_engine if prefill else machine.zero_copy
    token = min(gpu.token_ns for gpu in machine.gpus) / 1e9 / len(machine.gpus)
    ways = [Way("copy" if prefill else "zero-copy", 0.0, float(speed * machine.links), token)]
    if machine.cpu is not None:
        cpu = machine.cpu
        ways.append(Way("cpu", cpu.fixed_ns / 1e9, float(cpu.bandwidth), cpu.token_ns / 1e9))
    return tuple(ways)


def stored_sizes(machine: Machine, card_sizes: np.ndarray, host_sizes: np.ndarray) -> np.ndarray:
    """int64 [L, E, P]: bytes that an expert takes on each place, as the host's allocator rounds them."""
    different, which = np.unique(host_sizes, return_inverse=True)
    pinned = np.array([machine.pinned(int(size)) for size in different])[which].reshape(host_sizes.shape)
    return np.stack([card_sizes] * (len(machine.places) - 1) + [pinned], axis=2)

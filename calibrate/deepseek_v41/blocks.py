"""What the parts of a layer share: the root-mean-square norm and the walk over query blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...parallel import slices

CARD_TOKENS = 8192
"""Tokens at a time of what treats each apart, on a card: 671 MB of streams at V4.1's widths. Launches are dear."""
QUERY_BLOCK = 256
"""Queries at a time: with 64 heads and the at most 2,431 keys of dense attention their scores take 160 MB."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension."""
    return x * torch.rsqrt(mean_square(x).unsqueeze(-1) + eps) * weight


class _MeanSquare(torch.autograd.Function):
    """`x.square().mean(-1)` whose gradient is one product instead of the five passes over x that autograd makes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square().mean(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x * (gradient * (2 / x.shape[-1])).unsqueeze(-1)


def mean_square(x: Tensor) -> Tensor:
    """Mean of the squares over the last dimension, [..., n] -> [...]."""
    return _MeanSquare.apply(x) if x.requires_grad else x.square().mean(-1)


def by_tokens(part: Callable[[slice], Tensor], like: Tensor) -> Tensor:
    """`by_blocks` of what treats every token of `like` [T, ...] apart: on a card in few pieces, of many tokens each."""
    return by_blocks(part, len(like), QUERY_BLOCK if like.is_cpu else CARD_TOKENS)


def by_blocks(part: Callable[[slice], Tensor], length: int, size: int = 0) -> Tensor:
    """`part` of every block of `size` positions (0: QUERY_BLOCK), one after the other in one tensor [length, ...].

    Unless a gradient is recorded, the whole exists once, and not as pieces besides.
    """
    blocks = slices(length, size or QUERY_BLOCK)
    first = part(next(blocks))
    if len(first) == length:
        return first
    if first.requires_grad:
        return torch.cat([first, *map(part, blocks)])
    whole = first.new_empty(length, *first.shape[1:])
    whole[: len(first)] = first
    for block in blocks:
        whole[block] = part(block)
    return whole


def query_blocks(length: int) -> Iterator[slice]:
    """Slices of at most QUERY_BLOCK positions that cover `length`."""
    return slices(length, QUERY_BLOCK)

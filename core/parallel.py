"""Threads that do not change the answer.

BLAS may split a reduction differently for another thread count and so round differently. Every worker
therefore runs its own torch operations on one thread, and work is cut into pieces that do not depend on how
many workers there are: same seed, same bytes, whatever the number of threads.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def default_threads() -> int:
    """Number of CPUs this process may use."""
    return len(os.sched_getaffinity(0))


def ordered_map(function: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Iterator[Result]:
    """`map(function, items)` on `threads` workers, results in the order of `items`.

    At most `threads + 1` items are started ahead of the one the caller waits for, so results that are large do
    not pile up. The first exception stops the rest and is raised. Until the last result is taken, the caller's own
    torch operations keep to one thread too: an OpenMP team waits by spinning, on cores that the workers need.
    """

    def single_threaded(item: Item) -> Result:
        torch.set_num_threads(1)  # a thread-local setting: it must be made in the worker itself
        return function(item)

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if threads <= 1:
            yield from map(function, items)
            return
        pending: deque[Future[Result]] = deque()
        with ThreadPoolExecutor(threads) as pool:
            try:
                for item in items:
                    pending.append(pool.submit(single_threaded, item))
                    if len(pending) > threads + 1:
                        yield pending.popleft().result()
                while pending:
                    yield pending.popleft().result()
            finally:
                for future in pending:
                    future.cancel()
    finally:
        torch.set_num_threads(before)


def slices(length: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover `length`."""
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


@contextmanager
def overlapped(enabled: bool) -> Iterator[Callable[[Callable[[], None]], None]]:
    """Hands out a function that runs tasks in the order given, on a thread of its own, while the caller goes on.

    At most one task is unfinished when the next is accepted, so that what tasks hold does not pile up. What a task
    raises comes out of a later call, or on leaving, which waits for the last; no task starts after one that failed.
    Not enabled: tasks are run at once.
    """
    if not enabled:
        yield lambda task: task()
        return
    last: Future[None] | None = None
    with ThreadPoolExecutor(1) as pool:

        def then(task: Callable[[], None]) -> None:
            nonlocal last
            if last is not None:
                last.result()
            last = pool.submit(task)

        yield then
        if last is not None:
            last.result()

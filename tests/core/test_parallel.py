"""Order, thread settings and failure of the worker pool."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from moefit.parallel import ordered_map, overlapped


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_come_in_order(threads: int) -> None:
    def slow_first(n: int) -> int:
        time.sleep(0.02 if n == 0 else 0)
        return n * n

    assert list(ordered_map(slow_first, range(20), threads)) == [n * n for n in range(20)]


@pytest.mark.parametrize("threads", [1, 3])
def test_torch_is_single_threaded_inside_and_restored_after(threads: int) -> None:
    torch.set_num_threads(2)
    assert set(ordered_map(lambda _: torch.get_num_threads(), range(8), threads)) == {1}
    assert torch.get_num_threads() == 2


def test_results_do_not_pile_up() -> None:
    started: list[int] = []
    lock = threading.Lock()

    def note(n: int) -> int:
        with lock:
            started.append(n)
        return n

    results = ordered_map(note, range(100), 2)
    next(results)
    time.sleep(0.1)
    assert len(started) <= 5
    results.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_the_first_failure_is_raised(threads: int) -> None:
    def fails(n: int) -> int:
        if n == 3:
            raise ValueError("three")
        return n

    results = ordered_map(fails, range(1000), threads)
    with pytest.raises(ValueError, match="three"):
        list(results)


@pytest.mark.parametrize("enabled", [False, True])
def test_tasks_behind_the_caller_keep_their_order(enabled: bool) -> None:
    done: list[int] = []
    with overlapped(enabled) as then:
        for n in range(5):

            def task(n: int = n) -> None:
                time.sleep(0.01)
                done.append(n)

            then(task)
            assert len(done) >= n - 1 + (not enabled)
    assert done == [0, 1, 2, 3, 4]


def test_the_caller_goes_on_meanwhile() -> None:
    go = threading.Event()
    with overlapped(True) as then:
        then(lambda: assert_true(go.wait(5)))
        go.set()  # would never come if the task had been waited for


def assert_true(value: bool) -> None:
    assert value


def test_nothing_is_started_after_a_failure() -> None:
    done: list[int] = []

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), overlapped(True) as then:
        then(fail)
        then(lambda: done.append(1))
    assert not done
    with pytest.raises(ZeroDivisionError), overlapped(True) as then:
        then(fail)

"""The kernels of windows: along the ways of microbatches they narrow windows to heads and tails."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from fxsplit.schedule import Times
from fxsplit.schedule.homes import deal_in_turn, go_there_and_back, line
from fxsplit.schedule.kernels import compile_kernels, walks
from fxsplit.schedule.kernels.instance import make_instance
from fxsplit.schedule.solver.heads import find_heads
from fxsplit.system.kernels import compile_kernel

HOMES = [line(3), go_there_and_back(2), deal_in_turn(3, 2)]


@pytest.mark.parametrize("homes", HOMES)
@pytest.mark.parametrize("n", [1, 4])
def test_windows_spread_to_heads_and_tails(homes: tuple[tuple[int, ...], ...], n: int) -> None:
    """One microbatch never waits for a link, and messages without hops neither: then ways are all that counts."""
    count, random = len(homes), Random(n)
    forward, backward = ([random.uniform(1, 5) for _ in range(count)] for _ in range(2))
    hops, latency = ([random.uniform(0.5, 2) for _ in range(count)] for _ in range(2))
    weight = [0.4 * b for b in backward] if n == 1 else [0.0] * count
    link = hops if n == 1 else ()
    back = [2 * hop for hop in hops] if n == 1 else ()
    one = make_instance(homes, n, Times(forward, backward, link, back, weight_ms=weight, latency_ms=latency))
    expected = find_heads(one)
    plain: Callable[..., None] = walks.KERNELS[0]  # type: ignore[assignment]
    for kernel in (plain, compile_kernel(plain)):
        head, last = np.zeros((2, count, n)), np.full((2, count, n), 1000.0)
        changed = np.zeros(one.n_devices, np.bool_)
        kernel(one, 1000.0, head, last, changed, 1e-9)
        assert head == pytest.approx(expected.head, rel=1e-12)
        assert last == pytest.approx(1000.0 - expected.tail, rel=1e-12)
        assert changed.all()
        # Nothing is left to narrow.
        changed[:] = False
        kernel(one, 1000.0, head, last, changed, 1e-9)
        assert not changed.any()


def test_a_new_window_marks_the_devices_behind_it() -> None:
    one = make_instance(line(3), 2, Times.unit(3))
    found = find_heads(one)
    head, last, changed = found.head.copy(), 100.0 - found.tail, np.zeros(3, np.bool_)
    head[1, 1, 1] += 3.0
    walks.spread(one, 100.0, head, last, changed, 1e-9)
    assert changed.tolist() == [True, False, False]
    assert head[1, 0].tolist() == [found.head[1, 0, 0], found.head[1, 0, 1] + 3.0]
    changed[:] = False
    last[0, 1, 0] -= 2.0
    walks.spread(one, 100.0, head, last, changed, 1e-9)
    # The F before it must end earlier too.
    assert changed.tolist() == [True, False, False]
    assert last[0, 0].tolist() == [100.0 - found.tail[0, 0, 0] - 2.0, 100.0 - found.tail[0, 0, 1]]


def test_kernels_are_compiled() -> None:
    compile_kernels()
    assert all(hasattr(getattr(walks, kernel.__name__), "py_func") for kernel in walks.KERNELS)

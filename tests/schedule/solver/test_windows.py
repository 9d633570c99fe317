"""Windows: what they refute is impossible, and a step that exists is never refuted."""

from __future__ import annotations

import time
from math import inf
from random import Random

import numpy as np
import pytest

from fxsplit.schedule import Times
from fxsplit.schedule.homes import go_there_and_back, line
from fxsplit.schedule.kernels.instance import make_instance
from fxsplit.schedule.solver.heads import find_heads
from fxsplit.schedule.solver.windows import PRECISE, WindowBound, list_states, prove_bound, share_weights
from tests.support.exact_schedules import draw, find_optimum, make_arrays

LIMIT = 1_000_000


@pytest.mark.parametrize("placement", ["line", "v", "loop"])
def test_possible_steps_are_not_refuted(placement: str) -> None:
    equal = 0
    for seed in range(12):
        x = draw(Random(f"windows {placement}{seed}"), placement, 2)
        one = make_arrays(x)
        proofs = WindowBound(one, find_heads(one), LIMIT)
        assert proofs.complete
        # All microbatches one after another fit any memory.
        slow = float(one.work.sum()) + x.n * 2 * (sum(x.hops[0]) + sum(x.hops[1]) + 2 * sum(x.latency))
        bound = prove_bound(proofs, 1.0, slow, inf)
        optimum = find_optimum(x, 1.05 * bound + 1)
        assert bound <= optimum * (1 + 1e-9)
        for share in (1.0, 1.0001, 1.1, 2.0):
            assert not proofs.refutes(optimum * share, inf)
        assert proofs.refutes(bound * (1 - 3 * PRECISE), inf)
        equal += bound >= optimum * (1 - 1e-6)
    # Of lines the bound is nearly always the optimum, and of others mostly.
    assert equal >= 10


def test_states_are_those_that_fit() -> None:
    def count(memory: float | None, kept: float = 1.0, n: int = 3) -> int:
        found = list_states(make_instance(line(2), n, Times.unit(2), memory, kept), 0, LIMIT)
        assert found is not None
        return len(found.between)

    # In flight and waiting W: pairs of 0 to 3.
    assert count(None) == 16
    assert count(1) == 3
    assert count(2) == 6
    # A waiting W keeps half.
    assert count(1, 0.5) == 3 + 1
    assert count(1, 0.0) == 4 * 2
    assert list_states(make_instance(line(2), 3, Times.unit(2)), 0, 15) is None
    assert list_states(make_instance(line(2), 3, Times.unit(2)), 0, 16) is not None


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 0.5)])
@pytest.mark.parametrize("memory", [1.0, 2.0, None])
def test_moves_lead_from_state_to_state(weights: tuple[float, float], memory: float | None) -> None:
    times = Times([1.0] * 4, [2.0] * 4, weight_ms=[weights[0]] * 2 + [weights[1]] * 2)
    one = make_instance(go_there_and_back(2), 2, times, memory)
    states = list_states(one, 0, LIMIT)
    assert states is not None
    alike = share_weights(one, 0)
    assert alike == (weights[0] == weights[1])
    between, follow = states.between, states.follow
    assert follow.shape[1] == 4 + (1 if alike else 2)
    assert not between[states.empty].any() and (follow[states.empty, 1:] == -1).all()
    # The first F leads to one microbatch between it and the next place; moves lead to later rows, the last I earlier.
    assert between[follow[states.empty, 0]].tolist() == [1, 0, 0]
    for move, (less, more) in enumerate([(None, 0), (0, 1), (1, 2), (2, None)]):
        at = np.flatnonzero(follow[:, move] >= 0)
        assert at.size
        change = between[follow[at, move]] - between[at]
        expected = np.zeros(3, int)
        if less is not None:
            expected[less] = -1
        if more is not None:
            expected[more] = 1
        assert (change == expected).all()
    for move in range(4, follow.shape[1]):
        at = np.flatnonzero(follow[:, move] >= 0)
        assert at.size and (between[follow[at, move]] == between[at]).all() and (follow[at, move] > at).all()
    # The walk finds all states that the definition allows.
    reached, todo = {states.empty}, [states.empty]
    while todo:
        for to in follow[todo.pop()].tolist():
            if to >= 0 and to not in reached:
                reached.add(to)
                todo.append(to)
    assert len(reached) >= len(list_legal(memory or inf, alike))


def list_legal(memory: float, alike: bool) -> set[tuple[int, ...]]:
    """Return what is in flight and what waits, for all orders of two microbatches on a device with two stages."""
    found = set[tuple[int, ...]]()
    todo: list[tuple[int, ...]] = [(0,) * 6]
    seen = set(todo)
    while todo:
        f0, f1, i1, i0, w1, w0 = now = todo.pop()
        waits = (i0 - w0 + i1 - w1,) if alike else (i0 - w0, i1 - w1)
        found.add((f0 - f1, f1 - i1, i1 - i0, *waits))
        for at in range(6):
            to = (*now[:at], now[at] + 1, *now[at + 1 :])
            f0, f1, i1, i0, w1, w0 = to
            legal = 2 >= f0 >= f1 >= i1 >= i0 and i1 >= w1 and i0 >= w0 and (f0 - w0 + f1 - w1) / 2 <= memory
            if legal and to not in seen:
                seen.add(to)
                todo.append(to)
    return found


def test_too_many_states_are_no_proof() -> None:
    one = make_instance(go_there_and_back(2), 8, Times.unit(4))
    proofs = WindowBound(one, find_heads(one), 100)
    assert not proofs.complete
    whole = WindowBound(one, find_heads(one), LIMIT)
    assert whole.complete and whole.size == 9 * sum(len(s.between) for s in whole.states)


def test_nothing_is_refuted_after_the_deadline() -> None:
    one = make_instance(line(2), 4, Times.unit(2), memory=1)
    proofs = WindowBound(one, find_heads(one), LIMIT)
    # The step is 19 ms: 4 times F I of both stages, and W.
    assert proofs.refutes(19.0, inf)
    assert not proofs.refutes(19.0, time.monotonic() - 1)
    assert prove_bound(proofs, 12.0, 30.0, time.monotonic() - 1) == 12.0


def test_a_bound_is_found_by_bisection() -> None:
    one = make_instance(line(2), 4, Times.unit(2), memory=1)
    proofs = WindowBound(one, find_heads(one), LIMIT)
    bound = prove_bound(proofs, 1.0, 1000.0, inf)
    assert bound == pytest.approx(20.0, rel=3 * 1000 * PRECISE / 20)
    assert bound <= 20.0
    # A step that is known: one proof is enough. A bound that is the optimum stays.
    assert prove_bound(proofs, 1.0, 20.0, inf) == pytest.approx(20.0, rel=2 * PRECISE)
    assert prove_bound(proofs, 20.0, 25.0, inf) == 20.0

"""The kernels of orders: `run` beside the simulator, and compiled or not, the same comes out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from random import Random
from typing import Any

import numpy as np
import pytest

from fxsplit.schedule import Times, simulate, verify
from fxsplit.schedule.generators.fill import evaluate, write_schedule
from fxsplit.schedule.homes import go_there_and_back, line
from fxsplit.schedule.kernels import compile_kernels, orders, walks
from fxsplit.schedule.kernels.instance import Floats, Instance, Ints, make_instance
from fxsplit.schedule.solver.heads import find_heads
from fxsplit.schedule.solver.windows import WindowBound
from tests.support.exact_schedules import Pipeline, draw, find_optimum, find_peaks, make_arrays, read_orders, run_orders

RULES = (0.0, 0.3, 0.6, 1.0, -1e-9, -0.6, -1.0, 2.0, 2.6, -2.0, -3.0)


@pytest.fixture(params=["plain", "compiled"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with the kernels in plain Python, and again with the compiled ones."""
    use_plain(monkeypatch) if request.param == "plain" else compile_kernels()


def use_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (orders, walks):
        for kernel in module.KERNELS:
            monkeypatch.setattr(module, kernel.__name__, kernel)


def draw_orders(random: Random, one: Instance) -> Ints:
    """Draw orders of F and I in which no device waits for ever, if memory is unlimited."""
    p = one.n_devices
    done = np.zeros((2, one.device.size), int)
    rows: list[list[int]] = [[] for _ in range(p)]
    chunk = {int(s): c for own in one.stages for c, s in enumerate(own)}
    last = one.device.size - 1
    for _ in range(2 * one.device.size * one.n_microbatches):
        may = [
            (op, s)
            for s in range(last + 1)
            for op in (0, 1)
            if done[op, s] < one.n_microbatches
            and (op or not s or done[0, s] < done[0, s - 1])
            and (not op or (done[1, s] < done[0, s] if s == last else done[1, s] < done[1, s + 1]))
        ]
        # Most draws take the I that is possible, so that little memory is enough for some.
        op, s = random.choice([pair for pair in may if pair[0]] or may) if random.random() < 0.7 else random.choice(may)
        done[op, s] += 1
        rows[one.device[s]].append(2 * chunk[s] + op)
    return np.array(rows, np.int64)


def draw_rules(random: Random, kinds: Ints) -> Floats:
    return np.array([[random.choice(RULES) for _ in row] for row in kinds])


def list_cases(count: int) -> Iterator[tuple[Pipeline, Instance, Ints, Floats]]:
    for seed in range(count):
        random = Random(seed)
        x = draw(random, ("line", "v", "loop")[seed % 3])
        one = make_arrays(x)
        kinds = draw_orders(random, one)
        yield x, one, kinds, draw_rules(random, kinds)


def test_runs_equal_the_simulation(kernels: None) -> None:
    ran = 0
    for x, one, kinds, rules in list_cases(150):
        step, state = evaluate(one, kinds, rules)
        if step >= orders.NEVER:
            # Only memory can stop these orders.
            assert min(x.memory) < inf
            continue
        ran += 1
        schedule = write_schedule(one, kinds, state, tuple((d,) for d in x.devices))
        verify(schedule)
        simulation = simulate(schedule, x.state_times())
        assert step == pytest.approx(simulation.step_ms, rel=1e-12)
        assert step == pytest.approx(run_orders(x, read_orders(schedule)), rel=1e-12)
        assert state.free == pytest.approx([max(end for _, end in row) for row in simulation.spans], rel=1e-12)
        assert all(peak <= most + 1e-9 for peak, most in zip(find_peaks(x, schedule), x.memory, strict=True))
        for row, spans, begins in zip(schedule.actions, simulation.spans, state.begins, strict=True):
            found = [begin for action, (begin, _) in zip(row, spans, strict=True) if action.op != "W"]
            assert found == pytest.approx(list(begins), rel=1e-12)
    assert ran > 60


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        # The last device waits for 0F1 from 5 to 6 ms, and a W takes 4 ms: there is room for 0.25 of it.
        (0.0, "F0 I0 W0 F1 I1 W1"),
        (0.25, "F0 I0 W0 F1 I1 W1"),
        (0.3, "F0 I0 F1 I1 W0 W1"),
        (1.0, "F0 I0 F1 I1 W0 W1"),
        # One W goes into each gap in any case. Before I1 none is left.
        (-1.0, "F0 I0 W0 F1 I1 W1"),
    ],
)
def test_a_rule_says_how_much_of_a_gap_a_weight_may_exceed(kernels: None, rule: float, expected: str) -> None:
    one = make_instance(line(2), 2, Times([3.0, 1.0], [4.0, 5.0], weight_ms=[2.0, 4.0]))
    kinds = np.array([[0, 0, 1, 1], [0, 1, 0, 1]])
    step, state = evaluate(one, kinds, np.full((2, 4), rule))
    schedule = write_schedule(one, kinds, state, line(2))
    assert step == pytest.approx(simulate(schedule, Times([3.0, 1.0], [4.0, 5.0], weight_ms=[2.0, 4.0])).step_ms)
    assert " ".join(f"{a.op}{a.microbatch}" for a in schedule.actions[1]) == expected


@pytest.mark.parametrize(
    ("rule", "expected"), [(1.0, "W1 W1 W0 W0"), (2.0, "W0 W0 W1 W1"), (-3.0, "W0 W0 W1 W1"), (-1.0, "W1 W1 W0 W0")]
)
def test_a_rule_may_put_the_other_chunk_first(kernels: None, rule: float, expected: str) -> None:
    one = make_instance(go_there_and_back(1), 2, Times([1.0] * 2, [2.0] * 2))
    kinds = np.array([[0, 2, 0, 2, 3, 3, 1, 1]])
    rules = np.ones((1, 8))
    # Two W of stage 1, and one of stage 0, wait before the last entry.
    rules[0, -1] = rule
    _, state = evaluate(one, kinds, rules)
    row = write_schedule(one, kinds, state, go_there_and_back(1)).actions[0]
    found = [f"W{a.stage}" for a in row if a.op == "W"]
    if abs(rule) >= orders.OTHER:
        assert found[0] == "W0" and sorted(found) == ["W0", "W0", "W1", "W1"]
    else:
        assert found == ["W1", "W1", "W0", "W0"]
    assert [a.microbatch for a in row if a.op == "W" and a.stage == 1] == [0, 1]
    # A forced W goes before the entry, others have no gap and go to the end.
    assert (row[-1].op, row[-5].op) == ("W", "I" if rule > 0 else "W") or rule < 0


def test_weights_make_room_in_memory(kernels: None) -> None:
    times = Times([1.0] * 2, [2.0] * 2)
    kinds = np.array([[0, 1, 0, 1, 0, 1]] * 2)
    one = make_instance(line(2), 3, times, memory=1)
    step, state = evaluate(one, kinds, np.ones((2, 6)))
    rows = write_schedule(one, kinds, state, line(2)).actions
    assert [a.op for a in rows[0]] == [*"FIW"] * 3 and step == 15.0
    # Two forwards in a row do not fit, and no W can help.
    assert evaluate(one, np.array([[0, 0, 1, 1, 0, 1], [0, 1] * 3]), np.ones((2, 6)))[0] >= orders.NEVER
    # An I frees half: the second F still fits, and the third needs room for a half.
    half = make_instance(line(2), 3, times, memory=[3, 1.5], kept_for_weights=0.5)
    kinds = np.array([[0, 0, 0, 1, 1, 1], [0, 1, 0, 1, 0, 1]])
    _, state = evaluate(half, kinds, np.ones((2, 6)))
    assert "".join(a.op for a in write_schedule(half, kinds, state, line(2)).actions[1]) == "FIFIWFIWW"


def test_devices_that_wait_for_each_other_never_end(kernels: None) -> None:
    one = make_instance(line(2), 2, Times.unit(2))
    # The first device wants the gradient of a microbatch whose value it sends later.
    assert evaluate(one, np.array([[0, 1, 0, 1], [0, 0, 1, 1]]), np.ones((2, 4)))[0] >= orders.NEVER


def test_list_orders_can_run(kernels: None) -> None:
    found = 0
    for x, one, kinds, _ in list_cases(45):
        v = one.stages.shape[1]
        made, state = np.zeros_like(kinds), orders.begin(one)
        priority = np.array([2.0, 1.0] if v == 1 else [4.0, 3.0, 2.0, 1.0])
        if not orders.list_orders(one, priority, np.full(x.p, x.n), 1.0, state, made):
            continue
        found += 1
        assert (np.sort(made, axis=1) == np.sort(kinds, axis=1)).all()
        assert evaluate(one, made, np.zeros(made.shape))[0] < orders.NEVER
        assert state.used == pytest.approx(np.zeros(x.p), abs=1e-9) or (state.done < x.n * v).any()
    assert found > 20


def list_by_hand(x: Pipeline, priority: list[float], most: list[int], reserve: float) -> list[list[int]] | None:
    """Return the orders of a list schedule, from its definition, or None if devices cannot go on."""
    own = [x.list_own(d) for d in range(x.p)]
    rows: list[list[int]] = [[] for _ in own]
    waiting: list[list[int]] = [[] for _ in own]
    free, used, links = [0.0] * x.p, [0.0] * x.p, dict[tuple[int, int], float]()
    arrived = {(0, 0, m): 0.0 for m in range(x.n)}

    def list_able(d: int) -> dict[int, float]:
        able = {}
        for kind in range(2 * len(own[d])):
            s, m, last = own[d][kind // 2], rows[d].count(kind), own[d][-1]
            if kind % 2 == 0:
                later = s != last and rows[d].count(2 * len(own[d]) - 2) < x.n
                room = x.memory[d] - (reserve * x.held[last] if later else 0.0)
                if used[d] + x.held[s] > room + 1e-9 or (kind == 0 and m - rows[d].count(1) >= most[d]):
                    continue
            if (kind % 2, s, m) in arrived:
                able[kind] = arrived[kind % 2, s, m]
        return able

    while any(len(row) < 2 * len(mine) * x.n for row, mine in zip(rows, own, strict=True)):
        begins = [
            min([max(free[d], t) for t in list_able(d).values()] + [free[d]] * bool(waiting[d]), default=inf)
            for d in range(x.p)
        ]
        d = begins.index(min(begins))
        if begins[d] == inf:
            return None
        now = [kind for kind, t in list_able(d).items() if t <= begins[d] + 1e-9]
        if not now:
            s = waiting[d].pop(0)
            free[d] = begins[d] + x.times[2][s]
            used[d] += x.change_memory(2, s)
            continue
        kind = min(now, key=lambda kind: priority[kind])
        op, s, m = kind % 2, own[d][kind // 2], rows[d].count(kind)
        rows[d].append(kind)
        used[d] += x.change_memory(op, s)
        free[d] = arrival = begins[d] + x.times[op][s]
        waiting[d] += [s] * op
        then = x.find_next(op, s)
        if then is not None:
            if then[2] is not None:
                link = d, x.devices[then[1]]
                links[link] = max(links.get(link, 0.0), arrival) + x.hops[op][then[2]]
                arrival = links[link] + x.latency[then[2]]
            arrived[then[0], then[1], m] = arrival
    return rows


def test_list_orders_are_those_of_the_definition(kernels: None) -> None:
    stuck = 0
    for at in range(90):
        random = Random(f"list{at}")
        x = draw(random, ("line", "v", "loop")[at % 3])
        one = make_arrays(x)
        kinds = 2 * one.stages.shape[1]
        priority = [float(number) for number in random.sample(range(kinds), kinds)]
        most = [random.choice([1, 2, x.n]) for _ in range(x.p)]
        reserve = random.choice([0.0, 1.0, 2.0])
        made = np.zeros((x.p, kinds * x.n), np.int64)
        able = orders.list_orders(one, np.array(priority), np.array(most), reserve, orders.begin(one), made)
        expected = list_by_hand(x, priority, most, reserve)
        assert able == (expected is not None)
        stuck += not able
        if able:
            assert made.tolist() == expected
    assert 3 < stuck < 45


def test_compiled_kernels_equal_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_all() -> list[Any]:
        results: list[Any] = []
        for x, one, kinds, rules in list_cases(12):
            step, state = evaluate(one, kinds, rules)
            results += [step, *(part.tolist() for part in state)]
            made = np.zeros_like(kinds)
            for most in (1, x.n):
                numbers = np.arange(2.0 * one.stages.shape[1])[::-1].copy()
                able = orders.list_orders(one, numbers, np.full(x.p, most), 1.0, orders.begin(one), made)
                results += [able, made.tolist()]
            row = kinds[0].copy()
            for kind in range(2 * one.stages.shape[1]):
                for distance in (-2, 1, 3):
                    orders._shift(row, 1, kind, int(row[0] == kind), 0, 1, distance)
                    results.append(row.tolist())
            if x.n * x.n_stages < 13:
                proofs = WindowBound(one, find_heads(one), 100_000)
                results += [proofs.refutes(share * 0.3 * x.n * one.work.max(), inf) for share in (1.0, 3.0, 9.0)]
        return results

    compile_kernels()
    compiled = run_all()
    use_plain(monkeypatch)
    assert run_all() == compiled


@pytest.mark.parametrize(
    ("start", "first", "last", "distance", "expected"),
    [
        # Entries 1 are microbatches 0, 1 and 2.
        (0, 1, 1, 1, [0, 1, 0, 0, 1, 0, 1]),
        (0, 1, 1, -1, [0, 1, 1, 0, 0, 0, 1]),
        (0, 0, 1, 1, [0, 0, 1, 0, 1, 0, 1]),
        (0, 0, 2, -1, [1, 0, 1, 0, 0, 1, 0]),
        (0, 0, 2, -9, [1, 1, 1, 0, 0, 0, 0]),
        (0, 0, 2, 9, [0, 0, 0, 0, 1, 1, 1]),
        (2, 0, 2, -9, [0, 1, 1, 1, 0, 0, 0]),
    ],
)
def test_shifts_move_entries_past_other_kinds(
    kernels: None, start: int, first: int, last: int, distance: int, expected: list[int]
) -> None:
    row = np.array([0, 1, 0, 1, 0, 0, 1])
    orders._shift(row, start, 1, int((row[:start] == 1).sum()), first, last, distance)
    assert row.tolist() == expected


def make_candidates(kinds: Ints, rules: Floats, step: float) -> orders.Candidates:
    """Return candidates that begin at these orders, with a high cost."""
    figures = np.array([2 * step, step])
    return orders.Candidates(
        kinds.copy(), rules.copy(), kinds.copy(), rules.copy(), kinds.copy(), rules.copy(), figures
    )


@pytest.mark.parametrize("cut", [0, 3, 7])
def test_an_annealing_keeps_the_best_and_the_beginning(kernels: None, cut: int) -> None:
    """The best order has the step that is claimed, and nothing before the suffix has changed."""
    for seed in (1, 4, 2):
        random = Random(seed)
        x = draw(random, ("line", "v", "loop")[seed % 3])
        one = make_arrays(x)._replace(memory=np.full(x.p, 1e9))
        kinds = draw_orders(random, one)
        rules = np.zeros(kinds.shape)
        stop = np.full(x.p, min(cut, kinds.shape[1] - 2))
        start = orders.begin(one)
        orders.run(one, kinds, rules, start, stop)
        suffix = orders.Suffix(start, min(int(start.counts.min()), x.n - 1), int(start.done.min()))
        step, state = evaluate(one, kinds, rules)
        tried = make_candidates(kinds, rules, step)
        orders.seed_random(seed)
        for by_gap in (False, True):
            cooling = orders.Cooling(300, step / 50, 0.2, 0.0, by_gap, True, 0.0)
            reached = orders.anneal(one, tried, suffix, state, np.full(x.p, kinds.shape[1]), cooling, 0, 300)
            assert not reached
        assert tried.figures[1] <= step
        assert evaluate(one, tried.best_orders, tried.best_rules)[0] == pytest.approx(tried.figures[1], rel=1e-12)
        assert (np.sort(tried.best_orders, axis=1) == np.sort(kinds, axis=1)).all()
        for r, at in enumerate(start.at):
            assert (tried.best_orders[r, :at] == kinds[r, :at]).all() and not tried.best_rules[r, :at].any()
        # What is current has the cost that is claimed.
        now, after = evaluate(one, tried.orders, tried.rules)
        assert tried.figures[0] == pytest.approx(now + 0.2 * after.free.mean(), rel=1e-9)
        goal = orders.Cooling(300, step / 50, 0.2, 0.0, True, True, 2 * step)
        assert orders.anneal(one, tried, suffix, state, np.full(x.p, kinds.shape[1]), goal, 0, 300)


def test_changes_of_rules_are_drawn_as_stated(kernels: None) -> None:
    """For a device or all after it, a share of 0 to 1.3 and often 0; for a gap, one of four, or those of all gaps."""
    orders.seed_random(1)
    start = np.array([0, 2, 0])
    zeros, lasts, shares = 0, 0, []
    for _ in range(2000):
        rules = np.full((3, 5), 7.0)
        first, last = orders._change_rules(rules, start, False, False)
        changed = rules != 7.0
        assert changed.any(axis=1).tolist() == [first <= d <= last for d in range(3)]
        assert not changed[1, :2].any() and len({*rules[changed].tolist()}) == 1
        lasts += first == 0 and last == 2
        zeros += rules[changed][0] == 0.0
        shares.append(rules[changed][0])
    assert min(shares) == 0.0 and 1.2 < max(shares) <= 1.3
    assert 500 < zeros < 700 and 250 < lasts < 420
    drawn, alone = list[float](), 0
    for _ in range(2000):
        rules = np.full((3, 5), 7.0)
        first, last = orders._change_rules(rules, start, True, True)
        assert first == last
        changed = rules[first] != 7.0
        alone += changed.sum() == 1
        drawn.append(float(rules[first][changed][0]))
    # W of the other chunk first in 0.3 of the draws.
    other = [abs(rule) >= orders.OTHER for rule in drawn]
    assert 500 < sum(other) < 700 and 900 < alone < 1500
    plain = [rule for rule in drawn if abs(rule) < orders.OTHER]
    # In a tenth a force is dropped, and the rule holds for all gaps.
    for rule, low, high in ((0.0, 0.35, 0.45), (1.0, 0.27, 0.36), (-1e-9, 0.1, 0.17), (-1.0, 0.1, 0.17)):
        assert low < plain.count(rule) / len(plain) < high


def test_an_annealing_finds_the_optimum() -> None:
    compile_kernels()
    for seed in range(6):
        x = draw(Random(f"anneal{seed}"), "line", 3)
        one = make_arrays(x)._replace(memory=np.full(x.p, 1e9))
        kinds = np.array([[0] * x.n + [1] * x.n] * x.p)
        rules = np.ones(kinds.shape)
        step, state = evaluate(one, kinds, rules)
        optimum = find_optimum(replace(x, memory=(inf,) * x.p), step)
        tried = make_candidates(kinds, rules, step)
        suffix = orders.Suffix(orders.begin(one), 0, 0)
        orders.seed_random(0)
        cooling = orders.Cooling(50_000, step / 20, 0.2, 0.0, True, False, optimum * (1 + 1e-6))
        assert orders.anneal(one, tried, suffix, state, np.full(x.p, kinds.shape[1]), cooling, 0, 50_000)

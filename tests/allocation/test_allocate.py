"""Allocations are the best ones: against all allocations, and against scipy's MILP; what is wrong is named."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import inf, nan
from random import Random
from typing import Any

import pytest

from fxsplit.allocation.allocate import allocate, choose_counts
from fxsplit.allocation.job import Job
from fxsplit.errors import InputError
from tests.support.milp import solve_milp
from tests.support.refusals import refused


def draw_jobs(random: Random, n_jobs: int, longest: int) -> list[Job]:
    """Return jobs whose curves rise and fall, with counts that they must not have."""
    jobs = []
    for number in range(n_jobs):
        curve = [random.choice([0.0, random.uniform(0.0, 10.0)]) for _ in range(random.randint(1, longest))]
        least = random.randint(1, len(curve))
        up_s, down_s = random.uniform(0.0, 20.0), random.uniform(0.0, 20.0)
        most = random.randint(least, len(curve))
        jobs.append(Job(f"job{number}", curve, least, most, random.choice([1.0, 0.0, 2.5]), up_s, down_s))
    return jobs


def draw_current(random: Random, jobs: Sequence[Job], n_devices: int) -> dict[str, int]:
    """Return counts that fit the devices; they may be smaller than `least` and larger than `most`."""
    current = {}
    for job in jobs:
        current[job.name] = random.randint(0, n_devices) if random.random() < 0.5 else 0
        n_devices -= current[job.name]
    return current


def list_allocations(jobs: Sequence[Job], n_devices: int) -> Iterator[dict[str, int]]:
    for counts in product(*([0, *range(job.least, (job.most or 0) + 1)] for job in jobs)):
        if sum(counts) <= n_devices:
            yield {job.name: count for job, count in zip(jobs, counts, strict=True)}


def define_gain(job: Job, count: int, current: int, horizon_s: float) -> float:
    """Return the gain of the definition, with its own reading of the curve."""
    curve = [0.0, *job.curve]
    seconds = job.up_s if count > current else job.down_s if count < current else 0.0
    return job.weight * (horizon_s * curve[count] - curve[min(current, len(curve) - 1)] * seconds)


@pytest.mark.parametrize("seed", range(40))
def test_no_allocation_has_a_larger_throughput(seed: int) -> None:
    random = Random(seed)
    jobs, n_devices = draw_jobs(random, random.randint(1, 4), 5), random.randint(0, 9)
    current, horizon_s = draw_current(random, jobs, n_devices), random.choice([1.0, 10.0, 100.0])
    values = {
        tuple(counts.values()): sum(define_gain(job, counts[job.name], current[job.name], horizon_s) for job in jobs)
        for counts in list_allocations(jobs, n_devices)
    }
    found = allocate(jobs, n_devices, current, horizon_s=horizon_s)
    assert found.objective == pytest.approx(max(values.values()), abs=1e-9)
    assert values[tuple(found.counts.values())] == pytest.approx(found.objective, abs=1e-9)
    assert sum(found.gains.values()) == found.objective
    # No equally good allocation has fewer devices.
    best = max(values.values())
    assert sum(found.counts.values()) == min(sum(c) for c, value in values.items() if value >= best - 1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_no_allocation_has_a_larger_worst_share_or_the_same_and_more_throughput(seed: int) -> None:
    random = Random(seed)
    jobs, n_devices = draw_jobs(random, random.randint(1, 4), 5), random.randint(0, 9)
    current = draw_current(random, jobs, n_devices)

    def value(counts: dict[str, int]) -> tuple[float, float]:
        shares = []
        for job in jobs:
            allowed = [job.curve[n - 1] for n in range(job.least, min(job.most or 0, n_devices) + 1)]
            now = current[job.name]
            unweighted = define_gain(Job("a", job.curve, up_s=job.up_s, down_s=job.down_s), counts[job.name], now, 30.0)
            shares.append(unweighted / (30.0 * max(allowed)) if any(allowed) else 1.0)
        gains = sum(define_gain(job, counts[job.name], current[job.name], 30.0) for job in jobs)
        return round(min(shares), 9), round(gains, 6)

    found = allocate(jobs, n_devices, current, horizon_s=30.0, objective="share")
    assert value(found.counts) == max(map(value, list_allocations(jobs, n_devices)))
    assert found.objective == pytest.approx(value(found.counts)[0], abs=1e-8)


@pytest.mark.parametrize("seed", range(40))
def test_any_function_of_job_and_count_is_an_objective(seed: int) -> None:
    random = Random(seed)
    jobs, n_devices = draw_jobs(random, random.randint(1, 4), 5), random.randint(0, 9)
    table = {(job.name, n): random.choice([-inf, random.uniform(-5.0, 5.0)]) for job in jobs for n in range(1, 10)}

    def worth(job: Job, count: int) -> float:
        return table.get((job.name, count), 0.0)

    found = allocate(jobs, n_devices, horizon_s=1.0, objective=worth)
    sums = (sum(worth(job, counts[job.name]) for job in jobs) for counts in list_allocations(jobs, n_devices))
    assert found.objective == pytest.approx(max(sums))
    assert found.gains == {job.name: worth(job, found.counts[job.name]) for job in jobs}


def compare_with_milp(seeds: range) -> None:
    for seed in seeds:
        random = Random(seed)
        jobs, n_devices = draw_jobs(random, random.randint(1, 8), 12), random.randint(0, 40)
        current, horizon_s = draw_current(random, jobs, n_devices), random.choice([10.0, 60.0, 300.0])
        values = [job.gains(current[job.name], horizon_s) for job in jobs]
        found = allocate(jobs, n_devices, current, horizon_s=horizon_s)
        assert found.objective == pytest.approx(solve_milp(values, n_devices), abs=1e-6), seed


def test_forty_allocations_equal_a_milp() -> None:
    compare_with_milp(range(40))


@pytest.mark.long
def test_a_thousand_allocations_equal_a_milp() -> None:
    compare_with_milp(range(1000))


def test_large_allocations_are_found_in_blocks() -> None:
    """The sums of a job are formed in blocks: many devices and long curves need several."""
    jobs = [Job(f"job{n}", [float((k * (n + 3)) % 17 + k) for k in range(250)]) for n in range(2)]
    values = [job.gains(0, 1.0) for job in jobs]
    counts = choose_counts(values, 400)
    assert counts is not None
    assert sum(value[n] for value, n in zip(values, counts, strict=True)) == pytest.approx(solve_milp(values, 400))


def test_the_table_says_why_a_job_has_no_more() -> None:
    flat, steep = Job("flat", [3.0, 3.0, 3.0]), Job("steep", [2.0, 4.0])
    assert allocate([flat, steep], 4, horizon_s=1.0).reasons == {
        "flat": "more devices bring no more",
        "steep": "2 is its most",
    }
    slow = Job("slow", [2.0, 2.5], up_s=60.0)
    kept = allocate([slow], 2, {"slow": 1}, horizon_s=10.0)
    assert kept.reasons == {"slow": "a move to more costs more than it brings"}
    behind = allocate([slow, Job("steep", [2.0, 5.0])], 2, horizon_s=10.0)
    assert behind.reasons["slow"] == "1 more would bring 20, less than elsewhere"
    assert allocate([Job("pair", [1.0, 2.0], least=2)], 1, horizon_s=1.0).reasons == {"pair": "it needs 2 to gain more"}
    assert "steep    0        2" in str(allocate([flat, steep], 4, horizon_s=1.0))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n_devices": -1}, "n_devices=-1: give a number of devices, 0 or more"),
        ({"n_devices": 2.0}, "n_devices=2.0: give a number of devices"),
        ({"current": {"a": 4, "b": 1}}, "current has 5 devices in all, and there are 4"),
        ({"current": {"aa": 1}}, "current names the job 'aa': the jobs are a, b"),
        ({"current": {"a": -1}}, "current says that job 'a' has -1 devices"),
        ({"current": [1]}, r"current=\[1\]: give the devices of jobs by name"),
        ({"horizon_s": 0.0}, "horizon_s=0.0: give seconds, more than 0"),
        ({"horizon_s": "auto"}, "horizon_s='auto': give seconds"),
        ({"objective": "shares"}, "objective='shares': give throughput, share, .*did you mean 'share'"),
        ({"objective": lambda job, n: nan}, "the objective is nan for job 'a' on 0 devices"),
        ({"objective": lambda job, n: "x"}, "the objective is 'x' for job 'a' on 0 devices"),
        ({"objective": lambda job, n: -inf}, "it is -inf for every allocation"),
        ({"jobs": []}, r"jobs=\[\]: give at least one Job"),
        ({"jobs": [Job("a", [1.0]), Job("a", [1.0])]}, "two jobs are called 'a'"),
        ({"jobs": [Job("p", profile="p.json")]}, "job 'p' has no curve"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], message: str) -> None:
    known: dict[str, Any] = {"jobs": [Job("a", [1.0]), Job("b", [1.0])], "n_devices": 4, "horizon_s": 1.0}
    with refused(InputError, message):
        allocate(**known | given)

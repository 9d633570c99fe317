"""Measure how fast pipelines run: fxsplit, torch.distributed.pipelining, torchgpipe and the unsplit model in one run.

Run `make bench`. Two devices with one thread each, the same stage modules for all, repetitions interleaved, medians.
*bound* is the simulator's step time, computed from the measured times of actions.
"""

from __future__ import annotations

import copy
import gc
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from bench.lib.peers_runtime import Processes, torchgpipe_step
from bench.lib.runtime_networks import TINY, Case, build
from bench.lib.size import choose
from fxsplit.api.pipeline.pipeline import Pipeline
from fxsplit.runtime.stage import run as stage_run
from fxsplit.schedule import RUNNABLE, Action, Times, generate, simulate
from fxsplit.schedule.simulation.timeline import Timeline
from fxsplit.system.interrupts import lose_no_interrupt
from fxsplit.torch_internals.autograd import sums as grad_sums

ROUNDS, WARM_UP = choose((5, 1), (1, 0))
# Few rows for each microbatch. The second case of each pair has twice as many microbatches of the same size.
PAIRS = {
    Case("resnet50", 32, 4): Case("resnet50", 64, 8),
    Case("vgg16", 16, 4): Case("vgg16", 32, 8),
    Case("transformer", 16, 8): Case("transformer", 32, 16),
}
SHORT = choose([*PAIRS], [TINY])
CASES = choose([case for pair in PAIRS.items() for case in pair], [TINY])


@dataclass(frozen=True)
class TracedTimes(Times):
    """Durations for the simulator, one for each action."""

    by_action: dict[Action, float] = field(default_factory=dict)

    def of(self, action: Action) -> float:
        """Return how long the action took."""
        return self.by_action[action]


def elapsed(run: Callable[[], Any]) -> tuple[float, float]:
    """Run `run` and return its seconds of wall clock, and this process's seconds of CPU time."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def with_threads(count: int, run: Callable[[], Any]) -> tuple[float, float]:
    """Do the same as `elapsed`, with `count` threads inside operators."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return elapsed(run)
    finally:
        torch.set_num_threads(before)


def take_turns(
    runs: dict[str, Callable[[], tuple[float, float]]], warm_up: int, rounds: int, prepare: Callable[[], object]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the seconds of wall clock and of CPU time of each run in each round, by name.

    Runs take turns, so that other load on the machine falls on all of them. `prepare` is called before each run.
    """
    wall: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    for turn in range(warm_up + rounds):
        for name, run in runs.items():
            prepare()
            taken = run()
            if turn >= warm_up:
                wall.setdefault(name, []).append(taken[0])
                cpu.setdefault(name, []).append(taken[1])
    return wall, cpu


def looped(model: nn.Module, x: Tensor, y: Tensor, n_microbatches: int) -> Callable[[], None]:
    """Return a training step of the unsplit model, one microbatch after another."""
    pieces = list(zip(x.chunk(n_microbatches), y.chunk(n_microbatches), strict=True))

    def loop() -> None:
        for a, b in pieces:
            (F.cross_entropy(model(a), b) / n_microbatches).backward()

    return loop


def bound_ms(traces: list[Timeline], pipe: Pipeline, n_microbatches: int) -> float:
    """Return the step time that the schedule allows with the measured times of actions.

    Each action has its own time: the first backward of a stage makes the sums that later backwards add to, so it takes
    longer or shorter.
    """
    taken: dict[Action, list[float]] = {}
    for trace in traces:
        for row in trace.spans:
            for action, begin, end in row:
                taken.setdefault(action, []).append(end - begin)
    # simulate() only calls `of` for durations, and only checks that the lists have two stages.
    times = TracedTimes([0.0, 0.0], [0.0, 0.0])
    times.by_action.update({action: median(each) for action, each in taken.items()})
    return simulate(generate(pipe.plan.schedule, 2, n_microbatches), times).step_ms


def predict_ms(pipe: Pipeline, n_microbatches: int) -> float:
    """Return the step time that the plan's costs predict, in milliseconds; transfers take none on CPU devices."""
    stages = pipe.plan.stages
    times = Times([s.forward_ms for s in stages], [s.backward_ms for s in stages])
    return simulate(generate("1F1B", len(stages), n_microbatches), times).step_ms


def run_torchgpipe(stages: Sequence[nn.Module], n: int, x: Tensor, y: Tensor) -> dict[str, Callable[[], Any]]:
    """Return a training step by torchgpipe, by its name; nothing if it is not installed."""
    if find_spec("torchgpipe") is None:
        return {}
    step = torchgpipe_step(stages, n, x, y)
    return {"torchgpipe": lambda: with_threads(1, step)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_step(benchmark: BenchmarkFixture, case: Case, tmp_path: Path) -> None:
    """Measure one training step of each runtime: forward, loss and backward over all microbatches."""
    model, x, y = build(case)
    n = case.n_microbatches
    machine = ["cpu"] * 2
    pipe = fxsplit.compile(model, machine, loss_fn=F.cross_entropy, n_microbatches=n, example_inputs=x)
    pipe.costs.save(tmp_path / "costs.json")
    # Copies, so that no run adds to the gradients of another run.
    unsplit = copy.deepcopy(model)
    stages = [copy.deepcopy(s.module) for s in pipe.stages.stages]
    loop = looped(unsplit, x, y, n)

    def whole() -> None:
        F.cross_entropy(unsplit(x), y).backward()

    theirs = Processes.start(case, str(tmp_path / "costs.json"))
    traces: list[Timeline] = []
    runs: dict[str, Callable[[], tuple[float, float]]] = {
        "fxsplit": lambda: elapsed(lambda: pipe.step(x, target=y)),
        "loop, 1 thread": lambda: with_threads(1, loop),
        "torch pipelining": lambda: (theirs.step_s(), 0.0),
        **run_torchgpipe(stages, n, x, y),
        "whole, 1 thread": lambda: with_threads(1, whole),
        "whole, 2 threads": lambda: with_threads(2, whole),
        "traced": lambda: elapsed(lambda: traces.append(pipe.trace(x, target=y)[0])),
    }

    def prepare() -> None:
        for module in (model, unsplit, *stages):  # as every training loop does
            module.zero_grad()
        gc.collect(0)

    gc.disable()  # or its pauses fall on any of the runs
    try:
        seconds, cpu = take_turns(runs, WARM_UP, ROUNDS, prepare)
        benchmark.pedantic(lambda: pipe.step(x, target=y), rounds=choose(3, 1))
    finally:
        gc.enable()
        theirs.stop()
    bound = bound_ms(traces[WARM_UP:], pipe, n) / 1000.0
    pipe.close()
    ours = median(seconds["fxsplit"])
    benchmark.group = "runtime"
    benchmark.extra_info.update(
        runtime=str(case),
        seconds={name: median(values) for name, values in seconds.items()},
        of_bound=bound / median(seconds["traced"]),
        cpu=median(cpu["fxsplit"]) / median(cpu["loop, 1 thread"]),
        predicted=predict_ms(pipe, n) / 1000.0 / ours,
    )


def test_overhead(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """Measure the runtime's own time for an action, on stages with next to nothing to compute."""
    case = Case("empty", 64, 64)
    model, x, y = build(case)
    n = case.n_microbatches
    pipe = fxsplit.compile(model, ["cpu"] * 2, loss_fn=F.cross_entropy, n_microbatches=n, example_inputs=x)
    pipe.costs.save(tmp_path / "costs.json")
    unsplit = copy.deepcopy(model)
    stages = [copy.deepcopy(s.module) for s in pipe.stages.stages]
    loop = looped(unsplit, x, y, n)

    theirs = Processes.start(case, str(tmp_path / "costs.json"))
    runs: dict[str, Callable[[], tuple[float, float]]] = {
        "fxsplit": lambda: elapsed(lambda: pipe.step(x, target=y)),
        "loop, 1 thread": lambda: with_threads(1, loop),
        "torch pipelining": lambda: (theirs.step_s(), 0.0),
        **run_torchgpipe(stages, n, x, y),
    }
    # A step takes milliseconds, so a median needs many steps.
    seconds, _ = take_turns(runs, choose(5, 0), choose(40, 1), lambda: None)
    benchmark.pedantic(lambda: pipe.step(x, target=y), rounds=choose(3, 1))
    theirs.stop()
    pipe.close()
    loop_s = median(seconds["loop, 1 thread"])
    actions = 4 * n  # a forward and a backward of each stage
    benchmark.group = "overhead"
    overhead = {name: 1e6 * (median(values) - loop_s) / actions for name, values in seconds.items()}
    benchmark.extra_info.update(runtime=str(case), overhead_us=overhead)


@pytest.mark.parametrize("case", SHORT[-2:], ids=str)
def test_copies(benchmark: BenchmarkFixture, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the processor time that `find_unshared` saves: a step with it, and with a copy of each first gradient."""
    model, x, y = build(case)
    find = grad_sums.find_unshared
    copied: list[int] = []

    def copy_all(*asked: Any) -> list[bool]:
        copied.append(len(find(*asked)))
        return [False] * copied[-1]

    asks: dict[str, Callable[..., list[bool]]] = {"taken over": find, "copied": copy_all}
    cpu: dict[str, list[float]] = {name: [] for name in asks}
    options: dict[str, Any] = {"loss_fn": F.cross_entropy, "n_microbatches": case.n_microbatches, "example_inputs": x}
    with fxsplit.compile(model, ["cpu"] * 2, **options) as pipe:
        for turn in range(WARM_UP + ROUNDS):
            for name, ask in asks.items():
                monkeypatch.setattr(stage_run, "find_unshared", ask)
                model.zero_grad()
                taken = elapsed(lambda: pipe.step(x, target=y))[1]
                if turn >= WARM_UP:
                    cpu[name].append(taken)
        benchmark.pedantic(lambda: pipe.step(x, target=y), rounds=1)
    assert sum(copied) >= (WARM_UP + ROUNDS) * len(list(model.parameters())), "the runtime calls another function"
    benchmark.group = "copies"
    benchmark.extra_info.update(copies=str(case), cpu={name: median(values) for name, values in cpu.items()})


def test_hearing(benchmark: BenchmarkFixture) -> None:
    """Measure how much longer a public function takes because it does not lose a Ctrl-C."""
    calls = choose(1000, 1)

    def work(number: int) -> int:
        return number

    def time_us(call: Callable[[int], int]) -> float:
        return 1e6 * elapsed(lambda: deque(map(call, range(calls)), maxlen=0))[0] / calls

    hearing = lose_no_interrupt(work)
    taken = min(time_us(hearing) - time_us(work) for _ in range(ROUNDS))
    benchmark.pedantic(hearing, args=(1,), rounds=1)
    benchmark.group = "hearing"
    benchmark.extra_info.update(hearing_us=taken)


@pytest.mark.parametrize("case", SHORT, ids=str)
def test_prediction(benchmark: BenchmarkFixture, case: Case) -> None:
    """Compare the predicted step time with the measured one under each schedule; the schedules are interleaved."""
    model, x, y = build(case)
    options: dict[str, Any] = {"loss_fn": F.cross_entropy, "n_microbatches": case.n_microbatches, "example_inputs": x}
    pipes: dict[str, Pipeline] = {}
    predicted: dict[str, float] = {}
    measured: dict[str, list[float]] = {name: [] for name in RUNNABLE}
    with ExitStack() as stack:
        for name in RUNNABLE:
            # Every schedule is predicted from the same measured costs: the costs of the first pipeline.
            costs = next((pipe.costs for pipe in pipes.values()), None)
            pipe = fxsplit.compile(model, ["cpu"] * 2, schedule=name, costs=costs, **options)
            pipes[name] = stack.enter_context(pipe)
        for turn in range(WARM_UP + ROUNDS):
            for schedule, pipe in pipes.items():
                found, expected = pipe.trace(x, target=y)
                predicted[schedule] = expected.length_ms
                if turn >= WARM_UP:
                    measured[schedule].append(found.length_ms)
        benchmark.pedantic(lambda: pipes["1F1B"].step(x, target=y), rounds=choose(3, 1))
    benchmark.group = "prediction"
    found_ms = {name: median(times) for name, times in measured.items()}
    benchmark.extra_info.update(prediction=str(case), predicted_ms=predicted, measured_ms=found_ms)

"""Kernels: compiled or not, the same chains come out."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from math import inf
from typing import Any

import pytest
from hypothesis import given

from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.price import COST_MODELS
from fxsplit.planner import Options, Task, kernels, pose_problems
from fxsplit.planner.clock import OutOfTime, SearchClock
from fxsplit.planner.planner import Planner
from tests.planner.test_planner_models import solve
from tests.support.graphs import machines, node, profiles, sweep, try_examples, workload


@pytest.fixture
def plain() -> Iterator[None]:
    yield
    kernels.prefer_compiled(False)


@pytest.mark.parametrize("model", COST_MODELS)
@pytest.mark.parametrize("use_all", [True, False])
@sweep(20, 100)
def test_compiled_plans_are_the_same(plain: None, model: str, use_all: bool, examples: int) -> None:
    """Every stage agrees, not only the objective, so that a plan does not depend on earlier work of the process."""

    @try_examples(examples)
    @given(profiles(7), machines())
    def check(costs: Costs, machine: Machine) -> None:
        found = []
        for compiled in (False, True):
            kernels.prefer_compiled(compiled)
            plan = solve(costs, machine, Options(model=model, use_all=use_all))
            found.append(plan and (plan.stages, plan.lower_bound_ms))
        assert found[0] == found[1]

    check()


def test_enumeration_stops_at_the_cap_when_compiled(plain: None) -> None:
    costs = Costs(tuple(node(f"n{i}") for i in range(12)), (), ("n0",), rows=1)
    kernels.prefer_compiled()
    whole, _ = Planner(costs, max_states=4096).lattice(Machine.planned(2))
    part, _ = Planner(costs, max_states=4095).lattice(Machine.planned(2))
    assert whole.complete and len(whole) == 4096
    assert not part.complete and len(part) == 13


def test_a_kernel_is_compiled_for_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of ideals says little of a kernel that looks at pairs of them."""
    compiled: list[int] = []

    def kernel(need: int, steps: int) -> tuple[Any, Any, int]:
        return None, None, min(need, steps + 1)

    def compile_kernel(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def machine_code(need: int, steps: int) -> tuple[Any, Any, int]:
            compiled.append(steps)
            return None, None, min(need, steps + 1)

        return machine_code

    monkeypatch.setattr(kernels, "compile_kernel", compile_kernel)
    monkeypatch.setattr(kernels, "PLAIN_STEPS", 100)
    # Small work stays plain, also if the caller's limit ends it.
    assert kernels.run_counted(kernel, 10, 10**6, 40)[2] == 40
    assert kernels.run_counted(kernel, 10, 20, 40)[2] == 21 and compiled == []
    # Steps of the whole process count; then the kernel starts again as machine code.
    assert kernels.run_counted(kernel, 10, 10**6, 60)[2] == 60 and compiled == [10**6]
    assert kernels.run_counted(kernel, 10, 500, 1)[2] == 1 and compiled == [10**6, 500]


def test_a_clock_gives_a_kernel_its_time_in_steps() -> None:
    """A kernel that is stopped early runs again while there is time; then the search ends."""
    asked: list[int] = []

    def kernel(steps: int) -> tuple[str, str, int]:
        asked.append(steps)
        return "one", "other", 100 if len(asked) > 1 else steps + 1

    assert SearchClock.limited(60).run(kernel) == ("one", "other") and len(asked) == 2
    assert SearchClock().run(kernel) == ("one", "other")
    with pytest.raises(OutOfTime):
        SearchClock.limited(0).run(kernel)


@pytest.mark.parametrize("model", ["forwarded", "direct"])
@pytest.mark.parametrize("memory", [inf, 1e4])
def test_kernels_stop_after_their_steps(model: str, memory: float) -> None:
    costs = Costs(tuple(node(f"n{i}", ms=1.0 + i, kept_bytes=1, output_bytes=1) for i in range(6)), (), ("n0",), rows=1)
    machine = Machine.planned(3, 1e3, memory_bytes=memory)
    chains, states = Planner(costs).lattice(machine, whole=True)
    (problem, *_) = pose_problems(Task(costs, machine, workload(machine), Options(model=model)), chains, states)
    _, _, whole = problem.reach(50.0, 2**62)
    assert problem.reach(50.0, whole)[2] == whole
    assert whole // 2 < problem.reach(50.0, whole // 2)[2] < whole


PLAN = """
import sys
from fxsplit.planner import Options
from fxsplit.planner.planner import Planner
from tests.support.graphs import Machine, node, workload, Costs

for length in (45, 60):
    sides = [node(f"{side}{i}", (f"{side}{i - 1}",) if i else (), ms=1 + i % 7) for side in "ab" for i in range(length)]
    costs = Costs((*sides, node("end", (f"a{length - 1}", f"b{length - 1}"))), (), ("end",), rows=1)
    plan = Planner(costs).plan(Machine.planned(4), workload(Machine.planned(4)), Options())
    print(plan.n_states, "numba" in sys.modules)
"""


def test_numba_is_loaded_where_plain_python_would_be_slower() -> None:
    """Loading takes about a second, and in plain Python a plan of so many states a tenth of that."""
    ran = subprocess.run([sys.executable, "-c", PLAN], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["2117 False", "3722 True"]

"""Measure how long each phase of compile() takes: the networks of the paper's table 1, on 4 and 8 CPU devices.

Run `make bench`. Images are 224 x 224 (Inception 299 x 299), 8 microbatches of 2 rows, kernels warm. A phase is timed
on the IR that the phases before it made; the total is their sum in one run of compile().
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor, nn

import fxsplit
from bench import networks as zoo
from bench.lib.size import choose
from fxsplit.frontend.capture import capture
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.lattice.antichains import Antichains
from fxsplit.ir.graph import IR
from fxsplit.ir.manager import run_chain
from fxsplit.passes import Augment, Emit, Order, Partition, Profile
from fxsplit.schedule import find_schedule

# The paper's table has the same numbers of devices.
DEVICES = (4, 8)
MICROBATCHES, ROWS = choose((8, 2), (2, 1))
REPEATS = choose(3, 1)
NETWORKS = choose(list(zoo.TABLE_1), ["squeezenet1_0"])
SIDE = choose(224, 64)
CHAIN = choose(1000, 10)


# Only one network at a time is kept: several of them, with their facts, take gigabytes.
@lru_cache(maxsize=1)
def network(name: str) -> tuple[nn.Module, Tensor]:
    # Inception-v3 takes no smaller images.
    torch.manual_seed(0)
    side = 299 if name == "inception_v3" else SIDE
    return zoo.build(name), torch.randn(MICROBATCHES * ROWS, 3, side, side)


@lru_cache(maxsize=1)
def irs_before(name: str) -> dict[str, IR]:
    """Return the IR before each phase that does not depend on the number of devices, by the phase."""
    model, x = network(name)
    made = {"profile": capture(model, (x,), {}, ROWS).learn(fxsplit.Machine.of(["cpu"] * 8))}
    made["augment"] = run_chain(made["profile"], [Profile(REPEATS)])
    made["order"] = run_chain(made["augment"], [Augment()])
    made["partition"] = run_chain(made["order"], [Order()])
    return made


def order_for(name: str, devices: int) -> IR:
    """Return the IR before `partition`, for 1F1B on `devices` devices."""
    # The facts that compile() would learn from its arguments. Ideals depend on the machine, so they are found again.
    peaks = {k: find_schedule("1F1B")(k, MICROBATCHES).peak_in_flight() for k in range(1, devices + 1)}
    facts = fxsplit.Machine.of(["cpu"] * devices), Workload("1F1B", MICROBATCHES, peaks)
    return run_chain(irs_before(name)["augment"].learn(*facts), [Augment(), Order()])


def note(benchmark: BenchmarkFixture, network: str, phase: str, devices: int = 0, **more: Any) -> None:
    benchmark.group = phase
    benchmark.extra_info.update(network=network, phase=phase, devices=devices, **more)


@pytest.mark.parametrize("name", NETWORKS)
class TestPhases:
    def test_trace(self, benchmark: BenchmarkFixture, name: str) -> None:
        model, x = network(name)
        note(benchmark, name, "trace")
        benchmark.pedantic(lambda: capture(model, (x,), {}, ROWS), rounds=choose(3, 1))

    def test_profile(self, benchmark: BenchmarkFixture, name: str) -> None:
        ir = irs_before(name)["profile"]
        note(benchmark, name, "profile")
        benchmark.pedantic(lambda: Profile(REPEATS)(ir), rounds=1)

    def test_augment(self, benchmark: BenchmarkFixture, name: str) -> None:
        irs = irs_before(name)
        note(benchmark, name, "augment", states=len(irs["order"][Antichains]))
        benchmark.pedantic(lambda: Augment()(irs["augment"]), rounds=choose(5, 1), warmup_rounds=1)

    def test_order(self, benchmark: BenchmarkFixture, name: str) -> None:
        ir = irs_before(name)["order"]
        note(benchmark, name, "order")
        benchmark.pedantic(lambda: Order()(ir), rounds=choose(5, 1), warmup_rounds=1)

    @pytest.mark.parametrize("devices", DEVICES)
    def test_partition(self, benchmark: BenchmarkFixture, name: str, devices: int) -> None:
        ir = order_for(name, devices)
        note(benchmark, name, "partition", devices)
        benchmark.pedantic(lambda: Partition()(ir), rounds=choose(5, 1), warmup_rounds=1)

    @pytest.mark.parametrize("devices", DEVICES)
    def test_emit(self, benchmark: BenchmarkFixture, name: str, devices: int) -> None:
        ir = Partition()(order_for(name, devices))
        note(benchmark, name, "emit", devices)
        benchmark.pedantic(lambda: Emit()(ir), rounds=choose(3, 1))

    @pytest.mark.parametrize("devices", DEVICES)
    def test_total(self, benchmark: BenchmarkFixture, name: str, devices: int) -> None:
        model, x = network(name)
        chain = f"profile{{repeats={REPEATS}}},augment,order,partition,emit"

        def compile_and_close() -> fxsplit.Plan:
            options: dict[str, Any] = {"example_inputs": x, "n_microbatches": MICROBATCHES, "passes": chain}
            with fxsplit.compile(model, ["cpu"] * devices, **options) as pipe:
                return pipe.plan

        plan = benchmark.pedantic(compile_and_close, rounds=1)
        note(benchmark, name, "total", devices, speedup=plan.speedup, gap=plan.gap, optimal=plan.optimal)


# Run in a new process, because only a cold start compiles kernels, or loads them from the folder that the test names.
PLAN = """
import sys, time, fxsplit
from tests.support.graphs import Costs, Machine, ir_of, node, workload
from fxsplit.ir.manager import run_chain
from fxsplit.passes import Augment, Order, Partition
nodes = [node(f"n{i}", [f"n{i - 1}"] if i else []) for i in range(int(sys.argv[1]))]
costs = Costs(tuple(nodes), (), (nodes[-1].name,), rows=1)
machine = Machine.of(["cpu"] * 4)
ir = ir_of(costs, machine, workload(machine))
begin = time.perf_counter()
run_chain(ir, [Augment(), Order(), Partition()])
print(time.perf_counter() - begin)
"""


@pytest.mark.parametrize("cache", ["cold", "warm"])
def test_planning_in_a_fresh_process(benchmark: BenchmarkFixture, cache: str, tmp_path: Path) -> None:
    """Cold: kernels are compiled. Warm: they are loaded from numba's cache.

    The graph is a chain of 1,000 nodes on 4 devices, which is too long for plain Python.
    """
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.getcwd()}

    def plan() -> float:
        command = [sys.executable, "-c", PLAN, str(CHAIN)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return float(done.stdout)

    # The first process fills the cache.
    if cache == "warm":
        plan()
    note(benchmark, f"chain of {CHAIN:,} nodes", f"kernels {cache}")
    benchmark.extra_info["planning_s"] = benchmark.pedantic(plan, rounds=1)

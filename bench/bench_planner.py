"""Measure how long planning takes, and compare it with the paper's own dynamic programme if its files are here.

Run `make bench`. One thread, kernels warm. Profiles of other tools are read from the folder FXSPLIT_PROFILES, which
holds `dnn_partitioning/*.json` (github.com/msr-fiddle/dnn-partitioning) and `pipedream/*.txt`
(github.com/msr-fiddle/pipedream, each model's graph.txt by its name); without it they are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.bench_compile import NETWORKS, irs_before
from bench.lib.peer import optimum_ms, subsets
from bench.lib.profiles import transformer
from bench.lib.size import choose
from fxsplit.api.plan import build_machine, lay_out
from fxsplit.formats import read
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.lattice.antichains import Antichains
from fxsplit.ir.facts.lattice.states import States
from fxsplit.ir.facts.plan import Plan
from fxsplit.planner import Options, Task, kernels, partition, sequence_states
from fxsplit.planner.planner import Planner
from fxsplit.planner.search.search import minimise
from fxsplit.planner.solve import pose_problems

# No folder of that name exists, so its benchmarks are skipped.
FOLDER = Path(os.environ.get("FXSPLIT_PROFILES", "no such folder"))
WORKLOADS = sorted(FOLDER.glob("dnn_partitioning/*.json"))
PROFILES = sorted(path for path in FOLDER.glob("pipedream/*.txt") if "LICENSE" not in path.name)
# PipeDream's default: stages may have several devices, and traffic between stages is free.
PIPEDREAM = Options(model="replicated", traffic=False)
LAYERS, MOST_IDEALS = choose((96, 5000), (2, 20))
PROCESS = choose("resnet50", NETWORKS[0])


@pytest.fixture(autouse=True)
def warm() -> Iterator[None]:
    """Plan as in a process that plans repeatedly: all kernels are compiled, and small graphs use them too."""
    # By default a small graph is planned in plain Python, which is faster than loading the kernels once.
    kernels.prefer_compiled()
    yield
    kernels.prefer_compiled(False)


def note(benchmark: BenchmarkFixture, work: str, plan: Plan, **more: Any) -> None:
    benchmark.group = "planner"
    figures = {"objective": plan.bottleneck_ms, "gap": plan.gap, "ideals": plan.n_states}
    benchmark.extra_info.update(work=work, **figures, **more)


@pytest.mark.skipif(not WORKLOADS, reason="FXSPLIT_PROFILES names no folder with dnn_partitioning/*.json")
@pytest.mark.parametrize("path", WORKLOADS, ids=lambda path: str(path.stem))
def test_dnn_partitioning(benchmark: BenchmarkFixture, path: Path) -> None:
    """Plan under the cost model `direct` on the file's own devices; reading the file does not count."""
    profile = read(path)
    machine = build_machine(profile, None, None)
    options = Options(model="direct", free=True, use_all=False)

    def plan() -> Plan:
        return Planner(profile.costs).plan(*lay_out(machine), options)

    note(benchmark, path.stem, benchmark.pedantic(plan, rounds=choose(5, 1), warmup_rounds=1))


@pytest.mark.skipif(not PROFILES, reason="FXSPLIT_PROFILES names no folder with pipedream/*.txt")
@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("path", PROFILES, ids=lambda path: str(path.stem))
def test_pipedream(benchmark: BenchmarkFixture, path: Path, devices: int) -> None:
    """Plan under the cost model `replicated` and PipeDream's defaults: all devices, free traffic, 1e9 bytes/s."""
    costs = read(path).costs
    machine = Machine.planned(devices, 1e9)

    def plan() -> Plan:
        return Planner(costs).plan(*lay_out(machine), PIPEDREAM)

    note(benchmark, f"{path.stem}, {devices} devices", benchmark.pedantic(plan, rounds=choose(5, 1), warmup_rounds=1))


@lru_cache(maxsize=1)
def lattice(name: str) -> tuple[Costs, Antichains, States]:
    ir = irs_before(name)["partition"]
    return ir[Costs], ir[Antichains], ir[States]


@pytest.mark.parametrize("devices", [2, 4, 8, 16])
@pytest.mark.parametrize("name", NETWORKS)
def test_order_and_partition(benchmark: BenchmarkFixture, name: str, devices: int) -> None:
    """Plan a traced network under the cost model `forwarded`, at 10 GB/s; devices idle if there are too few blocks."""
    costs, chains, _ = lattice(name)
    machine = Machine.planned(devices, 1e10)
    options = Options(use_all=devices <= len(chains.blocks))

    def plan() -> Plan:
        return partition(Task(costs, *lay_out(machine), options), chains, sequence_states(costs, chains))

    note(benchmark, f"{name}, {devices} devices", benchmark.pedantic(plan, rounds=choose(5, 1), warmup_rounds=1))


@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("name", choose(["resnet50", "resnet101", "densenet121"], NETWORKS))
def test_beside_the_paper(benchmark: BenchmarkFixture, name: str, devices: int) -> None:
    """Search the same states under the same cost model, by both planners; neither time includes building the plan."""
    costs, chains, states = lattice(name)
    machine = Machine.planned(devices, 1e9)
    below = subsets(chains)
    # Plain Python takes up to half a second, so one run is enough.
    begin = time.perf_counter()
    peer = optimum_ms(below, states, devices, 1e6)
    peer_s = time.perf_counter() - begin

    def search() -> float:
        (problem,) = pose_problems(Task(costs, *lay_out(machine), PIPEDREAM), chains, states)
        found = minimise(problem, chains)
        assert found is not None
        return max(problem.loads(found.path))

    # Comparing the times makes sense only if both searches find the same optimum.
    assert benchmark.pedantic(search, rounds=choose(20, 1), warmup_rounds=1) == pytest.approx(peer, rel=1e-9)
    plan = partition(Task(costs, *lay_out(machine), PIPEDREAM), chains, states)
    note(benchmark, f"{name}, {devices} devices, beside all pairs", plan, peer_s=peer_s)


def test_transformer(benchmark: BenchmarkFixture) -> None:
    """Layers traced operator by operator, 16 devices at 25 GB/s: blocks, states and solution."""
    # A graph of thousands of nodes, with a far larger lattice than the other networks have.
    costs = transformer(LAYERS)
    machine = Machine.planned(16, 25e9)

    def plan() -> Plan:
        return Planner(costs).plan(*lay_out(machine), Options())

    work = f"transformer, {len(costs.nodes):,} nodes, 16 devices"
    note(benchmark, work, benchmark.pedantic(plan, rounds=choose(3, 1), warmup_rounds=1))


def test_beyond_the_cap(benchmark: BenchmarkFixture) -> None:
    """Plan the same transformer with a cap on its ideals: only ideals along minimum cuts, and a gap."""
    costs = transformer(LAYERS)
    machine = Machine.planned(16, 25e9)

    def plan() -> Plan:
        return Planner(costs, max_states=MOST_IDEALS).plan(*lay_out(machine), Options())

    note(
        benchmark,
        f"transformer, at most {MOST_IDEALS:,} ideals",
        benchmark.pedantic(plan, rounds=choose(3, 1), warmup_rounds=1),
    )


def test_whole_process(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """`fxsplit plan profile.json --devices 8`, from start to exit; numba is not touched."""
    costs, _, _ = lattice(PROCESS)
    costs.save(tmp_path / "profile.json")
    command = [sys.executable, "-m", "fxsplit", "plan", str(tmp_path / "profile.json"), "--devices", "8"]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}

    def plan() -> None:
        subprocess.run(command, env=environment, check=True, capture_output=True)

    benchmark.pedantic(plan, rounds=choose(5, 1), warmup_rounds=1)
    machine = Machine.planned(8)
    note(benchmark, f"{PROCESS}, 8 devices, whole process", Planner(costs).plan(*lay_out(machine), Options()))

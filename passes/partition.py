"""partition: cut the state sequence into stages so that the slowest is as fast as possible; learns Plan."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from fxsplit.antichains import Antichains
from fxsplit.costs import Costs
from fxsplit.errors import ChainError, PlanError
from fxsplit.ir import IR
from fxsplit.machine import Machine
from fxsplit.plan import Plan, price
from fxsplit.search import lower_bound, minimise, misfit, pose
from fxsplit.states import States
from fxsplit.workload import Pins, Workload


@dataclass(frozen=True)
class Partition:
    """Minimise the largest stage load by dynamic programming over the states, under every device's memory.

    Stage i runs on device i. `use_all` asks for exactly as many stages as devices; without it the first devices may
    do where more would not be faster. `optimizer_factor` is the bytes of optimizer state per byte of parameters
    (2 for Adam, 1 for momentum, 0 for plain SGD).
    """

    use_all: bool = True
    optimizer_factor: float = 2.0

    name: ClassVar[str] = "partition"

    def __post_init__(self) -> None:
        if not 0 <= self.optimizer_factor < inf:
            raise ChainError(f"partition{{optimizer_factor={self.optimizer_factor}}}: give a number, zero or more")

    def __call__(self, ir: IR) -> IR:
        """Learn Plan from States; raises PlanError when none fits, saying by how much and where."""
        costs, machine, chains = ir[Costs], ir[Machine], ir[Antichains]
        blocks = len(chains.blocks)
        if len(machine) > blocks and not ir[Workload].may_idle:
            largest = max(chains.blocks.members, key=len)
            raise PlanError(
                f"{len(machine)} devices, and the graph has only {blocks} nodes that can be parted "
                f"({len(costs.nodes)} before those that must stay together were joined; the largest group has "
                f"{len(largest)}, {largest[0]!r} .. {largest[-1]!r}, which share a parameter or memory, or lie between "
                f"nodes that do): use {blocks} devices or fewer"
            )
        plans, failures = [], []
        for n_stages in [len(machine)] if self.use_all else range(1, len(machine) + 1):
            try:
                plans.append(self._plan(ir, n_stages))
            except PlanError as error:
                failures.append(error)
        if not plans:
            raise failures[-1]
        return ir.learn(min(plans, key=lambda plan: plan.bottleneck_ms))

    def _plan(self, ir: IR, n_stages: int) -> Plan:
        """Return the best plan of exactly `n_stages` stages."""
        costs, machine, workload, chains = ir[Costs], ir[Machine], ir[Workload], ir[Antichains]
        pins = ir.get(Pins)
        pinned = pins.nodes(costs) if pins else {}
        problem = pose(ir[States], chains, machine, workload, n_stages, self.optimizer_factor, pinned)
        bound = lower_bound(problem)
        cuts = minimise(problem, bound)
        if cuts is None:
            raise misfit(problem, machine)
        stages = []
        for begin, end in itertools.pairwise(cuts):
            own = set(chains.names(end)) - set(chains.names(begin))
            stages.append([n.name for n in costs.nodes if n.name in own])
        priced = price(costs, machine, workload, stages, self.optimizer_factor)
        reached = max(s.load_ms for s in priced)
        return Plan(
            stages=priced,
            device_names=tuple(d.name for d in machine.devices[:n_stages]),
            lower_bound_ms=reached if chains.complete else min(bound, reached),
            single_ms=costs.total_ms,
            schedule=workload.schedule,
            n_microbatches=workload.n_microbatches,
            rows=costs.rows,
            n_states=len(chains),
            optimizer_factor=self.optimizer_factor,
        )

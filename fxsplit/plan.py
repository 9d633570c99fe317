"""Plan: which nodes run in which stage, what that is predicted to cost, and how far from the best possible it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isclose
from typing import ClassVar

from fxsplit.costs import Costs
from fxsplit.errors import BrokenFact
from fxsplit.ir import IR
from fxsplit.machine import Machine
from fxsplit.workload import Pins, Workload

WEIGHT_COPIES = 3.0
"""A stage holds each parameter, the sum of its gradients, and the gradient of the microbatch in hand."""

PROVEN = 1e-6
"""A plan whose gap is below this is called optimal: the search compares with a slack of 1e-9."""


@dataclass(frozen=True)
class StagePlan:
    """One stage of a plan, per microbatch.

    Times are on the stage's own device; `send_ms` and `receive_ms` are the transfers over its two boundaries, values
    forward and gradients back together. `memory_bytes` holds parameters, gradients, optimizer state and the
    activations in flight.
    """

    nodes: tuple[str, ...]
    device: int
    forward_ms: float
    backward_ms: float
    receive_ms: float
    send_ms: float
    in_bytes: int
    out_bytes: int
    memory_bytes: float

    @property
    def load_ms(self) -> float:
        """How long the stage is busy with one microbatch, transfers added to compute."""
        return self.forward_ms + self.backward_ms + self.receive_ms + self.send_ms


@dataclass(frozen=True, eq=False)
class Plan:
    """Stages in pipeline order, one device each; `lower_bound_ms` is a load that no plan's slowest stage can beat."""

    stages: tuple[StagePlan, ...]
    device_names: tuple[str, ...]
    lower_bound_ms: float
    single_ms: float
    schedule: str
    n_microbatches: int
    rows: int
    n_states: int
    optimizer_factor: float

    made_by: ClassVar[str] = "partition"
    given: ClassVar[bool] = False

    @property
    def bottleneck_ms(self) -> float:
        """The load of the slowest stage: in steady state the pipeline takes this long for each microbatch."""
        return max(s.load_ms for s in self.stages)

    @property
    def gap(self) -> float:
        """How far the bottleneck may be above the best possible, as a share of it."""
        return self.bottleneck_ms / self.lower_bound_ms - 1.0 if self.lower_bound_ms > 0 else 0.0

    @property
    def optimal(self) -> bool:
        """Whether the plan is proven to be the best under its cost model."""
        return self.gap < PROVEN

    def stage_of(self) -> dict[str, int]:
        """Return the stage of every node."""
        return {name: i for i, s in enumerate(self.stages) for name in s.nodes}

    def verify(self, ir: IR) -> None:
        """Raise BrokenFact unless the stages partition the nodes, run forwards and cost what the plan says.

        The cost is computed again from the definition, on the graph and not on the lattice that was searched.
        """
        costs = ir.get(Costs)
        if costs is None:  # the graph has been rewritten into stages, and the plan describes the one before
            return
        stage_of = self.stage_of()
        if set(stage_of) != set(costs.by_name) or len(stage_of) != sum(len(s.nodes) for s in self.stages):
            raise BrokenFact("the stages of the plan do not partition the nodes")
        for node in costs.nodes:
            for name in node.inputs:
                if stage_of.get(name, -1) > stage_of[node.name]:
                    raise BrokenFact(f"node {node.name!r} reads {name!r} from a later stage")
        for a, b in costs.ordered:
            if stage_of[a] > stage_of[b]:
                raise BrokenFact(f"node {a!r} must run before {b!r}, and its stage is later")
        again = price(costs, ir[Machine], ir[Workload], [s.nodes for s in self.stages], self.optimizer_factor)
        for number, (mine, other) in enumerate(zip(self.stages, again, strict=True)):
            if not isclose(mine.load_ms, other.load_ms, rel_tol=1e-9, abs_tol=1e-12):
                raise BrokenFact(f"stage {number} is said to take {mine.load_ms} ms and takes {other.load_ms} ms")
            if other.memory_bytes > ir[Machine].devices[mine.device].memory_bytes:
                raise BrokenFact(f"stage {number} needs {other.memory_bytes:.0f} bytes, more than its device has")
        pins = ir.get(Pins)
        for name, stage in (pins.nodes(costs) if pins else {}).items():
            if stage_of[name] != stage:
                where = f"pinned to stage {stage} and planned on {stage_of[name]}"
                raise BrokenFact(f"node {name!r} is {where}: pin before 'partition'")
        if self.lower_bound_ms > self.bottleneck_ms * (1 + 1e-9):
            raise BrokenFact(f"lower bound {self.lower_bound_ms} ms above the bottleneck {self.bottleneck_ms} ms")

    def __str__(self) -> str:
        """A table of the stages, then the bottleneck with its lower bound and gap."""
        rows = [
            f"{'stage':<6}{'device':<10}{'nodes':>6}{'fwd ms':>10}{'bwd ms':>10}{'xfer ms':>9}"
            f"{'in':>11}{'out':>11}{'memory':>11}  first .. last node"
        ]
        for i, s in enumerate(self.stages):
            rows.append(
                f"{i:<6}{self.device_names[i]:<10}{len(s.nodes):>6}{s.forward_ms:>10.3f}{s.backward_ms:>10.3f}"
                f"{s.receive_ms + s.send_ms:>9.3f}{size(s.in_bytes):>11}{size(s.out_bytes):>11}"
                f"{size(s.memory_bytes):>11}  {f'{s.nodes[0]} .. {s.nodes[-1]}' if s.nodes else '(passes values on)'}"
            )
        proof = "optimal" if self.optimal else f"gap {100 * self.gap:.2f} %"
        speedup = self.single_ms / self.bottleneck_ms if self.bottleneck_ms else inf
        rows.append(
            f"bottleneck {self.bottleneck_ms:.3f} ms, lower bound {self.lower_bound_ms:.3f} ms, {proof} "
            f"among {self.n_states} states; steady-state speed-up {speedup:.2f} over one device"
        )
        rows.append(f"{self.schedule}, {self.n_microbatches} microbatches of {self.rows} rows")
        return "\n".join(rows)


def price(
    costs: Costs, machine: Machine, workload: Workload, stages: Sequence[Sequence[str]], optimizer_factor: float
) -> tuple[StagePlan, ...]:
    """Return what a split costs, from the definition: stage i runs on device i, values are forwarded stage to stage.

    A value crosses boundary b exactly if it is made (or given) at or before stage b and read after it, or is an
    output made before the last stage. Memory = parameters x (WEIGHT_COPIES + optimizer_factor) + buffers + microbatches
    in flight x (kept activations + boundary values).
    """
    stage_of = {name: i for i, names in enumerate(stages) for name in names}
    last = len(stages) - 1
    crossing = [0.0] * (len(stages) + 1)  # boundary b lies before stage b
    returning = [0.0] * (len(stages) + 1)
    for name, output_bytes, gradient_bytes, readers, is_output in costs.values():
        born = stage_of.get(name, -1)
        dies = max([stage_of[r] for r in readers] + ([last + 1] if is_output else []), default=born)
        for boundary in range(born + 1, dies + 1):
            crossing[boundary] += output_bytes
            returning[boundary] += gradient_bytes
    in_flight = workload.in_flight[len(stages)]
    plans = []
    for i, names in enumerate(stages):
        device = machine.devices[i]
        nodes = [costs.by_name[n] for n in names]
        receive = (crossing[i] + returning[i]) / machine.bytes_per_ms(i - 1) if i > 0 else 0.0
        send = (crossing[i + 1] + returning[i + 1]) / machine.bytes_per_ms(i) if i < last else 0.0
        kept = sum(n.kept_bytes for n in nodes) + crossing[i] + crossing[i + 1]
        held = sum(n.parameter_bytes * (WEIGHT_COPIES + optimizer_factor) + n.buffer_bytes for n in nodes)
        plans.append(
            StagePlan(
                nodes=tuple(names),
                device=i,
                forward_ms=sum(n.forward_ms for n in nodes) / device.speed,
                backward_ms=sum(n.backward_ms for n in nodes) / device.speed,
                receive_ms=receive,
                send_ms=send,
                in_bytes=int(crossing[i]),
                out_bytes=int(crossing[i + 1]),
                memory_bytes=held + in_flight[i] * kept,
            )
        )
    return tuple(plans)


def size(count: float) -> str:
    """Return a number of bytes for people, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")

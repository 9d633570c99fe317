"""Cuts: the values that cross each cut of a plan, with their bytes and the time that they take."""

from __future__ import annotations

from dataclasses import dataclass

from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.costs.edges import list_crossed
from fxsplit.ir.facts.plan import Plan


@dataclass(frozen=True)
class CutValue:
    """A value that crosses a cut: its bytes forward, and the bytes of its gradient back, as they are sent."""

    name: str
    forward_bytes: float
    backward_bytes: float

    @property
    def both_bytes(self) -> float:
        """The bytes in both directions."""
        return self.forward_bytes + self.backward_bytes


@dataclass(frozen=True)
class Cut:
    """The cut before stage `number`, for one microbatch.

    `transfer_ms` is the time for which its messages keep the slower of the two devices busy. `values` has the largest
    value first, and is empty if the costs are not known.
    """

    number: int
    forward_bytes: float
    backward_bytes: float
    transfer_ms: float
    values: tuple[CutValue, ...] = ()

    @property
    def both_bytes(self) -> float:
        """The bytes in both directions."""
        return self.forward_bytes + self.backward_bytes


def list_cuts(plan: Plan, costs: Costs | None) -> list[Cut]:
    """Return the cuts of a plan in order; with `costs`, each has the values that cross it."""
    crossing = [list[CutValue]() for _ in plan.stages] if costs is None else _list_values(plan, costs)
    found = []
    for number in range(1, len(plan.stages)):
        before, after = plan.stages[number - 1], plan.stages[number]
        there, back = after.in_bytes, after.in_gradient_bytes
        if plan.compress:
            there, back = after.in_sent_bytes, after.in_sent_gradient_bytes
        values = sorted(crossing[number], key=lambda value: (-value.both_bytes, value.name))
        found.append(Cut(number, there, back, max(before.send_ms, after.receive_ms), tuple(values)))
    return found


def _list_values(plan: Plan, costs: Costs) -> list[list[CutValue]]:
    """Return the values that cross the cut before each stage, in the order of the graph.

    Under the cost model `direct`, a stage sends a value straight to the stages that read it, over all cuts between
    them. Inputs of the model then cross no cut, and an output crosses one only if a later stage reads it.
    """
    stage_of, count = plan.stage_of(), len(plan.stages)
    crossing: list[list[CutValue]] = [[] for _ in plan.stages]
    for name, _, _, readers, returned in costs.values:
        if name not in stage_of and not plan.model.forwards:
            continue
        kept = returned and plan.model.forwards
        for boundary in list_crossed(stage_of, name, readers, count, returned=kept):
            if 0 < boundary < count:
                crossing[boundary].append(CutValue(name, *costs.sent[name]))
    for exchange in costs.exchanges:
        # A backward exchanges a tensor among these nodes: it crosses each cut that has some of them on both sides.
        stages = [stage_of[name] for name in exchange.nodes]
        for boundary in range(min(stages) + 1, max(stages) + 1):
            crossing[boundary].append(CutValue(exchange.nodes[0], 0.0, exchange.output_bytes))
    return crossing

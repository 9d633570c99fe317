"""even, greedy: split the order of the graph as people do by hand, to compare the exact planner with.

Each takes the place of augment, order and partition in a chain: `profile,even,emit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar, Literal

from fxsplit.errors import PlanError
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.given.pins import Pins
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.graph import IR


@dataclass(frozen=True)
class Even:
    """Cut at the places closest to equal shares of the nodes, of their times, or of their parameters."""

    by: Literal["nodes", "time", "parameters"] = "nodes"

    name: ClassVar[str] = "even"
    ignores_mode: ClassVar[bool] = True
    needs: ClassVar[tuple[type, ...]] = (Costs, Machine, Workload)
    learns: ClassVar[tuple[type, ...]] = (Plan,)
    ignores_graph: ClassVar[bool] = True

    def __call__(self, ir: IR) -> IR:
        """Learn Plan from Costs. Raises PlanError if there are fewer places for cuts than needed."""
        costs, count = ir[Costs], len(ir[Machine])
        weights = {
            "nodes": [1.0] * len(costs.nodes),
            "time": [n.forward_ms + n.backward_ms for n in costs.nodes],
            "parameters": [n.parameter_bytes for n in costs.nodes],
        }[self.by]
        sums = [0.0, *accumulate(weights)]
        places, cuts = list_places(costs), [0]
        for stage in range(1, count):
            share = sums[-1] * stage / count
            # Each later stage needs a place of its own.
            left = [place for place in places if place > cuts[-1]]
            free = left[: max(0, len(left) - (count - 1 - stage))]
            if not free:
                raise PlanError(
                    f"the graph can be cut at {len(places)} places in its order, too few for {count} stages"
                )
            cuts.append(min(free, key=lambda place: abs(sums[place] - share)))
        return ir.learn(cut_at(ir, [*cuts, len(costs.nodes)]))


@dataclass(frozen=True)
class Greedy:
    """Fill each stage, in the order of the graph, until it has its share of the time; the last one takes the rest."""

    name: ClassVar[str] = "greedy"
    ignores_mode: ClassVar[bool] = True
    needs: ClassVar[tuple[type, ...]] = (Costs, Machine, Workload)
    learns: ClassVar[tuple[type, ...]] = (Plan,)
    ignores_graph: ClassVar[bool] = True

    def __call__(self, ir: IR) -> IR:
        """Learn Plan from Costs."""
        costs, count = ir[Costs], len(ir[Machine])
        sums = [0.0, *accumulate(n.forward_ms + n.backward_ms for n in costs.nodes)]
        cuts = [0]
        for place in list_places(costs):
            full = sums[place] - sums[cuts[-1]] >= sums[-1] / count
            if full and len(cuts) < count:
                cuts.append(place)
        return ir.learn(cut_at(ir, [*cuts, len(costs.nodes)]))


def list_places(costs: Costs) -> list[int]:
    """Return the positions in the order of the graph at which a cut parts no nodes that must stay together."""
    at = {node.name: position for position, node in enumerate(costs.nodes)}
    spans = [(min(at[n] for n in names), max(at[n] for n in names)) for names in costs.together if names]
    return [place for place in range(1, len(at)) if not any(first < place <= last for first, last in spans)]


def cut_at(ir: IR, cuts: Sequence[int]) -> Plan:
    """Return the plan with a stage of the nodes between each two neighbours in `cuts`, positions in graph order.

    Raises PlanError if there are pins, which these splits do not look at.
    """
    if ir.get(Pins) is not None:
        raise PlanError("even and greedy do not look at pins: leave the pins out, or take 'augment,order,partition'")
    names = [node.name for node in ir[Costs].nodes]
    return Plan.of(ir, [names[begin:end] for begin, end in pairwise(cuts)])

"""The memory of a stage: permanent, for each microbatch, and the most at once.

The price of a plan comes from this file, and the search asks this file whether a stage fits. Both add up the same
figures in the same order, so that they agree to the byte.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from fxsplit.ir.facts.costs.costs import Costs, NodeCost
from fxsplit.ir.facts.memory.microbatch import Crossings, MicrobatchMemory, follow_stage
from fxsplit.ir.facts.memory.moments import Moment, count_moving, find_fullest

WEIGHT_COPIES = 2.0
"""How often a stage holds each parameter: once itself, and once as the sum of its gradients during a step.

The sum becomes the parameter's `.grad`. A `.grad` that exists when a step begins is a third copy, which plans ignore.
"""
STEP_COPIES = 2.0
"""What an optimizer step allocates, as a multiple of the largest node's parameters. This is Adam's on a CPU."""

NUMBERS_BYTES = 4096.0
"""The most memory of a training stage for single numbers.

Such numbers are losses and their weights, and placeholders for gradients that were added to their sums. They count only
if the allocations of operators are known.
"""


@dataclass(frozen=True, kw_only=True)
class StageMemory(MicrobatchMemory):
    """The memory of a stage, in bytes: `memory_bytes` is the most at once; see StagePlan for the other fields.

    `activations_bytes`, `boundaries_bytes` and `working_bytes` divide up the fullest moment: the activations that
    autograd keeps for all microbatches, the values between stages that nothing keeps, and the rest.
    """

    held_bytes: float
    parameter_bytes: float
    optimizer_bytes: float
    buffer_bytes: float
    kept_bytes: float
    boundary_bytes: float
    step_bytes: float
    memory_bytes: float = 0.0
    versions_bytes: float = 0.0
    activations_bytes: float = 0.0
    boundaries_bytes: float = 0.0
    working_bytes: float = 0.0


_KNOWN: WeakKeyDictionary[Costs, dict[Any, StageMemory]] = WeakKeyDictionary()
"""The results of `measure_stage` by its arguments, as long as the costs exist."""


def measure_stage(
    costs: Costs,
    names: Sequence[str],
    crossings: Crossings,
    *,
    optimizer_factor: float,
    recompute: bool,
    last: bool,
    forwards: bool,
) -> StageMemory:
    """Return the memory of a stage of the nodes `names`, in the order of the graph, for one microbatch and permanently.

    - `optimizer_factor`: the optimizer's state, as a multiple of the parameters' bytes
    - `recompute`: the stage keeps no activations and runs its forward again before its backward
    - `last`: the loss is computed after the stage
    - `forwards`: stages hand on values that later stages read. Otherwise a stage holds none for other stages, and its
      memory is counted per node
    """
    # The search weighs the stages of a plan before they are priced, and verifying the plan prices them again.
    key = tuple(names), tuple(crossings.taken), tuple(crossings.given), optimizer_factor, recompute, last, forwards
    of_costs = _KNOWN.setdefault(costs, {})
    if key in of_costs:
        return of_costs[key]
    nodes = [costs.by_name[name] for name in names]
    parameters, buffers = sum_shared(costs, nodes, shared=forwards)
    kept = float(sum(n.kept_bytes for n in nodes))
    boundary = sum_boundaries(costs, crossings) if forwards else 0.0
    # The allocations in the stages of another tool's model are unknown.
    if forwards and costs.weighed:
        held = follow_stage(costs, names, crossings, recompute=recompute, last=last and not costs.inference)
        numbers = 0.0 if costs.inference else NUMBERS_BYTES
    else:
        numbers = 0.0
        held = spread_activations(kept, boundary, parameters, recompute=recompute, trains=not costs.inference)
    of_costs[key] = StageMemory(
        held_bytes=parameters * (WEIGHT_COPIES + optimizer_factor) + buffers + numbers,
        parameter_bytes=parameters,
        optimizer_bytes=parameters * optimizer_factor,
        buffer_bytes=buffers,
        kept_bytes=kept,
        boundary_bytes=boundary,
        # Another tool's optimizer is unknown as well.
        step_bytes=float(STEP_COPIES * max((n.parameter_bytes for n in nodes), default=0.0)) if forwards else 0.0,
        # As floats, even if a profile has integers: a plan that was written and read is the same plan.
        **{figure: float(amount) for figure, amount in vars(held).items()},
    )
    return of_costs[key]


def sum_boundaries(costs: Costs, crossings: Crossings) -> float:
    """Return the bytes of the values that a stage takes, and of its given values that nothing keeps."""
    given = ((name, costs.value_of[name][1]) for name in crossings.given)
    found = float(sum(costs.value_of[name][1] for name in crossings.taken))
    return found + float(sum(costs.find_unkept(name, size) for name, size in given))


def sum_shared(costs: Costs, nodes: Collection[NodeCost], *, shared: bool = True) -> tuple[float, float]:
    """Return the bytes of parameters and of buffers of some nodes; `shared` counts a weight of several nodes once."""
    parameters, buffers = float(sum(n.parameter_bytes for n in nodes)), float(sum(n.buffer_bytes for n in nodes))
    if shared and costs.tied:
        names = {n.name for n in nodes}
        # Each node that uses a parameter counts it among its own.
        for tie in costs.tied:
            again = max(sum(name in names for name in tie.nodes) - 1, 0)
            parameters, buffers = parameters - again * tie.parameter_bytes, buffers - again * tie.buffer_bytes
    return parameters, buffers


def find_peak(stage: StageMemory, moments: Iterable[Moment]) -> float:
    """Return the most bytes that a stage holds at once, over all `moments`."""
    return stage.held_bytes + max(count_moving(stage, moment) for moment in moments)


def fill_peak(stage: StageMemory, moments: Sequence[Moment], *, recompute: bool) -> StageMemory:
    """Return the stage with its peak filled in: the most bytes that it holds at once, in all and by kind."""
    fullest = find_fullest(stage, moments)
    moving, versions = count_moving(stage, fullest), fullest.versions * stage.parameter_bytes
    in_hand = getattr(stage, fullest.during) if fullest.during else 0.0
    # Sums that the action makes itself are part of the stage's permanent memory.
    in_hand = max(in_hand - (1 - fullest.sums) * stage.parameter_bytes, 0.0)
    # A stage that recomputes holds activations only for the running microbatch, and between two halves.
    activations = fullest.halfway * min(stage.kept_bytes, stage.halfway_bytes) + min(stage.kept_bytes, in_hand)
    if not recompute:
        activations += fullest.resting * min(stage.kept_bytes, stage.resting_bytes)
    # Memory that is neither kept nor handed on belongs to the action. Single numbers count with it.
    weights = stage.parameter_bytes * WEIGHT_COPIES + stage.optimizer_bytes
    numbers = max(stage.held_bytes - weights - stage.buffer_bytes, 0.0)
    working = max(in_hand - stage.kept_bytes - stage.boundary_bytes, 0.0) + numbers
    return replace(
        stage,
        memory_bytes=stage.held_bytes + moving,
        versions_bytes=versions,
        activations_bytes=activations,
        boundaries_bytes=max(moving + numbers - versions - activations - working, 0.0),
        working_bytes=working,
    )


def spread_activations(
    kept: float, boundary: float, parameters: float, *, recompute: bool, trains: bool
) -> MicrobatchMemory:
    """Return the memory of a microbatch if only its activations and boundary values are known.

    It assumes that all of these are held in each action, and in the first backward all sums of gradients too.
    """
    whole = kept + boundary
    return MicrobatchMemory(
        resting_bytes=whole - kept * recompute if trains else boundary,
        halfway_bytes=whole,
        forward_bytes=whole,
        whole_bytes=whole,
        first_bytes=whole + parameters,
        early_bytes=whole,
        late_bytes=whole,
    )

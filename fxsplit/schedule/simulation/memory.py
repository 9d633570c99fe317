"""Memory: the bytes that each device holds over a simulated step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxsplit.ir.facts.memory.microbatch import MicrobatchMemory
from fxsplit.ir.facts.memory.moments import Moment, count_moving
from fxsplit.schedule.moments import DURING, follow_device
from fxsplit.schedule.outstanding import list_outstanding
from fxsplit.schedule.simulation.simulate import Simulation

MemoryTrace = tuple[tuple[float, float], ...]
"""The memory of one device over a step: pairs (begin in ms, bytes), in order of time."""


@dataclass(frozen=True)
class Footprint(MicrobatchMemory):
    """The memory of one stage, in bytes: the fields of MicrobatchMemory for each microbatch, and these for the stage.

    - `held_bytes`: constant: weights, their gradients, optimizer state, buffers
    - `parameter_bytes`: one more version of the weights
    - `step_bytes`: allocated by the optimizer in a step between microbatches
    """

    held_bytes: float
    parameter_bytes: float = 0.0
    step_bytes: float = 0.0


def trace_memory(simulation: Simulation, footprints: Sequence[Footprint]) -> tuple[MemoryTrace, ...]:
    """Return the memory of every device over the step. `footprints` has one entry for each stage.

    A sent message counts until its receiver has certainly taken it, whatever the times of the actions.
    """
    schedule = simulation.schedule
    traces = []
    for device, (spans, outstanding) in enumerate(zip(simulation.spans, list_outstanding(schedule), strict=True)):
        always = sum(f.held_bytes for f, home in zip(footprints, schedule.homes, strict=True) if device in home)

        def count(held: dict[int, Moment], always: float = always) -> float:
            return always + sum(count_moving(footprints[stage], moment) for stage, moment in held.items())

        # Before the first action only the constant memory is in use.
        trace = [(0.0, always)]
        for turn, (begin, end) in zip(follow_device(schedule, device, outstanding), spans, strict=True):
            if turn.action.op in DURING:
                trace.append((begin, count(turn.during)))
            trace.append((end, count(turn.after)))
        traces.append(tuple(trace))
    return tuple(traces)


def find_peak(trace: MemoryTrace) -> float:
    """Return the most bytes that a device holds at once."""
    return max(bytes_ for _, bytes_ in trace)

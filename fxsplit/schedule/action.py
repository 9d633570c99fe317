"""Action and Schedule: who does what, in which order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from fxsplit.errors import ScheduleError

FORWARD, BACKWARD = "F", "B"


class Action(NamedTuple):
    """One thing a device does: the forward (F) or full backward (B) of one stage on one microbatch."""

    stage: int
    op: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """Each device's actions in order; `device_of[s]` is where stage s lives."""

    name: str
    n_microbatches: int
    device_of: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def n_stages(self) -> int:
        """How many stages the schedule drives."""
        return len(self.device_of)

    def only(self, op: str) -> Schedule:
        """Return the schedule of the actions with `op` alone: a forward pass, or the backward of an earlier one."""
        return replace(self, actions=tuple(tuple(a for a in row if a.op == op) for row in self.actions))

    def peak_in_flight(self) -> tuple[int, ...]:
        """Return, for each stage, the most microbatches that are forwarded and not yet backwarded at once."""
        held, peak = [0] * self.n_stages, [0] * self.n_stages
        for row in self.actions:
            for action in row:
                held[action.stage] += 1 if action.op == FORWARD else -1
                peak[action.stage] = max(peak[action.stage], held[action.stage])
        return tuple(peak)

    def check(self) -> None:
        """Raise ScheduleError, naming the place, unless every stage does F then B once per microbatch, at home."""
        seen: set[Action] = set()
        for device, row in enumerate(self.actions):
            for position, action in enumerate(row):
                where = f"{self.name}: device {device}, position {position}, {action}"
                if action in seen:
                    raise ScheduleError(f"{where}: done twice")
                if not 0 <= action.stage < self.n_stages or not 0 <= action.microbatch < self.n_microbatches:
                    raise ScheduleError(f"{where}: no such stage or microbatch")
                if self.device_of[action.stage] != device:
                    raise ScheduleError(f"{where}: stage {action.stage} lives on device {self.device_of[action.stage]}")
                if action.op == BACKWARD and action._replace(op=FORWARD) not in seen:
                    raise ScheduleError(f"{where}: backward before its forward")
                seen.add(action)
        for stage in range(self.n_stages):
            for microbatch in range(self.n_microbatches):
                for op in (FORWARD, BACKWARD):
                    if Action(stage, op, microbatch) not in seen:
                        raise ScheduleError(f"{self.name}: {Action(stage, op, microbatch)} is never done")

    def __str__(self) -> str:
        return "\n".join(" ".join(str(a) for a in row) for row in self.actions)

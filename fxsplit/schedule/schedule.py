"""Schedule: the actions of each device in order, and facts that follow from the order without times.

Facts that need times are in `simulate.py` and `memory.py`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from fxsplit.schedule.action import BACKWARD, COMPUTES, FORWARD, INPUT_GRADIENT, RELEASES, STEP, TRANSFERS, Action

Homes = tuple[tuple[int, ...], ...]
"""The devices of each stage, one for each replica. ((0,), (1, 2)) puts stage 1 on devices 1 and 2."""


@dataclass(frozen=True)
class Schedule:
    """The actions of each device in order: `actions[d]` for device d. `homes[s]` are the devices of stage s.

    Replica r of stage s is on device `homes[s][r]`. A schedule is `synchronous` if the optimizer steps once, after all
    microbatches, so that all of them use the same weights. Without `trains` it has only forwards.

    A forward in `paired` and the backward after it run together, as under DualPipeV: the results of both leave the
    device when both are done.
    """

    name: str
    n_microbatches: int
    homes: Homes
    actions: tuple[tuple[Action, ...], ...]
    synchronous: bool = True
    trains: bool = True
    paired: frozenset[Action] = frozenset()

    @property
    def n_stages(self) -> int:
        """The number of stages."""
        return len(self.homes)

    @property
    def shares_devices(self) -> bool:
        """Whether there are more stages than devices, so that devices have several."""
        return self.n_stages > self.n_devices

    @property
    def n_devices(self) -> int:
        """The number of devices."""
        return len(self.actions)

    @cached_property
    def replica_of(self) -> dict[tuple[int, int], int]:
        """The replica that runs each (stage, microbatch): the replica of its forward.

        A schedule of only backwards has no forwards: there it is the replica of the backward.
        """
        actions = [a for row in self.actions for a in row if a.op in COMPUTES]
        forwards = (a for a in actions if a.op == FORWARD)
        # Later entries override earlier ones, so forwards take precedence.
        return {(a.stage, a.microbatch): a.replica for a in (*actions, *forwards)}

    @cached_property
    def splits(self) -> frozenset[tuple[int, int]]:
        """The (stage, microbatch) pairs with a backward split into I and W."""
        return frozenset((a.stage, a.microbatch) for row in self.actions for a in row if a.op == INPUT_GRADIENT)

    @cached_property
    def releases(self) -> dict[int, list[Action]]:
        """The last actions of each microbatch, B or W, by stage. A reduction of gradients waits for all of them."""
        # Runs and checks look this up for each action, so cache it.
        found: dict[int, list[Action]] = {}
        for action in (a for row in self.actions for a in row if a.op in RELEASES):
            found.setdefault(action.stage, []).append(action)
        return found

    @cached_property
    def transfers(self) -> bool:
        """Whether transfers between devices are written out. If not, each value is sent as soon as it is made."""
        return any(a.op in TRANSFERS for row in self.actions for a in row)

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """The last microbatch before each optimizer step. All stages step at the same microbatches."""
        return tuple(sorted({a.microbatch for row in self.actions for a in row if a.op == STEP}))

    def device_of(self, stage: int, microbatch: int) -> int:
        """Return the device that runs a microbatch in a stage."""
        home = self.homes[stage]
        return home[0] if len(home) == 1 else home[self.replica_of.get((stage, microbatch), 0)]

    def gradient(self, stage: int, microbatch: int) -> Action:
        """Return the action that makes the gradient of a stage's inputs for a microbatch: its B or its I."""
        op = INPUT_GRADIENT if (stage, microbatch) in self.splits else BACKWARD
        return Action(stage, op, microbatch, self.replica_of.get((stage, microbatch), 0))

    def only(self, op: str) -> Schedule:
        """Return the schedule with only the actions `op`, for example only forwards."""
        rows = tuple(tuple(a for a in row if a.op == op) for row in self.actions)
        return replace(self, actions=rows, paired=frozenset())

    def without(self, op: str) -> Schedule:
        """Return the schedule without the actions `op`."""
        rows = tuple(tuple(a for a in row if a.op != op) for row in self.actions)
        return replace(self, actions=rows, paired=frozenset() if op in COMPUTES else self.paired)

    def in_flight(self, device: int) -> list[dict[int, int]]:
        """Return, after each action of a device, the number of microbatches with activations in each of its stages."""
        held = {stage: 0 for stage, home in enumerate(self.homes) if device in home}
        found = []
        for action in self.actions[device]:
            if action.op == FORWARD:
                held[action.stage] += 1
            elif action.op in RELEASES:
                held[action.stage] -= 1
            found.append(dict(held))
        return found

    def peak_in_flight(self) -> tuple[int, ...]:
        """Return the most microbatches with activations that each stage, or one of its replicas, holds at once."""
        peak = [0] * self.n_stages
        # Replicas of a stage may hold different numbers: take the largest.
        for device in range(self.n_devices):
            for held in self.in_flight(device):
                for stage, count in held.items():
                    peak[stage] = max(peak[stage], count)
        return tuple(peak)

    def peak_activations(self) -> tuple[float, ...]:
        """Return the most activations that each device holds at once.

        The unit is one microbatch's activations in all stages of a device: with 2 stages a device, a forward of one
        stage counts 0.5. Without backwards nothing is kept, and all are 0.
        """
        if not self.trains:
            return (0.0,) * self.n_devices
        # With v stages on a device, a stage has 1 / v of the length and of the activations.
        share = self.n_devices / max(1, self.n_stages)
        return tuple(
            share * max((sum(held.values()) for held in self.in_flight(d)), default=0) for d in range(self.n_devices)
        )

    def versions(self, device: int) -> list[int]:
        """Return, after each action of a device, the number of weight versions that the action's stage keeps there.

        A stage keeps its newest version, and every older version that a later action reads.
        """
        left: dict[tuple[int, int], Counter[int]] = {}
        for action in self.actions[device]:
            if action.op in COMPUTES:
                left.setdefault((action.stage, action.replica), Counter())[action.version] += 1
        newest: dict[tuple[int, int], int] = {}
        found = []
        for action in self.actions[device]:
            place = action.stage, action.replica
            if action.op == STEP:
                newest[place] = action.version
            elif action.op in COMPUTES:
                left[place][action.version] -= 1
            now = newest.get(place, 0)
            # Versions newer than `now` do not exist yet.
            found.append(len({now, *(v for v, count in left.get(place, {}).items() if count and v < now)}))
        return found

    def weight_versions(self) -> tuple[int, ...]:
        """Return the most weight versions that each stage keeps at once."""
        kept = [1] * self.n_stages
        for device, row in enumerate(self.actions):
            for action, versions in zip(row, self.versions(device), strict=True):
                kept[action.stage] = max(kept[action.stage], versions)
        return tuple(kept)

    def lag(self) -> tuple[int, ...]:
        """Return, for each stage, the highest age of a gradient when a step applies it, in weight versions."""
        lags = [0] * self.n_stages
        for row in self.actions:
            # For each stage and replica, the versions that computed the gradients since the last step.
            waiting: dict[tuple[int, int], list[int]] = {}
            for action in row:
                place = action.stage, action.replica
                if action.op in RELEASES:
                    waiting.setdefault(place, []).append(action.version)
                elif action.op == STEP:
                    # The step that makes version v applies gradients to version v - 1.
                    behind = [action.version - 1 - version for version in waiting.pop(place, [])]
                    lags[action.stage] = max([lags[action.stage], *behind])
        return tuple(lags)

    def at(self, device: int, position: int) -> str:
        """Return the name of a place for errors, such as `1F1B: device 0, position 2, 0B0`."""
        return f"{self.name}: device {device}, position {position}, {self.actions[device][position]}"

    def __str__(self) -> str:
        return "\n".join(" ".join(str(a) for a in row) for row in self.actions)

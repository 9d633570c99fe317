"""Pins: the stages that the user has chosen for submodules and nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import ClassVar

from fxsplit.errors import PlanError
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.graph import IR, GivenFact
from fxsplit.ir.text.records import Record

SHOWN_NAMES = 5
"""How many of the known names an error lists, if no known name is similar to the wrong one."""


@dataclass(frozen=True)
class Pins(GivenFact):
    """The stages of pinned submodules and nodes: path of a submodule, or name of a node -> number of its stage.

    optional: paths that the graph may lack: the evaluation mode of a model has no dropout, for example.
    """

    stages: Mapping[str, int]
    optional: frozenset[str] = frozenset()

    made_by: ClassVar[str] = "a pass of yours"

    @staticmethod
    def add(ir: IR, stages: Mapping[str, int]) -> IR:
        """Return `ir` with `stages` pinned in addition to the earlier pins; raises PlanError for a contradiction."""
        # Several passes may pin, independently of each other.
        earlier = ir.get(Pins) or Pins({})
        for path, stage in stages.items():
            if not path:
                raise PlanError(f"a pin on stage {stage} names no submodule: give its path, such as 'layer1'")
            if earlier.stages.get(path, stage) != stage:
                raise PlanError(f"{path!r} is pinned to stage {earlier.stages[path]} and to stage {stage}: keep one")
        return ir.learn(Pins({**earlier.stages, **stages}, earlier.optional - set(stages)))

    @staticmethod
    def join(several: Sequence[Pins]) -> Pins:
        """Return several pins as one. If two contradict each other, the later one counts."""
        stages = {path: stage for pins in several for path, stage in pins.stages.items()}
        return Pins(stages, frozenset().union(*(pins.optional for pins in several)))

    def nodes(self, costs: Costs, machine: Machine | None = None) -> dict[str, int]:
        """Return the stage of every pinned node.

        Raises PlanError for a path that no node belongs to, and for a stage that has no device on the machine.
        """
        pinned: dict[str, int] = {}
        for path, stage in self.stages.items():
            if machine is not None and not 0 <= stage < len(machine):
                last = len(machine) - 1
                raise PlanError(f"{path!r} is pinned to device {stage}, and there are devices 0 to {last}")
            found = find_nodes(costs, path)
            if not found and path not in self.optional:
                raise PlanError(f"cannot pin {path!r}: {suggest_names(costs, path)}")
            pinned.update(dict.fromkeys(found, stage))
        return pinned

    def verify(self, ir: IR) -> None:
        """Raise PlanError for a pin that matches no node, if the nodes are known already."""
        costs = ir.get(Costs)
        if costs is not None:
            self.nodes(costs)

    def to_record(self, ir: IR) -> Record:
        """Return the pins in the form in which they are stored in text."""
        optional = {"optional": tuple(sorted(self.optional))} if self.optional else {}
        return Record("Pins", {"stages": dict(self.stages), **optional})

    @classmethod
    def from_record(cls, record: Record, ir: IR) -> Pins:
        """Return the pins of a record; raises IRSyntaxError."""
        optional = record.values.get("optional", ())
        if not isinstance(optional, tuple):
            record.fail("optional must be names in round brackets", "optional")
        return record.make(cls, {"optional": frozenset(optional)})

    def __str__(self) -> str:
        return "\n".join(f"{path} on stage {stage}" for path, stage in self.stages.items())


def find_nodes(costs: Costs, path: str) -> list[str]:
    """Return the nodes of the submodule at `path`, or the node of that name; empty if the graph has neither."""
    # The dot keeps "layer1" from matching "layer10".
    return [n.name for n in costs.nodes if n.name == path or f"{n.module}.".startswith(f"{path}.")]


def suggest_names(costs: Costs, path: str) -> str:
    """Return the second half of an error about a name that the graph lacks: it suggests similar names."""
    # A misspelt path is the usual reason. A profile of another tool may have no submodules.
    parts = [n.module.split(".") for n in costs.nodes if n.module]
    modules = sorted({".".join(part[: i + 1]) for part in parts for i in range(len(part))})
    nodes = [n.name for n in costs.nodes]
    close = get_close_matches(path, list(dict.fromkeys([*modules, *nodes])), n=3)
    if close:
        return f"no such submodule or node in the graph; did you mean {', '.join(map(repr, close))}?"
    known = modules or nodes
    more = f" and {len(known) - SHOWN_NAMES} more" if len(known) > SHOWN_NAMES else ""
    return f"no such submodule or node in the graph; there are {', '.join(map(repr, known[:SHOWN_NAMES]))}{more}"

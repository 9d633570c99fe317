"""Known costs: earlier measurements of operators, so that a profile need not measure them again."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

from fxsplit.ir.facts.costs.costs import Costs, NodeCost
from fxsplit.ir.graph import GivenFact


class Measured(NamedTuple):
    """The measurement of an operator, in milliseconds and bytes. NodeCost has fields with the same names."""

    forward_ms: float
    backward_ms: float
    weight_ms: float
    spread_ms: float | None
    forward_launch_ms: float = 0.0
    backward_launch_ms: float = 0.0
    forward_peak_bytes: float | None = None
    backward_peak_bytes: float = 0.0
    halved_peak_bytes: float = 0.0
    late_peak_bytes: float = 0.0
    waiting_bytes: float = 0.0
    lent_bytes: float = 0.0
    kind: str = ""


_SIZES = re.compile(r"\[[\d, ]*\]")
_CHOOSES = re.compile(r"\b(bool|u?int\d+)\[")
"""Matches a tensor among the arguments of an operator that may be a mask, or indices."""


class Observed(NamedTuple):
    """A node of a graph that has run once, with all that is needed to look it up among known costs.

    signature: its operator with the shapes of its arguments. made: the dtype and shape of its output.
    """

    name: str
    inputs: Sequence[str]
    signature: str
    made: str


def _drop_sizes(signature: str) -> str:
    """Return a signature without the sizes of its arguments, but with the sizes of a module's weights."""
    head, _, arguments = signature.rpartition("(")
    return f"{head}({_SIZES.sub('', arguments)}"


@dataclass(frozen=True, eq=False)
class KnownCosts(GivenFact):
    """Costs measured earlier. `profile` looks them up by operator signature instead of measuring.

    complete: whether `profile` must measure no operator itself.
    by_name: the model is a copy, in other dtypes, of the model that the costs are of. If it has the same nodes, the
        costs hold for it as they are.
    """

    costs: Costs
    complete: bool
    by_name: bool = False

    made_by: ClassVar[str] = "compile(costs=)"

    @cached_property
    def times(self) -> dict[str, Measured]:
        """The measurement of each operator, by the operator's signature."""
        return {
            n.signature: Measured(
                n.forward_ms,
                n.backward_ms,
                n.late_ms,
                n.spread_ms,
                n.forward_launch_ms,
                n.backward_launch_ms,
                n.forward_peak_bytes,
                n.backward_peak_bytes,
                n.halved_peak_bytes,
                n.late_peak_bytes,
                n.waiting_bytes,
                n.lent_bytes,
                n.kind,
            )
            for n in self.costs.nodes
        }

    def covers(self, nodes: Iterable[Observed]) -> bool:
        """Return whether the costs may be used by name, and are the costs of exactly these nodes with these inputs."""
        found = {name: tuple(inputs) for name, inputs, _, _ in nodes} if self.by_name else None
        return found == {node.name: node.inputs for node in self.costs.nodes}

    def find_chosen(self, nodes: Iterable[Observed]) -> dict[str, NodeCost]:
        """Return the known costs of nodes whose sizes depend on values, by the names of the nodes.

        Such a node selects entries by a mask or by indices, or computes with selected entries. Its sizes may differ
        from those of the earlier measurement only because other entries were selected, so the earlier costs are used.
        nodes: all nodes, in the order of the graph. A node whose sizes differ for any other reason is left out.
        """
        found: dict[str, NodeCost] = {}
        for name, inputs, signature, made in nodes:
            known = self.costs.by_name.get(name)
            if known is None or known.inputs != tuple(inputs) or not known.made:
                continue
            if known.signature == signature:
                chooses = known.made != made and _CHOOSES.search(signature) is not None
                if chooses and _SIZES.sub("", known.made) == _SIZES.sub("", made):
                    found[name] = known
            elif not found.keys().isdisjoint(inputs) and _drop_sizes(known.signature) == _drop_sizes(signature):
                found[name] = known
        return found

    def __str__(self) -> str:
        return f"{len(self.times)} operator signatures, {'complete' if self.complete else 'others are measured'}"

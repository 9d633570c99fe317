"""Passes that fail in many ways, for tests of errors and reproducers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.pins import Pins
from fxsplit.ir.facts.lattice.states import States
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.graph import IR, GivenFact


@dataclass(frozen=True)
class Never(GivenFact):
    """A fact that never holds."""

    made_by: ClassVar[str] = "learn_wrong"

    def verify(self, ir: IR) -> None:
        """Raise an error of Python."""
        assert ir is None, "never true"


def _raise(error: Exception) -> Any:
    raise error


def _edit_in_place(ir: IR) -> IR:
    next(iter(ir.gm.graph.nodes)).name = "renamed"
    return ir


def _lose_node(ir: IR) -> IR:
    with ir.edited() as edit:
        calls = edit.graph.find_nodes(op="call_module")
        calls[-1].replace_all_uses_with(calls[-1].args[0])
    return edit.ir.learn(ir[Costs])


def _change(ir: IR, **figures: Any) -> IR:
    costs = ir[Costs]
    return ir.learn(replace(costs, nodes=(replace(costs.nodes[0], **figures), *costs.nodes[1:])))


WAYS: dict[str, Callable[[IR], Any]] = {
    "key-error": lambda ir: _raise(KeyError("nope")),
    "value-error": lambda ir: _raise(ValueError("of the pass")),
    "zero-division": lambda ir: 1 / 0,
    "assertion": lambda ir: _raise(AssertionError("wrong")),
    "attribute-error": lambda ir: ir.nothing,  # type: ignore[attr-defined]
    "not-implemented": lambda ir: _raise(NotImplementedError("later")),
    "os-error": lambda ir: Path("/no/such/file").read_text(),
    "recursion": lambda ir: _raise(RecursionError("too deep")),
    "returns-none": lambda ir: None,
    "returns-graph": lambda ir: ir.gm,
    "learns-no-fact": lambda ir: ir.learn("costs"),  # type: ignore[arg-type]
    "learns-wrong": lambda ir: ir.learn(Never()),
    "missing-states": lambda ir: ir[States],
    "missing-plan": lambda ir: ir[Plan],
    "edits-in-place": _edit_in_place,
    "loses-node": _lose_node,
    "negative-time": lambda ir: _change(ir, forward_ms=-1.0),
    "other-inputs": lambda ir: _change(ir, inputs=("nobody",)),
    "renamed-node": lambda ir: _change(ir, name="other"),
    "pins-nobody": lambda ir: Pins.add(ir, {"nobody": 0}),
    "pins-twice": lambda ir: Pins.add(Pins.add(ir, {"0": 0}), {"0": 1}),
}
"""Each way to fail, by its name."""


@dataclass(frozen=True)
class Break:
    """Fail in one of the ways."""

    how: str = "key-error"

    name: ClassVar[str] = "break"

    def __call__(self, ir: IR) -> IR:
        """Fail."""
        result: IR = WAYS[self.how](ir)
        return result

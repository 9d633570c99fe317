"""The IR: a torch.fx graph and the facts that passes have learnt about it.

It is the one thing that goes from pass to pass: `capture` makes it, each pass returns another, and the last one holds
the Stages that the runtime runs. A *fact* is a frozen value, found by its type: `ir[Costs]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar, cast, runtime_checkable

from fxsplit.errors import ChainError, MissingFact
from fxsplit.system.shown import Parts, Shown

if TYPE_CHECKING:  # torch takes a second to load, and planning from a profile needs none of it
    from torch import fx


Mode = Literal["train", "eval"]
"""A model's mode. Training and evaluation may be different graphs, as batch norm and dropout make them."""


@runtime_checkable
class Fact(Protocol):
    """Something known about a graph. A fact can check itself against the graph, and its text is a section of a dump.

    A fact that has `dumped`, a text, is a section of that text instead.

    made_by: the pass that learns it, for error messages. given: whether it describes the run (the machine, the example)
    and not the graph, so that it outlives a rewrite of the graph; false for a class that derives from Fact.
    derives_from: the facts that it follows from, so that it is forgotten when one of those is learnt anew; none unless
    a class states some.
    """

    made_by: ClassVar[str]
    given: ClassVar[bool] = False

    def verify(self, ir: IR) -> None:
        """Raise BrokenFact unless the fact holds for `ir`."""


class GivenFact(Fact):
    """Base of the facts that describe the run, such as the machine: they outlive a rewrite, and hold for any graph."""

    given: ClassVar[bool] = True

    def verify(self, ir: IR) -> None:
        """Accept every graph: nothing in the fact is about a particular one."""


F = TypeVar("F", bound=Fact)


@dataclass(frozen=True)
class Step:
    """One applied pass: its text and how long it took."""

    text: str
    seconds: float


@dataclass(frozen=True, eq=False, repr=False)
class IR(Shown):
    """A graph and what is known about it; passes return a new one and never edit `gm` in place.

    `model` is the name of the class that the graph was captured from, and `mode` the mode that the model was in. A pass
    that is right in one mode only asks `mode`: the flag `gm.training` is lost by some rewrites.
    """

    gm: fx.GraphModule
    # A read-only view: passes that keep an earlier IR must find it as it was.
    facts: Mapping[type, Fact] = field(default_factory=lambda: MappingProxyType({}))
    steps: tuple[Step, ...] = ()
    # Each fact that was forgotten because one that it derives from was learnt anew, and which that was.
    fallen: Mapping[type, type] = field(default_factory=lambda: MappingProxyType({}))
    model: str = ""
    mode: Mode = "train"

    def summarise(self) -> str:
        """Return what the graph is of, how large it is, and what is known about it."""
        known = ", ".join(kind.__name__ for kind in self.facts) or "nothing"
        return f"{self.model or 'no model'}, {self.mode} mode, {len(self.gm.graph.nodes)} nodes; known: {known}"

    def show(self) -> Parts:
        """Return the text of a dump."""
        from fxsplit.ir.text import render

        return [render(self).rstrip("\n")]

    def __getitem__(self, kind: type[F]) -> F:
        """Return the fact of type `kind`; raises MissingFact, with the next step, where it is not known."""
        fact = self.get(kind)
        if fact is not None:
            return fact
        known = ", ".join(k.__name__ for k in self.facts) or "nothing"
        if kind in self.fallen:
            # In the order in which they were learnt, so the passes in between come first.
            again = dict.fromkeys(cast("type[Fact]", k).made_by for k in self.fallen)
            raise MissingFact(
                f"no {kind.__name__} any more (known: {known}): it derives from {self.fallen[kind].__name__}, which a "
                f"pass has learnt anew since: run {', '.join(again)} again behind that pass"
            )
        # The chain is at fault: it lacks a pass, or has it and rewrites the graph behind it.
        if any(step.text.partition("{")[0] == kind.made_by for step in self.steps):
            raise MissingFact(
                f"no {kind.__name__} any more (known: {known}): what {kind.made_by!r} learnt was forgotten when a "
                f"later pass rewrote the graph: rewrite it before {kind.made_by!r}, keep what still holds "
                f"(ir.rewrite(gm, {kind.__name__})), or read it earlier"
            )
        raise MissingFact(f"no {kind.__name__} yet (known: {known}): run {kind.made_by!r} earlier in the chain")

    def get(self, kind: type[F]) -> F | None:
        """Return the fact of type `kind`, or None."""
        return cast("F | None", self.facts.get(kind))

    def learn(self, *facts: Fact) -> IR:
        """Return an IR that also knows `facts`; a fact of a type already known takes its place.

        Known facts that derive from a type learnt anew are forgotten. Raises ChainError for what is no fact.
        """
        for fact in facts:
            # Not isinstance(fact, Fact), which takes a tenth of a millisecond for a protocol.
            if isinstance(fact, type) or not all(hasattr(fact, name) for name in ("verify", "made_by", "given")):
                raise ChainError(f"{fact!r} is no fact: give an object with verify(ir), made_by and given")
        learnt: dict[type, Fact] = {type(f): f for f in facts}
        # The reason for which each fact falls, which may be another one that falls.
        anew = {kind: kind for kind, fact in learnt.items() if self.facts.get(kind) is not fact}
        for kind in self.facts:
            cause = next((anew[base] for base in list_sources(kind) if base in anew), None)
            if cause is not None and kind not in learnt:
                anew[kind] = cause
        fallen = {k: cause for k, cause in {**self.fallen, **anew}.items() if k not in learnt}
        kept = {k: f for k, f in self.facts.items() if k not in fallen}
        return replace(self, facts=MappingProxyType(kept | learnt), fallen=MappingProxyType(fallen))

    def rewrite(self, gm: fx.GraphModule, *keep: type) -> IR:
        """Return an IR of another graph, which keeps the given facts and those of the types in `keep`.

        All other facts are about the graph that was, and are forgotten.
        """
        # A fact that is kept by mistake is found out when the manager verifies it against the new graph.
        kept = {k: f for k, f in self.facts.items() if f.given or k in keep}
        return replace(self, gm=gm, facts=MappingProxyType(kept))


def list_sources(kind: Any) -> tuple[type, ...]:
    """Return the types of the facts that a fact of type `kind` derives from."""
    # A fact need not be of a class that derives from Fact, and then may lack what has a default.
    return tuple(getattr(kind, "derives_from", ()))


Pass = Callable[[IR], IR]
"""Anything that maps an IR to an IR: a plain function, or a frozen dataclass whose fields are its options."""


def name_pass(step: Any) -> str:
    """Return the name of a pass in chains, dumps and messages; a function `fold_bn` is called `fold-bn`."""
    name = getattr(step, "name", None) or getattr(step, "__name__", None) or type(step).__name__
    return str(name).replace("_", "-")


def is_own(step: Any) -> bool:
    """Return whether a pass comes with fxsplit, which tests it; a class derived from such a pass does not."""
    return type(step).__module__.startswith("fxsplit.passes.")


def ignores_mode(step: Any) -> bool:
    """Return whether a pass states that it does the same to the same graph in both modes: `ignores_mode = True`.

    A class states it for itself, since a class derived from it may ask for the mode; a function has it as an attribute.
    """
    return any(bool(held.get("ignores_mode")) for held in (vars(type(step)), getattr(step, "__dict__", {})))

"""The IR: a torch.fx graph and the facts that passes have learnt about it.

The IR is all that goes from pass to pass: `capture` makes the first IR, each pass returns another, and the last IR
holds the Stages that the runtime runs. A *fact* is a frozen value, found by its type: `ir[Costs]`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar, cast, runtime_checkable

from fxsplit.errors import ChainError, MissingFact
from fxsplit.system.files import write_whole
from fxsplit.system.shown import Parts, Shown

if TYPE_CHECKING:  # torch takes a second to load, and planning from a profile needs none of it
    from contextlib import AbstractContextManager

    from torch import fx

    from fxsplit.ir.edit import Edit


Mode = Literal["train", "eval"]
"""The mode of a model.

Training and evaluation may have different graphs, for example because of batch norm and dropout.
"""


@runtime_checkable
class Fact(Protocol):
    """A known property of a graph. A fact checks itself against the graph, and its text is a section of a dump.

    If a fact has an attribute `dumped`, that text is the section instead.

    - `made_by` names the pass that learns the fact, for error messages
    - `given` is true for a fact about the run (the machine, the example), which survives a rewrite of the graph; the
      default is false
    - `derives_from` lists the facts from which this fact follows. If a pass learns one of them again, this fact is
      forgotten; the default is none
    """

    made_by: ClassVar[str]
    given: ClassVar[bool] = False

    def verify(self, ir: IR) -> None:
        """Raise BrokenFact unless the fact holds for `ir`."""


class GivenFact(Fact):
    """Base of the facts that describe the run, such as the machine. They survive a rewrite, and hold for any graph."""

    given: ClassVar[bool] = True

    def verify(self, ir: IR) -> None:
        """Accept every graph: a fact about the run does not depend on the graph."""


@dataclass(frozen=True, eq=False)
class Unread(Fact):
    """A fact that a text of an IR contains only as a comment: its lines are kept, but its values are not known.

    - `kind` is the name of the fact's class, and `sources` are the names of the facts from which it follows
    - `stays` is true for a fact about the run, which survives a rewrite of the graph
    - `step` is the pass that computes the fact again if it is asked for; None if the text does not suffice for that
    """

    kind: str
    lines: tuple[str, ...]
    sources: tuple[str, ...] = ()
    stays: bool = False
    step: Pass | None = None
    _made: dict[str, Fact] = field(default_factory=dict, compare=False, repr=False)

    made_by: ClassVar[str] = "read_ir"

    def verify(self, ir: IR) -> None:
        """Accept every graph: the values of the fact are not known, so they cannot be checked."""

    def make(self, ir: IR) -> Fact | None:
        """Return the fact itself, computed by its pass at the first call; None if there is no such pass."""
        if self.step is not None and not self._made:
            made = self.step(ir)
            self._made.update({kind.__name__: fact for kind, fact in made.facts.items() if kind.__name__ == self.kind})
        return self._made.get(self.kind)

    def to_comment(self) -> tuple[str, tuple[str, ...]]:
        """Return the first line of the comment, and a tuple of the other lines."""
        return self.kind if self.stays else f"{self.kind} of {', '.join(self.sources)}", self.lines

    def __str__(self) -> str:
        return "\n".join(self.lines)


F = TypeVar("F", bound=Fact)


@dataclass(frozen=True)
class Step:
    """One applied pass: its text, its time in seconds, and the figures that it has noted (see `IR.note`).

    run: the pass itself; None for a step that was read from a file.
    """

    text: str
    seconds: float
    noted: Mapping[str, object] = field(default_factory=dict)
    run: Pass | None = field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        """The name of the pass. For a step from a file, the name of the class or function that its text names."""
        return name_pass(self.run) if self.run is not None else self.text.partition("{")[0].rpartition(":")[2]


@dataclass(frozen=True, eq=False, repr=False)
class IR(Shown):
    """A graph and the known facts about it. Passes return a new IR and never edit `gm` in place.

    model: the name of the class that the graph was captured from.
    mode: the mode of the model at that time. A pass that is valid in only one mode looks at `mode`, since some rewrites
        lose the flag `gm.training`.
    """

    gm: fx.GraphModule
    # A read-only view: a pass that keeps an earlier IR must find it unchanged.
    facts: Mapping[type, Fact] = field(default_factory=lambda: MappingProxyType({}))
    steps: tuple[Step, ...] = ()
    # From each forgotten fact to the fact that caused this: it derives from that fact, which was learnt again.
    fallen: Mapping[type, type] = field(default_factory=lambda: MappingProxyType({}))
    model: str = ""
    mode: Mode = "train"
    # The IR before the last step or rewrite. It still has facts that this IR may have forgotten.
    earlier: IR | None = None
    # Figures that the present pass has noted, by name. The manager moves them to the step of the pass.
    noted: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))

    def before(self, name: str) -> IR:
        """Return the IR before the last pass called `name`; raises ChainError if that is not known."""
        found = self._find_step(name).earlier
        assert found is not None  # a step without an earlier IR is not found
        return found

    def after(self, name: str) -> IR:
        """Return the IR after the last pass called `name`; raises ChainError if that is not known."""
        return self._find_step(name)

    def _find_step(self, name: str) -> IR:
        """Return the IR after the last pass called `name`."""
        at: IR | None = self
        while at is not None and at.earlier is not None:
            # An IR from a file follows the captured one without a step.
            if len(at.steps) == len(at.earlier.steps) + 1 and at.steps[-1].name == name:
                return at
            at = at.earlier
        steps = ", ".join(step.name for step in self.steps) or "none"
        raise ChainError(
            f"the IR around pass {name!r} is not known: the steps are {steps}, and an IR from a file, or from a pass "
            "that was called by hand, keeps no earlier ones: run passes by fxsplit.run(ir, chain)"
        )

    def summarise(self) -> str:
        """Return one line with the model, the mode, the size of the graph and the names of the known facts."""
        known = ", ".join(kind.__name__ for kind in self.facts) or "nothing"
        return f"{self.model or 'no model'}, {self.mode} mode, {len(self.gm.graph.nodes)} nodes; known: {known}"

    def show(self) -> Parts:
        """Return the IR as text, as dumps and `print` show it."""
        from fxsplit.ir.text.write import render

        return [render(self).rstrip("\n")]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the IR as text, which `fxsplit.load_ir` reads.

        Raises FileError, and then leaves an existing file unchanged.
        """
        from fxsplit.ir.text.write import render

        write_whole(path, render(self))

    def __getitem__(self, kind: type[F]) -> F:
        """Return the fact of type `kind`. Raises MissingFact, with the next step, if the fact is not known."""
        fact = self.get(kind)
        if fact is not None:
            return fact
        known = ", ".join(k.__name__ for k in self.facts) or "nothing"
        loads = "fxsplit.load_ir(path, model, example_inputs), or fxsplit opt --model"
        if kind.made_by == "trace":
            raise MissingFact(
                f"no {kind.__name__} (known: {known}): it comes from the model, so capture that (fxsplit.capture), or "
                f"give it to the file with its inputs ({loads})"
            )
        if self._find_unread(kind) is not None:
            raise MissingFact(
                f"{kind.__name__} is only a comment in the text that this IR was read from: run {kind.made_by!r} "
                f"again; if that runs the graph, give the model and its inputs ({loads})"
            )
        # A comment of a text has a class of its own with the name of the fact.
        cause = next((cause.__name__ for k, cause in self.fallen.items() if k.__name__ == kind.__name__), None)
        if cause is not None:
            # In the order in which they were learnt, so that the passes in between come first.
            made = dict.fromkeys(cast("type[Fact]", k).made_by for k in self.fallen)
            again = [step for step in made if step != Unread.made_by]
            raise MissingFact(
                f"no {kind.__name__} any more (known: {known}): it derives from {cause}, which is another one since: "
                f"run {', '.join(again or [kind.made_by])} again"
            )
        # The chain is at fault: it lacks the pass, or a later pass rewrites the graph.
        if any(step.name == kind.made_by for step in self.steps):
            raise MissingFact(
                f"no {kind.__name__} any more (known: {known}): the facts of {kind.made_by!r} were forgotten when a "
                f"later pass rewrote the graph: rewrite it before {kind.made_by!r}, keep this fact if it still holds "
                f"(ir.rewrite(gm, {kind.__name__})), or read it earlier"
            )
        raise MissingFact(f"no {kind.__name__} yet (known: {known}): run {kind.made_by!r} earlier in the chain")

    def get(self, kind: type[F]) -> F | None:
        """Return the fact of type `kind`, or None if it is not known."""
        fact = self.facts.get(kind)
        unread = None if fact is not None else self._find_unread(kind)
        return cast("F | None", fact if unread is None else unread.make(self))

    def _find_unread(self, kind: type) -> Unread | None:
        """Return the fact of type `kind` that is only a comment in the text of this IR, or None."""
        return next((f for f in self.facts.values() if isinstance(f, Unread) and f.kind == kind.__name__), None)

    def learn(self, *facts: Fact) -> IR:
        """Return an IR that also knows `facts`. A new fact replaces a known fact of the same type.

        Known facts that derive from a replaced fact are forgotten. Raises ChainError for an object that is not a fact.
        """
        for fact in facts:
            # isinstance(fact, Fact) would take 0.1 ms, since Fact is a protocol.
            if isinstance(fact, type) or not all(hasattr(fact, name) for name in ("verify", "made_by", "given")):
                raise ChainError(f"{fact!r} is no fact: give an object with verify(ir), made_by and given")
        learnt: dict[type, Fact] = {type(f): f for f in facts}
        names = {kind.__name__ for kind in learnt}
        # The cause for which each fact is forgotten, which may itself be a forgotten fact.
        anew = {kind: kind for kind, fact in learnt.items() if self.facts.get(kind) is not fact}
        for kind in self.facts:
            cause = next((anew[base] for base in list_sources(kind) if base in anew), None)
            if cause is not None and kind not in learnt:
                anew[kind] = cause
        # A fact that stands as a comment knows only the names of its sources.
        gone = {kind.__name__: kind for kind in anew}
        for kind, fact in self.facts.items():
            sources = fact.sources if isinstance(fact, Unread) and kind.__name__ not in names else ()
            cause = next((gone[name] for name in sources if name in gone), None)
            if cause is not None:
                anew[kind] = gone[kind.__name__] = cause
        fallen = {k: cause for k, cause in {**self.fallen, **anew}.items() if k.__name__ not in names}
        kept = {k: f for k, f in self.facts.items() if k not in fallen and k.__name__ not in names}
        return replace(self, facts=MappingProxyType(kept | learnt), fallen=MappingProxyType(fallen))

    def note(self, **figures: object) -> IR:
        """Return an IR with figures of the pass that makes the IR, such as `ir.note(fused=3)`.

        Afterwards the figures are in the pass's `Step`, and `fxsplit opt --stats` prints them. No pass reads them.
        Raises ChainError for a figure that is not a number, a flag or a text.
        """
        # A number of numpy or torch has `item`, and so has an array, which is no number.
        plain = {n: v.item() if hasattr(v, "item") and not getattr(v, "shape", ()) else v for n, v in figures.items()}
        odd = next((name for name, value in plain.items() if not isinstance(value, (int, float, str))), None)
        if odd is not None:
            raise ChainError(f"note({odd}=...) has a {type(plain[odd]).__name__}: give a number, a flag or text")
        return replace(self, noted=MappingProxyType({**self.noted, **plain}))

    def edited(self) -> AbstractContextManager[Edit[IR]]:
        """Return a block in which a copy of the graph may be changed: `with ir.edited() as edit:`, then `edit.ir`.

        `edit.graph` is the copy, a graph of torch.fx. `edit.add_module(path, module)` gives it a module of your own.
        Nodes that nothing reads any more are dropped, and facts of the old graph are forgotten.
        """
        from fxsplit.ir.edit import edit_graph  # it needs torch

        return edit_graph(self)

    def rewrite(self, gm: fx.GraphModule, *keep: type) -> IR:
        """Return an IR of another graph that keeps the given facts and the facts of the types in `keep`.

        All other facts are about the old graph, and are forgotten.
        """
        # If a fact is kept by mistake, the manager finds out: it verifies every fact against the new graph.
        names = {kind.__name__ for kind in keep}
        kept = {
            k: f for k, f in self.facts.items() if f.given or k in keep or (isinstance(f, Unread) and _stays(f, names))
        }
        return replace(self, gm=gm, facts=MappingProxyType(kept), earlier=self)


def _stays(fact: Unread, keep: set[str]) -> bool:
    """Return whether a fact that is only a comment survives a rewrite of the graph. `keep`: names of facts to keep."""
    return fact.stays or fact.kind in keep


def list_sources(kind: Any) -> tuple[type, ...]:
    """Return the types of the facts that a fact of type `kind` derives from."""
    # A fact need not inherit from Fact, and may then lack the attributes that have defaults.
    return tuple(getattr(kind, "derives_from", ()))


Pass = Callable[[IR], IR]
"""A function from IR to IR: a plain function, or a frozen dataclass whose fields are its options."""


def name_pass(step: Any) -> str:
    """Return the name of a pass for chains, dumps and messages; a function `fold_bn` is called `fold-bn`."""
    name = getattr(step, "name", None) or getattr(step, "__name__", None) or type(step).__name__
    return str(name).replace("_", "-")


def is_own(step: Any) -> bool:
    """Return whether a pass is one of fxsplit's own, which are tested. A user's subclass of such a pass is not."""
    return type(step).__module__.startswith("fxsplit.passes.")


def ignores_mode(step: Any) -> bool:
    """Return whether a pass declares `ignores_mode = True`: in both modes it does the same to the same graph.

    Only the class itself counts, since a subclass may look at the mode. A function declares it as an attribute.
    """
    return _declares(step, "ignores_mode")


def ignores_graph(step: Any) -> bool:
    """Return whether a pass declares `ignores_graph = True`: it reads only facts and needs no torch.fx graph."""
    return _declares(step, "ignores_graph")


def _declares(step: Any, name: str) -> bool:
    """Return whether the attribute `name` of a function, or of the class of a pass itself, is true."""
    return any(bool(held.get(name)) for held in (vars(type(step)), getattr(step, "__dict__", {})))

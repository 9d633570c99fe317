"""Run a chain: apply each pass, verify every fact after it, record the step, and notify the observers.

Every compile runs through this file. An error names the pass that breaks a fact at once, and not a later pass that uses
the fact.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

from fxsplit.errors import BrokenFact, ChainError, FxsplitError
from fxsplit.ir.chain import Chain, pass_text
from fxsplit.ir.contract import check_kept, check_needs
from fxsplit.ir.graph import IR, Pass, Step, ignores_graph, is_own, name_pass
from fxsplit.ir.text.graph import PlainGraph, is_plain
from fxsplit.system.interrupts import raise_lost_interrupt
from fxsplit.system.logs import emit
from fxsplit.system.progress import phase

Check = Callable[[Pass, IR, IR], IR]
"""A check of a pass, given the IR before and after it; returns the IR to continue with, or raises BrokenFact."""


def accept(step: Pass, before: IR, after: IR) -> IR:
    """Return the IR after a pass, without any check."""
    return after


class Observer:
    """Base class of observers of a chain, such as `dump.DumpTo`. Its methods do nothing."""

    def start(self, ir: IR) -> None:
        """Observe the IR before the first pass."""

    def before(self, name: str, ir: IR) -> None:
        """Observe the IR before the pass called `name`."""

    def after(self, name: str, ir: IR) -> None:
        """Observe the IR after the pass called `name`."""

    def failed(self, name: str, ir: IR, error: Exception) -> None:
        """Observe the IR after the pass called `name`, if a check of that IR has found the error."""

    def raised(self, rest: Chain, ir: IR, error: Exception) -> None:
        """Observe the IR before the first pass of `rest`.

        That pass has raised the error, or a check has refused its result.
        """


def run_chain(
    ir: IR,
    chain: Iterable[Pass],
    observers: Sequence[Observer] = (),
    check: Check = accept,
    *,
    verify: bool = True,
) -> IR:
    """Return the IR after all passes of `chain`.

    check: a further check after each pass. verify: whether to check facts and contracts.
    Raises the errors of the passes, and ChainError if a pass does not return an IR. Raises BrokenFact, with the name of
    the pass, if a fact does not hold after the pass, if the pass edits the graph or its modules in place, or if `check`
    finds a fault. Every error has a note with the pass that it comes from.
    """
    for observer in observers:
        observer.start(ir)
    first, steps = ir, list(chain)
    for number, step in enumerate(steps, 1):
        raise_lost_interrupt()
        given = ir
        try:
            for observer in observers:
                observer.before(name_pass(step), ir)
            if verify:
                check_needs(step, ir)
            result = _run_pass(step, ir, first, verify=verify)
            try:
                if verify:
                    verify_ir(result)
                    check_kept(step, given, result)
                ir = check(step, ir, result)
            except Exception as error:
                _tell(observers, error, lambda o, e: o.failed(name_pass(step), result, e))  # noqa: B023
                raise
            for observer in observers:
                observer.after(name_pass(step), ir)
            _log_pass(given, ir)
        except Exception as error:
            _tell(observers, error, lambda o, e: o.raised(Chain(tuple(steps[number - 1 :])), given, e))  # noqa: B023
            where = f"in pass {pass_text(step)!r} ({number} of {len(steps)}) on {ir.model} in {ir.mode} mode"
            error.add_note(where)
            emit("passes", "pass_failed", where, error=error, model=ir.model)
            # A BrokenFact names the pass in its own text, since not every program shows notes.
            if isinstance(error, BrokenFact):
                error.args = (f"after pass {name_pass(step)!r}: {error}",)
            raise
        if getattr(step, "ends_chain", False):
            break
    return ir


def _run_pass(step: Pass, ir: IR, first: IR, *, verify: bool) -> IR:
    """Return the result of a pass. Raises BrokenFact if the pass edits `ir`, or the `first` IR, in place."""
    if is_plain(ir.gm) and not ignores_graph(step):
        # A graph from a file needs no torch until a pass looks at it.
        from fxsplit.ir.text.fx_graph import to_fx

        ir = replace(ir, gm=to_fx(cast(PlainGraph, ir.gm)))
    # The passes of fxsplit are known to edit nothing.
    watched = [] if is_own(step) or not verify else [ir] if ir.gm is first.gm else [first, ir]
    watched = [each for each in watched if not is_plain(each.gm)]
    if watched:  # reading weights needs torch, and planning from a file does not
        from fxsplit.ir.fingerprint import find_edit, take_fingerprint

        before = [take_fingerprint(each) for each in watched]
    # The time of the pass only; verifying comes after.
    begin = time.perf_counter()
    with phase(f"pass {name_pass(step)}"):
        result: object = step(ir)
    seconds = time.perf_counter() - begin
    if not isinstance(result, IR):
        what = f"returned {type(result).__name__}: a pass returns an IR (is 'return ir' missing?)"
        raise ChainError(f"pass {name_pass(step)!r} {what}")
    for at, each in enumerate(watched):
        edit = find_edit(before[at], take_fingerprint(each))
        if edit is not None:
            raise BrokenFact(
                f"the pass has edited {edit} of {ir.model} in place: edit a copy of the graph, in a block of 'with "
                "ir.edited() as edit:', and return edit.ir; learn a new fact. Modules and weights are the model's own: "
                "build the model again if one of them has changed"
            )
    # The steps, the model and the mode go from pass to pass; a pass that makes a new IR would lose them.
    steps = (*ir.steps, Step(pass_text(step, importable=True), seconds, result.noted, step))
    return replace(result, steps=steps, model=ir.model, mode=ir.mode, earlier=ir, noted=MappingProxyType({}))


def _log_pass(before: IR, after: IR) -> None:
    """Log the last step of `after`: its time, the facts that it has made or changed, and the number of nodes."""
    step, n_nodes = after.steps[-1], len(after.gm.graph.nodes)
    facts = [kind.__name__ for kind, fact in after.facts.items() if before.facts.get(kind) is not fact]
    fields: dict[str, Any] = {"step": step.text, "seconds": step.seconds, "noted": dict(step.noted)}
    fields |= {"model": after.model, "mode": after.mode, "facts": facts, "n_nodes": n_nodes}
    what = f"{step.text} of {after.model}: {step.seconds:.3f} s, {n_nodes} nodes"
    emit("passes", "pass", f"{what}, facts: {', '.join(facts) or 'none'}", **fields)


def _tell(observers: Sequence[Observer], error: Exception, tell: Callable[[Observer, Exception], None]) -> None:
    """Tell the observers of an error. An error that an observer raises becomes a note, since `error` says more."""
    for observer in observers:
        try:
            tell(observer, error)
        except Exception as other:
            error.add_note(f"{type(observer).__name__} could not show the IR ({type(other).__name__}: {other})")


def verify_ir(ir: IR) -> None:
    """Raise BrokenFact unless torch.fx accepts the graph and every fact holds, those of earlier passes too."""
    what = "the graph"
    try:
        ir.gm.graph.lint()
        # All facts are verified, not only new ones: a pass may have changed the graph that an older fact is about.
        for kind, fact in ir.facts.items():
            what = kind.__name__
            fact.verify(ir)
    except FxsplitError:
        # A broken fact, or a mistake of the user, such as a pin of a submodule that does not exist.
        raise
    except Exception as error:
        # A badly wrong fact, such as a plan for device 9 of 2, raises an error inside its own check.
        raise BrokenFact(f"{what} does not hold ({type(error).__name__}: {error})") from error

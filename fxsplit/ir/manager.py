"""Run a chain: apply each pass, verify every fact after it, record the step, and tell the observers.

This is where every compile passes: a pass that breaks a fact is named here, and not where its result is used.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from fxsplit.errors import BrokenFact, ChainError, FxsplitError
from fxsplit.ir.chain import pass_text
from fxsplit.ir.graph import IR, Pass, Step, name_pass


class Observer(Protocol):
    """Something that watches a chain run, such as `dump.DumpTo`."""

    def start(self, ir: IR) -> None:
        """See the IR before the first pass."""

    def after(self, name: str, ir: IR) -> None:
        """See the IR after the pass called `name`."""


def run_chain(ir: IR, chain: Iterable[Pass], observers: Sequence[Observer] = ()) -> IR:
    """Return the IR after all passes of `chain`.

    Raises what a pass raises, ChainError for a pass that returns no IR, and BrokenFact, naming the pass, where a fact
    does not hold after it.
    """
    for observer in observers:
        observer.start(ir)
    for step in chain:
        # The time of the pass itself; verifying comes after.
        begin = time.perf_counter()
        result: object = step(ir)
        if not isinstance(result, IR):
            what = f"returned {type(result).__name__}: a pass returns an IR (is 'return ir' missing?)"
            raise ChainError(f"pass {name_pass(step)!r} {what}")
        # What stays the same from pass to pass: a pass that makes a new IR would lose it.
        steps = (*ir.steps, Step(pass_text(step), time.perf_counter() - begin))
        ir = replace(result, steps=steps, model=ir.model, mode=ir.mode)
        _verify(ir, name_pass(step))
        for observer in observers:
            observer.after(name_pass(step), ir)
    return ir


def _verify(ir: IR, name: str) -> None:
    """Raise BrokenFact unless the graph is sound and every fact holds, also those that earlier passes learnt."""
    what = "the graph"
    try:
        ir.gm.graph.lint()
        # All facts, and not only new ones: a pass may have changed the graph that an older fact is about.
        for kind, fact in ir.facts.items():
            what = kind.__name__
            fact.verify(ir)
    except BrokenFact as error:
        raise BrokenFact(f"after pass {name!r}: {error}") from error
    except FxsplitError:
        # Not a broken fact, but a wrong word of the user, such as a pin of a submodule that is not there.
        raise
    except Exception as error:
        # A fact that is wrong enough, such as a plan for device 9 of 2, raises in the middle of its own check.
        raise BrokenFact(f"after pass {name!r}: {what} does not hold ({type(error).__name__}: {error})") from error

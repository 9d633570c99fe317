"""Run a chain: apply each pass, verify every fact, record the step, tell the observers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from fxsplit.errors import BrokenFact, ChainError, FxsplitError
from fxsplit.ir.chain import pass_text
from fxsplit.ir.graph import IR, Pass, Step, name_pass


class Observer(Protocol):
    """Watches a chain run; never changes it."""

    def start(self, ir: IR) -> None:
        """See the IR before the first pass."""

    def after(self, name: str, ir: IR) -> None:
        """See the IR after the pass called `name`."""


def run_chain(ir: IR, chain: Iterable[Pass], observers: Sequence[Observer] = ()) -> IR:
    """Return the IR after every pass of `chain`; raises what a pass raises, or BrokenFact naming the pass at fault."""
    for observer in observers:
        observer.start(ir)
    for step in chain:
        begin = time.perf_counter()
        result: object = step(ir)
        if not isinstance(result, IR):
            what = f"returned {type(result).__name__}: a pass returns an IR (is 'return ir' missing?)"
            raise ChainError(f"pass {name_pass(step)!r} {what}")
        ir = replace(result, steps=(*ir.steps, Step(pass_text(step), time.perf_counter() - begin)))
        _verify(ir, name_pass(step))
        for observer in observers:
            observer.after(name_pass(step), ir)
    return ir


def _verify(ir: IR, name: str) -> None:
    """Verify the graph and every fact, whoever learnt it."""
    try:
        ir.gm.graph.lint()
        for fact in ir.facts.values():
            fact.verify(ir)
    except FxsplitError as error:
        if not isinstance(error, BrokenFact):
            raise
        raise BrokenFact(f"after pass {name!r}: {error}") from error

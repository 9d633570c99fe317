"""run(): run passes on an IR."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

from fxsplit.ir.chain import Chain, to_chain
from fxsplit.ir.graph import IR, Pass, Unread
from fxsplit.ir.manager import Check, Observer, accept, run_chain
from fxsplit.ir.text.graph import is_plain
from fxsplit.passes import PASSES


def run(
    ir: IR,
    passes: str | Chain | Iterable[Pass],
    *,
    until: str | None = None,
    observers: Sequence[Observer] = (),
    verify: bool = True,
    check_rewrites: bool = True,
) -> IR:
    """Return the IR after all passes, or after the pass called `until`.

    passes: a chain, a list of passes, or text such as "augment,order,partition".
    observers: they are told of each pass, as `fxsplit.Observer` says.
    verify: check the graph and every fact after each pass.
    check_rewrites: run each graph that a pass of yours makes, and compare it with the graph before. This needs the
        Example of a captured model; a graph from a file has none.

    `before(name)` and `after(name)` of the result return the IRs on the way. Raises the errors of the passes, and
    ChainError for passes that cannot be read. BrokenFact names a pass after which a fact does not hold.
    """
    chain = to_chain(passes, PASSES)
    check = choose_check(ir, runs=verify and check_rewrites)
    with _allow_gradients(ir):
        return run_chain(ir, chain if until is None else chain.until(until), observers, check, verify=verify)


def _allow_gradients(ir: IR) -> AbstractContextManager[None]:
    """Return a block in which passes may run the graph backward, whatever the caller's grad mode is."""
    if is_plain(ir.gm):
        return nullcontext()
    from fxsplit.torch_internals.thread_modes import enable_gradients  # planning from a file needs no torch

    return enable_gradients()


def choose_check(ir: IR, *, runs: bool = True) -> Check:
    """Return the check of passes that rewrite the graph of `ir`; none for a graph that does not run here.

    Without `runs` the graphs are not compared, and only weights that are none of the model's are noted.
    """
    # A fact from a file is known by its class only if it is stored, and Example is not.
    known = {kind.__name__: fact for kind, fact in ir.facts.items() if not isinstance(fact, Unread)}
    if "Example" not in known or "Stages" in known:
        return accept
    from fxsplit.frontend.check.rewrites import Rewrites  # it needs torch, and planning from a file does not

    rewrites = Rewrites(ir)
    return rewrites.check if runs else rewrites.mark

"""run(): run passes on an IR."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fxsplit.ir.chain import Chain, to_chain
from fxsplit.ir.graph import IR, Pass
from fxsplit.ir.manager import Observer, run_chain
from fxsplit.passes import PASSES


def run(
    ir: IR,
    passes: str | Chain | Iterable[Pass],
    *,
    until: str | None = None,
    observers: Sequence[Observer] = (),
    verify: bool = True,
) -> IR:
    """Return the IR after all passes, or after the pass called `until`.

    passes: a chain, a list of passes, or text such as "augment,order,partition".
    observers: they are told of each pass, as `fxsplit.Observer` says.
    verify: check the graph and every fact after each pass.

    `before(name)` and `after(name)` of the result return the IRs on the way. Raises the errors of the passes, and
    ChainError for passes that cannot be read. BrokenFact names a pass after which a fact does not hold.
    """
    chain = to_chain(passes, PASSES)
    return run_chain(ir, chain if until is None else chain.until(until), observers, verify=verify)

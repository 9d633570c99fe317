"""print, stop: look at the IR in the middle of a chain, and end the chain there."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar

from fxsplit.errors import MissingFact, suggest
from fxsplit.ir.graph import IR


@dataclass(frozen=True)
class Print:
    """Print the IR, or only the fact that `what` names: `profile,print{what=Costs},augment,...`."""

    what: str = ""

    name: ClassVar[str] = "print"
    ignores_mode: ClassVar[bool] = True
    ignores_graph: ClassVar[bool] = True

    def __call__(self, ir: IR) -> IR:
        """Print to the standard output. Raises MissingFact for a fact that is not known."""
        if not self.what:
            sys.stdout.write(f"{ir}\n")
            return ir
        known = {kind.__name__: fact for kind, fact in ir.facts.items()}
        if self.what not in known:
            raise MissingFact(f"no {self.what} (known: {', '.join(known) or 'nothing'}){suggest(self.what, known)}")
        sys.stdout.write(f"{known[self.what]}\n")
        return ir


@dataclass(frozen=True)
class Stop:
    """End the chain: later passes do not run."""

    name: ClassVar[str] = "stop"
    ignores_mode: ClassVar[bool] = True
    ignores_graph: ClassVar[bool] = True
    ends_chain: ClassVar[bool] = True

    def __call__(self, ir: IR) -> IR:
        """Return the IR as it is."""
        return ir

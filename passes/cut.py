"""cut: say where cuts may lie, and how what crosses them is compressed; stands between profile and augment."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fxsplit.errors import ChainError
from fxsplit.ir.facts.compress import HOW
from fxsplit.ir.facts.costs import Costs
from fxsplit.ir.facts.machine import Machine
from fxsplit.ir.graph import IR
from fxsplit.planner.borders import PLACES, check_modules, compress_cuts, list_modules


@dataclass(frozen=True)
class Cut:
    """Let cuts lie anywhere, or at the borders of modules alone: `profile,cut{at=modules},augment,order,...`.

    `compress` is how values and gradients that cross are compressed: "bf16" or "int8" (see ir/facts/compress.py), which
    changes what the pipeline computes. Raises ChainError for another place or another way.
    """

    at: str = "anywhere"
    compress: str = ""

    name: ClassVar[str] = "cut"
    ignores_mode: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.at not in PLACES:
            raise ChainError(f"cut{{at={self.at}}}: give {' or '.join(PLACES)}")
        if self.compress not in ("", *HOW):
            raise ChainError(f"cut{{compress={self.compress}}}: give {' or '.join(HOW)}")

    def __call__(self, ir: IR) -> IR:
        """Learn Costs anew, which price compressed cuts, and whose modules no cut parts.

        Raises PlanError for a model with too few modules.
        """
        if self == Cut():
            return ir
        costs = compress_cuts(ir[Costs], self.compress)
        if self.at == "anywhere":
            return ir.learn(costs)
        check_modules(costs, len(ir[Machine]))
        kept = [names for names in list_modules(costs).values() if len(names) > 1]
        return ir.learn(replace(costs, together=(*costs.together, *kept)))

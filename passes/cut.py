"""cut: say where cuts may lie, and how what crosses them is compressed; stands between profile and augment."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fxsplit.errors import ChainError, suggest
from fxsplit.ir.facts.costs.compress import HOW
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.graph import IR
from fxsplit.planner.problem.borders import ANYWHERE, check_modules, check_place, compress_cuts, list_wholes


@dataclass(frozen=True)
class Cut:
    """Let cuts lie anywhere, or only at the borders of modules: `profile,cut{at=modules},augment,order,...`.

    `at` is "anywhere"; "modules" for the model's own parts; "modules=2" for their parts, and so on down; or a pattern
    of paths, such as "model.layers.*", for the borders of the modules that match it (see planner/problem/borders.py).

    `compress` is how values and gradients that cross are compressed: "bf16" or "int8" (see ir/facts/costs/compress.py),
    which changes what the pipeline computes. Raises ChainError for what is none of these.
    """

    at: str = ANYWHERE
    compress: str = ""

    name: ClassVar[str] = "cut"
    ignores_mode: ClassVar[bool] = True

    def __post_init__(self) -> None:
        try:
            check_place(self.at)
        except ValueError as error:
            raise ChainError(f"cut{{at={self.at}}}: {error}") from error
        if self.compress not in ("", *HOW):
            raise ChainError(f"cut{{compress={self.compress}}}: give {' or '.join(HOW)}{suggest(self.compress, HOW)}")

    def __call__(self, ir: IR) -> IR:
        """Learn Costs anew, which price compressed cuts, and whose modules no cut parts.

        Raises PlanError for a model with too few modules, or without one that matches the pattern.
        """
        if self == Cut():
            return ir
        costs = compress_cuts(ir[Costs], self.compress)
        if self.at == ANYWHERE:
            return ir.learn(costs)
        check_modules(costs, len(ir[Machine]), self.at)
        kept = [names for names in list_wholes(costs, self.at).values() if len(names) > 1]
        return ir.learn(replace(costs, together=(*costs.together, *kept)))

"""cut: restrict the places of cuts, and compress the values that cross them; runs between profile and augment."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fxsplit.errors import ChainError, suggest
from fxsplit.ir.facts.costs.compress import HOW
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.split import cut_before
from fxsplit.ir.graph import IR
from fxsplit.planner.problem.borders import ANYWHERE, check_modules, check_place, compress_cuts, list_wholes


@dataclass(frozen=True)
class Cut:
    """Allow cuts anywhere, or only at the borders of modules: `profile,cut{at=modules},augment,order,...`.

    `at` is "anywhere"; "modules" for the parts at the top of the model; "modules=2" for their parts, and so on; or a
    pattern of paths, such as "model.layers.*", for the borders of matching modules (see planner/problem/borders.py).

    `before` lists submodules or nodes before which a stage begins: `profile,cut{before=[layer2]},emit`. These cuts are
    a whole plan, so no `partition` follows, and nothing is proven about it.

    `compress` compresses crossing values and gradients with "bf16" or "int8" (see ir/facts/costs/compress.py), which
    changes the results of the pipeline. Raises ChainError for other options.
    """

    at: str = ANYWHERE
    compress: str = ""
    before: tuple[str, ...] = ()

    name: ClassVar[str] = "cut"
    ignores_mode: ClassVar[bool] = True
    ignores_graph: ClassVar[bool] = True

    def __post_init__(self) -> None:
        try:
            check_place(self.at)
        except ValueError as error:
            raise ChainError(f"cut{{at={self.at}}}: {error}") from error
        if self.before and self.at != ANYWHERE:
            raise ChainError(f"cut{{at={self.at},before=...}}: the cuts are stated, so leave out at")
        if self.compress not in ("", *HOW):
            raise ChainError(f"cut{{compress={self.compress}}}: give {' or '.join(HOW)}{suggest(self.compress, HOW)}")

    def __call__(self, ir: IR) -> IR:
        """Replace Costs by costs that price compressed cuts and keep modules whole; with `before`, learn Plan.

        Raises PlanError if the model has too few modules, or no module matches the pattern.
        """
        if self == Cut():
            return ir
        costs = compress_cuts(ir[Costs], self.compress)
        if self.before:
            priced = ir if costs is ir[Costs] else ir.learn(costs)
            return priced.learn(Plan.of(priced, cut_before(*self.before)))
        if self.at == ANYWHERE:
            return ir.learn(costs)
        check_modules(costs, len(ir[Machine]), self.at)
        kept = [names for names in list_wholes(costs, self.at).values() if len(names) > 1]
        return ir.learn(replace(costs, together=(*costs.together, *kept)))

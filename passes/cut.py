"""cut: say where cuts may lie; a constraint of the plan, which stands between profile and augment."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fxsplit.errors import ChainError
from fxsplit.ir.facts.costs import Costs
from fxsplit.ir.facts.machine import Machine
from fxsplit.ir.graph import IR
from fxsplit.planner.borders import PLACES, check_modules, list_modules


@dataclass(frozen=True)
class Cut:
    """Let cuts lie anywhere, or at the borders of modules alone: `profile,cut{at=modules},augment,order,...`.

    Raises ChainError for another place.
    """

    at: str = "anywhere"

    name: ClassVar[str] = "cut"
    ignores_mode: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.at not in PLACES:
            raise ChainError(f"cut{{at={self.at}}}: give {' or '.join(PLACES)}")

    def __call__(self, ir: IR) -> IR:
        """Learn Costs anew, whose modules no cut parts; raises PlanError for a model with too few modules."""
        if self.at == "anywhere":
            return ir
        costs = ir[Costs]
        check_modules(costs, len(ir[Machine]))
        kept = [names for names in list_modules(costs).values() if len(names) > 1]
        return ir.learn(replace(costs, together=(*costs.together, *kept)))

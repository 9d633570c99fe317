"""pin, together: keep a submodule on a device, and keep nodes in one stage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fxsplit.errors import ChainError, PlanError
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.pins import Pins, find_nodes, suggest_names
from fxsplit.ir.graph import IR


@dataclass(frozen=True)
class Pin:
    """Keep the submodule or node `module` on device `device`: `pin{module=layer1,device=0},profile,...`.

    The pass may stand anywhere before `augment`. Raises ChainError for an empty name or a negative device.
    """

    module: str = ""
    device: int = 0

    name: ClassVar[str] = "pin"
    ignores_mode: ClassVar[bool] = True
    ignores_graph: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.module or self.device < 0:
            raise ChainError(
                f"pin{{module={self.module},device={self.device}}}: give a submodule and a device from 0 up"
            )

    def __call__(self, ir: IR) -> IR:
        """Add the pin to Pins. Raises PlanError if it contradicts an earlier one."""
        return Pins.add(ir, {self.module: self.device})


@dataclass(frozen=True)
class Together:
    """Keep nodes, or all nodes of submodules, in one stage: `profile,together{nodes=[layer1,layer2]},augment,...`.

    Raises ChainError without names.
    """

    nodes: tuple[str, ...] = ()

    name: ClassVar[str] = "together"
    ignores_mode: ClassVar[bool] = True
    ignores_graph: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ChainError("together{nodes=[]}: give the names of submodules or nodes, such as [layer1,layer2]")

    def __call__(self, ir: IR) -> IR:
        """Replace Costs by costs that keep these nodes together. Raises PlanError for a name that the graph lacks."""
        costs = ir[Costs]
        lacking = next((name for name in self.nodes if not find_nodes(costs, name)), None)
        if lacking is not None:
            raise PlanError(f"cannot keep {lacking!r} together with others: {suggest_names(costs, lacking)}")
        names = tuple(dict.fromkeys(node for path in self.nodes for node in find_nodes(costs, path)))
        return ir.learn(replace(costs, together=(*costs.together, names)))

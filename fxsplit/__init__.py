"""fxsplit: cut a PyTorch model into stages and run it as a pipeline, exactly equal to the model it came from.

pipe = fxsplit.compile(model, 2)
loss = criterion(pipe(x), y); loss.backward(); optimizer.step()
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # each is imported when it is first used: planning from a profile needs no torch
    from fxsplit.chunks import Replicate as Replicate
    from fxsplit.costs import Costs as Costs
    from fxsplit.driver import DEFAULT as DEFAULT
    from fxsplit.driver import compile as compile
    from fxsplit.errors import FxsplitError as FxsplitError
    from fxsplit.ir import IR as IR
    from fxsplit.ir import Fact as Fact
    from fxsplit.ir import Pass as Pass
    from fxsplit.machine import Device as Device
    from fxsplit.machine import Machine as Machine
    from fxsplit.passes.leaf import leaf as leaf
    from fxsplit.planning import plan as plan
    from fxsplit.plans import Plan as Plan
    from fxsplit.profiling import profile as profile
    from fxsplit.runtime import Pipeline as Pipeline
    from fxsplit.spec import Chain as Chain
    from fxsplit.stages import Stages as Stages
    from fxsplit.standins import without_weights as without_weights
    from fxsplit.verification import verify as verify
    from fxsplit.workload import Pins as Pins

__version__ = "0.1.0"

_HOME = {
    "compile": "driver",
    "plan": "planning",
    "profile": "profiling",
    "verify": "verification",
    "without_weights": "standins",
    "leaf": "passes.leaf",
    "Replicate": "chunks",
    "Pipeline": "runtime",
    "Machine": "machine",
    "Device": "machine",
    "DEFAULT": "driver",
    "Chain": "spec",
    "IR": "ir",
    "Fact": "ir",
    "Pass": "ir",
    "Pins": "workload",
    "Costs": "costs",
    "Plan": "plans",
    "Stages": "stages",
    "FxsplitError": "errors",
}
"""The public names, and the room that each lives in."""

__all__ = list(_HOME)


def __getattr__(name: str) -> object:
    """Import a public name from its room."""
    if name not in _HOME:
        raise AttributeError(f"fxsplit has no {name!r}: it has {', '.join(_HOME)}")
    value = getattr(import_module(f"fxsplit.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_HOME)

"""fxsplit: cut a PyTorch model into stages and run it as a pipeline, exactly equal to the model it came from.

pipe = fxsplit.compile(model, 2)
loss = criterion(pipe(x), y); loss.backward(); optimizer.step()
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # each is imported when it is first used: planning from a profile needs no torch
    from fxsplit.api.checkpoint import Restored as Restored
    from fxsplit.api.checkpoint import latest_checkpoint as latest_checkpoint
    from fxsplit.api.checkpoint import load_checkpoint as load_checkpoint
    from fxsplit.api.checkpoint import save_checkpoint as save_checkpoint
    from fxsplit.api.compile import DEFAULT as DEFAULT
    from fxsplit.api.compile import compile as compile
    from fxsplit.api.pipeline import Pipeline as Pipeline
    from fxsplit.api.plan import plan as plan
    from fxsplit.api.profile import profile as profile
    from fxsplit.api.saving import Saving as Saving
    from fxsplit.api.verify import verify as verify
    from fxsplit.errors import FxsplitError as FxsplitError
    from fxsplit.errors import FxsplitWarning as FxsplitWarning
    from fxsplit.ir.chain import Chain as Chain
    from fxsplit.ir.facts.chunks import Replicate as Replicate
    from fxsplit.ir.facts.costs import Costs as Costs
    from fxsplit.ir.facts.machine import Device as Device
    from fxsplit.ir.facts.machine import Machine as Machine
    from fxsplit.ir.facts.pins import Pins as Pins
    from fxsplit.ir.facts.plan import Plan as Plan
    from fxsplit.ir.facts.stages import Stages as Stages
    from fxsplit.ir.graph import IR as IR
    from fxsplit.ir.graph import Fact as Fact
    from fxsplit.ir.graph import Pass as Pass
    from fxsplit.passes.leaf import leaf as leaf
    from fxsplit.torch_internals.fake_weights import without_weights as without_weights

__version__ = "0.1.0"

_HOME = {
    "compile": "api.compile",
    "plan": "api.plan",
    "profile": "api.profile",
    "verify": "api.verify",
    "save_checkpoint": "api.checkpoint",
    "load_checkpoint": "api.checkpoint",
    "latest_checkpoint": "api.checkpoint",
    "without_weights": "torch_internals.fake_weights",
    "leaf": "passes.leaf",
    "Replicate": "ir.facts.chunks",
    "Pipeline": "api.pipeline",
    "Machine": "ir.facts.machine",
    "Device": "ir.facts.machine",
    "DEFAULT": "api.compile",
    "Chain": "ir.chain",
    "IR": "ir.graph",
    "Fact": "ir.graph",
    "Pass": "ir.graph",
    "Pins": "ir.facts.pins",
    "Costs": "ir.facts.costs",
    "Plan": "ir.facts.plan",
    "Stages": "ir.facts.stages",
    "Saving": "api.saving",
    "Restored": "api.checkpoint",
    "FxsplitError": "errors",
    "FxsplitWarning": "errors",
}
"""The public names, and the room that each lives in."""

__all__ = list(_HOME)


def __getattr__(name: str) -> object:
    """Import a public name from its room."""
    if name not in _HOME:
        raise AttributeError(f"fxsplit has no {name!r}: it has {', '.join(_HOME)}")
    from fxsplit.ir.imports import import_whole

    # torch takes seconds to load, and Ctrl-C would leave half of it.
    (home,) = import_whole([f"fxsplit.{_HOME[name]}"])
    value = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_HOME)

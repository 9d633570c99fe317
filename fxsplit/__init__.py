"""fxsplit: cut a PyTorch model into stages and run it as a pipeline, exactly equal to the model it came from.

pipe = fxsplit.compile(model, 2)
loss = criterion(pipe(x), y); loss.backward(); optimizer.step()
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # each is imported when it is first used: planning from a profile needs no torch
    from fxsplit.allocation.allocate import Allocation as Allocation
    from fxsplit.allocation.job import Job as Job
    from fxsplit.allocation.replay import Replay as Replay
    from fxsplit.api.allocate import allocate as allocate
    from fxsplit.api.allocate import replay as replay
    from fxsplit.api.checkpoint.checkpoint import Restored as Restored
    from fxsplit.api.checkpoint.checkpoint import latest_checkpoint as latest_checkpoint
    from fxsplit.api.checkpoint.checkpoint import load_checkpoint as load_checkpoint
    from fxsplit.api.checkpoint.checkpoint import save_checkpoint as save_checkpoint
    from fxsplit.api.compile import DEFAULT as DEFAULT
    from fxsplit.api.compile import compile as compile
    from fxsplit.api.pipeline.pipeline import Pipeline as Pipeline
    from fxsplit.api.pipeline.saving import Saving as Saving
    from fxsplit.api.plan import plan as plan
    from fxsplit.api.profile import profile as profile
    from fxsplit.api.toolkit.capture import capture as capture
    from fxsplit.api.toolkit.load_ir import load_ir as load_ir
    from fxsplit.api.toolkit.run import run as run
    from fxsplit.api.verify.verify import verify as verify
    from fxsplit.errors import FxsplitError as FxsplitError
    from fxsplit.errors import FxsplitWarning as FxsplitWarning
    from fxsplit.ir.chain import Chain as Chain
    from fxsplit.ir.facts.capture.chunks import Replicate as Replicate
    from fxsplit.ir.facts.costs.costs import Costs as Costs
    from fxsplit.ir.facts.given.machine import Device as Device
    from fxsplit.ir.facts.given.machine import Machine as Machine
    from fxsplit.ir.facts.given.pins import Pins as Pins
    from fxsplit.ir.facts.plan import Plan as Plan
    from fxsplit.ir.facts.split import cut_before as cut_before
    from fxsplit.ir.facts.stages import Stages as Stages
    from fxsplit.ir.graph import IR as IR
    from fxsplit.ir.graph import Fact as Fact
    from fxsplit.ir.graph import Pass as Pass
    from fxsplit.ir.manager import Observer as Observer
    from fxsplit.passes.leaf import leaf as leaf
    from fxsplit.torch_internals.fake.without_weights import without_weights as without_weights

__version__ = "0.1.0"

_HOME = {
    "compile": "api.compile",
    "plan": "api.plan",
    "profile": "api.profile",
    "allocate": "api.allocate",
    "replay": "api.allocate",
    "verify": "api.verify.verify",
    "capture": "api.toolkit.capture",
    "load_ir": "api.toolkit.load_ir",
    "run": "api.toolkit.run",
    "save_checkpoint": "api.checkpoint.checkpoint",
    "load_checkpoint": "api.checkpoint.checkpoint",
    "latest_checkpoint": "api.checkpoint.checkpoint",
    "without_weights": "torch_internals.fake.without_weights",
    "leaf": "passes.leaf",
    "Replicate": "ir.facts.capture.chunks",
    "Pipeline": "api.pipeline.pipeline",
    "Machine": "ir.facts.given.machine",
    "Device": "ir.facts.given.machine",
    "DEFAULT": "api.compile",
    "Chain": "ir.chain",
    "IR": "ir.graph",
    "Fact": "ir.graph",
    "Pass": "ir.graph",
    "Observer": "ir.manager",
    "Pins": "ir.facts.given.pins",
    "Costs": "ir.facts.costs.costs",
    "Plan": "ir.facts.plan",
    "Job": "allocation.job",
    "Allocation": "allocation.allocate",
    "Replay": "allocation.replay",
    "Stages": "ir.facts.stages",
    "cut_before": "ir.facts.split",
    "Saving": "api.pipeline.saving",
    "Restored": "api.checkpoint.checkpoint",
    "FxsplitError": "errors",
    "FxsplitWarning": "errors",
}
"""The public names, and the room that each lives in."""

__all__ = list(_HOME)


def __getattr__(name: str) -> object:
    """Import a public name from its room."""
    if name not in _HOME:
        from fxsplit.errors import suggest

        raise AttributeError(f"fxsplit has no {name!r}: it has {', '.join(_HOME)}{suggest(name, _HOME)}")
    from fxsplit.system.imports import import_whole

    # torch takes seconds to load, and Ctrl-C would leave half of it.
    (home,) = import_whole([f"fxsplit.{_HOME[name]}"])
    value = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_HOME)

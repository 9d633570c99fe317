"""Program: everything the runtime needs to know about one compiled mode of a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from fxsplit.costs import Costs
from fxsplit.draws import Draw
from fxsplit.inputs import Inputs
from fxsplit.ir import IR
from fxsplit.machine import Machine
from fxsplit.plan import Plan
from fxsplit.schedule.action import Schedule
from fxsplit.schedule.generate import Generator
from fxsplit.stages import Stages, weights


@dataclass(frozen=True, eq=False)
class Program:
    """Stages with their plan, and how the model is called; `traced` is the IR the passes started from."""

    inputs: Inputs
    stages: Stages
    plan: Plan
    costs: Costs | None
    machine: Machine
    generator: Generator
    n_microbatches: int
    traced: IR
    final: IR
    _schedules: dict[int, Schedule] = field(default_factory=dict)

    def schedule(self, n_microbatches: int) -> Schedule:
        """Return the schedule for a number of microbatches, checked."""
        if n_microbatches not in self._schedules:
            schedule = self.generator(len(self.stages), n_microbatches)
            schedule.check()
            self._schedules[n_microbatches] = schedule
        return self._schedules[n_microbatches]

    @cached_property
    def draws(self) -> bool:
        """Whether any stage takes random numbers."""
        return any(isinstance(m, Draw) for s in self.stages.stages for m in s.module.children())

    @property
    def devices(self) -> list[torch.device]:
        """Each stage's torch device."""
        return [s.torch_device for s in self.stages.stages]

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all stages that want a gradient now; a frozen one may be thawed later."""
        return [p for s in self.stages.stages for p in s.module.parameters() if p.requires_grad]

    def place(self, model: nn.Module) -> None:
        """Move each stage's parameters and buffers to its device, in place: optimizers keep holding them.

        Stages that fetch a parameter by its path fetch the one that `model` has under it now.
        """
        for stage in self.stages.stages:
            for node in stage.module.graph.nodes:
                if node.op == "get_attr":
                    _relink(stage.module, model, str(node.target))
            for weight in weights(stage.module):
                if weight.device != stage.torch_device:
                    weight.data = weight.data.to(stage.torch_device)


def _relink(module: nn.Module, model: nn.Module, path: str) -> None:
    """Let `module` hold under `path` what `model` holds there; constants that only the graph has are kept."""
    *parents, name = path.split(".")
    source, target = model, module
    for parent in parents:
        target = getattr(target, parent)
        if parent not in source._modules:
            return
        source = getattr(source, parent)
    for kind in ("_parameters", "_buffers"):
        held = getattr(source, kind)
        if name in held and name in getattr(target, kind):
            getattr(target, kind)[name] = held[name]

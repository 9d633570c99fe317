"""Program: everything the runtime needs to know about one compiled mode of a model."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxsplit.errors import InputError
from fxsplit.ir.facts.call import Inputs
from fxsplit.ir.facts.costs import Costs
from fxsplit.ir.facts.effects import CallEffects
from fxsplit.ir.facts.example import Example
from fxsplit.ir.facts.machine import Machine
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.scope import Scope
from fxsplit.ir.facts.stages import Stages, list_weights
from fxsplit.ir.graph import IR
from fxsplit.runtime.stage.recompute import POLICIES
from fxsplit.runtime.stage.replica import Replica
from fxsplit.schedule import Schedule, verify
from fxsplit.schedule.catalogue import Scheduler
from fxsplit.schedule.generate import all_then_all
from fxsplit.schedule.of_plan import replicas_of, schedule_of
from fxsplit.schedule.schedule import Homes
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.batch_norm import Noted
from fxsplit.torch_internals.containers import HOOKS
from fxsplit.torch_internals.interpret import get_storage_id
from fxsplit.torch_internals.module_kinds import is_dropout
from fxsplit.torch_internals.rng import Draw

_TORCHS = nn.Module().__dict__.keys() - {"training"}


@dataclass(frozen=True, eq=False)
class Program:
    """Stages with their plan, and how the model is called; `traced` is the IR the passes started from.

    `alone` says that weights are not where the other mode's program has them, so that one must be compiled again.
    `n_microbatches` is how many were chosen, where neither the user nor the batch says. `checkpoint` is when stages
    keep no activations; `written` the buffers that those stages are known to write. `stage_backend` is what compiles
    each stage. `others` are programs for other shapes, where the graph is for one alone.
    """

    model: nn.Module
    inputs: Inputs
    stages: Stages
    plan: Plan
    costs: Costs | None
    machine: Machine
    scheduler: Scheduler
    traced: IR
    final: IR
    alone: bool = False
    n_microbatches: int | None = None
    checkpoint: str = "plan"
    stage_backend: str | None = None
    written: dict[int, set[str]] = field(default_factory=dict)
    others: dict[Any, Program] = field(default_factory=dict)
    _schedules: dict[int, Schedule] = field(default_factory=dict)
    _passes: dict[int, Schedule] = field(default_factory=dict)

    def schedule(self, n_microbatches: int) -> Schedule:
        """Return the schedule of a training step for a number of microbatches, verified."""
        if n_microbatches not in self._schedules:
            memory_bytes = [device.memory_bytes for device in self.machine.devices]
            schedule = schedule_of(self.plan, self.scheduler, n_microbatches, memory_bytes)
            verify(schedule)
            self._schedules[n_microbatches] = schedule
        return self._schedules[n_microbatches]

    def checkpoints(self, stage: int, microbatch: int, count: int) -> bool:
        """Return whether a stage keeps no activations of a microbatch, of `count`."""
        return POLICIES[self.checkpoint](self.plan.stages[stage].recompute, microbatch, count)

    def passes(self, n_microbatches: int) -> Schedule:
        """Return all forwards, then all backwards, for when something else comes between; any number will do."""
        if n_microbatches not in self._passes:
            made = Schedule("passes", n_microbatches, self.homes, all_then_all(self.homes, n_microbatches))
            self._passes[n_microbatches] = made
        return self._passes[n_microbatches]

    @cached_property
    def homes(self) -> Homes:
        """The devices of each stage."""
        return replicas_of(self.plan) or self.scheduler.homes(len(self.stages))

    @cached_property
    def replicas(self) -> list[list[Replica]]:
        """Each stage as each of its devices runs it."""
        devices, places, backend = self.machine.devices, self.places, self.stage_backend
        pairs = zip(self.stages.stages, self.homes, strict=True)
        return [[Replica(stage, devices[d], places, backend) for d in home] for stage, home in pairs]

    @property
    def places(self) -> dict[int, torch.device]:
        """Where each parameter and buffer lives, by its identity: with the first stage that has it."""
        places: dict[int, torch.device] = {}
        for stage in self.stages.stages:
            for weight in list_weights(stage.module):
                places.setdefault(id(weight), stage.torch_device)
        return places

    @cached_property
    def shared(self) -> bool:
        """Whether stages share a parameter."""
        held = [id(p) for stage in self.stages.stages for p in stage.module.parameters()]
        return len(set(held)) < len(held)

    def result(self, outputs: Sequence[Any]) -> Any:
        """Return the last stage's outputs as the model returns them."""
        plain, returns = self.stages.fill(outputs), self.traced[CallEffects].containers
        return plain if returns is None else pytree.tree_unflatten(pytree.tree_leaves(plain), returns)

    @cached_property
    def joined(self) -> tuple[int | None, ...]:
        """For each output of the last stage, the dimension that microbatches are joined on."""
        of = dict(zip(self._returned, self.traced[CallEffects].output_dims, strict=True))
        return tuple(of.get(name, 0) for name in self.stages[-1].outputs)

    @property
    def _returned(self) -> list[str]:
        """The names of the values that the graph returns, in the order of its outputs."""
        leaves = pytree.tree_leaves(self.traced.gm.graph.output_node().args[0])
        return [leaf.name for leaf in leaves if isinstance(leaf, fx.Node)]

    @property
    def writes_inputs(self) -> bool:
        """Whether the model writes to its inputs in place."""
        return self.traced[CallEffects].writes_inputs

    def rewritten(self) -> frozenset[int]:
        """Return the memory of the buffers that each call writes and something may save for backward."""
        return frozenset(
            get_storage_id(operator.attrgetter(path)(self.model)) for path in self.traced[CallEffects].saved_buffers
        )

    @cached_property
    def noted(self) -> list[Noted]:
        """The batch norms whose running statistics change at the end of a batch."""
        return [m for s in self.stages.stages for m in s.module.children() if isinstance(m, Noted)]

    def hooked(self) -> list[bool]:
        """Whether modules that each stage calls put hooks on activations, or have hooks themselves that may do so."""
        return [
            self.traced[CallEffects].sets_hooks
            or any(m.__dict__[kind] for m in s.module.modules() for kind in HOOKS if kind in m.__dict__)
            for s in self.stages.stages
        ]

    @cached_property
    def draws(self) -> bool:
        """Whether any stage takes random numbers."""
        return any(isinstance(m, Draw) and not m.idle for s in self.stages.stages for m in s.module.children())

    def trained(self) -> list[list[Tensor]]:
        """Return, for each stage, its leaves that want a gradient now; a frozen parameter may be thawed later."""
        return [[w for w in list_weights(s.module) if w.requires_grad] for s in self.stages.stages]

    def check_hooks(self) -> None:
        """Raise InputError for a hook on a module whose inside is cut into stages: nothing would call it.

        One that the model's own library has registered belongs to its forward(), and what it does is in the graph.
        """
        for path, module in self._containers:
            hooks = [hook for kind in HOOKS for hook in module.__dict__[kind].values()]
            if not all(_is_the_librarys(hook, self.model) for hook in hooks):
                raise InputError(
                    f"submodule {path!r} has hooks, and its inside is cut into stages, so they would never run: put "
                    f"them on modules that stay whole, such as {self._leaf!r}, or remove them"
                )

    @cached_property
    def _leaf(self) -> str:
        """A module that stays whole."""
        return next((str(n.target) for n in self.traced.gm.graph.nodes if n.op == "call_module"), "a layer")

    @cached_property
    def _whole(self) -> list[tuple[str, nn.Module]]:
        """The modules that stages call."""
        nodes = self.traced.gm.graph.nodes
        paths = {str(n.target): 0 for n in nodes if n.op == "call_module"}
        return [(path, self.traced.gm.get_submodule(path)) for path in paths]

    @cached_property
    def _containers(self) -> list[tuple[str, nn.Module]]:
        """The modules that were traced into, but for the model itself: calling the pipeline runs its hooks."""
        whole = {str(n.target) for n in self.traced.gm.graph.nodes if n.op == "call_module"}
        inside = tuple(f"{target}." for target in whole)
        named = self.model.named_modules()
        return [(path, m) for path, m in named if path and path not in whole and not f"{path}.".startswith(inside)]

    def attributes(self) -> dict[str, str]:
        """Return the plain values that modules traced into have now; those that forward() reads are in the graph."""
        modules = [("", self.model), *self._containers]
        found = {f"{path}.training": str(m.training) for path, m in self._whole}
        found |= {f"{path}.p": repr(m.p) for path, m in self._whole if is_dropout(m)}
        for path, module in modules:
            held = {**module._parameters, **module._buffers}
            found |= {f"{path}.{name}": "None" for name, value in held.items() if value is None}
            found |= {f"{path}.{n}": repr(v) for n, v in module.__dict__.items() if n not in _TORCHS and _is_plain(v)}
            tensors = ((n, v) for n, v in module.__dict__.items() if isinstance(v, Tensor))
            found |= {f"{path}.{n}": f"tensor {id(v):#x}" for n, v in tensors}
            if "forward" in module.__dict__:
                found[f"{path}.forward"] = str(id(module.__dict__["forward"]))
        first: dict[int, str] = {}
        weights = (
            *self.model.named_parameters(remove_duplicate=False),
            *self.model.named_buffers(remove_duplicate=False),
        )
        for path, tensor in weights:  # what is one weight with two names is one in the graph
            if first.setdefault(id(tensor), path) != path:
                found[f"{path} as"] = first[id(tensor)]
        if self.traced[Scope].fixed:  # an exported graph converts to the dtypes that there were
            found |= {f"{path}.dtype": str(p.dtype) for path, p in self.model.named_parameters()}
        return {name.removeprefix("."): value for name, value in found.items()}

    def relink(self) -> None:
        """Let stages that fetch a parameter or buffer by its path fetch what the model has under it now."""
        for module, path in self._fetched:
            _relink(module, self.model, path)

    @cached_property
    def _fetched(self) -> list[tuple[nn.Module, str]]:
        """Each stage's module with each path it fetches."""
        modules = [s.module for s in self.stages.stages]
        return [(m, str(n.target)) for m in modules for n in m.graph.nodes if n.op == "get_attr"]

    def place(self) -> None:
        """Move each stage's parameters and buffers to its device, in place: optimizers keep holding them.

        Those that have no values yet stay where they are.
        """
        self.relink()
        for weight, device in self.placed():
            if weight.device != device and not weight.is_meta:
                weight.data = weight.data.to(device)

    def placed(self) -> list[tuple[Tensor, torch.device]]:
        """Return each parameter and buffer with the device it belongs on, stage by stage."""
        places = self.places
        held = {id(w): w for stage in self.stages.stages for w in list_weights(stage.module)}
        return [(w, places[key]) for key, w in held.items()]

    def check_weights(self) -> None:
        """Raise InputError for a parameter or buffer without values."""
        if self.traced[Example].from_shapes and any(w.is_meta for w, _ in self.placed()):
            named = (*self.model.named_parameters(), *self.model.named_buffers())
            name = next((name for name, w in named if w.is_meta), "a constant")
            raise InputError(
                f"{name!r} has no values yet, it is on the meta device: give the checkpoint, compile(weights=path) or "
                "pipe.load_weights(path), or pipe.load_state_dict(state, assign=True)"
            )


def _is_the_librarys(hook: Callable[..., Any], model: nn.Module) -> bool:
    """Return whether a hook comes from the installed package that the model's class comes from."""
    package = type(model).__module__.partition(".")[0]
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return "site-packages" in file and getattr(hook, "__module__", "").partition(".")[0] == package


def _is_plain(value: Any) -> bool:
    """Return whether a value may be compared with what it was: a number, a text, or a short tuple of them."""
    if type(value) is tuple:
        return len(value) < 100 and all(_is_plain(v) for v in value)
    return value is None or type(value) in (bool, int, float, complex, str)


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

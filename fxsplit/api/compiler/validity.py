"""Check whether a compiled graph still is the model: attributes, hooks and weights may change between calls.

A graph holds Python values that forward() read, such as the model's attributes, as constants. It does not call the
modules that were traced into, so it would not run their hooks. It fetches some weights by their paths, and the model
may have other weights there by now.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from torch import nn

from fxsplit.errors import InputError
from fxsplit.ir.facts.capture.example import Example
from fxsplit.ir.facts.capture.python_state import PythonState
from fxsplit.ir.facts.capture.scope import Scope
from fxsplit.ir.facts.stages import Stages, list_weights
from fxsplit.ir.graph import IR
from fxsplit.torch_internals.nn.containers import HOOKS, has_global_hooks
from fxsplit.torch_internals.random.seeded_calls import is_dropout


class Validity:
    """Compares a model with the graph that was captured from it.

    `attributes` are the model's attributes at the capture, as `_read_attributes` returns them.
    """

    def __init__(self, model: nn.Module, captured: IR, stages: Stages) -> None:
        self._model = model
        self._captured = captured
        self._stages = stages
        # Looked up once, since each call asks for them.
        self._python_state = captured[PythonState]
        self._fixed = captured[Scope].fixed
        self._from_shapes = captured[Example].from_shapes
        self.attributes = self._read_attributes()
        self._held = [held for m in model.modules() for held in (m._parameters, m._buffers)]
        # The inputs of `_read_attributes` when its result was last known to be unchanged.
        self._seen: tuple[list[Any], ...] = ()

    def find_changes(self) -> dict[str, tuple[str, str]]:
        """Return the values that have changed since the graph was captured, in words: name -> (then, now)."""
        # This runs before every call, and nearly always nothing has changed.
        found = self._python_state.find_changes()
        seen = self._look()
        if seen == self._seen:
            return found
        then, now = self.attributes, self._read_attributes()
        if then == now:
            self._seen = seen
            return found
        names = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
        named = {f"attribute {n!r} of the model": (then.get(n, "nothing"), now.get(n, "nothing")) for n in names}
        return {**named, **found}

    def _look(self) -> tuple[list[Any], ...]:
        """Return everything from which `_read_attributes` computes its result, in a tenth of the time.

        If nothing of this has changed since the last call, the attributes are the same.
        """
        weights = [weight for held in self._held for weight in held.values()]
        return (
            [module.training for _, module in self._whole],
            [repr(module.p) for module in self._dropouts],
            [name for held in self._held for name in held],
            list(map(id, weights)),
            [weight.dtype for weight in weights if weight is not None] if self._fixed else [],
        )

    def _read_attributes(self) -> dict[str, str]:
        """Return path -> value of state such as `training`, which shapes the graph even if forward() never reads it."""
        # A graph holds the behaviour of a module in one mode, even if only a part of the model is in that mode.
        found = {f"{path}.training": str(m.training) for path, m in self._whole}
        # A dropout reads its rate itself. At 0 it returns its input, and not new memory.
        found |= {f"{path}.p": "more than 0" if m.p else repr(m.p) for path, m in self._whole if is_dropout(m)}
        first: dict[int, str] = {}
        parameters = self._model.named_parameters(remove_duplicate=False)
        for path, weight in (*parameters, *self._model.named_buffers(remove_duplicate=False)):
            # A tied weight is one weight in the graph. If it is untied later, the graph would train only one of the
            # two.
            if first.setdefault(id(weight), path) != path:
                found[f"{path} as"] = first[id(weight)]
        if self._fixed:
            # An exported graph has conversions for the dtypes at its capture.
            found |= {f"{path}.dtype": str(p.dtype) for path, p in self._model.named_parameters()}
        return {name.removeprefix("."): value for name, value in found.items()}

    def check_hooks(self) -> None:
        """Raise InputError for a hook on a module that is cut into stages inside, since nothing would call the hook.

        A hook may be a part of forward(): a library sets it on a module inside of a module of its own class. Such a
        hook is allowed, as the graph has its effect.
        """
        if self._traced_into and has_global_hooks():
            raise InputError(
                "there are hooks for all modules (torch.nn.modules.module.register_module_forward_hook and the like), "
                f"and nothing would call them for submodule {self._traced_into[0][0]!r}, whose inside is cut into "
                "stages: remove them before you call the pipeline"
            )
        for path, module in self._traced_into:
            hooks = [hook for kind in HOOKS for hook in module.__dict__[kind].values()]
            if hooks and not all(_is_from_library(hook, self._list_around(path)) for hook in hooks):
                kept_whole = next((path for path, _ in self._whole), "a layer")
                raise InputError(
                    f"submodule {path!r} has hooks, and its inside is cut into stages, so they would never run: keep "
                    f"it whole, fxsplit.leaf({path!r}) in passes=, put them on modules that stay whole, such as "
                    f"{kept_whole!r}, or remove them"
                )

    def _list_around(self, path: str) -> list[nn.Module]:
        """Return the module at a path, with all modules that contain it."""
        parts = path.split(".")
        return [self._model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts) + 1)]

    def check_weights(self) -> None:
        """Raise InputError if a parameter or buffer of a model captured by its shapes still has no values."""
        if not self._from_shapes:
            return
        if any(w.is_meta for stage in self._stages.stages for w in list_weights(stage.module)):
            named = (*self._model.named_parameters(), *self._model.named_buffers())
            name = next((name for name, w in named if w.is_meta), "a constant")
            raise InputError(
                f"{name!r} has no values yet, it is on the meta device: give the checkpoint, compile(weights=path) or "
                "pipe.load_weights(path), or pipe.load_state_dict(state, assign=True)"
            )

    def relink(self) -> None:
        """Update stages that fetch a parameter or buffer by its path, in case the model has another one there now."""
        for module, path in self._fetched:
            _relink(module, self._model, path)

    @cached_property
    def _whole(self) -> list[tuple[str, nn.Module]]:
        """The modules that the graph calls, by path."""
        paths = dict.fromkeys(str(n.target) for n in self._captured.gm.graph.nodes if n.op == "call_module")
        return [(path, self._captured.gm.get_submodule(path)) for path in paths]

    @cached_property
    def _dropouts(self) -> list[Any]:
        """The dropouts among the modules that the graph calls."""
        return [module for _, module in self._whole if is_dropout(module)]

    @cached_property
    def _traced_into(self) -> list[tuple[str, nn.Module]]:
        """The modules that were traced into, without the model itself: the pipeline runs the model's own hooks."""
        whole = {path for path, _ in self._whole}
        inside = tuple(f"{path}." for path in whole)
        named = self._model.named_modules()
        return [(path, m) for path, m in named if path and path not in whole and not f"{path}.".startswith(inside)]

    @cached_property
    def _fetched(self) -> list[tuple[nn.Module, str]]:
        """Each stage's module with each path that it fetches."""
        modules = [stage.module for stage in self._stages.stages]
        return [(m, str(n.target)) for m in modules for n in m.graph.nodes if n.op == "get_attr"]


def _is_from_library(hook: Callable[..., Any], modules: Sequence[nn.Module]) -> bool:
    """Return whether a hook and the class of one of the modules come from the same installed package."""
    package = (getattr(hook, "__module__", None) or "").partition(".")[0]
    # A user's own package may be installed too, in an editable way, but then its files are not in site-packages.
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    if "site-packages" not in file or package == "torch":
        return False
    return any(type(module).__module__.partition(".")[0] == package for module in modules)


def _relink(module: nn.Module, model: nn.Module, path: str) -> None:
    """Set `path` in `module` to the weight that `model` has there; constants that only the graph has are kept."""
    *parents, name = path.split(".")
    source, target = model, module
    for parent in parents:
        target = getattr(target, parent)
        if parent not in source._modules:
            return
        source = getattr(source, parent)
    # Written to the registries: a stage's module would take an assignment for a new parameter.
    for kind in ("_parameters", "_buffers"):
        held = getattr(source, kind)
        if name in held and name in getattr(target, kind):
            getattr(target, kind)[name] = held[name]


class ModuleWatch:
    """Remembers the modules that a model had at the last check."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: list[nn.Module] = []
        self._children: list[int] = []
        self._classes: list[type] = []

    def find_replaced(self) -> bool:
        """Return whether a submodule was replaced, added or removed, or got another class, since the last check."""
        # This runs at every call. Comparing the children of each module takes a tenth of the time of a walk.
        if self._modules and self._children == _list_children(self._modules) and self._classes == self._list_classes():
            return False
        # Identities tell modules apart: while these are held, no new module can have the same identity.
        modules = list(self._model.modules())
        replaced = list(map(id, modules)) != list(map(id, self._modules)) or self._classes != self._list_classes()
        self._modules, self._children = modules, _list_children(modules)
        self._classes = self._list_classes()
        return replaced

    def _list_classes(self) -> list[type]:
        """Return the class of each module: `module.__class__ = Quantized` gives the module another forward()."""
        return list(map(type, self._modules))


def _list_children(modules: Sequence[nn.Module]) -> list[int]:
    """Return the identities of the children of each module, with a separator after each module's children."""
    return [id(child) for module in modules for child in (*module._modules.values(), None)]

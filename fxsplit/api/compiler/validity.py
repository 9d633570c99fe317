"""Validity: whether what was compiled still is the model, whose attributes, hooks and weights may change between calls.

A graph holds as constants what forward() read of Python values, such as the model's attributes. It has no calls of the
modules that were traced into, so it would run no hooks of theirs. It fetches some weights by their paths, under which
the model may hold others by now.
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
    """What one mode was compiled from; `attributes` are the model's as they were when this was made."""

    def __init__(self, model: nn.Module, captured: IR, stages: Stages) -> None:
        self._model = model
        self._captured = captured
        self._stages = stages
        self.attributes = self._read_attributes()
        self._held = [held for m in model.modules() for held in (m._parameters, m._buffers)]
        # What attributes followed from when they were last read in full.
        self._seen: tuple[list[Any], ...] = ()

    def find_changes(self) -> dict[str, tuple[str, str]]:
        """Return what has another value than when the graph was captured, in words: name -> (then, now)."""
        # Asked before every call, and nearly always nothing has changed.
        found = self._captured[PythonState].find_changes()
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
        """Return all that `_read_attributes` reads, in a tenth of its time: what the same follows from is the same."""
        weights = [weight for held in self._held for weight in held.values()]
        return (
            [module.training for _, module in self._whole],
            [repr(module.p) for module in self._dropouts],
            [name for held in self._held for name in held],
            list(map(id, weights)),
            [weight.dtype for weight in weights if weight is not None] if self._captured[Scope].fixed else [],
        )

    def _read_attributes(self) -> dict[str, str]:
        """Return, by path, the values now of what a graph depends on though no code of the user's reads it."""
        # The graph of one mode holds what a module does in it, also where only a part of the model changes its mode.
        found = {f"{path}.training": str(m.training) for path, m in self._whole}
        # A dropout reads its rate itself. At 0 it returns its input, and not new memory.
        found |= {f"{path}.p": "more than 0" if m.p else repr(m.p) for path, m in self._whole if is_dropout(m)}
        first: dict[int, str] = {}
        parameters = self._model.named_parameters(remove_duplicate=False)
        for path, weight in (*parameters, *self._model.named_buffers(remove_duplicate=False)):
            # One weight with two names is one in the graph: untied later, the graph would train only one of the two.
            if first.setdefault(id(weight), path) != path:
                found[f"{path} as"] = first[id(weight)]
        if self._captured[Scope].fixed:
            # An exported graph converts to the dtypes that there were.
            found |= {f"{path}.dtype": str(p.dtype) for path, p in self._model.named_parameters()}
        return {name.removeprefix("."): value for name, value in found.items()}

    def check_hooks(self) -> None:
        """Raise InputError for a hook on a module whose inside is cut into stages: nothing would call it.

        A hook of the library that a module around it comes from belongs to forward() there: its effect is in the graph.
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
        """Return the module at a path, with all modules around it."""
        parts = path.split(".")
        return [self._model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts) + 1)]

    def check_weights(self) -> None:
        """Raise InputError for a parameter or buffer without values, where the model was captured by shapes alone."""
        if not self._captured[Example].from_shapes:
            return
        if any(w.is_meta for stage in self._stages.stages for w in list_weights(stage.module)):
            named = (*self._model.named_parameters(), *self._model.named_buffers())
            name = next((name for name, w in named if w.is_meta), "a constant")
            raise InputError(
                f"{name!r} has no values yet, it is on the meta device: give the checkpoint, compile(weights=path) or "
                "pipe.load_weights(path), or pipe.load_state_dict(state, assign=True)"
            )

    def relink(self) -> None:
        """Let stages that fetch a parameter or buffer by its path fetch what the model has under it now."""
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
        """The modules whose inside is in the graph, but for the model itself: calling the pipeline runs its hooks."""
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
    """Return whether a hook comes from the installed package that the class of one of the modules comes from."""
    package = (getattr(hook, "__module__", None) or "").partition(".")[0]
    # A user's own module is installed too, in an editable way, but not among the site packages.
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    if "site-packages" not in file or package == "torch":
        return False
    return any(type(module).__module__.partition(".")[0] == package for module in modules)


def _relink(module: nn.Module, model: nn.Module, path: str) -> None:
    """Let `module` hold under `path` what `model` holds there; constants that only the graph has are kept."""
    *parents, name = path.split(".")
    source, target = model, module
    for parent in parents:
        target = getattr(target, parent)
        if parent not in source._modules:
            return
        source = getattr(source, parent)
    # Set in the registries themselves: a stage's module would take an assignment for a new parameter.
    for kind in ("_parameters", "_buffers"):
        held = getattr(source, kind)
        if name in held and name in getattr(target, kind):
            getattr(target, kind)[name] = held[name]

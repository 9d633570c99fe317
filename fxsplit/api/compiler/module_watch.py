"""Notice that submodules of a model were replaced, added or removed between two calls."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


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

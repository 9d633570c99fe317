"""Which modules a model consists of, and whether they are others now."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


class ModuleWatch:
    """Knows the modules that a model had when it was last asked."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: list[nn.Module] = []
        self._children: list[int] = []
        self._classes: list[type] = []

    def find_replaced(self) -> bool:
        """Return whether a submodule was replaced, added or removed, or a module's class, since the last time."""
        # Asked at every call: to look whether each has the same children takes a tenth of the time of a walk.
        if self._modules and self._children == _list_children(self._modules) and self._classes == self._list_classes():
            return False
        # Identities tell modules apart: as these are held, no new one can have the same identity.
        modules = list(self._model.modules())
        replaced = list(map(id, modules)) != list(map(id, self._modules)) or self._classes != self._list_classes()
        self._modules, self._children = modules, _list_children(modules)
        self._classes = self._list_classes()
        return replaced

    def _list_classes(self) -> list[type]:
        """Return the class of each module: `module.__class__ = Quantized` gives it another forward()."""
        return list(map(type, self._modules))


def _list_children(modules: Sequence[nn.Module]) -> list[int]:
    """Return the identities of the modules inside each of the modules, and where those of each of them end."""
    return [id(child) for module in modules for child in (*module._modules.values(), None)]

"""Code of graphs that is generated when somebody first looks at it, and not whenever a graph has changed.

torch.export rewrites a graph a dozen times and more, and each time generates and compiles the code of all of it, which
nobody runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.fx import GraphModule

from fxsplit.torch_internals.scopes.patch import Method, patch_method

GENERATED = ("forward", "_code", "_in_spec", "_out_spec", "_lineno_map", "_prologue_start")
"""What GraphModule.recompile() sets: `forward` of the class, which each module has to itself, and the others of it."""


@contextmanager
def generate_code_late() -> Iterator[None]:
    """Generate code of graphs that are made or changed in the block once it is looked at or run, then or later."""
    with patch_method(GraphModule, "recompile", lambda recompile: partial(_postpone, recompile)):
        yield


def _postpone(recompile: Method, module: GraphModule) -> None:
    """Put something in place of all that `recompile` sets, that calls it when one of them is read."""
    for name in GENERATED:
        setattr(type(module), name, _Late(recompile, module, name))
        # What an object has itself is found before what its class has.
        vars(module).pop(name, None)


class _Late:
    """Something that `recompile` sets, before it has; a descriptor of the module's class."""

    def __init__(self, recompile: Method, module: GraphModule, name: str) -> None:
        self._recompile = partial(recompile, module)
        self._name = name

    def __get__(self, module: GraphModule | None, kind: type[GraphModule]) -> Any:
        """Generate the code, and return what it is that was read."""
        self._recompile()
        # A graph of plain arguments has no specs of containers, and so nothing has taken their place.
        for name in GENERATED:
            if isinstance(vars(kind).get(name), _Late):
                delattr(kind, name)
        return getattr(kind if module is None else module, self._name)

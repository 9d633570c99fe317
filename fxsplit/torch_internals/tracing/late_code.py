"""Generate the code of a graph when it is first read, instead of at every change of the graph.

torch.export rewrites a graph a dozen times or more. Each time it generates and compiles the code of the whole graph,
although nothing runs that code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.fx import GraphModule

from fxsplit.torch_internals.scopes.patch import Method, patch_method

GENERATED = ("forward", "_code", "_in_spec", "_out_spec", "_lineno_map", "_prologue_start")
"""The attributes set by GraphModule.recompile(): `forward` on the class, which each module has to itself, and the rest.
"""


@contextmanager
def generate_code_late() -> Iterator[None]:
    """Inside the block, generate the code of a graph that is made or changed only when the code is read or run."""
    with patch_method(GraphModule, "recompile", lambda recompile: partial(_postpone, recompile)):
        yield


def _postpone(recompile: Method, module: GraphModule) -> None:
    """Replace all attributes that `recompile` sets by descriptors, which call `recompile` when an attribute is read."""
    for name in GENERATED:
        setattr(type(module), name, _Late(recompile, module, name))
        # Python looks in the object before its class, so remove the object's own attribute.
        vars(module).pop(name, None)


class _Late:
    """A class attribute that stands for generated code. When it is read, it generates the code."""

    def __init__(self, recompile: Method, module: GraphModule, name: str) -> None:
        self._recompile = partial(recompile, module)
        self._name = name

    def __get__(self, module: GraphModule | None, kind: type[GraphModule]) -> Any:
        """Generate the code, and return the attribute that was read."""
        self._recompile()
        # `recompile` sets no container specs for a graph with plain arguments, so remove the descriptors that remain.
        for name in GENERATED:
            if isinstance(vars(kind).get(name), _Late):
                delattr(kind, name)
        return getattr(kind if module is None else module, self._name)

"""What a front end is, and what it gives: the graph of a model, not yet compared with the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import fx

from fxsplit.frontend.subject import Subject
from fxsplit.ir.facts.scope import Scope


@dataclass(frozen=True)
class Graph:
    """A graph of a model, and the calls for which it is right."""

    gm: fx.GraphModule
    scope: Scope


class FrontEnd(Protocol):
    """A way to make a graph of a model."""

    @property
    def name(self) -> str:
        """What `Scope.front_end` says of a graph that was made this way."""

    def attempt(self, subject: Subject) -> Graph:
        """Return a graph of the subject's model, not yet checked; raises TraceError where that is impossible.

        The error names the innermost submodule that the front end cannot follow, where there is one.
        """


def find_submodule(node: fx.Node) -> str | None:
    """Return the path of the innermost submodule that a node was made in; None for the model itself."""
    # fx and torch.export both note the stack of modules here, outermost first; the model's own path is empty.
    paths = [str(path) for path, *_ in (node.meta.get("nn_module_stack") or {}).values()]
    return next((path for path in reversed(paths) if path), None)

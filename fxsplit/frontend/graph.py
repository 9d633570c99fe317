"""The interface of a front end, and its result: the graph of a model, not yet compared with the model.

There are also functions that read such a graph: the origin of a node, the attributes that the graph fetches, and
whether two graphs are equal.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from fxsplit.frontend.subject import Subject
from fxsplit.ir.facts.capture.python_state import NumberPlace
from fxsplit.ir.facts.capture.scope import Scope
from fxsplit.torch_internals.fx.interpret import find_target
from fxsplit.torch_internals.fx.module_stack import find_module_path, find_user_line


@dataclass(frozen=True)
class Graph:
    """A graph of a model, the calls for which it is right, and the Python numbers that are inputs of it.

    computed: the storages of tensors that operators read during the trace. The graph then holds the results of these
        operators as constants.
    """

    gm: fx.GraphModule
    scope: Scope
    followed: tuple[NumberPlace, ...] = ()
    computed: frozenset[int] = frozenset()


class FrontEnd(Protocol):
    """A way to make a graph of a model."""

    @property
    def name(self) -> str:
        """The name of this way, for the field `front_end` of `Scope`."""

    def attempt(self, subject: Subject) -> Graph:
        """Return a graph of the subject's model, not yet checked. Raises TraceError if that is impossible.

        The error names the innermost submodule that the front end cannot follow, if there is one.
        """


def is_inside(path: str, whole: Set[str]) -> bool:
    """Return whether the submodule at `path` is one of the `whole` submodules, or lies inside one of them."""
    # A deep model has thousands of both, so look each prefix up instead of comparing with every whole submodule.
    return path in whole or any(path[:end] in whole for end, letter in enumerate(path) if letter == ".")


def find_submodule(node: fx.Node) -> str | None:
    """Return the path of the innermost submodule that made a node; None for the model itself."""
    return find_module_path(node) or None


def find_line(node: fx.Node) -> str:
    """Return the user's file and line of a node, to follow its name in a message; empty if unknown."""
    line = find_user_line(node)
    return f" from {line}" if line else ""


def list_fetched(gm: fx.GraphModule) -> dict[str, Any]:
    """Return the attributes that the graph fetches, by path: parameters, buffers, and constants from tracing."""
    return {str(n.target): find_target(gm, n) for n in gm.graph.find_nodes(op="get_attr")}


def same_graph(a: fx.GraphModule, b: fx.GraphModule) -> bool:
    """Return whether two captures of one model have the same operations on the same modules and constants.

    Weights must be the same objects. A constant may be another tensor of the same values: each capture makes its own.
    """
    return _list_nodes(a) == _list_nodes(b) and all(
        same_constant(one, other) for one, other in zip(list_fetched(a).values(), list_fetched(b).values(), strict=True)
    )


def same_constant(a: Any, b: Any) -> bool:
    """Return whether two fetched values are the same object, or tensors of equal values."""
    return a is b or (isinstance(a, Tensor) and isinstance(b, Tensor) and _has_equal_values(a, b))


def _has_equal_values(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal in everything but their memory."""
    # torch.equal raises for tensors on two devices, and compares dtypes loosely.
    return a.dtype == b.dtype and a.shape == b.shape and a.device == b.device and bool(torch.equal(a, b))


def _list_nodes(gm: fx.GraphModule) -> list[tuple[Any, ...]]:
    """Return a description of each node, to compare graphs.

    It has no node objects, which differ between equal graphs.
    """
    # A number that is an input has its earlier value as its default.
    return [
        (n.op, n.name, n.target, repr(n.args if n.op != "placeholder" else ()), repr(n.kwargs)) for n in gm.graph.nodes
    ]

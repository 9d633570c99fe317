"""Edit an IR's graph: change a copy of it, and get another IR with the changed graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar, cast

from torch import fx, nn

from fxsplit.errors import ChainError
from fxsplit.system.figures import show
from fxsplit.torch_internals.fx.interpret import find_target

T = TypeVar("T")
"""Stands for the class IR. This file cannot import it, since the file of IR imports this file."""


class Edit(Generic[T]):
    """A copy of a graph that may be changed inside a block.

    graph: the copy. Its nodes have the same names and metadata.
    ir: the IR with the changed graph, after the block has ended.
    """

    def __init__(self, ir: T) -> None:
        self._before: Any = ir
        self._added: dict[str, nn.Module] = {}
        self._made: T | None = None
        self.graph = fx.Graph()
        # graph_copy returns the result, and leaves the output node to its caller.
        result = self.graph.graph_copy(cast(Any, ir).gm.graph, {})
        self.graph.output(result)

    @property
    def ir(self) -> T:
        """The IR with the changed graph. Raises ChainError inside of the block."""
        if self._made is None:
            raise ChainError("the edit has not ended: read edit.ir after the block of 'with ir.edited() as edit:'")
        return self._made

    def add_module(self, path: str, module: nn.Module) -> str:
        """Give the graph a module of your own, and return the module's path for `graph.call_module`.

        Its weights must be the model's own, unless the graph is only evaluated. Raises ChainError for a path that is
        taken.
        """
        called = {str(node.target) for node in self._before.gm.graph.nodes if node.op in ("call_module", "get_attr")}
        if not path or path in called or path in self._added:
            raise ChainError(
                f"add_module({show(path)}): the graph has such a path already, or it is empty: give another"
            )
        self._added[path] = module.train(self._before.mode == "train")
        return path

    def find_module(self, node: fx.Node) -> Any:
        """Return the module or weight that a node calls or fetches."""
        added = self._added.get(str(node.target))
        return added if added is not None else find_target(self._before.gm, node)

    def finish(self) -> None:
        """Make the IR: check the graph, drop nodes that nothing reads, and attach the modules that the graph calls.

        Raises ChainError for a graph that torch.fx refuses.
        """
        self._drop_unread()
        try:
            self.graph.lint()
            held = {str(n.target): self.find_module(n) for n in self.graph.nodes if n.op in ("call_module", "get_attr")}
        except (RuntimeError, AttributeError) as error:
            raise ChainError(f"the edited graph of {self._before.model} is not sound: {error}") from error
        gm = fx.GraphModule(held, self.graph, class_name=type(self._before.gm).__name__)
        gm.training = self._before.gm.training
        self._made = self._before.rewrite(gm)

    def _drop_unread(self) -> None:
        """Drop the nodes that nothing reads any more. A node that nothing read before the edit stays."""
        unread = {node.name for node in self._before.gm.graph.nodes if not node.users}
        for node in reversed(self.graph.nodes):
            if not node.users and node.op not in ("placeholder", "output") and node.name not in unread:
                self.graph.erase_node(node)


@contextmanager
def edit_graph(ir: T) -> Iterator[Edit[T]]:
    """Yield a copy of the graph of `ir` to change, and make the IR of the changed graph at the end of the block."""
    edit = Edit(ir)
    yield edit
    edit.finish()

"""leaf: keep a submodule whole, as one node of the graph.

A *leaf* is a submodule that is called in the graph and whose inside is not in it: with `leaf{path=encoder.attn}` the
graph has one node `encoder.attn(x)`. Front ends look for the pass in the chain before any pass runs, because they make
the graph. The pass itself checks that they did.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxsplit.errors import ChainError, TraceError
from fxsplit.ir.graph import IR


@dataclass(frozen=True)
class Leaf:
    """Keep the submodule under `path` whole: it is one call in the graph, and lies in one stage.

    Raises ChainError for a path that is no text, or an empty one.
    """

    path: str = ""

    name: ClassVar[str] = "leaf"
    ignores_mode: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise ChainError(f"leaf{{path={self.path!r}}}: give the path of a submodule, such as 'encoder.attn'")

    def __call__(self, ir: IR) -> IR:
        """Return the graph as it is; raises TraceError where only the inside of the submodule is in it."""
        # A graph without the submodule is none's fault: a mode may do without it, or call it inside another leaf.
        called = {str(n.target) for n in ir.gm.graph.nodes if n.op == "call_module"}
        # With its inside in the graph and no call of it, the submodule could be cut.
        if self.path not in called and any(path.startswith(f"{self.path}.") for path in called):
            raise TraceError(
                f"the inside of submodule {self.path!r} is in the graph, and no call of it: forward() calls its parts "
                "by themselves; name those"
            )
        return ir


def leaf(path: str) -> Leaf:
    """Return a pass that keeps the submodule under `path` whole: `passes=[fxsplit.leaf("encoder.attn"), *DEFAULT]`."""
    return Leaf(path)

"""leaf: keep a submodule as one node of the graph.

With `leaf{path=encoder.attn}` the graph has one node `encoder.attn(x)`, without the operators inside. Front ends look
for this pass in the chain before any pass runs, because they capture the graph. The pass itself checks the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxsplit.errors import ChainError, TraceError
from fxsplit.ir.graph import IR


@dataclass(frozen=True)
class Leaf:
    """Keep the submodule at `path` as one call in the graph, and so in one stage.

    Raises ChainError unless the path is a non-empty text.
    """

    path: str = ""

    name: ClassVar[str] = "leaf"
    ignores_mode: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise ChainError(f"leaf{{path={self.path!r}}}: give the path of a submodule, such as 'encoder.attn'")

    def __call__(self, ir: IR) -> IR:
        """Return the IR unchanged. Raises TraceError if the graph has the submodule's operators instead of its call."""
        # A graph without the submodule is fine: this mode may not use it, or another leaf calls it.
        called = {str(n.target) for n in ir.gm.graph.nodes if n.op == "call_module"}
        # If its operators are in the graph without its call, the submodule could be cut.
        if self.path not in called and any(path.startswith(f"{self.path}.") for path in called):
            raise TraceError(
                f"the graph has the inside of submodule {self.path!r}, and no call of it: if forward() calls its parts "
                f"directly, name those; else capture it whole, by fxsplit.capture(..., leaves=[{self.path!r}]), as "
                "compile(passes=) and 'fxsplit opt MODULE:FACTORY -p leaf{path=...}' do"
            )
        return ir


def leaf(path: str) -> Leaf:
    """Return a pass that keeps the submodule at `path` whole: `passes=[fxsplit.leaf("encoder.attn"), *DEFAULT]`."""
    return Leaf(path)

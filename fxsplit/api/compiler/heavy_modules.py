"""Warn of a module that stays whole, takes most of the time, and could be cut if it were traced into."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.graph import IR
from fxsplit.system.user_lines import warn_user

SHARE = 0.5
"""The share of the time above which a single node spoils any plan."""


def warn_of_heavy_module(captured: IR, costs: Costs | None, meant: Collection[str]) -> None:
    """Warn if one call of a module takes over half of the measured time, and the module has several layers inside.

    meant: paths of modules that the user keeps whole on purpose.
    """
    total = sum(node.forward_ms + node.backward_ms for node in costs.nodes) if costs else 0.0
    for node in costs.nodes if costs and total else ():
        share = (node.forward_ms + node.backward_ms) / total
        if share <= SHARE or not node.op.startswith("call_module:"):
            continue
        path = node.op.removeprefix("call_module:")
        module = dict(captured.gm.named_modules(remove_duplicate=False)).get(path)
        # A module that a pass has made is not in the captured graph, and a front end cannot trace into it.
        if module is not None and path not in meant and count_parts(module) > 1:
            warn_user(
                f"submodule {path!r} ({type(module).__name__}) is one node and takes {share:.0%} of the time, so no "
                "plan is faster than that: write its parts as modules of your own, which are traced into, or say with "
                f"fxsplit.leaf({path!r}) in passes= that this is meant"
            )


def count_parts(module: nn.Module) -> int:
    """Return the number of layers inside a module: submodules with weights of their own, or layers of an RNN."""
    if isinstance(module, nn.RNNBase):
        return module.num_layers
    return sum(any(True for _ in m.parameters(recurse=False)) for m in module.modules())

"""Placement: what a graph makes on a fixed device is made on that of its stage.

A model that was captured on one device makes its constants there: torch.arange(n, device=x.device). Parted, each stage
has a device of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx, nn


def fix_constant_devices(gm: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """Return the graph with `device` in place of nodes that ask a tensor for its device, which would cross stages."""
    asking = [n for n in gm.graph.nodes if n.target is getattr and n.args[1:2] == ("device",)]
    for node in asking:
        for user in list(node.users):
            _rewrite(user, lambda key, value: device if value in asking else value)
        gm.graph.erase_node(node)
    gm.recompile()
    return gm


def move_constants(module: nn.Module, captured_on: torch.device, here: torch.device) -> None:
    """Let all that a stage's graph, and the parts in it, do on the device they were captured on be done `here`."""
    if captured_on == here:
        return
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                converts = node.op == "call_method" and node.target in ("to", "type")
                _rewrite(node, partial(_replace_device, captured_on, here, converts))
            part.recompile()


def _rewrite(node: fx.Node, change: Callable[[str, Any], Any]) -> None:
    """Change a node's arguments, each by its name (empty for one without) and value."""
    node.args = tuple(fx.node.map_aggregate(value, partial(change, "")) for value in node.args)
    node.kwargs = {key: fx.node.map_aggregate(value, partial(change, key)) for key, value in node.kwargs.items()}


def _replace_device(captured_on: torch.device, here: torch.device, converts: bool, key: str, value: Any) -> Any:
    """Return `here` for a value that names the device of the capture; a text does so where a device is asked for."""
    named = isinstance(value, torch.device) or (isinstance(value, str) and (converts or key == "device"))
    return here if named and _names_device(value, captured_on) else value


def _names_device(value: torch.device | str, device: torch.device) -> bool:
    """Return whether a value names a device; one without a number is the current one of its kind."""
    try:
        named = torch.device(value)
    except RuntimeError:  # a text such as "float32" is none
        return False
    return named.type == device.type and named.index in (None, device.index)

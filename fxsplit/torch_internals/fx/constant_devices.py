"""Make a graph create its constants on the device of its stage.

A model that was captured on one device creates constants there, for example by `torch.arange(n, device=x.device)`.
After the cut, each stage runs on its own device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx, nn


def fix_constant_devices(gm: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """Replace each read of a tensor's device (`x.device`) in a graph by `device`, in place. Returns the graph.

    Otherwise the device would be a value that is handed from stage to stage, and would name the wrong stage's device.
    """
    asking = [n for n in gm.graph.nodes if n.target is getattr and n.args[1:2] == ("device",)]
    for node in asking:
        # Copy the users, since changing their arguments removes them from `node.users`.
        for user in list(node.users):
            _rewrite(user, lambda key, value: device if value in asking else value)
        gm.graph.erase_node(node)
    gm.recompile()
    return gm


def move_constants(module: nn.Module, captured_on: torch.device, here: torch.device) -> None:
    """Rewrite a stage's graphs in place, so that they make constants on `here` instead of the capture's device."""
    if captured_on == here:
        return
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                _rewrite(node, partial(_replace_device, captured_on, here, _converts(node)))
            part.recompile()


def name_other_device(node: fx.Node, values: Any, captured_on: torch.device, here: torch.device) -> Any:
    """Return a node's arguments or keyword arguments with `here` instead of the capture's device.

    The graph is not changed.
    """
    change = partial(_replace_device, captured_on, here, _converts(node))

    def rename(key: str, value: Any) -> Any:
        if type(value) is dict:
            return {name: rename(name, v) for name, v in value.items()}
        return type(value)(rename(key, v) for v in value) if type(value) in (list, tuple) else change(key, value)

    return rename("", values)


def _converts(node: fx.Node) -> bool:
    """Return whether a node calls a method that accepts a device name as a positional string."""
    return node.op == "call_method" and node.target in ("to", "type")


def _rewrite(node: fx.Node, change: Callable[[str, Any], Any]) -> None:
    """Rewrite a node's arguments. `change` gets each argument's name (empty if positional) and value."""
    node.args = tuple(fx.node.map_aggregate(value, partial(change, "")) for value in node.args)
    node.kwargs = {key: fx.node.map_aggregate(value, partial(change, key)) for key, value in node.kwargs.items()}


def _replace_device(captured_on: torch.device, here: torch.device, converts: bool, key: str, value: Any) -> Any:
    """Return `here` if a value names the capture's device, else the value."""
    # A string such as "cpu" names a device only in x.to("cpu") and device="cpu"; elsewhere it may be a mode or a key.
    if not (isinstance(value, torch.device) or (isinstance(value, str) and (converts or key == "device"))):
        return value
    try:
        named = torch.device(value)
    except RuntimeError:
        # The string is a dtype, as in x.to("float32").
        return value
    # A device without an index, such as "cuda", is the current device of its type.
    return here if named.type == captured_on.type and named.index in (None, captured_on.index) else value

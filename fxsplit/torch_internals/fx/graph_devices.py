"""Let a graph make its constants on the device of its stage.

A model that was captured on one device makes constants there, as `torch.arange(n, device=x.device)` does. Once the
graph is cut into stages, each stage has a device of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx, nn


def fix_constant_devices(gm: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """Return the graph, changed in place, with `device` where a node asked a tensor for its device (`x.device`).

    A device as the value of a node would have to cross stages, and would name the wrong stage's device there.
    """
    asking = [n for n in gm.graph.nodes if n.target is getattr and n.args[1:2] == ("device",)]
    for node in asking:
        # A copy of the users, since a change of arguments takes them out of `node.users`.
        for user in list(node.users):
            _rewrite(user, lambda key, value: device if value in asking else value)
        gm.graph.erase_node(node)
    gm.recompile()
    return gm


def move_constants(module: nn.Module, captured_on: torch.device, here: torch.device) -> None:
    """Let a stage's graph, and graphs inside it, make `here` what they made on the device of the capture.

    The graphs are changed in place.
    """
    if captured_on == here:
        return
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                _rewrite(node, partial(_replace_device, captured_on, here, _converts(node)))
            part.recompile()


def name_other_device(node: fx.Node, values: Any, captured_on: torch.device, here: torch.device) -> Any:
    """Return the arguments that a node runs with, or its keyword arguments, with `here` for the device of the capture.

    The graph stays as it is.
    """
    change = partial(_replace_device, captured_on, here, _converts(node))

    def rename(key: str, value: Any) -> Any:
        if type(value) is dict:
            return {name: rename(name, v) for name, v in value.items()}
        return type(value)(rename(key, v) for v in value) if type(value) in (list, tuple) else change(key, value)

    return rename("", values)


def _converts(node: fx.Node) -> bool:
    """Return whether a node calls a method that takes a device as a text, by position."""
    return node.op == "call_method" and node.target in ("to", "type")


def _rewrite(node: fx.Node, change: Callable[[str, Any], Any]) -> None:
    """Change a node's arguments: `change` gets the name (empty for a positional one) and the value of each."""
    node.args = tuple(fx.node.map_aggregate(value, partial(change, "")) for value in node.args)
    node.kwargs = {key: fx.node.map_aggregate(value, partial(change, key)) for key, value in node.kwargs.items()}


def _replace_device(captured_on: torch.device, here: torch.device, converts: bool, key: str, value: Any) -> Any:
    """Return `here` for a value that names the device of the capture, and every other value as it is."""
    # A text such as "cpu" names a device only in x.to("cpu") and in device="cpu"; elsewhere it may be a mode or a key.
    if not (isinstance(value, torch.device) or (isinstance(value, str) and (converts or key == "device"))):
        return value
    try:
        named = torch.device(value)
    except RuntimeError:
        # x.to("float32") gives a dtype as a text.
        return value
    # A name without a number, as "cuda", is the current device of its kind.
    return here if named.type == captured_on.type and named.index in (None, captured_on.index) else value

"""Convert graphs of torch.fx to plain graphs, which are written as text, and back."""

from __future__ import annotations

import re
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn

from fxsplit.errors import IRSyntaxError
from fxsplit.ir.text.graph import FunctionName, PlainGraph, PlainNode, map_inside, walk_values
from fxsplit.ir.text.values import DeviceName, Opaque, TorchName
from fxsplit.system.figures import show
from fxsplit.torch_internals.fx.module_stack import find_module_path, find_user_line
from fxsplit.torch_internals.fx.names import UnknownFunction, find_function, name_function

ATTRIBUTES = ("shape", "dtype", "device", "ndim", "layout", "T", "mT", "H", "mH", "data", "real", "imag", "itemsize")
"""The attributes of a tensor that a graph from a file may read; other attributes could reach more than its values."""
SHAPE, COMMENT = "fxsplit_shape", "fxsplit_comment"
"""The entries of a node's `meta`: dtype and shape of the result as text, and the comment that was read from text."""


def to_plain(gm: fx.GraphModule) -> PlainGraph:
    """Return a graph without torch that has all that the text of the graph needs."""
    plain = PlainGraph(type(gm).__name__)
    made: dict[fx.Node, PlainNode] = {}
    for node in gm.graph.nodes:
        target = node.target if isinstance(node.target, str) else FunctionName(name_function(node.target))
        arguments = tuple(_to_plain_value(a, made) for a in node.args)
        options = {k: _to_plain_value(v, made) for k, v in node.kwargs.items()}
        module = find_module_path(node)
        made[node] = PlainNode(node.name, node.op, target, arguments, options)
        made[node].module = module if module != _guess_module(node.op, target) else ""
        made[node].made = str(node.meta.get(SHAPE, "")).replace("\n", " ").replace(";", ",").strip()
        made[node].comment = _describe(gm, node)
        plain.nodes.append(made[node])
    return plain


def _guess_module(op: str, target: str | FunctionName) -> str:
    """Return the path of the innermost submodule of a node, as far as its kind tells: a call of `a.b` is in `a.b`."""
    return target if op == "call_module" and isinstance(target, str) else ""


def _describe(gm: fx.GraphModule, node: fx.Node) -> str:
    """Return the comment of a node: the class of its module with the settings, and the user's line that made it."""
    if COMMENT in node.meta:
        return str(node.meta[COMMENT])
    line = find_user_line(node)
    said = [describe_module(gm.get_submodule(str(node.target)))] if node.op == "call_module" else []
    said += [f"@ {_shorten(line)}"] if line else []
    return " ".join(" ".join(said).split())


def _shorten(line: str) -> str:
    """Return a user's line such as `File "/home/me/net.py", line 12` as `net.py:12`, the same on every machine."""
    path, _, number = line.removeprefix("File ").rpartition(", line ")
    name = re.split(r"[/\\]", path.strip('"'))[-1]
    return f"{name}:{number}"


def describe_module(module: nn.Module) -> str:
    """Return the class of a module and its settings, such as `Linear(in_features=8, out_features=16, bias=True)`."""
    # extra_repr is the user's code, and may need what the module lacks.
    try:
        settings = module.extra_repr()
    except Exception:
        settings = "..."
    return f"{type(module).__name__}({' '.join(settings.split())})"


def _to_plain_value(value: Any, made: dict[fx.Node, PlainNode]) -> Any:
    """Return an argument with plain nodes and names in place of torch's objects."""
    if isinstance(value, fx.Node):
        return made[value]
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return TorchName(str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return DeviceName(str(value))
    return map_inside(value, lambda inner: _to_plain_value(inner, made))


def to_fx(plain: PlainGraph, model: nn.Module | None = None) -> fx.GraphModule:
    """Return the graph as a GraphModule that calls the submodules of `model`.

    Without a model, placeholders stand for its modules, its weights and all functions that are not torch's: the graph
    can be planned, but does not run. If `model` is a captured graph itself, its functions are known too. Raises
    IRSyntaxError, with the node, if the graph does not fit the model, or if torch.fx cannot hold it.
    """
    try:
        return _to_fx(plain, model)
    except IRSyntaxError:
        raise
    except Exception as error:  # the graph is data from a file, and torch.fx has no errors of its own
        raise IRSyntaxError(f"torch.fx cannot hold this graph ({type(error).__name__}: {show(str(error))})") from error


def _to_fx(plain: PlainGraph, model: nn.Module | None) -> fx.GraphModule:
    """Return the graph as a GraphModule; raises any error of torch.fx."""
    graph, root = fx.Graph(), nn.Module()
    captured = model.graph.nodes if isinstance(model, fx.GraphModule) else ()
    functions = {name_function(n.target): n.target for n in captured if n.op == "call_function"}
    arguments_of = {node.name: node for node in captured}
    made: dict[PlainNode, fx.Node] = {}
    for node in plain.nodes:
        arguments = tuple(_to_fx_value(a, made) for a in node.args)
        options = {k: _to_fx_value(v, made) for k, v in node.kwargs.items()}
        if model is not None and any(isinstance(value, Opaque) for value in walk_values((node.args, node.kwargs))):
            arguments, options = _find_arguments(node, arguments_of.get(node.name), made)
        if node.op == "output":
            graph.output(*arguments)
            continue
        if node.op in ("call_module", "get_attr"):
            _attach(node, root, model)
        target = node.target
        if isinstance(target, FunctionName):
            target = functions.get(target.qualified) or _find_target(target, arguments)
        created = graph.create_node(node.op, target, arguments, options, name=node.name)
        if created.name != node.name:
            raise IRSyntaxError(f"torch.fx has no node called {node.name!r}: give it an unused name of Python")
        _note(created, node, alone=model is None)
        made[node] = created
    return fx.GraphModule(root if model is None else model, graph, class_name=plain.name)


def _find_arguments(
    node: PlainNode, captured: fx.Node | None, made: dict[PlainNode, fx.Node]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the node of the same name in the captured graph; raises IRSyntaxError if it reads others.

    The text cannot say every value, so it gives only the repr of some. The captured graph has the values themselves.
    """
    known = {created.name: created for created in made.values()}
    reads = [] if captured is None else [read.name for read in captured.all_input_nodes]
    if captured is None or reads != [read.name for read in node.all_input_nodes]:
        raise IRSyntaxError(
            f"node {node.name!r} has a value that the text cannot say, and the model has no node like it: read the IR "
            "without the model, or capture the model again"
        )
    arguments, options = fx.map_arg((captured.args, captured.kwargs), lambda read: known[read.name])
    return arguments, options


def _note(created: fx.Node, node: PlainNode, *, alone: bool) -> None:
    """Store the shape, the submodule and the comment of a node from a text; `alone`: it is read without a model."""
    if node.made:
        created.meta[SHAPE] = node.made
    if alone:
        created.meta[COMMENT] = node.comment
    # With a model the comment is made again from it, except for the user's line, which only the text has.
    line = re.search(r"@ (.+):(\d+)$", node.comment)
    if line is not None and not alone:
        created.meta["stack_trace"] = 'File "{}", line {}, in forward'.format(*line.groups())
    path = node.module or _guess_module(node.op, node.target)
    parts = path.split(".") if path else []
    paths = [".".join(parts[: i + 1]) for i in range(len(parts))]
    if paths:
        created.meta["nn_module_stack"] = {p: (p, nn.Module) for p in paths}


def _find_target(name: FunctionName, arguments: tuple[Any, ...]) -> Any:
    """Return a function of torch by its name, or a placeholder for another function."""
    # x.shape is a call of getattr; of other attributes more than the values of a tensor could be reached.
    if name.qualified == "builtins.getattr" and len(arguments) == 2 and arguments[1] in ATTRIBUTES:
        return getattr
    return find_function(name.qualified) or UnknownFunction(name.qualified, name.__name__)


class UnknownModule(nn.Module):
    """Stands for a module of a graph that was read without its model."""

    def forward(self, *values: Any, **options: Any) -> Any:
        """Raise NotImplementedError: the module has no weights and no code."""
        raise NotImplementedError("this graph was read from a file, without the model that its modules belong to")


def _attach(node: PlainNode, root: nn.Module, model: nn.Module | None) -> None:
    """Check that the model has the module or the weight of a node; without a model, put a placeholder into `root`."""
    path = str(node.target)
    if "\\" in path or not path.isprintable():
        raise IRSyntaxError(f"torch.fx has no module called {show(path)}: this graph can be planned, and does not run")
    if model is None:
        *owners, leaf = path.split(".")
        for part in owners:
            if part not in root._modules:
                root.add_module(part, nn.Module())
            root = root.get_submodule(part)
        if not hasattr(root, leaf):
            if node.op == "call_module":
                root.add_module(leaf, UnknownModule())
            else:
                root.register_buffer(leaf, torch.empty(0, device="meta"))
        return
    try:
        found = attrgetter(path)(model)
    except AttributeError as error:
        what = "submodule" if node.op == "call_module" else "weight or attribute"
        raise IRSyntaxError(f"node {node.name!r} needs {what} {path!r}, which this model lacks: {error}") from error
    said = node.comment.partition("@ ")[0].strip()
    if node.op == "call_module" and said and said != describe_module(found):
        raise IRSyntaxError(f"{path!r} is {describe_module(found)} in this model, and {said} in the text")
    shape = re.search(r"\[.*\]$", node.made)
    here = str([*found.shape]) if isinstance(found, torch.Tensor) else None
    if shape is not None and here is not None and shape[0] != here:
        raise IRSyntaxError(f"{path!r} has shape {here} in this model, and {shape[0]} in the text")


def _to_fx_value(value: Any, made: dict[PlainNode, fx.Node]) -> Any:
    """Return an argument of a plain graph with torch's own nodes, dtypes and devices in place of names."""
    if isinstance(value, PlainNode):
        return made[value]
    if isinstance(value, TorchName):
        found = getattr(torch, value.name, None)
        return found if isinstance(found, (torch.dtype, torch.layout, torch.memory_format)) else value
    if isinstance(value, DeviceName):
        try:
            return torch.device(value.name)
        except RuntimeError:
            return value  # a kind of device that this torch does not have
    return map_inside(value, lambda inner: _to_fx_value(inner, made))

"""The IR as text, for dumps: the steps taken, the graph, and a section for each fact in the order learnt.

# fxsplit ir: Net, train mode
# 1: profile

[graph]
%x = input x()
%layer = module layer(%x) : float32[4, 8]
return %layer

[Costs]
...
"""

from __future__ import annotations

from typing import Any

from torch import fx


def render(ir: Any) -> str:
    """Return the text of an IR; the IR itself calls this function when it is printed.

    Equal IRs give equal texts, except for measured figures.
    """
    sections = [f"# fxsplit ir: {ir.model or type(ir.gm).__name__}, {ir.mode} mode"]
    sections += [f"# {i}: {step.text}" for i, step in enumerate(ir.steps, 1)]
    sections.append("\n[graph]\n" + render_graph(ir.gm))
    # A dict keeps the order in which facts were learnt. `dumped` is for facts that print() shows only in part.
    sections += [f"\n[{kind.__name__}]\n{getattr(fact, 'dumped', fact)}" for kind, fact in ir.facts.items()]
    return "\n".join(sections) + "\n"


def render_graph(gm: fx.GraphModule, *, shapes: bool = True) -> str:
    """Return the text of a graph, one line for each node; `shapes` adds the shape of each result, if known."""
    return "\n".join(_render_node(node, shapes=shapes) for node in gm.graph.nodes)


def _render_node(node: fx.Node, *, shapes: bool) -> str:
    """Return the line of one node: `%name = kind target(arguments) : shape`, without the shape if it is unknown."""
    arguments = [_render_value(a) for a in node.args] + [f"{k}={_render_value(v)}" for k, v in node.kwargs.items()]
    # The output node of fx has a name that nothing refers to.
    if node.op == "output":
        return f"return {', '.join(arguments)}"
    target = node.target if isinstance(node.target, str) else _name_function(node.target)
    shape = node.meta.get("fxsplit_shape") if shapes else None
    # Plain words for readers who do not know torch.fx.
    kind = {"placeholder": "input", "get_attr": "attribute"}.get(node.op, node.op.removeprefix("call_"))
    return f"%{node.name} = {kind} {target}({', '.join(arguments)})" + (f" : {shape}" if shape else "")


def _name_function(target: object) -> str:
    """Return the qualified name of a function, or that of its type if it has none."""
    # Functions of `operator` give their module as `_operator`, where nobody would look for them.
    module = getattr(target, "__module__", None) or ""
    return f"{module.removeprefix('_')}.{getattr(target, '__qualname__', type(target).__name__)}"


def _render_value(value: object) -> str:
    """Return the text of an argument, with nodes as %name even inside tuples, lists, dicts and slices."""
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, (tuple, list)):
        inner = ", ".join(_render_value(v) for v in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_render_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, slice):
        return f"slice({_render_value(value.start)}, {_render_value(value.stop)}, {_render_value(value.step)})"
    return repr(value)

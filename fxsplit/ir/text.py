"""The IR as text: the graph, then a section for each fact, in the order learnt."""

from __future__ import annotations

from torch import fx

from fxsplit.ir.graph import IR


def render(ir: IR) -> str:
    """Return the text of an IR; deterministic but for measured figures."""
    sections = [f"# fxsplit ir: {type(ir.gm).__name__}"]
    sections += [f"# {i}: {step.text}" for i, step in enumerate(ir.steps, 1)]
    sections.append("\n[graph]\n" + "\n".join(_line(node) for node in ir.gm.graph.nodes))
    sections += [f"\n[{kind.__name__}]\n{fact}" for kind, fact in ir.facts.items()]
    return "\n".join(sections) + "\n"


def _line(node: fx.Node) -> str:
    """Return one node: `%name = op target(arguments) : shape`."""
    arguments = [_value(a) for a in node.args] + [f"{k}={_value(v)}" for k, v in node.kwargs.items()]
    if node.op == "output":
        return f"return {', '.join(arguments)}"
    target = node.target if isinstance(node.target, str) else _function(node.target)
    shape = node.meta.get("fxsplit_shape")
    kind = {"placeholder": "input", "get_attr": "attribute"}.get(node.op, node.op.removeprefix("call_"))
    return f"%{node.name} = {kind} {target}({', '.join(arguments)})" + (f" : {shape}" if shape else "")


def _function(target: object) -> str:
    """Return a function's qualified name."""
    module = getattr(target, "__module__", None) or ""
    return f"{module.removeprefix('_')}.{getattr(target, '__qualname__', type(target).__name__)}"


def _value(value: object) -> str:
    """Return an argument, with nodes as %name."""
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, (tuple, list)):
        inner = ", ".join(_value(v) for v in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, slice):
        return f"slice({_value(value.start)}, {_value(value.stop)}, {_value(value.step)})"
    return repr(value)

"""The graph of an IR as text, and as plain nodes that need no torch.

    graph Net {
      %x = input x() : float32[2, 8]
      %a = module a(%x) : float32[2, 16]  ; Linear(in_features=8, out_features=16, bias=True)
      %relu = function torch.relu(%a) in "block" : float32[2, 16]
      return %relu
    }

`in` names the innermost submodule of a node that is not a submodule itself, and `:` the dtype and shape of its result.
A PlainGraph has the part of torch.fx's interface that planning uses, so facts are verified on it as on a GraphModule.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from keyword import iskeyword
from typing import Any

from fxsplit.errors import suggest
from fxsplit.ir.text.tokens import Token, Tokens, describe
from fxsplit.ir.text.values import DEEPEST, read_name, read_value, write_name, write_value
from fxsplit.system.figures import show

KINDS = {
    "input": "placeholder",
    "attribute": "get_attr",
    "module": "call_module",
    "function": "call_function",
    "method": "call_method",
}
"""The kinds of nodes, and their names in torch.fx."""


UNKNOWN = "unknown"
"""Stands for the module of a function whose module is not known, as in `unknown.relu`."""


@dataclass(frozen=True)
class FunctionName:
    """A function by its qualified name, such as `torch.relu` or `torch.ops.aten.view.default`."""

    qualified: str

    @property
    def __name__(self) -> str:
        """The last part of the name; an operator of torch.ops has its overload too: `view.default`.

        A profile tells only this last part, so a name from a profile is `unknown.` and this part.
        """
        parts = self.qualified.split(".")
        if parts[0] == UNKNOWN:
            return ".".join(parts[1:])
        if len(parts) == 3 and parts[0] == "torch" and parts[1] in ("fft", "linalg", "special"):
            return "_".join(parts[1:])  # as torch.fft.rfft calls itself
        return ".".join(parts[-2:] if parts[:2] == ["torch", "ops"] else parts[-1:])


@dataclass(eq=False)
class PlainNode:
    """A node of a PlainGraph, with the field names of torch.fx.Node. `module` is the path of the innermost submodule.

    `made` is the dtype and shape of the result, as text. `comment` is the class and the settings of its module.
    """

    name: str
    op: str
    target: str | FunctionName
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    module: str = ""
    made: str = ""
    comment: str = ""

    @property
    def all_input_nodes(self) -> list[PlainNode]:
        """The nodes that this node reads, each once."""
        values = walk_values((self.args, self.kwargs))
        return list(dict.fromkeys(value for value in values if isinstance(value, PlainNode)))

    def __repr__(self) -> str:
        return self.name


def walk_values(value: Any) -> Iterator[Any]:
    """Yield the values inside an argument, at any depth of lists, tuples, dicts and slices."""
    if isinstance(value, (list, tuple)):
        for inner in value:
            yield from walk_values(inner)
    elif isinstance(value, dict):
        yield from walk_values(list(value.values()))
    elif isinstance(value, slice):
        yield from walk_values((value.start, value.stop, value.step))
    else:
        yield value


def map_inside(value: Any, convert: Callable[[Any], Any]) -> Any:
    """Return a slice, a list, a tuple or a dict with `convert` applied to its values; any other value as it is."""
    if isinstance(value, slice):
        return slice(*map(convert, (value.start, value.stop, value.step)))
    if isinstance(value, list):
        return [convert(v) for v in value]
    if isinstance(value, tuple):
        return tuple(map(convert, value))
    if isinstance(value, dict):
        return {k: convert(v) for k, v in value.items()}
    return value


@dataclass(eq=False)
class PlainGraph:
    """A graph without torch. `name` is the class name of its GraphModule."""

    name: str
    nodes: list[PlainNode] = field(default_factory=list)

    @property
    def graph(self) -> PlainGraph:
        """The graph itself. A GraphModule has an attribute `graph`, and a PlainGraph stands in for both."""
        return self

    def lint(self) -> None:
        """Do nothing: `read_graph` has already checked all that torch.fx's `lint` would check."""


def is_plain(gm: object) -> bool:
    """Return whether a graph is a PlainGraph, and not a graph of torch.fx."""
    return isinstance(gm, PlainGraph)


def write_graph(graph: PlainGraph, *, shapes: bool = True) -> str:
    """Return the text of a graph; `shapes` adds what is known about each result, and the comments."""
    lines = [f"  {_write_node(node, shapes=shapes)}" for node in graph.nodes]
    return "\n".join([f"graph {write_name(graph.name)[1:]} {{", *lines, "}"])


def _write_node(node: PlainNode, *, shapes: bool) -> str:
    """Return the line of a node."""

    def name_of(value: Any) -> str | None:
        return value.name if isinstance(value, PlainNode) else None

    if node.op == "output":
        return f"return {write_value(node.args[0], name_of)}"
    arguments = [write_value(a, name_of) for a in node.args]
    arguments += [f"{k}={write_value(v, name_of)}" for k, v in node.kwargs.items()]
    target = node.target if isinstance(node.target, str) else node.target.qualified
    kind = next(kind for kind, op in KINDS.items() if op == node.op)
    line = f"{write_name(node.name)} = {kind} {_write_target(target)}({', '.join(arguments)})"
    if not shapes:
        return line
    line += f" in {write_value(node.module)}" if node.module else ""
    line += f" : {node.made}" if node.made else ""
    return line + (f"  ; {node.comment}" if node.comment else "")


def _write_target(target: str) -> str:
    """Return the name of a module, a function, a method or an input; in quotes if it is not a plain word."""
    name = write_name(target)[1:]
    return name if target else '""'


def read_graph(tokens: Tokens) -> PlainGraph:
    """Return the graph at the next token, `graph NAME {`; raises IRSyntaxError."""
    tokens.expect("graph", "a graph")
    graph = PlainGraph(tokens.take_word("the name of a graph"))
    tokens.expect("{", "a graph")
    tokens.end_line("'{'")
    known: dict[str, PlainNode] = {}
    while not tokens.accept("}"):
        if tokens.next.kind in ("newline", "comment"):
            tokens.take()
            continue
        if graph.nodes and graph.nodes[-1].op == "output":
            tokens.fail("'return' is the last line of a graph: '}' must follow")
        node = _read_node(tokens, known)
        known[node.name] = node
        graph.nodes.append(node)
    if not graph.nodes or graph.nodes[-1].op != "output":
        tokens.fail("the graph does not return: write 'return %name' as its last line")
    return graph


def _read_node(tokens: Tokens, known: dict[str, PlainNode]) -> PlainNode:
    """Return the node in the next line. `known` are the nodes before it."""

    def find(name: str, token: Token) -> PlainNode:
        if name not in known:
            tokens.fail(f"no node {name!r} before this line{suggest(name, known)}", token)
        return known[name]

    token = tokens.next
    if tokens.accept("return"):
        result = read_value(tokens, find)
        tokens.end_line("a node")
        return PlainNode("output", "output", "output", (result,), {})
    if token.kind != "name":
        tokens.fail(f"a node or 'return' must begin this line, and not {describe(token)}")
    name = read_name(tokens, tokens.take())
    if name in known:
        tokens.fail(f"there are two nodes {name!r}: give each a name of its own", token)
    tokens.expect("=", "a node")
    kind = tokens.next
    if tokens.take_word("the kind of a node") not in KINDS:
        tokens.fail(f"{show(kind.text)} is no kind of node: give {', '.join(KINDS)}{suggest(kind.text, KINDS)}", kind)
    target: str | FunctionName = tokens.take_word("what the node calls")
    if kind.text == "function":
        target = FunctionName(str(target))
    _check_target(tokens, kind, str(target) if kind.text != "function" else "")
    arguments, options = _read_arguments(tokens, find)
    if kind.text == "method" and not arguments:
        tokens.fail("a method needs the value that it is called on as its first argument", kind)
    module = tokens.take_word("the submodule of a node") if tokens.accept("in") else ""
    made = _read_rest(tokens) if tokens.accept(":") else ""
    return PlainNode(name, KINDS[kind.text], target, arguments, options, module, made, tokens.end_line("a node"))


def _check_target(tokens: Tokens, kind: Token, target: str) -> None:
    """Raise IRSyntaxError unless the target of a node is a name: torch.fx writes it into code that then runs."""
    parts = target.split(".")
    if kind.text in ("module", "attribute"):
        # A module in a dict has any name. torch.fx writes it between double quotes, if it is no name of Python.
        if len(parts) > DEEPEST or not all(map(_PART.fullmatch, parts)):
            tokens.fail(f"{show(target)} is no path of a module or weight, such as encoder.layers.0", kind)
    elif kind.text in ("input", "method") and (not _is_name(target) or (kind.text == "method" and target[0] == "_")):
        tokens.fail(
            f"{show(target)} is no name of an {'input' if kind.text == 'input' else 'operation of tensors'}", kind
        )


_PART = re.compile(r'[^"]+')


def _is_name(text: str) -> bool:
    """Return whether a text is an ASCII identifier of Python and not a keyword."""
    return text.isidentifier() and text.isascii() and not iskeyword(text)


def _read_arguments(tokens: Tokens, find: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments between round brackets: those without a name, and those with a name."""
    tokens.expect("(", "a node")
    arguments: list[Any] = []
    options: dict[str, Any] = {}
    while not tokens.accept(")"):
        token = tokens.next
        value = read_value(tokens, find)
        if tokens.accept("="):
            # The name of an argument may be a word that is a value elsewhere, as in nan_to_num(x, nan=0.0).
            if token.kind != "word" or not _is_name(token.text) or token.text in options:
                tokens.fail(f"{describe(token)} is no name of an argument, or appears twice", token)
            options[token.text] = read_value(tokens, find)
        elif options:
            tokens.fail("an argument without a name comes after one with a name", token)
        else:
            if token.kind == "word" and isinstance(value, str):
                tokens.fail(f"{value!r} is no value: put a text in quotes", token)
            arguments.append(value)
        if not tokens.accept(",") and tokens.next.text != ")":
            tokens.fail(f"a comma or ')' is missing before {describe(tokens.next)}")
    return tuple(arguments), options


def _read_rest(tokens: Tokens) -> str:
    """Return the text up to the comment or the end of the line: the dtype and shape of a result."""
    begin = end = tokens.next.begin
    while tokens.next.kind not in ("comment", "newline", "end"):
        end = tokens.take().end
    return tokens.text[begin:end]

"""Write an IR as text that reads back: its header, the graph, and a section for each fact in the order learnt.

    fxsplit-ir 1
    model Net
    mode train
    step "profile"

    graph Net {
      %x = input x() : float32[4, 8]
      %layer = module layer(%x) : float32[4, 8]  ; Linear(in_features=8, out_features=8, bias=True)
      return %layer
    }

    fact Machine {
      ...
    }

    ; fact Antichains of Costs, Machine
    ; 2 states of 1 block: every ideal

A fact that follows from other facts, or from the model, is a comment. Its first line names these facts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fxsplit.ir.text.graph import PlainGraph, write_graph
from fxsplit.ir.text.records import write_record
from fxsplit.ir.text.values import write_word

if TYPE_CHECKING:  # planning from a file needs no torch
    from torch import fx

VERSION = 1
"""The version of the format. fxsplit refuses to read any other version."""


def render(ir: Any) -> str:
    """Return the text of an IR, which `read_ir` can read back. An IR calls this function when it is printed.

    Equal IRs give equal texts, except for measured figures.
    """
    # The class IR imports this file to print itself, so this file does not import that class.
    lines = [f"fxsplit-ir {VERSION}"]
    lines += [f"model {write_word(ir.model)}"] if ir.model else []
    lines += [f"mode {ir.mode}", *(f"step {write_word(step.text)}" for step in ir.steps)]
    sections = ["\n".join(lines), write_graph(find_plain(ir.gm))]
    # A dict keeps the order in which facts were learnt.
    sections += [_write_fact(kind, fact, ir) for kind, fact in ir.facts.items()]
    return "\n\n".join(sections) + "\n"


def find_plain(gm: fx.GraphModule | PlainGraph) -> PlainGraph:
    """Return a graph as a PlainGraph, without torch."""
    if isinstance(gm, PlainGraph):
        return gm
    from fxsplit.ir.text.fx_graph import to_plain

    return to_plain(gm)


def render_graph(gm: fx.GraphModule, *, shapes: bool = True) -> str:
    """Return the text of a graph, one line for each node; `shapes` adds the shape of each result and the comments."""
    return write_graph(find_plain(gm), shapes=shapes)


def _write_fact(kind: type, fact: Any, ir: Any) -> str:
    """Return the section of a fact: its record, or comments for a fact that is not stored."""
    if hasattr(fact, "to_record"):
        return write_record(fact.to_record(ir))
    if hasattr(fact, "to_comment"):
        head, lines = fact.to_comment()
    else:
        sources = ", ".join(source.__name__ for source in getattr(kind, "derives_from", ())) or "the graph"
        head = kind.__name__ if fact.given else f"{kind.__name__} of {sources}"
        # `dumped` is for facts that print() shows only in part.
        lines = str(getattr(fact, "dumped", fact)).split("\n")
    return "\n".join([f"; fact {head}", *(f"; {line}".rstrip() for line in lines)])

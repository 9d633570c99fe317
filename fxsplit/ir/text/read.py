"""Read an IR from its text. The text is only data: reading imports and evaluates nothing of it.

A graph that was read can be planned without its model, its weights and torch. With the model it runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, cast

from fxsplit.errors import FxsplitError, IRSyntaxError, suggest
from fxsplit.ir.chain import parse_chain
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.given.pins import Pins
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.graph import IR, Fact, Mode, Step, Unread
from fxsplit.ir.text.graph import PlainGraph, read_graph
from fxsplit.ir.text.records import Record, Source, read_record
from fxsplit.ir.text.tokens import Token, Tokens, describe
from fxsplit.ir.text.write import VERSION
from fxsplit.system.figures import show

if TYPE_CHECKING:
    from torch import nn

_FACT = re.compile(r"; fact (?P<kind>[\w.]+)(?: of (?P<sources>.*))?")
HEADERS = ("model", "mode", "step")
STORED: dict[str, Any] = {kind.__name__: kind for kind in (Machine, Workload, Pins, Costs, Plan)}
"""The facts that a text stores. All others follow from these and from the model, so the text has them as comments."""
MAKES_AGAIN = {"Antichains": "augment", "States": "order"}
"""Facts that follow only from the stored facts, without the model -> the passes that make them again."""


@dataclass(frozen=True)
class IRReader:
    """Reads IRs from text.

    - `passes`: fxsplit's own passes by name, which make the facts again that a text does not store
    - `source`: what the stored facts need from elsewhere (see Source)
    """

    passes: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    source: Source = field(default_factory=Source)

    def read(self, text: str, file: str, model: nn.Module | None = None) -> IR:
        """Return the IR in `text`; `file` is its name, for messages.

        The graph is one of torch.fx if `source.torch` is True or `model` is given; it calls the submodules of `model`.
        Raises IRSyntaxError, with line and column, for a text that is no IR.
        """
        tokens = Tokens(text, file)
        _read_version(tokens)
        ir = self._read_header(tokens)
        while tokens.next.kind != "end":
            token = tokens.next
            if token.kind == "newline":
                tokens.take()
            elif token.kind == "comment":
                ir = self._read_comments(tokens, ir)
            elif token.text == "fact" and token.kind == "word":
                ir = self._read_fact(tokens, ir)
            else:
                tokens.fail(f"'fact' or a comment must begin this line, and not {describe(token)}")
        if not (self.source.torch or model is not None):
            return ir
        from fxsplit.ir.text.fx_graph import to_fx

        try:
            return replace(ir, gm=to_fx(cast(PlainGraph, ir.gm), model))
        except IRSyntaxError as error:
            raise IRSyntaxError(f"{file}: {error}") from error

    def _read_header(self, tokens: Tokens) -> IR:
        """Return an IR with the header and the graph of a text, but without facts."""
        model, mode, steps = "", "train", []
        while tokens.next.text != "graph":
            token = tokens.next
            if token.kind in ("newline", "comment"):
                tokens.take()
                continue
            word = tokens.take_word("a header")
            if word not in HEADERS:
                tokens.fail(
                    f"{show(word)} is no header: give {', '.join(HEADERS)}, or the graph{suggest(word, HEADERS)}", token
                )
            value = tokens.take_word(word)
            tokens.end_line("a header")
            if word == "step":
                steps.append(Step(value, 0.0))
            elif word == "model":
                model = value
            elif value not in ("train", "eval"):
                tokens.fail(f"the mode is {show(value)}: give train or eval", token)
            else:
                mode = value
        graph = read_graph(tokens)
        return IR(cast(Any, graph), steps=tuple(steps), model=model, mode=cast(Mode, mode))

    def _read_fact(self, tokens: Tokens, ir: IR) -> IR:
        """Return `ir` with the fact at the next token added; raises IRSyntaxError if the fact does not hold."""
        record = read_record(tokens)
        if any(kind.__name__ == record.kind for kind in ir.facts):
            record.fail("it appears twice")
        fact = _find_class(record).from_record(replace(record, source=self.source), ir)
        check_fact(fact, record, ir)
        return ir.learn(fact)

    def _read_comments(self, tokens: Tokens, ir: IR) -> IR:
        """Return `ir` with the fact that the next comment lines describe; `ir` itself if they describe none.

        Such a fact is not stored. An Unread takes its place and keeps the text, and the pass that can make it again.
        """
        lines: list[str] = []
        while tokens.next.kind == "comment":
            lines.append(tokens.take().text)
            tokens.end_line("a comment")
        found = _FACT.fullmatch(lines[0])
        if found is None:
            return ir
        kind, sources = found["kind"], tuple(filter(None, (found["sources"] or "").split(", ")))
        made = MAKES_AGAIN.get(kind)
        step = self._find_step(ir, made) if made is not None else None
        rest = tuple(line.removeprefix(";").removeprefix(" ") for line in lines[1:])
        # A class of its own, as facts are found by class.
        unread = type(kind, (Unread,), {"made_by": made or Unread.made_by})(
            kind, rest, sources, found["sources"] is None, step
        )
        return ir.learn(unread)

    def _find_step(self, ir: IR, name: str) -> Any:
        """Return the last pass called `name` of the steps of an IR.

        None if it is missing or its options are outdated.
        """
        text = next((step.text for step in reversed(ir.steps) if step.name == name), None)
        try:
            return None if text is None or name not in self.passes else parse_chain(text, self.passes, imports=False)[0]
        except FxsplitError:
            return None  # the pass had an option that it no longer has: it must be asked for by hand


def check_fact(fact: Fact, record: Record, ir: IR) -> None:
    """Raise IRSyntaxError unless a fact from a text holds.

    The fact's own check may be a user's code and raise any error.
    """
    try:
        fact.verify(ir)
    except FxsplitError as error:
        record.fail(str(error))
    except Exception as error:
        record.fail(f"it does not hold ({type(error).__name__}: {error})")


def _find_class(record: Record) -> Any:
    """Return the class of a stored fact; raises IRSyntaxError for an unknown kind of fact.

    Another package can store a fact too. The class of the fact needs `to_record(ir)` and a class method
    `from_record(record, ir)`, and the package must name the class in the group `fxsplit.facts` of its entry points.
    """
    if record.kind in STORED:
        return STORED[record.kind]
    # An entry point may have another name than its class, and a text has the name of the class.
    others = {point.value.rpartition(":")[2]: point for point in entry_points(group="fxsplit.facts")}
    if record.kind not in others:
        known = [*STORED, *others]
        record.fail(
            f"it is none of {', '.join(known)}; a fact of another package needs that package, which names it as an "
            f"entry point of the group fxsplit.facts{suggest(record.kind, known)}"
        )
    try:
        return others[record.kind].load()
    except Exception as error:
        return record.fail(f"it cannot be imported ({type(error).__name__}: {error})")


def _read_version(tokens: Tokens) -> None:
    """Go past the first line.

    Raises IRSyntaxError for a file that is no IR or has a version that fxsplit cannot read.
    """
    while tokens.next.kind in ("newline", "comment"):
        tokens.take()
    first = tokens.next
    if first.text != "fxsplit-ir":
        tokens.fail("this is no IR: its first line must be 'fxsplit-ir 1'", first)
    tokens.take()
    _check_version(tokens, tokens.next)
    tokens.take()
    tokens.end_line("the version")


def _check_version(tokens: Tokens, token: Token) -> None:
    """Raise IRSyntaxError for a version of the format that this fxsplit cannot read."""
    if token.text != str(VERSION):
        tokens.fail(f"the text has version {describe(token)}, and this fxsplit reads version {VERSION}", token)

"""An IR from any file that can be planned: the text of an IR, or a profile, whose nodes then make a graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from fxsplit.api.plan import build_machine, lay_out
from fxsplit.api.toolkit.parse_ir import parse_ir
from fxsplit.errors import InputError, suggest
from fxsplit.formats.profiles.foreign import ProfileFile
from fxsplit.formats.read import parse_profile
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.graph import IR
from fxsplit.ir.text.graph import KINDS, UNKNOWN, FunctionName, PlainGraph, PlainNode, is_plain
from fxsplit.ir.text.read import check_fact
from fxsplit.ir.text.records import Source
from fxsplit.ir.text.tokens import Tokens
from fxsplit.ir.text.values import read_value
from fxsplit.schedule.generators.catalogue import find_moments
from fxsplit.system.figures import show


def read_planned(text: str, name: str, *, torch: bool = False) -> IR:
    """Return the IR in the text of a file: an IR, or a profile in a known format with the machine that it states.

    With `torch` the graph of an IR is one of torch.fx. Raises IRSyntaxError or ProfileError, by the kind of the file.
    """
    first = next((line for line in text.split("\n") if line.strip() and not line.startswith(";")), "")
    if first.startswith("fxsplit-ir"):
        return parse_ir(text, name, torch=torch)
    profile = _name_operators(parse_profile(text, name))
    ir = IR(
        cast(Any, make_graph(profile.costs)), model=profile.format, mode="eval" if profile.costs.inference else "train"
    )
    return ir.learn(*lay_out(build_machine(profile, None, None)), profile.costs)


def _name_operators(profile: ProfileFile) -> ProfileFile:
    """Return a profile in which each node's `op` begins with a kind of torch.fx; other tools name only operators."""
    nodes = tuple(
        node if node.op.partition(":")[0] in KINDS.values() else replace(node, op=f"call_function:{node.op or 'node'}")
        for node in profile.costs.nodes
    )
    return replace(profile, costs=replace(profile.costs, nodes=nodes))


def make_graph(costs: Costs) -> PlainGraph:
    """Return a graph of the nodes of a profile: it can be planned, and computes nothing."""
    graph = PlainGraph("Profile")
    made: dict[str, PlainNode] = {}
    for number, given in enumerate(costs.inputs):
        made[given.name] = PlainNode(given.name, "placeholder", f"input_{number}", (), {}, made=given.made)
    for node in costs.nodes:
        kind, _, target = node.op.partition(":")
        # The profile tells only the last part of a function's name.
        called = FunctionName(f"{UNKNOWN}.{target}") if kind == "call_function" else target
        inputs = tuple(made[name] for name in node.inputs)
        made[node.name] = PlainNode(node.name, kind, called, inputs, {}, made=node.made)
    graph.nodes = [*made.values()]
    graph.nodes.append(PlainNode("output", "output", "output", (tuple(made[name] for name in costs.outputs),), {}))
    return graph


def place_on(ir: IR, machine: Machine, schedule: str | None = None, n_microbatches: int | None = None) -> IR:
    """Return `ir` for another machine, schedule or number of microbatches, without the facts that follow from these.

    By default the schedule and the number of microbatches stay as they are. Raises ScheduleError for numbers that the
    schedule is not made for.
    """
    workload = ir.get(Workload)
    known = None if workload is None else workload.n_microbatches
    name = schedule or ("1F1B" if workload is None else workload.schedule)
    count = known if n_microbatches is None else n_microbatches
    laid_out, made = lay_out(machine, name, count)
    # Facts that follow from the machine still hold if it is the same.
    laid_out = laid_out if laid_out != ir.get(Machine) else ir[Machine]
    if workload is not None:
        made = replace(made, recompute=workload.recompute, may_idle=workload.may_idle)
    return ir.learn(laid_out, made)


def set_field(ir: IR, text: str) -> IR:
    """Return `ir` with a field of a fact changed, such as `Workload.n_microbatches=8`.

    Raises InputError for a fact that is not there, and IRSyntaxError for a field or value that it does not take.
    """
    place, _, value = text.partition("=")
    kind, _, name = place.partition(".")
    fact: Any = next((fact for known, fact in ir.facts.items() if known.__name__ == kind), None)
    if fact is None or not hasattr(fact, "to_record") or not value:
        known = [kind.__name__ for kind, fact in ir.facts.items() if hasattr(fact, "to_record")]
        hint = "" if kind in known else suggest(kind, known)
        raise InputError(f"--set {show(text)}: give FACT.FIELD=VALUE with a fact among {', '.join(known)}{hint}")
    tokens = Tokens(value, f"--set {place}")
    first = tokens.next
    read = read_value(tokens)
    tokens.end_line("a value")
    if isinstance(fact, Workload) and name in ("schedule", "n_microbatches"):
        return _lay_out_again(ir, name, read)
    # As if it had been written into the text, so that the same checks hold.
    record = replace(fact.to_record(ir), tokens=tokens, at={"": first})
    record.values[name] = read
    record.source = Source(not is_plain(ir.gm), find_moments)
    made = type(fact).from_record(record, ir)
    changed = ir.learn(made)
    workload = changed.get(Workload)
    if isinstance(made, Machine) and workload is not None:
        changed = ir.learn(made, replace(workload, moments=find_moments(workload, made)))
    check_fact(changed[type(fact)], record, changed)
    return changed


def _lay_out_again(ir: IR, name: str, value: Any) -> IR:
    """Return `ir` for another schedule or number of microbatches, on the machine that it was laid out for."""
    if name == "n_microbatches" and type(value) is not int:
        raise InputError(f"--set Workload.n_microbatches={show(value)}: give a whole number")
    return place_on(ir, ir[Machine].rolled(), **{name: value})

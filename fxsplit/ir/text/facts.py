"""The facts that are stored in text, as records and back: Machine, Workload, Pins, Costs and Plan.

All other facts follow from these and from the model, and stand in the text as comments. A fact of another package is
stored if it has `to_record()`, which returns its values by name, and a class method `from_record(values, ir)`, and if
its package names the class in the group `fxsplit.facts` of its entry points.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from fxsplit.errors import FxsplitError, suggest
from fxsplit.ir.facts.costs.costs import Costs, Exchange, InputCost, NodeCost, TiedParameter
from fxsplit.ir.facts.costs.loss import LossCost
from fxsplit.ir.facts.given.machine import Device, DeviceName, Machine
from fxsplit.ir.facts.given.pins import Pins
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.price import COST_MODELS, CostModel, StagePlan, price_split
from fxsplit.ir.text.records import Record, Row, list_values
from fxsplit.system.figures import format_bytes

if TYPE_CHECKING:
    from fxsplit.ir.facts.memory.moments import MomentsBy
    from fxsplit.ir.graph import IR, Fact

FindMoments = Callable[[Workload, Machine], "MomentsBy | None"]
"""Returns the moments of a workload's schedule on a machine; None if the schedule is not known."""


@dataclass(frozen=True)
class Reader:
    """What reading a fact may need from other rooms.

    - `find_moments`: the memory that the stages of a schedule hold follows from its name, and is not stored
    - `torch`: devices become torch's own; otherwise only their names are kept, and torch is not loaded
    """

    find_moments: FindMoments = lambda workload, machine: None
    torch: bool = False


def to_record(fact: Fact, ir: IR) -> Record | None:
    """Return a fact as a record; None for a fact that is not stored."""
    kind = type(fact).__name__
    writer = _WRITERS.get(type(fact))
    if writer is not None:
        return writer(fact, ir)
    make = getattr(fact, "to_record", None)
    return Record(kind, dict(make())) if callable(make) and kind in list_other_facts() else None


def from_record(record: Record, ir: IR, reader: Reader) -> Fact:
    """Return the fact of a record; `ir` has the facts before it. Raises IRSyntaxError for a wrong record."""
    if record.kind in _READERS:
        return _READERS[record.kind](record, ir, reader)
    others = list_other_facts()
    if record.kind not in others:
        known = [*_READERS, *others]
        record.fail(f"it is none of {', '.join(known)}{suggest(record.kind, known)}; others stand as comments")
    try:
        made: Fact = others[record.kind].load().from_record(record.values, ir)
    except Exception as error:
        record.fail(f"{type(error).__name__}: {error}")
    return made


def list_other_facts() -> Mapping[str, Any]:
    """Return the entry points of the facts of other packages, by the names of their classes."""
    return {point.name: point for point in entry_points(group="fxsplit.facts")}


def _write_machine(machine: Machine, ir: IR) -> Record:
    """Return a machine as a record."""
    values: Row = {"devices": [_write_device(d) for d in machine.devices], "links": machine.links}
    values |= list_values(machine, leave_out=("devices", "links", "real"))
    return Record("Machine", values | ({"real": [_write_device(d) for d in machine.real]} if machine.real else {}))


def _write_device(device: Device) -> Row:
    """Return a device as a row."""
    row = list_values(device)
    return row | ({"torch_device": str(device.torch_device)} if device.torch_device is not None else {})


def _read_machine(record: Record, ir: IR, reader: Reader) -> Machine:
    """Return the machine of a record."""
    devices = {name: tuple(_read_device(record, row, name, reader) for row in record.take_rows(name)) for name in _MADE}
    return record.make(Machine, devices=devices["devices"], real=devices["real"])


_MADE = ("devices", "real")


def _read_device(record: Record, row: Row, name: str, reader: Reader) -> Device:
    """Return the device of a row; without torch it keeps only the name of its torch device."""
    place = row.get("torch_device")
    if place is not None and not isinstance(place, str):
        record.fail("torch_device must be a name, such as cuda:0", name)
    return record.make_row(
        Device, row | {"torch_device": place if reader.torch or not place else DeviceName(place)}, name
    )


def _write_workload(workload: Workload, ir: IR) -> Record:
    """Return a workload as a record, without the moments, which follow from the schedule."""
    values = list_values(workload, leave_out=("moments",))
    return Record("Workload", {k: dict(v) if isinstance(v, Mapping) else v for k, v in values.items()})


def _read_workload(record: Record, ir: IR, reader: Reader) -> Workload:
    """Return the workload of a record."""
    workload = record.make(Workload)
    machine = ir.get(Machine)
    return workload if machine is None else replace(workload, moments=reader.find_moments(workload, machine))


def _write_pins(pins: Pins, ir: IR) -> Record:
    """Return pins as a record."""
    values: Row = {"stages": dict(pins.stages)}
    return Record("Pins", values | ({"optional": tuple(sorted(pins.optional))} if pins.optional else {}))


def _read_pins(record: Record, ir: IR, reader: Reader) -> Pins:
    """Return the pins of a record."""
    optional = record.values.get("optional", ())
    if not isinstance(optional, tuple):
        record.fail("optional must be names in round brackets", "optional")
    return record.make(Pins, optional=frozenset(optional))


_LAST = ("made", "op", "signature", "nodes")
"""The last columns of a table."""
_TABLES: dict[str, Any] = {"nodes": NodeCost, "inputs": InputCost, "exchanges": Exchange, "tied": TiedParameter}


def _write_costs(costs: Costs, ir: IR) -> Record:
    """Return costs as a record: a table of the nodes, and the other fields."""
    values = list_values(costs)
    columns: Row = {name: [list_values(row) for row in getattr(costs, name)] for name in _TABLES if name in values}
    columns = {name: _order_columns(cls, columns[name]) for name, cls in _TABLES.items() if name in columns}
    loss = {"loss": [list_values(costs.loss)]} if costs.loss else {}
    return Record("Costs", values | columns | loss)


def _order_columns(cls: Any, rows: list[Row]) -> list[Row]:
    """Return rows in which the values stand in the order of the fields, those that all rows lack left out.

    Long texts come last, or a reader would have to look for the figures after them.
    """
    used = [f.name for f in fields(cls) if any(f.name in row for row in rows)]
    used.sort(key=lambda name: _LAST.index(name) if name in _LAST else -1)
    return [{name: row[name] if name in row else _default(cls, name) for name in used} for row in rows]


def _default(cls: Any, name: str) -> Any:
    """Return the default of a field."""
    return next(f.default for f in fields(cls) if f.name == name)


def _read_costs(record: Record, ir: IR, reader: Reader) -> Costs:
    """Return the costs of a record."""
    tables = {name: record.read_rows(cls, name) for name, cls in _TABLES.items()}
    loss = record.read_rows(LossCost, "loss")
    costs = record.make(Costs, **tables, loss=loss[0] if loss else None)
    try:
        costs.check()
    except (FxsplitError, TypeError) as error:
        record.fail(str(error))
    return costs


def _write_plan(plan: Plan, ir: IR) -> Record:
    """Return a plan as a record: only devices, recompute and nodes of its stages if the costs are there to price them.

    Comments say what follows from that: the figures of each stage, the values that cross each cut, and the bottleneck.
    """
    values: Row = list_values(plan.model)
    values = {"model": plan.model.name} | {k: v for k, v in values.items() if k != "name"}
    values |= {"lower_bound_ms": plan.lower_bound_ms, "n_states": plan.n_states, "proof": plan.proof}
    priced = all(ir.get(kind) is not None for kind in (Costs, Machine, Workload))
    if priced:
        stages = [{"devices": s.devices, "recompute": s.recompute, "nodes": s.nodes} for s in plan.stages]
    else:
        own = list_values(plan, leave_out=("stages", "model", *values))
        values |= own
        stages = _order_columns(StagePlan, [list_values(s) for s in plan.stages])
    return Record("Plan", values | {"stages": stages}, [*str(plan).splitlines(), *_describe_cuts(plan, ir)])


def _describe_cuts(plan: Plan, ir: IR) -> list[str]:
    """Return a line for each stage, with its memory and limit, and one for each cut, with the values that cross it."""
    machine, costs = ir.get(Machine), ir.get(Costs)
    model = plan.model
    traffic = "" if model.traffic else ", transfers unpriced"
    lines = [
        f"cost model {model.name}{traffic}, {model.optimizer_factor:g} B of optimizer state for each of parameters"
    ]
    inside: set[str] = set()
    for number, stage in enumerate(plan.stages):
        limit = "" if machine is None else f" of {_limit(machine, stage)}"
        again = ", recomputes" if stage.recompute else ""
        lines.append(
            f"stage {number}: load {stage.load_ms:.3f} ms, memory {format_bytes(stage.memory_bytes)}{limit}{again}"
        )
        inside |= set(stage.nodes)
        if costs is None or number + 1 == len(plan.stages):
            continue
        crossing = [
            f"%{name} {format_bytes(there)}" + (f" + {format_bytes(back)} back" if back else "")
            for name, there, back, readers, returned in costs.values
            if (name in inside or name not in costs.by_name) and (returned or any(r not in inside for r in readers))
        ]
        lines.append(f"cut {number}|{number + 1}: {', '.join(crossing) or 'nothing'}")
    return lines


def _limit(machine: Machine, stage: StagePlan) -> str:
    """Return the memory that a stage may use, for people."""
    least = min(machine.devices[d].memory_bytes for d in stage.devices)
    return "unlimited" if least == float("inf") else format_bytes(least)


def _read_plan(record: Record, ir: IR, reader: Reader) -> Plan:
    """Return the plan of a record, priced by the costs before it if it has no figures of its own."""
    values, rows = dict(record.values), record.take_rows("stages")
    given = {f.name: values.pop(f.name) for f in fields(CostModel) if f.name in values}
    model = record.make_row(CostModel, given | {"name": values.pop("model", "forwarded")}, "model")
    if model.name not in COST_MODELS:
        record.fail(f"model is {model.name!r}, and not one of {', '.join(COST_MODELS)}", "model")
    proof = values.pop("proof", None)
    if proof not in ("search", "bound", None):
        record.fail(f"proof is {proof!r}, and neither search nor bound nor none", "proof")
    if not rows:
        record.fail("there are no stages: give a table with devices and nodes", "stages")
    values.pop("stages")
    costs, machine, workload = ir.get(Costs), ir.get(Machine), ir.get(Workload)
    if "load_ms" in rows[0] or costs is None or machine is None or workload is None:
        stages = tuple(record.make_row(StagePlan, row, "stages") for row in rows)
        made = record.make_row(Plan, values | {"stages": stages, "model": model}, "")
        return made.prove(proof)
    bounds = {"lower_bound_ms": values.pop("lower_bound_ms", 0.0), "n_states": values.pop("n_states", 0)}
    splits = [record.make_row(_Split, row, "stages") for row in rows]
    try:
        stages = price_split(costs, machine, workload, [(s.nodes, s.devices, s.recompute) for s in splits], model)
        plan = Plan.of(tuple(stages), costs, machine, workload, model, **bounds)
        return replace(plan, **values).prove(proof)
    except (FxsplitError, TypeError, ValueError, KeyError, IndexError) as error:
        return record.fail(f"the stages cannot be priced ({type(error).__name__}: {error})", "stages")


@dataclass(frozen=True)
class _Split:
    """A stage as a plan without figures states it."""

    devices: tuple[int, ...]
    nodes: tuple[str, ...]
    recompute: bool = False


_WRITERS: dict[type, Callable[[Any, IR], Record]] = {
    Machine: _write_machine,
    Workload: _write_workload,
    Pins: _write_pins,
    Costs: _write_costs,
    Plan: _write_plan,
}
_READERS: dict[str, Callable[[Record, Any, Reader], Any]] = {
    "Machine": _read_machine,
    "Workload": _read_workload,
    "Pins": _read_pins,
    "Costs": _read_costs,
    "Plan": _read_plan,
}

"""Plans as JSON: the output of `fxsplit plan --json` and the input of `fxsplit simulate --plan`.

{"format": "fxsplit-plan", "version": 1, "objective": 9.02, "lower_bound": 9.02, "gap": 0.0, "optimal": true,
 "stages": [{"nodes": ["n0"], "devices": ["device0"], "load": 3.0, "forward_ms": 1.0, ...}, ...], ...}
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict, fields, replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

from fxsplit.errors import InputError, PlanError
from fxsplit.ir.facts.compared import ComparedCount, ComparedSchedule
from fxsplit.ir.facts.costs.compress import HOW
from fxsplit.ir.facts.costs.estimated import Estimated
from fxsplit.ir.facts.given.machine import TRANSFER_KINDS, Device, Machine, TransferKind
from fxsplit.ir.facts.memory.microbatch import MicrobatchMemory
from fxsplit.ir.facts.memory.stage import spread_activations
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.price import COST_MODELS, CostModel, StagePlan
from fxsplit.system.figures import AMOUNT, as_list, is_amount, is_count, replace_infinite, show
from fxsplit.system.files import explain_unreadable, write_whole

FORMAT, VERSION = "fxsplit-plan", 1
"""The format of a file, and its version. Files from before version 1 state neither, and are read too."""

# All numbers of a stage: a new figure of StagePlan is written and read without a change here.
_FIGURES = [f.name for f in fields(StagePlan) if f.name.endswith(("_ms", "_bytes"))]

# Figures that files of earlier versions lack.
_LATER = [
    "forward_launch_ms",
    "backward_launch_ms",
    "working_bytes",
    "optimizer_bytes",
    "buffer_bytes",
    "in_latency_ms",
]
_LATER += ["versions_bytes", "boundaries_bytes", "activations_bytes", "step_bytes"]
_HELD = [f.name for f in fields(MicrobatchMemory)]
_SENT = {"in_sent_bytes": "in_bytes", "in_sent_gradient_bytes": "in_gradient_bytes"}
"""If a file does not state the sent bytes: values are sent uncompressed."""


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Return a plan as a JSON object: objective, bound and stages first.

    The objective is the load of the slowest stage, in ms for a microbatch, whichever figure was `minimised`. Its lower
    bound and its gap are null if that was the step. `step_ms` is null if nobody has simulated the plan.
    """
    bounded, step_gap = plan.minimised == "bottleneck", plan.step_gap
    return {
        "format": FORMAT,
        "version": VERSION,
        "objective": plan.bottleneck_ms,
        "lower_bound": plan.lower_bound_ms if bounded else None,
        # JSON has no infinity, the gap of a plan without a bound.
        "gap": plan.gap if bounded and isfinite(plan.gap) else None,
        "optimal": plan.optimal,
        "minimised": plan.minimised,
        "bottleneck_ms": plan.bottleneck_ms,
        "step_ms": plan.step_ms,
        "step_lower_bound_ms": plan.step_lower_bound_ms,
        "step_gap": step_gap if step_gap is not None and isfinite(step_gap) else None,
        "proof": plan.proof,
        "cost_model": plan.model.name,
        "stages": [
            {
                "nodes": list(s.nodes),
                "begins_at": s.begins_at,
                "ends_at": s.ends_at,
                "devices": [plan.device_names[d] for d in s.devices],
                "load": s.load_ms,
                "recompute": s.recompute,
                **{name: value for name, value in asdict(s).items() if name in _FIGURES},
            }
            for s in plan.stages
        ],
        "ideals": plan.n_states,
        "device_names": list(plan.device_names),
        "traffic": plan.model.traffic,
        "optimizer_factor": plan.model.optimizer_factor,
        "single": plan.single_ms,
        "schedule": plan.schedule,
        "n_microbatches": plan.n_microbatches,
        "rows": plan.rows,
        "fixed_rows": list(plan.fixed_rows),
        "spread": plan.spread,
        "measured_on": plan.measured_on,
        "estimated": None if plan.estimated is None else plan.estimated.to_json(),
        "compress": plan.compress or None,
        "shared": plan.shared_ms,
        "busiest": plan.busiest_ms,
        "transfers": plan.transfers,
        "schedule_csv": plan.schedule_csv or None,
        "compared": [asdict(choice) for choice in plan.compared],
        "compared_counts": [replace_infinite(asdict(count)) for count in plan.compared_counts],
        "interpolated_between": list(plan.interpolated_between) or None,
    }


def describe_plan(plan: Plan) -> dict[str, Any]:
    """Return a plan as a JSON object for files, with the machine that it was made for, if that is known."""
    return plan_to_dict(plan) | ({} if plan.machine is None else {"machine": _describe_machine(plan.machine)})


def _describe_machine(machine: Machine) -> dict[str, Any]:
    """Return the real devices and links of a machine, and the devices of each stage if it is unrolled.

    JSON has no infinity: an unlimited amount is null.
    """
    real = machine.rolled()
    figures = ("name", "memory_bytes", "speed", "bytes_per_s", "host")
    devices = [{name: getattr(device, name) for name in figures} for device in real.devices]
    found = {"devices": devices, "links": list(real.links), "latencies_ms": list(real.latencies_ms)}
    return {**replace_infinite(found), "transfers": real.transfers, "homes": [list(home) for home in machine.homes]}


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan as JSON. Raises FileError if that fails; an existing file is then unchanged."""
    write_whole(path, json.dumps(describe_plan(plan), indent=1) + "\n")


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Return the plan in a file. Raises PlanError, with file and reason, for a file without a plan."""
    name = os.fspath(path)
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        what = explain_unreadable(error)
        raise PlanError(f"cannot read a plan from {name!r}: {what}; write one with fxsplit plan --json") from error
    return parse_plan(data, name)


def parse_plan(data: Any, name: str) -> Plan:
    """Return the plan in a JSON object from the file `name`. Raises PlanError for any other object."""
    _check_version(data, name)
    try:
        names = [str(d) for d in as_list(data["device_names"])]
        _refuse_twice("device", names)
        plan = Plan(
            model=_read_cost_model(data),
            stages=_read_stages(data, names),
            device_names=tuple(names),
            # null in plans for the shortest step.
            lower_bound_ms=_find_number(data["lower_bound"], "lower_bound") or 0.0,
            single_ms=_number(data["single"], "single"),
            schedule=str(data["schedule"]),
            n_microbatches=_count(data["n_microbatches"], "n_microbatches"),
            rows=_count(data["rows"], "rows"),
            n_states=_count(data["ideals"], "ideals"),
            # Missing in files of earlier versions, and in plans from profiles of other tools.
            spread=_find_number(data.get("spread"), "spread"),
            measured_on=str(data.get("measured_on", "")),
            estimated=Estimated.parse(data.get("estimated")),
            shared_ms=_number(data.get("shared", 0.0), "shared"),
            busiest_ms=_number(data.get("busiest", 0.0), "busiest"),
            compress=_read_compress(data.get("compress")),
            transfers=_read_transfers(data.get("transfers", "asynchronous")),
            fixed_rows=tuple(_count(rows, "fixed_rows") for rows in as_list(data.get("fixed_rows", []))),
            schedule_csv=_read_schedule(data.get("schedule_csv")),
            compared=tuple(_read_compared(choice) for choice in as_list(data.get("compared", []))),
            compared_counts=tuple(_read_count(count) for count in as_list(data.get("compared_counts", []))),
            machine=_read_machine(data.get("machine"), names),
            step_ms=_find_number(data.get("step_ms"), "step_ms"),
            step_lower_bound_ms=_find_number(data.get("step_lower_bound_ms"), "step_lower_bound_ms"),
        )
        return plan.prove(_read_proof(data))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, InputError, PlanError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise PlanError(f"{name!r} is a damaged plan: {what}; write it again with fxsplit plan --json") from error


def _read_cost_model(data: dict[str, Any]) -> CostModel:
    """Return the cost model of a plan. Raises PlanError for an unknown one."""
    name = data["cost_model"]
    if name not in COST_MODELS:
        raise PlanError(f"cost_model is {show(name)}, and not one of {', '.join(COST_MODELS)}")
    return CostModel(name, _truth(data["traffic"], "traffic"), _number(data["optimizer_factor"], "factor"))


def _read_stages(data: dict[str, Any], names: list[str]) -> tuple[StagePlan, ...]:
    """Return the stages of a plan on the devices with these names. Raises PlanError if they make no plan."""
    # Under `direct`, stages hold no values at their boundaries.
    held = data["cost_model"] != "direct"
    stages = tuple(_read_stage(i, stage, names, held=held) for i, stage in enumerate(as_list(data["stages"])))
    if not stages:
        raise PlanError("it has no stages")
    _refuse_twice("device", [names[d] for stage in stages for d in stage.devices])
    _refuse_twice("node", [node for stage in stages for node in stage.nodes])
    return stages


def _check_version(data: Any, name: str) -> None:
    """Raise PlanError for an object that is no plan, or a plan of another version."""
    # Any JSON file may come here. The two keys that every plan has identify a plan.
    if not isinstance(data, dict) or "stages" not in data or "objective" not in data:
        raise PlanError(f"{name!r} is no plan: write one with fxsplit plan PROFILE --json")
    if (data.get("format", FORMAT), data.get("version", VERSION)) != (FORMAT, VERSION):
        stated = f"{show(data.get('format'))}, version {show(data.get('version'))}"
        raise PlanError(f"{name!r} is of {stated}, and this fxsplit reads {FORMAT!r}, version {VERSION}")


def _read_proof(data: dict[str, Any]) -> Any:
    """Return how a plan's bound is proven. Raises PlanError for another word."""
    # Files of earlier versions have only "optimal".
    proof = data.get("proof", "search" if data["optimal"] else "bound")
    if proof not in ("search", "bound", None):
        raise PlanError(f"proof is {show(proof)}, and neither 'search' nor 'bound' nor null")
    return proof


def _read_stage(index: int, data: dict[str, Any], names: list[str], *, held: bool) -> StagePlan:
    """Return one stage. Raises PlanError for an invalid device or number.

    held: whether stages of the plan's cost model hold values at their boundaries.
    """
    if not as_list(data["devices"]):
        raise PlanError(f"stage {index} has no device")
    for device in data["devices"]:
        if device not in names:
            raise PlanError(f"stage {index} is on {show(device)}, which is none of its devices")
    backward = _number(data["backward_ms"], f"backward_ms of stage {index}")
    # Files of earlier versions lack weight_ms: assume half of the backward, as simulations do. They also lack launches
    # and working memory.
    data = {"weight_ms": backward / 2, **dict.fromkeys(_LATER, 0.0), **data}
    data |= {name: data[own] for name, own in _SENT.items() if name not in data}
    data.setdefault("boundary_bytes", held * (data["in_bytes"] + data["out_bytes"]))
    # They also lack the memory during each action.
    known = "resting_bytes" in data
    if known and "first_bytes" not in data:
        data["first_bytes"] = data["whole_bytes"] + data["parameter_bytes"]
    data = {**dict.fromkeys(_HELD, 0.0), **data}
    if _number(data["weight_ms"], f"weight_ms of stage {index}") > backward:
        raise PlanError(f"weight_ms of stage {index} is {data['weight_ms']}, and it is part of backward_ms={backward}")
    stage = StagePlan(
        nodes=tuple(str(n) for n in as_list(data["nodes"])),
        devices=tuple(names.index(d) for d in data["devices"]),
        recompute=_truth(data["recompute"], f"recompute of stage {index}"),
        # Files of earlier versions lack the stages' places in the model.
        begins_at=str(data.get("begins_at", "")),
        ends_at=str(data.get("ends_at", "")),
        **{figure: _number(data[figure], f"{figure} of stage {index}") for figure in _FIGURES},
    )
    if known:
        return stage
    kept, between, weights = stage.kept_bytes, stage.boundary_bytes, stage.parameter_bytes
    spread = spread_activations(kept, between, weights, recompute=stage.recompute, trains=True)
    return replace(stage, **vars(spread))


def _refuse_twice(what: str, names: list[str]) -> None:
    """Raise PlanError for a duplicate name: a device has one stage, and a node is in one stage."""
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise PlanError(f"{what} {show(twice)} appears twice")


def _read_compress(value: Any) -> str:
    """Return how the plan compresses cuts. Raises PlanError for an unknown way."""
    if value not in (None, *HOW):
        raise PlanError(f"compress is {show(value)}, and neither null nor one of {', '.join(HOW)}")
    return value or ""


def _read_transfers(value: Any) -> TransferKind:
    """Return whether the plan's devices wait for their messages. Raises PlanError for another word."""
    found: TransferKind | None = next((kind for kind in TRANSFER_KINDS if kind == value), None)
    if found is None:
        raise PlanError(f"transfers is {show(value)}, and neither 'asynchronous' nor 'blocking'")
    return found


def _read_schedule(value: Any) -> str:
    """Return the file of the plan's schedule, empty for none. Raises PlanError for anything but text."""
    if not (value is None or isinstance(value, str)):
        raise PlanError(f"schedule_csv is {show(value)}, and neither null nor a schedule in torch's format")
    return value or ""


def _read_compared(value: Any) -> ComparedSchedule:
    """Return a schedule that was compared for the plan. Raises PlanError for figures that are none."""
    fits = value["fits"]
    return ComparedSchedule(
        str(value["schedule"]),
        _number(value["step_ms"], "step_ms"),
        None if fits is None else _truth(fits, "fits"),
    )


def _read_count(value: Any) -> ComparedCount:
    """Return a number of microbatches that was compared for the plan. Raises PlanError for figures that are none."""
    return ComparedCount(
        _count(value["n_microbatches"], "n_microbatches"),
        _count(value["rows"], "rows"),
        _find_number(value["step_ms"], "step_ms"),
        _limit(value["lower_bound_ms"]),
        _limit(value["single_ms"]),
        tuple(_count(rows, "between") for rows in as_list(value["between"])),
    )


def _read_machine(data: Any, names: list[str]) -> Machine | None:
    """Return the machine that the plan was made for, None in files that do not state it.

    Raises PlanError for a machine with other devices than the plan, InputError for one that cannot be.
    """
    if data is None:
        return None
    devices = tuple(
        Device(
            str(device["name"]),
            memory_bytes=_limit(device["memory_bytes"]),
            speed=_number(device["speed"], "speed"),
            bytes_per_s=_limit(device["bytes_per_s"]),
            host=_truth(device["host"], "host"),
        )
        for device in as_list(data["devices"])
    )
    links, late = tuple(map(_limit, as_list(data["links"]))), tuple(as_list(data["latencies_ms"]))
    machine = Machine(devices, links, latencies_ms=late, transfers=_read_transfers(data["transfers"]))
    homes = [as_list(home) for home in as_list(data["homes"])]
    if not all(homes) or any(not is_count(d) or d >= len(devices) for home in homes for d in home):
        raise PlanError(f"its machine has homes={show(homes)}, and {len(devices)} devices")
    made = machine.unrolled(homes) if homes else machine
    if [device.name for device in made.devices] != names:
        raise PlanError("its machine has other devices than its device_names")
    return made


def _limit(value: Any) -> float:
    """Return an amount that is unlimited if it is null."""
    return inf if value is None else _number(value, "an amount of the machine")


def _count(value: Any, what: str) -> int:
    """Return a whole number, zero or more. Raises PlanError for any other value."""
    if not is_count(value):
        raise PlanError(f"{what} is {show(value)}: it must be a whole number, zero or more")
    return int(value)


def _number(value: Any, what: str) -> float:
    """Return a finite number, zero or more. Raises PlanError for any other value."""
    if not is_amount(value):
        raise PlanError(f"{what} is {show(value)}: it must be {AMOUNT}")
    return float(value)


def _find_number(value: Any, what: str) -> float | None:
    """Return a finite number, zero or more, or None for null. Raises PlanError for any other value."""
    return None if value is None else _number(value, what)


def _truth(value: Any, what: str) -> bool:
    """Return true or false. Raises PlanError for any other value."""
    if not isinstance(value, bool):
        raise PlanError(f"{what} is {show(value)}: it must be true or false")
    return value

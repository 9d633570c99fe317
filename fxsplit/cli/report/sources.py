"""The sources of `fxsplit report`: the file of a plan with its profile and machine, or a dump folder.

Each source becomes a Story, the contents of a report. The *mark* of a dump folder is its file that lists the passes.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from fxsplit.api.report.gather import gather_story
from fxsplit.api.report.passes import compare_texts, make_steps, read_notes
from fxsplit.api.toolkit.parse_ir import parse_ir, read_text
from fxsplit.cli.words import read_bandwidth
from fxsplit.errors import InputError
from fxsplit.formats import read
from fxsplit.formats.machine_toml import read_machine
from fxsplit.formats.plan_json import describe_plan, read_plan
from fxsplit.ir.dump_folder import MARK, read_mark
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.costs.forwards import keep_forwards
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.plan import Plan
from fxsplit.report.page.story import PassRow, Story
from fxsplit.schedule.generators.catalogue import INFERENCE
from fxsplit.system.figures import show
from fxsplit.system.progress_bar import show_progress


def tell_story(arguments: argparse.Namespace) -> Story:
    """Return the story of the source of a report. Raises PlanError, ProfileError or InputError for a bad one."""
    bandwidth = read_bandwidth(arguments.bandwidth)
    source = Path(arguments.source)
    with show_progress():
        return _tell_folder(arguments, source) if source.is_dir() else _tell_plan(arguments, bandwidth)


def _tell_plan(arguments: argparse.Namespace, bandwidth: float | None) -> Story:
    """Return the story of the file of a plan, with the profile if one is given."""
    name = arguments.source
    plan = read_plan(name)
    machine = plan.machine if arguments.machine is None else _lay_out(plan, read_machine(arguments.machine))
    if bandwidth is not None:
        base = (machine or _guess_machine(plan)).rolled()
        machine = _lay_out(plan, replace(base, links=(bandwidth,) * len(base.links)))
    given = f"fxsplit report {name}"
    if arguments.profile is not None:
        costs = read(arguments.profile, bandwidth is not None).costs
        plan = plan.attach(_drop_backwards(costs, plan), machine or _guess_machine(plan))
        given += f" --profile {arguments.profile}"
    elif machine is not None:
        plan = replace(plan, machine=machine).prove(plan.proof)
    command = f"{given} -o {arguments.output}"
    in_python = f'pipe = fxsplit.compile(model, devices, example_inputs=x, plan="{name}")'
    return gather_story(plan, commands=[command, in_python], seconds=arguments.seconds, plan_json=describe_plan(plan))


def _drop_backwards(costs: Costs, plan: Plan) -> Costs:
    """Return the costs as the plan counts them: without backwards for inference, and with the plan's compression."""
    kept = keep_forwards(costs) if plan.schedule == INFERENCE else costs
    return replace(kept, compress=plan.compress)


def _guess_machine(plan: Plan) -> Machine:
    """Return a machine for a plan whose file does not state one: its devices, with unlimited links and memory."""
    planned = Machine.planned(len(plan.device_names))
    devices = tuple(replace(d, name=name) for d, name in zip(planned.devices, plan.device_names, strict=True))
    return replace(planned, devices=devices)


def _lay_out(plan: Plan, machine: Machine) -> Machine:
    """Return `machine` with the plan's names of devices. Raises InputError if the plan has more devices, or fewer.

    If devices of the plan have several stages, each of these stages counts as a device.
    """
    homes = plan.machine.homes if plan.machine is not None else ()
    made = machine.unrolled(homes) if homes and len(machine) > max(d for home in homes for d in home) else machine
    if len(made) != len(plan.device_names):
        raise InputError(
            f"the machine has {len(made)} devices, and the plan {len(plan.device_names)}: give the plan's machine"
        )
    names = tuple(replace(d, name=name) for d, name in zip(made.devices, plan.device_names, strict=True))
    return replace(made, devices=names)


def _tell_folder(arguments: argparse.Namespace, folder: Path) -> Story:
    """Return the story of a dump folder: of the last IR in it that has a plan with its costs."""
    for name in ("profile", "machine", "bandwidth"):
        if getattr(arguments, name) is not None:
            raise InputError(f"--{name} is for PLAN.json: a dump folder has all of it")
    mark, texts = read_dump(folder)
    plan = find_plan(texts, folder)
    return gather_story(
        plan,
        model=str(mark.get("model", "")),
        passes=_list_passes(mark, list(texts.values()), folder),
        notes=read_notes(next(iter(texts.values()))),
        commands=[f"fxsplit report {folder} -o {arguments.output}", *_save_from(folder, list(texts))],
        seconds=arguments.seconds,
        plan_json=describe_plan(plan),
    )


def read_dump(folder: Path) -> tuple[dict[str, Any], dict[Path, str]]:
    """Return the mark of a dump folder, and the text of the IR after each pass; raises InputError for another folder.

    An IR in which a check has found an error is left out.
    """
    mark = read_mark(folder)
    files = sorted(folder.glob("[0-9][0-9]*.ir"))
    if mark is None or not files:
        raise InputError(f"{str(folder)!r} is no dump folder: compile(dump={str(folder)!r}) writes one ({MARK}, *.ir)")
    return mark, {path: read_text(path) for path in files if not path.name.endswith(".failed.ir")}


def _save_from(folder: Path, paths: list[Path]) -> list[str]:
    """Return the commands that save the plan and the profile of a dump folder."""
    made = next((path for path in paths if "partition" in path.name), None)
    if made is None:
        return []
    return [f"fxsplit opt {made} --emit-json costs > profile.json", f"fxsplit opt {made} --emit-json plan > plan.json"]


def find_plan(texts: dict[Path, str], folder: Path) -> Plan:
    """Return the last plan in an IR that also has its costs, or else the last plan."""
    found: Plan | None = None
    for path, text in reversed(texts.items()):
        # An IR before the plan is long to read, and has none.
        if "\nfact Plan" not in text:
            continue
        ir = parse_ir(text, str(path), torch=False)
        plan, costs, machine = ir.get(Plan), ir.get(Costs), ir.get(Machine)
        if plan is not None and costs is not None:
            return plan.attach(costs, machine)
        found = found or plan
    if found is None:
        raise InputError(f"{str(folder)!r} has no plan: its chain ended before a pass made one")
    return found


def _list_passes(mark: dict[str, Any], texts: list[str], folder: Path) -> list[PassRow]:
    """Return the passes of a dump with what each changed. Raises InputError for a damaged mark."""
    try:
        steps = make_steps(mark.get("passes", []))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{str(folder / MARK)!r} is damaged: passes={show(json.dumps(mark.get('passes')))}") from error
    if len(texts) != len(steps) + 1:
        return [PassRow(step.text, step.seconds, step.noted) for step in steps]
    return [compare_texts(step, before, after) for step, before, after in zip(steps, texts, texts[1:], strict=False)]

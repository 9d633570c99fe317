"""`fxsplit simulate`: the time of a schedule, and each device's idle share and memory; needs no torch or model."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from fxsplit.api.compiler.microbatch_count import choose_microbatch_count
from fxsplit.api.plan import check_can_run, choose_passes, lay_out
from fxsplit.cli.output import print_json, print_parts
from fxsplit.cli.plan import choose_machine
from fxsplit.cli.words import (
    add_examples,
    add_json,
    add_machine,
    add_picture,
    add_planned_file,
    add_schedule,
    add_search,
    check_picture,
    read_bandwidth,
    take_search,
    take_text,
)
from fxsplit.errors import InputError
from fxsplit.formats import read
from fxsplit.formats.plan_json import read_plan
from fxsplit.ir.facts.plan import Plan
from fxsplit.planner import Options
from fxsplit.planner.planner import Planner
from fxsplit.schedule import (
    SCHEDULES,
    Schedule,
    SearchResult,
    Simulation,
    Times,
    generate,
    search,
    simulate,
    verify,
)
from fxsplit.schedule.generators.catalogue import INFERENCE, SEARCH, Scheduler, count_devices
from fxsplit.schedule.of_plan import (
    build_schedule,
    find_replicas,
    name_devices,
    name_places,
    read_footprints,
    read_times,
)
from fxsplit.schedule.schedule_plan import list_limits, schedule_plan, search_for_plan
from fxsplit.schedule.simulation.memory import MemoryTrace, find_peak, trace_memory
from fxsplit.schedule.simulation.timeline import Timeline
from fxsplit.schedule.torch_csv import parse_csv, read_csv, write_csv
from fxsplit.system.figures import format_bytes, format_count
from fxsplit.system.progress_bar import show_progress
from fxsplit.system.shown import Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `simulate`."""
    add_planned_file(parser, optional="each forward takes 1, each backward 2")
    what = parser.add_mutually_exclusive_group()
    add_schedule(what, [*SCHEDULES, INFERENCE, SEARCH], default="the plan's, or 1F1B")
    what.add_argument("--csv", type=take_text, metavar="FILE", help="a schedule file of torch.distributed.pipelining")
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="equal devices (default: what a file states, else 2 for FILE, else 4)",
    )
    parser.add_argument("--n-microbatches", type=int, metavar="N", help="default: the plan's, else two a device")
    parser.add_argument("--stages-per-device", type=int, metavar="N", help="default: the schedule's own number")
    add_search(parser)
    add_machine(parser)
    parser.add_argument(
        "--plan",
        type=take_text,
        metavar="PLAN",
        help="a plan in place of FILE: fxsplit plan FILE ... --json > PLAN (default: the best plan for FILE)",
    )
    add_json(parser)
    parser.add_argument(
        "--trace", type=take_text, metavar="FILE", help="write the timeline for Perfetto (ui.perfetto.dev)"
    )
    add_picture(parser, "the timeline and the memory of devices")
    parser.add_argument(
        "--to-csv", type=take_text, metavar="FILE", help="write the schedule for torch.distributed.pipelining"
    )
    add_examples(
        parser,
        ("the idle time of a schedule, drawn", "fxsplit simulate --schedule ZB-H1 --devices 4"),
        ("a step of a model's best plan, for Perfetto", "fxsplit simulate net.json --devices 4 --trace step.json"),
        ("another schedule for a saved plan", "fxsplit simulate --plan plan.json --schedule GPipe"),
    )


def main(arguments: argparse.Namespace) -> int:
    """Simulate a step, print it as a table with a drawing or as JSON, and write the requested files.

    Raises InputError for an argument that needs a profile if there is none, or that contradicts a file.
    """
    arguments.bandwidth = read_bandwidth(arguments.bandwidth)
    check_picture(arguments)
    if arguments.file is not None and arguments.plan is not None:
        raise InputError(f"--plan {arguments.plan}: FILE is planned from, and this is a plan already: give one of them")
    for name in ("machine", "bandwidth"):
        if getattr(arguments, name) is not None and arguments.file is None:
            raise InputError(f"--{name} is for a FILE, a profile that is planned first: give that too")
    fixed = _read_schedule(arguments) if arguments.csv else None
    options = take_search(arguments)
    found: SearchResult | None = None
    plan: Plan | None
    if arguments.file is not None:
        plan, schedule, found = _plan_profile(arguments, fixed, options)
    else:
        plan = None if arguments.plan is None else read_plan(arguments.plan)
        schedule = _choose_schedule(arguments, plan) if fixed is None else fixed
        if plan is not None and schedule.trains == (plan.schedule == INFERENCE):
            made, used = ("inference", "training") if schedule.trains else ("training", "inference")
            raise InputError(
                f"--plan {arguments.plan} is for {made}, and {schedule.name} for {used}: give a plan for {used}"
            )
    if arguments.schedule == SEARCH and found is None:
        found = _search(plan, schedule, options)
        schedule = found.schedule
    verify(schedule)
    times = Times.unit(schedule.n_stages) if plan is None else read_times(plan, schedule)
    simulation = simulate(schedule, times)
    # Memory is traced from forwards to their backwards, and inference has none: `fxsplit plan` states its memory.
    traces = () if plan is None or plan.schedule == INFERENCE else trace_memory(simulation, read_footprints(plan))
    places = () if plan is None else name_places(plan, schedule)
    timeline = Timeline.of(simulation, _name_devices(plan, schedule), traces, places)
    estimated = plan.estimated if plan else None
    if estimated:
        timeline = replace(timeline, title=f"{timeline.title}, {estimated}")
    _write_files(arguments, timeline, plan, schedule)
    if arguments.json:
        proof = {} if found is None else {"step_lower_bound": found.bound_ms, "step_gap": found.gap}
        told = {"estimated": estimated.to_json()} if estimated else {}
        print_json(_describe(simulation, traces, plan is None) | told | proof)
    else:
        _show(simulation, traces, timeline, plan is None)
        if estimated:
            print(estimated.details)
        if found is not None:
            print(found if plan else f"lower bound {found.bound_ms:g} x one forward, gap {100 * found.gap:.2f} %")
    return 0


def _write_files(arguments: argparse.Namespace, timeline: Timeline, plan: Plan | None, schedule: Schedule) -> None:
    """Write the trace, the picture and the schedule that are asked for."""
    # Import reports only if requested.
    if arguments.trace:
        from fxsplit.report.perfetto import save_trace

        save_trace([timeline], arguments.trace)
    if arguments.picture:
        from fxsplit.report.picture import save_picture
        from fxsplit.report.pictures.plan import find_device_limits

        limits = () if plan is None else find_device_limits(plan, timeline)
        save_picture([timeline], arguments.picture, dark=arguments.dark, limits=limits)
    if arguments.to_csv:
        write_csv(schedule, arguments.to_csv)


def _search(plan: Plan | None, base: Schedule, options: dict[str, Any]) -> SearchResult:
    """Return the schedule that a search finds for a plan, or for equal stages of unit times."""
    if plan is not None:
        # The file of a plan may not state its machine.
        limits = () if plan.machine is None else list_limits(plan, plan.machine)
        return search_for_plan(plan, limits, n_microbatches=base.n_microbatches, **options)
    each = base.n_stages // base.n_devices
    times = Times.unit(base.n_stages)
    return search(
        times, n_devices=base.n_devices, n_microbatches=base.n_microbatches, stages_per_device=each, **options
    )


def _read_schedule(arguments: argparse.Namespace) -> Schedule:
    """Return the schedule of --csv; raises InputError for an argument that the file contradicts."""
    schedule = read_csv(arguments.csv)
    verify(schedule)
    if arguments.stages_per_device is not None:
        raise InputError(f"--stages-per-device: the file {arguments.csv!r} says where its stages are")
    # A file states its devices and microbatches; repeating the same numbers is harmless.
    for name, value, stated in (
        ("--devices", arguments.devices, schedule.n_devices),
        ("--n-microbatches", arguments.n_microbatches, schedule.n_microbatches),
    ):
        if value not in (None, stated):
            raise InputError(f"{name} {value}: the file {arguments.csv!r} has {stated}")
    return schedule


def _choose_schedule(arguments: argparse.Namespace, plan: Plan | None) -> Schedule:
    """Return the schedule with the given name and numbers. The plan states the others, and without a plan defaults."""
    name = arguments.schedule or (plan.schedule if plan else "1F1B")
    devices = arguments.devices
    stated = plan is not None and plan.schedule_csv and (arguments.schedule, devices) == (None, None)
    # Only a schedule from a file has no name that says what runs.
    if plan is not None and stated and name not in (SEARCH, *SCHEDULES):
        scheduler = Scheduler.of(parse_csv(plan.schedule_csv, name))
        return build_schedule(plan, scheduler, arguments.n_microbatches or plan.n_microbatches)
    if devices is None:
        devices = count_devices(name, len(plan.stages), arguments.stages_per_device) if plan else 4
    count = arguments.n_microbatches
    if count is None:
        count = plan.n_microbatches if plan else choose_microbatch_count(devices)
    # An explicit number of devices selects that schedule, even if the plan has replicas.
    if plan is not None and arguments.devices is None:
        planned = len({device for stage in plan.stages for device in stage.devices})
        if arguments.schedule is not None and find_replicas(plan) is None and devices != planned:
            raise InputError(
                f"--schedule {name}: it puts {len(plan.stages)} stages on another number of devices than this plan "
                f"({devices}, not {planned}): plan for it (fxsplit plan --schedule {name}), or give --devices {devices}"
            )
        return build_schedule(plan, Scheduler(name, devices, arguments.stages_per_device), count)
    # A search begins with another schedule if a device has two stages.
    several = name == SEARCH and arguments.stages_per_device == 2
    return generate("ZBVZeroBubble" if several else name, devices, count, arguments.stages_per_device)


def _plan_profile(
    arguments: argparse.Namespace, fixed: Schedule | None, options: dict[str, Any]
) -> tuple[Plan, Schedule, SearchResult | None]:
    """Return the best plan of a profile, as `fxsplit plan` makes it, its schedule, and the result of a search or None.

    - fixed: the schedule in a file, to plan for
    - options: the options of the search, which runs if --schedule asks for it

    Raises InputError for a machine that has another number of devices than the fixed schedule.
    """
    profile = read(arguments.file, by_bytes=arguments.bandwidth is not None or arguments.machine is not None)
    named = arguments.schedule or "1F1B"
    inference = named == INFERENCE
    costs, name = choose_passes(profile.costs, "1F1B" if inference else named, inference=inference)
    devices = arguments.devices
    if fixed is not None and arguments.machine is None:
        devices = fixed.n_devices - profile.hosts
    machine = choose_machine(profile, arguments.machine, devices, arguments.bandwidth)
    scheduler = Scheduler(name, len(machine), arguments.stages_per_device)
    if fixed is None:
        laid_out, workload = lay_out(machine, name, arguments.n_microbatches, arguments.stages_per_device)
    elif fixed.n_devices == len(machine):
        laid_out, workload = lay_out(machine.unrolled(fixed.homes), n_microbatches=fixed.n_microbatches)
    else:
        raise InputError(
            f"--machine {arguments.machine} has {len(machine)} devices, and the schedule {arguments.csv!r} "
            f"{fixed.n_devices}: give a machine with as many"
        )
    # A schedule that is stated action by action has all of its stages.
    use_all = fixed is not None
    with show_progress():
        plan = Planner(costs).plan(laid_out, workload, Options(model=profile.cost_model, use_all=use_all))
    check_can_run(plan)
    if fixed is not None:
        return plan, fixed, None
    plan, workload, found = schedule_plan(plan, costs, laid_out, workload, **options)
    memory_bytes = [device.memory_bytes for device in machine.devices]
    return plan, build_schedule(plan, scheduler, workload.n_microbatches, memory_bytes), found


def _name_devices(plan: Plan | None, schedule: Schedule) -> tuple[str, ...]:
    """Return the names of the devices: the plan's if there is one, otherwise numbers."""
    return tuple(f"device {d}" for d in range(schedule.n_devices)) if plan is None else name_devices(plan, schedule)


def _describe(simulation: Simulation, traces: tuple[MemoryTrace, ...], unit: bool) -> dict[str, Any]:
    """Return the simulation as a JSON object for other programs.

    Times are in ms, or in forwards of a stage with `unit`. Bubbles and busy links are shares of the step. Bytes are
    peaks by device.
    """
    schedule = simulation.schedule
    return {
        "schedule": schedule.name,
        "n_devices": schedule.n_devices,
        "n_stages": schedule.n_stages,
        "n_microbatches": schedule.n_microbatches,
        "synchronous": schedule.synchronous,
        "unit": "forward" if unit else "ms",
        "step_time": simulation.step_ms,
        "bubble": simulation.bubble,
        "bubbles": list(simulation.bubbles),
        "links": [{"from": a, "to": b, "busy": busy} for (a, b), busy in simulation.busy_links.items()],
        "peak_activations": list(schedule.peak_activations()) if schedule.trains else None,
        "peak_bytes": [find_peak(trace) for trace in traces] if traces else None,
        "weight_versions": list(schedule.weight_versions()),
        "lag": list(schedule.lag()),
    }


def _show(simulation: Simulation, traces: tuple[MemoryTrace, ...], timeline: Timeline, unit: bool) -> None:
    """Print a row for each device, the whole step, and the timeline in the terminal's width."""
    from rich.console import Console

    from fxsplit.report.terminal import draw

    schedule = simulation.schedule
    versions, lags = schedule.weight_versions(), schedule.lag()
    rows = []
    for d, name in enumerate(timeline.devices):
        own = [s for s, home in enumerate(schedule.homes) if d in home]
        # Without backwards no activations are kept.
        kept_at_most = f"{schedule.peak_activations()[d]:g}" if schedule.trains else "-"
        figures = f"{100 * simulation.bubbles[d]:.1f} %", kept_at_most
        held = format_bytes(find_peak(traces[d])) if traces else "-"
        behind = (max((kept[s] for s in own), default=0) for kept in (versions, lags))
        rows.append((name, ", ".join(map(str, own)), *figures, held, *behind))
    heads = ("device", "stages", ">bubble", ">activations", ">memory", ">versions", ">lag")
    print_parts([Table(heads, rows)])
    time = f"{simulation.step_ms:g} x one forward" if unit else f"{simulation.step_ms:.3f} ms"
    count = format_count(schedule.n_microbatches, "microbatch")
    print(f"{schedule.name}, {count}: {time}, bubble {100 * simulation.bubble:.1f} %")
    for (name, _), busy in zip(timeline.links, simulation.busy_links.values(), strict=True):
        print(f"link {name}: busy {100 * busy:.1f} % of the step")
    print()
    # In a wider drawing it is hard to follow a line.
    console = Console(soft_wrap=True)
    console.print(draw(timeline, min(console.width, 160)), end="")

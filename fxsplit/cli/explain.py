"""`fxsplit explain`: the contents of each stage, the bytes over each cut, and the best plan without that cut."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, replace
from math import inf, sqrt
from typing import Any

from fxsplit.api.plan import build_machine, lay_out
from fxsplit.cli import plan as plan_command
from fxsplit.cli.output import print_json, print_parts
from fxsplit.cli.plan import PlanArguments, draw_picture
from fxsplit.cli.words import add_examples
from fxsplit.errors import InputError, PlanError
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.costs.text import sum_by_module
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.plan import PROVEN, Plan
from fxsplit.schedule.taxonomy import classify_plan
from fxsplit.system.figures import format_bytes
from fxsplit.system.progress import track
from fxsplit.system.progress_bar import show_progress
from fxsplit.system.shown import Table

SHOWN = 3
"""The number of nodes of a stage, values of a cut, and idle devices to list."""
MOST_TIMES, PATIENCE_S, CLOSE = 1024.0, 2.0, 1.01
"""How the bandwidth is found from which on an idle device would make the plan faster.

The bandwidth is doubled up to MOST_TIMES, for at most PATIENCE_S seconds, and then found up to a factor of CLOSE.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments and examples of `explain`."""
    plan_command.add_arguments(parser)
    add_examples(
        parser,
        ("why the best plan for three devices cuts there", "fxsplit explain net.json --devices 3"),
        ("how links of 1 GB/s would change it", "fxsplit explain net.json --devices 3 --bandwidth 1GB/s"),
    )


def main(arguments: argparse.Namespace) -> int:
    """Explain the best plan, as text or JSON. Raises InputError for a range of devices."""
    question = PlanArguments(arguments)
    counts = question.counts()
    if len(counts) > 1:
        raise InputError(f"--devices {arguments.devices}: one plan is explained at a time, so give one number")
    (count,) = counts
    plan = question.plan(count)
    draw_picture(arguments, [(count, plan)])
    stages = [_explain_stage(plan, n, question.profile.costs) for n in range(len(plan.stages))]
    with show_progress():
        cuts = [
            _explain_cut(question, count, plan, n) for n in track(range(1, len(plan.stages)), "plans without a cut")
        ]
    kind = classify_plan(plan)
    if arguments.json:
        numbered = {} if count is None else {"n_devices": count}
        explained = {"stages": stages, "cuts": cuts, "kind": None if kind is None else asdict(kind)}
        print_json(question.answer(plan) | numbered | {"explained": explained})
        return 0
    print_parts(plan.show())
    for n, stage in enumerate(stages):
        note = ", the slowest" if stage["load"] == plan.bottleneck_ms else ""
        print(f"\nstage {n}: {stage['load']:.4f} ms{note}, {100 * stage['transfer_share']:.0f} % of it transfers")
        if stage["launch"]:
            decides = "which decides" if stage["launch"] == stage["load"] else "meanwhile"
            print(f"  its host launches for {stage['launch']:.4f} ms, {decides}")
        print_parts([_tabulate(question, stage)])
    for line in _explain_idle(question, count, plan):
        print(line)
    for n, cut in enumerate(cuts, 1):
        nominal = question.profile.nominal_bytes_per_ms
        print(f"\ncut {n}, between stage {n - 1} and {n}: {_format_amount(cut['bytes'], nominal)} forward and back")
        rows = [(f"  {_describe(question, name)}", _format_amount(b, nominal)) for name, b in cut["largest"].items()]
        print_parts([Table(("  made by", ">sent"), rows)] if rows else [])
        print(f"  next best without this cut: {_format_next_best(cut, plan)}")
    if kind is not None:
        print(f"\nparallelism: {kind.parallelism}")
        print(f"synchronisation: {kind.synchronisation}")
        print(f"weights: {kind.weights}")
        nominal = question.profile.nominal_bytes_per_ms
        rows = [(f"  {name}", _format_amount(sent, nominal)) for name, sent in kind.list_bytes()]
        print_parts([Table(("  sent in a step", ">in all"), rows)])
    return 0


def _explain_stage(plan: Plan, number: int, costs: Costs) -> dict[str, Any]:
    """Return a stage's load, its share of transfers, and the shares of its largest modules and nodes."""
    stage = plan.stages[number]
    time = {n: costs.by_name[n].forward_ms + costs.by_name[n].backward_ms for n in stage.nodes}
    # If no node takes time, all shares are 0.
    total = sum(time.values()) or 1.0
    # Break ties by name, so that the output is deterministic.
    largest = sorted(time, key=lambda n: (-time[n], n))[:SHOWN]
    nodes = [costs.by_name[n] for n in stage.nodes]
    modules = sum_by_module(nodes, SHOWN) if any(n.module for n in nodes) else {}
    return {
        "load": stage.load_ms,
        "launch": stage.launch_ms,
        "transfer_share": stage.transfer_ms / stage.load_ms if stage.load_ms else 0.0,
        "modules": {name: sum(time[n.name] for n in held) / total for name, held in modules.items()},
        "largest": {n: time[n] / total for n in largest},
    }


def _tabulate(question: PlanArguments, stage: dict[str, Any]) -> Table:
    """Return a table of a stage's largest modules and nodes."""
    shares = {name: (share, "") for name, share in stage["modules"].items()}
    for name, share in stage["largest"].items():
        # A module of one node is listed already. Profiles of other tools have no modules.
        shares.setdefault(_describe(question, name), (share, "one node" if stage["modules"] else ""))
    rows = [(f"  {name}", f"{100 * share:.1f} %", note) for name, (share, note) in shares.items()]
    return Table(("  largest", ">of its computing", ""), rows)


def _explain_idle(question: PlanArguments, count: int | None, plan: Plan) -> list[str]:
    """Return lines that say why devices are idle, and from which bandwidth on one more would make the plan faster."""
    machine = question.machine(count)
    used = _list_used(plan, question.lay_out(count)[0])
    idle = [device.name for d, device in enumerate(machine.devices) if d not in used]
    if not idle:
        return []
    known = "no plan that uses them is faster" if plan.optimal else "no faster plan that uses them was found"
    lines = [f"\nidle: {', '.join(idle[:SHOWN])}{' ...' if len(idle) > SHOWN else ''}: {known}"]
    begin, bandwidth = time.perf_counter(), question.arguments.bandwidth or question.profile.bytes_per_s

    def plan_for(devices: int | None, bytes_per_s: float) -> tuple[Plan, Machine]:
        other = build_machine(question.profile, devices, bytes_per_s)
        laid_out, workload = lay_out(other, question.schedule, question.arguments.n_microbatches)
        return question.planner.plan(laid_out, workload, question.options), laid_out

    def pays(bytes_per_s: float) -> bool:
        found, laid_out = plan_for(count, bytes_per_s)
        more = len(_list_used(found, laid_out))
        if more <= len(used):
            return False
        # The search may take a device that gains nothing.
        fewer, _ = plan_for(more - 1, bytes_per_s)
        return found.bottleneck_ms < fewer.bottleneck_ms * (1 - PROVEN)

    low, high, enough = bandwidth, 2.0 * bandwidth, False
    # A machine's links have no single bandwidth, and no bandwidth helps if links are unlimited. Hosts have no link.
    stated = question.arguments.machine or question.profile.hosts
    while not stated and high <= MOST_TIMES * bandwidth < inf and high > CLOSE * low:
        if time.perf_counter() - begin > PATIENCE_S:
            break
        tried = sqrt(low * high) if enough else high
        if pays(tried):
            high, enough = tried, True
        else:
            low, high = tried, high if enough else 2.0 * high
    return [*lines, f"  links of {high:.3g} bytes/s and more would make another device pay"] if enough else lines


def _list_used(plan: Plan, machine: Machine) -> set[int]:
    """Return the numbers of the real devices that a plan uses.

    If devices have several stages, `machine` has a device for each stage, and `homes` are the real devices of each.
    """
    used = {device for stage in plan.stages for device in stage.devices}
    return {real for device in used for real in machine.homes[device]} if machine.homes else used


def _explain_cut(question: PlanArguments, count: int | None, plan: Plan, number: int) -> dict[str, Any]:
    """Return the values that cross the cut before stage `number`, and the bottleneck of the best plan without it."""
    costs = question.profile.costs
    # The nodes of all stages before it identify a cut.
    before = {name for stage in plan.stages[:number] for name in stage.nodes}
    crossing: dict[str, float] = {}
    for name, _, _, readers, is_output in costs.values:
        # Inputs of the model come from outside all stages; under `direct` they are not forwarded.
        made = name in before or (name not in costs.by_name and plan.model.forwards)
        # An output of the model is forwarded to the last stage, which returns it.
        if made and ((is_output and plan.model.forwards) or not before.issuperset(readers)):
            crossing[name] = crossing.get(name, 0.0) + sum(costs.sent[name])
    for exchange in costs.exchanges:
        # A tensor with users on both sides crosses the cut.
        if before & set(exchange.nodes) and not before.issuperset(exchange.nodes):
            crossing[exchange.nodes[0]] = crossing.get(exchange.nodes[0], 0.0) + exchange.output_bytes
    largest = sorted(crossing, key=lambda n: (-crossing[n], n))[:SHOWN]
    other = _find_next_best(question, count, before)
    return {
        "bytes": sum(crossing.values()),
        "largest": {n: crossing[n] for n in largest},
        "next_best": None if other is None else other.bottleneck_ms,
        "next_best_lower_bound": None if other is None else other.lower_bound_ms,
    }


def _describe(question: PlanArguments, name: str) -> str:
    """Return a node's place in the model, or its name and operator for PipeDream's numbered nodes."""
    node = question.profile.costs.by_name.get(name)
    # An input of the model crosses cuts too.
    if node is None:
        return name
    return f"{name} {node.op}" if question.profile.format == "pipedream" else node.place


def _format_amount(bytes_: float, nominal: float) -> str:
    """Return bytes for people, or the time they represent if the file states only times."""
    return f"{bytes_ / nominal:.4g} ms" if nominal else format_bytes(bytes_)


def _find_next_best(question: PlanArguments, count: int | None, before: set[str]) -> Plan | None:
    """Return the best plan without a cut right after the nodes `before`, or None if none exists."""
    # The search excludes only this state as a cut.
    planner = replace(question.planner, never=(*question.planner.never, frozenset(before)))
    try:
        return question.plan(count, planner)
    except PlanError:
        return None


def _format_next_best(cut: dict[str, Any], plan: Plan) -> str:
    """Return the next best plan's cost, and the difference in percent, for people."""
    if cut["next_best"] is None:
        return "no plan"
    more = cut["next_best"] / plan.bottleneck_ms - 1.0 if plan.bottleneck_ms else 0.0
    # A difference of 0 % shows that nothing depends on this cut.
    proven = cut["next_best_lower_bound"] >= cut["next_best"] * (1 - PROVEN)
    bound = "" if proven else f" (not less than {cut['next_best_lower_bound']:.4f} ms)"
    return f"{cut['next_best']:.4f} ms, {100 * more:+.2f} %{bound}"

"""`fxsplit plan`: the best plan of a profile for a machine, as a table or JSON, without torch or the model."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from fxsplit.api.plan import (
    build_machine,
    check_can_run,
    check_without_backwards,
    choose_passes,
    lay_out,
    lay_out_schedule,
)
from fxsplit.api.to_titan import CONFIG, SCHEDULE, check_forward, emit_titan
from fxsplit.cli.output import print_json, print_parts
from fxsplit.cli.words import (
    add_constraints,
    add_examples,
    add_json,
    add_machine,
    add_picture,
    add_planned_file,
    add_schedule,
    add_search,
    check_picture,
    parse_pins,
    read_bandwidth,
    split_together,
    take_search,
    take_text,
)
from fxsplit.errors import InputError, NoFit, PlanError
from fxsplit.formats import ProfileFile, read
from fxsplit.formats.machine_toml import read_machine
from fxsplit.formats.plan_json import describe_plan
from fxsplit.ir.facts.costs.compress import HOW
from fxsplit.ir.facts.costs.costs import Costs, NodeCost
from fxsplit.ir.facts.costs.estimated import list_doubts, list_shares
from fxsplit.ir.facts.given.machine import MAX_DEVICES, Machine, check_device_count
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.plan import PROVEN, Plan
from fxsplit.ir.facts.price import COST_MODELS, price_split
from fxsplit.planner import Options
from fxsplit.planner.baselines import BASELINES, plan_baseline
from fxsplit.planner.batch import check_several, choose_count, list_sizes
from fxsplit.planner.planner import MAX_STATES, Planner
from fxsplit.planner.problem.borders import ANYWHERE, FORMS, check_modules, check_place, compress_cuts, list_wholes
from fxsplit.planner.solve import OBJECTIVES, RECOMPUTE
from fxsplit.report.devices import KNEE, describe_run, explain_knee, find_last_worthwhile, tabulate_steps
from fxsplit.schedule import SearchResult
from fxsplit.schedule.generators.catalogue import SCHEDULES, SEARCH, Scheduler
from fxsplit.schedule.of_plan import build_schedule
from fxsplit.schedule.schedule_plan import schedule_plan, state_step
from fxsplit.schedule.torch_csv import read_schedule
from fxsplit.system.figures import SHOWN, format_count
from fxsplit.system.files import make_folder, write_whole
from fxsplit.system.progress import track
from fxsplit.system.progress_bar import show_progress
from fxsplit.system.shown import Table

FACTORS = (0.7, 1.4)
"""How much slower each class of operators is taken to be than estimated, in turn."""
UNLIMITED = "links are unlimited, so that transfers take no time: --bandwidth prices them"

TWO_MACHINES = "--devices and --machine both state the devices: give one of them"


def add_arguments(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Add the arguments of `plan` and `explain`; `several`: take several profiles."""
    add_planned_file(parser, several=several)
    parser.add_argument("--devices", metavar="N|A..B", help="equal devices (default: the file's number, else 2)")
    add_machine(parser)
    parser.add_argument("--cost-model", choices=COST_MODELS, help="the costs of stages (default: the file's own)")
    parser.add_argument("--use-all-devices", action="store_true", help="leave no device idle")
    parser.add_argument("--no-traffic", action="store_true", help="ignore the time of transfers between stages")
    parser.add_argument("--free-order", action="store_true", help="take devices in any order")
    parser.add_argument(
        "--recompute",
        choices=RECOMPUTE,
        help="stages that recompute activations, to save memory (default: never, or auto with --best)",
    )
    add_schedule(parser, [*SCHEDULES, SEARCH, "a .csv file in torch's format"], "1F1B, or search with --best")
    add_search(parser)
    parser.add_argument("--inference", action="store_true", help="for outputs without gradients: only forwards")
    parser.add_argument("--n-microbatches", type=int, metavar="N", help="default: two a device")
    parser.add_argument(
        "--optimizer-factor",
        type=float,
        default=Options.optimizer_factor,
        metavar="X",
        help="the optimizer's bytes per parameter byte",
    )
    add_constraints(parser)
    parser.add_argument(
        "--compress",
        choices=HOW,
        help="compress values at cuts, which changes results (default: send them unchanged)",
    )
    parser.add_argument(
        "--cut-at", type=take_text, metavar="PLACE", help=f"where cuts may lie: {FORMS} (default: {ANYWHERE})"
    )
    parser.add_argument("--max-states", type=int, default=MAX_STATES, metavar="N", help="ideals to enumerate at most")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=inf,
        metavar="S",
        help="stop after S seconds with the best plan found (default: no limit)",
    )
    add_picture(parser, "the plan, or the speed-up over a range of devices,")
    add_json(parser)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments and examples of `plan`; `explain` has fewer arguments."""
    add_arguments(parser, several=True)
    parser.add_argument(
        "--emit",
        choices=("titan", "dot", "model-explorer"),
        help="write the plan for torchtitan (titan.py and schedule.csv), or its graph with its stages for Graphviz "
        "(plan.dot) or for Model Explorer (model-explorer.json and node data)",
    )
    parser.add_argument(
        "--to", type=take_text, metavar="FOLDER", help="the folder for --emit (default: the current one)"
    )
    parser.add_argument(
        "--objective",
        choices=OBJECTIVES,
        help="what the plan makes as small as possible: its slowest stage, or a whole step (default: bottleneck)",
    )
    parser.add_argument(
        "--best",
        action="store_true",
        help="choose stages, replicas, devices and order of work together, for the shortest step",
    )
    parser.add_argument(
        "--knee",
        type=float,
        default=KNEE,
        metavar="SHARE",
        help="with --best and a range of devices: what share of the first device's speed a device must bring to count",
    )
    parser.add_argument("--baselines", action="store_true", help="compare the plan with simple splits by hand")
    add_examples(
        parser,
        ("the best plan for four equal devices", "fxsplit plan net.json --devices 4 --bandwidth 12GB/s"),
        ("the speed-up of 1 to 16 devices", "fxsplit plan net.json --devices 1..16"),
        ("a plan for the machine in a file", "fxsplit plan net.json --machine cluster.toml --n-microbatches 16"),
        ("the plan with the shortest step", "fxsplit plan net.json --devices 4 --best"),
        ("a file for compile(plan=)", "fxsplit plan net.json --devices 4 --json > plan.json"),
    )


class PlanArguments:
    """The parsed and checked arguments: the *question* that the command answers with a plan.

    It has the profile, the options of the plan, and the planner. If there are several profiles, `profile` is the first,
    and `sizes` are the numbers of microbatches to choose from. Raises InputError with the name of an invalid argument,
    and ProfileError for the files.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        begin = time.perf_counter()
        arguments.bandwidth = read_bandwidth(arguments.bandwidth)
        check_picture(arguments)
        if arguments.max_states < 1:
            raise InputError(f"--max-states {arguments.max_states}: give at least 1")
        # torchtitan has modules in every stage, and one rank for each stage.
        if getattr(arguments, "emit", None) == "titan":
            if arguments.cut_at not in (None, "modules"):
                raise InputError(f"--cut-at {arguments.cut_at[:SHOWN]}: --emit titan cuts at modules, so leave it out")
            arguments.cut_at, arguments.use_all_devices = "modules", True
        self.arguments = arguments
        self._best = getattr(arguments, "best", False)
        self._choose_objective()
        self._searches: dict[int, SearchResult] = {}
        # A bandwidth determines the times of transfers, so the times stated in the file no longer apply.
        by_bytes = arguments.bandwidth is not None or arguments.machine is not None
        files = [arguments.file] if isinstance(arguments.file, str) else arguments.file
        profile, *others = [read(file, by_bytes) for file in files]
        batch = check_several(len(files), arguments.n_microbatches, best=self._best) if others else 0
        name, self.fixed = read_schedule(arguments.schedule)
        self.search = take_search(arguments)
        costs, self.schedule = choose_passes(
            profile.costs, "1F1B" if self.fixed else name, inference=arguments.inference
        )
        costs = compress_cuts(costs, arguments.compress or "")
        self.profile: ProfileFile = replace(profile, costs=costs)
        measured = [costs, *(compress_cuts(other.costs, arguments.compress or "") for other in others)]
        self.sizes = list_sizes(measured, files, batch) if others else []
        pins = parse_pins(arguments.pins)
        together: list[Sequence[str]] = [*split_together(arguments.together), *self._list_wholes()]
        self.planner = Planner(self.profile.costs, pins, together, arguments.max_states)
        self._planners = {costs.rows: self.planner}
        self.load_s = time.perf_counter() - begin
        for note in dict.fromkeys((*(found.noise for found in measured if found.noise), *list_doubts(costs))):
            print(f"note: {note}", file=sys.stderr)
        # The solver of these files takes devices in any order; a machine's links and replicas need its order.
        foreign = self.profile.format == "dnn-partitioning"
        model = arguments.cost_model or ("replicated" if self._best else self.profile.cost_model)
        self.options = Options(
            model=model,
            use_all=arguments.use_all_devices,
            traffic=not arguments.no_traffic,
            free=arguments.free_order or (foreign and not arguments.machine and model != "replicated"),
            objective=self.objective,
            optimizer_factor=arguments.optimizer_factor,
            recompute=arguments.recompute,
            time_limit=arguments.time_limit,
        )
        if arguments.inference:
            check_without_backwards(self.options)

    def _choose_objective(self) -> None:
        """Fill in the objective, and the schedule that it takes by default.

        Raises InputError for a contradiction, and for --knee out of range.
        """
        given, knee = getattr(self.arguments, "objective", None), getattr(self.arguments, "knee", KNEE)
        if not 0 < knee < 1:
            raise InputError(f"--knee {knee:g}: give a share between 0 and 1, such as {KNEE:g}")
        if self._best and given == "bottleneck":
            raise InputError("--objective bottleneck: --best minimises the step, so leave one of them out")
        self.objective = "step" if self._best else given or "bottleneck"
        if self.objective == "step" and getattr(self.arguments, "emit", None):
            raise InputError(
                f"--objective step: --emit {self.arguments.emit} needs a stage on every rank: leave it out"
            )
        if self._best and self.arguments.inference:
            raise InputError("--inference: --best minimises a step of training, so leave one of them out")
        if self.arguments.schedule is None:
            self.arguments.schedule = SEARCH if self._best else "1F1B"
        if self.arguments.recompute is None:
            self.arguments.recompute = "auto" if self._best else Options.recompute

    @property
    def has_knee(self) -> bool:
        """Whether the rows of a range of devices are for one batch, so that they may be compared."""
        return self._best and len(self.counts()) > 1 and self.arguments.n_microbatches is not None

    def _list_wholes(self) -> list[Sequence[str]]:
        """Return the sets of nodes that --cut-at leaves whole. Raises InputError if the model has no such place."""
        place = self.arguments.cut_at or ANYWHERE
        try:
            check_place(place)
            wholes = list_wholes(self.profile.costs, place)
        except (ValueError, PlanError) as error:
            raise InputError(f"--cut-at {place[:SHOWN]}: {error}") from error
        if place != ANYWHERE and not wholes:
            if getattr(self.arguments, "emit", None) == "titan":
                raise InputError(
                    "--emit titan: the profile names no modules, and torchtitan has modules in every stage: give a "
                    "profile that fxsplit has measured"
                )
            raise InputError(f"--cut-at {place[:SHOWN]}: the profile names no modules, so leave it out")
        return list(wholes.values())

    def counts(self) -> list[int | None]:
        """Return the numbers of devices to plan for; None means the devices of the file or the machine.

        Raises InputError unless --devices is a number or a range.
        """
        text = self.arguments.devices
        if text is None:
            return [None]
        if self.arguments.machine:
            raise InputError(TWO_MACHINES)
        # One number, or a range for a curve of speed-ups.
        found = re.fullmatch(r"(\d{1,18})(?:\.\.(\d{1,18}))?", text)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= first <= last:
            raise InputError(
                f"--devices {text[:SHOWN]}: give a number from 1 to {MAX_DEVICES}, or a range such as 1..16"
            )
        check_device_count(last)
        return list(range(first, last + 1))

    def machine(self, count: int | None) -> Machine:
        """Return the machine of --machine, or one with `count` equal devices."""
        return choose_machine(self.profile, self.arguments.machine, count, self.arguments.bandwidth)

    def lay_out(self, count: int | None, n_microbatches: int | None = None) -> tuple[Machine, Workload]:
        """Return the machine with one device for each stage, and the schedule's workload.

        n_microbatches: another number than that of the arguments.
        """
        machine, number = self.machine(count), n_microbatches or self.arguments.n_microbatches
        if self.fixed is not None:
            return lay_out_schedule(machine, self.fixed, number)
        laid_out, workload = lay_out(machine, self.schedule, number)
        if self.arguments.pins and len(laid_out) != len(machine):
            raise InputError(
                f"--pin {self.arguments.pins[0][:SHOWN]}: under {self.schedule} a device has several stages, and a "
                "device does not say which: in Python, fxsplit.plan(pins={'layer1': 3}) takes the number of a stage"
            )
        return laid_out, workload

    def costs_no_transfers(self, count: int | None) -> bool:
        """Return whether transfers are priced but take no time, because no bandwidth was given."""
        machine = self.machine(count)
        unlimited = all(d.bytes_per_s == inf for d in machine.devices) and set(machine.links) == {inf}
        return unlimited and not any(machine.latencies_ms) and self.options.traffic

    def plan(self, count: int | None, planner: Planner | None = None) -> Plan:
        """Return the best plan for `count` devices, from the question's planner or the given one.

        With several profiles it is the best for all numbers of microbatches. Raises NoFit if no plan fits, or if every
        plan places a node on a device that cannot run it.
        """
        if not self.sizes:
            return self.plan_for(count, planner or self.planner)
        return choose_count(
            self.sizes,
            self.machine(count),
            lambda costs, number: self.plan_for(count, self._find_planner(costs), number),
        )

    def _find_planner(self, costs: Costs) -> Planner:
        """Return the planner for one of the sizes, which knows its states if it has planned before."""
        if costs.rows not in self._planners:
            self._planners[costs.rows] = replace(self.planner, costs=costs, _known={})
        return self._planners[costs.rows]

    def plan_for(self, count: int | None, planner: Planner, n_microbatches: int | None = None) -> Plan:
        """Return the best plan of a planner for `count` devices, and for a number of microbatches."""
        machine, workload = self.lay_out(count, n_microbatches)
        # A schedule that is stated action by action has all of its stages.
        options = self.options if self.fixed is None else replace(self.options, use_all=True)
        with show_progress():
            plan = check_can_run(planner.plan(machine, workload, options))
            plan, _, found = schedule_plan(plan, planner.costs, machine, workload, **self.search)
            plan = state_step(plan)
        if found is not None:
            self._searches[id(plan)] = found
        # A node without support has an extreme time, so it is the bottleneck if no plan avoids it.
        if plan.bottleneck_ms >= self.profile.never_ms:
            raise NoFit("no plan fits: some node runs only on hosts, and there is no host for it")
        return plan

    def find_search(self, plan: Plan) -> SearchResult | None:
        """Return the search that found the schedule of a plan of this question, or None."""
        return self._searches.get(id(plan))

    def answer(self, plan: Plan) -> dict[str, Any]:
        """Return a plan as a JSON object for other programs; times are in the file's own unit."""
        answer = describe_plan(plan)
        # Readers of PipeDream's files expect every node in a stage, including the inputs.
        if self.profile.format == "pipedream":
            answer["stages"][0]["nodes"] = [i.name for i in self.profile.costs.inputs] + answer["stages"][0]["nodes"]
        found = self.find_search(plan)
        if found is not None:
            answer |= {"step_time": found.step_ms, "step_lower_bound": found.bound_ms, "step_gap": found.gap}
        return answer | {"unit": self.profile.unit, "seconds": {"load": self.load_s, **self.planner.seconds}}


def choose_machine(profile: ProfileFile, path: str | None, count: int | None, bandwidth: float | None) -> Machine:
    """Return the machine in a file, with links of another bandwidth if one is given, or one of `count` equal devices.

    Raises InputError if both the file and the number are given.
    """
    if path is None:
        return build_machine(profile, count, bandwidth)
    if count is not None:
        raise InputError(TWO_MACHINES)
    machine = read_machine(path)
    if not bandwidth:
        return machine
    # A device has its own link, and the machine has one between each two neighbours.
    devices = tuple(d if d.host else replace(d, bytes_per_s=bandwidth) for d in machine.devices)
    return replace(machine, devices=devices, links=(bandwidth,) * len(machine.links))


def main(arguments: argparse.Namespace) -> int:
    """Print the plan, or a row for each number of devices if --devices is a range."""
    question = PlanArguments(arguments)
    counts = question.counts()
    if arguments.baselines and (arguments.json or arguments.emit or len(counts) > 1):
        raise InputError("--baselines prints a table for one plan: leave out --json, --emit and a range of --devices")
    if arguments.baselines and question.sizes:
        raise InputError("--baselines compares plans of one profile: give one, or leave --baselines out")
    if arguments.emit:
        return _emit(question, counts)
    if arguments.to:
        raise InputError(f"--to {arguments.to}: it needs --emit")
    with show_progress():
        plans = [(count, question.plan(count)) for count in track(counts, "numbers of devices")]
    draw_picture(arguments, plans)
    if arguments.json:
        answers = [question.answer(plan) | ({} if count is None else {"n_devices": count}) for count, plan in plans]
        knee = {"knee": find_last_worthwhile(plans, arguments.knee)} if question.has_knee else {}
        print_json(answers[0] if len(answers) == 1 else {"curve": answers} | knee)
        return 0
    if len(plans) > 1:
        _print_range(plans, question)
        return 0
    (_, plan) = plans[0]
    print_parts(plan.show())
    if question.objective == "step":
        idle, memory, order = describe_run(plan)
        print(f"devices in use are idle for {idle} of the step; the fullest has {memory}; order of work: {order}")
    found = question.find_search(plan)
    if found is not None:
        print(found)
    if question.costs_no_transfers(counts[0]):
        print(UNLIMITED)
    if arguments.baselines:
        print()
        print_parts([_price_baselines(question, counts[0], plan)])
    if plan.estimated and not question.sizes:
        print("\nplanned again with each class of operators 0.7 and 1.4 times as slow:")
        print_parts([_vary(question, counts[0], plan)])
    seconds = {"load": question.load_s, **question.planner.seconds}
    print("seconds: " + ", ".join(f"{name} {s:.4f}" for name, s in seconds.items()))
    return 0


def _print_range(plans: Sequence[tuple[int | None, Plan]], question: PlanArguments) -> None:
    """Print a row for each number of devices, and what the rows say together."""
    print_parts([_tabulate(plans, question)])
    for line in _explain_end(plans):
        print(line)
    if any(plan.interpolated_between for _, plan in plans):
        print("~: times are interpolated between the profiles of two sizes")
    if question.has_knee:
        print(explain_knee(plans, question.arguments.knee))
    if question.arguments.n_microbatches is None:
        print("each row has two microbatches a device, so the batch grows: see --n-microbatches")
    if question.costs_no_transfers(plans[-1][0]):
        print(UNLIMITED)
    if question.profile.costs.estimated:
        print(question.profile.costs.estimated.details)


def draw_picture(arguments: argparse.Namespace, plans: Sequence[tuple[int | None, Plan]]) -> None:
    """Draw the picture that --picture asks for: of one plan, or of the speed-up of several."""
    if not arguments.picture:
        return
    if len(plans) == 1:
        plans[0][1].picture(arguments.picture, dark=arguments.dark)
        return
    from fxsplit.report import save_devices_picture

    save_devices_picture([(count or 0, plan) for count, plan in plans], arguments.picture, dark=arguments.dark)


def _vary(question: PlanArguments, count: int | None, plan: Plan) -> Table:
    """Return a row for each class of operators of an estimate: what its error would change in the plan."""
    costs = question.profile.costs
    machine, workload = question.lay_out(count)
    split = [(stage.nodes, stage.devices, stage.recompute) for stage in plan.stages]
    rows = []
    with show_progress():
        for kind, share in track(list(list_shares(costs).items()), "plans for other times"):
            cells = []
            for factor in FACTORS:
                changed = _scale(costs, kind, factor)
                planner = replace(question.planner, costs=changed, seconds={"states": 0.0, "solve": 0.0}, _known={})
                other = question.plan(count, planner)
                kept = price_split(changed, machine, workload, split, plan.model)
                lost = max(stage.load_ms for stage in kept) / (other.bottleneck_ms or 1.0) - 1.0
                moved = (other.step_ms or 0.0) / plan.step_ms - 1.0 if plan.step_ms else 0.0
                # Other cuts may be as good.
                cuts = "cuts stay" if lost < PROVEN else f"other cuts are {100 * lost:.1f} % better"
                cells.append(f"step {100 * moved:+.0f} %, {cuts}")
            rows.append((kind, f"{100 * share:.0f} %", *cells))
    return Table(("operators", ">of the time", *(f"{factor:g} times" for factor in FACTORS)), rows)


def _scale(costs: Costs, kind: str, factor: float) -> Costs:
    """Return costs in which the operators of a class take `factor` times as long."""

    def slow_down(node: NodeCost) -> NodeCost:
        weight_ms = None if node.weight_ms is None else node.weight_ms * factor
        return replace(
            node, forward_ms=node.forward_ms * factor, backward_ms=node.backward_ms * factor, weight_ms=weight_ms
        )

    return replace(costs, nodes=tuple(slow_down(node) if node.kind == kind else node for node in costs.nodes))


def _tabulate(plans: Sequence[tuple[int | None, Plan]], question: PlanArguments) -> Table:
    """Return a row for each number of devices."""
    rows: list[tuple[object, ...]] = []
    if question.objective == "step":
        return tabulate_steps(plans)
    for count, plan in plans:
        figures = f"{plan.bottleneck_ms:.4f}", f"{plan.speedup:.2f}", plan.standing.removeprefix("gap ")
        found = question.find_search(plan)
        searched = () if found is None else (f"{found.step_ms:.3f}", found.standing.removeprefix("gap "))
        rows.append((count, *figures, len(plan.stages), *searched))
    searched = (">step ms", ">step gap") if question.schedule == SEARCH else ()
    return Table((">devices", ">bottleneck ms", ">speed-up", ">gap", ">stages", *searched), rows)


def _explain_end(plans: Sequence[tuple[int | None, Plan]]) -> list[str]:
    """Return two lines on why the last rows have the same bottleneck, if these rows are proven optimal."""
    (most, last) = plans[-1]
    # Of a device with several stages only the slowest stage is proven, and not the device's time.
    proven = [
        (count, plan)
        for count, plan in plans
        if plan.optimal and plan.minimised == "bottleneck" and plan.steady_ms == plan.bottleneck_ms
    ]
    same = [count for count, plan in proven if plan.bottleneck_ms == last.bottleneck_ms]
    if len(same) < 2 or same[-1] != most:
        return []
    slowest = max(last.stages, key=lambda stage: stage.load_ms)
    # One node runs on one device, whatever the plan.
    more = slowest.nodes[1:]
    alone = not more and len(slowest.devices) == 1 and last.model.name != "replicated"
    beyond = " or more" if alone and slowest.load_ms == slowest.forward_ms + slowest.backward_ms else ""
    return [
        f"no plan for {most}{beyond} devices is faster than the one for {same[0]}: the slowest stage is",
        f"  {slowest.place}, with {format_count(len(slowest.nodes), 'node')}",
    ]


def _emit(question: PlanArguments, counts: Sequence[int | None]) -> int:
    """Write the plan for torchtitan and print the modules of each stage, or for a viewer of graphs."""
    if len(counts) > 1:
        raise InputError(f"--devices {question.arguments.devices}: --emit writes one plan, give one number")
    costs = question.profile.costs
    if question.arguments.emit != "titan":
        return _emit_graph(question, counts[0])
    check_forward(costs)
    check_modules(costs, len(question.lay_out(counts[0])[0]))
    plan = question.plan(counts[0])
    devices = len(question.machine(counts[0]))
    schedule = build_schedule(plan, Scheduler(question.schedule, devices), plan.n_microbatches)
    made = emit_titan(plan, costs, schedule)
    folder = question.arguments.to or "."
    made.save(folder)
    draw_picture(question.arguments, [(counts[0], plan)])
    if question.arguments.json:
        print_json({"parts": made.parts, "folder": folder} | question.answer(plan))
        return 0
    for number, modules in enumerate(made.parts):
        print(f"stage {number}: {', '.join(modules)}")
    print(f"{CONFIG} and {SCHEDULE} written to {folder}")
    return 0


def _emit_graph(question: PlanArguments, count: int | None) -> int:
    """Write the graph of the plan for a viewer, and print the plan and the names of the files."""
    from fxsplit.report.export.dot import write_dot
    from fxsplit.report.export.model_explorer import write_model_explorer

    plan, costs = question.plan(count), question.profile.costs
    folder = Path(question.arguments.to or ".")
    as_dot = question.arguments.emit == "dot"
    files = {"plan.dot": write_dot(plan, costs)} if as_dot else write_model_explorer(plan, costs)
    make_folder(folder)
    for name, text in files.items():
        write_whole(folder / name, text)
    draw_picture(question.arguments, [(count, plan)])
    if question.arguments.json:
        print_json({"files": list(files), "folder": str(folder)} | question.answer(plan))
        return 0
    print_parts(plan.show())
    print(f"{', '.join(files)} written to {folder}")
    return 0


def _price_baselines(question: PlanArguments, count: int | None, plan: Plan) -> Table:
    """Return a table of simple splits, with the ratio of their bottleneck to the plan's."""
    machine, workload = question.lay_out(count)
    # A simple split may cut inside a contracted block, so use all states.
    chains, states = question.planner.lattice(machine, whole=True)
    rows = [("plan", f"{plan.bottleneck_ms:.4f}", "1.00", "")]
    for name in BASELINES:
        other = plan_baseline(name, question.profile.costs, chains, states, machine, workload, question.options.costs)
        if other is None:
            rows.append((name, "-", "-", "too few nodes"))
            continue
        # Replicas are on equal devices: check the first.
        fits = all(s.memory_bytes <= machine.devices[s.devices[0]].memory_bytes for s in other.stages)
        ratio = other.bottleneck_ms / plan.bottleneck_ms if plan.bottleneck_ms else inf
        note = "" if fits else "does not fit in memory"
        rows.append((name, f"{other.bottleneck_ms:.4f}", f"{ratio:.2f}", note))
    return Table(("split", ">bottleneck ms", ">x plan", "note"), rows)

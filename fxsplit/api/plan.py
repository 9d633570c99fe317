"""plan(): return the best plan for a profile or a model, on a machine that need not be here.

It takes the same steps as the passes augment, order and partition (planner/planner.py), from the costs and without a
graph. So it returns the plan that `compile` makes from the same costs, and it loads no torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from fxsplit.api.compiler.microbatch_count import check_microbatch_count, choose_microbatch_count
from fxsplit.errors import InputError, UnsteadyProfileWarning
from fxsplit.formats import ProfileFile, read
from fxsplit.ir.facts.costs.compress import Compress, check_compress
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.costs.forwards import keep_forwards
from fxsplit.ir.facts.given.machine import Device, Machine, check_device_count
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.plan import Plan
from fxsplit.planner import Options
from fxsplit.planner.batch import check_several, choose_count, list_sizes
from fxsplit.planner.planner import Planner
from fxsplit.planner.problem.borders import compress_cuts
from fxsplit.planner.solve import OBJECTIVES
from fxsplit.schedule.generators.catalogue import INFERENCE, ScheduleName, Scheduler, find_schedule
from fxsplit.schedule.generators.synchronous import check_takes_replicas
from fxsplit.schedule.of_plan import find_replicas
from fxsplit.schedule.schedule import Schedule
from fxsplit.schedule.schedule_plan import schedule_plan, state_step
from fxsplit.schedule.torch_csv import read_schedule
from fxsplit.system.figures import check_flag, show
from fxsplit.system.interrupts import lose_no_interrupt
from fxsplit.system.progress_bar import show_progress
from fxsplit.system.user_lines import warn_user

if TYPE_CHECKING:  # a model comes with torch; a profile does not need it
    from torch import nn

    from fxsplit.api.pipeline.pipeline import Pipeline

S = TypeVar("S")
OneProfile: TypeAlias = "Costs | Pipeline | nn.Module | str | os.PathLike[str]"
"""Costs, or what they are read from, taken from or measured on."""


@lose_no_interrupt
def plan(
    profile: OneProfile | Sequence[OneProfile],
    machine: int | Machine,
    *,
    example_inputs: Any = None,
    schedule: ScheduleName | Schedule | os.PathLike[str] | None = None,
    n_microbatches: int | None = None,
    inference: bool = False,
    compress: Compress | None = None,
    options: Options | None = None,
    objective: Literal["bottleneck", "step"] | None = None,
    best: bool = False,
    pins: Mapping[str, int] | None = None,
    together: Sequence[Sequence[str]] = (),
) -> Plan:
    """Return the plan with the fastest slowest stage, or with the shortest step, on `machine`; with its lower bound.

    profile: costs, a compiled pipeline, the path of a profile (fxsplit's JSON, PipeDream's graph.txt, or a
        dnn-partitioning JSON), or a model, which is measured here on a CPU. `fxsplit.profile` measures on other
        devices. With `best`, also a list of profiles of one model at several microbatch sizes: then the number of
        microbatches is chosen too, for a batch of `n_microbatches` microbatches of the first profile. Times at sizes
        between two profiles are interpolated, and the plan says so.
    machine: a number of equal devices with free links, or a Machine, which need not exist here.
    example_inputs: one whole batch for a model, as `compile` takes it.
    schedule, n_microbatches: any schedule that compile() runs (default: "1F1B"), and the pieces that a batch is cut
        into (default: two a device). They decide how many microbatches a stage holds, and how many stages a device
        has. "search" plans for 1F1B, and then searches for the order of work with the shortest step. Also a Schedule,
        or a .csv file.
    inference: plan for outputs without gradients: from forward times only, with each weight held once. A profile that
        was measured for inference needs this.
    compress: count values and gradients with the bytes that compile(compress=) sends: "bf16" or "int8".
    options: the cost model, and the freedoms of the planner.
    objective: what the plan makes as small as possible: "bottleneck" (the default), the time of its slowest stage, or
        "step", the time of a whole step under its schedule. "step" leaves devices idle that do not help.
    best: choose stages, their replicas, the devices in use and the order of work together, for the shortest step. It
        stands for objective="step", schedule="search" and Options(model="replicated", recompute="auto"), unless these
        are stated.
    pins: submodule or node -> number of its stage.
    together: sets of submodules or nodes that no cut may separate.

    Raises PlanError if no plan exists (NoFit if memory is too small), ScheduleError for numbers that the schedule is
    not made for, ProfileError or InputError for bad input.
    """
    _check_arguments(machine, options, pins, together)
    check_flag("inference", inference)
    check_flag("best", best)
    if best and inference:
        raise InputError("best=True with inference=True: a step is one of training, so leave one of them out")
    options, chosen = choose_objective(options, objective, schedule, best=best)
    if inference:
        check_without_backwards(options)
    where = machine if isinstance(machine, Machine) else Machine.planned(machine)
    several = isinstance(profile, (list, tuple))
    given: Sequence[Any] = profile if isinstance(profile, (list, tuple)) else [profile]
    batch = check_several(len(given), n_microbatches, best=best) if several else 0
    measure = partial(_measure, example_inputs=example_inputs, n_microbatches=n_microbatches, inference=inference)
    profiles = [_find_costs(each, where, measure) for each in given]
    stated, fixed = read_schedule(chosen)
    check_compress(compress)

    def plan_for(costs: Costs, count: int | None) -> Plan:
        costs, name = choose_passes(costs, "1F1B" if fixed else stated, inference=inference)
        # The costs of a pipeline with compressed cuts count the compressed bytes already.
        costs = costs if compress is None else compress_cuts(costs, compress)
        laid_out, workload = lay_out(where, name, count) if fixed is None else lay_out_schedule(where, fixed, count)
        # A schedule that is stated action by action has all of its stages.
        own = options if fixed is None else replace(options, use_all=True)
        found = check_can_run(Planner(costs, pins or {}, together).plan(laid_out, workload, own))
        return state_step(schedule_plan(found, costs, laid_out, workload)[0])

    with show_progress():
        if not several:
            return plan_for(profiles[0], n_microbatches)
        return choose_count(list_sizes(profiles, _name_profiles(given), batch), where, plan_for)


def _name_profiles(given: Sequence[Any]) -> list[str]:
    """Return the names of profiles, for errors: their paths, or their numbers."""
    return [os.fspath(each) if isinstance(each, (str, os.PathLike)) else f"profile {i}" for i, each in enumerate(given)]


def _find_costs(profile: OneProfile, machine: Machine, measure: Callable[[Any, Machine], Costs]) -> Costs:
    """Return the costs of a profile, a file, a pipeline or a model, and warn if they are not steady.

    `measure` returns the costs of a model, for a machine.
    """
    if isinstance(profile, (str, os.PathLike)):
        profile = read(profile).costs
    # A compiled pipeline knows its costs. One that is not compiled raises its own error, which says so.
    costs: Any = profile.costs if not isinstance(profile, Costs) and "costs" in dir(profile) else profile
    found = costs if isinstance(costs, Costs) else measure(profile, machine)
    if found.noise is not None:
        warn_user(found.noise, UnsteadyProfileWarning)
    return found


def choose_objective(
    options: Options | None, objective: str | None, schedule: S | None, *, best: bool
) -> tuple[Options, S | Literal["1F1B", "search"]]:
    """Return the options and the schedule of a plan, with the defaults of its objective; see `plan`."""
    if objective not in (None, *OBJECTIVES):
        raise InputError(f"objective={show(objective)}: give one of {', '.join(OBJECTIVES)}")
    if best and objective == "bottleneck":
        raise InputError("best=True with objective='bottleneck': the best plan is the one with the shortest step")
    objective = "step" if best else objective
    if options is None:
        chosen = Options(model="replicated", recompute="auto") if best else Options()
        options = replace(chosen, use_all=objective != "step")
    options = replace(options, objective=objective or options.objective)
    usual: Literal["1F1B", "search"] = "search" if best else "1F1B"
    return options, usual if schedule is None else schedule


def _check_arguments(machine: object, options: object, pins: object, together: object) -> None:
    """Raise InputError for an argument of plan() that is of another type."""
    if not isinstance(machine, (int, Machine)):
        raise InputError(
            f"machine={show(machine)}: give a number of devices to plan for, or a Machine, such as "
            "fxsplit.Machine.of(['cpu', 'cpu'])"
        )
    if not (options is None or isinstance(options, Options)):
        raise InputError(f"options={show(options)}: give an Options of fxsplit.planner, Options(...)")
    if not (pins is None or isinstance(pins, Mapping)):
        raise InputError(f"pins={show(pins)}: give the number of a stage by submodule or node, such as {{'head': 1}}")
    for name, stage in (pins or {}).items():
        if not isinstance(name, str) or type(stage) is not int:
            raise InputError(
                f"pins={{{show(name)}: {show(stage)}}}: give the name of a submodule or node, and a number"
            )
    several = (list, tuple, set, frozenset)
    if not isinstance(together, several):
        raise InputError(
            f"together={show(together)}: give a list of sets of names that stay together, such as [('a', 'b')]"
        )
    for names in together:
        # The planner says more about a name that is no set of names.
        if not (isinstance(names, str) or (isinstance(names, several) and all(isinstance(n, str) for n in names))):
            raise InputError(f"together has {show(names)}: give sets of names that stay together, such as ('a', 'b')")


def choose_passes(costs: Costs, schedule: str, *, inference: bool) -> tuple[Costs, str]:
    """Return the costs to plan from and the schedule to plan for, with or without backwards.

    Raises InputError if costs without backwards are to be planned for training, or if a training schedule is given for
    inference; ScheduleError for an unknown schedule, and for the name "Inference" in a plan for training.
    """
    if not inference and costs.inference:
        raise InputError(
            "the profile has only forwards, as measured for inference: plan for inference, too (inference=True, or "
            "--inference; simulate takes --schedule Inference), or measure the model for training"
        )
    if not inference:
        find_schedule(schedule)
        return costs, schedule
    if schedule != "1F1B":
        raise InputError(f"schedule {schedule!r} for inference: without backwards there is one schedule, leave it out")
    return keep_forwards(costs), INFERENCE


def check_without_backwards(options: Options) -> None:
    """Raise InputError for an option that changes nothing in a plan for inference."""
    if options.recompute != Options.recompute:
        raise InputError(f"partition{{recompute={options.recompute}}}: inference has no backwards, so leave it out")
    if options.optimizer_factor != Options.optimizer_factor:
        factor = f"{options.optimizer_factor:g}"
        raise InputError(f"partition{{optimizer_factor={factor}}}: inference has no optimizer, so leave it out")


def _measure(
    model: Any, machine: Machine, *, example_inputs: Any, n_microbatches: int | None, inference: bool
) -> Costs:
    """Return the costs of a model, measured here on a CPU. Raises InputError if `model` is not a module."""
    # A user who has a model has loaded torch. This check must not load torch for a typing error.
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module):
        raise InputError(
            f"profile is a {type(model).__name__}: give costs, a compiled pipeline, the path of a profile, or a model"
        )
    if example_inputs is None:
        raise InputError("to plan for a model it is measured first: give example_inputs=, one whole batch")
    # Measuring needs torch, but planning from a profile must not load it.
    from fxsplit.api.profile import profile

    count = choose_microbatch_count(len(machine), stated=n_microbatches)
    return profile(model, example_inputs, n_microbatches=count, inference=inference)


def check_can_run(plan: Plan) -> Plan:
    """Return the plan. Raises ScheduleError if a stage has several devices and the schedule cannot run such stages."""
    # A plan that states its schedule was made for it.
    if find_replicas(plan) is not None and not plan.schedule_csv:
        check_takes_replicas(plan.schedule)
    return plan


def lay_out(
    machine: Machine,
    schedule: str = "1F1B",
    n_microbatches: int | None = None,
    stages_per_device: int | None = None,
) -> tuple[Machine, Workload]:
    """Return the machine and the workload that the planner takes: the devices as stages see them, and their memory.

    Under a schedule with several stages a device, the machine has a device for each of them, which has an even
    share of the memory. The workload says how many microbatches each stage holds at once.

    Raises ScheduleError for numbers that the schedule is not made for, InputError for too many devices.
    """
    check_device_count(len(machine))
    if n_microbatches is not None:
        check_microbatch_count(n_microbatches)
    count = choose_microbatch_count(len(machine), stated=n_microbatches)
    return Scheduler(schedule, len(machine), stages_per_device).lay_out(machine, count)


def lay_out_schedule(
    machine: Machine, schedule: Schedule, n_microbatches: int | None = None
) -> tuple[Machine, Workload]:
    """Return the machine and the workload for a schedule that is stated action by action.

    Raises InputError for another number of devices or microbatches than the schedule's, and NotExportable for one with
    replicas of stages, or with several steps.
    """
    if len(machine) != schedule.n_devices:
        raise InputError(
            f"schedule {schedule.name!r} is for {schedule.n_devices} devices, and there are {len(machine)}"
        )
    if n_microbatches not in (None, schedule.n_microbatches):
        raise InputError(
            f"n_microbatches={n_microbatches}: schedule {schedule.name!r} has {schedule.n_microbatches}: leave it out"
        )
    return Scheduler.of(schedule).lay_out(machine, schedule.n_microbatches)


def build_machine(profile: ProfileFile, devices: int | None, bandwidth: float | None) -> Machine:
    """Return the machine that a file states, or one with `devices` equal accelerators in place of the file's."""
    stated = 2 if profile.accelerators is None else profile.accelerators
    count = stated if devices is None else devices
    if count < 1 and not profile.hosts:
        raise InputError(f"devices={count}: give at least 1 device to plan for")
    check_device_count(count + profile.hosts)
    bytes_per_s = bandwidth or profile.bytes_per_s
    # The devices of a file are alike. Only their own links join them. Hosts come last.
    made = [Device(f"device{i}", memory_bytes=profile.memory_bytes, bytes_per_s=bytes_per_s) for i in range(count)]
    made += [Device(f"host{i}", host=True) for i in range(profile.hosts)]
    return Machine(tuple(made), (inf,) * (len(made) - 1))

"""plan(): return the best plan for a profile, or a model, on a machine that need not be here."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from fxsplit.errors import InputError
from fxsplit.formats import Profile, read
from fxsplit.ir.facts.costs import Costs
from fxsplit.ir.facts.machine import Device, Machine
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.workload import Workload
from fxsplit.planner import Options
from fxsplit.schedule import PEAKS, find_schedule

if TYPE_CHECKING:  # a model comes with torch; a profile does not need it
    from torch import nn

    from fxsplit.api.pipeline import Pipeline
from fxsplit.planner.planner import Planner

MAX_DEVICES = 512


def plan(
    profile: Costs | Pipeline | nn.Module | str | os.PathLike[str],
    machine: int | Machine,
    *,
    example_inputs: Any = None,
    schedule: str = "1F1B",
    n_microbatches: int | None = None,
    options: Options | None = None,
    pins: Mapping[str, int] | None = None,
    keep: Sequence[Sequence[str]] = (),
) -> Plan:
    """Return the plan whose slowest stage is fastest on `machine`, with its lower bound and gap.

    profile: costs, a pipeline that has some, the path of a profile (fxsplit's JSON, PipeDream's graph.txt, or a
        dnn-partitioning JSON), or a model, which is measured here on a CPU; `fxsplit.profile` measures elsewhere.
    machine: a number of equal devices with free links, or a Machine, which need not exist here.
    example_inputs: one whole batch for a model, as `compile` takes it.
    schedule, n_microbatches: what decides how many microbatches a stage holds (default: two a device).
    options: the cost model, and what the planner may do. pins: submodule or node -> number of its device. keep: sets of
        submodules or nodes that no cut may part.

    Raises PlanError where no plan exists (NoFit where memory is too small), ProfileError or InputError for bad input.
    """
    if isinstance(profile, (str, os.PathLike)):
        profile = read(profile).costs
    where = machine if isinstance(machine, Machine) else Machine.planned(machine)
    costs = profile if isinstance(profile, Costs) else getattr(profile, "costs", None)
    if not isinstance(costs, Costs):
        costs = _measured(profile, example_inputs, n_microbatches or 2 * len(where))
    return Planner(costs, pins or {}, keep).plan(
        where, make_workload(where, schedule, n_microbatches), options or Options()
    )


def _measured(model: Any, example_inputs: Any, n_microbatches: int) -> Costs:
    """Return the costs of a model; raises InputError for anything else."""
    torch = sys.modules.get("torch")  # who has a model has loaded it
    if torch is None or not isinstance(model, torch.nn.Module):
        raise InputError(
            f"profile is a {type(model).__name__}: give costs, a compiled pipeline, the path of a profile, or a model"
        )
    if example_inputs is None:
        raise InputError("to plan for a model it is measured first: give example_inputs=, one whole batch")
    from fxsplit.api.profile import profile

    return profile(model, example_inputs, n_microbatches=n_microbatches)


def make_workload(machine: Machine, schedule: str = "1F1B", n_microbatches: int | None = None) -> Workload:
    """Return what a schedule asks of each stage's memory, for every number of stages up to the machine's devices."""
    if len(machine) > MAX_DEVICES:
        raise InputError(f"{len(machine)} devices: plan for at most {MAX_DEVICES}")
    count = n_microbatches or 2 * len(machine)
    find_schedule(schedule, tuple(PEAKS))
    return Workload(schedule, count, {k: PEAKS[schedule](k, count) for k in range(1, len(machine) + 1)})


def build_machine(profile: Profile, devices: int | None, bandwidth: float | None) -> Machine:
    """Return the machine that a file states, or `devices` equal accelerators in their place."""
    stated = 2 if profile.accelerators is None else profile.accelerators
    count = stated if devices is None else devices
    if count < 1 and not profile.hosts:
        raise InputError(f"devices={count}: give at least 1 device to plan for")
    bytes_per_s = bandwidth or profile.bytes_per_s
    made = [Device(f"device{i}", memory_bytes=profile.memory_bytes, bytes_per_s=bytes_per_s) for i in range(count)]
    made += [Device(f"host{i}", host=True) for i in range(profile.hosts)]
    return Machine(tuple(made), (inf,) * (len(made) - 1))

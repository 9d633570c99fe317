"""The cases in which the order of work is checked: schedules, loops, devices, and features of models and callers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from fxsplit.schedule.generators.catalogue import ASYNCHRONOUS as ASYNCHRONOUS_SCHEDULES
from fxsplit.schedule.generators.catalogue import RUNNABLE
from tests.support.accelerator.cases import (
    ACCUMULATION,
    ASYNCHRONOUS,
    BACKWARD,
    EVALUATION,
    FAILURE,
    MIXED,
    SIDE,
    STEP,
    STREAM,
    TWO,
    Case,
    HalfTied,
    Net,
    Tied,
    deal,
)

PLACES = {
    "one device": ("toy:0", "toy:0"),
    "own devices": ("toy:0", "toy:1"),
    "three devices": ("toy:0", "toy:1", "toy:2"),
}
Norm = partial(Net, norm=True, layers=3)
KINDS: dict[str, dict[str, Any]] = {
    "tied weights": {"make_model": Tied},
    "weights of another stage": {"make_model": HalfTied},
    "batch norm": {"make_model": Norm},
    "deferred batch norm": {"make_model": Norm, "options": {"deferred_batch_norm": True}},
    "recompute": {"make_model": Norm, "options": {"recompute": "always"}},
    "recompute, ZB-H1": {"schedule": "ZB-H1", "options": {"recompute": "except_last"}},
}
LOOPS = (STEP, BACKWARD, ACCUMULATION, SIDE, MIXED, EVALUATION)


# If a mutant must be reported, the cut must not depend on times.
HALVES = {"passes": deal([1, 1])}
REPLICAS = {"passes": deal([2, 1])}
# After its forward the caller's stream writes statistics, which a recomputed forward copies.
LATE = {"deferred_batch_norm": True, "recompute": "always", **HALVES}
FEW = [
    Case("1F1B: step, own devices", make_model=partial(Net, layers=4)),
    Case("1F1B: step, a stage on the CPU", ("toy:0", "cpu"), make_model=partial(Net, layers=4)),
    Case("tied weights: backward, own devices", loop=BACKWARD, make_model=Tied, options=HALVES),
    Case("tied weights: accumulation, own devices", loop=ACCUMULATION, make_model=HalfTied, options=HALVES),
    Case("1F1B: side stream, own devices", loop=SIDE, make_model=partial(Net, layers=4)),
    Case("deferred batch norm: two streams, own devices", loop=TWO, make_model=Norm, options=LATE),
    Case("GPipe: evaluation, one device", PLACES["one device"], "GPipe", EVALUATION, partial(Net, layers=4)),
    Case("ZB-H1: failure, one device", PLACES["one device"], "ZB-H1", FAILURE, partial(Net, layers=4)),
    Case("PipeDream: step, one device", PLACES["one device"], "PipeDream", ASYNCHRONOUS),
    Case("replicas (2, 1): step, other devices", PLACES["three devices"], make_model=Tied, options=REPLICAS),
    Case("replicas (2, 1): batches under way", PLACES["three devices"], "1F1B", STREAM, Tied, options=REPLICAS),
]
"""A few cases with every feature: together they report every mutant."""


def list_cases() -> list[Case]:
    """Return all cases."""
    return [*_list_schedules(), *_list_kinds(), *_list_replicas(), *_list_mixed()]


def group_cases() -> list[list[Case]]:
    """Return all cases, those together that one compiled pipeline can run.

    Every loop is the first one of a new pipeline in some groups.
    """

    def find_key(case: Case) -> tuple[Any, ...]:
        # A model in evaluation mode is compiled anew.
        compiled = case.devices, case.schedule, case.make_model, case.n_microbatches, case.options
        return *compiled, case.loop == EVALUATION

    found: list[list[Case]] = []
    for case in list_cases():
        group = next((group for group in found if find_key(group[0]) == find_key(case)), None)
        if group is None:
            found.append([case])
        else:
            group.append(case)
    return [group[i % len(group) :] + group[: i % len(group)] for i, group in enumerate(found)]


def _name(place: str, what: str, loop: str) -> str:
    return f"{what}: {loop}, {place}"


def _list_schedules() -> Iterator[Case]:
    """Yield each schedule in each loop, on the devices of one place, and a step that fails."""
    for place, devices in PLACES.items():
        count = 2 * len(devices)
        for schedule in RUNNABLE:
            if schedule == "Chimera" and len(devices) % 2:
                continue
            for loop in (*LOOPS, FAILURE):
                yield Case(_name(place, schedule, loop), devices, schedule, loop, n_microbatches=count)
        for stream in ASYNCHRONOUS_SCHEDULES:
            yield Case(_name(place, stream, STEP), devices, stream, ASYNCHRONOUS, n_microbatches=count)


def _list_kinds() -> Iterator[Case]:
    # A stage between two others receives as the last one does, and sends as the first one does.
    for place in ("one device", "three devices"):
        devices = PLACES[place]
        for kind, more in KINDS.items():
            for loop in LOOPS:
                yield Case(_name(place, kind, loop), devices, loop=loop, **more)


def _list_replicas() -> Iterator[Case]:
    """Yield stages on several devices, one of which may also hold the other stage."""
    for place, devices in {"other devices": PLACES["three devices"], "one device": ("toy:0",) * 3}.items():
        for counts in ((2, 1), (1, 2)):
            options = {"passes": deal(counts)}
            for loop in (*LOOPS, STREAM):
                name = _name(place, f"replicas {counts}", loop)
                yield Case(name, devices, loop=loop, make_model=Tied, options=options)


def _list_mixed() -> Iterator[Case]:
    """Yield pipelines with some stages on the CPU."""
    for devices in (("toy:0", "cpu"), ("cpu", "toy:1"), ("toy:0", "cpu", "toy:1")):
        for loop in LOOPS:
            yield Case(_name(", ".join(devices), "1F1B", loop), devices, loop=loop)

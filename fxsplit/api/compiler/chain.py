"""Put a plan, pins, and nodes that stay together, as the user states them, into the chain of passes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from fxsplit.errors import InputError
from fxsplit.formats.plan_json import read_plan
from fxsplit.ir.chain import Chain
from fxsplit.ir.facts.given.machine import MAX_DEVICES
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.split import CutBefore, Split
from fxsplit.ir.graph import Pass, name_pass
from fxsplit.passes import Cut, Pin, ReadPlan, SplitBy, TakePlan, Together
from fxsplit.schedule import Schedule
from fxsplit.schedule.generators.catalogue import INFERENCE, SCHEDULES
from fxsplit.schedule.generators.catalogue import SEARCH as SEARCHED
from fxsplit.schedule.torch_csv import parse_csv
from fxsplit.system.figures import show

SEARCH = ("augment", "order", "partition")
"""The passes that a stated plan takes the place of."""


def state_in_chain(
    chain: Chain,
    plan: Plan | Split | str | os.PathLike[str] | None,
    pins: Mapping[str, int],
    together: Sequence[Sequence[str]],
) -> Chain:
    """Return `chain` with passes for the stated plan, pins and groups of nodes.

    Raises InputError for an argument of another form.
    """
    if not isinstance(pins, Mapping) or not all(isinstance(n, str) and type(d) is int for n, d in pins.items()):
        raise InputError(f"pins={show(pins)}: give the number of a device by submodule or node, such as {{'head': 1}}")
    if not isinstance(together, (list, tuple, set, frozenset)) or not all(_is_set(names) for names in together):
        raise InputError(f"together={show(together)}: give sets of names that stay together, such as [('a', 'b')]")
    if plan is not None and (pins or together):
        raise InputError("plan= states all stages: leave out pins= and together=, or the plan")
    names = [name_pass(step) for step in chain]
    if together:
        if "profile" not in names:
            raise InputError("together= needs the pass 'profile' in the chain, or put together{nodes=...} into it")
        chain = chain.after("profile", *(Together(tuple(group)) for group in together))
    if plan is not None:
        taken = _choose_pass(plan)
        at = next((i for i, name in enumerate(names) if name in SEARCH), None)
        if at is None:
            raise InputError(f"plan= takes the place of {', '.join(SEARCH)}, and the chain has none of them")
        kept = [step for step in chain if name_pass(step) not in SEARCH]
        chain = Chain((*chain.passes[:at], taken, *kept[at:]))
    return Chain((*(Pin(name, device) for name, device in pins.items()), *chain.passes))


def find_schedule_of(
    plan: Plan | Split | str | os.PathLike[str] | None,
) -> tuple[str | None, Schedule | None, int | None]:
    """Return the schedule that a stated plan was made for: its name, its actions, and its number of microbatches.

    The actions are None if the name gives them. The number is None if the schedule is for any number.
    (None, None, None) without a plan, and for plans that state none: a split by hand, and a plan for inference. Raises
    PlanError for a file without a plan, ScheduleError for a damaged schedule.
    """
    made = read_plan(plan) if isinstance(plan, (str, os.PathLike)) else plan
    if not isinstance(made, Plan) or made.schedule == INFERENCE:
        return None, None, None
    actions = None
    if made.schedule_csv and made.schedule not in SCHEDULES:
        actions = parse_csv(made.schedule_csv, made.schedule)
        # Only a searched order with two stages on a device is more than its name says.
        if made.schedule == SEARCHED and not actions.shares_devices:
            actions = None
    return made.schedule, actions, made.n_microbatches if made.schedule_csv else None


def _choose_pass(plan: Plan | Split | str | os.PathLike[str]) -> Pass:
    """Return the pass that takes the stages of a plan, of its file, or of a split by hand; raises InputError."""
    if isinstance(plan, (str, os.PathLike)):
        return ReadPlan(os.fspath(plan))
    if isinstance(plan, Plan):
        return TakePlan(plan)
    if isinstance(plan, CutBefore):
        return Cut(before=plan.names)
    if isinstance(plan, Mapping) and all(type(stage) is int and 0 <= stage < MAX_DEVICES for stage in plan.values()):
        count = max(plan.values(), default=0) + 1
        return SplitBy(tuple(tuple(n for n, s in plan.items() if s == i) for i in range(count)))
    if isinstance(plan, (list, tuple)) and all(map(_is_set, plan)):
        return SplitBy(tuple(map(tuple, plan)))
    raise InputError(
        f"plan={show(plan)}: give a Plan, the path of one, the stage of each submodule, a list of names for each "
        "stage, or fxsplit.cut_before('layer3')"
    )


def _is_set(names: object) -> bool:
    """Return whether a value is a list or set of names."""
    return isinstance(names, (list, tuple, set, frozenset)) and all(isinstance(name, str) for name in names)

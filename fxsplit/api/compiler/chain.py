"""State a plan, pins and nodes that stay together in the chain of passes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from fxsplit.errors import InputError
from fxsplit.ir.chain import Chain
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.split import Split
from fxsplit.ir.graph import name_pass
from fxsplit.passes import Pin, ReadPlan, TakePlan, Together
from fxsplit.system.figures import show

SEARCH = ("augment", "order", "partition")
"""The passes that a stated plan takes the place of."""


def state_in_chain(
    chain: Chain,
    plan: Plan | Split | str | os.PathLike[str] | None,
    pins: Mapping[str, int],
    together: Sequence[Sequence[str]],
) -> Chain:
    """Return `chain` with passes for what the user states; raises InputError for statements of another form."""
    if not isinstance(pins, Mapping) or not all(isinstance(n, str) and type(d) is int for n, d in pins.items()):
        raise InputError(f"pins={show(pins)}: give the number of a device by submodule or node, such as {{'head': 1}}")
    if isinstance(together, str) or not all(_is_set(names) for names in together):
        raise InputError(f"together={show(together)}: give sets of names that stay together, such as [('a', 'b')]")
    if plan is not None and (pins or together):
        raise InputError("plan= states all stages: leave out pins= and together=, or the plan")
    names = [name_pass(step) for step in chain]
    if together:
        if "profile" not in names:
            raise InputError("together= needs the pass 'profile' in the chain, or put together{nodes=...} into it")
        chain = chain.after("profile", *(Together(tuple(group)) for group in together))
    if plan is not None:
        taken = ReadPlan(os.fspath(plan)) if isinstance(plan, (str, os.PathLike)) else TakePlan(plan)
        at = next((i for i, name in enumerate(names) if name in SEARCH), None)
        if at is None:
            raise InputError(f"plan= takes the place of {', '.join(SEARCH)}, and the chain has none of them")
        kept = [step for step in chain if name_pass(step) not in SEARCH]
        chain = Chain((*chain.passes[:at], taken, *kept[at:]))
    return Chain((*(Pin(name, device) for name, device in pins.items()), *chain.passes))


def _is_set(names: object) -> bool:
    """Return whether a value is a list or set of names."""
    return isinstance(names, (list, tuple, set, frozenset)) and all(isinstance(name, str) for name in names)

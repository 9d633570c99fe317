"""Modules that several threads run at a time, and that set attributes of their own as they run.

A hook of `torch.nn.utils.weight_norm` or `prune` computes `module.weight` before each forward and sets it. Of two
threads in such a module, one would compute with the weight of the other's microbatch. So they take turns.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from fxsplit.torch_internals.thread_modes import NO_CONTEXT

FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
STATELESS = ("torch.", "fxsplit.")
"""Modules of these packages set no attributes as they run, unless somebody hooks them."""


class ModuleLocks:
    """What stages need around a forward so that no two threads are in one module that may set attributes.

    units: for each stage the modules that its devices run, one of them for each device.
    """

    def __init__(self, units: Sequence[Sequence[nn.Module]]) -> None:
        self._units = units
        held = [[list(unit.modules()) for unit in stage] for stage in units]
        count = Counter(id(m) for stage in held for unit in stage for m in unit)
        self._shared = [{id(m): m for unit in stage for m in unit if count[id(m)] > 1} for stage in held]
        locks = [threading.RLock() for _ in units]
        # Stages that share a module have one lock, and so have all that each of them shares others with.
        self._locks = list(locks)
        for i, shared in enumerate(self._shared):
            for j in range(i):
                if shared.keys() & self._shared[j].keys():
                    old, new = self._locks[j], self._locks[i]
                    self._locks = [new if lock is old else lock for lock in self._locks]

    def __reduce__(self) -> tuple[Any, ...]:
        # A lock is of one process, and another one makes locks of its own.
        return ModuleLocks, (self._units,)

    def list_contexts(self) -> list[AbstractContextManager[Any]]:
        """Return what each stage's forward has to be in now; hooks may come and go between jobs."""
        pairs = zip(self._shared, self._locks, strict=True)
        return [lock if any(map(may_assign, shared.values())) else NO_CONTEXT for shared, lock in pairs]


def may_assign(module: nn.Module) -> bool:
    """Return whether a call of a module may set attributes: it has hooks, or a forward() that is not torch's."""
    hooked = any(module.__dict__.get(kind) for kind in FORWARD_HOOKS)
    return hooked or not type(module).__module__.startswith(STATELESS)

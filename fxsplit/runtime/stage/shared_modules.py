"""Locks for modules that several threads run at once and that set attributes of their own as they run.

A hook of `torch.nn.utils.weight_norm` or `prune` computes `module.weight` before each forward and sets it. If two
threads ran such a module at once, one would compute with the weight of the other's microbatch.
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
"""Modules of these packages set no attributes as they run, unless they have hooks."""


class ModuleLocks:
    """Locks for the forwards of stages: no two threads run a module at once if the module may set attributes.

    units: for each stage, the module that each of its devices runs.
    shared: whether any module is run by several threads.
    """

    def __init__(self, units: Sequence[Sequence[nn.Module]]) -> None:
        self._units = units
        held = [[list(unit.modules()) for unit in stage] for stage in units]
        count = Counter(id(m) for stage in held for unit in stage for m in unit)
        self._shared = [{id(m): m for unit in stage for m in unit if count[id(m)] > 1} for stage in held]
        self.shared = any(self._shared)
        locks = [threading.RLock() for _ in units]
        # Stages that share a module have one lock, also through a third stage.
        self._locks = list(locks)
        for i, shared in enumerate(self._shared):
            for j in range(i):
                if shared.keys() & self._shared[j].keys():
                    old, new = self._locks[j], self._locks[i]
                    self._locks = [new if lock is old else lock for lock in self._locks]

    def __reduce__(self) -> tuple[Any, ...]:
        # A lock belongs to one process: an unpickled copy makes its own.
        return ModuleLocks, (self._units,)

    def list_contexts(self) -> list[AbstractContextManager[Any]]:
        """Return the context for each stage's forward in this job. Hooks may come and go between jobs."""
        pairs = zip(self._shared, self._locks, strict=True)
        return [lock if any(map(may_assign, shared.values())) else NO_CONTEXT for shared, lock in pairs]


def may_assign(module: nn.Module) -> bool:
    """Return whether a call of a module may set attributes: it has hooks, or its forward() is not torch's."""
    hooked = any(module.__dict__.get(kind) for kind in FORWARD_HOOKS)
    return hooked or not type(module).__module__.startswith(STATELESS)

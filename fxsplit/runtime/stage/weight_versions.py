"""Versions: a stage whose weights change while microbatches that read the earlier ones are under way.

A backward needs the weights of its forward. So each version is leaves of its own, and the modules hold those of the
version in hand for as long as an action runs (weight stashing: Narayanan et al. 2019). The newest version lies in the
model's own memory; a step that others still read from moves the model's weights elsewhere first.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, UntypedStorage
from torch.optim import Optimizer

from fxsplit.errors import InputError
from fxsplit.ir.facts.machine import Device
from fxsplit.ir.facts.stages import Stage
from fxsplit.runtime.stage.replica import Replica
from fxsplit.schedule import Schedule
from fxsplit.schedule.action import COMPUTES, Action
from fxsplit.torch_internals.grad_sums import Sums, accumulate
from fxsplit.torch_internals.interpret import get_storage_id


class Stepper:
    """Lets one optimizer step for one stage at a time: torch's optimizers pass over parameters without a gradient."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._one_at_a_time = threading.Lock()

    def step(self, sums: Sums) -> None:
        """Step with these gradients, and keep none of them."""
        with self._one_at_a_time:
            try:
                accumulate(sums)
                self._optimizer.step()
            finally:
                for weight in sums.totals:
                    weight.grad = None


def make_stepper(schedule: Schedule, optimizer: Optimizer | None) -> Stepper | None:
    """Return what steps between microbatches, for schedules that do; raises InputError where it is missing or odd."""
    if schedule.synchronous:
        if optimizer is not None:
            raise InputError(f"{schedule.name} waits for the whole batch: call optimizer.step() after pipe.step(...)")
        return None
    if not isinstance(optimizer, Optimizer):
        raise InputError(
            f"{schedule.name} steps between microbatches: give the optimizer, pipe.step(x, target=y, optimizer=sgd)"
        )
    optimizer.zero_grad(set_to_none=True)
    return Stepper(optimizer)


class VersionedReplica(Replica):
    """A stage with as many versions of its weights as the actions in `row` ask for."""

    def __init__(
        self,
        stage: Stage,
        device: Device,
        places: Mapping[int, torch.device],
        row: Sequence[Action],
        stepper: Stepper,
    ) -> None:
        super().__init__(stage, device, places)
        self._stepper = stepper
        self._left = Counter(a.version for a in row if a.stage == stage.index and a.op in COMPUTES)
        modules = stage.module.modules()
        self._slots = [(m._parameters, name, p) for m in modules for name, p in m._parameters.items() if p is not None]
        self._weights = {weight: None for _, _, weight in self._slots}
        self._newest = 0
        self._leaves: dict[int, dict[Tensor, Tensor]] = {}
        self._add_version(0)

    @contextmanager
    def use_version(self, version: int) -> Iterator[None]:
        """Let the stage's modules hold the weights of a version."""
        leaves = self._leaves[version]
        for held, name, weight in self._slots:
            held[name] = leaves[weight]  # type: ignore[assignment]  # modules compute with any tensor
        try:
            yield
        finally:
            for held, name, weight in self._slots:
                held[name] = weight
            self._left[version] -= 1

    def list_leaves(self, trained: Sequence[Tensor], version: int) -> list[Tensor]:
        """Return the leaves of a version, and the weights themselves, which nothing should have read."""
        of = self._leaves[version]
        return [*(of.get(weight, weight) for weight in trained), *(weight for weight in trained if weight in of)]

    def step(self, action: Action, sums: Sums) -> None:
        """Make a new version from the newest one."""
        passed = next((weight for weight in sums.totals if weight in self._weights), None)
        if passed is not None:
            raise InputError(
                f"a module reads its parameter of shape {tuple(passed.shape)} from elsewhere than its attribute, where "
                "earlier versions of weights cannot be: train it under a schedule that waits for its step, as 1F1B"
            )
        if self._left[self._newest] > 0:
            self._move_weights()
        self._stepper.step(self.assign_to_owners(sums))
        self._add_version(action.version)

    def _add_version(self, version: int) -> None:
        """Let the model's weights as they are now be a version, and forget those that nothing will read."""
        self._newest = version
        self._leaves[version] = {w: w.data.requires_grad_(w.requires_grad) for w in self._weights}
        self._leaves = {v: leaves for v, leaves in self._leaves.items() if v == version or self._left[v] > 0}
        self._owner_of = {leaf: w for leaves in self._leaves.values() for w, leaf in leaves.items()}

    def _move_weights(self) -> None:
        """Move the model's weights to other memory; those that share memory go on sharing it."""
        moved: dict[int, UntypedStorage] = {}
        for weight in self._weights:
            key = get_storage_id(weight)
            storage = moved[key] = moved[key] if key in moved else weight.untyped_storage().clone()
            elsewhere = torch.empty(0, dtype=weight.dtype, device=weight.device)
            weight.data = elsewhere.set_(storage, weight.storage_offset(), weight.shape, weight.stride())

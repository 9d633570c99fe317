"""Run a stage whose weights change while microbatches in flight still need earlier weights.

Asynchronous schedules such as PipeDream step between microbatches, and a backward needs the weights of its forward. So
each *version* of the weights is a set of leaves of its own, and during an action the stage's modules hold the leaves of
one version (weight stashing: Narayanan et al., PipeDream, 2019).

    version 0  [forward 0] [forward 1] [backward 0]          [backward 1]   old memory, freed after backward 1
                                            step --> version 1 [forward 2]   the model's own memory

The newest version is in the model's own memory. If later actions still read that memory, a step first moves the model's
weights to other memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, UntypedStorage
from torch.optim import Optimizer

from fxsplit.errors import InputError
from fxsplit.ir.facts.given.machine import Device
from fxsplit.ir.facts.stages import Stage
from fxsplit.runtime.stage.compiled_stage import Compilations
from fxsplit.runtime.stage.replica import Replica
from fxsplit.runtime.stage.streams import hand_over
from fxsplit.schedule import Schedule
from fxsplit.schedule.action import COMPUTES, Action
from fxsplit.torch_internals.autograd.accumulate import accumulate
from fxsplit.torch_internals.autograd.leaves import unmute
from fxsplit.torch_internals.autograd.sums import EagerAccumulator, Sums
from fxsplit.torch_internals.fx.interpret import get_storage_id
from fxsplit.torch_internals.scopes.undo import CallerLock, restore_after
from fxsplit.torch_internals.thread_modes import NO_CONTEXT


class Stepper:
    """Lets the user's one optimizer step for one stage at a time.

    torch's optimizers skip parameters whose `.grad` is None, so during a step only the stage's own weights have a
    `.grad`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._one_at_a_time = CallerLock()

    def step(self, sums: Sums) -> None:
        """Step the optimizer with these sums of gradients. Afterwards every `.grad` is None."""
        weights = list(sums.totals)

        def forget() -> None:
            for weight in weights:
                weight.grad = None

        # The user's gradient hooks were muted for the gradients of single microbatches. They expect this sum.
        with self._one_at_a_time.take(), restore_after(forget), unmute():
            accumulate(sums)
            self._optimizer.step()


def make_stepper(schedule: Schedule, optimizer: Optimizer | None) -> Stepper | None:
    """Return a stepper for an asynchronous schedule, and None for a synchronous one.

    Raises InputError if an asynchronous schedule has no optimizer, or a synchronous one has an optimizer.
    """
    if schedule.synchronous:
        if optimizer is not None:
            raise InputError(f"{schedule.name} waits for the whole batch: call optimizer.step() after the step")
        return None
    if not isinstance(optimizer, Optimizer):
        raise InputError(f"{schedule.name} steps between microbatches: give the optimizer by name, optimizer=sgd")
    # A leftover gradient of another stage would take part in the first step.
    optimizer.zero_grad(set_to_none=True)
    return Stepper(optimizer)


class VersionedReplica(Replica):
    """A stage that holds several versions of its weights, each for as long as an action reads it.

    row: the actions of the stage's device, in order.
    """

    def __init__(
        self,
        stage: Stage,
        device: Device,
        places: Mapping[int, torch.device],
        row: Sequence[Action],
        stepper: Stepper,
        compilations: Compilations | None = None,
    ) -> None:
        super().__init__(stage, device, places, compilations)
        self._stepper = stepper
        # The number of actions that will still read each version.
        self._left = Counter(a.version for a in row if a.stage == stage.index and a.op in COMPUTES)
        modules = stage.module.modules()
        self._slots = [(m._parameters, name, p) for m in modules for name, p in m._parameters.items() if p is not None]
        self._weights = {weight: None for _, _, weight in self._slots}
        self._newest = 0
        self._leaves: dict[int, dict[Tensor, Tensor]] = {}
        # A step sums gradients of leaves of several versions. Each weight has one sum, under an empty tensor as key.
        self._keys: dict[Tensor, Tensor] = {weight: torch.empty(0) for weight in self._weights}
        self._owner_of = {key: weight for weight, key in self._keys.items()}
        self._add_version(0)

    @contextmanager
    def use_version(self, version: int, *, catches: bool = False) -> Iterator[None]:
        """Make the stage's modules hold the leaves of a version in the block, which is one action."""
        leaves = self._leaves[version]
        # Watch leaves only during the action: the watching hook keeps a leaf alive, and so the old version's memory.
        accumulator = EagerAccumulator(self.key_of).watch(leaves.values()) if catches else NO_CONTEXT

        def put_back() -> None:
            for held, name, weight in self._slots:
                held[name] = weight

        with restore_after(put_back), accumulator:
            for held, name, weight in self._slots:
                held[name] = leaves[weight]  # type: ignore[assignment]  # modules compute with any tensor
            yield
        self._left[version] -= 1
        self._forget_versions()

    def list_leaves(self, trained: Sequence[Tensor], version: int) -> list[Tensor]:
        """Return the leaves of a version, followed by the weights themselves.

        A weight itself gets a gradient only if the stage's code reads it otherwise than through its module; `step`
        refuses that.
        """
        leaf_of = self._leaves[version]
        leaves = [leaf_of.get(weight, weight) for weight in trained]
        return [*leaves, *(weight for weight in trained if weight in leaf_of)]

    def step(self, action: Action, sums: Sums) -> None:
        """Let the optimizer make a new version of the weights, from the newest version and these sums of gradients.

        Raises InputError if a weight itself got a gradient (see `list_leaves`).
        """
        passed = next((weight for weight in sums.totals if weight in self._weights), None)
        if passed is not None:
            raise InputError(
                f"a module reads its parameter of shape {tuple(passed.shape)} otherwise than as its own attribute, so "
                "it cannot get an earlier version: use a schedule that waits for the whole batch, such as 1F1B"
            )
        # The optimizer writes to the model's memory, which is the newest version's.
        if self._left[self._newest] > 0:
            self._move_weights()
        found = Sums()
        found.add(self.take_shares(sums))
        self._stepper.step(found)
        self._add_version(action.version)

    def _add_version(self, version: int) -> None:
        """Make the model's present weights the version with this number."""
        self._newest = version
        # `.data` is a new tensor on the same memory: a leaf that the optimizer does not know.
        self._leaves[version] = {w: w.data.requires_grad_(w.requires_grad) for w in self._weights}
        self._forget_versions()

    def _forget_versions(self) -> None:
        """Drop the versions that no action will read, except the newest."""
        self._leaves = {v: leaves for v, leaves in self._leaves.items() if v == self._newest or self._left[v] > 0}
        self.key_of = {leaf: self._keys[w] for leaves in self._leaves.values() for w, leaf in leaves.items()}

    def _move_weights(self) -> None:
        """Copy the weights to new memory on the same device. The old memory stays with the version that still reads it.

        Weights that share memory go on sharing memory.
        """
        # The caller's stream allocated the old memory, and this worker's stream may still be reading it.
        hand_over(self._weights)
        moved: dict[int, UntypedStorage] = {}
        for weight in self._weights:
            key = get_storage_id(weight)
            # Move whole storages, since weights may be views of one, as an LSTM's are.
            storage = moved[key] = moved[key] if key in moved else _copy_storage(weight)
            elsewhere = torch.empty(0, dtype=weight.dtype, device=weight.device)
            weight.data = elsewhere.set_(storage, weight.storage_offset(), weight.shape, weight.stride())


def _copy_storage(weight: Tensor) -> UntypedStorage:
    """Return a copy of a weight's storage, from the allocator that tensors use."""
    # Cloning the storage itself would bypass an allocator that was set for tensors.
    whole = torch.empty(0, dtype=torch.uint8, device=weight.device).set_(weight.untyped_storage())
    return whole.clone().untyped_storage()

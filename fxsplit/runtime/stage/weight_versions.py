"""Run a stage whose weights change while microbatches that read earlier weights are under way.

Asynchronous schedules such as PipeDream step between microbatches, and a backward needs the weights of its forward. So
each *version* of the weights is a set of leaves of its own, and the stage's modules hold the leaves of one version for
as long as an action runs (weight stashing: Narayanan et al., PipeDream, 2019). The newest version lies in the model's
own memory. Where actions to come still read that memory, a step moves the model's weights to other memory first.
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
from fxsplit.torch_internals.autograd.eager_accumulator import EagerAccumulator
from fxsplit.torch_internals.autograd.leaves import unmute
from fxsplit.torch_internals.autograd.sums import Share, Sums
from fxsplit.torch_internals.fx.interpret import get_storage_id
from fxsplit.torch_internals.scopes.undo import CallerLock, restore_after
from fxsplit.torch_internals.thread_modes import NO_CONTEXT


class Stepper:
    """Lets the user's one optimizer step for one stage at a time.

    torch's optimizers pass over parameters whose `.grad` is None, so only the stage's own weights have one in a step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._one_at_a_time = CallerLock()

    def step(self, sums: Sums) -> None:
        """Step with these sums of gradients, and leave every `.grad` None."""
        weights = list(sums.totals)

        def forget() -> None:
            for weight in weights:
                weight.grad = None

        # Hooks are the user's and expect this sum; those of microbatches are muted in this thread.
        with self._one_at_a_time.take(), restore_after(forget), unmute():
            accumulate(sums)
            self._optimizer.step()


def make_stepper(schedule: Schedule, optimizer: Optimizer | None) -> Stepper | None:
    """Return what steps between microbatches, or None for a schedule whose steps wait for the whole batch.

    Raises InputError where an asynchronous schedule has no optimizer, and where a synchronous one has.
    """
    if schedule.synchronous:
        if optimizer is not None:
            raise InputError(f"{schedule.name} waits for the whole batch: call optimizer.step() after pipe.step(...)")
        return None
    if not isinstance(optimizer, Optimizer):
        raise InputError(
            f"{schedule.name} steps between microbatches: give the optimizer, pipe.step(x, target=y, optimizer=sgd)"
        )
    # The gradient of another stage would take part in the first step.
    optimizer.zero_grad(set_to_none=True)
    return Stepper(optimizer)


class VersionedReplica(Replica):
    """A stage with as many versions of its weights as the actions in `row`, those of its device, ask for."""

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
        # How many actions are still to read each version.
        self._left = Counter(a.version for a in row if a.stage == stage.index and a.op in COMPUTES)
        modules = stage.module.modules()
        self._slots = [(m._parameters, name, p) for m in modules for name, p in m._parameters.items() if p is not None]
        self._weights = {weight: None for _, _, weight in self._slots}
        self._newest = 0
        self._leaves: dict[int, dict[Tensor, Tensor]] = {}
        # A step sums gradients of leaves of several versions. Each weight has one sum, and its key takes no memory.
        self._keys: dict[Tensor, Tensor] = {weight: torch.empty(0) for weight in self._weights}
        self._owner_of = {key: weight for weight, key in self._keys.items()}
        self._key_of: dict[Tensor, Tensor] = {}
        self._add_version(0)

    @contextmanager
    def use_version(self, version: int, *, catches: bool = False) -> Iterator[None]:
        """Let the stage's modules hold the leaves of a version for the block, which is one action."""
        leaves = self._leaves[version]
        # Only for the action: a hook keeps its leaf, and so a version that is over.
        accumulator = EagerAccumulator(self._key_of).watch(leaves.values()) if catches else NO_CONTEXT

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
        """Return the leaves of a version, and after them the weights themselves.

        A weight itself gets a gradient only where the stage's code has read it past its modules, which `step` refuses.
        """
        leaf_of = self._leaves[version]
        leaves = [leaf_of.get(weight, weight) for weight in trained]
        return [*leaves, *(weight for weight in trained if weight in leaf_of)]

    def key_shares(self, shares: list[Share]) -> list[Share]:
        """Return the shares of leaves under what the sums know their weights by, whichever version they are of."""
        return [(self._key_of.get(leaf, leaf), gradient, unshared) for leaf, gradient, unshared in shares]

    def step(self, action: Action, sums: Sums) -> None:
        """Let the optimizer make a new version of the weights, from the newest one and these sums of gradients.

        Raises InputError where a weight itself got a gradient (see `list_leaves`).
        """
        passed = next((weight for weight in sums.totals if weight in self._weights), None)
        if passed is not None:
            raise InputError(
                f"a module reads its parameter of shape {tuple(passed.shape)} from elsewhere than its attribute, where "
                "earlier versions of weights cannot be: train it under a schedule that waits for its step, as 1F1B"
            )
        # The optimizer writes to the model's memory, which is that of the newest version.
        if self._left[self._newest] > 0:
            self._move_weights()
        found = Sums()
        found.add(self.take_shares(sums))
        self._stepper.step(found)
        self._add_version(action.version)

    def _add_version(self, version: int) -> None:
        """Make the model's weights as they are now a version."""
        self._newest = version
        # `.data` is a tensor of its own on the same memory: a leaf that the optimizer does not know.
        self._leaves[version] = {w: w.data.requires_grad_(w.requires_grad) for w in self._weights}
        self._forget_versions()

    def _forget_versions(self) -> None:
        """Let go of the versions that no action will read, but for the newest one."""
        self._leaves = {v: leaves for v, leaves in self._leaves.items() if v == self._newest or self._left[v] > 0}
        self._key_of = {leaf: self._keys[w] for leaves in self._leaves.values() for w, leaf in leaves.items()}

    def _move_weights(self) -> None:
        """Move the model's weights to other memory. Those that share memory go on sharing it."""
        # The caller's stream made the memory that they leave, and this worker's may still be reading it.
        hand_over(self._weights)
        moved: dict[int, UntypedStorage] = {}
        for weight in self._weights:
            key = get_storage_id(weight)
            # Whole storages are moved, since weights may be views of one, as those of an LSTM are.
            storage = moved[key] = moved[key] if key in moved else _copy_storage(weight)
            elsewhere = torch.empty(0, dtype=weight.dtype, device=weight.device)
            weight.data = elsewhere.set_(storage, weight.storage_offset(), weight.shape, weight.stride())


def _copy_storage(weight: Tensor) -> UntypedStorage:
    """Return a copy of the memory that a weight lies in, from the allocator that all tensors have theirs from."""
    # A storage that is cloned as such passes over an allocator that was set for tensors.
    whole = torch.empty(0, dtype=torch.uint8, device=weight.device).set_(weight.untyped_storage())
    return whole.clone().untyped_storage()

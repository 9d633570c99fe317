"""Run a stage on one of its devices, with the model's own weights or with copies of them.

A replicated stage has several devices and a replica on each. A weight that several stages read lives on the device of
the first of these stages, and replicas on other devices hold copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxsplit.ir.facts.given.machine import Device
from fxsplit.ir.facts.stages import Stage, list_weights
from fxsplit.runtime.stage.compiled_stage import Compilations
from fxsplit.schedule.action import Action
from fxsplit.torch_internals.autograd.accumulate import is_plain
from fxsplit.torch_internals.autograd.split import BranchFinder
from fxsplit.torch_internals.autograd.sums import Share, Sums
from fxsplit.torch_internals.fx.constant_devices import move_constants
from fxsplit.torch_internals.fx.interpret import count_writes
from fxsplit.torch_internals.nn.copies import copy_module
from fxsplit.torch_internals.nn.recurrent import flatten_weights
from fxsplit.torch_internals.random.seeded_calls import SeededCall
from fxsplit.torch_internals.thread_modes import NO_CONTEXT


class Replica:
    """A stage on one device.

    It shares the weights on its torch device with the model and with other stages. It copies weights that live on other
    devices, and refreshes the copies before every forward pass. The copies' gradients go back to the weights.

    places: the device of each weight by id(); empty for a stage that another process runs.
    fetched: the values of weights that live in other processes.
    branches: an attribute that finds the nodes at which the stage's backward can be split.
    """

    def __init__(
        self,
        stage: Stage,
        device: Device,
        places: Mapping[int, torch.device],
        compilations: Compilations | None = None,
        fetched: Mapping[int, Tensor] | None = None,
    ) -> None:
        assert device.torch_device is not None
        self._original = stage.module
        self._here = device.torch_device
        self._fetched = {} if fetched is None else fetched
        foreign = any(places[id(w)] != self._here for w in list_weights(stage.module) if places)
        module = stage.module
        if foreign:
            # The replica on another device must hold other weights, so it needs a module of its own.
            module = _copy_module(stage.module)
            move_constants(module, stage.torch_device, self._here)
        compiled = None if compilations is None else compilations.compile(stage.index, module)
        self.stage = replace(stage, device_name=device.name, torch_device=self._here, module=module, compiled=compiled)
        self.branches = BranchFinder()
        # The key of a leaf in the replica's sums, if that is not the leaf itself.
        self.key_of: dict[Tensor, Tensor] = {}
        self._copies: dict[Tensor, Tensor] = {}
        # The address of each weight and its count of writes at the time of its copy.
        self._copied: dict[Tensor, tuple[int, int | None]] = {}
        self._owner_of: dict[Tensor, Tensor] = {}

    @property
    def copies(self) -> bool:
        """Whether this replica holds copies of weights that live on another device."""
        return self.stage.module is not self._original

    def is_stale(self) -> bool:
        """Return whether weights or modes have changed since the copies were made, by torch's counts of writes."""
        if not self.copies:
            return False
        pairs = list(zip(self._original.modules(), self.stage.module.modules(), strict=True))
        if any(mine.training != copied.training for mine, copied in pairs):
            return True
        elsewhere = (w for w in list_weights(self._original) if w.device != self._here)
        return any(self._copied.get(w) != _read_state(w) for w in elsewhere)

    def refresh(self) -> None:
        """Bring the copies up to date: the values of weights, which weights are frozen, and the modes of modules."""
        if not self.copies:
            return
        for mine, copied in zip(self._original.modules(), self.stage.module.modules(), strict=True):
            copied.training = mine.training
            if isinstance(mine, SeededCall) and isinstance(copied, SeededCall):
                copied.in_evaluation = mine.in_evaluation
            # Change the dictionaries directly: setting an attribute would register a new parameter.
            for kind in ("_parameters", "_buffers"):
                held: dict[str, Tensor | None] = getattr(copied, kind)
                held |= {name: None if w is None else self._copy_weight(w) for name, w in getattr(mine, kind).items()}
        flatten_weights(self.stage.module.modules())
        self._owner_of = {local: own for own, local in self._copies.items()}

    def _copy_weight(self, own: Tensor) -> Tensor:
        """Return a weight itself if it lives on this device, else its copy, filled with the present values."""
        values = self._fetched.get(id(own))
        if values is None and own.device == self._here:
            return own
        # Make the copy once, so that graphs of several microbatches end at one leaf. Its memory is set below.
        if own not in self._copies:
            empty = torch.empty(0, dtype=own.dtype, device=self._here)
            self._copies[own] = nn.Parameter(empty, False) if isinstance(own, nn.Parameter) else empty
        copied = self._copies[own]
        self._copied[own] = _read_state(own)
        # Replace the memory rather than write to it: graphs of an earlier batch may still read the old values.
        copied.data = own.data.to(self._here, non_blocking=True, copy=True) if values is None else values
        return copied.requires_grad_(own.requires_grad)

    def use_version(self, version: int, *, catches: bool = False) -> AbstractContextManager[Any]:
        """Return a context in which the stage has the weights of a version. A plain replica has only one version.

        catches: whether a backward runs in the context. Large gradients are then added to their sums at once.
        """
        return NO_CONTEXT

    def list_leaves(self, trained: Sequence[Tensor], version: int) -> list[Tensor]:
        """Return the leaves of this replica's graphs that stand for the model's weights `trained`."""
        if not self._owner_of:
            return list(trained)
        return [self._copies.get(weight, weight) for weight in trained]

    def list_own(self, trained: Sequence[Tensor]) -> list[Tensor]:
        """Return the weights among `trained` that this replica uses directly, and not through copies."""
        return [weight for weight in trained if weight not in self._copies]

    def take_shares(self, sums: Sums) -> Iterator[Share]:
        """Take this replica's gradients out of `sums`, one by one, as gradients of the model's own weights.

        Each gradient is moved to the device of its weight.
        """
        for leaf in list(sums.totals):
            owner = self._owner_of.get(leaf, leaf)
            # Pop it, so that only the moved copy stays in memory.
            total = sums.totals.pop(leaf)
            # The process that owns the weight fetches the gradient from here.
            yield owner, total if id(owner) in self._fetched else total.to(owner.device, non_blocking=True), True

    def step(self, action: Action, sums: Sums) -> None:
        """Raise AssertionError: only a stage with weight versions steps between microbatches."""
        raise AssertionError(f"{action} of a schedule whose steps wait for the whole batch")


def start_from_gradients(
    replicas: Sequence[Replica], sums: Sequence[Sequence[Sums]], trained: Sequence[Sequence[Tensor]]
) -> None:
    """Use the `.grad` of leaves as the first replica's initial sum, so that gradients are added in place.

    Only leaves whose accumulation is a plain addition are treated so. All arguments are by stage.
    replicas: the first replica of each stage.
    """
    seen = set[Tensor]()
    for replica, own, leaves in zip(replicas, sums, trained, strict=True):
        # The first of two stages that share a leaf adds to it; the other stage's sum is added at the end.
        free = [leaf for leaf in replica.list_own(leaves) if leaf not in seen and is_plain(leaf)]
        own[0].totals.update((leaf, leaf.grad) for leaf in free if leaf.grad is not None)
        seen.update(leaves)


def _copy_module(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a module and its submodules. The copy holds the same weight and hook objects as the original."""
    hooks = [held for m in module.modules() for key, held in m.__dict__.items() if "_hooks" in key]
    shared = [*list_weights(module), *(held for held in hooks if held is not None)]
    # Objects in the memo are not copied.
    return copy_module(module, {id(one): one for one in shared})


def _read_state(weight: Tensor) -> tuple[int, int | None]:
    """Return the address of a weight's values and torch's count of writes to them."""
    return weight.data_ptr(), count_writes(weight)

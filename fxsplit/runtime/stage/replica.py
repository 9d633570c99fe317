"""Run a stage on one of its devices, with the model's own weights or with copies of them.

A replicated stage has several devices, and a replica on each. A weight that several stages read lives on the device of
the first one, and replicas on other devices have copies.
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
from fxsplit.torch_internals.fx.graph_devices import move_constants
from fxsplit.torch_internals.fx.interpret import count_writes
from fxsplit.torch_internals.nn.copies import copy_module
from fxsplit.torch_internals.nn.recurrent import flatten_weights
from fxsplit.torch_internals.random.seeded_calls import SeededCall
from fxsplit.torch_internals.thread_modes import NO_CONTEXT


class Replica:
    """A stage on one device.

    It shares the weights that live on its torch device with the model, and with other stages that read them. Of weights
    elsewhere it has copies. They are refreshed before every forward pass, and their gradients go back to the weights.
    `places` says where each weight lives, by its id; a stage that another process runs has none. `fetched` has the
    values of weights that live in other processes. `branches` finds where the stage's backward can be cut in two.
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
            # Another device's module must hold other weights, so it is a module of its own.
            module = _copy_module(stage.module)
            move_constants(module, stage.torch_device, self._here)
        compiled = None if compilations is None else compilations.compile(stage.index, module)
        self.stage = replace(stage, device_name=device.name, torch_device=self._here, module=module, compiled=compiled)
        self.branches = BranchFinder()
        self._copies: dict[Tensor, Tensor] = {}
        # Where the values of each weight were, and how often it had been written to, when it was copied.
        self._copied: dict[Tensor, tuple[int, int | None]] = {}
        self._owner_of: dict[Tensor, Tensor] = {}

    @property
    def copies(self) -> bool:
        """Whether it has copies of weights that live elsewhere."""
        return self.stage.module is not self._original

    def is_stale(self) -> bool:
        """Return whether weights or modes are others than at the last `refresh`, as far as torch counts writes."""
        if not self.copies:
            return False
        pairs = list(zip(self._original.modules(), self.stage.module.modules(), strict=True))
        if any(mine.training != copied.training for mine, copied in pairs):
            return True
        elsewhere = (w for w in list_weights(self._original) if w.device != self._here)
        return any(self._copied.get(w) != _read_state(w) for w in elsewhere)

    def refresh(self) -> None:
        """Make the copies what the model is now: values of weights, which are frozen, and the modes of modules."""
        if not self.copies:
            return
        for mine, copied in zip(self._original.modules(), self.stage.module.modules(), strict=True):
            copied.training = mine.training
            if isinstance(mine, SeededCall) and isinstance(copied, SeededCall):
                copied.in_evaluation = mine.in_evaluation
            # The dictionaries are changed directly: to set an attribute would register a parameter anew.
            for kind in ("_parameters", "_buffers"):
                held: dict[str, Tensor | None] = getattr(copied, kind)
                held |= {name: None if w is None else self._copy_weight(w) for name, w in getattr(mine, kind).items()}
        flatten_weights(self.stage.module.modules())
        self._owner_of = {local: own for own, local in self._copies.items()}

    def _copy_weight(self, own: Tensor) -> Tensor:
        """Return a weight that lives on this device, or the copy of another, with its values of now."""
        values = self._fetched.get(id(own))
        if values is None and own.device == self._here:
            return own
        # Made once, so that graphs of several microbatches end at one leaf; made small, since `.data` is replaced.
        if own not in self._copies:
            empty = torch.empty(0, dtype=own.dtype, device=self._here)
            self._copies[own] = nn.Parameter(empty, False) if isinstance(own, nn.Parameter) else empty
        copied = self._copies[own]
        self._copied[own] = _read_state(own)
        # New memory and not a write: graphs of an earlier batch may still read the old values.
        copied.data = own.data.to(self._here, non_blocking=True, copy=True) if values is None else values
        return copied.requires_grad_(own.requires_grad)

    def use_version(self, version: int, *, catches: bool = False) -> AbstractContextManager[Any]:
        """Return a context in which the stage has the weights of a version. A replica has one version.

        catches: whether a backward runs in it, whose large gradients go to their sums at once.
        """
        return NO_CONTEXT

    def list_leaves(self, trained: Sequence[Tensor], version: int) -> list[Tensor]:
        """Return the leaves at which this replica's graphs end, for the model's weights `trained`."""
        if not self._owner_of:
            return list(trained)
        return [self._copies.get(weight, weight) for weight in trained]

    def key_shares(self, shares: list[Share]) -> list[Share]:
        """Return the shares of leaves under what the replica's sums know these leaves by: here by themselves."""
        return shares

    def list_own(self, trained: Sequence[Tensor]) -> list[Tensor]:
        """Return those of the model's weights that this replica itself computes with, and not with copies."""
        return [weight for weight in trained if weight not in self._copies]

    def take_shares(self, sums: Sums) -> Iterator[Share]:
        """Take the sums of this replica's leaves out of `sums`, one by one, as shares of the model's weights.

        Each is on the device of its weight.
        """
        for leaf in list(sums.totals):
            owner = self._owner_of.get(leaf, leaf)
            # A copy elsewhere is all that is left of it.
            total = sums.totals.pop(leaf)
            # The process that has the weight fetches it from here.
            yield owner, total if id(owner) in self._fetched else total.to(owner.device, non_blocking=True), True

    def step(self, action: Action, sums: Sums) -> None:
        """Raise AssertionError: only a stage with versions of its weights steps between microbatches."""
        raise AssertionError(f"{action} of a schedule whose steps wait for the whole batch")


def start_from_gradients(
    replicas: Sequence[Replica], sums: Sequence[Sequence[Sums]], trained: Sequence[Sequence[Tensor]]
) -> None:
    """Let the `.grad` of each leaf of `trained` that has one be the sum that a stage's first replica adds to.

    So it is where nothing but an addition is to be done. Everything is by stage; `replicas` are the first ones.
    """
    seen = set[Tensor]()
    for replica, own, leaves in zip(replicas, sums, trained, strict=True):
        # A leaf of two stages is added to by the first of them, and what the other one has comes at the end.
        free = [leaf for leaf in replica.list_own(leaves) if leaf not in seen and is_plain(leaf)]
        own[0].totals.update((leaf, leaf.grad) for leaf in free if leaf.grad is not None)
        seen.update(leaves)


def _copy_module(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy whose modules can hold other weights. Its weights and hooks are still the model's own objects."""
    hooks = [held for m in module.modules() for key, held in m.__dict__.items() if "_hooks" in key]
    shared = [*list_weights(module), *(held for held in hooks if held is not None)]
    # What is in the memo is not copied.
    return copy_module(module, {id(one): one for one in shared})


def _read_state(weight: Tensor) -> tuple[int, int | None]:
    """Return where a weight's values are, and how often torch has counted a write to them."""
    return weight.data_ptr(), count_writes(weight)

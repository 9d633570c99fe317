"""Replicas: a stage as one of its devices runs it, with the model's own weights or with copies of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxsplit.machine import Device
from fxsplit.runtime.gradients import Sums
from fxsplit.schedule.action import Action
from fxsplit.stages import Stage

NOTHING = nullcontext()


class Replica:
    """A stage on one device.

    Where the weights are it runs them; another torch device has copies, which are refreshed before every forward pass
    and whose gradients go back to the weights.
    """

    def __init__(self, stage: Stage, device: Device) -> None:
        assert device.torch_device is not None
        self._original = stage.module
        module = stage.module if _same_place(stage.torch_device, device.torch_device) else _copied(stage.module)
        self.stage = replace(stage, device_name=device.name, torch_device=device.torch_device, module=module)
        self._owner_of: dict[Tensor, Tensor] = {}

    def refresh(self) -> None:
        """Let copies be what the model is now: its weights, what of them is frozen, the modes of its modules."""
        if self.stage.module is self._original:
            return
        for mine, copied in zip(self._original.modules(), self.stage.module.modules(), strict=True):
            copied.training = mine.training
        self._owner_of = {}
        for own, other in zip(_tensors(self._original), _tensors(self.stage.module), strict=True):
            other.data = own.data.to(self.stage.torch_device, non_blocking=True)
            other.requires_grad_(own.requires_grad)
            self._owner_of[other] = own

    def using(self, version: int) -> AbstractContextManager[Any]:
        """Return a context in which the stage has the weights of a version; there is one."""
        return NOTHING

    def leaves(self, trained: Sequence[Tensor], version: int) -> list[Tensor]:
        """Return the leaves of this replica's graphs for the weights that are `trained`."""
        if not self._owner_of:
            return list(trained)
        wanted = set(trained)
        return [leaf for leaf, owner in self._owner_of.items() if owner in wanted]

    def owned(self, sums: Sums) -> Sums:
        """Return sums of this replica's leaves as sums of the model's weights, where those are."""
        if not self._owner_of:
            return sums
        found = Sums()
        for leaf, total in sums.totals.items():
            owner = self._owner_of.get(leaf, leaf)
            found.add(owner, total.to(owner.device, non_blocking=True), own=True)
        return found

    def step(self, action: Action, sums: Sums) -> None:
        """Let the optimizer step; only stages with versions of their weights can."""
        raise AssertionError(f"{action} of a schedule whose steps wait for the whole batch")


def _same_place(one: torch.device, other: torch.device) -> bool:
    """Return whether two devices can share a weight."""
    return one == other


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy with weights of its own; hooks are the model's."""
    hooks = [held for m in module.modules() for key, held in m.__dict__.items() if "_hooks" in key]
    made = copy.deepcopy(module, {id(held): held for held in hooks if held is not None})
    for weight in made.parameters():
        weight.grad = None
    return made


def _tensors(module: nn.Module) -> list[Tensor]:
    """Return parameters and buffers, each as often as it is held."""
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return [tensor for _, tensor in named]

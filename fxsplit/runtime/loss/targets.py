"""Targets of microbatches, moved to the device of each microbatch's loss."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fxsplit.runtime.stage.streams import move
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.tensors.host_copies import is_on_host


class Targets:
    """The target of each microbatch, as `given`: a tensor, or tensors in containers. `whole` is the batch's target.

    If a target has tensors both on an accelerator and in host memory, the latter stay: a loss such as CTC needs lengths
    on the host.
    """

    def __init__(self, given: Sequence[Any], whole: Any = None) -> None:
        self.given = given
        self.whole = whole
        # By thread too: on a GPU another worker's stream may lag.
        self._placed: dict[tuple[int, int, torch.device], Any] = {}

    @cached_property
    def are_on_host(self) -> bool:
        """Whether all tensors of the target are in host memory."""
        return all(is_on_host(leaf) for leaf in pytree.tree_leaves(self.given) if isinstance(leaf, Tensor))

    def place(self, microbatch: int, device: torch.device) -> Any:
        """Return the target of a microbatch with its tensors on a device."""
        given = self.given[microbatch]
        # A shortcut for the usual case, in every action: searching containers takes longer than a small loss.
        if isinstance(given, Tensor) and given.device == device:
            return given
        key = threading.get_ident(), microbatch, device
        if key not in self._placed:
            self._placed[key] = pytree.tree_map_only(Tensor, lambda t: self._place(t, device), given)
        return self._placed[key]

    def _place(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return one tensor of a target on a device."""
        return tensor if is_on_host(tensor) and not self.are_on_host else move(tensor, device)

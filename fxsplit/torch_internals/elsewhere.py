"""Elsewhere: parameters and buffers of the model that other ranks have.

A weight that is sent away stays the same Python object, which the model and optimizers hold. What torch keeps behind
the object is exchanged for a tensor without memory, and the object's class for one that is derived from its own and
from `Away`. A weight that is brought back is as before.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from fxsplit.torch_internals.away import Away, Spot, make_away
from fxsplit.torch_internals.undo import call_all


class Elsewhere(Away, nn.Parameter):
    """A parameter that another rank has."""

    aside: Tensor | None = None
    """Its gradient, while an optimizer steps."""

    @property
    def data(self) -> Tensor:
        """The parameter, as one that autograd does not know."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        # Its rank takes the values. Here it may become one of another kind, as by model.half().
        if (value.dtype, value.shape, value.device) != (self.dtype, self.shape, self.device):
            _exchange(self, make_away(type(self), value, self.spot, requires_grad=self.requires_grad))


@cache
def _derive(kind: type) -> Any:
    """Return the class of what is away, derived from the class that it has here."""
    if issubclass(kind, Away):
        return kind
    if kind in (nn.Parameter, Tensor):
        return Elsewhere if kind is nn.Parameter else Away
    base = Elsewhere if issubclass(kind, nn.Parameter) else Away
    return type(f"Elsewhere{kind.__name__}", (base, kind), {"own_class": kind})


def _get_own_class(weight: Tensor) -> Any:
    """Return the class that a weight has where its values are."""
    if not isinstance(weight, Away):
        return type(weight)
    return getattr(weight, "own_class", nn.Parameter if isinstance(weight, nn.Parameter) else Tensor)


def send_away(weight: Tensor, spot: Spot, device: torch.device | None = None) -> None:
    """Let go of the values of a weight, which another rank has; the weight stays the same object.

    device: that of this rank, which weights of all ranks say that they are on; by default where the weight is.
    A weight that is away already is told where it is now.
    """
    _exchange(weight, make_away(_derive(type(weight)), weight, spot, requires_grad=weight.requires_grad, device=device))


def bring_back(weight: Tensor, value: Tensor) -> None:
    """Give a weight that is away the values, and the memory, of `value`; the weight stays the same object."""
    kind = _get_own_class(weight)
    made = value.detach()
    if issubclass(kind, nn.Parameter):
        # A class derived from Parameter may have a constructor of its own, which this does not call.
        made = torch.Tensor._make_subclass(kind, made, weight.requires_grad)
    _exchange(weight, made)
    weight.__dict__.pop("spot", None)


def _exchange(weight: Tensor, made: Tensor) -> None:
    """Let a weight be what `made` is, with the attributes of both; `made` takes what the weight was."""
    new: Any = type(made)
    old: Any = type(weight)
    # torch.utils.swap_tensors does the same, and refuses where there are weak references, which go on meaning the
    # weight. From C: an interrupt comes before all of it or after.
    call_all(
        [
            partial(setattr, weight, "__class__", new),
            partial(setattr, made, "__class__", old),
            partial(torch._C._swap_tensor_impl, weight, made),
            partial(weight.__dict__.update, made.__dict__),
        ]
    )

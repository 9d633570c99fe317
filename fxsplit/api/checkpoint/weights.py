"""Read the weights of a model for a checkpoint, and load them, under the names of the model's state_dict.

On several ranks each rank has the values of a part of the weights, and the names of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fxsplit.api.checkpoint.storage import MODEL
from fxsplit.errors import ElsewhereError, InputError
from fxsplit.formats.weights.save_safetensors import NAMES
from fxsplit.torch_internals.distributed.remote_tensors import RemoteTensor, exchange, is_remote
from fxsplit.torch_internals.fx.interpret import get_storage_id
from fxsplit.torch_internals.tensors.dress import dress_like

EXTRA_STATE = "_extra_state"
"""The name in torch's state_dict() for the result of a module's get_extra_state()."""


@dataclass
class ModelState:
    """The weights of a model: the values on this rank, and all names of each weight.

    own: the weights of this rank by first name.
    made: the names of extra state. get_extra_state() makes a new value in each call, and set_extra_state() takes it
        back.
    places: each name -> the first name of the same weight, on all ranks.
    kinds: the weights of all ranks by first name; those of other ranks have only shape and dtype.
    """

    own: dict[str, Tensor] = field(default_factory=dict)
    made: set[str] = field(default_factory=set)
    places: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, Tensor] = field(default_factory=dict)

    @property
    def apart(self) -> list[str]:
        """The names of values that cannot be filled in place: extra state, and tensors whose memory repeats numbers."""
        return [name for name, value in self.own.items() if name in self.made or _find_distinct(value) is not value]

    @property
    def tied(self) -> dict[str, str]:
        """Each other name of a weight -> its first name, for weights with several names."""
        return {name: first for name, first in self.places.items() if name != first}


def read_model(model: nn.Module, *, filled: bool = True) -> ModelState:
    """Return the weights of a model. Raises InputError for values that are not plain tensors.

    filled: whether to refuse weights without values. Saving needs values, and loading does not.
    """
    state, first_of = ModelState(), dict[int, str]()
    again = model.state_dict(keep_vars=True)
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise InputError(
                f"state_dict() of {type(model).__name__} holds {name!r}, a {type(value).__name__}, and a checkpoint "
                "holds only tensors: save other values as extra="
            )
        if is_lazy(value) or (filled and value.is_meta):
            raise InputError(f"{name!r} has no values yet: load its weights, or run the model, first")
        check_plain(name, value)
        if _is_made(value, again.get(name)):
            if name.rpartition(".")[2] != EXTRA_STATE:
                raise InputError(
                    f"state_dict() of {type(model).__name__} makes a new {name!r} in each call, so a loaded value "
                    "would not reach the model: let it return the parameter or buffer, or save the value as extra="
                )
            state.made.add(name)
        first = state.places[name] = first_of.setdefault(id(value), name)
        if first == name:
            state.kinds[name] = value
            if not is_remote(value):
                state.own[name] = value
    return state


def _is_made(value: Tensor, again: Any) -> bool:
    """Return whether two calls of state_dict() made two different tensors, so that neither belongs to the model."""
    if value is again or is_remote(value) or value.is_meta:
        return False
    return not isinstance(again, Tensor) or get_storage_id(value) != get_storage_id(again)


def _find_distinct(value: Tensor) -> Tensor:
    """Return a view of a tensor that has each number once: an expanded tensor repeats numbers without own memory."""
    repeated = [dim for dim, size in enumerate(value.shape) if size > 1 and value.stride(dim) == 0]
    for dim in repeated:
        value = value.narrow(dim, 0, 1)
    return value


def check_apart(state: ModelState, values: Mapping[str, Tensor], where: str) -> None:
    """Raise InputError if a stored value has different numbers at places that share memory in the model's tensor."""
    for name, value in values.items():
        if name in state.made:
            continue
        once = value[tuple(slice(n) for n in _find_distinct(state.own[name]).shape)].expand(value.shape)
        # Compared as bytes, since NaN equals nothing.
        if not torch.equal(*(part.contiguous().view(torch.uint8) for part in (once, value))):
            raise InputError(
                f"{name!r} repeats its numbers in the model, as expand() makes it, and does not in {where}: give it "
                "memory of its own, .clone(), before loading"
            )


def give_apart(model: nn.Module, state: ModelState, values: Mapping[str, Tensor]) -> None:
    """Give a model the values that cannot be filled in place: extra state, and tensors whose memory repeats numbers."""
    for name, value in values.items():
        if name in state.made:
            model.get_submodule(name.rpartition(".")[0]).set_extra_state(value)
            continue
        target = _find_distinct(state.own[name].detach())
        target.copy_(value[tuple(slice(n) for n in target.shape)])


def refuse_remote(model: nn.Module, state: ModelState, verb: str) -> None:
    """Raise ElsewhereError for a model that has weights on other ranks. Only a pipeline can reach their values.

    verb: "save" or "load", for the message.
    """
    for name, weight in state.kinds.items():
        if isinstance(weight, RemoteTensor):
            into = "into " if verb == "load" else ""
            raise ElsewhereError(
                f"{name!r} is on rank {weight.owner.rank}, and this rank cannot {verb} a {type(model).__name__} "
                f"without its values: {verb} {into}the pipeline of the model, on all ranks"
            )


def check_plain(name: str, value: Tensor) -> None:
    """Raise InputError for a tensor that is more than its numbers: quantized, sparse, or distributed over processes."""
    # The class is not checked: a parameter may be of the user's own class.
    distributed = hasattr(value, "device_mesh") or hasattr(value, "local_shards")
    if value.layout != torch.strided or value.dtype not in NAMES or value.is_quantized or distributed:
        raise InputError(
            f"{name!r} is a {type(value).__name__} of {value.dtype} and {value.layout}, which no safetensors file "
            "holds: save it with torch.distributed.checkpoint"
        )


def check_model(state: ModelState, kinds: Mapping[str, Tensor], tied: Mapping[str, str], where: str) -> dict[str, str]:
    """Return the first name of each weight in the model -> its name in the checkpoint.

    kinds: the tensors of the checkpoint, by full name. tied: the checkpoint's other names of weights -> stored name.
    Raises InputError for missing or extra tensors, or for another shape or dtype.
    """
    stored = {name.removeprefix(MODEL): kind for name, kind in kinds.items() if name.startswith(MODEL)}
    found: dict[str, str] = {}
    used = set()
    for name, first in state.places.items():
        at = tied.get(name, name)
        used.add(at)
        if at in stored and found.setdefault(first, at) != at:
            raise InputError(
                f"{first!r} and {name!r} are one weight in the model, and two in {where}: build the model as the "
                "checkpoint's was"
            )
    missing = next((first for first in state.kinds if first not in found), None)
    if missing is not None:
        raise InputError(f"{where} does not hold {missing!r}: build the model as the checkpoint's was")
    extra = next((name for name in stored if name not in used), None)
    if extra is not None:
        raise InputError(f"{where} holds {extra!r}, which the model does not have: build it as the checkpoint's was")
    for first, at in found.items():
        weight, kind = state.kinds[first], stored[at]
        if first in state.made:
            continue
        if (weight.dtype, weight.shape) != (kind.dtype, kind.shape):
            raise InputError(
                f"{first!r} is {kind.dtype} {tuple(kind.shape)} in {where} and {weight.dtype} {tuple(weight.shape)} in "
                "the model: build the model as the checkpoint's was"
            )
    return found


def make_room(state: ModelState, places: Mapping[int, torch.device]) -> None:
    """Allocate memory for weights of this rank that have none, on their stages' devices. They stay the same objects."""
    for name, weight in state.own.items():
        if weight.is_meta:
            device = places.get(id(weight), torch.device("cpu"))
            room = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device=device)
            exchange(weight, dress_like(weight, room))
            state.own[name] = weight

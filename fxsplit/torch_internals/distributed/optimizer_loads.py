"""State that optimizers load over ranks: each rank's optimizer keeps state of the parameters of that rank only.

A state_dict of rank 0 has no entries for parameters of other ranks. torch loads it on these ranks without a word, and
their averages would begin at zero again. So the state that an optimizer loads is compared with its parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from functools import cache, wraps
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from fxsplit.errors import FxsplitWarning, InputError
from fxsplit.torch_internals.distributed.remote_tensors import RemoteTensor
from fxsplit.torch_internals.user_lines import warn_user

_names: Any = WeakIdKeyDictionary()
"""The names of the parameters of all pipelines over ranks, those of other ranks too."""
_loaded: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers that have loaded state before it was known which rank has which parameter."""
_arrived: Any = WeakIdKeyDictionary()
"""Parameters that have come from another rank, and that no optimizer has stepped since then."""
SHOWN = 3
"""How many names a message shows."""


def note_names(named: Iterable[tuple[str, Tensor]]) -> None:
    """Note the parameters of a pipeline over ranks; from now on each rank has some of them."""
    for name, weight in named:
        _names[weight] = name


@cache
def watch_loads() -> None:
    """Look at all state that optimizers load, for as long as the process lives."""
    load = Optimizer.load_state_dict

    @wraps(load)
    def load_and_check(self: Optimizer, state_dict: Any) -> None:
        # As the last one: a hook of the user's may make another state of it.
        last = self.register_load_state_dict_pre_hook(_check_load)
        try:
            load(self, state_dict)
        finally:
            last.remove()

    Optimizer.load_state_dict = load_and_check  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(_check_step)


def _list_weights(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer, in the order in which a state_dict counts them."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def _check_load(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Raise InputError for state of other ranks, and warn of state that lacks some of this rank."""
    weights = _list_weights(optimizer)
    if not any(weight in _names for weight in weights):
        _loaded.add(optimizer)
        return
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    if len(keys) == len(weights):  # torch refuses others
        state = state_dict["state"]
        _check(weights, {id(w) for key, w in zip(keys, weights, strict=True) if key in state})


def note_arrival(weight: Tensor) -> None:
    """Note a parameter that has come from another rank; its optimizer state has stayed there."""
    _arrived[weight] = True


def _check_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Look at state that was loaded before weights were with their ranks, and at weights that came later."""
    was_loaded = optimizer in _loaded
    if not was_loaded and not _arrived:
        return
    weights = _list_weights(optimizer)
    trained = [weight for weight in weights if weight.grad is not None and (was_loaded or weight in _arrived)]
    _loaded.discard(optimizer)
    for weight in trained:
        _arrived.pop(weight, None)
    _check(trained, {id(weight) for weight in weights if weight in optimizer.state}, was_loaded)


def _check(weights: Iterable[Tensor], held: Collection[int], was_loaded: bool = True) -> None:
    """Warn of parameters of this rank without optimizer state, if other parameters have some.

    held: identities of the parameters that have state. was_loaded: whether to raise InputError instead, if no
    parameter of this rank has any.
    """
    own = [w for w in weights if w in _names and w.requires_grad and not isinstance(w, RemoteTensor)]
    lacking = [_names[weight] for weight in own if id(weight) not in held]
    if not lacking or not held:  # some optimizers keep nothing
        return
    shown = ", ".join(map(repr, lacking[:SHOWN])) + (f" and {len(lacking) - SHOWN} more" if lacking[SHOWN:] else "")
    text = (
        f"the optimizer's state holds nothing of {shown}, which this rank has: each rank's optimizer.state_dict() has "
        "entries of its own parameters only, and this one is of another rank or of another plan. save_checkpoint() and "
        "load_checkpoint() keep the state of all ranks"
    )
    if was_loaded and len(lacking) == len(own):
        raise InputError(text)
    warn_user(f"{text}. What the optimizer keeps of these parameters begins at zero again", FxsplitWarning)

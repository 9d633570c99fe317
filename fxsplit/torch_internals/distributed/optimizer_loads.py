"""Check the state that optimizers load if parameters are spread over ranks.

Each rank's optimizer has state only for the rank's own parameters, so the state_dict of rank 0 has no entries for
others. torch loads it on the other ranks without an error, and their averages would start again at zero. So loaded
state is compared with the rank's parameters.
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
from fxsplit.system.user_lines import warn_user
from fxsplit.torch_internals.distributed.remote_tensors import RemoteTensor

_names: Any = WeakIdKeyDictionary()
"""The names of the parameters of all pipelines over ranks, including parameters of other ranks."""
_loaded: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers that loaded state before the parameters were assigned to ranks."""
_arrived: Any = WeakIdKeyDictionary()
"""Parameters that have arrived from another rank and have not been stepped since."""
SHOWN = 3
"""The number of names shown in a message."""


def note_names(named: Iterable[tuple[str, Tensor]]) -> None:
    """Record the parameters of a pipeline over ranks. From now on they are spread over the ranks."""
    for name, weight in named:
        _names[weight] = name


@cache
def watch_loads() -> None:
    """Check all state that optimizers load, from now until the process ends."""
    load = Optimizer.load_state_dict

    @wraps(load)
    def load_and_check(self: Optimizer, state_dict: Any) -> None:
        # Register last, since a user's hook may change the state.
        last = self.register_load_state_dict_pre_hook(_check_load)
        try:
            load(self, state_dict)
        finally:
            last.remove()

    Optimizer.load_state_dict = load_and_check  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(_check_step)


def _list_weights(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer, in the order of its state_dict."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def _check_load(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Raise InputError if an optimizer loads the state of another rank.

    Warn if some of this rank's state is missing.
    """
    weights = _list_weights(optimizer)
    if not any(weight in _names for weight in weights):
        _loaded.add(optimizer)
        return
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    if len(keys) == len(weights):  # torch refuses other lengths
        state = state_dict["state"]
        _check(weights, {id(w) for key, w in zip(keys, weights, strict=True) if key in state})


def note_arrival(weight: Tensor) -> None:
    """Record that a parameter has arrived from another rank. Its optimizer state stayed on that rank."""
    _arrived[weight] = True


def _check_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Check an optimizer's state before a step, if it was loaded too early, or if parameters have arrived since."""
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
    """Warn of this rank's parameters that have no optimizer state, if other parameters have state.

    held: the ids of the parameters with state. was_loaded: whether the state was loaded. If so, this raises InputError
        instead if no parameter of this rank has state.
    """
    own = [w for w in weights if w in _names and w.requires_grad and not isinstance(w, RemoteTensor)]
    lacking = [_names[weight] for weight in own if id(weight) not in held]
    if not lacking or not held:  # some optimizers have no state
        return
    shown = ", ".join(map(repr, lacking[:SHOWN])) + (f" and {len(lacking) - SHOWN} more" if lacking[SHOWN:] else "")
    text = (
        f"the optimizer's state has no entries for {shown}, which this rank has: each rank's optimizer.state_dict() "
        "has entries for its own parameters only, and this one is from another rank or another plan. Use "
        "save_checkpoint() and load_checkpoint(), which keep the state of all ranks"
    )
    if was_loaded and len(lacking) == len(own):
        raise InputError(text)
    warn_user(f"{text}. The state of these parameters starts again at zero", FxsplitWarning)

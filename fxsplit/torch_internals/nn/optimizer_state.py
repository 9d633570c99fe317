"""Move optimizer state, such as Adam's averages, after its parameter has moved to another device.

The state belongs to the user's optimizer, of which fxsplit has no reference. So each move of a parameter is recorded,
and a hook moves the state of these parameters before any optimizer's next step.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

_changing = threading.Lock()
_moves: dict[int, tuple[weakref.ref[Tensor], set[torch.device]]] = {}
"""Parameters that have moved, by id, each with the devices that it was on before."""
_count = 0
"""The number of moves recorded so far."""
_up_to: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
"""The number of moves that each optimizer's state has followed."""


def note_move(weight: Tensor, before: torch.device) -> None:
    """Record that a parameter moved from device `before`, so that optimizer state follows it before the next step."""
    global _count
    with _changing:
        if not _count:
            # The hook stays for the life of the process: any optimizer may step at any time, and an idle hook costs
            # little.
            register_optimizer_step_pre_hook(_follow)
        moved, devices = _moves.get(id(weight), (None, set[torch.device]()))
        # A parameter that is gone may have had this id.
        devices = devices if moved is not None and moved() is weight else set()
        key = id(weight)
        _moves[key] = weakref.ref(weight, lambda gone: _forget(key, gone)), devices | {before}
        _count += 1


def _forget(key: int, gone: weakref.ref[Tensor]) -> None:
    """Forget a parameter that was collected, unless another parameter has its id by now."""
    if key in _moves and _moves[key][0] is gone:
        del _moves[key]


def _follow(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Move an optimizer's state of parameters that have moved since its last step."""
    if _up_to.get(optimizer) == _count:
        return
    with _changing:
        for group in optimizer.param_groups:
            for weight in group["params"]:
                moved, devices = _moves.get(id(weight), (None, set()))
                held, state = moved() if moved else None, optimizer.state.get(weight)
                if held is not None and held is weight and isinstance(state, dict):
                    _move_state(state, held, devices, group)
        _up_to[optimizer] = _count


def _move_state(state: dict[Any, Any], weight: Tensor, devices: set[torch.device], group: dict[str, Any]) -> None:
    """Move state on one of `devices` to the parameter's device."""

    def move(value: Tensor) -> Tensor:
        # State on any other device is there on purpose: some optimizers keep their state in host memory.
        return value.to(weight.device) if value.device in devices else value

    for key in state:
        # As in torch's load_state_dict: the step count stays on the host unless a fused or capturable kernel reads it.
        if key != "step" or group.get("fused") or group.get("capturable"):
            state[key] = pytree.tree_map_only(Tensor, move, state[key])

"""State of optimizers, such as Adam's averages, which follows its parameter to another device.

The state is the optimizer's, and the user's own. So a parameter that has moved is noted, and before an optimizer steps
next, whichever it is, the state that it has of such parameters is moved.
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
"""Parameters that have moved, by identity, each with the devices that it was on before."""
_count = 0
"""How many parameters have moved so far."""
_up_to: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
"""Up to which number of moves each optimizer has been looked at."""


def note_move(weight: Tensor, before: torch.device) -> None:
    """Let the state that optimizers have of a parameter follow it, before they step next; it was on `before`."""
    global _count
    with _changing:
        if not _count:
            # For as long as the process lives: any optimizer may step at any time, and few lines run where all is done.
            register_optimizer_step_pre_hook(_follow)
        moved, devices = _moves.get(id(weight), (None, set[torch.device]()))
        # Another parameter may have had this identity.
        devices = devices if moved is not None and moved() is weight else set()
        key = id(weight)
        _moves[key] = weakref.ref(weight, lambda gone: _forget(key, gone)), devices | {before}
        _count += 1


def _forget(key: int, gone: weakref.ref[Tensor]) -> None:
    """Forget a parameter that is gone, unless another one has its identity by now."""
    if key in _moves and _moves[key][0] is gone:
        del _moves[key]


def _follow(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Move the state that an optimizer has of parameters that have moved since this looked last."""
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
    """Move to a parameter's device what is on one of `devices`."""

    def move(value: Tensor) -> Tensor:
        # What is elsewhere is so on purpose, as by an optimizer that keeps its state in host memory.
        return value.to(weight.device) if value.device in devices else value

    for key in state:
        # As torch has it where a state is loaded: the number of steps is on the host, unless a kernel reads it.
        if key != "step" or group.get("fused") or group.get("capturable"):
            state[key] = pytree.tree_map_only(Tensor, move, state[key])

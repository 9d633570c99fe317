"""Time operators alone, each on values that are made up for it: what is never in memory as a whole is measured so.

The peak of memory is that of the largest operator. Caches are warmer than in the real step that `measure` times.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxsplit.errors import ProfileError
from fxsplit.passes.profile.time_in_step import HALVED, WARM_UP, Clock, NodeTimes, check_stop, halves, medians_of
from fxsplit.torch_internals import pytree


@dataclass(frozen=True)
class Call:
    """What a node calls (a module, a function, or the name of a method), with stand-ins for tensors."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    writes: bool = False


def time_alone(calls: Mapping[str, Call], device: torch.device, repeats: int, tick: Callable[[], object]) -> NodeTimes:
    """Return the medians of each call; `tick` counts the calls.

    Raises ProfileError, naming the node, for one that does not run on made-up values.
    """
    found = {}
    for name, call in calls.items():
        tick()
        try:
            found[name] = _time(call, device, repeats)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise ProfileError(
                f"node {name!r} cannot be timed on made-up values of its shapes ({error}): give the model its weights, "
                "or a profile measured where it has them (costs=)"
            ) from error
    return found


def _time(call: Call, device: torch.device, repeats: int) -> tuple[float, float, float]:
    """Return the median times of one call."""
    made: dict[int, Tensor] = {}

    def make(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = made_up(tensor, device)
        return made[id(tensor)]

    args, kwargs = pytree.tree_map_only(Tensor, make, (call.args, call.kwargs))
    target = _filled(call.target, device) if isinstance(call.target, nn.Module) else call.target
    leaves = [t for t in made.values() if t.requires_grad]
    if isinstance(target, nn.Module):
        leaves += [p for p in target.parameters() if p.requires_grad]
    clock = Clock(device)
    forward, backward = [], []
    early = late = 0.0
    for turn in range(WARM_UP + repeats + HALVED):
        check_stop()
        # Lists of its own for each turn, and copies of what it writes to: nothing may write to a leaf.
        given, named = pytree.tree_map_only(Tensor, torch.clone if call.writes else _same, (args, kwargs))
        begin = clock.now()
        value = _run(target, given, named)
        middle = clock.now()
        outputs = [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor) and t.requires_grad]
        seeds = [torch.ones_like(t) for t in outputs]
        if turn >= WARM_UP + repeats and outputs and leaves:
            first, second = halves(outputs, leaves, seeds, None, clock)
            early, late = early + first, late + second
            continue
        start = clock.now()
        if outputs and leaves:
            torch.autograd.grad(outputs, leaves, seeds, allow_unused=True)
        end = clock.now()
        if turn >= WARM_UP:
            forward.append(middle - begin)
            backward.append(end - start)
    return medians_of(forward, backward, early, late)


def _same(tensor: Tensor) -> Tensor:
    """Return a tensor as it is."""
    return tensor


def _run(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call."""
    if isinstance(target, str):
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)


def _filled(module: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of a module whose weights are made up, on `device`; the module's own are not copied."""
    made: dict[int, Any] = {id(w): made_up(w, device) for w in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, made)


def made_up(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the same shape and strides: normal numbers, zeros for integers, which are valid indices."""
    with torch.no_grad():
        last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        memory = made.as_strided((last + 1 if tensor.numel() else 0,), (1,))  # what is expanded shares its memory
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            memory.normal_()
        else:
            memory.fill_(1 if tensor.dtype == torch.bool else 0)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)

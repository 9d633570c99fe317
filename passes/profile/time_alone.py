"""Time operators one by one on made-up values, for a model that does not fit in memory as a whole.

Only one operator is in memory at a time. Caches are warmer than in a real step, which time_in_step measures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxsplit.errors import ProfileError
from fxsplit.ir.facts.costs.known import Measured
from fxsplit.passes.profile.clock import Clock, WorkTime, make_clock
from fxsplit.passes.profile.thread import check_stop
from fxsplit.passes.profile.time_in_step import (
    WARM_UP,
    Halves,
    NodeTimes,
    ignore_missing_backward,
    list_turns,
    settle,
    take_medians,
    time_halves,
)
from fxsplit.passes.profile.weigh import OperatorMemory
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.nn.copies import copy_module


@dataclass(frozen=True)
class TimedCall:
    """One call of an operator that is to be timed: `target`, with `args` and `kwargs`.

    target: a module, a function, or the name of a method of the first argument. Tensors among the arguments may have
    shapes without values.
    writes: the call writes to its arguments in place.
    turned: the gradient of the result arrives in another memory order (see Observation.is_read_turned).
    joined: the gradient of the result arrives as a part of a larger tensor.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    writes: bool = False
    turned: bool = False
    joined: bool = False


def time_alone(
    calls: Mapping[str, TimedCall],
    device: torch.device,
    repeats: int,
    tick: Callable[[], object],
    *,
    trains: bool = True,
    clock: Clock | None = None,
) -> NodeTimes:
    """Time each call by itself. Return the median times, by the node's name.

    tick: called once for each call, to report progress.
    trains: measure backwards too; with gradients off there are none.
    clock: times the calls (default: a clock of the device for each call).
    Raises ProfileError, with the node, for a call that fails on made-up values.
    """
    times = {}
    for name, call in calls.items():
        tick()
        try:
            times[name] = _time(call, device, clock or make_clock(device), list_turns(repeats, trains=trains))
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise ProfileError(
                f"node {name!r} cannot be timed on made-up values of its shapes ({error}): give the model its weights, "
                "or give a profile measured with weights (costs=)"
            ) from error
    return times


def _time(call: TimedCall, device: torch.device, clock: Clock, turns: Sequence[bool]) -> Measured:
    """Return the median times of one call.

    Each of the `turns` runs the call; if the turn is True, with a halved backward.
    """
    target, args, kwargs, leaves = _make_up_call(call, device)
    forward: list[WorkTime] = []
    backward: list[WorkTime] = []
    halves: list[Halves] = []

    def run(halved: bool = False, memory: OperatorMemory | None = None) -> bool:
        """Run the call forward and backward, and return whether its times can be trusted.

        halved: run the backward in two halves. memory: record allocations in this object, and no times.
        """
        check_stop()
        clock.enter("forward")
        # Each run gets its own containers, and copies of tensors that are written: autograd refuses to write to a leaf.
        given, named = pytree.tree_map_only(Tensor, lambda t: t.clone() if call.writes else t, (args, kwargs))
        with memory.note_forward() if memory is not None else nullcontext():
            begin = clock.start()
            value = run_call(target, given, named)
            forward.append(clock.stop(begin))
        outputs = [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor) and t.requires_grad]
        seeds = [torch.ones_like(t) for t in outputs]
        clock.enter("backward")
        if memory is not None and outputs and leaves:
            with ignore_missing_backward():
                memory.note_backward(outputs, leaves)
        elif halved and outputs and leaves:
            with ignore_missing_backward():
                halves.append(time_halves(outputs, leaves, seeds, None, clock))
        elif outputs and leaves:
            # Begin after the seeds are made, which is no part of a backward.
            begin = clock.start()
            with ignore_missing_backward():
                _ = torch.autograd.grad(outputs, leaves, seeds, allow_unused=True)
                backward.append(clock.stop(begin, calls=1))
        return clock.end_sweep()

    settle(clock, run)
    forward.clear()
    backward.clear()
    for halved in turns:
        run(halved)
    times = take_medians(forward, backward, halves, turns.count(False) - WARM_UP)
    memory = OperatorMemory(is_turned=call.turned, is_joined=call.joined, count=clock.count_allocations)
    run(memory=memory)
    while memory.is_unfinished:
        run(memory=memory)
    return memory.add_to(times)


def _make_up_call(call: TimedCall, device: torch.device) -> tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]:
    """Return a call's target and arguments with made-up values, and the tensors that its backward ends at."""
    made: dict[int, Tensor] = {}

    def make(tensor: Tensor) -> Tensor:
        # A tensor given twice, as in x * x, stays one tensor.
        if id(tensor) not in made:
            made[id(tensor)] = make_up_tensor(tensor, device)
        return made[id(tensor)]

    args, kwargs = pytree.tree_map_only(Tensor, make, (call.args, call.kwargs))
    _spread_offsets(call.target, args, kwargs)
    target = _make_up_weights(call.target, device) if isinstance(call.target, nn.Module) else call.target
    # The node's backward gives gradients to its arguments and to its module's parameters.
    leaves = [t for t in made.values() if t.requires_grad]
    if isinstance(target, nn.Module):
        leaves += [p for p in target.parameters() if p.requires_grad]
    return target, args, kwargs, leaves


def run_call(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call `target`, which is a module, a function, or the name of a method of the first argument."""
    return getattr(args[0], target)(*args[1:], **kwargs) if isinstance(target, str) else target(*args, **kwargs)


def _spread_offsets(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Divide rows evenly over the experts of a mixture: fill the argument `offs`, the end of each expert's rows.

    Made-up integers are zeros. With these, all experts would have no rows, and so no work to measure.
    """
    schema = getattr(target, "_schema", None)
    named = dict(zip([a.name for a in schema.arguments], args, strict=False)) if schema is not None else {}
    ends = (named | kwargs).get("offs")
    if not (isinstance(ends, Tensor) and ends.dim() == 1 and len(args) > 1):
        return
    rows, weights = args[:2]
    # One group of rows for each weight matrix. If both arguments are matrices, the offsets divide another dimension.
    if isinstance(rows, Tensor) and isinstance(weights, Tensor) and (rows.dim(), weights.dim()) == (2, 3):
        ends.copy_(torch.arange(1, len(ends) + 1, device=ends.device) * len(rows) // len(ends))


def _make_up_weights(module: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of a module on `device` with made-up weights."""
    # The copy takes the made-up weights from its memo, so the module's own weights are not copied.
    made: dict[int, Any] = {id(w): make_up_tensor(w, device) for w in (*module.parameters(), *module.buffers())}
    return copy_module(module, made)


def make_up_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a made-up tensor on `device` with the shape, strides, dtype and requires_grad of `tensor`.

    Floating-point values are normal numbers. Integers are 0, a valid index of any table, and booleans are true.
    """
    with torch.no_grad():
        last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        # torch refuses to fill an expanded tensor, which has several elements in one place: fill its memory instead.
        memory = made.as_strided((last + 1 if tensor.numel() else 0,), (1,))
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            memory.normal_()
        else:
            memory.fill_(1 if tensor.dtype == torch.bool else 0)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)

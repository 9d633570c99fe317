"""Time one operator on one device: forward and backward, with warm-up, as medians."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxsplit.observe import tensor_text

WARM_UP = 2
ENOUGH_S = 0.25
"""An operator whose repetitions have taken this long has been measured well enough."""


class Clock:
    """Milliseconds on one device: the wall clock on a CPU; on a GPU, after everything queued has finished."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> float:
        """Return milliseconds from an arbitrary start."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() * 1000.0


def signature(call: Any, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return a text that two operators share exactly if they do the same work on the same shapes.

    `call` is a module, a function or a method's name. A module from outside torch may do anything, so its `path` in
    the model is part of its signature.
    """
    if isinstance(call, nn.Module):
        kind = type(call)
        weights = ",".join(f"{tensor_text(p)}{'g' if p.requires_grad else ''}" for p in call.parameters())
        own = "" if kind.__module__.startswith("torch.nn") else f"@{path}"
        mode = "train" if call.training else "eval"
        head = f"{kind.__module__}.{kind.__qualname__}{own}<{' '.join(repr(call).split())};{weights};{mode}>"
    elif isinstance(call, str):
        head = f"Tensor.{call}"
    else:
        head = f"{getattr(call, '__module__', '')}.{getattr(call, '__qualname__', repr(call))}"
    words = [_word(leaf) for leaf in pytree.tree_leaves((args, sorted(kwargs.items())))]
    return f"{head}({', '.join(words)})"


def time_operator(
    call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, repeats: int
) -> tuple[float, float]:
    """Return the median forward and backward milliseconds of `call(*args, **kwargs)` on `device`.

    Every repetition works on fresh copies of the tensors, so that operators may write in place; copying is not timed.
    """
    if isinstance(call, nn.Module) and any(w.device != device for w in (*call.parameters(), *call.buffers())):
        call = copy.deepcopy(call).to(device)
    run: Callable[..., Any] = call if not isinstance(call, str) else lambda x, *a, **k: getattr(x, call)(*a, **k)
    weights = [p for p in call.parameters() if p.requires_grad] if isinstance(call, nn.Module) else []
    clock = Clock(device)
    forward, backward = [], []
    start = clock.now()
    for turn in range(WARM_UP + repeats):
        (fresh_args, fresh_kwargs), leaves = _fresh(args, kwargs, device)
        begin = clock.now()
        value = run(*fresh_args, **fresh_kwargs)
        middle = clock.now()
        outs = [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor) and t.requires_grad]
        spent = 0.0
        if outs and (leaves or weights):
            gradients = [torch.ones_like(t) for t in outs]
            begin_backward = clock.now()
            torch.autograd.grad(outs, [*leaves, *weights], gradients, allow_unused=True)
            spent = clock.now() - begin_backward
        if turn >= WARM_UP:
            forward.append(middle - begin)
            backward.append(spent)
        if turn >= WARM_UP and clock.now() - start > 1000.0 * ENOUGH_S:
            break
    return median(forward), median(backward)


@contextmanager
def intraop_threads(count: int) -> Iterator[None]:
    """Let operators in the calling thread use `count` threads inside the block, as the runtime's workers will."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _fresh(args: Any, kwargs: Any, device: torch.device) -> tuple[Any, list[Tensor]]:
    """Return copies of the arguments on `device`, and the leaves among them that want a gradient."""
    leaves: list[Tensor] = []

    def renew(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        leaf = value.detach().to(device).requires_grad_(value.requires_grad)
        if value.requires_grad:
            leaves.append(leaf)
        return leaf.clone()

    return pytree.tree_map(renew, (args, kwargs)), leaves


def _word(leaf: Any) -> str:
    """Return an argument's part of a signature."""
    if not isinstance(leaf, Tensor):
        return repr(leaf) if isinstance(leaf, (int, float, str, bool, torch.dtype, type(None))) else type(leaf).__name__
    layout = "" if leaf.is_contiguous() else f"~{list(leaf.stride())}"
    return f"{tensor_text(leaf)}{layout}{'g' if leaf.requires_grad else ''}"

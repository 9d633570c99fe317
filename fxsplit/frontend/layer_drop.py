"""Layer drop with a rate of 0: a model that draws a random number to skip a layer, but never skips one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fxsplit.torch_internals.random.generators import read_cpu_generator, take_back_draw


class NeverDropped(TorchFunctionMode):
    """Answers False to `torch.rand([]) < 0.0`, the comparison of layer drop with a rate of 0.

    torch.export cannot follow a branch on a random number. But a draw is never below 0, so the answer is known. The
    draw is undone, since the graph does not hold it: a later dropout has to draw the same mask in the model and in the
    graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self._draws: list[tuple[Tensor, Tensor, Tensor]] = []  # the draw, and the generator state before and after

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return the result of `func`, or False for a comparison of a draw with a number that is at most 0."""
        # Only draws of forward() itself are compared, and only with a number that is at most 0.
        below = getattr(func, "__name__", "") in ("lt", "__lt__") and len(args) == 2
        if below and isinstance(args[1], (int, float)) and args[1] <= 0:
            found = next((draw for draw in self._draws if draw[0] is args[0]), None)
            if found is not None:
                take_back_draw(*found[1:])
                return False
        if func is not torch.rand:
            return func(*args, **(kwargs or {}))
        before = read_cpu_generator()
        made = func(*args, **(kwargs or {}))
        self._draws.append((made, before, read_cpu_generator()))
        return made

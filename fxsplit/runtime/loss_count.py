"""Find out by which count of labels a loss function divides: torch tells which means over labels it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fxsplit.ir.facts.counts import LABEL_FUNCTIONS, Count, Watch, is_mean, make_label_count, read_options
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.expectations import expect_averages
from fxsplit.torch_internals.thread_modes import enter_function_mode


def find_loss_count(loss_fn: Callable[..., Any], outputs: Any, target: tuple[Any, ...]) -> Count | Watch | None:
    """Return what a loss is divided by that averages labels of its target; a Watch where it does more than that."""
    note = _NoteMeans()
    with expect_averages(), enter_function_mode(note):
        loss = loss_fn(outputs, *target)
    leaves = list(pytree.tree_leaves(target))
    found = []
    for result, labels, options in note.found:
        place = next((i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and _has_same(leaf, labels)), None)
        if place is None:
            continue
        count = make_label_count(options, place)
        if result is loss:
            return count
        found.append(count)
    return Watch("the loss of loss_fn", found) if found else None


class _NoteMeans(TorchFunctionMode):
    """Notes each mean over labels that is computed: its result, the labels, and its options."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Tensor, Tensor, dict[str, Any]]] = []

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in LABEL_FUNCTIONS:
            given = read_options(args, kwargs or {})
            if is_mean(given):
                self.found.append((result, given["target"], given))
        return result


def _has_same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same entries in the same order."""
    # A loss may move its outputs and its target, to host memory for example.
    return a.numel() == b.numel() and torch.equal(a.flatten(), b.flatten().to(a.device))

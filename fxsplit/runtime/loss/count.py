"""Find the count of labels that a loss function divides by.

Such a count is known if torch itself computes the mean over labels, for example in a cross entropy with ignore_index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fxsplit.ir.facts.capture.counts import LABEL_FUNCTIONS, Count, CountWatch, is_mean, make_label_count, read_options
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.nn.expectations import expect_averages
from fxsplit.torch_internals.thread_modes import enter_function_mode

TRIED = 16
"""How many classes, from class 0, are tried as labels at most."""


class _Mean(NamedTuple):
    """A mean over labels that torch computed: its result, its labels, and the call's arguments by name."""

    result: Tensor
    labels: Tensor
    options: dict[str, Any]


def find_loss_count(loss_fn: Callable[..., Any], outputs: Any, target: tuple[Any, ...]) -> Count | CountWatch | None:
    """Return how to compute the divisor of a loss from its target, if the loss is a mean over counted labels.

    Returns a CountWatch if such a mean is only a part of the loss, and None if the loss has no such mean.
    """
    note = _NoteMeans()
    with expect_averages(), enter_function_mode(note):
        loss = loss_fn(outputs, *target)
    leaves = list(pytree.tree_leaves(target))
    found = []
    for number, mean in enumerate(note.found):
        alike = (i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and _has_same(leaf, mean.labels))
        place = next((i for i in alike if _takes_any(loss_fn, outputs, target, i, number, mean)), None)
        if place is None:
            continue
        count = make_label_count(mean.options, place)
        if mean.result is loss:
            return count
        found.append(count)
    return CountWatch("the loss of loss_fn", found) if found else None


def _takes_any(
    loss_fn: Callable[..., Any], outputs: Any, target: tuple[Any, ...], place: int, number: int, mean: _Mean
) -> bool:
    """Return whether mean `number` of a loss uses the target's labels as they are, whatever the labels.

    place: the index of the labels among the tensors of the target.
    A function may change labels that this target happens to lack, for example by clamp(min=0), masked_fill() or
    where().
    """
    if mean.labels.is_floating_point():
        return True
    leaves, structure = pytree.tree_flatten(target)
    for labels in _vary_labels(leaves[place], mean):
        given = pytree.tree_unflatten([*leaves[:place], labels, *leaves[place + 1 :]], structure)
        note = _NoteMeans(last=number)
        # The function may fail earlier on a label that is not one of its classes.
        with suppress(Exception), expect_averages(), enter_function_mode(note):
            loss_fn(outputs, *given)
        if note.labels is not None and not _has_same(labels, note.labels):
            return False
    return True


def _vary_labels(labels: Tensor, mean: _Mean) -> Iterator[Tensor]:
    """Yield labels of the same shape that together cover all cases: classes, ignored labels, and invalid ones."""
    if not labels.numel():
        return
    scores: Tensor = mean.options["input"]
    n_classes = scores.shape[min(1, scores.ndim - 1)]
    values = [*range(min(n_classes, TRIED)), n_classes - 1, mean.options.get("ignore_index", -100), -100, -1, n_classes]
    for begin in range(0, len(values), labels.numel()):
        chosen = values[begin : begin + labels.numel()]
        filled = [chosen[i % len(chosen)] for i in range(labels.numel())]
        with suppress(RuntimeError):  # a small dtype may not hold all values
            yield torch.tensor(filled, dtype=labels.dtype).reshape(labels.shape).to(labels.device)


class _SeenError(Exception):
    """Ends a call of a loss function after its labels are known."""


class _NoteMeans(TorchFunctionMode):
    """Records each mean over labels that torch computes.

    last: stop at the mean with this number, before it is computed. `labels` is then the labels of that mean.
    """

    def __init__(self, last: int | None = None) -> None:
        super().__init__()
        self.found: list[_Mean] = []
        self.labels: Tensor | None = None
        self._last = last

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = read_options(args, kwargs or {}) if function in LABEL_FUNCTIONS else {}
        is_mean_of_labels = bool(given) and is_mean(given)
        if is_mean_of_labels and len(self.found) == self._last:
            self.labels = given["target"]
            raise _SeenError
        result = function(*args, **(kwargs or {}))
        if is_mean_of_labels:
            self.found.append(_Mean(result, given["target"], given))
        return result


def _has_same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same entries in the same order."""
    # A loss may move its outputs and its target, for example to host memory.
    return a.numel() == b.numel() and torch.equal(a.flatten(), b.flatten().to(a.device))

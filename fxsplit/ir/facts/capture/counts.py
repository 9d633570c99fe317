"""Counts: the numbers that means over some entries are divided by, if that is not the number of rows.

A loss over labels averages the labels that are not ignored, and a loss under a mask divides by the sum of the mask. The
share of a microbatch in such a count is not its share of the rows. With counts c_m of the microbatches and c of the
batch, the mean of the batch is sum(x_m c_m) / c, where x_m are the means of the microbatches. Counts follow from the
inputs, so they are known before any microbatch runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxsplit.errors import InputError
from fxsplit.system.user_lines import warn_user
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.distributed.remote_parameters import call_with_lent
from fxsplit.torch_internals.tensors.accelerators import is_on_host
from fxsplit.torch_internals.tensors.host_copies import PendingCopies

LABEL_MODULES = (nn.CrossEntropyLoss, nn.NLLLoss)
LABEL_FUNCTIONS = (F.cross_entropy, F.nll_loss)
NAMES = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
"""The arguments of LABEL_FUNCTIONS."""
MEAN = (None, 1, "mean")
"""The values of `reduction` for a mean: the default, torch's own number for it, and the name."""
EVEN = 1e-9
"""The difference up to which a share of a count equals a share of the rows: a larger one is not rounding."""
_COUNTED = "is divided by a count of its own, such as the number of labels other than ignore_index"
DIFFERS = (
    f"{_COUNTED}: the pipeline averages it by rows, which differs from the whole batch if the counts of microbatches "
    "differ; pass the count to the model (Hugging Face: num_items_in_batch=), or compile with n_microbatches=1"
)
"""A warning about a number that cannot be made from microbatches. The name of the number is put before it."""
LACKS = (
    f"{_COUNTED}, and that count is zero in a microbatch and not in the batch: the microbatch's number is 0 / 0; "
    "compile with fewer microbatches, or with n_microbatches=1"
)
"""An error about such a number, if a microbatch has no entries to count. The name is put before it."""


Weights = Sequence[float | Tensor]
"""Weights of microbatches: numbers, or tensors on an accelerator, so that the host need not wait for them."""


@dataclass(frozen=True, eq=False)
class Count:
    """The count that a number is divided by, such as the labels that a loss averages.

    - `compute`: returns the count from the tensors of a call, or from the target of a loss
    - `by_rows`: the number to divide is a mean over rows; otherwise it is a sum
    - `safe`: with a count of zero and the weight zero, the gradients are zero, as for torch's means over labels. A sum
      divided by zero has other gradients (see `keep_zeros`)
    - `reads`: further tensors that `compute` reads
    - `additive`: the count of a batch is the sum of the counts of its microbatches. `mask.sum().clamp(min=1)` is not
      additive
    """

    compute: Callable[..., Tensor]
    by_rows: bool = False
    safe: bool = False
    reads: tuple[Tensor, ...] = ()
    additive: bool = True

    def weigh(self, pieces: Sequence[Sequence[Any]], rows: Sequence[int], whole: Sequence[Any] = ()) -> list[float]:
        """Return the weight of each piece's number in the number of the whole.

        pieces: the tensors of each piece. rows: the rows of each piece.
        whole: the tensors of the whole. Without them, the count of the whole is the sum of the pieces' counts.
        If the pieces are on an accelerator, the host waits for it once.
        """
        weights: list[float] = self.compute_weights(pieces, rows, whole).tolist()
        return weights

    def weigh_there(self, pieces: Sequence[Sequence[Any]], rows: Sequence[int], whole: Sequence[Any] = ()) -> Weights:
        """Return the same weights as `weigh`. On an accelerator they stay tensors, so that the host need not wait."""
        weights = self.compute_weights(pieces, rows, whole)
        if not is_on_host(weights):
            return list(weights.unbind())
        found: list[float] = weights.tolist()
        return found

    def compute_weights(self, pieces: Sequence[Sequence[Any]], rows: Sequence[int], whole: Sequence[Any]) -> Tensor:
        """Return the weights of all pieces, in double precision, on the device of the tensors."""
        with torch.set_grad_enabled(False):
            # Stacked before the division: an operator takes as long for one number as for all.
            divisors = self._make_divisors([self._count(tensors) for tensors in pieces], rows)
            total = self._make_divisors([self._count(whole)], [sum(rows)])[0] if whole else divisors.sum()
            # If nothing counts in the whole batch, the model divides by zero, and so does each microbatch.
            return (divisors / total).where(total != 0, 1.0)

    def find_divisor(self, tensors: Sequence[Any], rows: int) -> float:
        """Return the factor that turns the number for `rows` rows, which is a mean of counted entries, into a sum."""
        with torch.no_grad():
            return float(self._make_divisors([self._count(tensors)], [rows]))

    def find_count(self, tensors: Sequence[Any]) -> float:
        """Return the count for these tensors. The host waits for the accelerator that holds them."""
        with torch.no_grad():
            return float(self._count(tensors))

    def _count(self, tensors: Sequence[Any]) -> Tensor:
        """Return the result of `compute`, a tensor of one number on the device of `tensors`."""
        # Only a module has buffers, which may be on another rank.
        lent = isinstance(self.compute, nn.Module)
        count = call_with_lent(self.compute, tensors) if lent else self.compute(*tensors)
        return torch.as_tensor(count).reshape(())

    def _make_divisors(self, counts: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
        """Return the factors that turn means of counted entries into sums, in double precision.

        counts: the count of each piece. rows: the rows of each piece.
        """
        if self.by_rows:
            counts = [count.double() * n for count, n in zip(counts, rows, strict=True)]
        return torch.stack(list(counts)).double()


class CountWatch:
    """Compares counts inside a number that uses counts in other ways than as its only divisor.

    Such a number is averaged by rows. This is right only if every microbatch has the same count per row, so a warning
    is given once if a count differs. If a count is zero in a microbatch and not in the batch, the number of that
    microbatch is 0 / 0, and an error says so. If the counts are on an accelerator, the host does not wait for them: the
    warning or the error comes with a later batch.
    name: the name of the number. said: an attribute, whether a warning has been given.
    """

    def __init__(self, name: str, counts: Sequence[Count]) -> None:
        self.counts = counts
        self._name = name
        self.said = False
        self._coming: PendingCopies[None] = PendingCopies()

    def weigh(self, pieces: Sequence[Sequence[Any]], rows: Sequence[int], whole: Sequence[Any] = ()) -> list[float]:
        """Return the share of each piece in the rows. Warns once if a count has other shares.

        Raises InputError if a count is zero in a piece and not in the whole.
        """
        shares = share_rows(rows)
        if not self._coming.is_full:
            for count in self.counts:
                weights = count.compute_weights(pieces, rows, whole)
                pairs = zip(weights, shares, strict=True)
                differs = torch.stack([(weight - share).abs() > EVEN for weight, share in pairs]).any()
                self._coming.add(torch.stack([differs, (weights == 0).any()]), None)
        arrived = [flags.tolist() for flags, _ in self._coming.take_arrived()]
        if any(lacks for _, lacks in arrived):
            raise InputError(f"{self._name} {LACKS}")
        if not self.said and any(differs for differs, _ in arrived):
            self.said = True
            warn_user(f"{self._name} {DIFFERS}")
        return shares


def share_rows(rows: Sequence[int]) -> list[float]:
    """Return, for each microbatch, its share of the rows of all microbatches."""
    total = sum(rows)
    return [count / total for count in rows]


COUNTS_NOTHING = (
    "the model divides by a count that is zero in this microbatch and not in the batch; compile with n_microbatches=1, "
    "or divide outside of the model"
)
"""An error about a number that was divided by a count of zero, and is not 0 / 0. The name is put before it."""


def check_nothing_counts(number: Tensor | None, name: str) -> None:
    """Raise InputError unless a number that has been divided by a count of zero is NaN (0 / 0), or zero."""
    if number is not None and not (number.isnan() | (number == 0)).all():
        raise InputError(f"{name} is {number.item()}: {COUNTS_NOTHING}")


def find_miscounted(numbers: Tensor, weights: Tensor) -> Tensor:
    """Return a flag, as a tensor: whether any number of weight zero is neither NaN (0 / 0) nor zero."""
    return ((weights == 0) & ~numbers.isnan() & (numbers != 0)).any()


def make_label_count(options: Mapping[str, Any], place: int = 0) -> Count:
    """Return the count of the labels that a loss averages over.

    options: the arguments of the loss, by name. place: the index of the labels among the tensors of the target.
    """
    weight, ignore_index = options.get("weight"), options.get("ignore_index", -100)
    # torch gives ignored labels a gradient of zero, but divides by zero for classes of weight zero.
    safe = weight is None or bool((weight > 0).all())
    return Count(
        lambda target: count_labels(pytree.tree_leaves(target)[place], weight, ignore_index),
        safe=safe,
        reads=() if weight is None else (weight,),
    )


def count_labels(labels: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Return the number of labels that are not ignored, or the sum of the weights of their classes.

    If the target holds probabilities of classes, nothing is ignored and weights are not a divisor. The count is then
    the number of probabilities.
    """
    if labels.is_floating_point():
        return torch.tensor(labels.numel())
    counts = labels != ignore_index
    if weight is None:
        return counts.sum()
    return (weight.to(labels.device)[labels.where(counts, 0)] * counts).sum()


def count_selected(*places: Any) -> Tensor:
    """Return how many entries a mask selects, or how many a tuple of indices selects, as from `nonzero`."""
    given: list[Tensor] = pytree.tree_leaves(places)
    if len(given) == 1 and given[0].dtype is torch.bool:
        return given[0].sum()
    return torch.tensor(torch.broadcast_tensors(*given)[0].numel())


def divide_one_by(factor: Tensor) -> Tensor:
    """Return the number by which to divide to get the same result as by multiplying by `factor`."""
    return factor.double().reciprocal()


def read_options(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of one of LABEL_FUNCTIONS by name. An argument that was not passed is missing."""
    return {**dict(zip(NAMES, args, strict=False)), **kwargs}


def is_mean(options: Mapping[str, Any]) -> bool:
    """Return whether a loss over labels is a mean, given its arguments by name.

    "size_average" and "reduce" are older arguments that state the same.
    """
    older = options.get("size_average") is None and options.get("reduce") is None
    return older and options.get("reduction") in MEAN

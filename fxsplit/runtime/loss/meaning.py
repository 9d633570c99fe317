"""Find out how a user's loss function reduces the losses of rows, from the microbatches of its first steps.

    loss(microbatch) == mean of loss(pieces), by rows?    -->  batch loss = mean of microbatch losses, by rows
    loss(microbatch) == sum of loss(pieces)?              -->  batch loss = sum of microbatch losses
    loss(microbatch) == mean of loss(pieces), by counts?  -->  batch loss = mean, by counts of the target's entries

The relation that holds for a microbatch and its pieces is assumed for the batch and its microbatches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import torch

from fxsplit.errors import InputError
from fxsplit.ir.facts.capture.counts import Count, CountWatch
from fxsplit.ir.facts.capture.output_kinds import Kind
from fxsplit.runtime.loss.calls import Heard
from fxsplit.runtime.loss.count import find_loss_count
from fxsplit.runtime.loss.trial import LossTrial
from fxsplit.runtime.program import Program
from fxsplit.system.user_lines import warn_user
from fxsplit.torch_internals.nn.expectations import expect_averages
from fxsplit.torch_internals.scopes.undo import restore_after
from fxsplit.torch_internals.torch_compile.compiled_code import is_compiled

MOST_STEPS = 3
"""After this many steps, a loss that is still undecided, such as one that is always zero, is no longer looked at."""


MOST_HEARD = 64
"""So many different calls of one loss function are remembered; the first one is forgotten then."""


class LossSideEffects(Protocol):
    """Records the changes that calls of a loss function make to other objects, and undoes them."""

    def note(self) -> AbstractContextManager[None]:
        """Record the changes of the call inside the block."""

    def list_changes(self) -> list[str]:
        """Return a text for each change that every call makes, after two calls."""

    def put_back(self) -> None:
        """Restore all values from before the first call."""


FindCounts = Callable[[Callable[..., Any], Any, tuple[Any, ...]], tuple[Sequence[Count], Sequence[float]]]
"""Returns the divisors that a loss may have, and marks (see `LossTrial.try_counts`), from outputs and target."""


class LossMeaning:
    """The known properties of one loss function in one program. Several threads may compute its microbatches.

    looks: whether to look at microbatches; otherwise `stated` is trusted. watch: makes the object that undoes side
        effects of the trial calls. find_counts: finds counts that the loss may divide by.
    side_by_side: whether other pipelines have other rows of the batch.
    listens: whether a step records the calls of its first loss.
    count: the divisor of the loss, if it is known and not the number of rows.
    stated: the reduction that the function states itself.
    steps_left: the number of steps that will still look at their microbatches.
    reduction: "mean" or "sum", stated or found out; None if not known yet.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        stated: str | None,
        *,
        looks: bool = True,
        watch: Callable[[Callable[..., Any]], LossSideEffects] | None = None,
        find_counts: FindCounts | None = None,
        side_by_side: bool = False,
    ) -> None:
        self.stated = stated
        self.reduction = "mean" if stated == "batchmean" else stated
        self.count: Count | CountWatch | None = None
        self._loss_fn = loss_fn
        self._watch = watch
        self._find_counts = find_counts or (lambda loss_fn, outputs, target: ((), ()))
        self._changes: list[str] = []
        self._compares = False
        self._tried = False
        self._calls: Heard | None = None
        self._earlier: list[Count] = []
        self._agreed: tuple[Count | CountWatch | None, str | None] | None = None
        # A step asks for each microbatch.
        self.listens = looks and not _is_fixed(loss_fn)
        self._side_by_side = side_by_side
        self._heard: dict[tuple[Any, ...], tuple[Count | CountWatch | None, str | None]] = {}
        self._said = False
        self.steps_left = MOST_STEPS if looks else 0
        self._differs = ""
        self._lock = threading.Lock()

    def hear(self, calls: Heard) -> bool:
        """Return whether the loss has to be looked at again, given the torch functions that it calls in this step.

        If an earlier step has made the same calls, what was found then holds: whether the loss is a mean, a sum, or
        divided by a count. Otherwise the step's first microbatch shows it.
        """
        with self._lock:
            if self.steps_left:  # this step has looked at the microbatch
                self._calls = calls
                return False
            known = next((self._heard[key] for key in (calls, calls.calls) if key in self._heard), None)
            if known is not None:
                self.count, self.reduction = known
                return False
            self._agreed = (self.count, self.reduction) if self._side_by_side else None
            self._earlier = [c for c, _ in self._heard.values() if isinstance(c, Count)]
            self.count, self.reduction = None, "mean" if self.stated == "batchmean" else self.stated
            self.steps_left, self._tried, self._calls = MOST_STEPS, False, calls
            return True

    def begin_step(self) -> None:
        """Forget the findings of a failed step."""
        self._differs, self._compares, self._calls = "", False, None

    def look_at(self, program: Program, outputs: Sequence[Any], target: tuple[Any, ...], rows: int) -> None:
        """Compare a microbatch's loss, from the last stage's `outputs` for its rows, with the losses of its pieces.

        Raises InputError if the loss has changed after pipelines side by side agreed on the weights of their losses.
        """
        self._look_at(program, outputs, target, rows)
        agreed, self._agreed = self._agreed, None
        if agreed is None:
            return
        # Other calls may lead to the same weights: a function may have a path of its own for some labels.
        alike = [_find_share(count, target) for count in (agreed[0], self.count)]
        if agreed[1] != self.reduction or alike[0] != alike[1]:
            raise InputError(
                "loss_fn makes other calls of torch than in earlier steps, or with other numbers or weights, "
                "but the pipelines of a mesh have already agreed on the weights of their losses: compile again "
                "when loss_fn changes"
            )

    def _look_at(self, program: Program, outputs: Sequence[Any], target: tuple[Any, ...], rows: int) -> None:
        """Do what `look_at` says, for all but pipelines side by side."""
        with self._lock, torch.no_grad():
            if isinstance(self.count, Count):
                return
            # If nothing counts, a function may take another path, which says nothing about the usual one.
            nothing = next((count for count in self._earlier if _counts_nothing(count, target)), None)
            if nothing is not None:
                self.count, self.reduction, self._calls = nothing, "mean", None
                return
            try:
                with self._call_without_trace(outputs, target, program) as loss_fn:
                    self.count = self.count or find_loss_count(loss_fn, program.build_result(outputs), target)
                    if isinstance(self.count, Count):
                        self.reduction = "mean"
                        return
                    trial = LossTrial(loss_fn, program, outputs, target, rows)
                    unjoined = trial.find_unjoined()
                    if unjoined is not None:
                        self._differs = f"it reads what microbatches do not make ({unjoined})"
                        return
                    kinds, count = self._find_kinds(trial, loss_fn, program.build_result(outputs), target)
                    if count is not None:
                        self.count, self.reduction = count, "mean"
                        self._compares |= trial.compares_rows(count)
                        return
                    self._compares |= len(kinds) == 1 and trial.compares_rows(*kinds)
            except Exception as error:  # a loss may work for only one number of rows
                self._differs = self._differs or f"it does not run on pieces of a microbatch ({error})"
                return
            if len(kinds) > 1:
                return  # a loss of zero is both a mean and a sum
            found = next(iter(kinds), None)
            if self.reduction is None:
                self.reduction = found
            if found is None or found != self.reduction:
                if isinstance(self.count, CountWatch):
                    self.count.said = True  # this warning says more
                self._differs = "a microbatch's is neither the mean nor the sum of that of its rows"

    def _find_kinds(
        self, trial: LossTrial, loss_fn: Callable[..., Any], outputs: Any, target: tuple[Any, ...]
    ) -> tuple[set[Kind], Count | None]:
        """Return how the losses of pieces combine for any target: a mean, a sum, or divided by a count."""
        kinds = trial.find_kinds()
        if self._tried:
            return kinds, None
        counts, marks = self._find_counts(loss_fn, outputs, target)
        varied, counts = trial.try_counts(kinds, [*counts, *self._earlier], marks)
        # A loss of zero is a mean, a sum, and a quotient of any count.
        if len(varied) > 1 or "sum" in varied:
            return varied, None
        self._tried = True
        return varied, next(iter(counts), None)

    @contextmanager
    def _call_without_trace(
        self, outputs: Sequence[Any], target: tuple[Any, ...], program: Program
    ) -> Iterator[Callable[..., Any]]:
        """Yield the loss function with its side effects undone after each call, and record them for a warning."""
        if self._watch is None:
            yield self._loss_fn
            return
        watcher = self._watch(self._loss_fn)

        def compute(*args: Any) -> Any:
            with restore_after(watcher.put_back):
                return self._loss_fn(*args)

        with restore_after(watcher.put_back), expect_averages():
            # Two calls: a change that only the first call makes is a cache.
            for _ in range(2):
                with watcher.note():
                    self._loss_fn(program.build_result(outputs), *target)
            self._changes = self._changes or watcher.list_changes()
            watcher.put_back()
            yield compute

    def end_step(self) -> None:
        """Warn, once, if the batch's loss does not follow from its microbatches, or a call changes other objects."""
        if not self.steps_left:
            return
        self.steps_left = 0 if self.reduction is not None or self._differs else self.steps_left - 1
        if self._calls is not None:
            # The code of a handwritten count may contain sizes.
            by_hand = isinstance(self.count, Count) and not self.count.additive
            self._heard[self._calls if by_hand else self._calls.calls] = self.count, self.reduction
            if len(self._heard) > MOST_HEARD:
                del self._heard[next(iter(self._heard))]
        changes, self._changes = self._changes, []
        if changes and not self._said:
            self._said = True
            warn_user(
                f"loss_fn changes {'; '.join(changes)}. A step calls it for each microbatch, not for the batch: "
                "change this in the training loop, or compile with n_microbatches=1"
            )
        if self._compares:
            warn_user(
                "the gradient of loss_fn compares rows, although its value does not, as in a loss divided by a "
                "detached loss: the pipeline computes it within microbatches, and so it differs from the whole "
                "batch's; compile with n_microbatches=1 to compare all rows"
            )
        if self._differs:
            warn_user(
                f"loss_fn is no mean over rows and no sum: {self._differs}. The pipeline averages it over "
                "microbatches, by rows, which differs from the loss of the whole batch: divide by the number of rows, "
                "state loss_fn.reduction = 'sum', or compile with n_microbatches=1"
            )


def _is_fixed(function: Callable[..., Any]) -> bool:
    """Return whether a function always makes the same calls, like torch's own, also with bound arguments.

    A function under torch.compile counts as fixed: listening would compile it again.
    """
    while isinstance(function, partial):
        function = function.func
    of_torch = str(getattr(function, "__module__", "")).startswith("torch.") and hasattr(function, "__name__")
    return of_torch or is_compiled(function)


def _find_share(count: Count | CountWatch | None, target: tuple[Any, ...]) -> float | None:
    """Return what a count is for a microbatch's target; None for no count. The host waits for an accelerator."""
    try:
        return count.find_count(target) if isinstance(count, Count) else None
    except Exception:  # what counts may hold sizes
        return None


def _counts_nothing(count: Count, target: tuple[Any, ...]) -> bool:
    """Return whether a count of a microbatch's target is zero."""
    return _find_share(count, target) == 0

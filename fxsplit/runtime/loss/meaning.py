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
"""How many different records of a loss function's calls are remembered. The oldest record is then forgotten."""


class LossSideEffects(Protocol):
    """Records the changes that calls of a loss function make to other objects, and undoes them."""

    def note(self) -> AbstractContextManager[None]:
        """Record the changes of the call inside the block."""

    def list_changes(self) -> list[str]:
        """Return a text for each change that every call makes. Call it after `note` has recorded two calls."""

    def put_back(self) -> None:
        """Restore all changed values to what they were before the first call."""


FindCounts = Callable[[Callable[..., Any], Any, tuple[Any, ...]], tuple[Sequence[Count], Sequence[float]]]
"""From (loss_fn, outputs, target): counts that the loss may divide by, and marks (see `LossTrial.try_counts`)."""


class LossMeaning:
    """The known properties of one loss function in one program. Several threads may compute its microbatches.

    Parameters:
    stated: the reduction that the function itself states, "mean" or "sum" (None: it states none).
    looks: whether to find the reduction out from microbatches; otherwise `stated` is trusted.
    watch: makes the object that undoes side effects of trial calls.
    find_counts: finds counts that the loss may divide by.
    side_by_side: whether other pipelines train on other rows of the batch.

    Attributes:
    listens: whether a step records the calls that the first microbatch's loss makes.
    count: the number that the loss divides by, if it is known and is not the number of rows.
    steps_left: the number of steps that will still examine their microbatches.
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
        """Return whether the loss has to be examined again, given the torch functions that the loss calls in this step.

        If an earlier step has made the same calls, the findings of that step hold: whether the loss is a mean, a sum,
        or divided by a count. Otherwise the step's first microbatch is examined.
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
        """Forget what a step that failed has found out."""
        self._differs, self._compares, self._calls = "", False, None

    def look_at(self, program: Program, outputs: Sequence[Any], target: tuple[Any, ...], rows: int) -> None:
        """Find out how the loss combines: compare the loss of a microbatch with the losses of pieces of the microbatch.

        outputs: the last stage's outputs for the microbatch, which has `rows` rows.
        Raises InputError if the loss has changed after parallel pipelines have agreed on the weights of their losses.
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
        """Find out how the loss combines, as in `look_at`, but without the check for parallel pipelines."""
        with self._lock, torch.no_grad():
            if isinstance(self.count, Count):
                return
            # A function may compute a microbatch without counted entries in another way than usual: learn nothing here.
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
        """Return how the losses of pieces combine for any target, and the count that the loss divides by.

        The result is the set of the kinds "mean" and "sum" that hold, and a count, or None if there is none.
        """
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
        """Yield the loss function in a form whose side effects are undone after each call.

        The side effects that every call makes are recorded, to warn of them later.
        """
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
        """Warn once if the batch's loss does not follow from its microbatches, or if calls change other objects."""
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
    """Return whether a function always makes the same calls. This is so for torch's own, also with bound arguments.

    A function under torch.compile counts as fixed too: recording its calls would make torch compile it again.
    """
    while isinstance(function, partial):
        function = function.func
    of_torch = str(getattr(function, "__module__", "")).startswith("torch.") and hasattr(function, "__name__")
    return of_torch or is_compiled(function)


def _find_share(count: Count | CountWatch | None, target: tuple[Any, ...]) -> float | None:
    """Return the value of a count for a microbatch's target; None for no count. The host waits for an accelerator."""
    try:
        return count.find_count(target) if isinstance(count, Count) else None
    except Exception:  # a count's code may contain sizes of an earlier target, and then fails for this target
        return None


def _counts_nothing(count: Count, target: tuple[Any, ...]) -> bool:
    """Return whether a count is zero for a microbatch's target."""
    return _find_share(count, target) == 0

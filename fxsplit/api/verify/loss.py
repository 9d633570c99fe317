"""Choose the loss with which verify() trains its copies: the pipeline's, the model's own, or the sum of squares."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxsplit.api.verify.ranks import Ranks
from fxsplit.errors import InputError
from fxsplit.ir.facts.capture.call import Call, Inputs
from fxsplit.ir.facts.capture.chunks import Chunks
from fxsplit.runtime.loss.loss import LossFn, find_own_loss, name_loss, sum_squares
from fxsplit.runtime.microbatches import Targets, find_target_cuts
from fxsplit.runtime.program import Program
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.autograd.leaves import hide_gradients
from fxsplit.torch_internals.fx.interpret import preserve
from fxsplit.torch_internals.nn.containers import to_plain_outputs
from fxsplit.torch_internals.nn.copies import copy_module
from fxsplit.torch_internals.random.generators import read_generators, read_python_generators

RUNS = 3
"""How many more runs must repeat a model's outputs before verify() believes that it draws no random numbers."""
SQUARES = "the sum of squares of the outputs"
OWN = "the model's own loss"


class RefusedDtype(Exception):
    """The model or its loss fails if all weights and inputs are in one dtype, such as float64."""


@dataclass(frozen=True)
class TrainingRequest:
    """What the caller of verify() wants to train with: the pipeline's `loss_fn` and the target of the batch.

    Both may be None.
    """

    loss_fn: LossFn | None = None
    target: Any = None

    def check(self, ranks: Ranks) -> None:
        """Raise InputError for a target if there is no loss function, or if only some ranks have a target."""
        if self.target is not None and self.loss_fn is None:
            raise InputError(
                "verify() was given a target, and the pipeline has no loss_fn to take it: compile with loss_fn=, for "
                "example fxsplit.compile(model, 2, loss_fn=torch.nn.functional.cross_entropy), or leave target= out"
            )
        if ranks.any(self.target is not None) and ranks.any(self.target is None):
            raise InputError("verify() was given a target on some ranks and none on others: give target= on all")

    def check_rows(self, model: nn.Module, call: Call, chunks: Chunks | None) -> None:
        """Raise InputError unless the target has one row for each row of the batch."""
        if self.target is not None:
            inputs, tensors = Inputs.of(model, *call, chunks)
            find_target_cuts(pytree.tree_leaves(self.target), inputs.count_rows(tensors), inputs)

    def convert(self, convert: Callable[[Tensor], Tensor]) -> TrainingRequest:
        """Return the request after `convert`: a floating-point target needs the dtype of the outputs."""
        if self.target is None or self.loss_fn is None:
            return self
        target = pytree.tree_map_only(Tensor, lambda t: convert(t.detach()), self.target)
        return TrainingRequest(_convert_function(self.loss_fn, convert), target)


@contextmanager
def refuse_gradients(model: nn.Module, asked: TrainingRequest) -> Iterator[None]:
    """Run the block. Raise InputError if weights of `model` itself got gradients: only copies may.

    Restore old gradients.
    """
    with hide_gradients(model.parameters()):
        yield
        reached = [name for name, weight in model.named_parameters() if weight.grad is not None]
        if reached:
            raise InputError(
                f"loss_fn {name_loss(asked.loss_fn)} reads weights of the model, such as {reached[0]!r}, and verify() "
                "trains copies, which have their own weights: leave target= out, or take such a term out of loss_fn"
            )


def _convert_function(function: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    """Return a loss function with converted tensors. They may be in its module or partial, such as weights of classes.

    Tensors that any other kind of function refers to stay as they are.
    """
    if isinstance(function, nn.Module):
        return copy_module(function)._apply(convert)
    if isinstance(function, types.MethodType) and isinstance(function.__self__, nn.Module):
        return types.MethodType(function.__func__, _convert_function(function.__self__, convert))
    if isinstance(function, functools.partial):
        args, kwargs = pytree.tree_map_only(Tensor, convert, (function.args, function.keywords))
        return functools.partial(_convert_function(function.func, convert), *args, **kwargs)
    return function


@dataclass(frozen=True, eq=False)
class Objective:
    """The loss of a step.

    loss_fn: the loss of the outputs, and of the target if there is one; None for the loss that the model itself
        returns.
    text: the loss in words.
    outputs: the outputs of the unsplit model for the whole batch.
    """

    loss_fn: LossFn | None
    text: str
    outputs: Any
    target: Any = None

    @property
    def takes_target(self) -> bool:
        """Whether the loss is the pipeline's `loss_fn`, of outputs and a target."""
        return self.target is not None

    def compute(self, program: Program, outputs: Any, target: Any) -> Tensor:
        """Return the loss of a target and of outputs, which are in the containers that the unsplit model returns."""
        assert self.loss_fn is not None, "the model does not compute it"
        leaves = list_tensors(outputs)
        return self.loss_fn(program.build_result(leaves), self.place(target, leaves))

    def clone_target(self) -> Any:
        """Return a copy of the target, for a loss that may write to it."""
        return pytree.tree_map_only(Tensor, torch.clone, self.target)

    @staticmethod
    def place(target: Any, leaves: list[Tensor]) -> Any:
        """Return the target on the device of the outputs."""
        return Targets([target]).place(0, leaves[0].device) if leaves else target


def list_tensors(outputs: Any) -> list[Tensor]:
    """Return all tensors among the outputs of a model."""
    return [leaf for leaf in pytree.tree_leaves(to_plain_outputs(outputs)) if isinstance(leaf, Tensor)]


def choose_objective(model: nn.Module, call: Call, asked: TrainingRequest, ranks: Ranks, *, finite: bool) -> Objective:
    """Return the loss to train with. Runs the model on the whole batch to find it, and leaves the model as it was.

    finite: whether to refuse the dtype if outputs are NaN or infinite.
    Raises RefusedDtype. Raises InputError for a model without a floating-point output, and if the model or its loss
    draws random numbers from a default generator of torch, Python or numpy. `refuse_draws` also finds other draws.
    """
    refused: RefusedDtype | None = None
    first, draws = None, False
    try:
        first, draws = _run_without_trace(model, call, finite=finite)
        if asked.target is not None:
            _compute_loss(model, asked, first)
    except RefusedDtype as error:
        refused = error
    # Ranks have different batches, and must all use one dtype.
    if ranks.any(refused is not None):
        raise refused or RefusedDtype
    if ranks.any(draws):
        refuse_draws(model, call, first, ranks)
    if not any(t.is_floating_point() for t in list_tensors(first)):
        raise InputError(f"{type(model).__name__} returns no floating-point tensor, so it has no gradients to compare")
    if asked.target is not None:
        loss = _compute_loss(model, asked, first)
        if not all(are_equal(loss, _compute_loss(model, asked, first)) for _ in range(RUNS)):
            raise InputError(
                f"loss_fn {name_loss(asked.loss_fn)} draws random numbers, so no two losses of one batch are equal: "
                "verify with one that draws none, or leave target= out"
            )
        return Objective(asked.loss_fn, f"loss_fn {name_loss(asked.loss_fn)}", first, asked.target)
    own = find_own_loss(first) is not None
    missed = "" if asked.loss_fn is None else f", as no target was given for loss_fn {name_loss(asked.loss_fn)}"
    return Objective(None if own else sum_squares, (OWN if own else SQUARES) + missed, first)


def refuse_draws(model: nn.Module, call: Call, outputs: Any, ranks: Ranks) -> None:
    """Raise InputError if further runs of a model return other outputs than `outputs`. All ranks call this."""
    if ranks.any(not all(are_equal(outputs, _run_without_trace(model, call)[0]) for _ in range(RUNS))):
        raise InputError(
            f"{type(model).__name__} draws random numbers besides dropout, so no two runs of it are equal: verify it "
            "with such rates at 0, or in evaluation, pipe.eval()"
        )


def _run_without_trace(model: nn.Module, call: Call, *, finite: bool = False) -> tuple[Any, bool]:
    """Return the model's outputs, and whether it has drawn from a generator. Leaves the model as it was.

    Raises RefusedDtype if the model fails, so that the caller tries another dtype. If `finite`, NaN or infinity in the
    outputs counts as a failure.
    """
    try:
        with torch.no_grad(), preserve(model):
            # A new seed each time, or random draws would be equal in all runs. preserve() restores the generator.
            torch.manual_seed(torch.seed())
            own, named = pytree.tree_map_only(Tensor, torch.clone, call)
            before = read_generators(), read_python_generators()
            outputs = model(*own, **named)
            draws = before != (read_generators(), read_python_generators())
    except Exception as error:
        raise RefusedDtype from error
    numbers = all(bool(t.isfinite().all()) for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor))
    # Constants made for float32, such as a mask of its smallest number, may give NaN in float64.
    if finite and not numbers:
        raise RefusedDtype
    return outputs, draws


def _compute_loss(model: nn.Module, asked: TrainingRequest, outputs: Any) -> Any:
    """Return the loss of the whole batch, and leave the model as it was. Raises RefusedDtype if the loss fails."""
    assert asked.loss_fn is not None, "a target was given"
    try:
        with torch.no_grad(), preserve(model):
            torch.manual_seed(torch.seed())
            outputs, target = pytree.tree_map_only(Tensor, torch.clone, (outputs, asked.target))
            return asked.loss_fn(outputs, Objective.place(target, list_tensors(outputs)))
    except Exception as error:
        error.add_note(f"raised by loss_fn {name_loss(asked.loss_fn)}, for the outputs and the target of the batch")
        raise RefusedDtype from error


def are_equal(a: Any, b: Any) -> bool:
    """Return whether all tensors in two outputs are equal. NaN equals NaN."""
    pairs = zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
    return all(torch.equal(torch.nan_to_num(x), torch.nan_to_num(y)) for x, y in pairs if isinstance(x, Tensor))

"""Row gradients: check that the gradients for a batch are the sums of the gradients for its pieces.

This may fail although the outputs are right: a user's own backward may compare rows that the forward keeps apart, for
example by dividing by a norm.

The function to differentiate depends on the kinds of the outputs, which are known only after the batch and all pieces
have run. So the kinds are guessed first, and one run gives both outputs and gradients: an output with dimensions has
rows in the first, and a number is a mean, by the count that the graph divides by if it does. If the guess was wrong,
the gradients are computed once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxsplit.frontend.check.gradients import find_parameters, split_parameters, square_rows
from fxsplit.frontend.meanings.rows import cut_pieces
from fxsplit.frontend.meanings.trial import TrialRun, join_runs, list_outputs, name_outputs, take_batch, try_out
from fxsplit.frontend.subject import Runnable
from fxsplit.ir.facts.capture.agreement import is_close
from fxsplit.ir.facts.capture.counts import Count
from fxsplit.ir.facts.capture.output_kinds import MEAN, ROWS, OutputKind
from fxsplit.torch_internals.error_texts import is_out_of_memory
from fxsplit.torch_internals.nn.containers import to_plain_outputs

Meanings = Mapping[str, OutputKind]
"""The kinds of outputs, by their names."""


@dataclass(frozen=True)
class EarlyGradients:
    """Gradients of weights, computed with guessed kinds of the outputs.

    - `guess`: the guessed kinds
    - `whole`: the gradients for a batch, by the weights' names
    - `joined`: the sums of the gradients for its pieces, in the same order
    """

    guess: Meanings
    whole: dict[str, Tensor]
    joined: list[Tensor]

    def is_right(self, meanings: Meanings) -> bool:
        """Return whether the guessed kinds are the true ones."""
        return all(_describe(meanings[name]) == _describe(guess) for name, guess in self.guess.items())

    def find_unjoined(self) -> str | None:
        """Return the name of a weight whose gradient for the batch is not the sum over the pieces, or None."""
        return _find_other(self.whole, self.joined)


def _describe(meaning: OutputKind) -> tuple[object, ...]:
    """Return all that the function to differentiate depends on."""
    count = meaning.count if isinstance(meaning.count, Count) else None
    return meaning.kind, meaning.dim, count and (count.compute, count.by_rows)


class _EarlyRun(NamedTuple):
    """A run on some rows: the outputs, the guessed kinds of those with gradients, and the gradients of the weights.

    usual: whether any other run of the model on these rows gives the same, since nothing draws or normalises a batch.
    """

    outputs: dict[str, Any]
    guess: Meanings
    gradients: list[Tensor]
    usual: bool


def run_early(
    here: Runnable, rows: tuple[int, ...], find_count: Callable[[int], Count | None]
) -> tuple[TrialRun, EarlyGradients | None]:
    """Run the model on a batch and its pieces, of sizes `rows`. Returns the outputs and gradients of these runs.

    find_count: returns the count that a number is probably divided by, from its place among the outputs.
    The gradients are None if no weight is trained, or if the guesses differ between runs. Raises the model's own
    errors.
    """
    batch, trained = take_batch(here, sum(rows)), _list_trained(here)
    pieces = cut_pieces(here.inputs, batch, rows)
    # Copied before other runs, since a user's own backward may reuse the memory of its gradients.
    first = _take_first_run(here, pieces[0], trained)
    whole = _run_once(here, batch, trained, find_count)
    if first is not None and _is_like(first, whole, rows[0]):
        first = first._replace(guess=whole.guess)
    else:
        first = _run_once(here, pieces[0], trained, find_count)
    outputs, joined, alike = [first.outputs], first.gradients, first.guess == whole.guess
    for tensors in pieces[1:]:
        made = _run_once(here, tensors, trained, find_count)
        outputs.append(made.outputs)
        alike = alike and made.guess == whole.guess
        if alike:
            joined = _add(joined, made.gradients)
    run = join_runs(here, whole.outputs, outputs, rows)
    if not whole.gradients or not alike:
        return run, None
    return run, EarlyGradients(whole.guess, dict(zip(trained, whole.gradients, strict=True)), joined)


def _run_once(
    here: Runnable, tensors: Sequence[Tensor], trained: Mapping[str, Tensor], find_count: Callable[[int], Count | None]
) -> _EarlyRun:
    """Run the model on some rows. Returns no gradients if some output fits no guess, or if no weight is trained."""
    count = here.inputs.count_rows(tensors)
    gradients: list[Tensor] = []
    with torch.enable_grad(), try_out(here) as met:
        made = list_outputs(here, tensors)
        guess = _guess(made, count, find_count)
        if guess and trained:
            gradients = _differentiate(made, guess, tensors, count, list(trained.values()))
    return _EarlyRun(_detach(made), guess, gradients, not met())


def _take_first_run(here: Runnable, tensors: Sequence[Tensor], trained: Mapping[str, Tensor]) -> _EarlyRun | None:
    """Return the model's first run, with copies of its gradients, if it was on these rows. It has no guess yet."""
    ran = here.first.find(tensors)
    # Its memory is needed, whether it was on these rows or not.
    here.first.forget()
    if ran is None or ran.gradients is None:
        return None
    # The gradients of inputs follow those of parameters.
    known = dict(zip(find_parameters(here), ran.gradients, strict=False))
    if not trained.keys() <= known.keys():
        return None
    gradients = [_copy_gradient(w, known[name]) for name, w in trained.items()]
    return _EarlyRun(_detach(name_outputs(to_plain_outputs(ran.outputs))), {}, gradients, usual=True)


def _detach(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same outputs without the memory of autograd, which the next run needs."""
    return {name: v.detach() if isinstance(v, Tensor) else v for name, v in outputs.items()}


def _is_like(first: _EarlyRun, whole: _EarlyRun, rows: int) -> bool:
    """Return whether the first run of the model, on `rows` rows, can be that of a piece of the run `whole`.

    Its gradients are of `square_rows` of all outputs, as those of a piece are if each of these outputs has `rows` rows.
    """
    if not whole.usual or list(first.outputs) != list(whole.outputs):
        return False
    return all(guess == ROWS and first.outputs[name].shape[:1] == (rows,) for name, guess in whole.guess.items())


def find_unjoined_gradient(here: Runnable, rows: tuple[int, ...], meanings: Meanings) -> str | None:
    """Return the name of a parameter whose gradient for a batch is not the sum over pieces of sizes `rows`, or None.

    meanings: the kinds of the outputs. Returns None too if no output that can be joined has a gradient.
    Two sets of gradients are in memory at once. If they do not fit, parts of them are compared one after the other;
    raises torch's error if a part does not fit either.
    """
    trained = _list_trained(here)
    if not trained:
        return None
    try:
        return _find_unjoined(here, rows, meanings, trained)
    except Exception as error:
        if not is_out_of_memory(error):  # for example an operator without a backward: nothing is known then
            return None
    parts = (_find_unjoined(here, rows, meanings, part) for part in split_parameters(trained))
    return next((name for name in parts if name is not None), None)


def _find_unjoined(
    here: Runnable, rows: tuple[int, ...], meanings: Meanings, trained: Mapping[str, Tensor]
) -> str | None:
    """Return the first weight in `trained` whose gradient for a batch is not the sum over its pieces, or None."""
    batch, weights = take_batch(here, sum(rows)), list(trained.values())
    whole = _compute_gradients(here, batch, meanings, weights)
    first, *others = cut_pieces(here.inputs, batch, rows)
    joined = _compute_gradients(here, first, meanings, weights)
    for tensors in others:
        joined = _add(joined, _compute_gradients(here, tensors, meanings, weights))
    return _find_other(dict(zip(trained, whole, strict=True)), joined)


def _find_other(whole: Mapping[str, Tensor], joined: Sequence[Tensor]) -> str | None:
    """Return the name of the first gradient that differs from its counterpart in `joined`, or None."""
    largest = max((float(g.abs().nan_to_num(0.0, 0.0, 0.0).max()) for g in whole.values() if g.numel()), default=0.0)
    for (name, gradient), found in zip(whole.items(), joined, strict=True):
        # Gradients are sums over rows, and their rounding grows with the largest of them.
        if not is_close(gradient, found, largest, loose=gradient.dtype is not torch.float64):
            return name
    return None


def _list_trained(here: Runnable) -> dict[str, Tensor]:
    """Return the weights whose gradients are compared; none for a model that behaves differently with gradients."""
    if here.asks_for_gradients and not torch.is_grad_enabled():
        return {}
    return {name: p for name, p in here.model.named_parameters() if p.requires_grad}


def _add(gradients: Sequence[Tensor], more: Sequence[Tensor]) -> list[Tensor]:
    """Return the sums of gradients of the same weights. They take the memory of the first gradients."""
    return [a.add_(b) for a, b in zip(gradients, more, strict=True)]


def _guess(outputs: Mapping[str, Any], rows: int, find_count: Callable[[int], Count | None]) -> Meanings:
    """Return the guessed kinds of the outputs that have gradients; empty if some output fits no guess.

    rows: the number of rows for which the outputs were computed.
    """
    guesses: dict[str, OutputKind] = {}
    for place, (name, value) in enumerate(outputs.items()):
        if _has_gradient(value):
            if value.ndim and value.shape[0] % rows:
                return {}
            guesses[name] = ROWS if value.ndim else replace(MEAN, count=find_count(place))
    return guesses


def _has_gradient(value: Any) -> bool:
    """Return whether an output gets a gradient."""
    return isinstance(value, Tensor) and value.requires_grad and value.is_floating_point()


def _compute_gradients(
    here: Runnable, tensors: Sequence[Tensor], meanings: Meanings, weights: Sequence[Tensor]
) -> list[Tensor]:
    """Return the gradients of `weights` for a number that adds up over the rows of `tensors`."""
    with torch.enable_grad(), try_out(here):
        rows = here.inputs.count_rows(tensors)
        return _differentiate(list_outputs(here, tensors), meanings, tensors, rows, weights)


def _differentiate(
    outputs: Mapping[str, Any], meanings: Meanings, tensors: Sequence[Tensor], rows: int, weights: Sequence[Tensor]
) -> list[Tensor]:
    """Return the gradients of `weights` for a number that adds up over the rows of `outputs`.

    The model has computed the outputs from `rows` rows of `tensors`.
    """
    terms = [_sum_rows(outputs[name], meaning, rows, tensors) for name, meaning in meanings.items()]
    ends = [term for term in terms if term is not None]
    if not ends:
        return [torch.zeros_like(w) for w in weights]
    found = torch.autograd.grad(torch.stack(ends).sum(), list(weights), allow_unused=True)
    return [_copy_gradient(w, g) for w, g in zip(weights, found, strict=True)]


def _copy_gradient(weight: Tensor, gradient: Tensor | None) -> Tensor:
    """Return a dense copy of a weight's gradient; zeros if it has none."""
    if gradient is None:
        return torch.zeros_like(weight)
    # A clone, since a user's own backward may reuse its memory in the next run.
    return gradient.to_dense() if gradient.is_sparse else gradient.clone()


def _sum_rows(output: Tensor, meaning: OutputKind, rows: int, tensors: Sequence[Tensor]) -> Tensor | None:
    """Return a number that adds up over the rows of an output.

    Returns None if the output has no gradient, or if no such number can be computed from it.
    """
    if not _has_gradient(output):
        return None
    if isinstance(meaning.count, Count):
        # Multiplied by its divisor. If nothing counts, the output is 0 / 0.
        divisor = meaning.count.find_divisor(tensors, rows)
        return output.sum() * divisor if divisor else None
    if meaning.kind in ("mean", "sum"):
        return output.sum() * (rows if meaning.kind == "mean" else 1)
    if meaning.kind != "rows":
        return None
    return square_rows(output.movedim(meaning.dim, 0).reshape(rows, -1))

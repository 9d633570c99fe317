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
from typing import Any

import torch
from torch import Tensor

from fxsplit.frontend.check.gradients import split_parameters
from fxsplit.frontend.meanings.rows import cut_pieces
from fxsplit.frontend.meanings.trial import TrialRun, join_runs, list_outputs, take_batch, try_out
from fxsplit.frontend.subject import Runnable
from fxsplit.ir.facts.capture.agreement import is_close
from fxsplit.ir.facts.capture.counts import Count
from fxsplit.ir.facts.capture.output_kinds import MEAN, ROWS, OutputKind
from fxsplit.torch_internals.error_texts import is_out_of_memory

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


def run_early(
    here: Runnable, rows: tuple[int, ...], find_count: Callable[[int], Count | None]
) -> tuple[TrialRun, EarlyGradients | None]:
    """Run the model on a batch and its pieces, of sizes `rows`. Returns the outputs and gradients of these runs.

    find_count: returns the count that a number is probably divided by, from its place among the outputs.
    The gradients are None if no weight is trained, or if the guesses differ between runs. Raises the model's own
    errors.
    """
    batch, trained = take_batch(here, sum(rows)), _list_trained(here)
    outputs: list[dict[str, Any]] = []
    guesses: list[Meanings] = []
    gradients: list[list[Tensor]] = []
    for tensors in (batch, *cut_pieces(here.inputs, batch, rows)):
        count = here.inputs.count_rows(tensors)
        with torch.enable_grad(), try_out(here):
            made = list_outputs(here, tensors)
            guesses.append(_guess(made, count, find_count))
            if guesses[-1] and trained:
                gradients.append(_differentiate(made, guesses[-1], tensors, count, list(trained.values())))
        outputs.append({name: v.detach() if isinstance(v, Tensor) else v for name, v in made.items()})
        del made  # frees the memory of autograd for the next run
        if len(gradients) > 2:
            gradients[1:] = [_add(gradients[1], gradients[2])]
    run = join_runs(here, outputs[0], outputs[1:], rows)
    if len(gradients) != 2 or any(guess != guesses[0] for guess in guesses):
        return run, None
    return run, EarlyGradients(guesses[0], dict(zip(trained, gradients[0], strict=True)), gradients[1])


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
    made = (torch.zeros_like(w) if g is None else g for w, g in zip(weights, found, strict=True))
    # Clones, since a user's own backward may reuse its memory in the next run.
    return [g.to_dense() if g.is_sparse else g.clone() for g in made]


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
    # Weights, since the squares of a normalised row add up to the same number for any row.
    places = output.movedim(meaning.dim, 0).reshape(rows, -1)
    weights = torch.linspace(0.5, 1.5, places.shape[1], dtype=output.dtype, device=output.device)
    return (places.square() * weights).sum()

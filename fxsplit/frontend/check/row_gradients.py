"""Row gradients: whether gradients of a batch are the sums of those of its pieces, as its outputs are their outputs.

A backward of the user's own may compare rows that the forward keeps apart, for example by dividing by a norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fxsplit.frontend.check.rows import cut_pieces
from fxsplit.frontend.check.trial import list_outputs, take_batch, try_out
from fxsplit.frontend.subject import Runnable
from fxsplit.ir.facts.agreement import is_close
from fxsplit.ir.facts.counts import Count
from fxsplit.ir.facts.meanings import Meaning


def find_unjoined_gradient(here: Runnable, rows: tuple[int, ...], meanings: Mapping[str, Meaning]) -> str | None:
    """Return a parameter whose gradient is not the sum of those of pieces of so many `rows`; None where all are.

    `meanings` are those of the outputs. None too where no output that microbatches make has a gradient.
    """
    trained = {name: p for name, p in here.model.named_parameters() if p.requires_grad}
    if not trained or (here.asks_for_gradients and not torch.is_grad_enabled()):
        return None
    batch = take_batch(here, sum(rows))
    try:
        whole, *pieces = (
            _compute_gradients(here, tensors, meanings, list(trained.values()))
            for tensors in (batch, *cut_pieces(here.inputs, batch, rows))
        )
    except Exception:  # for example an operator without a backward, or too little memory: nothing is known then
        return None
    largest = max((float(g.abs().nan_to_num(0.0, 0.0, 0.0).max()) for g in whole if g.numel()), default=0.0)
    for name, gradient, parts in zip(trained, whole, zip(*pieces, strict=True), strict=True):
        # Gradients are sums over rows, whose rounding grows with the largest of them.
        if not is_close(gradient, torch.stack(parts).sum(0), largest, loose=gradient.dtype is not torch.float64):
            return name
    return None


def _compute_gradients(
    here: Runnable, tensors: Sequence[Tensor], meanings: Mapping[str, Meaning], weights: Sequence[Tensor]
) -> list[Tensor]:
    """Return the gradients of `weights` for one number that is a sum over the rows of `tensors`."""
    rows = here.inputs.count_rows(tensors)
    with torch.enable_grad(), try_out(here):
        outputs = list_outputs(here, tensors)
        terms = [_sum_rows(outputs[name], meaning, rows, tensors) for name, meaning in meanings.items()]
        ends = [term for term in terms if term is not None]
        if not ends:
            return [torch.zeros_like(w) for w in weights]
        found = torch.autograd.grad(torch.stack(ends).sum(), list(weights), allow_unused=True)
    made = (torch.zeros_like(w) if g is None else g for w, g in zip(weights, found, strict=True))
    # Clones: a backward of the user's own may use its memory again in the next run.
    return [g.to_dense() if g.is_sparse else g.clone() for g in made]


def _sum_rows(output: Tensor, meaning: Meaning, rows: int, tensors: Sequence[Tensor]) -> Tensor | None:
    """Return a sum over the rows of an output; None for one that has no gradient, or is no sum over rows."""
    if not output.requires_grad or not output.is_floating_point():
        return None
    if isinstance(meaning.count, Count):
        # Multiplied by what it was divided by. Without anything to count it is zero divided by zero.
        divisor = meaning.count.find_divisor(tensors, rows)
        return output.sum() * divisor if divisor else None
    if meaning.kind in ("mean", "sum"):
        return output.sum() * (rows if meaning.kind == "mean" else 1)
    if meaning.kind != "rows":
        return None
    # Weights, as the squares of a row that was normalised add up to the same number whatever it holds.
    places = output.movedim(meaning.dim, 0).reshape(rows, -1)
    weights = torch.linspace(0.5, 1.5, places.shape[1], dtype=output.dtype, device=output.device)
    return (places.square() * weights).sum()

"""Trial: run the model itself, without its graph, on a batch and on pieces of the batch.

Random draws are replaced by their averages, and batch norms normalise each row by itself. Any remaining difference
between a batch and its pieces is due to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fxsplit.errors import InputError
from fxsplit.frontend.meanings.rows import add_rows, cut_pieces, tell_rows_apart
from fxsplit.frontend.restore.no_trace_left import refuse_assignments, restore_model
from fxsplit.frontend.subject import Runnable
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.fake.values import has_values
from fxsplit.torch_internals.fx.interpret import preserve
from fxsplit.torch_internals.nn.containers import to_plain_outputs
from fxsplit.torch_internals.nn.copies import copy_module
from fxsplit.torch_internals.nn.expectations import Averages, RowwiseNorm, expect_averages, normalise_rows_alone
from fxsplit.torch_internals.thread_modes import disable_compilers

JITTER = 0.1
"""The change of weights, as a share of their size. Outputs that are equal only by chance differ after the change."""


MOST_PIECES = 8
"""The most pieces that a batch is cut into."""


class TrialRun(NamedTuple):
    """The outputs of the model for a batch and for its pieces, by name, and the number of rows of each piece."""

    whole: dict[str, Any]
    pieces: list[dict[str, Any]]
    rows: tuple[int, ...]

    def take(self, name: str) -> tuple[Any, list[Any]]:
        """Return an output of the batch, and the same output of every piece."""
        return self.whole[name], [piece[name] for piece in self.pieces]


def run_model(here: Runnable, tensors: Sequence[Tensor], *, from_shapes: bool = False) -> dict[str, Any]:
    """Return the outputs of the model, by name, for `tensors` in place of the call's tensors.

    The model does not change.
    The names are for messages, for example "output 1 ('loss')".
    """
    rows = here.inputs.count_rows(tensors)
    if from_shapes and rows in here.outputs:
        return name_outputs(here.outputs[rows])
    with torch.no_grad(), try_out(here, from_shapes=from_shapes):
        return list_outputs(here, tensors)


@contextmanager
def try_out(here: Runnable, *, from_shapes: bool = False) -> Iterator[Callable[[], bool]]:
    """Let the model run inside the block so that no random draw and no batch norm makes rows depend on each other.

    Yields a function that returns whether the model has met any of these, so that its usual run differs.
    """
    modes: list[Averages | RowwiseNorm] = []
    with ExitStack() as around, preserve(here.modules), refuse_assignments(here.modules):
        if not from_shapes:  # fake tensors draw nothing, and have no values to average
            around.enter_context(restore_model(here.modules))
            # torch.cond compiles itself, and its cache of a call in the modes below would fail outside of them.
            around.enter_context(disable_compilers())
            modes += (around.enter_context(expect_averages()), around.enter_context(normalise_rows_alone()))
        yield lambda: any(mode.met for mode in modes)


def list_outputs(here: Runnable, tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Return the flat outputs of one call of the model, by name."""
    return name_outputs(to_plain_outputs(here.run_model(*(t.detach().clone() for t in tensors))))


def name_outputs(returned: Any) -> dict[str, Any]:
    """Return the outputs in the result of a call, taken out of their containers, by name."""
    leaves, _ = pytree.tree_flatten_with_path(returned)
    return {f"output {i}{_name_key(path)}": value for i, (path, value) in enumerate(leaves)}


def _name_key(path: Sequence[Any]) -> str:
    """Return the key of a value in a dict, for a message; empty for a value outside of dicts."""
    keys = [entry.key for entry in path if isinstance(getattr(entry, "key", None), str)]
    return f" ({'.'.join(keys)!r})" if keys else ""


def run_pieces(
    here: Runnable, tensors: Sequence[Tensor], rows: tuple[int, ...], *, from_shapes: bool = False
) -> TrialRun:
    """Return the outputs of the model for a batch of `tensors`, and for its pieces of sizes `rows`.

    Raises InputError if the numbers of outputs differ.
    """
    pieces = cut_pieces(here.inputs, tensors, rows)
    whole = run_model(here, tensors, from_shapes=from_shapes)
    return join_runs(here, whole, [run_model(here, piece, from_shapes=from_shapes) for piece in pieces], rows)


def join_runs(here: Runnable, whole: dict[str, Any], pieces: list[dict[str, Any]], rows: tuple[int, ...]) -> TrialRun:
    """Return the outputs of a batch and of its pieces; raises InputError if the numbers of outputs differ."""
    if any(list(piece) != list(whole) for piece in pieces):
        raise InputError(f"{here.name} returns more values for some numbers of rows than for others")
    return TrialRun(whole, pieces, rows)


def choose_pieces(batch: int, rows: int) -> tuple[int, ...]:
    """Return sizes of pieces that are similar to the sizes of microbatches, but not all the same.

    Pieces of one size would not show whether their mean is weighted by rows. The sum may exceed the batch by one row.
    """
    if batch == rows:
        return rows, rows // 2 or 2
    even = divide_evenly(batch, rows)
    # Many small runs take long and show no more.
    even = (*even[: MOST_PIECES - 1], sum(even[MOST_PIECES - 1 :])) if len(even) > MOST_PIECES else even
    if len(set(even)) > 1:
        return even
    if even[-1] > 1:
        return even[0] + 1, *even[1:-1], even[-1] - 1
    return (2, *even[2:]) if len(even) > 2 else (2, 1)


def divide_evenly(batch: int, rows: int) -> tuple[int, ...]:
    """Return the sizes of the microbatches that the batch is cut into, if the largest has `rows` rows."""
    count = -(-batch // rows)
    return tuple(batch // count + (m < batch % count) for m in range(count))


def take_batch(here: Runnable, rows: int, *, from_shapes: bool = False) -> list[Tensor]:
    """Return `rows` rows of the example. If it has fewer rows, rows that are mixed from them are added.

    Identical rows are made different.
    """
    batch = here.inputs.count_rows(here.tensors)
    taken = here.inputs.take_rows(here.tensors, min(rows, batch))
    taken = add_rows(here.inputs, taken, rows - batch) if rows > batch else taken
    return taken if from_shapes else tell_rows_apart(here.inputs, taken)


def copy_in_double(here: Runnable, *, jitter: bool) -> Runnable | None:
    """Return a copy of a model and its rows in double precision; None for a model that cannot be copied.

    jitter: change all weights a little, so that layers whose weights start at zero compute something.
    """
    try:
        model = copy_module(here.model).double()
    except Exception:  # a model's own __deepcopy__ may raise anything
        return None
    if jitter:
        generator = torch.Generator().manual_seed(0)
        # Made-up weights are changed already, and ignore writes.
        for weight in (w for w in model.parameters() if w.is_floating_point() and has_values(w)):
            noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype).to(weight.device)
            weight.data.add_(noise * JITTER * (weight.data.abs().mean() + JITTER))
    tensors = [t.double() if t.is_floating_point() else t for t in here.tensors]
    return replace(here, modules=nn.ModuleList([model]), tensors=tensors)

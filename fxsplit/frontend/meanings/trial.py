"""Trial: run the model on a batch and on pieces of it, alone and without its graph.

Random draws are replaced by their averages, and batch norms normalise each row by itself: what then differs between a
batch and its pieces is what the model itself makes of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from fxsplit.torch_internals.fake.fake_weights import has_values
from fxsplit.torch_internals.fx.interpret import preserve
from fxsplit.torch_internals.nn.containers import to_plain_outputs
from fxsplit.torch_internals.nn.copies import copy_module
from fxsplit.torch_internals.nn.expectations import expect_averages, normalise_rows_alone
from fxsplit.torch_internals.thread_modes import disable_compilers

JITTER = 0.1
"""How far weights are moved, as a share of their size, to tell what is always equal from what happens to be."""


MOST_PIECES = 8
"""Pieces that a batch is cut into at most."""


class TrialRun(NamedTuple):
    """The flat outputs of a batch under their names, and those of its pieces, which have so many rows each."""

    whole: dict[str, Any]
    pieces: list[dict[str, Any]]
    rows: tuple[int, ...]

    def take(self, name: str) -> tuple[Any, list[Any]]:
        """Return an output of the batch, and that of every piece."""
        return self.whole[name], [piece[name] for piece in self.pieces]


def run_model(here: Runnable, tensors: Sequence[Tensor], *, from_shapes: bool = False) -> dict[str, Any]:
    """Return the flat outputs of the model for tensors in the places of the call's; leaves no trace on it.

    Their names are for messages, for example "output 1 ('loss')".
    """
    rows = here.inputs.count_rows(tensors)
    if from_shapes and rows in here.outputs:
        return name_outputs(here.outputs[rows])
    with torch.no_grad(), try_out(here, from_shapes=from_shapes):
        return list_outputs(here, tensors)


@contextmanager
def try_out(here: Runnable, *, from_shapes: bool = False) -> Iterator[None]:
    """Let the model run inside the block so that no draw and no batch norm makes rows depend on each other."""
    with ExitStack() as around, preserve(here.modules), refuse_assignments(here.modules):
        if not from_shapes:  # stand-ins draw nothing, and have no values to average
            around.enter_context(restore_model(here.modules))
            # torch.cond compiles itself, and what it keeps of a call in the modes below fails outside of them.
            around.enter_context(disable_compilers())
            around.enter_context(expect_averages())
            around.enter_context(normalise_rows_alone())
        yield


def list_outputs(here: Runnable, tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Return the flat outputs of one call of the model, under their names."""
    return name_outputs(to_plain_outputs(here.run_model(*(t.detach().clone() for t in tensors))))


def name_outputs(returned: Any) -> dict[str, Any]:
    """Return the flat outputs of what a call has returned, under their names."""
    leaves, _ = pytree.tree_flatten_with_path(returned)
    return {f"output {i}{_name_key(path)}": value for i, (path, value) in enumerate(leaves)}


def _name_key(path: Sequence[Any]) -> str:
    """Return the key that a value has in a dict, for a message, or nothing for a value that is in none."""
    keys = [entry.key for entry in path if isinstance(getattr(entry, "key", None), str)]
    return f" ({'.'.join(keys)!r})" if keys else ""


def run_pieces(
    here: Runnable, tensors: Sequence[Tensor], rows: tuple[int, ...], *, from_shapes: bool = False
) -> TrialRun:
    """Return what the model makes of a batch of `tensors`, and of its pieces of so many `rows`.

    Raises InputError where one returns more values than another.
    """
    pieces = cut_pieces(here.inputs, tensors, rows)
    whole = run_model(here, tensors, from_shapes=from_shapes)
    return join_runs(here, whole, [run_model(here, piece, from_shapes=from_shapes) for piece in pieces], rows)


def join_runs(here: Runnable, whole: dict[str, Any], pieces: list[dict[str, Any]], rows: tuple[int, ...]) -> TrialRun:
    """Return the outputs of a batch and of its pieces; raises InputError where one has more values than another."""
    if any(list(piece) != list(whole) for piece in pieces):
        raise InputError(f"{here.name} returns more values for some numbers of rows than for others")
    return TrialRun(whole, pieces, rows)


def choose_pieces(batch: int, rows: int) -> tuple[int, ...]:
    """Return sizes of pieces, much like those of the microbatches, and not all the same.

    Pieces of one size would not tell whether their mean is weighted by rows. There may be a row more than in the batch.
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
    """Return the sizes of the microbatches that the batch is cut into, if the largest has so many rows."""
    count = -(-batch // rows)
    return tuple(batch // count + (m < batch % count) for m in range(count))


def take_batch(here: Runnable, rows: int, *, from_shapes: bool = False) -> list[Tensor]:
    """Return so many rows of the example, the last of which may be made of the others; rows that are alike differ."""
    batch = here.inputs.count_rows(here.tensors)
    taken = here.inputs.take_rows(here.tensors, min(rows, batch))
    taken = add_rows(here.inputs, taken, rows - batch) if rows > batch else taken
    return taken if from_shapes else tell_rows_apart(here.inputs, taken)


def copy_in_double(here: Runnable, *, jitter: bool) -> Runnable | None:
    """Return a copy of a model and its rows in double precision; None for a model that cannot be copied.

    jitter: move all weights a little, so that layers that start at zero are told from those that compute nothing.
    """
    try:
        model = copy_module(here.model).double()
    except Exception:  # whatever a model's own __deepcopy__ raises
        return None
    if jitter:
        generator = torch.Generator().manual_seed(0)
        # Made-up weights are moved already, and keep nothing that is written to them.
        for weight in (w for w in model.parameters() if w.is_floating_point() and has_values(w)):
            noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype).to(weight.device)
            weight.data.add_(noise * JITTER * (weight.data.abs().mean() + JITTER))
    tensors = [t.double() if t.is_floating_point() else t for t in here.tensors]
    return replace(here, modules=nn.ModuleList([model]), tensors=tensors)

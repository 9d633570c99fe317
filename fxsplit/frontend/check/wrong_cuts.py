"""Wrong cuts: arguments that are as long as the batch by accident, and so are cut although they have no rows.

A weight for each of 8 classes beside 8 rows is one. Where the model is not that of its microbatches, it is run again
with such an argument whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import Tensor

from fxsplit.errors import InputError
from fxsplit.frontend.check.run import summarize
from fxsplit.frontend.check.trial import Run, divide_evenly, run_pieces
from fxsplit.frontend.no_trace_left import refuse_assignments
from fxsplit.frontend.subject import Runnable, Subject
from fxsplit.ir.facts.agreement import find_rows_dim, is_close, list_kinds
from fxsplit.torch_internals.fake_weights import keep_values
from fxsplit.torch_internals.interpret import preserve


def describe_wrong_cuts(subject: Subject, here: Runnable) -> str | None:
    """Return what to state of an argument that all microbatches need whole, so that their outputs make the batch's."""
    names = _find_uncut(subject, here)
    if not names:
        return None
    return (
        f"argument {names[0]!r} of {here.name} is as long as the batch and was cut with it, but the outputs of the "
        f"batch are those of its microbatches only if each gets all of it: state {_write_chunks(names)}"
    )


def explain_failure(subject: Subject, error: Exception) -> InputError | None:
    """Return what to do about a model that runs on the example and not on microbatches of it; None for any other."""
    if not subject.is_cut:
        return None
    with subject.make_runnable(subject.batch) as here:
        if _runs(here, subject.rows) or not _runs(here, subject.batch):
            return None
        names = _find_uncut(subject, here)
    way = (
        f"argument {names[0]!r} has no rows, although it is as long as the batch: state {_write_chunks(names)}"
        if names
        else "state which arguments have rows and which every microbatch needs whole, chunks={'name': 0} or "
        "chunks={'name': fxsplit.Replicate}, or compile for larger microbatches, such as with n_microbatches=1"
    )
    return InputError(
        f"{here.name} runs on the whole example of {subject.batch} rows, and not on microbatches of {subject.rows} "
        f"({type(error).__name__}: {summarize(error)}): {way}"
    )


def _runs(here: Runnable, rows: int) -> bool:
    """Return whether the model runs on the first rows of the example, as it is."""
    tensors = (t.detach().clone() for t in here.inputs.take_rows(here.tensors, rows))
    # It may be one that no graph can be made of, because it writes to its weights.
    with keep_values(here.model.parameters()):
        try:
            with torch.no_grad(), preserve(here.modules), refuse_assignments(here.modules):
                here.run_model(*tensors)
        except Exception:
            return False
    return True


def _find_uncut(subject: Subject, here: Runnable) -> list[str]:
    """Return the arguments to give whole to every microbatch, which then make the batch; empty where none is found."""
    specs = here.inputs.specs
    rows = divide_evenly(subject.batch, subject.rows)
    for places in _list_guesses(subject):
        with suppress(Exception):  # the model does not run in this way
            run = run_pieces(here, here.tensors, rows, whole=places, from_shapes=subject.from_shapes)
            if subject.from_shapes or _is_joined(run):
                return [specs[i].name for i in places]
    return []


def _list_guesses(subject: Subject) -> Iterator[list[int]]:
    """Return positions of cut arguments that may have no rows: each alone, the later ones first, and all but one."""
    inputs = subject.inputs
    cut = [i for i, spec in enumerate(inputs.specs) if spec.batch_dim is not None]
    if len(cut) == 1 or not subject.is_cut:
        return
    names = {i: f"{inputs.specs[i].name}_" for i in cut}
    guessed = [i for i in cut if not any(names[i].startswith(f"{stated}_") for stated in inputs.chunks)]
    for i in reversed(guessed):
        yield [i]
    if len(guessed) > 1:
        yield guessed[1:]


def _is_joined(run: Run) -> bool:
    """Return whether the outputs of the batch follow from those of its pieces, and any of them from their rows."""
    depends = False
    for name in run.whole:
        whole, pieces = run.take(name)
        if not isinstance(whole, Tensor):
            if any(piece != whole for piece in pieces):
                return False
            continue
        batched = find_rows_dim(whole.shape, [piece.shape for piece in pieces], run.rows)
        if batched is None and any(piece.shape != whole.shape for piece in pieces):
            return False
        if not (is_close(whole, torch.cat(pieces, batched[0])) if batched else list_kinds(whole, pieces, run.rows)):
            return False
        # What is the same for every piece is so because nothing of what it is made of was cut.
        depends |= not all(piece.shape == whole.shape and is_close(whole, piece) for piece in pieces)
    return depends


def _write_chunks(names: list[str]) -> str:
    """Return the option that gives arguments whole to every microbatch."""
    return f"chunks={{{', '.join(f'{name!r}: fxsplit.Replicate' for name in names)}}}, or compile with n_microbatches=1"

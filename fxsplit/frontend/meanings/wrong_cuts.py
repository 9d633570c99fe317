"""Wrong cuts: arguments that are as long as the batch by accident, or a multiple of it on purpose.

A weight for each of 8 classes is cut along with 8 rows, although it has no rows. An argument of 16 words for 8 rows is
given whole to every microbatch, although each row has two words. If the model does not equal its microbatches, it runs
again with such an argument cut in another way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fxsplit.errors import InputError
from fxsplit.frontend.check.run import summarize
from fxsplit.frontend.meanings.rows import cut_pieces
from fxsplit.frontend.meanings.trial import TrialRun, divide_evenly, run_pieces
from fxsplit.frontend.restore.no_trace_left import refuse_assignments
from fxsplit.frontend.subject import Runnable, Subject
from fxsplit.ir.facts.capture.agreement import find_rows_dim, is_close, list_kinds
from fxsplit.ir.facts.capture.call import Inputs
from fxsplit.ir.facts.capture.chunks import ChunkSpec
from fxsplit.torch_internals.fake.snapshot import keep_values
from fxsplit.torch_internals.fake.values import has_values
from fxsplit.torch_internals.fx.interpret import preserve


def describe_wrong_cuts(subject: Subject, here: Runnable) -> str | None:
    """Return advice about arguments that must be cut in another way, so that microbatches give the batch's outputs.

    Returns None if no other way of cutting helps.
    """
    cuts = _find_cuts(subject, here)
    if not cuts:
        return None
    return (
        f"{_describe_cuts(cuts, here.inputs)}: the microbatches give the outputs of the batch only then; "
        f"state {_write_chunks(cuts)}"
    )


def explain_failure(subject: Subject, error: Exception) -> InputError | None:
    """Return an error for a model that runs on the example but not on its microbatches; None for any other model."""
    if not subject.is_cut:
        return None
    with subject.make_runnable(subject.batch) as here:
        if not _runs(here, here.tensors):
            return None
        # A later microbatch may fail even if the first one runs, since offsets count from the start of the batch.
        sizes = subject.divided or divide_evenly(subject.batch, subject.rows)
        pieces = cut_pieces(here.inputs, here.tensors, sizes)
        failing = next((m for m, piece in enumerate(pieces) if not _runs(here, piece)), None)
        if failing is None:
            return None
        cuts = _find_cuts(subject, here)
        counting = None if cuts or not failing else _find_counting(here, pieces[0], pieces[failing])
        said = "" if cuts or counting else describe_counting(here)
    way = (
        f"{_describe_cuts(cuts, here.inputs)}: state {_write_chunks(cuts)}"
        if cuts
        else f"argument {counting!r} is the reason, as it does run with the values of {counting!r} for the first "
        "microbatch, so they count from the start of the batch, as offsets do: give each row values of its own, such "
        f"as lengths, state chunks={{{counting!r}: fxsplit.Replicate}} if every microbatch can take all of them, or "
        "compile with n_microbatches=1"
        if counting
        else said
        or "state which arguments have rows and which every microbatch needs whole, chunks={'name': 0} or "
        "chunks={'name': fxsplit.Replicate}, or compile for larger microbatches, such as with n_microbatches=1"
    )
    # A number of rows that the model states itself is in most errors of torch.
    if not (cuts or counting or said) and re.search(rf"\b{subject.batch}\b", str(error)):
        way += (
            f"; or, if the model states {subject.batch} rows itself, as torch.zeros({subject.batch}, 4) does, let it "
            "take them from an argument, as torch.zeros(len(x), 4) does"
        )
    which = f"microbatches of {subject.rows}" if failing == 0 else f"microbatch {failing}, which has {sizes[failing]}"
    return InputError(
        f"{here.name} runs on the whole example of {subject.batch} rows, and not on {which} "
        f"({type(error).__name__}: {summarize(error)}): {way}"
    )


def describe_counting(here: Runnable) -> str:
    """Return advice about an argument that counts entries of another argument, such as offsets or sizes of pieces.

    The text is empty if no argument looks like that.
    """
    tensors = {spec.name: t for spec, t in zip(here.inputs.specs, here.tensors, strict=True)}
    for name, t in tensors.items():
        if t.is_floating_point() or t.dtype == torch.bool or t.numel() < 2 or t.ndim != 1 or not has_values(t):
            continue
        values = t.tolist()
        # Offsets begin with 0, and end at or before the length. Positions increase by one.
        rises = values[0] == 0 and values == sorted(values) and set(np.diff(values)) != {1}
        for other, (length, *_) in ((n, o.shape) for n, o in tensors.items() if n != name and o.ndim):
            if sum(values) == length or (rises and values[-1] <= length):
                what = f"offsets that count, up to {values[-1]}, the" if rises else "sizes that add up to the"
                return (
                    f"argument {name!r} of shape {tuple(t.shape)} holds {what} {length} entries of {other!r}, and is "
                    "right for the whole batch only: give each row values of its own, such as the lengths of padded "
                    "rows, and count in forward(), or compile with n_microbatches=1"
                )
    return ""


def _runs(here: Runnable, tensors: Sequence[Tensor]) -> bool:
    """Return whether the model, as it is, runs on these tensors."""
    tensors = [t.detach().clone() for t in tensors]
    # There may be no graph of this model, because it writes to its weights.
    with keep_values(here.model.parameters()):
        try:
            with torch.no_grad(), preserve(here.modules), refuse_assignments(here.modules):
                here.run_model(*tensors)
        except Exception:
            return False
    return True


def _find_counting(here: Runnable, first: Sequence[Tensor], failing: Sequence[Tensor]) -> str | None:
    """Return the argument that makes the model fail on a microbatch, or None.

    first, failing: the tensors of the first microbatch, and of a microbatch on which the model fails. The model runs on
        the latter if it gets the first microbatch's values for this argument.
    """
    rows = here.inputs.count_rows(failing)
    for i, spec in enumerate(here.inputs.specs):
        if spec.cut.dim is not None:
            tensors = list(failing)
            tensors[i] = spec.cut.narrow(first[i], 0, rows)
            if _runs(here, tensors):
                return spec.name
    return None


def _find_cuts(subject: Subject, here: Runnable) -> dict[str, ChunkSpec]:
    """Return another way to cut arguments, for which microbatches give the batch's outputs; empty if there is none."""
    count = -(-subject.batch // subject.rows)
    for cuts in _list_guesses(subject):
        other = replace(here, inputs=here.inputs.cut_otherwise(cuts))
        with suppress(Exception):  # the model does not run in this way
            batch = other.inputs.count_rows(here.tensors)
            rows = divide_evenly(batch, -(-batch // count))
            run = run_pieces(other, here.tensors, rows, from_shapes=subject.from_shapes)
            if subject.from_shapes or _is_joined(run):
                return cuts
    return {}


def _list_guesses(subject: Subject) -> Iterator[dict[str, ChunkSpec]]:
    """Yield other ways to cut arguments, to try.

    First come cuts that leave one argument whole, beginning with the last argument, then a cut that leaves all
    arguments but the first whole. Then come multiples: if one argument is several times as long as another, each row
    may have several entries.
    """
    inputs = subject.inputs
    if not subject.is_cut:
        return
    free = [s for s in inputs.specs if not any(f"{s.name}_".startswith(f"{stated}_") for stated in inputs.chunks)]
    cut = [spec.name for spec in free if spec.cut.dim is not None]
    if sum(spec.cut.dim is not None for spec in inputs.specs) > 1:
        for name in reversed(cut):
            yield {name: ChunkSpec(None)}
        if len(cut) > 1:
            yield dict.fromkeys(cut[1:], ChunkSpec(None))
    if len(free) < len(inputs.specs):
        return  # if some of them are stated, so is the number of rows
    lengths = {spec.name: spec.shape[0] for spec in free if spec.shape}
    for rows in sorted(set(lengths.values()) - {1}, reverse=True):
        cuts = {name: ChunkSpec(0, length // rows) for name, length in lengths.items() if length % rows == 0}
        if any(each > 1 for _, each in cuts.values()):
            yield cuts


def _is_joined(run: TrialRun) -> bool:
    """Return whether the batch's outputs follow from those of its pieces, and at least one depends on the rows."""
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
        # An output that is the same for every piece depends on nothing that was cut.
        depends |= not all(piece.shape == whole.shape and is_close(whole, piece) for piece in pieces)
    return depends


def _describe_cuts(cuts: Mapping[str, ChunkSpec], inputs: Inputs) -> str:
    """Return a sentence about arguments that are to be cut in another way."""
    name, (dim, each) = max(cuts.items(), key=lambda entry: entry[1].each)
    if dim is None:
        return f"argument {name!r} has no rows, although it is as long as the batch, and was cut with it"
    shape = next(spec.shape for spec in inputs.specs if spec.name == name)
    return f"argument {name!r} has shape {shape}, which is {each} entries for each row of the batch"


def _write_chunks(cuts: Mapping[str, ChunkSpec]) -> str:
    """Return the option `chunks=` as text, with the dimensions in `cuts`, for the user to copy."""
    places = (f"{name!r}: {'fxsplit.Replicate' if dim is None else dim}" for name, (dim, _) in cuts.items())
    return f"chunks={{{', '.join(places)}}}, or compile with n_microbatches=1"

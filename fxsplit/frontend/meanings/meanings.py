"""Find the kind of each output over microbatches: rows, a mean, a sum, or a value that only the whole batch has.

The model runs on a batch and on pieces of different sizes. A relation between the batch's output and the outputs of the
pieces is taken to hold for microbatches too. If several relations hold on the example, as for a loss of zero, other
rows of the same sort are tried, with other weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, fx

from fxsplit.errors import InputError
from fxsplit.frontend.meanings.carried import find_carried_buffer
from fxsplit.frontend.meanings.counts import find_count, find_inner_counts, is_safe
from fxsplit.frontend.meanings.row_gradients import EarlyGradients, find_unjoined_gradient, run_early
from fxsplit.frontend.meanings.rows import cut_pieces, join_pieces, mix_batch
from fxsplit.frontend.meanings.trial import (
    TrialRun,
    choose_pieces,
    copy_in_double,
    divide_evenly,
    run_model,
    run_pieces,
    take_batch,
)
from fxsplit.frontend.meanings.wrong_cuts import describe_counting, describe_wrong_cuts, explain_failure
from fxsplit.frontend.subject import Runnable, Subject
from fxsplit.ir.facts.capture.agreement import find_rows_dim, is_close, is_weighted_mean, list_kinds
from fxsplit.ir.facts.capture.counts import DIFFERS, Count, CountWatch, share_rows
from fxsplit.ir.facts.capture.output_kinds import Kind, OutputKind
from fxsplit.system.user_lines import warn_user
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.fake.values import has_values

TRIES = 3
"""How many other batches are made from the example if several kinds fit an output."""
ALONE = "compile with n_microbatches=1, or return one row for each row of the input and reduce outside of the model"
WHOLE = OutputKind(
    "unjoined", why="the pipeline was compiled for one microbatch a batch: compile with n_microbatches=1"
)
"""The kind of all outputs of a model whose batches are not cut."""


def find_meanings(subject: Subject, gm: fx.GraphModule | None = None, *, joined: bool = True) -> tuple[OutputKind, ...]:
    """Return the kind of each output tensor of the subject's model over microbatches.

    gm: the model's graph, if it is known.
    joined: whether outputs of microbatches are to be joined; otherwise every output has the kind WHOLE.
    A model without weights runs on made-up weights. Warns of rows that depend on each other. Raises InputError for a
    Python value that depends on the number of rows, and for an argument that is cut by mistake.
    """
    if not subject.from_shapes or not joined:
        return _find(subject, gm, joined=joined)
    try:
        return _find(replace(subject, from_shapes=False, made_up=True), gm)
    except InputError:
        raise
    except Exception as error:  # a model may need certain values, or more memory than there is
        return _find(subject, gm, failed=error)


def _find(
    subject: Subject, gm: fx.GraphModule | None, *, joined: bool = True, failed: Exception | None = None
) -> tuple[OutputKind, ...]:
    """Return the kind of each output. `failed`: the error on made-up weights, if the model runs only on shapes."""
    with subject.make_runnable(subject.batch) as here:
        trial = _Trial(subject, here, gm, failed)
        if not joined:
            return trial.leave_whole()
        run = trial.run()
        if run is None:
            return trial.leave_whole()
        found = [trial.judge(name, run) for name in run.whole if trial.is_tensor(name, run)]
        trial.look_at_buffers()
        trial.look_at_gradients(run, found)
        wrong = describe_wrong_cuts(subject, here) if trial.doubtful and not subject.from_shapes else None
        # If an output is refused anyway when somebody asks for it, the error may wait until then.
        if wrong and trial.said:
            raise InputError(wrong)
        for text in trial.said:
            warn_user(text)
    return tuple(replace(m, why=f"{m.why}. But {wrong}") if wrong and m.kind == "unjoined" else m for m in found)


class _Trial:
    """One trial of a subject: it runs the model on the example and on pieces of it, and judges each output.

    - `here`: the model with the whole example
    - `failed`: why the model runs only on shapes
    - `said`: texts of warnings
    - `doubtful`: whether some output cannot be made from the microbatches' outputs
    """

    def __init__(
        self, subject: Subject, here: Runnable, gm: fx.GraphModule | None, failed: Exception | None = None
    ) -> None:
        self._subject = subject
        self._failed = failed
        self._here = here
        self._gm = gm
        self.said: list[str] = []
        self.doubtful = False
        self._closer: dict[tuple[int, ...], TrialRun] = {}
        self._early: EarlyGradients | None = None
        self._divisors: dict[int, fx.GraphModule | None] = {}

    def run(self) -> TrialRun | None:
        """Return the first run in which the model does not fail. Runs differ in the sizes of the pieces.

        Returns None if the model takes only the example's number of rows, and no batch is cut. Otherwise raises the
        last error.
        """
        failed: list[Exception] = []
        for rows in self._list_sizes():
            try:
                run = self._run(self._here, rows)
            except Exception as error:
                failed.append(error)
                continue
            # A few rows show the batch dimension. The whole example shows the kind of a number better.
            whole = failed or self._subject.from_shapes or sum(rows) >= self._subject.batch
            if whole or all(_is_batch(name, run) or self._is_shown(name, run) for name in run.whole):
                return run
        if not self._subject.is_cut:
            return None
        raise explain_failure(self._subject, failed[-1]) or failed[-1]

    def leave_whole(self) -> tuple[OutputKind, ...]:
        """Return the kinds of outputs that are never joined: WHOLE."""
        # Not `run`: the model may only work for its own number of rows, and it gets no other.
        outputs = run_model(self._here, self._here.tensors, from_shapes=self._subject.from_shapes).values()
        constants = [value for value in outputs if not isinstance(value, Tensor)]
        # Numbers become part of the graph, and the next batch may have other rows.
        if any(isinstance(value, (int, float)) for value in constants) and (run := self.run()):
            for name in run.whole:
                self.is_tensor(name, run)
        return (WHOLE,) * (len(outputs) - len(constants))

    def is_tensor(self, name: str, run: TrialRun) -> bool:
        """Return whether an output is a tensor; raises InputError for any other value that depends on the rows."""
        whole, pieces = run.take(name)
        if isinstance(whole, Tensor) and all(isinstance(piece, Tensor) for piece in pieces):
            return True
        for piece, rows in zip(pieces, run.rows, strict=True):
            if type(piece) is not type(whole) or piece != whole:
                raise InputError(
                    f"{name} of {self._here.name} is {piece!r} for {rows} rows and {whole!r} for {sum(run.rows)}, and "
                    "not the same for every microbatch: return tensors only"
                )
        return False

    def judge(self, name: str, run: TrialRun) -> OutputKind:
        """Return the kind of an output tensor."""
        whole, pieces = run.take(name)
        batched = find_rows_dim(whole.shape, [piece.shape for piece in pieces], run.rows)
        if batched is not None:
            return self._judge_rows(name, run, *batched)
        if all(piece.shape == whole.shape for piece in pieces):
            return self._judge_number(name, run)
        return self._refuse(name, run, "it does not have one row for each row of the input")

    def look_at_buffers(self) -> None:
        """Add a warning about a buffer through which microbatches change each other's outputs."""
        buffer = find_carried_buffer(self._here, self._few) if self._may_compare else None
        if buffer:
            self.said.append(
                f"forward() of {self._here.name} writes buffer {buffer!r}, and its outputs depend on that buffer: the "
                "pipeline writes it once for each microbatch instead of once for the batch; compile with "
                "n_microbatches=1, or write it outside of forward()"
            )

    def look_at_gradients(self, run: TrialRun, found: Sequence[OutputKind]) -> None:
        """Warn of a weight whose gradient is not the sum over microbatches, although the outputs are right."""
        # Gradients of made-up weights would take memory for all weights.
        if not self._may_compare or self._subject.made_up:
            return
        named = (name for name in run.whole if isinstance(run.whole[name], Tensor))
        meanings = dict(zip(named, found, strict=True))
        # A few rows, since a backward of the whole example may need more memory than there is.
        early, self._early = self._early, None
        right = early is not None and early.is_right(meanings)
        weight = early.find_unjoined() if early and right else self._find_unjoined(self._here, meanings)
        del early  # it is as large as all weights, twice
        # Rounding may take another branch of a maximum, so the difference must persist in double precision and at other
        # weights.
        closer = copy_in_double(self._here, jitter=True) if weight else None
        if weight and (closer is None or self._find_unjoined(closer, meanings)):
            self.said.append(
                f"the gradient of {weight!r} of {self._here.name} is not the sum of the microbatches' gradients: a "
                "custom backward, a hook, or scale_grad_by_freq compares rows. The pipeline computes it within "
                "microbatches, which differs from the whole batch; compile with n_microbatches=1 for that"
            )

    # The kinds of outputs

    def _judge_rows(self, name: str, run: TrialRun, dim: int, each: int) -> OutputKind:
        """Return the kind of an output with a dimension of `each` times the number of rows."""
        if self._subject.from_shapes:
            if each > 1:
                return self._refuse(name, run, f"it may not be in the order of the rows{self._say_failed}")
            self.said.append(
                f"the rows of {name} of {self._here.name} may depend on each other{self._say_failed}: the pipeline "
                "computes them within microbatches"
            )
            return OutputKind("rows", dim)
        for exact in (False, True):
            found, loose = self._look_closer(run) if exact else (run, False)
            whole, pieces = found.take(name)
            if is_close(whole, torch.cat(pieces, dim), loose=loose):
                return OutputKind("rows", dim, each)
        if each > 1:
            return self._refuse(name, run, "it is not in the order of the rows, or they depend on each other")
        self.doubtful = True
        self.said.append(
            f"the rows of {name} of {self._here.name} depend on each other: the pipeline computes them within "
            "microbatches, which differs from the whole batch; compile with n_microbatches=1 for that"
        )
        return OutputKind("rows", dim)

    def _judge_number(self, name: str, run: TrialRun) -> OutputKind:
        """Return the kind of an output whose shape does not depend on the number of rows, such as a loss."""
        whole, pieces = run.take(name)
        if self._subject.from_shapes:
            return self._refuse(name, run, f"it may be a mean or a sum{self._say_failed}")
        if self._subject.made_up and not _is_finite(whole):
            return self._refuse(name, run, "on made-up weights it is not finite, so a mean cannot be told from a sum")
        kinds = list_kinds(whole, pieces, run.rows)
        if not kinds and (count := self._find_count(name, run)) is not None:
            return OutputKind("mean", count=count)
        if not kinds:
            closer, loose = self._look_closer(run)
            kinds = list_kinds(*closer.take(name), closer.rows, loose=loose)
        if not kinds and self._is_counted(name, whole):
            self.doubtful = True
            self.said.append(f"{name} of {self._here.name} {DIFFERS}")
            return OutputKind("counted")
        if "same" in kinds and len(kinds) > 1:
            kinds = self._try_others(name, kinds)
        kind = next((k for k in ("same", "mean", "sum", "all", "any") if k in kinds), None)
        if kind is None:
            return self._refuse(name, run, "its rows depend on each other")
        # The labels of another batch may be ignored, or masked, even if none of the example are.
        found = (self._find_count(name, run) or self._find_watch(name, run)) if kind == "mean" else None
        return OutputKind(kind, count=found)

    def _refuse(self, name: str, run: TrialRun, reason: str) -> OutputKind:
        """Return the kind "unjoined" for an output, with a sentence that gives the reason."""
        whole, pieces = run.take(name)
        self.doubtful = True
        shown = list(dict.fromkeys(f"{_describe(p)} for {n}" for p, n in zip(pieces, run.rows, strict=True)))
        found = f"{name} of {self._here.name} is {_describe(whole)} for {sum(run.rows)} rows, {' and '.join(shown)}"
        way = describe_counting(self._here) or ALONE
        if "aux_loss" in name:
            way += ", or leave it out (Hugging Face: output_router_logits=False)"
        return OutputKind("unjoined", why=f"{found}: {reason}, so it cannot be made from microbatches; {way}")

    @property
    def _say_failed(self) -> str:
        """A clause that says why only shapes are known, for the end of a sentence."""
        failed = f"{type(self._failed).__name__}: {self._failed}"
        return f", which is unknown as the model has no weights yet and fails on made-up ones ({failed})"

    # More runs

    @property
    def _few(self) -> tuple[int, int]:
        """The sizes of two pieces of a few rows. The second size differs from the first."""
        rows = self._subject.rows
        # The check of the graph has run the model on one row already, so that run is free.
        return (rows, 1) if rows > 1 and 1 in self._subject.outputs else (rows, rows // 2 or 2)

    @property
    def _may_compare(self) -> bool:
        """Whether it is useful to compare values of pieces: batches are cut, and no output is doubtful so far."""
        return self._subject.is_cut and not self._subject.from_shapes and not self.doubtful

    def _list_sizes(self) -> Iterator[tuple[int, ...]]:
        """Yield the sizes of pieces to try, as a tuple for each run."""
        batch, rows = self._subject.batch, self._subject.rows
        cut = [spec for spec in self._here.inputs.specs if spec.cut.dim is not None]
        # With several cut arguments, try the whole example first: an argument may have no rows after all.
        without_weights = self._subject.from_shapes or self._subject.made_up
        if without_weights or (sum(self._few) < batch and len(cut) == 1):
            yield self._few
        yield choose_pieces(batch, rows)
        if self._subject.is_cut:
            yield divide_evenly(batch, rows)
            yield self._few  # memory may not suffice for the whole example

    def _is_shown(self, name: str, run: TrialRun) -> bool:
        """Return whether a run on a few rows has shown whether a number, such as a loss, is a mean or a sum."""
        # If a model has no weights, the whole example may need more memory than there is.
        whole, pieces = run.take(name)
        is_number = self._subject.made_up and isinstance(whole, Tensor) and whole.is_floating_point()
        alike = (
            is_number and all(piece.shape == whole.shape for piece in pieces) and all(map(_is_finite, (whole, *pieces)))
        )
        # In a few rows, all entries may count, or none.
        return alike and "same" not in list_kinds(whole, pieces, run.rows, loose=True)

    def _find_unjoined(self, here: Runnable, meanings: Mapping[str, OutputKind]) -> str | None:
        """Return a weight whose gradient for a few rows is not the sum of the gradients for pieces of them, or None."""
        return find_unjoined_gradient(here, self._few, meanings)

    def _run(self, here: Runnable, rows: tuple[int, ...]) -> TrialRun:
        """Return a run on the example's rows, or some of them, with gradients if they will be needed."""
        shapes = self._subject.from_shapes
        # A backward of more rows may need more memory than there is.
        few = rows == self._few or sum(rows) <= 2 * self._subject.rows
        early = here is self._here and few and not self._subject.made_up
        # A model that looks at the grad mode would behave differently.
        if early and self._may_compare and not here.asks_for_gradients:
            # Without gradients the same run may succeed.
            with suppress(Exception):
                run, self._early = run_early(here, rows, self._guess_count)
                return run
        here.first.forget()  # its memory is needed
        return run_pieces(here, take_batch(here, sum(rows), from_shapes=shapes), rows, from_shapes=shapes)

    @cached_property
    def _double(self) -> Runnable | None:
        """A copy in double precision, to rule out rounding as the reason for a difference."""
        return copy_in_double(self._here, jitter=False)

    def _look_closer(self, run: TrialRun) -> tuple[TrialRun, bool]:
        """Return the same run in double precision, and False.

        If double precision is impossible, return the run itself and True: its values must then be compared loosely.
        """
        if self._double is not None and run.rows not in self._closer:
            with suppress(Exception):  # for example if a model only works in float32
                self._closer[run.rows] = self._run(self._double, run.rows)
        return (self._closer[run.rows], False) if run.rows in self._closer else (run, True)

    @cached_property
    def _others(self) -> list[TrialRun]:
        """Runs on other rows of the same sort, with other weights."""
        moved = copy_in_double(self._here, jitter=True) or self._here
        rows = choose_pieces(self._subject.batch, self._subject.rows)
        found = []
        with suppress(Exception):  # a model may check its inputs
            for shift in range(1, TRIES + 1):
                found.append(run_pieces(moved, mix_batch(moved.inputs, take_batch(moved, sum(rows)), shift), rows))
        return found

    def _try_others(self, name: str, kinds: set[Kind]) -> set[Kind]:
        """Return those of `kinds` that also fit an output on other rows."""
        for run in self._others:
            kinds = kinds & list_kinds(*run.take(name), run.rows)
        return kinds

    @cached_property
    def _nodes(self) -> list[fx.Node | None]:
        """The nodes that compute the outputs of the captured graph, None for a constant; [] without a graph."""
        leaves = [] if self._gm is None else pytree.tree_leaves(self._gm.graph.output_node().args[0])
        return [leaf if isinstance(leaf, fx.Node) else None for leaf in leaves]

    def _find_place(self, name: str, run: TrialRun) -> int | None:
        """Return the place of an output among those of the captured graph; None if there is no graph of these."""
        return list(run.whole).index(name) if len(self._nodes) == len(run.whole) else None

    def _find_divisor(self, place: int) -> fx.GraphModule | None:
        """Return the graph of the count that an output of the captured graph is divided by, or None."""
        if place not in self._divisors:
            node = self._nodes[place] if place < len(self._nodes) else None
            self._divisors[place] = None if self._gm is None or node is None else find_count(self._gm, node)
        return self._divisors[place]

    def _guess_count(self, place: int) -> Count | None:
        """Return the count that an output is divided by if pieces are weighted by it alone, not by their rows too."""
        graph = self._find_divisor(place)
        return None if graph is None else Count(graph, False, safe=is_safe(graph))

    def _find_count(self, name: str, run: TrialRun) -> Count | None:
        """Return the count that a number is divided by, if pieces weighted by this count make the number, else None."""
        place = self._find_place(name, run)
        graph = None if place is None else self._find_divisor(place)
        if graph is None:
            return None
        weights = {}
        for by_rows in (False, True):
            count = Count(graph, by_rows, safe=is_safe(graph) and not by_rows)
            with suppress(Exception):  # such as labels on which the loss itself fails
                weights[count] = torch.tensor(self._weigh(count, run), dtype=torch.float64)
        by_size = torch.tensor(share_rows(run.rows), dtype=torch.float64)
        fitting = [w for w in (*weights.values(), by_size) if _weighs(w, *run.take(name))]
        # Losses of pieces may be so alike that in single precision several weights fit.
        clear = fitting and all(is_close(w, fitting[0]) for w in fitting)
        closer, loose = (run, False) if clear else self._look_closer(run)
        return next((c for c, w in weights.items() if _weighs(w, *closer.take(name), loose=loose)), None)

    def _find_watch(self, name: str, run: TrialRun) -> CountWatch | None:
        """Return a watch for the divisions that lead to a number, if the number is a mean over rows on the example.

        On another batch, the number may not be a mean over rows. The watch compares the counts of each batch. Returns
        None if there is no division to watch.
        """
        place, found = self._find_place(name, run), []
        node = None if place is None else self._nodes[place]
        for graph in () if self._gm is None or node is None else find_inner_counts(self._gm, node):
            for by_rows in (False, True):
                count = Count(graph, by_rows)
                with suppress(Exception):  # such as a divisor for each row
                    weights = torch.tensor(self._weigh(count, run), dtype=torch.float64)
                    if is_close(weights, torch.tensor(share_rows(run.rows), dtype=torch.float64)):
                        found.append(count)
                        break
        return CountWatch(f"{name} of {self._here.name}", found) if found else None

    def _weigh(self, count: Count, run: TrialRun) -> list[float]:
        """Return the share of each piece of a batch in a mean that is divided by `count`."""
        tensors = take_batch(self._here, sum(run.rows))
        return count.weigh(cut_pieces(self._here.inputs, tensors, run.rows), run.rows, tensors)

    def _is_counted(self, name: str, whole: Tensor) -> bool:
        """Return whether a number is a weighted mean over microbatches whose weights are not their numbers of rows."""
        batch = self._subject.batch
        is_number = whole.ndim == 0 and whole.is_floating_point()
        if self._double is None or not is_number or batch < 3 or self._subject.made_up:
            return False
        tensors = take_batch(self._double, batch)
        sizes = tuple(batch // 3 + (m < batch % 3) for m in range(3))
        a, b, c = cut_pieces(self._here.inputs, tensors, sizes)
        ab, bc = (join_pieces(self._here.inputs, pair) for pair in ((a, b), (b, c)))
        parts = {"a": a, "b": b, "c": c, "ab": ab, "bc": bc, "abc": tensors}
        try:
            return is_weighted_mean({part: run_model(self._double, rows)[name] for part, rows in parts.items()})
        except Exception:  # for example if two rows must stay together
            return False


def _weighs(weights: Tensor, whole: Tensor, pieces: Sequence[Tensor], *, loose: bool = False) -> bool:
    """Return whether a number is the sum of the pieces' numbers times their weights, without pieces of weight zero."""
    terms = [piece * weight for piece, weight in zip(pieces, weights.tolist(), strict=True) if weight]
    return bool(terms) and is_close(whole, torch.stack(terms).sum(0).to(whole.dtype), loose=loose)


def _is_finite(value: Tensor) -> bool:
    """Return whether all entries of a tensor are finite."""
    return bool(value.isfinite().all())


def _is_batch(name: str, run: TrialRun) -> bool:
    """Return whether an output needs no further run: it has the batch's rows, or is neither tensor nor number."""
    whole, pieces = run.take(name)
    if not isinstance(whole, Tensor):
        return not isinstance(whole, (int, float)) or isinstance(whole, bool)
    return find_rows_dim(whole.shape, [piece.shape for piece in pieces], run.rows) is not None


def _describe(value: Tensor) -> str:
    """Return the text of a scalar's value, or of any other tensor's shape."""
    return f"{value.item():.4g}" if value.ndim == 0 and has_values(value) else f"of shape {tuple(value.shape)}"

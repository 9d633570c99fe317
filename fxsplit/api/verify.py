"""verify(): prove on copies in float64 that a pipeline is its model: outputs, every gradient, every buffer.

Both train for two steps on one batch. A difference counts if it is larger than what a change of the model's weights by
their own rounding makes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.rnn import RNNBase

from fxsplit.api.compare import (
    Joined,
    Outcome,
    list_differences,
    run_pipeline_loop,
    run_pipeline_step,
    run_unsplit_step,
)
from fxsplit.api.compile import recompile_like
from fxsplit.api.compiled import get_mode
from fxsplit.api.compression import Compression, measure_compression
from fxsplit.api.differences import Difference, widen_dtype
from fxsplit.api.pipeline import Pipeline
from fxsplit.errors import InputError
from fxsplit.ir.facts.call import Call, parse_example_inputs
from fxsplit.ir.facts.effects import CallEffects
from fxsplit.ir.facts.meanings import Meaning
from fxsplit.ir.interrupts import lose_no_interrupt
from fxsplit.runtime.loss import LossFn, find_own_loss, find_own_meaning, sum_squares, take_model_loss
from fxsplit.runtime.program import Batch
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.containers import to_plain_outputs
from fxsplit.torch_internals.expectations import normalise_rows_alone
from fxsplit.torch_internals.fake_weights import Snapshot, are_together, lacks_values
from fxsplit.torch_internals.generators import keep_torch_generators
from fxsplit.torch_internals.interpret import preserve
from fxsplit.torch_internals.undo import leave_no_trace, undo_after

STEPS = 2
"""The second step starts from weights and buffers that the first one has changed."""
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Sums in another order differ by rounding, which layers amplify; a lost gradient differs by its own size."""
AMPLIFIED = 10.0
"""A pipeline may differ this many times as much as rounding the model's weights does. Batch norm over two values, for
example, makes 1e-8 of 1e-16."""
MOST = 1e-3
"""No rounding excuses more than this, which is far less than a gradient that is lost or doubled."""
RUNS = 3
"""Runs after the first in which a model must give the same outputs, to be believed to draw no random numbers."""
STEP_SIZE = 0.01
"""How far a step goes along the steepest gradient, as a share of the largest weight."""


@dataclass(frozen=True)
class Verification:
    """What was compared, the largest relative difference of each over all steps, and what the pipeline is.

    `by_nature` are names of outputs, gradients and buffers in which the unsplit model itself, run on microbatches,
    differs from its run on the whole batch for a reason that lies in the model: batch norm, buffers that every call
    writes, or a loss that divides by a count that its graph does not show. They are compared with the model on
    microbatches, and all others with the model on the whole batch.

    Where cuts are compressed, all this is of the same pipeline with exact cuts, and `compression` is what compressing
    changes in one step.
    """

    differences: tuple[Difference, ...]
    by_nature: tuple[str, ...]
    dtype: torch.dtype
    front_end: str
    nodes: int
    stages: int
    n_microbatches: int
    compression: Compression | None = None

    @property
    def offending(self) -> tuple[Difference, ...]:
        """What differs by more than rounding."""
        allowed = TOLERANCE[self.dtype]
        return tuple(d for d in self.differences if not d.value <= max(allowed, min(AMPLIFIED * d.rounding, MOST)))

    @property
    def equal(self) -> bool:
        """Whether the pipeline is the model on the whole batch, or on microbatches in what is named `by_nature`."""
        return not self.offending

    @property
    def largest(self) -> float:
        """The largest relative difference."""
        return max((d.value for d in self.differences), default=0.0)


@lose_no_interrupt
@leave_no_trace
def verify(pipe: Pipeline, inputs: Any, more: Mapping[str, Any] | None = None) -> Verification:
    """Train copies of a pipeline and of its model for two steps on one batch, and compare all they leave behind.

    inputs: one whole batch, as `compile` takes it; `more` are keyword arguments besides. The copies are in float64 (in
    float32 where the model refuses that) and drop nothing; the loss is the model's own if it returns one, else the sum
    of squares of all float outputs. A model that is frozen as a whole is thawed, and batch norm is not deferred.
    Neither the pipeline nor its model are changed. Raises InputError for a model that draws random numbers otherwise,
    and for asynchronous schedules.
    """
    if lacks_values(pipe.model):
        raise InputError(f"{type(pipe.model).__name__} has no values yet, it is on the meta device: load its weights")
    call = parse_example_inputs(inputs)
    call.kwargs.update(more or {})
    # float64 keeps rounding some eight digits below any gradient that is lost; some models know float32 alone.
    with disable_dropout(), keep_torch_generators():
        try:
            return _train_copies(pipe, *_convert(torch.float64, pipe.model, call), torch.float64)
        except _Refused:
            return _train_copies(pipe, *_convert(torch.float32, pipe.model, call), torch.float32)


class _Refused(Exception):
    """The model does not run in float64."""


def _train_copies(pipe: Pipeline, model: nn.Module, call: Call, dtype: torch.dtype) -> Verification:
    """Train copies of `model` side by side, and return how they differ; model and call are in `dtype`.

    Raises InputError for a model without a float output, or one that draws random numbers besides dropout.
    """
    # `model` itself becomes the pipeline's. The others run unsplit, and one has weights off by rounding, to tell what
    # rounding makes.
    unsplit, shaken = copy.deepcopy(model), copy.deepcopy(model)
    _shake_weights(shaken)
    first = _run_without_trace(unsplit, call, dtype)
    if not all(_are_equal(first, _run_without_trace(unsplit, call, dtype)) for _ in range(RUNS)):
        raise InputError(
            f"{type(model).__name__} draws random numbers besides dropout, so no two runs of it are equal: verify it "
            "with such rates at 0, or in evaluation, pipe.eval()"
        )
    loss_fn = sum_squares if find_own_loss(first) is None else None
    if not any(isinstance(t, Tensor) and t.is_floating_point() for t in pytree.tree_leaves(to_plain_outputs(first))):
        raise InputError(f"{type(model).__name__} returns no floating-point tensor, so it has no gradients to compare")
    # Largest over all steps, by kind and name: the pipeline's differences, and those that rounding makes.
    found: dict[Key, float] = {}
    rounding: dict[Key, float] = {}
    natural: dict[Key, None] = {}
    how, start = pipe.compiler.options.way_to_compress, copy.deepcopy(model)
    compression = None
    with recompile_like(pipe, model, loss_fn) as split:
        batch = split.compiler.prepare(get_mode(model), call)
        trial = _Trial(call, batch, split.traced[CallEffects].meanings, loss_fn)
        # All start every step from the same weights and buffers, those of the unsplit model on microbatches.
        for _ in range(STEPS):
            whole = copy.deepcopy(unsplit)
            neutral = _Neutral(trial, unsplit, 1e3 * TOLERANCE[dtype])
            by_pieces = trial.run(unsplit, batch.rows)
            if how and compression is None:
                with recompile_like(pipe, start, loss_fn, how) as compressed:
                    compression = measure_compression(how, trial.run_pipeline(compressed), by_pieces)
            by_pipeline = trial.run_pipeline(split)
            by_whole = trial.run(whole, [sum(batch.rows)])
            _keep_largest(rounding, list_differences(trial.run(shaken, batch.rows), by_pieces))
            # What microbatches leave as it is must be that of the whole batch, which the model has without fxsplit.
            apart = neutral.find_apart(by_pieces, by_whole)
            mine, others = list_differences(by_pipeline, by_pieces), list_differences(by_pipeline, by_whole)
            kept = (b if apart.get((a.kind, a.name)) == "wrong" else a for a, b in zip(mine, others, strict=True))
            _keep_largest(found, list(kept))
            natural |= dict.fromkeys(key for key, why in apart.items() if why == "nature")
            for trained in (model, unsplit, shaken):
                _take_step(trained)
        nodes = sum(n.op not in ("placeholder", "output") for n in split.traced.gm.graph.nodes)
        return Verification(
            tuple(Difference(*key, value, rounding.get(key, 0.0)) for key, value in found.items()),
            tuple(f"output {name}" if kind == "output" else name for kind, name in natural),
            dtype,
            split.front_end,
            nodes,
            len(split.stages),
            len(batch.rows),
            compression,
        )


Key = tuple[str, str]
"""The kind and name of what is compared."""


@dataclass(frozen=True, eq=False)
class _Trial:
    """One call of a model, and how its loss and outputs follow from those of microbatches.

    `loss_fn` is None for the model's own loss.
    """

    call: Call
    batch: Batch
    meanings: Sequence[Meaning]
    loss_fn: LossFn | None

    @cached_property
    def joins_first(self) -> bool:
        """Whether the loss is of joined outputs: the squares of means and sums do not add up over microbatches."""
        return self.loss_fn is not None and any(meaning.kind != "rows" for meaning in self.meanings)

    def run(self, model: nn.Module, rows: Sequence[int]) -> Outcome:
        """Return what a step of the unsplit model leaves, on microbatches of so many rows."""
        args, kwargs = _clone_call(self.call)
        target = () if self.loss_fn else None
        loss_fn, how = self.loss_fn or take_model_loss, self.batch.program.inputs
        batch = self.batch._replace(rows=rows)
        meanings = [replace(m, weights=[float(w) for w in batch.weigh(m)]) for m in self.meanings]
        own = find_own_meaning(batch.program, len(rows)) if self.loss_fn is None else None
        weights = None if own is None else [float(w) for w in batch.weigh(own)]
        joined = Joined(meanings, weights, self.joins_first)
        return run_unsplit_step(model, args, target, loss_fn, rows, kwargs, how, joined)

    def run_pipeline(self, split: Pipeline) -> Outcome:
        """Return what a step of the pipeline leaves."""
        args, kwargs = _clone_call(self.call)
        if self.joins_first:
            return run_pipeline_loop(split, args, sum_squares, kwargs)
        return run_pipeline_step(split, args, () if self.loss_fn else None, kwargs)


class _Neutral:
    """Tells what microbatches change by nature: batch norm, buffers that calls write, and means by other counts.

    A copy of the model, as it is before a step, is run with batch norms that normalise each row by itself, and buffers
    that every microbatch finds as they were. What still differs between microbatches and the whole batch is a fault.
    """

    def __init__(self, trial: _Trial, model: nn.Module, tolerance: float) -> None:
        self._trial = trial
        self._model = copy.deepcopy(model)
        self._tolerance = tolerance

    def find_apart(self, by_pieces: Outcome, by_whole: Outcome) -> dict[Key, str]:
        """Return what differs between microbatches and the whole batch, and whether by "nature" or as "wrong"."""
        apart = self._list_apart(by_pieces, by_whole)
        # An output that is averaged by other counts is named when the model is compiled.
        counted = [str(i) for i, meaning in enumerate(self._trial.meanings) if meaning.kind == "counted"]
        if not apart or (counted and self._trial.loss_fn is None):
            return dict.fromkeys(apart, "nature")
        rows = self._trial.batch.rows
        with normalise_rows_alone():
            wrong = self._list_apart(self._run(rows), self._run([sum(rows)]))
        return {key: "wrong" if key in wrong and key[0] != "buffer" else "nature" for key in apart}

    def _run(self, rows: Sequence[int]) -> Outcome:
        """Return what a step leaves of a copy whose buffers are as before for every microbatch."""
        model = copy.deepcopy(self._model)
        before = Snapshot(model.buffers())
        model.register_forward_pre_hook(lambda *_: before.restore())
        return self._trial.run(model, rows)

    def _list_apart(self, a: Outcome, b: Outcome) -> list[Key]:
        """Return what differs by more than rounding."""
        return [(d.kind, d.name) for d in list_differences(a, b) if d.value > self._tolerance]


def _keep_largest(found: dict[tuple[str, str], float], more: Sequence[Difference]) -> None:
    """Keep the largest difference found of each name."""
    for d in more:
        found[d.kind, d.name] = max(found.get((d.kind, d.name), 0.0), d.value)


def _shake_weights(model: nn.Module) -> None:
    """Change every weight by its dtype's rounding, one up, the next one down."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.is_floating_point():
                up = torch.arange(weight.numel(), device=weight.device).view(weight.shape) % 2 == 0
                weight.mul_(1.0 + torch.where(up, 1.0, -1.0).to(weight.dtype) * torch.finfo(weight.dtype).eps)


def _convert(dtype: torch.dtype, model: nn.Module, call: Call) -> tuple[nn.Module, Call]:
    """Return a copy of the model, and the call, in a dtype; in host memory where the model cannot run where it is.

    Stages on several devices have its weights there.
    """
    given = [t for t in pytree.tree_leaves(call) if isinstance(t, Tensor)]
    runs_here = are_together([*model.parameters(), *model.buffers()], given)

    def convert(tensor: Tensor) -> Tensor:
        tensor = tensor if runs_here else tensor.cpu()
        # Floating and complex numbers alone have gradients, and are what a dtype is for.
        return tensor.to(widen_dtype(tensor, dtype)) if tensor.is_floating_point() or tensor.is_complex() else tensor

    copied = copy.deepcopy(model)._apply(convert)
    for module in copied.modules():
        if isinstance(module, RNNBase):
            # Its dropout happens inside one kernel, where `disable_dropout` does not reach.
            module.dropout = 0.0
    frozen = not any(parameter.requires_grad for parameter in copied.parameters())
    for parameter in copied.parameters():
        parameter.grad = None
        # With every parameter frozen there would be no gradient to compare.
        if frozen and parameter.is_floating_point():
            parameter.requires_grad_()

    return copied, pytree.tree_map_only(Tensor, lambda t: convert(t.detach()), call)


def _run_without_trace(model: nn.Module, call: Call, dtype: torch.dtype) -> Any:
    """Return what the model returns, without a trace on it; raises _Refused where it does not run in a dtype."""
    try:
        with torch.no_grad(), preserve(model):
            # A new seed each time, or a model that draws would draw the same. preserve() restores the generator.
            torch.manual_seed(torch.seed())
            own, named = _clone_call(call)
            outputs = model(*own, **named)
    except RuntimeError as error:
        if dtype is torch.float64:
            raise _Refused from error
        raise
    finite = all(bool(t.isfinite().all()) for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor))
    # Constants made for float32, such as a mask of its least number, may give no numbers in float64.
    if dtype is torch.float64 and not finite:
        raise _Refused
    return outputs


def _clone_call(call: Call) -> Call:
    """Return a call with copies of its tensors, which a model may write to."""
    cloned: Call = pytree.tree_map_only(Tensor, torch.clone, call)
    return cloned


def _are_equal(a: Any, b: Any) -> bool:
    """Return whether two outputs are equal; a value that is no number equals another one."""
    pairs = zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
    return all(torch.equal(torch.nan_to_num(x), torch.nan_to_num(y)) for x, y in pairs if isinstance(x, Tensor))


def _take_step(model: nn.Module) -> None:
    """Take a step down the gradients and forget them."""
    trained = [(w, w.grad) for w in model.parameters() if w.grad is not None and w.numel()]
    trained = [(w, gradient.to_dense() if gradient.is_sparse else gradient) for w, gradient in trained]
    with torch.no_grad():
        steepest = max((float(gradient.abs().max()) for _, gradient in trained), default=0.0)
        largest = max((float(w.abs().max()) for w, _ in trained), default=0.0)
        # One rate for all weights: a gradient that is rounding alone moves its weight by rounding alone.
        for weight, gradient in trained:
            if steepest > 0.0:
                weight.sub_(gradient * (STEP_SIZE * largest / steepest))
            weight.grad = None


@contextmanager
def disable_dropout() -> Iterator[None]:
    """Let torch's dropout functions and modules drop nothing inside the block."""
    # Modules of dropout call these functions too, so patching the functions reaches both.
    names = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    own = {name: getattr(F, name) for name in (*names, "scaled_dot_product_attention")}

    def drop_nothing(function: Any) -> Any:
        @wraps(function)
        def keep(input: Tensor, p: float = 0.0, training: bool = False, inplace: bool = False) -> Any:
            return function(input, 0.0, training, inplace)

        return keep

    @wraps(own["scaled_dot_product_attention"])
    def attend(query: Any, key: Any, value: Any, mask: Any = None, p: float = 0.0, *more: Any, **named: Any) -> Any:
        named = {"attn_mask": mask, **named, "dropout_p": 0.0}
        named |= dict(zip(("is_causal", "scale"), more, strict=False))
        return own["scaled_dot_product_attention"](query, key, value, **named)

    def put_back() -> None:
        for name, function in own.items():
            setattr(F, name, function)

    with undo_after(put_back):
        for name in names:
            setattr(F, name, drop_nothing(own[name]))
        F.scaled_dot_product_attention = attend  # type: ignore[assignment]
        yield

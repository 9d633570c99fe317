"""verify(): prove on copies in float64 that a pipeline is its model: outputs, every gradient, every buffer.

The pipeline and the model train for two steps on one batch. A difference is an error if it is much larger than the
effect of rounding the model's weights. If parts of the model compute in a coarser dtype, its rounding is allowed too.

  model --copy--> unsplit    on the whole batch ------------+
        --copy--> unsplit    on microbatches ---------------+--> outputs, gradients, buffers -> Tally -> Verification
        --copy--> shaken     on microbatches: the rounding -+
        --copy--> pipeline   on microbatches ---------------+
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.rnn import RNNBase

from fxsplit.api.compile import list_rough, recompile_like
from fxsplit.api.compiler.compile_group import GradientHook
from fxsplit.api.compiler.compiler import get_mode
from fxsplit.api.pipeline.pipeline import Pipeline
from fxsplit.api.verify.approximations import Compression, HookEffect, measure_compression, measure_hook
from fxsplit.api.verify.compare import Outcome, limit_difference
from fxsplit.api.verify.loss import (
    RefusedDtype,
    TrainingRequest,
    are_equal,
    choose_objective,
    list_tensors,
    refuse_draws,
    refuse_gradients,
)
from fxsplit.api.verify.ranks import Ranks
from fxsplit.api.verify.tally import Tally
from fxsplit.api.verify.trials import Trial
from fxsplit.errors import InputError
from fxsplit.ir.facts.capture.call import Call, flatten_call, parse_example_inputs
from fxsplit.ir.graph import name_pass
from fxsplit.runtime.loss.loss import LossFn
from fxsplit.system.figures import format_count, show
from fxsplit.system.interrupts import lose_no_interrupt
from fxsplit.system.shown import Parts, Shown, Table
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.distributed.remote_tensors import is_remote
from fxsplit.torch_internals.fake.runnable import are_together
from fxsplit.torch_internals.nn.copies import copy_module
from fxsplit.torch_internals.random.generators import keep_torch_generators
from fxsplit.torch_internals.random.no_dropout import disable_dropout
from fxsplit.torch_internals.scopes.undo import restores_all
from fxsplit.torch_internals.tensors.coarse_rounding import find_eps, shake_coarse_parts
from fxsplit.torch_internals.tensors.differences import Difference, widen_dtype
from fxsplit.torch_internals.thread_modes import enable_gradients

STEPS = 2
"""How many steps the copies train for. The second starts from the weights and buffers that the first has changed."""
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.15}
"""By dtype, the relative difference that is always allowed.

Sums in another order differ by rounding, which layers amplify. A lost gradient differs by its own size.
"""
FEW = 10
"""How many values are listed if all agree."""
STEP_SIZE = 0.01
"""The largest change of a weight in a step, as a share of the largest weight."""


@dataclass(frozen=True, repr=False)
class Verification(Shown):
    """The result of verify(): the relative difference of each value, and facts about the pipeline.

    by_nature: names of outputs, gradients and buffers in which the unsplit model itself differs between microbatches
        and the whole batch, for a reason in the model: batch norm, buffers that every call writes, or a loss that
        divides by a count that its graph does not show. These are compared with the model on microbatches. All other
        values are compared with the model on the whole batch.
    dtype: the dtype of the copies; for a model that was compared in its own dtypes, the finest of them.
    compression, gradient_hook, passes: the errors of compressed cuts, of the gradient hook, and of passes that state a
        tolerance, each in one step. All other results are for the same pipeline with exact cuts and sums, and without
        these passes.
    coarse: the rounding of the coarsest dtype that the model computes in; 0.0 if none is coarser than `dtype`.
    loss: the loss that the copies were trained with, in words.
    detached: why the copies were not trained, and only outputs and buffers were compared; empty if they were trained.
    """

    differences: tuple[Difference, ...]
    by_nature: tuple[str, ...]
    dtype: torch.dtype
    front_end: str
    nodes: int
    stages: int
    n_microbatches: int
    compression: Compression | None = None
    gradient_hook: HookEffect | None = None
    coarse: float = 0.0
    loss: str = ""
    detached: str = ""
    passes: Compression | None = None

    @property
    def offending(self) -> tuple[Difference, ...]:
        """The values that differ by more than rounding."""
        allowed = TOLERANCE[self.dtype]
        limits = [limit_difference(allowed, d.rounding, self.coarse) for d in self.differences]
        return tuple(d for d, limit in zip(self.differences, limits, strict=True) if d.broken or not d.value <= limit)

    @property
    def equal(self) -> bool:
        """Whether the pipeline computes what the model computes.

        Values in `by_nature` are judged against the model on microbatches, and all others against the model on the
        whole batch.
        """
        return not self.offending

    @property
    def largest(self) -> float:
        """The largest relative difference."""
        return max((d.value for d in self.differences), default=0.0)

    def summarise(self) -> str:
        """Return in words whether the pipeline equals the model, and how many values were compared."""
        return f"{self._judge()}; {len(self.differences)} values compared, largest difference {self.largest:.1e}"

    def show(self) -> Parts:
        """Yield a row for each output, gradient and buffer, the largest differences first, and the verdict."""
        ordered = sorted(self.differences, key=lambda d: -d.value)
        # If something differs, the whole list shows where it begins.
        listed = ordered if self.offending else ordered[:FEW]
        rows = [(d.kind, f"{d.value:.1e}", d.name) for d in listed]
        yield Table(("what", ">relative difference", "name"), rows)
        if len(listed) < len(ordered):
            yield f"... and {len(ordered) - len(listed)} more, none larger"
        dtype = str(self.dtype).removeprefix("torch.")
        nodes, stages = format_count(self.nodes, "node"), format_count(self.stages, "stage")
        yield f"\n{self._judge()}; {nodes} by {self.front_end}, {stages}"
        how = f"not trained, as it is {self.detached}" if self.detached else f"trained with {self.loss}"
        yield f"{format_count(self.n_microbatches, 'microbatch')}, {dtype}; {how}"
        if self.compression is not None:
            yield f"{self.compression}; all else is of exact cuts"
        if self.gradient_hook is not None:
            yield f"{self.gradient_hook}; all else is of exact sums"
        if self.passes is not None:
            yield f"{self.passes}; all else is without them"
        if self.by_nature:
            yield (
                f"{len(self.by_nature)} values differ from the model on the whole batch by nature, as the unsplit "
                f"model on microbatches does (batch norm, buffers, other counts): {', '.join(self.by_nature[:3])} ..."
            )

    def _judge(self) -> str:
        """Return in words whether the pipeline equals the model."""
        return "equal" if self.equal else f"NOT equal: {len(self.offending)} of {len(self.differences)} differ"


@lose_no_interrupt
@restores_all
@enable_gradients()
def verify(pipe: Pipeline, inputs: Any, more: Mapping[str, Any] | None = None, *, target: Any = None) -> Verification:
    """Train copies of a pipeline and of its model for two steps on one batch, and compare the results.

    inputs: one whole batch, as `compile` takes it; `more` are further keyword arguments.
    target: the target of the batch, as `pipe.step` takes it. With a target the loss is the pipeline's own `loss_fn`.
        Without a target it is the loss that the model returns, or else the sum of squares of all float outputs. `loss`
        of the result says which.

    The copies are in float64, without dropout. A model that refuses float64 is compared in float32, and a model that
    refuses both in its own dtypes. If all weights of a model are frozen, its copies train anyway. Batch norm is not
    deferred. If a pass has made weights of its own, no gradient reaches the model: the copies are then not trained, and
    outputs and buffers are compared after one call. The pipeline and its model stay as they are. Over ranks all of them
    call this, each with the batch of its pipeline, and all return the same result.

    Raises InputError for a model or a loss that draws random numbers besides dropout, for asynchronous schedules, and
    for a target that does not fit. Raises CallError, as compile does, for arguments that do not fit the model's
    forward(), and the model's own errors in its own dtypes.
    """
    if not isinstance(pipe, Pipeline):
        raise InputError(f"verify() is given a {type(pipe).__name__}: give a pipeline, as fxsplit.compile returns it")
    call = parse_example_inputs(inputs, "inputs")
    # It is easy to pass the target by position.
    if not (more is None or isinstance(more, Mapping)):
        raise InputError(
            f"more={show(more)} is no dict of keyword arguments: give a target by name, fxsplit.verify(pipe, x, "
            "target=y), and further arguments of the model in a tuple, (x, mask)"
        )
    call.kwargs.update(more or {})
    ranks = Ranks(pipe.compiler.compile_group)
    with ranks.meet():
        # Checked here, as the unsplit model would raise a TypeError.
        flatten_call(inspect.signature(pipe.model.forward), *call)
        if any(w.is_meta for w in (*pipe.model.parameters(), *pipe.model.buffers())):
            raise InputError(
                f"{type(pipe.model).__name__} has no values yet, it is on the meta device: load its weights"
            )
        asked = TrainingRequest(pipe.compiler.options.loss_fn, target)
        asked.check(ranks)
        model = ranks.copy_whole(pipe.model)
        # float64 keeps rounding some eight digits below any lost gradient; some models run only in float32.
        with disable_dropout(), keep_torch_generators(), refuse_gradients(pipe.model, asked):
            for dtype in (torch.float64, torch.float32):
                try:
                    return _train_copies(pipe, *_convert(dtype, model, call, asked), dtype, ranks)
                except RefusedDtype:
                    continue
            try:
                return _train_copies(pipe, *_convert(None, model, call, asked), _find_finest_dtype(model), ranks)
            except RefusedDtype as refused:
                asked.check_rows(model, call, pipe.compiler.options.chunks)
                # The model's own error, or the loss's, if it is this rank that refuses.
                raise refused.__cause__ or InputError("verify() was refused on another rank, which says why") from None


def _find_finest_dtype(model: nn.Module) -> torch.dtype:
    """Return the floating dtype of the model's parameters that rounds least; torch.float32 if they have none."""
    floats = [p.dtype for p in model.parameters() if p.is_floating_point() or p.is_complex()]
    return min({dtype.to_real() for dtype in floats} & TOLERANCE.keys(), key=find_eps, default=torch.float32)


def _train_copies(
    pipe: Pipeline, model: nn.Module, call: Call, asked: TrainingRequest, dtype: torch.dtype, ranks: Ranks
) -> Verification:
    """Train copies of `model`, whole and as a pipeline, and return how they differ.

    dtype: the finest dtype of model and call. Raises InputError for a model without a float output, or one that draws
    random numbers besides dropout.
    """
    # In float64, constants that were made for float32, such as the smallest number in a mask, may give NaN.
    objective = choose_objective(copy_module(model), call, asked, ranks, finite=dtype is torch.float64)
    ways = _Ways(pipe, objective.loss_fn, ranks.take_common_rows(model, call, pipe.compiler.options.chunks))
    mine = copy_module(model)
    with ways.compile(mine) as split, ExitStack() as stack:
        batch = split.compiler.prepare(get_mode(mine), call)
        stack.enter_context(ranks.lend_counted(split, batch.program))
        trial = Trial.of(call, batch, split, objective, ranks)
        effects = ways.measure(model, trial)
        tally = Tally(trial, split, TOLERANCE[dtype])
        repeats = _train_steps(model, mine, split, trial, tally, dtype)
        found = Verification(
            tally.list_differences(),
            tally.list_natural(),
            dtype,
            split.front_end,
            sum(n.op not in ("placeholder", "output") for n in split.traced.gm.graph.nodes),
            len(split.stages),
            len(batch.rows),
            effects.compression,
            effects.gradient_hook,
            tally.coarse,
            trial.loss,
            batch.program.detached or "",
            effects.passes,
        )
    # No generator shows that a model draws from one of its own, but then it returns other outputs.
    if ranks.any(not (repeats and found.equal)):
        refuse_draws(model, call, objective.outputs, ranks)
    return found


def _train_steps(
    model: nn.Module, mine: nn.Module, split: Pipeline, trial: Trial, tally: Tally, dtype: torch.dtype
) -> bool:
    """Train copies of `model`, and the pipeline `split` of its copy `mine`, and note in `tally` how they differ.

    Returns whether the first step repeats the outputs that the objective was chosen from.
    """
    # Both copies run unsplit. The weights of `shaken` are off by rounding, to measure its effect.
    unsplit, shaken = copy_module(model), copy_module(model)
    _shake_weights(shaken)
    rows, repeats = trial.batch.rows, True

    def shake() -> tuple[Outcome, float]:
        with shake_coarse_parts(dtype) as shaking:
            return trial.run(shaken, rows), shaking.eps

    # Without gradients a second step would be the first one again.
    for step in range(STEPS if trial.trains else 1):
        tally.begin_step(unsplit)
        whole = copy_module(unsplit)
        by_pieces, by_pipeline = trial.run(unsplit, rows), trial.run_pipeline(split)
        by_whole = trial.run(whole, [sum(rows)])
        if step == 0:
            repeats = are_equal(list_tensors(trial.objective.outputs), [*by_whole.outputs.values()])
        tally.compare(by_pipeline, by_pieces, by_whole, shake)
        # All start the next step from the same weights and buffers, those of the unsplit model on microbatches.
        if trial.trains:
            _take_step(unsplit)
            _take_step(shaken)
            _load(mine, unsplit)
    return repeats


class _Effects(NamedTuple):
    """The errors that a pipeline's approximations make in one step; None for one that the pipeline does not use."""

    compression: Compression | None = None
    gradient_hook: HookEffect | None = None
    passes: Compression | None = None


@dataclass(frozen=True, eq=False)
class _Ways:
    """Compiles copies of a model with the options of `pipe`: exactly, or with one of its approximations.

    loss_fn: the loss to train with. example: the call to compile for.
    """

    pipe: Pipeline
    loss_fn: LossFn | None
    example: Call

    def compile(
        self,
        model: nn.Module,
        *,
        compress: str | None = None,
        hook: GradientHook | None = None,
        approximate: bool = False,
    ) -> Pipeline:
        """Return `model` as a pipeline.

        It is exact, unless `compress`, `hook` or `approximate` asks for an approximation.
        """
        made = recompile_like(self.pipe, model, self.loss_fn, compress, hook, approximate=approximate)
        # The first step would show nothing of a hook that begins later.
        if hook is not None and made.compiler.compile_group is not None:
            made.compiler.compile_group.reduction.choice.skip_warm_up()
        made.compiler.program(get_mode(model), self.example)
        return made

    def measure(self, model: nn.Module, trial: Trial) -> _Effects:
        """Return the errors that each approximation in the options makes in one step."""
        compression = effect = passes = None
        options = self.pipe.compiler.options
        rough = ", ".join(map(name_pass, list_rough(self.pipe)))
        if not options.way_to_compress and options.gradient_hook is None and not rough:
            return _Effects()
        exact = trial.run(copy_module(model), trial.batch.rows)
        if how := options.way_to_compress:
            with self.compile(copy_module(model), compress=how) as other:
                compression = measure_compression(how, trial, trial.run_pipeline(other), exact)
        if options.gradient_hook is not None and trial.trains:
            hook: Any = trial.ranks.find_reduction(self.pipe).copy_option()
            with self.compile(copy_module(model), hook=hook) as other:
                effect = measure_hook(other, trial, trial.run_pipeline(other), exact)
        if rough:
            with self.compile(copy_module(model), approximate=True) as other:
                what = "passes that state a tolerance"
                passes = measure_compression(rough, trial, trial.run_pipeline(other), exact, what)
        return _Effects(compression, effect, passes)


def _shake_weights(model: nn.Module) -> None:
    """Change every weight by the rounding of its dtype, alternately up and down, to see how much rounding matters."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.is_floating_point():
                up = torch.arange(weight.numel(), device=weight.device).view(weight.shape) % 2 == 0
                weight.mul_(1.0 + torch.where(up, 1.0, -1.0).to(weight.dtype) * torch.finfo(weight.dtype).eps)


def _convert(
    dtype: torch.dtype | None, model: nn.Module, call: Call, asked: TrainingRequest
) -> tuple[nn.Module, Call, TrainingRequest]:
    """Return a copy of the model, the call and the request, all converted to a dtype (None: in their own dtypes).

    If the weights are on several devices, all is moved to host memory: a model over several devices cannot run unsplit.
    """
    given = [t for t in pytree.tree_leaves(call) if isinstance(t, Tensor)]
    runs_here = are_together([*model.parameters(), *model.buffers()], given)

    def convert(tensor: Tensor) -> Tensor:
        tensor = tensor if runs_here else tensor.cpu()
        if dtype is None:
            return tensor
        # Only floating and complex numbers have gradients, and so a dtype to choose.
        return tensor.to(widen_dtype(tensor, dtype)) if tensor.is_floating_point() or tensor.is_complex() else tensor

    copied = copy_module(model)._apply(convert)
    for module in copied.modules():
        if isinstance(module, RNNBase):
            # Its dropout happens inside one kernel, out of reach of `disable_dropout`.
            module.dropout = 0.0
    frozen = not any(parameter.requires_grad for parameter in copied.parameters())
    for parameter in copied.parameters():
        parameter.grad = None
        # With every parameter frozen there would be no gradient to compare.
        if frozen and parameter.is_floating_point():
            parameter.requires_grad_()

    return copied, pytree.tree_map_only(Tensor, lambda t: convert(t.detach()), call), asked.convert(convert)


def _load(model: nn.Module, like: nn.Module) -> None:
    """Copy this rank's weights and buffers from the model `like` into `model`, and clear the gradients of `model`."""
    others = {**dict(like.named_parameters()), **dict(like.named_buffers())}
    with torch.no_grad():
        for name, weight in (*model.named_parameters(), *model.named_buffers()):
            if not is_remote(weight):
                weight.copy_(others[name])
            weight.grad = None


def _take_step(model: nn.Module) -> None:
    """Move all weights a step down their gradients, then clear the gradients."""
    trained = [(w, w.grad) for w in model.parameters() if w.grad is not None and w.numel()]
    trained = [(w, gradient.to_dense() if gradient.is_sparse else gradient) for w, gradient in trained]
    with torch.no_grad():
        steepest = max((float(gradient.abs().max()) for _, gradient in trained), default=0.0)
        largest = max((float(w.abs().max()) for w, _ in trained), default=0.0)
        # One rate for all weights: a gradient that is only rounding then moves its weight only by rounding.
        for weight, gradient in trained:
            if steepest > 0.0:
                weight.sub_(gradient * (STEP_SIZE * largest / steepest))
            weight.grad = None

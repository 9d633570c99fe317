"""verify(): prove on copies in float64 that a pipeline is its model: outputs, every gradient, every buffer.

Both train for two steps on one batch. A difference counts if it is larger than what a change of the model's weights by
their own rounding makes. Parts that compute in a coarser dtype are off by the rounding of that dtype besides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.rnn import RNNBase

from fxsplit.api.compare import limit_difference, list_differences
from fxsplit.api.compile import recompile_like
from fxsplit.api.compiled import get_mode
from fxsplit.api.compression import Compression, measure_compression
from fxsplit.api.differences import Difference, widen_dtype
from fxsplit.api.hook_effect import HookEffect, measure_hook
from fxsplit.api.pipeline import Pipeline
from fxsplit.api.ranks import GradientHook
from fxsplit.api.verify_ranks import Ranks
from fxsplit.api.verify_trials import Key, Neutral, Trial, clone_call
from fxsplit.errors import InputError
from fxsplit.ir.facts.call import Call, parse_example_inputs
from fxsplit.ir.interrupts import lose_no_interrupt
from fxsplit.runtime.loss import LossFn, find_own_loss, sum_squares
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.away import is_away
from fxsplit.torch_internals.coarse_rounding import shake_coarse_parts
from fxsplit.torch_internals.containers import to_plain_outputs
from fxsplit.torch_internals.copies import copy_module
from fxsplit.torch_internals.fake_weights import are_together
from fxsplit.torch_internals.generators import keep_torch_generators
from fxsplit.torch_internals.interpret import preserve
from fxsplit.torch_internals.no_dropout import disable_dropout
from fxsplit.torch_internals.undo import leave_no_trace

STEPS = 2
"""The second step starts from weights and buffers that the first one has changed."""
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Sums in another order differ by rounding, which layers amplify; a lost gradient differs by its own size."""
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

    Where cuts are compressed, or a gradient hook adds gradients over ranks, all this is of the same pipeline with exact
    cuts and sums. `compression` and `gradient_hook` are what these change in one step.

    `coarse` is the rounding of the coarsest dtype that the model computes in, 0.0 if none is coarser than `dtype`.
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

    @property
    def offending(self) -> tuple[Difference, ...]:
        """What differs by more than rounding."""
        allowed = TOLERANCE[self.dtype]
        return tuple(d for d in self.differences if not d.value <= limit_difference(allowed, d.rounding, self.coarse))

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
    Neither the pipeline nor its model are changed. Over ranks all of them call this, each with the batch of its
    pipeline, and all return the same. Raises InputError for a model that draws random numbers otherwise, and for
    asynchronous schedules, and for a model that runs in neither dtype, as one with parts in several dtypes may.
    """
    call = parse_example_inputs(inputs)
    call.kwargs.update(more or {})
    ranks = Ranks(pipe.compiler.team)
    with ranks.meet():
        if any(w.is_meta for w in (*pipe.model.parameters(), *pipe.model.buffers())):
            raise InputError(
                f"{type(pipe.model).__name__} has no values yet, it is on the meta device: load its weights"
            )
        model = ranks.copy_whole(pipe.model)
        # float64 keeps rounding some eight digits below any gradient that is lost; some models know float32 alone.
        with disable_dropout(), keep_torch_generators():
            try:
                return _train_copies(pipe, *_convert(torch.float64, model, call), torch.float64, ranks)
            except _Refused:
                pass
            try:
                return _train_copies(pipe, *_convert(torch.float32, model, call), torch.float32, ranks)
            except _Refused as refused:
                # The model's own error where it is this rank that refuses.
                raise _explain_refusal(model, refused) from refused.__cause__


class _Refused(Exception):
    """The model does not run in one dtype for all weights and inputs."""


def _explain_refusal(model: nn.Module, refused: _Refused) -> InputError:
    """Return the error for a model that runs neither in float64 nor in float32."""
    own = sorted({str(w.dtype).removeprefix("torch.") for w in model.parameters() if w.is_floating_point()})
    cause = refused.__cause__
    why = f" ({type(cause).__name__}: {str(cause).strip().splitlines()[0]})" if cause and str(cause).strip() else ""
    return InputError(
        f"{type(model).__name__} runs neither in float64 nor in float32{why}, and verify() compares in one of them for "
        f"all weights and inputs; the weights are in {', '.join(own) or 'no floating dtype'}. Cast to the dtype of a "
        "weight in forward(), as in x.to(self.weight.dtype), and not to one that is written out"
    )


def _train_copies(pipe: Pipeline, model: nn.Module, call: Call, dtype: torch.dtype, ranks: Ranks) -> Verification:
    """Train copies of `model` side by side, and return how they differ; model and call are in `dtype`.

    Raises InputError for a model without a float output, or one that draws random numbers besides dropout.
    """
    # The copies of `model` run unsplit, and one has weights off by rounding, to tell what rounding makes.
    unsplit, shaken = copy_module(model), copy_module(model)
    _shake_weights(shaken)
    loss_fn = _choose_loss(unsplit, call, dtype, ranks)
    # Largest over all steps, by kind and name: the pipeline's differences, and those that rounding makes.
    found: dict[Key, float] = {}
    rounding: dict[Key, float] = {}
    natural: dict[Key, float] = {}
    coarse = 0.0
    ways = _Ways(pipe, loss_fn, ranks.take_common_rows(model, call, pipe.compiler.options.chunks))
    mine = copy_module(model)
    with ways.compile(mine) as split:
        batch = split.compiler.prepare(get_mode(mine), call)
        trial = Trial.of(call, batch, split, loss_fn, ranks)
        effects = ways.measure(model, trial)
        for _ in range(STEPS):
            neutral, whole = Neutral(trial, unsplit, 1e3 * TOLERANCE[dtype]), copy_module(unsplit)
            by_pieces, by_pipeline = trial.run(unsplit, batch.rows), trial.run_pipeline(split)
            by_whole = trial.run(whole, [sum(batch.rows)])
            with shake_coarse_parts(dtype) as shaking:
                by_shaken = trial.run(shaken, batch.rows)
            coarse = max(coarse, *ranks.merge({("rounding", "coarse"): shaking.eps}).values())
            _keep_largest(rounding, list_differences(by_shaken, by_pieces, coarse))
            # What microbatches leave as it is must be that of the whole batch, which the model has without fxsplit.
            apart = neutral.find_apart(by_pieces, by_whole, rounding, coarse)
            for one in list_differences(by_pipeline, ranks.keep_own(by_pieces, split), coarse):
                if apart.get((one.kind, one.name)) != "wrong":
                    _keep_largest(found, [one])
            for one in list_differences(by_pipeline, ranks.keep_own(by_whole, split), coarse):
                if apart.get((one.kind, one.name)) == "wrong":
                    _keep_largest(found, [one])
            natural |= dict.fromkeys((key for key, why in apart.items() if why == "nature"), 1.0)
            # All start the next step from the same weights and buffers, those of the unsplit model on microbatches.
            _take_step(unsplit)
            _take_step(shaken)
            _load(mine, unsplit)
        return Verification(
            _join(ranks.merge(found), ranks.merge(rounding)),
            tuple(f"output {name}" if kind == "output" else name for kind, name in ranks.merge(natural)),
            dtype,
            split.front_end,
            sum(n.op not in ("placeholder", "output") for n in split.traced.gm.graph.nodes),
            len(split.stages),
            len(batch.rows),
            *effects,
            coarse,
        )


def _join(found: Mapping[Key, float], rounding: Mapping[Key, float]) -> tuple[Difference, ...]:
    """Return what differs, with what rounding makes of it."""
    return tuple(Difference(*key, value, rounding.get(key, 0.0)) for key, value in found.items())


def _choose_loss(model: nn.Module, call: Call, dtype: torch.dtype, ranks: Ranks) -> LossFn | None:
    """Return the loss to train with, None for the model's own; raises _Refused or InputError for a model of no use."""
    refused: _Refused | None = None
    first = None
    try:
        first = _run_without_trace(model, call, dtype)
    except _Refused as error:
        refused = error
    # Ranks have other batches, and go on in one dtype.
    if ranks.any(refused is not None):
        raise refused or _Refused
    if not all(_are_equal(first, _run_without_trace(model, call, dtype)) for _ in range(RUNS)):
        raise InputError(
            f"{type(model).__name__} draws random numbers besides dropout, so no two runs of it are equal: verify it "
            "with such rates at 0, or in evaluation, pipe.eval()"
        )
    if not any(isinstance(t, Tensor) and t.is_floating_point() for t in pytree.tree_leaves(to_plain_outputs(first))):
        raise InputError(f"{type(model).__name__} returns no floating-point tensor, so it has no gradients to compare")
    return sum_squares if find_own_loss(first) is None else None


class _Effects(NamedTuple):
    """What is asked for by options changes in one step."""

    compression: Compression | None = None
    gradient_hook: HookEffect | None = None


@dataclass(frozen=True, eq=False)
class _Ways:
    """Compiles copies of a model as `pipe` is compiled, for one example: exactly, and in the ways that approximate."""

    pipe: Pipeline
    loss_fn: LossFn | None
    example: Call

    def compile(self, model: nn.Module, *, compress: str | None = None, hook: GradientHook | None = None) -> Pipeline:
        """Return a copy of the model as a pipeline, whose cuts and sums are exact unless they are to be otherwise."""
        made = recompile_like(self.pipe, model, self.loss_fn, compress, hook)
        # Of a hook that begins later the first step would say nothing.
        if hook is not None and made.compiler.team is not None:
            made.compiler.team.summing.choice.skip_warm_up()
        made.compiler.program(get_mode(model), self.example)
        return made

    def measure(self, model: nn.Module, trial: Trial) -> _Effects:
        """Return what compressed cuts and a gradient hook change in one step, each where it is asked for."""
        compression = effect = None
        options = self.pipe.compiler.options
        if not options.way_to_compress and options.gradient_hook is None:
            return _Effects()
        exact = trial.run(copy_module(model), trial.batch.rows)
        if how := options.way_to_compress:
            with self.compile(copy_module(model), compress=how) as other:
                compression = measure_compression(how, trial.run_pipeline(other), exact, trial.ranks)
        if options.gradient_hook is not None:
            hook: Any = trial.ranks.find_summing(self.pipe).copy_option()
            with self.compile(copy_module(model), hook=hook) as other:
                effect = measure_hook(other, trial.run_pipeline(other), exact, trial.ranks, trial.weight)
        return _Effects(compression, effect)


def _keep_largest(found: dict[Key, float], more: Sequence[Difference]) -> None:
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

    copied = copy_module(model)._apply(convert)
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
    """Return what the model returns, without a trace on it; raises _Refused if it does not run in a dtype."""
    try:
        with torch.no_grad(), preserve(model):
            # A new seed each time, or a model that draws would draw the same. preserve() restores the generator.
            torch.manual_seed(torch.seed())
            own, named = clone_call(call)
            outputs = model(*own, **named)
    except RuntimeError as error:
        raise _Refused from error
    finite = all(bool(t.isfinite().all()) for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor))
    # Constants made for float32, such as a mask of its least number, may give no numbers in float64.
    if dtype is torch.float64 and not finite:
        raise _Refused
    return outputs


def _are_equal(a: Any, b: Any) -> bool:
    """Return whether two outputs are equal; a value that is no number equals another one."""
    pairs = zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
    return all(torch.equal(torch.nan_to_num(x), torch.nan_to_num(y)) for x, y in pairs if isinstance(x, Tensor))


def _load(model: nn.Module, like: nn.Module) -> None:
    """Give the weights of a model the values of another one, and no gradient; other ranks have some of them."""
    others = {**dict(like.named_parameters()), **dict(like.named_buffers())}
    with torch.no_grad():
        for name, weight in (*model.named_parameters(), *model.named_buffers()):
            if not is_away(weight):
                weight.copy_(others[name])
            weight.grad = None


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

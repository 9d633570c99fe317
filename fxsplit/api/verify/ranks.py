"""Let ranks verify one pipeline together: each rank compares its own stages, and all get the same result.

Every rank runs the unsplit model on the batch of its pipeline, so it holds all weights meanwhile. The gradients of
pipelines side by side are added exactly, without any hook. A pipeline in one process has nothing to share.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxsplit.api.compiler.compile_group import CompileGroup
from fxsplit.api.pipeline.pipeline import Pipeline
from fxsplit.api.verify.compare import Outcome
from fxsplit.ir.facts.capture.call import Call, Inputs
from fxsplit.ir.facts.capture.chunks import Chunks
from fxsplit.runtime.program import Program
from fxsplit.runtime.ranks.gradients.batch_share import BatchShare
from fxsplit.runtime.ranks.gradients.reduction import GradientReduction
from fxsplit.runtime.ranks.weight_placement import list_named
from fxsplit.runtime.ranks.world.messages import begin_collective
from fxsplit.runtime.ranks.world.world import COMPILE_LIMIT_S
from fxsplit.torch_internals.distributed.remote_parameters import bring_back
from fxsplit.torch_internals.distributed.remote_tensors import is_remote
from fxsplit.torch_internals.nn.copies import copy_module
from fxsplit.torch_internals.tensors.differences import widen
from fxsplit.torch_internals.tensors.squares import Squares

WHAT = "verify()"


class Ranks:
    """The ranks of one pipeline, which all make the same calls in the same order.

    Without a group: this process only.
    """

    def __init__(self, compile_group: CompileGroup | None) -> None:
        self._compile_group = compile_group

    @contextmanager
    def meet(self) -> Iterator[None]:
        """Run the block on all ranks together. Raises RanksDiffer if a rank makes another call than verify()."""
        if self._compile_group is None:
            yield
            return
        with self._compile_group.placement.agree(WHAT, limit_s=COMPILE_LIMIT_S, side_by_side=True):
            yield

    def copy_whole(self, model: nn.Module) -> nn.Module:
        """Return a model with all weights: the model itself, or over ranks a copy that has other ranks' weights too."""
        if self._compile_group is None:
            return model
        # A copy: the pipeline's own model keeps only the weights of this rank.
        copied = copy_module(model)
        named = dict(list_named(copied))
        for name, value in self._compile_group.placement.gather_values(named):
            if is_remote(named[name]):
                bring_back(named[name], value.to(named[name].device))
        return copied

    @contextmanager
    def lend_counted(self, pipe: Pipeline, program: Program) -> Iterator[None]:
        """During the block, give all ranks the buffers that divisors of losses come from, such as class weights."""
        compile_group = pipe.compiler.compile_group
        counted = {} if compile_group is None else program.list_counted()
        with compile_group.placement.lend(counted) if compile_group is not None and counted else nullcontext():
            yield

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is True on any rank. All ranks call this."""
        if self._compile_group is None:
            return flag
        return any(map(int, self._compile_group.world.whole.gather(torch.tensor([int(flag)]), WHAT)))

    def merge(self, found: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
        """Return, for each key, the largest value that any rank has found."""
        if self._compile_group is None:
            return dict(found)
        # Each rank has compared the gradients of its stages, and all ranks have compared outputs.
        merged: dict[tuple[str, str], float] = {}
        own = json.dumps([[*key, value] for key, value in found.items()])
        for text in self._compile_group.world.whole.gather_texts(own, WHAT):
            for kind, name, value in json.loads(text):
                merged[kind, name] = max(merged.get((kind, name), 0.0), value)
        return merged

    def merge_squares(self, squares: Squares) -> Squares:
        """Return the squared norms of all differences, by name of the tensor. Each rank has computed some of them."""
        if self._compile_group is None:
            return squares
        texts = self._compile_group.world.gather_texts(json.dumps(squares), WHAT)
        return {name: one for text in texts for name, one in json.loads(text).items()}

    # The part of the model that this rank's pipeline has

    def keep_own(self, outcome: Outcome, pipe: Pipeline) -> Outcome:
        """Return the outcome without the weights that `pipe` has on other ranks: each rank compares only its own."""
        if self._compile_group is None:
            return outcome
        away = {name for name, weight in list_named(pipe.model) if is_remote(weight)}

        def keep(values: Mapping[str, Tensor | None]) -> Mapping[str, Tensor | None]:
            return {name: value for name, value in values.items() if name not in away}

        return Outcome(outcome.outputs, keep(outcome.gradients), keep(outcome.buffers))

    # Pipelines side by side

    def find_reduction(self, pipe: Pipeline) -> GradientReduction:
        """Return the object that adds the gradients of a pipeline over these ranks."""
        compile_group = pipe.compiler.compile_group
        assert compile_group is not None, "a gradient hook is for ranks"
        return compile_group.reduction

    @property
    def _are_side_by_side(self) -> bool:
        return self._compile_group is not None and len(self._compile_group.world.rows) > 1

    def take_common_rows(self, model: nn.Module, call: Call, chunks: Chunks | None) -> Call:
        """Return a call with only its first rows, as many as every rank has: all ranks compile for one shape."""
        if self._compile_group is None or not self._are_side_by_side:
            return call
        # The program runs any number of rows, but ranks compare the shapes that they compile with.
        inputs, tensors = Inputs.of(model, *call, chunks)
        rows = inputs.count_rows(tensors)
        least = min(map(int, self._compile_group.world.whole.gather(torch.tensor([rows]), WHAT)))
        return call if least == rows else inputs.make_call(inputs.take_rows(tensors, least))

    def weigh(self, pipe: Pipeline, find_batch_share: Callable[[], BatchShare]) -> float:
        """Return the weight of this pipeline's loss in the loss of all pipelines side by side; 1 for a single pipeline.

        find_batch_share: returns this pipeline's share of that loss. It is called only if there are several pipelines.
        """
        if not self._are_side_by_side:
            return 1.0
        weight, _ = self.find_reduction(pipe).data_parallel.weigh(WHAT, find_batch_share())
        assert weight is not None, "nothing is open"
        return weight

    def add(self, model: nn.Module, outcome: Outcome, weight: float) -> Outcome:
        """Return an outcome whose gradients are summed over all pipelines, each times its pipeline's weight.

        The sums also replace the `.grad` of the model's parameters.
        """
        if self._compile_group is None or not self._are_side_by_side:
            return outcome
        # Which parameters have a gradient may depend on the rows of a pipeline.
        flags = torch.tensor([int(g is not None) for g in outcome.gradients.values()], dtype=torch.uint8)
        self._all_reduce(flags, dist.ReduceOp.MAX)
        weights = dict(model.named_parameters())
        sums: dict[str, Tensor | None] = {}
        for (name, own), there in zip(outcome.gradients.items(), flags.tolist(), strict=True):
            sums[name] = self._add(weights[name], own, weight) if there else None
            weights[name].grad = sums[name]
        return Outcome(outcome.outputs, sums, outcome.buffers)

    def _add(self, like: Tensor, own: Tensor | None, weight: float) -> Tensor:
        """Return the sum of one gradient over all pipelines, with the device and dtype of `like`.

        `own`: this pipeline's.
        """
        # With weight 0 the gradient may be NaN, so it is left out.
        total = widen(torch.zeros_like(like)) if own is None or not weight else widen(own) * weight
        # gloo adds no complex numbers.
        plain: Any = torch.view_as_real(total) if total.is_complex() else total
        self._all_reduce(plain, dist.ReduceOp.SUM)
        return total.to(like.device, like.dtype)

    def _all_reduce(self, tensor: Tensor, op: Any) -> None:
        """Reduce a tensor in host memory over the ranks that run the same stages in other pipelines."""
        assert self._compile_group is not None, "there are several pipelines"
        world = self._compile_group.world
        options = dist.AllreduceOptions()
        options.reduceOp = op
        work = begin_collective([tensor], world.dp_group.allreduce, [tensor], options)
        world.wait(work, f"the other pipelines at {WHAT}")

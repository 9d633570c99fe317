"""Compare a pipeline over ranks with the same plan over threads of one process, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxsplit
from fxsplit.api.pipeline.pipeline import Pipeline
from tests.support.models import FAST

Step = Callable[[Pipeline, int], Any]
"""Runs step number i of a pipeline, and returns values to compare."""
Check = Callable[[Pipeline, int, Any], None]
"""Checks a pipeline after step number i, and the step's result."""


class State(NamedTuple):
    """The parameters of a pipeline's model, their gradients, and its buffers, by name."""

    weights: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]

    @classmethod
    def of(cls, pipe: Pipeline) -> State:
        """Return the present state of a pipeline."""
        weights = dict(pipe.model.named_parameters())
        gradients = {name: weight.grad for name, weight in weights.items()}
        return cls({name: w.detach() for name, w in weights.items()}, gradients, dict(pipe.model.named_buffers()))


def compile_both(model: nn.Module, n: int, options: dict[str, Any]) -> tuple[Pipeline, Pipeline]:
    """Return a model over ranks, and a copy of it over threads, with one plan."""
    other = copy.deepcopy(model)
    over_ranks = _compile_over_ranks(model, options)
    return over_ranks, _compile_over_threads(other, n, options, over_ranks)


def _compile_over_ranks(model: nn.Module, options: dict[str, Any]) -> Pipeline:
    return fxsplit.compile(model, "world", **{"passes": FAST, "n_microbatches": 4, **options})


def _compile_over_threads(model: nn.Module, n: int, options: dict[str, Any], over_ranks: Pipeline) -> Pipeline:
    """Return a model over threads, with the plan of the pipeline over ranks."""
    options = {"passes": FAST, "n_microbatches": 4, **options}
    over_threads = fxsplit.compile(model, ["cpu"] * n, **options, costs=over_ranks.costs)
    split = [[list(stage.nodes) for stage in pipe.plan.stages] for pipe in (over_ranks, over_threads)]
    assert split[0] == split[1], "the planner makes one plan of one profile"
    return over_threads


def list_own(pipe: Pipeline) -> set[str]:
    """Return the names of the weights that live on this rank."""
    compiled = pipe.compiler.get_compiled("train") or pipe.compiler.get_compiled("eval")
    assert compiled is not None
    program = compiled.program
    own = {id(weight) for weight, _ in program.list_placed()}
    return {name for name, w in (*pipe.model.named_parameters(), *pipe.model.named_buffers()) if id(w) in own}


def assert_alike(over_ranks: Pipeline, expected: State, exact: bool = True) -> int:
    """Compare gradients and buffers of this rank's weights; return how many gradients there were."""
    own, found = list_own(over_ranks), State.of(over_ranks)
    count = 0
    for name in own & found.weights.keys():
        mine, other = found.gradients[name], expected.gradients[name]
        assert (mine is None) == (other is None), f"{name} has a gradient in one of two"
        if mine is not None and other is not None:
            count += 1
            _assert_equal(mine, other, f"gradient of {name}", exact)
        _assert_equal(found.weights[name], expected.weights[name], name, exact)
    for name in own & found.buffers.keys():
        _assert_equal(found.buffers[name], expected.buffers[name], name, exact)
    return count


def assert_same(found: Any, expected: Any, exact: bool = True) -> None:
    """Compare the results of two steps."""
    if isinstance(found, Tensor):
        _assert_equal(found.detach(), expected.detach(), "a result", exact)
    elif isinstance(found, dict):
        assert found.keys() == expected.keys()
        for key in found:
            assert_same(found[key], expected[key], exact)
    elif isinstance(found, (tuple, list)):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other, exact)
    else:
        assert found == expected


def _assert_equal(a: Tensor, b: Tensor, what: str, exact: bool) -> None:
    assert a.dtype == b.dtype and a.shape == b.shape, what
    a, b = a.to_dense(), b.to_dense()
    if exact:
        assert torch.equal(a, b), f"{what} differs by {(a.double() - b.double()).abs().max()}"
    else:
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda text: f"{what}: {text}")


def compare(
    model: nn.Module,
    n: int,
    step: Step,
    options: dict[str, Any],
    steps: int = 3,
    exact: bool = True,
    check: Check = lambda pipe, i, found: None,
) -> int:
    """Run the same steps over ranks and over threads, and compare results, gradients and weights.

    Rank 0 runs the pipeline over threads, and tells the other ranks what comes out of it. After each step over ranks,
    `check` is called with its result.
    """
    first, other = dist.get_rank() == 0, copy.deepcopy(model)
    count = 0
    with ExitStack() as stack:
        over_ranks = stack.enter_context(_compile_over_ranks(model, options))
        over_threads = stack.enter_context(_compile_over_threads(other, n, options, over_ranks)) if first else None
        for i in range(steps):
            torch.manual_seed(i)
            found = step(over_ranks, i)
            told: list[Any] = [None]
            if over_threads is not None:
                torch.manual_seed(i)
                result = pytree.tree_map_only(Tensor, Tensor.detach, step(over_threads, i))
                told = [(result, State.of(over_threads))]
            dist.broadcast_object_list(told)
            expected, state = told[0]
            assert_same(found, expected, exact)
            count += assert_alike(over_ranks, state, exact)
            check(over_ranks, i, found)
    return count


def make_optimizers(make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> Callable[[nn.Module], None]:
    """Return a function that applies the gradients of a model's last step, by an optimizer for each model.

    Before the first step it only makes the optimizer.
    """
    made: dict[nn.Module, torch.optim.Optimizer] = {}

    def apply_gradients(model: nn.Module) -> None:
        if model not in made:
            made[model] = make(model.parameters())
            return
        made[model].step()
        made[model].zero_grad()

    return apply_gradients


def describe(pipe: Pipeline) -> Sequence[int]:
    """Return how many nodes each stage has."""
    return [len(stage.nodes) for stage in pipe.plan.stages]

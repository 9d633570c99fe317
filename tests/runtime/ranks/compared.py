"""Compare a pipeline over ranks with the same plan over threads of one process, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fxsplit
from fxsplit.api.pipeline.pipeline import Pipeline
from tests.support.models import FAST

Step = Callable[[Pipeline, int], Any]
"""Runs step number i of a pipeline, and returns values to compare."""


def compile_both(model: nn.Module, n: int, options: dict[str, Any]) -> tuple[Pipeline, Pipeline]:
    """Return a model over ranks, and a copy of it over threads, with one plan."""
    mine, other = model, copy.deepcopy(model)
    options = {"passes": FAST, "n_microbatches": 4, **options}
    over_ranks = fxsplit.compile(mine, "world", **options)
    over_threads = fxsplit.compile(other, ["cpu"] * n, **options, costs=over_ranks.costs)
    split = [[list(stage.nodes) for stage in pipe.plan.stages] for pipe in (over_ranks, over_threads)]
    assert split[0] == split[1], "the planner makes one plan of one profile"
    return over_ranks, over_threads


def list_own(pipe: Pipeline) -> set[str]:
    """Return the names of the weights that live on this rank."""
    compiled = pipe.compiler.get_compiled("train") or pipe.compiler.get_compiled("eval")
    assert compiled is not None
    program = compiled.program
    own = {id(weight) for weight, _ in program.list_placed()}
    return {name for name, w in (*pipe.model.named_parameters(), *pipe.model.named_buffers()) if id(w) in own}


def assert_alike(over_ranks: Pipeline, over_threads: Pipeline, exact: bool = True) -> int:
    """Compare gradients and buffers of this rank's weights; return how many gradients there were."""
    own = list_own(over_ranks)
    others = dict(over_threads.model.named_parameters())
    count = 0
    for name, mine in over_ranks.model.named_parameters():
        if name not in own:
            continue
        other = others[name]
        assert (mine.grad is None) == (other.grad is None), f"{name} has a gradient in one of two"
        if mine.grad is not None and other.grad is not None:
            count += 1
            _assert_equal(mine.grad, other.grad, f"gradient of {name}", exact)
        _assert_equal(mine.detach(), other.detach(), name, exact)
    for name, buffer in over_ranks.model.named_buffers():
        if name in own:
            _assert_equal(buffer, dict(over_threads.model.named_buffers())[name], name, exact)
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


def compare(model: nn.Module, n: int, step: Step, options: dict[str, Any], steps: int = 3, exact: bool = True) -> int:
    """Run the same steps over ranks and over threads, and compare results, gradients and weights."""
    over_ranks, over_threads = compile_both(model, n, options)
    count = 0
    with over_ranks, over_threads:
        for i in range(steps):
            results = []
            for pipe in (over_ranks, over_threads):
                torch.manual_seed(i)
                results.append(step(pipe, i))
            assert_same(results[0], results[1], exact)
            count += assert_alike(over_ranks, over_threads, exact)
    return count


def describe(pipe: Pipeline) -> Sequence[int]:
    """Return how many nodes each stage has."""
    return [len(stage.nodes) for stage in pipe.plan.stages]

"""Check the gradients of a graph: one that computes the right outputs may still have lost a backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxsplit.errors import TraceError
from fxsplit.frontend.check.outputs import Runner
from fxsplit.ir.facts.call import Inputs
from fxsplit.torch_internals.fake_weights import has_values
from fxsplit.torch_internals.grad_leaves import watch_hooks
from fxsplit.torch_internals.interpret import preserve

TOLERANCE = 1e-5
"""The same operators in the same order give the same bits; only non-deterministic kernels need any tolerance."""

LOST = (
    "the graph of {} has another gradient for {!r} than the model: tracing lost a backward, as "
    "checkpoint(use_reentrant=True), an autograd.Function or a backward hook has its own; keep the module that has it "
    "whole, fxsplit.leaf('its.path')"
)


def check_gradients(model: nn.Module, both: nn.ModuleList, inputs: Inputs, tensors: Sequence[Tensor]) -> bool:
    """Raise TraceError unless the graph has the model's gradients, for the sum of squares of all outputs.

    Those of the inputs too, and of what is frozen now and may be thawed. `both` are the model and the graph, on one
    device. A model that cannot itself run backward is not asked. Returns whether the graph puts hooks on activations.
    """
    mine, traced = both[0], both[1]
    assert isinstance(traced, fx.GraphModule)
    named = {name: p for name, p in mine.named_parameters() if p.is_floating_point()}

    hooked: list[Tensor] = []

    def own(*given: Tensor) -> Any:
        call = inputs.call(given)
        return mine.forward(*call.args, **call.kwargs)

    for thawed in (True, False):
        trained = {name: p for name, p in named.items() if thawed or p.requires_grad}
        with _wanting(list(trained.values())):
            wanted = _gradients(both, own, tensors, list(trained.values()), thawed, or_none=True)
            if wanted is None:
                continue
            with watch_hooks(hooked.append):
                run = Runner(traced).run
                found = _gradients(both, run, tensors, list(trained.values()), thawed, or_none=thawed)
        if found is None:
            continue  # what nobody wants now cannot be had: not a reason to refuse
        names = [*trained, *(f"argument {s.name}" for s in inputs.specs)]
        _compare(model, names, wanted, found)
        return bool(hooked)
    return False


def _compare(model: nn.Module, names: list[str], wanted: Sequence[Any], found: Sequence[Any]) -> None:
    """Raise TraceError for the first gradient that differs."""
    if not all(has_values(g) for g in wanted if g is not None):
        lost = (name for name, a, b in zip(names, wanted, found, strict=False) if a is not None and b is None)
        if name := next(lost, None):
            raise TraceError(LOST.format(type(model).__name__, name))
        return
    wanted, found = ([g.to_dense() if g is not None and g.is_sparse else g for g in each] for each in (wanted, found))
    largest = max((float(torch.nan_to_num(g).abs().max()) for g in wanted if g is not None and g.numel()), default=0.0)
    for name, a, b in zip(names, wanted, found, strict=False):
        if a is None and b is None:
            continue
        a, b = torch.zeros_like(b) if a is None else a, torch.zeros_like(a) if b is None else b
        if not torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE * largest, equal_nan=True):
            raise TraceError(LOST.format(type(model).__name__, name))


@contextmanager
def _wanting(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Let parameters want gradients inside the block."""
    frozen = [p for p in parameters if not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_()
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _gradients(
    both: nn.ModuleList,
    run: Callable[..., Any],
    tensors: Sequence[Tensor],
    trained: Sequence[Tensor],
    of_inputs: bool,
    or_none: bool = False,
) -> Sequence[Tensor | None] | None:
    """Return the gradients of `trained` and `of_inputs`; None where nothing depends on them, or `or_none` it fails."""
    with preserve(both), torch.enable_grad():
        leaves = [t.detach().clone().requires_grad_(of_inputs and t.is_floating_point()) for t in tensors]
        try:
            outputs = [o for o in pytree.tree_leaves(run(*(leaf.clone() for leaf in leaves))) if _is_trained(o)]
            if not outputs:
                return None if or_none else [None] * (len(trained) + len(leaves))
            ends = [*trained, *(leaf for leaf in leaves if leaf.requires_grad)]
            found = iter(torch.autograd.grad(sum(o.square().sum() for o in outputs), ends, allow_unused=True))
        except (RuntimeError, TraceError):
            if or_none:
                return None
            raise
    return [*(next(found) for _ in trained), *(next(found) if leaf.requires_grad else None for leaf in leaves)]


def _is_trained(value: Any) -> bool:
    """Return whether a gradient returns for an output."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad

"""Check the gradients of a graph: one that computes the right outputs may still have lost a backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxsplit.errors import TraceError
from fxsplit.inputs import Inputs
from fxsplit.observe import preserved

TOLERANCE = 1e-5
"""The same operators in the same order give the same bits; only non-deterministic kernels need any tolerance."""


def check_gradients(model: nn.Module, both: nn.ModuleList, inputs: Inputs, tensors: Sequence[Tensor]) -> None:
    """Raise TraceError unless the graph has the model's gradients, for the sum of squares of all outputs.

    `both` are the model and the graph, on one device. A model that cannot itself run backward is not asked.
    """
    mine, traced = both[0], both[1]
    assert isinstance(traced, fx.GraphModule)
    trained = {name: p for name, p in mine.named_parameters() if p.requires_grad}

    def own(*given: Tensor) -> Any:
        call = inputs.call(given)
        return mine.forward(*call.args, **call.kwargs)

    wanted = _gradients(both, own, tensors, list(trained.values()), or_none=True)
    if wanted is None:
        return
    found = _gradients(both, fx.Interpreter(traced).run, tensors, list(trained.values()))
    assert found is not None
    largest = max((float(torch.nan_to_num(g).abs().max()) for g in wanted if g is not None and g.numel()), default=0.0)
    for name, a, b in zip(trained, wanted, found, strict=True):
        a, b = (torch.zeros_like(trained[name]) if g is None else g for g in (a, b))
        if not torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE * largest, equal_nan=True):
            raise TraceError(
                f"the graph of {type(model).__name__} has another gradient for {name!r} than the model: tracing lost a "
                "backward, as checkpoint(use_reentrant=True), an autograd.Function or a backward hook has its own; "
                "keep the module that has it whole, fxsplit.leaf('its.path')"
            )


def _gradients(
    both: nn.ModuleList,
    run: Callable[..., Any],
    tensors: Sequence[Tensor],
    trained: Sequence[Tensor],
    or_none: bool = False,
) -> Sequence[Tensor | None] | None:
    """Return the gradients of `trained`; None where nothing depends on them, or where the backward fails `or_none`."""
    with preserved(both), torch.enable_grad():
        outputs = [o for o in pytree.tree_leaves(run(*(t.detach().clone() for t in tensors))) if _is_trained(o)]
        if not outputs:
            return None if or_none else [None] * len(trained)
        try:
            return torch.autograd.grad(sum(o.square().sum() for o in outputs), trained, allow_unused=True)
        except RuntimeError:
            if or_none:
                return None
            raise


def _is_trained(value: Any) -> bool:
    """Return whether a gradient returns for an output."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad

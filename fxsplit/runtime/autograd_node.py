"""Join the pipeline to the caller's autograd graph: one node, whose backward is the pipelined backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxsplit.errors import BackwardError
from fxsplit.torch_internals.thread_modes import refuse_foreign_modes

Backward = Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]]
"""From the gradients of the outputs to those of the inputs and parameters; None where there is no gradient."""


class PipelineFunction(torch.autograd.Function):
    """The pipeline as one operator of autograd.

    Its inputs are the differentiable inputs of the batch and all parameters, so autograd itself adds their gradients to
    `.grad` and runs their hooks.
    """

    @staticmethod
    def forward(ctx: Any, backward: Backward, outputs: list[Tensor], wanted: list[bool], *inputs: Tensor) -> Any:
        """Return `outputs`, which the pipeline has computed already, as functions of `inputs`.

        `wanted` says which outputs want a gradient.
        """
        ctx.backward_of_pipeline = backward
        # An output that the loss does not use gets None. Zeros would go backward through all stages.
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(o for o, w in zip(outputs, wanted, strict=True) if not w))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Run the pipelined backward. Raises BackwardError where it should itself be differentiated."""
        # Autograd turns grad mode on in a backward only for create_graph=True.
        if torch.is_grad_enabled():
            raise BackwardError(
                "a pipeline's backward cannot be differentiated again (create_graph=True): compute a gradient penalty "
                "or a Hessian on the unsplit model, which shares the pipeline's parameters"
            )
        refuse_foreign_modes()
        # Autograd wants a result for each argument of forward; the first three are no tensors.
        return (None, None, None, *ctx.backward_of_pipeline(gradients))

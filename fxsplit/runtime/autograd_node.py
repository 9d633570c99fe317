"""Join the pipeline to the caller's autograd graph: one node with the pipelined backward.

    inputs --------------------.
    stage 0's leaves -- node --+-- PipelineFunction -- outputs -- the caller's loss
    stage 1's leaves -- node --'

Each stage has a node of its own for its parameters. Autograd runs a node's backward on the stream that was current when
the node was made. Here that is the stage's own stream, on which the stage has computed its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxsplit.errors import BackwardError
from fxsplit.runtime.stage.streams import DeviceStream, hand_over, make_caller_wait
from fxsplit.torch_internals.thread_modes import refuse_foreign_modes

Backward = Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]]
"""A function from the gradients of the outputs to the gradients of the inputs (None: no gradient)."""


class LeafNode(NamedTuple):
    """The autograd node through which a backward of the caller reaches the weights of one stage.

    leaves: the stage's leaves, which are its weights. value: an empty tensor on the stage's device, computed from the
        leaves; the pipeline's outputs depend on it, so that autograd calls this node.
    """

    leaves: Sequence[Tensor]
    value: Tensor

    @classmethod
    def make(cls, leaves: Sequence[Tensor], stream: DeviceStream) -> LeafNode:
        """Return the node of `leaves`, made on `stream`."""
        with stream.enter():
            return cls(leaves, _StageLeaves.apply(stream.device, *leaves))  # type: ignore[no-untyped-call]

    def carry(self, gradients: Sequence[Tensor | None], tokens: Sequence[Any]) -> Tensor:
        """Return a gradient of `value` that carries the gradients of the leaves, which are ready after `tokens`."""
        # Autograd passes on this very object; if nobody wants the leaves' gradients, it drops the object and all it
        # carries.
        carrier = torch.empty_like(self.value, requires_grad=False)
        carrier.carried = gradients, tokens  # type: ignore[attr-defined]
        return carrier


class _StageLeaves(torch.autograd.Function):
    """The leaves of one stage as one operator: autograd adds to their `.grad` and runs their hooks."""

    @staticmethod
    def forward(ctx: Any, device: torch.device, *leaves: Tensor) -> Tensor:
        """Return an empty tensor that depends on the leaves."""
        return torch.empty(0, device=device)

    @staticmethod
    def backward(ctx: Any, *carriers: Any) -> Any:
        """Return the gradients of the leaves."""
        (carrier,) = carriers
        gradients, tokens = carrier.carried
        make_caller_wait([carrier.device], tokens)
        hand_over(gradients)
        return (None, *gradients)


class PipelineFunction(torch.autograd.Function):
    """The pipeline as one operator of autograd.

    Its inputs are the differentiable inputs of the batch, and an empty tensor for each stage that depends on its
    parameters.
    """

    @staticmethod
    def forward(ctx: Any, backward: Backward, outputs: list[Tensor], wanted: list[bool], *inputs: Tensor) -> Any:
        """Return `outputs`, which the pipeline has computed already, as functions of `inputs`.

        `wanted` says which outputs want a gradient.
        """
        ctx.backward_of_pipeline = backward
        # An output that the loss does not use gets None. Zeros would run a backward through all stages.
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(o for o, w in zip(outputs, wanted, strict=True) if not w))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Run the pipelined backward. Raises BackwardError for a second derivative."""
        # Autograd turns grad mode on in a backward only for create_graph=True.
        if torch.is_grad_enabled():
            raise BackwardError(
                "a pipeline's backward cannot be differentiated again (create_graph=True): compute a gradient penalty "
                "or a Hessian on the unsplit model, which shares the pipeline's parameters"
            )
        refuse_foreign_modes()
        # Autograd wants a result for each argument of forward; the first three are not tensors.
        return (None, None, None, *ctx.backward_of_pipeline(gradients))

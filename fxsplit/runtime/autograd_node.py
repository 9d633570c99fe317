"""Join the pipeline to the caller's autograd graph: one node stands for the pipelined backward.

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
    """The autograd node through which a caller's backward() gives the weights of one stage their gradients.

    leaves: the stage's weights, which are leaves of autograd's graph.
    value: an empty tensor on the stage's device, computed from the leaves. The pipeline's outputs depend on `value`, so
        autograd calls this node.
    """

    leaves: Sequence[Tensor]
    value: Tensor

    @classmethod
    def make(cls, leaves: Sequence[Tensor], stream: DeviceStream) -> LeafNode:
        """Return the node of `leaves`. Its backward will run on `stream`."""
        with stream.enter():
            return cls(leaves, _StageLeaves.apply(stream.device, *leaves))  # type: ignore[no-untyped-call]

    def carry(self, gradients: Sequence[Tensor | None], tokens: Sequence[Any]) -> Tensor:
        """Return an empty tensor that carries the gradients of the leaves to this node's backward.

        Autograd takes the empty tensor for the gradient of `value`.
        tokens: marks in the streams that computed the gradients. The gradients may be read after these marks.
        """
        # Autograd passes this very object on to the node. If nobody wants the leaves' gradients, autograd drops the
        # object together with the gradients.
        carrier = torch.empty_like(self.value, requires_grad=False)
        carrier.carried = gradients, tokens  # type: ignore[attr-defined]
        return carrier


class _StageLeaves(torch.autograd.Function):
    """The leaves of one stage as inputs of one operator: autograd then adds to their `.grad` and runs their hooks."""

    @staticmethod
    def forward(ctx: Any, device: torch.device, *leaves: Tensor) -> Tensor:
        """Return an empty tensor that depends on the leaves, so that autograd calls `backward`."""
        return torch.empty(0, device=device)

    @staticmethod
    def backward(ctx: Any, *carriers: Any) -> Any:
        """Return the gradients of the leaves, which the pipeline has computed and `LeafNode.carry` has attached."""
        (carrier,) = carriers
        gradients, tokens = carrier.carried
        make_caller_wait([carrier.device], tokens)
        hand_over(gradients)
        return (None, *gradients)


class PipelineFunction(torch.autograd.Function):
    """The pipeline as one operator of autograd.

    Its inputs are the differentiable inputs of the batch and, for each stage, the empty `value` of the stage's
    LeafNode.
    """

    @staticmethod
    def forward(ctx: Any, backward: Backward, outputs: list[Tensor], wanted: list[bool], *inputs: Tensor) -> Any:
        """Return `outputs`, which the pipeline has computed already, as functions of `inputs`.

        wanted: for each output, whether the output wants a gradient.
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

"""What a worker does for one action: a stage forward or backward on one microbatch."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxsplit.stages import Stage


@dataclass(frozen=True)
class Packet:
    """Values on their way between stages: detached, with whether a gradient is expected back for each."""

    values: tuple[Any, ...]
    wanted: tuple[bool, ...]

    @classmethod
    def of(cls, values: Sequence[Any]) -> Packet:
        """Return the packet of a stage's outputs."""
        detached = tuple(v.detach() if isinstance(v, Tensor) else v for v in values)
        return cls(detached, tuple(isinstance(v, Tensor) and v.requires_grad for v in values))


@dataclass(frozen=True)
class Saved:
    """What a stage's backward on one microbatch starts from."""

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]


def forward(stage: Stage, packet: Packet) -> Saved:
    """Run a stage; in grad mode its inputs become leaves, so that each stage's graph ends at its boundary."""
    grad = torch.is_grad_enabled()
    inputs = tuple(
        v.detach().requires_grad_() if grad and wanted else v
        for v, wanted in zip(packet.values, packet.wanted, strict=True)
    )
    return Saved(inputs, stage.module(*inputs))


def backward(
    saved: Saved, gradients: Sequence[Tensor | None], parameters: Sequence[nn.Parameter]
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Return the gradients of a stage's inputs and parameters, given those of its outputs; None is no gradient."""
    roots = [
        (value, gradient)
        for value, gradient in zip(saved.outputs, gradients, strict=True)
        if isinstance(value, Tensor) and value.requires_grad and gradient is not None
    ]
    wanted = [isinstance(v, Tensor) and v.requires_grad for v in saved.inputs]
    leaves = [v for v, w in zip(saved.inputs, wanted, strict=True) if w]
    if not roots or not (leaves or parameters):
        return [None] * len(saved.inputs), [None] * len(parameters)
    outputs, seeds = zip(*roots, strict=True)
    found = torch.autograd.grad(outputs, [*leaves, *parameters], seeds, allow_unused=True)
    of_leaves = iter(found[: len(leaves)])
    return [next(of_leaves) if w else None for w in wanted], list(found[len(leaves) :])


class Sums:
    """Gradients summed over microbatches, in the order of one stage's parameters."""

    def __init__(self, count: int) -> None:
        self.totals: list[Tensor | None] = [None] * count
        self._owned = [False] * count

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add one microbatch's gradients; autograd may share the first one, so only own memory is written to."""
        for i, gradient in enumerate(gradients):
            total = self.totals[i]
            if gradient is None:
                continue
            if total is None:
                self.totals[i] = gradient
            elif self._owned[i]:
                total.add_(gradient)
            else:
                self.totals[i] = total + gradient
                self._owned[i] = True


def failing_node(error: BaseException, stage: Stage) -> str:
    """Return the node of a stage at which its code raised, with the user's line; empty where none did."""
    code = type(stage.module).forward.__code__
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code is code:
            lines = stage.code.strip("\n").splitlines()
            text = lines[line - code.co_firstlineno].strip() if 0 <= line - code.co_firstlineno < len(lines) else ""
            name = text.split(" = ")[0]
            node = next((n for n in stage.module.graph.nodes if n.name == name), None)
            return f", node {name!r}{_origin(node.meta) if node else ''}"
    return ""


def _origin(meta: dict[str, Any]) -> str:
    """Return the user's file and line that a node was traced from."""
    lines = [row.strip() for row in str(meta.get("stack_trace") or "").splitlines() if row.strip().startswith("File")]
    return f" from {lines[-1].split(', in ')[0]}" if lines else ""

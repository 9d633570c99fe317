"""What a worker does for one action: a stage forward or backward on one microbatch."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxsplit.stages import Stage
from fxsplit.structures import LIBRARIES


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


def backward(saved: Saved, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Run a stage backward from the gradients of its outputs; return those of its inputs (None is no gradient).

    Autograd adds the parameters' gradients to their `.grad`, one microbatch after another and in place.
    """
    roots = [
        (value, gradient)
        for value, gradient in zip(saved.outputs, gradients, strict=True)
        if isinstance(value, Tensor) and value.requires_grad and gradient is not None
    ]
    if roots:
        torch.autograd.backward([value for value, _ in roots], [gradient for _, gradient in roots])
    return [v.grad if isinstance(v, Tensor) and v.is_leaf else None for v in saved.inputs]


def failing_node(error: BaseException, stage: Stage) -> str:
    """Return the node of a stage at which its code raised, with the user's line; empty where none did."""
    code = type(stage.module).forward.__code__
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code is code:
            name = linecache.getline(code.co_filename, line).strip().split(" = ")[0]
            node = next((n for n in stage.module.graph.nodes if n.name == name), None)
            return f", node {name!r}{_origin(node.meta) if node else ''}"
    return ""


def _origin(meta: dict[str, Any]) -> str:
    """Return the user's file and line that a node was traced from."""
    rows = (row.strip() for row in str(meta.get("stack_trace") or "").splitlines())
    places = [row.split(", in ")[0] for row in rows if row.startswith("File")]
    own = [place for place in places if not any(folder in place for folder in LIBRARIES)]
    return f" from {own[-1]}" if own else ""

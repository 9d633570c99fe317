"""What a worker does for one action: a stage forward or backward on one microbatch."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxsplit.ir.facts.stages import Stage
from fxsplit.torch_internals.containers import LIBRARIES
from fxsplit.torch_internals.grad_leaves import mute
from fxsplit.torch_internals.grad_sums import Share, differentiate, find_unshared, make_shares
from fxsplit.torch_internals.thread_modes import NO_CONTEXT


class Packet(NamedTuple):
    """Values on their way between stages: detached, with whether a gradient is expected back for each."""

    values: tuple[Any, ...]
    wanted: tuple[bool, ...]

    @classmethod
    def of(cls, values: Sequence[Any]) -> Packet:
        """Return the packet of a stage's outputs."""
        detached = tuple(v.detach() if isinstance(v, Tensor) else v for v in values)
        return cls(detached, tuple(isinstance(v, Tensor) and v.requires_grad for v in values))


class Saved(NamedTuple):
    """What a stage's backward on one microbatch starts from; `extra` are leaves that only its loss depends on."""

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    extra: tuple[Tensor, ...] = ()


def forward(stage: Stage, packet: Packet, writes: bool = False) -> Saved:
    """Run a stage; in grad mode its inputs become leaves, so that each stage's graph ends at its boundary.

    A stage that `writes` to its inputs in place gets copies of those, since nothing may write to a leaf.
    """
    if not torch.is_grad_enabled():
        return Saved(packet.values, stage(*packet.values))
    pairs = zip(packet.values, packet.wanted, strict=True)
    inputs = tuple([v.detach().requires_grad_() if wanted else v for v, wanted in pairs])
    if not writes:
        return Saved(inputs, stage(*inputs))
    return Saved(inputs, stage(*(v.clone() if isinstance(v, Tensor) and v.requires_grad else v for v in inputs)))


def backward(
    saved: Saved, gradients: Sequence[Tensor | None], trained: Sequence[Tensor], first: bool = True
) -> tuple[list[Tensor | None], list[Share]]:
    """Run a stage backward from the gradients of its outputs; return those of its inputs (None is no gradient).

    The second result are those of `trained` and of what else the loss depends on. Whether they are ours alone is asked
    only of the `first` ones: later ones are added to what there is, whosever they are.
    """
    roots = list_roots(saved, gradients)
    of_inputs: list[Tensor | None] = [None] * len(saved.inputs)
    wanted = [i for i, v in enumerate(saved.inputs) if isinstance(v, Tensor) and v.requires_grad]
    leaves = [*(saved.inputs[i] for i in wanted), *trained]
    leaves += [one for one in saved.extra if all(one is not leaf for leaf in leaves)]
    if not roots or not leaves:
        return of_inputs, []
    with mute(saved.extra) if saved.extra else NO_CONTEXT:
        found = differentiate([value for value, _ in roots], [gradient for _, gradient in roots], leaves)
    own = find_unshared(found) if first else [False] * len(leaves)
    for i, gradient in zip(wanted, found, strict=False):
        of_inputs[i] = gradient
    at = len(wanted)
    return of_inputs, make_shares(leaves[at:], found[at:], own[at:])


def list_roots(saved: Saved, gradients: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor]]:
    """Return the outputs that a backward starts from, each with its gradient."""
    return [
        (value, gradient)
        for value, gradient in zip(saved.outputs, gradients, strict=True)
        if isinstance(value, Tensor) and value.requires_grad and gradient is not None
    ]


def find_failing_node(error: BaseException, stage: Stage) -> str:
    """Return the node of a stage at which its code raised, with the user's line; empty where none did."""
    code = type(stage.module).forward.__code__
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code is code:
            name = linecache.getline(code.co_filename, line).strip().split(" = ")[0]
            node = next((n for n in stage.module.graph.nodes if n.name == name), None)
            return f", node {name!r}{_describe_origin(node.meta) if node else ''}"
    return ""


def _describe_origin(meta: dict[str, Any]) -> str:
    """Return the user's file and line that a node was traced from."""
    rows = (row.strip() for row in str(meta.get("stack_trace") or "").splitlines())
    places = [row.split(", in ")[0] for row in rows if row.startswith("File")]
    own = [place for place in places if not any(folder in place for folder in LIBRARIES)]
    return f" from {own[-1]}" if own else ""

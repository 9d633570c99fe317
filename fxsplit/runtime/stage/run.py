"""Run one action of a worker: a stage forward or backward on one microbatch.

    whole backward (B):   loss --> ... --> inputs and weights
    split backward (I):   loss --> ... --> inputs               keeps the gradient at each weight's branch node
                   (W):                      branch nodes --> weights

Schedules such as ZB-H1 split a backward. Input gradients (I) run at once, since the stage before waits only for them.
Weight gradients (W) run when the worker has time. See `torch_internals/autograd/split.py` for branch nodes. A weight
without a branch node gets its gradient in the first part, and so do all weights of a stage whose modules have hooks.
"""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from fxsplit.errors import FxsplitError
from fxsplit.ir.facts.stages import Stage
from fxsplit.torch_internals.autograd.leaves import comes_through, find_leaves, mute, put_hook_behind
from fxsplit.torch_internals.autograd.split import BranchFinder, BranchNodes, WeightBackward, collect_weight_backwards
from fxsplit.torch_internals.autograd.sums import (
    LEAST_BYTES,
    Share,
    Sums,
    differentiate_into,
    find_unshared,
    make_shares,
)
from fxsplit.torch_internals.autograd.zero_gradients import keep_zeros
from fxsplit.torch_internals.error_texts import is_second_backward
from fxsplit.torch_internals.fx.module_stack import find_module_path, find_user_line
from fxsplit.torch_internals.tensors.sparse_layouts import count_bytes
from fxsplit.torch_internals.thread_modes import NO_CONTEXT

KEPT = (
    "your own backward runs through a tensor that a hook (or an attribute of a module) has kept from a pipeline's "
    "forward. Such a tensor has gradients only within its stage, so parameters of earlier stages would get none: "
    "return the tensor as an output of the model and compute the loss from it, or call pipe.model"
)
"""The error of a backward from a tensor that user code kept from a stage."""


HELD_BYTES = LEAST_BYTES
"""Once held weight gradients reach this size in bytes, they are added to their sums."""


class Packet(NamedTuple):
    """Values on their way between stages, detached, each with a flag that says whether it wants a gradient back."""

    values: tuple[Any, ...]
    wanted: tuple[bool, ...]

    @classmethod
    def of(cls, values: Sequence[Any]) -> Packet:
        """Return the packet of a stage's outputs."""
        detached = tuple([v.detach() if isinstance(v, Tensor) else v for v in values])
        return cls(detached, tuple([isinstance(v, Tensor) and v.requires_grad for v in values]))


class SavedForBackward(NamedTuple):
    """The ends of a stage's graph on one microbatch, from which its backward starts.

    extra: leaves that only the loss depends on, for example a temperature that the loss function trains.
    """

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    extra: tuple[Tensor, ...] = ()


def forward(stage: Stage, packet: Packet, writes: bool = False) -> SavedForBackward:
    """Run a stage on a packet. With gradients on, its inputs become leaves, so that each stage has a graph of its own.

    writes: whether the stage writes to its inputs in place. It then gets copies, since autograd forbids writes to a
        leaf.
    """
    if not torch.is_grad_enabled():
        return SavedForBackward(packet.values, stage(*packet.values))
    pairs = zip(packet.values, packet.wanted, strict=True)
    # Detach again: one value may go to several stages, and each needs a leaf of its own.
    inputs = tuple([_make_boundary(v) if wanted else v for v, wanted in pairs])
    if not writes:
        return SavedForBackward(inputs, stage(*inputs))
    return SavedForBackward(
        inputs, stage(*(v.clone() if isinstance(v, Tensor) and v.requires_grad else v for v in inputs))
    )


def _make_boundary(value: Tensor) -> Tensor:
    """Return a value as a leaf at which a stage's graph ends.

    A backward that is not the pipeline's own raises an error there.
    The pipeline's backward asks for the leaf's gradient without accumulating it, so the hook that raises does not run.
    """
    leaf = value.detach().requires_grad_()
    put_hook_behind(leaf, _refuse_foreign_backward)
    return leaf


def _refuse_foreign_backward(leaf: Tensor) -> None:
    """Raise FxsplitError for a user's own backward that has reached the start of a stage."""
    raise FxsplitError(KEPT)


def refuse_kept(saved: SavedForBackward) -> None:
    """Raise FxsplitError if the caller's own backward, which is running now, would also go through a stage's graph.

    The pipeline's backward comes first and frees that graph.
    """
    ends = [v for v in saved.inputs if isinstance(v, Tensor) and v.requires_grad]
    if comes_through(ends, [v for v in saved.outputs if isinstance(v, Tensor)]):
        raise FxsplitError(KEPT)


def backward(
    saved: SavedForBackward,
    gradients: Sequence[Tensor | None],
    trained: Sequence[Tensor],
    first: bool = True,
    finder: BranchFinder | None = None,
    sums: Sums | None = None,
    *,
    keeps_zeros: bool = False,
) -> tuple[list[Tensor | None], list[Share], list[WeightBackward]]:
    """Run a stage backward from the gradients of its outputs (None: no gradient).

    Returns the gradients of its inputs, the gradients of `trained` and of `saved.extra`, and the backwards of weights
    that are left for later.
    first: whether a leaf may get its first gradient. The memory of that gradient becomes the memory of the sum, so it
        must not be shared with another tensor.
    finder: finds the branch nodes of the stage, at which gradients of weights are left for later (None: all are
        computed now).
    sums: add gradients of large leaves here directly, instead of returning them.
    keeps_zeros: let a gradient of zero stay zero in the backward of a division by zero, where it would become NaN.
    """
    roots, arrived = list_roots(saved, gradients)
    if keeps_zeros:
        keep_zeros(roots)
    of_inputs: list[Tensor | None] = [None] * len(saved.inputs)
    wanted = [i for i, v in enumerate(saved.inputs) if isinstance(v, Tensor) and v.requires_grad]
    nodes: BranchNodes = {}
    if finder is not None:
        # Do not split the backward of a weight that the loss reads too: part of its gradient comes from the loss.
        beside = {id(leaf) for leaf in saved.extra}
        nodes, trained = finder.find(roots, [weight for weight in trained if id(weight) not in beside])
    leaves = [saved.inputs[i] for i in wanted] + list(trained)
    # Compare by identity, since == of tensors compares elements.
    leaves += [one for one in saved.extra if all(one is not leaf for leaf in leaves)]
    edges = [edge for branch in nodes.values() for edge in branch.edges]
    if not roots or not (leaves or edges):
        return of_inputs, [], []
    # The stage's own leaves are muted in all workers. The leaves of a loss are known only now.
    try:
        with mute(saved.extra) if saved.extra else NO_CONTEXT:
            found, caught = differentiate_into(sums, roots, arrived, [*leaves, *edges], retain_graph=bool(edges))
    except RuntimeError as error:
        # torch's message does not say that another backward has freed the graph.
        if not is_second_backward(error):
            raise
        raise FxsplitError(KEPT) from error
    at, end = len(wanted), len(leaves)
    unshared = find_unshared(found, at, end) if first else [False] * (end - at)
    for i, gradient in zip(wanted, found, strict=False):
        of_inputs[i] = gradient
    shares = make_shares(leaves[at:], found[at:end], unshared)
    if caught:
        shares = [share for share in shares if id(share[0]) not in caught]
    return of_inputs, shares, collect_weight_backwards(nodes, found[end:]) if nodes else []


def find_loss_leaves(loss: Tensor, outputs: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return the leaves that a loss depends on and no stage does, such as parameters of the loss function."""
    # An output may itself be a leaf: a parameter that the last stage returns.
    own = {id(v) for v in outputs}
    made_by = [v.grad_fn for v in outputs if isinstance(v, Tensor)]
    return tuple([leaf for leaf in find_leaves(loss, made_by) if id(leaf) not in own])


def compute_weight_gradients(left: list[WeightBackward], sums: Sums, first: bool = True) -> None:
    """Run the backwards of weights in the list `left`, add the gradients to `sums`, and empty the list.

    first: whether a weight may get its first gradient (see `backward`).
    """
    shares: list[Share] = []
    held_bytes = 0
    with torch.no_grad():
        # Pop, so that the gradient kept at each branch node is freed after its use.
        while left:
            one = left.pop()
            found = one.run()
            new = make_shares(one.weights, found, find_unshared(found) if first else [False] * len(found))
            shares += new
            held_bytes += sum([g.nbytes if g.layout is torch.strided else count_bytes(g) for _, g, _ in new])
            del found, new
            # Small gradients are added together, since each addition is a call. Large gradients are not held together.
            if held_bytes > HELD_BYTES or not left:
                sums.add(shares)
                shares, held_bytes = [], 0


def list_roots(saved: SavedForBackward, gradients: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs from which a backward starts, and their gradients. Outputs without a gradient are left out."""
    pairs = zip(saved.outputs, gradients, strict=True)
    found = [(v, g) for v, g in pairs if isinstance(v, Tensor) and v.requires_grad and g is not None]
    return [value for value, _ in found], [gradient for _, gradient in found]


Frames = Sequence[tuple[FrameType, int]]
"""Python frames of one thread, the innermost last, each with its current line."""


def list_frames(innermost: FrameType | None) -> Frames:
    """Return the frames of a running thread."""
    return list(traceback.walk_stack(innermost))[::-1] if innermost else []


def find_node(frames: Frames, stage: Stage) -> str:
    """Return the node that a stage's code is running, with the user's line; empty if no frame is the stage's.

    For example: `, node 'relu_3' in layers.2.mlp from File "model.py", line 12`.
    """
    code = type(stage.module).forward.__code__
    for frame, line in frames:
        if frame.f_code is code:
            # Each line of the generated code is `name = call(...)` with the node's name.
            name = linecache.getline(code.co_filename, line).strip().split(" = ")[0]
            node = next((n for n in stage.module.graph.nodes if n.name == name), None)
            return f", node {name!r}{_describe_origin(node, stage.module) if node else ''}"
    return ""


def _describe_origin(node: fx.Node, module: nn.Module) -> str:
    """Return where a node comes from: its module path, and the user's file and line, as far as they are known."""
    path = find_module_path(node)
    if node.op == "call_module":
        # A number, as in an nn.Sequential, says little: add the layer's class.
        path = f"{node.target} ({type(module.get_submodule(str(node.target))).__name__})"
    line = find_user_line(node)
    return (f" in {path}" if path else "") + (f" from {line}" if line else "")

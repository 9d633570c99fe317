"""Weigh operators: measure the most memory that each allocates in addition to its result, forward and backward.

An operator allocates more than it returns: gradients, copies in other layouts, workspaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import InitVar, dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fxsplit.ir.facts.costs.known import Measured
from fxsplit.torch_internals.autograd.split import Branch, collect_weight_backwards, find_branch_nodes
from fxsplit.torch_internals.tensors.allocations import Allocations, count_allocations
from fxsplit.torch_internals.tensors.sparse_layouts import list_parts

Tensors = Sequence[Tensor]
Count = Callable[[], AbstractContextManager[Allocations]]
"""Counts the allocations inside a block."""
REVERSED, CHANNELS_LAST, PART = "reversed", "channels last", "part"
Layout = torch.memory_format | str
"""The memory layout in which a gradient arrives.

It is the output's own layout, contiguous, reversed, channels last, or a part of a larger tensor.
"""


@dataclass
class OperatorMemory:
    """The memory that one operator allocates, in bytes. NodeCost explains the fields of the same names.

    is_turned: the gradient of the result may arrive in another memory order. is_joined: it may be a part of a larger
    tensor. The backward is then measured for such gradients too. count: how allocations are counted.
    """

    forward_peak_bytes: float | None = None
    backward_peak_bytes: float = 0.0
    halved_peak_bytes: float = 0.0
    late_peak_bytes: float = 0.0
    waiting_bytes: float = 0.0
    lent_bytes: float | None = None
    is_turned: InitVar[bool] = False
    is_joined: InitVar[bool] = False
    count: InitVar[Count] = count_allocations

    def __post_init__(self, is_turned: bool, is_joined: bool, count: Count) -> None:
        self._count = count
        # The gradient arrives in another memory order than the value's, for example from a reader that transposes.
        self._is_turned = is_turned
        # The gradient arrives as a part of a larger one, for example from a concatenation.
        self._is_joined = is_joined
        # Backwards still to run: (layout of the gradient, whether in halves). None before the first backward.
        self._ways: list[tuple[Layout, bool]] | None = None

    @property
    def is_unfinished(self) -> bool:
        """Whether the operator must run again, because a kind of backward is not measured yet."""
        return bool(self._ways)

    @contextmanager
    def note_forward(self) -> Iterator[None]:
        """Record the memory that is allocated in the block, in which the caller runs the operator forward."""
        with self._count() as found:
            yield
        self.forward_peak_bytes = found.peak_bytes

    def note_backward(self, outputs: Tensors, leaves: Tensors) -> None:
        """Run the operator's backward in the next way that is not measured yet, and record its allocations.

        The ways differ in the layout of the gradient, and in whole or halved backwards. Each needs a run of the
        operator, since an autograd.Function may refuse a second backward. outputs: where the backward starts. leaves:
        where it ends.
        """
        if self._ways == []:
            return
        nodes, _ = find_branch_nodes(outputs, [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)])
        if self._ways is None:
            # An arriving gradient is usually contiguous, even if the output is a non-contiguous view.
            layouts: list[Layout] = [torch.preserve_format, torch.contiguous_format]
            layouts = layouts if not all(t.is_contiguous() for t in outputs) else layouts[:1]
            layouts += [REVERSED, CHANNELS_LAST] if self._is_turned else []
            layouts += [PART] if self._is_joined else []
            # If no gradient can be delayed, the first half is the whole backward.
            self._ways = [(layout, halved) for layout in layouts for halved in ([True, False] if nodes else [True])]
        layout, halved = self._ways.pop()
        if halved and nodes:
            self._note_halves(outputs, leaves, nodes, layout)
            return
        made = self._note_whole(outputs, leaves, layout)
        # If no gradient can be delayed, this is also the first half.
        if not nodes:
            self._note_early(made, made.gradients, layout)

    def _note_whole(self, outputs: Tensors, leaves: Tensors, layout: Layout) -> BackwardMemory:
        """Run the whole backward from `outputs` to `leaves`, and record the most bytes that it allocates.

        The backward may return memory that it was given, instead of new memory: a view of the arriving gradient. Also
        record these bytes; over several layouts of the gradient, the smallest number counts.
        """
        made = count_backward(outputs, leaves, layout, self._count)
        self.backward_peak_bytes = max(self.backward_peak_bytes, made.peak_bytes)
        if len(outputs) == 1:
            given = {part.untyped_storage()._cdata for seed in made.seeds for part in list_parts(seed)}
            parts = [part for t in made.gradients if t is not None for part in list_parts(t)]
            lent = sum(part.nbytes for part in parts if part.untyped_storage()._cdata in given)
            self.lent_bytes = lent if self.lent_bytes is None else min(self.lent_bytes, lent)
        return made

    def _note_early(self, made: BackwardMemory, first: Sequence[Tensor | None], layout: Layout) -> None:
        """Record what the first half of a backward allocates, and the bytes that stay in memory until the second half.

        made: the measured first half. first: the gradients of inputs among its results; the rest wait for the second
            half.
        """
        # One branch may wait with a view of another branch's memory: count each storage once.
        waiting = [part for t in made.gradients[len(first) :] if t is not None for part in list_parts(t)]
        # A gradient that is a part of a larger one, as of a concatenated value, keeps the whole storage.
        waiting += [t for t in first if t is not None and is_part(t)]
        storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in waiting}
        # The graph of the stage determines the larger gradient of a part.
        if layout != PART:
            self.waiting_bytes = max(self.waiting_bytes, sum(storages.values()))
        self.halved_peak_bytes = max(self.halved_peak_bytes, made.peak_bytes)

    def _note_halves(self, outputs: Tensors, leaves: Tensors, nodes: Mapping[Any, Branch], layout: Layout) -> None:
        """Run the backward in two halves. Record what each allocates, and the memory that waits for the second half.

        nodes: autograd nodes that compute only weight gradients, which are delayed to the second half.
        """
        late = {id(weight) for branch in nodes.values() for weight in branch.weights}
        first = [leaf for leaf in leaves if id(leaf) not in late]
        edges = [edge for branch in nodes.values() for edge in branch.edges]
        made = count_backward(outputs, [*first, *edges], layout, self._count)
        self._note_early(made, made.gradients[: len(first)], layout)
        for left in collect_weight_backwards(dict(nodes), made.gradients[len(first) :]):
            with torch.no_grad(), self._count() as later:
                # Keep the activations, as in the first half, so that no older memory is freed during the count. torch's
                # profiler would warn about such a block of unknown size.
                gradients = left.run(retain_graph=True)
            self.late_peak_bytes = max(self.late_peak_bytes, later.peak_bytes or 0)
            del gradients

    def add_to(self, times: Measured) -> Measured:
        """Return the measurements of the operator: the given times together with this memory."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return times._replace(**found | {"lent_bytes": self.lent_bytes or 0})


def is_part(tensor: Tensor) -> bool:
    """Return whether a tensor lies in memory that is larger than the tensor needs."""
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > tensor.nbytes


class BackwardMemory(NamedTuple):
    """A measured backward: the most bytes that it allocates, the gradients it returns, and the `seeds` it starts from.

    A seed is the gradient of an output.
    """

    peak_bytes: int
    gradients: Sequence[Tensor | None]
    seeds: Tensors


def count_backward(
    outputs: Tensors, ends: Sequence[Any], layout: Layout, count: Count = count_allocations
) -> BackwardMemory:
    """Run a backward from `outputs` to `ends` and count its allocations. Activations stay in memory.

    With several outputs, the gradients that the backward starts from count too: in a step, no gradient may arrive for
    some outputs, and the operator's backward then makes these gradients itself.
    """
    # A single output's gradient exists before the backward, and counts elsewhere.
    seeds = [_make_seed(t, layout) for t in outputs] if len(outputs) == 1 else None
    with count() as found:
        seeds = seeds or [_make_seed(t, layout) for t in outputs]
        made = torch.autograd.grad(outputs, ends, seeds, retain_graph=True, allow_unused=True)
    return BackwardMemory(found.peak_bytes or 0, made, seeds)


def _make_seed(output: Tensor, layout: Layout) -> Tensor:
    """Return a gradient of ones for an output, in the given memory layout."""
    if isinstance(layout, torch.memory_format):
        return torch.ones_like(output, memory_format=layout)
    if layout == PART and output.ndim:
        # Concatenate two outputs along a dimension that leaves a part non-contiguous.
        dim = min(1, output.ndim - 1)
        return torch.ones_like(torch.cat([output.detach()] * 2, dim)).narrow(dim, 0, output.shape[dim])
    # A scalar has no memory order.
    dims = list(range(output.ndim))
    # For each dimension in memory, the dimension of the output.
    order = dims[::-1] if layout == REVERSED else dims[:1] + dims[2:] + dims[1:2]
    made = torch.ones_like(output.detach().permute(order), memory_format=torch.contiguous_format)
    return made.permute([order.index(dim) for dim in dims])

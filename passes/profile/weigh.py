"""Weigh operators: the most that each allocates at once, forward and backward, which a stage needs room for besides.

What an operator allocates is more than what it returns: its gradients, copies in other layouts, workspaces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from fxsplit.ir.facts.measured import Measured
from fxsplit.torch_internals.allocations import count_allocations
from fxsplit.torch_internals.grad_split import Branch, find_branch_nodes
from fxsplit.torch_internals.layouts import list_parts

Tensors = Sequence[Tensor]


@dataclass
class Weight:
    """What one operator allocates, in bytes; see the fields of NodeCost with these names."""

    forward_peak_bytes: float | None = None
    backward_peak_bytes: float = 0.0
    halved_peak_bytes: float = 0.0
    waiting_bytes: float = 0.0

    def __post_init__(self) -> None:
        # The ways in which the backward is still to be run: with gradients of a layout, in halves or whole. None before
        # the first is seen.
        self._ways: list[tuple[torch.memory_format, bool]] | None = None

    @property
    def is_unfinished(self) -> bool:
        """Whether the operator is to run once more, as its backward was not yet noted in all ways."""
        return bool(self._ways)

    @contextmanager
    def note_forward(self) -> Iterator[None]:
        """Note what the block allocates, which is the operator's forward."""
        with count_allocations() as found:
            yield
        self.forward_peak_bytes = found.peak_bytes

    def note_backward(self, outputs: Tensors, leaves: Tensors) -> None:
        """Run the operator's backward in the next of its ways, if one is left, and note what that allocates.

        A graph runs backward once, since that of an autograd.Function may refuse to do so again.

        outputs: where the backward starts. leaves: where it ends.
        """
        if self._ways == []:
            return
        nodes, _ = find_branch_nodes(outputs, [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)])
        if self._ways is None:
            # Gradients that arrive are usually contiguous, also where the output is a view that is not.
            layouts = [torch.preserve_format, torch.contiguous_format]
            layouts = layouts if not all(t.is_contiguous() for t in outputs) else layouts[:1]
            # Where no gradient can be left for later, the first half is all of the backward.
            self._ways = [(layout, halved) for layout in layouts for halved in ([True, False] if nodes else [True])]
        layout, halved = self._ways.pop()
        peak = self._note_half(outputs, leaves, nodes, layout) if halved else count_backward(outputs, leaves, layout)[0]
        if halved:
            self.halved_peak_bytes = max(self.halved_peak_bytes, peak)
        if not (halved and nodes):
            self.backward_peak_bytes = max(self.backward_peak_bytes, peak)

    def _note_half(
        self, outputs: Tensors, leaves: Tensors, nodes: Mapping[Any, Branch], layout: torch.memory_format
    ) -> int:
        """Run the first half of the operator's backward; return what it allocates, and note what the second waits with.

        nodes: those that compute gradients of weights alone, which are left for later.
        """
        late = {id(weight) for branch in nodes.values() for weight in branch.weights}
        first = [leaf for leaf in leaves if id(leaf) not in late]
        edges = [edge for branch in nodes.values() for edge in branch.edges]
        peak, found = count_backward(outputs, [*first, *edges], layout)
        # What one branch waits with may be a view of what another one does.
        waiting = [part for t in found[len(first) :] if t is not None for part in list_parts(t)]
        # Where a gradient is a part of a larger one, as that of a value that was concatenated, it keeps all of that.
        waiting += [t for t in found[: len(first)] if t is not None and is_part(t)]
        storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in waiting}
        self.waiting_bytes = max(self.waiting_bytes, sum(storages.values()))
        return peak

    def add_to(self, times: Measured) -> Measured:
        """Return what was measured of the operator: its times, and this."""
        return times._replace(**{field.name: getattr(self, field.name) for field in fields(self)})


def is_part(tensor: Tensor) -> bool:
    """Return whether a tensor lies in memory that is larger than it."""
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > tensor.nbytes


def count_backward(
    outputs: Tensors, ends: Sequence[Any], layout: torch.memory_format
) -> tuple[int, tuple[Tensor | None, ...]]:
    """Return the most bytes that a backward from `outputs` to `ends` allocates at once, and the gradients there.

    Activations are kept meanwhile. Where there are several outputs the gradients that it starts from count too:
    those that do not arrive in a step are made inside of the operator.
    """
    # One that is given is there before, and is counted as such.
    seeds = [torch.ones_like(t, memory_format=layout) for t in outputs] if len(outputs) == 1 else None
    with count_allocations() as found:
        seeds = seeds or [torch.ones_like(t, memory_format=layout) for t in outputs]
        made = torch.autograd.grad(outputs, ends, seeds, retain_graph=True, allow_unused=True)
    return found.peak_bytes or 0, made

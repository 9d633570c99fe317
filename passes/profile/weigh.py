"""Weigh operators: the most that each allocates at once, forward and backward, which a stage needs room for besides.

What an operator allocates is more than what it returns: its gradients, copies in other layouts, workspaces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fxsplit.ir.facts.costs.measured import Measured
from fxsplit.torch_internals.autograd.split import Branch, collect_weight_backwards, find_branch_nodes
from fxsplit.torch_internals.tensors.allocations import count_allocations
from fxsplit.torch_internals.tensors.layouts import list_parts

Tensors = Sequence[Tensor]
REVERSED, CHANNELS_LAST, PART = "reversed", "channels last", "part"
Layout = torch.memory_format | str
"""In which order of memory a gradient arrives: its output's, contiguous, with its dimensions turned, or as a part."""


@dataclass
class Weight:
    """What one operator allocates, in bytes; see the fields of NodeCost with these names."""

    forward_peak_bytes: float | None = None
    backward_peak_bytes: float = 0.0
    halved_peak_bytes: float = 0.0
    late_peak_bytes: float = 0.0
    waiting_bytes: float = 0.0
    lent_bytes: float | None = None
    is_turned: InitVar[bool] = False
    is_joined: InitVar[bool] = False

    def __post_init__(self, is_turned: bool, is_joined: bool) -> None:
        # Whether its gradient arrives in another order of memory than it has itself, as from what reads it transposed.
        self._is_turned = is_turned
        # Whether it arrives as a part of a larger one, as from what is joined of several.
        self._is_joined = is_joined
        # The ways in which the backward is still to be run: with gradients of a layout, in halves or whole. None before
        # the first is seen.
        self._ways: list[tuple[Layout, bool]] | None = None

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
            layouts: list[Layout] = [torch.preserve_format, torch.contiguous_format]
            layouts = layouts if not all(t.is_contiguous() for t in outputs) else layouts[:1]
            layouts += [REVERSED, CHANNELS_LAST] if self._is_turned else []
            layouts += [PART] if self._is_joined else []
            # Where no gradient can be left for later, the first half is all of the backward.
            self._ways = [(layout, halved) for layout in layouts for halved in ([True, False] if nodes else [True])]
        layout, halved = self._ways.pop()
        if halved and nodes:
            self._note_halves(outputs, leaves, nodes, layout)
            return
        made = self._note_whole(outputs, leaves, layout)
        # Where no gradient can be left for later, this is the first half too.
        if not nodes:
            self._note_early(made, made.gradients, layout)

    def _note_whole(self, outputs: Tensors, leaves: Tensors, layout: Layout) -> Counted:
        """Run the operator's backward whole; note what it allocates, and what it returns in memory that it was given.

        Of several layouts, what is returned so in all of them counts.
        """
        made = count_backward(outputs, leaves, layout)
        self.backward_peak_bytes = max(self.backward_peak_bytes, made.peak_bytes)
        if len(outputs) == 1:
            given = {part.untyped_storage()._cdata for seed in made.seeds for part in list_parts(seed)}
            parts = [part for t in made.gradients if t is not None for part in list_parts(t)]
            lent = sum(part.nbytes for part in parts if part.untyped_storage()._cdata in given)
            self.lent_bytes = lent if self.lent_bytes is None else min(self.lent_bytes, lent)
        return made

    def _note_early(self, made: Counted, first: Sequence[Tensor | None], layout: Layout) -> None:
        """Note what a first half allocates, and what is held until the second; `first` are gradients of inputs."""
        # What one branch waits with may be a view of what another one does.
        waiting = [part for t in made.gradients[len(first) :] if t is not None for part in list_parts(t)]
        # Where a gradient is a part of a larger one, as that of a value that was concatenated, it keeps all of that.
        waiting += [t for t in first if t is not None and is_part(t)]
        storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in waiting}
        # Of which larger gradient one is a part, the graph of the stage tells.
        if layout != PART:
            self.waiting_bytes = max(self.waiting_bytes, sum(storages.values()))
        self.halved_peak_bytes = max(self.halved_peak_bytes, made.peak_bytes)

    def _note_halves(self, outputs: Tensors, leaves: Tensors, nodes: Mapping[Any, Branch], layout: Layout) -> None:
        """Run the operator's backward in two halves; note what each allocates, and what the second waits with.

        nodes: those that compute gradients of weights alone, which are left for later.
        """
        late = {id(weight) for branch in nodes.values() for weight in branch.weights}
        first = [leaf for leaf in leaves if id(leaf) not in late]
        edges = [edge for branch in nodes.values() for edge in branch.edges]
        made = count_backward(outputs, [*first, *edges], layout)
        self._note_early(made, made.gradients[: len(first)], layout)
        for left in collect_weight_backwards(dict(nodes), made.gradients[len(first) :]):
            with torch.no_grad(), count_allocations() as later:
                # Activations are kept, as in the first half: what was allocated before is not to be freed meanwhile.
                # torch's profiler would warn of such a block, whose size it does not know.
                gradients = left.run(retain_graph=True)
            self.late_peak_bytes = max(self.late_peak_bytes, later.peak_bytes or 0)
            del gradients

    def add_to(self, times: Measured) -> Measured:
        """Return what was measured of the operator: its times, and this."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return times._replace(**found | {"lent_bytes": self.lent_bytes or 0})


def is_part(tensor: Tensor) -> bool:
    """Return whether a tensor lies in memory that is larger than it."""
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > tensor.nbytes


class Counted(NamedTuple):
    """What a backward allocates at most, at once, the gradients that it returns, and those that it starts from."""

    peak_bytes: int
    gradients: Sequence[Tensor | None]
    seeds: Tensors


def count_backward(outputs: Tensors, ends: Sequence[Any], layout: Layout) -> Counted:
    """Run a backward from `outputs` to `ends` and count what it allocates.

    Activations are kept meanwhile. Where there are several outputs the gradients that it starts from count too:
    those that do not arrive in a step are made inside of the operator.
    """
    # One that is given is there before, and is counted as such.
    seeds = [_make_seed(t, layout) for t in outputs] if len(outputs) == 1 else None
    with count_allocations() as found:
        seeds = seeds or [_make_seed(t, layout) for t in outputs]
        made = torch.autograd.grad(outputs, ends, seeds, retain_graph=True, allow_unused=True)
    return Counted(found.peak_bytes or 0, made, seeds)


def _make_seed(output: Tensor, layout: Layout) -> Tensor:
    """Return a gradient of ones for an output."""
    if isinstance(layout, torch.memory_format):
        return torch.ones_like(output, memory_format=layout)
    if layout == PART and output.ndim:
        # Joined with another one, and along a dimension in which a part does not lie in one piece.
        dim = min(1, output.ndim - 1)
        return torch.ones_like(torch.cat([output.detach()] * 2, dim)).narrow(dim, 0, output.shape[dim])
    # A number has no order.
    dims = list(range(output.ndim))
    # For each dimension of the memory, the one of the output that lies there.
    order = dims[::-1] if layout == REVERSED else dims[:1] + dims[2:] + dims[1:2]
    made = torch.ones_like(output.detach().permute(order), memory_format=torch.contiguous_format)
    return made.permute([order.index(dim) for dim in dims])

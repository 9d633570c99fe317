"""Recomputation: a stage keeps only a microbatch's inputs, and runs forward again before its backward.

    forward:    packet --> stage --> outputs         keeps packet, written buffers, random state
    backward:   packet --> stage --> outputs --> backward      the second run makes the activations

This saves the memory of the activations (all that autograd keeps for a backward) at the price of one more forward. The
second run draws the same random numbers as the first and sees the buffers as they were then. It leaves buffers as they
are now. A loss is computed once: its graph starts at the last stage's outputs and is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fxsplit.errors import FxsplitError
from fxsplit.ir.facts.stages import Stage
from fxsplit.runtime.stage.run import KEPT, Packet, SavedForBackward, forward
from fxsplit.torch_internals.fx.interpret import get_storage_id
from fxsplit.torch_internals.nn.batch_norm import note_nothing
from fxsplit.torch_internals.scopes.undo import restore_after
from fxsplit.torch_internals.tensors.accelerators import is_on_host
from fxsplit.torch_internals.tensors.host_copies import PendingCopies
from fxsplit.torch_internals.tensors.sparse_layouts import count_bytes
from fxsplit.torch_internals.thread_modes import ThreadModes

Surroundings = Callable[[frozenset[int]], AbstractContextManager[Any]]
"""From the storages of further buffers that a stage writes to: the context in which the stage's forward runs."""
MOST_COMING = 64
"""The most comparisons of buffers that may be pending on accelerators."""
SMALL_BYTES = 1 << 16
"""Buffers up to this size are copied for every microbatch, and larger buffers only if they are known to be written."""

Policy = Literal["never", "plan", "except_last", "always"]

POLICIES: dict[str, Callable[[bool, int, int], bool]] = {
    "never": lambda planned, microbatch, count: False,
    "plan": lambda planned, microbatch, count: planned,
    "except_last": lambda planned, microbatch, count: microbatch < count - 1,
    "always": lambda planned, microbatch, count: True,
}
"""Whether to recompute a stage on a microbatch, from the plan's choice, the microbatch, and the number of microbatches.
"""


@dataclass(frozen=True, eq=False)
class ForwardRecord:
    """The inputs of a stage's forward on one microbatch, kept to run the forward again.

    buffers: copies, made before the forward, of the buffers that the forward writes.
    surroundings, context: the contexts in which the forward ran, such as the state of random numbers.
    head: for the last stage of a training step, the graph of the loss as a function of the stage's outputs.
    """

    packet: Packet
    buffers: dict[str, Tensor]
    surroundings: Surroundings
    context: ThreadModes
    head: SavedForBackward | None = None

    def recompute(self, stage: Stage, writes: bool) -> SavedForBackward:
        """Run the stage forward again with the inputs of the first run. Returns the graph for the backward.

        writes: whether the stage writes to its inputs in place.
        """
        # Autograd saves a buffer as the object itself, and the buffer's present memory is put back after the run. So
        # let autograd save copies.
        own = frozenset(get_storage_id(earlier) for earlier in self.buffers.values())
        with self.context.enter(), self.surroundings(own), _restore_buffers(stage, self.buffers), note_nothing():
            return forward(stage, _copy_packet(self.packet, writes), writes)


class WrittenBuffers:
    """The buffers that a stage is known to write. The first run compares all buffers, and later runs compare fewer.

    A tensor's version counts most writes. Kernels that update a buffer, such as batch norm's, may not count, so values
    are compared too. On an accelerator the host would have to wait for the comparison. It does so only in the first
    run. Later, a write to a buffer that the first run did not write is found in a later batch, and raises an error
    then.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._looked = False
        self._coming: PendingCopies[list[str]] = PendingCopies(MOST_COMING)

    def copy_likely(self, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of the buffers that a forward may write, by name. Raises FxsplitError as `note` does."""
        self._read_arrived()
        likely = (n for n, b in buffers.items() if not self._looked or n in self.names or count_bytes(b) <= SMALL_BYTES)
        return {name: buffers[name].clone() for name in likely}

    def note(self, before: dict[str, Tensor], versions: dict[str, int], after: dict[str, Tensor]) -> None:
        """Record which buffers a forward has written.

        before: copies of some buffers from before the forward. versions: the versions of all buffers before the
            forward. after: the buffers now.
        Raises FxsplitError if a large buffer is written that the first run did not write: it was not copied in time. If
        the comparison is still pending on an accelerator, a later call raises.
        """
        changed = {n for n, b in after.items() if b._version != versions[n]}
        if late := sorted(changed - before.keys()):
            raise FxsplitError(f"buffer {late[0]!r} is written now but was not in the first run: use recompute='never'")
        self.names |= changed
        open_ = [name for name in before if name not in self.names]
        there = [name for name in open_ if self._looked and not is_on_host(after[name])]
        self.names |= {name for name in open_ if name not in there and not torch.equal(before[name], after[name])}
        # If too many comparisons are pending, this one is skipped.
        if there and not self._coming.is_full:
            self._coming.add(torch.stack([_differs(before[n], after[n]) for n in there]), there)
        self._looked = True

    def _read_arrived(self) -> None:
        """Read the comparisons of buffers that the device has finished, without waiting for the rest.

        Raises FxsplitError if a buffer was written that the first run had not written.
        """
        for differences, names in self._coming.take_arrived():
            late = [name for name, differs in zip(names, differences.tolist(), strict=True) if differs]
            new = [name for name in late if name not in self.names]
            # Add the names, so that the error comes only once. Another worker's first run may have added them already.
            self.names.update(late)
            if new:
                raise FxsplitError(
                    f"buffer {new[0]!r} is written now but was not in the first run, so an earlier batch was "
                    "recomputed with other values and has wrong gradients: use recompute='never'"
                )


def _differs(a: Tensor, b: Tensor) -> Tensor:
    """Return a flag, on the tensors' device, that is set if any entries differ. NaN differs from NaN."""
    if a.shape != b.shape:
        return torch.ones((), dtype=torch.bool, device=b.device)
    # torch cannot compare 8-bit floats by value.
    return (a.view(torch.uint8) != b.view(torch.uint8) if a.dtype.itemsize == 1 else a != b).any()


def forward_without_activations(
    stage: Stage,
    packet: Packet,
    writes: bool,
    written: WrittenBuffers,
    surroundings: Surroundings,
    context: ThreadModes,
) -> tuple[tuple[Any, ...], ForwardRecord]:
    """Run a stage forward without keeping activations, and note in `written` which buffers it writes.

    Returns the outputs, detached and with requires_grad as the stage set it, and the record for the second run. Raises
    FxsplitError if a buffer is first written now (see `WrittenBuffers.note`).
    """
    now = dict(stage.module.named_buffers())
    before = written.copy_likely(now)
    versions = {name: b._version for name, b in now.items()}
    with surroundings(frozenset()), saved_tensors_hooks(_drop, _refuse):
        outputs = forward(stage, _copy_packet(packet, writes), writes).outputs
    written.note(before, versions, dict(stage.module.named_buffers()))
    # Detach them: this graph has saved nothing and can never run backward.
    detached = tuple(v.detach().requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v for v in outputs)
    buffers = {name: b for name, b in before.items() if name in written.names}
    return detached, ForwardRecord(packet, buffers, surroundings, context)


def _copy_packet(packet: Packet, writes: bool) -> Packet:
    """Return a packet that the stage may write to: copies if it `writes`, since the second run needs the inputs."""
    if not writes:
        return packet
    return Packet(tuple(v.clone() if isinstance(v, Tensor) else v for v in packet.values), packet.wanted)


@contextmanager
def _restore_buffers(stage: Stage, earlier: dict[str, Tensor]) -> Iterator[None]:
    """Give the stage's buffers the values of `earlier` inside the block, in other memory than their own."""
    now = {name: buffer for name, buffer in stage.module.named_buffers() if name in earlier}
    memory = {name: buffer.data for name, buffer in now.items()}

    def put_back() -> None:
        for name, buffer in now.items():
            buffer.data = memory[name]

    # Replace `.data` rather than write: autograd may have saved the buffer, and a write would count as a new version.
    with restore_after(put_back):
        for name, buffer in now.items():
            buffer.data = earlier[name]
        yield


def _drop(tensor: Tensor) -> None:
    """Return None: autograd then saves nothing for the tensor."""


def _refuse(nothing: None) -> Tensor:
    """Raise FxsplitError. This runs only if user code goes backward through a tensor kept from the first run."""
    raise FxsplitError(f"{KEPT}; this stage recomputes, so its first run has kept nothing to go backward with")

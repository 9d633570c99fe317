"""JobInputs: what a job starts from, and what is to be kept of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fxsplit.runtime.loss.loss import Finish
from fxsplit.runtime.stage.recompute import ForwardRecord
from fxsplit.runtime.stage.run import Packet, SavedForBackward
from fxsplit.torch_internals.fx.kv_cache import KVCaches

Tape = dict[tuple[int, int], SavedForBackward | ForwardRecord]
"""What the backwards of a forward pass start from, by stage and microbatch."""

Seeds = Callable[[int], Sequence[Tensor | None]]
"""The gradients of the last stage's outputs, by microbatch."""


@dataclass(frozen=True, eq=False)
class JobInputs:
    """What a job starts from, and what is to be kept of it.

    packets: for each microbatch, the packet for the first stage; empty for a job of backwards alone.
    finish: computes a microbatch's loss from the last stage's outputs; its backward starts there.
    keep_outputs: whether the last stage's outputs are to be kept.
    seeds: the gradients that the last stage's backwards start from.
    trained: each stage's leaves that want a gradient.
    tape: what backwards start from; forwards write it, so a job of backwards alone is given that of its forwards.
    pasts: what stages keep of each microbatch from job to job (None: nothing).
    """

    packets: Sequence[Packet] = ()
    finish: Finish | None = None
    keep_outputs: bool = True
    seeds: Seeds | None = None
    trained: Sequence[Sequence[Tensor]] = ()
    tape: Tape = field(default_factory=dict)
    kv_caches: KVCaches | None = None
